"""`gpuwatch status`: one picture, as text or JSON."""

import json
import shutil

import click

from gpuwatch.commands.target import Targets, target_options

__all__ = ["show_status", "status"]


def show_status(targets: Targets, *, as_json: bool, peak_tflops: float | None = None) -> None:
    """Print one picture of all runs, or of the named one, or the last one of a recording.

    Targets that cannot be reached while others can are a sentence each on stderr. `peak_tflops` is
    the dense peak of the devices, where the user knows better than the table.

    Raises:
        TargetError: no run of that name, or a recording that cannot be read.
        AgentError: none of the targets can be reached.
    """
    from gpuwatch.commands.shapes import status_document
    from gpuwatch.commands.target import one_picture, say_troubles
    from gpuwatch.commands.text import status_lines

    picture = one_picture(targets)
    recorded = picture.recorded
    if as_json:
        document = status_document(picture.view, peak_tflops)
        if recorded is not None:
            from gpuwatch.commands.recorded import recording_document

            document["recording"] = recording_document(recorded)
        click.echo(json.dumps(document, allow_nan=False))
    else:
        lines = status_lines(picture.without_troubles(), shutil.get_terminal_size().columns)
        if recorded is not None and not picture.view.runs:
            lines[0] = f"no run in {recorded.path}"
        elif targets.elsewhere and not picture.view.runs:
            lines[0] = "no run of yours there"
        click.echo("\n".join(lines))
    say_troubles(picture.troubles)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
@click.option(
    "--peak-tflops",
    type=click.FloatRange(0.0, 1e6, min_open=True),
    envvar="GPUWATCH_PEAK_TFLOPS",
    metavar="TFLOPS",
    help="Dense peak of the training dtype on these devices, for MFU.",
)
@target_options
def status(targets: Targets, as_json: bool, peak_tflops: float | None) -> None:
    """Print one picture of runs, ranks and host.

    A TARGET is a run id, its beginning, or a run's name; without any all runs are shown. Or other
    machines, as for gpuwatch attach: ssh://[user@]host[:port][/run], tcp://host:port[/run] with
    --key, or --via. Or a recording or a trace: then the picture is that at its end.
    """
    show_status(targets, as_json=as_json, peak_tflops=peak_tflops)
