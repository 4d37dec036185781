"""What the objects that pass by tell of their configuration: DataLoader iterators and DDP."""

from typing import Any

from gpuwatch.probe.text import wire_text
from gpuwatch.schema import Ddp, Loader

__all__ = ["describe_ddp", "describe_loader", "queue_depth"]


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
        dataset=wire_text(type(iterator._dataset).__name__),
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


def describe_ddp(module: Any) -> Ddp:
    """Return the settings of a DistributedDataParallel module."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    group = getattr(module, "process_group", None)
    return Ddp(
        bucket_cap_mb=getattr(module, "bucket_bytes_cap", 0) / 2**20 or None,
        find_unused_parameters=bool(getattr(module, "find_unused_parameters", False)),
        static_graph=bool(getattr(module, "static_graph", False)),
        broadcast_buffers=bool(
            getattr(module, "forward_sync_buffers", getattr(module, "broadcast_buffers", True))
        ),
        gradient_as_bucket_view=bool(getattr(module, "gradient_as_bucket_view", False)),
        comm_hook=_comm_hook(module),
        parameters=sum(p.numel() for p in parameters),
        gradient_bytes=sum(p.numel() * p.element_size() for p in parameters),
        buffers=sum(1 for _ in module.buffers()),
        backend=wire_text(group.name()) if group is not None else "",
    )


def _comm_hook(module: Any) -> str:
    hooks = getattr(module, "_comm_hooks", None) or []
    names = [getattr(hook[0], "__name__", type(hook[0]).__name__) for hook in hooks]
    return wire_text(",".join(names))
