"""Curves in braille: two values and four heights a cell, spikes kept."""

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, isfinite

__all__ = ["braille_rows"]

_LEFT = (0x00, 0x40, 0x44, 0x46, 0x47)
_RIGHT = (0x00, 0x80, 0xA0, 0xB0, 0xB8)
"""Bits of a column filled from below to the height 0..4."""

_CELLS = [[chr(0x2800 + (a | b)) if a | b else " " for b in _RIGHT] for a in _LEFT]


def braille_rows(
    values: Sequence[float | None], width: int, rows: int, low: float, high: float
) -> list[str]:
    """Return an area chart of `rows` lines, each exactly `width` cells, the newest at the right.

    `values` are at most 2 * `width`, one a dot column. An unknown value is a gap; a known one has
    at least one dot, so that 0 and n/a look different.
    """
    if width <= 0 or rows <= 0:
        return []
    return list(_rows(tuple(values[-2 * width :]), width, rows, low, high))


# A curve has a new point once a second, and is drawn several times in it.
@lru_cache(maxsize=32)
def _rows(
    newest: tuple[float | None, ...], width: int, rows: int, low: float, high: float
) -> tuple[str, ...]:
    span = high - low
    if not isfinite(span) or span <= 0.0:
        span = 1.0
    top = 4 * rows
    heights = [0] * (2 * width - len(newest))
    heights += [
        0
        if value is None or not isfinite(value)
        else ceil(share * 4 * rows - 1e-9) or 1
        if 0.0 <= (share := (value - low) / span) <= 1.0
        else (top if share > 1.0 else 1)
        for value in newest
    ]
    out = []
    for base in range(top - 4, -1, -4):
        full = base + 4
        levels = [0 if h <= base else 4 if h >= full else h - base for h in heights]
        out.append("".join([_CELLS[a][b] for a, b in zip(levels[::2], levels[1::2], strict=True)]))
    return tuple(out)
