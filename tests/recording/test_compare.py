"""Before and after a change: what is faster, what is noise, what was promised."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import traces
from click.testing import CliRunner

from gpuwatch.commands.cli import cli
from gpuwatch.commands.recorded import last_view
from gpuwatch.recording.compare import Change, Comparison, compare_runs
from gpuwatch.store import RunView

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
    assert compare_runs(slow, few).changes[0].reason == "under 8 steps in a window"
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
    assert "noise" in text
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
