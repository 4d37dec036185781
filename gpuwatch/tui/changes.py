"""Live changes: which knobs a run has, what may be set, and a change that is under way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuwatch.schema import Knob
from gpuwatch.store.views import RankView, RunView, View
from gpuwatch.tui.requests import Request, Told

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding, Hint
    from gpuwatch.store.session import Session

__all__ = [
    "HOW_TO_ALLOW",
    "Change",
    "KnobRow",
    "Proposal",
    "Value",
    "follows",
    "is_late",
    "knob_rows",
    "limits_text",
    "parse_value",
    "proposals",
    "value_text",
    "why_not_applied",
    "why_not_set",
    "wrong_value",
]

Value = int | float | str | bool

HOW_TO_ALLOW = "gpuwatch run --allow-control -- ..."
"""How a training is started that takes changes."""

_OVER = ("gone", "ended")

_WRITTEN_OUT = 1e15
"""A whole limit below this is shown with all its digits."""

_NEXT_EPOCH = "next epoch"
"""In the words of a rank on when a change takes effect: a loader's with its next iterator."""

_WORDS: Mapping[str, bool] = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


@dataclass(frozen=True, slots=True)
class KnobRow:
    """One live knob of a run: `values` by rank, the limits and the words of the first of them.

    `allowed` says whether every rank takes a change.
    """

    knob: Knob
    values: Mapping[int, Value]
    allowed: bool

    @property
    def name(self) -> str:
        """The name of the knob."""
        return self.knob.name

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have it, in their order."""
        return tuple(self.values)

    def by_value(self) -> list[tuple[Value, tuple[int, ...]]]:
        """Return each value with the ranks that have it, that of most ranks first."""
        groups: dict[tuple[str, str], list[int]] = {}
        for rank, value in self.values.items():
            groups.setdefault((type(value).__name__, repr(value)), []).append(rank)
        found = sorted(groups.values(), key=len, reverse=True)
        return [(self.values[ranks[0]], tuple(ranks)) for ranks in found]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A knob, the value to set, and the ranks to set it on; of a finding's hint or of a person.

    `asked` is the value of the hint where the knob does not go so far: `new` is the most that it
    takes then, and `hint` predicts nothing, since its prediction is for its own value.
    """

    run: str
    run_name: str
    row: KnobRow
    new: Value
    everyone: bool
    finding: Finding | None = None
    hint: Hint | None = None
    asked: Value | None = None


def knob_rows(run: RunView, ranks: Sequence[int] | None = None) -> tuple[KnobRow, ...]:
    """Return the knobs of a run that lives, in the order of the first rank that has them.

    `ranks` leaves out all others.
    """
    knobs: dict[str, Knob] = {}
    values: dict[str, dict[int, Value]] = {}
    closed: set[str] = set()
    for rank in run.ranks:
        if (
            rank.hello is None
            or rank.state in _OVER
            or (ranks is not None and rank.rank not in ranks)
        ):
            continue
        for knob in rank.hello.knobs:
            knobs.setdefault(knob.name, knob)
            values.setdefault(knob.name, {})[rank.rank] = knob.value
            if not rank.hello.allow_control:
                closed.add(knob.name)
    return tuple(KnobRow(knobs[name], values[name], name not in closed) for name in knobs)


def limits_text(knob: Knob) -> str:
    """Return `0..16`, `at least 1`, `adam, sgd`, `true, false`; empty where anything goes."""
    if knob.choices:
        return ", ".join(knob.choices)
    if isinstance(knob.value, bool):
        return "true, false"
    if knob.low is not None and knob.high is not None:
        return f"{_limit_text(knob, knob.low)}..{_limit_text(knob, knob.high)}"
    if knob.low is not None:
        return f"at least {_limit_text(knob, knob.low)}"
    return f"at most {_limit_text(knob, knob.high)}" if knob.high is not None else ""


def _limit_text(knob: Knob, limit: float) -> str:
    if isinstance(knob.value, int) and abs(limit) < _WRITTEN_OUT and limit == int(limit):
        return f"{int(limit):,}"
    return value_text(limit)


def value_text(value: Value) -> str:
    """Return a value as it is typed: `7`, `0.0003`, `true`, `adam`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def wrong_value(knob: Knob, value: Value) -> str:
    """Return one sentence on why a knob cannot be set to that, empty where it can."""
    name, shown = knob.name, value_text(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(knob.value, bool):
        return "" if isinstance(value, bool) else f"{name} is true or false, not {shown}"
    if isinstance(knob.value, str):
        if not isinstance(value, str):
            return f"{name} is a word, not {shown}"
        if knob.choices and value not in knob.choices:
            return f"{name} is one of {', '.join(knob.choices)}, not {shown}"
        return ""
    if not number or not math.isfinite(float(value)):
        return f"{name} is a number, not {shown}"
    if isinstance(knob.value, int) and float(value) != int(value):
        return f"{name} is a whole number, not {shown}"
    if knob.low is not None and float(value) < knob.low:
        return f"{name} takes {limits_text(knob)}: {shown} is too little"
    if knob.high is not None and float(value) > knob.high:
        return f"{name} takes {limits_text(knob)}: {shown} is too much"
    if knob.choices and shown not in knob.choices:
        return f"{name} is one of {', '.join(knob.choices)}, not {shown}"
    return ""


def parse_value(knob: Knob, text: str) -> Value:
    """Return what was typed as a value of that knob.

    Raises:
        ValueError: it is none; the message is one sentence.
    """
    text = text.strip()
    value: Value = text
    if isinstance(knob.value, bool):
        value = _WORDS.get(text.casefold(), text)
    elif isinstance(knob.value, int):
        value = _number(text, int)
    elif isinstance(knob.value, float):
        value = _number(text, float)
    problem = wrong_value(knob, value)
    if problem:
        raise ValueError(problem)
    return value


def _number(text: str, kind: type[int] | type[float]) -> Value:
    # More digits than any knob has: int() would take its time over them.
    for cast in (kind, float):
        try:
            return cast(text[:64])
        except ValueError:
            continue
    return text


def why_not_set(run: RunView, row: KnobRow | None = None) -> str:
    """Return one sentence on why nothing can be set in a run, empty where it can."""
    alive = [rank for rank in run.ranks if rank.state not in _OVER]
    if run.state == "ended" or not alive:
        return "the run has ended: start it anew with another value"
    allowed = row.allowed if row is not None else _allows(alive)
    if not allowed:
        return f"this run takes no changes: start it with {HOW_TO_ALLOW}"
    return ""


def _allows(ranks: Sequence[RankView]) -> bool:
    return all(rank.hello is not None and rank.hello.allow_control for rank in ranks)


def proposals(finding: Finding, run: RunView) -> tuple[Proposal, ...]:
    """Return the hints of a finding that can be set live, in their order."""
    rows = {row.name: row for row in knob_rows(run, finding.ranks)}
    found = []
    for hint in finding.hints:
        row = _row_of(hint, rows)
        if row is None or hint.new is None:
            continue
        new, asked, told = hint.new, None, hint
        if wrong_value(row.knob, new):
            most = _most(row.knob, new)
            if most is None or [value for value, _ in row.by_value()] == [most]:
                continue
            new, asked, told = most, new, replace(hint, predicted_ms=None)
        if isinstance(row.knob.value, int) and not isinstance(new, bool | str):
            new = int(new)
        if [value for value, _ in row.by_value()] == [new]:
            continue  # it has been set since
        everyone = set(row.ranks) == {rank.rank for rank in run.ranks}
        name = run.name or run.run
        found.append(Proposal(run.run, name, row, new, everyone, finding, told, asked))
    return tuple(found)


def _most(knob: Knob, value: Value) -> Value | None:
    """Return the most that a knob takes where a value is above that and is wrong for that alone."""
    if knob.high is None or isinstance(value, str) or not value > knob.high:
        return None
    whole = isinstance(knob.value, int)
    most: Value = math.floor(knob.high) if whole else knob.high
    open_knob = Knob(knob.name, knob.value, knob.low, None, knob.choices)
    return None if wrong_value(open_knob, value) or wrong_value(knob, most) else most


def _row_of(hint: Hint, rows: Mapping[str, KnobRow]) -> KnobRow | None:
    near = (row for name, row in rows.items() if follows(name, hint))
    return rows.get(hint.knob) or next(near, None)


def follows(name: str, hint: Hint) -> bool:
    """Whether a live knob of that name is the one of a hint: `train.lr` is that of `lr`."""
    return bool(hint.knob) and (name == hint.knob or name.endswith(f".{hint.knob}"))


def is_late(message: str) -> bool:
    """Whether a rank has said of a knob that it is felt with the next epoch only."""
    return _NEXT_EPOCH in message


def why_not_applied(finding: Finding, run: RunView) -> str:
    """Return one sentence on why no hint of a finding can be set live, empty where one can."""
    name = finding.id or "this finding"
    hints = [hint for hint in finding.hints if hint.knob and hint.new is not None]
    if not hints:
        return f"{name} has no hint that is a value to set"
    closed = why_not_set(run)
    found = proposals(finding, run)
    if found:
        return why_not_set(run, found[0].row)
    if closed:
        return closed
    rows = {row.name: row for row in knob_rows(run, finding.ranks)}
    for hint in hints:
        row = _row_of(hint, rows)
        if row is None or hint.new is None:
            continue
        most = _most(row.knob, hint.new)
        if most is not None:
            return f"{row.name} is {value_text(most)} already, the most that it takes"
        wrong = wrong_value(row.knob, hint.new)
        return wrong or f"{row.name} is {value_text(hint.new)} already"
    return f"{hints[0].knob} is no live knob of this run: change it, start anew, v compares"


class Change:
    """A knob that is being set on some ranks. A `Task`: it goes on when its page is closed.

    `begin` freezes the window of the finding and returns why it could not; `settled` is called
    once when every rank has answered, with the number of steps of the run then, or None where no
    rank has taken the change, and whether it is felt with the next epoch only.
    """

    def __init__(
        self,
        proposal: Proposal,
        *,
        begin: Callable[[], str] | None = None,
        settled: Callable[[int | None, bool], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.proposal = proposal
        self.unchecked = ""
        args: dict[str, Value] = {"knob": proposal.row.name, "value": proposal.new}
        self.request = Request(
            "set",
            proposal.run,
            proposal.row.ranks,
            args,
            everyone=proposal.everyone,
            clock=clock,
        )
        self._begin = begin
        self._settled = settled
        self._told = False

    @property
    def finished(self) -> bool:
        """Whether every rank has answered."""
        return self._told

    def start(self, session: Session, view: View) -> None:
        """Freeze the window, then send."""
        if self._begin is not None:
            self.unchecked = self._begin()
        self.request.send(session, view)

    def advance(self, view: View) -> Told | None:
        """Take the answers; the check begins with the last of them."""
        self.request.take(view)
        if self._told or not self.request.finished:
            return None
        self._told = True
        done = self.request.of("done")
        if self._settled is not None:
            answers = [self.request.answers[rank] for rank in done]
            steps = [answer.step for answer in answers]
            late = any(is_late(answer.message) for answer in answers)
            self._settled(max(steps) if steps else None, late)
        name, new = self.proposal.row.name, value_text(self.proposal.new)
        number = len(self.request.ranks)
        if not done:
            return f"{name} was not set to {new}: {self._problem()}", "warning", 8.0
        where = f"on {len(done)} of {number} ranks" if len(done) < number else "everywhere"
        style = "warning" if len(done) < number else "ok"
        finding = self.proposal.finding
        check = f"; {finding.id} is being checked" if finding and not self.unchecked else ""
        return f"{name} is set to {new} {where}{check}", style, 8.0

    def close(self) -> None:
        """Nothing is half done here: what was sent is answered without us."""

    def _problem(self) -> str:
        if self.request.error:
            return self.request.error
        return next((a.message for a in self.request.answers.values() if a.message), "no answer")
