"""One device in detail."""

from typing import ClassVar

from textual.binding import BindingType

from gpuwatch.tui.binding import bind
from gpuwatch.tui.render.gpus import gpu_page
from gpuwatch.tui.render.text import Line, fit, heading
from gpuwatch.tui.scene import Scene, gpu_rows
from gpuwatch.tui.screens.reading import ReadingScreen

__all__ = ["GpuScreen"]


class GpuScreen(ReadingScreen):
    """The selected device; `[` and `]` go through the table."""

    BINDINGS: ClassVar[list[BindingType]] = bind("close", "previous", "next")
    HERE = (*ReadingScreen.HERE, "previous", "next")

    def page(self, scene: Scene, width: int) -> list[Line]:
        """Return the page of the selected device."""
        rows = gpu_rows(scene)
        for node, gpu, rank in rows:
            if gpu.uuid == scene.selected_gpu:
                return gpu_page(node, gpu, rank, scene, width)
        if rows:
            return gpu_page(*rows[0], scene, width)
        return [heading("GPU", width), fit([(" no device passes the filter", "dim")], width)]

    def more_keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return what can be done here."""
        keys = [("back", "time"), ("zoom-out", "zoom")]
        return [("next", "other GPU"), *keys]

    def action_step(self, step: int) -> None:
        """Go to the next or previous device of the table."""
        scene = self._scene
        uuids = [gpu.uuid for _, gpu, _ in gpu_rows(scene)] if scene is not None else []
        if scene is None or not uuids:
            return
        place = uuids.index(scene.selected_gpu) if scene.selected_gpu in uuids else 0
        self.to_top()
        self.gpuwatch.watcher.select_gpu(uuids[(place + step) % len(uuids)])
        self.gpuwatch.refresh_scene(force=True)
