"""Keys, words and signs."""

from gpuwatch.tui.render.keys import help_lines
from gpuwatch.tui.render.text import Line
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.reading import ReadingScreen

__all__ = ["HelpScreen"]


class HelpScreen(ReadingScreen):
    """Every key that works, and what the words on the screens mean."""

    def page(self, scene: Scene, width: int) -> list[Line]:
        """Return the page of help."""
        return help_lines(width)
