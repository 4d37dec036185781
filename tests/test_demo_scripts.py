"""The scripts in demo/: each starts, trains, is mended by --fixed, and is documented truthfully."""

import ast
import itertools
import os
import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from torch.utils.data import default_collate

from demo import cpu_decode, jitter, slow_collate, slow_dataset, slow_storage
from demo._common import Job
from gpuwatch.commands.demo import FAULTS
from gpuwatch.diagnosis.engine import RULES
from trainer.data import ImageSet, make_jpegs, normalise, scan
from trainer.signals import stop_signals

DEMO = Path(slow_storage.__file__).parent
SCRIPTS = (
    "slow_dataset", "cpu_decode", "slow_storage", "slow_collate", "slow_backward", "jitter",
    "comm_heavy", "sync_every_step", "ckpt_every", "hang",
)  # fmt: skip
NEED_RANKS = {"slow_backward", "jitter", "comm_heavy", "hang"}
STEPS = 10

Ended = tuple[int, str, str]
"""Exit code, stdout, stderr."""


def run_all(
    zygote: support.Zygote, commands: list[list[str]], rundir: Path, tmp_path: Path
) -> list[Ended]:
    """Each script in a fork of a process that has imported torch."""
    env = support.environment(rundir)

    def run(number: int) -> Ended:
        out, err = tmp_path / f"{number}.out", tmp_path / f"{number}.err"
        code = zygote.start(commands[number], env, out, err).wait()
        return code, support.text_of(out), support.text_of(err)

    # Three at a time: most of them sleep.
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(run, range(len(commands))))


def path_of(name: str) -> str:
    return str(DEMO / f"{name}.py")


def step_ms(out: str) -> float:
    found = re.fullmatch(
        rf"step {STEPS}  loss \d+\.\d+  step_ms (\d+\.\d)(  batch_ms \d+\.\d)?\n", out
    )
    assert found is not None, out
    return float(found[1])


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_every_script_trains_with_the_fault_and_without(
    zygote: support.Zygote, rundir: Path, tmp_path: Path
) -> None:
    cases = list(itertools.product(SCRIPTS, ((), ("--fixed",))))
    commands = [[path_of(name), "--steps", str(STEPS), *more] for name, more in cases]
    ended = run_all(zygote, commands, rundir, tmp_path)
    took_ms = {}
    for (name, more), (code, out, err) in zip(cases, ended, strict=True):
        assert code == 0, (name, more, err)
        took_ms[name, bool(more)] = step_ms(out)
        said = err.splitlines()
        if name in NEED_RANKS:
            assert f"torchrun --standalone --nproc-per-node 2 {path_of(name)}" in said.pop(0)
        if name in {"slow_dataset", "sync_every_step"}:
            assert said.pop(0).startswith("SIMULATED: ")
        assert said == [], (name, more)
    # A sleep is never shorter than it says: eight items of 25 ms, and an answer of 20 ms.
    assert took_ms["slow_dataset", False] > 200
    assert took_ms["sync_every_step", False] > 20


def test_a_bad_argument_gives_one_sentence(
    zygote: support.Zygote, rundir: Path, tmp_path: Path
) -> None:
    cases = {"--steps=-1": "'-1' is no number of steps", "--fix": "unrecognized arguments: --fix"}
    commands = [[path_of("hang"), argument] for argument in cases]
    for sentence, (code, out, err) in zip(
        cases.values(), run_all(zygote, commands, rundir, tmp_path), strict=True
    ):
        assert (code, out) == (2, "")
        assert re.fullmatch(rf"hang\.py: [^\n]*{sentence}; --help lists what there is\n", err)


def test_the_fix_of_slow_dataset_is_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not timed: on a machine that does more, the start of eight workers takes what they save.
    asked: list[int] = []

    class AskedError(Exception):
        """Enough is known."""

    def loader(*_: object, num_workers: int, **__: object) -> None:
        asked.append(num_workers)
        raise AskedError

    monkeypatch.setattr(slow_dataset, "DataLoader", loader)
    monkeypatch.setattr(slow_dataset.gpuwatch, "watch", lambda **_: None)
    with stop_signals() as stop:
        for fixed in (False, True):
            with pytest.raises(AskedError):
                slow_dataset.train(Job(0, 1, steps=1, fixed=fixed, stop=stop))
    assert asked == [1, 8]


def docstring(name: str) -> str:
    text = ast.get_docstring(ast.parse(Path(path_of(name)).read_text()))
    assert text is not None
    return text


def kind_in(text: str) -> str:
    found = re.search(r"gpuwatch finds `(\w+)`", text)
    assert found is not None, text
    return found[1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_docstring_names_command_kind_and_fix(name: str) -> None:
    text = docstring(name)
    assert f"torchrun --standalone --nproc-per-node 2 demo/{name}.py" in text
    assert f"gpuwatch demo demo/{name}.py" in text
    assert kind_in(text) in RULES
    assert "The fix (--fixed)" in text
    assert name in FAULTS


def test_the_table_lists_the_scripts_and_what_is_found() -> None:
    rows = re.findall(
        r"^\| \[(\w+)\.py\]\((\w+)\.py\) .*\| `(\w+)`", (DEMO / "README.md").read_text(), re.M
    )
    assert all(name == target for name, target, _ in rows)
    assert {name: kind for name, _, kind in rows} == {n: kind_in(docstring(n)) for n in SCRIPTS}
    assert {p.stem for p in DEMO.glob("[a-z]*.py")} == {*SCRIPTS, "slow_loader"}


# --- the fix does the same work -----------------------------------------------------------------


def test_hues_are_turned_alike_pixel_by_pixel_and_batch_by_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (3, 3, 6, 5), dtype=torch.uint8, generator=chance)
    angles = [-0.5, 0.0, 0.4]
    turns = iter(angles)
    monkeypatch.setattr(random, "uniform", lambda low, high: next(turns))
    whole = cpu_decode.turn_batch(images)
    single = torch.stack(
        [cpu_decode.turn_pixels(image, a) for image, a in zip(images, angles, strict=True)]
    )
    assert (whole - single).abs().max() <= 1.01  # one is rounded down to whole numbers
    assert (single[0].int() - images[0].int()).abs().max() > 20
    assert (single[1].int() - images[1].int()).abs().max() <= 1


def test_both_ways_of_collating_give_the_same_batch() -> None:
    px = slow_collate.PX
    images = ImageSet(scan(make_jpegs(images=512, classes=8, px=96)), px=px, augment=False)
    items = [images[0], images[300]]
    batch, labels = slow_collate.collate(items)
    stacked, same_labels = default_collate(items)
    assert torch.equal(labels, same_labels)
    assert torch.allclose(batch, normalise(stacked), atol=1e-5)


def test_a_clip_is_the_same_read_directly_and_mapped(tmp_path: Path) -> None:
    if not reads_directly(tmp_path):
        pytest.skip("this file system has no reads past the page cache")
    slow_storage.make_clips(tmp_path, clips=2)
    labels = slow_storage.decoded(slow_storage.PX).tensors[1]
    direct = slow_storage.Frames(tmp_path, labels, mapped=False)
    mapped = slow_storage.Frames(tmp_path, labels, mapped=True)
    pixels = slow_storage.decoded(slow_storage.PX).tensors[0]
    for index in (3, slow_storage.FRAMES + 700):
        clip, frame = divmod(index, slow_storage.FRAMES)
        shown = int(slow_storage.order_of(clip)[frame])
        assert torch.equal(direct[index][0], mapped[index][0])
        assert torch.equal(direct[index][0], pixels[shown])
        assert direct[index][1] == mapped[index][1] == int(labels[shown])


def reads_directly(folder: Path) -> bool:
    probe = folder / "probe"
    probe.write_bytes(bytes(4096))
    try:
        os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def sizes(ranks: int, *, together: bool) -> list[tuple[bool, ...]]:
    """Return whether each rank has large images, for forty steps."""
    streams: list[Any] = [
        iter(jitter.Buckets(rank, ranks, together=together)) for rank in range(ranks)
    ]
    return [tuple(min(next(stream)) >= jitter.IMAGES for stream in streams) for _ in range(40)]


def test_one_rank_has_the_large_images_or_all_have() -> None:
    uneven = sizes(2, together=False)
    assert {sum(step) for step in uneven} == {1}
    assert {step.index(True) for step in uneven} == {0, 1}
    even = sizes(2, together=True)
    assert {sum(step) for step in even} == {0, 2}


# --- two ranks ----------------------------------------------------------------------------------


@pytest.mark.distributed
def test_two_ranks_that_accumulate(zygote: support.Zygote, rundir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = [path_of("comm_heavy"), "--steps", str(STEPS), "--fixed"]
    with support.Ranks(zygote, argv, support.environment(rundir), out) as ranks:
        assert ranks.wait(100) == 0, support.text_of(out)
    # All that both have said, on stdout and stderr, but for what gloo says of itself.
    lines = support.text_of(out).splitlines(keepends=True)
    said = "".join(line for line in lines if not line.startswith("[Gloo]"))
    assert step_ms(said) > 0
    assert "batch_ms" in said


@pytest.mark.distributed
def test_the_hang_stands_in_a_collective_and_ends_on_ctrl_c(rundir: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    command = [*support.TORCHRUN, path_of("hang")]
    with support.process(command, support.environment(rundir), output=output) as job:
        states: list[Any] = []

        def stands() -> bool:
            # While they start they may stand still too, but not in these.
            states[:] = [frame.state for frame in support.snapshots(rundir)]
            return (
                len(states) == 2
                and all(s.phase_age_ns > 2e9 for s in states)
                and states[0].phase in {"backward", "comm"}
            )

        support.wait_until(stands, 90, "both ranks stand still", every_s=0.3)
        assert states[1].phase not in {"backward", "comm"}
        job.send_signal(signal.SIGINT)
        assert job.wait(30) != 0
    support.wait_until(lambda: not support.processes_of(rundir), 20, "nothing left running")
    # torchrun says with a traceback that it was interrupted; the script says nothing.
    assert "hang.py" not in support.text_of(output)
