"""Gradient accumulation as arithmetic: which micro-batch ends a step and what its loss weighs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Accumulation", "MicroBatch", "PlannedAccumulation", "Windows"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch in its window, the micro-batches of one optimizer step."""

    share: float
    """What its mean loss is multiplied by: its units / the window's units."""
    window_samples: int
    """Samples of this rank in the window."""
    last: bool
    """The optimizer steps after it; gradients are reduced over the ranks in its backward."""
    per_unit: float = 0.0
    """What the sum of its units' losses is multiplied by, where the loss is a sum."""
    window_tokens: int | None = None
    """Real tokens of this rank in the window; None for what has none."""
    window_share: float = 1.0
    """The sum of the window's shares: what its micro-batches make of a mean loss of 1."""


class Windows(Protocol):
    """The windows of one epoch on one rank."""

    @property
    def batches(self) -> int:
        """Micro-batches in the epoch."""
        ...

    @property
    def steps(self) -> int:
        """Optimizer steps in the epoch."""
        ...

    def micro_batch(self, index: int) -> MicroBatch:
        """The micro-batch `index` of the epoch, counted from 0."""
        ...


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
    start: int = 0
    """The micro-batch from which on `every` counts, where it was changed within the epoch."""

    @property
    def batches(self) -> int:
        """Micro-batches in an epoch."""
        return -(-self.samples // self.batch_size)

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch."""
        return -(-self.batches // self.every)

    def micro_batch(self, index: int) -> MicroBatch:
        """The micro-batch `index` of the epoch, counted from 0; `start` or later."""
        first = index - (index - self.start) % self.every
        end = min(first + self.every, self.batches)
        window_samples = min(end * self.batch_size, self.samples) - first * self.batch_size
        own = min((index + 1) * self.batch_size, self.samples) - index * self.batch_size
        return MicroBatch(
            own / window_samples,
            window_samples,
            last=index + 1 == end,
            per_unit=1.0 / window_samples,
        )


@dataclass(frozen=True, slots=True)
class PlannedAccumulation:
    """The windows of an epoch whose micro-batches differ in what they hold, known beforehand.

    DDP takes the mean of the ranks' gradients, but ranks with fewer units (tokens that are
    predicted) should weigh less. As the plan of all ranks is known, `per_unit` is ranks / units of
    the window over all ranks: the reduced gradient is that of the mean over every unit.
    """

    units: Sequence[int]
    """Of each micro-batch, over all ranks."""
    own_units: Sequence[int]
    own_samples: Sequence[int]
    own_tokens: Sequence[int]
    ranks: int
    every: int
    start: int = 0
    """The micro-batch from which on `every` counts, where it was changed within the epoch."""

    @property
    def batches(self) -> int:
        """Micro-batches in the epoch."""
        return len(self.units)

    @property
    def steps(self) -> int:
        """Optimizer steps in the epoch."""
        return -(-self.batches // self.every)

    def micro_batch(self, index: int) -> MicroBatch:
        """The micro-batch `index` of the epoch, counted from 0; `start` or later."""
        first = index - (index - self.start) % self.every
        end = min(first + self.every, self.batches)
        per_unit = self.ranks / max(1, sum(self.units[first:end]))
        return MicroBatch(
            self.own_units[index] * per_unit,
            sum(self.own_samples[first:end]),
            last=index + 1 == end,
            per_unit=per_unit,
            window_tokens=sum(self.own_tokens[first:end]),
            window_share=sum(self.own_units[first:end]) * per_unit,
        )
