"""One finding: why, what was ruled out, what to try."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwatch.tui.render.findings import finding_detail
from gpuwatch.tui.render.text import Line
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.reading import ReadingScreen

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding

__all__ = ["FindingScreen"]


class FindingScreen(ReadingScreen):
    """The evidence of one finding, kept up to date for as long as it is found."""

    def __init__(self, finding: Finding) -> None:
        super().__init__()
        self._finding = finding

    @property
    def finding(self) -> Finding:
        """The finding on the screen, as it was last heard of."""
        return self._finding

    def page(self, scene: Scene, width: int) -> list[Line]:
        """Return the finding as it is now; as it was, if it is no longer found."""
        for item in scene.findings:
            if item.id == self._finding.id and item.kind == self._finding.kind:
                self._finding = item
                break
        return finding_detail(self._finding, scene, width)
