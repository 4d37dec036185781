"""Loader workers that time themselves, seen from the training process.

When an iterator starts its workers, each gets a slot in shared memory to write what its batches
cost (`gpuwatch.probe.workerclock`). Nothing of this happens in a step: the training thread pays
when an iterator is made, and the telemetry thread reads the slots.

The memory has no name: forked workers inherit it, spawned ones get its file descriptor. So there
is no file that a killed process could leave behind.
"""

import contextlib
import functools
import mmap
import multiprocessing.reduction
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from gpuwatch.probe import workerclock
from gpuwatch.probe.workerclock import SLOT_FIELDS, Slot
from gpuwatch.schema import WorkerCost

__all__ = ["Workers"]

READ_S = 1.0
KEPT_READINGS = 12
"""Past readings for a monitor that comes late: rates are differences over ten seconds."""

_MOST_WORKERS = 256
"""Of all loaders together in one reading; beyond, the rest stays unseen."""

# Runs in a spawned worker while it unpickles its arguments, and leaves the user's function where
# ours was. Nothing here may need gpuwatch: where the worker cannot import it, it works as before.
_ARRIVE = """
try:
    from gpuwatch.probe.workerclock import arrive
    arrive(handle, queue)
except Exception:
    pass
"""
_ARRIVE_AND_RETURN = "exec(code) or init_fn"


def _nothing(worker_id: int) -> None:
    """A `worker_init_fn` for a context that pickles nothing, where the user has none."""


class _Carrier(functools.partial):  # type: ignore[type-arg]
    """Stands for the user's `worker_init_fn` on the way to a spawned worker.

    Unpickling it sets the clock up and gives the user's own function, None included. A partial,
    so that calling it leaves no frame, should a context not pickle.
    """

    user_fn: Any
    iterator: Any
    fd: int

    @classmethod
    def of(cls, user_fn: Any, iterator: Any, fd: int) -> "_Carrier":
        carrier = cls(_nothing if user_fn is None else user_fn)
        carrier.user_fn, carrier.iterator, carrier.fd = user_fn, iterator, fd
        return carrier

    def __reduce__(self) -> Any:
        if self.iterator is None:
            return eval, ("init_fn", {"init_fn": self.user_fn})
        names = {
            "code": _ARRIVE,
            "init_fn": self.user_fn,
            "handle": multiprocessing.reduction.DupFd(self.fd),
            # The same object as among the worker's arguments: pickle keeps that so.
            "queue": self.iterator._worker_result_queue,
        }
        return eval, (_ARRIVE_AND_RETURN, names)


class _Disguise:
    """The user's loader with another `worker_init_fn`, so that the loader itself stays as it is."""

    def __init__(self, loader: Any, worker_init_fn: Any) -> None:
        vars(self).update(_loader=loader, worker_init_fn=worker_init_fn)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_loader"], name, value)

    @property
    def __class__(self) -> Any:
        return type(vars(self)["_loader"])

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("not of a loader that starts")


class _Start:
    """One iterator whose workers start, and its slots ever after."""

    def __init__(self, iterator: Any, workers: int) -> None:
        self.iterator = weakref.ref(iterator)
        self.key = ""
        self.fd = os.memfd_create("gpuwatch-workers", os.MFD_CLOEXEC)
        try:
            size = workers * SLOT_FIELDS * 8
            os.ftruncate(self.fd, size)
            self.slots = memoryview(mmap.mmap(self.fd, size)).cast("q")
        except BaseException:
            os.close(self.fd)
            raise
        self.carrier: _Carrier | None = None

    def disguise(self, iterator: Any, loader: Any) -> Any:
        """Return what the iterator is given for the loader."""
        context = loader.multiprocessing_context or torch.multiprocessing
        if context.get_start_method() == "fork":
            return loader
        self.carrier = _Carrier.of(loader.worker_init_fn, iterator, self.fd)
        return _Disguise(loader, self.carrier)

    def finish(self, iterator: Any) -> None:
        """The workers have started, or failed to: leave nothing in the iterator."""
        os.close(self.fd)
        carrier = self.carrier
        if carrier is None:
            return
        carrier.iterator = None  # or the iterator would hold itself, and outlive its last user
        left = vars(iterator).get("_worker_init_fn")
        if left is carrier:
            iterator._worker_init_fn = carrier.user_fn
        elif isinstance(left, functools.partial) and carrier in left.args:
            args = (carrier.user_fn if arg is carrier else arg for arg in left.args)
            iterator._worker_init_fn = functools.partial(left.func, *args, **left.keywords)

    def read(self, now_ns: int) -> list[WorkerCost]:
        found = []
        for at in range(0, len(self.slots), SLOT_FIELDS):
            slot = self.slots[at : at + SLOT_FIELDS].tolist()
            if not slot[Slot.PID]:
                continue  # no batch yet
            started_ns = slot[Slot.STARTED_NS]
            found.append(
                WorkerCost(
                    self.key,
                    slot[Slot.PID],
                    slot[Slot.BATCHES],
                    slot[Slot.WALL_NS],
                    slot[Slot.CPU_NS],
                    slot[Slot.COLLATE_NS],
                    max(0, now_ns - started_ns) if started_ns else 0,
                )
            )
        return found


# What the forking thread is starting: the only way from here into the child of a fork.
_starting = threading.local()
_fork_hooked = False


def _after_fork() -> None:
    start, iterator = vars(_starting).get("now", (None, None))
    if start is not None:
        vars(_starting).clear()
        with contextlib.suppress(Exception):
            workerclock.install(start.slots, iterator._worker_result_queue)


class Workers:
    """The workers of all loaders of this process.

    `starting` belongs around `_MultiProcessingDataLoaderIter.__init__`, `name` is called once an
    iterator has a key. The rest is for the telemetry thread. Nothing raises.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._starts: list[_Start] = []
        self._read_s = 0.0
        self._readings: deque[tuple[float, tuple[WorkerCost, ...]]] = deque(maxlen=KEPT_READINGS)

    def starting(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return an `__init__` of the iterator whose workers time themselves."""

        def start_workers(iterator: Any, loader: Any) -> None:
            start, passed = self._start(iterator, loader)
            try:
                original(iterator, passed)
            finally:
                if start is not None:
                    self._started(iterator, start)

        return start_workers

    def _start(self, iterator: Any, loader: Any) -> tuple[_Start | None, Any]:
        global _fork_hooked
        if os.getpid() != self._pid or vars(_starting).get("now") is not None:
            return None, loader
        try:
            start = _Start(iterator, loader.num_workers)
        except Exception:
            return None, loader
        try:
            if not _fork_hooked:
                os.register_at_fork(after_in_child=_after_fork)
                _fork_hooked = True
            passed = start.disguise(iterator, loader)
        except Exception:
            passed = loader
        _starting.now = (start, iterator)
        return start, passed

    def _started(self, iterator: Any, start: _Start) -> None:
        vars(_starting).clear()
        with contextlib.suppress(Exception):
            start.finish(iterator)
            self._starts.append(start)

    def name(self, iterator: Any, key: str) -> None:
        """The batches of this iterator are those of loader `key`."""
        for start in self._starts:
            if start.iterator() is iterator:
                start.key = key

    # --- the telemetry thread ------------------------------------------------------------------

    def fresh(self) -> tuple[WorkerCost, ...]:
        """Return the totals of every worker, once a second; empty in between."""
        now_s = time.monotonic()
        if now_s - self._read_s < READ_S:
            return ()
        self._read_s = now_s
        try:
            costs = self._read()
        except Exception:
            return ()
        if costs and (not self._readings or _batches(costs) != _batches(self._readings[-1][1])):
            self._readings.append((now_s, costs))
        return costs

    def _read(self) -> tuple[WorkerCost, ...]:
        now_ns = time.monotonic_ns()
        costs: list[WorkerCost] = []
        for start in list(self._starts):
            # Asked before the slots are read: what a worker did last is read once more.
            ended = start.iterator() is None
            if start.key:
                costs += start.read(now_ns)
            if ended:
                self._starts.remove(start)
        return tuple(costs[:_MOST_WORKERS])

    def past(self) -> tuple[WorkerCost, ...]:
        """Return what was read before, each with its age, oldest first, for a snapshot."""
        now_s = time.monotonic()
        return tuple(
            WorkerCost(
                cost.loader,
                cost.pid,
                cost.batches,
                cost.wall_ns,
                cost.cpu_ns,
                cost.collate_ns,
                cost.busy_ns,
                max(0.0, now_s - read_s),
            )
            for read_s, costs in list(self._readings)
            for cost in costs
        )


def _batches(costs: tuple[WorkerCost, ...]) -> list[tuple[int, int]]:
    return [(cost.pid, cost.batches) for cost in costs]
