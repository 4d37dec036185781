"""What a batch costs in the loader's workers, from the totals that they report."""

import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

from gpuwatch.errors import FrameError
from gpuwatch.frames import decode_costs
from gpuwatch.schema import WorkerCost

__all__ = ["BatchCost", "Totals", "WorkerBatch", "WorkerTotals", "are_costs"]

WINDOW_S = 10.0
"""Rates are differences over this long, longer where batches are slow."""

MIN_BATCHES = 2
"""Of a worker: its first batch opens files and imports, and is left out with any before it."""

_KEPT_READINGS = 64

_READING = struct.Struct("=dqqqq")
"""When it was taken, and the totals by then: batches, wall, CPU, collating."""

_TIME = struct.Struct("=dq")
"""Its beginning: when it was taken, and the batches by then."""

_SIZE = _READING.size

_KEPT_WORKERS = 4096

_MOST_WAITING = 16
"""Frames whose readings wait until somebody asks."""


@dataclass(frozen=True, slots=True)
class BatchCost:
    """Mean cost of a batch in its worker: wall, CPU and the part of the wall that collates."""

    wall_ms: float
    cpu_ms: float
    collate_ms: float
    batches: int


class WorkerBatch(NamedTuple):
    """Mean wall time of a batch in one worker."""

    pid: int
    wall_ms: float
    batches: int


_Rows = dict[tuple[str, int], bytes]

_Waiting = Sequence[tuple[float, Iterable[WorkerCost] | bytes]]


class Totals:
    """The readings of one rank's workers over the last seconds, by loader and worker.

    A picture: what it says never changes. Readings that came last are looked at when it is asked
    for; of a thousand ranks few are, and seldom.
    """

    __slots__ = ("_found", "_known")

    def __init__(self, rows: _Rows, newest_s: float, waiting: _Waiting) -> None:
        # One attribute: whoever looks from another thread finds what belongs together.
        self._known = rows, newest_s, waiting
        self._found: dict[str, tuple[BatchCost | None, tuple[WorkerBatch, ...]]] | None = None

    def followed_by(self, told: _Waiting) -> "Totals":
        """Return these readings and others, each with when they were sent."""
        if len(self._known[2]) >= _MOST_WAITING:
            self._rows()
        rows, newest_s, waiting = self._known
        return Totals(rows, newest_s, (*waiting, *told))

    def _rows(self) -> _Rows:
        rows, newest_s, waiting = self._known
        if waiting:
            rows = dict(rows)
            for sent_s, costs in waiting:
                found = decode_costs(costs) if isinstance(costs, bytes) else costs
                newest_s = _add(rows, newest_s, sent_s, found)
            self._known = rows, newest_s, ()
        return rows

    def knows(self, loader: str) -> bool:
        """Whether any worker of the loader has reported a batch."""
        return any(key == loader for key, _ in self._rows())

    def per_batch(self, loader: str) -> tuple[BatchCost | None, tuple[WorkerBatch, ...]]:
        """Return what a batch of the loader costs on average, and in each worker.

        None, and no worker, before any of them has made a few.
        """
        if self._found is None:
            self._found = {}
        found = self._found.get(loader)
        if found is None:
            found = self._found[loader] = _per_batch(self._rows(), loader)
        return found


_NO_TOTALS = Totals({}, 0.0, ())


class WorkerTotals:
    """Collects the readings of one rank's workers."""

    __slots__ = ("picture",)

    def __init__(self) -> None:
        self.picture = _NO_TOTALS
        """What is known by now."""

    def add(self, sent_s: float, costs: Iterable[WorkerCost] | bytes) -> None:
        """Take readings that were sent at `sent_s` of the sender's clock, in any order.

        Bytes are those that `decode_costs` can decode.
        """
        self.picture = self.picture.followed_by(((sent_s, costs),))

    def extend(self, told: _Waiting) -> None:
        """Take readings that were sent one after the other, each with when."""
        self.picture = self.picture.followed_by(told)

    def per_batch(self, loader: str) -> tuple[BatchCost | None, tuple[WorkerBatch, ...]]:
        """Return what `Totals.per_batch` says by now."""
        return self.picture.per_batch(loader)


def are_costs(parts: Sequence[bytes]) -> bool:
    """Whether all of these can be decoded as readings; False also where they are too many."""
    data = parts[0]
    if len(parts) > 1:
        if any(part[0] >> 4 != 0x9 for part in parts):
            return False
        count = sum([part[0] & 0xF for part in parts])
        data = b"\xdd" + count.to_bytes(4, "big") + b"".join([part[1:] for part in parts])
    try:
        decode_costs(data)
    except FrameError:
        return False
    return True


def _add(rows: _Rows, newest_s: float, sent_s: float, costs: Iterable[WorkerCost]) -> float:
    """Add readings to rows; returns when the newest was taken."""
    if sent_s < newest_s - WINDOW_S:
        # The sender's clock was set back: ages from before mean nothing.
        rows.clear()
        newest_s = 0.0
    for cost in costs:
        if not cost.batches:
            continue
        at_s = sent_s - cost.age_s
        newest_s = max(newest_s, at_s)
        key = (cost.loader, cost.pid)
        row = rows.get(key)
        if row is None:
            if len(rows) >= _KEPT_WORKERS:
                continue
            row, key = b"", (sys.intern(cost.loader), cost.pid)
        rows[key] = _with_reading(row, at_s, cost)
    _prune(rows, newest_s - WINDOW_S)
    return newest_s


def _prune(rows: _Rows, old_s: float) -> None:
    gone = []
    for key, row in rows.items():
        last_s, batches = _TIME.unpack_from(row, len(row) - _SIZE)
        first = 0
        while len(row) - first > 2 * _SIZE:
            at_s, made = _TIME.unpack_from(row, first + _SIZE)
            if at_s > old_s or batches - made < MIN_BATCHES:
                break
            first += _SIZE
        if last_s <= old_s:
            gone.append(key)  # a worker that is no more
        elif first:
            rows[key] = row[first:]
    for key in gone:
        del rows[key]


def _per_batch(rows: _Rows, loader: str) -> tuple[BatchCost | None, tuple[WorkerBatch, ...]]:
    batches = wall_ns = cpu_ns = collate_ns = 0
    workers: list[WorkerBatch] = []
    for (key, pid), row in rows.items():
        if key != loader:
            continue
        first, last = _READING.unpack_from(row), _READING.unpack_from(row, len(row) - _SIZE)
        made, took_ns, busy_ns, joined_ns = map(sub, last[1:], first[1:])
        if made < MIN_BATCHES:
            continue
        batches += made
        wall_ns += took_ns
        workers.append(WorkerBatch(pid, took_ns / 1e6 / made, made))
        cpu_ns += busy_ns
        collate_ns += joined_ns
    if not batches or min(wall_ns, cpu_ns, collate_ns) < 0:
        return None, ()
    scale = 1e6 * batches
    mean = BatchCost(wall_ns / scale, cpu_ns / scale, collate_ns / scale, batches)
    return mean, tuple(workers)


def _with_reading(row: bytes, at_s: float, cost: WorkerCost) -> bytes:
    """Return readings, oldest first, with one more; one reading a number of batches.

    A reading without new batches moves the last one: the worker lives, and waits or is busy.
    """
    new = _READING.pack(at_s, cost.batches, cost.wall_ns, cost.cpu_ns, cost.collate_ns)
    if not row:
        return new
    last_s, batches = _TIME.unpack_from(row, len(row) - _SIZE)
    if at_s < last_s:
        first_s, first_batches = _TIME.unpack_from(row)
        older = at_s < first_s and cost.batches < first_batches
        return new + row if older and len(row) < _KEPT_READINGS * _SIZE else row
    if cost.batches < batches:
        return new  # another worker that has the same pid
    if len(row) > _SIZE and cost.batches == batches:
        row = row[:-_SIZE]
    if len(row) == _KEPT_READINGS * _SIZE:
        row = row[_SIZE:]
    return row + new
