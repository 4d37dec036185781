"""View 4: every finding, the selected one in full, and what could not be judged."""

from collections.abc import Mapping
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from gpuwatch.tui.binding import bind
from gpuwatch.tui.layout import TWO_COLUMNS_FROM, Rect
from gpuwatch.tui.render.findings import finding_detail
from gpuwatch.tui.render.states import idle_lines
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.base import LIST_KEYS, ActsOnFinding
from gpuwatch.tui.screens.finding import FINDING_ACTIONS
from gpuwatch.tui.widgets.findings import FindingsPane
from gpuwatch.tui.widgets.pane import LinePane, ListPane, place

__all__ = ["FindingsScreen"]

_LEAST_DETAIL = 10
"""Lines from which on the selected finding stands below the list."""


class FindingsScreen(ActsOnFinding):
    """What costs time, why, and what to try."""

    BINDINGS: ClassVar[list[BindingType]] = [*LIST_KEYS, *bind(*FINDING_ACTIONS, "apply")]
    AUTO_FOCUS = "#findings"
    VIEW = "findings"
    LIST = "findings"
    HERE = ("down", "up", "open", "filter", "sort", *FINDING_ACTIONS, "apply", "close")

    def __init__(self) -> None:
        super().__init__(id="findings-view")
        self._findings = FindingsPane(id="findings", full=True)
        self._detail = LinePane(id="detail")

    def bodies(self) -> Mapping[str, Widget]:
        """List and detail."""
        return {"findings": self._findings, "detail": self._detail}

    def list_pane(self) -> Widget | None:
        """The list has the focus."""
        return self._findings

    def draw(self, scene: Scene, room: Rect) -> None:
        """List; the selected finding at the right, or below, or one key away."""
        if scene.run is None:
            place(self._findings, None)
            place(self._detail, room)
            self._detail.show(idle_lines(scene, room.width))
            return
        if room.width >= TWO_COLUMNS_FROM:
            left = room.width * 48 // 100
            right = room.width - left - 2
            place(self._findings, Rect(0, room.y + 1, left, room.height - 1))
            self._findings.feed(scene, left, room.height - 1)
            self._show_detail(scene, Rect(left + 2, room.y + 1, right, room.height - 1))
            return
        rows = 1 + 2 * len(scene.findings) + len(scene.abstained)
        top = min(rows, max(6, room.height * 2 // 5))
        if room.height - top < _LEAST_DETAIL or not scene.findings:
            place(self._detail, None)
            place(self._findings, room)
            self._findings.feed(scene, room.width, room.height)
            return
        place(self._findings, Rect(0, room.y, room.width, top))
        self._findings.feed(scene, room.width, top)
        self._show_detail(scene, Rect(0, room.y + top + 1, room.width, room.height - top - 1))

    def _show_detail(self, scene: Scene, rect: Rect) -> None:
        finding = self._findings.finding
        if finding is None:
            place(self._detail, None)
            return
        place(self._detail, rect)
        lines = finding_detail(finding, scene, rect.width, focused=False)
        self._detail.show(lines[: rect.height])

    def keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return the keys of the list."""
        if scene.run is None:
            return []
        keys: list[tuple[str, str]] = []
        if scene.findings:
            keys += [
                ("down", "move"),
                ("open", "open"),
                ("copy", "copy hint"),
                ("copy-markdown", "copy all"),
                ("verify", "verify"),
                ("snooze", "snooze"),
                ("sort", "sort"),
            ]
            selected = self._findings.finding
            if selected is not None and self.gpuwatch.can_apply(selected):
                keys.insert(2, ("apply", "apply live"))
        return [*keys, ("filter", "filter"), ("events", "events"), ("write", "write")]

    def on_list_pane_moved(self, message: ListPane.Moved) -> None:
        """Show the selected finding."""
        self.gpuwatch.refresh_scene(force=True)

    def on_list_pane_opened(self, message: ListPane.Opened) -> None:
        """Open the finding."""
        self._with_finding(self.gpuwatch.open_finding)
