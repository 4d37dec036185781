"""Knobs that somebody has set in a running training, and whose hint each of them follows.

Every rank logs what became of a command, for all who watch. So the check of a finding begins in
each monitor, and in the replay of a recording, wherever the change was sent from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwatch.schema import Logged
from gpuwatch.store.compare import Setting
from gpuwatch.store.views import RankView, RunView
from gpuwatch.tui.changes import Value, follows, is_late, knob_rows, parse_value

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding

__all__ = ["Seen", "Witness"]

_KEPT_RUNS = 32


@dataclass(frozen=True, slots=True)
class Seen:
    """A knob was set, and `finding` has a hint for it.

    Steps up to `until` had ended when the first rank took the command, those after `step` begin
    after it was done; where it is `late` it is felt with the next epoch only.
    """

    finding: Finding
    setting: Setting
    until: int
    step: int
    late: bool


class Witness:
    """Follows the command logs of runs from one picture to the next.

    `runs` are those whose logs were seen to be empty before.
    """

    def __init__(self, runs: Iterable[str] = ()) -> None:
        self._known: dict[str, frozenset[str]] = {run: frozenset() for run in runs}

    def take(self, run: RunView, findings: Sequence[Finding]) -> list[Seen]:
        """Take the newest picture of a run; returns what was set since, by the first that has it.

        What is in the log when a run is seen first is history, and a command without a change or
        without a hint of an open finding is nobody's.
        """
        known = self._known.get(run.run)
        logs = [(rank, rank.commands) for rank in run.ranks if rank.commands]
        done: dict[str, tuple[RankView, Logged]] = {}
        for rank, commands in logs:
            for logged in commands:
                if logged.verb == "set" and logged.status == "done":
                    done.setdefault(logged.id, (rank, logged))
        if known is None:
            while len(self._known) >= _KEPT_RUNS:
                del self._known[next(iter(self._known))]
            known = frozenset(done)
        # What has left the logs does not come back: they are as long for everybody.
        self._known[run.run] = frozenset(done)
        seen = []
        for ident, (rank, logged) in done.items():
            if ident in known:
                continue
            began_s = min(
                one.at_s - teller.ahead_s
                for teller, commands in logs
                for one in commands
                if one.id == ident
            )
            found = _seen(run, findings, rank, logged, began_s)
            if found is not None:
                seen.append(found)
        return seen


def _seen(
    run: RunView, findings: Sequence[Finding], rank: RankView, logged: Logged, began_s: float
) -> Seen | None:
    """Return what a command has set, from its words: `num_workers 1 -> 6, after this step`."""
    name, _, text = logged.args.split(" at=")[0].partition(" ")
    row = next((row for row in knob_rows(run, (rank.rank,)) if row.name == name), None)
    before, arrow, _ = logged.message.partition(" -> ")
    if row is None or not arrow or not before.startswith(f"{name} "):
        return None
    try:
        old: Value = parse_value(row.knob, before.removeprefix(f"{name} "))
        new: Value = parse_value(row.knob, text)
    except ValueError:
        return None
    finding = next(
        (
            one
            for one in findings
            if one.state == "open"
            and rank.rank in one.ranks
            and any(follows(name, hint) for hint in one.hints)
        ),
        None,
    )
    if finding is None:
        return None
    until = _last_before(run, began_s)
    return Seen(finding, Setting(name, old, new), until, run.steps, is_late(logged.message))


def _last_before(run: RunView, at_s: float) -> int:
    """Return the newest steady step that every rank had ended by then, -1 for none.

    `at_s` is by the observer's clock.
    """
    ended = []
    for rank in run.ranks:
        for record in reversed(rank.window):
            if record.started_s + record.step_ns / 1e9 <= at_s + rank.ahead_s:
                ended.append(record.index)
                break
        else:
            if rank.window:
                return -1
    return min(ended, default=-1)
