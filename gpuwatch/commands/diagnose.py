"""`gpuwatch diagnose`: why is the step not faster."""

import json
import re
import time

import click

__all__ = ["diagnose"]

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class _Duration(click.ParamType[float]):
    """Seconds, or a number with s, m or h."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no duration; write 30s, 5m or 1h", param, ctx)
        return float(match[1]) * _UNITS_S[match[2]]


@click.command()
@click.argument("target", required=False)
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
@click.option(
    "--fail-on",
    type=click.Choice(["note", "warning", "critical"]),
    help="Exit 1 if there is a finding of this severity or above.",
)
@click.option(
    "--for", "for_s", type=_Duration(), default=0.0, help="Watch so long before judging: 30s, 5m."
)
@click.pass_context
def diagnose(
    ctx: click.Context, target: str | None, as_json: bool, fail_on: str | None, for_s: float
) -> None:
    """Say why the step of a run is not faster, and what to change.

    TARGET is a run id, its beginning, or a run's name; without it the newest run is judged.
    """
    from gpuwatch.commands.session import LiveSession, pick_run
    from gpuwatch.commands.shapes import diagnosis_document
    from gpuwatch.commands.text import diagnosis_lines
    from gpuwatch.diagnosis import Engine
    from gpuwatch.diagnosis.types import SEVERITIES
    from gpuwatch.errors import TargetError

    engine = Engine(open_after=1)
    session = LiveSession()
    try:
        view = session.settled_view()
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            time.sleep(min(1.0, max(0.0, until_s - time.monotonic())))
            view = session.view()
            engine(view)
    finally:
        session.close()
    run, others = pick_run(view, target)
    if run is None and target is not None:
        raise TargetError(f"no run {target!r} here; gpuwatch runs lists those there are")
    live = [r for r in others if r.state != "ended"]
    if run is not None and target is None and live:
        names = ", ".join(r.run for r in live)
        click.echo(f"judging the newest run, {run.run}; there are also {names}", err=True)
    diagnosis = engine.evaluate(view, run) if run is not None else None
    if as_json:
        click.echo(json.dumps(diagnosis_document(run, diagnosis), allow_nan=False))
    else:
        click.echo("\n".join(diagnosis_lines(run, diagnosis)))
    if fail_on is not None and diagnosis is not None:
        bar = SEVERITIES.index(fail_on)
        if any(
            f.state == "open" and SEVERITIES.index(f.severity) >= bar for f in diagnosis.findings
        ):
            ctx.exit(1)
