"""The heat map, with ranks that can be clicked."""

from textual.events import Click
from textual.message import Message

from gpuwatch.tui.render.heat import HeatGrid, heat_values, rank_under
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

    def draw_map(self, lines: list[Line], grid: HeatGrid | None, scene: Scene, top: int) -> None:
        """Show lines; the rows of the grid begin at line `top`."""
        self._grid, self._map, self._top = grid, scene, top
        self.show(lines)

    def on_click(self, event: Click) -> None:
        """Choose the rank under the mouse."""
        run = self._map.run if self._map is not None else None
        if self._grid is None or self._map is None or run is None:
            return
        values = heat_values(run, self._map.metric, self._map.gpus)
        position = rank_under(self._grid, values, event.x, event.y - self._top)
        if position is not None:
            self.post_message(self.Chosen(run.ranks[position].rank))
