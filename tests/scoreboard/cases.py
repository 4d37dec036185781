"""Public reports of slow runs as traces: what the report says on every channel, and scatter.

Each trace was written from its report: the numbers there, the look-alikes' signals at innocent
values, and 3 % scatter. Times of minutes are scaled down where only their ratio matters. Phases are
those of the clock that decides. `NOT_TESTABLE` names reports whose trace would need a decisive
number that they do not give.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from traces import Job

__all__ = ["CASES", "NOT_TESTABLE", "Case"]


@dataclass(frozen=True)
class Case:
    """One report: kinds that may be the first finding at warning or above (none: nothing may be
    said), the ranks to be named (none: not checked), and the trace.
    """

    expect: tuple[str, ...]
    job: Job
    ranks: tuple[int, ...] | None = None
    never: tuple[str, ...] = ()


NO_QUOTA = {"value": None, "state": "na", "reason": "no CPU quota"}
CALM_HOST = {"cpu_percent": 20.0, "cpu_iowait_percent": 0.5}


def process(cpu: float = 45.0, cores: int = 16, **more: Any) -> dict[str, Any]:
    """The readings of a rank's process."""
    return {
        "cpu_percent": cpu,
        "affinity_cores": float(cores),
        "cpu_quota_cores": NO_QUOTA,
        "rss": 3e9,
        **more,
    }


def job(
    phases_ms: Any,
    *,
    workers: int = 4,
    queue: float = 6.0,
    worker_cpu: float = 30.0,
    threads: float = 2.0,
    main_cpu: float = 45.0,
    cores: int = 16,
    host: Mapping[str, Any] = CALM_HOST,
    loader: Mapping[str, Any] | None = None,
    step: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    **more: Any,
) -> Job:
    """A healthy job but for what is given."""
    return Job(
        phases_ms=phases_ms,
        loader={"num_workers": workers, "persistent_workers": True, **(loader or {})},
        step={
            "queue_depth": queue if workers else None,
            "queue_capacity": 2 * workers if workers else None,
            "loader": "train",
            "memory_bytes": 3_000_000_000,
            **(step or {}),
        },
        host=host,
        cores=cores,
        process=process(main_cpu, cores, **(limits or {})),
        worker_process={"cpu_percent": worker_cpu, "threads": threads} if workers else None,
        **{"steps": 80, **more},
    )  # fmt: skip


def compute(total_ms: float, **more: Any) -> dict[str, Any]:
    """The phases of a step that computes for so long and waits for nothing."""
    return {
        "data_wait": 0.004 * total_ms,
        "forward": 0.32 * total_ms,
        "backward": 0.61 * total_ms,
        "optimizer": 0.05 * total_ms,
        "other": 0.016 * total_ms,
        **more,
    }


def firsts(every: int, steps: int) -> list[list[str] | None]:
    """Tags of a run whose epochs have so many steps."""
    return [
        (["first_batch", "warmup"] if n == 0 else ["first_batch"]) if n % every == 0 else None
        for n in range(steps)
    ]


def epochs(every: int, steps: int, first_ms: float, other_ms: float) -> list[float]:
    """The data wait of such a run."""
    return [first_ms if n % every == 0 else other_ms for n in range(steps)]


def stands(
    ranks: int, at_s: float, states: Mapping[int, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """From a moment on every rank stands where it says, for a minute."""
    lines: list[dict[str, Any]] = []
    for second in range(0, 61, 5):
        lines += (
            {
                "type": "state",
                "rank": rank,
                "at_s": at_s + second,
                "status": "training",
                "phase": "comm",
                "phase_age_ms": second * 1000.0,
                **states.get(rank, {}),
            }
            for rank in range(ranks)
        )
    return lines


STORAGE = {"cpu_percent": 14.0, "cpu_iowait_percent": 35.0}
NFS = [
    {
        "name": "server:/share", "kind": "dataset", "path": "/share", "filesystem": "nfs4",
        "readings": {"read_latency": {"value": 45.0, "unit": "ms"},
                     "read_bytes_per_s": {"value": 1.2e8, "unit": "B/s"}},
    }
]  # fmt: skip
HDD = [
    {
        "name": "sda", "kind": "disk",
        "readings": {"busy_percent": {"value": 99.0, "unit": "%"},
                     "read_latency": {"value": 30.0, "unit": "ms"},
                     "read_bytes_per_s": {"value": 1.2e8, "unit": "B/s"}},
    }
]  # fmt: skip


def pinned(full: int, cores: int) -> dict[str, Any]:
    """So many full cores, and the rest idle."""
    return {"core_percents": [100.0] * full + [2.0] * (cores - full)}


CASES: dict[str, Case] = {
    # --- too few workers
    "LW-01": Case(
        ("loader_few_workers",),
        job(compute(100, data_wait=200), workers=1, queue=0, worker_cpu=98,
            batch_ms=(295, 290, 12), host={"cpu_percent": 12.0, "cpu_iowait_percent": 0.0},
            worker_state="R"),
        (0,),
    ),
    "LW-03": Case(
        (), job(compute(830, data_wait=9), workers=3, queue=3, batch_ms=(2400, 2350, 30))
    ),
    "LW-04": Case(
        ("loader_few_workers", "collate_ipc"),
        job(compute(75, data_wait=600), workers=8, queue=0, worker_cpu=0, main_cpu=100,
            worker_state="S"),
        never=("num_workers",),
    ),
    # --- decoding
    "CD-02": Case(
        ("cpu_decode_aug",),
        job(compute(40, data_wait=62), workers=8, queue=0, cores=8, worker_cpu=94, main_cpu=30,
            batch_ms=(8 * 24.4 * 4, 8 * 24.4 * 3.9, 10), worker_state="R",
            host={"cpu_percent": 98.0, "cpu_iowait_percent": 0.0}),
    ),
    "CD-03": Case(
        ("cpu_decode_aug",),
        job(compute(45, data_wait=60), workers=4, queue=0, cores=4, worker_cpu=93, main_cpu=20,
            batch_ms=(420, 415, 12), worker_state="R",
            host={"cpu_percent": 97.0, "cpu_iowait_percent": 0.0}),
    ),
    # --- storage
    "ST-01": Case(
        ("storage_slow",),
        job(compute(300, data_wait=700), workers=8, queue=0, worker_cpu=12, worker_state="D",
            batch_ms=(8000, 900, 40), host=STORAGE, host_fields={"io": NFS},
            hello={"dataset_path": "/share"}),
    ),
    "ST-02": Case(
        ("storage_slow",),
        job(compute(150, data_wait=350), workers=6, queue=0, worker_cpu=15, worker_state="D",
            batch_ms=(3000, 420, 30), host=STORAGE, host_fields={"io": HDD}),
    ),
    "ST-03": Case(
        ("storage_slow",),
        job(compute(120, data_wait=60), workers=8, queue=0, worker_cpu=20, worker_state="D",
            batch_ms=(1440, 260, 20), host_fields={"io": NFS}, hello={"dataset_path": "/share"}),
    ),
    # --- oversubscription
    "LO-02": Case(
        ("loader_oversub",),
        job(compute(40, data_wait=160), workers=8, queue=0, cores=24, worker_cpu=140, threads=26,
            batch_ms=(1600, 2200, 20), worker_state="R",
            host={"cpu_percent": 95.0, "cpu_iowait_percent": 0.0}),
        never=("num_workers up",),
    ),
    "LO-05": Case(
        ("loader_oversub",),
        job(compute(30, data_wait=70), workers=4, queue=0, cores=8, worker_cpu=150, threads=10,
            batch_ms=(400, 580, 5), worker_state="R",
            host={"cpu_percent": 97.0, "cpu_iowait_percent": 0.0}),
    ),
    "LO-06": Case(
        ("loader_oversub",),
        job(compute(12, data_wait=20), workers=8, queue=0, cores=8, worker_cpu=88, threads=9,
            batch_ms=(255, 220, 5), worker_state="R", steps=200,
            host={"cpu_percent": 99.0, "cpu_iowait_percent": 0.0}),
    ),
    "LO-07": Case(
        (),
        job(compute(198, data_wait=2), workers=12, queue=20, cores=16, worker_cpu=110, threads=18,
            batch_ms=(900, 1100, 10), worker_state="R",
            host={"cpu_percent": 90.0, "cpu_iowait_percent": 0.0}),
    ),
    # --- new epochs
    "WR-01": Case(
        ("worker_restart",),
        job({**compute(105), "data_wait": epochs(31, 160, 1000, 1.0)}, steps=160,
            loader={"persistent_workers": False}, step={"tags": firsts(31, 160)},
            batch_ms=(200, 180, 5)),
    ),
    "WR-02": Case(
        ("worker_restart",),
        job({**compute(100), "data_wait": epochs(40, 170, 4200, 1.0)}, steps=170,
            loader={"persistent_workers": False}, step={"tags": firsts(40, 170)},
            batch_ms=(200, 150, 5)),
    ),
    "WR-04": Case(
        ("worker_restart",),
        job({**compute(33), "data_wait": epochs(25, 110, 27_490, 2.1)}, steps=110,
            loader={"persistent_workers": False}, step={"tags": firsts(25, 110)},
            batch_ms=(120, 100, 5)),
    ),
    # --- bursts
    "PS-19": Case(
        (),
        job({**compute(420), "data_wait": [400.0 if n % 8 == 0 else 0.5 for n in range(160)]},
            workers=8, queue=4, steps=160),
    ),
    # --- collating and handing over
    "IC-01": Case(
        ("collate_ipc",),
        job(compute(50, data_wait=50), workers=4, queue=0, worker_cpu=15, main_cpu=100,
            batch_ms=(90, 60, 10), worker_state="S"),
        never=("num_workers",),
    ),
    "IC-03": Case(
        ("collate_ipc",),
        job(compute(160, data_wait=1400), workers=4, queue=0, worker_cpu=4, main_cpu=100,
            batch_ms=(250, 240, 5), worker_state="S", steps=40),
    ),
    # --- checkpoints and validation
    "PS-02": Case(
        ("stall_checkpoint",),
        job({**compute(480), "forward": [4700 if n and n % 10 == 0 else 150 for n in range(90)]},
            steps=90, spans=[(n, "checkpoint", 30.0) for n in range(10, 90, 10)]),
    ),
    "PS-03": Case((), job(compute(300), steps=90, spans=[(60, "checkpoint", 360_000.0 / 20)])),
    "PS-04": Case(
        (),
        job(compute(100), steps=1200,
            spans=[(n, "checkpoint", 210.0) for n in (100, 620, 1140)]),
    ),
    "PS-06": Case(
        ("stall_validation",),
        job(compute(100), steps=100, spans=[(n, "eval", 40_000.0) for n in (20, 40, 60, 80)]),
    ),
    "PS-07": Case((), job(compute(680), steps=60, spans=[(50, "eval", 17_330.0)])),
    # --- logging
    "PS-10": Case(
        ("stall_log_sync",), job(compute(40, other=20.0), ranks=2), (0, 1)
    ),
    "PS-11": Case(("stall_log_sync",), job(compute(300, other=500.0), ranks=4)),
    "PS-12": Case(("stall_log_sync", "tool_overhead"), job(compute(100, other=26.0))),
    # --- communication
    "CM-01": Case(
        ("comm_bound",), job(compute(100), ranks=16, nodes=2, transfer_ms=700.0, steps=40)
    ),
    "CM-03": Case(("comm_bound",), job(compute(200), ranks=6, nodes=2, transfer_ms=380.0)),
    "CM-11": Case(("comm_bound",), job(compute(150), ranks=2, transfer_ms=60.0), (0, 1)),
    "SG-01": Case(
        ("straggler",),
        job([compute(1112 if r == 17 else 1051) for r in range(48)], ranks=48, nodes=6,
            transfer_ms=4.0, scatter=0.002, steps=40),
        (17,),
    ),
    "SG-02": Case(
        ("straggler",),
        job([{**compute(150), "backward": 292.0 if r == 1 else 92.0} for r in range(4)], ranks=4),
        (1,),
    ),
    "SG-03": Case(
        ("straggler", "loader_few_workers"),
        job([{**compute(100), "data_wait": 201.6 if r == 1 else 1.4} for r in range(2)], ranks=2,
            queue=3),
        (1,),
    ),
    # --- hangs
    "HG-03": Case(
        ("hang",),
        job(compute(100), ranks=4, steps=60,
            more=stands(
                4, 7.0,
                {0: {"phase": "other", "step": 60}, **{r: {"step": 61} for r in (1, 2, 3)}},
            )),
        (0,),
        never=("network",),
    ),
    "HG-04": Case(
        ("hang",),
        job(compute(100), ranks=2, steps=60,
            more=stands(2, 7.0, {0: {"phase": "forward"}, 1: {"phase": "comm"}})),
        (0,),
    ),
    "HG-05": Case(
        ("hang",), job(compute(100), ranks=4, steps=60, more=stands(4, 7.0, {})), (0, 1, 2, 3)
    ),
    "HG-06": Case(
        (),
        job(compute(100), ranks=2, steps=60,
            more=stands(2, 7.0, {0: {"status": "eval", "phase": ""}})),
    ),
    # --- memory
    "GL-02": Case(
        ("gpu_leak",),
        job(compute(80), steps=400, hello={"device": "cuda"},
            step={"memory_bytes": [3_000_000_000 + n * 9_000_000 for n in range(400)]}),
    ),
    "GL-04": Case(
        ("gpu_leak", "cpu_leak"),
        job(compute(80), steps=400,
            step={"memory_bytes": [3_000_000_000 + n * 12_000_000 for n in range(400)]}),
        never=("num_workers",),
    ),
    "GL-05": Case(
        ("gpu_leak", "cpu_leak"),
        job(compute(80), steps=400,
            step={"memory_bytes": [3_000_000_000 + n * 1_572_864 for n in range(400)]}),
    ),
    # --- the host
    "CQ-01": Case(
        ("cpu_quota",),
        job(compute(200), cores=12, main_cpu=390,
            limits={"cpu_quota_cores": 4.0, "cpu_throttled_percent": 90.0,
                    "cpu_throttled_ms_per_s": 6000.0}),
    ),
    "CQ-03": Case(
        ("cpu_quota", "loader_oversub"),
        job(compute(200), cores=16, main_cpu=195,
            limits={"cpu_quota_cores": 2.0, "cpu_throttled_percent": 97.0,
                    "cpu_throttled_ms_per_s": 9000.0}),
    ),
    "CA-01": Case(
        ("cpu_affinity",),
        job(compute(60, data_wait=140), workers=8, queue=0, cores=8, worker_cpu=8, main_cpu=36,
            worker_state="R", batch_ms=(1500, 190, 10), host_fields=pinned(1, 8),
            host={"cpu_percent": 14.0, "cpu_iowait_percent": 0.0}, limits={"affinity_cores": 1.0},
            hello={"cores": 1}),
        never=("num_workers",),
    ),
    "CA-02": Case(
        ("cpu_affinity",),
        job(compute(60, data_wait=140), workers=8, queue=0, cores=8, worker_cpu=20, main_cpu=38,
            worker_state="R", batch_ms=(1500, 380, 10), host_fields=pinned(2, 8),
            host={"cpu_percent": 27.0, "cpu_iowait_percent": 0.0}, limits={"affinity_cores": 2.0},
            hello={"cores": 2}),
    ),
}  # fmt: skip

NOT_TESTABLE: dict[str, str] = {
    "LW-05": "says neither waits nor CPU: only that data time is most of it and unstable",
    "CD-04": "a regression between releases; one run alone shows num_workers=0 and a slow item",
    "CD-05": "unconfirmed where the time goes; nothing says that it is in the data wait",
    "CD-06": "compares codecs, not steps",
    "ST-05": "the disk's numbers, which separate storage from a late rank, are not given",
    "LO-04": "the share of data wait is not given; the whole gain is 8 % of an iteration",
    "LO-08": "microsecond steps; neither waits nor the workers' time are given",
    "IC-04": "rates by number of GPUs only",
    "PS-09": "a gain of 6-10 % from a synchronization inside the forward, which no phase shows",
    "CM-04": "epoch times by number of nodes only: the split of a step is not given",
    "CM-05": "rates by number of nodes only",
    "SG-05": "the cause is open",
    "HG-07": "a job that never made a step: the rule abstains by design",
    "GL-06": "peaks of evaluation, which records of steps do not carry",
}
