"""Unmodified loops of every kind under `gpuwatch run`; Accelerate's launcher and its loaders."""

import contextlib
import json
import statistics
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import support

from gpuwatch.schema import RankFrame, StepRecord

HERE = Path(__file__).parent
RUN = [*support.GPUWATCH, "run", "--no-card", "--"]


@contextlib.contextmanager
def job(rundir: Path, log: Path, argv: Sequence[str]) -> Iterator[Any]:
    env = support.environment(rundir, DONE=str(log.with_suffix(".done")))
    with support.process([*RUN, *argv], env, output=log) as running:
        yield running


def past(
    running: Any, rundir: Path, log: Path, words: str, ranks: int, steps: int
) -> list[RankFrame]:
    """Wait until the job has said the words so often, and return the past of its ranks."""
    frames: list[RankFrame] = []

    def there() -> bool:
        assert running.poll() is None, support.text_of(log)
        if support.text_of(log).count(words) < ranks:
            return False
        frames[:] = support.snapshots(rundir)
        return len(frames) == ranks and all(f.ledger.steps >= steps for f in frames)

    support.wait_until(there, 60, f"{steps} steps of {ranks} ranks, now {frames}", 0.3)
    log.with_suffix(".done").touch()
    assert running.wait(20) == 0, support.text_of(log)
    return frames


def check(record: StepRecord) -> None:
    host = record.host
    phases = [getattr(host, name) for name in host.__struct_fields__]
    assert sum(p for p in phases if p is not None) == record.step_ns
    for name in ("forward", "backward", "optimizer"):
        assert getattr(host, name) > 0, (record.index, name)


@pytest.mark.process
def test_loops_of_every_kind(rundir: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with job(rundir, log, [support.PYTHON, str(HERE / "loops.py")]) as running:
        # Nothing has followed the very last step, which fetches nothing: it is still open.
        (frame,) = past(running, rundir, log, '"without_a_loader"', 1, 99)
    rows = [json.loads(line) for line in support.text_of(log).splitlines() if line[:1] == "{"]
    assert len(rows) == 15
    records = {record.index: record for record in frame.records}
    expected = {row["loop"]: row["steps"] for row in rows}
    at = 0
    for name, steps in expected.items():
        seen = [records[i] for i in range(at, at + len(steps)) if i in records]
        assert len(seen) == len(steps) - (name == "without_a_loader"), name
        for record in seen:
            check(record)
        found = [[record.batches, record.samples] for record in seen]
        assert found == steps[: len(found)], name
        for record in seen:
            assert (record.host.data_wait is None) == (name == "without_a_loader"), name
        skipped = [n for n, record in enumerate(seen) if "skipped" in record.tags]
        assert skipped == ([3] if name == "amp_with_a_scaler" else []), name
        if name == "validation_with_gradients_on_or_off":
            # In both epochs after the third step, and in no step.
            assert [span.step for span in frame.spans if span.name == "eval"] == [at + 3, at + 9]
        at += len(steps)
    assert [span.name for span in frame.spans] == ["eval", "eval"]
    assert frame.dropped == 0
    assert frame.state.notices == ()
    assert {name: frame.state.phases_na.get(name) for name in ("forward", "optimizer")} == {
        "forward": None,
        "optimizer": None,
    }


@pytest.mark.process
def test_a_loop_in_a_thread(rundir: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with job(rundir, log, [support.PYTHON, str(HERE / "loops.py"), "in_a_thread"]) as running:
        (frame,) = past(running, rundir, log, '"in_a_thread"', 1, 6)
    for record in frame.records:
        check(record)
        assert (record.batches, record.samples) == (1, 4)
        assert record.host.data_wait is not None


@pytest.mark.process
def test_an_optimizer_that_is_none_of_torchs(rundir: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with job(rundir, log, [support.PYTHON, str(HERE / "loops.py"), "none_of_torchs"]) as running:
        (frame,) = past(running, rundir, log, '"none_of_torchs"', 1, 6)
    for record in frame.records:
        host = record.host
        assert (record.batches, record.samples) == (1, 4)
        assert host.optimizer is None
        assert min(host.data_wait or 0, host.forward or 0, host.backward or 0, host.other or 0) > 0
    assert frame.state.phases_na["optimizer"].startswith("no optimizer step is seen: ")
    assert "forward" not in frame.state.phases_na


@pytest.mark.distributed
def test_accelerate_launch_with_a_first_rank_that_loads_for_all(
    rundir: Path, tmp_path: Path
) -> None:
    if find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed: pip install -e '.[integrations]'")
    log = tmp_path / "log"
    # Without --multi_gpu it starts two processes through mpirun only; the script says it is on CPU.
    launch = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1"
    options = "--mixed_precision no --dynamo_backend no --main_process_port 0"
    argv = [support.PYTHON, *launch.split(), *options.split(), str(HERE / "accelerated.py")]
    with job(rundir, log, argv) as running:
        frames = past(running, rundir, log, "trained", 2, 20)
    assert [frame.rank for frame in frames] == [0, 1]
    (run,) = {frame.run for frame in frames}
    assert run.startswith("accelerated-")
    for frame in frames:
        assert frame.hello is not None
        assert frame.hello.world_size == 2
        (loader,) = frame.hello.loaders
        assert (loader.dataset, loader.batch_size) == ("Items", 4)
        assert frame.state.notices == ()
        assert [record.index for record in frame.records] == list(range(20))
        # Of the last five samples each rank has three: it is filled up with one of the first.
        assert [record.samples for record in frame.records] == ([4] * 9 + [3]) * 2
        assert [record.batches for record in frame.records] == [1] * 20
        assert ["first_batch" in r.tags for r in frame.records] == ([True] + [False] * 9) * 2
        for record in frame.records:
            check(record)
            assert record.loader == loader.key
    # Two batches of four items are loaded in a step, by the first rank; the other one waits for
    # them to be broadcast, and that is no loading.
    for rank, name in ((0, "data_wait"), (1, "comm")):
        steady = frames[rank].records[2:8]
        waits = [(getattr(record.host, name) or 0) / 1e6 for record in steady]
        assert statistics.median(waits) >= 38, (rank, name)
    other = [(record.host.data_wait or 0) / 1e6 for record in frames[1].records[2:8]]
    assert statistics.median(other) < 5
