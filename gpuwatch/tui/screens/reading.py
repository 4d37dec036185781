"""A page to read: lines that scroll under a header, a footer with keys, esc goes back."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize

from gpuwatch.tui.layout import Rect
from gpuwatch.tui.render.header import header_line
from gpuwatch.tui.render.keys import Key, footer_line
from gpuwatch.tui.render.states import LEAST_HEIGHT, LEAST_WIDTH, too_small_line
from gpuwatch.tui.render.text import Line
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.base import FedScreen
from gpuwatch.tui.widgets.pane import LinePane, ListPane, place

__all__ = ["PagePane", "ReadingScreen"]


class PagePane(ListPane):
    """Text that scrolls; nothing in it is selected."""

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
    """Base of the pages that open over the overview. Subclasses give `page`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace", "leave", "Back", show=False, id="back"),
    ]

    AUTO_FOCUS = "#page"

    def __init__(self) -> None:
        super().__init__()
        self._header = LinePane(id="header")
        self._page = PagePane(id="page")
        self._footer = LinePane(id="footer")
        self._scene: Scene | None = None

    def compose(self) -> ComposeResult:
        """Header, page, footer."""
        yield self._header
        yield self._page
        yield self._footer

    def page(self, scene: Scene, width: int) -> list[Line]:
        """Return the lines of the page."""
        raise NotImplementedError

    def keys(self) -> list[Key]:
        """Return the keys that work here."""
        keys: list[Key] = [("esc", "back")]
        if self._page.virtual_size.height > self._page.size.height:
            keys.append(("j/k", "scroll"))
        return [*keys, ("q", "quit")]

    def feed(self, scene: Scene) -> None:
        """Draw that scene."""
        self._scene = scene
        width, height = self.size
        if not width or not height:
            return
        with self.app.batch_update():
            place(self._header, Rect(0, 0, width, 1))
            small = width < LEAST_WIDTH or height < LEAST_HEIGHT
            place(self._page, None if small else Rect(0, 2, width, height - 3))
            place(self._footer, None if small else Rect(0, height - 1, width, 1))
            if small:
                self._header.show([too_small_line(width, height)])
                return
            self._header.show([header_line(scene, width)])
            self._page.feed(self.page(scene, width))
            self._footer.show([footer_line(self.keys(), width)])

    def on_resize(self, event: Resize) -> None:
        """Lay out anew for the new size."""
        if self._scene is not None:
            self.feed(self._scene)

    def action_leave(self) -> None:
        """Go back to the screen below."""
        self.dismiss(None)
