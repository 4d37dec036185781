"""What every screen of gpuwatch has in common: header, footer, prompt, resizing, clicks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.events import Resize
from textual.geometry import Size
from textual.screen import Screen
from textual.widget import Widget

from gpuwatch.tui.binding import bind
from gpuwatch.tui.keymap import ACTIONS, VIEWS, label_of
from gpuwatch.tui.layout import Rect
from gpuwatch.tui.render.header import header_line, verdict_line
from gpuwatch.tui.render.keys import Key, footer_line, footer_spans
from gpuwatch.tui.render.states import is_too_small, too_small_lines
from gpuwatch.tui.render.text import Line, hanging
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.watcher import SORTS
from gpuwatch.tui.widgets.paint import SpanCompositor
from gpuwatch.tui.widgets.pane import LinePane, ListPane, forget_drawn, place

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding
    from gpuwatch.tui.app import GpuwatchApp
    from gpuwatch.tui.requests import Task
    from gpuwatch.tui.widgets.findings import FindingsPane
    from gpuwatch.tui.widgets.prompt import PromptPane

__all__ = ["ActsOnFinding", "FedScreen"]

_VERDICT_FROM = 24
"""Lines from which on the verdict stands over pages too."""

_WORDS_FROM = 100
"""Cells from which on every key in the footer has its words."""


class FedScreen(Screen[None]):
    """A screen that draws scenes. Only the one on top is fed: a covered one costs as much.

    Subclasses give `bodies`, `draw` and `keys`. `VIEW` is the name of a view (of `VIEWS`), empty
    for what opens over one; `LIST` the name under which its filter and sort are kept; `HERE` the
    actions that help names.
    """

    DEFAULT_CSS = "FedScreen { overflow: hidden; }"
    BINDINGS: ClassVar[list[BindingType]] = []
    AUTO_FOCUS = ""

    VIEW: ClassVar[str] = ""
    LIST: ClassVar[str] = ""
    HEADER: ClassVar[int] = 2
    """Lines of the header; where there is room it has two on every screen."""
    AIRY: ClassVar[bool] = True
    """Whether it leaves the first line of its room free where the header has but one."""
    HERE: ClassVar[tuple[str, ...]] = ()
    TYPED: ClassVar[bool] = False
    """Letters are text here: only the keys of the screen itself are named."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._compositor = SpanCompositor()
        self._header = LinePane(id="header")
        self._footer = LinePane(id="footer")
        self._prompt: PromptPane | None = None
        self._scene: Scene | None = None
        self._laid_out: Size | None = None
        self._keys: list[Key] = []
        self._footer_at: Rect | None = None

    # --- what subclasses give ------------------------------------------------------------------

    def bodies(self) -> Mapping[str, Widget]:
        """Return the panes between header and footer, by name."""
        raise NotImplementedError

    def draw(self, scene: Scene, room: Rect) -> None:
        """Place the panes in that room and draw the scene in them."""
        raise NotImplementedError

    def keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return (action, words) of the keys that work here, most useful first."""
        return []

    def moves(self) -> bool:
        """Whether it has something to draw that is in no scene."""
        return False

    def list_pane(self) -> Widget | None:
        """Return the pane that has the focus when nothing is typed."""
        return None

    def rank_meant(self, scene: Scene) -> int | None:
        """Return the rank that a question is about: the selected one, None where there is none."""
        return scene.rank.rank if scene.rank is not None else None

    def shows(self, task: Task) -> bool:
        """Whether what a task has to tell stands on the screen anyway."""
        return False

    def line(self) -> PromptPane | None:
        """Return the line that takes what is typed, None while keys are commands."""
        return self._prompt if self._prompt is not None and self._prompt.typing else None

    # --- what all of them do -------------------------------------------------------------------

    @property
    def gpuwatch(self) -> GpuwatchApp:
        """The app, as what it is."""
        return cast("GpuwatchApp", self.app)

    def compose(self) -> ComposeResult:
        """Put all panes up once; drawing places, shows and hides them."""
        yield self._header
        yield from self.bodies().values()
        yield self._footer

    def on_screen_resume(self) -> None:
        """Draw at once on coming to the top, not at the next tick."""
        pane = self.list_pane()
        if pane is not None and self.focused is None:
            pane.focus(scroll_visible=False)
        self.gpuwatch.refresh_scene(force=True)

    def on_unmount(self) -> None:
        """Leave nothing behind: pages are opened and closed for as long as the training runs."""
        forget_drawn()

    def feed(self, scene: Scene) -> None:
        """Draw that scene."""
        self._scene = scene
        self._laid_out = self.app.size
        width, height = self.app.size
        if not width or not height:
            return
        with self.app.batch_update():
            if is_too_small(width, height):
                self._footer_at = None
                for pane in (*self.bodies().values(), self._footer):
                    place(pane, None)
                if self._prompt is not None:
                    place(self._prompt, None)
                place(self._header, Rect(0, 0, width, height))
                self._header.show(too_small_lines(width, height))
                return
            rows = 2 if height >= _VERDICT_FROM else self.HEADER
            place(self._header, Rect(0, 0, width, rows))
            top = [header_line(scene, width), verdict_line(scene, width)]
            self._header.show(top[:rows])
            # The verdict takes the line that is left free above a page.
            above = self.HEADER if self.AIRY else rows
            self.draw(scene, Rect(0, above, width, height - above - 1))
            self.draw_footer()

    def _compositor_refresh(self) -> None:
        """Paint what is to be painted; not while all of it waits for the end of a change.

        Textual (8.2.8) makes the whole picture then, and throws it away. It is painted as a whole
        when the change is over.
        """
        if self.app._batch_count and not self.app.is_inline:
            self._compositor._dirty_regions.clear()
            self._dirty_widgets.clear()
            return
        super()._compositor_refresh()

    def draw_footer(self) -> None:
        """Draw the keys that work now, or what there is to be told."""
        if self._scene is None:
            return
        width, height = self.app.size
        told = self.gpuwatch.told
        if is_too_small(width, height):
            return
        if told is not None:
            # All of it, over the lines above where it is long: the next key takes it away.
            lines = hanging([(" ", told[1])], told[0], told[1], width)[: height - self.HEADER]
            self._keys = []
            self._put_footer(lines)
            return
        chosen = self.gpuwatch.key_names
        pairs = self.keys(self._scene)
        if self.VIEW and self._scene.job is not None:
            ended = self._scene.job.ended
            pairs = [("report", "report")] * ended + [("output", "output"), *pairs]
        if not self.TYPED:
            # On a narrow screen every cell is wanted, and what j/k do is known.
            narrow = width < _WORDS_FROM
            if narrow:
                known = ("move", "scroll")
                pairs = [(name, "" if words in known else words) for name, words in pairs]
            commands = ("palette", "cmd" if narrow else "commands")
            pairs = [*pairs, commands, ("help", "help"), ("quit", "quit")]
        if not self.VIEW and "close" in self.HERE:
            pairs.insert(0, ("close", "back"))
        self._keys = [(label_of(name, chosen), words, name) for name, words in pairs]
        self._put_footer([footer_line(self._keys, width, self._number())])

    def _put_footer(self, lines: list[Line]) -> None:
        """Show lines at the bottom; they cover what is there."""
        width, height = self.app.size
        rect = Rect(0, height - len(lines), width, len(lines))
        if rect != self._footer_at:
            self._footer_at = rect
            place(self._footer, rect)
        self._footer.show(lines)

    def _number(self) -> int:
        return VIEWS.index(self.VIEW) + 1 if self.VIEW else 0

    def on_resize(self, event: Resize) -> None:
        """Lay out anew for another size; Textual tells the first one several times."""
        if self._scene is not None and self.app.size != self._laid_out:
            self.feed(self._scene)
            small = is_too_small(*self.app.size)
            if self._prompt is not None and self._prompt.typing and not small:
                place(self._prompt, Rect(0, self.app.size.height - 1, self.app.size.width, 1))

    async def on_line_pane_clicked(self, message: LinePane.Clicked) -> None:
        """Do what a click on the footer names; a click on a curve goes to its moment."""
        if message.pane is not self._footer:
            if message.pane is not self._header and message.y < len(message.pane.lines):
                self.go_to_moment(message.pane.lines[message.y], message.x)
            return
        message.stop()
        if self.gpuwatch.pressed_told:
            return  # it was what stood there that was clicked, no key
        for start, end, action in footer_spans(self._keys, self.app.size.width, self._number()):
            if start <= message.x < end:
                call = ACTIONS[action].call
                method = f"action_{call.split('(')[0]}"
                for node in (self.focused, self, self.app):
                    if node is not None and hasattr(node, method):
                        await self.app.run_action(call, node)
                        return

    def go_to_moment(self, line: Line, x: int) -> None:
        """Show the moment that a cell of a line stands for, if it is one of a curve."""
        from gpuwatch.tui.render.charts import moment_under

        if self._scene is not None:
            self.show_moment(moment_under(line, self._scene, x))

    def show_moment(self, at_s: float | None) -> None:
        """Show the moment that was clicked; None where no time axis was."""
        if at_s is None:
            return
        if self.gpuwatch.watcher.go_to_time(at_s):
            self.gpuwatch.refresh_scene(force=True)
        elif self._scene is not None and at_s < self._scene.end_s - 1.0:
            self.gpuwatch.tell("nothing is kept of that moment", "warning")

    # --- filter and sort -----------------------------------------------------------------------

    async def action_filter(self) -> None:
        """Type words that filter the list."""
        from gpuwatch.tui.widgets.prompt import PromptPane

        if not self.LIST:
            return
        if self._prompt is None:
            self._prompt = PromptPane("/", "a rank, 8-15, a node, a state, F1, !not", id="prompt")
            await self.mount(self._prompt)
        place(self._prompt, Rect(0, self.app.size.height - 1, self.app.size.width, 1))
        self._prompt.open(self.gpuwatch.watcher.scene.filters.get(self.LIST, ""))
        self.set_focus(self._prompt, scroll_visible=False)

    def on_prompt_pane_changed(self, message: PromptPane.Changed) -> None:
        """Filter while it is typed."""
        self.gpuwatch.watcher.set_filter(self.LIST, message.text)
        self.gpuwatch.refresh_scene(force=True)

    def on_prompt_pane_closed(self, message: PromptPane.Closed) -> None:
        """Keep the filter, or go back to all."""
        if self._prompt is None:
            return
        place(self._prompt, None)
        self.gpuwatch.watcher.set_filter(self.LIST, message.text if message.kept else "")
        self.set_focus(self.list_pane(), scroll_visible=False)
        self.gpuwatch.refresh_scene(force=True)

    def action_sort(self) -> None:
        """Sort the list by the next thing."""
        if self.LIST:
            self._sort_list(self.LIST, "")

    def on_list_pane_head_clicked(self, message: ListPane.HeadClicked) -> None:
        """Sort by what the head of a column names."""
        self._sort_list(message.name, message.sort)

    def _sort_list(self, name: str, wanted: str) -> None:
        """Sort a list by that, or by the next thing where it is empty."""
        watcher = self.gpuwatch.watcher
        sort = watcher.next_sort(name)
        for _ in SORTS[name]:
            if wanted and sort != wanted:
                sort = watcher.next_sort(name)
        self.gpuwatch.tell(f"sorted by {sort.replace('_', ' ')}")
        self.gpuwatch.refresh_scene(force=True)

    def action_back(self) -> None:
        """Go back to the screen below; on a view take its filter away."""
        if not self.VIEW:
            self.dismiss(None)
        elif self.LIST and self.gpuwatch.watcher.scene.filters.get(self.LIST):
            self.gpuwatch.watcher.set_filter(self.LIST, "")
            self.gpuwatch.refresh_scene(force=True)


class ActsOnFinding(FedScreen):
    """A screen with a list of findings, whose selected one its keys act on."""

    _findings: FindingsPane

    def action_copy(self) -> None:
        """Copy the selected finding's first hint."""
        self._with_finding(self.gpuwatch.copy_hint)

    def action_copy_markdown(self) -> None:
        """Copy the selected finding as Markdown."""
        self._with_finding(self.gpuwatch.copy_finding)

    def action_snooze(self) -> None:
        """Put the selected finding aside, or take it back."""
        self._with_finding(self.gpuwatch.snooze)

    def action_apply(self) -> None:
        """Ask whether to set what the selected finding's hint proposes."""
        self._with_finding(self.gpuwatch.apply_hint)

    def action_verify(self) -> None:
        """Check a change against the selected finding's window, or stop checking."""
        self._with_finding(self.gpuwatch.verify)

    def _with_finding(self, call: Callable[[Finding], None]) -> None:
        # What was acted on once is what the next key means too, though its place is another.
        finding = self._findings.hold()
        if finding is not None:
            call(finding)


LIST_KEYS = bind("filter", "sort", "close")
"""Bindings of a screen with a list that can be filtered and sorted."""
