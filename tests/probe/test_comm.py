"""Waiting for other ranks: what is seen, what cannot be told, and that nothing is touched."""

import io
import json
import subprocess
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import support
import torch
import torch.distributed as dist
from marks import Loop, ms
from torch.distributed import distributed_c10d, pipelining
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from gpuwatch.frames import decode_rank_frame
from gpuwatch.probe import comm, events, patches
from gpuwatch.probe.events import Recorder
from gpuwatch.probe.patches import Marks
from gpuwatch.probe.telemetry import Telemetry
from gpuwatch.schema import RankFrame, StepRecord

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = str(Path(__file__).parent / "comm_job.py")
LATE_MS = 30.0
LOOKED_AT = {
    events.BACKWARD_BEGIN,
    events.BACKWARD_END,
    events.COMM_BEGIN,
    events.COMM_END,
    events.COMPUTE_END,
}
WAIT = [events.COMM_BEGIN, events.COMM_END]
Work = torch._C._distributed_c10d.Work


class Watched:
    """Marks that are on, and the telemetry that would send what they leave; it is not started."""

    def __init__(self) -> None:
        self.recorder = Recorder(distributed=True)
        self.warnings: list[str] = []
        self.marks = Marks(self.recorder, self.warnings.append)
        self.marks.install()
        self._telemetry: Telemetry | None = None

    def codes(self) -> list[int]:
        """The marks of backwards and of communication since the last call."""
        found = [event[0] for event in self.recorder.events if event[0] in LOOKED_AT]
        self.recorder.events.clear()
        return found

    def frame(self) -> RankFrame:
        """What a monitor would be told now."""
        if self._telemetry is None:
            self._telemetry = Telemetry(
                self.recorder, self.marks, name="", control=False, notices=[], warn=pytest.fail
            )
        return decode_rank_frame(self._telemetry._past(None))


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def watched(group: None) -> Iterator[Watched]:
    found = Watched()
    try:
        yield found
        assert found.warnings == []
    finally:
        found.marks.remove()


def replica(width: int = 4, layers: int = 2, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    stack = [torch.nn.Linear(width, width) for _ in range(layers)]
    return DistributedDataParallel(torch.nn.Sequential(*stack), **options)


def train(net: torch.nn.Module, steps: int = 1) -> None:
    """Forwards and backwards; the first layer tells the width."""
    width = next(iter(net.parameters())).shape[1]
    for _ in range(steps):
        net(torch.ones(2, width)).sum().backward()


# --- two ranks ---------------------------------------------------------------------------------


def past(
    zygote: support.Zygote, rundir: Path, tmp_path: Path
) -> tuple[list[RankFrame], dict[str, dict[int, Any]]]:
    """Run the job; returns the past of its ranks, and what each of them printed by scenario."""
    done, out = tmp_path / "done", tmp_path / "out"
    env = support.environment(rundir, DONE=str(done))
    with support.Ranks(zygote, [SCRIPT], env, out) as training:

        def finished() -> bool:
            assert training.poll() is None, support.text_of(out)
            return support.text_of(out).count('"scenario": "pipeline"') == 2

        support.wait_until(finished, 100, "the scenarios")
        rows: dict[str, dict[int, Any]] = {}
        for line in support.text_of(out).splitlines():
            if line[:1] == "{":
                row = json.loads(line)
                rows.setdefault(row["scenario"], {})[row["rank"]] = row
        presences = support.rank_presences(rundir)
        assert [p.rank for p in presences] == [0, 1]
        frames = [support.ask(p, "snapshot") for p in presences]
        done.touch()
        assert training.wait(20) == 0, support.text_of(out)
    return frames, rows


def comm_ms(record: StepRecord) -> float:
    assert record.host.comm is not None
    return record.host.comm / 1e6


@pytest.mark.distributed
@pytest.mark.alone
def test_whoever_waits_for_a_late_rank_says_so(
    zygote: support.Zygote, rundir: Path, tmp_path: Path
) -> None:
    frames, rows = past(zygote, rundir, tmp_path)
    records = [
        {
            name: [r for r in frame.records if row[rank]["first"] <= r.index < row[rank]["last"]]
            for name, row in rows.items()
        }
        for rank, frame in enumerate(frames)
    ]
    unknown = {"join": {"comm"}, "pipeline": {"forward", "backward", "comm"}}
    assert len(rows) > 30
    for name in rows:
        steps = [of_rank[name] for of_rank in records]
        for rank, row in rows[name].items():
            assert len(steps[rank]) == row["last"] - row["first"], name
        for record in (*steps[0], *steps[1]):
            phases = {phase: getattr(record.host, phase) for phase in frames_phases()}
            assert sum(ns or 0 for ns in phases.values()) == record.step_ns, name
        if name in unknown:
            # What was seen first was sent before it was known.
            for record in (steps[0][-1], steps[1][-1]):
                missing = {p for p in frames_phases() if getattr(record.host, p) is None}
                assert missing == unknown[name] | {"h2d"}, name
            continue
        # On a busy machine a rank is late by itself in some steps, and then its peer waits for it.
        waited = [max(map(comm_ms, steps[0])), min(map(comm_ms, steps[1]))]
        assert waited[0] > LATE_MS - 5, (name, waited)
        assert waited[0] - waited[1] > LATE_MS - 10, (name, waited)
        own = [min(r.step_ns / 1e6 - comm_ms(r) for r in of_rank) for of_rank in steps]
        assert own[1] - own[0] == pytest.approx(LATE_MS, abs=10), (name, own)
    for frame in frames:
        assert frame.hello is not None
        assert frame.hello.parallel == ("fsdp2", "tensor", "ddp", "pipeline")
        assert frame.state.phases_na["comm"].startswith("join(): ")
        assert frame.state.phases_na["forward"].startswith("pipeline parallel: ")
        assert frame.state.phases_na["backward"].startswith("pipeline parallel: ")
        assert "optimizer" not in frame.state.phases_na
        assert frame.state.notices == ()


def frames_phases() -> tuple[str, ...]:
    return ("data_wait", "h2d", "forward", "backward", "comm", "optimizer", "other")


# --- waits, in one process ---------------------------------------------------------------------


def test_only_the_training_thread_waits(watched: Watched) -> None:
    dist.all_reduce(torch.ones(2))
    assert watched.codes() == WAIT
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(2),))
    thread.start()
    thread.join()
    assert watched.codes() == []


class WaitsElsewhere(torch.autograd.Function):
    """Waits in another thread, as an engine's thread for a device does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(2),))
        thread.start()
        thread.join()
        return grads[0]


@pytest.mark.parametrize("ours", [True, False])
def test_a_thread_that_works_for_our_backward_waits(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    tasks: list[int] = []

    def task() -> int:
        here = threading.current_thread() is threading.main_thread()
        if here:
            tasks.append(torch._C._current_graph_task_id())
        return tasks[-1] if here or ours else -1

    monkeypatch.setattr(comm, "graph_task", task)
    monkeypatch.setattr(patches, "graph_task", task)
    weight = torch.ones(4, requires_grad=True)
    WaitsElsewhere.apply(weight).sum().backward()
    assert len(tasks) == 1
    assert tasks[0] >= 0
    wait = WAIT if ours else []
    assert watched.codes() == [
        events.BACKWARD_BEGIN,
        *wait,
        events.COMPUTE_END,
        events.BACKWARD_END,
    ]
    dist.all_reduce(torch.ones(2))
    watched.codes()
    watched.marks.silence()
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(2),))
    thread.start()
    thread.join()
    assert watched.codes() == []


def test_a_wait_that_raises_is_over(watched: Watched) -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_exception(ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        future.wait()
    assert watched.codes() == WAIT


def test_the_broadcast_of_buffers_is_communication(watched: Watched) -> None:
    net = DistributedDataParallel(torch.nn.BatchNorm1d(4))
    watched.codes()
    net(torch.ones(2, 4))
    assert watched.codes() == WAIT


def test_what_blocks_without_its_work_is_marked_itself(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NCCL `barrier` blocks in C++ and gives no work to wait for."""
    monkeypatch.setattr(Work, "wait", lambda work: True)
    dist.barrier()
    assert watched.codes() == WAIT
    dist.monitored_barrier()
    assert watched.codes() == WAIT


@pytest.mark.parametrize("side", [False, True])
def test_a_kernel_on_the_stream_that_computes_is_communication(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, side: bool
) -> None:
    """As on NCCL, whose synchronous collectives give no work to wait for."""
    monkeypatch.setattr(Work, "wait", lambda work: True)
    dist.all_reduce(torch.ones(2))
    assert watched.codes() == []
    streams = [3]
    monkeypatch.setattr(comm, "_stream", lambda index: streams[index])
    codes = {name: getattr(dist, name).__wrapped__.__code__ for name in ("all_reduce", "broadcast")}
    watched.marks.device = "cuda:0"
    watched.marks.device_clock = object()  # type: ignore[assignment]
    watched.marks.comm.mark_imported()
    watched.marks.device_clock = None
    if side:
        streams[0] = 4
    wait = [] if side else WAIT
    dist.all_reduce(torch.ones(2))
    assert watched.codes() == wait
    dist.broadcast(torch.ones(2), src=0)
    assert watched.codes() == wait
    dist.all_gather([torch.ones(2)], torch.ones(2))
    assert watched.codes() == wait
    watched.marks.remove()
    for name, code in codes.items():
        assert getattr(dist, name).__wrapped__.__code__ is code


def test_functional_collectives_wait_in_their_own_way(watched: Watched) -> None:
    import torch.distributed._functional_collectives as funcol

    reduced = funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    assert watched.codes() == []  # under way: nobody has asked for it
    assert (reduced + 1).tolist() == [2, 2]
    assert watched.codes() == WAIT


def test_fsdp2_waits_for_its_parameters_and_is_not_tensor_parallel(watched: Watched) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = torch.nn.Linear(4, 4)
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    net(torch.ones(2, 4))
    watched.codes()
    out = net(torch.ones(2, 4))
    # Alone there is nothing to gather, only to copy out: it is the wait for the group itself.
    assert watched.codes() == WAIT
    out.sum().backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).full_tensor()  # type: ignore[attr-defined]
    assert list(watched.marks.parallel) == ["fsdp2"]
    assert watched.marks.na == {}


def test_an_error_in_a_barrier_shows_nothing_of_us(watched: Watched) -> None:
    with pytest.raises(TypeError) as raised:
        dist.barrier(timeout="soon")  # type: ignore[arg-type]
    files = {frame.filename for frame in traceback.extract_tb(raised.tb)}
    assert len(files) > 1
    assert not [name for name in files if "gpuwatch/probe" in name]


def test_marks_on_methods_in_c_come_off_without_a_trace(group: None) -> None:
    before = [vars(owner)["wait"] for owner in (Work, torch._C.Future)]
    barrier, inner = dist.barrier, dist.barrier.__wrapped__  # type: ignore[attr-defined]
    code = inner.__code__
    found = Watched()
    try:
        now = [vars(owner)["wait"] for owner in (Work, torch._C.Future)]
        assert all(a is not b for a, b in zip(now, before, strict=True))
        # To the compiler, which would trace a function in Python, they are still in C.
        assert [type(method) for method in now] == [type(method) for method in before]
        assert dist.barrier is barrier is distributed_c10d.barrier
        assert inner.__code__ is not code
    finally:
        found.marks.remove()
    after = [vars(owner)["wait"] for owner in (Work, torch._C.Future)]
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert inner.__code__ is code
    dist.all_reduce(torch.ones(2))
    assert found.codes() == []


# --- what cannot be told -----------------------------------------------------------------------


def test_joining_ranks_makes_communication_unknown(watched: Watched) -> None:
    net = replica()
    train(net)
    assert watched.marks.na == {}
    with net.join():
        train(net)
    assert list(watched.marks.na) == ["comm"]
    assert watched.marks.na["comm"].startswith("join(): ")


@pytest.mark.parametrize("kind", ["periodic", "hierarchical"])
def test_local_sgd_makes_communication_unknown_when_it_begins(watched: Watched, kind: str) -> None:
    net = replica()
    parameters = list(net.parameters())
    if kind == "periodic":
        averager: Any = PeriodicModelAverager(period=2, warmup_steps=2)
    else:
        periods = {2: dist.get_world_size()}
        averager = _hierarchical(periods, warmup_steps=2)
    for step in range(3):
        train(net)
        assert ("comm" in watched.marks.na) is False, step
        averager.average_parameters(parameters)
    assert watched.marks.na["comm"].startswith("LocalSGD: ")
    assert list(watched.marks.parallel) == ["ddp", "local_sgd"]


def _hierarchical(periods: Any, warmup_steps: int) -> Any:
    from collections import OrderedDict

    return HierarchicalModelAverager(OrderedDict(periods), warmup_steps=warmup_steps)


@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B", "ScheduleLoopedBFS"])
def test_a_pipeline_hides_the_phases_of_its_micro_batches(watched: Watched, kind: str) -> None:
    several = kind == "ScheduleLoopedBFS"
    stages = [
        pipelining.PipelineStage(torch.nn.Linear(4, 4), n, 1 + several, torch.device("cpu"))
        for n in range(1 + several)
    ]
    make = getattr(pipelining, kind)
    schedule = make(stages if several else stages[0], 2, loss_fn=torch.nn.functional.mse_loss)
    schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
    assert list(watched.marks.parallel) == ["pipeline"]
    assert list(watched.marks.na) == ["forward", "backward", "comm"]
    assert {reason.split(":")[0] for reason in watched.marks.na.values()} == {"pipeline parallel"}


def test_what_is_imported_later_is_marked_when_a_loop_begins() -> None:
    """In a fresh process, where torch has not imported it for its own purposes."""
    code = """
import sys, torch, gpuwatch
gpuwatch.watch()
import torch.distributed as dist
name = "torch.distributed.algorithms.model_averaging.averagers"
assert name not in sys.modules
import torch.distributed.algorithms.model_averaging.averagers as averagers
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in torch.utils.data.DataLoader([1]): pass
weight = torch.nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
averagers.PeriodicModelAverager(2).average_parameters([weight])
from gpuwatch import probe
print(probe._probe.marks.na)
gpuwatch.unwatch()
"""
    with support.run_directory() as directory:
        done = subprocess.run(
            [support.PYTHON, "-c", code],
            env=support.environment(directory),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert "LocalSGD: " in done.stdout, done.stderr


class Graph:
    """What `torch.cuda.CUDAGraph` is to a script."""

    def replay(self) -> str:
        """As torch's own."""
        return "replayed"


class Graphed(torch.autograd.Function):
    """What `make_graphed_callables` makes: graphs inside an autograd function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Graph().replay()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        Graph().replay()
        return grads[0]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("optimizer_too", [False, True])
def test_a_cuda_graph_hides_the_phases_that_it_replays(
    group: None, monkeypatch: pytest.MonkeyPatch, inside: bool, optimizer_too: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    found = Watched()
    try:
        weight = torch.ones(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for (batch,) in DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=4):
            if inside:
                Graphed.apply(batch @ weight).sum().backward()
            else:
                assert Graph().replay() == "replayed"
            if inside or not optimizer_too:
                optimizer.step()
            found.recorder.step()
        frame = found.frame()
    finally:
        found.marks.remove()
    assert found.warnings == []
    record = frame.records[-1]
    unknown = {p for p in frames_phases() if getattr(record.host, p) is None} - {"h2d"}
    if inside:
        assert unknown == set()
        return
    assert unknown == {"forward", "backward", "comm"} | ({"optimizer"} if optimizer_too else set())
    for phase in ("forward", "backward", "comm"):
        assert frame.state.phases_na[phase].startswith("a CUDA graph replays the step"), phase
    assert ("optimizer" in frame.state.phases_na) is optimizer_too
    known = [ns for p in frames_phases() if (ns := getattr(record.host, p)) is not None]
    assert sum(known) == record.step_ns


def test_tensor_parallel_is_measured_on_cpu_and_unknown_on_a_device(watched: Watched) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    net = torch.nn.Linear(4, 4)
    parallelize_module(net, init_device_mesh("cpu", (1,)), ColwiseParallel())
    net(torch.ones(2, 4)).sum().backward()
    net(torch.ones(2, 4)).sum().backward()
    assert list(watched.marks.parallel) == ["tensor"]
    assert watched.marks.na == {}
    watched.marks.comm._settled = False
    watched.marks.device = "cuda:0"
    net(torch.ones(2, 4)).sum().backward()
    assert watched.marks.na["comm"].startswith("tensor parallel: ")


# --- DistributedDataParallel -------------------------------------------------------------------


class Reads:
    """Counts how often DDP's logger is read, and refuses that its rate is set."""

    def __init__(self, net: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = net._get_ddp_logging_data

        def read() -> Any:
            self.count += 1
            return original()

        monkeypatch.setattr(net, "_get_ddp_logging_data", read)
        monkeypatch.setattr(net, "_set_ddp_runtime_logging_sample_rate", pytest.fail)


def buckets(net: DistributedDataParallel) -> tuple[int, ...]:
    said = net._get_ddp_logging_data()
    return tuple(int(size) for size in said["rebuilt_bucket_sizes"].split(","))


def test_buckets_and_times_come_from_ddp_itself_and_seldom(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = replica(256, 6, bucket_cap_mb=0.5)
    reads = Reads(net, monkeypatch)
    train(net, 11)
    first = reads.count  # what it says of a hook, at the first forward
    version = watched.marks.config_version
    assert first == 1
    assert watched.marks.ddp is not None
    assert (watched.marks.ddp.bucket_bytes, watched.marks.ddp.comm_span_ns) == ((), None)
    with torch.no_grad():
        net(torch.ones(1, 256))
    with net.no_sync():
        train(net)
    assert reads.count == first  # neither is an iteration to DDP
    train(net)
    assert reads.count == first + 1
    told = watched.marks.ddp
    assert told.bucket_bytes == buckets(net)
    assert len(told.bucket_bytes) == 3
    assert sum(told.bucket_bytes) == told.gradient_bytes
    assert told.comm_span_ns == net._get_ddp_logging_data()["backward_comm_time"]
    assert watched.marks.config_version == version + 1
    first = reads.count
    train(net, 90)
    assert reads.count == first  # the 102nd comes too soon, by the clock
    monkeypatch.setattr(comm, "_LOGGED_APART_NS", 0)
    train(net, 99)
    assert reads.count == first
    train(net, 1)
    assert reads.count == first + 1
    span_ns = net._get_ddp_logging_data()["backward_comm_time"]
    assert watched.marks.ddp.comm_span_ns == span_ns != told.comm_span_ns


def test_on_a_device_only_the_buckets_are_read_and_once(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "_LOGGED_APART_NS", 0)
    net = replica(256, 6, bucket_cap_mb=0.5)
    net.device_type = "cuda"
    reads = Reads(net, monkeypatch)
    train(net, 12)
    assert watched.marks.ddp is not None
    assert len(watched.marks.ddp.bucket_bytes) == 3
    assert watched.marks.ddp.comm_span_ns is None
    first = reads.count
    train(net, 100)
    assert reads.count == first


@pytest.mark.parametrize("sizes", ["", "12, x", "-4, 8", "0", ", ".join(["4"] * 5000)])
def test_buckets_that_make_no_sense_are_unknown(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, sizes: str
) -> None:
    net = replica()
    said = {"rebuilt_bucket_sizes": sizes, "backward_comm_time": -1}
    monkeypatch.setattr(net, "_get_ddp_logging_data", lambda: said)
    train(net, 12)
    assert watched.marks.ddp is not None
    assert (watched.marks.ddp.bucket_bytes, watched.marks.ddp.comm_span_ns) == ((), None)


@pytest.mark.parametrize("larger_first", [False, True])
def test_of_two_replicas_the_larger_is_described_once(watched: Watched, larger_first: bool) -> None:
    small, large = replica(4), replica(8)
    for _ in range(3):
        for net in (large, small) if larger_first else (small, large):
            train(net)
    told = watched.marks.ddp
    assert told is not None
    assert told.parameters == sum(p.numel() for p in large.parameters())
    version = watched.marks.config_version
    train(small, 3)
    assert watched.marks.config_version == version
    assert watched.marks.ddp is told


# --- communication hooks -----------------------------------------------------------------------


def test_a_hook_of_the_users_stays(watched: Watched) -> None:
    called = []

    def mine(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        called.append(state)
        return fp16_compress_hook(None, bucket)

    net = replica()
    net.register_comm_hook("my state", mine)
    train(net, 13)
    assert net._comm_hooks == [(mine, "my state")]
    assert called == ["my state"] * len(called) != []
    assert watched.marks.ddp is not None
    assert watched.marks.ddp.comm_hook == "mine"


def test_a_hook_in_cpp_stays(watched: Watched) -> None:
    net = replica()
    net._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    train(net, 13)
    assert net._comm_hooks == []
    assert watched.marks.ddp is not None
    assert watched.marks.ddp.comm_hook == "BuiltinCommHookType.FP16_COMPRESS"
    # DDP takes one hook. It is still theirs, so there is no room for another.
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        net.register_comm_hook(None, fp16_compress_hook)


def test_there_is_room_for_a_hook_after_forwards(watched: Watched) -> None:
    net = replica()
    with torch.no_grad():
        net(torch.ones(2, 4))
    net.register_comm_hook(None, fp16_compress_hook)
    train(net, 12)
    assert watched.marks.ddp is not None
    assert watched.marks.ddp.comm_hook == "fp16_compress_hook"


def test_a_hook_that_follows_a_knob_is_called_after_what_it_does(watched: Watched) -> None:
    class Follows:
        __qualname__ = ""
        __name__ = ""

        def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            return fp16_compress_hook(None, bucket)

    net, hook = replica(), Follows()
    hook.__qualname__ = ""
    net.register_comm_hook(None, hook)
    told = []
    for name in ("", "fp16_compress_hook", "fp16_compress_hook", ""):
        hook.__name__ = name
        version = watched.marks.config_version
        train(net)
        assert watched.marks.ddp is not None
        told.append((watched.marks.ddp.comm_hook, watched.marks.config_version > version))
    assert told == [
        ("", True), ("fp16_compress_hook", True), ("fp16_compress_hook", False), ("", True),
    ]  # fmt: skip


# --- the end of computing ----------------------------------------------------------------------


def test_one_end_a_backward_and_no_hook_is_left(watched: Watched) -> None:
    weight = torch.ones(4, requires_grad=True)
    x, y = (weight * 2).sum(), (weight * 3).sum()
    seen: list[float] = []
    x.register_hook(lambda grad: seen.append(grad.item()))
    once = [events.BACKWARD_BEGIN, events.COMPUTE_END, events.BACKWARD_END]
    for _ in range(2):
        torch.autograd.backward([x, y], retain_graph=True)
        assert watched.codes() == once
    assert len(x._backward_hooks) == 1  # theirs
    assert not y._backward_hooks
    assert seen == [1.0, 1.0]
    assert weight.grad is not None
    assert weight.grad.tolist() == [10.0] * 4


def test_a_backward_that_raises_leaves_no_hook(watched: Watched) -> None:
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * 2).sum()
    loss.backward()
    watched.codes()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert not loss._backward_hooks
    assert watched.codes()[-1] == events.BACKWARD_END
    (weight * 2).sum().backward()
    assert watched.codes() == [events.BACKWARD_BEGIN, events.COMPUTE_END, events.BACKWARD_END]


def test_the_ends_of_nested_backwards_add_up() -> None:
    """Reentrant checkpointing: DDP may wait in the inner backward, and again in the outer one."""
    loop = Loop()
    loop.fetch(1)
    loop.acc.backward_begin()
    loop.work(10)
    loop.acc.backward_begin()
    loop.work(5)
    loop.acc.compute_end()
    loop.work(3)
    loop.acc.backward_end()
    loop.work(4)
    loop.acc.compute_end()
    loop.work(1)
    loop.comm(2)  # what follows the mark, and waits in Python, is not counted twice
    loop.work(6)
    loop.acc.backward_end()
    loop.optimizer(1)
    loop.fetch(1)
    (step,) = loop.steps
    assert ms(step) == {
        "data_wait": 1,
        "backward": 10 + 5 + 4 + 1,
        "comm": 3 + 2 + 6,
        "optimizer": 1,
    }


def test_compiled_autograd_makes_communication_unknown(group: None) -> None:
    from torch._dynamo import compiled_autograd

    found = Watched()
    try:
        weight = torch.ones(4, requires_grad=True)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            for _ in range(2):
                (weight * 2).sum().backward()
        assert found.codes() == [events.BACKWARD_BEGIN, events.BACKWARD_END] * 2
    finally:
        found.marks.remove()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0] * 4
    assert "compiled autograd" in found.marks.na["comm"]
    assert len(found.warnings) == 1


def test_replicas_are_saved_as_ever(watched: Watched) -> None:
    net = replica()
    train(net, 2)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    assert not [name for name in vars(net) if "gpuwatch" in name]
