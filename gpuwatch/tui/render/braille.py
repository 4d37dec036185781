"""Curves in braille: two values and four heights a cell, spikes kept."""

from collections.abc import Sequence
from math import ceil, isfinite

__all__ = ["braille_rows"]

_LEFT = (0x00, 0x40, 0x44, 0x46, 0x47)
_RIGHT = (0x00, 0x80, 0xA0, 0xB0, 0xB8)
"""Bits of a column filled from below to the height 0..4."""


def braille_rows(
    values: Sequence[float | None], width: int, rows: int, low: float, high: float
) -> list[str]:
    """Return an area chart of `rows` lines, each exactly `width` cells, the newest at the right.

    `values` are at most 2 * `width`, one a dot column. An unknown value is a gap; a known one has
    at least one dot, so that 0 and n/a look different.
    """
    if width <= 0 or rows <= 0:
        return []
    newest = values[-2 * width :]
    points: list[float | None] = [None] * (2 * width - len(newest))
    points += newest
    span = high - low
    if not isfinite(span) or span <= 0.0:
        span = 1.0
    heights = [
        0
        if value is None or not isfinite(value)
        else max(1, ceil(min(1.0, max(0.0, (value - low) / span)) * 4 * rows - 1e-9))
        for value in points
    ]
    out = []
    for row in range(rows - 1, -1, -1):
        base = row * 4
        cells = []
        for i in range(0, 2 * width, 2):
            left = max(0, min(4, heights[i] - base))
            right = max(0, min(4, heights[i + 1] - base))
            bits = _LEFT[left] | _RIGHT[right]
            cells.append(chr(0x2800 + bits) if bits else " ")
        out.append("".join(cells))
    return out
