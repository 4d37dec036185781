"""Tuning: what is chosen from what was measured, files that are changed, and one sweep for real."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trainer.errors import ConfigError
from trainer.sources import load
from trainer.tune.choice import (
    Measurement,
    busy_machine,
    choose,
    faster,
    next_workers,
    verdict,
)
from trainer.tune.commands import tune
from trainer.tune.loader import share_of_cpus
from trainer.tune.toml_edit import set_keys, write_keys


def measured(workers: int, prefetch: int | None, rate: float) -> Measurement:
    return Measurement(workers, prefetch, rate, 32 * rate, 0.0, 1e3 / rate)


measurements = st.lists(
    st.builds(
        lambda workers, prefetch, rate: measured(workers, prefetch if workers else None, rate),
        st.sampled_from([0, 1, 2, 4, 8, 16]),
        st.sampled_from([2, 4]),
        st.floats(0.1, 1e4),
    ),
    min_size=1,
    max_size=12,
)


def size(it: Measurement) -> tuple[int, int]:
    return it.num_workers, it.prefetch_factor or 0


# The choice.


@given(measurements)
def test_the_choice_is_the_smallest_of_the_good_ones(sweep: list[Measurement]) -> None:
    chosen = choose(sweep)
    best = max(it.batches_per_s for it in sweep)
    assert chosen in sweep
    assert chosen.batches_per_s >= 0.95 * best
    for other in sweep:
        if size(other) < size(chosen):
            assert other.batches_per_s < 0.95 * best


@given(measurements, st.randoms())
def test_the_choice_does_not_depend_on_the_order(sweep: list[Measurement], chance: Any) -> None:
    shuffled = list(sweep)
    chance.shuffle(shuffled)
    assert size(choose(shuffled)) == size(choose(sweep))


def test_known_choices() -> None:
    sweep = [
        measured(0, None, 10.0),
        measured(2, 2, 95.1),
        measured(2, 4, 100.0),
        measured(4, 2, 100.0),
        measured(1, 4, 94.9),
    ]
    assert size(choose(sweep)) == (2, 2)
    assert size(choose([measured(4, 4, 1.0), measured(4, 2, 1.0)])) == (4, 2)
    with pytest.raises(ValueError, match="nothing"):
        choose([])


def test_the_faster_round_counts() -> None:
    slow, fast = measured(2, 2, 10.0), measured(2, 2, 20.0)
    assert faster(slow, fast) is faster(fast, slow) is fast


def test_a_busy_machine_is_noticed() -> None:
    assert busy_machine([1.0, 1.2, 0.9, 1.1]) is None
    assert busy_machine([3.0, 1.0, 1.0]) is None
    words = busy_machine([3.0, 0.3, 1.0])
    assert words is not None
    assert "2 of 3 settings" in words


# The sweep.


def ladder(rate: Any, *, cpus: int, cap: int = 64) -> list[int]:
    found: dict[int, float] = {}
    while (workers := next_workers(found, cpus=cpus, cap=cap)) is not None:
        assert workers not in found
        found[workers] = rate(workers)
    return list(found)


def test_the_ladder_follows_what_it_finds() -> None:
    # Nothing grows: two more are tried, for one may be hidden by noise.
    assert ladder(lambda _: 10.0, cpus=16) == [0, 1, 2]
    # Items that wait: far beyond the CPUs, to the cap.
    assert ladder(lambda w: 1.0 + w, cpus=2) == [0, 1, 2, 4, 8, 16, 32, 64]
    assert ladder(lambda w: 1.0 + w, cpus=2, cap=12) == [0, 1, 2, 4, 8, 12]
    # The device is the limit from 4 workers on: beyond the CPUs one try is enough.
    assert ladder(lambda w: min(4.0, 0.5 + w), cpus=4) == [0, 1, 2, 4, 8]
    assert ladder(lambda w: min(4.0, 0.5 + w), cpus=32) == [0, 1, 2, 4, 8, 16]


@given(st.data())
def test_the_ladder_ends(data: st.DataObject) -> None:
    cpus, cap = data.draw(st.integers(1, 128)), data.draw(st.integers(1, 64))
    found = ladder(lambda _: data.draw(st.floats(0.1, 100)), cpus=cpus, cap=cap)
    assert found == sorted(set(found))
    assert found[0] == 0
    assert max(found) <= cap
    assert len(found) >= min(3, cap + 1)


def test_a_share_of_the_cpus_is_kept_to_and_given_back() -> None:
    before = os.sched_getaffinity(0)
    with share_of_cpus(1) as alone:
        assert os.sched_getaffinity(0) == before
    with share_of_cpus(2) as half:
        assert half == max(1, alone // 2)
        assert len(os.sched_getaffinity(0)) == half
    assert os.sched_getaffinity(0) == before
    with pytest.raises(ConfigError, match="at least 1"), share_of_cpus(0):
        pass


# The verdict.


@pytest.mark.parametrize(
    ("loader", "compute", "both", "wait", "workers", "cpu", "kind"),
    [
        (10, 100, 102, 2, 2, True, "compute-bound"),
        (100, 10, 105, 95, 2, False, "loader-bound"),
        (100, 95, 108, 13, 2, False, "balanced"),
        (50, 50, 100, 50, 0, True, "no-overlap"),
        (50, 50, 95, 45, 2, True, "competing"),
        (50, 50, 95, 45, 2, False, "no-overlap"),
        (1, 100, 101, 1, 0, True, "compute-bound"),
        # Slow alone, but nothing waits for it.
        (74, 51, 64, 2, 4, True, "balanced"),
    ],
)
def test_verdicts(
    loader: float, compute: float, both: float, wait: float, workers: int, cpu: bool, kind: str
) -> None:
    found = verdict(
        loader_ms=loader,
        compute_ms=compute,
        both_ms=both,
        wait_ms=wait,
        num_workers=workers,
        cpu=cpu,
    )
    assert found.kind == kind
    for figure in (loader, compute, both):
        assert f"{figure:.1f} ms" in found.sentence


times = st.floats(0.1, 1e4)


@given(times, times, st.floats(0.5, 1.15), st.floats(0, 1), st.integers(0, 8), st.booleans())
def test_where_both_take_what_the_longer_takes_the_overlap_is_fine(
    loader: float, compute: float, factor: float, waits: float, workers: int, cpu: bool
) -> None:
    both = factor * max(loader, compute)
    assume(both <= 1.15 * max(loader, compute))
    found = verdict(
        loader_ms=loader,
        compute_ms=compute,
        both_ms=both,
        wait_ms=waits * both,
        num_workers=workers,
        cpu=cpu,
    )
    assert "the overlap is fine" in found.sentence
    if found.kind == "loader-bound":
        assert loader > compute
        assert waits > 0.09
    if found.kind == "compute-bound":
        assert compute > loader


# Files.

VALUES: dict[str, bool | int | float | str] = {
    "num_workers": 8,
    "prefetch_factor": 4,
    "persistent_workers": True,
}

HAND_WRITTEN = """\
# My run
preset = "mlp"  # small

[train]
steps = 20

[loader]  # measured
batch_size = 64
num_workers   =  2   # two were "enough"
# not yet: prefetch_factor = 9

[data]
# [loader]
image_px = 32
"""


def test_only_the_lines_of_the_section_change() -> None:
    assert set_keys(HAND_WRITTEN, "loader", VALUES) == HAND_WRITTEN.replace(
        '=  2   # two were "enough"\n',
        '=  8   # two were "enough"\nprefetch_factor = 4\npersistent_workers = true\n',
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "[loader]\nnum_workers = 8\n"),
        ("[train]\nsteps = 1", "[train]\nsteps = 1\n\n[loader]\nnum_workers = 8\n"),
        ("[loader]", "[loader]\nnum_workers = 8\n"),
        ("[loader]\nnum_workers = 1", "[loader]\nnum_workers = 8"),
        ("[ 'loader' ]\r\n\"num_workers\"=1#x\r\n", "[ 'loader' ]\r\n\"num_workers\"=8#x\r\n"),
        (
            "loader.batch_size = 4\npreset = 'mlp'\n[train]\n",
            "loader.batch_size = 4\nloader.num_workers = 8\npreset = 'mlp'\n[train]\n",
        ),
        ("loader.num_workers = 'auto' # a\n", "loader.num_workers = 8 # a\n"),
        (
            "loader = {batch_size = 4, num_workers = 1}\n[train]\n",
            "loader = {batch_size = 4, num_workers = 8}\n[train]\n",
        ),
        ("[loader]\nnum_workers = '#1' # '#2'\n", "[loader]\nnum_workers = 8 # '#2'\n"),
        (
            'a = """\n[loader]\nnum_workers = 3\n"""\n[loader]\nnum_workers = 3\n',
            'a = """\n[loader]\nnum_workers = 3\n"""\n[loader]\nnum_workers = 8\n',
        ),
        ("[loader.x]\ny = 1\n", "[loader.x]\ny = 1\n\n[loader]\nnum_workers = 8\n"),
        ("a = [\n  1, # one\n]\n[loader]\n", "a = [\n  1, # one\n]\n[loader]\nnum_workers = 8\n"),
    ],
)
def test_every_way_to_write_a_section(before: str, after: str) -> None:
    assert set_keys(before, "loader", {"num_workers": 8}) == after


@pytest.mark.parametrize("text", ["a = ", "[loader\n", "loader = 3\n", "[[loader]]\na = 1\n"])
def test_what_is_no_section_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        set_keys(text, "loader", VALUES)


names = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)
scalars = st.one_of(
    st.booleans(),
    st.integers(-5, 5),
    st.sampled_from(
        ["'#'", '"a = [x]"', "1.5", "1979-05-27", "[1, 2] # two", "[\n 1,\n]", "{a = 1}"]
    ),
)
spaces = st.sampled_from(["", " ", "  ", "\t"])
comments = st.sampled_from(["", " # why", "#x = 1", "  # [loader]"])
newlines = st.sampled_from(["\n", "\r\n"])


@st.composite
def documents(draw: st.DrawFn) -> str:
    newline = draw(newlines)
    lines: list[str] = []

    def pairs(own: list[str]) -> None:
        for key in draw(st.lists(st.one_of(names, st.sampled_from(own)), unique=True, max_size=4)):
            if draw(st.booleans()):
                lines.append(draw(comments))
            value = draw(scalars)
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            lines.append(f"{key}{draw(spaces)}={draw(spaces)}{shown}{draw(comments)}")

    pairs(["preset", "loader.num_workers", "loader.batch_size"])
    for name in draw(st.lists(st.sampled_from(["train", "loader", "data"]), unique=True)):
        lines.append(f"[{name}]{draw(comments)}")
        pairs(["num_workers", "prefetch_factor", "steps"])
    return newline.join(lines)


@settings(max_examples=60)
@given(
    documents(),
    st.dictionaries(
        st.sampled_from(sorted(VALUES)),
        st.one_of(st.booleans(), st.integers(0, 64), st.text("a\"'#\\\x7fé=]", max_size=4)),
        min_size=1,
    ),
)
def test_any_document_keeps_the_rest(
    text: str, values: dict[str, bool | int | float | str]
) -> None:
    try:
        before = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        with pytest.raises(ConfigError):
            set_keys(text, "loader", values)
        return
    assume(isinstance(before.get("loader", {}), dict))
    after = set_keys(text, "loader", values)
    assert tomllib.loads(after) == {**before, "loader": {**before.get("loader", {}), **values}}
    # Every comment is still there, and so is every line that says nothing of what was set.
    assert after.count("#") >= text.count("#") - sum(
        str(v).count("#") for v in (before.get("loader", {}).get(key, "") for key in values)
    )
    for line in text.splitlines():
        # A value that spans lines goes with all of them.
        if line != " 1," and not line.startswith("]") and not any(key in line for key in values):
            assert line in after
    # Once more changes nothing.
    assert set_keys(after, "loader", values) == after


def test_a_file_is_made_or_replaced_and_loads(tmp_path: Path) -> None:
    new = tmp_path / "new.toml"
    write_keys(new, "loader", VALUES, check=lambda path: load(file=path, environ={}))
    assert load(file=new, environ={}).loader.num_workers == 8

    old, link = tmp_path / "old.toml", tmp_path / "link.toml"
    old.write_text(HAND_WRITTEN)
    old.chmod(0o640)
    link.symlink_to(old)
    write_keys(link, "loader", VALUES)
    config = load(file=old, environ={})
    assert (config.preset, config.loader.batch_size, config.data.image_px) == ("mlp", 64, 32)
    assert (config.loader.prefetch_factor, config.loader.persistent_workers) == (4, True)
    assert old.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.toml", "new.toml", "old.toml"]


def test_a_file_that_would_not_load_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[loader]\ntimeout_s = 3\n")
    zero: dict[str, bool | int | float | str] = {"num_workers": 0}
    with pytest.raises(ConfigError, match=r"a\.toml is left as it was: .*timeout_s"):
        write_keys(file, "loader", zero, check=lambda path: load(file=path, environ={}))
    assert file.read_text() == "[loader]\ntimeout_s = 3\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/a\.toml"):
        write_keys(tmp_path / "none" / "a.toml", "loader", VALUES)
    with pytest.raises(ConfigError, match="cannot read"):
        write_keys(tmp_path, "loader", VALUES)
    broken = tmp_path / "broken.toml"
    broken.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not TOML"):
        write_keys(broken, "loader", VALUES)


# For real.


def test_a_sweep_finds_that_waiting_items_need_workers(
    jpegs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # put back afterwards
    monkeypatch.setattr("trainer.tune.loader.WORKERS_MAX", 2)
    file = tmp_path / "found.toml"
    file.write_text("# mine\n[loader]\nbatch_size = 8\nnum_workers = 0\n")
    words = (
        f"loader --json --steps 2 --config {file} --write {file} --data.path {jpegs} "
        "--data.image_px 16 --model.width 8 --train.threads 1 --faults.item_latency_ms 8"
    )
    tune.main(words.split(), prog_name="tune", standalone_mode=False)
    captured = capsys.readouterr()
    assert captured.err == ""
    found = json.loads(captured.out)
    assert found["schema"] == 1
    assert found["simulated"].startswith("SIMULATED")
    swept = [(it["num_workers"], it["prefetch_factor"]) for it in found["measurements"]]
    assert swept == [(0, None), (1, 2), (1, 4), (2, 2), (2, 4)]
    assert found["configured"]["num_workers"] == 0
    # A batch waits 64 ms, and computes for a few: two workers are nearly twice as fast.
    assert found["chosen"]["num_workers"] == 2
    assert found["loader_ms"] > found["compute_ms"]
    assert found["chosen"]["samples_per_s"] > 1.3 * found["configured"]["samples_per_s"]
    assert found["command"].startswith(f"trainer train --config {file} ")
    assert "--loader.num_workers 2" in found["command"]
    text = file.read_text()
    assert text.startswith("# mine\n[loader]\nbatch_size = 8\nnum_workers = 2\n")
    assert load(file=file, environ={}).loader.persistent_workers is True
