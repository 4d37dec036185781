"""Bars: a step split into phases, and a plain gauge."""

from collections.abc import Mapping
from math import isfinite

from gpuwatch.schema import PHASES
from gpuwatch.tui.render.text import Line

__all__ = ["PHASE_GLYPHS", "PHASE_LABELS", "PHASE_WORDS", "gauge", "phase_bar", "phase_cells"]

PHASE_GLYPHS = {
    "data_wait": "▚",
    "h2d": "░",
    "forward": "▒",
    "backward": "▓",
    "comm": "█",
    "optimizer": "▞",
    "other": "╌",
}
"""One glyph a phase: alone it must carry what the colour repeats."""

PHASE_LABELS = {
    "data_wait": "data",
    "h2d": "h2d",
    "forward": "fwd",
    "backward": "bwd",
    "comm": "comm",
    "optimizer": "opt",
    "other": "other",
}

PHASE_WORDS = {
    "data_wait": "data wait",
    "h2d": "h2d",
    "forward": "forward",
    "backward": "backward",
    "comm": "comm",
    "optimizer": "optimizer",
    "other": "other",
}


def _positive(value: float | None) -> float:
    return value if value is not None and isfinite(value) and value > 0.0 else 0.0


def phase_cells(phases_ms: Mapping[str, float | None], width: int) -> list[tuple[str, int]]:
    """Split `width` cells over the phases in proportion to their time.

    The ends of the phases are rounded, not their lengths, so that the cells add up to `width`
    exactly. An n/a phase takes no cells. Nothing known: an empty list.
    """
    values = [(name, _positive(phases_ms.get(name))) for name in PHASES]
    total = sum(value for _, value in values)
    if width <= 0 or total <= 0.0 or not isfinite(total):
        return []
    cells: list[tuple[str, int]] = []
    done = 0.0
    start = 0
    for name, value in values:
        done += value
        end = min(width, round(done / total * width))
        if end > start:
            cells.append((name, end - start))
            start = end
    if start < width and cells:
        # Only rounding of the sum itself can leave a cell over.
        name, length = cells[-1]
        cells[-1] = (name, length + width - start)
    return cells


def phase_bar(
    phases_ms: Mapping[str, float | None], width: int, scale_ms: float | None = None
) -> Line:
    """Return a stacked bar of exactly `width` cells.

    `scale_ms` is the duration that the full width stands for, so that bars under each other can
    be compared; without it the bar fills the width.
    """
    if width <= 0:
        return []
    total = sum(_positive(phases_ms.get(name)) for name in PHASES)
    length = width
    if scale_ms is not None and isfinite(scale_ms) and scale_ms > 0.0:
        length = max(1, min(width, round(min(1.0, total / scale_ms) * width)))
    line: Line = [
        (PHASE_GLYPHS[name] * cells, f"bar.{name}")
        for name, cells in phase_cells(phases_ms, length)
    ]
    drawn = length if line else 0
    if drawn < width:
        line.append((" " * (width - drawn), "text"))
    return line


def gauge(fraction: float | None, width: int, style: str = "gauge") -> Line:
    """Return a thin horizontal gauge of exactly `width` cells; unknown is an empty track."""
    if width <= 0:
        return []
    filled = 0
    if fraction is not None and isfinite(fraction):
        filled = round(max(0.0, min(1.0, fraction)) * width)
        if fraction > 0.0:
            filled = max(1, filled)
    line: Line = []
    if filled:
        line.append(("━" * filled, style))
    if filled < width:
        line.append(("─" * (width - filled), "rule"))
    return line
