"""All runs, to go to another."""

from collections.abc import Mapping
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from gpuwatch.store.views import RunView
from gpuwatch.tui.binding import bind
from gpuwatch.tui.layout import Rect
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.text import Line, fit, heading, pad, rpad
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.base import FedScreen
from gpuwatch.tui.widgets.pane import ListPane, place

__all__ = ["RunsScreen", "run_row"]


_WIDE = 96
"""From this width on there is room for the age beside a name that can be read."""


def run_row(run: RunView, width: int, *, selected: bool, shown: bool, since_s: float) -> Line:
    """Return a run in one line: name, state, size, step, how long a step takes, its age."""
    mark = "▌" if selected else " "
    ended = run.state == "ended"
    wide = width >= _WIDE
    line: Line = [(mark, "focus"), ("◉ " if shown else "  ", "accent")]
    line.append(
        (
            pad(run.name or run.run, max(16, width - (71 if wide else 63))),
            "dim" if ended else "strong",
        )
    )
    line.append((f" {pad(run.state, 9)}", "dim" if ended else "ok"))
    ranks = f"{run.world_size:,} rank{'s' if run.world_size != 1 else ''}"
    line.append((rpad(ranks, 13), "text"))
    line.append((rpad(f"step {run.steps:,}", 16), "text"))
    line.append((rpad(numbers.duration(run.step_ms), 10), "text"))
    if wide:
        line.append((rpad(numbers.age(run.age_s + since_s), 8), "dim"))
    if run.simulated:
        line.append(("  SIMULATED", "warning"))
    return fit(line, width)


class _RunsPane(ListPane):
    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.scene: Scene | None = None
        self.cells = 0

    def draw(self, selected: int) -> None:
        """Make the lines with that run selected."""
        scene = self.scene
        if scene is None:
            return
        runs = scene.view.runs
        shown = scene.run.run if scene.run is not None else ""
        width = self.cells

        def row(index: int) -> Line:
            run = runs[index]
            return run_row(
                run,
                width,
                selected=index == selected,
                shown=run.run == shown,
                since_s=scene.since_s,
            )

        title = heading("Runs", width, note="newest first", right=f"{len(runs)}", focused=True)
        self.show([title], row, range(len(runs)), len(runs), selected)


class RunsScreen(FedScreen):
    """Enter goes to a run."""

    BINDINGS: ClassVar[list[BindingType]] = [*bind("close"), Binding("o", "back", show=False)]
    AUTO_FOCUS = "#runs"
    HEADER = 1
    HERE = ("close", "down", "up", "open")

    def __init__(self) -> None:
        super().__init__()
        self._runs = _RunsPane(id="runs")
        self._placed = False

    def bodies(self) -> Mapping[str, Widget]:
        """The list alone."""
        return {"runs": self._runs}

    def list_pane(self) -> Widget | None:
        """The list has the focus."""
        return self._runs

    def draw(self, scene: Scene, room: Rect) -> None:
        """Draw the list."""
        place(self._runs, Rect(room.x, room.y + 1, room.width, room.height - 1))
        self._runs.scene, self._runs.cells = scene, room.width
        selected = self._runs.selected
        if not self._placed and scene.run is not None:
            self._placed = True
            runs = [run.run for run in scene.view.runs]
            selected = runs.index(scene.run.run) if scene.run.run in runs else 0
        self._runs.draw(selected)

    def keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return the keys of the list."""
        return [("down", "move"), ("open", "go to")]

    def on_list_pane_opened(self, message: ListPane.Opened) -> None:
        """Go to the run."""
        if self._scene is not None and message.item < len(self._scene.view.runs):
            self.gpuwatch.watcher.choose_run(self._scene.view.runs[message.item].run)
            self.dismiss(None)
