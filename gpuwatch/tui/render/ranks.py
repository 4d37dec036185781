"""The table of ranks: fixed columns, so that only digits change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwatch.schema import GpuSample
from gpuwatch.store.views import RankView
from gpuwatch.tui.metrics import METRICS, Metric, metric_text
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.bars import PHASE_GLYPHS, PHASE_LABELS, phase_bar
from gpuwatch.tui.render.text import Line, fit, pad, rpad
from gpuwatch.tui.scene import RANK_SORTS

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding

__all__ = ["Columns", "columns_for", "header_row", "rank_flags", "rank_row", "sort_under"]

_STATE_STYLES = {
    "hung": "critical",
    "gone": "critical",
    "silent": "warning",
    "starting": "dim",
    "ended": "dim",
    "eval": "accent",
    "checkpoint": "accent",
    "compile": "accent",
}

_CELL = 8
_LEAST_BAR = 16
"""A bar shorter than this says less than the two columns that it would cost."""
_ALL = ("data_wait", "h2d", "forward", "backward", "comm", "optimizer")
_SOME = ("data_wait", "forward", "backward", "comm")
_EXTRA = ("gpu_util", "sm_active", "memory")


@dataclass(frozen=True, slots=True)
class Columns:
    """Widths in cells. `node` 0 leaves the node out, `bar` 0 the bar; `extra` are metrics."""

    width: int
    node: int
    phases: tuple[str, ...]
    bar: int
    state: int
    extra: tuple[str, ...] = ()


def columns_for(width: int, several_nodes: bool, devices: bool = False) -> Columns:
    """Choose the columns for a table of `width` cells; `devices`: there are some to tell of."""
    node = 11 if several_nodes and width >= 96 else 0
    state = 24 if width >= 110 else 16 if width >= 92 else 13
    fixed = 7 + _CELL + node + 4 + state
    phases: tuple[str, ...]
    if devices:
        # What tells causes apart comes first: data and comm, then the device beside them.
        for phases, extra, least in (
            (_ALL, _EXTRA, _LEAST_BAR),
            (_ALL, _EXTRA, 0),
            (_SOME, _EXTRA, 0),
            (_SOME, _EXTRA[:2], 0),
            (("data_wait", "comm"), _EXTRA[:2], 0),
        ):
            left = width - fixed - _CELL * (len(phases) + len(extra))
            if left >= least:
                return Columns(width, node, phases, _bar(left), state, extra)
    phases = _ALL
    if width - fixed - _CELL * len(phases) < _LEAST_BAR:
        phases = _SOME
    if width - fixed - _CELL * len(phases) < 6:
        phases = _SOME[:1]
    bar = width - fixed - _CELL * len(phases)
    return Columns(width, node, phases, max(0, min(bar, 60)), state)


def _bar(room: int) -> int:
    """Return the length of the bar in what is left; a short one says nothing."""
    return min(room, 60) if room >= 8 else 0


def header_row(columns: Columns) -> Line:
    """Return the names of the columns; phases carry their glyph, so that this is also the key."""
    line: Line = [(f" {rpad('rank', 6)}", "dim")]
    if columns.node:
        line.append((f"  {pad('node', columns.node - 2)}", "dim"))
    line.append((rpad("own ms", _CELL), "dim"))
    for name in columns.phases:
        label = PHASE_LABELS[name]
        line += [
            (" " * (_CELL - 2 - len(label)), "text"),
            (PHASE_GLYPHS[name], f"phase.{name}"),
            (f" {label}", "dim"),
        ]
    line += [(rpad(_metric(name).label, _CELL), "dim") for name in columns.extra]
    if columns.bar:
        line.append((f"  {pad('step', columns.bar)}", "dim"))
    line.append(("  state", "dim"))
    return fit(line, columns.width)


def sort_under(columns: Columns, x: int) -> str | None:
    """Return what the head of the column at a cell sorts by, None where it is not sorted by."""
    spans: list[tuple[int, str]] = [(7, "rank"), (columns.node, ""), (_CELL, "own")]
    spans += [(_CELL, name) for name in (*columns.phases, *columns.extra)]
    spans.append((columns.bar + 2 if columns.bar else 0, "step"))
    for size, name in spans:
        if x < size:
            return name if name in RANK_SORTS else None
        x -= size
    return None


def _metric(name: str) -> Metric:
    return next(item for item in METRICS if item.name == name)


def rank_flags(
    findings: Sequence[Finding], world: int, *, every: bool = False
) -> Mapping[int, str]:
    """Return for a rank the findings above note that single it out: on some ranks only.

    `every`: all open findings on it instead, with their kinds, as a filter looks for them.
    """
    flags: dict[int, list[str]] = {}
    for item in findings:
        if item.state != "open":
            continue
        if every:
            for rank in item.ranks:
                flags.setdefault(rank, []).append(f"{item.id} {item.kind}")
        elif item.severity != "note" and len(item.ranks) < world:
            for rank in item.ranks:
                flags.setdefault(rank, []).append(item.id or item.kind)
    return {rank: " ".join(ids) for rank, ids in flags.items()}


def _state(rank: RankView, flag: str, since_s: float) -> tuple[str, str]:
    text, style = rank.state, _STATE_STYLES.get(rank.state, "dim")
    if rank.state == "hung":
        text = f"✖ hung {numbers.age(rank.phase_age_s + since_s)} {rank.phase}".rstrip()
    elif rank.state == "silent":
        text = f"▲ silent {numbers.age(rank.age_s + since_s)}"
    elif rank.state == "gone":
        text = f"✖ gone {rank.state_reason}".rstrip()
    elif rank.state == "training":
        text, style = (f"◀ {flag}", "accent") if flag else ("", "dim")
    elif flag:
        text = f"{text} ◀ {flag}"
    return text, style


def rank_row(
    rank: RankView,
    columns: Columns,
    scale_ms: float | None,
    *,
    flag: str = "",
    selected: bool = False,
    focused: bool = False,
    since_s: float = 0.0,
    gpu: GpuSample | None = None,
) -> Line:
    """Return one row of exactly `columns.width` cells.

    `scale_ms` is the step that the full bar stands for, `flag` the findings on this rank, `gpu`
    the device that it computes on.
    """
    mark = "▌" if selected and focused else "▏" if selected else " "
    line: Line = [(mark, "focus" if focused else "dim")]
    line.append((rpad(str(rank.rank), 6), "strong" if selected else "text"))
    if columns.node:
        line.append((f"  {pad(rank.node, columns.node - 2)}", "dim"))
    own = numbers.ms(rank.own_ms)
    line.append((rpad(own, _CELL), "strong" if own != numbers.NA else "faint"))
    for name in columns.phases:
        value = rank.phases_ms.get(name)
        text = numbers.ms(value)
        line.append((rpad(text, _CELL), "text" if text != numbers.NA else "faint"))
    for name in columns.extra:
        metric = _metric(name)
        text = metric_text(metric, metric.get(rank, gpu))
        line.append((rpad(text, _CELL), "text" if text != numbers.NA else "faint"))
    if columns.bar:
        line.append(("  ", "text"))
        line += phase_bar(rank.phases_ms, columns.bar, scale_ms)
    text, style = _state(rank, flag, since_s)
    line.append((f"  {pad(text, columns.state)}", style))
    return fit(line, columns.width)
