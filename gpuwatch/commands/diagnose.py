"""`gpuwatch diagnose`: why is the step not faster."""

import json
import re
import time

import click

from gpuwatch.commands.target import Targets, target_options

__all__ = ["Duration", "diagnose"]

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


_STACKS_S = 2.0
"""So long the ranks of a hang may take to say where they stand."""


class Duration(click.ParamType[float]):
    """Seconds, or a number with s, m or h."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the seconds."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no duration; write 30s, 5m or 1h", param, ctx)
        return float(match[1]) * _UNITS_S[match[2]]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
@click.option(
    "--fail-on",
    type=click.Choice(["note", "warning", "critical"]),
    help="Exit 1 if there is a finding of this severity or above.",
)
@click.option(
    "--for", "for_s", type=Duration(), default=0.0, help="Watch so long before judging: 30s, 5m."
)
@target_options
@click.pass_context
def diagnose(
    ctx: click.Context,
    targets: Targets,
    as_json: bool,
    fail_on: str | None,
    for_s: float,
) -> None:
    """Say why the step of a run is not faster, and what to change.

    A TARGET is a run id, its beginning, or a run's name; without any the newest run is judged. Or
    the machines of one job, as for gpuwatch attach: ssh://[user@]host[:port][/run],
    tcp://host:port[/run] with --key, or --via. Or a recording or a trace, which is judged as it is
    replayed: what is open at its end.
    """
    from gpuwatch.commands.shapes import diagnosis_document, finding_document
    from gpuwatch.commands.target import named_run, open_targets, say_troubles, troubles_of
    from gpuwatch.commands.text import diagnosis_lines
    from gpuwatch.diagnosis import Engine
    from gpuwatch.diagnosis.types import SEVERITIES

    recorded = None
    troubles: tuple[str, ...] = ()
    path = targets.recording
    if path is not None:
        from gpuwatch.commands.recorded import judged, narrate, recording_document

        if for_s:
            raise click.UsageError("a recording is judged as a whole: leave --for out")
        view, found, recorded = judged(path)
        narrate(recorded)
        name = None
    else:
        session, name = open_targets(targets)
        engine = Engine(open_after=1, ask=session.send)
        try:
            view = session.settled_view()
            until_s = time.monotonic() + for_s
            while time.monotonic() < until_s:
                time.sleep(min(1.0, max(0.0, until_s - time.monotonic())))
                view = session.view()
                engine(view)
            engine(view)
            until_s = time.monotonic() + _STACKS_S
            while engine.waiting and time.monotonic() < until_s:
                time.sleep(0.1)
                view = session.view()
                engine(view)
            troubles = troubles_of(session, view)
        finally:
            session.close()
    run, others = named_run(view, name, targets, troubles)
    live = [r for r in others if r.state != "ended"]
    if run is not None and name is None and live:
        names = ", ".join(r.run for r in live)
        click.echo(f"judging the newest run, {run.run}; there are also {names}", err=True)
    if run is None:
        diagnosis = None
    else:
        diagnosis = engine.evaluate(view, run) if recorded is None else found.get(run.run)
    resolved = [f for f in diagnosis.findings if f.state == "resolved"] if diagnosis else []
    if as_json:
        document = diagnosis_document(run, diagnosis)
        document["resolved"] = [finding_document(f) for f in resolved]
        if recorded is not None:
            document["recording"] = recording_document(recorded)
        click.echo(json.dumps(document, allow_nan=False))
    else:
        lines = diagnosis_lines(run, diagnosis)
        if recorded is not None and run is None:
            lines[0] = f"no run in {recorded.path}"
        elif targets.elsewhere and run is None:
            lines[0] = "no run of yours there"
        lines += [
            f"resolved at step {f.resolved_step:,}: {f.id} {f.kind}: {f.summary}" for f in resolved
        ]
        click.echo("\n".join(lines))
    say_troubles(troubles)
    if fail_on is not None and diagnosis is not None:
        bar = SEVERITIES.index(fail_on)
        if any(
            f.state == "open" and SEVERITIES.index(f.severity) >= bar for f in diagnosis.findings
        ):
            ctx.exit(1)
