"""A command's output, its end, and the question that comes before the screen is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.text import Line, clip, fit, heading, wrap

if TYPE_CHECKING:
    from gpuwatch.tui.job import Job

__all__ = ["leave_lines", "output_line", "output_title", "report_lines"]

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
    return heading("Output", width, note=clip(job.log, max(10, width // 2)), right=where)


def output_line(text: str, words: str, width: int, *, current: bool) -> Line:
    """Return a line of output; what was searched for is marked, the match one stands at by `▌`."""
    line: Line = [("▌" if current else " ", "focus")]
    low, wanted = text.casefold(), words.casefold()
    # Case folding may change the length of a text: then its places are not those of the text.
    at = low.find(wanted) if wanted and len(low) == len(text) else -1
    while at >= 0:
        end = at + len(wanted)
        line += [(text[:at], "text"), (text[at:end], "badge")]
        text, low = text[end:], low[end:]
        at = low.find(wanted)
    line.append((text, "text"))
    return fit(line, width)


def report_lines(job: Job, card: Sequence[str], width: int) -> list[Line]:
    """Return how a command ended: its card, the end of its output, where all of it is."""
    code = job.exit_code
    how = job.lost or ("it still runs" if code is None else f"ended with exit code {code}")
    title = heading("Report", width, note=f"{how} after {numbers.age(job.elapsed_s)}", focused=True)
    lines = [title, fit([("", "text")], width)]
    lines += [fit([("  ", "text"), (row, "strong")], width) for row in wrap(job.command, width - 4)]
    lines.append(fit([("", "text")], width))
    if not card:
        text = "no process of it has trained where gpuwatch could see it: there is no more to say"
        lines += [fit([("  ", "text"), (row, "dim")], width) for row in wrap(text, width - 4)]
    for text in card:
        indent = " " * 12 if text.startswith("  ") else ""
        for i, row in enumerate(wrap(text, width - 14)):
            lead = text[: len(text) - len(text.lstrip())] if i == 0 else indent
            lines.append(fit([(f"  {lead}{row.lstrip()}", "text")], width))
    lines += [fit([("", "text")], width), heading("Its last lines", width, note=job.log)]
    end = job.output.end
    last = job.output.lines(end - _LAST, _LAST)
    lines += [output_line(text, "", width, current=False) for text in last]
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
