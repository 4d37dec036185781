"""Faults of datasets and loaders. They act where the real cause would: in the loader's process."""

import functools
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from trainer.errors import TrainerError
from trainer.faults.spec import Fault

__all__ = ["burn", "collate_with", "dataset_with", "loader_with"]

_SCRATCH_MB = 256


def burn(seconds: float) -> None:
    """Compute for so much CPU time of this thread."""
    until = time.thread_time() + seconds
    value = 1
    while time.thread_time() < until:
        for _ in range(200):
            value = (value * 1103515245 + 12345) & 0x7FFFFFFF


class _Items(Dataset[Any]):
    """A dataset with something done at each item."""

    def __init__(self, dataset: Dataset[Any], before: Callable[[int], None]) -> None:
        self.dataset = dataset
        self.before = before

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int | list[int]) -> Any:
        # A row of packed texts is several items.
        for one in index if isinstance(index, list) else [index]:
            self.before(one)
        return self.dataset[index]


class _Batches(Dataset[Any]):
    """A dataset that waits once for all items of a batch."""

    def __init__(self, dataset: Dataset[Any], seconds: float) -> None:
        self.dataset = dataset
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        time.sleep(self.seconds)
        return [self.dataset[index] for index in indices]


class _Sleep:
    def __init__(self, seconds: float, worker: int | None = None) -> None:
        self.seconds = seconds
        self.worker = worker

    def __call__(self, index: int) -> None:
        info = get_worker_info()
        if self.worker is None or (info is not None and info.id == self.worker):
            time.sleep(self.seconds)


class _Burn:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, index: int) -> None:
        burn(self.seconds)


class _FirstTime:
    """Waits for items that no worker has read before; the marks are shared memory."""

    def __init__(self, items: int, seconds: float) -> None:
        self.seconds = seconds
        self.seen = torch.zeros(items, dtype=torch.bool)
        self.seen.share_memory_()  # type: ignore[no-untyped-call]

    def __call__(self, index: int) -> None:
        if not self.seen[index]:
            self.seen[index] = True
            time.sleep(self.seconds)


class _Disk:
    """Reads from a scratch file past the page cache, so that the process waits for the disk."""

    def __init__(self, path: Path, megabytes: float) -> None:
        self.path = path
        self.size = max(mmap.PAGESIZE, int(megabytes * 2**20) // mmap.PAGESIZE * mmap.PAGESIZE)
        make_scratch(path)

    def __call__(self, index: int) -> None:
        left = self.size
        # O_DIRECT wants aligned memory; an anonymous map is.
        with (
            open(os.open(self.path, os.O_RDONLY | os.O_DIRECT), "rb", buffering=0) as file,
            mmap.mmap(-1, min(left, 8 * 2**20)) as buffer,
        ):
            while left > 0:
                read = file.readinto(buffer)
                if not read:
                    file.seek(0)
                left -= read


class _Threads:
    """Computes on many threads in each worker, as a library does that is not told otherwise.

    Plain threads that hash without the GIL: a forked process must not touch a pool of OpenMP
    threads that its parent has used.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def __call__(self, index: int) -> None:
        if get_worker_info() is not None:
            list(_pool(self.threads).map(_hash, range(self.threads)))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="oversub")


def _hash(_: int) -> bytes:
    return hashlib.sha256(_BLOCK).digest()


_BLOCK = bytes(2 * 2**20)  # a few milliseconds


def make_scratch(path: Path) -> None:
    """Make the scratch file if it is not there.

    Raises:
        TrainerError: it cannot be made, or its file system has no way past the page cache.
    """
    try:
        if not path.exists() or path.stat().st_size < _SCRATCH_MB * 2**20:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}")
            with open(temporary, "wb") as file:
                block = os.urandom(2**20)
                for _ in range(_SCRATCH_MB):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except (OSError, AttributeError) as error:
        raise TrainerError(f"the fault slow_storage cannot read {path}: {error}") from None


def dataset_with(
    dataset: Dataset[Any], faults: Sequence[Fault], rank: int, folder: Path
) -> Dataset[Any]:
    """Return the dataset with this rank's faults on its items; `folder` takes scratch files."""
    for fault in faults:
        if not fault.on(rank):
            continue
        seconds = fault.strength / 1e3
        match fault.name:
            case "slow_dataset":
                dataset = _Items(dataset, _Sleep(seconds))
            case "slow_worker":
                dataset = _Items(dataset, _Sleep(seconds, worker=0))
            case "cpu_decode":
                dataset = _Items(dataset, _Burn(seconds))
            case "cold_epoch":
                dataset = _Items(dataset, _FirstTime(len(dataset), seconds))  # type: ignore[arg-type]
            case "slow_storage":
                dataset = _Items(dataset, _Disk(folder / "slow-storage.bin", fault.strength))
            case "burst":
                dataset = _Batches(dataset, seconds)
            case "oversub":
                threads = max(2, int(fault.strength * (os.cpu_count() or 1)))
                dataset = _Items(dataset, _Threads(threads))
    return dataset


class _Collate:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, items: list[Any]) -> Any:
        burn(self.seconds)
        return default_collate(items)


def collate_with(faults: Sequence[Fault], rank: int) -> Callable[[list[Any]], Any] | None:
    """Return a collate function that is slow, None if it is not asked for."""
    seconds = sum(f.strength for f in faults if f.name == "slow_collate" and f.on(rank)) / 1e3
    return _Collate(seconds) if seconds else None


def loader_with(loader: DataLoader[Any], faults: Sequence[Fault], rank: int) -> None:
    """Make each fetch block the calling thread, within ``next()``, as `slow_data` says.

    Raises:
        TrainerError: this torch's loader is built in another way.
    """
    seconds = sum(f.strength for f in faults if f.name == "slow_data" and f.on(rank)) / 1e3
    if seconds:
        slow_next(loader, seconds)


def slow_next(loader: DataLoader[Any], seconds: float) -> None:
    """Make each ``next()`` of the loader's iterators take so much longer."""
    make_iterator = loader._get_iterator

    def get_iterator() -> Any:
        iterator: Any = make_iterator()
        # Inside __next__, where a slow loader blocks; torch has no public place there.
        if not hasattr(iterator, "_next_data"):
            raise TrainerError("a slow fetch cannot be made with this torch's DataLoader")
        next_data = iterator._next_data

        def slow_next_data() -> Any:
            data = next_data()
            time.sleep(seconds)
            return data

        iterator._next_data = slow_next_data
        return iterator

    loader._get_iterator = get_iterator  # type: ignore[method-assign]
