"""View 3: the devices of the run's nodes, the selected one beside the table."""

from collections.abc import Mapping
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from gpuwatch.tui.layout import TWO_COLUMNS_FROM, Rect
from gpuwatch.tui.render.gpus import gpu_preview
from gpuwatch.tui.render.sensors import node_heading, node_lines
from gpuwatch.tui.render.text import Line, fit
from gpuwatch.tui.scene import Scene, gpu_rows
from gpuwatch.tui.screens.base import LIST_KEYS, FedScreen
from gpuwatch.tui.widgets.gpus import GpusPane
from gpuwatch.tui.widgets.pane import LinePane, ListPane, place

__all__ = ["GpusScreen"]


class GpusScreen(FedScreen):
    """What the devices do while the steps go on."""

    BINDINGS: ClassVar[list[BindingType]] = LIST_KEYS
    AUTO_FOCUS = "#gpus"
    VIEW = "gpus"
    LIST = "gpus"
    HERE = ("down", "up", "first", "last", "open", "filter", "sort", "close")

    def __init__(self) -> None:
        super().__init__(id="gpus-view")
        self._gpus = GpusPane(id="gpus")
        self._side = LinePane(id="side")

    def bodies(self) -> Mapping[str, Widget]:
        """Table and selected device."""
        return {"gpus": self._gpus, "side": self._side}

    def list_pane(self) -> Widget | None:
        """The table has the focus."""
        return self._gpus

    def draw(self, scene: Scene, room: Rect) -> None:
        """Table; the selected device at the right, or below, or one key away."""
        rows = gpu_rows(scene)
        if not rows and not scene.filters.get("gpus"):
            # Without devices the hosts are what there is to see.
            self._gpus.feed(scene, room.width, 3)
            # The reason may be long.
            used = min(max(3, len(self._gpus.fixed)), room.height // 2)
            place(self._gpus, Rect(0, room.y, room.width, used))
            place(self._side, Rect(0, room.y + used, room.width, room.height - used))
            self._side.show(self._hosts(scene, room.width)[: room.height - used])
            return
        number = len(rows) + 2
        picked = next((row for row in rows if row[1].uuid == scene.selected_gpu), None)
        picked = picked or (rows[0] if rows else None)
        if room.width >= TWO_COLUMNS_FROM and picked is not None:
            right = room.width * 44 // 100
            left = room.width - right - 2
            place(self._gpus, Rect(0, room.y + 1, left, room.height - 1))
            self._gpus.feed(scene, left, room.height - 1)
            place(self._side, Rect(left + 2, room.y + 1, right, room.height - 1))
            self._side.show(gpu_preview(*picked, scene, right, room.height - 1))
            return
        below = room.height - min(number, max(6, room.height // 2)) - 1
        if picked is None or below < 8:
            place(self._side, None)
            place(self._gpus, room)
            self._gpus.feed(scene, room.width, room.height)
            return
        top = room.height - below - 1
        place(self._gpus, Rect(0, room.y, room.width, top))
        self._gpus.feed(scene, room.width, top)
        place(self._side, Rect(0, room.y + top + 1, room.width, below))
        self._side.show(gpu_preview(*picked, scene, room.width, below))

    def _hosts(self, scene: Scene, width: int) -> list[Line]:
        lines: list[Line] = []
        ranks = scene.run.ranks if scene.run is not None else ()
        for node in scene.nodes:
            lines.append(fit([("", "text")], width))
            lines.append(
                node_heading(
                    node,
                    len(scene.nodes),
                    scene.since_s,
                    width,
                    past=scene.cursor_s is not None,
                )
            )
            here = [rank for rank in ranks if rank.node == node.node]
            lines += node_lines(node, here, width, devices=False)
        return lines

    def keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return the keys of the table."""
        if not scene.gpus:
            return [("pause", "resume" if scene.paused else "pause")]
        return [
            ("down", "move"),
            ("open", "readings"),
            ("filter", "filter"),
            ("sort", "sort"),
            ("back", "time"),
            ("zoom-out", "zoom"),
            ("pause", "resume" if scene.paused else "pause"),
        ]

    def on_list_pane_moved(self, message: ListPane.Moved) -> None:
        """Follow the selection."""
        found = self._gpus.at(message.item)
        if found is not None:
            self.gpuwatch.watcher.select_gpu(found[1].uuid)
            self.gpuwatch.refresh_scene(force=True)

    def on_list_pane_opened(self, message: ListPane.Opened) -> None:
        """Open the device."""
        from gpuwatch.tui.screens.gpu import GpuScreen

        found = self._gpus.at(message.item)
        if found is not None:
            self.gpuwatch.watcher.select_gpu(found[1].uuid)
            self.app.push_screen(GpuScreen())
