"""`gpuwatch runs`: what runs here."""

import json

import click

__all__ = ["runs"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def runs(as_json: bool) -> None:
    """List the runs of this user on this machine, newest first."""
    from gpuwatch.commands.session import LiveSession
    from gpuwatch.commands.shapes import SCHEMA
    from gpuwatch.commands.text import runs_lines

    session = LiveSession()
    try:
        view = session.settled_view()
    finally:
        session.close()
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
    elif view.runs:
        click.echo("\n".join(runs_lines(view)))
    else:
        click.echo("no run of yours on this machine; try gpuwatch demo", err=True)
