"""Loader workers that time themselves, against what their datasets measured of themselves."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import support

from gpuwatch.probe.workers import Workers
from gpuwatch.schema import RankFrame, WorkerCost
from gpuwatch.wire.collect.discovery import RankFiles

SCRIPT = str(Path(__file__).parent / "loading.py")

TIMED = [
    "fork",
    "spawn",
    "forkserver",
    "two workers, pinned",
    "busy",
    "stream",
    "persistent",
    "loader within",
    "no workers",
    "new workers",
]
WORKERS = {"two workers, pinned": 2, "stream": 2, "no workers": 0, "new workers": 2}

SAME = [
    "init fork function",
    "init fork none",
    "error fork item",
    "error fork init",
    "error fork collate",
    "init spawn object",
    "error spawn item",
    "error spawn unpicklable",
]


@contextlib.contextmanager
def loading(rundir: Path, out: Path, scenarios: list[str], **more: str) -> Iterator[Any]:
    env = support.environment(rundir, DONE=str(out.with_suffix(".done")), **more)
    argv = [support.PYTHON, SCRIPT, json.dumps(scenarios)]
    with support.process(argv, env, output=out) as running:
        yield running


def wait_for_all(running: Any, out: Path) -> dict[str, dict[str, Any]]:
    def finished() -> bool:
        assert running.poll() is None, support.text_of(out)
        return '"all"' in support.text_of(out)

    support.wait_until(finished, 90, "the scenarios")
    rows = [json.loads(line) for line in support.text_of(out).splitlines() if line[:1] == "{"]
    return {row.pop("scenario"): row for row in rows}


def newest(frame: RankFrame) -> dict[str, list[WorkerCost]]:
    """The last reading of every worker, by loader."""
    last: dict[tuple[str, int], WorkerCost] = {}
    for cost in frame.workers:
        last[cost.loader, cost.pid] = cost
    found: dict[str, list[WorkerCost]] = {}
    for (loader, _), cost in last.items():
        found.setdefault(loader, []).append(cost)
    return found


@pytest.mark.process
@pytest.mark.alone
def test_what_workers_say_is_what_their_batches_cost(rundir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with loading(rundir, out, TIMED) as running:
        rows = wait_for_all(running, out)
        (presence,) = support.rank_presences(rundir)
        wanted = sum(row["batches"] for row in rows.values() if "batches" in row)
        wanted -= rows["no workers"]["batches"]

        def counted() -> int:
            costs = newest(support.ask(presence, "snapshot")).values()
            return sum(cost.batches for found in costs for cost in found)

        support.wait_until(lambda: counted() == wanted, 20, "the last batches", every_s=0.3)
        frame = support.ask(presence, "snapshot")
        assert list(rundir.glob("rank-*")) != []
        assert {path.suffix for path in rundir.glob("rank-*")} == {".json", ".t", ".c"}
        out.with_suffix(".done").touch()
        assert running.wait(20) == 0
    assert [line for line in support.text_of(out).splitlines() if line[:1] != "{"] == []
    costs = newest(frame)
    assert frame.hello is not None
    for number, name in enumerate(TIMED):
        row = rows[name]
        found = costs.get(f"loader{number}", [])
        assert len(found) == WORKERS.get(name, 1), name
        assert row["unchanged"], name
        if not found:
            continue
        assert sum(cost.batches for cost in found) == row["batches"], name
        # The dataset measured itself: what is more are the fetcher's own moments.
        for field in ("wall", "cpu", "collate"):
            said_s = sum(getattr(cost, f"{field}_ns") for cost in found) / 1e9
            true_s = row[f"{field}_s"]
            assert said_s == pytest.approx(true_s, rel=0.1), (name, field)
        assert all(cost.busy_ns == 0 for cost in found), name
    nominal_cpu_s = 8 * 2 * 0.03
    assert rows["busy"]["cpu_s"] == pytest.approx(nominal_cpu_s, rel=0.1)
    assert rows["spawn"]["wall_s"] > 4 * rows["spawn"]["cpu_s"]
    # Every reading is a state that was: older ones have fewer batches.
    ages = [cost.age_s for cost in frame.workers]
    assert ages == sorted(ages, reverse=True)


@pytest.mark.process
@pytest.mark.alone
def test_the_user_sees_nothing_of_it(rundir: Path, tmp_path: Path) -> None:
    watched, bare = tmp_path / "watched", tmp_path / "bare"
    with (
        loading(rundir, watched, SAME) as one,
        loading(rundir, bare, SAME, UNWATCHED="1") as other,
    ):
        seen, expected = wait_for_all(one, watched), wait_for_all(other, bare)
    untouched = {"rows": [[0, 40]] * 16, "untouched": True, "freed": True}
    assert seen["init fork function"] == seen["init spawn object"] == untouched
    assert "a broken item" in seen["error spawn item"]["text"]
    assert "pickle" in seen["error spawn unpicklable"]["text"]
    for name, row in expected.items():
        # Tracebacks of workers come as text: not a frame more.
        assert seen[name] == row, name


@pytest.mark.process
@pytest.mark.alone
def test_a_worker_that_cannot_import_us_and_a_process_that_is_killed(
    rundir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with loading(rundir, out, ["spawn"], WITHOUT_GPUWATCH="1") as running:
        rows = wait_for_all(running, out)
        (presence,) = support.rank_presences(rundir)
        frame = support.ask(presence, "snapshot")
        assert [line for line in support.text_of(out).splitlines() if line[:1] != "{"] == []
        os.kill(running.pid, signal.SIGKILL)
        running.wait(10)
    assert rows["spawn"]["batches"] == 8
    assert frame.hello is not None
    assert frame.hello.loaders[0].num_workers == 1
    assert frame.workers == ()
    RankFiles(rundir).scan()
    assert list(rundir.glob("rank-*")) == []


def test_an_iterator_that_cannot_start_is_the_users_own_affair() -> None:
    workers = Workers()

    class Nothing:
        """No loader at all."""

    def fail(iterator: Any, loader: Any) -> None:
        assert isinstance(loader, Nothing)
        raise TypeError("as before")

    with pytest.raises(TypeError, match="as before"):
        workers.starting(fail)(object(), Nothing())
    assert workers.fresh() == ()
    assert workers.past() == ()
