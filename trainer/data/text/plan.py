"""Which texts go into which row of which batch of which rank: one epoch, decided at once.

Everything follows from the lengths, the seed and the epoch, so that every rank computes the same
plan and none needs to ask another. All ranks have the same number of batches: a rank with fewer
would leave the others waiting in a collective.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trainer.errors import DataError

__all__ = ["EpochPlan", "Padding", "PlannedBatch", "Row", "plan_epoch", "row_tokens"]

Padding = Literal["fixed", "dynamic", "bucket", "pack"]
Row = list[int]
"""Indices of the samples in one row of a batch: one, or several where they are packed."""
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """What one batch of one rank will hold."""

    samples: int
    """Texts."""
    tokens: int
    """Their tokens, without padding."""
    padded_tokens: int
    """Tokens the device computes on."""

    @property
    def targets(self) -> int:
        """Tokens that a language model predicts: all but each text's first."""
        return self.tokens - self.samples


@dataclass(frozen=True)
class EpochPlan:
    """The batches of all ranks. What is listed by micro-batch is summed over the ranks."""

    world_size: int
    dropped: int
    """Texts left out of this epoch, at random, so that the ranks are even or batches are full."""
    _samples: Array
    _tokens: Array
    _padded_tokens: Array
    _order: Array
    _row_ends: Array
    _batch_ends: Array

    def __len__(self) -> int:
        """Micro-batches of each rank."""
        return len(self._samples)

    @property
    def samples(self) -> list[int]:
        """Texts of each micro-batch."""
        return _listed(self._samples)

    @property
    def weights(self) -> list[int]:
        """Tokens of each micro-batch, without padding."""
        return _listed(self._tokens)

    @property
    def targets(self) -> list[int]:
        """Tokens of each micro-batch that a language model predicts: all but each text's first."""
        return _listed(self._tokens - self._samples)

    @property
    def padded_tokens(self) -> list[int]:
        """Tokens of each micro-batch that devices compute on."""
        return _listed(self._padded_tokens)

    @property
    def waste(self) -> float:
        """Share of the computed tokens that is padding, over the epoch."""
        return float(1.0 - self._tokens.sum() / self._padded_tokens.sum())

    def weight(self, index: int) -> int:
        """Tokens of micro-batch `index`, without padding, over all ranks."""
        return int(self._tokens[index].sum())

    def of_rank(self, rank: int) -> list[PlannedBatch]:
        """What the batches of a rank hold, in order."""
        columns = (self._samples[:, rank], self._tokens[:, rank], self._padded_tokens[:, rank])
        return [PlannedBatch(*batch) for batch in zip(*(c.tolist() for c in columns), strict=True)]

    def batch(self, rank: int, index: int) -> list[Row]:
        """The rows of micro-batch `index` on `rank`."""
        number = index * self.world_size + rank
        first = int(self._batch_ends[number - 1]) if number else 0
        ends = self._row_ends[first : int(self._batch_ends[number])].tolist()
        start = int(self._row_ends[first - 1]) if first else 0
        order = self._order[start : ends[-1]].tolist()
        begins = [start, *ends[:-1]]
        return [order[a - start : b - start] for a, b in zip(begins, ends, strict=True)]

    def batches(self, rank: int, first: int = 0, every: int = 1) -> Iterator[list[Row]]:
        """The batches of a rank in order, each `every`-th from micro-batch `first` on."""
        return (self.batch(rank, index) for index in range(first, len(self), every))


def row_tokens(longest: int, *, padding: Padding, max_tokens: int, multiple: int) -> int:
    """The padded length of a batch whose longest row has `longest` tokens."""
    if padding in ("fixed", "pack"):
        return max_tokens
    return min(-(-longest // multiple) * multiple, max_tokens)


def plan_epoch(
    lengths: Array,
    *,
    batch_size: int,
    world_size: int,
    seed: int,
    epoch: int,
    padding: Padding,
    max_tokens: int,
    multiple: int = 8,
    bucket_batches: int = 50,
    shuffle: bool = True,
    drop_last: bool = False,
) -> EpochPlan:
    """Plan one epoch over samples of `lengths` tokens, each 1 to `max_tokens`.

    A batch has `batch_size` rows on each rank. The last one may have fewer, as evenly spread as
    can be, unless `drop_last`; it is left out where there is not a row for every rank. Each sample
    is drawn at most once, and exactly once but for the `dropped` ones.

    Args:
        lengths: tokens of each sample.
        batch_size: rows of a batch on one rank.
        world_size: ranks.
        seed: of the shuffling, with `epoch`.
        epoch: counted from 0.
        padding: ``fixed`` to `max_tokens`; ``dynamic`` to the longest row of the batch; ``bucket``
            the same, with batches of alike lengths: samples are sorted within random windows of
            about `bucket_batches` batches, neighbours are dealt to the ranks, so that all have
            alike work at the same time, and the batches are shuffled; ``pack`` puts several
            samples in a row of `max_tokens`, longest first into the first row that has room,
            within windows of the same size.
        max_tokens: most tokens of a row.
        multiple: rows of ``dynamic`` and ``bucket`` are padded to a multiple of it.
        bucket_batches: batches of a window.
        shuffle: False keeps the order of the samples, as far as `padding` allows.
        drop_last: leave an incomplete last batch out.

    Raises `DataError` where there is not one batch for every rank.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= max_tokens:
        raise ValueError(f"a sample is empty or longer than max_tokens={max_tokens}")
    chance = np.random.default_rng([seed, epoch])
    order = chance.permutation(len(lengths)) if shuffle else np.arange(len(lengths))
    row_sizes = np.ones(len(lengths), dtype=np.int64)
    step = batch_size * world_size
    if padding == "pack":
        packed, row_sizes = _packed(order, lengths, max_tokens, bucket_batches * step * max_tokens)
        rows = len(row_sizes)
        turn = chance.permutation(rows) if shuffle else np.arange(rows)
        dealt, sizes = _deal(turn[: _even(rows, step, world_size, drop_last)], step, world_size)
        per_row = row_sizes[dealt]
        order = packed[_ranges((np.cumsum(row_sizes) - row_sizes)[dealt], per_row)]
    else:
        kept = order[: _even(len(order), step, world_size, drop_last)]
        if padding == "bucket":
            # By padded length: sorting finer saves nothing, and fixes who meets whom.
            widths = -(-lengths // multiple)
            kept = _bucketed(kept, widths, step, bucket_batches)
        shuffled = chance if shuffle and padding == "bucket" else None
        order, sizes = _deal(kept, step, world_size, shuffled)
        per_row = row_sizes[: len(order)]
    if not len(sizes):
        raise DataError(
            f"{len(lengths):,} texts make {len(row_sizes):,} rows, too few for a "
            + (f"batch of {batch_size}" if drop_last else "row")
            + f" on each of {world_size} ranks"
        )
    row_ends = np.cumsum(per_row)
    batch_ends = np.cumsum(sizes)
    batch_starts = batch_ends - sizes
    row_lengths = np.add.reduceat(lengths[order], row_ends - per_row)
    padded = [
        row_tokens(longest, padding=padding, max_tokens=max_tokens, multiple=multiple)
        for longest in np.maximum.reduceat(row_lengths, batch_starts).tolist()
    ]
    shape = (-1, world_size)
    return EpochPlan(
        world_size=world_size,
        dropped=len(lengths) - len(order),
        _samples=np.add.reduceat(per_row, batch_starts).reshape(shape),
        _tokens=np.add.reduceat(row_lengths, batch_starts).reshape(shape),
        _padded_tokens=(sizes * np.array(padded, dtype=np.int64)).reshape(shape),
        _order=order,
        _row_ends=row_ends,
        _batch_ends=batch_ends,
    )


def _listed(by_rank: Array) -> list[int]:
    listed: list[int] = by_rank.sum(axis=1).tolist()
    return listed


def _even(rows: int, step: int, world_size: int, drop_last: bool) -> int:
    """Rows that are used: whole micro-batches, and a rest that has one for every rank."""
    rest = rows % step
    return rows - rest if drop_last or rest < world_size else rows


def _deal(
    rows: Array, step: int, world_size: int, chance: np.random.Generator | None = None
) -> tuple[Array, Array]:
    """Rows in the order of micro-batch, rank, row; and the rows of each batch.

    Each micro-batch is `step` neighbours, dealt like cards; with `chance` the micro-batches are
    shuffled, but for an incomplete one, which stays last.
    """
    whole = len(rows) // step
    full = rows[: whole * step].reshape(whole, step // world_size, world_size)
    if chance is not None:
        full = full[chance.permutation(whole)]
    rest = rows[whole * step :]
    hands = [rest[rank::world_size] for rank in range(world_size)] if len(rest) else []
    sizes = np.array(
        [step // world_size] * (whole * world_size) + [len(hand) for hand in hands], dtype=np.int64
    )
    return np.concatenate([full.transpose(0, 2, 1).reshape(-1), *hands]), sizes


def _ranges(starts: Array, sizes: Array) -> Array:
    """The numbers from each start on, as many as its size, one range after the other."""
    offsets = np.cumsum(sizes) - sizes
    numbers: Array = np.arange(sizes.sum()) + np.repeat(starts - offsets, sizes)
    return numbers


def _bucketed(order: Array, widths: Array, step: int, bucket_batches: int) -> Array:
    """Windows of about so many micro-batches, each sorted, widest first; ties stay shuffled."""
    micro_batches = -(-len(order) // step)
    windows = max(1, round(micro_batches / bucket_batches))
    # Alike in size: a small last one would be sorted badly.
    cuts = [window * micro_batches // windows * step for window in range(1, windows)]
    parts = [
        part[np.argsort(-widths[part], kind="stable")]
        for part in np.split(order, np.array(cuts, dtype=np.int64))
    ]
    return np.concatenate(parts)


def _packed(
    order: Array, lengths: Array, max_tokens: int, window_tokens: int
) -> tuple[Array, Array]:
    """Samples in the order of rows that have room for them, and the samples of each row.

    First-fit decreasing in windows of so many tokens. The last row of a window is rarely full: it
    goes into the next one.
    """
    samples: list[int] = []
    sizes: list[int] = []
    ends = np.cumsum(lengths[order])
    carried: list[int] = []
    start = 0
    while start < len(order):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + window_tokens, side="right")))
        window = [*carried, *order[start:stop].tolist()]
        found, rows = _first_fit(window, lengths[window].tolist(), max_tokens)
        start = stop
        if start < len(order):
            last = rows.pop()
            carried = found[-last:]
            del found[-last:]
        samples += found
        sizes += rows
    return np.array(samples, dtype=np.int64), np.array(sizes, dtype=np.int64)


def _first_fit(
    samples: list[int], lengths: list[int], max_tokens: int
) -> tuple[list[int], list[int]]:
    """First-fit decreasing, row by row: each takes the longest that still fits, until none does.

    That gives the rows of the usual way, sample by sample, and needs a search among the lengths
    that are left instead of one among all open rows.
    """
    waiting: dict[int, list[int]] = {}
    for sample, length in zip(reversed(samples), reversed(lengths), strict=True):
        waiting.setdefault(length, []).append(sample)
    left = sorted(waiting)
    found: list[int] = []
    sizes: list[int] = []
    while left:
        before = len(found)
        room = max_tokens
        while (place := bisect_right(left, room) - 1) >= 0:
            length = left[place]
            stack = waiting[length]
            found.append(stack.pop())
            room -= length
            if not stack:
                del left[place]
        sizes.append(len(found) - before)
    return found, sizes
