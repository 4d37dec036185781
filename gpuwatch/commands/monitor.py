"""The screen: `gpuwatch` without a command."""

import os
import sys
import threading

import click

from gpuwatch.commands.session import LiveSession

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
    session: LiveSession | None = None,
    seconds: float | None = None,
) -> int:
    """Open the screen and stay until it is left, or for `seconds`; returns the exit code.

    Where no screen can be drawn the picture is printed as text instead.
    """
    why_not = can_draw()
    if why_not:
        from gpuwatch.commands.status import show_status

        click.echo(f"gpuwatch: {why_not}, so here is one picture as text", err=True)
        show_status(run, as_json=False)
        return 0
    from gpuwatch.diagnosis import Engine
    from gpuwatch.tui import GpuwatchApp

    own = session is None
    session = session or LiveSession()
    try:
        app = GpuwatchApp(session, Engine(), hz=hz, run=run)
        if seconds is not None:
            timer = threading.Timer(seconds, app.call_from_thread, [app.exit])
            timer.daemon = True
            timer.start()
        app.run()
    finally:
        if own:
            session.close()
    return app.return_code or 0
