"""What a batch costs in the loader's workers, from the totals that they report."""

import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

from gpuwatch.schema import WorkerCost

__all__ = ["BatchCost", "WorkerBatch", "WorkerTotals"]

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


class WorkerTotals:
    """The readings of one rank's workers over the last seconds, by loader and worker."""

    __slots__ = ("_found", "_newest_s", "_rows")

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], bytes] = {}
        self._newest_s = 0.0
        self._found: dict[str, tuple[BatchCost | None, tuple[WorkerBatch, ...]]] = {}

    def add(self, sent_s: float, costs: Iterable[WorkerCost]) -> None:
        """Take readings that were sent at `sent_s` of the sender's clock, in any order."""
        self._found = {}
        if sent_s < self._newest_s - WINDOW_S:
            # The sender's clock was set back: ages from before mean nothing.
            self._rows.clear()
            self._newest_s = 0.0
        for cost in costs:
            if not cost.batches:
                continue
            at_s = sent_s - cost.age_s
            self._newest_s = max(self._newest_s, at_s)
            key = (cost.loader, cost.pid)
            row = self._rows.get(key)
            if row is None:
                if len(self._rows) >= _KEPT_WORKERS:
                    continue
                row, key = b"", (sys.intern(cost.loader), cost.pid)
            self._rows[key] = _with_reading(row, at_s, cost)
        self._prune()

    def _prune(self) -> None:
        old_s = self._newest_s - WINDOW_S
        gone = []
        for key, row in self._rows.items():
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
                self._rows[key] = row[first:]
        for key in gone:
            del self._rows[key]

    def knows(self, loader: str) -> bool:
        """Whether any worker of the loader has reported a batch."""
        return any(key == loader for key, _ in self._rows)

    def per_batch(self, loader: str) -> tuple[BatchCost | None, tuple[WorkerBatch, ...]]:
        """Return what a batch of the loader costs on average, and in each worker.

        None, and no worker, before any of them has made a few.
        """
        found = self._found.get(loader)
        if found is None:
            found = self._found[loader] = self._per_batch(loader)
        return found

    def _per_batch(self, loader: str) -> tuple[BatchCost | None, tuple[WorkerBatch, ...]]:
        batches = wall_ns = cpu_ns = collate_ns = 0
        workers: list[WorkerBatch] = []
        for (key, pid), row in self._rows.items():
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
