"""Keys: the line at the bottom and the page of help. Only keys that work are named."""

from collections.abc import Sequence

from gpuwatch.schema import PHASES
from gpuwatch.tui.render.bars import PHASE_GLYPHS, PHASE_WORDS
from gpuwatch.tui.render.text import Line, cells, fit, hanging, heading, pad, width_of, wrap

__all__ = ["Key", "footer_line", "footer_spans", "help_lines"]

Key = tuple[str, str, str]
"""What is pressed, what it does in one or two words, and the action that a click calls."""

_TITLES = ("Overview", "Ranks", "GPUs", "Findings", "Compare")
_TABS_FROM = 132
_GAPS_FROM = 100
"""Cells from which on the views are named, and keys stand wide apart where no views are."""

_GUIDE: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Words",
        (
            ("own ms", "the step without exposed communication: tells ranks apart"),
            ("comm", "time blocked by communication that compute does not hide"),
            ("data wait", "time blocked in fetching the next batch"),
            ("stall", "device clock: from one step's last kernel to the next one's first"),
            ("GPU-Util", "share of time in which any kernel ran, however small"),
            ("SM active", "share of cycles in which an SM had work; never from GPU-Util"),
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
            ("▲F1", "on a time axis: here F1 opened"),
            ("▁▂▃▄▅▆▇█", "one rank a glyph, low to high"),
        ),
    ),
)


def _size(key: str, what: str) -> int:
    return cells(key) + (1 + cells(what) if what else 0)


def _parts(keys: Sequence[Key], width: int, view: int) -> list[tuple[Line, str]]:
    """Return what the footer holds: pieces of the line, each with the action a click calls."""
    out: list[tuple[Line, str]] = [([(" ", "text")], "")]
    if view and width >= _TABS_FROM:
        for i, title in enumerate(_TITLES, 1):
            style = "tab" if i == view else "dim"
            out.append(([(str(i), "key"), (" ", "text"), (title, style)], f"view-{i}"))
            out.append(([("  ", "text")], ""))
        out[-1] = ([(" │ ", "rule")], "")
    elif view:
        numbers = range(1, len(_TITLES) + 1)
        out += [([(str(i), "tab" if i == view else "key")], f"view-{i}") for i in numbers]
        out.append(([(" view", "dim")], ""))
        out.append(([("  ", "text")], ""))
    gap = "   " if width >= (_TABS_FROM if view else _GAPS_FROM) else "  "
    used = sum(width_of(part) for part, _ in out)
    first = True
    # Commands, help and quit are never the ones that do not fit: the last three are kept.
    sizes = [_size(key, what) for key, what, _ in keys]
    for i, (key, what, action) in enumerate(keys):
        size = sizes[i] + (0 if first else len(gap))
        reserve = sum(len(gap) + later for later in sizes[max(i + 1, len(keys) - 3) :])
        if used + size + reserve > width - 1:
            continue
        if not first:
            out.append(([(gap, "text")], ""))
        out.append(([(key, "key"), (f" {what}" if what else "", "dim")], action))
        used += size
        first = False
    return out


def footer_line(keys: Sequence[Key], width: int, view: int = 0) -> Line:
    """Return the views and the keys that work here, as many as fit, most useful first.

    `view` is the number of the view that is open, 0 to leave the views out.
    """
    line: Line = []
    for part, _ in _parts(keys, width, view):
        line += part
    return fit(line, width)


def footer_spans(keys: Sequence[Key], width: int, view: int = 0) -> list[tuple[int, int, str]]:
    """Return (first cell, cell after the last, action) of what can be clicked in the footer."""
    spans = []
    x = 0
    for part, action in _parts(keys, width, view):
        size = width_of(part)
        if action:
            spans.append((x, x + size, action))
        x += size
    return spans


def help_lines(
    width: int,
    here: Sequence[tuple[str, str]] = (),
    everywhere: Sequence[tuple[str, str]] = (),
    problems: Sequence[str] = (),
) -> list[Line]:
    """Return the page of help: the keys of the view it was opened on, then those of all views.

    `problems` are what is wrong with the person's own keys and other settings.
    """
    lines: list[Line] = []
    if problems:
        lines.append(heading("Settings", width))
        for text in problems:
            lines += hanging([(" ▲ ", "warning")], text, "text", width)
        lines.append(fit([("", "text")], width))
    for title, entries in (("Keys here", here), ("Keys everywhere", everywhere), *_GUIDE):
        if not entries:
            continue
        lines += [heading(title, width)]
        for key, what in entries:
            for i, row in enumerate(wrap(what, width - 21)):
                lines.append(
                    fit(
                        [("   ", "text"), (pad(key if i == 0 else "", 16), "key"), (row, "text")],
                        width,
                    )
                )
        lines.append(fit([("", "text")], width))
    lines.append(heading("Phases of a step", width))
    parts: Line = [("   ", "text")]
    for name in PHASES:
        parts += [(PHASE_GLYPHS[name] * 2, f"bar.{name}"), (f" {PHASE_WORDS[name]}   ", "text")]
    lines.append(fit(parts, width))
    return lines
