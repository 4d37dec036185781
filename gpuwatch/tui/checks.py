"""Findings whose window was frozen, and what has come of the change since."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuwatch.diagnosis.verify import Check, CheckResult, freeze, successor, verify
from gpuwatch.store.views import RunView
from gpuwatch.tui.tracks import Tracks

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding

__all__ = ["Checks"]

_KEPT = 16
"""Checks: the oldest goes."""


class Checks:
    """The checks of this session, in the order in which they were begun."""

    def __init__(self) -> None:
        self._checks: dict[tuple[str, str], Check] = {}
        self._results: tuple[CheckResult, ...] = ()
        self._told: set[tuple[str, str, float, str]] = set()

    def __len__(self) -> int:
        return len(self._checks)

    @property
    def newest(self) -> str | None:
        """The id of the run whose window was frozen last, None for none."""
        return next(reversed(self._checks.values())).run if self._checks else None

    @property
    def results(self) -> tuple[CheckResult, ...]:
        """How they stood at the last `refresh`."""
        return self._results

    def toggle(
        self,
        finding: Finding,
        run: RunView,
        runs: Sequence[RunView],
        tracks: Tracks,
        at_s: float,
    ) -> bool | None:
        """Freeze the window of a finding of `run`, or let it go; returns whether it is frozen now.

        None where the window has too few steps for a comparison.
        """
        key = (run.run, finding.id)
        if key in self._checks:
            gone = self._checks.pop(key)
            self._results = tuple(r for r in self._results if r.check is not gone)
            return False
        # The window alone: what lies before it may be from before the finding.
        check = freeze(finding, Tracks().side(run), tracks.generation(run.run), at_s, runs)
        if check is None:
            return None
        self._checks[key] = check
        if len(self._checks) > _KEPT:
            del self._checks[next(iter(self._checks))]
        return True

    def refresh(self, runs: Sequence[RunView], tracks: Tracks) -> list[CheckResult]:
        """Compare anew, and return those that were completed by it."""
        results = []
        for check in self._checks.values():
            after = successor(check, runs)
            after = after or next((run for run in runs if run.run == check.run), None)
            if after is not None:
                results.append(verify(check, tracks.side(after), tracks.generation(after.run)))
                continue
            # Its run is forgotten and no other has come: it stands as it stood.
            results += [old for old in self._results if old.check is check]
        self._results = tuple(results)
        new = []
        for result in results:
            check = result.check
            key = (check.run, check.finding.id, check.at_s, result.run)
            if result.is_done and key not in self._told:
                self._told.add(key)
                new.append(result)
        return new
