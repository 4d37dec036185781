"""The whole event log."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from gpuwatch.tui.binding import bind
from gpuwatch.tui.render.text import Line
from gpuwatch.tui.render.timeline import event_page
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.reading import ReadingScreen

__all__ = ["EventsScreen"]


class EventsScreen(ReadingScreen):
    """What happened, newest first."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bind("close"),
        Binding("e", "back", "Back", show=False),
    ]

    def page(self, scene: Scene, width: int) -> list[Line]:
        """Return all that is kept."""
        return event_page(scene, width, self.gpuwatch.problems)
