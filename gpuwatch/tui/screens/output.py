"""The command's own output, its report when it has ended, and the question on leaving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from textual.binding import BindingType
from textual.message import Message
from textual.widget import Widget

from gpuwatch.tui.binding import bind
from gpuwatch.tui.keymap import label_of
from gpuwatch.tui.layout import Rect
from gpuwatch.tui.render.output import (
    leave_lines,
    match_cells,
    output_line,
    output_title,
    report_lines,
)
from gpuwatch.tui.render.text import Line, cells
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.base import FedScreen
from gpuwatch.tui.screens.reading import ReadingScreen
from gpuwatch.tui.widgets.pane import LinePane, place
from gpuwatch.tui.widgets.prompt import PromptPane

if TYPE_CHECKING:
    from gpuwatch.tui.job import Job

__all__ = ["LeaveScreen", "OutputPane", "OutputScreen", "ReportScreen"]


class OutputPane(LinePane, can_focus=True):
    """Follows the end of the output until it is scrolled; at the end it follows again.

    Lines are not broken: a progress bar or a table would come apart. They are scrolled sideways.
    """

    class Shifted(Message):
        """The keys that work are others now."""

    BINDINGS: ClassVar[list[BindingType]] = bind(
        *("down", "up", "page-down", "page-up", "first", "last", "left", "right")
    )

    def __init__(self, job: Job, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._job = job
        self._top: int | None = None
        self._cells = (1, 1)
        self._words = ""
        self._match: int | None = None
        self._left = 0
        self._longest = 0
        self.drawn = -1

    @property
    def follows(self) -> bool:
        """Whether the end is shown, whatever comes."""
        return self._top is None

    @property
    def is_wide(self) -> bool:
        """Whether there is more of a line than the screen shows."""
        return self._left > 0 or self._longest > self._columns()

    def _columns(self) -> int:
        """Return the cells of a line that are on the screen: the first one is for marks."""
        return max(1, self._cells[0] - 1)

    def _room(self) -> int:
        return max(1, self._cells[1] - 1)

    def _start(self) -> int:
        """Return the number of the line on top."""
        ring = self._job.output
        last = max(ring.first, ring.end - self._room())
        return last if self._top is None else max(ring.first, min(self._top, last))

    def feed(self, width: int, height: int) -> None:
        """Draw what is there now in a pane of that size."""
        self._cells = (width, height)
        ring = self._job.output
        self.drawn = ring.version
        top, room = self._start(), self._room()
        lines: list[Line] = [output_title(self._job, top, room, self.follows, width)]
        shown = ring.lines(top, room)
        self._longest = max([cells(text) for text in shown], default=0)
        for i, text in enumerate(shown):
            current = self._match == top + i
            lines.append(output_line(text, self._words, width, current=current, left=self._left))
        self.show(lines)

    def _redraw(self) -> None:
        self.feed(*self._cells)

    def _go_to(self, top: int) -> None:
        ring = self._job.output
        last = max(ring.first, ring.end - self._room())
        self._top = None if top >= last else max(ring.first, top)
        self._redraw()

    def search(self, words: str) -> str:
        """Mark words and go to the last line that holds them; return what to tell of it."""
        self._words, self._match = words, None
        return self.go_on(-1)

    def go_on(self, step: int) -> str:
        """Go to the next (1) or the previous (-1) match; return what to tell of it."""
        if not self._words:
            self._redraw()
            return ""
        found = self._job.output.find(self._words)
        if not found:
            self._match = None
            self._redraw()
            return f"no line holds ‹{self._words}›"
        here = self._match
        if here is None:
            here = self._start() + (self._room() if step < 0 else -1)
        later = [line for line in found if line > here]
        earlier = [line for line in found if line < here]
        if step > 0:
            self._match = later[0] if later else found[0]
        else:
            self._match = earlier[-1] if earlier else found[-1]
        top, room = self._start(), self._room()
        if not top <= self._match < top + room:
            top = max(self._job.output.first, self._match - room // 2)
        self._top = top
        self._show_match(self._match)
        self._redraw()
        return f"‹{self._words}› {found.index(self._match) + 1:,} of {len(found):,}"

    def _show_match(self, line: int) -> None:
        """Shift the lines so that what was found is on the screen, no further than it takes."""
        found = None
        for text in self._job.output.lines(line, 1):
            found = match_cells(text, self._words)
        if found is None:
            return
        first, last = found
        # The last cell says that a line goes on.
        most = self._columns() - 1
        if last <= most:
            self._left = 0
        elif first < self._left or last > self._left + most:
            self._left = max(0, min(first, (first + last - most) // 2))

    def action_shift(self, step: int) -> None:
        """Scroll sideways by half a screen, to the end of the longest line at most."""
        most = max(self._left, self._longest - self._columns())
        self._left = max(0, min(most, self._left + step * max(1, self._columns() // 2)))
        self._redraw()
        self.post_message(self.Shifted())

    def action_move(self, step: int) -> None:
        """Scroll by lines."""
        self._go_to(self._start() + step)

    def action_page(self, pages: int) -> None:
        """Scroll by what fits on the screen."""
        self.action_move(pages * max(1, self._room() - 1))

    def action_jump(self, item: int) -> None:
        """Go to the first line that is kept (0), or to the end and follow it (-1)."""
        self._go_to(0 if item >= 0 else self._job.output.end)


class OutputScreen(FedScreen):
    """What the command prints, to be scrolled and searched."""

    BINDINGS: ClassVar[list[BindingType]] = bind("close", "search", "find", "find-back")
    AUTO_FOCUS = "#output"
    HEADER = 1
    AIRY = False
    HERE = (
        *("close", "down", "up", "page-down", "page-up", "first", "last"),
        *("search", "find", "find-back", "left", "right"),
    )

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._output = OutputPane(job, id="output")

    def bodies(self) -> Mapping[str, Widget]:
        """The output alone."""
        return {"output": self._output}

    def list_pane(self) -> Widget | None:
        """The output has the focus."""
        return self._output

    def moves(self) -> bool:
        """Whether something was printed since it was drawn."""
        return self._output.drawn != self._job.output.version

    def draw(self, scene: Scene, room: Rect) -> None:
        """Draw the part that is looked at."""
        place(self._output, Rect(room.x, room.y, room.width, room.height))
        self._output.feed(room.width, room.height)

    def keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return the keys of the output."""
        keys = [("down", "scroll"), ("search", "search"), ("find", "next, previous")]
        if self._output.is_wide:
            keys.insert(1, ("left", "sideways"))
        return [*keys, ("last", "follow")] if not self._output.follows else keys

    def on_output_pane_shifted(self, message: OutputPane.Shifted) -> None:
        """Name the keys that work now."""
        self.draw_footer()

    async def action_filter(self) -> None:
        """Type what is searched for."""
        if self._prompt is None:
            self._prompt = PromptPane("/", "part of a line; n and N go on from there", id="prompt")
            await self.mount(self._prompt)
        place(self._prompt, Rect(0, self.app.size.height - 1, self.app.size.width, 1))
        self._prompt.open()
        self.set_focus(self._prompt, scroll_visible=False)

    def on_prompt_pane_changed(self, message: PromptPane.Changed) -> None:
        """Search while it is typed."""
        self._output.search(message.text)

    def on_prompt_pane_closed(self, message: PromptPane.Closed) -> None:
        """Keep the words, or forget them."""
        if self._prompt is None:
            return
        place(self._prompt, None)
        self.set_focus(self._output, scroll_visible=False)
        self._tell(self._output.search(message.text if message.kept else ""))

    def action_step(self, step: int) -> None:
        """Go to the next or previous line that holds the words."""
        self._tell(self._output.go_on(step) or "nothing is searched for; / does")

    def _tell(self, text: str) -> None:
        if text:
            self.gpuwatch.tell(text, "warning" if text.startswith("no") else "ok")
        self.draw_footer()


class ReportScreen(ReadingScreen):
    """How the command ended."""

    BINDINGS: ClassVar[list[BindingType]] = bind("close")

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def page(self, scene: Scene, width: int) -> list[Line]:
        """Return the card of the run and the end of its output."""
        return report_lines(self._job, self.gpuwatch.watcher.report(), width)

    def more_keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return what can be looked at besides."""
        return [("output", "output"), ("write", "write")]


class LeaveScreen(ReadingScreen):
    """Asks what becomes of a command that still runs."""

    BINDINGS: ClassVar[list[BindingType]] = bind("close", "detach", "stop")
    HERE = ("close", "detach", "stop")

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def moves(self) -> bool:
        """Its seconds run."""
        return True

    def page(self, scene: Scene, width: int) -> list[Line]:
        """Return the question."""
        chosen = self.gpuwatch.key_names
        keys = (label_of("detach", chosen), label_of("stop", chosen), label_of("close", chosen))
        return leave_lines(self._job, keys, width)

    def more_keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return the answers."""
        return [("detach", "leave it running"), ("stop", "stop it")]

    def action_detach(self) -> None:
        """Leave; the command goes on."""
        self.app.exit()

    def action_stop_job(self) -> None:
        """Stop the command and wait for its end with the screen."""
        self._job.stop()
        self.gpuwatch.refresh_scene(force=True)
