"""The marks: where torch is touched, and how it is put back.

Boundary marks only; nothing happens per module. Each mark acts in the training thread alone,
does nothing while torch compiles, and never raises: the first failure of a mark turns the probe
off with one line, and training goes on.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_compiling
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from gpuwatch.probe.comm import Comm
from gpuwatch.probe.describe import describe_loader, queue_depth
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
from gpuwatch.probe.swap import RAISED, Calls, SwapError, leave_uncompiled, swap
from gpuwatch.probe.workers import Workers
from gpuwatch.schema import Ddp, Loader

__all__ = ["Marks", "batch_samples"]

_DEAR_NS = 100_000_000  # what costs over a microsecond is read at most ten times a second
_BATCH_NESTING = 3
_KEY = "_gpuwatch_loader"
# What else writes checkpoints, where the script imports it.
_SAVERS = {
    "safetensors.torch": ("save_file", "save_model"),
    "torch.distributed.checkpoint": ("save",),
}


def batch_samples(batch: object, nesting: int = _BATCH_NESTING) -> int | None:
    """Return the first dimension of the first tensor in a batch, None if there is none near."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else None
    if nesting == 0:
        return None
    if isinstance(batch, Mapping):
        values: Any = batch.values()
    elif isinstance(batch, list | tuple):
        values = batch
    else:
        return None
    for value in values:
        found = batch_samples(value, nesting - 1)
        if found is not None:
            return found
        break
    return None


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
    when there is something new. `na` says of a phase why it cannot be known.
    """

    def __init__(self, recorder: Recorder, warn: Callable[[str], None]) -> None:
        self._recorder = recorder
        self._warn = warn
        self.thread = get_ident()  # 0 while the marks are off: no thread has that id
        self._adopted = False
        self._off = True
        self._awaited: Callable[[], None] | None = None
        self._undo: list[Callable[[], None]] = []
        self._dear_ns = 0
        self._keys: dict[object, tuple[weakref.ref[Any] | None, str]] = {}
        self._named = 0
        self._savers = dict(_SAVERS)
        self._end_queued = False
        self.engine_mark = True
        self.device = ""
        self.autocast = ""
        self.grad_scaler = False
        self.config_version = 0
        self.loaders: dict[str, Loader] = {}
        self.ddp: Ddp | None = None
        self.workers = Workers()
        self.comm = Comm(self, recorder)
        self.na: dict[str, str] = {}
        self.parallel: dict[str, None] = {}

    # --- install and remove --------------------------------------------------------------------

    def install(self) -> None:
        """Put the marks on. Raises whatever an unknown torch raises; `remove` undoes the rest."""
        self._off = False
        self.thread = get_ident()
        self.mark(dataloader._BaseDataLoaderIter, "__next__", self._fetch())
        self.wrap(dataloader._MultiProcessingDataLoaderIter, "__init__", self.workers.starting)
        self.mark(torch.autograd, "backward", self._backward())
        self.wrap(torch.amp.GradScaler, "step", self._scaler_step)
        if dist.is_available():
            self.comm.install()
        self.mark(torch, "save", self._save())
        self._mark_savers()
        leave_uncompiled(self._optimizer_before, self._optimizer_after)
        before = register_optimizer_step_pre_hook(self._optimizer_before)
        after = register_optimizer_step_post_hook(self._optimizer_after)
        self._undo += [before.remove, after.remove]

    def remove(self) -> None:
        """Take the marks off, as far as nobody has wrapped them again since."""
        self.silence()
        while self._undo:
            self._undo.pop()()

    def mark(self, owner: Any, name: str, calls: Calls) -> None:
        """Have the calls made around a function: within its code, or else around it."""
        begin, end = calls
        leave_uncompiled(begin, end)
        try:
            self._undo.append(swap(getattr(owner, name, None), begin, end))
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
        setattr(owner, name, wrapper)

        def undo() -> None:
            if getattr(owner, name, None) is wrapper:
                setattr(owner, name, original)

        self._undo.append(undo)

    def silence(self) -> None:
        """Turn every mark off without touching torch: in a forked child."""
        self._off = True
        self.thread = 0

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

    def _sign(self) -> bool:
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

        def fetch_begins(iterator: Any) -> bool:
            if get_ident() != self.thread and not self._sign():
                return False
            try:
                begin(iterator)
            except Exception:
                self.fail()
            return True

        def fetch_ends(begun: bool, batch: Any) -> Any:
            if begun:
                ended_ns = perf_counter_ns()
                if batch is RAISED:
                    recorder.push((FETCH_STOP, ended_ns, sys.exc_info()[0] is not StopIteration))
                    return None
                try:
                    recorder.push((FETCH_END, ended_ns, batch_samples(batch)))
                except Exception:
                    self.fail()
            return batch

        return fetch_begins, fetch_ends

    def _fetch_begin(self, iterator: Any) -> None:
        first = iterator._num_yielded == 0
        key = iterator.__dict__.get(_KEY)
        if first or key is None:
            key = self._see_loader(iterator)
        now_ns = perf_counter_ns()
        if now_ns - self._dear_ns < _DEAR_NS:
            self._recorder.push((FETCH_BEGIN, now_ns, key, first))
        else:
            self._dear_ns = now_ns
            self._recorder.push((FETCH_BEGIN, now_ns, key, first, *queue_depth(iterator)))

    def _see_loader(self, iterator: Any) -> str:
        """A new iterator: which loader is it of, and how is that configured?"""
        self._mark_savers()
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
        self.loaders[key] = describe_loader(key, iterator)
        self.workers.name(iterator, key)
        self.config_version += 1
        return key

    # --- backward ------------------------------------------------------------------------------

    def _compute_ended(self) -> None:
        self._recorder.push((COMPUTE_END, perf_counter_ns()))

    def _root_hook(self, grad: Any) -> None:
        # Queued before DDP queues its finalizer, so it runs before DDP waits for its buckets: the
        # time from here to the return of backward is communication that nothing hides.
        if not self._end_queued:
            self._end_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._compute_ended)

    def _backward(self) -> Calls:
        begin, recorder = self._backward_begin, self._recorder

        def backward_begins(tensors: Any) -> Any:
            if is_compiling():
                return None
            if get_ident() != self.thread and not self._sign() and not self._adopt():
                return None
            recorder.push((BACKWARD_BEGIN, perf_counter_ns()))
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

    def _backward_begin(self, tensors: Any) -> Any:
        root = tensors if isinstance(tensors, torch.Tensor) else _first_tensor(tensors)
        if root is None or not root.requires_grad:
            return None
        self._adopted = True
        if not self.device:
            self.device = str(root.device)
            self.config_version += 1
            self._mark_savers()
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

    def _mark_savers(self) -> None:
        """Mark what writes checkpoints, as far as the script has imported it by now."""
        for name in [name for name in self._savers if name in sys.modules]:
            for function in self._savers.pop(name):
                if hasattr(sys.modules[name], function):
                    self.mark(sys.modules[name], function, self._save())

    # --- optimizer -----------------------------------------------------------------------------

    def _optimizer_before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_compiling():
            return
        if get_ident() != self.thread and not self._sign() and not self._adopt():
            return
        self._adopted = True
        self._recorder.push((OPTIMIZER_BEGIN, perf_counter_ns(), id(optimizer)))

    def _optimizer_after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling() and get_ident() == self.thread:
            self._stepped = True
            self._recorder.optimizer_end(id(optimizer))

    _stepped = False

    def _scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or get_ident() != self.thread:
                return original(scaler, optimizer, *args, **kwargs)
            if not self.grad_scaler:
                self.grad_scaler = True
                self.config_version += 1
            self._stepped = False
            self._recorder.push((OPTIMIZER_BEGIN, perf_counter_ns(), id(optimizer)))
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                # A scaler that found an infinity calls no optimizer, so no hook has fired.
                self._recorder.optimizer_end(id(optimizer), not self._stepped)

        return step


def _first_tensor(tensors: Any) -> torch.Tensor | None:
    try:
        return next((t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad), None)
    except TypeError:
        return None
