"""What memory is in use, and what to say when it has run out."""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from trainer.distributed import Placement
from trainer.errors import ConfigError
from trainer.memory.host import available_bytes, cgroup_limit_bytes, status_bytes

__all__ = [
    "dump_snapshot",
    "is_out_of_memory",
    "memory_summary",
    "oom_sentence",
    "record_snapshot",
    "saved_bytes",
]

_SNAPSHOT_ENTRIES = 100_000

# Libraries below torch raise a plain RuntimeError. Lower case; matched anywhere in the message.
_OOM_WORDS = (
    "out of memory",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "cannot allocate memory",
    "std::bad_alloc",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cufft_alloc_failed",
    "cudaerrormemoryallocation",
    # Out of address space there is no room for the stack of a thread either.
    "can't start new thread",
)
_WANTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]i?B)", re.IGNORECASE)
_TOTAL = re.compile(r"total capacity of ([\d.]+ [KMGT]iB)")
_FREE = re.compile(r"of which ([\d.]+ [KMGT]iB) is free")


def memory_summary(device: torch.device) -> list[str]:
    """One line per figure, each with its unit; what is not known is n/a, with the reason.

    CUDA: what torch's allocator holds of the device. Else: what the kernel says of this process.
    """
    return _cuda_summary(device) if device.type == "cuda" else _host_summary()


def record_snapshot() -> None:
    """Keep the history that `dump_snapshot` writes, from now on. Costs time: only when asked for.

    Raises `ConfigError` without CUDA.
    """
    _need_cuda()
    torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_ENTRIES)


def dump_snapshot(path: Path) -> None:
    """Write the CUDA allocator's snapshot; pytorch.org/memory_viz draws it.

    Raises `ConfigError` without CUDA, or where the file cannot be written.
    """
    _need_cuda()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ConfigError(f"cannot write memory.snapshot={path}: {error.strerror}") from None


def saved_bytes(fn: Callable[[], object], *, without: nn.Module | None = None) -> int:
    """Bytes that autograd keeps for the backward of what `fn` computes, on any device.

    `fn` does the forward alone, and returns what holds the graph. Views of one storage count
    once. The parameters of `without` are kept anyway and do not count.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    known = {p.untyped_storage().data_ptr() for p in without.parameters()} if without else set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Held until the end, so that no address is used twice.
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return sum(storage.nbytes() for storage in storages.values())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory has run out: of the device, of the address space, or of the machine."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError | OSError):
        return False
    text = str(error).lower()
    return any(words in text for words in _OOM_WORDS)


def oom_sentence(error: BaseException, batch_size: int, placement: Placement) -> str:
    """What was wanted, what there is, and what to change: one sentence."""
    text = str(error)
    wanted = _WANTED.search(text)
    what = f"{_amount(wanted)} more were wanted" if wanted else "more was wanted"
    where = f"rank {placement.rank}" if placement.world_size > 1 else "the training"
    if placement.device.type == "cuda":
        total, free = _TOTAL.search(text), _FREE.search(text)
        there = (
            f"{placement.device} has {total[1]}, of which {free[1]} are free"
            if total and free
            else f"{placement.device} has no more"
        )
    else:
        left = available_bytes()
        there = "the machine has no more" if left is None else f"the machine has {_mib(left)} left"
    return (
        f"{where} ran out of memory with loader.batch_size={batch_size}: {what} and {there}; "
        "lower loader.batch_size (trainer find-batch-size finds the largest that fits), raise "
        "train.accumulate to keep the samples of a step, or set memory.checkpoint_activations=true"
    )


def _need_cuda() -> None:
    if not torch.cuda.is_available():
        raise ConfigError(
            "memory.snapshot needs train.device=cuda: the CPU's allocator keeps no history"
        )


def _cuda_summary(device: torch.device) -> list[str]:
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    rows = [
        ("in tensors", stats.get("allocated_bytes.all.current")),
        ("in tensors, peak", stats.get("allocated_bytes.all.peak")),
        ("held by torch", stats.get("reserved_bytes.all.current")),
        ("held by torch, peak", stats.get("reserved_bytes.all.peak")),
        ("free on the device", free),
        ("on the device", total),
    ]
    lines = [_line(name, value, "the allocator does not count it") for name, value in rows]
    # Retries: the cache was emptied to make room, which waits for the device.
    for name, key in (("allocator retries", "num_alloc_retries"), ("out of memory", "num_ooms")):
        count = stats.get(key)
        shown = "n/a (the allocator does not count it)" if count is None else f"{count:,} times"
        lines.append(f"{name}: {shown}")
    return lines


def _host_summary() -> list[str]:
    unknown = "no /proc here"
    return [
        _line("resident", status_bytes("VmRSS"), unknown),
        _line("resident, peak", status_bytes("VmHWM"), unknown),
        _line("limit of the cgroup", cgroup_limit_bytes(), "it has none"),
        _line("left", available_bytes(), unknown),
    ]


def _line(name: str, value: int | None, reason: str) -> str:
    return f"{name}: {_mib(value)}" if value is not None else f"{name}: n/a ({reason})"


def _mib(value: int) -> str:
    return f"{value / 2**20:,.1f} MiB"


def _amount(found: re.Match[str]) -> str:
    if found[2].lower() == "bytes":
        return _mib(int(float(found[1])))
    return f"{found[1]} {found[2]}"
