"""`gpuwatch attach`: runs on other machines, on one screen."""

import json
from typing import TYPE_CHECKING

import click

from gpuwatch.commands.target import job_key, key_option

if TYPE_CHECKING:
    from gpuwatch.commands.remote import RemoteSession

__all__ = ["attach"]


@click.command()
@click.argument("targets", nargs=-1)
@click.option(
    "--via",
    "via",
    multiple=True,
    metavar="CMD",
    help="A command that runs another over there, such as 'kubectl exec -i POD --'. Repeatable.",
)
@click.option(
    "--remote-command",
    default="gpuwatch",
    show_default=True,
    metavar="CMD",
    help="gpuwatch over there, where it is not on the PATH.",
)
@key_option
@click.option("--json", "as_json", is_flag=True, help="Print one picture as JSON and exit.")
@click.option(
    "--hz",
    type=click.FloatRange(1, 10),
    default=4.0,
    show_default=True,
    help="How often the screen is drawn.",
)
@click.pass_context
def attach(
    ctx: click.Context,
    targets: tuple[str, ...],
    via: tuple[str, ...],
    remote_command: str,
    key: str | None,
    as_json: bool,
    hz: float,
) -> None:
    """Watch runs on other machines.

    A TARGET is ssh://[user@]host[:port][/run], with your ssh configuration, keys and jump hosts:
    nothing listens, it is a command and its pipe. Or tcp://host:port[/run] with --key, where
    gpuwatch agent --listen or gpuwatch run --listen has opened a door; or local, for this machine
    beside others; or, alone, a run on this machine, its id or name.

    Ranks with one run id are one job, wherever they are. A connection that is lost comes back by
    itself.
    """
    from gpuwatch.commands.monitor import can_draw
    from gpuwatch.commands.remote import is_remote, open_session

    if not targets and not via:
        raise click.UsageError("name a target: ssh://host, or --via 'CMD --'")
    if len(targets) == 1 and not via and not is_remote(targets[0]):
        ctx.exit(_show_run(targets[0], as_json=as_json, hz=hz))
    why_not = "" if as_json else can_draw()
    session, run = open_session(targets, via=via, program=remote_command, key=job_key(targets, key))
    try:
        if as_json or why_not:
            if why_not:
                click.echo(f"gpuwatch: {why_not}, so here is one picture as text", err=True)
            _show_once(session, run, as_json=as_json)
        else:
            from gpuwatch.commands.monitor import watch_screen

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
            show_status(run.run, as_json=as_json)
            return 0
        return watch_screen(hz=hz, run=run.run, session=session)
    finally:
        session.close()


def _show_once(session: "RemoteSession", target: str | None, *, as_json: bool) -> None:
    from dataclasses import replace

    from gpuwatch.commands.session import pick_run
    from gpuwatch.commands.shapes import status_document
    from gpuwatch.commands.text import status_lines
    from gpuwatch.errors import TargetError

    view = session.settled_view()
    troubled = [f"{p.target.label}: {p.trouble}" for p in session.pipes if p.trouble]
    if target is not None:
        run, _ = pick_run(view, target)
        if run is None:
            raise TargetError(f"no run {target!r} there; leave it out to see those there are")
        view = replace(view, runs=(run,))
    if as_json:
        click.echo(json.dumps(status_document(view), allow_nan=False))
    else:
        lines = status_lines(replace(view, notices=view.notices[len(troubled) :]))
        if not view.runs:
            lines[0] = "no run of yours there"
        click.echo("\n".join(lines))
    for sentence in troubled:
        click.echo(f"gpuwatch: {sentence}", err=True)
