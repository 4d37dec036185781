"""The scripts in demo/: each starts, trains, is mended by --fixed, and is documented truthfully."""

import ast
import itertools
import json
import os
import random
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from torch.utils.data import default_collate

from demo import cpu_decode, jitter, slow_collate, slow_storage
from gpuwatch.commands.demo import FAULTS
from gpuwatch.diagnosis.engine import RULES
from trainer.data import ImageSet, make_jpegs, normalise, scan

DEMO = Path(slow_storage.__file__).parent
SCRIPTS = (
    "slow_dataset", "cpu_decode", "slow_storage", "slow_collate", "slow_backward", "jitter",
    "comm_heavy", "sync_every_step", "ckpt_every", "hang",
)  # fmt: skip
NEED_RANKS = {"slow_backward", "jitter", "comm_heavy", "hang"}
STEPS = 10

# Each script in a fork of a process that has imported torch once: twenty starts in a few seconds.
DRIVER = """
import json, os, runpy, sys, time
import torch, torch.distributed, torch.utils.data, PIL.Image, trainer.data, trainer.models

def child(argv, out, err):
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = argv
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            return 1
        return error.code or 0
    return 0

folder, commands = sys.argv[1], json.loads(sys.argv[2])
found, running = [None] * len(commands), {}

def one_ends():
    pid, status = os.wait()
    number = running.pop(pid)
    out, err = (open(f"{folder}/{number}.{name}").read() for name in ("out", "err"))
    found[number] = [os.waitstatus_to_exitcode(status), out, err]

for number, argv in enumerate(commands):
    # Two at a time: most of them sleep.
    if len(running) == 2:
        one_ends()
    out, err = f"{folder}/{number}.out", f"{folder}/{number}.err"
    pid = os.fork()
    if not pid:
        code = 70
        try:
            code = child(argv, out, err)
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    running[pid] = number
while running:
    one_ends()
print(json.dumps(found))
"""

Ended = tuple[int, str, str]
"""Exit code, stdout, stderr."""


def run_all(commands: list[list[str]], rundir: Path, tmp_path: Path) -> list[Ended]:
    done = subprocess.run(
        [support.PYTHON, "-c", DRIVER, str(tmp_path), json.dumps(commands)],
        env=support.environment(rundir),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


def path_of(name: str) -> str:
    return str(DEMO / f"{name}.py")


def step_ms(out: str) -> float:
    found = re.fullmatch(
        rf"step {STEPS}  loss \d+\.\d+  step_ms (\d+\.\d)(  batch_ms \d+\.\d)?\n", out
    )
    assert found is not None, out
    return float(found[1])


@pytest.mark.distributed
def test_every_script_trains_with_the_fault_and_without(rundir: Path, tmp_path: Path) -> None:
    cases = list(itertools.product(SCRIPTS, ((), ("--fixed",))))
    commands = [[path_of(name), "--steps", str(STEPS), *more] for name, more in cases]
    ended = run_all(commands, rundir, tmp_path)
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
    assert took_ms["slow_dataset", True] < took_ms["slow_dataset", False]


def test_a_bad_argument_gives_one_sentence(rundir: Path, tmp_path: Path) -> None:
    cases = {"--steps=-1": "'-1' is no number of steps", "--fix": "unrecognized arguments: --fix"}
    commands = [[path_of("hang"), argument] for argument in cases]
    for sentence, (code, out, err) in zip(
        cases.values(), run_all(commands, rundir, tmp_path), strict=True
    ):
        assert (code, out) == (2, "")
        assert re.fullmatch(rf"hang\.py: [^\n]*{sentence}; --help lists what there is\n", err)


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
def test_two_ranks_that_accumulate(rundir: Path) -> None:
    done = subprocess.run(
        [*support.TORCHRUN, path_of("comm_heavy"), "--steps", str(STEPS), "--fixed"],
        env=support.environment(rundir),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert step_ms(done.stdout) > 0
    assert "batch_ms" in done.stdout
    assert "comm_heavy.py" not in done.stderr


@pytest.mark.distributed
def test_the_hang_stands_in_a_collective_and_ends_on_ctrl_c(rundir: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    command = [*support.TORCHRUN, path_of("hang")]
    with support.process(command, support.environment(rundir), output=output) as job:

        def stands() -> bool:
            states = [frame.state for frame in support.snapshots(rundir)]
            return len(states) == 2 and all(s.phase_age_ns > 3e9 for s in states)

        support.wait_until(stands, 70, "both ranks stand still", every_s=0.5)
        waiting, away = (frame.state.phase for frame in support.snapshots(rundir))
        assert waiting in {"backward", "comm"}
        assert away not in {"backward", "comm"}
        job.send_signal(signal.SIGINT)
        assert job.wait(30) != 0
    support.wait_until(lambda: not support.processes_of(rundir), 8, "nothing left running")
    # torchrun says with a traceback that it was interrupted; the script says nothing.
    assert "hang.py" not in support.text_of(output)
