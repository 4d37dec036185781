"""`gpuwatch runs`: what runs here."""

import json

import click

from gpuwatch.commands.target import key_option

__all__ = ["runs"]


@click.command()
@click.argument("target", required=False)
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
@key_option
def runs(target: str | None, as_json: bool, key: str | None) -> None:
    """List the runs of this user on this machine, newest first.

    TARGET is a run id, its beginning, or a run's name, for that run alone; another machine,
    ssh://[user@]host[:port], or tcp://host:port with --key, for the runs there; or a recording or a
    trace, for the runs in it.
    """
    from dataclasses import replace

    from gpuwatch.commands.shapes import SCHEMA
    from gpuwatch.commands.target import is_elsewhere, job_key, named_run, open_target
    from gpuwatch.commands.text import runs_lines
    from gpuwatch.recording.read import is_recording

    unlocking = job_key([target], key)
    if target is not None and is_recording(target):
        from gpuwatch.commands.recorded import last_view, narrate

        view, recorded = last_view(target)
        narrate(recorded)
    else:
        session, name = open_target(target, key=unlocking)
        try:
            view = session.settled_view()
        finally:
            session.close()
        if name is not None:
            run, _ = named_run(view, name, target)
            view = replace(view, runs=(run,) if run is not None else ())
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
    elif view.runs or (target is not None and is_recording(target)):
        click.echo("\n".join(runs_lines(view)))
    elif is_elsewhere(target):
        click.echo("no run of yours there", err=True)
    else:
        click.echo("no run of yours on this machine; try gpuwatch demo", err=True)
