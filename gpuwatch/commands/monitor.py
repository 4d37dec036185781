"""The screen: `gpuwatch` without a command."""

import os
import sys
import threading
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuwatch.store.session import Session
    from gpuwatch.tui import GpuwatchApp
    from gpuwatch.tui.diagnoser import Diagnose
    from gpuwatch.tui.job import Job

__all__ = ["can_draw", "watch_screen"]


def can_draw() -> str:
    """Return why no screen can be drawn here, empty if it can."""
    if not sys.stdin.isatty() or not sys.stdout.isatty() or not sys.stderr.isatty():
        return "this is no terminal"
    if os.environ.get("TERM", "dumb") in {"", "dumb"}:
        return f"the terminal type {os.environ.get('TERM', '')!r} cannot be drawn on"
    return ""


def watch_screen(
    *,
    hz: float,
    run: str | None = None,
    session: "Session | None" = None,
    diagnose: "Diagnose | None" = None,
    seconds: float | None = None,
    recordings: "Sequence[str]" = (),
    job: "Job | None" = None,
    on_left: "Callable[[GpuwatchApp], None] | None" = None,
) -> int:
    """Open the screen and stay until it is left, or for `seconds`; returns the exit code.

    `recordings` are paths that were given for comparing; the first two are A and B. Where no
    screen can be drawn the picture is printed as text instead. `job` is a command that was started
    for the screen; `on_left` is called when it has been left, while its session is still open.

    Raises:
        GpuwatchError: this machine cannot be watched; the screen has been left.
    """
    why_not = can_draw()
    if why_not:
        from gpuwatch.commands.status import show_status
        from gpuwatch.commands.target import Targets

        click.echo(f"gpuwatch: {why_not}, so here is one picture as text", err=True)
        show_status(Targets.run(run), as_json=False)
        return 0
    from gpuwatch.commands.compare import RecordingShelf
    from gpuwatch.commands.deferred import DeferredEngine, DeferredSession
    from gpuwatch.tui import GpuwatchApp

    deferred = DeferredSession() if session is None else None

    def leave() -> None:
        app.call_from_thread(app.exit)

    def painted() -> None:
        if deferred is not None:
            deferred.start(leave)

    shown = session if session is not None else deferred
    assert shown is not None
    judge = diagnose or DeferredEngine(shown.send)
    shelf = RecordingShelf(recordings)
    app = GpuwatchApp(
        shown, judge, hz=hz, run=run, on_first_paint=painted, recordings=shelf, job=job
    )
    if seconds is not None:
        timer = threading.Timer(seconds, leave)
        timer.daemon = True
        timer.start()
    try:
        app.run()
        if on_left is not None:
            on_left(app)
    finally:
        if deferred is not None:
            deferred.close()
    if deferred is not None and deferred.error is not None:
        raise deferred.error
    return app.return_code or 0
