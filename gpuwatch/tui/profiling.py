"""A profile of a rank: asked for, read, its trace fetched; it outlives its page."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpuwatch.store.session import Session
from gpuwatch.store.views import View
from gpuwatch.tui.answers import AnswerError, ProfileAnswer, read_profile
from gpuwatch.tui.export import trace_target
from gpuwatch.tui.fetch import Fetch
from gpuwatch.tui.requests import Answer, Request, Told, is_expired

__all__ = ["DEFAULT_STEPS", "MOST_STEPS", "Profile"]

DEFAULT_STEPS = 5
MOST_STEPS = 50
"""What a rank profiles at most at once: a trace has about a megabyte a step."""


class Profile:
    """One profile of one rank. A `Task`.

    `answer` is there when it was read, `error` says why not; `fetch` is its trace on the way here.
    """

    def __init__(
        self, run: str, rank: int, steps: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.run, self.rank, self.steps = run, rank, steps
        self.request = Request("profile", run, (rank,), {"steps": steps}, clock=clock)
        self.answer: ProfileAnswer | None = None
        self.error = ""
        self.fetch: Fetch | None = None
        self._clock = clock
        self._read_at = 0.0

    @property
    def status(self) -> Answer:
        """How the rank stands to it."""
        return self.request.answers[self.rank]

    @property
    def age_s(self) -> float:
        """Seconds since it was read."""
        return self._clock() - self._read_at

    @property
    def finished(self) -> bool:
        """Whether nothing is under way."""
        asked = self.answer is None and not self.error
        return not asked and (self.fetch is None or self.fetch.finished)

    def waits(self, view: View) -> bool:
        """Whether it is under way: it is not over, and its time to be begun has not passed."""
        if self.finished:
            return False
        run = view.run(self.run)
        ranks = run.ranks if run is not None else ()
        rank = next((rank for rank in ranks if rank.rank == self.rank), None)
        return not is_expired(self.status, rank, self.request.waited_s, view.link)

    def start(self, session: Session, view: View) -> None:
        """Ask for it."""
        self.request.send(session, view)
        self._read()

    def bring(self, session: Session, view: View, run_name: str) -> str:
        """Begin to fetch the trace, or go on; returns why not, empty where it is under way."""
        if self.answer is None or not self.answer.trace:
            return "there is no trace to fetch"
        if self.fetch is not None and self.fetch.path is not None:
            return f"it is there: {self.fetch.path}"
        if self.fetch is None:
            target = trace_target(run_name, self.rank, self.answer.trace)
            self.fetch = Fetch(
                self.run, self.rank, self.answer.trace, session, target, clock=self._clock
            )
        elif not self.fetch.finished:
            return ""
        self.fetch.start(view)
        return ""

    def advance(self, view: View) -> Told | None:
        """Take what came."""
        if self.fetch is not None and not self.fetch.finished:
            return self.fetch.advance(view)
        if self.answer is not None or self.error:
            return None
        self.request.take(view)
        self._read()
        return self._news()

    def _news(self) -> Told | None:
        if self.answer is not None:
            return f"rank {self.rank} is profiled; p shows it", "ok", 8.0
        if self.error:
            return f"rank {self.rank} is not profiled: {self.error}", "warning", 8.0
        return None

    def close(self) -> None:
        """Leave no half of a file behind."""
        if self.fetch is not None:
            self.fetch.close()

    def _read(self) -> None:
        status = self.status
        if self.request.error or status.status in ("error", "lost"):
            self.error = self.request.error or status.message or "the rank refused"
        elif status.status == "done":
            try:
                self.answer = read_profile(status.data)
                self._read_at = self._clock()
            except AnswerError as exc:
                self.error = str(exc)
