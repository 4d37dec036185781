"""Diagnosis beside the screen, in a thread that nothing ever waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpuwatch.store.views import View

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import RunDiagnosis

__all__ = ["Diagnose", "Diagnoser"]

Diagnose = Callable[[View], "Sequence[RunDiagnosis]"]
"""Judges every run of a view."""


class Diagnoser:
    """Runs `diagnose` on the newest submitted view, one at a time.

    A slow or hanging diagnosis delays only its own findings: keys, drawing and exit go on. The
    thread is a daemon and is never joined.
    """

    def __init__(self, diagnose: Diagnose) -> None:
        self._diagnose = diagnose
        self._wake = threading.Condition()
        self._pending: View | None = None
        self._results: Mapping[str, RunDiagnosis] = {}
        self._error = ""
        self._rounds = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def rounds(self) -> int:
        """How many diagnoses have ended; rises with each."""
        return self._rounds

    @property
    def results(self) -> Mapping[str, RunDiagnosis]:
        """The latest diagnosis of each run, by run id."""
        return self._results

    @property
    def error(self) -> str:
        """One sentence if the latest diagnosis failed, else empty."""
        return self._error

    def submit(self, view: View) -> None:
        """Ask for a diagnosis of this view; an older one that still waits is dropped."""
        with self._wake:
            if self._closed:
                return
            self._pending = view
            self._wake.notify()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="gpuwatch-diagnosis", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Ask the thread to end, without waiting for it."""
        with self._wake:
            self._closed = True
            self._pending = None
            self._wake.notify()

    def _work(self) -> None:
        while True:
            with self._wake:
                while self._pending is None:
                    if self._closed:
                        return
                    self._wake.wait()
                view, self._pending = self._pending, None
            try:
                results = {item.run: item for item in self._diagnose(view)}
            except Exception as problem:
                # A rule that fails must not take the screen with it; the person is told.
                self._error = f"diagnosis failed: {type(problem).__name__}: {problem}"
            else:
                self._results, self._error = results, ""
            # While it waits, the thread is not to keep a whole picture alive.
            del view
            self._rounds += 1
