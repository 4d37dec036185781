"""The table of ranks."""

from gpuwatch.store.views import RankView
from gpuwatch.tui.render.ranks import columns_for, header_row, rank_flags, rank_row, sort_under
from gpuwatch.tui.render.text import Line, fit, heading
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.widgets.pane import ListPane

__all__ = ["RanksPane"]


class RanksPane(ListPane):
    """Ranks, most noteworthy first. The selection follows the rank, not the row."""

    LIST = "ranks"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._scene: Scene | None = None
        self._cells = (0, 0)

    def rank_at(self, item: int) -> RankView | None:
        """Return the rank in that row, None where there is none."""
        scene = self._scene
        if scene is None or scene.run is None or not 0 <= item < len(scene.order):
            return None
        return scene.run.ranks[scene.order[item]]

    def feed(self, scene: Scene, width: int, height: int) -> None:
        """Draw the ranks of a scene in a pane of that size."""
        self._scene = scene
        self._cells = (width, height)
        selected = 0
        if scene.run is not None and scene.selected is not None:
            ranks = scene.run.ranks
            selected = next(
                (row for row, i in enumerate(scene.order) if ranks[i].rank == scene.selected), 0
            )
        self.draw(selected)

    def draw(self, selected: int) -> None:
        """Make the lines with that row selected."""
        scene = self._scene
        if scene is None or scene.run is None:
            return
        run = scene.run
        width, height = self._cells
        columns = columns_for(width, len(run.nodes) > 1, bool(scene.gpus))
        flags = rank_flags(scene.findings, run.world_size)
        scale = scene.summary.scale_ms if scene.summary is not None else None
        focused = self.has_focus

        def row(index: int) -> Line:
            # Through the scene, which lets go of its picture: this pane may be covered for long.
            rank = self.rank_at(index)
            if rank is None:
                return []
            return rank_row(
                rank,
                columns,
                scale,
                flag=flags.get(rank.rank, ""),
                selected=index == selected,
                focused=focused,
                since_s=scene.since_s,
                gpu=scene.gpu(rank),
            )

        room = max(1, height - 2)
        number = len(scene.order)
        first = min(self.first_row, max(0, number - room))
        where = f"{number:,}"
        if number > room:
            where = f"{first + 1:,}-{min(number, first + room):,} of {number:,}"
        words = scene.filters.get("ranks", "")
        if words:
            where += f" of {len(run.ranks):,} pass"
        elif number < run.world_size:
            where += f" heard, {run.world_size:,} expected"
        title = heading("Ranks", width, note=self._note(scene), right=where, focused=focused)
        fixed = [title, header_row(columns)]
        if not number and words:
            fixed.append(fit([(f"   no rank passes ‹{words}›; esc shows all", "dim")], width))
        self.show(fixed, row, range(number), number, selected)

    def sort_at(self, x: int, y: int) -> str | None:
        """Return what a column's head sorts by."""
        scene = self._scene
        if scene is None or scene.run is None or y != 1:
            return None
        columns = columns_for(self._cells[0], len(scene.run.nodes) > 1, bool(scene.gpus))
        return sort_under(columns, x)

    @staticmethod
    def _note(scene: Scene) -> str:
        if scene.run is None or len(scene.run.ranks) < 2:
            return ""
        sort = scene.sorts.get("ranks", "own")
        note = "slowest own time first" if sort == "own" else f"by {sort.replace('_', ' ')}"
        words = scene.filters.get("ranks", "")
        return f"{note}  filter ‹{words}›" if words else note
