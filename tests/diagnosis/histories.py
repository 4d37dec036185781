"""Random runs, as a monitor sees them: steps, losses, snapshots and restarts between its looks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
from builders import T0_S, Trace, node_frame, rank_frame

from gpuwatch.schema import RankFrame, Reading, Span, StepRecord
from gpuwatch.store import Store
from gpuwatch.store.views import View

__all__ = ["history"]

STEPS = 150


def _trace(rng: random.Random, ranks: int) -> tuple[Trace, tuple[Span, ...]]:
    """A run that may be slow for any of the reasons there are, or for several of them."""
    usual = {
        phase: rng.choice([0.0, 0.5, 3.0, 20.0, 60.0])
        for phase in ("data_wait", "h2d", "backward", "optimizer", "other")
    }
    phases = [{"forward": 5.0, **usual} for _ in range(ranks)]
    if rng.random() < 0.4:
        phases[rng.randrange(ranks)][rng.choice(list(usual))] += rng.choice([3.0, 10.0, 40.0])
    workers = rng.choice([0, 2, 2, 4])
    batches = [None, (20.0, 10.0, 2.0), (150.0, 20.0, 2.0), (200.0, 150.0, 120.0)]
    growth = rng.choice([0, 2**20, 2**21])
    more: dict[str, Any] = {}
    if rng.random() < 0.2:
        more["limits"] = {
            "cpu_quota_cores": Reading(2.0, "", "test"),
            "cpu_throttled_percent": Reading(rng.choice([10.0, 60.0]), "%", "test"),
            "cpu_throttled_ms_per_s": Reading(900.0, "", "test"),
        }
    if rng.random() < 0.2:
        more["core_percents"] = (99.0, 99.0, *(10.0,) * 14)
    trace = Trace(
        phases,
        transfer_ms=rng.choice([0.5, 5.0, 40.0]),
        scatter=rng.choice([0.01, 0.03, 0.1, 0.4]),
        seed=rng.randrange(2**30),
        num_workers=workers,
        queue_depth=rng.choice([0.0, 4.0]),
        worker_cpu=rng.choice([10.0, 60.0, 95.0, None]),
        worker_state=rng.choice("SSSDR"),
        cpu=rng.choice([25.0, 95.0, None]),
        iowait=rng.choice([0.0, 40.0]),
        cores=rng.choice([4, 16]),
        main_cpu=rng.choice([40.0, 97.0, None]),
        steps=STEPS,
        spike={0: 80.0} if rng.random() < 0.1 else None,
        gradient_bytes=rng.choice([10**4, 10**8]),
        batch_ms=rng.choice(batches) if workers else None,
        slow_worker=rng.choice([1.0, 1.0, 4.0]),
        persistent_workers=rng.random() < 0.5,
        memory_bytes=[10**9 + index * growth for index in range(STEPS)],
        first_batch_ms=(
            {index: rng.choice([60.0, 400.0, 2000.0]) for index in range(25, STEPS, 25)}
            if rng.random() < 0.4
            else None
        ),
        threads=rng.choice([2.0, 9.0]),
        psi=rng.choice([None, 5.0, 50.0]),
        more_hello={"device": rng.choice(["cpu", "cpu", "cuda"])},
        **more,
    )
    spans = [
        Span(
            rng.choice(["eval", "checkpoint"]),
            T0_S + 10 * at + rng.random(),
            int(rng.choice([50, 500, 3000]) * 1e6),
            20 * at + 5,
        )
        for at in range(6)
        if rng.random() < 0.4
    ]
    return trace, tuple(spans)


def _told(rng: random.Random, frame: RankFrame) -> RankFrame:
    """The frame as a rank of any kind tells it: on a GPU, with pauses, of several batches."""
    records = frame.records
    if rng.random() < 0.4:
        records = tuple(
            msgspec.structs.replace(r, device=r.host, clock="device", device_stall_ns=1000)
            if rng.random() < 0.98
            else r
            for r in records
        )
    if rng.random() < 0.2:
        pauses = [None, 10**6, 10**7]
        records = tuple(msgspec.structs.replace(r, gc_ns=rng.choice(pauses)) for r in records)
    if rng.random() < 0.1:
        records = tuple(msgspec.structs.replace(r, batches=rng.choice([1, 2])) for r in records)
    if rng.random() < 0.1:
        records = tuple(_without_comm(r) if rng.random() < 0.1 else r for r in records)
    return msgspec.structs.replace(frame, records=records)


def _without_comm(record: StepRecord) -> StepRecord:
    host = msgspec.structs.replace(record.host, comm=None)
    return msgspec.structs.replace(record, host=host, device=None, clock="host")


def history(seed: int, ranks: int | None = None, looks: int = 10) -> Iterator[View]:
    """Yield what a monitor sees of a run, a view a second."""
    rng = random.Random(seed)
    count = ranks or rng.choice([1, 1, 2, 2, 3, 4, 8])
    trace, spans = _trace(rng, count)
    frames = [_told(rng, frame) for frame in trace.frames]
    clock_s = 100.0
    store = Store(clock=lambda: clock_s, wall=lambda: T0_S)
    known = [rng.choice([3, 30, 60])] * count
    seqs = [1] * count
    restarts = [0] * count
    first = [msgspec.structs.replace(f, records=f.records[: known[0]]) for f in frames]
    store.apply(node_frame(1, first, sensors=trace.sensors), clock_s)
    for look in range(looks):
        yield store.view()
        clock_s += 1.0
        told: list[RankFrame | bytes] = []
        for rank, frame in enumerate(frames):
            usual = rng.random() < 0.9
            new = rng.choice([9, 10]) if usual else rng.choice([0, 3, 40, 80])
            records = frame.records[known[rank] : known[rank] + new]
            known[rank] += len(records)
            seqs[rank] += 1
            more: dict[str, Any] = {}
            chance = rng.random()
            if chance < 0.03:
                seqs[rank] += 1  # a frame is lost, and its steps
                records = records[len(records) // 2 :]
            elif chance < 0.08:  # a snapshot brings them back
                records = frame.records[: known[rank]]
                more = {"snapshot": True, "hello": frame.hello}
            elif chance < 0.09:
                restarts[rank] += 1
                known[rank], records = 20, frame.records[:20]
                more = {"snapshot": True, "hello": frame.hello}
            told.append(
                rank_frame(
                    seqs[rank],
                    records,
                    rank=rank,
                    incarnation=f"inc{rank}.{restarts[rank]}" if restarts[rank] else f"inc{rank}",
                    sent_s=T0_S + look + 1,
                    spans=tuple(span for span in spans if span.step < known[rank]),
                    workers=frame.workers,
                    **more,
                )
            )
        ticked = msgspec.structs.replace(trace.sensors, seq=look + 3)
        store.apply(node_frame(look + 2, told, sensors=ticked), clock_s)
