"""Inside a loader worker: what each batch costs there, written where the rank can read it.

No frame of ours is on the stack while the user's code runs, so that a traceback from a worker
reads as it would without us. `_worker_loop` looks up `fetcher.fetch` right before a batch, the
fetcher looks up its `collate_fn` right before collating, and the loop puts the batch into its
queue right after: two properties and one wrapped `put` see all three moments from outside.

A slot has one writer. Its fields are aligned 8-byte integers, written through a memoryview of
format `q`, which is a single store on x86-64 and arm64: a reader never sees half of one. Between
fields a reader may be one batch off, which a difference over many batches does not show.
"""

import mmap
import os
import time
from collections.abc import Callable
from typing import Any

__all__ = ["SLOT_FIELDS", "Slot", "arrive", "install"]

SLOT_FIELDS = 8
"""Of 8 bytes each: a slot is a cache line, so that workers do not slow each other."""


class Slot:
    """Places of the fields in a slot. Totals count since the worker started."""

    PID = 0
    BATCHES = 1
    WALL_NS = 2
    CPU_NS = 3
    COLLATE_NS = 4
    STARTED_NS = 5
    """Monotonic clock at the start of the batch that is being made, 0 between batches."""


class _Clock:
    """Times the batches of this worker.

    CPU is that of the whole process, not of the thread: items that are decoded by a pool of
    threads, Python's or a C library's, would look like waiting otherwise. The thread that sends
    the batch before is in it too; its work is part of what a batch costs.
    """

    def __init__(self, slots: memoryview, worker_info: Callable[[], Any]) -> None:
        self._slots = slots
        self._worker_info = worker_info
        self._at: int | None = None
        self._fetcher: object = None
        self._wall_ns = self._cpu_ns = self._collate_ns = 0

    def stop(self) -> None:
        """Never time again."""
        self._fetcher = self  # as in a batch that does not end
        self._at = None

    def fetching(self, fetcher: object) -> None:
        """A batch begins."""
        if self._fetcher is not None:
            return  # a loader within the dataset: its batches are part of ours
        if self._at is None:
            info = self._worker_info()
            if info is None or (info.id + 1) * SLOT_FIELDS > len(self._slots):
                return
            self._at = info.id * SLOT_FIELDS
            self._slots[self._at + Slot.PID] = os.getpid()
        self._fetcher = fetcher
        self._collate_ns = 0
        self._cpu_ns = time.process_time_ns()
        self._wall_ns = time.monotonic_ns()
        self._slots[self._at + Slot.STARTED_NS] = self._wall_ns

    def collating(self, fetcher: object) -> None:
        """The items of the batch are there."""
        if self._fetcher is fetcher:
            self._collate_ns = time.monotonic_ns()

    def put(self, count: bool) -> None:
        """The batch is done; `count` is false for an exception or the end of the data."""
        if self._fetcher is None or self._at is None:
            return
        self._fetcher = None
        now_ns = time.monotonic_ns()
        slots, at = self._slots, self._at
        if count:
            slots[at + Slot.CPU_NS] += time.process_time_ns() - self._cpu_ns
            slots[at + Slot.WALL_NS] += now_ns - self._wall_ns
            if self._collate_ns:
                slots[at + Slot.COLLATE_NS] += now_ns - self._collate_ns
            slots[at + Slot.BATCHES] += 1
        slots[at + Slot.STARTED_NS] = 0


_installed = False


def install(slots: memoryview, queue: Any) -> None:
    """Time this worker from now on. For a process that is a loader worker and nothing else.

    Args:
        slots: of all workers of the loader, format `q`.
        queue: the worker's end of the queue that takes its batches.
    """
    global _installed
    if _installed:
        return
    from torch._utils import ExceptionWrapper
    from torch.utils.data._utils import fetch, worker

    clock = _Clock(slots, worker.get_worker_info)
    no_batch = (ExceptionWrapper, worker._IterableDatasetStopIteration)
    original_put = queue.put

    def put(task: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            clock.put(not isinstance(task[1], no_batch))
        except Exception:
            clock.stop()
        return original_put(task, *args, **kwargs)

    def collate_of(fetcher: Any) -> Any:
        clock.collating(fetcher)
        return fetcher.__dict__["collate_fn"]

    def set_collate(fetcher: Any, collate_fn: Any) -> None:
        fetcher.__dict__["collate_fn"] = collate_fn

    def timed(original: Any) -> property:
        def fetch_of(fetcher: Any) -> Any:
            try:
                clock.fetching(fetcher)
            except Exception:
                clock.stop()
            return original.__get__(fetcher)

        return property(fetch_of)

    classes: tuple[Any, ...] = (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
    properties = [timed(cls.fetch) for cls in classes]
    queue.put = put
    for cls, found in zip(classes, properties, strict=True):
        cls.collate_fn = property(collate_of, set_collate)
        cls.fetch = found
    _installed = True


def arrive(handle: Any, queue: Any) -> None:
    """Time this worker, which was spawned and has got the slots as a file descriptor."""
    fd = handle.detach()
    try:
        mapping = mmap.mmap(fd, 0)
    finally:
        os.close(fd)
    install(memoryview(mapping).cast("q"), queue)
