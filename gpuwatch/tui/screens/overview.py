"""The first screen: where a step goes, what was found, ranks, machine, and what happened."""

from collections.abc import Mapping
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import DescendantBlur, DescendantFocus
from textual.widget import Widget

from gpuwatch.store.views import NodeView, RunView
from gpuwatch.tui.binding import bind
from gpuwatch.tui.layout import CURVES_FROM, Content, Plan, Rect, plan, side_width
from gpuwatch.tui.metrics import Metric
from gpuwatch.tui.render.heat import heat_grid, heat_height, heat_lines
from gpuwatch.tui.render.ranks import rank_flags
from gpuwatch.tui.render.sensors import host_row, node_heading, node_lines
from gpuwatch.tui.render.states import idle_lines
from gpuwatch.tui.render.steps import step_lines
from gpuwatch.tui.render.text import Line, heading
from gpuwatch.tui.render.timeline import event_lines, second_under, timeline_lines, timeline_row
from gpuwatch.tui.scene import Scene, Summary
from gpuwatch.tui.screens.base import LIST_KEYS, ActsOnFinding
from gpuwatch.tui.widgets.findings import FindingsPane
from gpuwatch.tui.widgets.heat import HeatPane
from gpuwatch.tui.widgets.pane import LinePane, ListPane, place
from gpuwatch.tui.widgets.ranks import RanksPane

__all__ = ["Overview"]

_HeatKey = tuple[
    Summary | None, Rect | None, bool, str, int | None, tuple[int, ...], Mapping[int, str]
]


class Overview(ActsOnFinding):
    """Everything about one run at a glance."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *LIST_KEYS,
        *bind("focus-next", "stacks", "copy", "copy-markdown", "snooze", "verify", "apply"),
        Binding("shift+tab", "other_list", show=False),
    ]
    VIEW = "overview"
    LIST = "ranks"
    HERE = (
        "down",
        "up",
        "first",
        "last",
        "open",
        "focus-next",
        "filter",
        "sort",
        "copy",
        "copy-markdown",
        "snooze",
        "verify",
        "apply",
        "stacks",
        "previous",
        "next",
    )

    def __init__(self) -> None:
        super().__init__(id="overview")
        self._message = LinePane(id="message")
        self._steps = LinePane(id="steps")
        self._findings = FindingsPane(id="findings")
        self._ranks = RanksPane(id="ranks")
        self._heat = HeatPane(id="heat")
        self._machine = LinePane(id="machine")
        self._timeline = LinePane(id="timeline")
        self._events = LinePane(id="events")
        self._panes: dict[str, Widget] = {
            "message": self._message,
            "steps": self._steps,
            "findings": self._findings,
            "ranks": self._ranks,
            "heat": self._heat,
            "machine": self._machine,
            "timeline": self._timeline,
            "events": self._events,
        }
        self._plan = Plan()
        self._chosen = False
        self._here_key: tuple[str, str, tuple[int, ...]] = ("", "", ())
        self._here: tuple[int, ...] = ()
        self._heat_wish: tuple[tuple[str, int, int, int], int] = (("", 0, 0, 0), 0)
        self._heat_drawn: _HeatKey = (None, None, False, "", None, (), {})
        self._most: tuple[str, int] = ("", 0)

    def bodies(self) -> Mapping[str, Widget]:
        """All panes; the layout shows and hides them."""
        return self._panes

    def list_pane(self) -> Widget | None:
        """Findings or ranks, whichever the person was in last."""
        if self._scene is None:
            return None
        target: Widget = self._findings if self._scene.findings else self._ranks
        if self._chosen and self._last is not None:
            target = self._last
        return target if target.display else None

    _last: Widget | None = None

    def draw(self, scene: Scene, room: Rect) -> None:
        """Lay out and draw; the layout counts header and footer in."""
        width, height = self.app.size
        self._lay_out(plan(width, height, self._content(scene)))
        self._draw(scene)
        self._settle_focus(scene)

    def _settle_focus(self, scene: Scene) -> None:
        """Focus findings if there are any, else ranks, until the person chose."""
        if self._chosen or (self._prompt is not None and self._prompt.has_focus):
            return
        target: Widget = self._findings if scene.findings else self._ranks
        if not target.has_focus and target.display:
            target.focus(scroll_visible=False)

    def _content(self, scene: Scene) -> Content:
        width = self.app.size.width
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
            heat=2 + min(12, self._heat_height(run, side_width(width))),
            machine=min(9, here) + max(1, gpus) + self._disks(node),
        )

    @staticmethod
    def _disks(node: NodeView | None) -> int:
        """Return the lines for pressure and disks that would be of use."""
        if node is None or node.host is None:
            return 0
        pressed = any(name.startswith("psi_") for name in node.host.readings)
        return pressed + min(2, len(node.host.io))

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
        width = self.app.size.width
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
                self._timeline.show([timeline_row(scene.rank, scene, rect.width)])
            else:
                self._timeline.show(self._time_lines(scene, rect))
        if (rect := rects.get("events")) is not None:
            self._events.show(event_lines(scene, rect.width, rect.height, compact=compact))

    def _time_lines(self, scene: Scene, rect: Rect) -> list[Line]:
        """Return the step over time; where there is room, what the device did beside it."""
        rank = scene.rank
        if rank is None or rect.height < CURVES_FROM:
            return timeline_lines(rank, scene, rect.width, rect.height)
        from gpuwatch.tui.render.charts import rank_series, time_charts

        title = heading("Time", rect.width, note=f"rank {rank.rank}", right="+ - zoom")
        charts = time_charts(scene, rank_series(scene, rank), rect.width, rect.height - 1)
        return [title, *charts]

    def _draw_heat(self, scene: Scene, rect: Rect, compact: bool) -> None:
        run, summary = scene.run, scene.summary
        selected = None if scene.rank is None else scene.rank.rank
        shown = scene.order if scene.filters.get("ranks") else ()
        flags = rank_flags(scene.findings, run.world_size) if run is not None else {}
        key = (summary, rect, compact, scene.metric_name, selected, shown, flags)
        # The summary of a large run is older than its rows; while it is the same, so is this.
        if run is None or summary is None or self._same_heat(key):
            return
        self._heat_drawn = key
        metric: Metric = scene.metric
        if compact:
            self._heat.draw_row(run, scene, rect.width)
            return
        lines: list[Line] = [
            heading("Heat map", rect.width, note=f"{metric.label} by rank", right="m metric  h")
        ]
        grid = heat_grid(run, rect.width, max(1, rect.height - 2))
        lines += heat_lines(
            run,
            rect.width,
            rect.height - 1,
            metric=metric,
            gpus=scene.gpus,
            selected=selected,
            passing=frozenset(shown) if scene.filters.get("ranks") else None,
            grid=grid,
            flags=flags,
        )
        self._heat.draw_map(lines, grid, scene, 1)

    def _same_heat(self, key: _HeatKey) -> bool:
        old = self._heat_drawn
        return old[0] is key[0] and old[1:] == key[1:]

    def _machine_lines(self, scene: Scene, rect: Rect, compact: bool) -> list[Line]:
        node = self._node(scene)
        run = scene.run
        ranks = [run.ranks[i] for i in self._ranks_on(scene, node)] if run is not None else []
        number = len(scene.nodes)
        if compact:
            lines = [host_row(node, number, rect.width)]
        else:
            simulated = run is not None and run.simulated
            past = scene.cursor_s is not None
            lines = [node_heading(node, number, scene.since_s, rect.width, simulated, past)]
        return [*lines, *node_lines(node, ranks, rect.width, compact=compact)][: rect.height]

    def keys(self, scene: Scene) -> list[tuple[str, str]]:
        """Return the keys that work on the list that has the focus."""
        if scene.run is None:
            return [("runs", "runs")] if scene.view.runs else []
        keys = [("pause", "resume"), ("back", "time")] if scene.paused else []
        keys.append(("down", "move"))
        found = self._findings.has_focus
        if found and scene.findings:
            keys += [("open", "evidence"), ("copy", "copy hint")]
        elif self._ranks.has_focus:
            keys.append(("open", "rank"))
        keys.append(("focus-next", "ranks" if found else "findings"))
        if not scene.paused:
            keys.append(("pause", "pause"))
        if len(scene.view.runs) > 1:
            keys.append(("runs", "runs"))
        keys.append(("filter", "filter"))
        if len(scene.run.ranks) > 1:
            keys.append(("metric", "metric"))
        return [*keys, ("events", "events"), ("write", "write")]

    def action_other_list(self) -> None:
        """Move the focus between findings and ranks."""
        self._chosen = True
        target: Widget = self._ranks if self._findings.has_focus else self._findings
        if target.display:
            target.focus()

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        """Name the keys that work now."""
        if event.widget in (self._findings, self._ranks):
            self._last = event.widget
        self.draw_footer()

    def on_descendant_blur(self, _: DescendantBlur) -> None:
        """Name the keys that work now."""
        self.draw_footer()

    async def on_line_pane_clicked(self, message: LinePane.Clicked) -> None:
        """Go to the second of the sparkline that was clicked; curves are those of every screen."""
        rect = self._plan.rects.get("timeline")
        if message.pane is not self._timeline or self._scene is None or rect is None:
            return
        compact = self._plan.compact
        if compact or (rect.height < CURVES_FROM and message.y > 0):
            rank = self._scene.rank
            self.show_moment(second_under(rank, rect.width, message.x, row=compact))

    def on_heat_pane_chosen(self, message: HeatPane.Chosen) -> None:
        """Select the rank under the mouse."""
        self.gpuwatch.select_rank(message.rank)

    def on_list_pane_moved(self, message: ListPane.Moved) -> None:
        """Follow the selected rank with bars, machine and timeline."""
        self._chosen = True
        if message.pane is self._ranks:
            rank = self._ranks.rank_at(message.item)
            if rank is not None:
                self.gpuwatch.select_rank(rank.rank)

    def on_list_pane_opened(self, message: ListPane.Opened) -> None:
        """Open the evidence of a finding, or a rank."""
        if message.pane is self._findings:
            self._with_finding(self.gpuwatch.open_finding)
            return
        rank = self._ranks.rank_at(message.item)
        if rank is not None:
            self.gpuwatch.open_rank(rank.rank)

    def action_stacks(self) -> None:
        """Ask the selected rank where its threads stand."""
        self.gpuwatch.show_stacks()
