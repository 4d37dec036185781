"""What a DataLoader iterator tells of its loader."""

from typing import Any

from gpuwatch.schema import Loader

__all__ = ["describe_loader", "queue_depth"]


def describe_loader(key: str, iterator: Any) -> Loader:
    """Return the arguments that the iterator was built with, and its workers."""
    sampler = iterator._index_sampler
    batch_size = getattr(sampler, "batch_size", None)
    try:
        length = len(sampler)
    except (TypeError, NotImplementedError):
        length = None
    workers = getattr(iterator, "_workers", ())
    return Loader(
        key=key,
        num_workers=iterator._num_workers,
        prefetch_factor=getattr(iterator, "_prefetch_factor", None),
        pin_memory=bool(iterator._pin_memory),
        persistent_workers=bool(iterator._persistent_workers),
        batch_size=batch_size if isinstance(batch_size, int) and batch_size >= 0 else None,
        drop_last=bool(iterator._drop_last),
        dataset=type(iterator._dataset).__name__[:256],
        length=length,
        worker_pids=tuple(w.pid for w in workers if w.pid is not None)[:4096],
    )


def queue_depth(iterator: Any) -> tuple[int | None, int | None]:
    """Return how many batches are ready and how many can be, None where it cannot be told."""
    try:
        ready = iterator._data_queue.qsize()
        # Batches that came out of order wait beside the queue.
        ready += sum(len(info) == 2 for info in iterator._task_info.values())
    except (AttributeError, NotImplementedError, RuntimeError):
        return None, None
    return ready, iterator._num_workers * iterator._prefetch_factor
