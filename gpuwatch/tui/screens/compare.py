"""View 5: two runs against each other, recordings or runs of this session."""

from collections.abc import Mapping
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from gpuwatch.tui.binding import bind
from gpuwatch.tui.keymap import label_of
from gpuwatch.tui.layout import Rect
from gpuwatch.tui.render.compare import compare_lines
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.base import FedScreen
from gpuwatch.tui.screens.reading import PagePane
from gpuwatch.tui.widgets.pane import place

__all__ = ["CompareScreen"]


class CompareScreen(FedScreen):
    """What a change has brought."""

    BINDINGS: ClassVar[list[BindingType]] = bind("close", "choose", "all")
    AUTO_FOCUS = "#page"
    VIEW = "compare"
    HERE = ("choose", "all", "down", "up", "page-down", "page-up", "close")

    def __init__(self) -> None:
        super().__init__(id="compare-view")
        self._page = PagePane(id="page")
        self._all = False
        self._is_long = False

    def bodies(self) -> Mapping[str, Widget]:
        """The page alone."""
        return {"page": self._page}

    def list_pane(self) -> Widget | None:
        """The page has the focus: it may be longer than the screen."""
        return self._page

    def draw(self, scene: Scene, room: Rect) -> None:
        """Compare what is chosen as it is now."""
        airy = room.height >= 28
        top = 1 if airy else 0
        place(self._page, Rect(room.x, room.y + top, room.width, room.height - top))
        names = self.gpuwatch.key_names
        lines = compare_lines(
            self.gpuwatch.watcher.compared(),
            scene.checks,
            room.width,
            show_all=self._all,
            choose_key=label_of("choose", names),
            all_key=label_of("all", names),
        )
        self._is_long = len(lines) > room.height - top
        self._page.feed(lines)

    def keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return the keys that work here."""
        keys = [("choose", "choose A and B"), ("all", "differences" if self._all else "all")]
        if self._is_long:
            keys.append(("down", "scroll"))
        return [*keys, ("pause", "resume" if scene.paused else "pause"), ("write", "write")]

    def action_choose(self) -> None:
        """List what can be compared."""
        from gpuwatch.tui.screens.sides import SidesScreen

        self.app.push_screen(SidesScreen())

    def action_all(self) -> None:
        """Show the settings that are equal too, or the differences alone."""
        self._all = not self._all
        self.gpuwatch.refresh_scene(force=True)

    def action_back(self) -> None:
        """Hide the equal settings again."""
        if self._all:
            self.action_all()
