"""A session that is made after the first picture is on the screen.

Sockets, decoding and the rules take a quarter of the time until something is drawn, and nothing is
known before they have run anyway.
"""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpuwatch.errors import GpuwatchError, TargetError
from gpuwatch.store.views import View

if TYPE_CHECKING:
    from gpuwatch.commands.session import LiveSession
    from gpuwatch.diagnosis import Engine, RunDiagnosis
    from gpuwatch.diagnosis.stacks import Ask

__all__ = ["DeferredEngine", "DeferredSession"]


class DeferredSession:
    """A `Session` that knows nothing until `start` has been called, and then is a live one."""

    def __init__(self) -> None:
        self._inner: LiveSession | None = None
        self._closed = False
        self._lock = threading.Lock()
        self.error: GpuwatchError | None = None

    def start(self, failed: Callable[[], None]) -> None:
        """Make the live session in a thread of its own; `failed` is called if it cannot be."""
        threading.Thread(
            target=self._make, args=[failed], name="gpuwatch-start", daemon=True
        ).start()

    def _make(self, failed: Callable[[], None]) -> None:
        from gpuwatch.commands.session import LiveSession

        try:
            made = LiveSession()
        except GpuwatchError as exc:
            self.error = exc
            failed()
            return
        with self._lock:
            if self._closed:
                made.close()
            else:
                self._inner = made

    @property
    def version(self) -> int:
        """Rises with every change."""
        inner = self._inner
        return 0 if inner is None else inner.version + 1

    def view(self) -> View:
        """Return the present picture."""
        inner = self._inner
        return View(version=0, at_s=time.time()) if inner is None else inner.view()

    def send(
        self,
        verb: str,
        run: str,
        rank: int | None = None,
        args: dict[str, str | int | float | bool] | None = None,
    ) -> str:
        """Queue a command and return its id."""
        inner = self._inner
        if inner is None:
            raise TargetError("nothing is connected yet")
        return inner.send(verb, run, rank, args)

    def close(self) -> None:
        """Let go of everything; returns within 0.5 s."""
        with self._lock:
            self._closed = True
            inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()


class DeferredEngine:
    """The rules, loaded when there is something to judge.

    Args:
        ask: sends a command to a rank, for the stacks of a hang.
    """

    def __init__(self, ask: "Ask | None" = None) -> None:
        self._ask = ask
        self._engine: Engine | None = None

    def __call__(self, view: View) -> "tuple[RunDiagnosis, ...]":
        """Evaluate every run of the view."""
        if not view.runs:
            return ()
        if self._engine is None:
            from gpuwatch.diagnosis import Engine

            self._engine = Engine(ask=self._ask)
        return self._engine(view)
