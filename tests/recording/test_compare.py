"""Before and after a change: what is faster, what is noise, what was promised."""

import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import traces
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.commands.cli import cli
from gpuwatch.commands.compare import RecordingShelf
from gpuwatch.commands.recorded import last_view
from gpuwatch.errors import TargetError
from gpuwatch.recording import open_recording
from gpuwatch.recording.compare import Comparison, compare_runs, read_steps
from gpuwatch.schema import PhasesNs, StepRecord
from gpuwatch.store import RunView
from gpuwatch.store.blocks import Interval, difference, estimate, t_quantile
from gpuwatch.store.compare import Change, Row, _part_verdict, align, compare_sides
from gpuwatch.store.track import Side, Steps, Track, side_of

SLOW: dict[str, Any] = {
    "phases_ms": {"data_wait": 90.0, "forward": 20.0, "backward": 40.0, "optimizer": 3.0},
    "step": {"queue_depth": 0, "queue_capacity": 4},
    "loader": {"num_workers": 2},
}
FAST: dict[str, Any] = {
    "phases_ms": {"data_wait": 1.0, "forward": 20.0, "backward": 40.0, "optimizer": 3.0},
    "step": {"queue_depth": 4, "queue_capacity": 12},
    "loader": {"num_workers": 6},
}


def job(**how: Any) -> traces.Job:
    common: dict[str, Any] = {
        "ranks": 2,
        "steps": 120,
        "host": {"cpu_percent": 20, "cpu_iowait_percent": 0},
        "process": {"cpu_percent": 40},
        "worker_process": {"cpu_percent": 20},
        "worker_state": "S",
        "batch_ms": (300, 60, 10),
    }
    return traces.Job(**{**common, **how})


def run_of(tmp_path: Path, **how: Any) -> RunView:
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    view, _ = last_view(str(job(**how).write(path)))
    return view.runs[0]


def change(comparison: Comparison, metric: str) -> Change:
    return next(c for c in comparison.changes if c.metric == metric)


def test_what_is_faster_and_what_is_noise(tmp_path: Path) -> None:
    found = compare_runs(run_of(tmp_path, **SLOW), run_of(tmp_path, **FAST, seed=3))
    step = found.changes[0]
    assert (step.metric, step.unit, step.clear) == ("step", "ms", True)
    assert step.share == pytest.approx(-0.57, abs=0.03)
    wait = change(found, "data_wait")
    assert (wait.clear, wait.before) == (True, pytest.approx(90, abs=2))
    for name in ("forward", "backward", "optimizer"):
        assert change(found, name).clear is False
    assert "h2d" not in {c.metric for c in found.changes}
    assert [(s.name, s.before, s.after) for s in found.settings] == [("num_workers", 2, 6)]


def test_the_same_job_twice_is_noise(tmp_path: Path) -> None:
    for seed in range(1, 6):
        found = compare_runs(run_of(tmp_path, **SLOW), run_of(tmp_path, **SLOW, seed=seed))
        assert found.changes[0].clear is False
        assert found.settings == ()


def test_a_small_difference_is_clear_where_steps_are_steady(tmp_path: Path) -> None:
    def pair(scatter: float) -> Change:
        slower = {**SLOW, "phases_ms": {**SLOW["phases_ms"], "backward": 44.0}}
        return compare_runs(
            run_of(tmp_path, **SLOW, scatter=scatter),
            run_of(tmp_path, **slower, scatter=scatter, seed=1),
        ).changes[0]

    assert pair(0.005).clear is True
    assert pair(0.3).clear is False


def test_what_cannot_be_told_says_why(tmp_path: Path) -> None:
    slow = run_of(tmp_path, **SLOW)
    few = run_of(tmp_path, **SLOW, steps=6)
    assert compare_runs(slow, few).changes[0].clear is None
    assert compare_runs(slow, few).changes[0].reason == "under 16 steps in a window"
    without = {**FAST, "phases_ms": {"forward": 60.0}}
    wait = change(compare_runs(slow, run_of(tmp_path, **without)), "data_wait")
    assert (wait.after, wait.clear, wait.reason) == (None, None, "not known after")
    device = replace(slow, ranks=tuple(replace(r, clock="device") for r in slow.ranks))
    other = change(compare_runs(slow, device), "forward")
    assert (other.before, other.reason) == (None, "they are by different clocks")


def test_the_command(tmp_path: Path) -> None:
    before = str(job(**SLOW).write(tmp_path / "before.jsonl"))
    after = str(job(**FAST, seed=2, simulated=True).write(tmp_path / "after.jsonl"))
    done = CliRunner().invoke(cli, ["compare", before, after, "--json"])
    assert (done.exit_code, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["before"]["target"] == before
    assert document["after"]["simulated"] is True
    assert [f["kind"] for f in document["findings"]["gone"]] == ["loader_few_workers"]
    assert document["findings"]["new"] == []
    assert document["aligned"] == {
        "by": "step",
        "before_steps": 119,
        "after_steps": 119,
        "first_step": 1,
        "last_step": 119,
        "reason": None,
    }
    step = document["rows"][0]
    assert (step["metric"], step["better"], step["clear"]) == ("step_p50", True, True)
    low, high = step["interval"]
    assert low < step["share"] < high < 0
    assert step["before_p10_p50_p90"][1] == pytest.approx(step["before"])
    assert document["notes"] == ["B is SIMULATED, the other was measured"]
    (promise,) = [p for p in document["predictions"] if p["knob"] == "num_workers"]
    low, high = promise["predicted_ms"]
    assert (promise["from"], promise["to"]) == (2, 6)
    assert promise["actual_ms"] == pytest.approx(66, abs=2)
    wanted = "as predicted" if low <= promise["actual_ms"] <= high else "faster"
    assert promise["verdict"] == wanted
    text = CliRunner().invoke(cli, ["compare", before, after]).stdout
    assert "setting num_workers: 2 -> 6" in text
    assert "gone    loader_few_workers" in text
    assert "SIMULATED" in text
    assert "forward_backward" in text
    assert "same" in text
    assert "aligned by step 1-119, 119 steps each" in text
    assert "equal   " in text
    everything = CliRunner().invoke(cli, ["compare", before, after, "--all"]).stdout
    assert "equal   batch_size: 8" in everything
    back = CliRunner().invoke(cli, ["compare", after, before]).stdout
    assert "new     loader_few_workers" in back
    assert "predicted" not in back
    gone = CliRunner().invoke(cli, ["compare", before, "gone.jsonl"])
    assert (gone.exit_code, gone.stderr) == (2, "gpuwatch: there is no file gone.jsonl\n")


def test_what_stays_and_what_was_not_followed(tmp_path: Path) -> None:
    before = str(job(**SLOW).write(tmp_path / "before.jsonl"))
    other = {**SLOW, "loader": {"num_workers": 3}, "batch_ms": (450, 90, 10)}
    after = str(job(**other, seed=2).write(tmp_path / "after.jsonl"))
    done = CliRunner().invoke(cli, ["compare", before, after, "--json"])
    document = json.loads(done.stdout)
    found = document["findings"]
    assert (found["gone"], found["new"]) == ([], [])
    (both,) = found["both"]
    assert both["kind"] == "loader_few_workers"
    assert both["before_cost_ms"] == pytest.approx(both["after_cost_ms"], abs=5)
    # The hint was another number of workers: nothing was promised for this one.
    assert [s["name"] for s in document["settings"]] == ["num_workers"]
    assert document["predictions"] == []
    assert (
        "still   loader_few_workers" in CliRunner().invoke(cli, ["compare", before, after]).stdout
    )


# Steps beyond the window, and which of them are compared


def side(tmp_path: Path, **how: Any) -> Side:
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    job(**how).write(path)
    view, _ = last_view(str(path))
    with open_recording(path) as recording:
        return Side("x", "saved", view.runs[0], read_steps(recording, view.runs[0].run))


def row(comparison: Comparison, metric: str) -> Row:
    return next(r for r in comparison.rows if r.metric == metric)


def test_a_recording_has_more_steps_than_its_last_window(tmp_path: Path) -> None:
    long = side(tmp_path, **SLOW, steps=300, warmup=3)
    assert long.steps.indices == tuple(range(3, 300))
    assert long.run.window == 64
    window = side_of(long.run)
    assert window.steps.indices == tuple(range(236, 300))
    # The same steps have the same rows, however they came.
    again = long.steps.of(frozenset(window.steps.indices))
    for name in ("step", "data_wait", "comm_median", "transfer", "samples"):
        assert window.steps.column(name) == again.column(name)
    assert window.steps.waits(1) == again.waits(1)


def test_the_step_after_a_pause_is_left_out_unless_most_steps_are_such(tmp_path: Path) -> None:
    spans = [(100, "checkpoint", 400.0), (130, "eval", 900.0), (140, "log", 50.0)]
    some = side(tmp_path, **SLOW, steps=200, spans=spans)
    assert set(range(1, 200)) - set(some.steps.indices) == {100, 130}
    # By its windows alone it is the same.
    assert set(range(136, 200)) - set(side_of(some.run).steps.indices) == set()
    every = side(tmp_path, **SLOW, steps=60, spans=[(i, "checkpoint", 20.0) for i in range(60)])
    assert every.steps.indices == tuple(range(1, 60))


def test_steps_are_aligned_by_index_where_enough_are_common(tmp_path: Path) -> None:
    long, short = side(tmp_path, **SLOW, steps=300), side(tmp_path, **FAST, steps=150)
    one, other, how = align(long.steps, short.steps)
    assert (how.by, how.first, how.last, how.before) == ("step", 1, 149, 149)
    assert one.indices == other.indices
    late = replace(short.steps, indices=tuple(i + 5000 for i in short.steps.indices))
    one, other, how = align(long.steps, late)
    assert (how.by, how.before, how.after) == ("last", 256, 149)
    assert one.indices[-1] == 299
    assert "no step in common" in how.text
    touching = replace(short.steps, indices=tuple(i + 290 for i in short.steps.indices))
    assert "only 9 steps in common" in align(long.steps, touching)[2].text
    assert align(long.steps, Steps())[2].why == "B has no steady step"
    assert align(Steps(), Steps())[2].why == "they have no steady step"


def record(index: int, *, tags: tuple[str, ...] = (), ms: float = 10.0) -> StepRecord:
    ns = round(ms * 1e6)
    return StepRecord(index, 1000.0, ns, PhasesNs(forward=ns), tags=tags)


def test_a_track_waits_for_every_rank_and_begins_anew_with_a_restart() -> None:
    track = Track()
    track.add(0, "a", [record(i) for i in range(10)])
    track.add(1, "a", [record(i, ms=20.0) for i in range(4)])
    track.settle(3)
    assert track.steps().indices == (0, 1, 2, 3)
    assert track.steps().column("step") == [15.0] * 4
    # What comes late, twice, unsteady or skipped changes nothing.
    track.add(1, "a", [record(2), record(4, ms=20.0), record(5, tags=("warmup",))])
    track.add(1, "a", [record(4, ms=20.0)])
    track.settle()
    assert track.steps().indices == tuple(range(10))
    assert track.steps().column("step")[4:7] == [15.0, 10.0, 10.0]
    track.add(0, "b", [record(0, ms=5.0), record(1, tags=("skipped",)), record(2, ms=5.0)])
    track.settle()
    assert (track.generation, track.steps().indices) == (1, (0, 2))
    # The process that was replaced speaks once more.
    track.add(0, "a", [record(50)])
    track.settle()
    assert track.steps().indices == (0, 2)


def test_a_track_keeps_the_newest_steps_of_one_clock() -> None:
    track = Track()
    for i in range(9000):
        track.add(0, "a", [record(i)])
    track.settle()
    assert track.steps().indices == tuple(range(9000 - 8192, 9000))
    device = StepRecord(9000, 1.0, 10**7, PhasesNs(), PhasesNs(backward=2 * 10**7), "device")
    track.add(0, "a", [device])
    track.settle()
    assert (track.steps().clock, track.steps().indices) == ("device", (9000,))
    assert (track.steps().column("step"), track.steps().column("wall")) == ([20.0], [10.0])
    many = Track()
    for rank in range(1024):
        many.add(rank, "a", [record(i) for i in range(600)])
    many.settle()
    assert 256 < len(many) < 600


# Rows and verdicts


def test_what_a_part_has_to_do_with_the_step(tmp_path: Path) -> None:
    slow, fast = side(tmp_path, **SLOW), side(tmp_path, **FAST, seed=3)
    found = compare_sides(fast, slow)
    step = row(found, "step_p50")
    assert step.better is False
    assert step.verdict.startswith("slower, 95 % CI +1")
    assert row(found, "data_wait_worst").verdict.startswith("89 of the 90 ms, 95 % CI +")
    assert row(found, "forward_backward").verdict.startswith("same, 95 % CI -")
    assert row(found, "samples_per_s").verdict.startswith("lower, 95 % CI -5")
    assert row(found, "samples_per_s").better is False
    assert row(found, "other").change.reason == "not known on either side"
    back = compare_sides(slow, fast)
    assert row(back, "step_p50").better is True
    assert row(back, "step_p50").verdict.startswith("faster, 95 % CI -")
    spread = row(back, "step_p50")
    assert spread.before is not None
    assert spread.after is not None
    assert spread.after.high < spread.before.low < spread.before.middle < spread.before.high


def test_a_part_that_changes_by_almost_nothing_is_not_called_the_same() -> None:
    """Its interval leaves out 0, and beside the step it is nothing."""
    step = Change("step", "ms", 200.0, 201.0, False, interval=(-0.01, 0.02))
    small = Change("other", "ms", 0.3, 0.35, False, interval=(0.04, 0.31))
    assert _part_verdict(small, step) == "under 0.5% of the step, 95 % CI +4..+31 %"
    none = Change("other", "ms", 0.3, 0.3, False, interval=(-0.04, 0.05))
    assert _part_verdict(none, step) == "same, 95 % CI -4..+5 %"


def test_communication_is_split_into_transfer_and_wait(tmp_path: Path) -> None:
    wait = [{"data_wait": 1.0, "forward": 20.0, "backward": 40.0} for _ in range(4)]
    late = [dict(phases) for phases in wait]
    late[3]["data_wait"] = 61.0
    even, uneven = side(tmp_path, phases_ms=wait, ranks=4), side(tmp_path, phases_ms=late, ranks=4)
    found = compare_sides(even, uneven)
    assert row(found, "data_wait_worst").change.after == pytest.approx(61.0, abs=1.0)
    assert row(found, "transfer").verdict.startswith("same, 95 % CI -")
    peer = row(found, "peer_wait").change
    assert peer.after == pytest.approx(60.0, abs=4.0)
    verdict = row(found, "comm_median").verdict
    assert verdict.endswith("ms is wait, follows data wait"), verdict
    assert row(compare_sides(uneven, even), "comm_median").verdict.endswith(
        "less wait, follows data wait"
    )
    # One that waits for slow compute follows no data.
    late[3].update(data_wait=1.0, forward=80.0)
    uneven = side(tmp_path, phases_ms=late, ranks=4)
    verdict = row(compare_sides(even, uneven), "comm_median").verdict
    assert verdict.endswith("is wait for slower ranks"), verdict
    slower = side(tmp_path, phases_ms=wait, ranks=4, transfer_ms=31.0)
    verdict = row(compare_sides(even, slower), "comm_median").verdict
    assert verdict.startswith("30 of the 30 ms, 95 % CI +")


def test_one_process_says_why_it_has_no_communication(tmp_path: Path) -> None:
    state = {"type": "state", "rank": 0, "at_s": 5.0, "phases_na": {"comm": "one process"}}
    alone = side(tmp_path, **{**SLOW, "ranks": 1, "more": [state]})
    comm = row(compare_sides(alone, alone), "comm_median")
    assert (comm.change.before, comm.change.after, comm.verdict) == (None, None, "one process")
    assert "transfer" not in {r.metric for r in compare_sides(alone, alone).rows}


def test_different_clocks_compare_whole_steps_alone(tmp_path: Path) -> None:
    one = side(tmp_path, **SLOW)
    ranks = tuple(replace(r, clock="device") for r in one.run.ranks)
    other = replace(one, run=replace(one.run, ranks=ranks))
    found = compare_sides(one, other)
    assert row(found, "step_p50").verdict.startswith("same")
    assert row(found, "forward_backward").verdict == "they are by different clocks"
    assert found.notes[0].startswith("A is by the host's clock, B by the device's")


def test_settings_and_environment(tmp_path: Path) -> None:
    one = side(tmp_path, **SLOW, hello={"versions": {"torch": "2.6.0"}, "device_name": "T4"})
    other = side(tmp_path, **FAST, hello={"versions": {"torch": "2.7.0"}, "device_name": "T4"})
    found = compare_sides(one, other)
    differing = {s.name: (s.before, s.after, s.is_environment) for s in found.settings}
    assert differing == {
        "num_workers": (2, 6, False),
        "versions.torch": ("2.6.0", "2.7.0", True),
    }
    equal = {s.name for s in found.equal}
    assert {"batch_size", "device_name", "world_size"} <= equal
    # What neither of them tells is no setting that is equal.
    assert not {"versions.cuda", "script"} & equal


def test_more_ranks_are_said(tmp_path: Path) -> None:
    found = compare_sides(side(tmp_path, **SLOW), side(tmp_path, **SLOW, ranks=4))
    assert found.notes == ("A has 2 ranks, B 4: a step is not the same work",)


# The interval. Steps are alike their neighbours: a series with a memory stands for them.


def steps_like(
    rng: random.Random, number: int, *, memory: float = 0.3, spikes: float = 0.05
) -> list[float]:
    """A first-order autoregressive series with spikes, as steps with a slow batch now and then."""
    mean, sd = 150.0, 4.0
    state, found = rng.gauss(0.0, 1.0), []
    for _ in range(number):
        state = memory * state + math.sqrt(1.0 - memory**2) * rng.gauss(0.0, 1.0)
        spike = 0.3 * mean if rng.random() < spikes else 0.0
        found.append(mean + sd * state + spike)
    return found


def between(
    one: Sequence[float], other: Sequence[float], of: Callable[[Sequence[float]], float]
) -> Interval:
    found = difference(estimate(one, of), estimate(other, of))
    assert found is not None
    return found


@pytest.mark.parametrize("number", [32, 64, 256])
@pytest.mark.parametrize("of", [statistics.fmean, statistics.median], ids=["mean", "median"])
def test_the_same_is_called_the_same_in_about_95_of_100(
    number: int, of: Callable[[Sequence[float]], float]
) -> None:
    rng = random.Random(number)
    trials = 500
    same = sum(
        not between(steps_like(rng, number), steps_like(rng, number), of).clear
        for _ in range(trials)
    )
    # 95 % of 500 is 475 with a standard deviation of 5; blocks of alike steps cost a little.
    assert 0.91 <= same / trials <= 0.985


def test_blocks_are_what_keeps_alike_steps_from_looking_different() -> None:
    rng = random.Random(7)
    trials, naive, blocks = 300, 0, 0
    for _ in range(trials):
        one, other = (steps_like(rng, 256, memory=0.8, spikes=0.0) for _ in range(2))
        error = math.hypot(*(statistics.stdev(s) / math.sqrt(256) for s in (one, other)))
        naive += abs(statistics.fmean(one) - statistics.fmean(other)) > 1.96 * error
        blocks += between(one, other, statistics.fmean).clear
    assert naive / trials > 0.2
    assert blocks / trials < 0.12


@pytest.mark.parametrize("shift", [1.05, 0.95, 1.5, 0.4])
@pytest.mark.parametrize("of", [statistics.fmean, statistics.median], ids=["mean", "median"])
def test_a_shift_is_found_with_its_sign_and_its_size(
    shift: float, of: Callable[[Sequence[float]], float]
) -> None:
    rng = random.Random(2)
    trials, found, holds = 400, 0, 0
    for _ in range(trials):
        one = steps_like(rng, 64)
        other = [shift * value for value in steps_like(rng, 64)]
        interval = between(one, other, of)
        assert interval.relative is not None
        low, high = interval.relative
        found += interval.clear and (low > 0.0) is (shift > 1.0)
        holds += low <= shift - 1.0 <= high
    limit = 0.97 if of is statistics.median else 0.5
    assert found / trials >= limit
    assert 0.9 <= holds / trials <= 0.995


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(1.0, 1e4), min_size=16, max_size=80),
    st.lists(st.floats(1.0, 1e4), min_size=16, max_size=80),
    st.floats(0.01, 100.0),
)
def test_an_interval_holds_its_change_and_knows_no_units(
    one: list[float], other: list[float], scale: float
) -> None:
    found = between(one, other, statistics.fmean)
    change = statistics.fmean(other) - statistics.fmean(one)
    room = 1e-9 * max(*one, *other)
    assert found.low - room <= change <= found.high + room
    if found.relative is not None:
        low, high = found.relative
        share = change / statistics.fmean(one)
        assert low - 1e-9 <= share <= high + 1e-9
        scaled = between([scale * v for v in one], [scale * v for v in other], statistics.fmean)
        assert scaled.relative == pytest.approx((low, high), abs=1e-6)
    back = between(other, one, statistics.fmean)
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low), abs=1e-6)


def test_an_interval_near_nothing_is_absolute() -> None:
    rng = random.Random(3)
    nothing = [max(0.0, rng.gauss(0.0, 0.02)) for _ in range(64)]
    nothing[:60] = [0.0] * 60
    wait = [30.0 + rng.gauss(0.0, 1.0) for _ in range(64)]
    found = between(nothing, wait, statistics.fmean)
    assert found.relative is None
    assert found.clear
    constant = between([5.0] * 64, [5.0] * 64, statistics.fmean)
    assert (constant.low, constant.high, constant.clear) == (0.0, 0.0, False)
    assert difference(estimate([1.0] * 15, statistics.fmean), estimate(wait, max)) is None


@pytest.mark.parametrize(
    ("freedom", "point"), [(3, 3.182), (6, 2.447), (14, 2.145), (30, 2.042), (1e9, 1.960)]
)
def test_points_of_students_t(freedom: float, point: float) -> None:
    assert t_quantile(freedom) == pytest.approx(point, rel=0.01)


# The shelf of recordings that the screen chooses from


def test_the_shelf_lists_what_was_given_and_what_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(**SLOW).write(tmp_path / "before.jsonl")
    job(**FAST).write(tmp_path / "after.jsonl")
    (tmp_path / "notes.txt").write_text("no recording")
    (tmp_path / "folder.gpuwatch").mkdir()
    broken = tmp_path / "broken.gpuwatch"
    broken.write_text("nonsense")
    monkeypatch.chdir(tmp_path)
    shelf = RecordingShelf(["./after.jsonl"])
    assert shelf.paths()[0] == "./after.jsonl"
    assert sorted(shelf.paths()[1:]) == ["before.jsonl", "broken.gpuwatch"]
    loaded = shelf.load("before.jsonl")
    assert (loaded.name, loaded.source, len(loaded.steps)) == ("before", "saved", 119)
    with pytest.raises(TargetError, match=r"broken\.gpuwatch is no recording"):
        shelf.load("broken.gpuwatch")
    with pytest.raises(TargetError, match="there is no file"):
        shelf.load("gone.jsonl")


def test_a_recording_beside_the_replayed_one_must_be_there(tmp_path: Path) -> None:
    before = str(job(**SLOW, steps=20).write(tmp_path / "before.jsonl"))
    done = CliRunner().invoke(cli, ["replay", before, "gone.jsonl"])
    assert (done.exit_code, done.stderr) == (2, "gpuwatch: there is no file gone.jsonl\n")
    done = CliRunner().invoke(cli, ["replay", before, before])
    assert done.exit_code == 0
    assert "step" in done.stdout
