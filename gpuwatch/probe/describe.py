"""What the objects that pass by tell of their configuration: DataLoader iterators and DDP."""

import multiprocessing
from typing import Any, NamedTuple

from gpuwatch.probe.text import wire_text
from gpuwatch.schema import Ddp, Loader

__all__ = [
    "DdpLogged",
    "ddp_logged",
    "describe_ddp",
    "describe_loader",
    "hook_names",
    "queue_depth",
]

_MOST_BUCKETS = 4096
_LONGEST_NS = 10**15  # both as in the schema


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
        collate=_name(getattr(iterator, "_collate_fn", None)),
        start_method=_start_method(iterator) if workers else "",
    )


def _name(function: Any) -> str:
    """Return what a person would call a function, or an object that is called like one."""
    if function is None:
        return ""
    inner = getattr(function, "func", function)  # functools.partial
    return wire_text(getattr(inner, "__name__", type(inner).__name__))


def _start_method(iterator: Any) -> str:
    """Return how the iterator's workers were started."""
    worker = iterator._workers[0]
    return wire_text(getattr(worker, "_start_method", None) or multiprocessing.get_start_method())


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
        comm_hook=_comm_hook(module, _logged(module)),
        parameters=sum(p.numel() for p in parameters),
        gradient_bytes=sum(p.numel() * p.element_size() for p in parameters),
        buffers=sum(1 for _ in module.buffers()),
        backend=wire_text(group.name()) if group is not None else "",
    )


class DdpLogged(NamedTuple):
    """What DDP's own logger has.

    `bucket_bytes` are the buckets in use, empty if they cannot be told. `comm_span_ns` is the time
    from the start of the first all-reduce to the end of the last one, in the iteration that was
    sampled last; None if there is none. `comm_hook` is as in `Ddp`.
    """

    bucket_bytes: tuple[int, ...]
    comm_span_ns: int | None
    comm_hook: str


def ddp_logged(module: Any) -> DdpLogged:
    """Read the logger of a DistributedDataParallel module; takes about 100 us."""
    logged = _logged(module)
    # Without rebuilding (unused parameters are looked for) those of the beginning stay.
    text = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
    try:
        sizes = tuple(int(part) for part in str(text).split(",") if part.strip())
    except ValueError:
        sizes = ()
    if len(sizes) > _MOST_BUCKETS or any(size <= 0 for size in sizes):
        sizes = ()  # the logger counts in 32 bits, and a bucket may be larger
    span_ns = logged.get("backward_comm_time")
    return DdpLogged(
        sizes,
        span_ns if isinstance(span_ns, int) and 0 < span_ns < _LONGEST_NS else None,
        _comm_hook(module, logged),
    )


def _logged(module: Any) -> dict[str, Any]:
    read = getattr(module, "_get_ddp_logging_data", None)
    if read is None or getattr(module, "logger", None) is None:
        return {}
    try:
        found = read()
    except (RuntimeError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def hook_names(module: Any) -> str:
    """Return what the Python hooks of a DistributedDataParallel module are called now."""
    hooks = getattr(module, "_comm_hooks", None)
    if not hooks:
        return ""
    return ",".join(str(getattr(hook[0], "__name__", type(hook[0]).__name__)) for hook in hooks)


def _comm_hook(module: Any, logged: dict[str, Any]) -> str:
    # A hook in C++ is in no list, but the logger is told its name.
    return wire_text(hook_names(module) or str(logged.get("comm_hook") or ""))
