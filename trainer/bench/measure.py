"""Times of single batches: what the device computes, and what it waits for."""

import contextlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from trainer import faults
from trainer.config import Config
from trainer.data import Feed
from trainer.loop import Trainer
from trainer.signals import Stop

__all__ = ["Batches", "Clock", "batch_length", "endless", "fetch_batches", "train_batches"]


@dataclass(frozen=True, slots=True)
class Batches:
    """Times of batches that followed each other. Wait and compute fill the time without a gap."""

    data_wait_ms: tuple[float, ...]
    """On CUDA: how long the device had nothing to do before each batch."""
    compute_ms: tuple[float, ...]
    """Copy to the device, forward, backward and the optimizer where it was due."""
    losses: tuple[float, ...]
    """Mean loss of each batch, before the step on it."""
    samples: int
    cpu_ms: float
    """CPU time of this process per batch, over all its threads; loader workers not included."""

    @property
    def total_ms(self) -> float:
        """From the end of the batch before the first to the end of the last."""
        return sum(self.data_wait_ms) + sum(self.compute_ms)

    @property
    def step_ms(self) -> float:
        """Mean time of a batch: waits come in bursts, so a median would miss them."""
        return self.total_ms / len(self.compute_ms)

    @property
    def device_busy_ratio(self) -> float:
        """Share of the time in which the device had a batch to compute, 0..1."""
        return sum(self.compute_ms) / self.total_ms

    @property
    def samples_per_s(self) -> float:
        """Of all the time."""
        return 1e3 * self.samples / self.total_ms


class Clock:
    """Points in time on the clock that the device's work happens on, read after all is over.

    On CUDA these are events: the host runs ahead, and its clock would see the time pile up where
    it first waits for the device. Nothing is waited for before `gaps_ms`.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        """Now; on CUDA when the device has done all that it was given before."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def gaps_ms(self) -> list[float]:
        """Between neighbouring marks."""
        if self._cuda:
            self._events[-1].synchronize()
            pairs = zip(self._events, self._events[1:], strict=False)
            return [first.elapsed_time(second) for first, second in pairs]
        pairs_s = zip(self._times, self._times[1:], strict=False)
        return [1e3 * (second - first) for first, second in pairs_s]


def train_batches(
    trainer: Trainer,
    batches: Iterator[Any],
    count: int,
    *,
    first: int = 0,
    period: int | None = None,
) -> Batches:
    """Train on the next `count` batches.

    `first` is the number of the first one in its iterator, which repeats itself after `period`
    batches, those of an epoch if None.
    """
    windows = trainer.loaders.accumulation
    period = period or windows.batches
    clock = Clock(trainer.placement.device)
    samples = 0
    losses = []
    cpu = time.process_time()
    clock.mark()
    for index in range(first, first + count):
        batch = next(batches)
        clock.mark()
        part = windows.micro_batch(index % period)
        losses.append(trainer.micro_batch(batch, part) / part.share)
        if part.last:
            trainer.update()
        clock.mark()
        samples += batch_length(batch)
        trainer.stop.check()
    gaps = clock.gaps_ms()
    return Batches(
        data_wait_ms=tuple(gaps[0::2]),
        compute_ms=tuple(gaps[1::2]),
        losses=tuple(float(loss) for loss in losses),
        samples=samples,
        cpu_ms=1e3 * (time.process_time() - cpu) / count,
    )


def fetch_batches(batches: Iterator[Any], count: int, stop: Stop) -> float:
    """Mean time of fetching a batch that nothing is done with, in ms."""
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
        stop.check()
    return 1e3 * (time.perf_counter() - start) / count


def batch_length(batch: Any) -> int:
    """Samples of a batch: a dict of tensors, or a sequence of them."""
    parts = list(batch.values()) if isinstance(batch, dict) else list(batch)
    return int(parts[0].shape[0])


class _Again(Sampler[list[int]]):
    """The batches of one epoch, over and over."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from self._batches


@contextlib.contextmanager
def endless(feed: Feed, config: Config, stop: Stop) -> Iterator[Iterator[Any]]:
    """The training batches of `feed` without an end, from workers that are started now.

    An epoch of a small set would be over before its workers are in step: each one begins with the
    first batch of every worker at once, and ends with all that was prefetched.
    """
    feed.set_epoch(0)
    given = feed.train
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader: DataLoader[Any] = DataLoader(
            given.dataset,
            batch_sampler=_Again(given.batch_sampler),
            collate_fn=given.collate_fn,
            worker_init_fn=given.worker_init_fn,
            in_order=given.in_order,
            **feed.plan.arguments(),
        )
        faults.loader_with(loader, faults.requested(config.faults), rank=0)
        with stop.defer():
            batches: Any = iter(loader)
    try:
        yield batches
    finally:
        # Now, not when the last reference goes: workers that still run would slow what is
        # measured next. In-process iterators have none.
        end = getattr(batches, "_shutdown_workers", None)
        if end is not None:
            end()
