"""The stacks of a rank as a page."""

from gpuwatch.schema import Reply
from gpuwatch.store.views import RankView
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.text import Line, fit, heading, wrap

__all__ = ["stack_lines"]

_SLOW_S = 3.0
"""An answer takes a tenth of a second; after this long something is to be said."""


def stack_lines(
    number: int,
    rank: RankView | None,
    reply: Reply | None,
    error: str,
    waited_s: float,
    width: int,
) -> list[Line]:
    """Return the answer of a rank, the main thread first, or why there is none yet."""
    note = ""
    if rank is not None and rank.phase:
        note = f"in {rank.phase} for {numbers.age(rank.phase_age_s)}, step {rank.steps:,}"
    lines = [heading(f"Stacks of rank {number}", width, note=note, focused=True)]
    words = "innermost call first" if reply is not None and reply.status == "done" else ""
    lines.append(fit([(f" {words}", "faint")], width))
    if error:
        lines.append(fit([(" ▲ ", "warning"), (error, "text")], width))
        return lines
    if reply is None:
        text = "asking the rank"
        if waited_s >= _SLOW_S:
            text = f"no answer for {numbers.age(waited_s)}"
            if rank is not None and rank.state in ("silent", "gone", "ended"):
                text += f": it is {rank.state}"
                text += f" ({rank.state_reason})" if rank.state_reason else ""
            elif rank is not None:
                text += ": its telemetry thread may be held up by the GIL"
        lines.append(fit([(f" {text}", "dim")], width))
        return lines
    if reply.status == "error":
        lines += [
            fit([(" ▲ " if i == 0 else "   ", "warning"), (row, "text")], width)
            for i, row in enumerate(wrap(reply.message or "the rank refused", width - 5))
        ]
        return lines
    for text in _main_first(reply.data):
        if text.startswith("Thread "):
            lines.append(fit([(f" {text}", "title")], width))
        elif text.lstrip().startswith("File "):
            lines.append(fit([(f" {text}", "dim")], width))
        else:
            lines.append(fit([(f" {text}", "text")], width))
    return lines


def _main_first(data: str) -> list[str]:
    """Return the lines with the main thread's in front, and the innermost call of each first."""
    blocks: list[list[list[str]]] = []
    for line in data.splitlines():
        if line.startswith("Thread ") or not blocks:
            blocks.append([[line]])
        elif line.lstrip().startswith("File "):
            blocks[-1].append([line])
        elif line.strip():
            blocks[-1][-1].append(line)
    blocks.sort(key=lambda block: "MainThread" not in block[0][0])
    out: list[str] = []
    for head, *calls in blocks:
        out += [*head, *(line for call in reversed(calls) for line in call), ""]
    return out
