"""Every phase against the truth, alone and on two ranks, with and without BatchNorm."""

import json
import statistics
from pathlib import Path
from typing import Any

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


def scenarios(tmp_path: Path) -> dict[str, dict[int, Any]]:
    """What each rank printed of each scenario."""
    found: dict[str, dict[int, Any]] = {}
    for line in support.text_of(tmp_path / "out").splitlines():
        if line[:1] == "{":
            row = json.loads(line)
            found.setdefault(row["scenario"], {})[row["rank"]] = row
    return found


def true_ms(row: dict[str, Any], phase: str) -> float:
    """How long the phase really slept in a step, by the script's own clock."""
    return statistics.median(step[phase] for step in row["slept_ms"][2:])


def steps(frame: RankFrame, row: dict[str, Any]) -> list[StepRecord]:
    """The steps of a scenario but its first ones (first batch, DDP's first iterations)."""
    found = [r for r in frame.records if row["first"] + 2 <= r.index < row["last"]]
    assert len(found) >= 10
    return found


def median_ms(records: list[StepRecord], phase: str) -> float:
    return statistics.median((getattr(r.host, phase) or 0) / 1e6 for r in records)


def allowed(ms: float, batches: int) -> float:
    # Beside its sleep a phase holds real work, a millisecond a batch on a slow machine: two small
    # layers, DDP, the optimizer. A mark in a wrong place is off by the whole of a phase.
    return max(1.0, 0.05 * ms) + 1.2 * batches


def test_one_process(rundir: Path, tmp_path: Path) -> None:
    (frame,) = run(rundir, tmp_path, [support.PYTHON], 1)
    rows = scenarios(tmp_path)
    assert frame.hello is not None
    assert (frame.hello.world_size, frame.hello.run_name) == (1, "ground-truth")
    assert frame.state.phases_na["comm"] == "one process"
    for name, (row,) in ((n, tuple(r.values())) for n, r in rows.items()):
        times = 2 if "accumulate" in name else 1
        records = steps(frame, row)
        for record in records:
            assert record.host.comm is None
            known = [getattr(record.host, p) for p in (*OWN, "h2d", "comm")]
            assert sum(v for v in known if v is not None) == record.step_ns
            assert (record.batches, record.samples) == (times, 4 * times)
        for phase in OWN:
            truth = true_ms(row, phase)
            assert median_ms(records, phase) == pytest.approx(truth, abs=allowed(truth, times)), (
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
    for name, of_rank in rows.items():
        times = 2 if "accumulate" in name else 1
        late = name.split()[1] if name.startswith("late") else ""
        own_ms = []
        for rank, frame in enumerate(frames):
            row = of_rank[rank]
            records = steps(frame, row)
            for record in records:
                known = [getattr(record.host, p) for p in (*OWN, "h2d", "comm")]
                assert sum(v for v in known if v is not None) == record.step_ns
            own_ms.append(
                statistics.median((r.step_ns - (r.host.comm or 0)) / 1e6 for r in records)
            )
            for phase in OWN:
                truth = true_ms(row, phase)
                assert median_ms(records, phase) == pytest.approx(
                    truth, abs=allowed(truth, times)
                ), (
                    name,
                    rank,
                    phase,
                )
        if late:
            # The whole step is the same on both ranks; own time tells which one is late, and the
            # other one's exposed communication is the wait for it.
            assert own_ms[1] - own_ms[0] == pytest.approx(30, abs=8), name
            waiting = median_ms(steps(frames[0], of_rank[0]), "comm")
            assert waiting == pytest.approx(30, abs=10), name
            assert median_ms(steps(frames[1], of_rank[1]), "comm") < 12, name
