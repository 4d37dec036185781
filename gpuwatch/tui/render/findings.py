"""Findings: the list on the overview, and one finding with everything behind it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.text import (
    Line,
    cells,
    clip,
    fit,
    hanging,
    heading,
    pad,
    rpad,
    spread,
    width_of,
    wrap,
)
from gpuwatch.tui.scene import Scene

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Abstain, Finding, Hint

__all__ = [
    "SEVERITY_GLYPHS",
    "abstained_row",
    "abstained_rows",
    "cost_text",
    "finding_detail",
    "finding_rows",
    "hint_rest",
    "hint_text",
    "life_texts",
    "quiet_rows",
    "ranks_text",
    "stack_texts",
    "with_cause",
]

SEVERITY_GLYPHS = {"critical": "✖", "warning": "▲", "note": "·"}

_PREDICTED = re.compile(r"predicted step [\d.,]+ -> [\d.,]+ ms")

_EARLY_STEPS = 20
"""Before so many steady steps it is too early to call a run healthy."""

_TURNS = 8
"""Turns of a life that are told, the last ones and the first."""
_STACKS, _FRAMES = 8, 16
"""Ranks of a hang whose stacks are shown, and calls of each."""


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _severity(item: Finding, aside: bool = False) -> tuple[str, str]:
    """Return glyph and style; a severity that is not known counts as a note."""
    if item.state != "open":
        return "✓", "dim"
    if aside:
        return SEVERITY_GLYPHS.get(item.severity, "·"), "dim"
    severity = item.severity if item.severity in SEVERITY_GLYPHS else "note"
    return SEVERITY_GLYPHS[severity], severity


def cost_text(item: Finding) -> str:
    """Return `+61 ms/step`, what it follows, or `--`; the step would lose this much."""
    if item.cost_ms is not None and numbers.known(item.cost_ms):
        digits = 1 if abs(item.cost_ms) < 9.95 else 0
        return f"+{item.cost_ms:,.{digits}f} ms/step"
    return f"follows {item.follows}" if item.follows else "--"


def with_cause(item: Finding, findings: Sequence[Finding]) -> Finding:
    """Return a finding that follows another by that one's id, where it names its kind alone.

    A finding that is resolved keeps the kind: what it followed has not been looked for since.
    """
    for cause in findings:
        if item.follows == cause.kind and cause.id:
            return replace(item, follows=cause.id)
    return item


def _step(value: float) -> str:
    return f"{value:,.1f}" if abs(value) < 9.95 else f"{value:,.0f}"


def predicted_text(hint: Hint, step_ms: float | None) -> str:
    """Return `predicted step 231 -> 148..160 ms`, empty where nothing is predicted."""
    if hint.predicted_ms is None or not all(numbers.known(value) for value in hint.predicted_ms):
        return ""
    low, high = hint.predicted_ms
    now = f"{_step(step_ms)} -> " if step_ms is not None and numbers.known(step_ms) else ""
    return f"predicted step {now}{_step(low)}..{_step(high)} ms"


def _change(hint: Hint) -> str:
    """Return `num_workers 1 -> 7`, or the change in words where it is no value."""
    if hint.knob and hint.new is not None:
        old = f" {_value(hint.old)} ->" if hint.old is not None else ""
        return f"{hint.knob}{old} {_value(hint.new)}"
    return hint.change or hint.knob


def hint_text(hint: Hint, step_ms: float | None) -> str:
    """Return one hint as a line: the change, and the mean step predicted after it."""
    change = _change(hint)
    predicted = predicted_text(hint, step_ms)
    if predicted:
        # A rule may have said it in its own words; the step of now is the one on the screen.
        change, said = _PREDICTED.subn(predicted, change)
        return change if said or "predicted" in change else f"{change}: {predicted}"
    return change


def hint_rest(hint: Hint) -> str:
    """Return what a hint says in words beyond `hint_text`: for whom, why; empty for nothing."""
    change = _change(hint)
    if not hint.change or hint.change == change:
        return ""
    words = hint.change.removeprefix(change)
    if hint.predicted_ms is not None:
        words = _PREDICTED.sub("", words)
    return re.sub(r"^[\s:;,]+|[\s:;,]+$|\s*[:,]\s*(?=;)", "", words)


def ranks_text(ranks: Sequence[int], world: int | None = None, room: int = 40) -> str:
    """Return `rank 3`, `ranks 0-7, 12`, or `all 32 ranks`."""
    if not ranks:
        return ""
    if world is not None and len(ranks) >= world > 1:
        return "all ranks"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    spans: list[str] = []
    start = last = ranks[0]
    for rank in [*ranks[1:], -2]:
        if rank == last + 1:
            last = rank
            continue
        spans.append(
            f"{start}-{last}"
            if last > start + 1
            else f"{start}, {last}"
            if last > start
            else f"{start}"
        )
        start = last = rank
        if len(spans) > room:
            break
    return clip("ranks " + ", ".join(spans), room)


def _width_left(item: Finding, width: int, aside: bool = False) -> Line:
    glyph, style = _severity(item, aside)
    line: Line = [(f"{glyph} ", style)]
    if width >= 96:
        word = item.severity if item.state == "open" else "resolved"
        word = "aside" if aside and item.state == "open" else word
        line.append((pad(word, 9), style))
    line.append((pad(item.id or "-", 3) + " ", "dim"))
    return line


def finding_rows(
    item: Finding,
    width: int,
    *,
    world: int | None,
    step_ms: float | None,
    selected: bool = False,
    focused: bool = False,
    hints: bool = True,
    aside: bool = False,
) -> list[Line]:
    """Return the rows of one finding in the list: what and how much, then the first hint.

    One that is `aside` (snoozed) is quiet, and says so.
    """
    mark = "▌" if selected and focused else "▏" if selected else " "
    mark_style = "focus" if focused else "dim"
    left: Line = [(mark, mark_style), *_width_left(item, width, aside)]
    quiet = aside or item.state != "open" or item.severity not in ("critical", "warning")
    faded = aside or item.state != "open"
    if aside and item.state == "open" and width < 96:
        left.append(("aside: ", "dim"))
    left.append((item.summary or item.kind, "dim" if faded else "strong" if not quiet else "text"))
    if width >= 96:
        left.append((f"  {ranks_text(item.ranks, world, 24)}", "dim"))
    cost = cost_text(item)
    right: Line = []
    if width >= 96:
        part = numbers.share(item.share) + " of step" if numbers.known(item.share) else ""
        right.append((rpad(part, 13), "dim"))
    right.append((rpad(cost, 15), "dim" if quiet else "strong"))
    if width >= 110:
        right.append((f"  {pad(f'confidence {item.confidence}', 17)}", "dim"))
    elif width >= 70:
        right.append((f"  conf {pad(item.confidence, 6)}", "dim"))
    right.append((" ", "text"))
    rows = [spread(left, right, width)]
    if hints and item.hints and not quiet:
        indent = width_of(_width_left(item, width))
        hint: Line = [
            (mark, mark_style),
            (" " * (indent - 2), "text"),
            ("→ ", "hint"),
            (hint_text(item.hints[0], step_ms), "hint"),
        ]
        if len(item.hints) > 1:
            hint.append((f"   +{len(item.hints) - 1} more", "dim"))
        rows.append(fit(hint, width))
    return rows


def quiet_rows(scene: Scene, width: int) -> list[Line]:
    """Return what stands in the list when there is no finding, and which rules could not judge."""
    run = scene.run
    rows: list[Line] = []
    if scene.diagnosis_error:
        rows.append(fit([(" ▲ ", "warning"), (scene.diagnosis_error, "warning")], width))
    if not scene.findings and run is not None:
        if scene.cursor_s is not None:
            rows.append(fit([("   no finding was open at that moment", "dim")], width))
        elif scene.filters.get("findings"):
            rows.append(fit([("   no finding passes the filter; esc shows all", "dim")], width))
        elif run.step_ms is None or not run.window:
            text = "waiting for steady steps: warm-up and first batches are left out"
            rows.append(fit([(f"   {text}", "dim")], width))
        elif not scene.diagnosed:
            rows.append(fit([("   looking at the first steps", "dim")], width))
        elif run.window < _EARLY_STEPS and run.state != "ended":
            plural = "s" if run.window != 1 else ""
            text = f"nothing found yet, after {run.window} steady step{plural}"
            rows.append(fit([(f"   {text}", "dim")], width))
        elif scene.abstained:
            rows.append(fit([("   nothing found yet; not everything can be judged", "dim")], width))
        else:
            rows.append(
                fit([(" ✓ ", "ok"), ("nothing found that holds this run back", "text")], width)
            )
    return rows


def abstained_row(abstained: Sequence[Abstain], width: int) -> Line:
    """Return one line that names the causes that could not be judged."""
    kinds = ", ".join(item.kind for item in abstained)
    return fit([("   ", "text"), (clip(f"not judged: {kinds}", width - 4), "faint")], width)


def abstained_rows(abstained: Sequence[Abstain], width: int) -> list[Line]:
    """Return what could not be judged, each with what it would need."""
    if not abstained:
        return []
    lines = [fit([("", "text")], width), fit([("   not judged, and what it needs", "dim")], width)]
    name = min(24, max(len(item.kind) for item in abstained) + 2)
    for item in abstained:
        for i, row in enumerate(wrap(item.needs, width - name - 5)):
            kind = item.kind if i == 0 else ""
            lines.append(fit([(f"   {pad(kind, name)}", "dim"), (row, "faint")], width))
    return lines


def _check(item: Finding, scene: Scene, width: int) -> list[Line]:
    """Return how a change did against the finding's window, or how to find that out."""
    result = scene.check(item)
    if result is None and (not item.hints or item.state != "open"):
        return []
    lines = [fit([("", "text")], width), fit([("  CHECK", "title")], width)]
    if result is not None:
        from gpuwatch.tui.render.checks import check_lines

        return lines + check_lines(result, width)
    text = (
        "v freezes this window; then change the knob, in the run or by starting it anew: the next "
        "256 steps are compared with it, predicted against actual"
    )
    return lines + [fit([("    ", "text"), (row, "text")], width) for row in wrap(text, width - 8)]


def finding_detail(item: Finding, scene: Scene, width: int, *, focused: bool = True) -> list[Line]:
    """Return every line of one finding: evidence, what was ruled out, what to try."""
    item = with_cause(item, scene.findings)
    glyph, style = _severity(item)
    run, summary = scene.run, scene.summary
    # What it predicts is for the step of its time, not for the one of now.
    step_ms = summary.step_ms if summary is not None and item.state == "open" else None
    title = f"{item.id}  {item.kind}" if item.id else item.kind
    lines = [heading(title, width, focused=focused), fit([("", "text")], width)]
    word = (
        item.severity if item.state == "open" else f"resolved at step {item.resolved_step or 0:,}"
    )
    lead = f"  {glyph} {word}   "
    lines += hanging([(lead, style)], item.summary, "strong", width)
    facts: list[str] = []
    facts.append(f"cost {cost_text(item)}")
    if numbers.known(item.share):
        facts.append(f"{numbers.share(item.share)} of the step")
    facts.append(f"confidence {item.confidence}")
    facts.append(ranks_text(item.ranks, run.world_size if run else None, 48))
    if item.nodes:
        facts.append(clip(" ".join(item.nodes), 40))
    if item.opened_step and item.state != "open":
        facts.append(f"was open from step {item.opened_step:,} to {item.resolved_step or 0:,}")
    elif item.opened_step:
        since = f"open since step {item.opened_step:,}"
        if item.opened_s:
            since += f" ({numbers.age(scene.view.at_s + scene.since_s - item.opened_s)})"
        facts.append(since)
    if item.follows:
        facts.append(f"follows {item.follows}")
    lines += _packed([fact for fact in facts if fact], width)
    checked = scene.check(item) is not None
    if checked:
        # What the person waits for stands where it is seen.
        lines += _check(item, scene, width)
    lines += _evidence(item, width)
    lines += _stacks(item, width)
    lines += _section(
        "RULED OUT",
        width,
        [[(text, "text")] for text in item.ruled_out],
        "nothing else was looked at",
    )
    lines += _hints(item, step_ms, width)
    if not checked:
        lines += _check(item, scene, width)
    if item.follows:
        cause = next((f for f in scene.findings if item.follows in (f.id, f.kind)), None)
        text = f"{item.follows}  {cause.summary}" if cause is not None else item.follows
        lines += _section("FOLLOWS", width, [[(text, "text")]], "")
    if len(item.life) > 1:
        lines += _section("LIFE", width, [[(text, "text")] for text in life_texts(item)], "")
    return lines


def life_texts(item: Finding) -> list[str]:
    """Return the turns of a finding's life, oldest first; of many the first and the last ones."""
    turns = [
        f"{event.what} at step {event.step:,}"
        + (time.strftime(", %H:%M:%S", time.localtime(event.at_s)) if event.at_s > 0 else "")
        + (f": {event.text}" if event.text else "")
        for event in item.life
    ]
    if len(turns) > _TURNS + 1:
        left_out = len(turns) - _TURNS
        turns = [turns[0], f"{left_out} more turns", *turns[1 - _TURNS :]]
    return turns


def stack_texts(item: Finding) -> list[tuple[str, list[str]]]:
    """Return the stacks of a hang as (rank, calls), innermost first; what is cut is said."""
    out: list[tuple[str, list[str]]] = []
    for stack in item.stacks[:_STACKS]:
        calls = list(stack.frames[:_FRAMES]) or ["it has told no call"]
        if len(stack.frames) > _FRAMES:
            calls.append(f"{len(stack.frames) - _FRAMES} calls further out")
        out.append((f"rank {stack.rank}", calls))
    if len(item.stacks) > _STACKS:
        out.append((f"{len(item.stacks) - _STACKS} more ranks", []))
    return out


def _stacks(item: Finding, width: int) -> list[Line]:
    """Return where the ranks of a hang stood when it was found."""
    if not item.stacks:
        return []
    lines: list[Line] = [fit([("", "text")], width), fit([("  STACKS", "title")], width)]
    text = "where the main threads stood, innermost call first; t asks the first rank for all now"
    lines += [fit([("    ", "text"), (row, "dim")], width) for row in wrap(text, width - 8)]
    for rank, calls in stack_texts(item):
        lines.append(fit([(f"    {rank}", "strong")], width))
        for call in calls:
            rows = wrap(call, width - 10)
            lines += [fit([("      ", "text"), (row, "text")], width) for row in rows]
    return lines


def _packed(facts: Sequence[str], width: int) -> list[Line]:
    """Put facts beside each other, as many a line as fit, none broken."""
    lines: list[Line] = []
    row = ""
    for fact in facts:
        if row and cells(row) + 3 + cells(fact) > width - 6:
            lines.append(fit([("    ", "text"), (row, "dim")], width))
            row = ""
        row = f"{row}   {fact}" if row else fact
    lines.append(fit([("    ", "text"), (row, "dim")], width))
    return lines


def _section(title: str, width: int, entries: Sequence[Line], empty: str) -> list[Line]:
    lines: list[Line] = [fit([("", "text")], width), fit([(f"  {title}", "title")], width)]
    if not entries and empty:
        lines.append(fit([("    ", "text"), (empty, "dim")], width))
    for entry in entries:
        text, style = entry[0]
        lines += hanging([("    · ", "dim")], text, style, width)
    return lines


def _evidence(item: Finding, width: int) -> list[Line]:
    lines: list[Line] = [fit([("", "text")], width), fit([("  WHY", "title")], width)]
    if not item.evidence:
        lines.append(fit([("    no evidence was recorded", "dim")], width))
    name_width = min(max((len(e.metric) for e in item.evidence), default=0) + 2, width // 3)
    unit_width = min(max((len(e.unit) for e in item.evidence), default=0) + 2, 12)
    for number, piece in enumerate(item.evidence, 1):
        value = piece.value
        if isinstance(value, float | int) and not isinstance(value, bool):
            shown = numbers.count(float(value))
            if shown.endswith(".0"):
                shown = shown[:-2]
        else:
            shown = str(value)
        line: Line = [
            (f"  {rpad(str(number), 3)} ", "dim"),
            (pad(piece.metric, name_width), "text"),
            (rpad(shown, 9), "strong"),
            (pad(f" {piece.unit}", unit_width), "dim"),
        ]
        rest = f" {piece.compared_with}" if piece.compared_with else ""
        source = f"[{piece.source}] " if piece.source else ""
        if width_of(line) + cells(rest) + cells(source) + 1 < width:
            lines.append(spread([*line, (rest, "text")], [(source, "faint")], width, keep="left"))
            continue
        # No room beside the number: below it, whole.
        lines.append(fit(line, width))
        indent = " " * 8
        for text, style in ((rest.strip(), "text"), (source.strip(), "faint")):
            rows = wrap(text, width - len(indent) - 2)
            lines += [fit([(indent, "text"), (row, style)], width) for row in rows]
    return lines


def _hints(item: Finding, step_ms: float | None, width: int) -> list[Line]:
    lines: list[Line] = [fit([("", "text")], width), fit([("  TRY", "title")], width)]
    if not item.hints:
        text = (
            "nothing here: change what it follows" if item.follows else "no change is known to help"
        )
        lines.append(fit([(f"    {text}", "dim")], width))
    for number, hint in enumerate(item.hints, 1):
        for i, row in enumerate(wrap(hint_text(hint, step_ms), width - 8)):
            lead = f"  {rpad(str(number) if i == 0 else '', 3)} "
            lines.append(fit([(lead, "dim"), (row, "hint")], width))
        tail = [text for text in (hint_rest(hint),) if text]
        if hint.predicted_ms is not None and step_ms is not None and numbers.known(step_ms):
            low, high = hint.predicted_ms
            if numbers.known(low) and numbers.known(high):
                least, most = max(0.0, step_ms - high), max(0.0, step_ms - low)
                tail.append(f"gain {_step(least)}..{_step(most)} ms a step")
        lines += [
            fit([("      ", "text"), (row, "dim")], width)
            for row in wrap("   ".join(tail), width - 10)
        ]
    return lines
