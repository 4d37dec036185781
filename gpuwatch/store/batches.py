"""What a batch costs in the loader's workers, from the totals that they report."""

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gpuwatch.schema import WorkerCost

__all__ = ["BatchCost", "WorkerBatch", "WorkerTotals"]

WINDOW_S = 10.0
"""Rates are differences over this long, longer where batches are slow."""

MIN_BATCHES = 2
"""Of a worker: its first batch opens files and imports, and is left out with any before it."""

_KEPT_READINGS = 64
_TOTALS = 4
"""Of a reading: batches, wall, CPU, collating."""

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


class _Row:
    """The readings of one worker, oldest first: when they were taken, and four totals of each."""

    __slots__ = ("at_s", "totals")

    def __init__(self) -> None:
        self.at_s = array("d")
        self.totals = array("q")

    def batches(self, place: int) -> int:
        """Return the batches of a reading; -1 is the newest."""
        return self.totals[place * _TOTALS]

    def clear(self) -> None:
        """Forget them all."""
        del self.at_s[:], self.totals[:]

    def drop(self, place: int) -> None:
        """Forget the oldest (0) or the newest (-1)."""
        self.at_s.pop(place)
        if place == 0:
            del self.totals[:_TOTALS]
        else:
            del self.totals[-_TOTALS:]

    def insert(self, place: int, at_s: float, cost: WorkerCost) -> None:
        """Put a reading before the one at that place."""
        row = array("q", (cost.batches, cost.wall_ns, cost.cpu_ns, cost.collate_ns))
        self.at_s.insert(place, at_s)
        self.totals[place * _TOTALS : place * _TOTALS] = row


class WorkerTotals:
    """The readings of one rank's workers over the last seconds, by loader and worker."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], _Row] = {}
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
                row = self._rows[sys.intern(cost.loader), cost.pid] = _Row()
            _insert(row, at_s, cost)
        self._prune()

    def _prune(self) -> None:
        old_s = self._newest_s - WINDOW_S
        for key, row in list(self._rows.items()):
            while len(row.at_s) > 2 and row.at_s[1] <= old_s:
                if row.batches(-1) - row.batches(1) < MIN_BATCHES:
                    break
                row.drop(0)
            if row.at_s[-1] <= old_s:
                del self._rows[key]  # a worker that is no more

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
            made, took_ns, busy_ns, joined_ns = (
                last - first
                for first, last in zip(row.totals[:_TOTALS], row.totals[-_TOTALS:], strict=True)
            )
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


def _insert(row: _Row, at_s: float, cost: WorkerCost) -> None:
    """Keep the row in order, one reading a number of batches.

    A reading without new batches moves the last one: the worker lives, and waits or is busy.
    """
    if row.at_s and at_s < row.at_s[-1]:
        older = at_s < row.at_s[0] and cost.batches < row.batches(0)
        if older and len(row.at_s) < _KEPT_READINGS:
            row.insert(0, at_s, cost)
        return
    if row.at_s and cost.batches < row.batches(-1):
        row.clear()  # another worker that has the same pid
    elif len(row.at_s) > 1 and cost.batches == row.batches(-1):
        row.drop(-1)
    if len(row.at_s) == _KEPT_READINGS:
        row.drop(0)
    row.insert(len(row.at_s), at_s, cost)
