"""A profile of a rank as a page."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuwatch.store.views import RankView
from gpuwatch.tui.answers import Operator, ProfileAnswer
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.bars import gauge
from gpuwatch.tui.render.memory import size_text
from gpuwatch.tui.render.text import Line, cells, fit, hanging, heading, pad, rpad, wrap
from gpuwatch.tui.requests import Answer, is_expired, pending_text

if TYPE_CHECKING:
    from gpuwatch.tui.fetch import Fetch

__all__ = ["ask_lines", "profile_lines", "profile_markdown", "steps_text", "waiting_text"]

_STEPS = re.compile(r"steps? (\d{1,15})(?:-(\d{1,15}))?$")

_LABEL = 14
_FIGURES = (
    ("kernel_share", "kernels"),
    ("comm_ms", "comm"),
    ("comm_overlap_share", "comm hidden"),
)
_WORDS = {
    "kernel_share": "of the time a kernel ran",
    "comm_ms": "in communication, all steps together",
    "comm_overlap_share": "of it behind compute",
}


def ask_lines(rank: int, typed: str, steps: int, most: int, problem: str, width: int) -> list[Line]:
    """Return the question how many steps to profile."""
    lines = [heading(f"Profile rank {rank}", width, focused=True), fit([("", "text")], width)]
    shown = typed if typed else f"{steps}"
    lines.append(
        fit(
            [("   steps  ", "dim"), (shown, "strong"), (" ", "cursor"), (f"   1..{most}", "dim")],
            width,
        )
    )
    lines.append(fit([("", "text")], width))
    if problem:
        lines.append(fit([(" ▲ ", "warning"), (problem, "text")], width))
    text = (
        "type a number, or + and -; enter starts. The rank runs PyTorch's profiler over so many "
        "steps, which are slower for it; nothing else of the training changes, so no "
        "--allow-control is needed."
    )
    lines += [fit([("   ", "text"), (row, "dim")], width) for row in wrap(text, width - 5)]
    return lines


def waiting_text(status: Answer, rank: RankView | None, waited_s: float, link: str) -> str:
    """Return what is being waited for: which steps were promised, and how far the rank is."""
    text = pending_text(replace(status, message=""), rank, waited_s, link)
    expired = is_expired(status, rank, waited_s, link)
    if status.status != "accepted" or not status.message or expired:
        return text
    text = f"{status.message}: {text}"
    found = _STEPS.search(status.message)
    if found is None or rank is None:
        return text
    last = int(found[2] or found[1])
    if rank.steps > last:
        return f"{text}; the steps are over, the rank reads the profile"
    return f"{text}; the rank is at step {rank.steps:,}"


def steps_text(answer: ProfileAnswer) -> str:
    """Return `steps 120-124`, or that they are not known."""
    first, last = answer.first_step, answer.last_step
    if first is None:
        return "steps n/a"
    return f"step {first:,}" if last in (None, first) else f"steps {first:,}-{last:,}"


def _figure(answer: ProfileAnswer, name: str) -> str:
    value = getattr(answer, name)
    return numbers.duration(value) if name == "comm_ms" else numbers.share(value)


def profile_lines(
    rank: int,
    node: str,
    answer: ProfileAnswer,
    age_s: float,
    fetch: Fetch | None,
    fetch_key: str,
    width: int,
) -> list[Line]:
    """Return what was found: shares, operators by their own time, and where the trace is."""
    note = f"{steps_text(answer)}, {numbers.duration(answer.wall_ms)}"
    note += f", {answer.clock} clock" if answer.clock else ""
    right = f"{numbers.age(age_s)} old"
    blank = fit([("", "text")], width)
    title = f"Profile of rank {rank}"
    lines = [heading(title, width, note=note, right=right, focused=True), blank]
    notes = wrap(answer.note, width - 5) if answer.note else []
    lines += [fit([(f"   {row}", "warning")], width) for row in notes]
    for name, label in _FIGURES:
        value = getattr(answer, name)
        if value is None:
            reason = answer.na.get(name) or "the profile does not tell"
            lead: Line = [(f"   {pad(label, _LABEL)}", "dim")]
            lines += hanging(lead, f"n/a: {reason}", "dim", width)
            continue
        parts = [(rpad(_figure(answer, name), 9), "strong"), (f"   {_WORDS[name]}", "text")]
        lines.append(fit([(f"   {pad(label, _LABEL)}", "dim"), *parts], width))
    for name in answer.na:
        if name not in _WORDS:
            text = f"{name}: n/a: {answer.na[name]}"
            lines += [fit([("   ", "text"), (row, "dim")], width) for row in wrap(text, width - 5)]
    lines += [blank, *_trace(node, answer, fetch, fetch_key, width), blank]
    lines += _operators(answer, width)
    return lines


def _operators(answer: ProfileAnswer, width: int) -> list[Line]:
    number = len(answer.operators)
    if not number:
        return [
            heading("Operators", width),
            fit([("   the profile holds no operator", "dim")], width),
        ]
    device = any(item.device_self_ms is not None for item in answer.operators)
    device = device and width >= 100
    bar = max(6, min(30, width - 74))
    name = width - 48 - bar - (11 if device else 0)
    head = f" {pad('operator', name)}{rpad('calls', 9)}{rpad('self ms', 11)}"
    head += rpad("device ms", 11) if device else ""
    head += f"{rpad('total ms', 11)}{rpad('share', 8)}"
    lines = [
        heading("Operators", width, note="by own time, all steps together", right=f"{number}"),
        fit([(head, "dim")], width),
    ]
    for item in answer.operators:
        parts: Line = [
            (f" {pad(item.name or 'n/a', name)}", "text"),
            (rpad(numbers.count(item.calls), 9), "text"),
            (rpad(numbers.ms(item.self_ms), 11), "strong"),
        ]
        if device:
            parts.append((rpad(numbers.ms(item.device_self_ms), 11), "text"))
        parts += [
            (rpad(numbers.ms(item.total_ms), 11), "text"),
            (f"{rpad(numbers.share(item.share), 7)} ", "text"),
            *gauge(item.share, bar),
        ]
        lines.append(fit(parts, width))
    return lines


def _unbroken(text: str, room: int) -> list[str]:
    """Return text in lines of at most `room` cells with nothing left out: paths end at a slash."""
    rows: list[str] = []
    row = ""
    for part in re.findall(r"[^/ ]*[/ ]?", text):
        if row and cells(row + part.rstrip()) > room:
            rows.append(row.rstrip())
            row = ""
        for sign in part:
            if row and cells(row + sign) > room and sign != " ":
                rows.append(row)
                row = ""
            row += sign
    return [*rows, row.rstrip()]


def _trace(
    node: str, answer: ProfileAnswer, fetch: Fetch | None, key: str, width: int
) -> list[Line]:
    where = f" on {node}" if node else ""
    if not answer.trace:
        reason = answer.na.get("trace") or "the rank wrote none"
        return [fit([(f"   {pad('trace', _LABEL)}", "dim"), (f"n/a: {reason}", "dim")], width)]
    path = answer.trace_path or answer.trace
    text = f"{size_text(answer.trace_bytes)}, {path}{where}"
    rows = [(row, "text") for row in _unbroken(text, width - _LABEL - 5)]
    if fetch is None:
        rows.append((f"{key} brings it here; ui.perfetto.dev and chrome://tracing open it", "dim"))
    elif fetch.path is not None:
        rows += [(row, "ok") for row in _unbroken(f"fetched: {fetch.path}", width - _LABEL - 5)]
        rows.append(("ui.perfetto.dev and chrome://tracing open it", "dim"))
    elif fetch.error:
        text = f"{fetch.error}; {key} tries again"
        rows += [(row, "warning") for row in wrap(text, width - _LABEL - 5)]
    lines = [
        fit([(f"   {pad('trace' if i == 0 else '', _LABEL)}", "dim"), row], width)
        for i, row in enumerate(rows)
    ]
    if fetch is not None and not fetch.finished:
        total = fetch.total
        done = fetch.at / total if total else None
        label = f"{size_text(fetch.at)} of {size_text(total)} "
        lines.append(
            fit(
                [
                    (f"   {pad('', _LABEL)}", "dim"),
                    (label, "text"),
                    *gauge(done, max(8, min(40, width - _LABEL - 32))),
                    (f" {numbers.share(done)}", "text"),
                ],
                width,
            )
        )
    return lines


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|") or "n/a"


def _row(item: Operator) -> str:
    cells = (
        _cell(item.name),
        numbers.count(item.calls),
        numbers.ms(item.self_ms),
        numbers.ms(item.device_self_ms),
        numbers.ms(item.total_ms),
        numbers.share(item.share),
    )
    return f"| {' | '.join(cells)} |"


def profile_markdown(run: str, rank: int, node: str, answer: ProfileAnswer) -> str:
    """Return the profile as Markdown, for a message or an issue."""
    where = f" on {_cell(node)}" if node else ""
    clock = f", {_cell(answer.clock)} clock" if answer.clock else ""
    lines = [
        f"## Profile of rank {rank} of {_cell(run)}{where}",
        "",
        f"{steps_text(answer)}, {numbers.duration(answer.wall_ms)}{clock}",
        *(["", _cell(answer.note)] if answer.note else []),
        "",
    ]
    for name, label in _FIGURES:
        text = f"{_figure(answer, name)} {_WORDS[name]}"
        if getattr(answer, name) is None:
            text = f"n/a ({_cell(answer.na.get(name) or 'the profile does not tell')})"
        lines.append(f"- {label}: {text}")
    if answer.trace:
        lines.append(f"- trace: `{_cell(answer.trace_path or answer.trace).replace('`', '')}`")
    lines += [
        "",
        "| operator | calls | self ms | device ms | total ms | share |",
        "|---|---:|---:|---:|---:|---:|",
        *(_row(item) for item in answer.operators),
        "",
    ]
    return "\n".join(lines)
