"""Rules on a GPU: by the device's clock, and not at all without it."""

from collections.abc import Callable, Mapping

import msgspec
import pytest
from builders import Trace, record

from gpuwatch.diagnosis.engine import diagnose_run, picture_of
from gpuwatch.diagnosis.types import Abstain, Finding, RunPicture
from gpuwatch.schema import StepRecord
from gpuwatch.store import Store

BUSY = {"data_wait": 0.5, "forward": 30.0, "backward": 60.0, "optimizer": 5.0}
STARVED = {**BUSY, "data_wait": 100.0}

# What the host of a busy device sees: it is ahead, and time piles up where it first waits.
AHEAD = {"data_wait": 85.0, "forward": 3.0, "backward": 4.0, "optimizer": 1.0, "other": 3.0}


def picture(
    trace: Trace,
    host: Mapping[str, float],
    *,
    timed: Callable[[int], bool] = lambda rank: True,
    device: str = "cuda:0",
) -> RunPicture:
    """The trace as the device's times, with these of the host."""

    def on_device(step: StepRecord, rank: int) -> StepRecord:
        phases = {**host, "comm": None if step.host.comm is None else 0.1}
        there = record(step.index, phases, started_s=step.started_s)
        return msgspec.structs.replace(
            step,
            step_ns=there.step_ns,
            host=there.host,
            device=step.host if timed(rank) else None,
            clock="device" if timed(rank) else "host",
        )

    replace = msgspec.structs.replace
    trace.frames = [
        replace(
            frame,
            records=tuple(on_device(step, frame.rank) for step in frame.records),
            hello=None if frame.hello is None else replace(frame.hello, device=device),
        )
        for frame in trace.frames
    ]
    store = Store(lambda: 100.0)
    store.apply(trace.node_frame, 100.0)
    view = store.view()
    return picture_of(view, view.runs[0])


def diagnosed(*args: object, **options: object) -> tuple[list[Finding], list[Abstain]]:
    return diagnose_run(picture(*args, **options))  # type: ignore[arg-type]


def test_a_host_that_waits_for_data_while_the_device_works_is_no_finding() -> None:
    trace = Trace([BUSY] * 2, queue_depth=0.0, worker_cpu=10.0)
    assert diagnosed(trace, AHEAD) == ([], [])


def test_a_device_that_waits_for_data_is_starved_by_its_own_clock() -> None:
    trace = Trace([STARVED] * 2, queue_depth=0.0, worker_cpu=10.0)
    found, abstained = diagnosed(trace, {**AHEAD, "data_wait": 300.0})
    assert abstained == []
    loader = found[0]
    assert loader.kind == "loader_few_workers"
    assert loader.cost_ms == pytest.approx(100, abs=6)
    evidence = {e.metric: e for e in loader.evidence}
    assert evidence["data_wait"].value == pytest.approx(100, abs=5)
    assert evidence["data_wait"].source == "device clock, mean of window"
    # Two workers and an interval of about 197 ms of the device, whatever the host's.
    assert evidence["batch_cost"].value == pytest.approx(394, abs=15)


def test_without_workers_a_batch_costs_what_the_host_needs_for_it() -> None:
    # The device hides 40 of the 140 ms that the host is at making the batch.
    trace = Trace([STARVED], num_workers=0, worker_cpu=None)
    found, _ = diagnosed(trace, {**AHEAD, "data_wait": 140.0})
    (cost,) = [e for e in found[0].evidence if e.metric == "batch_cost"]
    assert cost.value == pytest.approx(140)


def test_a_straggler_and_the_network_are_told_by_the_device() -> None:
    slow = {**BUSY, "forward": 80.0}
    found, abstained = diagnosed(Trace([BUSY, slow, BUSY]), AHEAD)
    assert abstained == []
    assert [(f.kind, f.ranks) for f in found if f.severity != "note"] == [("straggler", (1,))]
    found, _ = diagnosed(Trace([BUSY] * 3, transfer_ms=60), AHEAD)
    assert [f.kind for f in found] == ["comm_bound"]


@pytest.mark.parametrize("timed", [lambda rank: False, lambda rank: rank == 0])
@pytest.mark.parametrize("device", ["cuda:0", "mps:0"])
def test_rules_abstain_where_a_device_was_not_timed(
    timed: Callable[[int], bool], device: str
) -> None:
    trace = Trace([STARVED] * 2, queue_depth=0.0, worker_cpu=10.0)
    found, abstained = diagnosed(trace, STARVED, timed=timed, device=device)
    assert found == []
    assert {a.kind for a in abstained} == {
        "loader_few_workers",
        "cpu_decode_aug",
        "storage_slow",
        "loader_oversub",
        "collate_ipc",
        "stall_prefetch_burst",
        "stall_log_sync",
        "straggler",
        "comm_bound",
    }
    assert {a.needs for a in abstained} == {"device timings: on a GPU the host clock runs ahead"}
