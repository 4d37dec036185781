"""Exposed communication against what DDP itself measures, iteration by iteration."""

import json
import statistics
from pathlib import Path

import pytest
import support

SCRIPT = str(Path(__file__).parent / "ddp_logger.py")
FIRST = 3  # DDP rebuilds its buckets in the first iterations


@pytest.mark.distributed
def test_exposed_communication_agrees_with_ddp(
    zygote: support.Zygote, rundir: Path, tmp_path: Path
) -> None:
    done, out = tmp_path / "done", tmp_path / "out"
    env = support.environment(rundir, DONE=str(done))
    with support.Ranks(zygote, [SCRIPT], env, out) as training:

        def finished() -> bool:
            assert training.poll() is None, support.text_of(out)
            return support.text_of(out).count('"exposed_ms"') == 2

        support.wait_until(finished, 100, "both ranks")
        presences = support.rank_presences(rundir)
        support.wait_until(
            lambda: all(len(support.ask(p, "snapshot").records) >= 60 for p in presences), 20
        )
        frames = [support.ask(p, "snapshot") for p in presences]
        done.touch()
        assert training.wait(20) == 0, support.text_of(out)
    rows = [json.loads(r) for r in support.text_of(out).splitlines() if r.startswith("{")]
    said = {row["rank"]: row["exposed_ms"] for row in rows}
    differences = []
    exposures = []
    for frame in frames:
        ours = {r.index: (r.host.comm or 0) / 1e6 for r in frame.records}
        assert frame.hello is not None
        assert frame.hello.ddp is not None
        (row,) = (row for row in rows if row["rank"] == frame.rank)
        assert list(frame.hello.ddp.bucket_bytes) == row["buckets"]
        assert frame.hello.ddp.comm_span_ns == row["span_ns"] > 0
        for index, theirs in enumerate(said[frame.rank]):
            if index >= FIRST:
                differences.append(abs(ours[index] - theirs))
                exposures.append(theirs)
    median_ms = statistics.median(differences)
    print(
        f"median difference {median_ms:.3f} ms, 90th percentile "
        f"{statistics.quantiles(differences, n=10)[-1]:.3f} ms, exposures up to "
        f"{statistics.quantiles(exposures, n=20)[-1]:.1f} ms, {len(differences)} iterations"
    )
    # The late rank of an iteration waits for nobody, the other one for all of its lateness.
    assert statistics.quantiles(exposures, n=20)[-1] > 5
    assert median_ms < 0.5
