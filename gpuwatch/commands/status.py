"""`gpuwatch status`: one picture, as text or JSON."""

import json

import click

from gpuwatch.commands.target import key_option

__all__ = ["show_status", "status"]


def show_status(
    target: str | None,
    *,
    as_json: bool,
    peak_tflops: float | None = None,
    key: str | None = None,
) -> None:
    """Print one picture of all runs, or of the named one, or the last one of a recording.

    `peak_tflops` is the dense peak of the devices, where the user knows better than the table;
    `key` the key file for a target over TCP.

    Raises:
        TargetError: no run of that name, or a recording that cannot be read.
    """
    from dataclasses import replace

    from gpuwatch.commands.shapes import status_document
    from gpuwatch.commands.target import is_elsewhere, job_key, named_run, open_target
    from gpuwatch.commands.text import status_lines
    from gpuwatch.recording.read import is_recording

    recorded = None
    unlocking = job_key([target], key)
    if target is not None and is_recording(target):
        from gpuwatch.commands.recorded import last_view, narrate, recording_document

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
        document = status_document(view, peak_tflops)
        if recorded is not None:
            document["recording"] = recording_document(recorded)
        click.echo(json.dumps(document, allow_nan=False))
    else:
        lines = status_lines(view)
        if recorded is not None and not view.runs:
            lines[0] = f"no run in {recorded.path}"
        elif is_elsewhere(target) and not view.runs:
            lines[0] = "no run of yours there"
        click.echo("\n".join(lines))
    if view.link == "lost" and view.message:
        click.echo(f"gpuwatch: {view.message}", err=True)


@click.command()
@click.argument("target", required=False)
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
@click.option(
    "--peak-tflops",
    type=click.FloatRange(0.0, 1e6, min_open=True),
    envvar="GPUWATCH_PEAK_TFLOPS",
    metavar="TFLOPS",
    help="Dense peak of the training dtype on these devices, for MFU.",
)
@key_option
def status(target: str | None, as_json: bool, peak_tflops: float | None, key: str | None) -> None:
    """Print one picture of runs, ranks and host.

    TARGET is a run id, its beginning, or a run's name; without it all runs are shown. Or another
    machine, ssh://[user@]host[:port][/run], or tcp://host:port[/run] with --key. Or a recording or
    a trace: then the picture is that at its end.
    """
    show_status(target, as_json=as_json, peak_tflops=peak_tflops, key=key)
