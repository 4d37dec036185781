"""Sparklines and the row of heat glyphs."""

from collections.abc import Sequence
from math import ceil, isfinite

__all__ = ["BLOCKS", "bucket_max", "heat_levels", "limits", "spark_rows"]

BLOCKS = "▁▂▃▄▅▆▇█"
UNKNOWN = "·"

_FLAT_SHARE = 0.25
"""A range narrower than this share of its maximum is drawn as if it were this wide.

Otherwise the scatter of a steady run would fill the whole height and look like trouble.
"""


def limits(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Return the least and greatest of the values that are finite, None where there are none."""
    finite = [value for value in values if value is not None and isfinite(value)]
    return (min(finite), max(finite)) if finite else None


def _scale(low: float, high: float) -> tuple[float, float]:
    """Widen a narrow range downwards, see `_FLAT_SHARE`."""
    least = abs(high) * _FLAT_SHARE
    if high - low < least:
        low = high - least
    return low, (high if high > low else low + 1.0)


def heat_levels(values: Sequence[float | None], low: float, high: float) -> list[int | None]:
    """Return the level 0..7 of each value between two limits, None where it is unknown."""
    low, high = _scale(low, high)
    step = (high - low) / 7.999
    if not isfinite(step):
        return [None] * len(values)
    return [
        None if value is None or not isfinite(value) else max(0, min(7, int((value - low) / step)))
        for value in values
    ]


def bucket_max(values: Sequence[float | None], width: int) -> list[float | None]:
    """Reduce values to at most `width`, the greatest of each bucket, so that spikes stay."""
    n = len(values)
    if width <= 0:
        return []
    if n <= width:
        return list(values)
    out: list[float | None] = []
    for i in range(width):
        part = values[i * n // width : max((i + 1) * n // width, i * n // width + 1)]
        known = [value for value in part if value is not None and isfinite(value)]
        out.append(max(known) if known else None)
    return out


def spark_rows(values: Sequence[float | None], width: int, rows: int = 1) -> list[str]:
    """Return a sparkline of `rows` lines, each exactly `width` cells, the newest at the right.

    An unknown value is a gap. A narrow range is drawn flat.
    """
    if width <= 0 or rows <= 0:
        return []
    points = bucket_max(values, width)
    ends = limits(points)
    lead = width - len(points)
    if ends is None:
        return [" " * width] * rows
    low, high = _scale(*ends)
    if not isfinite(high - low):
        return [" " * width] * rows
    eighths: list[int] = []
    for value in points:
        if value is None or not isfinite(value):
            eighths.append(0)
            continue
        part = (value - low) / (high - low)
        eighths.append(max(1, min(rows * 8, ceil(part * rows * 8))))
    out = []
    for row in range(rows - 1, -1, -1):
        cells = []
        for height in eighths:
            left = height - row * 8
            cells.append(" " if left <= 0 else BLOCKS[min(left, 8) - 1])
        out.append(" " * lead + "".join(cells))
    return out
