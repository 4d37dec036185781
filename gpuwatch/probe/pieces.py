"""What a profile tells: operators, kernels and communication, from torch's raw events.

Pure functions over `Piece`s. torch's own `key_averages` gives the same sums per operator (a test
compares them) and takes a hundred times as long, with the GIL: too much beside a training.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["Piece", "Summary", "covered_ns", "operators", "overlap_ns", "pieces_of", "summarise"]

MOST_OPERATORS = 20

_HIDDEN = frozenset(
    {
        # Bookkeeping of torch's own, which its tables leave out as well.
        "profiler::_record_function_enter",
        "profiler::_record_function_enter_new",
        "profiler::_record_function_exit",
        "aten::is_leaf",
        "aten::output_nr",
        "aten::_version",
    }
)
_COMM = ("gloo:", "nccl:")
_COMM_KERNEL = "nccl"
_COMPUTE = "aten::"

Interval = tuple[int, int]


class Piece(NamedTuple):
    """One event: on a thread of the host, or on the device. Times are ns on one clock.

    `is_async` events begin and end in different places, and contain nothing. `id` is what a device
    event names as its `parent`: the operator that launched it.
    """

    name: str
    start_ns: int
    end_ns: int
    thread: int = 0
    on_device: bool = False
    is_kernel: bool = False
    is_async: bool = False
    id: int = 0
    parent: int = 0


class Summary(NamedTuple):
    """What is told of a profile; None with the reason in `na`."""

    clock: str
    operators: list[dict[str, Any]]
    kernel_share: float | None
    comm_ms: float | None
    comm_overlap_share: float | None
    na: dict[str, str]


def pieces_of(events: Iterable[Any]) -> list[Piece]:
    """Return torch's raw events as pieces, without what its tables leave out too."""
    found = []
    for event in events:
        name = event.name()
        if name in _HIDDEN or event.is_hidden_event() or name == "[memory]":
            continue
        on_device = event.device_type().name != "CPU"
        if on_device and event.is_user_annotation():
            continue  # a range of the host's, drawn on the device
        kind = event.activity_type() if on_device else ""
        thread = event.start_thread_id()
        found.append(
            Piece(
                name,
                event.start_ns(),
                event.start_ns() + event.duration_ns(),
                thread,
                on_device,
                kind == "kernel",
                event.is_async() or thread != event.end_thread_id(),
                event.correlation_id(),
                event.linked_correlation_id(),
            )
        )
    return found


def operators(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Return every operator's calls and times, by self time on the clock that decides.

    `total_ms` counts what an operator contains, `self_ms` does not; `device_self_ms` is the time
    of the kernels that it launched, None without any. `share` is that of the sum of self times. One
    that contains nothing but another of its name counts as one, as it does with torch.
    """
    rows: dict[str, list[float]] = {}
    names: dict[int, str] = {}
    by_thread: dict[int, list[Piece]] = {}
    for piece in pieces:
        if piece.on_device:
            continue
        row = rows.setdefault(piece.name, [0, 0, 0, 0])
        row[0] += 1
        row[2] += piece.end_ns - piece.start_ns
        if piece.is_async:
            continue
        if piece.id:
            names[piece.id] = piece.name
        by_thread.setdefault(piece.thread, []).append(piece)
    for own in by_thread.values():
        own.sort(key=lambda piece: (piece.start_ns, -piece.end_ns))
        open_now: list[int] = []
        inside = [-1] * len(own)
        contained = [0] * len(own)
        for at, piece in enumerate(own):
            while open_now and own[open_now[-1]].end_ns <= piece.start_ns:
                open_now.pop()
            length_ns = piece.end_ns - piece.start_ns
            rows[piece.name][1] += length_ns
            if open_now and piece.end_ns <= own[open_now[-1]].end_ns:
                outer = inside[at] = open_now[-1]
                contained[outer] += 1
                rows[own[outer].name][1] -= length_ns
            open_now.append(at)
        for outer, piece in zip(inside, own, strict=True):
            if outer >= 0 and contained[outer] == 1 and own[outer].name == piece.name:
                rows[piece.name][0] -= 1
                rows[piece.name][2] -= piece.end_ns - piece.start_ns
    device = False
    for piece in pieces:
        if piece.on_device and piece.parent in names:
            rows[names[piece.parent]][3] += piece.end_ns - piece.start_ns
            device = True
    by = 3 if device else 1
    whole = sum(row[by] for row in rows.values())
    ordered = sorted(rows.items(), key=lambda item: (-item[1][by], -item[1][1]))
    return [
        {
            "name": name,
            "calls": int(calls),
            "self_ms": self_ns / 1e6,
            "total_ms": total_ns / 1e6,
            "share": row[by] / whole if whole else 0.0,
            "device_self_ms": device_ns / 1e6 if device else None,
        }
        for name, row in ordered
        for calls, self_ns, total_ns, device_ns in [row]
    ]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return what the intervals cover, in order and without overlaps."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def covered_ns(intervals: Iterable[Interval]) -> int:
    """Return how long at least one of the intervals lasts."""
    return sum(end - start for start, end in _union(intervals))


def overlap_ns(one: Iterable[Interval], other: Iterable[Interval]) -> int:
    """Return how long an interval of both sides lasts."""
    mine, theirs = _union(one), _union(other)
    at = total = 0
    for start, end in mine:
        while at < len(theirs) and theirs[at][1] <= start:
            at += 1
        k = at
        while k < len(theirs) and theirs[k][0] < end:
            total += min(end, theirs[k][1]) - max(start, theirs[k][0])
            k += 1
    return total


def summarise(pieces: Sequence[Piece], wall_ns: int, *, world_size: int) -> Summary:
    """Return what is told of the pieces of steps that took `wall_ns` in all."""
    kernels = [piece for piece in pieces if piece.is_kernel]
    na: dict[str, str] = {}
    share = None
    if kernels and wall_ns > 0:
        share = min(1.0, covered_ns(_spans(kernels)) / wall_ns)
    else:
        na["kernel_share"] = "no kernel ran on a device in these steps"
    comm = [piece for piece in kernels if piece.name.startswith(_COMM_KERNEL)]
    if comm:
        compute = [piece for piece in kernels if not piece.name.startswith(_COMM_KERNEL)]
    else:
        comm = [p for p in pieces if not p.on_device and p.name.startswith(_COMM)]
        compute = [p for p in pieces if not p.on_device and p.name.startswith(_COMPUTE)]
    comm_ms = overlap = None
    if not comm:
        why = "one process" if world_size == 1 else "no gloo or NCCL operation ran in these steps"
        na["comm_ms"] = na["comm_overlap_share"] = why
    else:
        comm_ms = sum(piece.end_ns - piece.start_ns for piece in comm) / 1e6
        whole_ns = covered_ns(_spans(comm))
        if whole_ns and compute:
            overlap = overlap_ns(_spans(comm), _spans(compute)) / whole_ns
        else:
            na["comm_overlap_share"] = "no computation was seen beside it"
    clock = "device" if kernels else "host"
    return Summary(clock, operators(pieces)[:MOST_OPERATORS], share, comm_ms, overlap, na)


def _spans(pieces: Iterable[Piece]) -> list[Interval]:
    return [(piece.start_ns, piece.end_ns) for piece in pieces]
