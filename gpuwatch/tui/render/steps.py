"""Where a step goes: the mean of all ranks and the selected one as stacked bars, and the key."""

from gpuwatch.schema import PHASES
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.bars import PHASE_GLYPHS, PHASE_LABELS, PHASE_WORDS, phase_bar
from gpuwatch.tui.render.text import Line, fit, heading, pad, rpad
from gpuwatch.tui.scene import Scene, Summary

__all__ = ["legend", "step_lines"]

_LABEL_CELLS = 12
_VALUE_CELLS = 11


def legend(summary: Summary | None, width: int) -> Line:
    """Return the key of the bars with each phase's part of the step, in fixed columns.

    Wide: name, mean ms and share; narrow: short name and share.
    """
    cell = max(4, min(24, (width - 1) // len(PHASES)))
    words = PHASE_WORDS if cell >= 22 else PHASE_LABELS
    total = summary.step_ms if summary is not None else None
    line: Line = [(" ", "text")]
    for name in PHASES:
        value = summary.phases_ms.get(name) if summary is not None else None
        part = value / total if value is not None and total else None
        style = "text" if part is not None else "faint"
        text: Line = [(PHASE_GLYPHS[name], f"phase.{name}"), (f" {words[name]}", "dim")]
        if total is not None:
            if cell >= 17 and part is not None:
                text.append((rpad(numbers.ms(value), 6), style))
                style = "dim"
            text.append((rpad(numbers.share(part), 4), style))
        line += fit(text, cell)
    return fit(line, width)


def _bar_line(
    label: str,
    phases: dict[str, float | None],
    step_ms: float | None,
    scale: float | None,
    width: int,
) -> Line:
    track = max(1, width - _LABEL_CELLS - _VALUE_CELLS)
    line: Line = [(f" {pad(label, _LABEL_CELLS - 1)}", "dim"), *phase_bar(phases, track, scale)]
    text = numbers.ms(step_ms)
    unit = " ms" if text[-1:].isdigit() else ""
    line.append((rpad(text, 7) + pad(unit, 3), "strong" if step_ms is not None else "dim"))
    return fit(line, width)


def step_lines(scene: Scene, width: int, height: int) -> list[Line]:
    """Return at most `height` lines: heading, mean, selected rank where there are several, key."""
    run, summary = scene.run, scene.summary
    if run is None or summary is None:
        return [heading("Where a step goes", width)]
    note = f"last {run.window:,} steady steps" if run.window else "no steady step yet"
    clock = scene.rank.clock if scene.rank is not None else ""
    lines = [
        heading("Where a step goes", width, note=note, right=f"{clock} clock" if clock else "")
    ]
    scale = max(summary.scale_ms or 0.0, summary.step_ms or 0.0) or None
    rank = scene.rank
    several = len(run.ranks) > 1
    label = "mean" if several else f"rank {rank.rank}" if rank is not None else "step"
    lines.append(_bar_line(label, dict(summary.phases_ms), summary.step_ms, scale, width))
    if several and rank is not None and height >= 4:
        lines.append(
            _bar_line(f"rank {rank.rank}", dict(rank.phases_ms), rank.step_ms, scale, width)
        )
    lines.append(legend(summary, width))
    return lines[:height]
