"""Live knobs, a change that is to be confirmed, what came of it, and the log of commands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwatch.store.views import RankView, RunView
from gpuwatch.tui.changes import (
    HOW_TO_ALLOW,
    Change,
    KnobRow,
    Proposal,
    limits_text,
    value_text,
)
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.findings import predicted_text, ranks_text
from gpuwatch.tui.render.text import Line, cells, fit, hanging, heading, pad, width_of, wrap
from gpuwatch.tui.requests import Answer, pending_text

if TYPE_CHECKING:
    from gpuwatch.diagnosis.verify import CheckResult

__all__ = [
    "LogEntry",
    "change_lines",
    "control_off_lines",
    "knob_head",
    "knob_lines",
    "log_entries",
    "log_lines",
    "no_knobs_lines",
    "proposal_lines",
    "set_text",
]

_STYLES = {"done": "ok", "error": "warning", "lost": "warning", "accepted": "text", "asked": "dim"}
_MARKS = {"done": "✓", "error": "▲", "lost": "▲"}
_LOG_WORD = 9


def _values(row: KnobRow, world: int) -> str:
    """Return `4`, or `4 on ranks 0-3; 2 on rank 4` where they differ."""
    groups = row.by_value()
    if len(groups) == 1:
        value, ranks = groups[0]
        some = f" on {ranks_text(ranks, world, 16)}" if len(ranks) < world else ""
        return value_text(value) + some
    return "; ".join(
        [f"{value_text(value)} on {ranks_text(ranks, None, 16)}" for value, ranks in groups]
    )


def _columns(width: int) -> tuple[int, int, int]:
    """Return the widths of name, value and limits; what is left is for when it takes effect."""
    name = max(16, min(32, width // 4))
    value = max(16, min(40, width // 4))
    limits = max(12, min(28, width // 5))
    return name, value, limits


def knob_head(width: int) -> Line:
    """Return what stands over the columns."""
    name, value, limits = _columns(width)
    head = f"  {pad('knob', name)}{pad('value', value)}{pad('limits', limits)}takes effect"
    return fit([(head, "dim")], width)


def knob_lines(row: KnobRow, world: int, width: int, *, selected: bool) -> list[Line]:
    """Return one knob: its value, by rank where they differ, its limits, when a change is felt.

    What is longer than its column goes on in the next line of it.
    """
    name, value, limits = _columns(width)
    differ = len(row.by_value()) > 1
    columns = (
        (row.name, name, "strong" if selected else "text"),
        (_values(row, world), value, "warning" if differ else "strong"),
        (limits_text(row.knob), limits, "dim"),
    )
    felt = wrap(row.knob.effective, width - 2 - name - value - limits)
    wrapped = [*(wrap(text, room - 1) for text, room, _ in columns), felt]
    lines: list[Line] = []
    for i in range(max([1, *(len(rows) for rows in wrapped)])):
        line: Line = [("▌" if selected else " ", "focus"), (" ", "text")]
        for rows, (_, room, style) in zip(wrapped, columns, strict=False):
            line.append((pad(rows[i] if i < len(rows) else "", room), style))
        line.append((felt[i] if i < len(felt) else "", "dim"))
        lines.append(fit(line, width))
    return lines


def no_knobs_lines(run: RunView | None, width: int) -> list[Line]:
    """Return what stands where there are no knobs, and how a training gets some."""
    if run is None:
        return [fit([("   no run has been seen yet", "dim")], width)]
    text = (
        "this run has no live knob. Those of a DataLoader (num_workers, prefetch_factor) are there "
        "by themselves once the training fetches from it; gpuwatch.knob(name, value, apply) in the "
        f"script makes others. They can be set where the training is started with {HOW_TO_ALLOW}"
    )
    if run.state == "ended":
        text = "the run has ended: nothing can be set in it any more"
    return [fit([("   ", "text"), (row, "dim")], width) for row in wrap(text, width - 5)]


def control_off_lines(rows: Sequence[KnobRow], run: RunView | None, width: int) -> list[Line]:
    """Return what stands under knobs that cannot be set, and how a training takes changes."""
    if run is None or run.state == "ended" or all(row.allowed for row in rows):
        return []
    text = f"control is off: start it with {HOW_TO_ALLOW}, and these can be set"
    return [fit([("   ", "text"), (row, "warning")], width) for row in wrap(text, width - 5)]


# --- one change --------------------------------------------------------------------------------


def set_text(proposal: Proposal, world: int) -> str:
    """Return `set num_workers 1 -> 7 on ranks 0, 1 of RUN`."""
    row = proposal.row
    olds = ", ".join(value_text(value) for value, _ in row.by_value())
    where = ranks_text(row.ranks, world)
    new = value_text(proposal.new)
    return f"set {row.name} {olds} -> {new} on {where} of {proposal.run_name}"


def _head(proposal: Proposal, world: int, width: int) -> list[Line]:
    title = "Change the running training"
    note = f"{proposal.finding.id} {proposal.finding.kind}" if proposal.finding else ""
    rows = wrap(set_text(proposal, world), width - 5)
    return [
        heading(title, width, note=note, focused=True),
        fit([("", "text")], width),
        *(fit([("   ", "text"), (row, "strong")], width) for row in rows),
    ]


def proposal_lines(
    proposal: Proposal, run: RunView | None, step_ms: float | None, others: int, width: int
) -> list[Line]:
    """Return the question whether to do it: what, where, when it is felt, what it should bring."""
    world = run.world_size if run is not None else len(proposal.row.ranks)
    finding = proposal.finding
    lines = _head(proposal, world, width)
    facts = [f"takes effect: {proposal.row.knob.effective or 'it does not say when'}"]
    limits = limits_text(proposal.row.knob)
    if limits:
        facts.append(f"it takes {limits}")
    if proposal.asked is not None:
        asked, new = value_text(proposal.asked), value_text(proposal.new)
        facts.append(f"the hint is {asked}: {new} is the most that it takes here")
    if proposal.hint is not None:
        facts.append(predicted_text(proposal.hint, step_ms) or "nothing is predicted for it")
    if proposal.hint is not None and finding is not None:
        facts.append(f"{finding.id} is frozen with it: predicted against actual is shown here")
    if others > 1:
        facts.append(f"{others} hints of this finding can be set: ] shows the next")
    for fact in facts:
        lines += hanging([("   · ", "dim")], fact, "text", width)
    lines.append(fit([("", "text")], width))
    text = "enter sets it in the running training, esc does not"
    lines.append(fit([("   ", "text"), (text, "accent")], width))
    return lines


def change_lines(
    change: Change,
    run: RunView | None,
    link: str,
    check: CheckResult | None,
    step_ms: float | None,
    width: int,
) -> list[Line]:
    """Return how a change stands on every rank, and how the check does that came with it."""
    proposal, request = change.proposal, change.request
    world = run.world_size if run is not None else len(request.ranks)
    lines = [*_head(proposal, world, width), fit([("", "text")], width)]
    if request.error:
        return [*lines, *hanging([(" ▲ ", "warning")], request.error, "text", width)]
    ranks = {rank.rank: rank for rank in run.ranks} if run is not None else {}
    for (status, text), members in _grouped(request.answers, ranks, request.waited_s, link):
        mark = _MARKS.get(status, "·")
        who = pad(ranks_text(members, None, 16), 14)
        head: Line = [(f" {mark} {who}  {pad(status, 9)} ", _STYLES.get(status, "text"))]
        lines += hanging(head, text, "text", width)
    if proposal.finding is None:
        return lines
    lines += [fit([("", "text")], width), fit([("  CHECK", "title")], width)]
    if change.unchecked:
        text = f"not checked: {change.unchecked}"
        lines += [fit([("    ", "text"), (row, "dim")], width) for row in wrap(text, width - 8)]
    elif not change.finished:
        text = "its window is frozen; steps count from when every rank has answered"
        lines.append(fit([("    ", "text"), (text, "dim")], width))
    elif check is not None:
        from gpuwatch.tui.render.checks import check_lines

        if proposal.hint is not None:
            words = predicted_text(proposal.hint, step_ms) or "nothing is predicted for this hint"
            lines.append(fit([("    ", "text"), (words, "dim")], width))
        lines += check_lines(check, width)
    elif not request.of("done"):
        lines.append(fit([("    nothing was changed: nothing is checked", "dim")], width))
    return lines


def _grouped(
    answers: dict[int, Answer], ranks: dict[int, RankView], waited_s: float, link: str
) -> list[tuple[tuple[str, str], list[int]]]:
    """Return what was said, each with the ranks that said it: a thousand ranks say the same."""
    groups: dict[tuple[str, str], list[int]] = {}
    for number, answer in answers.items():
        text = answer.message
        if answer.pending:
            text = pending_text(answer, ranks.get(number), waited_s, link)
        groups.setdefault((answer.status, text), []).append(number)
    return list(groups.items())


# --- the log of commands -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One command of any monitor as its ranks have last told of it."""

    at_s: float
    ranks: tuple[int, ...]
    verb: str
    args: str
    status: str
    message: str


def log_entries(run: RunView) -> list[LogEntry]:
    """Return the commands that the ranks of a run have told of, newest first.

    Every monitor sees those of all of them. Of each command the last status counts, and ranks that
    say the same of it share an entry.
    """
    last: dict[tuple[int, str], tuple[float, str, str, str, str]] = {}
    for rank in run.ranks:
        for item in rank.commands:
            key = (rank.rank, item.id)
            began = last[key][0] if key in last else item.at_s - rank.ahead_s
            last[key] = (began, item.verb, item.args, item.status, item.message)
    groups: dict[tuple[str, str, str, str, str], list[tuple[float, int]]] = {}
    for (number, name), (at_s, verb, args, status, message) in last.items():
        groups.setdefault((name, verb, args, status, message), []).append((at_s, number))
    entries = [
        LogEntry(min(at_s for at_s, _ in told), tuple(sorted(n for _, n in told)), *key[1:])
        for key, told in groups.items()
    ]
    return sorted(entries, key=lambda entry: entry.at_s, reverse=True)


def log_lines(entries: Sequence[LogEntry], width: int) -> list[Line]:
    """Return the log: when, which ranks, what was asked, how it stands."""
    note = "of every monitor, newest first"
    lines = [heading("Commands", width, note=note, right=numbers.count(len(entries)))]
    if not entries:
        lines.append(fit([("   none was sent to this run", "dim")], width))
    for entry in entries:
        at = time.strftime("%H:%M:%S", time.localtime(entry.at_s)) if entry.at_s > 0 else "--:--:--"
        who = pad(ranks_text(entry.ranks, None, 10), 12)
        lead: Line = [(f" {at}  ", "dim"), (f"{who} ", "text")]
        what = f"{entry.verb} {entry.args}".strip()
        room = max(20, min(44, width // 3))
        told: Line = [(pad(entry.status, _LOG_WORD) + " ", _STYLES.get(entry.status, "text"))]
        used = width_of(lead) + room + 1 + width_of(told) + cells(entry.message)
        if used < width and cells(what) <= room:
            lines.append(
                fit(
                    [*lead, (pad(what, room) + " ", "strong"), *told, (entry.message, "dim")], width
                )
            )
            continue
        # What was asked in its own lines, what came of it below.
        lines += hanging(lead, what, "strong", width)
        indent = " " * width_of(lead)
        lines += hanging([(indent, "text"), *told], entry.message, "dim", width)
    return lines
