"""`gpuwatch status`: one picture, as text or JSON."""

import json

import click

__all__ = ["show_status", "status"]


def show_status(target: str | None, *, as_json: bool) -> None:
    """Print one picture of all runs, or of the named one.

    Raises:
        TargetError: no run of that name.
    """
    from dataclasses import replace

    from gpuwatch.commands.session import LiveSession, pick_run
    from gpuwatch.commands.shapes import status_document
    from gpuwatch.commands.text import status_lines
    from gpuwatch.errors import TargetError

    session = LiveSession()
    try:
        view = session.settled_view()
    finally:
        session.close()
    if target is not None:
        run, _ = pick_run(view, target)
        if run is None:
            raise TargetError(f"no run {target!r} here; gpuwatch runs lists those there are")
        view = replace(view, runs=(run,))
    if as_json:
        click.echo(json.dumps(status_document(view), allow_nan=False))
    else:
        click.echo("\n".join(status_lines(view)))
    if view.link == "lost" and view.message:
        click.echo(f"gpuwatch: {view.message}", err=True)


@click.command()
@click.argument("target", required=False)
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def status(target: str | None, as_json: bool) -> None:
    """Print one picture of runs, ranks and host.

    TARGET is a run id, its beginning, or a run's name; without it all runs are shown.
    """
    show_status(target, as_json=as_json)
