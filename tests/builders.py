"""Frames as a rank and a node process would send them, for tests that need no process."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gpuwatch.frames import encode
from gpuwatch.schema import (
    PHASES,
    WIRE_VERSION,
    Ddp,
    Hello,
    HostSample,
    IoSample,
    Loader,
    NodeFrame,
    PhasesNs,
    ProcessSample,
    RankAge,
    RankFrame,
    RankState,
    Reading,
    SensorFrame,
    Span,
    StepRecord,
    WorkerCost,
)

T0_S = 1_800_000_000.0


def record(index: int, phases_ms: Mapping[str, float | None], **more: Any) -> StepRecord:
    """A step whose phases are given in ms; it starts a second-fraction after the one before."""
    phases = {n: None if v is None else int(v * 1e6) for n, v in phases_ms.items()}
    step_ns = sum(v for v in phases.values() if v is not None)
    started_s = more.pop("started_s", T0_S + index * step_ns / 1e9)
    return StepRecord(
        index=index,
        started_s=started_s,
        step_ns=step_ns,
        host=PhasesNs(**{n: phases.get(n) for n in PHASES}),
        **more,
    )


def hello(rank: int = 0, world_size: int = 1, **more: Any) -> Hello:
    """A hello of a rank whose pid is 1000 + rank."""
    defaults: dict[str, Any] = {
        "host": "node0",
        "pid": 1000 + rank,
        "pid_started_s": T0_S - 10,
        "run_name": "a-run",
        "started_s": T0_S - 5,
        "cores": 16,
    }
    return Hello(world_size=world_size, **{**defaults, **more})


def rank_frame(
    seq: int, records: Sequence[StepRecord] = (), *, rank: int = 0, **more: Any
) -> RankFrame:
    """A frame of incarnation `inc<rank>` unless told otherwise."""
    defaults: dict[str, Any] = {
        "version": WIRE_VERSION,
        "run": "run-1",
        "incarnation": f"inc{rank}",
        "sent_s": T0_S,
        "dropped": 0,
        "state": RankState(status="training", step=records[-1].index + 1 if records else 0),
    }
    return RankFrame(rank=rank, seq=seq, records=tuple(records), **{**defaults, **more})


def node_frame(
    seq: int,
    frames: Sequence[RankFrame | bytes] = (),
    *,
    sensors: SensorFrame | None = None,
    ages: Sequence[RankAge] = (),
    node: str = "node0",
    **more: Any,
) -> bytes:
    """The encoded frame of a node process."""
    raw = tuple(msgspec.Raw(f if isinstance(f, bytes) else encode(f)) for f in frames)
    defaults: dict[str, Any] = {"version": WIRE_VERSION, "incarnation": "agent", "sent_s": T0_S}
    return encode(
        NodeFrame(
            node=node,
            seq=seq,
            frames=raw,
            ages=tuple(ages),
            sensors=None if sensors is None else msgspec.Raw(encode(sensors)),
            **{**defaults, **more},
        )
    )


def percent(value: float | None) -> Reading:
    """A percentage, or n/a."""
    if value is None:
        return Reading(None, "%", "test", state="na", reason="not given")
    return Reading(value, "%", "test")


def sensors(
    seq: int = 2,
    *,
    cores: int = 16,
    cpu: float | None = 25.0,
    iowait: float | None = 0.0,
    ranks: Mapping[int, float | None] | None = None,
    workers: Mapping[int, Sequence[tuple[int, float | None, str]]] | None = None,
    limits: Mapping[str, Reading] | None = None,
    core_percents: tuple[float, ...] | None = None,
    threads: float = 2.0,
    io: Sequence[IoSample] = (),
    psi: float | None = None,
) -> SensorFrame:
    """A tick: `ranks` maps rank pid to CPU %, `workers` rank pid to (pid, CPU %, state letter).

    `limits` are more readings of every rank, `core_percents` by default the same on each core,
    `threads` those of a worker, `io` disks and datasets.
    """
    free = {
        "affinity_cores": Reading(float(cores), "", "test"),
        "cpu_quota_cores": Reading(None, "", "test", state="na", reason="no CPU quota"),
        **(limits or {}),
    }
    processes = [
        ProcessSample(pid, pid, "rank", "S", {"cpu_percent": percent(value), **free})
        for pid, value in (ranks or {}).items()
    ]
    for rank_pid, found in (workers or {}).items():
        processes += [
            ProcessSample(
                pid,
                rank_pid,
                "worker",
                letter,
                {"cpu_percent": percent(value), "threads": Reading(threads, "", "test")},
            )
            for pid, value, letter in found
        ]
    if core_percents is None:
        core_percents = () if cpu is None else (cpu,) * cores
    return SensorFrame(
        version=WIRE_VERSION,
        seq=seq,
        sent_s=T0_S,
        host=HostSample(
            cores,
            {
                "cpu_percent": percent(cpu),
                "cpu_iowait_percent": percent(iowait),
                "psi_cpu_some": percent(psi),
            },
            core_percents,
            tuple(io),
        ),
        gpus_reason="no NVIDIA driver",
        processes=tuple(processes),
    )


def worker_costs(
    pids: Sequence[int],
    batch_ms: tuple[float, float, float],
    loader: str = "loader0",
    first_times: float = 1.0,
) -> tuple[WorkerCost, ...]:
    """Two readings a worker, ten seconds apart; their first batches cost ten times as much.

    The first worker's batches take `first_times` as long as the others'.
    """
    wall_ns, cpu_ns, collate_ns = (int(value * 1e6) for value in batch_ms)

    def total(pid: int, batches: int, age_s: float) -> WorkerCost:
        weight = batches + 9
        wall = int(wall_ns * (first_times if pid == pids[0] else 1.0))
        totals = (weight * wall, weight * cpu_ns, weight * collate_ns)
        return WorkerCost(loader, pid, batches, *totals, age_s=age_s)

    return tuple(total(pid, n, age_s) for n, age_s in ((1, 10.0), (51, 0.0)) for pid in pids)


class Trace:
    """A run written step by step: what each rank's phases and look-alike signals are.

    `ranks` gives one mapping of phases in ms a rank, own phases only; communication follows from
    them as in synchronous training: the transfer, and the wait for the slowest rank. `batch_ms` is
    (wall, CPU, collating) of a batch if the workers time themselves, `slow_worker` how many times
    as long the first of them takes.
    """

    def __init__(
        self,
        ranks: Sequence[Mapping[str, float]],
        *,
        transfer_ms: float = 1.0,
        scatter: float = 0.03,
        seed: int = 0,
        num_workers: int = 2,
        queue_depth: float = 4.0,
        worker_cpu: float | None = 30.0,
        worker_state: str = "S",
        cpu: float | None = 25.0,
        iowait: float | None = 0.0,
        cores: int = 16,
        main_cpu: float | None = 40.0,
        steps: int = 70,
        spike: Mapping[int, float] | None = None,
        gradient_bytes: int = 100 * 2**20,
        batch_ms: tuple[float, float, float] | None = None,
        slow_worker: float = 1.0,
        persistent_workers: bool = True,
        memory_bytes: Sequence[int] | None = None,
        first_batch_ms: Mapping[int, float] | None = None,
        spans: Sequence[Span] = (),
        more_hello: Mapping[str, Any] | None = None,
        **more_sensors: Any,
    ) -> None:
        rng = random.Random(seed)
        world_size = len(ranks)
        self.frames: list[RankFrame] = []
        rows: list[list[StepRecord]] = [[] for _ in ranks]
        for index in range(steps):
            own = [
                {p: v * max(0.2, rng.gauss(1.0, scatter)) for p, v in phases.items()}
                for phases in ranks
            ]
            for rank, extra in (spike or {}).items():
                own[rank]["forward"] = own[rank].get("forward", 0.0) + extra * (index % 2)
            slowest = max(sum(phases.values()) for phases in own)
            moved = transfer_ms * max(0.2, rng.gauss(1.0, scatter))
            for rank, phases in enumerate(own):
                comm = slowest - sum(phases.values()) + moved if world_size > 1 else None
                tags = ("first_batch", "warmup") if index == 0 else ()
                if first_batch_ms and index in first_batch_ms:
                    phases["data_wait"] = first_batch_ms[index]
                    tags = ("first_batch",)
                rows[rank].append(
                    record(
                        index,
                        {**phases, "comm": comm},
                        started_s=T0_S + index * slowest / 1e3,
                        samples=8,
                        queue_depth=queue_depth if num_workers else None,
                        queue_capacity=2 * num_workers if num_workers else None,
                        tags=tags,
                        loader="loader0",
                        memory_bytes=(
                            10**9 + rng.randrange(2**20)
                            if memory_bytes is None
                            else memory_bytes[index]
                        ),
                    )
                )
        for rank, row in enumerate(rows):
            pids = tuple(2000 + 100 * rank + i for i in range(num_workers))
            described: dict[str, Any] = {"cores": cores, **(more_hello or {})}
            greeting = hello(
                rank,
                world_size,
                loaders=(
                    Loader(
                        "loader0",
                        num_workers,
                        2,
                        batch_size=8,
                        worker_pids=pids,
                        persistent_workers=persistent_workers,
                    ),
                ),
                ddp=Ddp(gradient_bytes=gradient_bytes, backend="gloo") if world_size > 1 else None,
                **described,
            )
            self.frames.append(
                rank_frame(
                    1,
                    row,
                    rank=rank,
                    hello=greeting,
                    snapshot=True,
                    spans=tuple(spans),
                    workers=(
                        worker_costs(pids, batch_ms, first_times=slow_worker) if batch_ms else ()
                    ),
                )
            )
        self.sensors = sensors(
            cores=cores,
            cpu=cpu,
            iowait=iowait,
            ranks={1000 + r: main_cpu for r in range(world_size)},
            workers={
                1000 + r: [
                    (2000 + 100 * r + i, worker_cpu, worker_state) for i in range(num_workers)
                ]
                for r in range(world_size)
            },
            **more_sensors,
        )

    @property
    def node_frame(self) -> bytes:
        """Everything in one frame of the node process."""
        return node_frame(1, self.frames, sensors=self.sensors)
