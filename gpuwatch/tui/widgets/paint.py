"""How what changed reaches the terminal: nothing but the cells that differ, in few bytes.

Textual (8.2.8) paints a changed part of a line from the left edge of its widget on, draws each
piece of text with all of its colours, and goes through every line between the first and the last
change. For a screen of numbers, of which most stay, that is most of the work and of the bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from rich.color import ColorSystem
from rich.style import Style
from textual._compositor import Compositor, CompositorUpdate
from textual.geometry import Region

from gpuwatch.tui.theme import Through

if TYPE_CHECKING:
    from rich.console import Console
    from textual.widget import Widget

__all__ = ["Painted", "Piece", "SpanCompositor", "SpanUpdate"]

Piece = tuple[str, Style]

_NULL = Style.null()
_BITS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 21, 51, 52, 53)
"""SGR codes of Rich's attributes, from the lowest bit."""


class Painted:
    """A widget that gives any part of a line of its own, without a picture of the whole."""

    def pieces(self, y: int, x1: int, x2: int, through: Through) -> list[Piece]:
        """Return the cells from `x1` to `x2` of line `y`, exactly so many."""
        raise NotImplementedError


class SpanUpdate(CompositorUpdate):
    """Cells to write: for each place (x, y) the pieces of text from there on."""

    def __init__(self, spans: list[tuple[int, int, list[Piece]]]) -> None:
        self.spans = spans

    def render_segments(self, console: Console) -> str:
        """Return what to write to the terminal, whose style is none before it and after it."""
        system = console._color_system or ColorSystem.TRUECOLOR
        out: list[str] = []
        add = out.append
        last = _NULL
        for x, y, pieces in self.spans:
            add(f"\x1b[{y + 1};{x + 1}H")
            for text, style in pieces:
                if style is not last:
                    add(_change(last, style, system))
                    last = style
                add(text)
        add(_change(last, _NULL, system))
        return "".join(out)


@lru_cache(maxsize=1024)
def _codes(style: Style, system: ColorSystem) -> tuple[frozenset[str], str, str]:
    """Return the SGR codes of a style: attributes, colour and ground, empty for the default."""
    bits = style._attributes & style._set_attributes
    attributes = frozenset(str(code) for i, code in enumerate(_BITS) if bits & (1 << i))
    colours = []
    for color, front in ((style.color, True), (style.bgcolor, False)):
        if color is None or color.is_default:
            colours.append("")
        else:
            colours.append(";".join(color.downgrade(system).get_ansi_codes(front)))
    return attributes, colours[0], colours[1]


@lru_cache(maxsize=4096)
def _change(last: Style, style: Style, system: ColorSystem) -> str:
    """Return what makes one style of another: the codes that differ alone."""
    had, front, ground = _codes(last, system)
    attributes, new_front, new_ground = _codes(style, system)
    codes: list[str] = []
    if not had <= attributes:
        # What takes one attribute away may take another one with it (bold and dim).
        codes, had, front, ground = ["0"], frozenset(), "", ""
    codes += sorted(attributes - had)
    if new_front != front:
        codes.append(new_front or "39")
    if new_ground != ground:
        codes.append(new_ground or "49")
    return f"\x1b[{';'.join(codes)}m" if codes else ""


class SpanCompositor(Compositor):
    """Textual's compositor, whose partial updates are the changed cells alone."""

    def render_partial_update(self) -> SpanUpdate | None:  # type: ignore[override]
        """Return the changed cells; None where there are none."""
        regions = self._dirty_regions.copy()
        self._dirty_regions.clear()
        screen = self.size.region
        rows: dict[int, list[tuple[Widget, Region, Region]]] = {}
        shown = [
            (widget, region, region.intersection(clip))
            for widget, (region, clip) in self.visible_widgets.items()
        ]
        grounds: dict[Widget, Through] = {}
        spans: list[tuple[int, int, list[Piece]]] = []
        for y, x1, x2 in self._regions_to_spans([r.intersection(screen) for r in regions]):
            if y not in rows:
                rows[y] = [item for item in shown if item[2].y <= y < item[2].bottom]
            free = [(max(x1, 0), x2)] if x2 > x1 else []
            # From the front to the back: what is in front has the cell.
            for widget, region, seen in rows[y]:
                if not free:
                    break
                rest: list[tuple[int, int]] = []
                for first, last in free:
                    begin, end = max(first, seen.x), min(last, seen.right)
                    if begin >= end:
                        rest.append((first, last))
                        continue
                    if widget not in grounds:
                        filters = tuple(widget.get_line_filters())
                        grounds[widget] = (filters, widget.background_colors[1])
                    found = _pieces(widget, y - region.y, begin - region.x, end - region.x, grounds)
                    spans.append((begin, y, found))
                    rest += [(a, b) for a, b in ((first, begin), (end, last)) if a < b]
                free = rest
        return SpanUpdate(spans) if spans else None


def _pieces(
    widget: Widget, y: int, x1: int, x2: int, grounds: dict[Widget, Through]
) -> list[Piece]:
    """Return cells of a widget, of Textual's as well as of ours."""
    if isinstance(widget, Painted):
        return widget.pieces(y, x1, x2, grounds[widget])
    strips = widget.render_lines(Region(x1, y, x2 - x1, 1))
    return [(text, style or _NULL) for strip in strips for text, style, _ in strip]
