"""Turns a session into scenes: what to draw now, or that there is nothing new."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from gpuwatch.schema import GpuSample
from gpuwatch.store.packed import collect_seldom
from gpuwatch.store.session import Playback, Session
from gpuwatch.store.views import NodeView, RunView, View
from gpuwatch.tui.diagnoser import Diagnose, Diagnoser
from gpuwatch.tui.filters import filter_findings, filter_ranks
from gpuwatch.tui.job import runs_of, state_of
from gpuwatch.tui.log import FindingLog, merged
from gpuwatch.tui.metrics import OWN, next_metric
from gpuwatch.tui.past import Moment, Past, nodes_at, run_at
from gpuwatch.tui.render.ranks import rank_flags
from gpuwatch.tui.render.sensors import device_figures
from gpuwatch.tui.scene import (
    FINDING_SORTS,
    GPU_SORTS,
    RANK_SORTS,
    Replay,
    Scene,
    Summary,
    gpus_of,
    order_findings,
    order_ranks,
    run_nodes,
    summarise,
)
from gpuwatch.tui.steady import HintHold

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding, RunDiagnosis
    from gpuwatch.diagnosis.verify import CheckResult
    from gpuwatch.store.compare import Setting
    from gpuwatch.tui.checks import Checks
    from gpuwatch.tui.job import Job
    from gpuwatch.tui.sides import Compared, Recordings, Sides
    from gpuwatch.tui.tracks import Tracks
    from gpuwatch.tui.witness import Seen, Witness

__all__ = ["SNOOZE_S", "SORTS", "SPANS_S", "Watcher"]

SORTS: Mapping[str, tuple[str, ...]] = {
    "ranks": RANK_SORTS,
    "gpus": GPU_SORTS,
    "findings": FINDING_SORTS,
}
"""What each list can be sorted by."""

SPANS_S = (60.0, 120.0, 300.0, 600.0)
"""What curves may cover."""

SNOOZE_S = 600.0
"""A snoozed finding comes back after this long."""

_DIAGNOSIS_S = 1.0
_EARLY_S = 0.5
_EARLY_RANKS = 64
"""Least time between two diagnoses; the shorter one while the window of a run of few ranks fills
up: the first finding is what people wait for."""

_WINDOW_STEPS = 60
"""About what a full window holds: some of its 64 steps may be missing on a rank."""

_REPEATS = 2
"""The end of a recording is judged again: a finding opens late, and nothing comes after it."""

_AGES_S = 1.0
"""Ages on the screen advance this often when nothing else changes."""

_SENSORS_S = 1.0
"""The sampler's own beat: mean figures of devices need not be made more often."""

_LARGE = 256
_LARGE_S = 1.0
"""A run of more ranks than `_LARGE` is summed up this often only; its rows are always fresh."""

_SHARE = 0.05
_SLOWEST_S = 10.0
"""A large run is drawn less often where that would take more than this share of a core, and at
least this often. The budget is 6 %: the beat itself takes part of it."""

_KEEP_S = 1.0
"""The past is looked after this often."""

_COLLECT_S = 15.0
"""Cycles are collected this often. Where many ranks are watched Python's collector runs too seldom
for those that pages leave behind. A collection looks at all that a store and its picture hold, for
50 to 100 ms at 1,024: of more ranks than `_COLLECT_RANKS` it is made less often."""

_COLLECT_RANKS = 512

_CHECKS_S = 1.0
"""The steps after a change are compared this often with those before it."""

_COMPARED_S = 10.0
"""So long after a comparison was on the screen the steps of its sides are followed, however many
ranks they have; their windows hold about a minute more."""

_REORDER_S = 2.0
"""Ranks change places at most this often, unless their number or trouble changes."""


def _severity(finding: Finding) -> int:
    """Return how severe a finding is, as a number that grows with it."""
    order = ("note", "warning", "critical")
    return order.index(finding.severity) if finding.severity in order else 0


_NO_RUN = RunView(
    run="",
    name="",
    state="running",
    world_size=1,
    ranks=(),
    nodes=(),
    steps=0,
    window=0,
    step_ms=None,
    samples_per_s=None,
    loss=None,
    epoch=None,
    total_steps=None,
    started_s=0.0,
    age_s=0.0,
    lost=0,
    dropped=0,
    simulated=False,
)
"""Stands for no run where the past of devices is kept."""


class Watcher:
    """Holds what outlives one drawing: chosen run, selected rank, orders, filters, pause, past.

    `clock` is a monotonic clock in seconds, `cpu` the seconds of CPU that the drawing thread has
    used. `poll` is called at the drawing rate; it never blocks as long as the session keeps its
    word. Of a run that is too large for the rate it takes fewer pictures than it is asked for.
    """

    def __init__(
        self,
        session: Session,
        diagnose: Diagnose,
        *,
        hz: float = 4.0,
        run: str | None = None,
        notices: Sequence[str] = (),
        recordings: Recordings | None = None,
        job: Job | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._session = session
        self._diagnoser = Diagnoser(diagnose)
        self._hz = hz
        self._clock = clock
        self._cpu = cpu
        self._cpu_s: float | None = None
        self._cost_s = 0.0
        self._viewed_at = clock()
        self._notices = tuple(notices)
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
        self._past = Past()
        self._log = FindingLog()
        self._hints = HintHold()
        self._results: Mapping[str, RunDiagnosis] = {}
        self._filters: dict[str, str] = {}
        self._sorts: dict[str, str] = {}
        self._metric = OWN.name
        self._span_s = SPANS_S[1]
        self._cursor_s: float | None = None
        self._snoozed: dict[tuple[str, str], tuple[float, int]] = {}
        self._selected_gpu: dict[str, str] = {}
        self._kept_at = -_KEEP_S
        self._collected_at = clock()
        self._back: tuple[Moment, RunView, RunView, tuple[NodeView, ...]] | None = None
        self._recordings = recordings
        self._job = job
        self._job_told: tuple[int | None, str, str] = (None, "", "")
        self._tracks: Tracks | None = None
        self._checks: Checks | None = None
        self._witness: Witness | None = None
        self._quiet_runs: set[str] = set()
        self._sides: Sides | None = None
        self._sides_rounds = 0
        self._checked_at = -_CHECKS_S
        self._compared_at = -_COMPARED_S
        self._completed: list[CheckResult] = []
        self._version: int | None = None
        self._rounds = 0
        self._view = View(version=-1, at_s=0.0)
        self._views = 0
        self._seldom = False
        self._taken_at = clock()
        self._drawn_at = 0.0
        self._diagnosed_at = -_DIAGNOSIS_S
        self._diagnosed = -1
        self._repeats = 0
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
        began_s = self._cpu()
        self._end_picture(began_s, by_key=force)
        resting = self._must_rest(now)
        if resting and not force:
            return None
        if self._sides is not None and self._sides.rounds != self._sides_rounds:
            # A recording has been read: what waits for it is drawn, also in a pause.
            self._sides_rounds, force = self._sides.rounds, True
        if self._job is not None:
            told = (self._job.exit_code, self._job.lost, self._job.stopping)
            force = force or told != self._job_told
            self._job_told = told
        if self._paused:
            if now - self._kept_at >= _KEEP_S:
                # The picture stands still; what happens meanwhile must be there afterwards.
                newest = self._session.view()
                self._track(newest)
                self._see_changes(newest)
                self._keep(newest, now)
            if not force:
                return None
        else:
            version = self._session.version
            aged = now - self._drawn_at >= _AGES_S
            if not resting and (version != self._version or aged):
                self._take(version, now)
                self._cpu_s = began_s
            elif not force and self._diagnoser.rounds == self._rounds:
                return None
            self._diagnose(now)
            self._settle()
            self._see_changes(self._view)
            self._check(now)
            if now - self._kept_at >= _KEEP_S:
                self._keep(self._view, now)
        self._drawn_at = now
        old, self._scene = self._scene, self._compose(now)
        ranks = len(self._scene.run.ranks) if self._scene.run is not None else 0
        if now - self._collected_at >= _COLLECT_S * max(1.0, ranks / _COLLECT_RANKS):
            self._collected_at = now
            gc.collect()
        if old.run is not None and len(old.run.ranks) > _LARGE:
            old.release()
        return self._scene

    def _end_picture(self, cpu_s: float, *, by_key: bool) -> None:
        """Settle what the newest view has cost: what the thread has used from taking it until now.

        That is making lines of it and painting them too, but not what keys asked for since: the
        first of them ends it. What was not painted by then costs what the view before has.
        """
        if self._cpu_s is None:
            return
        cost_s = cpu_s - self._cpu_s
        self._cost_s = max(cost_s, self._cost_s) if by_key else cost_s
        self._cpu_s = None

    def _must_rest(self, now: float) -> bool:
        """Whether the newest view has cost so much that the next one has to wait.

        What a key asks for is drawn at once all the same, from the view that is there.
        """
        run = self._scene.run
        if run is None or len(run.ranks) <= _LARGE or self._hz <= 0 or self._view.version < 0:
            return False
        rest_s = min(_SLOWEST_S, self._cost_s / _SHARE)
        return 0.0 <= now - self._viewed_at < rest_s

    def _settle(self) -> None:
        """Take over the newest diagnosis and log what it changed."""
        if self._diagnoser.rounds == self._rounds:
            return
        self._rounds = self._diagnoser.rounds
        now_s = self._clock()
        results: dict[str, RunDiagnosis] = {}
        for run, diagnosis in self._diagnoser.results.items():
            self._log.take(run, diagnosis.findings, self._view.at_s)
            held = self._hints.take(run, diagnosis.findings, now_s)
            results[run] = replace(diagnosis, findings=held)
        self._results = results

    def _track(self, view: View) -> None:
        """Take the steps that are new. What it takes is loaded when there are some."""
        if not any(run.window for run in view.runs):
            return
        if self._tracks is None:
            from gpuwatch.tui.tracks import Tracks

            self._tracks = Tracks()
        replayed = self.replayed
        wanted: set[str] = set()
        if self._checks:
            wanted |= {run.run for run in view.runs}
        if self._sides is not None and self._clock() - self._compared_at < _COMPARED_S:
            wanted |= self._sides.runs
            wanted |= {run.run for run in (self._scene.run,) if run is not None}
        self._tracks.take(view.runs, wanted, 0 if replayed is None else replayed.seeks)

    def _see_changes(self, view: View) -> None:
        """Begin to check what anybody has set in a running training, for its finding."""
        if self._witness is None:
            if not any(rank.commands for run in view.runs for rank in run.ranks):
                self._quiet_runs = {run.run for run in view.runs}
                return
            from gpuwatch.tui.witness import Witness

            self._witness = Witness(self._quiet_runs)
        for run in view.runs:
            diagnosis = self._results.get(run.run)
            for seen in self._witness.take(run, diagnosis.findings if diagnosis else ()):
                self._begin_seen(seen, run, view)

    def _begin_seen(self, seen: Seen, run: RunView, view: View) -> None:
        checks = self._known_checks()
        finding, setting = seen.finding, seen.setting
        if self._tracks is None or checks.is_set(finding, setting):
            return  # it was set here, and its check goes on
        fresh = not checks.holds(finding)
        if fresh and not checks.toggle(
            finding, run, view.runs, self._tracks, view.at_s, seen.until
        ):
            return
        checks.changed(finding, setting, seen.step, run if seen.late else None)
        self._checked_at = -_CHECKS_S

    def _known_checks(self) -> Checks:
        if self._checks is None:
            from gpuwatch.tui.checks import Checks

            self._checks = Checks()
        return self._checks

    def _check(self, now: float) -> None:
        if not self._checks or self._tracks is None or now - self._checked_at < _CHECKS_S:
            return
        self._checked_at = now
        self._completed += self._checks.refresh(self._view.runs, self._tracks)

    def _keep(self, view: View, now: float) -> None:
        self._kept_at = now
        if all(run.state == "ended" for run in view.runs):
            # The devices of a machine without a run have curves too.
            cards = {gpu.uuid: gpu for node in view.nodes for gpu in node.gpus}
            if cards:
                self._past.keep(_NO_RUN, cards, (), view.at_s)
        for run in view.runs:
            if run.state == "ended":
                continue
            gpus = {gpu.uuid: gpu for node in run_nodes(view, run) for gpu in node.gpus}
            diagnosis = self._results.get(run.run)
            self._past.keep(run, gpus, diagnosis.findings if diagnosis else (), view.at_s)

    def report(self) -> list[str]:
        """Return the card of the command's run as it is now, empty where there is none."""
        if self._job is None:
            return []
        return self._job.report(self._session.view(), self._results)

    # --- what the person chooses ---------------------------------------------------------------

    @property
    def replayed(self) -> Playback | None:
        """The controls of a recording, None where the session is live."""
        if hasattr(self._session, "seek"):
            return cast("Playback", self._session)
        return None

    @property
    def session(self) -> Session:
        """Where the pictures come from."""
        return self._session

    def seconds(self) -> float:
        """Return the time by the clock of all that is drawn, for what ages on the screen."""
        return self._clock()

    @property
    def newest(self) -> View:
        """The newest view, also while the picture stands still."""
        return self._session.view() if self._paused else self._view

    def toggle_pause(self) -> None:
        """Freeze the picture, or let it go on from now."""
        replayed = self.replayed
        if replayed is not None:
            replayed.paused = not replayed.paused
            return
        self._paused = not self._paused
        self._cursor_s = None
        self._back = None

    def move_in_time(self, seconds: float) -> bool:
        """Go back (negative) or forward; a live picture is paused by it. False: nothing there."""
        replayed = self.replayed
        if replayed is not None:
            replayed.seek(min(replayed.duration, max(0.0, replayed.position + seconds)))
            return True
        run = self._scene.run
        moments = self._past.moments(run.run) if run is not None else ()
        if run is None or not moments or (seconds > 0 and self._cursor_s is None):
            return False
        end_s = self._view.at_s
        shown_s = end_s if self._cursor_s is None else self._cursor_s
        if seconds < 0 and moments[0].at_s >= shown_s:
            return False
        # At least one moment: a large run is kept less often than once a second.
        least = self._past.interval_s(len(run.ranks))
        step = max(abs(seconds), least) * (1 if seconds > 0 else -1)
        target = shown_s + step
        self._paused = True
        self._cursor_s = None if target >= end_s else max(moments[0].at_s, target)
        return True

    def go_to_time(self, at_s: float) -> bool:
        """Show the moment nearest to a wall-clock time; False where it is not kept.

        A replay goes there itself, and stands.
        """
        run = self._scene.run
        replayed = self.replayed
        if replayed is not None:
            position_s = replayed.position + at_s - self._view.at_s
            if not -1.0 <= position_s <= replayed.duration:
                return False
            replayed.paused = True
            replayed.seek(max(0.0, position_s))
            return True
        moments = self._past.moments(run.run) if run is not None else ()
        if not moments or at_s < moments[0].at_s - 1.0:
            return False
        if at_s >= self._view.at_s:
            return False
        self._paused = True
        self._cursor_s = max(moments[0].at_s, at_s)
        while self._view.at_s - at_s > self._span_s and self._span_s < SPANS_S[-1]:
            self.zoom(1)
        return True

    def zoom(self, step: int) -> None:
        """Let curves cover more (1) or less (-1) time."""
        place = SPANS_S.index(self._span_s) + step
        self._span_s = SPANS_S[max(0, min(len(SPANS_S) - 1, place))]

    def set_filter(self, name: str, words: str) -> None:
        """Filter a list (ranks, gpus, findings); empty for all of it."""
        self._filters[name] = words.strip()

    def next_sort(self, name: str) -> str:
        """Sort a list by the next thing and return its name."""
        known = SORTS[name]
        sort = known[(known.index(self._sorts.get(name, known[0])) + 1) % len(known)]
        self._sorts[name] = sort
        self._orders.clear()
        return sort

    def next_metric(self, step: int = 1) -> str:
        """Let the heat map show the next metric that is known, and return its name."""
        scene = self._scene
        if scene.run is not None:
            ranks = scene.run.ranks
            gpus = [scene.gpu(rank) for rank in ranks]
            self._metric = next_metric(self._metric, ranks, gpus, step)
        return self._metric

    def set_metric(self, name: str) -> None:
        """Let the heat map show that metric."""
        self._metric = name

    def snooze(self, finding: Finding) -> bool:
        """Put a finding aside for a while, or take it back; returns whether it is aside now.

        It comes back by itself when it becomes more severe.
        """
        if self._scene.run is None:
            return False
        key = (self._scene.run.run, finding.id)
        if finding.id in self._scene.snoozed:
            del self._snoozed[key]
            return False
        self._snoozed[key] = (self._clock() + SNOOZE_S, _severity(finding))
        return True

    def hold_hints(self, finding: Finding, seconds: float) -> None:
        """Let the hints of a finding stand as they are for so long: one of them was copied."""
        self._hints.hold(finding, self._clock() + seconds)

    def _aside(self, run: str, found: Sequence[Finding], now: float) -> frozenset[str]:
        aside = set()
        for item in found:
            until_s, severity = self._snoozed.get((run, item.id), (0.0, 0))
            if until_s > now and _severity(item) <= severity:
                aside.add(item.id)
        return frozenset(aside)

    # --- before and after ----------------------------------------------------------------------

    def verify(self, finding: Finding) -> tuple[bool | None, str]:
        """Freeze the window of a finding to check a change against it, or let it go.

        Returns whether it is frozen now, None where it cannot be, and why.
        """
        run = self._view.run(finding.run) or self._scene.run
        if self._cursor_s is not None:
            return None, "this is the past; space goes on from now, v freezes what is then"
        steady = run is not None and any(rank.window for rank in run.ranks)
        if run is None or not steady or self._tracks is None:
            return None, "there is no window of steady steps to freeze yet"
        view = self._view
        frozen = self._known_checks().toggle(finding, run, view.runs, self._tracks, view.at_s)
        if frozen is None:
            return None, "the window has too few steady steps to compare with"
        self._checked_at = -_CHECKS_S
        self._check(self._clock())
        return frozen, ""

    def begin_check(self, finding: Finding) -> tuple[bool, str]:
        """Freeze the window of a finding unless it is: whether it was, and why it cannot be."""
        if self._checks is not None and self._checks.holds(finding):
            return False, ""
        frozen, problem = self.verify(finding)
        return frozen is True, problem

    def changed_live(
        self, finding: Finding, setting: Setting, step: int, *, next_epoch: bool
    ) -> None:
        """Tell that a knob was set, in the running training, for a finding that is checked."""
        if self._checks is not None:
            run = self._view.run(finding.run) if next_epoch else None
            self._checks.changed(finding, setting, step, run)
            self._checked_at = -_CHECKS_S

    def drop_check(self, finding: Finding) -> None:
        """Let the window of a finding go."""
        if self._checks is not None:
            self._checks.drop(finding)

    def take_completed(self) -> list[CheckResult]:
        """Return the checks that were completed since this was asked last."""
        completed, self._completed = self._completed, []
        return completed

    @property
    def sides(self) -> Sides:
        """The choice of what is compared."""
        if self._sides is None:
            from gpuwatch.tui.sides import Sides

            self._sides = Sides(self._recordings)
        return self._sides

    def compared(self) -> Compared:
        """Return how the two chosen sides compare, by what is on the screen."""
        self._compared_at = self._clock()
        if self._tracks is None:
            from gpuwatch.tui.tracks import Tracks

            self._tracks = Tracks()
        return self.sides.compared(
            self._view.runs,
            self._pick(self._view),
            self._tracks,
            self._clock(),
            replayed=self.replayed is not None,
            nodes=self._view.nodes,
            checked=self._checks.newest if self._checks is not None else None,
        )

    # -------------------------------------------------------------------------------------------

    def select_gpu(self, uuid: str) -> None:
        """Select a device of the run on the screen, or of this machine."""
        run = self._scene.run
        self._selected_gpu[run.run if run is not None else ""] = uuid

    def choose_run(self, run: str) -> None:
        """Show the run of that id."""
        self._chosen = run
        self._cursor_s = None

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
        self.choose_run(runs[(place + step) % len(runs)].run)
        return True

    def close(self) -> None:
        """Let go of the diagnosis thread, without waiting."""
        self._diagnoser.close()

    def _take(self, version: int, now: float) -> None:
        view = self._session.view()
        if self._notices:
            view = replace(view, notices=(*self._notices, *view.notices))
        # A session may hand out the same picture again: then its ages are as old as the picture.
        if view is not self._view and view.at_s != self._view.at_s:
            self._taken_at = now
        if not self._seldom and any(len(run.ranks) > _LARGE for run in view.runs):
            self._seldom = True
            collect_seldom()
        # Views are counted, not kept: of a large run one takes megabytes.
        self._views += view is not self._view
        self._viewed_at = now
        self._view = view
        self._version = version
        self._track(view)

    def _diagnose(self, now: float) -> None:
        if not self._view.runs or now - self._diagnosed_at < self._pause_s():
            return
        if self._diagnosed != self._views:
            self._repeats = 0
        elif self._view.link != "replay" or self._repeats >= _REPEATS:
            return
        else:
            self._repeats += 1
        self._diagnosed_at = now
        self._diagnosed = self._views
        self._diagnoser.submit(self._view)

    def _pause_s(self) -> float:
        """Return the least time between two diagnoses of what is there now."""
        early = self._view.link == "live" and any(
            run.state == "running"
            and 0 < run.window < _WINDOW_STEPS
            and len(run.ranks) <= _EARLY_RANKS
            for run in self._view.runs
        )
        return _EARLY_S if early else _DIAGNOSIS_S

    def _pick(self, view: View) -> RunView | None:
        """Return the chosen run, else the newest that is not over, else the newest.

        A command is waited for: until its run is there no other one is shown in its place. Of the
        trainings of one command (`RUN`, `RUN.2`, ...) it is the newest that is not over.
        """
        if self._chosen is not None:
            for run in view.runs:
                if self._chosen in (run.run, run.name):
                    return run
        elif self._job is not None and self._job.run:
            mine = runs_of(view, self._job.run)
            return next((run for run in mine if run.state != "ended"), mine[0] if mine else None)
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
        self,
        run: RunView,
        states: tuple[tuple[str, int], ...],
        gpus: Mapping[str, GpuSample],
        now: float,
    ) -> tuple[int, ...]:
        previous = self._orders.get(run.run, ())
        settled = len(previous) == len(run.ranks) and self._troubles.get(run.run) == states
        if settled and now - self._ordered_at < _REORDER_S:
            return previous
        order = order_ranks(run, previous, self._sorts.get("ranks", RANK_SORTS[0]), gpus)
        self._orders[run.run] = order
        self._troubles[run.run] = states
        self._ordered_at = now
        return order

    def _replay(self) -> Replay | None:
        replayed = self.replayed
        if replayed is None:
            return None
        return Replay(replayed.position, replayed.duration, replayed.paused)

    def _found(
        self, run: RunView, moment: Moment | None, now: float
    ) -> tuple[tuple[Finding, ...], RunDiagnosis | None, frozenset[str]]:
        """Return the findings to show, in their order, the diagnosis, and which are aside."""
        diagnosis = self._results.get(run.run)
        found = diagnosis.findings if diagnosis is not None else ()
        if moment is not None:
            found = moment.findings
        aside = self._aside(run.run, found, now)
        found = filter_findings(self._filters.get("findings", ""), found)
        sort = self._sorts.get("findings", FINDING_SORTS[0])
        findings = order_findings(found, self._finding_orders.get(run.run, ()), sort, aside)
        self._finding_orders[run.run] = tuple(
            item.id or f"{item.kind}/{i}" for i, item in enumerate(findings)
        )
        return findings, diagnosis, aside

    def _end_s(self, view: View, run: RunView | None, since_s: float) -> float:
        """Return where time axes end: now, or where the run has ended."""
        if run is not None and run.state == "ended":
            moments = self._past.moments(run.run)
            seconds = [rank.timeline[-1].second_s + 1.0 for rank in run.ranks if rank.timeline]
            known = [*seconds, *([moments[-1].at_s] if moments else [])]
            if known:
                return max(known)
        return view.at_s + since_s

    def _then(
        self, run: RunView, nodes: tuple[NodeView, ...], moment: Moment
    ) -> tuple[RunView, tuple[NodeView, ...]]:
        """Return run and nodes as they were; made once a moment, for they stand still."""
        if self._back is None or self._back[0] is not moment or self._back[1] is not run:
            self._back = (moment, run, run_at(run, moment), nodes_at(nodes, moment))
        return self._back[2], self._back[3]

    def _compose(self, now: float) -> Scene:
        view = self._view
        run = self._pick(view)
        since_s = 0.0 if view.link == "replay" or self._paused else max(0.0, now - self._taken_at)
        nodes = run_nodes(view, run)
        moment: Moment | None = None
        if run is not None and self._cursor_s is not None:
            moment = self._past.at(run.run, self._cursor_s)
        if run is not None and moment is not None:
            run, nodes = self._then(run, nodes, moment)
        gpus = {gpu.uuid: gpu for node in nodes for gpu in node.gpus}
        base = Scene(
            view,
            since_s=since_s,
            paused=self._paused,
            hz=self._hz,
            nodes=nodes,
            gpus=gpus,
            filters=dict(self._filters),
            sorts=dict(self._sorts),
            metric_name=self._metric,
            past=self._past,
            cursor_s=None if moment is None else moment.at_s,
            end_s=self._end_s(view, run, since_s),
            span_s=self._span_s,
            replay=self._replay(),
            events=merged(view, self._log, None if run is None else run.run),
            selected_gpu=self._selected_gpu.get(run.run if run is not None else "", ""),
            checks=self._checks.results if self._checks is not None else (),
            job=None if self._job is None else state_of(self._job),
        )
        if run is None:
            return base
        if moment is not None:
            self._summary = None
        summary = self._summarise(run, now)
        findings, diagnosis, aside = self._found(run, moment, now)
        order = self._order(run, tuple(sorted(summary.states.items())), gpus, now)
        words = self._filters.get("ranks", "")
        if words:
            passing = set(
                filter_ranks(words, run.ranks, rank_flags(findings, run.world_size, every=True))
            )
            order = tuple([i for i in order if i in passing])
        return replace(
            base,
            run=run,
            summary=summary,
            order=order,
            selected=self._selected.get(run.run),
            findings=findings,
            abstained=diagnosis.abstained if diagnosis is not None else (),
            diagnosed=diagnosis is not None,
            diagnosis_error=self._diagnoser.error,
            devices=self._device_figures(nodes, run, now),
            snoozed=aside,
        )
