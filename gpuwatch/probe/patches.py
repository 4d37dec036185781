"""The marks: where torch is touched, and how it is put back.

Boundary marks only; nothing happens per module. Each wrapper acts in the training thread alone,
does nothing while torch compiles, and never raises: the first failure of a mark turns the probe
off with one line, and training goes on.
"""

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from gpuwatch.probe.accounting import Accountant
from gpuwatch.probe.describe import describe_ddp, describe_loader, queue_depth
from gpuwatch.schema import Ddp, Loader

__all__ = ["Marks", "batch_samples"]

_DEAR_NS = 100_000_000  # what costs over a microsecond is read at most ten times a second
_BATCH_NESTING = 3


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


class Marks:
    """Installs the marks on torch and feeds an `Accountant`.

    `loaders` and `ddp` describe what was seen, for the hello;
    `config_version` rises when there is something new.
    """

    def __init__(self, accountant: Accountant, warn: Callable[[str], None]) -> None:
        self._accountant = accountant
        self._warn = warn
        self._thread = threading.get_ident()
        self._adopted = False
        self._off = True
        self._undo: list[Callable[[], None]] = []
        self._dear_ns = 0
        self._keys: dict[int, tuple[weakref.ref[Any] | None, str]] = {}
        self._compute_end_ns: int | None = None
        self.engine_mark = True
        self.device = ""
        self.autocast = ""
        self.grad_scaler = False
        self.config_version = 0
        self.loaders: dict[str, Loader] = {}
        self.ddp: Ddp | None = None
        self._ddp_module: weakref.ref[Any] | None = None

    # --- install and remove --------------------------------------------------------------------

    def install(self) -> None:
        """Put the marks on. Raises whatever an unknown torch raises; `remove` undoes the rest."""
        self._off = False
        self._wrap(dataloader._BaseDataLoaderIter, "__next__", self._next)
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.amp.GradScaler, "step", self._scaler_step)
        if dist.is_available():
            from torch.nn.parallel import DistributedDataParallel

            self._wrap(DistributedDataParallel, "_pre_forward", self._ddp_pre_forward)
            self._wrap(DistributedDataParallel, "_sync_buffers", self._waiting)
            work = torch._C._distributed_c10d.Work
            self._wrap(work, "wait", self._waiting)
        before = register_optimizer_step_pre_hook(self._optimizer_before)
        after = register_optimizer_step_post_hook(self._optimizer_after)
        self._undo += [before.remove, after.remove]

    def remove(self) -> None:
        """Take the marks off, as far as nobody has wrapped them again since."""
        self._off = True
        while self._undo:
            self._undo.pop()()

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
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

    def _fail(self) -> None:
        """A mark has raised: say so once and never run again."""
        if self._off:
            return
        self._off = True
        kind, value = sys.exc_info()[:2]
        name = kind.__name__ if kind else "error"
        self._warn(f"the marks are off after an error of their own ({name}: {value})")

    def _here(self) -> bool:
        return not self._off and threading.get_ident() == self._thread

    def _adopt(self) -> None:
        """The thread of the first backward or optimizer step is the training thread."""
        self._adopted = True
        self._thread = threading.get_ident()

    # --- the loader ----------------------------------------------------------------------------

    def _next(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def fetch(iterator: Any) -> Any:
            if not self._here():
                return original(iterator)
            try:
                self._fetch_begin(iterator)
            except Exception:
                self._fail()
            try:
                batch = original(iterator)
            except BaseException:
                if not self._off:
                    self._accountant.fetch_stop()
                raise
            if not self._off:
                try:
                    self._accountant.fetch_end(batch_samples(batch))
                except Exception:
                    self._fail()
            return batch

        return fetch

    def _fetch_begin(self, iterator: Any) -> None:
        dataset = iterator._dataset
        known = self._keys.get(id(dataset))
        if known is None or (known[0] is not None and known[0]() is not dataset):
            known = self._new_loader(iterator, dataset)
        key = known[1]
        first = iterator._num_yielded == 0
        if first:
            self.loaders[key] = describe_loader(key, iterator)
            self.config_version += 1
        depth = capacity = None
        if iterator._num_workers:
            now = self._accountant.clock()
            if now - self._dear_ns >= _DEAR_NS:
                self._dear_ns = now
                depth, capacity = queue_depth(iterator)
        self._accountant.fetch_begin(key, first, depth, capacity)

    def _new_loader(self, iterator: Any, dataset: Any) -> tuple[weakref.ref[Any] | None, str]:
        try:
            alive: weakref.ref[Any] | None = weakref.ref(dataset)
        except TypeError:
            alive = None  # a list, say: its id is all there is
        known = (alive, f"loader{len(self._keys)}")
        self._keys[id(dataset)] = known
        return known

    # --- backward ------------------------------------------------------------------------------

    def _compute_ended(self) -> None:
        self._compute_end_ns = time.perf_counter_ns()

    def _root_hook(self, grad: Any) -> None:
        # Queued before DDP queues its finalizer, so it runs before DDP waits for its buckets: the
        # time from here to the return of backward is communication that nothing hides.
        if self._compute_end_ns is None:
            self._compute_end_ns = -1
            torch.autograd.Variable._execution_engine.queue_callback(self._compute_ended)

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(tensors, *args, **kwargs)
            if not self._adopted and not self._off:
                self._adopt()
            if not self._here():
                return original(tensors, *args, **kwargs)
            handle = None
            try:
                handle = self._backward_begin(tensors)
            except Exception:
                self._fail()
            try:
                return original(tensors, *args, **kwargs)
            finally:
                if handle is not None:
                    handle.remove()
                if not self._off:
                    ended_ns = self._compute_end_ns
                    self._accountant.backward_end(
                        ended_ns if ended_ns is not None and ended_ns > 0 else None
                    )

        return backward

    def _backward_begin(self, tensors: Any) -> Any:
        accountant = self._accountant
        accountant.backward_begin()
        self._compute_end_ns = None
        root = tensors if isinstance(tensors, torch.Tensor) else _first_tensor(tensors)
        if root is None or not root.requires_grad:
            return None
        if not self.device:
            self.device = str(root.device)
            self.config_version += 1
        if not self.engine_mark or not accountant.distributed:
            return None
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and compiled.compiled_autograd_enabled:
            # Its engine refuses callbacks, and refusing kills the training.
            self.engine_mark = False
            self._warn("compiled autograd refuses engine callbacks: exposed communication is n/a")
            return None
        return root.register_hook(self._root_hook)  # type: ignore[no-untyped-call]

    # --- communication -------------------------------------------------------------------------

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._here():
                return original(owner, *args, **kwargs)
            self._accountant.comm_begin()
            try:
                return original(owner, *args, **kwargs)
            finally:
                self._accountant.comm_end()

        return waiting

    def _ddp_pre_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _pre_forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and self._here():
                try:
                    self._see_ddp(ddp)
                except Exception:
                    self._fail()
            return original(ddp, *args, **kwargs)

        return _pre_forward

    def _see_ddp(self, ddp: Any) -> None:
        if self._ddp_module is None or self._ddp_module() is not ddp:
            self._ddp_module = weakref.ref(ddp)
            self.ddp = describe_ddp(ddp)
            self.config_version += 1

    # --- optimizer -----------------------------------------------------------------------------

    def _optimizer_before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self._off:
            return
        if not self._adopted:
            self._adopt()
        if self._here():
            self._accountant.optimizer_begin(id(optimizer))

    def _optimizer_after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and self._here():
            self._stepped = True
            self._accountant.optimizer_end(id(optimizer))

    _stepped = False

    def _scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._here():
                return original(scaler, optimizer, *args, **kwargs)
            if not self.grad_scaler:
                self.grad_scaler = True
                self.config_version += 1
            self._stepped = False
            self._accountant.optimizer_begin(id(optimizer))
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                # A scaler that found an infinity calls no optimizer, so no hook has fired.
                self._accountant.optimizer_end(id(optimizer), skipped=not self._stepped)

        return step


def _first_tensor(tensors: Any) -> torch.Tensor | None:
    try:
        return next((t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad), None)
    except TypeError:
        return None
