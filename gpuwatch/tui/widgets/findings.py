"""The list of findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwatch.tui.render.findings import (
    abstained_row,
    abstained_rows,
    finding_rows,
    quiet_rows,
    with_cause,
)
from gpuwatch.tui.render.text import Line, heading
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.widgets.pane import ListPane

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding

__all__ = ["FindingsPane"]


class FindingsPane(ListPane):
    """Findings with their first hint. The selection follows the finding, not the row.

    `full`: what could not be judged is listed with what it would need, each on a row.
    """

    LIST = "findings"

    def __init__(self, *, id: str | None = None, full: bool = False) -> None:
        super().__init__(id=id)
        self._full = full
        self._scene: Scene | None = None
        self._cells = (0, 0)
        self._key: str | None = None
        self._run: str | None = None
        self._held = False

    @property
    def finding(self) -> Finding | None:
        """The selected finding, None where there is none."""
        if self._scene is None or not self._scene.findings:
            return None
        return self._scene.findings[min(self.selected, len(self._scene.findings) - 1)]

    def hold(self) -> Finding | None:
        """Return the selected finding, which stays the selected one wherever it goes from now on.

        Until the person has chosen one, it is whichever comes first.
        """
        finding = self.finding
        if finding is not None:
            self._key = finding.id
            self._held = True
        return finding

    def feed(self, scene: Scene, width: int, height: int) -> None:
        """Draw the findings of a scene in a pane of that size."""
        run = scene.run.run if scene.run is not None else None
        if run != self._run:
            self._run, self._key = run, None
        self._scene = scene
        self._cells = (width, height)
        selected = 0
        if self._key is not None:
            selected = next((i for i, f in enumerate(scene.findings) if f.id == self._key), 0)
        moved = selected != self.selected
        self.draw(selected)
        if moved and self._held:
            # What a key has sent elsewhere in the list is seen to be there.
            self.call_after_refresh(self.reveal)
        self._held = False

    def draw(self, selected: int) -> None:
        """Make the lines with that finding selected."""
        scene = self._scene
        if scene is None:
            return
        width = self._cells[0]
        step_ms = scene.summary.step_ms if scene.summary is not None else None
        world = scene.run.world_size if scene.run is not None else None
        rows: list[Line] = []
        items: list[int] = []
        for i, item in enumerate(scene.findings):
            part = finding_rows(
                with_cause(item, scene.findings),
                width,
                world=world,
                step_ms=step_ms,
                selected=i == selected,
                focused=self.has_focus,
                aside=item.id in scene.snoozed,
            )
            rows += part
            items += [i] * len(part)
        tail = quiet_rows(scene, width)
        if scene.abstained and self._full:
            tail += abstained_rows(scene.abstained, width)
        elif scene.abstained:
            tail.append(abstained_row(scene.abstained, width))
        rows += tail
        items += [-1] * len(tail)
        found = len(scene.open_findings)
        aside = sum(item.state == "open" and item.id in scene.snoozed for item in scene.findings)
        resolved = len(scene.findings) - found - aside
        words = scene.filters.get("findings", "")
        counts = (
            f"{found} open" if found else "",
            f"{aside} aside" if aside else "",
            f"{resolved} resolved" if resolved else "",
            f"filter ‹{words}›" if words else "",
        )
        sort = scene.sorts.get("findings", "cost")
        title = heading(
            "Findings",
            width,
            note="  ".join(text for text in counts if text),
            right=f"by {sort}" if len(scene.findings) > 1 else "",
            focused=self.has_focus,
        )
        self.show([title], rows.__getitem__, items, len(scene.findings), selected)

    def select(self, item: int) -> None:
        """Select a finding and remember it by its id."""
        super().select(item)
        if self.finding is not None:
            self._key = self.finding.id

    def sort_at(self, x: int, y: int) -> str | None:
        """Return that a click on `by cost` sorts by what comes after it."""
        scene = self._scene
        if scene is None or y or len(scene.findings) < 2:
            return None
        sort = scene.sorts.get("findings", "cost")
        return "" if self._cells[0] - len(f" by {sort} ") <= x < self._cells[0] - 1 else None
