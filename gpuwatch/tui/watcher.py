"""Turns a session into scenes: what to draw now, or that there is nothing new."""

import time
from collections.abc import Callable, Sequence

from gpuwatch.store.session import Session
from gpuwatch.store.views import NodeView, RunView, View
from gpuwatch.tui.diagnoser import Diagnose, Diagnoser
from gpuwatch.tui.render.sensors import device_figures
from gpuwatch.tui.scene import (
    Scene,
    Summary,
    gpus_of,
    order_findings,
    order_ranks,
    run_nodes,
    summarise,
)

__all__ = ["Watcher"]

_DIAGNOSIS_S = 1.0
"""Least time between two diagnoses."""

_AGES_S = 1.0
"""Ages on the screen advance this often when nothing else changes."""

_SENSORS_S = 1.0
"""The sampler's own beat: mean figures of devices need not be made more often."""

_LARGE = 256
_LARGE_S = 1.0
"""A run of more ranks than `_LARGE` is summed up this often only; its rows are always fresh."""

_REORDER_S = 2.0
"""Ranks change places at most this often, unless their number or trouble changes."""


class Watcher:
    """Holds what outlives one drawing: chosen run, selected rank, orders, pause.

    `clock` is a monotonic clock in seconds. `poll` is called at the drawing rate; it never blocks
    as long as the session keeps its word.
    """

    def __init__(
        self,
        session: Session,
        diagnose: Diagnose,
        *,
        hz: float = 4.0,
        run: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._diagnoser = Diagnoser(diagnose)
        self._hz = hz
        self._clock = clock
        self._chosen = run
        self._selected: dict[str, int] = {}
        self._orders: dict[str, tuple[int, ...]] = {}
        self._troubles: dict[str, tuple[tuple[str, int], ...]] = {}
        self._ordered_at = -_REORDER_S
        self._finding_orders: dict[str, tuple[str, ...]] = {}
        self._summary: tuple[str, int, Summary] | None = None
        self._summary_at = 0.0
        self._devices: tuple[str, tuple[tuple[str, str], ...]] = ("", ())
        self._devices_at = -_SENSORS_S
        self._paused = False
        self._version: int | None = None
        self._rounds = 0
        self._view = View(version=-1, at_s=0.0)
        self._taken_at = clock()
        self._drawn_at = 0.0
        self._diagnosed_at = -_DIAGNOSIS_S
        self._diagnosed_view: View | None = None
        self._scene = Scene(self._view, hz=hz)

    @property
    def scene(self) -> Scene:
        """The scene that `poll` made last."""
        return self._scene

    @property
    def diagnoses(self) -> int:
        """How many diagnoses have ended."""
        return self._diagnoser.rounds

    def poll(self, *, force: bool = False) -> Scene | None:
        """Return the scene to draw, or None where the one on the screen is still right."""
        now = self._clock()
        if self._paused:
            if not force:
                return None
        else:
            version = self._session.version
            aged = now - self._drawn_at >= _AGES_S
            if version != self._version or aged:
                self._take(version, now)
            elif not force and self._diagnoser.rounds == self._rounds:
                return None
            self._diagnose(now)
        self._rounds = self._diagnoser.rounds
        self._drawn_at = now
        self._scene = self._compose(now)
        return self._scene

    def toggle_pause(self) -> None:
        """Freeze the picture, or let it go on."""
        self._paused = not self._paused

    def select_rank(self, rank: int) -> None:
        """Select a rank of the run on the screen."""
        if self._scene.run is not None:
            self._selected[self._scene.run.run] = rank

    def switch_run(self, step: int) -> bool:
        """Go to the next (1) or previous (-1) run; False where there is no other."""
        runs = self._view.runs
        if len(runs) < 2:
            return False
        current = self._scene.run.run if self._scene.run is not None else None
        place = next((i for i, run in enumerate(runs) if run.run == current), 0)
        self._chosen = runs[(place + step) % len(runs)].run
        return True

    def close(self) -> None:
        """Let go of the diagnosis thread, without waiting."""
        self._diagnoser.close()

    def _take(self, version: int, now: float) -> None:
        view = self._session.view()
        # A session may hand out the same picture again: then its ages are as old as the picture.
        if view is not self._view and view.at_s != self._view.at_s:
            self._taken_at = now
        self._view = view
        self._version = version

    def _diagnose(self, now: float) -> None:
        if now - self._diagnosed_at < _DIAGNOSIS_S or self._view is self._diagnosed_view:
            return
        if not self._view.runs:
            return
        self._diagnosed_at = now
        self._diagnosed_view = self._view
        self._diagnoser.submit(self._view)

    def _pick(self, view: View) -> RunView | None:
        """Return the chosen run, else the newest that is not over, else the newest."""
        if self._chosen is not None:
            for run in view.runs:
                if self._chosen in (run.run, run.name):
                    return run
        for run in view.runs:
            if run.state != "ended":
                return run
        return view.runs[0] if view.runs else None

    def _summarise(self, run: RunView, now: float) -> Summary:
        number = len(run.ranks)
        if self._summary is not None and number > _LARGE and now - self._summary_at < _LARGE_S:
            of_run, of_number, summary = self._summary
            if (of_run, of_number) == (run.run, number):
                return summary
        summary = summarise(run)
        self._summary = (run.run, number, summary)
        self._summary_at = now
        return summary

    def _device_figures(
        self, nodes: Sequence[NodeView], run: RunView, now: float
    ) -> tuple[tuple[str, str], ...]:
        of_run, figures = self._devices
        if of_run != run.run or now - self._devices_at >= _SENSORS_S:
            figures = tuple(device_figures(gpus_of(nodes, run)))
            self._devices = (run.run, figures)
            self._devices_at = now
        return figures

    def _order(
        self, run: RunView, states: tuple[tuple[str, int], ...], now: float
    ) -> tuple[int, ...]:
        previous = self._orders.get(run.run, ())
        settled = len(previous) == len(run.ranks) and self._troubles.get(run.run) == states
        if settled and now - self._ordered_at < _REORDER_S:
            return previous
        order = order_ranks(run, previous)
        self._orders[run.run] = order
        self._troubles[run.run] = states
        self._ordered_at = now
        return order

    def _compose(self, now: float) -> Scene:
        view = self._view
        run = self._pick(view)
        since_s = 0.0 if view.link == "replay" else max(0.0, now - self._taken_at)
        nodes = run_nodes(view, run)
        if run is None:
            return Scene(view, since_s=since_s, paused=self._paused, hz=self._hz, nodes=nodes)
        summary = self._summarise(run, now)
        diagnosis = self._diagnoser.results.get(run.run)
        findings = order_findings(
            diagnosis.findings if diagnosis is not None else (),
            self._finding_orders.get(run.run, ()),
        )
        self._finding_orders[run.run] = tuple(
            item.id or f"{item.kind}/{i}" for i, item in enumerate(findings)
        )
        return Scene(
            view,
            run=run,
            summary=summary,
            order=self._order(run, tuple(sorted(summary.states.items())), now),
            selected=self._selected.get(run.run),
            findings=findings,
            abstained=diagnosis.abstained if diagnosis is not None else (),
            diagnosed=diagnosis is not None,
            diagnosis_error=self._diagnoser.error,
            since_s=since_s,
            paused=self._paused,
            hz=self._hz,
            nodes=nodes,
            devices=self._device_figures(nodes, run, now),
        )
