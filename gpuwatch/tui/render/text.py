"""Lines of styled text: the one thing that every drawing function here returns.

A `Line` is a list of (text, style name) pairs; the style names are those of `gpuwatch.tui.theme`.
Widths are terminal cells, not characters: text that came from a training script may hold wide
characters.
"""

from collections.abc import Iterable

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.segment import Segment

__all__ = [
    "Line",
    "beside",
    "blank",
    "cells",
    "clip",
    "cut",
    "fit",
    "hanging",
    "heading",
    "join",
    "middle",
    "pad",
    "rpad",
    "spread",
    "width_of",
    "wrap",
]

Line = list[tuple[str, str]]
"""Pieces of text with the name of their style, left to right."""

ELLIPSIS = "…"
RULE = "─"


def cells(text: str) -> int:
    """Return the width of text in cells; most of what is drawn is ASCII, where it is the length."""
    return len(text) if text.isascii() else cell_len(text)


def width_of(line: Iterable[tuple[str, str]]) -> int:
    """Return the width of a line in cells."""
    return sum([cells(text) for text, _ in line])


def clip(text: str, width: int) -> str:
    """Return text of at most `width` cells, ending in an ellipsis where something was cut."""
    if width <= 0:
        return ""
    if cells(text) <= width:
        return text
    if width == 1:
        return ELLIPSIS
    if text.isascii():
        return text[: width - 1].rstrip(" ") + ELLIPSIS
    # A wide character cut in two leaves a space, which set_cell_size puts there.
    return set_cell_size(text, width - 1).rstrip() + ELLIPSIS


def pad(text: str, width: int) -> str:
    """Return text of exactly `width` cells, aligned left."""
    if text.isascii() and len(text) <= width:
        return text.ljust(width)
    text = clip(text, width)
    return text + " " * (width - cells(text)) if width > 0 else ""


def rpad(text: str, width: int) -> str:
    """Return text of exactly `width` cells, aligned right."""
    if text.isascii() and len(text) <= width:
        return text.rjust(width)
    text = clip(text, width)
    return " " * (width - cells(text)) + text if width > 0 else ""


def blank(width: int) -> Line:
    """Return an empty line of `width` cells; an unstyled one would crash under NO_COLOR."""
    return [(" " * max(0, width), "text")]


def beside(left: list[Line], right: list[Line], left_width: int, right_width: int) -> list[Line]:
    """Return two columns as one picture, two cells between them; the shorter one is filled up."""
    longest = max(len(left), len(right))
    out: list[Line] = []
    for y in range(longest):
        a = fit(left[y], left_width) if y < len(left) else blank(left_width)
        b = fit(right[y], right_width) if y < len(right) else blank(right_width)
        out.append([*a, ("  ", "text"), *b])
    return out


def wrap(text: str, width: int) -> list[str]:
    """Break text at spaces into lines of at most `width` cells, keeping runs of spaces inside.

    A word that is longer than a line, such as a path, goes on in the next one: nothing is lost.
    """
    rows: list[str] = []
    row = ""
    room = max(10, width)
    for word in text.split(" "):
        if row and cells(row) + 1 + cells(word) > room:
            rows.append(row.rstrip())
            row = ""
            if not word:
                continue
        row = f"{row} {word}" if row else word
        if cells(row) > room:
            *full, row = chop_cells(row, room)
            rows += full
    rows.append(row.rstrip())
    return [clip(item, width) for item in rows if item]


def hanging(lead: Line, text: str, style: str, width: int) -> list[Line]:
    """Return `lead` and text behind it, broken into as many lines as it takes; they hang from it.

    A cell is left free at the right.
    """
    indent = width_of(lead)
    return [
        fit([*(lead if i == 0 else [(" " * indent, "text")]), (row, style)], width)
        for i, row in enumerate(wrap(text, width - indent - 1) or [""])
    ]


def middle(text: str, width: int) -> str:
    """Return text of at most `width` cells, cut in the middle: a path keeps its name."""
    if cells(text) <= width:
        return text
    if width < 4:
        return clip(text, width)
    front = (width - 1) // 3
    back = width - 1 - front
    end = text[-back:]
    while cells(end) > back:
        end = end[1:]
    return clip(text, front + 1) + end


def fit(line: Line, width: int, fill: str = " ", style: str = "text") -> Line:
    """Return the line cut or filled to exactly `width` cells."""
    out: Line = []
    room = max(0, width)
    for text, name in line:
        size = cells(text)
        if size > room:
            if room:
                out.append((pad(clip(text, room), room), name))
                room = 0
            break
        if size:
            out.append((text, name))
            room -= size
    if room:
        out.append((fill * room, style))
    return out


def cut(line: Line, x1: int, x2: int) -> Line:
    """Return the cells from `x1` to `x2` of a line; half of a wide character is a space."""
    out: Line = []
    at = 0
    for text, name in line:
        size = cells(text)
        end = at + size
        if end > x1:
            part = _cut_text(text, size, max(0, x1 - at), min(size, x2 - at))
            if part:
                out.append((part, name))
        at = end
        if at >= x2:
            break
    return out


def _cut_text(text: str, size: int, first: int, last: int) -> str:
    if not first and last == size:
        return text
    if size == len(text):
        return text[first:last]
    return Segment(text).split_cells(last)[0].split_cells(first)[1].text


def spread(
    left: Line, right: Line, width: int, fill: str = " ", style: str = "text", keep: str = "right"
) -> Line:
    """Put `left` and `right` at the two ends of a line of exactly `width` cells.

    Where both do not fit, the one not named by `keep` is cut.
    """
    right_width = width_of(right)
    left_width = width_of(left)
    if left_width + right_width + 1 > width:
        if keep == "right" and right_width < width:
            return [*fit(left, width - right_width - 1), (" ", "text"), *right]
        return fit([*left, ("  ", "text"), *right], width)
    return [*left, (fill * (width - left_width - right_width), style), *right]


def join(parts: Iterable[Line], separator: tuple[str, str], width: int) -> Line:
    """Join whole parts, in order, for as long as they fit in `width` cells."""
    out: Line = []
    used = 0
    gap = cells(separator[0])
    for part in parts:
        if not part:
            continue
        size = width_of(part)
        extra = size + (gap if out else 0)
        if used + extra > width:
            if not out:
                return fit(part, width)
            continue
        if out:
            out.append(separator)
        out.extend(part)
        used += extra
    return out


def heading(
    title: str,
    width: int,
    *,
    note: str = "",
    right: str = "",
    focused: bool = False,
) -> Line:
    """Return the line over a section: title, a quiet rule, and what counts at the right."""
    left: Line = [
        ("▌" if focused else " ", "focus"),
        (title, "title.focus" if focused else "title"),
        (" ", "text"),
    ]
    if note:
        left += [(f" {note}", "dim"), (" ", "text")]
    tail: Line = [(f" {right}", "dim"), (" ", "text")] if right else []
    return spread(left, tail, width, RULE, "rule")
