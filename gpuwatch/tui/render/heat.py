"""Own time of every rank as one glyph each: shape and colour say the same."""

from collections.abc import Sequence
from math import ceil, isfinite

from gpuwatch.store.views import RunView
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.spark import BLOCKS, UNKNOWN, bucket_max, heat_levels
from gpuwatch.tui.render.text import Line, fit, pad, spread, width_of
from gpuwatch.tui.scene import Summary

__all__ = ["heat_height", "heat_lines", "heat_row"]

_LABEL = 10

_GLYPHS = (*BLOCKS, UNKNOWN)
_STYLES = (*(f"heat.{level}" for level in range(len(BLOCKS))), "faint")
"""By level; -1, the last, is unknown."""


def _glyphs(values: Sequence[float | None], low: float, high: float, gap: int = 8) -> Line:
    """Return one glyph a value, equal styles joined, a space after every `gap` glyphs."""
    line: Line = []
    text, last = "", -2
    for i, level in enumerate(heat_levels(values, low, high)):
        key = -1 if level is None else level
        if key != last:
            if text:
                line.append((text, _STYLES[last]))
            text, last = "", key
        if gap and i and i % gap == 0:
            text += " "
        text += _GLYPHS[key]
    if text:
        line.append((text, _STYLES[last]))
    return line


def _room(width: int) -> int:
    """Return how many glyphs fit beside the label, with a space after each eighth."""
    cells = max(1, width - _LABEL - 1)
    return max(1, cells - (cells // 9))


def _groups(run: RunView) -> list[tuple[str, list[float | None]]]:
    """Return own times by node, in rank order; one nameless group where nodes are unknown."""
    groups: dict[str, list[float | None]] = {}
    for rank in run.ranks:
        own = rank.own_ms
        groups.setdefault(rank.node, []).append(own if own is not None and isfinite(own) else None)
    return list(groups.items())


def heat_height(run: RunView, width: int) -> int:
    """Return the lines that the picture would like to have, without its scale line."""
    room = _room(width)
    groups = _groups(run)
    return sum(max(1, ceil(len(values) / room)) for _, values in groups) if groups else 0


def heat_lines(run: RunView, summary: Summary, width: int, height: int) -> list[Line]:
    """Return at most `height` lines: a row a node, or several ranks a glyph where they are many.

    A glyph that stands for several ranks shows the slowest of them. The last line is the scale.
    """
    if height <= 0 or not run.ranks:
        return []
    low, high = summary.own_low_ms, summary.own_high_ms
    if low is None or high is None:
        return [fit([(" own time n/a: no steady step yet", "dim")], width)]
    rows = max(1, height - 1) if height > 1 else 1
    room = _room(width)
    groups = _groups(run)
    per_glyph = 1
    lines: list[Line] = []
    if len(groups) <= rows and all(
        len(values) <= room * (rows // len(groups)) for _, values in groups
    ):
        for name, values in groups:
            for start in range(0, len(values), room):
                label = name if start == 0 else ""
                lines.append(
                    [
                        (f" {pad(label, _LABEL - 1)}", "dim"),
                        *_glyphs(values[start : start + room], low, high),
                    ]
                )
    else:
        flat = [value for _, values in groups for value in values]
        per_glyph = max(1, ceil(len(flat) / (room * rows)))
        cells = bucket_max(flat, ceil(len(flat) / per_glyph))
        for start in range(0, len(cells), room):
            first = run.ranks[min(start * per_glyph, len(run.ranks) - 1)].rank
            lines.append(
                [
                    (f" {pad(f'{first:,}', _LABEL - 1)}", "dim"),
                    *_glyphs(cells[start : start + room], low, high),
                ]
            )
    lines = [fit(line, width) for line in lines[:rows]]
    if height > 1:
        scale: Line = [
            (f" {pad('own ms', _LABEL - 1)}", "dim"),
            (f"{numbers.ms(low)} ", "text"),
        ]
        scale += [(glyph, f"heat.{level}") for level, glyph in enumerate(BLOCKS)]
        scale.append((f" {numbers.ms(high)}", "text"))
        if per_glyph > 1:
            scale.append((f"   {per_glyph:,} ranks a glyph, the slowest shown", "dim"))
        lines.append(fit(scale, width))
    return lines


def heat_row(run: RunView, summary: Summary, width: int) -> Line:
    """Return the picture in one line, with its scale at the right, for a short terminal."""
    low, high = summary.own_low_ms, summary.own_high_ms
    if low is None or high is None:
        return fit([(" own time n/a: no steady step yet", "dim")], width)
    scale: Line = [(f"  {numbers.ms(low)}..{numbers.ms(high)} ms ", "dim")]
    room = width - 8 - width_of(scale)
    values = [
        rank.own_ms if rank.own_ms is not None and isfinite(rank.own_ms) else None
        for rank in run.ranks
    ]
    cells = bucket_max(values, max(1, room - room // 9))
    return spread([(" own    ", "dim"), *_glyphs(cells, low, high)], scale, width)
