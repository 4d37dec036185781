"""Hints that do not change under the hand: what is read and copied stays for some evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding, Hint

__all__ = ["HintHold"]

_HOLD = 3
"""Another change is shown once so many evaluations in a row have asked for another one."""

_Key = tuple[str, str, str]
"""A finding by run, id and kind: a run that was started anew numbers its findings anew."""


def _asked(hints: Sequence[Hint]) -> list[tuple[str, object]]:
    """Return what hints ask for, without what they predict, which may move at any time."""
    return [(h.knob, h.new) if h.new is not None else (h.change, None) for h in hints]


class HintHold:
    """Keeps each finding's hints as they are shown until others have held for a while.

    A number at the edge between two (11 or 12 workers) would else go back and forth on the screen,
    and what was copied would not be what stands there. Prediction and words are those of the
    evaluation that asked for the same.
    """

    def __init__(self) -> None:
        self._shown: dict[_Key, tuple[Hint, ...]] = {}
        self._differed: dict[_Key, int] = {}
        self._held_until_s: dict[_Key, float] = {}

    def take(self, run: str, findings: Sequence[Finding], now_s: float) -> tuple[Finding, ...]:
        """Return the findings of one evaluation of a run with the hints to show.

        `now_s` is a monotonic clock in seconds.
        """
        out: list[Finding] = []
        seen: set[_Key] = set()
        for item in findings:
            key = (run, item.id, item.kind)
            seen.add(key)
            shown = self._shown.get(key)
            if shown is not None and item.state == "open" and self._holds(key, item.hints, now_s):
                out.append(replace(item, hints=shown))
            else:
                self._shown[key] = item.hints
                out.append(item)
        for key in [key for key in self._shown if key[0] == run and key not in seen]:
            for kept in (self._shown, self._differed, self._held_until_s):
                kept.pop(key, None)
        return tuple(out)

    def _holds(self, key: _Key, hints: Sequence[Hint], now_s: float) -> bool:
        if _asked(hints) == _asked(self._shown[key]):
            self._differed[key] = 0
            return False
        if now_s < self._held_until_s.get(key, now_s):
            return True
        self._differed[key] = self._differed.get(key, 0) + 1
        if self._differed[key] < _HOLD:
            return True
        self._differed[key] = 0
        return False

    def hold(self, item: Finding, until_s: float) -> None:
        """Show the hints of a finding as they are until then: somebody has just copied one."""
        self._held_until_s[(item.run, item.id, item.kind)] = until_s
