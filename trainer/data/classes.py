"""How many samples each class has, and weights that draw rare ones more often."""

import math
import unicodedata
from collections.abc import Sequence

import numpy as np

from trainer.errors import DataError

__all__ = [
    "balance_weights",
    "class_counts",
    "histogram_lines",
    "imbalance",
    "sentence",
]

Integers = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

# From here on a model that ignores the rarest class begins to look good: what is said unasked.
_WORTH_SAYING = 3.0
_LINES = 12
_NAME_CELLS = 24


def class_counts(labels: Integers, classes: int) -> Integers:
    """Samples of each class, (classes,). Raises `DataError` for a label outside 0..classes-1."""
    _check_range(labels, classes)
    return np.bincount(labels, minlength=classes).astype(np.int64)


def imbalance(counts: Integers) -> float:
    """Largest count over smallest: 1 where all are equal, infinite where a class has none, and
    not a number where there are no samples at all.
    """
    if not counts.any():
        return math.nan
    smallest = int(counts.min())
    return int(counts.max()) / smallest if smallest else math.inf


def balance_weights(labels: Integers, counts: Integers, balance: float) -> Floats:
    """A weight for each sample, of mean 1, to draw it in proportion to.

    Each class is then drawn in proportion to count^(1 - balance): 0 leaves the classes as they
    are, 1 makes them equal (Mahajan et al. 2018 use 0.5). Raises `DataError` for a label outside
    `counts`.
    """
    _check_range(labels, len(counts))
    # A class without samples has no say in it, and must not divide by zero.
    of_class = np.maximum(counts, 1).astype(np.float64) ** -balance
    weights = of_class[labels]
    scaled: Floats = weights / weights.mean() if len(weights) else weights
    return scaled


def histogram_lines(classes: Sequence[str], counts: Integers, width: int) -> list[str]:
    """A bar for each class in `width` cells, largest class first, as plain text.

    Of more than 12 classes the six largest and the six smallest, with "... n more" between.
    """
    total = max(1, int(counts.sum()))
    order = np.argsort(-counts, kind="stable").tolist()
    left_out = len(order) - _LINES
    if left_out > 0:
        order = order[: _LINES // 2] + order[-(_LINES // 2) :]
    names = [_printable(classes[label]) for label in order]
    name_cells = min(max(map(_cells, names), default=0), _NAME_CELLS, max(1, width // 3))
    digits = max((len(f"{counts[label]:,}") for label in order), default=1)
    # Between the columns two spaces each; a share is as wide as "100.0%".
    room = width - name_cells - digits - len("100.0%") - 6
    largest = max(1, int(counts.max(initial=0)))
    lines = []
    for name, label in zip(names, order, strict=True):
        count = int(counts[label])
        # Something stays visible of whatever is there.
        bar = "#" * max(round(room * count / largest), 1 if count and room > 0 else 0)
        share = f"{count / total:6.1%}"
        lines.append(f"{_fit(name, name_cells)}  {count:>{digits},}  {share}  {bar}".rstrip())
    if left_out > 0:
        lines.insert(_LINES // 2, f"... {left_out:,} more")
    return lines


def sentence(counts: Integers) -> str | None:
    """What to say about the classes, or None where they are within a factor of 3."""
    empty = int((counts == 0).sum())
    if empty == len(counts):
        return None
    if empty:
        verb = "has" if empty == 1 else "have"
        return (
            f"{empty} of {len(counts)} classes {verb} no training samples: they cannot be learned"
        )
    ratio = imbalance(counts)
    if ratio < _WORTH_SAYING:
        return None
    return (
        f"the largest class has {ratio:.3g} times the samples of the smallest ({counts.max():,} "
        f"and {counts.min():,}): data.balance above 0 draws rare classes more often"
    )


def _check_range(labels: Integers, classes: int) -> None:
    if len(labels) == 0:
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise DataError(f"a sample has the label {wrong}, but there are {classes} classes from 0")


def _printable(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _cells(text: str) -> int:
    """Columns in a terminal: wide East Asian letters take two, combining marks none."""
    return sum(
        0 if unicodedata.combining(letter) else 1 + (unicodedata.east_asian_width(letter) in "WF")
        for letter in text
    )


def _fit(name: str, cells: int) -> str:
    """Cut or filled to exactly so many columns."""
    if _cells(name) > cells:
        while name and _cells(name) > cells - 1:
            name = name[:-1]
        name += "…"
    return name + " " * (cells - _cells(name))
