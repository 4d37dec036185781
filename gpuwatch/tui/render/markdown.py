"""Findings as Markdown, for a message or an issue."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.findings import (
    cost_text,
    hint_rest,
    hint_text,
    life_texts,
    ranks_text,
    stack_texts,
)
from gpuwatch.tui.scene import Scene

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding

__all__ = ["finding_markdown", "report_markdown"]


def _safe(text: object) -> str:
    """Return text that stays in its cell or line."""
    return " ".join(str(text).split()).replace("|", "\\|")


def finding_markdown(item: Finding, scene: Scene, level: int = 2) -> str:
    """Return one finding with evidence, what was ruled out and what to try."""
    summary = scene.summary
    step_ms = summary.step_ms if summary is not None else None
    world = scene.run.world_size if scene.run is not None else None
    title = f"{item.id} {item.kind}".strip()
    state = item.severity if item.state == "open" else "resolved"
    facts = [state, cost_text(item)]
    if numbers.known(item.share):
        facts.append(f"{numbers.share(item.share)} of the step")
    facts += [f"confidence {item.confidence}", ranks_text(item.ranks, world)]
    lines = [
        f"{'#' * level} {_safe(title)}",
        "",
        f"{_safe(item.summary)} ({', '.join(fact for fact in facts if fact)})",
        "",
    ]
    if item.evidence:
        lines += ["| why | value | compared with | source |", "|---|---:|---|---|"]
        for piece in item.evidence:
            value = piece.value if isinstance(piece.value, str) else f"{piece.value:.4g}"
            lines.append(
                f"| {_safe(piece.metric)} | {_safe(value)} {_safe(piece.unit)} "
                f"| {_safe(piece.compared_with)} | {_safe(piece.source)} |"
            )
        lines.append("")
    for rank, calls in stack_texts(item):
        lines += [f"Stack of {rank}:" if calls else rank, ""]
        if calls:
            lines += ["```text", *(" ".join(call.split()) for call in calls), "```", ""]
    if item.ruled_out:
        lines += ["Ruled out:", "", *(f"- {_safe(text)}" for text in item.ruled_out), ""]
    if item.hints:
        lines += ["Try:", ""]
        for number, hint in enumerate(item.hints, 1):
            text = hint_text(hint, step_ms)
            if rest := hint_rest(hint):
                text += f" ({rest})"
            lines.append(f"{number}. {_safe(text)}")
        lines.append("")
    if item.follows:
        lines += [f"Follows {item.follows}.", ""]
    if len(item.life) > 1:
        lines += ["Life:", "", *(f"- {_safe(text)}" for text in life_texts(item)), ""]
    return "\n".join(lines)


def report_markdown(scene: Scene) -> str:
    """Return a run with its numbers and all of its findings."""
    run, summary = scene.run, scene.summary
    if run is None or summary is None:
        return "# gpuwatch\n\nNo run.\n"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(scene.cursor_s or scene.view.at_s))
    lines = [f"# {_safe(run.name or run.run)}", ""]
    if run.simulated:
        lines += ["**SIMULATED**", ""]
    split = [
        f"{name.replace('_', ' ')} {numbers.ms(value)}"
        for name, value in summary.phases_ms.items()
        if value is not None
    ]
    lines += [
        f"{at}, step {run.steps:,}, {run.world_size:,} ranks, {run.state}",
        "",
        f"- step {numbers.duration(summary.step_ms)} (mean of {run.window} steady steps): "
        + (", ".join(split) or "n/a"),
        f"- data wait {numbers.share(summary.wait_worst)} worst rank, "
        f"{numbers.share(summary.wait_median)} median",
        f"- goodput {numbers.share(summary.goodput)}; {run.lost:,} frames lost",
        "",
    ]
    if not scene.findings:
        lines += ["Nothing found." if scene.diagnosed else "Not judged yet.", ""]
    for item in scene.findings:
        lines.append(finding_markdown(item, scene))
    if scene.abstained:
        lines += ["## Not judged", ""]
        lines += [f"- {item.kind}: {_safe(item.needs)}" for item in scene.abstained]
        lines.append("")
    return "\n".join(lines)
