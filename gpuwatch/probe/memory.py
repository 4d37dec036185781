"""The memory of this process, as the `memory` command tells it: read at once, also in a hang.

What the kernel knows is read from /proc. A GPU is only asked while the training moves: torch's
counters are behind the allocator's lock, and asking waits for it with the GIL held; in a hang
whoever holds that lock may wait for the device for ever. Then what the training thread read last
is told. Nothing initialises CUDA or resets a peak.
"""

import contextlib
import gc
import json
import os
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from gpuwatch.probe.device import DeviceMemory
from gpuwatch.probe.text import wire_text

__all__ = ["memory_document", "tensors_of"]

_CHILDREN = 256
_MOST_OBJECTS = 600_000
_MOST_CPU_S = 0.2
_MOST_WALL_S = 2.0
"""A bare process with torch has 290,000 objects. Listing them holds the GIL, 40 ms for those on a
busy machine, and sorting tensors out as long again; what is then read of each, in Python, gives way
to the training, so that time of its own is what counts."""

_NOT_ASKED = "press T on the memory page: it walks over all objects"
_LARGEST = 10
_LOOK_EVERY = 4096
MOVING_NS = 2_000_000_000
"""A mark within this time: the training moves, and the allocator may be asked."""


def memory_document(
    *, moving: bool, index: int | None, last: DeviceMemory | None, want_tensors: bool
) -> str:
    """Return the memory of this process as JSON text.

    Args:
        moving: whether the training moves, so that the allocator may be asked.
        index: of the CUDA device that trains, None where there is none.
        last: what the training thread read of it last.
        want_tensors: walk over Python's objects for tensors, which delays the training once.
    """
    cuda, cuda_reason = _cuda(moving, index, last)
    found, objects, reason = None, None, _NOT_ASKED
    if want_tensors:
        found, objects, reason = tensors_of()
    return json.dumps(
        {
            "schema": 1,
            **_process(os.getpid()),
            "children": _children(),
            "cuda": cuda,
            "cuda_reason": cuda_reason,
            "python": {"gc_counts": list(gc.get_count()), "objects": objects},
            "tensors": found,
            "tensors_reason": reason,
        }
    )


# --- the kernel's view -------------------------------------------------------------------------


def _process(pid: int) -> dict[str, int | None]:
    try:
        size, resident, shared = (int(part) for part in _read(pid, "statm").split()[:3])
    except (OSError, ValueError):
        return {"rss_bytes": None, "vms_bytes": None, "shared_bytes": None}
    page = os.sysconf("SC_PAGE_SIZE")
    return {"rss_bytes": resident * page, "vms_bytes": size * page, "shared_bytes": shared * page}


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(errors="replace")


def _children() -> list[dict[str, Any]]:
    """Return the children and theirs, largest first; those that end meanwhile are left out."""
    found = []
    waiting = _children_of(os.getpid())
    known: set[int] = set()
    while waiting and len(known) < _CHILDREN:
        pid = waiting.pop(0)
        if pid in known:
            continue
        known.add(pid)
        rss = _process(pid)["rss_bytes"]
        if rss is not None:
            with contextlib.suppress(OSError):
                name = wire_text(_read(pid, "comm").strip())
                found.append({"pid": pid, "rss_bytes": rss, "name": name})
        waiting += _children_of(pid)
    return sorted(found, key=lambda child: -child["rss_bytes"])


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, _read(pid, f"task/{thread}/children").split())
    return found


# --- the allocator's view ----------------------------------------------------------------------


def _cuda(
    moving: bool, index: int | None, last: DeviceMemory | None
) -> tuple[list[dict[str, Any]], str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return [], "CUDA is not in use in this process"
    if moving:
        try:
            return _asked(torch), ""
        except Exception as exc:
            return [], f"CUDA cannot be asked: {type(exc).__name__}: {exc}".splitlines()[0][:256]
    if index is None or last is None:
        return [], "the training stands still, and its allocator was not read before"
    return [
        {
            "device": index,
            "name": None,
            "allocated_bytes": last.allocated,
            "reserved_bytes": last.reserved,
            "peak_allocated_bytes": last.peak,
            "peak_reserved_bytes": None,
            "free_bytes": None,
            "total_bytes": None,
            "ooms": None,
            "retries": last.retries,
        }
    ], "the training stands still: as its own thread read it last"


def _asked(torch: Any) -> list[dict[str, Any]]:
    found = []
    current = torch.cuda.current_device()
    for index in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats(index)
        # Asking for what is free makes a context on a device that has none: on used ones only.
        if index != current and not stats.get("reserved_bytes.all.peak"):
            continue
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "device": index,
                "name": wire_text(torch.cuda.get_device_properties(index).name),
                "allocated_bytes": stats.get("allocated_bytes.all.current"),
                "reserved_bytes": stats.get("reserved_bytes.all.current"),
                "peak_allocated_bytes": stats.get("allocated_bytes.all.peak"),
                "peak_reserved_bytes": stats.get("reserved_bytes.all.peak"),
                "free_bytes": free,
                "total_bytes": total,
                "ooms": stats.get("num_ooms"),
                "retries": stats.get("num_alloc_retries"),
            }
        )
    return found


# --- tensors -----------------------------------------------------------------------------------


def tensors_of(
    most_objects: int = _MOST_OBJECTS,
    most_cpu_s: float = _MOST_CPU_S,
    most_wall_s: float = _MOST_WALL_S,
) -> tuple[dict[str, Any] | None, int | None, str]:
    """Return (the tensors that Python knows, its number of objects, why there are none).

    What only the autograd graph holds is not among them. Storages that tensors share count once.
    None of the objects is kept alive but the one that is being read.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None, None, "torch is not imported"
    began_cpu_s, began_s = time.thread_time(), time.perf_counter()

    def is_late(at: int) -> bool:
        return at % _LOOK_EVERY == 0 and (
            time.thread_time() - began_cpu_s > most_cpu_s
            or time.perf_counter() - began_s > most_wall_s
        )

    # By exact type: asking an object for its class may run code of the user's.
    kinds = _subclasses(torch.Tensor)
    objects = gc.get_objects()
    count = len(objects)
    if count > most_objects:
        del objects
        return None, count, f"{count:,} objects are over the {most_objects:,} that are walked over"
    late = f"walking over {count:,} objects takes over {most_cpu_s * 1e3:.0f} ms"
    # At once: the last reference to what the list holds should not be dropped by this thread.
    known = [weakref.ref(one) for one in objects if type(one) in kinds]
    del objects
    by_form: dict[tuple[str, str, str], list[int]] = {}
    storages: set[int] = set()
    total = tensors = 0
    for at, reference in enumerate(known):
        if is_late(at):
            return None, count, late
        one = reference()
        if one is None:
            continue
        try:
            form = str(tuple(one.shape)), str(one.dtype).removeprefix("torch."), str(one.device)
            storage = one.untyped_storage()
            size, place = storage.nbytes(), storage.data_ptr()
        except Exception:
            continue  # one without a storage: sparse, fake, on the way
        finally:
            one = storage = None
        tensors += 1
        seen = place in storages and place != 0
        storages.add(place)
        row = by_form.setdefault(form, [0, 0])
        row[0] += 1
        row[1] += 0 if seen else size
        total += 0 if seen else size
    largest = sorted(by_form.items(), key=lambda item: -item[1][1])[:_LARGEST]
    rows = [
        {"shape": shape, "dtype": dtype, "device": device, "bytes": size, "count": number}
        for (shape, dtype, device), (number, size) in largest
    ]
    return {"count": tensors, "bytes": total, "largest": rows}, count, ""


def _subclasses(kind: type) -> set[type]:
    found = {kind}
    waiting = [kind]
    while waiting:
        below: list[type] = type.__subclasses__(waiting.pop())
        for sub in below:
            if sub not in found:
                found.add(sub)
                waiting.append(sub)
    return found
