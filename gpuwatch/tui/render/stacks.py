"""The stacks of a rank as a page."""

import re

from gpuwatch.schema import Reply
from gpuwatch.store.views import RankView
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.text import Line, cells, fit, hanging, heading

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
        return [*lines, *hanging([(" ▲ ", "warning")], error, "text", width)]
    if reply is None:
        text = "asking the rank"
        if waited_s >= _SLOW_S:
            text = f"no answer for {numbers.age(waited_s)}"
            if rank is not None and rank.state in ("silent", "gone", "ended"):
                text += f": it is {rank.state}"
                text += f" ({rank.state_reason})" if rank.state_reason else ""
            elif rank is not None:
                text += ": its telemetry thread may be held up by the GIL"
        return [*lines, *hanging([(" ", "dim")], text, "dim", width)]
    if reply.status == "error":
        text = reply.message or "the rank refused"
        return [*lines, *hanging([(" ▲ ", "warning")], text, "text", width)]
    if reply.message:
        lines += hanging([(" ▸ ", "warning")], reply.message, "strong", width)
    for text in _main_first(reply.data):
        style, shown = "text", text.lstrip()
        if text.startswith("Thread "):
            style = "title"
        elif shown.startswith("File "):
            style, shown = "dim", _fitting(text, width - 3).lstrip()
        space = len(text) - len(text.lstrip())
        lines += hanging([(" " * (1 + space), "text")], shown, style, width)
    return lines


_FRAME = re.compile(r'(\s*File ")(.*)(", line .*)')


def _fitting(text: str, room: int) -> str:
    """Return a call with its path cut from the left, by whole folders, until it fits.

    Line and function are kept, and the name of the file; what they need more is wrapped.
    """
    found = _FRAME.fullmatch(text)
    if found is None or cells(text) <= room:
        return text
    lead, path, tail = found.groups()
    # The way to the installed packages says nothing.
    short = path.rpartition("-packages/")[2]
    while "/" in short and cells(lead) + 2 + cells(short) + cells(tail) > room:
        short = short.partition("/")[2]
    return f"{lead}…/{short}{tail}" if short != path else text


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
