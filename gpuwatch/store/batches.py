"""What a batch costs in the loader's workers, from the totals that they report."""

from collections import deque
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


_Reading = tuple[float, WorkerCost]


class WorkerTotals:
    """The readings of one rank's workers over the last seconds, by loader and worker."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], deque[_Reading]] = {}
        self._newest_s = 0.0

    def add(self, sent_s: float, costs: Iterable[WorkerCost]) -> None:
        """Take readings that were sent at `sent_s` of the sender's clock, in any order."""
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
                row = self._rows[key] = deque(maxlen=_KEPT_READINGS)
            _insert(row, at_s, cost)
        self._prune()

    def _prune(self) -> None:
        old_s = self._newest_s - WINDOW_S
        for key, row in list(self._rows.items()):
            last_s, last = row[-1]
            while len(row) > 2 and row[1][0] <= old_s:
                if last.batches - row[1][1].batches < MIN_BATCHES:
                    break
                row.popleft()
            if last_s <= old_s:
                del self._rows[key]  # a worker that is no more

    def knows(self, loader: str) -> bool:
        """Whether any worker of the loader has reported a batch."""
        return any(key == loader for key, _ in self._rows)

    def per_batch(self, loader: str) -> tuple[BatchCost | None, tuple[WorkerBatch, ...]]:
        """Return what a batch of the loader costs on average, and in each worker.

        None, and no worker, before any of them has made a few.
        """
        batches = wall_ns = cpu_ns = collate_ns = 0
        workers: list[WorkerBatch] = []
        for (key, pid), row in self._rows.items():
            if key != loader:
                continue
            first, last = row[0][1], row[-1][1]
            made = last.batches - first.batches
            if made < MIN_BATCHES:
                continue
            batches += made
            took_ns = last.wall_ns - first.wall_ns
            wall_ns += took_ns
            workers.append(WorkerBatch(pid, took_ns / 1e6 / made, made))
            cpu_ns += last.cpu_ns - first.cpu_ns
            collate_ns += last.collate_ns - first.collate_ns
        if not batches or min(wall_ns, cpu_ns, collate_ns) < 0:
            return None, ()
        scale = 1e6 * batches
        mean = BatchCost(wall_ns / scale, cpu_ns / scale, collate_ns / scale, batches)
        return mean, tuple(workers)


def _insert(row: "deque[_Reading]", at_s: float, cost: WorkerCost) -> None:
    """Keep the row in order, one reading a number of batches.

    A reading without new batches moves the last one: the worker lives, and waits or is busy.
    """
    if not row:
        row.append((at_s, cost))
        return
    last_s, last = row[-1]
    if at_s >= last_s:
        if cost.batches < last.batches:
            row.clear()  # another worker that has the same pid
        elif cost.batches == last.batches and len(row) > 1:
            row.pop()
        row.append((at_s, cost))
    elif at_s < row[0][0] and cost.batches < row[0][1].batches:
        if len(row) == _KEPT_READINGS:
            return
        row.appendleft((at_s, cost))
