"""`gpuwatch compare`: a run before a change, and after it."""

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gpuwatch.commands.recorded import Judged
    from gpuwatch.diagnosis import Finding
    from gpuwatch.recording.compare import Change, Comparison, Setting

__all__ = ["compare"]


@click.command()
@click.argument("before")
@click.argument("after")
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def compare(before: str, after: str, as_json: bool) -> None:
    """Say what a change has brought: times, settings and findings of two runs.

    BEFORE and AFTER are recordings or traces, or runs of this machine. Means are over the steady
    steps at the end of each; a difference within the scatter of the steps is called noise.
    """
    from gpuwatch.commands.recorded import judged_target
    from gpuwatch.recording.compare import compare_runs

    one, other = judged_target(before), judged_target(after)
    comparison = compare_runs(one.run, other.run)
    promises = _promises(one, other, comparison)
    if as_json:
        document = _document(one, other, comparison, promises)
        click.echo(json.dumps(document, allow_nan=False))
    else:
        click.echo("\n".join(_lines(one, other, comparison, promises)))


# --- findings ----------------------------------------------------------------------------------


def _open(judged: "Judged") -> "dict[str, Finding]":
    return {f.kind: f for f in judged.diagnosis.findings if f.state == "open"}


def _promises(before: "Judged", after: "Judged", comparison: "Comparison") -> list[dict[str, Any]]:
    """Return what the hints that were followed had predicted, and what came of it."""
    step = comparison.changes[0]
    found = []
    for finding in _open(before).values():
        for hint in finding.hints:
            setting = _followed(hint.knob, hint.new, comparison.settings)
            if setting is None or hint.predicted_ms is None or step.after is None:
                continue
            low, high = hint.predicted_ms
            verdict = (
                "faster" if step.after < low else "slower" if step.after > high else "as predicted"
            )
            found.append(
                {
                    "kind": finding.kind,
                    "knob": hint.knob,
                    "from": setting.before,
                    "to": setting.after,
                    "predicted_ms": [round(low, 3), round(high, 3)],
                    "actual_ms": round(step.after, 3),
                    "verdict": verdict,
                }
            )
    return found


def _followed(knob: str, new: object, settings: "tuple[Setting, ...]") -> "Setting | None":
    for setting in settings:
        if setting.name == knob or setting.name.endswith(f".{knob}"):
            return setting if new is not None and setting.after == new else None
    return None


# --- shapes ------------------------------------------------------------------------------------


def _document(
    before: "Judged", after: "Judged", comparison: "Comparison", promises: list[dict[str, Any]]
) -> dict[str, Any]:
    from gpuwatch.commands.shapes import SCHEMA, finding_document

    one, other = _open(before), _open(after)
    return {
        "schema": SCHEMA,
        "before": _side(before),
        "after": _side(after),
        "changes": [_change(change) for change in comparison.changes],
        "settings": [
            {"name": s.name, "before": _value(s.before), "after": _value(s.after)}
            for s in comparison.settings
        ],
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
    }


def _side(judged: "Judged") -> dict[str, Any]:
    run = judged.run
    return {
        "target": judged.target,
        "run": run.run,
        "name": run.name,
        "world_size": run.world_size,
        "steps": run.steps,
        "window": run.window,
        "simulated": run.simulated,
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
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _value(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _lines(
    before: "Judged", after: "Judged", comparison: "Comparison", promises: list[dict[str, Any]]
) -> list[str]:
    lines = []
    for word, side in (("before", before), ("after", after)):
        run = side.run
        mark = "  SIMULATED" if run.simulated else ""
        lines.append(
            f"{word:<7} {side.target}  run {run.run}  {len(run.ranks)} of {run.world_size} ranks  "
            f"{run.window} steps in the window{mark}"
        )
    lines.append("")
    lines += [_change_line(change) for change in comparison.changes]
    if comparison.settings:
        lines.append("")
    lines += [
        f"setting {s.name}: {_shown(s.before)} -> {_shown(s.after)}" for s in comparison.settings
    ]
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


def _shown(value: object) -> str:
    return "none" if value is None or value == "" else str(value)


def _change_line(change: "Change") -> str:
    def number(value: float | None) -> str:
        return "n/a" if value is None else f"{value:,.2f}" if change.unit else f"{value:.1%}"

    share = "" if change.share is None or not change.unit else f"{change.share:+.1%}"
    words = change.reason or ("noise" if change.clear is False else "")
    return (
        f"{change.metric:<14} {number(change.before):>12} -> {number(change.after):>12} "
        f"{change.unit:<4}{share:>9}  {words}"
    ).rstrip()
