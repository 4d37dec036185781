"""The memory of a rank: asked of the rank itself, which answers in a hang too."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import BindingType

from gpuwatch.tui.answers import AnswerError, MemoryAnswer, read_memory
from gpuwatch.tui.binding import bind
from gpuwatch.tui.render.memory import memory_lines, memory_markdown, waiting_lines
from gpuwatch.tui.render.text import Line
from gpuwatch.tui.requests import SLOW_S, Answer, Request, pending_text
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.asking import AskingScreen

__all__ = ["MemoryScreen"]


class MemoryScreen(AskingScreen):
    """Asks once on opening; `M` asks again, with the last answer left standing until then."""

    BINDINGS: ClassVar[list[BindingType]] = bind("close", "memory", "tensors", "copy-markdown")
    HERE = (*AskingScreen.HERE, "memory", "tensors", "copy-markdown")

    def __init__(self, run: str, rank: int) -> None:
        super().__init__(run, rank)
        self._request: Request | None = None
        self._answer: MemoryAnswer | None = None
        self._answered_at = 0.0
        self._error = ""

    def on_mount(self) -> None:
        """Ask."""
        self.action_memory()

    def action_memory(self) -> None:
        """Ask the rank for its memory."""
        self._ask({})

    def action_tensors(self) -> None:
        """Ask for its tensors too."""
        self._ask({"tensors": True})

    def _ask(self, args: dict[str, str | int | float | bool]) -> None:
        self._error = ""
        watcher = self.gpuwatch.watcher
        request = Request("memory", self._run, (self._rank,), args, clock=watcher.seconds)
        request.send(watcher.session, watcher.newest)
        self._request = request
        self._read(request)
        self.gpuwatch.refresh_scene(force=True)

    def moves(self) -> bool:
        """Its age runs."""
        return True

    def _read(self, request: Request) -> None:
        status = request.answers[self._rank]
        if request.error or status.status in ("error", "lost"):
            self._error = request.error or status.message or "the rank refused"
        elif status.status == "done":
            try:
                self._answer = read_memory(status.data)
                self._answered_at = self.gpuwatch.watcher.seconds()
            except AnswerError as exc:
                self._error = str(exc)

    def page(self, scene: Scene, width: int) -> list[Line]:
        """Return the answer, or what is being waited for."""
        # Of the newest view: the picture may be paused, the question is not.
        view = self.gpuwatch.watcher.newest
        request = self._request
        if request is not None and request.take(view):
            self._read(request)
        rank = self.rank_in(view)
        title = f"Memory of rank {self._rank}"
        if self._error:
            text = self.explained(self._error, rank)
            return waiting_lines(title, rank, text, width, problem=True)
        status = request.answers[self._rank] if request is not None else Answer()
        waited_s = request.waited_s if request is not None else 0.0
        if self._answer is not None and (not status.pending or waited_s < SLOW_S):
            age_s = self.gpuwatch.watcher.seconds() - self._answered_at
            node = rank.node if rank is not None else ""
            return memory_lines(self._rank, node, self._answer, age_s, width)
        text = pending_text(status, rank, waited_s, view.link)
        return waiting_lines(title, rank, text, width)

    def more_keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return what can be done here."""
        keys = [("memory", "ask again"), ("tensors", "tensors too")]
        return keys if self._answer is None else [*keys, ("copy-markdown", "copy")]

    def action_copy_markdown(self) -> None:
        """Copy the answer as Markdown."""
        if self._answer is None:
            self.gpuwatch.tell("there is no answer to copy yet", "warning")
            return
        rank = self.rank_in(self.gpuwatch.watcher.newest)
        node = rank.node if rank is not None else ""
        text = memory_markdown(self.run_name(), self._rank, node, self._answer)
        self.gpuwatch.copy_text(text, f"the memory of rank {self._rank} as Markdown")
