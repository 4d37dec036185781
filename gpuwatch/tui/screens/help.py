"""Keys, words and signs."""

from collections.abc import Sequence

from gpuwatch.tui.keymap import VIEWS, help_entries, keys_of
from gpuwatch.tui.render.keys import help_lines
from gpuwatch.tui.render.text import Line
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.reading import ReadingScreen

__all__ = ["EVERYWHERE", "OF_A_JOB", "HelpScreen"]

EVERYWHERE = (
    *(f"view-{i}" for i in range(1, len(VIEWS) + 1)),
    "quit",
    "help",
    "palette",
    "pause",
    "back",
    "forward",
    "back-far",
    "forward-far",
    "zoom-in",
    "zoom-out",
    "metric",
    "heat",
    "events",
    "memory",
    "profile",
    "knobs",
    "runs",
    "write",
)
"""Actions of the app itself, in the order of the page."""

OF_A_JOB = ("output", "report")
"""The same where the screen was opened with a command."""


class HelpScreen(ReadingScreen):
    """Every key that works, and what the words on the screens mean."""

    def __init__(self, here: Sequence[str] = ()) -> None:
        super().__init__()
        self._here = tuple(here)

    def page(self, scene: Scene, width: int) -> list[Line]:
        """Return the page of help for the screen below."""
        chosen = self.gpuwatch.key_names
        # A key that does something else here does not do what it does everywhere.
        taken = {keys_of(name, chosen) for name in self._here}
        names = EVERYWHERE if self.gpuwatch.job is None else (*EVERYWHERE, *OF_A_JOB)
        everywhere = [name for name in names if keys_of(name, chosen) not in taken]
        return help_lines(
            width,
            help_entries(self._here, chosen),
            help_entries(everywhere, chosen),
            self.gpuwatch.problems,
        )
