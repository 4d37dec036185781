"""Two runs against each other: values, difference, how the steps lie, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from gpuwatch.store.compare import untold_drivers
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.checks import check_lines
from gpuwatch.tui.render.text import Line, cells, clip, fit, heading, pad, rpad, width_of, wrap

if TYPE_CHECKING:
    from gpuwatch.diagnosis.verify import CheckResult
    from gpuwatch.store.compare import Comparison, Row, Setting, Spread
    from gpuwatch.tui.sides import Chosen, Compared, Source

__all__ = ["COMMANDS", "compare_lines", "source_row", "spread_line"]

COMMANDS = (
    ("gpuwatch record -o before.gpuwatch", "while the run goes, in another terminal"),
    ("gpuwatch record -o after.gpuwatch", "the run with the change"),
    ("gpuwatch replay before.gpuwatch after.gpuwatch", "this view on both"),
    ("gpuwatch compare before.gpuwatch after.gpuwatch", "the same as text"),
)
"""What gives two recordings, as it is typed."""

_LABELS = {
    "step_p50": "step p50 ms",
    "data_wait_worst": "data wait worst",
    "comm_median": "comm median",
    "transfer": "  transfer",
    "peer_wait": "  peer wait",
    "forward_backward": "fwd + bwd",
    "h2d": "h2d",
    "optimizer": "optimizer",
    "other": "other",
    "samples_per_s": "samples/s",
    "goodput": "goodput",
}

_LABEL_CELLS = 17
_VALUE_CELLS = 8
_SHARE_CELLS = 8
_SPREAD_FROM = 104
"""Cells from which on there is room for how the steps lie."""

_LONG = 48
"""Cells of a setting's value: a longer one is cut."""

_MUCH = 0.1
"""A step that is longer by a tenth is critical, as a finding of a fifth of it is."""

_WORDS = {"replay": "replayed"}
"""Of a source's kind, where the kind is no word for a person."""


def spread_line(before: Spread | None, after: Spread | None, width: int) -> Line:
    """Return where the steps of A (░) and B (█) lie, ▒ where both do; exactly `width` cells.

    Each from the step that one in ten is below to the one that one in ten is above, on the scale
    of this row. Unknown is empty.
    """
    known = [side for side in (before, after) if side is not None and isfinite(side.high)]
    if width <= 0 or not known:
        return [(" " * max(0, width), "text")]
    low = min(side.low for side in known)
    high = max(side.high for side in known)
    cells = [""] * width
    for side, glyph in ((before, "░"), (after, "█")):
        if side is None or not isfinite(side.low + side.high):
            continue
        first, last = 0, width - 1
        if high > low:
            first = min(width - 1, int((side.low - low) / (high - low) * width))
            last = min(width - 1, int((side.high - low) / (high - low) * width))
        for place in range(first, max(first, last) + 1):
            cells[place] = "▒" if cells[place] else glyph
    styles = {"": "text", "░": "dim", "█": "spark", "▒": "text"}
    line: Line = []
    for glyph in cells:
        if line and line[-1][1] == styles[glyph] and line[-1][0][-1:] == (glyph or " "):
            line[-1] = (line[-1][0] + (glyph or " "), styles[glyph])
        else:
            line.append((glyph or " ", styles[glyph]))
    return line


def _number(value: float | None, unit: str) -> str:
    if value is None or not isfinite(value):
        return numbers.NA
    if not unit:
        return numbers.share(value)
    if unit == "ms":
        return numbers.ms(value)
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.1f}"


def _share(row: Row) -> str:
    share = row.change.share
    if share is None or not isfinite(share):
        return ""
    if not row.change.unit:
        assert row.change.before is not None
        assert row.change.after is not None
        points = 100.0 * (row.change.after - row.change.before)
        return f"{points:+.0f} pt" if abs(points) >= 0.5 else "0 pt"
    percent = 100.0 * share
    if abs(percent) < 0.05:
        return "0.0%"
    return f"{percent:+,.0f}%" if abs(percent) >= 99.5 else f"{percent:+.1f}%"


def _mark(row: Row) -> tuple[str, str]:
    """Return sign and style: ✓ better, ✖ or ▲ worse, · no difference that is clear."""
    if row.better is None:
        return "·", "dim"
    if row.better:
        return "✓", "ok"
    share = row.change.share
    whole = row.metric in ("step_p50", "samples_per_s")
    much = whole and share is not None and abs(share) >= _MUCH
    return ("✖", "critical") if much else ("▲", "warning")


def _spread_cells(width: int) -> int:
    return 0 if width < _SPREAD_FROM else min(36, 14 + (width - _SPREAD_FROM) * 2 // 5)


def _columns(width: int) -> Line:
    line: Line = [(" " * _LABEL_CELLS, "text")]
    line += [(rpad(name, _VALUE_CELLS), "dim") for name in ("A", "B")]
    line.append((rpad("change", _SHARE_CELLS) + "  ", "dim"))
    cells = _spread_cells(width)
    if cells:
        line.append((f"  {pad('spread (A ░, B █)', cells)}", "dim"))
    line.append(("  verdict", "dim"))
    return fit(line, width)


def _row(row: Row, width: int) -> Line:
    change = row.change
    quiet = row.metric in ("transfer", "peer_wait")
    style = "dim" if quiet else "text"
    mark, mark_style = _mark(row)
    line: Line = [(pad(f" {_LABELS.get(row.metric, row.metric)}", _LABEL_CELLS), style)]
    for value in (change.before, change.after):
        known = numbers.known(value)
        shown = "faint" if not known else "dim" if quiet else "strong"
        line.append((rpad(_number(value, change.unit), _VALUE_CELLS), shown))
    line.append((rpad(_share(row), _SHARE_CELLS), style))
    line.append((f" {mark}", mark_style))
    cells = _spread_cells(width)
    if cells:
        line += [("  ", "text"), *spread_line(row.before, row.after, cells)]
    words = row.verdict
    line.append((f"  {clip(words, max(8, width - width_of(line) - 3))}", style if words else "dim"))
    return fit(line, width)


# --- what differs beside the times -------------------------------------------------------------


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _packed(title: str, facts: Sequence[str], width: int, style: str = "text") -> list[Line]:
    """Put facts beside each other under a title at the left, as many a line as fit."""
    room = width - _LABEL_CELLS - 2
    rows: list[str] = []
    row = ""
    for fact in facts:
        for piece in wrap(fact, room):
            if row and len(row) + 3 + len(piece) > room:
                rows.append(row)
                row = ""
            row = f"{row}   {piece}" if row else piece
    rows.append(row)
    return [
        fit([(pad(f" {title if i == 0 else ''}", _LABEL_CELLS), "dim"), (text, style)], width)
        for i, text in enumerate(rows)
    ]


def _parts(before: str, after: str) -> tuple[str, str]:
    """Return what is in one of two long texts alone, word by word, in its order: of a command line
    the arguments that are others. The texts themselves where that says nothing.
    """
    one, other = before.split(), after.split()
    only = [
        " ".join(word for word in mine if word not in theirs)
        for mine, theirs in ((one, other), (other, one))
    ]
    if not any(only) or max(map(cells, (before, after))) <= _LONG:
        return before, after
    return f"… {only[0]}" if only[0] else "…", f"… {only[1]}" if only[1] else "…"


def _difference(setting: Setting) -> str:
    name = setting.name.removeprefix("versions.")
    pair = _parts(_shown(setting.before), _shown(setting.after))
    values = [clip(value, _LONG) for value in pair]
    if setting.is_environment:
        # A run always has a version and a device: one that tells none has not told it.
        values = [numbers.NA if value == "none" else value for value in values]
    return f"{name} {values[0]} -> {values[1]}"


def _environment(found: Comparison, width: int) -> list[Line]:
    differing = [setting for setting in found.settings if setting.is_environment]
    equal = [setting for setting in found.equal if setting.is_environment]
    known = [s for s in equal if _shown(s.before) != "none"]
    told = {
        "versions.torch": "torch",
        "versions.cuda": "CUDA",
        "versions.nccl": "NCCL",
        "device_name": "",
        "driver": "driver",
    }
    parts = [f"{told[s.name]} {_shown(s.before)}".strip() for s in known if s.name in told]
    parts += [f"{_shown(s.before)} cores" for s in known if s.name == "cores"]
    tail = [f"driver n/a {words}" for words in untold_drivers(found)]
    if differing:
        facts = [_difference(setting) for setting in differing]
        return _packed("environment", [*facts, *tail], width, "warning")
    if not known:
        return _packed("environment", ["n/a: no rank has told its own", *tail], width, "dim")
    words = f"equal ({', '.join(parts)})" if parts else "equal"
    return _packed("environment", [words, *tail], width, "dim")


def _settings(found: Comparison, width: int, key: str, *, show_all: bool) -> list[Line]:
    own = [setting for setting in found.settings if not setting.is_environment]
    facts = [_difference(setting) for setting in own] or ["no setting differs"]
    count = len(found.equal)
    if not show_all and count:
        facts.append(f"({count} equal settings hidden, {key}: all)")
    lines = _packed("config diff", facts, width)
    if show_all and count:
        equal = [f"{s.name.removeprefix('versions.')} {_shown(s.before)}" for s in found.equal]
        lines += _packed(f"{count} equal", equal, width, "dim")
    return lines


# --- the page ----------------------------------------------------------------------------------


def _name(chosen: Chosen) -> str:
    source = chosen.source
    if source is None:
        return "not chosen"
    mark = " SIMULATED" if _simulated(chosen) else ""
    return f"{source.name} ({_WORDS.get(source.kind, source.kind)}){mark}"


def _simulated(chosen: Chosen) -> bool:
    if chosen.side is not None:
        return chosen.side.simulated
    return chosen.source is not None and chosen.source.simulated


def _title(compared: Compared, width: int, key: str) -> list[Line]:
    names = [f"A {_name(compared.before)}", f"B {_name(compared.after)}"]
    right = f"{key} choose"
    room = width - len("Compare") - len(right) - 10
    if sum(len(name) for name in names) + 3 <= room:
        return [heading("Compare", width, note="   ".join(names), right=right)]
    lines = [heading("Compare", width, right=right)]
    for chosen, name in zip((compared.before, compared.after), names, strict=True):
        style = "warning" if _simulated(chosen) else "text"
        lines.append(fit([(f"  {clip(name, width - 4)}", style)], width))
    return lines


def _missing(compared: Compared, width: int, key: str) -> list[Line]:
    """Return why there is nothing to compare yet, and what gives something."""
    lines: list[Line] = []
    for letter, chosen in (("A", compared.before), ("B", compared.after)):
        source = chosen.source
        if source is None:
            text, style = f"{letter} is not chosen: {key} lists runs and recordings", "strong"
        elif chosen.problem:
            text, style = f"✖ {letter}: {chosen.problem}", "critical"
        elif chosen.side is None:
            text, style = f"{letter}: reading {source.detail or source.name} …", "dim"
        else:
            count = len(chosen.side.steps)
            text, style = f"{letter}: {_name(chosen)}, {count:,} steady steps so far", "text"
        lines += [fit([(f"  {row}", style)], width) for row in wrap(text, width - 4)]
    lines.append(fit([("", "text")], width))
    words = "Two runs are compared, before a change and after it. To have them both:"
    lines += [fit([(f"  {words}", "text")], width), fit([("", "text")], width)]
    for command, why in COMMANDS:
        if width < 100:
            lines.append(fit([("    ", "text"), (command, "hint")], width))
            lines.append(fit([("        ", "text"), (why, "dim")], width))
        else:
            lines.append(fit([("    ", "text"), (pad(command, 52), "hint"), (why, "dim")], width))
    lines.append(fit([("", "text")], width))
    text = "Recordings in the current directory are in the list; others are named behind replay."
    lines += [fit([(f"  {row}", "dim")], width) for row in wrap(text, width - 4)]
    return lines


def compare_lines(
    compared: Compared,
    checks: Sequence[CheckResult],
    width: int,
    *,
    show_all: bool = False,
    choose_key: str = "o",
    all_key: str = "a",
) -> list[Line]:
    """Return the whole view; the screen scrolls what does not fit."""
    lines = _title(compared, width, choose_key)
    found = compared.comparison
    if found is None:
        lines.append(fit([("", "text")], width))
        lines += _missing(compared, width, choose_key)
    else:
        aligned = found.aligned
        if aligned.before and aligned.after:
            lines.append(_columns(width))
            lines += [_row(row, width) for row in found.rows]
        else:
            lines += _packed("", [f"▲ {aligned.text}"], width, "warning")
        lines += _settings(found, width, all_key, show_all=show_all)
        lines += _environment(found, width)
        if aligned.before and aligned.after:
            lines += _packed("steps", [aligned.text], width, "dim")
        for note in found.notes:
            lines += _packed("note", [f"▲ {note}"], width, "warning")
    if checks:
        lines += [fit([("", "text")], width), heading("Checked changes", width)]
        for result in checks:
            item = result.check.finding
            lines.append(fit([(f"  {item.id}  {item.summary or item.kind}", "strong")], width))
            lines += check_lines(result, width, indent=4)
    return lines


def source_row(source: Source, places: str, width: int, *, selected: bool) -> Line:
    """Return something that can be compared in one line; `places` is A, B, both or nothing."""
    mark = "▌" if selected else " "
    line: Line = [(mark, "focus"), (pad(places, 3), "accent")]
    name = max(16, min(44, width // 3))
    line += [
        (pad(source.name, name), "strong"),
        (f" {pad(_WORDS.get(source.kind, source.kind), 9)}", "text"),
    ]
    if source.simulated:
        line.append((" SIMULATED", "warning"))
    line.append((f" {source.detail}", "dim"))
    return fit(line, width)
