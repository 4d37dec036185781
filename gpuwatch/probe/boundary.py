"""Between the telemetry thread and the training thread: what is done at a step's boundary.

The telemetry thread puts a job on the desk; the training thread looks at it at the next boundary.
An empty desk costs a step the test of one flag, where a mark passes anyway.

A boundary is the first fetch after an optimizer step, where a new step begins. Where nothing
fetches it is the end of the optimizer, and in a loop that calls `gpuwatch.step()` that call alone.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from gpuwatch.probe.events import Recorder

__all__ = ["Desk", "Job", "Outcome"]


class Outcome(NamedTuple):
    """What became of a command."""

    status: Literal["done", "error"]
    message: str = ""
    data: str = ""


class Job(Protocol):
    """Something for the training thread. No method may raise anything but an Exception."""

    id: str

    def work(self, tick: int) -> Outcome | None:
        """At a boundary; None as long as it is not over, or is ended by someone else."""
        ...

    def glance(self) -> Outcome | None:
        """At a fetch that is no boundary."""
        ...

    def close(self) -> Outcome | None:
        """The training ends, or nobody took it up in time: then in the telemetry thread."""
        ...


class _Laid(NamedTuple):
    """A job in the inbox. Whoever gets the one item of `open` decides what becomes of it."""

    job: Job
    until_s: float
    open: list[None]

    def claim(self) -> bool:
        try:
            self.open.pop()
        except IndexError:
            return False
        return True


class Desk:
    """Where jobs lie. `due` is what a mark tests; `outcomes` are (id, outcome), for the telemetry.

    Args:
        recorder: whose counts tell boundaries.
        clock: monotonic seconds.
    """

    def __init__(self, recorder: Recorder, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = recorder
        self._clock = clock
        self._inbox: deque[_Laid] = deque()
        self._held: list[Job] = []
        self._seen = 0  # the tick of the last boundary
        self._since_fetch: set[int] = set()  # optimizers that have stepped since the last fetch
        self._fetchless = False
        self.due = False
        self.fetches = 0
        """Fetches that were looked at: they are the ticks as long as no optimizer is seen."""
        self.outcomes: deque[tuple[str, Outcome]] = deque()

    # --- the telemetry thread ------------------------------------------------------------------

    def put(self, job: Job, ttl_s: float) -> None:
        """Have the training thread take the job up at a boundary within `ttl_s`."""
        if not self.due:
            # Whoever is between the optimizer and the fetch now has this boundary behind it.
            self._seen = self._recorder.attempts
            self._since_fetch.clear()
        self._inbox.append(_Laid(job, self._clock() + ttl_s, [None]))
        self.due = True

    def expire(self) -> None:
        """End what nobody has taken up within its time: the training may stand for ever."""
        now_s = self._clock()
        for laid in list(self._inbox):
            if now_s > laid.until_s and laid.claim():
                self._end(laid.job, _EXPIRED)

    # --- the training thread -------------------------------------------------------------------

    @property
    def tick(self) -> int:
        """The tick of the last boundary, or of one that has begun since."""
        return self._recorder.said or self._recorder.attempts or self.fetches

    def fetching(self) -> None:
        """A fetch begins."""
        recorder = self._recorder
        self._since_fetch.clear()
        self._fetchless = False
        if recorder.said or (recorder.attempts and recorder.attempts == self._seen):
            self._each(lambda job: job.glance())
            return
        self.fetches += 1
        self._boundary(recorder.attempts or self.fetches)

    def stepped(self, optimizer: int) -> None:
        """An optimizer step has ended."""
        if self._recorder.said:
            return
        self._fetchless = self._fetchless or optimizer in self._since_fetch
        self._since_fetch.add(optimizer)
        if self._fetchless:
            self._boundary(self._recorder.attempts)

    def said(self) -> None:
        """The user has said that an iteration ends."""
        self._boundary(self._recorder.said)

    def _boundary(self, tick: int) -> None:
        self._seen = self._recorder.attempts
        self.due = False  # before the inbox is looked at: what comes later sets it again
        while self._inbox:
            laid = self._inbox.popleft()
            if not laid.claim():
                continue  # it was answered as expired
            if self._clock() > laid.until_s:
                self._end(laid.job, _EXPIRED)
            else:
                self._held.append(laid.job)
        self._each(lambda job: job.work(tick))
        if self._held:
            self.due = True

    def _each(self, call: Callable[[Job], Outcome | None]) -> None:
        for job in self._held.copy():
            try:
                outcome = call(job)
            except Exception as exc:
                self.drop(job)
                self._end(job, f"it failed: {type(exc).__name__}: {exc}")
                continue
            if outcome is not None:
                self.drop(job)
                self.outcomes.append((job.id, outcome))

    def _end(self, job: Job, why: str) -> None:
        with contextlib.suppress(Exception):
            job.close()
        self.outcomes.append((job.id, Outcome("error", why)))

    def drop(self, job: Job) -> None:
        """Let go of a job that is ended by someone else."""
        with contextlib.suppress(ValueError):
            self._held.remove(job)

    def close(self) -> None:
        """The training ends: nothing more is done."""
        self._each(lambda job: job.close() or Outcome("error", _ENDED))
        while self._inbox:
            laid = self._inbox.popleft()
            if laid.claim():
                self._end(laid.job, _ENDED)
        self.due = False


_EXPIRED = "expired: no step boundary came within its time to live; send it again"
_ENDED = "the training has ended before it was done"
