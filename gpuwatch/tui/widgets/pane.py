"""The two kinds of pane: a fixed picture, and a list that scrolls under a fixed heading."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual._styles_cache import StylesCache
from textual.binding import BindingType
from textual.events import Click
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from gpuwatch.tui.binding import bind
from gpuwatch.tui.layout import Rect
from gpuwatch.tui.render.glyphs import to_ascii
from gpuwatch.tui.render.text import Line, cells, cut, width_of
from gpuwatch.tui.theme import SELECTED_STYLES, STYLES, Through, styles_through
from gpuwatch.tui.widgets.paint import Painted, Piece

__all__ = [
    "LinePane",
    "ListPane",
    "ascii_only",
    "changed_span",
    "changed_spans",
    "forget_drawn",
    "place",
    "set_ascii",
    "to_strip",
]

_ascii = False


def set_ascii(wanted: bool) -> None:
    """Draw with ASCII alone from now on, or with all glyphs; one terminal a process."""
    global _ascii
    _ascii = wanted


def ascii_only() -> bool:
    """Tell whether only ASCII is drawn."""
    return _ascii


def to_strip(line: Line, width: int, *, selected: bool = False) -> Strip:
    """Return the line as a strip of exactly `width` cells; every segment has a style."""
    styles = SELECTED_STYLES if selected else STYLES
    line = _safe(line)
    plain = styles["text"]
    segments = [Segment(text, styles.get(name, plain)) for text, name in line]
    return Strip(segments, width_of(line)).adjust_cell_length(width, styles["text"])


def _safe(line: Line) -> Line:
    """Return the line with nothing in it that the terminal cannot or must not be sent."""
    if not all(text.isprintable() for text, _ in line):
        line = [(_printable(text), name) for text, name in line]
    if _ascii:
        line = [(to_ascii(text), name) for text, name in line]
    return line


def _pieces(line: Line, x1: int, x2: int, styles: Mapping[str, Style]) -> list[Piece]:
    """Return the cells of a line from `x1` to `x2`, filled up where it is shorter."""
    plain = styles["text"]
    shown = cut(_safe(line), x1, x2)
    pieces = [(text, styles.get(name, plain)) for text, name in shown]
    missing = x2 - x1 - width_of(shown)
    if missing > 0:
        pieces.append((" " * missing, plain))
    return pieces


def _printable(text: str) -> str:
    """Replace what would move the cursor or worse; the store has done so for its own text."""
    return "".join([char if char.isprintable() else "?" for char in text])


def place(pane: Widget, rect: Rect | None) -> None:
    """Put a pane where the layout wants it, or hide it."""
    if rect is None:
        pane.display = False
        return
    pane.styles.offset = (rect.x, rect.y)
    pane.styles.width = rect.width
    pane.styles.height = rect.height
    pane.display = True


def forget_drawn() -> None:
    """Let go of the drawn lines of panes that are closed.

    Textual (8.2.8) remembers two colours for each of its last 1,024 caches of lines, with the cache
    itself as a part of the key: so the lines of panes that are long gone stay. The colours are made
    again in microseconds.
    """
    StylesCache.get_inner_outer.cache_clear()


def _shared(one: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]], end: int) -> int:
    """Return how many cells two lines have in common: at their beginning (1) or their end (-1)."""
    room = 0
    for (text, style), (old, old_style) in zip(one[::end], other[::end], strict=False):
        if text == old and style == old_style:
            room += cells(text)
            continue
        if style == old_style:
            pairs = enumerate(zip(text[::end], old[::end], strict=False))
            alike = next((i for i, (a, b) in pairs if a != b), min(len(text), len(old)))
            room += cells(text[:alike] if end > 0 else text[len(text) - alike :])
        break
    return room


def changed_span(old: Line, new: Line, width: int) -> tuple[int, int] | None:
    """Return from where to where (cells, the end not included) a line differs; None: nowhere.

    A line of another width than the pane differs as a whole.
    """
    if old == new:
        return None
    if width_of(old) != width or width_of(new) != width:
        return 0, width
    first = _shared(new, old, 1)
    last = max(width - _shared(new, old, -1), first + 1)
    return min(first, last - 1), last


def _flat(line: Line) -> tuple[str, str] | None:
    """Return the text of a line and, cell for cell, what stands for its style.

    None where a character is not exactly one cell wide.
    """
    texts, marks = [], []
    for text, name in line:
        if not text.isascii() and not _ONE_CELL.issuperset(text):
            wide = [char for char in set(text) if cells(char) != 1]
            if wide:
                return None
            _ONE_CELL.update(text)
        texts.append(text)
        mark = _MARKS.get(name)
        if mark is None:
            mark = _MARKS[name] = chr(len(_MARKS))
        marks.append(mark * len(text))
    return "".join(texts), "".join(marks)


_ONE_CELL: set[str] = set()
"""Characters beyond ASCII that were seen to be one cell wide: a few hundred glyphs of ours."""

_MARKS: dict[str, str] = {}

_GAP = 12
"""So many cells that stay are skipped between two that change: going there costs as many bytes."""


def changed_spans(old: Line, new: Line, width: int) -> list[tuple[int, int]]:
    """Return from where to where (cells, the ends not included) a line differs, left to right."""
    if old == new:
        return []
    before, after = _flat(old), _flat(new)
    if before is None or after is None or not len(before[0]) == len(after[0]) == width:
        span = changed_span(old, new, width)
        return [] if span is None else [span]
    pairs = zip(*before, *after, strict=True)
    differs = [x for x, (a, b, c, d) in enumerate(pairs) if a != c or b != d]
    if not differs:
        return []
    spans: list[tuple[int, int]] = []
    start = last = differs[0]
    for x in differs:
        if x - last > _GAP:
            spans.append((start, last + 1))
            start = x
        last = x
    spans.append((start, last + 1))
    return spans


def _refresh_changed(
    pane: Widget, old: Sequence[Line], new: Sequence[Line], whole: Set[int] = frozenset()
) -> None:
    """Ask for a repaint of what differs between two pictures; what is alike costs no byte.

    Lines of `whole` are on another ground than before.
    """
    width = pane.size.width
    regions: list[Region] = []
    for y in range(max(len(old), len(new))):
        if y >= len(old) or y >= len(new) or y in whole:
            spans = [(0, width)]
        else:
            spans = changed_spans(old[y], new[y], width)
        for first, last in spans:
            before = regions[-1] if regions else None
            if (
                before is not None
                and before.bottom == y
                and (before.x, before.right)
                == (
                    first,
                    last,
                )
            ):
                regions[-1] = Region(before.x, before.y, before.width, before.height + 1)
            else:
                regions.append(Region(first, y, last - first, 1))
    if regions:
        pane.refresh(*regions)


class LinePane(Painted, Widget):
    """Shows lines from the top; repaints only those that changed."""

    DEFAULT_CSS = "LinePane { position: absolute; }"

    class Clicked(Message):
        """A cell was clicked, counted from the pane's corner."""

        def __init__(self, pane: "LinePane", x: int, y: int) -> None:
            super().__init__()
            self.pane = pane
            self.x = x
            self.y = y

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: list[Line] = []

    @property
    def lines(self) -> list[Line]:
        """The lines on the screen."""
        return self._lines

    def show(self, lines: list[Line]) -> None:
        """Replace the picture."""
        old, self._lines = self._lines, lines
        _refresh_changed(self, old, lines)

    def render_line(self, y: int) -> Strip:
        """Return one line as Textual wants it."""
        line = self._lines[y] if y < len(self._lines) else []
        return to_strip(line, self.size.width)

    def pieces(self, y: int, x1: int, x2: int, through: Through) -> list[Piece]:
        """Return a part of one line."""
        line = self._lines[y] if y < len(self._lines) else []
        return _pieces(line, x1, x2, styles_through(through)[0])

    def on_click(self, event: Click) -> None:
        """Say which cell it was."""
        self.post_message(self.Clicked(self, event.x, event.y))


class ListPane(Painted, ScrollView, can_focus=True, inherit_bindings=False):
    """Rows that can be selected, under `fixed` lines that do not scroll.

    Several rows may belong to one item. Only visible rows are ever asked for.
    """

    DEFAULT_CSS = """
    ListPane { position: absolute; scrollbar-size: 0 0; overflow-x: hidden; }
    """

    BINDINGS: ClassVar[list[BindingType]] = bind(
        "down", "up", "page-down", "page-up", "first", "last", "open"
    )
    LIST: ClassVar[str] = ""
    """The name under which its sort is kept, empty where it has none."""

    class Moved(Message):
        """The selection went to another item."""

        def __init__(self, pane: "ListPane", item: int) -> None:
            super().__init__()
            self.pane = pane
            self.item = item

    class Opened(Message):
        """Enter was pressed on an item."""

        def __init__(self, pane: "ListPane", item: int) -> None:
            super().__init__()
            self.pane = pane
            self.item = item

    class HeadClicked(Message):
        """A line above the rows was clicked, where the list is sorted by `sort`; empty: the next.

        `name` is that of the list.
        """

        def __init__(self, name: str, sort: str) -> None:
            super().__init__()
            self.name = name
            self.sort = sort

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._fixed: list[Line] = []
        self._items: Sequence[int] = ()
        self._count = 0
        self._item_count = 0
        self._selected = 0
        self._row: Callable[[int], Line] = lambda _: []
        self._drawn: list[Line] = []
        self._marked: frozenset[int] = frozenset()

    @property
    def selected(self) -> int:
        """The selected item."""
        return self._selected

    @property
    def fixed(self) -> list[Line]:
        """The lines above the rows, that do not scroll."""
        return self._fixed

    @property
    def first_row(self) -> int:
        """The row at the top of the scrolling part."""
        return self.scroll_offset.y

    @property
    def lines(self) -> list[Line]:
        """The lines on the screen."""
        return self._visible()

    def rows_in(self, height: int) -> int:
        """Return how many rows fit under the fixed lines."""
        return max(0, height - len(self._fixed))

    def show(
        self,
        fixed: list[Line],
        row: Callable[[int], Line],
        items: Sequence[int],
        number: int,
        selected: int,
    ) -> None:
        """Replace the picture.

        `items` says for each row which of the `number` items it belongs to, -1 for none.
        """
        self._fixed, self._row, self._items = fixed, row, items
        self._count = len(items)
        self._item_count = number
        self._selected = max(0, min(selected, self._item_count - 1))
        size = Size(max(1, self.size.width), self._count + len(fixed))
        if size != self.virtual_size:
            self.virtual_size = size
        self._repaint()

    def _visible(self) -> list[Line]:
        height = self.size.height
        top = self.scroll_offset.y
        rows = range(top, min(self._count, top + self.rows_in(height)))
        return [*self._fixed, *(self._row(i) for i in rows)]

    def _repaint(self) -> None:
        old, self._drawn = self._drawn, self._visible()
        before, self._marked = self._marked, self._selected_lines()
        _refresh_changed(self, old, self._drawn, before ^ self._marked)

    def render_line(self, y: int) -> Strip:
        """Return one line as Textual wants it."""
        line = self._drawn[y] if y < len(self._drawn) else []
        return to_strip(line, self.size.width, selected=y in self._marked)

    def pieces(self, y: int, x1: int, x2: int, through: Through) -> list[Piece]:
        """Return a part of one line."""
        line = self._drawn[y] if y < len(self._drawn) else []
        return _pieces(line, x1, x2, styles_through(through)[y in self._marked])

    def _selected_lines(self) -> frozenset[int]:
        """Return which lines on the screen are those of the selected item."""
        if not self.has_focus:
            return frozenset()
        top, fixed = self.scroll_offset.y, len(self._fixed)
        rows = range(top, min(self._count, top + self.rows_in(self.size.height)))
        return frozenset([fixed + i - top for i in rows if self._items[i] == self._selected])

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Follow the scroll position: the lines on the screen are others now."""
        super().watch_scroll_y(old_value, new_value)
        if round(old_value) != round(new_value):
            self.redraw()

    def redraw(self) -> None:
        """Draw again after the scroll position, the selection or the focus changed."""
        self.draw(self._selected)
        self.refresh()

    def draw(self, selected: int) -> None:
        """Make the lines with that item selected, and call `show`. Subclasses fill it in."""
        raise NotImplementedError

    def on_resize(self) -> None:
        """Fill the new size: until now only what fitted the old one was made."""
        self.redraw()

    def on_focus(self) -> None:
        """Show the selection as active."""
        self.redraw()

    def on_blur(self) -> None:
        """Show the selection as passive."""
        self.redraw()

    def reveal(self) -> None:
        """Scroll so that the selected item is on the screen."""
        rows = [i for i, item in enumerate(self._items) if item == self._selected]
        room = self.rows_in(self.size.height)
        if not rows or room <= 0:
            return
        top = self.scroll_offset.y
        if rows[0] < top:
            self.scroll_to(y=rows[0], animate=False)
        elif rows[-1] >= top + room:
            self.scroll_to(y=min(rows[0], rows[-1] - room + 1), animate=False)

    def select(self, item: int) -> None:
        """Select an item and say so."""
        if not self._item_count:
            return
        item = max(0, min(item, self._item_count - 1))
        if item != self._selected:
            self._selected = item
            self.post_message(self.Moved(self, item))
            self.redraw()
        self.reveal()

    def _go(self, item: int, rows: int) -> None:
        """Select an item; from the first or the last one on scroll by rows that belong to none."""
        last = self._item_count - 1
        beyond = (item > last and self._selected == last) or (item < 0 and self._selected == 0)
        if last < 0 or beyond:
            self.scroll_to(y=self.scroll_offset.y + rows, animate=False)
        else:
            self.select(item)

    def action_move(self, step: int) -> None:
        """Move the selection by items."""
        self._go(self._selected + step, step)

    def action_page(self, pages: int) -> None:
        """Move the selection by what fits on the screen."""
        rows = pages * max(1, self.rows_in(self.size.height) - 1)
        self._go(self._selected + rows, rows)

    def action_jump(self, item: int) -> None:
        """Select the first (0) or last (-1) item."""
        if item >= 0:
            self._go(item if self._selected != item else -1, -self._count)
        else:
            last = self._item_count - 1
            self._go(last + (self._selected == last), self._count)

    def action_open(self) -> None:
        """Open the selected item."""
        if self._item_count:
            self.post_message(self.Opened(self, self._selected))

    def sort_at(self, x: int, y: int) -> str | None:
        """Return what a click there, in the fixed lines, sorts by; empty: the next; None: no."""
        return None

    def on_click(self, event: Click) -> None:
        """Select what was clicked; a second click opens it. Heads of columns sort."""
        if event.y < len(self._fixed):
            sort = self.sort_at(event.x, event.y)
            if sort is not None:
                self.post_message(self.HeadClicked(self.LIST, sort))
            return
        row = self.scroll_offset.y + event.y - len(self._fixed)
        if 0 <= row < self._count and self._items[row] >= 0:
            self.select(self._items[row])
            if event.chain >= 2:
                self.post_message(self.Opened(self, self._items[row]))
