"""Peak memory over the batch size: a straight line through the trials, and its picture."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

__all__ = ["Fit", "Point", "draw", "fit_line"]

# A batch size that no training has: an edge beyond it means that memory is not what limits.
_EDGE_MOST = 1 << 40


@dataclass(frozen=True, slots=True)
class Point:
    """One trial."""

    batch_size: int
    ok: bool
    """False: memory ran out."""
    peak_bytes: int | None
    """None where nothing was measured: the process is gone when memory has run out."""


@dataclass(frozen=True, slots=True)
class Fit:
    """``peak = base_bytes + bytes_per_sample * batch_size``."""

    base_bytes: float
    bytes_per_sample: float
    residual_bytes: float
    """The farthest that one of the points lies from the line."""

    def at(self, batch_size: int) -> float:
        """The peak that the line predicts, in bytes."""
        return self.base_bytes + self.bytes_per_sample * batch_size

    def edge(self, limit_bytes: int) -> int | None:
        """The largest batch size whose predicted peak is within the limit, 0 if none is.

        None where the line does not rise, so that no batch size would reach the limit.
        """
        if self.bytes_per_sample <= 0:
            return None
        edge = (limit_bytes - self.base_bytes) / self.bytes_per_sample
        return min(_EDGE_MOST, max(0, math.floor(edge)))


def fit_line(points: Sequence[Point]) -> Fit | None:
    """The line through the trials that fitted; None with fewer than two batch sizes.

    Theil-Sen: the median slope over all pairs, then the median offset. A library that switches to
    another algorithm at one size moves it little. Of pairs, those of far batch sizes count alike
    with near ones; the larger half of the points is therefore taken alone where there are six or
    more, for the edge lies beyond them and small batches hide under what the start has left free.
    """
    known = {p.batch_size: p.peak_bytes for p in points if p.ok and p.peak_bytes is not None}
    sizes = sorted(known)
    if len(sizes) >= 6:
        sizes = sizes[len(sizes) // 2 :]
    if len(sizes) < 2:
        return None
    slope = statistics.median((known[b] - known[a]) / (b - a) for a, b in combinations(sizes, 2))
    base = statistics.median(known[size] - slope * size for size in sizes)
    residual = max(abs(known[size] - base - slope * size) for size in sizes)
    return Fit(base, slope, residual)


@dataclass(frozen=True, slots=True)
class _Glyphs:
    ok: str
    failed: str
    line: str
    limit: str
    edge: str
    axis: str
    corner: str
    floor: str
    tick: str


_UNICODE = _Glyphs("●", "✗", "·", "╌", "┆", "│", "└", "─", "┴")
_ASCII = _Glyphs("o", "x", ".", "-", ":", "|", "+", "-", "+")


def draw(
    points: Sequence[Point],
    fit: Fit | None,
    limit_bytes: int | None,
    *,
    width: int = 76,
    height: int = 16,
    ascii_only: bool = False,
) -> list[str]:
    """The memory curve as lines of at most `width` columns: peak memory over batch size.

    Each trial is marked, those that ran out of memory at the height of the limit; with the fitted
    line, the limit, and the edge where they cross. Both axes begin at 0. `height` counts the rows
    of the picture; a legend and the axis come below.
    """
    if not points:
        return []
    glyphs = _ASCII if ascii_only else _UNICODE
    edge = fit.edge(limit_bytes) if fit is not None and limit_bytes is not None else None
    largest = max(point.batch_size for point in points)
    if edge is not None and edge > 4 * largest:
        edge = None  # so far out that the trials would be one dot
    peaks = [point.peak_bytes for point in points if point.peak_bytes is not None]
    top = max([*peaks, limit_bytes or 0, 1])
    if limit_bytes is not None and peaks and limit_bytes > 20 * max(peaks):
        top, limit_bytes = max(peaks), None
    unit, divisor = ("GiB", 2**30) if top >= 10 * 2**30 else ("MiB", 2**20)
    ticks = [f"{top * share / 4 / divisor:,.1f}" for share in range(5)]
    margin = max(map(len, ticks)) + 1
    columns = max(16, width - margin - 1)
    rows = max(5, height)
    right = math.ceil(max(largest, edge or 0) / 4) * 4  # so that the ticks are whole numbers
    grid = [[" "] * columns for _ in range(rows)]

    def column(batch_size: float) -> int:
        return round(batch_size / right * (columns - 1))

    def row(size_bytes: float) -> int:
        return rows - 1 - round(min(max(size_bytes / top, 0.0), 1.0) * (rows - 1))

    if limit_bytes is not None:
        grid[row(limit_bytes)] = [glyphs.limit] * columns
    if edge is not None and edge > 0:
        for line in range(rows):
            grid[line][column(edge)] = glyphs.edge
    if fit is not None:
        for x in range(columns):
            predicted = fit.at(round(x / (columns - 1) * right))
            if 0 <= predicted <= top:
                grid[row(predicted)][x] = glyphs.line
    for point in sorted(points, key=lambda point: point.ok):
        if point.ok and point.peak_bytes is not None:
            grid[row(point.peak_bytes)][column(point.batch_size)] = glyphs.ok
        elif not point.ok:
            height_bytes = limit_bytes if limit_bytes is not None else top
            grid[row(height_bytes)][column(point.batch_size)] = glyphs.failed

    labels = {round((4 - share) / 4 * (rows - 1)): ticks[share] for share in range(5)}
    lines = [f"{unit:>{margin - 1}}  peak memory"]
    for index, cells in enumerate(grid):
        text = "".join(cells).rstrip()
        lines.append(f"{labels.get(index, ''):>{margin - 1}} {glyphs.axis}{text}".rstrip())
    lines.append(" " * margin + glyphs.corner + _axis(columns, glyphs))
    lines.append(f"{'batch':>{margin - 1}}".ljust(margin + 1) + _axis_labels(right, columns))
    legend = [f"{glyphs.ok} fits"]
    if any(not point.ok for point in points):
        legend.append(f"{glyphs.failed} out of memory")
    if fit is not None:
        legend.append(f"{glyphs.line} fitted line")
    if limit_bytes is not None:
        legend.append(f"{glyphs.limit} limit")
    if edge is not None and edge > 0:
        legend.append(f"{glyphs.edge} predicted edge {edge}")
    return [*lines, *_wrapped(legend, margin + 1, width)]


def _axis(columns: int, glyphs: _Glyphs) -> str:
    marks = {round(share / 4 * (columns - 1)) for share in range(1, 5)}
    return "".join(glyphs.tick if x in marks else glyphs.floor for x in range(columns))


def _axis_labels(right: int, columns: int) -> str:
    """Batch sizes below the ticks, each ending at its own."""
    cells = [" "] * columns
    free = 0
    for share in range(1, 5):
        text = str(right * share // 4)
        end = round(share / 4 * (columns - 1)) + 1
        if share == 4 or end - len(text) > free:
            begin = max(0, end - len(text))
            cells[begin:end] = text
            free = end
    return "".join(cells).rstrip()


def _wrapped(items: Sequence[str], indent: int, width: int) -> list[str]:
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 3 + len(item) <= width:
            lines[-1] += f"   {item}"
        else:
            lines.append(" " * indent + item)
    return lines
