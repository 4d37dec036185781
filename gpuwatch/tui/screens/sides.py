"""What can be compared: the runs of this session and the recordings at hand."""

from collections.abc import Mapping
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from gpuwatch.tui.binding import bind
from gpuwatch.tui.layout import Rect
from gpuwatch.tui.render.compare import source_row
from gpuwatch.tui.render.text import Line, fit, heading
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.base import FedScreen
from gpuwatch.tui.sides import Source
from gpuwatch.tui.widgets.pane import ListPane, place

__all__ = ["SidesScreen"]

_WORDS = ("A, the run before the change", "B, the run after it")


class _SidesPane(ListPane):
    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.sources: tuple[Source, ...] = ()
        self.places: tuple[str, ...] = ()
        self.side = 0
        self.cells = 0

    def draw(self, selected: int) -> None:
        """Make the lines with that source selected."""
        sources, places, width = self.sources, self.places, self.cells

        def row(index: int) -> Line:
            return source_row(sources[index], places[index], width, selected=index == selected)

        title = heading(f"Choose {_WORDS[self.side]}", width, right=f"{len(sources)}", focused=True)
        lines = [title]
        if not sources:
            text = " no run, and no recording in this directory: gpuwatch record -o FILE makes one"
            lines.append(fit([(text, "dim")], width))
        self.show(lines, row, range(len(sources)), len(sources), selected)


class SidesScreen(FedScreen):
    """Enter chooses A, then B; tab goes to the other one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bind("close", "focus-next"),
        Binding("o", "back", show=False),
    ]
    AUTO_FOCUS = "#sides"
    HEADER = 1
    HERE = ("close", "down", "up", "open", "focus-next")

    def __init__(self) -> None:
        super().__init__()
        self._list = _SidesPane(id="sides")
        self._side = 0
        # Looked for once: a directory is read on the thread that draws.
        self._sources: tuple[Source, ...] | None = None

    def bodies(self) -> Mapping[str, Widget]:
        """The list alone."""
        return {"sides": self._list}

    def list_pane(self) -> Widget | None:
        """The list has the focus."""
        return self._list

    def draw(self, scene: Scene, room: Rect) -> None:
        """Draw the list."""
        place(self._list, Rect(room.x, room.y + 1, room.width, room.height - 1))
        sides = self.gpuwatch.watcher.sides
        if self._sources is None:
            self._sources = sides.sources(scene.view.runs, replayed=scene.replay is not None)
        self._list.sources = self._sources
        self._list.places = tuple([sides.places(source) for source in self._sources])
        self._list.side, self._list.cells = self._side, room.width
        self._list.draw(self._list.selected)

    def keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return the keys of the list."""
        return [("down", "move"), ("open", "choose"), ("focus-next", "the other side")]

    def action_other_list(self) -> None:
        """Choose the other side."""
        self._side = 1 - self._side
        if self._scene is not None:
            self.feed(self._scene)

    def on_list_pane_opened(self, message: ListPane.Opened) -> None:
        """Take it; after B go back to the comparison."""
        sources = self._sources or ()
        if message.item >= len(sources):
            return
        self.gpuwatch.watcher.sides.choose(self._side, sources[message.item])
        if self._side:
            self.dismiss(None)
        else:
            self.action_other_list()
