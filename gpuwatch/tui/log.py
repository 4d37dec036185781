"""The event log: what the store saw happen, and what became of the findings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

from gpuwatch.store.views import Event, View

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding

__all__ = ["FindingLog", "merged"]

_KEPT = 200
_CHANGE = 0.25
"""A cost is told anew when it is another by this share, and by a millisecond at least."""
_TOLD_S = 10.0
"""A finding's cost is told at most this often."""


def _cost(item: Finding) -> float | None:
    cost = item.cost_ms
    return cost if cost is not None and isfinite(cost) else None


class FindingLog:
    """Turns successive diagnoses into events: opened, cost or severity changed, resolved, again."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_KEPT)
        self._told: dict[tuple[str, str], tuple[Finding, float]] = {}

    @property
    def events(self) -> tuple[Event, ...]:
        """What happened, oldest first."""
        return tuple(self._events)

    def take(self, run: str, findings: Sequence[Finding], at_s: float) -> None:
        """Compare the findings of a run with those before; `at_s` is the wall clock."""
        for item in findings:
            if not item.id:
                continue
            key = (run, item.id)
            before, told_s = self._told.get(key, (None, 0.0))
            text = ""
            when_s = at_s
            severity = item.severity
            if before is None or (before.state != "open" and item.state == "open"):
                if item.state != "open":
                    self._told[key] = (item, at_s)
                    continue
                cost = _cost(item)
                gain = f"  +{cost:,.0f} ms/step" if cost else ""
                turn = "opened" if item.opened_step else "is open"
                if before is not None or any(event.what == "reopened" for event in item.life):
                    turn = f"reopened at step {item.opened_step:,}"
                text = f"{item.id} {turn}: {item.summary or item.kind}{gain}"
                when_s = item.opened_s or at_s
            elif item.state != "open":
                if before.state == "open":
                    severity = "note"
                    text = f"{item.id} resolved at step {item.resolved_step or 0:,}"
            elif item.severity != before.severity:
                text = f"{item.id} is now {item.severity}, was {before.severity}"
            else:
                old, new = _cost(before), _cost(item)
                if (
                    old is not None
                    and new is not None
                    and abs(new - old) > max(1.0, _CHANGE * abs(old))
                    and at_s - told_s >= _TOLD_S
                ):
                    severity = "note"
                    text = f"{item.id} cost {old:,.0f} -> {new:,.0f} ms/step"
            if text:
                self._told[key] = (item, at_s)
                self._events.append(Event(when_s, text, severity, run))


def merged(view: View, log: FindingLog, run: str | None) -> tuple[Event, ...]:
    """Return the events of a run and of no run in particular, newest first."""
    events = [
        item
        for item in (*view.events, *log.events)
        if run is None or not item.run or item.run == run
    ]
    events.sort(key=lambda item: -item.at_s)
    return tuple(events)
