"""Where each pane goes: a pure function of the size of the screen and of what there is to show."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuwatch.tui.render.states import LEAST_HEIGHT, LEAST_WIDTH

__all__ = [
    "CURVES_FROM",
    "TWO_COLUMNS_FROM",
    "Content",
    "Plan",
    "Rect",
    "allocate",
    "plan",
    "side_width",
]

TWO_COLUMNS_FROM = 140
"""From this width on heat and machine stand beside the ranks."""

_AIRY_FROM = 34
"""A screen of two columns has a blank line between its sections from this height on."""

CURVES_FROM = 6
"""Lines from which on the time pane shows several curves instead of the step alone."""

_MOST_CURVES = 9

Wish = tuple[str, int, int]
"""A section's name, the least lines that make sense, and the lines it would fill."""


@dataclass(frozen=True, slots=True)
class Rect:
    """A pane's place in cells."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Content:
    """How many lines each section has to show, headings and the host's own lines not counted."""

    has_run: bool
    message: int = 0
    ranks: int = 0
    findings: int = 0
    heat: int = 0
    machine: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The places of the panes that are shown; the others are hidden.

    Names: header, message, steps, findings, ranks, heat, machine, timeline, events, footer.
    `compact`: heat, machine, timeline and events go without headings, to save lines.
    """

    rects: dict[str, Rect] = field(default_factory=dict)
    compact: bool = False


def side_width(width: int) -> int:
    """Return the width in which heat and machine are drawn on a screen of `width` cells."""
    return width if width < TWO_COLUMNS_FROM else min(72, width * 37 // 100)


def allocate(total: int, wishes: Sequence[Wish], gap: int = 0) -> dict[str, int]:
    """Share `total` lines among sections, most important first.

    A section whose least does not fit is left out. What remains goes out line by line, in order.
    Each section that is in costs `gap` lines beyond its own, the last one too.
    """
    heights: dict[str, int] = {}
    left = total
    for name, least, _ in wishes:
        if 0 < least <= left - gap:
            heights[name] = least
            left -= least + gap
    given = True
    while left > 0 and given:
        given = False
        for name, _, wanted in wishes:
            if name in heights and heights[name] < wanted and left > 0:
                heights[name] += 1
                left -= 1
                given = True
    return heights


def _stack(
    rects: dict[str, Rect],
    names: Sequence[str],
    heights: dict[str, int],
    corner: tuple[int, int],
    width: int,
    gap: int,
) -> int:
    """Put sections under each other from `corner` down; return the line below the last gap."""
    x, y = corner
    for name in names:
        height = heights.get(name, 0)
        if height:
            rects[name] = Rect(x, y, width, height)
            y += height + gap
    return y


def _fits(total: int, wishes: Sequence[Wish], gap: int) -> bool:
    return sum(wanted + gap for _, least, wanted in wishes if least) <= total


def _use_rest(heights: dict[str, int], total: int, gap: int, *, curves: bool) -> None:
    """Give the lines that nobody wished for to curves, if they suffice, and then to events."""
    left = total - sum(height + gap for height in heights.values())
    if curves and "timeline" in heights and heights["timeline"] + left >= CURVES_FROM:
        more = min(left, _MOST_CURVES - heights["timeline"])
        heights["timeline"] += more
        left -= more
    if "events" in heights:
        heights["events"] += max(0, left)


def _one_column(width: int, height: int, content: Content) -> Plan:
    several, many = content.ranks > 1, content.ranks > 4
    steps = ("steps", 3, 4 if several else 3)
    ranks = ("ranks", min(6, 2 + content.ranks), 2 + content.ranks)
    names = ("steps", "findings", "ranks", "heat", "machine", "timeline", "events")
    heat = 1 + content.heat
    machine = 3 + content.machine
    # In full, if all of it fits; a little is better seen whole than a lot cut.
    whole: list[Wish] = [
        steps,
        ("findings", 3, 1 + max(4, content.findings)),
        ranks,
        ("machine", 2, machine),
        ("timeline", 2, 4),
        ("heat", 2 if many else 0, heat),
        ("events", 2, 4),
    ]
    # The same with what is cut without a loss: what follows findings, the host's second line, the
    # rows of the time axis and the older events.
    enough: list[Wish] = [
        steps,
        ("findings", 3, 1 + max(2, content.findings)),
        ranks,
        ("machine", 2, machine - 1),
        ("timeline", 2, 3),
        ("heat", heat if many else 0, heat),
        ("events", 2, 3),
    ]
    for wishes, gap in ((whole, 1), (whole, 0), (enough, 0)):
        total = height - 3 - gap
        if _fits(total, wishes, gap):
            heights = allocate(total, wishes, gap)
            if wishes is enough:
                _top_up(heights, total, whole)
            _use_rest(heights, total, gap, curves=True)
            rects: dict[str, Rect] = {}
            _stack(rects, names, heights, (0, 2 + gap), width, gap)
            return Plan(rects)
    wishes = [
        steps,
        ("findings", 3, 1 + max(2, content.findings)),
        ranks,
        ("machine", 2, 1 + content.machine),
        ("timeline", 1, 1),
        ("heat", 1 if many else 0, 1),
        ("events", 1, 2),
    ]
    heights = allocate(height - 3, wishes)
    _use_rest(heights, height - 3, 0, curves=False)
    rects = {}
    _stack(rects, names, heights, (0, 2), width, 0)
    return Plan(rects, compact=True)


def _top_up(heights: dict[str, int], total: int, wishes: Sequence[Wish]) -> None:
    """Give lines that are left to who wishes for more, most important first."""
    left = total - sum(heights.values())
    for name, _, wanted in wishes:
        more = min(left, wanted - heights.get(name, wanted))
        if more > 0:
            heights[name] += more
            left -= more


def _two_columns(width: int, height: int, content: Content) -> Plan:
    gap = 1 if height >= _AIRY_FROM else 0
    several = content.ranks > 1
    heat: Wish = ("heat", 3 if several else 0, 1 + content.heat if several else 0)
    machine: Wish = ("machine", 3, 3 + content.machine)
    wishes: list[Wish] = [
        ("steps", 3, 4 if several else 3),
        ("findings", 3, 1 + max(4, content.findings)),
        ("body", 6, max(2 + content.ranks, heat[2] + gap + machine[2])),
        ("timeline", 2, _MOST_CURVES),
        ("events", 2, 6),
    ]
    heights = allocate(height - 3 - gap, wishes, gap)
    rects: dict[str, Rect] = {}
    y = _stack(rects, ("steps", "findings"), heights, (0, 2 + gap), width, gap)
    body = heights.get("body", 0)
    if body:
        right = side_width(width)
        left = width - right - 2
        rects["ranks"] = Rect(0, y, left, body)
        side = allocate(body + gap, [machine, heat], gap)
        _stack(rects, ("heat", "machine"), side, (left + 2, y), right, gap)
        y += body + gap
    _stack(rects, ("timeline", "events"), heights, (0, y), width, gap)
    return Plan(rects)


def _idle(width: int, height: int, content: Content) -> Plan:
    wishes: list[Wish] = [
        ("message", min(content.message, height - 3), content.message),
        ("machine", 2 if content.machine else 0, 3 + content.machine),
    ]
    rects: dict[str, Rect] = {}
    _stack(rects, ("message", "machine"), allocate(height - 3, wishes), (0, 2), width, 0)
    return Plan(rects)


def plan(width: int, height: int, content: Content) -> Plan:
    """Return the place of every pane on a screen of that size."""
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        return Plan({"message": Rect(0, 0, max(1, width), max(1, height))})
    if not content.has_run:
        found = _idle(width, height, content)
    elif width < TWO_COLUMNS_FROM:
        found = _one_column(width, height, content)
    else:
        found = _two_columns(width, height, content)
    found.rects["header"] = Rect(0, 0, width, 2)
    found.rects["footer"] = Rect(0, height - 1, width, 1)
    return found
