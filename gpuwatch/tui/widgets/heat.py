"""The heat map, with ranks that can be clicked."""

from textual.events import Click
from textual.message import Message

from gpuwatch.store.views import RunView
from gpuwatch.tui.render.heat import HeatGrid, heat_row, heat_row_grid, heat_values, rank_under
from gpuwatch.tui.render.text import Line
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.widgets.pane import LinePane

__all__ = ["HeatPane"]


class HeatPane(LinePane):
    """Lines of `render.heat`; a click on a glyph chooses the rank that it shows."""

    class Chosen(Message):
        """A rank was clicked."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._grid: HeatGrid | None = None
        self._map: Scene | None = None
        self._top = 0
        self._row_cells = 0

    def draw_map(self, lines: list[Line], grid: HeatGrid | None, scene: Scene, top: int) -> None:
        """Show lines; the rows of the grid begin at line `top`."""
        self._grid, self._map, self._top = grid, scene, top
        self._row_cells = 0
        self.show(lines)

    def draw_row(self, run: RunView, scene: Scene, width: int) -> None:
        """Show all ranks in one line."""
        self._grid, self._map, self._top = None, scene, 0
        self._row_cells = width
        self.show([heat_row(run, width, metric=scene.metric, gpus=scene.gpus)])

    def on_click(self, event: Click) -> None:
        """Choose the rank under the mouse."""
        scene = self._map
        run = scene.run if scene is not None else None
        if scene is None or run is None:
            return
        grid = self._grid
        if self._row_cells:
            # Where each stands in the line is of no use until there is a click.
            grid = heat_row_grid(run, self._row_cells, metric=scene.metric, gpus=scene.gpus)
        if grid is None:
            return
        values = heat_values(run, scene.metric, scene.gpus)
        position = rank_under(grid, values, event.x, event.y - self._top)
        if position is not None:
            self.post_message(self.Chosen(run.ranks[position].rank))
