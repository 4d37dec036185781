"""What travels and what is stored.

Every type here is a msgspec Struct encoded as a MessagePack array. The rules that keep old and
new versions able to read each other:

* a new field goes at the end of its Struct and has a default;
* a field is never removed, reordered or given another type;
* `WIRE_VERSION` is the major version. It changes only when these rules are broken.

Ranges are part of the types: a damaged frame decodes to plausible garbage more often than it
fails, so each number states what it may be and the decoder refuses the rest. What only holds
between fields (rank < world size, phases within the step) is checked in `gpuwatch.frames`.

Units are in the names: `_ns` are durations on the sender's monotonic clock, `_s` at the end of a
wall-clock name are seconds since the epoch, `age_s` are ages at the moment of sending.
"""

from typing import Annotated, Literal

from msgspec import Meta, Raw, Struct

__all__ = [
    "PHASES",
    "RANK_STATUSES",
    "TAGS",
    "WIRE_VERSION",
    "Bye",
    "Command",
    "Ddp",
    "GpuEvent",
    "GpuProcess",
    "GpuSample",
    "Hello",
    "HostSample",
    "IoSample",
    "Knob",
    "Ledger",
    "Loader",
    "Logged",
    "NodeFrame",
    "PhasesNs",
    "Precision",
    "ProcessSample",
    "RankAge",
    "RankFrame",
    "RankState",
    "Reading",
    "Reply",
    "SensorFrame",
    "Span",
    "StepRecord",
    "Versions",
    "WorkerCost",
]

WIRE_VERSION = 1

PHASES = ("data_wait", "h2d", "forward", "backward", "comm", "optimizer", "other")
"""The exclusive phases of a step, in the order of `PhasesNs`."""

TAGS = ("first_batch", "warmup", "compile", "ddp_first", "skipped")
"""Tags of a step. All but `skipped` keep it out of the steady-state window."""

RANK_STATUSES = ("starting", "training", "eval", "checkpoint", "compile", "hung", "ended")
"""What a rank can say about itself. `silent` and `gone` are the observer's words."""

# A wall-clock second, before 2103; 0 where it is not known.
WallSeconds = Annotated[float, Meta(ge=0.0, le=4.2e9)]
AgeSeconds = Annotated[float, Meta(ge=0.0, le=1e9)]
# 10**15 ns are 11.6 days: longer than any step or span, shorter than what damage produces.
DurationNs = Annotated[int, Meta(ge=0, le=10**15)]
# A ledger runs as long as the job: 10**17 ns are three years.
TotalNs = Annotated[int, Meta(ge=0, le=10**17)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Rank = Annotated[int, Meta(ge=0, lt=2**20)]
Pid = Annotated[int, Meta(ge=0, le=2**31)]
Bytes = Annotated[int, Meta(ge=0, le=2**60)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
# Loss and other values that come from the user's own arithmetic: NaN and infinity are legal news.
UserFloat = float
# What a knob stands at and between: finite, and whole numbers that a float holds exactly.
Setting = Annotated[int, Meta(ge=-(2**53), le=2**53)] | Annotated[float, Meta(ge=-1e18, le=1e18)]
Limit = Annotated[float, Meta(ge=-1e18, le=1e18)]


class _Wire(Struct, array_like=True, frozen=True):
    """Base of everything on the wire: an array, immutable, unknown trailing fields ignored."""


class Versions(_Wire, frozen=True):
    """Versions in the training process; empty where the part is absent."""

    gpuwatch: Name = ""
    python: Name = ""
    torch: Name = ""
    cuda: Name = ""
    nccl: Name = ""


class Loader(_Wire, frozen=True):
    """The arguments of one DataLoader as the training process built it, and its batches.

    `batch_bytes` are the tensors of the batch that was looked at last, `first_batch_ns` the wait
    for the first batch of the newest iterator, `start_method` how its workers were started.
    """

    key: Name
    num_workers: Annotated[int, Meta(ge=0, le=65536)] = 0
    prefetch_factor: Annotated[int, Meta(ge=0, le=2**20)] | None = None
    pin_memory: bool = False
    persistent_workers: bool = False
    batch_size: Count | None = None
    drop_last: bool = False
    dataset: Name = ""
    length: Count | None = None
    worker_pids: Annotated[tuple[Pid, ...], Meta(max_length=4096)] = ()
    batch_bytes: Bytes | None = None
    first_batch_ns: DurationNs | None = None
    collate: Name = ""
    start_method: Name = ""


class Ddp(_Wire, frozen=True):
    """DistributedDataParallel as configured. `gradient_bytes` are what one all-reduce moves.

    `bucket_bytes` are the buckets in use, by DDP's own logger; `comm_span_ns` is the time from its
    first all-reduce to its last in one sampled iteration, hidden behind the backward or not.
    """

    bucket_cap_mb: Annotated[float, Meta(ge=0.0, le=1e6)] | None = None
    find_unused_parameters: bool = False
    static_graph: bool = False
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = False
    comm_hook: Name = ""
    parameters: Count | None = None
    gradient_bytes: Bytes | None = None
    buffers: Count | None = None
    backend: Name = ""
    bucket_bytes: Annotated[tuple[Bytes, ...], Meta(max_length=4096)] = ()
    comm_span_ns: DurationNs | None = None


class Precision(_Wire, frozen=True):
    """Precision flags in force; autocast is the dtype of the last forward that was looked at."""

    float32_matmul: Name = ""
    cudnn_tf32: bool | None = None
    autocast: Name = ""
    grad_scaler: bool = False


class Knob(_Wire, frozen=True):
    """A setting that a `set` command can change while the training runs.

    Of a number `low` and `high` are the limits, both allowed, None for none; of a text `choices`
    are all that it can be. `effective` says in words when a change takes effect.
    """

    name: Name
    value: Setting | Name | bool
    low: Limit | None = None
    high: Limit | None = None
    choices: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    effective: Name = ""


class Hello(_Wire, frozen=True):
    """Who a rank is and how it is configured. Sent in the first frame and in every snapshot.

    `parallel` names the ways of parallel training that were seen (ddp, fsdp2, tensor, pipeline,
    local_sgd), `frameworks` the libraries whose loop it is (transformers, lightning, accelerate).
    `knobs` are what a `set` command can change, where `allow_control` says that one may.
    """

    host: Name
    pid: Pid
    pid_started_s: WallSeconds
    world_size: Annotated[int, Meta(ge=1, le=2**20)]
    local_rank: Rank | None = None
    run_name: Name = ""
    run_source: Name = ""
    started_s: WallSeconds = 0.0
    script: Text = ""
    device: Name = "cpu"
    device_name: Name = ""
    device_uuid: Name = ""
    cores: Annotated[int, Meta(ge=0, le=65536)] | None = None
    torch_threads: Annotated[int, Meta(ge=0, le=65536)] | None = None
    versions: Versions = Versions()
    loaders: Annotated[tuple[Loader, ...], Meta(max_length=64)] = ()
    ddp: Ddp | None = None
    precision: Precision = Precision()
    dataset_path: Text = ""
    allow_control: bool = False
    boot_id: Name = ""
    parallel: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    frameworks: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    knobs: Annotated[tuple[Knob, ...], Meta(max_length=64)] = ()


class PhasesNs(_Wire, frozen=True):
    """One step split into exclusive phases, in ns; None is n/a (reason in `RankState.phases_na`).

    The phases that are not None add up to the step exactly.
    """

    data_wait: DurationNs | None = None
    h2d: DurationNs | None = None
    forward: DurationNs | None = None
    backward: DurationNs | None = None
    comm: DurationNs | None = None
    optimizer: DurationNs | None = None
    other: DurationNs | None = None


class StepRecord(_Wire, frozen=True):
    """One optimizer step attempt.

    `clock` says which set of phases decides. `memory_bytes` is allocated device memory, or the
    resident set on CPU. `queue_depth` is the number of batches ready when the step began to wait,
    of `queue_capacity`; `batches` the micro-batches that the step consumed.
    """

    index: Count
    started_s: WallSeconds
    step_ns: DurationNs
    host: PhasesNs
    device: PhasesNs | None = None
    clock: Literal["host", "device"] = "host"
    batches: Count = 1
    samples: Count | None = None
    tokens: Count | None = None
    loss: UserFloat | None = None
    memory_bytes: Bytes | None = None
    queue_depth: Annotated[float, Meta(ge=0.0, le=1e6)] | None = None
    queue_capacity: Annotated[int, Meta(ge=0, le=2**20)] | None = None
    tags: Annotated[tuple[Name, ...], Meta(max_length=8)] = ()
    loader: Name = ""
    device_stall_ns: DurationNs | None = None
    grad_norm: UserFloat | None = None
    learning_rate: UserFloat | None = None
    loss_scale: UserFloat | None = None
    padding_share: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    gc_ns: DurationNs | None = None


class Ledger(_Wire, frozen=True):
    """Running totals of one rank since `watch()`, exclusive, in ns.

    training = steps without their data wait and exposed communication. wall - (all the others) is
    lost: start-up, compile, everything between. Goodput = training / wall.
    """

    steps: Count = 0
    samples: Count = 0
    skipped: Count = 0
    training_ns: TotalNs = 0
    data_wait_ns: TotalNs = 0
    comm_ns: TotalNs = 0
    eval_ns: TotalNs = 0
    checkpoint_ns: TotalNs = 0
    lost_ns: TotalNs = 0
    wall_ns: TotalNs = 0


class Span(_Wire, frozen=True):
    """Named time outside steady training; `step` is the index of the step that follows it."""

    name: Name
    started_s: WallSeconds
    duration_ns: DurationNs
    step: Count = 0


class RankState(_Wire, frozen=True):
    """What the rank is doing at the moment of sending.

    `phase` may be `user` between marks whose phase is settled later. `phase_age_ns` counts from
    the last mark, so that a hang shows where and since when on any observer's clock.
    `recompiles` counts what torch.compile has compiled again, None where it is not in use;
    `flops_per_step` are the model's FLOPs in one step of this rank, `flops_source` where they come
    from, or why they are not known; `device_dropped` counts steps whose device times were not
    taken. `memory_peak_bytes` is the most allocated at once since the user last reset it,
    `memory_retries` how often the allocator had to free its cache to go on.
    """

    status: Name = "starting"
    phase: Name = ""
    phase_age_ns: TotalNs = 0
    step: Count = 0
    phases_na: dict[Name, Name] = {}
    loss: UserFloat | None = None
    epoch: UserFloat | None = None
    total_steps: Count | None = None
    notices: Annotated[tuple[Text, ...], Meta(max_length=16)] = ()
    learning_rate: UserFloat | None = None
    grad_norm: UserFloat | None = None
    loss_scale: UserFloat | None = None
    recompiles: Count | None = None
    gc_pauses: Count = 0
    gc_pause_ns: TotalNs = 0
    flops_per_step: Annotated[float, Meta(ge=0.0, le=1e30)] | None = None
    flops_source: Name = ""
    device_dropped: Count = 0
    memory_peak_bytes: Bytes | None = None
    memory_reserved_bytes: Bytes | None = None
    memory_retries: Count | None = None


class Bye(_Wire, frozen=True):
    """The last words of a rank. `reason` is finished, exception, interrupted or detached.

    Of an exception `stack` has the innermost frames, a line each, `FILE:LINE in NAME`, innermost
    first, and `phase` the phase in which it was raised, empty where that is not known.
    """

    reason: Name
    detail: Text = ""
    stack: Text = ""
    phase: Name = ""


class Command(_Wire, frozen=True):
    """A request to a rank. `id` is the idempotency key; `ttl_s` counts from receipt.

    `args` are checked by the verb's own handler. `rank` None addresses every rank of the run;
    an empty `run` every run of the node.
    """

    version: Annotated[int, Meta(ge=0, le=2**16)]
    id: Name
    verb: Name
    run: Name = ""
    rank: Rank | None = None
    args: Annotated[dict[Name, str | int | float | bool], Meta(max_length=32)] = {}
    ttl_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 10.0


class Reply(_Wire, frozen=True):
    """An answer to a command: `accepted`, then `done` or `error`."""

    id: Name
    status: Literal["accepted", "done", "error"]
    message: Text = ""
    data: Annotated[str, Meta(max_length=262_144)] = ""


class Logged(_Wire, frozen=True):
    """What became of a command, for everyone who watches: each of its statuses once.

    `args` are its arguments in words, `message` is that of the reply. `at_s` is the rank's clock.
    """

    at_s: WallSeconds
    id: Name
    verb: Name
    args: Text
    status: Literal["accepted", "done", "error"]
    message: Text


class WorkerCost(_Wire, frozen=True):
    """What the batches of one loader worker have cost since it started, by its own clocks.

    Totals over `batches`: wall time in the dataset and in collating, CPU time of the worker's
    process meanwhile, and the part of the wall time that was collating. `busy_ns` is how long it
    has been at the batch it makes now, 0 between batches. `age_s` is the age of the reading.
    """

    loader: Name
    pid: Pid
    batches: Count = 0
    wall_ns: TotalNs = 0
    cpu_ns: TotalNs = 0
    collate_ns: TotalNs = 0
    busy_ns: TotalNs = 0
    age_s: AgeSeconds = 0.0


class RankFrame(_Wire, frozen=True):
    """What one rank sends ten times a second; without records it is the heartbeat.

    `seq` counts the frames of one incarnation. A snapshot carries the seq of the last frame that
    was published before it, `snapshot` True, and the rank's last records again. `workers` come
    once a second, newest totals only; in a snapshot those of the last seconds too, oldest first.
    `commands` is what became of commands since the frame before, in a snapshot of the last 64, but
    for snapshots and fetches. What ends later than its request is answered in `replies` here.
    `merged` frames, those of the numbers before `seq`, are in this one: their records, spans,
    worker totals and commands, and nothing of what it replaces. A rank sends none such.
    """

    version: Annotated[int, Meta(ge=0, le=2**16)]
    run: Name
    rank: Rank
    incarnation: Name
    seq: Count
    sent_s: WallSeconds
    dropped: Count
    records: Annotated[tuple[StepRecord, ...], Meta(max_length=4096)] = ()
    spans: Annotated[tuple[Span, ...], Meta(max_length=4096)] = ()
    state: RankState = RankState()
    ledger: Ledger = Ledger()
    hello: Hello | None = None
    replies: Annotated[tuple[Reply, ...], Meta(max_length=64)] = ()
    bye: Bye | None = None
    snapshot: bool = False
    simulated: bool = False
    workers: Annotated[tuple[WorkerCost, ...], Meta(max_length=4096)] = ()
    commands: Annotated[tuple[Logged, ...], Meta(max_length=64)] = ()
    merged: Count = 0


class Reading(_Wire, frozen=True):
    """One sensor value. `state` is ok, na, stale or error; value None needs a `reason`."""

    value: UserFloat | None
    unit: Name = ""
    source: Name = ""
    age_s: AgeSeconds = 0.0
    state: Literal["ok", "na", "stale", "error"] = "ok"
    reason: Name = ""


Readings = Annotated[dict[Name, Reading], Meta(max_length=256)]


class GpuProcess(_Wire, frozen=True):
    """One process that holds memory of a device, whoever's it is.

    `kind` is compute, graphics or both; `name` what to show for it; `visible` False means that
    this machine's (or container's) process table has no such process: it ended or is elsewhere,
    and its memory is real all the same. `memory_bytes` None: not told by the driver.
    """

    pid: Pid
    memory_bytes: Bytes | None = None
    kind: Name = ""
    name: Name = ""
    user: Name = ""
    visible: bool = True


class GpuEvent(_Wire, frozen=True):
    """A device's error report: for NVIDIA an Xid. `hardware` False: a program's own fault."""

    code: Count
    text: Name
    time_s: WallSeconds
    hardware: bool = True


class GpuSample(_Wire, frozen=True):
    """One device of the node; `uuid` joins it with the rank that computes on it.

    `reasons` are the active reasons for its clocks, `lost` why nothing can be read from it any
    more (its readings are then the last ones), `parent` the uuid of the device that this one is
    a slice of and `slice` which one; `processes_reason` says why there is no list of processes.
    `driver` is the version of its driver, empty with why in `driver_reason`.
    """

    index: Annotated[int, Meta(ge=0, le=4096)]
    uuid: Name
    name: Name = ""
    readings: Readings = {}
    processes: Annotated[tuple[GpuProcess, ...], Meta(max_length=1024)] = ()
    processes_reason: Name = ""
    reasons: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    events: Annotated[tuple[GpuEvent, ...], Meta(max_length=64)] = ()
    lost: Text = ""
    parent: Name = ""
    slice: Name = ""
    driver: Name = ""
    driver_reason: Name = ""


class IoSample(_Wire, frozen=True):
    """One disk, network interface or dataset of the node.

    `kind` is disk, network or dataset; a dataset is at `path`, on a file system of type
    `filesystem`, and `name` is the disk or the server below it, empty where there is none.
    """

    name: Name
    kind: Name
    path: Text = ""
    filesystem: Name = ""
    readings: Readings = {}


class HostSample(_Wire, frozen=True):
    """The node as a whole: CPU, memory, load, and how busy each core was (%)."""

    cores: Annotated[int, Meta(ge=0, le=65536)] = 0
    readings: Readings = {}
    core_percents: Annotated[
        tuple[Annotated[float, Meta(ge=0.0, le=100.0)], ...], Meta(max_length=65536)
    ] = ()
    io: Annotated[tuple[IoSample, ...], Meta(max_length=256)] = ()


class ProcessSample(_Wire, frozen=True):
    """One watched process: a rank (`role` rank) or one of its children (`role` worker).

    `rank_pid` is the rank's pid; `status` the kernel's letter (R, S, D, T, Z).
    """

    pid: Pid
    rank_pid: Pid
    role: Literal["rank", "worker"]
    status: Name = ""
    readings: Readings = {}


class SensorFrame(_Wire, frozen=True):
    """One tick of the sampler. `gpus_reason` says why the list of GPUs is empty."""

    version: Annotated[int, Meta(ge=0, le=2**16)]
    seq: Count
    sent_s: WallSeconds
    host: HostSample = HostSample()
    gpus: Annotated[tuple[GpuSample, ...], Meta(max_length=256)] = ()
    gpus_reason: Text = ""
    processes: Annotated[tuple[ProcessSample, ...], Meta(max_length=4096)] = ()


class RankAge(_Wire, frozen=True):
    """What the node process knows of a rank that sent nothing since the last node frame.

    `pid_alive` None means that it cannot be told from here.
    """

    run: Name
    rank: Rank
    incarnation: Name
    age_s: AgeSeconds
    pid_alive: bool | None = None
    process_state: Name = ""
    gone_reason: Name = ""


class NodeFrame(_Wire, frozen=True):
    """What a node process sends: its ranks' frames as they came, sensors, and silence.

    `incarnation` changes with the node process, `seq` counts within it. `merged` frames, those of
    the numbers before `seq`, are in this one: who asked for fewer frames gets such.
    """

    version: Annotated[int, Meta(ge=0, le=2**16)]
    node: Name
    incarnation: Name
    seq: Count
    sent_s: WallSeconds
    frames: Annotated[tuple[Raw, ...], Meta(max_length=65536)] = ()
    ages: Annotated[tuple[RankAge, ...], Meta(max_length=65536)] = ()
    sensors: Raw | None = None
    sensors_reason: Text = ""
    agent_pid: Pid = 0
    notices: Annotated[tuple[Text, ...], Meta(max_length=16)] = ()
    replies: Annotated[tuple[Reply, ...], Meta(max_length=64)] = ()
    merged: Count = 0
