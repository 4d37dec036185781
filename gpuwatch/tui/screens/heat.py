"""The heat map on the whole screen: up to 1,024 ranks, each by its own glyph."""

from collections.abc import Mapping
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from gpuwatch.tui.binding import bind
from gpuwatch.tui.layout import Rect
from gpuwatch.tui.render.heat import HeatGrid, heat_grid, heat_lines
from gpuwatch.tui.render.ranks import rank_flags
from gpuwatch.tui.render.text import heading
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.base import FedScreen
from gpuwatch.tui.widgets.heat import HeatPane
from gpuwatch.tui.widgets.pane import place

__all__ = ["HeatScreen"]


class HeatScreen(FedScreen):
    """Arrows move through the ranks as they stand; enter opens the one under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bind("close", "open", "down", "up"),
        Binding("h", "back", "Back", show=False),
        Binding("left", "walk(-1, 0)", show=False),
        Binding("right", "walk(1, 0)", show=False),
    ]
    HERE = ("close", "open", "down", "up")

    def __init__(self) -> None:
        super().__init__()
        self._heat = HeatPane(id="heat")
        self._grid: HeatGrid | None = None

    def bodies(self) -> Mapping[str, Widget]:
        """The map alone."""
        return {"heat": self._heat}

    def draw(self, scene: Scene, room: Rect) -> None:
        """Fill the room with the map."""
        run = scene.run
        place(self._heat, room)
        if run is None:
            self._heat.draw_map([heading("Heat map", room.width)], None, scene, 0)
            return
        self._grid = heat_grid(run, room.width, room.height - 2)
        title = heading(
            f"{scene.metric.label} of {len(run.ranks):,} ranks",
            room.width,
            note=scene.metric.words,
            right="m metric",
        )
        lines = heat_lines(
            run,
            room.width,
            room.height - 1,
            metric=scene.metric,
            gpus=scene.gpus,
            selected=None if scene.rank is None else scene.rank.rank,
            grid=self._grid,
            flags=rank_flags(scene.findings, run.world_size),
        )
        self._heat.draw_map([title, *lines], self._grid, scene, 1)

    def keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return the keys of the map."""
        return [("down", "move"), ("open", "rank"), ("metric", "metric")]

    def on_heat_pane_chosen(self, message: HeatPane.Chosen) -> None:
        """Select the rank under the mouse."""
        self.gpuwatch.select_rank(message.rank)

    def action_open(self) -> None:
        """Open the selected rank."""
        if self._scene is not None and self._scene.rank is not None:
            self.gpuwatch.open_rank(self._scene.rank.rank)

    def action_move(self, step: int) -> None:
        """Move the cursor by a row."""
        self.action_walk(0, step)

    def action_walk(self, dx: int, dy: int) -> None:
        """Move the cursor by a glyph or a row."""
        scene, grid = self._scene, self._grid
        if scene is None or grid is None or scene.run is None or scene.rank is None:
            return
        ranks = scene.run.ranks
        here = next((i for i, rank in enumerate(ranks) if rank.rank == scene.rank.rank), 0)
        for y, (_, cells) in enumerate(grid.rows):
            for i, (x, first, last) in enumerate(cells):
                if here not in grid.positions[first : last + 1]:
                    continue
                if dy:
                    row = grid.rows[max(0, min(len(grid.rows) - 1, y + dy))][1]
                    target = min(row, key=lambda cell: abs(cell[0] - x))
                elif 0 <= i + dx < len(cells):
                    target = cells[i + dx]
                else:
                    row = grid.rows[(y + dx) % len(grid.rows)][1]
                    target = row[0] if dx > 0 else row[-1]
                self.gpuwatch.select_rank(ranks[grid.positions[target[1]]].rank)
                return
