"""One rank in detail."""

from typing import ClassVar

from textual.binding import BindingType

from gpuwatch.tui.binding import bind
from gpuwatch.tui.render.rank import rank_page
from gpuwatch.tui.render.text import Line, fit, heading
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.reading import ReadingScreen

__all__ = ["RankScreen"]


class RankScreen(ReadingScreen):
    """The selected rank; `[` and `]` go through the ranks in the order of the table."""

    BINDINGS: ClassVar[list[BindingType]] = bind("close", "previous", "next", "stacks")
    HERE = (*ReadingScreen.HERE, "previous", "next", "stacks")

    def page(self, scene: Scene, width: int) -> list[Line]:
        """Return the page of the selected rank."""
        rank = scene.rank
        if rank is None:
            return [heading("Rank", width), fit([(" no rank passes the filter", "dim")], width)]
        return rank_page(rank, scene, width)

    def more_keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return what can be done with it."""
        keys = [("next", "other rank")] if len(scene.order) > 1 else []
        keys += [("stacks", "stacks"), ("back", "time"), ("zoom-out", "zoom")]
        return [*keys, ("memory", "memory"), ("profile", "profile")]

    def action_step(self, step: int) -> None:
        """Go to the next or previous rank of the table."""
        scene = self._scene
        if scene is None or scene.run is None or not scene.order:
            return
        ranks = [scene.run.ranks[i].rank for i in scene.order]
        now = scene.rank.rank if scene.rank is not None else ranks[0]
        place = ranks.index(now) if now in ranks else -step
        self.to_top()
        self.gpuwatch.select_rank(ranks[(place + step) % len(ranks)])

    def action_stacks(self) -> None:
        """Ask the rank where its threads stand."""
        self.gpuwatch.show_stacks()
