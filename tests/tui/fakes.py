"""A session without a training behind it, and builders of everything a view holds.

Every number is made from the arguments, so that a test can say what must be on the screen.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from gpuwatch.diagnosis.types import Abstain, Evidence, Finding, Hint, RunDiagnosis
from gpuwatch.errors import TargetError
from gpuwatch.schema import (
    GpuSample,
    Hello,
    HostSample,
    Knob,
    Ledger,
    Loader,
    PhasesNs,
    ProcessSample,
    Reading,
    Reply,
    StepRecord,
)
from gpuwatch.store.views import Event, NodeView, RankView, Rollup, RunView, View

NOW_S = 1_790_000_000.0
"""The wall clock of every built view."""

PHASES_MS: Mapping[str, float | None] = {
    "data_wait": 146.2,
    "h2d": 0.4,
    "forward": 28.1,
    "backward": 44.0,
    "comm": 8.2,
    "optimizer": 3.1,
    "other": 1.4,
}

NO_COMM = "one process: no communication"


def ok(value: float, unit: str = "", source: str = "fake") -> Reading:
    return Reading(value, unit, source, 0.2, "ok")


def unknown(unit: str = "", reason: str = "not measured here") -> Reading:
    return Reading(None, unit, "fake", 0.0, "na", reason)


def process_sample(pid: int, rank_pid: int, role: str = "rank", cpu: float = 99.0) -> ProcessSample:
    readings = {"cpu_percent": ok(cpu, "%"), "rss": ok(1.2e9, "B"), "threads": ok(9)}
    return ProcessSample(pid, rank_pid, "worker" if role == "worker" else "rank", "R", readings)


def rank_view(
    rank: int = 0,
    *,
    run: str = "r1",
    node: str = "node0",
    world: int = 2,
    phases: Mapping[str, float | None] | None = None,
    state: str = "training",
    workers: int = 1,
    steps: int = 1240,
    seconds: int = 120,
    **more: Any,
) -> RankView:
    """A rank in mid-training; `more` are fields of RankView. Own time is step - comm."""
    phases = dict(PHASES_MS if phases is None else phases)
    known = [value for value in phases.values() if value is not None]
    step = sum(known) if known else None
    comm = phases.get("comm")
    pid = 4000 + rank
    hello = Hello(
        host=node,
        pid=pid,
        pid_started_s=NOW_S - 900,
        world_size=world,
        local_rank=rank % 8,
        run_name="resnet50-ddp",
        started_s=NOW_S - 890,
        loaders=(Loader("train", num_workers=workers, prefetch_factor=2, batch_size=64),),
        device_uuid=f"GPU-{node}-{rank % 8}",
    )
    timeline = tuple(
        Rollup(
            int(NOW_S) - seconds + s,
            4,
            (step or 0.0) * 0.9,
            (step or 0.0) * (0.98 + 0.04 * ((s * 7) % 10) / 10) * (1.0 if s > 40 else 0.75),
            (step or 0.0) * 1.2,
            phases.get("data_wait"),
        )
        for s in range(seconds if step else 0)
    )
    fields: dict[str, Any] = {
        "run": run,
        "rank": rank,
        "node": node,
        "incarnation": "a",
        "restarts": 0,
        "state": state,
        "state_reason": "",
        "age_s": 0.1,
        "phase": "backward",
        "phase_age_s": 0.02,
        "steps": steps,
        "clock": "host",
        "window": (),
        "last": None,
        "step_ms": step,
        "step_p50_ms": step,
        "step_p95_ms": None if step is None else step * 1.13,
        "own_ms": None if step is None else step - (comm or 0.0),
        "phases_ms": phases,
        "phases_na": {} if comm is not None else {"comm": NO_COMM},
        "data_wait_ratio": (phases.get("data_wait") or 0.0) / step if step else None,
        "samples_per_s": 64_000.0 / step if step else None,
        "queue_depth": 0.1,
        "queue_capacity": 2,
        "ledger": Ledger(
            steps=steps,
            training_ns=330 * 10**9,
            data_wait_ns=500 * 10**9,
            comm_ns=30 * 10**9,
            wall_ns=890 * 10**9,
        ),
        "lost": 0,
        "dropped": 0,
        "loss": 1.284,
        "epoch": 3.0,
        "total_steps": 9000,
        "hello": hello,
        "process": process_sample(pid, pid),
        "workers": tuple(
            process_sample(pid * 10 + w, pid, "worker", 100.0 - w) for w in range(workers)
        ),
        "timeline": timeline,
        "notices": (),
        "replies": (),
        "simulated": False,
    }
    return RankView(**{**fields, **more})


def records(
    phases: Mapping[str, float | None] | None = None, *, number: int = 64, first: int = 1176
) -> tuple[StepRecord, ...]:
    """Steps that scatter around these phases by a few per cent; every eighth waits longer."""
    split = dict(PHASES_MS if phases is None else phases)
    found = []
    for i in range(number):
        part = {
            name: None
            if value is None
            else round(value * 1e6 * (1 + ((i * 7) % 5 - 2) / 100 + (0.4 if i % 8 == 5 else 0)))
            for name, value in split.items()
        }
        step = sum(value for value in part.values() if value is not None)
        found.append(
            StepRecord(
                first + i,
                NOW_S - (number - i) * step / 1e9,
                step,
                PhasesNs(**part),
                queue_depth=0.0 if i % 16 else 1.0,
                queue_capacity=2,
                samples=64,
                loader="train",
            )
        )
    return tuple(found)


def gpu_readings(**more: Reading) -> dict[str, Reading]:
    """Everything that a data-centre device tells, except what needs rights that are not there."""
    return {
        "gpu_util": ok(58.0, "%", "NVML"),
        "sm_active": ok(41.0, "%", "GPM"),
        "sm_occupancy": ok(33.0, "%", "GPM"),
        "tensor_active": unknown("%", "GPM needs a Hopper or newer; DCGM can give it"),
        "dram_active": ok(22.0, "%", "GPM"),
        "memory_used": ok(61.2e9, "B", "NVML"),
        "memory_total": ok(80e9, "B", "NVML"),
        "power": ok(412.0, "W", "NVML"),
        "power_limit": ok(700.0, "W", "NVML"),
        "temperature": ok(56.0, "°C", "NVML"),
        "sm_clock": ok(1755.0, "MHz", "NVML"),
        "sm_clock_max": ok(1980.0, "MHz", "NVML"),
        "fan": unknown("%", "not supported by this GPU or driver (NVML 3)"),
        "pcie_rx": ok(3.1e9, "B/s", "GPM"),
        "pcie_tx": ok(0.4e9, "B/s", "GPM"),
        "nvlink_rx": ok(41e9, "B/s", "GPM"),
        "nvlink_tx": Reading(40e9, "B/s", "GPM", 12.0, "stale", "the sampler is late"),
        **more,
    }


def run_view(ranks: Sequence[RankView], *, run: str = "r1", **more: Any) -> RunView:
    """A run of these ranks; `more` are fields of RunView."""
    steps = [rank.step_ms for rank in ranks if rank.step_ms is not None]
    rates = [rank.samples_per_s for rank in ranks if rank.samples_per_s is not None]
    fields: dict[str, Any] = {
        "run": run,
        "name": "resnet50-ddp",
        "state": "running",
        "world_size": max(1, len(ranks)),
        "ranks": tuple(ranks),
        "nodes": tuple(dict.fromkeys(rank.node for rank in ranks)),
        "steps": max((rank.steps for rank in ranks), default=0),
        "window": 64 if steps else 0,
        "step_ms": sum(steps) / len(steps) if steps else None,
        "samples_per_s": sum(rates) if rates else None,
        "loss": ranks[0].loss if ranks else None,
        "epoch": 3.0,
        "total_steps": 9000,
        "started_s": NOW_S - 2467,
        "age_s": 0.1,
        "lost": 0,
        "dropped": 0,
        "simulated": False,
    }
    return RunView(**{**fields, **more})


def gpu_sample(index: int, node: str = "node0", util: float | None = 71.0) -> GpuSample:
    return GpuSample(
        index,
        f"GPU-{node}-{index}",
        "NVIDIA H100 80GB HBM3",
        {
            "gpu_util": unknown("%") if util is None else ok(util, "%"),
            "sm_active": ok(52.0, "%") if util is not None else unknown("%"),
            "memory_used": ok(61.2e9, "B"),
            "memory_total": ok(80e9, "B"),
            "power": ok(412.0, "W"),
            "temperature": ok(56.0, "C"),
        },
        driver="570.86.15",
    )


def node_view(node: str = "node0", *, gpus: int = 0, **more: Any) -> NodeView:
    """A node with so many devices; `more` are fields of NodeView."""
    fields: dict[str, Any] = {
        "node": node,
        "age_s": 0.1,
        "agent_pid": 77,
        "lost": 0,
        "host": HostSample(
            2,
            {
                "cpu_percent": ok(96.0, "%"),
                "memory_used": ok(3.1e9, "B"),
                "memory_total": ok(7.8e9, "B"),
                "load1": ok(4.1),
            },
        ),
        "gpus": tuple(gpu_sample(i, node) for i in range(gpus)),
        "gpus_reason": "" if gpus else "no NVIDIA driver on this machine",
        "sensors_age_s": 0.4,
        "sensors_reason": "",
        "notices": (),
    }
    return NodeView(**{**fields, **more})


def view(
    runs: Sequence[RunView] = (), nodes: Sequence[NodeView] | None = None, **more: Any
) -> View:
    """A live view; `more` are fields of View."""
    fields: dict[str, Any] = {
        "version": 1,
        "at_s": NOW_S,
        "runs": tuple(runs),
        "nodes": (node_view(),) if nodes is None else tuple(nodes),
        "events": (
            Event(NOW_S - 31, "run resnet50-ddp started, 2 ranks"),
            Event(NOW_S - 12, "checkpoint 4.1 s (rank 0), kept out of step statistics"),
            Event(NOW_S - 4, "rank 1 silent (no word from it)", "warning"),
        ),
        "link": "live",
    }
    return View(**{**fields, **more})


def few_workers(**more: Any) -> Finding:
    """The loader finding of a real 2-rank CPU run."""
    fields: dict[str, Any] = {
        "kind": "loader_few_workers",
        "severity": "critical",
        "ranks": (0, 1),
        "nodes": ("node0",),
        "cost_ms": 83.0,
        "share": 0.36,
        "confidence": "high",
        "summary": "too few loader workers",
        "evidence": (
            Evidence("data wait", 146.2, "ms", "85.2 ms of compute", "host clock"),
            Evidence("queue empty", 62, "steps", "of the last 64", "queue depth"),
            Evidence("batch cost, wall", 205.0, "ms", "a worker; 31 ms of it CPU", "workers' map"),
            Evidence("worker cpu", 15.0, "%", "busy; it waits for storage", "sampler"),
        ),
        "ruled_out": (
            "storage_slow: 11 MB/s read, the disk is 2% busy",
            "cpu_quota: none set, 0 ms throttled",
            "worker_restart: the same worker pids for 1,240 steps",
        ),
        "hints": (
            Hint("raise num_workers", "num_workers", 1, 7, (148.0, 160.0)),
            Hint("keep workers between epochs", "persistent_workers", False, True, (226.0, 231.0)),
        ),
        "id": "F1",
        "run": "r1",
        "opened_step": 1180,
        "opened_s": NOW_S - 79,
    }
    return Finding(**{**fields, **more})


def peer_wait(**more: Any) -> Finding:
    fields: dict[str, Any] = {
        "kind": "comm_bound",
        "severity": "note",
        "ranks": (0, 1),
        "nodes": ("node0",),
        "cost_ms": None,
        "share": None,
        "confidence": "high",
        "summary": "comm is waiting for the slower rank, not bandwidth",
        "evidence": (Evidence("peer wait", 6.1, "ms", "transfer 2.1 ms", "host clock"),),
        "follows": "F1",
        "id": "F2",
        "run": "r1",
        "opened_step": 1190,
        "opened_s": NOW_S - 75,
    }
    return Finding(**{**fields, **more})


def two_ranks() -> View:
    """The realistic picture: 2 ranks on CPU, one loader worker each."""
    slower = {**PHASES_MS, "data_wait": 149.9, "comm": 3.0, "forward": 29.6}
    return view([run_view([rank_view(0), rank_view(1, phases=slower)])])


@functools.cache  # nothing in a view changes, so all tests may have the same one
def cluster(nodes: int = 4, per_node: int = 8, *, slow_node: int | None = 3, seed: int = 0) -> View:
    """Ranks on several nodes with GPUs; those of one node are slow in their loader."""
    ranks = []
    world = nodes * per_node
    for rank in range(world):
        node = rank // per_node
        jitter = ((rank * 37 + seed * 11) % 17) / 17.0
        slow = node == slow_node
        wait = (86.0 if slow else 30.0) + 5.0 * jitter
        phases: dict[str, float | None] = {
            "data_wait": wait,
            "h2d": 3.1,
            "forward": 38.0 + 0.3 * jitter,
            "backward": 72.4 + 0.5 * jitter,
            "comm": (112.0 if not slow else 56.0) - 5.0 * jitter - (32 if slow else 26),
            "optimizer": 6.0,
            "other": 0.4,
        }
        ranks.append(
            rank_view(
                rank,
                node=f"node{node}",
                world=world,
                phases=phases,
                workers=0,
                seconds=60,
                clock="device",
                steps=12_480 + seed,
                total_steps=90_000,
            )
        )
    run = run_view(ranks, total_steps=90_000)
    return view(
        [run],
        [node_view(f"node{n}", gpus=min(8, per_node)) for n in range(nodes)],
        version=seed + 1,
    )


def no_diagnosis(_: View) -> Sequence[RunDiagnosis]:
    return ()


def found(
    *findings: Finding, abstained: Sequence[Abstain] = ()
) -> Callable[[View], Sequence[RunDiagnosis]]:
    """A diagnosis that always gives these findings, for every run."""

    def diagnose(picture: View) -> Sequence[RunDiagnosis]:
        return [RunDiagnosis(run.run, tuple(findings), tuple(abstained)) for run in picture.runs]

    return diagnose


class FakeSession:
    """A Session that shows what it is given; `show` replaces the picture."""

    def __init__(self, picture: View) -> None:
        self._view = picture
        self._version = picture.version
        self.views = 0

    @property
    def version(self) -> int:
        return self._version

    def view(self) -> View:
        self.views += 1
        return self._view

    def show(self, picture: View) -> None:
        self._version += 1
        self._view = replace(picture, version=self._version)

    def send(
        self,
        verb: str,
        run: str,
        rank: int | None = None,
        args: dict[str, str | int | float | bool] | None = None,
    ) -> str:
        raise TargetError("a fake session has no training behind it")

    def close(self) -> None:
        return


KNOBS = (
    Knob("num_workers", 1, 0.0, 16.0, (), "from the next batch on"),
    Knob("lr", 0.1, 0.0, None, (), "at the next step"),
    Knob("schedule", "cosine", choices=("cosine", "linear"), effective="at the next epoch"),
)


def with_hello(picture: View, ranks: Sequence[int] | None = None, **more: Any) -> View:
    """The picture with fields of the hello of these ranks (all) replaced."""
    run = picture.runs[0]
    changed = []
    for rank in run.ranks:
        assert rank.hello is not None
        wanted = more if ranks is None or rank.rank in ranks else {}
        changed.append(replace(rank, hello=msgspec.structs.replace(rank.hello, **wanted)))
    return replace(picture, runs=(replace(run, ranks=tuple(changed)), *picture.runs[1:]))


class FakeTraining(FakeSession):
    """A session with ranks that answer what a test says; `sent` are the commands in order."""

    def __init__(self, picture: View) -> None:
        super().__init__(picture)
        self.sent: list[tuple[str, int | None, dict[str, Any]]] = []

    def send(
        self,
        verb: str,
        run: str,
        rank: int | None = None,
        args: dict[str, str | int | float | bool] | None = None,
    ) -> str:
        assert run == self._view.runs[0].run
        self.sent.append((verb, rank, dict(args or {})))
        return f"id{len(self.sent)}"

    def answer(
        self,
        status: str,
        message: str = "",
        data: object = "",
        *,
        command: int | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Let ranks (those that it went to) answer a command, the last or by its number from 1."""
        number = len(self.sent) if command is None else command
        asked = self.sent[number - 1][1]
        text = data if isinstance(data, str) else msgspec.json.encode(data).decode()
        reply = Reply(f"id{number}", status, message, text)  # type: ignore[arg-type]
        told = ranks if ranks is not None else None if asked is None else (asked,)
        self.change(told, lambda rank: {"replies": (*rank.replies, reply)})

    def change(
        self, ranks: Sequence[int] | None, fields: Callable[[RankView], Mapping[str, Any]]
    ) -> None:
        """Show the picture with fields of these ranks (all) replaced."""
        run = self._view.runs[0]
        changed = tuple(
            replace(rank, **fields(rank)) if ranks is None or rank.rank in ranks else rank
            for rank in run.ranks
        )
        self.show(replace(self._view, runs=(replace(run, ranks=changed), *self._view.runs[1:])))


class MovingSession(FakeSession):
    """Goes through prepared pictures, one a `period_s`, for ever."""

    def __init__(self, pictures: Sequence[View], period_s: float = 0.25) -> None:
        super().__init__(pictures[0])
        self._pictures = list(pictures)
        self._period_s = period_s
        self._start = time.monotonic()

    @property
    def version(self) -> int:
        return int((time.monotonic() - self._start) / self._period_s) + 1

    def view(self) -> View:
        version = self.version
        picture = self._pictures[version % len(self._pictures)]
        shift = time.monotonic() - self._start
        return replace(picture, version=version, at_s=picture.at_s + shift)


@functools.cache
def heavy() -> View:
    """Return 1,024 ranks on 128 nodes, made for the first who asks."""
    return cluster(128, 8, slow_node=77)
