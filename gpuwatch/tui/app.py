"""The application: one timer, one watcher, the screens."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.events import Event, Key, MouseDown
from textual.filter import Monochrome, NoColor
from textual.screen import Screen

from gpuwatch.store.session import Session
from gpuwatch.tui.binding import bind
from gpuwatch.tui.config import Config, load_config
from gpuwatch.tui.diagnoser import Diagnose
from gpuwatch.tui.hangup import HUNG_UP, TerminalWatch, has_hung_up, terminal_descriptors
from gpuwatch.tui.keymap import VIEWS, KeyNames, has_key, label_of
from gpuwatch.tui.render.states import is_too_small
from gpuwatch.tui.screens.base import FedScreen
from gpuwatch.tui.screens.overview import Overview
from gpuwatch.tui.terminal import has_few_colours, needs_ascii
from gpuwatch.tui.theme import textual_theme, use_theme
from gpuwatch.tui.watcher import Watcher
from gpuwatch.tui.widgets.pane import ascii_only, set_ascii

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding
    from gpuwatch.diagnosis.verify import CheckResult
    from gpuwatch.tui.changes import Change, Proposal
    from gpuwatch.tui.job import Job
    from gpuwatch.tui.profiling import Profile
    from gpuwatch.tui.requests import Task
    from gpuwatch.tui.sides import Recordings

__all__ = ["GpuwatchApp"]

_TOLD_S = 4.0
"""How long the footer says what a key did."""

_PROBLEM_S = 15.0
"""So long it says what is wrong with the settings; log and help keep it."""

_HELD_S = 10.0
"""A hint that was copied stays as it is for so long, the footer's word about it included."""


_KEPT_PROFILES = 16
"""Profiles that a page opens on again: the oldest goes."""

_CHANGE_S = 0.005
"""Long enough for the first layout of a view, so that it does not flicker."""


# A view is loaded and made when it is first opened: the first picture does not wait for it.
def _ranks() -> Screen[None]:
    from gpuwatch.tui.screens.ranks import RanksScreen

    return RanksScreen()


def _gpus() -> Screen[None]:
    from gpuwatch.tui.screens.gpus import GpusScreen

    return GpusScreen()


def _findings() -> Screen[None]:
    from gpuwatch.tui.screens.findings import FindingsScreen

    return FindingsScreen()


def _compare() -> Screen[None]:
    from gpuwatch.tui.screens.compare import CompareScreen

    return CompareScreen()


class GpuwatchApp(App[None]):
    """The live monitor over a session.

    `diagnose` judges the runs of a view; it is called in a thread of its own at most once a
    second and nothing waits for it. `hz` is the drawing rate, 0 for none (call `refresh_scene`).
    `run` is the id or name of the run to show, None for the newest. `on_first_paint` is called
    once when the first picture is on the screen. `config` are the person's settings, read from
    their file where they are not given. `recordings` are what view 5 may compare beside the runs.
    `job` is the command whose run is shown: its output can be opened, its end is reported, and
    leaving asks what becomes of it; the app never ends it unasked.

    The app does not close the session: who opened it does. SIGTERM, SIGHUP and SIGINT end the
    app with the terminal restored, and `return_code` 128 + the signal's number.
    """

    ENABLE_COMMAND_PALETTE = False
    MODES: ClassVar[dict[str, str | Callable[[], Screen[Any]]]] = dict(
        zip(VIEWS, (Overview, _ranks, _gpus, _findings, _compare), strict=True)
    )
    DEFAULT_MODE = VIEWS[0]
    CSS = "Screen { background: $background; color: $foreground; }"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "leave", "Quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False),
        *bind(
            *(f"view-{i}" for i in range(1, len(VIEWS) + 1)),
            "previous",
            "next",
            "pause",
            "back",
            "forward",
            "back-far",
            "forward-far",
            "zoom-in",
            "zoom-out",
            "metric",
            "heat",
            "events",
            "memory",
            "profile",
            "knobs",
            "output",
            "report",
            "runs",
            "write",
            "palette",
            "help",
            "quit",
        ),
    ]

    def __init__(
        self,
        session: Session,
        diagnose: Diagnose,
        *,
        hz: float = 4.0,
        run: str | None = None,
        on_first_paint: Callable[[], None] | None = None,
        config: Config | None = None,
        recordings: Recordings | None = None,
        job: Job | None = None,
    ) -> None:
        self._starting = True
        self._sheets_of = -1
        super().__init__()
        self.animation_level = "none"
        # Nothing here has a tooltip or a toast: two widgets less to be made for each screen.
        self._disable_tooltips = self._disable_notifications = True
        self._config = load_config() if config is None else config
        self._set_up_terminal()
        self.set_keymap(dict(self._config.keys))
        self._hz = hz
        self._watcher = Watcher(
            session,
            diagnose,
            hz=hz,
            run=run,
            recordings=recordings,
            job=job,
        )
        self._job = job
        self._reported = False
        self._on_first_paint = on_first_paint
        self._signals: list[int] = []
        self._suspended = False
        self._terminals: list[int] = []  # asked for while they are there
        self._terminal: TerminalWatch | None = None
        self._told: tuple[str, str] | None = None
        self._told_until = 0.0
        self._pressed_told = False
        self._tasks: list[Task] = []
        self._profiles: dict[tuple[str, int], Profile] = {}

    def _set_up_terminal(self) -> None:
        wanted = self._config.theme
        if not wanted:
            wanted = "ansi" if has_few_colours(self.console.color_system) else "dark"
        # Textual draws on stderr.
        encoding = getattr(sys.__stderr__, "encoding", None)
        plain = self._config.ascii
        set_ascii(needs_ascii(os.environ, encoding) if plain is None else plain)
        self._use(wanted)

    def _use(self, name: str) -> None:
        if self.no_color:
            # Of the terminal's own colours nothing is left but the default. Textual (8.2.8) has
            # made up its mind before there is a theme, for greys, which are colours too.
            name = "ansi"
            kept = [NoColor() if isinstance(item, Monochrome) else item for item in self._filters]
            self._filters = kept
        use_theme(name)
        theme = textual_theme(name)
        self.register_theme(theme)
        self.theme = theme.name

    @property
    def watcher(self) -> Watcher:
        """What decides what is drawn."""
        return self._watcher

    @property
    def key_names(self) -> KeyNames:
        """The keys that the person has chosen."""
        return self._config.keys

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the settings, a sentence each."""
        return self._config.problems

    @property
    def told(self) -> tuple[str, str] | None:
        """What the footer has to say now, with its style; None for the keys."""
        return self._told

    @property
    def pressed_told(self) -> bool:
        """Whether the footer had something to say when the mouse was pressed last."""
        return self._pressed_told

    def on_load(self) -> None:
        """Keep the collector out of the way until the first picture is up."""
        gc.disable()

    def on_mount(self) -> None:
        """Draw once, then at the drawing rate."""
        self._catch_signals()
        self._watch_terminal()
        self.app_resume_signal.subscribe(self, self._resumed)
        if self.problems:
            more = len(self.problems) - 1
            rest = f"   {label_of('events', self.key_names)} shows {more} more" if more else ""
            self.tell(f"{self.problems[0]}{rest}", "warning", _PROBLEM_S)
        self.refresh_scene()
        if self._hz > 0:
            self.set_interval(1.0 / self._hz, self.refresh_scene)
        self.call_after_refresh(self._painted)

    def on_unmount(self) -> None:
        """Let go of signals and the diagnosis thread; waits for nothing."""
        gc.enable()
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.remove_signal_handler(number)
        self._watcher.close()
        for task in (*self._tasks, *self._profiles.values()):
            task.close()

    def _painted(self) -> None:
        self._starting = False
        self.screen._css_update_count = self._css_update_count
        # What start-up built lives as long as the app: never look at it again.
        gc.freeze()
        gc.enable()
        if self._on_first_paint is not None:
            self._on_first_paint()

    def _resumed(self, _: App[Any]) -> None:
        """Paint all of it: the terminal has forgotten the picture, of which little changes."""
        self.screen.refresh()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            try:
                loop.add_signal_handler(number, self._leave_by_signal, number)
            except (ValueError, RuntimeError, NotImplementedError):
                return  # Not the main thread: signals are someone else's.
            self._signals.append(number)

        # Textual suspends and resumes inside a signal's handler. That may interrupt a write whose
        # queue is locked, and wait for this lock for ever; between two events nothing is locked.
        stop = getattr(self._driver, "_sigtstp_application", None)
        go_on = getattr(self._driver, "_sigcont_application", None)
        if stop is not None and go_on is not None:
            loop.add_signal_handler(signal.SIGTSTP, self._suspend, stop)
            loop.add_signal_handler(signal.SIGCONT, self._resume, go_on)
            self._signals += [signal.SIGTSTP, signal.SIGCONT]

    def _suspend(self, stop: Callable[[], object]) -> None:
        self._suspended = True
        stop()

    def _resume(self, go_on: Callable[[], object]) -> None:
        """Take the terminal again, once: Textual starts a thread that reads it each time.

        A terminal that goes away sends SIGCONT as well as SIGHUP. A thread that is started then
        reads the end of file for ever, and the process waits for it at its exit.
        """
        suspended, self._suspended = self._suspended, False
        if self._exit or has_hung_up(self._terminals):
            return
        if not suspended and self._driver is not None:
            self._driver.suspend_application_mode()  # stopped by SIGSTOP: that thread lives
        go_on()

    def _leave_by_signal(self, number: int) -> None:
        self.exit(return_code=128 + number)

    def _watch_terminal(self) -> None:
        if self.is_headless:
            return
        loop = asyncio.get_running_loop()

        def leave() -> None:
            self.exit(return_code=HUNG_UP)

        def gone() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(leave)
            self._discard_output()

        self._terminals = terminal_descriptors()
        self._terminal = TerminalWatch(self._terminals, gone)
        self._terminal.start()

    def _discard_output(self) -> None:
        """Take the place of the driver's writing thread, which died with the terminal.

        Its queue takes thirty pieces; after them whoever draws, or restores the terminal, waits.
        """
        writer = getattr(self._driver, "_writer_thread", None)
        if writer is None:
            return

        def discard() -> None:
            writer.join()
            while True:
                writer._queue.get()

        threading.Thread(target=discard, name="gpuwatch-discard", daemon=True).start()

    def run(self, *args: Any, **options: Any) -> None:
        """Run until it is left; see Textual's `App.run`."""
        try:
            super().run(*args, **options)
        finally:
            if self._terminal is not None:
                self._terminal.close()

    async def on_event(self, event: Event) -> None:
        """Do keys in the order in which they were pressed, however fast they came.

        Textual hands a key to what has the focus *now* and looks for its action when it has come
        back from there: what follows `/` would be lost until the line that it opens has the focus.
        """
        if isinstance(event, Key | MouseDown) and not event.is_forwarded:
            if isinstance(event, MouseDown):
                self._pressed_told = self._told is not None
            self._forget_told()
        if isinstance(event, Key) and not event.is_forwarded and event.key != "ctrl+c":
            screen = self.screen
            if is_too_small(*self.size):
                # Nothing is opened and nothing typed that cannot be seen.
                if has_key("quit", event.key, self.key_names):
                    self.action_leave()
                return
            line = screen.line() if isinstance(screen, FedScreen) else None
            if line is not None and line is not self.focused:
                line.post_message(event)
                return
            if line is None:
                # The app's own part of what Textual does, at once.
                await super(App, self).on_event(event)
                return
        await super().on_event(event)

    def refresh_scene(self, *, force: bool = False) -> None:
        """Draw what is new; `force` draws in any case."""
        if time.monotonic() >= self._told_until:
            self._forget_told()
        scene = self._watcher.poll(force=force)
        for result in self._watcher.take_completed():
            self._tell_check(result)
        if self._tasks:
            self._advance_tasks()
        if not isinstance(self.screen, FedScreen):
            return
        if scene is not None:
            self.screen.feed(scene)
        elif self.screen.moves():
            self.screen.feed(self._watcher.scene)
        self._report_end()

    def _report_end(self) -> None:
        """Open the report when the command has ended, unless the person is at something else."""
        if self._reported or self._job is None or self._watcher.scene.job is None:
            return
        if not self._watcher.scene.job.ended:
            return
        from gpuwatch.tui.screens.output import LeaveScreen, OutputScreen, ReportScreen

        self._reported = True
        if isinstance(self.screen, LeaveScreen):
            self.pop_screen()
        typing = self.focused is not None and self.focused.id == "prompt"
        if not typing and (len(self.screen_stack) == 1 or isinstance(self.screen, OutputScreen)):
            self.push_screen(ReportScreen(self._job))
        else:
            key = label_of("report", self.key_names)
            self.tell(f"the command has ended; {key} shows the report", "accent", 12.0)

    def tell(self, text: str, style: str = "ok", seconds: float = _TOLD_S) -> None:
        """Say in the footer what a key did."""
        self._told = (text, style)
        self._told_until = time.monotonic() + seconds
        if isinstance(self.screen, FedScreen):
            self.screen.draw_footer()

    def _forget_told(self) -> None:
        """Let the footer name the keys again: its time is over, or something else is done."""
        if self._told is not None:
            self._told = None
            if isinstance(self.screen, FedScreen):
                self.screen.draw_footer()

    def select_rank(self, rank: int) -> None:
        """Show that rank in bars, machine and timeline."""
        self._watcher.select_rank(rank)
        self.refresh_scene(force=True)

    def refresh_css(self, animate: bool = True) -> None:
        """Read the style sheets anew, after a change of theme.

        Textual (8.2.8) asks for it at the start and whenever a view is opened for the first time,
        twice each, though every widget has just been made from these sheets.
        """
        count = self._css_update_count
        if self._starting:
            if self._sheets_of != count:
                # Each is read once, when the first widget needs it.
                self.stylesheet.set_variables(self.get_css_variables())
                self.stylesheet._require_parse = True
        elif self._sheets_of != count or self.screen._css_update_count not in (-1, count):
            super().refresh_css(animate=animate)
        else:
            self.screen._css_update_count = count
        self._sheets_of = count

    def delay_update(self, delay: float = 0.05) -> None:
        """Hold drawing back while a view changes: a moment, not the twentieth of a second.

        Not by a timer of Textual's: one whose time is over before it sleeps never fires
        (`Timer._run` counts it as skipped). Another thread that takes the interpreter for its five
        milliseconds is enough for that, and nothing would ever be drawn again.
        """
        self._begin_batch()
        loop = asyncio.get_running_loop()
        loop.call_later(min(delay, _CHANGE_S), self.call_later, self._show_change)

    def _show_change(self) -> None:
        self._end_batch()
        if not self._batch_count:
            self.screen.refresh()

    async def run_call(self, call: str) -> None:
        """Do what an action says, on the screen on top where it knows it, else here."""
        name = call.split("(", maxsplit=1)[0]
        own = not name.startswith("app.") and hasattr(self.screen, f"action_{name}")
        await self.run_action(call.removeprefix("app."), self.screen if own else self)

    # --- screens -------------------------------------------------------------------------------

    def action_view(self, number: int) -> None:
        """Go to a view by its number; what is open over the present one is closed."""
        while len(self.screen_stack) > 1:
            self.pop_screen()
        self.switch_mode(VIEWS[number - 1])

    def open_rank(self, rank: int) -> None:
        """Open the page of a rank."""
        from gpuwatch.tui.screens.rank import RankScreen

        self._watcher.select_rank(rank)
        if isinstance(self.screen, RankScreen):
            self.refresh_scene(force=True)
        else:
            self.push_screen(RankScreen())

    def open_finding(self, finding: Finding) -> None:
        """Open the page of a finding."""
        from gpuwatch.tui.screens.finding import FindingScreen

        self.push_screen(FindingScreen(finding))

    def show_evidence(self, finding: Finding) -> None:
        """Open the first rank of a finding at the time at which it opened."""
        if finding.ranks:
            moved = finding.opened_s > 0 and self._watcher.go_to_time(finding.opened_s)
            self.open_rank(finding.ranks[0])
            if moved:
                self.tell(f"as it was when {finding.id} opened; space goes on from now", "accent")
            elif finding.opened_s > 0:
                self.tell("it opened before what is kept; this is now", "warning")
            else:
                self.tell("nobody saw it open; this is now", "warning")

    # --- commands to ranks ---------------------------------------------------------------------

    def _advance_tasks(self) -> None:
        """Take what ranks have answered to what goes on beside the page that is open."""
        view = self._watcher.newest
        for task in tuple(self._tasks):
            told = task.advance(view)
            shown = isinstance(self.screen, FedScreen) and self.screen.shows(task)
            if told is not None and not shown:
                self.tell(*told)
            if task.finished:
                self._tasks.remove(task)

    def _rank_meant(self) -> tuple[str, int] | None:
        """Return run and number of the rank that a question is about, or say that there is none."""
        scene = self._watcher.scene
        screen = self.screen
        rank = screen.rank_meant(scene) if isinstance(screen, FedScreen) else None
        if scene.run is None or rank is None:
            self.tell("there is no rank to ask", "warning")
            return None
        return scene.run.run, rank

    def action_memory(self) -> None:
        """Ask the rank for its memory."""
        from gpuwatch.tui.screens.memory import MemoryScreen

        meant = self._rank_meant()
        if meant is not None:
            self.push_screen(MemoryScreen(*meant))

    def action_profile(self) -> None:
        """Ask how many steps of the rank to profile, or show the profile that there is."""
        from gpuwatch.tui.screens.profile import ProfileScreen

        meant = self._rank_meant()
        if meant is not None:
            self.push_screen(ProfileScreen(*meant, self._profiles.get(meant)))

    def profile_rank(self, run: str, rank: int, steps: int) -> Profile:
        """Begin a profile of a rank, and follow it whatever page is open."""
        from gpuwatch.tui.profiling import Profile

        gone = [self._profiles.pop((run, rank), None)]
        while len(self._profiles) >= _KEPT_PROFILES:
            gone.append(self._profiles.pop(next(iter(self._profiles))))
        for before in gone:
            if before is not None:
                self._tasks = [task for task in self._tasks if task is not before]
                before.close()
        profile = self._profiles[run, rank] = Profile(run, rank, steps, clock=self._watcher.seconds)
        profile.start(self._watcher.session, self._watcher.newest)
        self._follow(profile)
        return profile

    def fetch_trace(self, profile: Profile, run_name: str) -> str:
        """Bring the trace of a profile here; returns why not, empty where it is under way."""
        problem = profile.bring(self._watcher.session, self._watcher.newest, run_name)
        self._follow(profile)
        return problem

    def _follow(self, task: Task) -> None:
        if not task.finished and task not in self._tasks:
            self._tasks.append(task)

    def action_knobs(self) -> None:
        """Open the knobs of the run and the log of commands."""
        from gpuwatch.tui.screens.knobs import KnobsScreen

        if not isinstance(self.screen, KnobsScreen):
            self.push_screen(KnobsScreen())

    def why_frozen(self) -> str:
        """Return one sentence on why the picture is not of now, empty where it is."""
        if self._watcher.replayed is not None:
            return "this is a recording: nothing can be set in it"
        scene = self._watcher.scene
        if scene.cursor_s is not None:
            return "this is the past: space goes on from now, then it can be set"
        return "the picture is paused: space goes on, then it can be set" if scene.paused else ""

    def can_apply(self, finding: Finding) -> bool:
        """Whether a hint of a finding can be set in the running training now."""
        return not self.why_frozen() and not self._why_not_applied(finding)

    def _why_not_applied(self, finding: Finding) -> str:
        from gpuwatch.tui.changes import why_not_applied

        run = self._watcher.newest.run(finding.run) or self._watcher.scene.run
        return "there is no run" if run is None else why_not_applied(finding, run)

    def apply_hint(self, finding: Finding) -> None:
        """Ask whether to set what a finding's hint proposes, or say why it cannot be."""
        from gpuwatch.tui.changes import proposals
        from gpuwatch.tui.screens.knobs import ChangeScreen

        problem = self.why_frozen() or self._why_not_applied(finding)
        run = self._watcher.newest.run(finding.run) or self._watcher.scene.run
        if problem or run is None:
            self.tell(problem, "warning", 8.0)
            return
        self.push_screen(ChangeScreen(proposals(finding, run)))

    def change(self, proposal: Proposal) -> Change:
        """Set a knob; of a finding freeze its window before, and check what comes of it."""
        from gpuwatch.store.compare import Setting
        from gpuwatch.tui.changes import Change

        finding = proposal.finding
        watcher = self._watcher
        fresh = False

        def begin() -> str:
            nonlocal fresh
            if finding is None:
                return ""
            fresh, problem = watcher.begin_check(finding)
            return problem

        def settled(step: int | None, next_epoch: bool) -> None:
            if finding is None:
                return
            if step is not None:
                knob = proposal.row.knob
                setting = Setting(knob.name, knob.value, proposal.new)
                watcher.changed_live(finding, setting, step, next_epoch=next_epoch)
            elif fresh:
                watcher.drop_check(finding)

        change = Change(proposal, begin=begin, settled=settled, clock=watcher.seconds)
        change.start(watcher.session, watcher.newest)
        self._tasks.append(change)
        return change

    def show_stacks(self) -> None:
        """Ask the selected rank where its threads stand."""
        from gpuwatch.tui.screens.stacks import StacksScreen

        scene = self._watcher.scene
        if scene.run is not None and scene.rank is not None:
            self.push_screen(StacksScreen(scene.run.run, scene.rank.rank))

    def action_leave(self) -> None:
        """Quit at once; nothing is joined or waited for. A command that runs is asked about."""
        job = self._watcher.scene.job
        if self._job is None or job is None or job.ended or self._job.exit_code is not None:
            self.exit()
            return
        from gpuwatch.tui.screens.output import LeaveScreen

        if not isinstance(self.screen, LeaveScreen):
            self.push_screen(LeaveScreen(self._job))

    @property
    def job(self) -> Job | None:
        """The command that the screen was opened with."""
        return self._job

    def action_output(self) -> None:
        """Open what the command prints, or close it."""
        if self._job is None:
            self.tell("there is no output here; gpuwatch run --tui -- CMD... has it", "warning")
            return
        from gpuwatch.tui.screens.output import OutputScreen

        if isinstance(self.screen, OutputScreen):
            self.screen.dismiss(None)
        else:
            self.push_screen(OutputScreen(self._job))

    def action_report(self) -> None:
        """Open how the command ended, or how it does so far."""
        if self._job is None:
            self.tell("there is no command here; gpuwatch run --tui -- CMD... has one", "warning")
            return
        from gpuwatch.tui.screens.output import ReportScreen

        if not isinstance(self.screen, ReportScreen):
            self.push_screen(ReportScreen(self._job))

    def action_help(self) -> None:
        """Open the page of keys, or close it."""
        from gpuwatch.tui.screens.help import HelpScreen

        if isinstance(self.screen, HelpScreen):
            self.screen.dismiss(None)
        else:
            self.push_screen(HelpScreen(self._here()))

    def _here(self) -> tuple[str, ...]:
        return self.screen.HERE if isinstance(self.screen, FedScreen) else ()

    def action_palette(self) -> None:
        """Open the list of commands."""
        from gpuwatch.tui.screens.palette import PaletteScreen

        if not isinstance(self.screen, PaletteScreen):
            self.push_screen(PaletteScreen(self._here()))

    def action_events(self) -> None:
        """Open the event log."""
        from gpuwatch.tui.screens.events import EventsScreen

        if not isinstance(self.screen, EventsScreen):
            self.push_screen(EventsScreen())

    def action_heat(self) -> None:
        """Open the heat map on the whole screen."""
        from gpuwatch.tui.screens.heat import HeatScreen

        if self._watcher.scene.run is not None and not isinstance(self.screen, HeatScreen):
            self.push_screen(HeatScreen())

    def action_runs(self) -> None:
        """Open the list of runs."""
        from gpuwatch.tui.screens.runs import RunsScreen

        if not self._watcher.scene.view.runs:
            self.tell("no run has been seen yet", "warning")
        elif not isinstance(self.screen, RunsScreen):
            self.push_screen(RunsScreen())

    def action_rank(self, rank: int) -> None:
        """Open a rank by its number."""
        self.open_rank(rank)

    def action_finding(self, name: str) -> None:
        """Open a finding by its id."""
        for item in self._watcher.scene.findings:
            if item.id == name:
                self.open_finding(item)
                return

    # --- time ----------------------------------------------------------------------------------

    def action_pause(self) -> None:
        """Freeze the picture or let it go on."""
        self._watcher.toggle_pause()
        self.refresh_scene(force=True)

    def action_travel(self, steps: int) -> None:
        """Go back or forward in time by seconds."""
        if self._watcher.move_in_time(float(steps)):
            self.refresh_scene(force=True)
        elif steps < 0:
            self.tell("nothing is kept of the time before", "warning")

    def action_zoom(self, step: int) -> None:
        """Let curves cover more or less time."""
        self._watcher.zoom(step)
        self.refresh_scene(force=True)

    # --- runs and metrics ----------------------------------------------------------------------

    def action_step(self, step: int) -> None:
        """Show the next or previous run."""
        if self._watcher.switch_run(step):
            self.refresh_scene(force=True)

    def action_show_run(self, place: int) -> None:
        """Show a run by its place in the list."""
        runs = self._watcher.scene.view.runs
        if 0 <= place < len(runs):
            self._watcher.choose_run(runs[place].run)
            self.refresh_scene(force=True)

    def action_metric(self, name: str = "") -> None:
        """Let the heat map show the next metric, or the named one."""
        if name:
            self._watcher.set_metric(name)
        else:
            self._watcher.next_metric()
        self.refresh_scene(force=True)
        self.tell(f"heat map: {self._watcher.scene.metric.words}")

    def action_theme(self, name: str) -> None:
        """Use a theme from now on."""
        if self.no_color:
            self.tell("NO_COLOR is set: every theme is without colours", "warning")
            return
        self._use(name)
        for screen in self.screen_stack:
            for pane in screen.query("LinePane, ListPane"):
                pane.refresh()
        self.refresh_scene(force=True)

    def action_ascii(self) -> None:
        """Draw with ASCII alone, or with all glyphs again."""
        set_ascii(not ascii_only())
        for pane in self.screen.query("LinePane, ListPane"):
            pane.refresh()

    # --- findings ------------------------------------------------------------------------------

    def copy_hint(self, finding: Finding) -> None:
        """Copy the first hint of a finding as it stands on the screen, and let it stand there."""
        from gpuwatch.tui.render.findings import hint_text

        if not finding.hints:
            self.tell(f"{finding.id} has no hint to copy", "warning")
            return
        text = hint_text(finding.hints[0], None).split(": predicted")[0]
        self._watcher.hold_hints(finding, _HELD_S)
        self.copy_text(text, text)

    def copy_finding(self, finding: Finding) -> None:
        """Copy a finding as Markdown."""
        from gpuwatch.tui.render.markdown import finding_markdown

        text = finding_markdown(finding, self._watcher.scene)
        self.copy_text(text, f"{finding.id} as Markdown")

    def copy_text(self, text: str, what: str) -> None:
        """Put text where it can be pasted from, and say where that is."""
        from gpuwatch.tui.clipboard import runs_in_tmux, to_tmux

        def copied() -> None:
            self.tell(f"copied to a buffer of tmux: {what}")

        def sent() -> None:
            # The terminal does not answer: whether it has such a clipboard is not known.
            self.copy_to_clipboard(text)
            other = label_of("write", self.key_names)
            self.tell(f"sent to the terminal's clipboard: {what}   {other} writes files", seconds=8)

        def ask_tmux() -> None:
            done = copied if to_tmux(text) else sent
            with contextlib.suppress(RuntimeError):  # the app has ended meanwhile
                self.call_from_thread(done)

        if runs_in_tmux(os.environ):
            threading.Thread(target=ask_tmux, name="gpuwatch-copy", daemon=True).start()
        else:
            sent()

    def snooze(self, finding: Finding) -> None:
        """Put a finding aside, or take it back."""
        aside = self._watcher.snooze(finding)
        self.refresh_scene(force=True)
        self.tell(f"{finding.id} is aside for ten minutes" if aside else f"{finding.id} is back")

    def verify(self, finding: Finding) -> None:
        """Freeze the window of a finding to check a change against it, or let it go."""
        frozen, problem = self._watcher.verify(finding)
        self.refresh_scene(force=True)
        if frozen is None:
            self.tell(f"{finding.id} is not checked: {problem}", "warning", 8.0)
        elif frozen:
            self.tell(f"{finding.id} is frozen; change the knob, here or in a new run", seconds=8.0)
        else:
            self.tell(f"{finding.id} is not checked any more")

    def _tell_check(self, result: CheckResult) -> None:
        from gpuwatch.tui.render.checks import promise_text

        words = result.reason or "the steps after it are all there"
        if result.promise is not None:
            words = promise_text(result.promise)
        self.tell(f"{result.check.finding.id} checked: {words}", "accent", 12.0)

    def action_write(self) -> None:
        """Write the picture as SVG and the findings as Markdown, and say where."""
        from gpuwatch.tui.export import write_files

        try:
            paths = write_files(self._watcher.scene, self.export_screenshot(title="gpuwatch"))
        except OSError as exc:
            self.tell(f"nothing written: {exc}", "critical", 8.0)
            return
        self.tell(f"written: {paths[0]} and {paths[1].name}", seconds=8.0)
