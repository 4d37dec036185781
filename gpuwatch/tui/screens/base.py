"""What every screen of gpuwatch has in common."""

from typing import cast

from textual.screen import Screen

from gpuwatch.tui.scene import Scene

__all__ = ["FedScreen"]


class FedScreen(Screen[None]):
    """A screen that draws scenes. Only the one on top is fed: a covered one costs as much."""

    DEFAULT_CSS = "FedScreen { overflow: hidden; }"

    def on_screen_resume(self) -> None:
        """Draw at once on coming to the top, not at the next tick."""
        from gpuwatch.tui.app import GpuwatchApp

        cast("GpuwatchApp", self.app).refresh_scene(force=True)

    def feed(self, scene: Scene) -> None:
        """Draw that scene."""
        raise NotImplementedError
