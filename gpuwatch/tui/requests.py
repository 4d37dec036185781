"""Commands to ranks from the screen: what was asked, what has come, and why nothing has."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpuwatch.errors import GpuwatchError
from gpuwatch.store.session import Session
from gpuwatch.store.views import RankView, View
from gpuwatch.tui.render import numbers

__all__ = ["SLOW_S", "Answer", "Request", "Task", "Told", "is_expired", "pending_text"]

SLOW_S = 3.0
"""A rank takes a tenth of a second to answer; after this long something is to be said."""

_OVER = ("gone", "ended")
_LONG_STEP_S = 10.0

_TTL_S = 10.0
_STEPS_TO_LIVE = 3
"""A rank does a command within ten seconds, or within three of its steps where they are longer."""

_MARGIN_S = 1.0
"""The way there and back: a rank counts from the moment at which the command comes."""

Told = tuple[str, str, float]
"""What the footer has to say: text, style, seconds."""


class Task(Protocol):
    """Something that goes on while the person looks at other pages."""

    @property
    def finished(self) -> bool:
        """Whether nothing more comes of it."""

    def advance(self, view: View) -> Told | None:
        """Take what is new, and return what the person is to be told once."""

    def close(self) -> None:
        """Let go of what is half done: the app ends."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How one rank stands: `status` is asked, accepted, done, error or lost.

    Lost means that nothing comes any more: the rank is gone, or began anew. `message` is then the
    sentence about it. `step` is the number of steps that the rank had when this status came.
    """

    status: str = "asked"
    message: str = ""
    data: str = ""
    step: int = 0

    @property
    def pending(self) -> bool:
        """Whether more is to come."""
        return self.status in ("asked", "accepted")


class Request:
    """One command to some ranks of a run.

    `answers` has a state for each rank; `error` is the sentence where it could not be sent.
    `everyone` addresses all ranks of the run at once, else each gets a command of its own.
    """

    def __init__(
        self,
        verb: str,
        run: str,
        ranks: Sequence[int],
        args: Mapping[str, str | int | float | bool] | None = None,
        *,
        everyone: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.verb = verb
        self.run = run
        self.ranks = tuple(ranks)
        self.args = dict(args or {})
        self.error = ""
        self.answers: dict[int, Answer] = {rank: Answer() for rank in self.ranks}
        self._everyone = everyone
        self._clock = clock
        self._sent_at = clock()
        self._ids: dict[int, str] = {}
        self._incarnations: dict[int, str] = {}

    @property
    def waited_s(self) -> float:
        """Seconds since it was sent."""
        return self._clock() - self._sent_at

    @property
    def finished(self) -> bool:
        """Whether nothing more comes."""
        return bool(self.error) or not any(answer.pending for answer in self.answers.values())

    def of(self, status: str) -> tuple[int, ...]:
        """Return the ranks that stand so."""
        return tuple(rank for rank, answer in self.answers.items() if answer.status == status)

    def send(self, session: Session, view: View) -> None:
        """Send it. Ranks of which the view knows that they are over are not asked."""
        known = _ranks(view, self.run)
        self._sent_at = self._clock()
        asked = []
        for rank in self.ranks:
            over = _over(rank, known.get(rank))
            if over:
                self.answers[rank] = Answer("lost", over)
            else:
                asked.append(rank)
                self._incarnations[rank] = known[rank].incarnation
        try:
            if self._everyone and asked:
                name = session.send(self.verb, self.run, None, self.args)
                self._ids = dict.fromkeys(asked, name)
                return
            for rank in asked:
                self._ids[rank] = session.send(self.verb, self.run, rank, self.args)
        except GpuwatchError as exc:
            self.error = str(exc)

    def take(self, view: View) -> bool:
        """Take the answers of a view; returns whether there was a new one."""
        if self.finished:
            return False
        known = _ranks(view, self.run)
        new = False
        for number, before in self.answers.items():
            if not before.pending:
                continue
            after = self._answer(number, known.get(number), before)
            if after is not before:
                self.answers[number] = after
                new = True
        return new

    def _answer(self, number: int, rank: RankView | None, before: Answer) -> Answer:
        after = before
        asked = self._ids.get(number)
        for reply in rank.replies if rank is not None else ():
            if reply.id != asked or (reply.status == "accepted" and before.status == "accepted"):
                continue
            steps = rank.steps if rank is not None else 0
            after = Answer(reply.status, reply.message, reply.data, steps)
            if not after.pending:
                return after
        over = _over(number, rank)
        if over:
            return Answer("lost", over)
        if rank is not None and rank.incarnation != self._incarnations.get(number):
            return Answer("lost", f"rank {number} was started anew: it knows nothing of this")
        return after


def _ranks(view: View, run: str) -> dict[int, RankView]:
    found = view.run(run)
    return {rank.rank: rank for rank in found.ranks} if found is not None else {}


def _over(number: int, rank: RankView | None) -> str:
    """Return why a rank can answer nothing any more, empty where it can."""
    if rank is None:
        return f"rank {number} is not known any more: nobody answers"
    if rank.state not in _OVER:
        return ""
    reason = f" ({rank.state_reason})" if rank.state_reason else ""
    word = "has ended" if rank.state == "ended" else "is gone"
    return f"rank {number} {word}{reason}: nobody answers"


def _ttl_s(rank: RankView) -> float:
    step_ms = rank.step_ms
    known = step_ms is not None and numbers.known(step_ms)
    return max(_TTL_S, _STEPS_TO_LIVE * (step_ms or 0.0) / 1e3) if known else _TTL_S


def is_expired(answer: Answer, rank: RankView | None, waited_s: float, link: str = "live") -> bool:
    """Return whether a rank has come to no step end within the time that a command has.

    The rank throws it away at its next step end and says so then. Of one that is not heard it is
    not known.
    """
    return (
        answer.status == "accepted"
        and rank is not None
        and rank.state != "silent"
        and link in ("live", "replay")
        and rank.steps <= answer.step
        and waited_s >= _ttl_s(rank) + _MARGIN_S
    )


def pending_text(answer: Answer, rank: RankView | None, waited_s: float, link: str = "live") -> str:
    """Return what is being waited for, and what it means that it has not come.

    `rank` is the rank as it is now, `link` that of the view. An `accepted` command waits for the
    training thread, one that is only `asked` for the thread of the telemetry.
    """
    age = numbers.age(waited_s)
    if answer.status == "asked" and waited_s < SLOW_S:
        return "asking the rank"
    if link not in ("live", "replay"):
        return f"no answer for {age}: there is no contact with its node"
    if rank is not None and rank.state == "silent":
        reason = f" ({rank.state_reason})" if rank.state_reason else ""
        since = "accepted, then silent" if answer.status == "accepted" else f"no answer for {age}"
        return f"{since}: the rank is silent{reason}"
    if answer.status == "asked":
        return f"no answer for {age}: its telemetry thread may be held up by the GIL"
    said = answer.message or "accepted"
    if rank is None:
        return said
    if is_expired(answer, rank, waited_s, link):
        within = f"within {_ttl_s(rank):.0f} s"
        return f"expired: the rank came to no step end {within}; it was not done"
    if rank.state == "hung":
        return "the rank hangs: it was accepted and waits for a step"
    if rank.state in ("eval", "checkpoint", "compile", "starting"):
        return f"accepted: it waits for the next training step, the rank is in {rank.state}"
    if rank.phase_age_s >= _LONG_STEP_S:
        where = f"in {rank.phase} for {numbers.age(rank.phase_age_s)}" if rank.phase else "still"
        return f"accepted: it waits for the end of a step, the rank is {where}"
    return f"{said}, {age} ago" if waited_s >= SLOW_S else said
