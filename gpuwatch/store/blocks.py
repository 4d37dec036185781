"""Is the difference of two windows of steps beyond their scatter? By means of blocks of steps.

Steps that follow each other are alike: a slow batch, a busy second, a prefetch queue that runs dry.
Taken as independent they would make a small scatter of the mean, and a difference of nothing
significant. So each window is cut into blocks of consecutive steps, as long as there are blocks
(the square root of their number: J. Flegal and G. Jones, Batch means and spectral variance
estimators in Markov chain Monte Carlo, Annals of Statistics 38, 2010, which shows it to be
consistent), and the scatter of the blocks' own values around that of the whole window is what
counts. A median is treated in the same way, by the medians of the blocks (sectioning: M. Nakayama,
Confidence intervals for quantiles using sectioning, ACM TOMACS 24, 2014).

Two windows are compared by Welch's t with Satterthwaite's degrees of freedom (B. Welch, Biometrika
34, 1947), on the logarithm of the ratio where both are well away from 0 (the delta method), so that
an interval of a relative change counts the scatter of both sides.

What differs between two starts of the same job (where its memory lies, who else was on the machine)
is in no window: an interval is about these two runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, isqrt, log, sqrt
from typing import TypeVar

__all__ = ["MIN_STEPS", "Estimate", "Interval", "difference", "estimate", "t_quantile"]

_Row = TypeVar("_Row")

MIN_STEPS = 16
"""Of a window: four blocks of four steps. With fewer an interval says nothing."""

_RATIO_ERRORS = 4.0
"""A value is well away from 0 when it is so many of its standard errors."""

_Z = 1.959964
"""Of the normal distribution: 95 % lie within so many standard deviations."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value over a window of steps, its standard error by `blocks` blocks (None: too few)."""

    value: float
    error: float | None
    blocks: int


@dataclass(frozen=True, slots=True)
class Interval:
    """95 % interval of a change, `low` to `high`, in the unit of the values.

    `relative` is the same as a share of the value before, None where that is near 0.
    """

    low: float
    high: float
    relative: tuple[float, float] | None

    @property
    def clear(self) -> bool:
        """Whether 0 lies outside."""
        low, high = self.relative if self.relative is not None else (self.low, self.high)
        return low > 0.0 or high < 0.0


def t_quantile(freedom: float) -> float:
    """Return the 97.5 % point of Student's t.

    By the expansion of Abramowitz and Stegun 26.7.5: within 1 % from three degrees of freedom on.
    """
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def estimate(rows: Sequence[_Row], of: Callable[[Sequence[_Row]], float]) -> Estimate:
    """Return what `of` gives for all rows, and how much it scatters between blocks of them.

    There must be at least one row. The oldest that fill no block count for the value alone.
    """
    value = of(rows)
    if len(rows) < MIN_STEPS:
        return Estimate(value, None, 0)
    length = isqrt(len(rows))
    blocks = len(rows) // length
    start = len(rows) - blocks * length
    values = [of(rows[at : at + length]) for at in range(start, len(rows), length)]
    scatter = sqrt(sum((item - value) ** 2 for item in values) / (blocks - 1))
    return Estimate(value, scatter / sqrt(blocks), blocks)


def difference(before: Estimate, after: Estimate) -> Interval | None:
    """Return the 95 % interval of after - before; None where a side has too few steps."""
    if before.error is None or after.error is None:
        return None
    change = after.value - before.value
    half = _half(before.error, before.blocks, after.error, after.blocks)
    low, high = change - half, change + half
    relative = None
    one = before.error / before.value if before.value > 0.0 else inf
    other = after.error / after.value if after.value > 0.0 else inf
    if max(one, other) < 1.0 / _RATIO_ERRORS:
        ratio = log(after.value / before.value)
        half = _half(one, before.blocks, other, after.blocks)
        relative = (exp(ratio - half) - 1.0, exp(ratio + half) - 1.0)
    return Interval(low, high, relative)


def _half(one: float, one_blocks: int, other: float, other_blocks: int) -> float:
    """Return half the width of Welch's interval from two standard errors."""
    variance = one**2 + other**2
    if not variance:
        return 0.0
    parts = one**4 / (one_blocks - 1) + other**4 / (other_blocks - 1)
    freedom = variance**2 / parts if parts else inf
    return t_quantile(freedom) * sqrt(variance)
