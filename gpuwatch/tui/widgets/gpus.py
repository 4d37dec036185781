"""The table of devices."""

from gpuwatch.schema import GpuSample
from gpuwatch.store.views import RankView
from gpuwatch.tui.render.gpus import (
    GpuColumns,
    gpu_columns,
    gpu_header,
    gpu_label,
    gpu_row,
    gpu_sort_under,
)
from gpuwatch.tui.render.text import Line, hanging, heading
from gpuwatch.tui.scene import GPU_SORTS, Scene, gpu_rows
from gpuwatch.tui.widgets.pane import ListPane

__all__ = ["GpusPane"]


class GpusPane(ListPane):
    """Devices of the run's nodes. The selection follows the device, not the row."""

    LIST = "gpus"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._scene: Scene | None = None
        self._cells = (0, 0)
        self._columns: GpuColumns | None = None

    @property
    def _rows(self) -> list[tuple[str, GpuSample, RankView | None]]:
        """The rows of the scene; made once, and gone with it."""
        scene = self._scene
        if scene is None:
            return []
        if "gpus" not in scene.rows:
            scene.rows["gpus"] = gpu_rows(scene)
        found: list[tuple[str, GpuSample, RankView | None]] = scene.rows["gpus"]
        return found

    def at(self, item: int) -> tuple[str, GpuSample, RankView | None] | None:
        """Return node, device and rank in that row."""
        rows = self._rows
        return rows[item] if 0 <= item < len(rows) else None

    def feed(self, scene: Scene, width: int, height: int) -> None:
        """Draw the devices of a scene in a pane of that size."""
        self._scene = scene
        self._cells = (width, height)
        selected = next(
            (i for i, (_, gpu, _) in enumerate(self._rows) if gpu.uuid == scene.selected_gpu), 0
        )
        self.draw(selected)

    def draw(self, selected: int) -> None:
        """Make the lines with that row selected."""
        scene = self._scene
        if scene is None:
            return
        width, height = self._cells
        several = len(scene.nodes) > 1
        rows = self._rows
        labels = [gpu_label(node, gpu, several) for node, gpu, _ in rows]
        columns = self._columns = gpu_columns(width, labels)
        focused = self.has_focus

        def row(index: int) -> Line:
            _, gpu, rank = self._rows[index]
            return gpu_row(
                labels[index],
                gpu,
                rank,
                columns,
                selected=index == selected,
                focused=focused,
            )

        number = len(rows)
        room = max(1, height - 2)
        first = min(self.first_row, max(0, number - room))
        where = f"{number:,}"
        if number > room:
            where = f"{first + 1:,}-{min(number, first + room):,} of {number:,}"
        words = scene.filters.get("gpus", "")
        sort = scene.sorts.get("gpus", GPU_SORTS[0])
        note = f"by {sort.replace('_', ' ')}" if sort != GPU_SORTS[0] else ""
        if words:
            note = f"{note}  filter ‹{words}›".strip()
        title = heading("GPUs", width, note=note, right=where, focused=focused)
        fixed = [title, gpu_header(columns)]
        if not rows:
            why = "no device passes the filter" if words else ""
            why = why or next(
                (node.gpus_reason for node in scene.nodes if node.gpus_reason), "not reported yet"
            )
            text = why if words else f"no GPUs: {why}"
            self.show([title, *hanging([(" ", "dim")], text, "dim", width)], row, (), 0, 0)
            return
        self.show(fixed, row, range(number), number, selected)

    def sort_at(self, x: int, y: int) -> str | None:
        """Return what a column's head sorts by."""
        if self._columns is None or y != 1:
            return None
        return gpu_sort_under(self._columns, x)
