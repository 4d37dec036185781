"""Gradient accumulation as arithmetic: which micro-batch ends a step and what its loss weighs."""

from dataclasses import dataclass

__all__ = ["Accumulation", "MicroBatch"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch in its window, the micro-batches of one optimizer step."""

    share: float
    """What its mean loss is multiplied by: its samples / the window's samples."""
    window_samples: int
    last: bool
    """The optimizer steps after it; gradients are reduced over the ranks in its backward."""


@dataclass(frozen=True, slots=True)
class Accumulation:
    """The windows of an epoch of `samples` samples on one rank, `batch_size` each, the last fewer.

    With equal micro-batches `share` is 1/N; with an incomplete last one it is still the weight
    that makes the sum of the micro-batches' gradients the gradient of one big batch. The last
    window of an epoch may hold fewer micro-batches; it is a step all the same.
    """

    samples: int
    batch_size: int
    every: int

    @property
    def batches(self) -> int:
        """Micro-batches in an epoch."""
        return -(-self.samples // self.batch_size)

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch."""
        return -(-self.batches // self.every)

    def micro_batch(self, index: int) -> MicroBatch:
        """The micro-batch `index` of the epoch, counted from 0."""
        first = index - index % self.every
        end = min(first + self.every, self.batches)
        window_samples = min(end * self.batch_size, self.samples) - first * self.batch_size
        own = min((index + 1) * self.batch_size, self.samples) - index * self.batch_size
        return MicroBatch(own / window_samples, window_samples, last=index + 1 == end)
