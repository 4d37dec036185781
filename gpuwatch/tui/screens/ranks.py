"""View 2: the heat map, the table of all ranks, and the selected one beside it."""

from collections.abc import Mapping
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from gpuwatch.tui.binding import bind
from gpuwatch.tui.layout import TWO_COLUMNS_FROM, Rect
from gpuwatch.tui.render.heat import heat_grid, heat_height, heat_lines
from gpuwatch.tui.render.rank import rank_preview
from gpuwatch.tui.render.ranks import rank_flags
from gpuwatch.tui.render.states import idle_lines
from gpuwatch.tui.render.text import heading
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.base import LIST_KEYS, FedScreen
from gpuwatch.tui.widgets.heat import HeatPane
from gpuwatch.tui.widgets.pane import LinePane, ListPane, place
from gpuwatch.tui.widgets.ranks import RanksPane

__all__ = ["RanksScreen"]

_LEAST_BELOW = 8
"""Lines under the table from which on the selected rank stands there: its phases, or most."""

_SHORT = 30
"""Below this height the heat map is one line; `h` has it on the whole screen."""


class RanksScreen(FedScreen):
    """Who is slow, and in what."""

    BINDINGS: ClassVar[list[BindingType]] = [*LIST_KEYS, *bind("previous", "next", "stacks")]
    AUTO_FOCUS = "#ranks"
    VIEW = "ranks"
    LIST = "ranks"
    HERE = ("down", "up", "first", "last", "open", "filter", "sort", "stacks", "close")

    def __init__(self) -> None:
        super().__init__(id="ranks-view")
        self._heat = HeatPane(id="heat")
        self._ranks = RanksPane(id="ranks")
        self._side = LinePane(id="side")

    def bodies(self) -> Mapping[str, Widget]:
        """Heat map, table, the selected rank."""
        return {"heat": self._heat, "ranks": self._ranks, "side": self._side}

    def list_pane(self) -> Widget | None:
        """The table has the focus."""
        return self._ranks

    def draw(self, scene: Scene, room: Rect) -> None:
        """Heat map over the table; the selected rank at the right where there is room."""
        run = scene.run
        if run is None:
            place(self._heat, None)
            place(self._ranks, None)
            place(self._side, room)
            self._side.show(idle_lines(scene, room.width))
            return
        y, height = room.y, room.height
        left = room.width
        two = room.width >= TWO_COLUMNS_FROM
        if two:
            right = room.width * 42 // 100
            left = room.width - right - 2
            place(self._side, Rect(left + 2, y + 1, right, height - 1))
            self._side.show(rank_preview(scene.rank, scene, right, height - 1))
            y, height = y + 1, height - 1
        used = self._draw_heat(scene, Rect(0, y, left, height)) if len(run.ranks) > 1 else 0
        if not used:
            place(self._heat, None)
        rows = height - used
        below = 0 if two else rows - len(run.ranks) - 3
        if below >= _LEAST_BELOW:
            # The table is whole, whatever the filter leaves of it: what is free tells of one rank.
            rows -= below + 1
            place(self._side, Rect(0, y + used + rows + 1, left, below))
            self._side.show(rank_preview(scene.rank, scene, left, below))
        elif not two:
            place(self._side, None)
        place(self._ranks, Rect(0, y + used, left, rows))
        self._ranks.feed(scene, left, rows)

    def _draw_heat(self, scene: Scene, room: Rect) -> int:
        """Draw the map in the upper part of a room and return its lines, with the one below."""
        run = scene.run
        assert run is not None
        if room.height < _SHORT - 3:
            place(self._heat, Rect(room.x, room.y, room.width, 1))
            self._heat.draw_row(run, scene, room.width)
            return 1
        wanted = min(heat_height(run, room.width), max(3, room.height // 3))
        grid = heat_grid(run, room.width, wanted)
        lines = [heading("Heat map", room.width, note=scene.metric.words, right="m metric  h")]
        lines += heat_lines(
            run,
            room.width,
            wanted + 2,
            metric=scene.metric,
            gpus=scene.gpus,
            selected=None if scene.rank is None else scene.rank.rank,
            passing=frozenset(scene.order) if scene.filters.get("ranks") else None,
            grid=grid,
            flags=rank_flags(scene.findings, run.world_size),
        )
        place(self._heat, Rect(room.x, room.y, room.width, len(lines)))
        self._heat.draw_map(lines, grid, scene, 1)
        return len(lines) + 1

    def keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return the keys of the table."""
        if scene.run is None:
            return []
        return [
            ("down", "move"),
            ("open", "rank"),
            ("filter", "filter"),
            ("sort", "sort"),
            ("metric", "metric"),
            ("heat", "heat map"),
            ("stacks", "stacks"),
            ("pause", "resume" if scene.paused else "pause"),
            ("memory", "memory"),
            ("profile", "profile"),
        ]

    def on_heat_pane_chosen(self, message: HeatPane.Chosen) -> None:
        """Select the rank under the mouse."""
        self.gpuwatch.select_rank(message.rank)

    def on_list_pane_moved(self, message: ListPane.Moved) -> None:
        """Follow the selection."""
        rank = self._ranks.rank_at(message.item)
        if rank is not None:
            self.gpuwatch.select_rank(rank.rank)

    def on_list_pane_opened(self, message: ListPane.Opened) -> None:
        """Open the rank."""
        rank = self._ranks.rank_at(message.item)
        if rank is not None:
            self.gpuwatch.open_rank(rank.rank)

    def action_stacks(self) -> None:
        """Ask the selected rank where its threads stand."""
        self.gpuwatch.show_stacks()

    def action_step(self, step: int) -> None:
        """Go to the next or previous run, as on the overview."""
        self.gpuwatch.action_step(step)
