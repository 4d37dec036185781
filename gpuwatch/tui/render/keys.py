"""Keys: the line at the bottom and the page of help. Only keys that work are named."""

from collections.abc import Sequence

from gpuwatch.schema import PHASES
from gpuwatch.tui.render.bars import PHASE_GLYPHS, PHASE_WORDS
from gpuwatch.tui.render.text import Line, fit, heading, join, pad

__all__ = ["Key", "footer_line", "help_lines"]

Key = tuple[str, str]
"""What is pressed, and what it does in one or two words."""

_HELP: tuple[tuple[str, tuple[Key, ...]], ...] = (
    (
        "Keys",
        (
            ("j k  ↓ ↑", "move the selection"),
            ("g G  home end", "first, last"),
            ("tab", "findings or ranks"),
            ("enter", "on a finding: its evidence and what to try"),
            ("esc", "back"),
            ("[ ]", "previous, next run, when several are live"),
            ("space", "pause and resume the picture; the training is not touched"),
            ("?", "this page"),
            ("q", "quit; the training goes on"),
        ),
    ),
    (
        "Words",
        (
            ("own ms", "the step without exposed communication: tells ranks apart"),
            ("comm", "time blocked by communication that compute does not hide"),
            ("data wait", "time blocked in fetching the next batch"),
            ("goodput", "useful training time / wall time since the start"),
            ("n/a", "not known, and never drawn as 0"),
            ("lost", "telemetry that never came; totals are still right"),
        ),
    ),
    (
        "Signs",
        (
            ("✖ ▲ ·", "critical, warning, note"),
            ("+61 ms/step", "what the step would lose if this cause were gone"),
            ("◀ F1", "this rank is singled out by finding F1"),
            ("▁▂▃▄▅▆▇█", "own time of one rank, fast to slow"),
        ),
    ),
)


def footer_line(keys: Sequence[Key], width: int) -> Line:
    """Return the keys that work here, as many as fit, most useful first."""
    parts: list[Line] = [[(key, "key"), (f" {what}", "dim")] for key, what in keys]
    return fit([(" ", "text"), *join(parts, ("   ", "text"), max(0, width - 2))], width)


def help_lines(width: int) -> list[Line]:
    """Return the page of help."""
    lines: list[Line] = []
    for title, entries in _HELP:
        lines += [heading(title, width)]
        for key, what in entries:
            lines.append(fit([("   ", "text"), (pad(key, 16), "key"), (what, "text")], width))
        lines.append(fit([("", "text")], width))
    lines.append(heading("Phases of a step", width))
    parts: Line = [("   ", "text")]
    for name in PHASES:
        parts += [(PHASE_GLYPHS[name] * 2, f"bar.{name}"), (f" {PHASE_WORDS[name]}   ", "text")]
    lines.append(fit(parts, width))
    return lines
