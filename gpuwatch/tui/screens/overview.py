"""The first screen: where a step goes, what was found, ranks, machine, and what happened."""

from typing import ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import DescendantBlur, DescendantFocus, Resize
from textual.widget import Widget

from gpuwatch.store.views import NodeView, RunView
from gpuwatch.tui.layout import Content, Plan, Rect, plan, side_width
from gpuwatch.tui.render.header import header_line, verdict_line
from gpuwatch.tui.render.heat import heat_height, heat_lines, heat_row
from gpuwatch.tui.render.keys import Key, footer_line
from gpuwatch.tui.render.sensors import host_row, node_heading, node_lines
from gpuwatch.tui.render.states import idle_lines, too_small_line
from gpuwatch.tui.render.steps import step_lines
from gpuwatch.tui.render.text import Line, heading
from gpuwatch.tui.render.timeline import event_lines, timeline_lines, timeline_row
from gpuwatch.tui.scene import Scene, Summary
from gpuwatch.tui.screens.base import FedScreen
from gpuwatch.tui.widgets.findings import FindingsPane
from gpuwatch.tui.widgets.pane import LinePane, ListPane, place
from gpuwatch.tui.widgets.ranks import RanksPane

__all__ = ["Overview"]


class Overview(FedScreen):
    """Everything about one run at a glance."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "other_list", "Findings or ranks", show=False, id="focus-next"),
        Binding("shift+tab", "other_list", show=False),
    ]

    AUTO_FOCUS = ""

    def __init__(self) -> None:
        super().__init__(id="overview")
        self._header = LinePane(id="header")
        self._message = LinePane(id="message")
        self._steps = LinePane(id="steps")
        self._findings = FindingsPane(id="findings")
        self._ranks = RanksPane(id="ranks")
        self._heat = LinePane(id="heat")
        self._machine = LinePane(id="machine")
        self._timeline = LinePane(id="timeline")
        self._events = LinePane(id="events")
        self._footer = LinePane(id="footer")
        self._panes: dict[str, Widget] = {
            "header": self._header,
            "message": self._message,
            "steps": self._steps,
            "findings": self._findings,
            "ranks": self._ranks,
            "heat": self._heat,
            "machine": self._machine,
            "timeline": self._timeline,
            "events": self._events,
            "footer": self._footer,
        }
        self._plan = Plan()
        self._scene: Scene | None = None
        self._chosen = False
        self._here_key: tuple[str, str, tuple[int, ...]] = ("", "", ())
        self._here: tuple[int, ...] = ()
        self._heat_wish: tuple[tuple[str, int, int, int], int] = (("", 0, 0, 0), 0)
        self._heat_drawn: tuple[Summary | None, Rect | None, bool] = (None, None, False)
        self._most: tuple[str, int] = ("", 0)

    def compose(self) -> ComposeResult:
        """Put all panes up once; the layout shows and hides them."""
        yield from self._panes.values()

    def feed(self, scene: Scene) -> None:
        """Draw that scene."""
        self._scene = scene
        size = self.size
        if not size:
            return
        with self.app.batch_update():
            self._lay_out(plan(size.width, size.height, self._content(scene)))
            self._draw(scene)
        self._settle_focus(scene)

    def _settle_focus(self, scene: Scene) -> None:
        """Focus findings if there are any, else ranks, until the person chose."""
        if self._chosen:
            return
        target: Widget = self._findings if scene.findings else self._ranks
        if not target.has_focus and target.display:
            target.focus(scroll_visible=False)

    def on_resize(self, event: Resize) -> None:
        """Lay out anew for the new size."""
        if self._scene is not None:
            self.feed(self._scene)

    def _content(self, scene: Scene) -> Content:
        width = self.size.width
        node = self._node(scene)
        run = scene.run
        gpus = max(1, len(node.gpus)) if node is not None else 0
        if run is None:
            return Content(False, message=len(idle_lines(scene, width)), machine=gpus)
        # The list of findings may grow but never shrinks under the eye.
        found = sum(
            2 if item.hints and item.severity in ("critical", "warning") else 1
            for item in scene.open_findings
        )
        found += len(scene.findings) - len(scene.open_findings) + (1 if scene.abstained else 0)
        most = max(self._most[1], found) if self._most[0] == run.run else found
        self._most = (run.run, most)
        here = len(self._ranks_on(scene, node))
        return Content(
            True,
            ranks=len(run.ranks),
            findings=most,
            heat=1 + min(12, self._heat_height(run, side_width(width))),
            machine=min(9, here) + max(1, gpus),
        )

    def _node(self, scene: Scene) -> NodeView | None:
        rank = scene.rank
        if rank is not None:
            for node in scene.nodes:
                if node.node == rank.node:
                    return node
        return scene.nodes[0] if scene.nodes else None

    def _ranks_on(self, scene: Scene, node: NodeView | None) -> tuple[int, ...]:
        """Return the positions of the ranks on a node, in drawing order; made once an order."""
        if scene.run is None or node is None:
            return ()
        run, name, order = self._here_key
        # The watcher hands out the same order for as long as nothing changes places.
        if order is not scene.order or (run, name) != (scene.run.run, node.node):
            ranks = scene.run.ranks
            self._here_key = (scene.run.run, node.node, scene.order)
            self._here = tuple([i for i in scene.order if ranks[i].node == node.node])
        return self._here

    def _heat_height(self, run: RunView, width: int) -> int:
        key = (run.run, len(run.ranks), len(run.nodes), width)
        if self._heat_wish[0] != key:
            self._heat_wish = (key, heat_height(run, width))
        return self._heat_wish[1]

    def _lay_out(self, new: Plan) -> None:
        old, self._plan = self._plan, new
        for name, pane in self._panes.items():
            rect = new.rects.get(name)
            if rect != old.rects.get(name) or not old.rects:
                place(pane, rect)

    def _draw(self, scene: Scene) -> None:
        rects, compact = self._plan.rects, self._plan.compact
        size = self.size
        if "header" not in rects:
            self._message.show([too_small_line(size.width, size.height)])
            return
        width = size.width
        self._header.show([header_line(scene, width), verdict_line(scene, width)])
        if "message" in rects:
            self._message.show(idle_lines(scene, width))
        if "steps" in rects:
            self._steps.show(step_lines(scene, width, rects["steps"].height))
        if (rect := rects.get("findings")) is not None:
            self._findings.feed(scene, rect.width, rect.height)
        if (rect := rects.get("ranks")) is not None:
            self._ranks.feed(scene, rect.width, rect.height)
        if (rect := rects.get("heat")) is not None:
            self._draw_heat(scene, rect, compact)
        if (rect := rects.get("machine")) is not None:
            self._machine.show(self._machine_lines(scene, rect, compact))
        if (rect := rects.get("timeline")) is not None:
            if compact:
                self._timeline.show([timeline_row(scene.rank, rect.width)])
            else:
                self._timeline.show(timeline_lines(scene.rank, scene, rect.width, rect.height))
        if (rect := rects.get("events")) is not None:
            self._events.show(event_lines(scene, rect.width, rect.height, compact=compact))
        self._footer.show([footer_line(self._keys(scene), width)])

    def _draw_heat(self, scene: Scene, rect: Rect, compact: bool) -> None:
        run, summary = scene.run, scene.summary
        drawn, *where = self._heat_drawn
        # The summary of a large run is older than its rows; while it is the same, so is this.
        if run is None or summary is None or (drawn is summary and where == [rect, compact]):
            return
        self._heat_drawn = (summary, rect, compact)
        if compact:
            self._heat.show([heat_row(run, summary, rect.width)])
            return
        lines: list[Line] = [heading("Own time by rank", rect.width)]
        lines += heat_lines(run, summary, rect.width, rect.height - 1)
        self._heat.show(lines)

    def _machine_lines(self, scene: Scene, rect: Rect, compact: bool) -> list[Line]:
        node = self._node(scene)
        run = scene.run
        ranks = [run.ranks[i] for i in self._ranks_on(scene, node)] if run is not None else []
        number = len(scene.nodes)
        if compact:
            lines = [host_row(node, number, rect.width)]
        else:
            simulated = run is not None and run.simulated
            lines = [node_heading(node, number, scene.since_s, rect.width, simulated)]
        return [*lines, *node_lines(node, ranks, rect.width, compact=compact)][: rect.height]

    def _keys(self, scene: Scene) -> list[Key]:
        keys: list[Key] = []
        if scene.run is not None:
            keys.append(("j/k", "move"))
            if self._findings.has_focus and scene.findings:
                keys.append(("enter", "evidence"))
            keys.append(("tab", "ranks" if self._findings.has_focus else "findings"))
            keys.append(("space", "resume" if scene.paused else "pause"))
        if len(scene.view.runs) > 1:
            keys.append(("[ ]", "run"))
        return [*keys, ("?", "help"), ("q", "quit")]

    def action_other_list(self) -> None:
        """Move the focus between findings and ranks."""
        self._chosen = True
        target: Widget = self._ranks if self._findings.has_focus else self._findings
        if target.display:
            target.focus()

    def on_descendant_focus(self, _: DescendantFocus) -> None:
        """Name the keys that work now."""
        self._draw_footer()

    def on_descendant_blur(self, _: DescendantBlur) -> None:
        """Name the keys that work now."""
        self._draw_footer()

    def _draw_footer(self) -> None:
        if self._scene is not None and "footer" in self._plan.rects:
            self._footer.show([footer_line(self._keys(self._scene), self.size.width)])

    def on_list_pane_moved(self, message: ListPane.Moved) -> None:
        """Follow the selected rank with bars, machine and timeline."""
        from gpuwatch.tui.app import GpuwatchApp

        self._chosen = True
        if message.pane is self._ranks:
            rank = self._ranks.rank_at(message.item)
            if rank is not None:
                cast("GpuwatchApp", self.app).select_rank(rank.rank)

    def on_list_pane_opened(self, message: ListPane.Opened) -> None:
        """Open the evidence of a finding."""
        from gpuwatch.tui.screens.finding import FindingScreen

        if message.pane is self._findings and self._findings.finding is not None:
            self.app.push_screen(FindingScreen(self._findings.finding))
