"""What loader workers pay to time themselves, and how busy workers are that are the limit.

    python benchmarks/bench_workers.py

The clock's cost is measured in this process, on the calls that a worker makes for each batch, and
what an iterator costs more to make, by making pairs of them. The busy share is a training loop
that waits for an empty queue: below the share that the diagnosis asks for, it stays silent.
"""

import statistics
import time
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import fetch, worker

import gpuwatch
from gpuwatch import probe
from gpuwatch.probe import workerclock

BATCHES = 20_000
ITERATORS = 30


class Items(Dataset[torch.Tensor]):
    """Items that wait `sleep_s` and hold `numbers` floats."""

    def __init__(self, sleep_s: float, cpu_s: float = 0.0, numbers: int = 1) -> None:
        self.sleep_s, self.cpu_s, self.numbers = sleep_s, cpu_s, numbers

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_s)
        end_s = time.thread_time() + self.cpu_s
        while time.thread_time() < end_s:
            pass
        return torch.zeros(self.numbers)


class Ready(Dataset[int]):
    """A dataset whose items cost nothing, so that the clock is all there is to see."""

    def __getitem__(self, index: int) -> int:
        return index


def batch_us() -> float:
    """Cost of fetching and putting one empty batch."""
    queue: Any = taking
    fetcher: Any = fetch._MapDatasetFetcher(Ready(), False, int, False)
    began_ns = time.perf_counter_ns()
    for i in range(BATCHES):
        queue.put((i, fetcher.fetch(i)))
    took_ns = time.perf_counter_ns() - began_ns
    while not queue.empty():
        queue.get()
    return took_ns / BATCHES / 1e3


class Queue:
    """As a worker's queue, whose `put` can be replaced."""

    def __init__(self) -> None:
        inner: SimpleQueue[Any] = SimpleQueue()
        self.put, self.get, self.empty = inner.put, inner.get, inner.empty


def iterator_ms() -> float:
    loader = DataLoader(Items(0.0), batch_size=1, num_workers=1)
    began_s = time.perf_counter()
    iterator = iter(loader)
    took_ms = (time.perf_counter() - began_s) * 1e3
    del iterator
    return took_ms


def busy_share(dataset: Items, workers: int, step_s: float) -> tuple[float, float]:
    """(share of the workers' time that batches take, ms a step) while the queue is empty."""
    watching = probe._probe
    assert watching is not None
    loader = iter(DataLoader(dataset, batch_size=4, num_workers=workers))
    for _ in range(4 * workers):
        next(loader)
        time.sleep(step_s)
    before, began_s = watching.marks.workers._read(), time.perf_counter()
    steps = 25 * workers
    for _ in range(steps):
        next(loader)
        time.sleep(step_s)
    after, took_s = watching.marks.workers._read(), time.perf_counter() - began_s
    wall_ns = sum(c.wall_ns for c in after[-workers:]) - sum(c.wall_ns for c in before[-workers:])
    return wall_ns / 1e9 / took_s / workers, took_s / steps * 1e3


taking = Queue()


def main() -> None:
    torch.set_num_threads(1)
    bare = [iterator_ms() for _ in range(ITERATORS)]
    gpuwatch.watch(name="bench-workers")
    timed = [iterator_ms() for _ in range(ITERATORS)]
    print(
        f"an iterator with one forked worker: {statistics.median(bare):.2f} ms bare, "
        f"{statistics.median(timed):.2f} ms watched"
    )
    for name, dataset, workers in [
        ("items that wait", Items(0.010), 1),
        ("items that wait", Items(0.010), 2),
        ("items that compute", Items(0.0, 0.010), 1),
        ("items that compute", Items(0.0, 0.010), 2),
        ("items of 4 MB that wait", Items(0.005, 0.0, 1 << 20), 2),
    ]:
        share, step_ms = busy_share(dataset, workers, 0.002)
        print(f"busy, {name}, {workers} workers: {share:.0%} of {step_ms:.1f} ms a step")
    gpuwatch.unwatch()
    before = [batch_us() for _ in range(5)]
    slots = memoryview(bytearray(workerclock.SLOT_FIELDS * 8)).cast("q")
    worker._worker_info = worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=Ready())
    workerclock.install(slots, taking)
    after = [batch_us() for _ in range(5)]
    assert slots[workerclock.Slot.BATCHES] == 5 * BATCHES
    print(f"a batch in the worker: +{min(after) - min(before):.2f} µs for the clock")


if __name__ == "__main__":
    main()
