"""Every phase against the truth, alone and on two ranks, with and without BatchNorm."""

import json
import statistics
from pathlib import Path

import pytest
import support

from gpuwatch.schema import RankFrame, StepRecord

SCRIPT = str(Path(__file__).parent / "ground_truth.py")
OWN = ("data_wait", "forward", "backward", "optimizer", "other")


def run(rundir: Path, tmp_path: Path, launcher: list[str], ranks: int) -> list[RankFrame]:
    """Run the script and return the past of its ranks, with what it printed in `out`."""
    done = tmp_path / "done"
    out = tmp_path / "out"
    env = support.environment(rundir, DONE=str(done))
    with support.process([*launcher, SCRIPT], env, output=out) as training:
        wanted = 10 if ranks == 2 else 4

        def finished() -> bool:
            assert training.poll() is None, support.text_of(out)
            return support.text_of(out).count('"scenario"') == wanted * ranks

        support.wait_until(finished, 100, "the scenarios")
        presences = support.rank_presences(rundir)
        assert [p.rank for p in presences] == list(range(ranks))
        support.wait_until(lambda: len(support.ask(presences[-1], "snapshot").records) > 0, 5)
        frames = [support.ask(p, "snapshot") for p in presences]
        done.touch()
        assert training.wait(20) == 0, support.text_of(out)
    return frames


def scenarios(tmp_path: Path) -> dict[str, dict[str, int]]:
    rows = [json.loads(r) for r in support.text_of(tmp_path / "out").splitlines() if r[:1] == "{"]
    return {row["scenario"]: row for row in rows}


def steps(frame: RankFrame, row: dict[str, int]) -> list[StepRecord]:
    """The steps of a scenario but its first ones (first batch, DDP's first iterations)."""
    found = [r for r in frame.records if row["first"] + 2 <= r.index < row["last"]]
    assert len(found) >= 10
    return found


def median_ms(records: list[StepRecord], phase: str) -> float:
    return statistics.median((getattr(r.host, phase) or 0) / 1e6 for r in records)


def allowed(true_ms: float) -> float:
    # A sleep ends late, and later on a machine that is busy: the slack is for the sleep, not for
    # the marks. A wrong place for a mark is off by the whole of a phase.
    return max(3.0, 0.15 * true_ms)


BASE_MS = {"data_wait": 12.0, "forward": 15.0, "backward": 20.0, "optimizer": 8.0, "other": 6.0}


def test_one_process(rundir: Path, tmp_path: Path) -> None:
    (frame,) = run(rundir, tmp_path, [support.PYTHON], 1)
    rows = scenarios(tmp_path)
    assert frame.hello is not None
    assert (frame.hello.world_size, frame.hello.run_name) == (1, "ground-truth")
    assert frame.state.phases_na["comm"] == "one process"
    for name, row in rows.items():
        times = 2 if "accumulate" in name else 1
        records = steps(frame, row)
        for record in records:
            assert record.host.comm is None
            known = [getattr(record.host, p) for p in (*OWN, "h2d", "comm")]
            assert sum(v for v in known if v is not None) == record.step_ns
            assert (record.batches, record.samples) == (times, 4 * times)
        for phase in OWN:
            true_ms = BASE_MS[phase] * (
                times if phase in {"data_wait", "forward", "backward"} else 1
            )
            assert median_ms(records, phase) == pytest.approx(true_ms, abs=allowed(true_ms)), (
                name,
                phase,
            )
    assert frame.ledger.steps == 4 * 14
    assert frame.dropped == 0


@pytest.mark.distributed
def test_two_ranks(rundir: Path, tmp_path: Path) -> None:
    frames = run(rundir, tmp_path, support.TORCHRUN, 2)
    rows = scenarios(tmp_path)
    assert len({f.run for f in frames}) == 1
    hello = frames[0].hello
    assert hello is not None
    assert hello.run_source == "TORCHELASTIC_RUN_ID"
    assert hello.ddp is not None
    assert hello.ddp.backend == "gloo"
    for name, row in rows.items():
        late = name.split()[1] if name.startswith("late") else ""
        own_ms = []
        for rank, frame in enumerate(frames):
            records = steps(frame, row)
            for record in records:
                known = [getattr(record.host, p) for p in (*OWN, "h2d", "comm")]
                assert sum(v for v in known if v is not None) == record.step_ns
            own_ms.append(
                statistics.median((r.step_ns - (r.host.comm or 0)) / 1e6 for r in records)
            )
            times = 2 if "accumulate" in name else 1
            for phase in OWN:
                true_ms = BASE_MS[phase] * (
                    times if phase in {"data_wait", "forward", "backward"} else 1
                )
                true_ms += 30.0 if late == phase and rank == 1 else 0.0
                assert median_ms(records, phase) == pytest.approx(true_ms, abs=allowed(true_ms)), (
                    name,
                    rank,
                    phase,
                )
        if late:
            # The whole step is the same on both ranks; own time tells which one is late, and the
            # other one's exposed communication is the wait for it.
            assert own_ms[1] - own_ms[0] == pytest.approx(30, abs=8), name
            waiting = median_ms(steps(frames[0], row), "comm")
            assert waiting == pytest.approx(30, abs=10), name
            assert median_ms(steps(frames[1], row), "comm") < 12, name
