"""`gpuwatch compare`: a run before a change, and after it."""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwatch.diagnosis import Finding, RunDiagnosis
    from gpuwatch.store.compare import Aligned, Change, Comparison, Driver, Row, Setting
    from gpuwatch.store.track import Side
    from gpuwatch.store.views import RunView, View

__all__ = ["RecordingShelf", "compare"]


@click.command()
@click.argument("before")
@click.argument("after")
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
@click.option("--all", "show_all", is_flag=True, help="Print equal settings too.")
def compare(before: str, after: str, as_json: bool, show_all: bool) -> None:
    """Say what a change has brought: times, settings and findings of two runs.

    BEFORE and AFTER are recordings or traces, or runs of this machine. The steps that both have
    are compared, else the last steady ones of each; an interval (CI) is one of 95 % by blocks of
    steps, and a difference within it is called the same.
    """
    from gpuwatch.store.compare import compare_sides, driver_of

    one, other = _target(before), _target(after)
    drivers = driver_of(one.run, one.view.nodes), driver_of(other.run, other.view.nodes)
    comparison = compare_sides(_side_of(one), _side_of(other), drivers)
    promises = _promises(one, other, comparison)
    if as_json:
        document = _document(one, other, comparison, promises)
        click.echo(json.dumps(document, allow_nan=False))
    else:
        click.echo("\n".join(_lines(one, other, comparison, promises, show_all=show_all)))


# --- sides -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    """What a TARGET means: a run, what was found in it, and the picture that both are from."""

    target: str
    run: "RunView"
    diagnosis: "RunDiagnosis"
    view: "View"


def _target(target: str) -> _Target:
    """Return the run that a TARGET means, recorded or live, and what is found in it.

    Raises:
        TargetError: there is no such run, or the recording cannot be read or holds none.
        AgentError: there is no contact with the node process.
    """
    from gpuwatch.commands.recorded import judged, narrate
    from gpuwatch.commands.session import LiveSession, pick_run
    from gpuwatch.diagnosis import Engine, RunDiagnosis
    from gpuwatch.errors import TargetError
    from gpuwatch.recording.read import is_recording

    if is_recording(target):
        view, found, recording = judged(target)
        narrate(recording)
        run, _ = pick_run(view, None)
        if run is None:
            raise TargetError(f"no run in {target}")
        return _Target(target, run, found.get(run.run) or RunDiagnosis(run.run), view)
    with contextlib.closing(LiveSession()) as session:
        view = session.settled_view()
    run, _ = pick_run(view, target)
    if run is None:
        raise TargetError(f"no run {target!r} here; gpuwatch runs lists those there are")
    return _Target(target, run, Engine(open_after=1).evaluate(view, run), view)


def _side_of(target: _Target) -> "Side":
    """Return all steps of a recording, or the window of a live run."""
    from gpuwatch.recording.read import is_recording
    from gpuwatch.store.track import side_of

    if not is_recording(target.target):
        return side_of(target.run, target.target)
    return _recorded(target.target, target.run)


def _recorded(path: str, run: "RunView") -> "Side":
    from gpuwatch.recording import open_recording
    from gpuwatch.recording.compare import read_steps
    from gpuwatch.store.track import Side

    with open_recording(path) as recording:
        return Side(Path(path).stem, "saved", run, read_steps(recording, run.run))


class RecordingShelf:
    """The recordings that a screen may compare: those it was given, and those around it.

    `given` are paths from the command line. Nothing is read before it is asked for.
    """

    def __init__(self, given: "Sequence[str]" = ()) -> None:
        self.given = tuple(given)
        self._drivers: dict[str, Driver] = {}

    def paths(self) -> tuple[str, ...]:
        """Return the given ones, then those in the current directory, newest first."""
        from gpuwatch.recording.read import SUFFIXES

        found: list[tuple[float, str]] = []
        with contextlib.suppress(OSError), os.scandir() as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIXES):
                    with contextlib.suppress(OSError):
                        if entry.is_file():
                            found.append((entry.stat().st_mtime, entry.name))
        known = {os.path.realpath(path) for path in self.given}
        near = [name for _, name in sorted(found, reverse=True)]
        return (*self.given, *(name for name in near if os.path.realpath(name) not in known))

    def load(self, path: str) -> "Side":
        """Read a recording: its newest run. Takes as long as that takes.

        Raises:
            TargetError: it cannot be read, or holds no run.
        """
        from gpuwatch.commands.recorded import last_view
        from gpuwatch.commands.session import pick_run
        from gpuwatch.errors import TargetError
        from gpuwatch.store.compare import driver_of

        view, _ = last_view(path)
        run, _ = pick_run(view, None)
        if run is None:
            raise TargetError(f"no run in {path}")
        self._drivers[path] = driver_of(run, view.nodes)
        return _recorded(path, run)

    def driver(self, path: str) -> "Driver":
        """Return the driver below the run of a recording that was read.

        Raises:
            KeyError: it was not.
        """
        return self._drivers[path]


# --- findings ----------------------------------------------------------------------------------


def _open(target: _Target) -> "dict[str, Finding]":
    return {f.kind: f for f in target.diagnosis.findings if f.state == "open"}


def _promises(before: _Target, after: _Target, comparison: "Comparison") -> list[dict[str, Any]]:
    """Return what the hints that were followed had predicted, and what came of it."""
    from gpuwatch.diagnosis.verify import comparable_ms, followed, promise_verdict

    step = comparison.changes[0]
    found = []
    for finding in _open(before).values():
        for hint in finding.hints:
            setting = followed(hint, comparison.settings)
            if setting is None or hint.predicted_ms is None or step.after is None:
                continue
            low, high = hint.predicted_ms
            actual_ms = comparable_ms(step.after, setting)
            found.append(
                {
                    "kind": finding.kind,
                    "knob": hint.knob,
                    "from": setting.before,
                    "to": setting.after,
                    "predicted_ms": [round(low, 3), round(high, 3)],
                    "actual_ms": round(actual_ms, 3),
                    "verdict": promise_verdict(hint.predicted_ms, actual_ms),
                }
            )
    return found


# --- shapes ------------------------------------------------------------------------------------


def _document(
    before: _Target, after: _Target, comparison: "Comparison", promises: list[dict[str, Any]]
) -> dict[str, Any]:
    from gpuwatch.commands.shapes import SCHEMA, finding_document

    one, other = _open(before), _open(after)
    return {
        "schema": SCHEMA,
        "before": _side(before, comparison.drivers[0]),
        "after": _side(after, comparison.drivers[1]),
        "changes": [_change(change) for change in comparison.changes],
        "settings": [_setting(s) for s in comparison.settings],
        "findings": {
            "gone": [finding_document(f) for kind, f in one.items() if kind not in other],
            "new": [finding_document(f) for kind, f in other.items() if kind not in one],
            "both": [
                {
                    "kind": kind,
                    "before_cost_ms": one[kind].cost_ms,
                    "after_cost_ms": other[kind].cost_ms,
                }
                for kind in one
                if kind in other
            ],
        },
        "predictions": promises,
        "rows": [_row(row) for row in comparison.rows],
        "aligned": _aligned(comparison.aligned),
        "equal_settings": [_setting(s) for s in comparison.equal],
        "notes": list(comparison.notes),
    }


def _setting(setting: "Setting") -> dict[str, Any]:
    return {
        "name": setting.name,
        "before": _value(setting.before),
        "after": _value(setting.after),
        "environment": setting.is_environment,
    }


def _aligned(aligned: "Aligned") -> dict[str, Any]:
    same = aligned.by == "step"
    return {
        "by": aligned.by,
        "before_steps": aligned.before,
        "after_steps": aligned.after,
        "first_step": aligned.first if same else None,
        "last_step": aligned.last if same else None,
        "reason": aligned.why or None,
    }


def _row(row: "Row") -> dict[str, Any]:
    def spread(side: Any) -> list[float] | None:
        return None if side is None else [round(v, 6) for v in (side.low, side.middle, side.high)]

    return {
        **_change(row.change),
        "better": row.better,
        "verdict": row.verdict,
        "before_p10_p50_p90": spread(row.before),
        "after_p10_p50_p90": spread(row.after),
    }


def _side(target: _Target, driver: "Driver") -> dict[str, Any]:
    run = target.run
    return {
        "target": target.target,
        "run": run.run,
        "name": run.name,
        "world_size": run.world_size,
        "steps": run.steps,
        "window": run.window,
        "simulated": run.simulated,
        "driver": driver.version or None,
        "driver_reason": driver.reason or None,
    }


def _change(change: "Change") -> dict[str, Any]:
    return {
        "metric": change.metric,
        "unit": change.unit,
        "before": _rounded(change.before),
        "after": _rounded(change.after),
        "share": _rounded(change.share),
        "clear": change.clear,
        "reason": change.reason or None,
        "interval": None if change.interval is None else [_rounded(v) for v in change.interval],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _value(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _lines(
    before: _Target,
    after: _Target,
    comparison: "Comparison",
    promises: list[dict[str, Any]],
    *,
    show_all: bool = False,
) -> list[str]:
    from gpuwatch.store.compare import untold_drivers

    lines = []
    for word, side in (("before", before), ("after", after)):
        run = side.run
        mark = "  SIMULATED" if run.simulated else ""
        lines.append(
            f"{word:<7} {side.target}  run {run.run}  {len(run.ranks)} of {run.world_size} ranks  "
            f"{run.steps:,} steps{mark}"
        )
    lines.append(comparison.aligned.text)
    lines += [f"note    {note}" for note in comparison.notes]
    lines.append("")
    lines += [_row_line(row) for row in comparison.rows]
    lines.append("")
    lines += [f"setting {s.name}: {_shown(s)} -> {_shown(s, 1)}" for s in comparison.settings]
    lines += [f"driver  n/a {words}" for words in untold_drivers(comparison)]
    if show_all:
        lines += [f"equal   {s.name}: {_shown(s)}" for s in comparison.equal]
    else:
        lines.append(f"equal   {len(comparison.equal)} settings (--all prints them)")
    lines.append("")
    one, other = _open(before), _open(after)
    lines += [f"gone    {f.kind}: {f.summary}{_cost(f)}" for k, f in one.items() if k not in other]
    lines += [f"new     {f.kind}: {f.summary}{_cost(f)}" for k, f in other.items() if k not in one]
    lines += [f"still   {f.kind}: {f.summary}{_cost(f)}" for k, f in other.items() if k in one]
    lines += [
        f"predicted for {p['knob']} {p['from']} -> {p['to']}: {p['predicted_ms'][0]:.0f}.."
        f"{p['predicted_ms'][1]:.0f} ms, got {p['actual_ms']:.0f} ms: {p['verdict']}"
        for p in promises
    ]
    if not one and not other:
        lines.append("no finding before, none after")
    return lines


def _cost(finding: "Finding") -> str:
    return "" if finding.cost_ms is None else f" (+{finding.cost_ms:.1f} ms/step)"


def _shown(setting: "Setting", side: int = 0) -> str:
    value = setting.after if side else setting.before
    if value is None or value == "":
        # A run always has a version and a device: one that tells none has not told it.
        return "n/a" if setting.is_environment else "none"
    return str(value)


def _row_line(row: "Row") -> str:
    change = row.change

    def number(value: float | None) -> str:
        return "n/a" if value is None else f"{value:,.2f}" if change.unit else f"{value:.1%}"

    share = "" if change.share is None or not change.unit else f"{change.share:+.1%}"
    mark = {True: "+", False: "!", None: " "}[row.better]
    name = ("  " if row.metric in {"transfer", "peer_wait"} else "") + row.metric
    return (
        f"{mark} {name:<17} {number(change.before):>11} -> {number(change.after):>11} "
        f"{change.unit:<4}{share:>9}  {row.verdict}"
    ).rstrip()
