"""How a change is checked: the frozen window, what has come since, predicted against actual."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.text import Line, fit, wrap

if TYPE_CHECKING:
    from gpuwatch.diagnosis.verify import CheckResult, Promise

__all__ = ["check_lines", "promise_text"]

_VERDICT_STYLES = {"as predicted": "ok", "faster": "ok", "slower": "warning"}
_MARKS = {"as predicted": "✓", "faster": "✓", "slower": "▲"}


def _step(value: float) -> str:
    return f"{value:,.1f}" if abs(value) < 9.95 else f"{value:,.0f}"


def promise_text(promise: Promise) -> str:
    """Return `num_workers 4 -> 12: predicted 171..186 ms, got 178 ms: as predicted`."""
    hint, (low, high) = promise.hint, promise.predicted_ms
    knob = hint.change or hint.knob
    if hint.knob and hint.new is not None:
        old = f" {hint.old} ->" if hint.old is not None else ""
        knob = f"{hint.knob}{old} {hint.new}"
    verdict = (
        promise.verdict if promise.verdict == "as predicted" else f"{promise.verdict} than that"
    )
    return (
        f"{knob}: predicted {_step(low)}..{_step(high)} ms, "
        f"got {_step(promise.actual_ms)} ms: {verdict}"
    )


def check_lines(result: CheckResult, width: int, indent: int = 4) -> list[Line]:
    """Return the check of one finding: before, after so far, and the verdict."""
    from gpuwatch.diagnosis.verify import WANTED_STEPS
    from gpuwatch.store.compare import percent_range

    check = result.check
    count = len(check.before.steps)
    # What stands beside a SIMULATED mark everywhere else stands beside one here.
    mark = "SIMULATED  " if check.before.simulated else ""
    entries: list[tuple[str, str]] = [
        (
            f"{mark}before  {numbers.duration(result.before_ms)}, mean of {count} steps up to step "
            f"{check.at_step:,} (frozen)",
            "text",
        )
    ]
    if result.has_ended and not result.is_done:
        so_far = f" after {result.steps} of {WANTED_STEPS} steps" if result.steps else ""
        entries.append(
            (f"after   its run has ended{so_far}: start the job anew, that run is compared", "dim")
        )
    elif not result.steps:
        where = "of the new run " if result.is_new_run else ""
        waiting = f"after   0 of {WANTED_STEPS} steps {where}yet: change the knob"
        text = f"{waiting}, in the run or by starting it anew"
        if check.changed is not None and not result.is_new_run:
            text = waiting.removesuffix(": change the knob")
            text += f": {check.changed.name} was set at step {check.changed_step:,}"
            text += "" if check.felt else ", and is felt with the next epoch"
        entries.append((text, "dim"))
    else:
        done = "" if result.is_done else " so far"
        new = f" of the new run {result.run}" if result.run != check.run else ""
        new = " since the restart" if result.is_new_run and not new else new
        after = (
            f"after   {numbers.duration(result.after_ms)}, mean of {result.steps} of "
            f"{WANTED_STEPS} steps{new}{done}"
        )
        if result.interval is not None:
            words = percent_range(result.interval)
            after += f"; 95 % CI of the change {words}"
            if result.clear is False:
                after += ": the same"
        entries.append((after, "text"))
    if result.promise is not None:
        verdict = result.promise.verdict
        style = _VERDICT_STYLES.get(verdict, "text") if result.is_done else "text"
        sign = f"{_MARKS.get(verdict, '·')} " if result.is_done else "· "
        entries.append((sign + promise_text(result.promise), style))
        if result.promise.setting is None:
            entries.append(("no change of that setting was seen in what the run tells", "dim"))
    if result.reason:
        entries.append((result.reason, "warning" if result.steps else "dim"))
    lines: list[Line] = []
    for text, style in entries:
        for i, row in enumerate(wrap(text, width - indent - 10)):
            lead = " " * (indent if i == 0 else indent + 8)
            lines.append(fit([(lead, "text"), (row, style)], width))
    return lines
