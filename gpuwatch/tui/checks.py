"""Findings whose window was frozen, and what has come of the change since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuwatch.diagnosis.verify import (
    Check,
    CheckResult,
    freeze,
    iterators,
    successor,
    tells,
    verify,
)
from gpuwatch.store.track import side_of
from gpuwatch.store.views import RunView

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding
    from gpuwatch.store.compare import Setting
    from gpuwatch.tui.tracks import Tracks

__all__ = ["Checks"]

_KEPT = 16
"""Checks: the oldest goes."""


class Checks:
    """The checks of this session, in the order in which they were begun."""

    def __init__(self) -> None:
        self._checks: dict[tuple[str, str], Check] = {}
        self._results: tuple[CheckResult, ...] = ()
        self._told: set[tuple[str, str, float, str]] = set()
        self._unseen: set[tuple[str, str]] = set()
        self._iterators: dict[tuple[str, str], tuple[object, ...]] = {}

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
        until: int | None = None,
    ) -> bool | None:
        """Freeze the window of a finding of `run`, or let it go; returns whether it is frozen now.

        Its steps after `until` are left out, where that is given. None where there are too few
        for a comparison.
        """
        key = (run.run, finding.id)
        if key in self._checks:
            self._drop(key)
            return False
        # The window alone: what lies before it may be from before the finding.
        before = side_of(run)
        if until is not None:
            kept = frozenset(index for index in before.steps.indices if index <= until)
            before = replace(before, steps=before.steps.of(kept))
        check = freeze(finding, before, tracks.generation(run.run), at_s, runs)
        if check is None:
            return None
        self._checks[key] = check
        if len(self._checks) > _KEPT:
            self._drop(next(iter(self._checks)))
        return True

    def holds(self, finding: Finding) -> bool:
        """Whether the window of a finding is frozen."""
        return (finding.run, finding.id) in self._checks

    def is_set(self, finding: Finding, setting: Setting) -> bool:
        """Whether a knob is known to be set to that value, for a finding that is checked."""
        check = self._checks.get((finding.run, finding.id))
        changed = check.changed if check is not None else None
        return changed is not None and (changed.name, changed.after) == (
            setting.name,
            setting.after,
        )

    def drop(self, finding: Finding) -> None:
        """Let the window of a finding go."""
        if self.holds(finding):
            self._drop((finding.run, finding.id))

    def changed(
        self, finding: Finding, setting: Setting, step: int, waits_for: RunView | None = None
    ) -> None:
        """Count what comes after a step: then a knob was set in the running training.

        Where the ranks tell that setting in their configuration, it is felt when they tell it;
        with `waits_for`, the run as it was then, when its loaders have begun another iterator.
        """
        key = (finding.run, finding.id)
        if key not in self._checks:
            return
        before = iterators(waits_for) if waits_for is not None else ()
        check = replace(self._checks[key], changed=setting, changed_step=step, felt=not before)
        self._checks[key] = check
        # What was counted until now is from before the change.
        self._results = tuple(
            replace(r, check=check, steps=0, after_ms=None, interval=None, clear=None, promise=None)
            if (r.check.run, r.check.finding.id) == key
            else r
            for r in self._results
        )
        self._unseen.discard(key)
        self._iterators.pop(key, None)
        if before:
            self._iterators[key] = before
        else:
            self._unseen.add(key)

    def _drop(self, key: tuple[str, str]) -> None:
        del self._checks[key]
        self._unseen.discard(key)
        self._iterators.pop(key, None)
        self._results = tuple(r for r in self._results if (r.check.run, r.check.finding.id) != key)

    def _see(self, key: tuple[str, str], check: Check, after: RunView) -> Check:
        """Begin at the moment at which what was set is first felt."""
        if key in self._iterators and after.run == check.run:
            if iterators(after) == self._iterators[key]:
                return check
            del self._iterators[key]
            return replace(check, changed_step=max(check.changed_step, after.steps), felt=True)
        if key not in self._unseen or check.changed is None or after.run != check.run:
            return check
        if not tells(check.changed, check.before.run, after):
            return check
        self._unseen.discard(key)
        return replace(check, changed_step=max(check.changed_step, after.steps))

    def refresh(self, runs: Sequence[RunView], tracks: Tracks) -> list[CheckResult]:
        """Compare anew, and return those that were completed by it."""
        results = []
        for key, check in list(self._checks.items()):
            after = successor(check, runs)
            after = after or next((run for run in runs if run.run == check.run), None)
            if after is not None:
                self._checks[key] = seen = self._see(key, check, after)
                results.append(verify(seen, tracks.side(after), tracks.generation(after.run)))
                continue
            # Its run is forgotten and no other has come: it stands as it stood.
            results += [r for r in self._results if (r.check.run, r.check.finding.id) == key]
        self._results = tuple(results)
        new = []
        for result in results:
            check = result.check
            told = (check.run, check.finding.id, check.at_s, f"{result.run}/{check.changed_step}")
            if result.is_done and told not in self._told:
                self._told.add(told)
                new.append(result)
        return new
