"""`gpuwatch replay`: the screen, on a recording."""

import os

import click

__all__ = ["replay"]

_LARGE_BYTES = 1_000_000
"""Of JSON lines about two of these are read in a second."""


@click.command()
@click.argument("file", type=click.Path())
@click.argument("others", type=click.Path(), nargs=-1)
@click.option(
    "--speed",
    type=click.FloatRange(0.1, 1000.0),
    default=1.0,
    show_default=True,
    help="Seconds of the recording a second.",
)
@click.option(
    "--at", "step", type=click.IntRange(0), metavar="STEP", help="Begin where this step was made."
)
@click.option(
    "--hz",
    type=click.FloatRange(1, 10),
    default=4.0,
    show_default=True,
    help="How often the screen is drawn.",
)
@click.pass_context
def replay(
    ctx: click.Context,
    file: str,
    others: tuple[str, ...],
    speed: float,
    step: int | None,
    hz: float,
) -> None:
    """Open the screen on a recording or a trace, as if the run ran now.

    FILE is what gpuwatch record wrote, or a trace of JSON lines. With OTHERS view 5 compares FILE
    (A) with the first of them (B), and o there chooses among them all. Without a terminal the
    picture at the end, or at STEP, is printed as text.
    """
    if os.path.isfile(file) and os.path.getsize(file) >= _LARGE_BYTES:
        # Before anything is loaded, so that nobody looks at an empty terminal and wonders.
        click.echo(f"gpuwatch: reading {file}, {os.path.getsize(file) / 1e6:,.0f} MB ...", err=True)
    from gpuwatch.commands.judge import Judge
    from gpuwatch.commands.monitor import can_draw, watch_screen
    from gpuwatch.commands.recorded import narrate
    from gpuwatch.commands.text import status_lines
    from gpuwatch.errors import TargetError
    from gpuwatch.recording import Player, ReplaySession, open_recording
    from gpuwatch.recording.replay import step_s

    for other in others:
        if not os.path.isfile(other):
            raise TargetError(f"there is no file {other}")
    with open_recording(file) as recording:
        narrate(recording)
        position_s = None
        if step is not None:
            position_s = step_s(recording, step)
            if position_s is None:
                raise TargetError(f"no rank has made step {step} in {file}")
        why_not = can_draw()
        if why_not:
            click.echo(f"gpuwatch: {why_not}, so here is one picture as text", err=True)
            player = Player(recording)
            player.advance(recording.duration_s if position_s is None else position_s)
            click.echo("\n".join(status_lines(player.view())))
            return
        session = ReplaySession(recording, speed=speed, position_s=position_s or 0.0)
        try:
            shown = (file, *others)
            ctx.exit(
                watch_screen(hz=hz, session=session, diagnose=Judge(session), recordings=shown)
            )
        finally:
            session.close()
