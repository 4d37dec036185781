"""One finding: why, what was ruled out, what to try."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import BindingType

from gpuwatch.tui.binding import bind
from gpuwatch.tui.render.findings import finding_detail
from gpuwatch.tui.render.text import Line
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.reading import ReadingScreen

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding

__all__ = ["FINDING_ACTIONS", "FindingScreen"]

_HERE = ("evidence", "previous", "next", "stacks", "apply")

FINDING_ACTIONS = ("copy", "copy-markdown", "snooze", "verify")
"""What can be done with a finding wherever one is selected."""


class FindingScreen(ReadingScreen):
    """The evidence of one finding, kept up to date for as long as it is found."""

    BINDINGS: ClassVar[list[BindingType]] = bind("close", *_HERE, *FINDING_ACTIONS)
    HERE = (*ReadingScreen.HERE, *_HERE, *FINDING_ACTIONS)

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
            # A run that was started anew numbers its findings anew.
            if (item.run, item.id, item.kind) == self._key():
                self._finding = item
                break
        return finding_detail(self._finding, scene, width)

    def _key(self) -> tuple[str, str, str]:
        return self._finding.run, self._finding.id, self._finding.kind

    def more_keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return what can be done with it."""
        keys = [("evidence", "on the time axis")]
        if self._finding.stacks:
            keys.append(("stacks", "stacks now"))
        if self._finding.hints:
            keys += [("copy", "copy hint"), ("verify", "verify")]
        if self.gpuwatch.can_apply(self._finding):
            keys.insert(0, ("apply", "apply live"))
        keys += [("copy-markdown", "copy all"), ("snooze", "snooze")]
        if len(scene.findings) > 1:
            keys.append(("next", "other finding"))
        return keys

    def action_step(self, step: int) -> None:
        """Go to the next or previous finding."""
        scene = self._scene
        if scene is None or not scene.findings:
            return
        ids = [item.id for item in scene.findings]
        place = ids.index(self._finding.id) if self._finding.id in ids else -step
        self._finding = scene.findings[(place + step) % len(ids)]
        self.to_top()
        self.gpuwatch.refresh_scene(force=True)

    def action_evidence(self) -> None:
        """Show the first of its ranks at the time at which it opened."""
        self.gpuwatch.show_evidence(self._finding)

    def action_stacks(self) -> None:
        """Ask the rank it waits for, or the first of its ranks, where its threads stand now."""
        stacks = self._finding.stacks
        self.gpuwatch.select_rank(stacks[0].rank if stacks else self._finding.ranks[0])
        self.gpuwatch.show_stacks()

    def rank_meant(self, scene: Scene) -> int | None:
        """Return the selected rank where it is one of the finding's, else the first of those."""
        ranks = self._finding.ranks
        selected = super().rank_meant(scene)
        return selected if selected in ranks or not ranks else ranks[0]

    def action_apply(self) -> None:
        """Ask whether to set what its hint proposes in the running training."""
        self.gpuwatch.apply_hint(self._finding)

    def action_copy(self) -> None:
        """Copy its first hint."""
        self.gpuwatch.copy_hint(self._finding)

    def action_copy_markdown(self) -> None:
        """Copy it as Markdown."""
        self.gpuwatch.copy_finding(self._finding)

    def action_snooze(self) -> None:
        """Put it aside, or take it back."""
        self.gpuwatch.snooze(self._finding)

    def action_verify(self) -> None:
        """Check a change against its window, or stop checking."""
        self.gpuwatch.verify(self._finding)
