"""The marks of communication: where the training thread waits for other ranks, and with whom.

What a backward waits for under DDP is marked with the backward itself (`gpuwatch.probe.patches`).
Here is the rest: DDP's broadcast of buffers, and every wait for a collective in Python. On gloo a
collective blocks in `Work.wait`, also the synchronous ones, those on objects, and SyncBatchNorm's;
functional collectives (tensor parallel, DTensor) block in `wait_tensor`. Where NCCL blocks the
host, it does so in `barrier`. Its synchronous collectives have no `Work` to wait for: they are
kernels on the stream that computes, and the device's clock times them where they are called.

Some ways to train cannot be split into phases from here, or can, but ranks do not meet in every
step, so that what one waits says nothing of the others. They are seen by what they call in every
step, whether the script made its objects before or after `watch()`; `Marks.na` says why a phase is
not known then. A communication hook is only ever read: DDP takes one, and it is the user's.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.compiler import is_compiling

from gpuwatch.probe.describe import ddp_logged, describe_ddp, hook_names
from gpuwatch.probe.events import COMM_BEGIN, COMM_END, Recorder
from gpuwatch.probe.swap import Calls
from gpuwatch.schema import Ddp

if TYPE_CHECKING:
    from gpuwatch.probe.patches import Marks

__all__ = ["Comm", "graph_task"]

graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
"""Tells which backward the calling thread works for; -1 for none."""

_stream: Callable[[int], Any] | None = getattr(torch._C, "_cuda_getCurrentStream", None)
"""Tells what tells streams apart: the current one of the calling thread on a device."""

_TASKS = 8  # a backward inside a backward is one of its own

_LOGGED_FIRST = 12
"""The synchronized forward before which DDP's logger is read first: by then the buckets have been
rebuilt, and the last of the ten iterations that it samples at first is in it."""

_LOGGED_EVERY = 100
_LOGGED_AT = 2
"""The logger samples every 100th iteration and has its times one forward later."""

_LOGGED_APART_NS = 10_000_000_000  # reading it takes about 100 us, and sends the hello again

_SYNCHRONOUS: tuple[str, ...] = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
)

_NO_JOIN = "join(): ranks with more batches than others train on alone"
_NO_LOCAL_SGD = "LocalSGD: ranks do not meet in every step"
_NO_PIPELINE = "pipeline parallel: micro-batches and their waits interleave"
_NO_GRAPH = "a CUDA graph replays the step: nothing inside it is marked"
_NO_TENSOR = "tensor parallel: collectives run among the kernels of the device"


class _Module:
    """A DistributedDataParallel that has run forward; `forwards` counts the synchronized ones."""

    __slots__ = ("described", "forwards", "hooks", "logged_ns")

    def __init__(self, described: Ddp, hooks: str) -> None:
        self.described = described
        self.forwards = 0
        self.hooks = hooks
        self.logged_ns = 0


class Comm:
    """Installs its marks through `marks` and leaves events with `recorder`."""

    def __init__(self, marks: "Marks", recorder: Recorder) -> None:
        self._marks = marks
        self._recorder = recorder
        self._modules: weakref.WeakKeyDictionary[Any, _Module] = weakref.WeakKeyDictionary()
        self.shown: Callable[[], Any] = lambda: None
        self._settled = False
        self._synchronous = _SYNCHRONOUS
        # The backwards of the training thread. On a device the engine works in threads of its own,
        # and FSDP2 waits for parameters there, while the training thread waits for the engine.
        self.tasks: deque[int] = deque(maxlen=_TASKS)
        wait = self._wait
        # What the script may import later, by module: (class or "", function, calls).
        self._later: dict[str, tuple[tuple[str, str, Callable[[], Calls]], ...]] = {
            "torch.distributed._functional_collectives": (("", "wait_tensor", wait),),
            "torch.distributed.fsdp._fully_shard._fsdp_param_group": (
                ("FSDPParamGroup", "wait_for_unshard", self._unshard),
            ),
            "torch.distributed.tensor._redistribute": (
                ("Redistribute", "forward", self._redistribute),
            ),
            "torch.distributed.pipelining.schedules": (
                ("PipelineScheduleSingle", "step", self._pipeline),
                ("PipelineScheduleMulti", "step", self._pipeline),
            ),
            "torch.distributed.algorithms.model_averaging.averagers": (
                ("PeriodicModelAverager", "average_parameters", self._averager),
            ),
            "torch.distributed.algorithms.model_averaging.hierarchical_model_averager": (
                ("HierarchicalModelAverager", "average_parameters", self._averager),
            ),
        }

    def install(self) -> None:
        """Put the marks on, as far as this torch has what they go on."""
        mark = self._marks.mark
        if hasattr(torch.cuda, "CUDAGraph"):
            mark(torch.cuda.CUDAGraph, "replay", self._replay())
        if not dist.is_available():
            self._later = {}
            self._synchronous = ()
            return
        from torch.distributed import distributed_c10d
        from torch.nn.parallel import DistributedDataParallel

        mark(DistributedDataParallel, "_pre_forward", self._ddp_forward())
        # Without it a straggler vanishes on any model with BatchNorm: the others wait here.
        mark(DistributedDataParallel, "_sync_buffers", self._wait())
        mark(torch._C._distributed_c10d.Work, "wait", self._wait())
        # A future of a collective, as in PowerSGD: not through its `Work`.
        mark(torch._C.Future, "wait", self._wait())
        mark(distributed_c10d, "barrier", self._wait())
        if hasattr(distributed_c10d, "monitored_barrier"):
            mark(distributed_c10d, "monitored_barrier", self._wait())
        self.mark_imported()

    def mark_imported(self) -> None:
        """Mark what the script has imported by now; private names only where they are there."""
        for name in [name for name in self._later if name in sys.modules]:
            module = sys.modules[name]
            for owner_name, function, calls in self._later.pop(name):
                owner = getattr(module, owner_name, None) if owner_name else module
                if hasattr(owner, function):
                    self._marks.mark(owner, function, calls())
        if self._marks.device_clock is not None and self._synchronous and _stream is not None:
            names, self._synchronous = self._synchronous, ()
            self._mark_synchronous(names, _stream)

    def _mark_synchronous(self, names: tuple[str, ...], stream: Callable[[int], Any]) -> None:
        from torch.distributed import distributed_c10d

        calls = self._on_stream(stream)
        for name in names:
            if hasattr(distributed_c10d, name):
                self._marks.mark(distributed_c10d, name, calls)

    # --- waits ---------------------------------------------------------------------------------

    def _wait(self) -> Calls:
        marks, recorder, tasks = self._marks, self._recorder, self.tasks

        def wait_begins(owner: Any) -> bool:
            if is_compiling():
                return False
            if get_ident() != marks.thread and not (marks.thread and graph_task() in tasks):
                return False
            recorder.push((COMM_BEGIN, perf_counter_ns()))
            return True

        def wait_ends(begun: bool, value: Any) -> Any:
            if begun:
                recorder.push((COMM_END, perf_counter_ns()))
            return value

        return wait_begins, wait_ends

    def _on_stream(self, stream: Callable[[int], Any]) -> Calls:
        """A collective on the stream that computes; FSDP2 has streams of its own for its own."""
        wait_begins, wait_ends = self._wait()
        index = torch.device(self._marks.device).index
        computes = stream(index)

        def call_begins(first: Any) -> bool:
            return not is_compiling() and stream(index) == computes and wait_begins(first)

        return call_begins, wait_ends

    def _unshard(self) -> Calls:
        """FSDP2 waits for the parameters of a group, and copies them out, as DDP copies back."""
        wait_begins, wait_ends = self._wait()
        marks = self._marks

        def unshard_begins(group: Any) -> bool:
            begun: bool = wait_begins(group)
            if begun and "fsdp2" not in marks.parallel:
                self._found("fsdp2")
            return begun

        return unshard_begins, wait_ends

    # --- ways to train -------------------------------------------------------------------------

    def _found(self, way: str, reason: str = "", *phases: str) -> None:
        """The script trains in this way; these phases cannot be known then."""
        self._marks.parallel[way] = None
        self._marks.config_version += 1
        self._unknown(reason, *phases)

    def _unknown(self, reason: str, *phases: str) -> None:
        for phase in phases:
            self._marks.na.setdefault(phase, reason)

    def _noticing(self, notice: Callable[[Any], None]) -> Calls:
        """Return calls that only look, in the training thread."""
        marks = self._marks

        def looks(owner: Any) -> None:
            if not is_compiling() and get_ident() == marks.thread:
                try:
                    notice(owner)
                except Exception:
                    marks.fail()

        def passes(_: None, value: Any) -> Any:
            return value

        return looks, passes

    def _pipeline(self) -> Calls:
        def notice(schedule: Any) -> None:
            if "pipeline" not in self._marks.parallel:
                self._found("pipeline", _NO_PIPELINE, "forward", "backward", "comm")

        return self._noticing(notice)

    def _averager(self) -> Calls:
        def notice(averager: Any) -> None:
            # While it warms up, DDP reduces gradients in every step as ever.
            warm = getattr(averager, "step", 0) >= getattr(averager, "warmup_steps", 0)
            if warm and "local_sgd" not in self._marks.parallel:
                self._found("local_sgd", _NO_LOCAL_SGD, "comm")

        return self._noticing(notice)

    def _redistribute(self) -> Calls:
        """A DTensor inside the forward changes its placement: its gradients will, too."""
        marks = self._marks

        def notice(ctx: Any) -> None:
            # Without a gradient it is the norm of FSDP2's gradients, say.
            if self._settled or not any(getattr(ctx, "needs_input_grad", ())):
                return
            if "tensor" not in marks.parallel:
                self._found("tensor")
            if marks.device:
                self._settled = True
                # On CPU the thread blocks in `wait_tensor`, which is marked.
                if marks.device != "cpu":
                    self._unknown(_NO_TENSOR, "comm")

        return self._noticing(notice)

    def _replay(self) -> Calls:
        def notice(graph: Any) -> None:
            # Inside an autograd function (make_graphed_callables, torch.compile) gradients are not
            # recorded; there a graph is part of a forward or a backward that is marked itself.
            if torch.is_grad_enabled():
                self._unknown(_NO_GRAPH, "forward", "backward", "comm")

        return self._noticing(notice)

    # --- DistributedDataParallel ---------------------------------------------------------------

    def _ddp_forward(self) -> Calls:
        return self._noticing(self._see_ddp)

    def _see_ddp(self, ddp: Any) -> None:
        module = self._modules.get(ddp)
        if module is None:
            module = self._modules[ddp] = _Module(describe_ddp(ddp), hook_names(ddp))
            self._show(ddp, module)
        elif (hooks := hook_names(ddp)) != module.hooks:
            # One that follows a knob may be called after what it does now.
            module.hooks = hooks
            self._tell(ddp, module, replace(module.described, comm_hook=ddp_logged(ddp).comm_hook))
        join = getattr(ddp, "_join_config", None)
        if join is not None and join.enable:
            self._unknown(_NO_JOIN, "comm")
        if torch.is_grad_enabled() and getattr(ddp, "require_backward_grad_sync", False):
            module.forwards = forwards = module.forwards + 1
            if forwards == _LOGGED_FIRST or forwards % _LOGGED_EVERY == _LOGGED_AT:
                self._read_logger(ddp, module)

    def _show(self, ddp: Any, module: _Module) -> None:
        """The hello has room for one DDP: of several the one that moves most."""
        marks, shown = self._marks, self.shown()
        if shown is not None and shown is not ddp:
            most = self._modules[shown].described.gradient_bytes or 0
            if (module.described.gradient_bytes or 0) <= most:
                return
        self.shown = weakref.ref(ddp)
        marks.ddp = module.described
        marks.parallel["ddp"] = None
        marks.config_version += 1

    def _read_logger(self, ddp: Any, module: _Module) -> None:
        """Take the buckets, and on CPU the times, from DDP's logger.

        Reading copies what the logger has and synchronizes nothing; it is the sampling that does
        on CUDA, which DDP does at its own rate and whose rate stays as it is.
        """
        now_ns = perf_counter_ns()
        on_cpu = getattr(ddp, "device_type", "") == "cpu"
        first = not module.logged_ns
        if module.forwards < _LOGGED_FIRST or not (
            first or (on_cpu and now_ns - module.logged_ns >= _LOGGED_APART_NS)
        ):
            return
        module.logged_ns = now_ns
        logged = ddp_logged(ddp)
        before = module.described
        described = replace(
            before,
            bucket_bytes=logged.bucket_bytes,
            comm_span_ns=(logged.comm_span_ns if on_cpu else None) or before.comm_span_ns,
            comm_hook=logged.comm_hook,  # one in C++ may have come since the first forward
        )
        self._tell(ddp, module, described)

    def _tell(self, ddp: Any, module: _Module, described: Ddp) -> None:
        if described != module.described:
            module.described = described
            if self.shown() is ddp:
                self._show(ddp, module)
