"""View 5: two runs against each other. It is a command so far, and the view says how to get it."""

from collections.abc import Mapping

from textual.widget import Widget

from gpuwatch.tui.layout import Rect
from gpuwatch.tui.render.text import fit, heading, pad
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.base import FedScreen
from gpuwatch.tui.widgets.pane import LinePane, place

__all__ = ["CompareScreen"]

COMMANDS = (
    ("gpuwatch record -o before", "in another terminal, while the run goes"),
    ("gpuwatch record -o after", "after the change"),
    ("gpuwatch compare before after", "times, settings, findings; predicted against actual"),
)
"""What gives a comparison today, as it is typed."""


class CompareScreen(FedScreen):
    """The commands that compare."""

    VIEW = "compare"

    def __init__(self) -> None:
        super().__init__(id="compare-view")
        self._text = LinePane(id="text")

    def bodies(self) -> Mapping[str, Widget]:
        """The text."""
        return {"text": self._text}

    def draw(self, scene: Scene, room: Rect) -> None:
        """Say how to get there."""
        place(self._text, room)
        lines = [heading("Compare", room.width), fit([("", "text")], room.width)]
        words = "Two runs are compared by their recordings, before a change and after it:"
        lines += [fit([(f"  {words}", "text")], room.width), fit([("", "text")], room.width)]
        lines += [
            fit([("    ", "text"), (pad(command, 36), "hint"), (why, "dim")], room.width)
            for command, why in COMMANDS
        ]
        self._text.show(lines)
