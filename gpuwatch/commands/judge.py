"""The rules on a replay, whose time can be moved."""

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuwatch.diagnosis import Engine, RunDiagnosis
    from gpuwatch.diagnosis.engine import Memory
    from gpuwatch.store import View
    from gpuwatch.store.session import Playback

__all__ = ["MOST", "REACH_S", "Judge"]

MOST = 512
"""Moments that are remembered; beyond that every other one is let go."""

REACH_S = 2.0
"""So long after the last look what was known then still holds."""


class Judge:
    """Evaluates the views of a playback and remembers what was known at its moments.

    Where time is moved to one that was played before, findings are as they were then: their
    numbers, and when they opened. Elsewhere it begins anew, with what the window shows there, and
    does not know since when that has been so.
    """

    def __init__(self, session: "Playback") -> None:
        self._session = session
        self._seeks = session.seeks
        self._engine: Engine | None = None
        self._begins_late = session.position > REACH_S
        self._times_s: list[float] = []
        self._until_s: list[float] = []
        self._memories: list[Memory] = []

    def __call__(self, view: "View") -> "tuple[RunDiagnosis, ...]":
        """Evaluate every run of the view."""
        engine, seeks = self._engine, self._session.seeks
        goes_on = engine is not None and seeks == self._seeks
        if engine is None or not goes_on:
            moved, self._seeks = seeks != self._seeks, seeks
            engine = self._engine = self._begin(view.at_s, moved or self._begins_late)
        found = engine(view)
        self._keep(view.at_s, engine, goes_on)
        return found

    def _begin(self, at_s: float, late: bool) -> "Engine":
        """Return an engine that knows what was known then, where that was played."""
        from gpuwatch.diagnosis import Engine

        place = bisect_right(self._times_s, at_s) - 1
        if place >= 0 and at_s <= self._until_s[place]:
            engine = Engine()
            engine.recall(self._memories[place])
            return engine
        return Engine(open_after=1, late=True) if late else Engine()

    def _keep(self, at_s: float, engine: "Engine", goes_on: bool) -> None:
        """Remember a moment, unless it was played before."""
        place = bisect_right(self._times_s, at_s)
        if place and (
            at_s == self._times_s[place - 1]
            or (at_s <= self._until_s[place - 1] and place < len(self._times_s))
        ):
            return
        if goes_on and place:
            # What was known at the last look held until this one.
            self._until_s[place - 1] = max(self._until_s[place - 1], at_s)
        self._times_s.insert(place, at_s)
        self._until_s.insert(place, at_s + REACH_S)
        self._memories.insert(place, engine.remember())
        if len(self._times_s) > MOST:
            self._thin()

    def _thin(self) -> None:
        """Let every other moment go; the one before it reaches as far as both did."""
        times_s, until_s = self._times_s, self._until_s
        for i in range(0, len(times_s) - 1, 2):
            if times_s[i + 1] <= until_s[i]:
                until_s[i] = max(until_s[i], until_s[i + 1])
        self._times_s, self._until_s = times_s[::2], until_s[::2]
        self._memories = self._memories[::2]
