"""The step time of the last minutes, and what happened in them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuwatch.store.views import Event, RankView, Rollup
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.findings import SEVERITY_GLYPHS, ranks_text
from gpuwatch.tui.render.spark import limits, spark_rows
from gpuwatch.tui.render.text import Line, clip, fit, hanging, heading, rpad, spread
from gpuwatch.tui.scene import Scene

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding

__all__ = ["event_lines", "event_page", "second_under", "timeline_lines", "timeline_row"]

_LABEL = 10
_ROW_LABEL, _ROW_ENDS = 8, 26
_OF_RANK = re.compile(r"rank (\d+)( .*)")
_AT_ONCE_S = 2.0
"""Ranks of one launcher say the same within this time."""


def _marks(findings: Sequence[Finding], first_s: float, last_s: float, width: int) -> Line:
    """Return the line under the timeline that says where findings opened."""
    cells = [" "] * width
    for item in findings:
        if not first_s <= item.opened_s <= last_s or last_s <= first_s or not item.id:
            continue
        text = f"▲ {item.id}"
        at = min(
            round((item.opened_s - first_s) / (last_s - first_s) * (width - 1)), width - len(text)
        )
        if at >= 0 and all(cell == " " for cell in cells[max(0, at - 1) : at + len(text) + 1]):
            cells[at : at + len(text)] = text
    return [("".join(cells), "dim")]


def _points(rank: RankView, track: int) -> tuple[Sequence[Rollup], list[float | None]]:
    """Return what is drawn in `track` cells: a second a cell while it fits, at most four."""
    points = rank.timeline[-track * 4 :]
    return points, [point.median_ms for point in points]


def _span(points: Sequence[Rollup]) -> str:
    return numbers.age(float(points[-1].second_s - points[0].second_s + 1))


def second_under(rank: RankView | None, width: int, x: int, *, row: bool) -> float | None:
    """Return the wall-clock time at a cell of the sparkline, None beside it.

    `row`: of the one that `timeline_row` draws, else of that of `timeline_lines`.
    """
    if rank is None or not rank.timeline:
        return None
    track = max(1, width - _ROW_LABEL - _ROW_ENDS) if row else max(1, width - _LABEL - 2)
    points, _ = _points(rank, track)
    drawn = min(track, len(points))
    cell = x - _ROW_LABEL if row else x - _LABEL - (track - drawn)
    if not 0 <= cell < drawn:
        return None
    # A cell is the end of its last second, as the times of curves are.
    return float(points[(cell + 1) * len(points) // drawn - 1].second_s + 1)


def _nothing(rank: RankView | None, scene: Scene) -> str:
    """Return why there is no sparkline."""
    words = scene.filters.get("ranks", "")
    if rank is None and words and scene.run is not None and scene.run.ranks:
        return f"no rank passes ‹{words}›; esc shows all"
    return "no step yet"


def timeline_row(rank: RankView | None, scene: Scene, width: int) -> Line:
    """Return the sparkline in one line, for a short terminal."""
    if rank is None or not rank.timeline:
        return fit([(f" step   {_nothing(rank, scene)}", "dim")], width)
    track = max(1, width - _ROW_LABEL - _ROW_ENDS)
    points, values = _points(rank, track)
    ends = limits(values)
    low, high = ends if ends is not None else (None, None)
    drawn = spark_rows(values, min(track, len(points)), 1)[0]
    right: Line = [(f"  {numbers.ms(low)}..{numbers.ms(high)} ms {_span(points)} ", "dim")]
    return spread([(" step   ", "dim"), (drawn, "spark")], right, width)


def timeline_lines(rank: RankView | None, scene: Scene, width: int, height: int) -> list[Line]:
    """Return heading and sparkline of one rank's median step per second, at most `height` lines."""
    title = "Step time"
    if rank is None or not rank.timeline:
        lines = [heading(title, width)]
        lines.append(fit([(f" {rpad('', _LABEL - 1)}{_nothing(rank, scene)}", "dim")], width))
        return lines[:height]
    track = max(1, width - _LABEL - 2)
    points, values = _points(rank, track)
    ends = limits(values)
    note = f"median ms a second, rank {rank.rank}, last {_span(points)}"
    lines = [heading(title, width, note=note)]
    marked = [item for item in scene.findings if item.opened_s > 0] if height >= 4 else []
    rows = max(1, min(2, height - 1 - (1 if marked else 0)))
    low, high = ends if ends is not None else (None, None)
    for i, row in enumerate(spark_rows(values, track, rows)):
        label = ""
        if i == 0:
            label = numbers.ms(high) if rows > 1 else numbers.ms(values[-1])
        elif i == rows - 1:
            label = numbers.ms(low)
        lines.append(fit([(f"{rpad(label, _LABEL - 1)} ", "dim"), (row, "spark")], width))
    if marked:
        drawn = min(len(points), track)
        first_s = float(points[0].second_s)
        marks = _marks(marked, first_s, float(points[-1].second_s), drawn)
        lines.append(fit([(" " * (_LABEL + track - drawn), "text"), *marks], width))
    return lines[:height]


def _event_lines(event: Event, width: int, whole: bool = False) -> list[Line]:
    """Return an event in a line, or `whole`: with its day, in as many lines as it takes."""
    form = "%Y-%m-%d %H:%M:%S" if whole else "%H:%M:%S"
    moment = time.strftime(form, time.localtime(event.at_s)) if event.at_s > 0 else "--:--:--"
    severity = event.severity if event.severity in SEVERITY_GLYPHS else "note"
    style = "text" if severity == "note" else severity
    lead: Line = [(f" {moment} ", "dim"), (f"{SEVERITY_GLYPHS[severity]} ", severity)]
    if whole:
        return hanging(lead, event.text, style, width)
    return [fit([*lead, (event.text, style)], width)]


def _told_of_ranks(events: Iterable[Event], most: int) -> list[Event]:
    """Return at most `most` events, newest first; what befell ranks at once is one of them.

    A short pane would else tell it of one rank only, as if the others were spared.
    """
    out: list[Event] = []
    ranks: list[int] = []
    for event in events:
        found = _OF_RANK.fullmatch(event.text)
        last = out[-1] if out else None
        if found is not None and last is not None and ranks:
            same = last.text == f"{_ranks(ranks)}{found[2]}" and last.severity == event.severity
            if same and last.run == event.run and last.at_s - event.at_s <= _AT_ONCE_S:
                ranks.append(int(found[1]))
                out[-1] = replace(last, text=f"{_ranks(ranks)}{found[2]}")
                continue
        if len(out) == most:
            break
        ranks = [int(found[1])] if found is not None else []
        out.append(event)
    return out


def _ranks(numbers_: Sequence[int]) -> str:
    return ranks_text(sorted(set(numbers_)))


def event_lines(scene: Scene, width: int, height: int, *, compact: bool = False) -> list[Line]:
    """Return heading and events, newest first, at most `height` lines; standing notices on top.

    `compact` leaves the heading out.
    """
    if height <= 0:
        return []
    lines = [] if compact else [heading("Events", width, right="e")]
    lines += [
        fit([(" ▲ ", "warning"), (clip(text, width - 4), "text")], width)
        for text in _notices(scene)[: max(1, height // 2)]
    ]
    for item in _told_of_ranks(_events(scene), max(0, height - len(lines))):
        lines += _event_lines(item, width)
    if len(lines) == (0 if compact else 1):
        lines.append(fit([("   nothing happened yet", "dim")], width))
    return lines[:height]


def event_page(scene: Scene, width: int, problems: Sequence[str] = ()) -> list[Line]:
    """Return all notices and events, newest first, each on its own, whole and with its day.

    `problems` are sentences about the monitor's own settings.
    """
    lines = [heading("Events", width)]
    for text in (*problems, *_notices(scene)):
        lines += hanging([(" ▲ ", "warning")], text, "text", width)
    for item in _events(scene):
        lines += _event_lines(item, width, whole=True)
    if len(lines) == 1:
        lines.append(fit([("   nothing happened yet", "dim")], width))
    return lines


def _events(scene: Scene) -> list[Event]:
    shown = scene.cursor_s
    return [item for item in scene.events if shown is None or item.at_s <= shown]


def _notices(scene: Scene) -> list[str]:
    notices = list(scene.view.notices)
    if scene.run is not None:
        for rank in scene.run.ranks[:64]:
            notices += [f"rank {rank.rank}: {text}" for text in rank.notices]
    return notices
