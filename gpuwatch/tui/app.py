"""The application: one timer, one watcher, the screens."""

import asyncio
import gc
import signal
from collections.abc import Callable
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.screen import Screen

from gpuwatch.store.session import Session
from gpuwatch.tui.diagnoser import Diagnose
from gpuwatch.tui.screens.base import FedScreen
from gpuwatch.tui.screens.overview import Overview
from gpuwatch.tui.theme import THEME
from gpuwatch.tui.watcher import Watcher

__all__ = ["GpuwatchApp"]


class GpuwatchApp(App[None]):
    """The live monitor over a session.

    `diagnose` judges the runs of a view; it is called in a thread of its own at most once a
    second and nothing waits for it. `hz` is the drawing rate, 0 for none (call `refresh_scene`).
    `run` is the id or name of the run to show, None for the newest. `on_first_paint` is called
    once when the first picture is on the screen.

    The app does not close the session: who opened it does. SIGTERM, SIGHUP and SIGINT end the
    app with the terminal restored, and `return_code` 128 + the signal's number.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = "Screen { background: $background; color: $foreground; }"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "leave", "Quit", show=False, priority=True, id="quit"),
        Binding("question_mark", "help", "Help", show=False, id="help"),
        Binding("space", "pause", "Pause", show=False, id="pause"),
        Binding("left_square_bracket", "run(-1)", "Previous run", show=False, id="previous-run"),
        Binding("right_square_bracket", "run(1)", "Next run", show=False, id="next-run"),
    ]

    def __init__(
        self,
        session: Session,
        diagnose: Diagnose,
        *,
        hz: float = 4.0,
        run: str | None = None,
        on_first_paint: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.animation_level = "none"
        self.register_theme(THEME)
        self.theme = THEME.name
        self._hz = hz
        self._watcher = Watcher(session, diagnose, hz=hz, run=run)
        self._on_first_paint = on_first_paint
        self._signals: list[int] = []

    @property
    def watcher(self) -> Watcher:
        """What decides what is drawn."""
        return self._watcher

    def get_default_screen(self) -> Screen[None]:
        """Start on the overview."""
        return Overview()

    def on_load(self) -> None:
        """Keep the collector out of the way until the first picture is up."""
        gc.disable()

    def on_mount(self) -> None:
        """Draw once, then at the drawing rate."""
        self._catch_signals()
        self.refresh_scene(force=True)
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

    def _painted(self) -> None:
        # What start-up built lives as long as the app: never look at it again.
        gc.freeze()
        gc.enable()
        if self._on_first_paint is not None:
            self._on_first_paint()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            try:
                loop.add_signal_handler(number, self._leave_by_signal, number)
            except (ValueError, RuntimeError, NotImplementedError):
                return  # Not the main thread: signals are someone else's.
            self._signals.append(number)

    def _leave_by_signal(self, number: int) -> None:
        self.exit(return_code=128 + number)

    def refresh_scene(self, *, force: bool = False) -> None:
        """Draw what is new; `force` draws in any case."""
        scene = self._watcher.poll(force=force)
        if scene is not None and isinstance(self.screen, FedScreen):
            self.screen.feed(scene)

    def select_rank(self, rank: int) -> None:
        """Show that rank in bars, machine and timeline."""
        self._watcher.select_rank(rank)
        self.refresh_scene(force=True)

    def action_leave(self) -> None:
        """Quit at once; nothing is joined or waited for."""
        self.exit()

    def action_help(self) -> None:
        """Open the page of keys, or close it."""
        from gpuwatch.tui.screens.help import HelpScreen

        if isinstance(self.screen, HelpScreen):
            self.screen.dismiss(None)
        else:
            self.push_screen(HelpScreen())

    def action_pause(self) -> None:
        """Freeze the picture or let it go on."""
        self._watcher.toggle_pause()
        self.refresh_scene(force=True)

    def action_run(self, step: int) -> None:
        """Show the next or previous run."""
        if self._watcher.switch_run(step):
            self.refresh_scene(force=True)
