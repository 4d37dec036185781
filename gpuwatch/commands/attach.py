"""`gpuwatch attach`: runs on other machines, on one screen."""

import click

from gpuwatch.commands.target import Targets, target_options

__all__ = ["attach"]


@click.command()
@target_options
@click.option("--json", "as_json", is_flag=True, help="Print one picture as JSON and exit.")
@click.option(
    "--hz",
    type=click.FloatRange(1, 10),
    default=4.0,
    show_default=True,
    help="How often the screen is drawn.",
)
@click.pass_context
def attach(ctx: click.Context, targets: Targets, as_json: bool, hz: float) -> None:
    """Watch runs on other machines.

    A TARGET is ssh://[user@]host[:port][/run], with your ssh configuration, keys and jump hosts:
    nothing listens, it is a command and its pipe. Or tcp://host:port[/run] with --key, where
    gpuwatch agent --listen or gpuwatch run --listen has opened a door; or local, for this machine
    beside others; or, alone, a run on this machine, its id or name.

    Ranks with one run id are one job, wherever they are. A connection that is lost comes back by
    itself.
    """
    from gpuwatch.commands.monitor import can_draw
    from gpuwatch.commands.status import show_status

    if not targets.words and not targets.via:
        raise click.UsageError("name a target: ssh://host, or --via 'CMD --'")
    if not targets.elsewhere:
        ctx.exit(_show_run(targets.words[0], as_json=as_json, hz=hz))
    why_not = "" if as_json else can_draw()
    if as_json or why_not:
        if why_not:
            click.echo(f"gpuwatch: {why_not}, so here is one picture as text", err=True)
        show_status(targets, as_json=as_json)
        return
    from gpuwatch.commands.monitor import watch_screen
    from gpuwatch.commands.target import open_targets

    session, run = open_targets(targets, many_runs=True)
    try:
        ctx.exit(watch_screen(hz=hz, run=run, session=session))
    finally:
        session.close()


def _show_run(target: str, *, as_json: bool, hz: float) -> int:
    """Show a run of this machine."""
    from gpuwatch.commands.monitor import can_draw, watch_screen
    from gpuwatch.commands.session import LiveSession, pick_run
    from gpuwatch.commands.status import show_status
    from gpuwatch.errors import TargetError

    session = LiveSession()
    try:
        run, _ = pick_run(session.settled_view(), target)
        if run is None:
            raise TargetError(
                f"no run {target!r} on this machine; another machine is written ssh://{target}"
            )
        if as_json or can_draw():
            show_status(Targets.run(run.run), as_json=as_json)
            return 0
        return watch_screen(hz=hz, run=run.run, session=session)
    finally:
        session.close()
