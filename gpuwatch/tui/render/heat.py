"""One number of every rank as one glyph each, grouped by node: shape and colour say the same."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, isfinite

from gpuwatch.schema import PHASES, GpuSample
from gpuwatch.store.views import RankView, RunView
from gpuwatch.tui.metrics import OWN, Metric, metric_text
from gpuwatch.tui.render.spark import BLOCKS, UNKNOWN, bucket_max, heat_levels, limits
from gpuwatch.tui.render.text import Line, fit, pad, spread, width_of

__all__ = [
    "HeatGrid",
    "heat_grid",
    "heat_height",
    "heat_lines",
    "heat_row",
    "heat_row_grid",
    "heat_values",
    "rank_under",
]

_GLYPHS = (*BLOCKS, UNKNOWN)
_STYLES = (*(f"heat.{level}" for level in range(len(BLOCKS))), "faint")
"""By level; -1, the last, is unknown."""

_LEAST_LABEL = 7
_MOST_LABEL = 16


@dataclass(frozen=True, slots=True)
class HeatGrid:
    """Where each rank stands: rows of (label, glyphs), a glyph being (x, first, last position).

    Positions are those in the run's ranks, grouped by node. `per_glyph` is how many ranks share
    a glyph at most.
    """

    rows: tuple[tuple[str, tuple[tuple[int, int, int], ...]], ...]
    positions: tuple[int, ...]
    per_glyph: int
    label: int


def _grouped(nodes: Sequence[str]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        groups.setdefault(node, []).append(i)
    return list(groups.items())


def _spaced(count: int) -> int:
    """Return the cells of so many glyphs with a space after each eighth."""
    return count + max(0, count - 1) // 8


def _block(x: int, start: int, count: int, per_glyph: int) -> list[tuple[int, int, int]]:
    cells = []
    number = ceil(count / per_glyph)
    for i in range(number):
        first = start + i * per_glyph
        cells.append((x + i + i // 8, first, min(start + count, first + per_glyph) - 1))
    return cells


def _in_blocks(
    groups: Sequence[tuple[str, list[int]]], width: int, rows: int, label: int, per_glyph: int
) -> list[tuple[str, list[tuple[int, int, int]]]] | None:
    """Return several nodes a row, each a block; None where the rows do not suffice."""
    block = max(_spaced(ceil(len(members) / per_glyph)) for _, members in groups)
    most = (width - label + 1) // (block + 1)
    if block == 1:
        # A glyph a node: in eighths, as ranks are.
        most = max(1, (width - label) // 9 * 8)
    if most < 1 or ceil(len(groups) / most) > rows:
        return None
    # The fewest blocks a row that fit, in powers of two, so that rows begin at round nodes.
    a_row = 1
    while a_row < most and ceil(len(groups) / a_row) > rows:
        a_row = min(most, a_row * 2)
    out: list[tuple[str, list[tuple[int, int, int]]]] = []
    start = 0
    for i, (name, members) in enumerate(groups):
        if i % a_row == 0:
            out.append((name, []))
        at = i % a_row
        x = label + (at + at // 8 if block == 1 else at * (block + 1))
        out[-1][1].extend(_block(x, start, len(members), per_glyph))
        start += len(members)
    return out


def heat_grid(run: RunView, width: int, rows: int) -> HeatGrid:
    """Find the clearest picture in `rows` lines of `width` cells.

    A line a node; else several nodes a line; else several ranks of a node a glyph; else ranks in
    a row without regard to nodes, where there are more nodes than glyphs.
    """
    return _grid(_nodes(run), tuple([rank.rank for rank in run.ranks]), width, rows)


def _nodes(run: RunView) -> tuple[str, ...]:
    return tuple([rank.node for rank in run.ranks])


# Where ranks run changes seldom, and the picture is wanted several times a second.
@lru_cache(maxsize=4)
def _grid(nodes: tuple[str, ...], ranks: tuple[int, ...], width: int, rows: int) -> HeatGrid:
    groups = _grouped(nodes)
    positions = tuple([i for _, members in groups for i in members])
    longest = max([len(name) for name, _ in groups], default=0)
    label = max(_LEAST_LABEL, min(_MOST_LABEL, longest + 3, width // 4))
    if not positions or width <= label or rows <= 0:
        return HeatGrid((), positions, 1, label)
    largest = max(len(members) for _, members in groups)
    wide = width - label - 1
    if len(groups) <= rows:
        # A node may need several lines: as many glyphs as fit in whole eighths.
        room = max(8, (wide + 1) // 9 * 8) if wide >= 9 else max(1, wide)
        lines: list[tuple[str, list[tuple[int, int, int]]]] = []
        start = 0
        for name, members in groups:
            for offset in range(0, len(members), room):
                count = min(room, len(members) - offset)
                lines.append((name if offset == 0 else "", _block(label, start + offset, count, 1)))
            start += len(members)
        if len(lines) <= rows:
            return HeatGrid(tuple((n, tuple(c)) for n, c in lines), positions, 1, label)
    for per_glyph in range(1, largest + 1):
        found = _in_blocks(groups, width, rows, label, per_glyph)
        if found is not None:
            return HeatGrid(tuple((n, tuple(c)) for n, c in found), positions, per_glyph, label)
    room = max(1, wide)
    per_glyph = max(1, ceil(len(positions) / (room * rows)))
    flat: list[tuple[str, tuple[tuple[int, int, int], ...]]] = []
    for start in range(0, len(positions), room * per_glyph):
        cells = []
        for i in range(room):
            first = start + i * per_glyph
            if first >= len(positions):
                break
            cells.append((label + i, first, min(len(positions), first + per_glyph) - 1))
        flat.append((f"{ranks[positions[start]]:,}", tuple(cells)))
    return HeatGrid(tuple(flat), positions, per_glyph, label)


def rank_under(grid: HeatGrid, values: Sequence[float | None], x: int, y: int) -> int | None:
    """Return the position of the rank at that cell; of several, the one that the glyph shows."""
    if not 0 <= y < len(grid.rows):
        return None
    for at, first, last in grid.rows[y][1]:
        if at == x:
            members = [grid.positions[i] for i in range(first, last + 1)]
            known = [i for i in members if values[i] is not None]
            return max(known, key=lambda i: values[i] or 0.0) if known else members[0]
    return None


def heat_height(run: RunView, width: int) -> int:
    """Return the rows that the picture would like to have, without its pointer and its scale."""
    if not run.ranks:
        return 0
    return len(heat_grid(run, width, max(len(set(_nodes(run))), 4) * 4).rows)


def heat_values(run: RunView, metric: Metric, gpus: Mapping[str, GpuSample]) -> list[float | None]:
    """Return the metric of every rank, by position."""
    # The usual ones without a call a rank: this is made of a thousand ranks at every tick.
    plain: list[float | None] | None = None
    if metric is OWN:
        plain = [rank.own_ms for rank in run.ranks]
    elif metric.name in PHASES:
        plain = [rank.phases_ms.get(metric.name) for rank in run.ranks]
    if plain is not None and isfinite(sum([value for value in plain if value is not None])):
        return plain
    values: list[float | None] = []
    for rank in run.ranks:
        gpu = gpus.get(rank.hello.device_uuid) if gpus and rank.hello is not None else None
        value = metric.get(rank, gpu)
        values.append(value if value is not None and isfinite(value) else None)
    return values


def heat_lines(
    run: RunView,
    width: int,
    height: int,
    *,
    metric: Metric = OWN,
    gpus: Mapping[str, GpuSample] | None = None,
    selected: int | None = None,
    passing: frozenset[int] | None = None,
    grid: HeatGrid | None = None,
    flags: Mapping[int, str] | None = None,
) -> list[Line]:
    """Return at most `height` lines; the last one is the scale.

    A glyph that stands for several ranks shows the greatest. `selected` is a rank number: its row
    is marked at the left and its glyph from below, where a line is left for that; the glyph keeps
    its shape, which is its value. `passing` are the positions that the filter lets through, the
    others are a faint dot; `grid` is that of `height` - 1 rows, where it was made before. `flags`
    are the findings that single a rank out, by its number: behind its row they are named.
    """
    if height <= 0 or not run.ranks:
        return []
    values = heat_values(run, metric, gpus or {})
    ends = limits(values)
    if ends is None:
        why = _why_unknown(run.ranks[0], metric)
        return [fit([(f" {metric.label} n/a: {why}", "dim")], width)]
    low, high = ends
    rows = height - 1 if height > 1 else 1
    grid = heat_grid(run, width, rows) if grid is None else grid
    placed: list[float | None] = [
        values[i] if passing is None or i in passing else None for i in grid.positions
    ]
    shown = placed
    if grid.per_glyph > 1:
        shown = []
        for _, cells in grid.rows:
            for _, first, last in cells:
                known = [value for value in placed[first : last + 1] if value is not None]
                shown.append(max(known) if known else None)
    levels = iter(heat_levels(shown, low, high))
    here = next((i for i, rank in enumerate(run.ranks) if rank.rank == selected), None)
    here_at = -1 if here is None else grid.positions.index(here)
    flagged = [flags.get(run.ranks[i].rank, "") for i in grid.positions] if flags else []
    lines: list[Line] = []
    pointed: int | None = None
    for name, cells in grid.rows:
        line: Line = [(" ", "focus"), (f"{pad(name, grid.label - 2)} ", "dim")]
        text, last_style, x = "", "", grid.label
        for at, first, last in cells:
            level = next(levels)
            key = -1 if level is None else level
            style = _STYLES[key]
            if first <= here_at <= last:
                style, pointed = "heat.cursor", at
                line[0] = ("▌", "focus")
            gap = " " * (at - x)
            if style != last_style:
                if text:
                    line.append((text + gap, last_style))
                elif gap:
                    line.append((gap, "text"))
                text, last_style = _GLYPHS[key], style
            else:
                text += gap + _GLYPHS[key]
            x = at + 1
        if text:
            line.append((text, last_style))
        if flagged and cells:
            told = _flags_text(flagged[cells[0][1] : cells[-1][2] + 1])
            if told and x + 3 + len(told) <= width:
                line.append((f"   {told}", "accent"))
        lines.append(fit(line, width))
    if pointed is not None and len(lines) + 2 <= height:
        lines.append(fit([(" " * pointed, "text"), ("↑", "focus")], width))
    if height > 1:
        lines.append(_scale_line(run, grid, metric, (low, high), width, values, here))
    return lines


def _flags_text(flags: Sequence[str]) -> str:
    """Return `◀ F1 on 8 ranks` for the ranks of a row, the finding on most of them first."""
    counts = Counter([name for names in flags for name in names.split()])
    if not counts:
        return ""
    (name, number), *others = counts.most_common()
    text = f"◀ {name} on {number:,} rank{'s' if number != 1 else ''}"
    return f"{text}, {' '.join(item for item, _ in others)}" if others else text


def _why_unknown(rank: RankView, metric: Metric) -> str:
    if metric.name in rank.phases_na:
        return rank.phases_na[metric.name]
    if rank.step_ms is None:
        return "no steady step yet"
    return "no rank reports it"


def _scale_line(
    run: RunView,
    grid: HeatGrid,
    metric: Metric,
    ends: tuple[float, float],
    width: int,
    values: Sequence[float | None],
    here: int | None,
) -> Line:
    low, high = ends
    scale: Line = [
        (f" {pad(metric.label, max(grid.label - 1, len(metric.label) + 1))}", "dim"),
        (f"{metric_text(metric, low)} ", "text"),
    ]
    scale += [(glyph, f"heat.{level}") for level, glyph in enumerate(BLOCKS)]
    scale.append((f" {metric_text(metric, high)}", "text"))
    if grid.per_glyph > 1:
        scale.append((f"   {grid.per_glyph:,} ranks a glyph, the greatest", "dim"))
    right: Line = []
    if here is not None:
        right = [
            (f"rank {run.ranks[here].rank} ", "dim"),
            (metric_text(metric, values[here]), "strong"),
            (" ", "text"),
        ]
    return spread(scale, right, width, keep="left")


def _row_cells(
    run: RunView, width: int, metric: Metric, gpus: Mapping[str, GpuSample]
) -> tuple[str, Line, list[float | None], tuple[float, float]] | None:
    """Return label, scale, the values of the glyphs, and their limits; None where none is known."""
    values = heat_values(run, metric, gpus)
    ends = limits(values)
    if ends is None:
        return None
    label = f" {pad(metric.label, 7)} "
    scale: Line = [(f"  {metric_text(metric, ends[0])}..{metric_text(metric, ends[1])} ", "dim")]
    room = width - len(label) - width_of(scale) - 1
    return label, scale, bucket_max(values, max(1, room - room // 9)), ends


def heat_row_grid(
    run: RunView,
    width: int,
    *,
    metric: Metric = OWN,
    gpus: Mapping[str, GpuSample] | None = None,
) -> HeatGrid | None:
    """Return where each rank stands in `heat_row`, None where it has no glyphs."""
    found = _row_cells(run, width, metric, gpus or {})
    if found is None:
        return None
    label, _, shown, _ = found
    number, drawn = len(run.ranks), len(shown)
    glyphs = tuple(
        [
            (len(label) + i + i // 8, i * number // drawn, max((i + 1) * number // drawn - 1, 0))
            for i in range(drawn)
        ]
    )
    return HeatGrid((("", glyphs),), tuple(range(number)), ceil(number / drawn), len(label))


def heat_row(
    run: RunView,
    width: int,
    *,
    metric: Metric = OWN,
    gpus: Mapping[str, GpuSample] | None = None,
) -> Line:
    """Return the picture in one line, with its scale at the right, for a short terminal."""
    found = _row_cells(run, width, metric, gpus or {})
    if found is None:
        return fit([(f" {metric.label} n/a: no steady step yet", "dim")], width)
    label, scale, shown, (low, high) = found
    line: Line = [(label, "dim")]
    text, last_style = "", ""
    for i, level in enumerate(heat_levels(shown, low, high)):
        key = -1 if level is None else level
        gap = " " if i and i % 8 == 0 else ""
        if _STYLES[key] != last_style:
            if text:
                line.append((text + gap, last_style))
            text, last_style = _GLYPHS[key], _STYLES[key]
        else:
            text += gap + _GLYPHS[key]
    line.append((text, last_style))
    return spread(line, scale, width)
