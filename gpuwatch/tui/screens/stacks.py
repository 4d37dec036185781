"""Where the threads of a rank stand: asked of the rank itself, which answers in a hang too."""

import time
from typing import ClassVar

from textual.binding import BindingType

from gpuwatch.errors import GpuwatchError
from gpuwatch.schema import Reply
from gpuwatch.tui.binding import bind
from gpuwatch.tui.render.stacks import stack_lines
from gpuwatch.tui.render.text import Line
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.reading import ReadingScreen

__all__ = ["StacksScreen"]


class StacksScreen(ReadingScreen):
    """Asks once on opening; `t` asks again."""

    BINDINGS: ClassVar[list[BindingType]] = bind("close", "stacks")
    HERE = (*ReadingScreen.HERE, "stacks")

    def __init__(self, run: str, rank: int) -> None:
        super().__init__()
        self._run = run
        self._rank = rank
        self._asked = ""
        self._asked_at = 0.0
        self._error = ""
        self._reply: Reply | None = None

    def on_mount(self) -> None:
        """Ask."""
        self.action_stacks()

    def action_stacks(self) -> None:
        """Ask the rank where its threads stand."""
        self._asked_at = time.monotonic()
        try:
            self._asked = self.gpuwatch.watcher.session.send("stack", self._run, self._rank)
            self._error = ""
        except GpuwatchError as exc:
            self._error = str(exc)
        self.gpuwatch.refresh_scene(force=True)

    def page(self, scene: Scene, width: int) -> list[Line]:
        """Return the answer, or what is being waited for."""
        # Of the newest view: the picture may be paused, the question is not.
        run = self.gpuwatch.watcher.session.view().run(self._run)
        rank = next((r for r in run.ranks if r.rank == self._rank), None) if run else None
        for reply in rank.replies if rank is not None else ():
            if reply.id == self._asked and reply.status != "accepted":
                self._reply = reply
        waited_s = time.monotonic() - self._asked_at
        answered = self._reply if self._reply is not None else None
        return stack_lines(self._rank, rank, answered, self._error, waited_s, width)

    def more_keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return what can be done here."""
        return [("stacks", "ask again")]
