"""The marks: where torch is touched, and how it is put back.

Boundary marks only; nothing happens per module. Each mark acts in the training thread alone,
does nothing while torch compiles, and never raises: the first failure of a mark turns the probe
off with one line, and training goes on.
"""

import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import torch
from msgspec.structs import replace
from torch.compiler import is_compiling
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from gpuwatch.probe.batches import look, measure
from gpuwatch.probe.boundary import Desk
from gpuwatch.probe.comm import Comm, graph_task
from gpuwatch.probe.describe import describe_loader, queue_depth
from gpuwatch.probe.device import Cuda, DeviceClock
from gpuwatch.probe.dispatch import MODULE, Dispatch
from gpuwatch.probe.events import (
    BACKWARD_BEGIN,
    BACKWARD_END,
    COMPUTE_END,
    FETCH_BEGIN,
    FETCH_END,
    FETCH_STOP,
    OPTIMIZER_BEGIN,
    SPAN_BEGIN,
    SPAN_END,
    Recorder,
)
from gpuwatch.probe.signals import Signals
from gpuwatch.probe.swap import RAISED, Calls, SwapError, leave_uncompiled, swap
from gpuwatch.probe.transfers import Transfers
from gpuwatch.probe.weights import Weights
from gpuwatch.probe.workers import Workers
from gpuwatch.schema import Ddp, Loader

__all__ = ["Marks"]

_DEAR_NS = 100_000_000  # what costs over a microsecond is read at most ten times a second
_KEY = "_gpuwatch_loader"
_OF = "_gpuwatch_of"
# What else writes checkpoints, where the script imports it.
_SAVERS = {
    "safetensors.torch": ("save_file", "save_model"),
    "torch.distributed.checkpoint": ("save", "async_save"),
}


def _around(
    original: Callable[..., Any], begin: Callable[[Any], Any], end: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    """Return a wrapper that makes the calls."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        token = begin(args[0] if args else next(iter(kwargs.values()), None))
        try:
            value = original(*args, **kwargs)
        except BaseException:
            end(token, RAISED)
            raise
        return end(token, value)

    return wrapper


class Marks:
    """Installs the marks on torch and leaves events with a `Recorder`.

    `loaders`, `ddp` and `parallel` describe what was seen, for the hello; `config_version` rises
    when there is something new. `na` says of a phase why it cannot be known. `desk` is where the
    telemetry thread leaves what is to be done at a step's boundary, `origins` the DataLoader that a
    key of `loaders` stands for.
    """

    def __init__(self, recorder: Recorder, warn: Callable[[str], None]) -> None:
        self._recorder = recorder
        self._warn = warn
        self.thread = get_ident()  # 0 while the marks are off: no thread has that id
        self._adopted = False
        self._off = True
        self._awaited: Callable[[], None] | None = None
        self._undo: list[Callable[[], None]] = []
        self._dear_ns = self._scale_ns = 0
        self._keys: dict[object, tuple[weakref.ref[Any] | None, str]] = {}
        self._named = 0
        self._savers = dict(_SAVERS)
        self._end_queued = False
        self._weights: Weights | None = Weights()  # until an optimizer step is seen
        self.engine_mark = True
        self.device = ""
        self.autocast = ""
        self.grad_scaler = False
        self.config_version = 0
        self.loaders: dict[str, Loader] = {}
        self.origins: dict[str, weakref.ref[Any]] = {}
        self.device_batches: set[str] = set()  # keys of loaders whose batches are on a device
        self.desk = Desk(recorder)
        self.ddp: Ddp | None = None
        self.workers = Workers()
        self.comm = Comm(self, recorder)
        self.dispatch = Dispatch(self, recorder)
        self.signals = Signals(self, recorder)
        self.device_clock: DeviceClock | None = None
        self._transfers = Transfers(self, recorder)
        self.na: dict[str, str] = {}
        self.parallel: dict[str, None] = {}

    # --- install and remove --------------------------------------------------------------------

    def install(self) -> None:
        """Put the marks on. Raises whatever an unknown torch raises; `remove` undoes the rest."""
        self._off = False
        self.thread = get_ident()
        self.mark(dataloader._BaseDataLoaderIter, "__next__", self._fetch())
        self.wrap(dataloader._MultiProcessingDataLoaderIter, "__init__", self.workers.starting)
        self.mark(dataloader.DataLoader, "_get_iterator", self._iterator())
        self.mark(torch.autograd, "backward", self._backward())
        self.wrap(torch.amp.GradScaler, "step", self._scaler_step)
        self.comm.install()
        self.mark(torch, "save", self._save())
        self._mark_imported()
        self.signals.install()
        leave_uncompiled(self._optimizer_before, self._optimizer_after)
        before = register_optimizer_step_pre_hook(self._optimizer_before)
        after = register_optimizer_step_post_hook(self._optimizer_after)
        self._undo += [before.remove, after.remove]

    def remove(self) -> None:
        """Take the marks off, as far as nobody has wrapped them again since."""
        self.silence()
        self.signals.remove()
        while self._undo:
            self._undo.pop()()

    def mark(self, owner: Any, name: str, calls: Calls) -> None:
        """Have the calls made around a function: within its code, or else around it."""
        begin, end = calls
        leave_uncompiled(begin, end)
        try:
            self._undo.append(swap(_undecorated(getattr(owner, name, None)), begin, end))
        except SwapError:  # a function in C, or no source: a frame more in tracebacks
            self.wrap(owner, name, lambda original: _around(original, begin, end))

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put what `make` returns of the function in its place; a frame more in tracebacks."""
        original = getattr(owner, name, None)
        if original is None:
            self._warn(f"torch {torch.__version__} has no {name} to mark; its phase is n/a")
            return
        wrapper = make(original)
        functools.update_wrapper(wrapper, original)
        leave_uncompiled(wrapper, callees=False)
        kept = vars(owner).get(name)
        # A method in C stays one to the compiler, which would trace a function in Python.
        kind = type(kept)
        placed = kind(wrapper) if kind.__name__ == "instancemethod" else wrapper
        setattr(owner, name, placed)

        def undo() -> None:
            if vars(owner).get(name) is not placed:
                return
            if kept is None:
                delattr(owner, name)
            else:
                setattr(owner, name, kept)

        self._undo.append(undo)

    def silence(self) -> None:
        """Turn every mark off without touching torch: in a forked child."""
        self._off = True
        self.thread = 0
        self.signals.silence()

    def fail(self) -> None:
        """A mark has raised: say so once and never run again."""
        if self._off:
            return
        self.silence()
        kind, value = sys.exc_info()[:2]
        name = kind.__name__ if kind else "error"
        self._warn(f"the marks are off after an error of their own ({name}: {value})")

    def here(self) -> bool:
        """Whether this is the training thread and the marks are on."""
        return get_ident() == self.thread

    def _adopt(self) -> bool:
        """The thread of the first backward or optimizer step is the training thread."""
        if self._adopted or self._off:
            return False
        self._adopted = True
        self.thread = get_ident()
        return True

    def wait_for_sign(self, seen: Callable[[], None]) -> None:
        """Record nothing before a mark fires, and call `seen` then, in the thread of the mark."""
        self._awaited = seen
        self.thread = 0

    def stop_waiting(self) -> None:
        """Record from here on, unless the marks are off."""
        if self._awaited is not None:
            self._awaited = None
            if not self._off:
                self.thread = get_ident()
                self._mark_imported()

    def sign(self) -> bool:
        """A mark fires in a thread that is not the training thread: is it the awaited sign?"""
        seen = self._awaited
        if seen is None:
            return False
        seen()
        self.stop_waiting()
        return get_ident() == self.thread

    # --- the loader ----------------------------------------------------------------------------

    def _fetch(self) -> Calls:
        begin, recorder = self._fetch_begin, self._recorder

        def fetch_begins(iterator: Any) -> Any:
            if get_ident() != self.thread and not self.sign():
                return None
            try:
                if self.dispatch.fetching:
                    self._dispatched(iterator)
                    return None
                return begin(iterator)
            except Exception:
                self.fail()
            return True

        def fetch_ends(begun: Any, batch: Any) -> Any:
            if begun is not None:
                ended_ns = perf_counter_ns()
                if batch is RAISED:
                    recorder.push((FETCH_STOP, ended_ns, sys.exc_info()[0] is not StopIteration))
                    return None
                try:
                    if begun is True:
                        recorder.push((FETCH_END, ended_ns, *measure(batch)))
                    else:
                        seen = self._see_batch(batch, ended_ns, *begun)
                        recorder.push((FETCH_END, ended_ns, *measure(batch), seen))
                except Exception:
                    self.fail()
            return batch

        return fetch_begins, fetch_ends

    def _iterator(self) -> Calls:
        def make_begins(loader: Any) -> Any:
            return loader

        def make_ends(loader: Any, iterator: Any) -> Any:
            # Which loader an iterator is of, it does not tell itself.
            if iterator is not RAISED and self.thread:
                with contextlib.suppress(Exception):
                    iterator.__dict__[_OF] = weakref.ref(loader)
            return iterator

        return make_begins, make_ends

    def _fetch_begin(self, iterator: Any) -> Any:
        """Returns True, or what `_see_batch` wants to know of a batch to be looked at."""
        if self.desk.due:
            self.desk.fetching()
        first = iterator._num_yielded == 0
        key = iterator.__dict__.get(_KEY)
        if first or key is None:
            key = self.see_loader(iterator)
        now_ns = perf_counter_ns()
        if not self.may_be_dear(now_ns):
            self._recorder.push((FETCH_BEGIN, now_ns, key, first))
            return (key, now_ns) if first else True
        self._recorder.push((FETCH_BEGIN, now_ns, key, first, *queue_depth(iterator)))
        return key, now_ns if first else None

    def _see_batch(self, batch: Any, ended_ns: int, key: str, first_ns: int | None) -> Any:
        """Look closer at a batch, whose iterator's first it is since `first_ns`; its padding."""
        seen = look(batch)
        self.signals.sequences[key] = seen.sequence
        if seen.on_device:
            self.device_batches.add(key)
        loader = self.loaders[key]
        told = loader.batch_bytes
        size = seen.size_bytes
        # Whoever listens is told anew when it has changed by a quarter: batches of text vary.
        if first_ns is not None or (size is not None and abs(size - (told or 0)) * 4 > size):
            first = loader.first_batch_ns if first_ns is None else ended_ns - first_ns
            self.loaders[key] = replace(loader, batch_bytes=size, first_batch_ns=first)
            self.config_version += 1
        return seen.padding

    def may_be_dear(self, now_ns: int) -> bool:
        """Whether it is time again for what costs over a microsecond."""
        if now_ns - self._dear_ns < _DEAR_NS:
            return False
        self._dear_ns = now_ns
        return True

    def _dispatched(self, iterator: Any) -> None:
        """The DataLoader is asked inside another fetch, which is marked."""
        if _KEY not in iterator.__dict__:
            self.see_loader(iterator)
            self.dispatch.iterator = weakref.ref(iterator)

    def see_loader(self, iterator: Any) -> str:
        """A new iterator: which loader is it of, and how is that configured?"""
        self._mark_imported()
        dataset = iterator._dataset
        # A script that makes its loader anew in every epoch has one loader all the same; another
        # one over the same data, for evaluation say, shuffles or batches otherwise.
        sampler = iterator._index_sampler
        batch_size = getattr(sampler, "batch_size", None)
        order = type(getattr(sampler, "sampler", sampler))
        made = (id(dataset), order, batch_size if isinstance(batch_size, int) else None)
        known = self._keys.get(made)
        if known is None or (known[0] is not None and known[0]() is not dataset):
            try:
                alive: weakref.ref[Any] | None = weakref.ref(dataset)
            except TypeError:
                alive = None  # a list, say: its id is all there is
            known = (alive, f"loader{self._named}")
            self._named += 1
            self._keys[made] = known
        key = known[1]
        iterator.__dict__[_KEY] = key
        loader, before = describe_loader(key, iterator), self.loaders.get(key)
        if before is not None:
            loader = replace(loader, batch_bytes=before.batch_bytes)
        self.loaders[key] = loader
        if _OF in iterator.__dict__:
            self.origins[key] = iterator.__dict__[_OF]
        self.workers.name(iterator, key)
        self.config_version += 1
        self.signals.see_loop()
        return key

    # --- backward ------------------------------------------------------------------------------

    def _compute_ended(self) -> None:
        self._recorder.push((COMPUTE_END, perf_counter_ns()))

    def _root_hook(self, grad: Any) -> None:
        # Queued before DDP queues its finalizer, so it runs before DDP waits for its buckets: the
        # time from here to the return of backward is communication that nothing hides.
        if not self._end_queued:
            self._end_queued = True
            self.comm.tasks.append(graph_task())
            torch.autograd.Variable._execution_engine.queue_callback(self._compute_ended)

    def _backward(self) -> Calls:
        begin, recorder = self._backward_begin, self._recorder

        def backward_begins(tensors: Any) -> Any:
            if is_compiling():
                return None
            if get_ident() != self.thread and not self.sign() and not self._adopt():
                return None
            if self._weights is None:
                recorder.push((BACKWARD_BEGIN, perf_counter_ns()))
            else:
                recorder.push((BACKWARD_BEGIN, perf_counter_ns(), self._updated(tensors)))
            if self._look:
                try:
                    return begin(tensors) or True
                except Exception:
                    self.fail()
            return True

        def backward_ends(handle: Any, value: Any) -> Any:
            if handle is not None:
                recorder.push((BACKWARD_END, perf_counter_ns(), value is RAISED))
                if handle is not True:
                    handle.remove()
            return value

        return backward_begins, backward_ends

    @property
    def _look(self) -> bool:
        """Whether a backward has to be looked at: for its device once, for its end under DDP."""
        return self._recorder.distributed or not self.device

    def _updated(self, tensors: Any) -> bool:
        """Before the first optimizer step: have the weights changed without one?"""
        root = tensors if isinstance(tensors, torch.Tensor) else _first_tensor(tensors)
        try:
            return self._weights is not None and root is not None and self._weights.updated(root)
        except Exception:
            self._weights = None  # no tensor of the usual kind
            return False

    def _backward_begin(self, tensors: Any) -> Any:
        root = tensors if isinstance(tensors, torch.Tensor) else _first_tensor(tensors)
        if root is None or not root.requires_grad:
            return None
        self._adopted = True
        if not self.device:
            self.device = str(root.device)
            self.config_version += 1
            self._see_device(root.device)
            self._mark_imported()
        if not self.engine_mark or not self._recorder.distributed:
            return None
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and compiled.compiled_autograd_enabled:
            # Its engine refuses callbacks, and refusing kills the training.
            self.engine_mark = False
            self.na["comm"] = "compiled autograd refuses engine callbacks"
            self._warn("compiled autograd refuses engine callbacks: exposed communication is n/a")
            return None
        self._end_queued = False
        return root.register_hook(self._root_hook)  # type: ignore[no-untyped-call]

    def _see_device(self, device: torch.device) -> None:
        """The training is on this device: time it there too, if there is a way."""
        if device.type == "cuda":
            self.device_clock = DeviceClock(self._recorder, Cuda(device.index), self._warn)
            self.device_clock.start()
        elif device.type != "cpu":
            self._warn(f"no device times on {device.type}: the host's clock runs ahead of it")

    # --- checkpoints ---------------------------------------------------------------------------

    def _save(self) -> Calls:
        recorder = self._recorder

        def save_begins(what: Any) -> bool:
            if is_compiling() or get_ident() != self.thread:
                return False
            recorder.push((SPAN_BEGIN, perf_counter_ns(), "checkpoint"))
            return True

        def save_ends(begun: bool, value: Any) -> Any:
            if begun:
                recorder.push((SPAN_END, perf_counter_ns()))
            return value

        return save_begins, save_ends

    def _mark_imported(self) -> None:
        """Mark what writes checkpoints or shares out batches, if the script has imported it."""
        if MODULE in sys.modules:
            self.dispatch.install(sys.modules[MODULE])
        self.signals.late()
        self.comm.mark_imported()
        if self.device_clock is not None:
            self._transfers.mark_imported()
        for name in [name for name in self._savers if name in sys.modules]:
            for function in self._savers.pop(name):
                if hasattr(sys.modules[name], function):
                    self.mark(sys.modules[name], function, self._save())

    # --- optimizer -----------------------------------------------------------------------------

    def _optimizer_before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_compiling():
            return
        if get_ident() != self.thread and not self.sign() and not self._adopt():
            return
        self._adopted = True
        self._weights = None
        now_ns = perf_counter_ns()
        self._recorder.push((OPTIMIZER_BEGIN, now_ns, id(optimizer)))
        signals = self.signals
        if now_ns - signals.dear_ns >= _DEAR_NS:
            self._extra(signals.look, optimizer, now_ns)
        if signals.count is not None:
            self._extra(signals.count.optimizer_begins, id(optimizer))

    def _extra(self, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception:
            self.fail()

    def _optimizer_after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling() and get_ident() == self.thread:
            self._stepped = True
            self._recorder.optimizer_end(id(optimizer))
            if self.signals.count is not None:
                self._extra(self.signals.count.optimizer_ended, id(optimizer))
            if self.desk.due:
                self._extra(self.desk.stepped, id(optimizer))

    _stepped = False

    def _scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or get_ident() != self.thread:
                return original(scaler, optimizer, *args, **kwargs)
            if not self.grad_scaler:
                self.grad_scaler = True
                self.config_version += 1
            self._stepped = False
            self._weights = None
            now_ns = perf_counter_ns()
            self._recorder.push((OPTIMIZER_BEGIN, now_ns, id(optimizer)))
            if now_ns - self._scale_ns >= _DEAR_NS:
                self._scale_ns = now_ns
                self._recorder.note("loss_scale", getattr(scaler, "_scale", None))
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                # A scaler that found an infinity calls no optimizer, so no hook has fired.
                self._recorder.optimizer_end(id(optimizer), not self._stepped, self._stepped)

        return step


def _undecorated(function: Any) -> Any:
    """Return what torch's own decorators are around: its code can be exchanged, a closure's not."""
    while isinstance(function, types.FunctionType):
        inner = getattr(function, "__wrapped__", None)
        if inner is None or not function.__globals__.get("__name__", "").startswith("torch."):
            break
        function = inner
    return function


def _first_tensor(tensors: Any) -> torch.Tensor | None:
    try:
        return next((t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad), None)
    except TypeError:
        return None
