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
        """The training ends."""
        ...


class Desk:
    """Where jobs lie. `due` is what a mark tests; `outcomes` are (id, outcome), for the telemetry.

    Args:
        recorder: whose counts tell boundaries.
        clock: monotonic seconds.
    """

    def __init__(self, recorder: Recorder, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = recorder
        self._clock = clock
        self._inbox: deque[tuple[Job, float]] = deque()
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
        self._inbox.append((job, self._clock() + ttl_s))
        self.due = True

    # --- the training thread -------------------------------------------------------------------

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
            job, until_s = self._inbox.popleft()
            if self._clock() > until_s:
                self._end(job, _EXPIRED)
            else:
                self._held.append(job)
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
            self._end(self._inbox.popleft()[0], _ENDED)
        self.due = False


_EXPIRED = "expired: no step boundary came within its time to live; send it again"
_ENDED = "the training has ended before it was done"
