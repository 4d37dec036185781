"""`gpuwatch runs`: what runs here."""

import json

import click

from gpuwatch.commands.target import Targets, target_options

__all__ = ["runs"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
@target_options
def runs(targets: Targets, as_json: bool) -> None:
    """List the runs of this user on this machine, newest first.

    A TARGET is a run id, its beginning, or a run's name, for that run alone; other machines, as for
    gpuwatch attach, for the runs there: ssh://[user@]host[:port], tcp://host:port with --key, or
    --via; or a recording or a trace, for the runs in it.
    """
    from gpuwatch.commands.shapes import SCHEMA
    from gpuwatch.commands.target import one_picture, say_troubles
    from gpuwatch.commands.text import runs_lines

    picture = one_picture(targets)
    view = picture.view
    if as_json:
        document = {
            "schema": SCHEMA,
            "runs": [
                {
                    "run": run.run,
                    "name": run.name,
                    "state": run.state,
                    "world_size": run.world_size,
                    "ranks": len(run.ranks),
                    "steps": run.steps,
                    "nodes": list(run.nodes),
                    "started_s": run.started_s,
                }
                for run in view.runs
            ],
        }
        click.echo(json.dumps(document))
    elif view.runs or picture.recorded is not None:
        click.echo("\n".join(runs_lines(view)))
    elif targets.elsewhere:
        click.echo("no run of yours there", err=True)
    else:
        click.echo("no run of yours on this machine; try gpuwatch demo", err=True)
    say_troubles(picture.troubles)
