"""The live knobs of a run, a change of one, and the log of commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from gpuwatch.store.views import RunView
from gpuwatch.tui.binding import bind
from gpuwatch.tui.changes import (
    Change,
    KnobRow,
    Proposal,
    knob_rows,
    limits_text,
    parse_value,
    value_text,
    why_not_set,
)
from gpuwatch.tui.layout import Rect
from gpuwatch.tui.render.knobs import (
    change_lines,
    control_off_lines,
    knob_head,
    knob_lines,
    log_entries,
    log_lines,
    no_knobs_lines,
    proposal_lines,
)
from gpuwatch.tui.render.text import Line, fit, heading
from gpuwatch.tui.requests import Task
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.base import FedScreen
from gpuwatch.tui.screens.reading import ReadingScreen
from gpuwatch.tui.widgets.pane import ListPane, place
from gpuwatch.tui.widgets.prompt import PromptPane

__all__ = ["ChangeScreen", "KnobsScreen"]


class _KnobsPane(ListPane, inherit_bindings=False):
    """Knobs that can be selected, over the log, which cannot. Enter is left to the screen."""

    BINDINGS: ClassVar[list[BindingType]] = bind(
        "down", "up", "page-down", "page-up", "first", "last"
    )

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.run: RunView | None = None
        self.rows: tuple[KnobRow, ...] = ()
        self.cells = 0

    @property
    def row(self) -> KnobRow | None:
        """The selected knob."""
        return self.rows[self.selected] if self.selected < len(self.rows) else None

    def draw(self, selected: int) -> None:
        """Make the lines with that knob selected."""
        run, rows, width = self.run, self.rows, self.cells
        world = run.world_size if run is not None else 1
        name = (run.name or run.run) if run is not None else ""
        title = heading("Knobs", width, note=name, right=f"{len(rows)}", focused=True)
        rest = control_off_lines(rows, run, width) if rows else no_knobs_lines(run, width)
        rest.append(fit([("", "text")], width))
        rest += log_lines(log_entries(run) if run is not None else [], width)

        lines: list[Line] = []
        items: list[int] = []
        for i, row in enumerate(rows):
            part = knob_lines(row, world, width, selected=i == selected)
            lines += part
            items += [i] * len(part)
        lines += rest
        items += [-1] * len(rest)
        head = [knob_head(width)] if rows else []
        self.show([title, *head], lines.__getitem__, items, len(rows), selected)


class KnobsScreen(FedScreen):
    """Enter types another value for a knob; what every monitor has sent stands below."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bind("close", "set"),
        Binding("K", "back", show=False),
    ]
    AUTO_FOCUS = "#knobs"
    HEADER = 1
    HERE = ("close", "down", "up", "set")

    def __init__(self) -> None:
        super().__init__()
        self._list = _KnobsPane(id="knobs")
        self._row: KnobRow | None = None

    def bodies(self) -> Mapping[str, Widget]:
        """The list alone."""
        return {"knobs": self._list}

    def list_pane(self) -> Widget | None:
        """The list has the focus."""
        return self._list

    def draw(self, scene: Scene, room: Rect) -> None:
        """Draw knobs and log, of the moment that is shown."""
        place(self._list, Rect(room.x, room.y + 1, room.width, room.height - 1))
        self._list.run, self._list.cells = scene.run, room.width
        self._list.rows = knob_rows(scene.run) if scene.run is not None else ()
        self._list.draw(self._list.selected)

    def keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return the keys of the list."""
        return [("down", "move"), ("set", "set")] if self._list.rows else []

    async def on_list_pane_opened(self, message: ListPane.Opened) -> None:
        """Type another value for the knob that was clicked twice."""
        await self.action_set_knob()

    async def action_set_knob(self) -> None:
        """Type another value for the knob."""
        scene, row = self._scene, self._list.row
        if scene is None or scene.run is None or row is None:
            return
        problem = self.gpuwatch.why_frozen() or why_not_set(scene.run, row)
        if problem:
            self.gpuwatch.tell(problem, "warning", 8.0)
            return
        self._row = row
        if self._prompt is not None:
            await self._prompt.remove()
        limits = limits_text(row.knob)
        words = f"{limits}   enter goes on   esc does not" if limits else "enter goes on"
        self._prompt = PromptPane(f"{row.name} = ", words, id="prompt")
        await self.mount(self._prompt)
        place(self._prompt, Rect(0, self.app.size.height - 1, self.app.size.width, 1))
        self._prompt.open("")
        self.set_focus(self._prompt, scroll_visible=False)

    def on_prompt_pane_changed(self, message: PromptPane.Changed) -> None:
        """Nothing is done while it is typed."""
        message.stop()

    def on_prompt_pane_closed(self, message: PromptPane.Closed) -> None:
        """Ask whether to set it."""
        message.stop()
        if self._prompt is not None:
            place(self._prompt, None)
        self.set_focus(self._list, scroll_visible=False)
        scene, row = self._scene, self._row
        if not message.kept or not message.text.strip() or row is None:
            return
        if scene is None or scene.run is None:
            return
        try:
            new = parse_value(row.knob, message.text)
        except ValueError as exc:
            self.gpuwatch.tell(str(exc), "warning", 8.0)
            return
        if [value for value, _ in row.by_value()] == [new]:
            self.gpuwatch.tell(f"{row.name} is {value_text(new)} already", "warning")
            return
        run = scene.run
        everyone = set(row.ranks) == {rank.rank for rank in run.ranks}
        proposal = Proposal(run.run, run.name or run.run, row, new, everyone)
        self.app.push_screen(ChangeScreen((proposal,)))


class ChangeScreen(ReadingScreen):
    """Asks whether to change the running training; then shows how every rank stands to it.

    Of a finding the check runs along, so that predicted and actual stand on the page.
    """

    BINDINGS: ClassVar[list[BindingType]] = bind("close", "confirm", "previous", "next")
    HERE = (*ReadingScreen.HERE, "confirm", "previous", "next")

    def __init__(self, proposals: tuple[Proposal, ...]) -> None:
        super().__init__()
        self._proposals = proposals
        self._place = 0
        self._change: Change | None = None
        self._step_ms: float | None = None

    @property
    def proposal(self) -> Proposal:
        """What is asked about."""
        return self._proposals[self._place]

    def moves(self) -> bool:
        """What is waited for."""
        return self._change is not None and not self._change.finished

    def shows(self, task: Task) -> bool:
        """Whether what a task has to tell stands on the page."""
        return task is self._change

    def page(self, scene: Scene, width: int) -> list[Line]:
        """Return the question, or what came."""
        proposal = self.proposal
        view = self.gpuwatch.watcher.newest
        run = view.run(proposal.run)
        if self._change is None:
            self._step_ms = run.step_ms if run is not None else None
            others = len(self._proposals)
            return proposal_lines(proposal, run, self._step_ms, others, width)
        check = scene.check(proposal.finding) if proposal.finding is not None else None
        return change_lines(self._change, run, view.link, check, self._step_ms, width)

    def more_keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return the answers."""
        if self._change is not None:
            return []
        keys = [("confirm", "set it")]
        return [*keys, ("next", "other hint")] if len(self._proposals) > 1 else keys

    def action_step(self, step: int) -> None:
        """Go to another hint that can be set."""
        if self._change is None:
            self._place = (self._place + step) % len(self._proposals)
            self.gpuwatch.refresh_scene(force=True)

    def action_confirm(self) -> None:
        """Set it."""
        if self._change is not None:
            return
        problem = self.gpuwatch.why_frozen()
        if problem:
            self.gpuwatch.tell(problem, "warning", 8.0)
            return
        self._change = self.gpuwatch.change(self.proposal)
        self.gpuwatch.refresh_scene(force=True)
