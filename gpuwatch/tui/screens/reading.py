"""A page to read: lines that scroll under a header, a footer with keys, esc goes back."""

from collections.abc import Mapping
from typing import ClassVar

from textual.binding import BindingType
from textual.events import Click
from textual.message import Message
from textual.widget import Widget

from gpuwatch.tui.binding import bind
from gpuwatch.tui.layout import Rect
from gpuwatch.tui.render.text import Line
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.base import FedScreen
from gpuwatch.tui.widgets.pane import ListPane, place

__all__ = ["PagePane", "ReadingScreen"]


class PagePane(ListPane, inherit_bindings=False):
    """Text that scrolls; nothing in it is selected, so enter is left to the screen."""

    BINDINGS: ClassVar[list[BindingType]] = bind(
        "down", "up", "page-down", "page-up", "first", "last"
    )

    class Clicked(Message):
        """A line was clicked, at that cell of it."""

        def __init__(self, line: Line, x: int) -> None:
            super().__init__()
            self.line = line
            self.x = x

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._text: list[Line] = []

    def feed(self, lines: list[Line]) -> None:
        """Replace the text."""
        self._text = lines
        self.draw(0)

    def draw(self, selected: int) -> None:
        """Make the lines."""
        self.show([], self._text.__getitem__, [-1] * len(self._text), 0, selected)

    def on_click(self, event: Click) -> None:
        """Say which line it was."""
        row = self.scroll_offset.y + event.y
        if row < len(self._text):
            self.post_message(self.Clicked(self._text[row], event.x))

    def action_move(self, step: int) -> None:
        """Scroll by lines."""
        self.scroll_to(y=self.scroll_offset.y + step, animate=False)

    def action_page(self, pages: int) -> None:
        """Scroll by what fits on the screen."""
        self.action_move(pages * max(1, self.size.height - 1))

    def action_jump(self, item: int) -> None:
        """Scroll to the start (0) or the end (-1)."""
        self.scroll_to(y=0 if item >= 0 else self.virtual_size.height, animate=False)


class ReadingScreen(FedScreen):
    """Base of the pages that open over a view. Subclasses give `page`."""

    BINDINGS: ClassVar[list[BindingType]] = bind("close")
    AUTO_FOCUS = "#page"
    HEADER = 1
    HERE: ClassVar[tuple[str, ...]] = ("close", "down", "up", "page-down", "page-up")

    def __init__(self) -> None:
        super().__init__()
        self._page = PagePane(id="page")
        self._is_long = False

    def bodies(self) -> Mapping[str, Widget]:
        """The page alone."""
        return {"page": self._page}

    def list_pane(self) -> Widget | None:
        """The page has the focus."""
        return self._page

    def page(self, scene: Scene, width: int) -> list[Line]:
        """Return the lines of the page."""
        raise NotImplementedError

    def more_keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return (action, words) of what this page can do beside scrolling."""
        return []

    def keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return the keys that work here."""
        keys = self.more_keys(scene)
        if self._is_long:
            keys.insert(0, ("down", "scroll"))
        return keys

    def draw(self, scene: Scene, room: Rect) -> None:
        """Draw the page under a line that is left free."""
        place(self._page, Rect(room.x, room.y + 1, room.width, room.height - 1))
        lines = self.page(scene, room.width)
        self._is_long = len(lines) > room.height - 1
        self._page.feed(lines)

    def on_page_pane_clicked(self, message: PagePane.Clicked) -> None:
        """Go to the moment of a curve that was clicked."""
        self.go_to_moment(message.line, message.x)

    def to_top(self) -> None:
        """Start at the top again: the page shows something else."""
        self._page.scroll_to(y=0, animate=False)
