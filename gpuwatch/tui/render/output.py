"""A command's output, its end, and the question that comes before the screen is left."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import chop_cells

from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.text import Line, cells, cut, fit, hanging, heading, middle, wrap

if TYPE_CHECKING:
    from gpuwatch.tui.job import Job

__all__ = ["card_rows", "leave_lines", "match_cells", "output_line", "output_title", "report_lines"]

_LAST = 10
"""Lines of the output under a report."""


def output_title(job: Job, top: int, height: int, follows: bool, width: int) -> Line:
    """Return the line over the output: where it is kept, and which part of it is shown."""
    ring = job.output
    end = ring.end
    last = min(end, top + height)
    where = f"{top + 1:,}-{last:,} of {end:,}" if end else "nothing yet"
    if ring.first:
        where += f", the first {ring.first:,} in the file only"
    where += "  follows" if follows else "  stands still"
    return heading(
        "Output", width, note=middle(job.log, max(10, width - cells(where) - 14)), right=where
    )


def _matches(text: str, words: str) -> list[tuple[int, int]]:
    """Return from where to where (characters) a line holds what is searched for."""
    low, wanted = text.casefold(), words.casefold()
    # Case folding may change the length of a text: then its places are not those of the text.
    if not wanted or len(low) != len(text):
        return []
    return [found.span() for found in re.finditer(re.escape(wanted), low)]


def match_cells(text: str, words: str) -> tuple[int, int] | None:
    """Return the cells of the first place that is marked in a line of output, None for none."""
    for start, end in _matches(text, words):
        return cells(text[:start]), cells(text[:end])
    return None


def output_line(text: str, words: str, width: int, *, current: bool, left: int = 0) -> Line:
    """Return a line of output; what was searched for is marked, the match one stands at by `▌`.

    `left` cells of it are off the screen at the left.
    """
    parts: Line = []
    at = 0
    for start, end in _matches(text, words):
        parts += [(text[at:start], "text"), (text[start:end], "badge")]
        at = end
    parts.append((text[at:], "text"))
    mark = ("▌", "focus") if current else ("…", "faint") if left and text else (" ", "focus")
    return fit([mark, *cut(parts, left, left + width)], width)


_NAMED = re.compile(r"  \S.{0,8} +(?=\S)|\s+try  ")
"""What the lines that a row of a card goes on in hang from: its name, or the word before a hint."""


def card_rows(text: str, width: int) -> list[str]:
    """Return a row of a card, broken to lines of at most `width` cells, under where it begins."""
    named = _NAMED.match(text)
    space = len(text) - len(text.lstrip())
    indent = named.end() if named is not None and named.end() in (11, 12) else space
    hang = indent if indent > space or space >= 11 else space + 2
    rows = wrap(text[indent:], width - hang) or [""]
    return [f"{text[:indent] if i == 0 else ' ' * hang}{row}" for i, row in enumerate(rows)]


def report_lines(job: Job, card: Sequence[str], width: int) -> list[Line]:
    """Return how a command ended: its card, the end of its output, where all of it is.

    `card` has a line for each of its rows; they are broken to the width here.
    """
    code = job.exit_code
    how = job.lost or ("it still runs" if code is None else f"ended with exit code {code}")
    title = heading("Report", width, note=f"{how} after {numbers.age(job.elapsed_s)}", focused=True)
    lines = [title, fit([("", "text")], width)]
    if cells(how) + 24 > width:
        # The heading would cut it, and it stands nowhere else.
        lines += hanging([("  ", "text")], how, "warning", width)
    lines += [fit([("  ", "text"), (row, "strong")], width) for row in wrap(job.command, width - 4)]
    lines.append(fit([("", "text")], width))
    if not card:
        text = "no process of it has trained where gpuwatch could see it: there is no more to say"
        lines += [fit([("  ", "text"), (row, "dim")], width) for row in wrap(text, width - 4)]
    for text in card:
        lines += [fit([(f"  {row}", "text")], width) for row in card_rows(text, width - 4)]
    lines.append(fit([("", "text")], width))
    title = heading("Its last lines", width, note=job.log)
    if cells(job.log) + 20 > width:
        title = heading("Its last lines", width)
        lines += [title, *hanging([(" all of it: ", "dim")], job.log, "dim", width)]
    else:
        lines.append(title)
    end = job.output.end
    last = job.output.lines(end - _LAST, _LAST)
    for text in last:
        for i, row in enumerate(chop_cells(text, max(10, width - 2)) or [""]):
            lines.append(fit([(" " if i == 0 else "…", "faint"), (row, "text")], width))
    if not last:
        lines.append(fit([(" it has printed nothing", "dim")], width))
    return lines


def leave_lines(job: Job, keys: tuple[str, str, str], width: int) -> list[Line]:
    """Return the question before the screen is left; `keys` leave it running, stop it, stay."""
    leave, stop, stay = keys
    lines = [
        heading("The command still runs", width, note=numbers.clock(job.elapsed_s), focused=True),
        fit([("", "text")], width),
    ]
    about = f"{job.command}   process {job.pid}"
    lines += [fit([("  ", "text"), (row, "strong")], width) for row in wrap(about, width - 4)]
    lines.append(fit([("", "text")], width))
    gently = "SIGINT now, SIGTERM after 10 s, SIGKILL after 10 s more; then its report is shown"
    if job.stopping:
        gently = f"{job.stopping}; again: the next signal now"
    for key, what in (
        (leave, f"leave it running without this screen; its output goes on into {job.log}"),
        (stop, f"stop it: {gently}"),
        (stay, "stay"),
    ):
        for i, row in enumerate(wrap(what, width - 14)):
            lead = f"  {key if i == 0 else '':<8}"
            lines.append(fit([(lead, "key"), (row, "text")], width))
    return lines
