"""Immutable pictures of what is known: what diagnosis, screens and JSON read.

Views are snapshots. They may be kept, compared and passed between threads; nothing in them
changes. Means are over the steady steps of the window (means add up, medians do not). A value
that is not known is None, and the reason stands beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from gpuwatch.schema import (
    Bye,
    GpuSample,
    Hello,
    HostSample,
    Ledger,
    Logged,
    ProcessSample,
    RankState,
    Reply,
    StepRecord,
)
from gpuwatch.store.batches import WorkerBatch
from gpuwatch.store.history import Past, ProcessMeans

__all__ = [
    "LATER",
    "Event",
    "Later",
    "NodeView",
    "RankView",
    "Rollup",
    "RunView",
    "View",
    "bare_uuid",
    "framed",
    "same_device",
    "sketch",
]


@dataclass(frozen=True, slots=True)
class Rollup:
    """The steps of one wall-clock second of one rank: minimum, median and maximum in ms."""

    second_s: int
    count: int
    min_ms: float
    median_ms: float
    max_ms: float
    data_wait_ms: float | None


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank.

    `state` is starting, training, eval, checkpoint, compile, hung, silent, gone or ended, and
    `state_reason` a clause for the last three. `age_s` is the age of its newest frame by the
    observer's clock. `window` holds its last steady steps, oldest first; `step_ms`, `own_ms`,
    `phases_ms` are means over them. An n/a phase is None in `phases_ms` with its reason in
    `phases_na`. `own_ms` is the step without exposed communication. `process` and `workers` are
    the sampler's latest word. `lost` counts frames that never came, `dropped` records that the
    training process itself threw away.

    `batch_wall_ms`, `batch_cpu_ms` and `collate_ms` (a part of the wall) are what a batch of the
    loader that trains costs in its worker, means over about ten seconds by the workers' own
    clocks; None with the reason in `batch_na`. `worker_batches` are the same by worker.

    `clock` is the one that `step_ms` and everything derived from steps is by, host or device; on
    a GPU the host's says where the host waited, not what the device did. `device_stall_ms` is how
    long the device had nothing to do between two steps, mean over the window, None where that is
    not known; `device_dropped` counts steps whose device times were not taken.

    `bye` are its last words, None while it lives and if it died without; `ended_s` is when it
    ended, to a tenth of a second where it died without a word.

    `commands` is what became of the last 64 commands, each status by itself, oldest first. Their
    times and those of steps and spans are by the rank's own wall clock, which is `ahead_s` seconds
    ahead of the observer's; `ended_s` and the seconds of `timeline` are by the observer's.

    `told` is what the rank said of itself last, `past` reaches back beyond the window.
    `process_means` and `worker_means` are the sampler's readings over about six seconds.

    Some of it is made when it is asked for, of what was known when the picture was taken: of a
    thousand ranks few are asked.
    """

    run: str
    rank: int
    node: str
    incarnation: str
    restarts: int
    state: str
    state_reason: str
    age_s: float
    phase: str
    phase_age_s: float
    steps: int
    clock: str
    window: Sequence[StepRecord]
    last: StepRecord | None
    step_ms: float | None
    step_p50_ms: float | None
    step_p95_ms: float | None
    own_ms: float | None
    phases_ms: Mapping[str, float | None]
    phases_na: Mapping[str, str]
    data_wait_ratio: float | None
    samples_per_s: float | None
    queue_depth: float | None
    queue_capacity: int | None
    ledger: Ledger
    lost: int
    dropped: int
    loss: float | None
    epoch: float | None
    total_steps: int | None
    hello: Hello | None
    process: ProcessSample | None
    workers: tuple[ProcessSample, ...]
    timeline: Sequence[Rollup]
    notices: tuple[str, ...]
    replies: tuple[Reply, ...]
    simulated: bool
    batch_wall_ms: float | None = None
    batch_cpu_ms: float | None = None
    collate_ms: float | None = None
    batch_na: str = ""
    device_stall_ms: float | None = None
    device_dropped: int = 0
    past: Past = field(default_factory=Past)
    told: RankState = field(default_factory=RankState)
    process_means: ProcessMeans | None = None
    worker_means: tuple[ProcessMeans, ...] = ()
    worker_batches: tuple[WorkerBatch, ...] = ()
    bye: Bye | None = None
    ended_s: float | None = None
    commands: tuple[Logged, ...] = ()
    ahead_s: int = 0
    _later: "Later | None" = field(default=None, init=False, repr=False, compare=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Only of what is not set yet, which a picture of a store has; see `sketch`.
            if name not in LATER:
                raise AttributeError(name)
            for field_name, value in self._later.made(name).items():
                object.__setattr__(self, field_name, value)
            return object.__getattribute__(self, name)

    @property
    def pid(self) -> int | None:
        """Process id on its node, None before the first hello."""
        return None if self.hello is None else self.hello.pid


class Later(Protocol):
    """Makes what a picture of a rank does not hold yet."""

    def made(self, name: str) -> Mapping[str, object]:
        """Return a field of `LATER` by name, and whichever others are made with it."""


LATER = frozenset(
    {
        *("batch_wall_ms", "batch_cpu_ms", "collate_ms", "batch_na", "worker_batches"),
        *("timeline", "process_means", "worker_means"),
    }
)
"""What is made when it is asked for."""

_Sketch: Any = type("_Sketch", (), {"__slots__": RankView.__slots__, "__doc__": "Not frozen yet."})


def sketch() -> Any:
    """Return a picture of a rank that is to be filled in, but for what its `_later` makes.

    `framed` makes it a `RankView`. A frozen dataclass sets each of its fifty fields by a call,
    which at a thousand ranks takes a tenth of all that it takes to look at them.
    """
    return _Sketch()


def framed(sketched: Any) -> RankView:
    """Return a picture that is filled in, frozen: the same object, which has the same slots."""
    sketched.__class__ = RankView
    view: RankView = sketched
    return view


@dataclass(frozen=True, slots=True)
class RunView:
    """One training job. `state` is starting, running or ended; `ranks` are in rank order.

    `steps` is the highest step attempt of any rank, `window` the steady steps that all ranks
    share. `age_s` is the age of its newest frame.
    """

    run: str
    name: str
    state: str
    world_size: int
    ranks: tuple[RankView, ...]
    nodes: tuple[str, ...]
    steps: int
    window: int
    step_ms: float | None
    samples_per_s: float | None
    loss: float | None
    epoch: float | None
    total_steps: int | None
    started_s: float
    age_s: float
    lost: int
    dropped: int
    simulated: bool


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node: its host and devices as the sampler saw them `sensors_age_s` ago.

    `gpus_reason` says why the list of devices is empty, `sensors_reason` why sensors are missing.
    `host_means` are the host's readings over about six seconds, by name.
    """

    node: str
    age_s: float
    agent_pid: int
    lost: int
    host: HostSample | None
    gpus: tuple[GpuSample, ...]
    gpus_reason: str
    sensors_age_s: float | None
    sensors_reason: str
    notices: tuple[str, ...]
    host_means: Mapping[str, float] = field(default_factory=dict)


def bare_uuid(uuid: str) -> str:
    """Return a device's uuid without its prefix: torch leaves it out, NVML writes GPU- or MIG-."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def same_device(one: str, other: str) -> bool:
    """Whether two uuids name one device."""
    return bool(one) and bare_uuid(one) == bare_uuid(other)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, for the event log."""

    at_s: float
    text: str
    severity: str = "note"
    run: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """Everything at one moment. `version` rises whenever anything in it changed.

    `link` is connecting, live, lost or replay; `message` one sentence for the person when it is
    not live. Runs are newest first.
    """

    version: int
    at_s: float
    runs: tuple[RunView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    events: tuple[Event, ...] = ()
    link: str = "connecting"
    message: str = ""
    refused: int = 0
    lost: int = 0
    notices: tuple[str, ...] = field(default=())

    def run(self, run: str) -> RunView | None:
        """Return the run of that id, or None."""
        return next((r for r in self.runs if r.run == run), None)

    def node(self, node: str) -> NodeView | None:
        """Return the node of that name, or None."""
        return next((n for n in self.nodes if n.node == node), None)
