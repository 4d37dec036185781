"""Ends the app when its terminal is gone, whatever tells the process so, if anything does.

SIGHUP comes from a controlling terminal only. Without one the descriptors alone say it: then the
driver's reading thread spins on the end of file, its writing thread is dead, and after thirty more
pieces of output the whole app waits for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence

__all__ = ["HUNG_UP", "TerminalWatch", "has_hung_up", "terminal_descriptors"]

HUNG_UP = 128 + signal.SIGHUP
"""The exit code of an app whose terminal is gone."""

_LOOK_MS = 1000
_GRACE_S = 5.0
"""So long may the app take to end before it is ended."""

_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL


def terminal_descriptors(descriptors: Sequence[int] = (0, 1, 2)) -> list[int]:
    """Return those of the descriptors that are terminals."""
    return [number for number in descriptors if os.isatty(number)]


def has_hung_up(descriptors: Sequence[int]) -> bool:
    """Whether one of the terminals is gone."""
    poll = select.poll()
    for number in descriptors:
        poll.register(number, 0)
    return any(event & _GONE for _, event in poll.poll(0))


class TerminalWatch:
    """Waits, in a thread of its own, until one of the terminals hangs up.

    Then `gone` is called in that thread, once; who does not call `close` within `grace_s` of it is
    ended by `end` with `HUNG_UP`, whatever it waits for.
    """

    def __init__(
        self,
        descriptors: Sequence[int],
        gone: Callable[[], None],
        *,
        grace_s: float = _GRACE_S,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._descriptors = tuple(descriptors)
        self._gone = gone
        self._grace_s = grace_s
        self._end = end
        self._closed = threading.Event()

    def start(self) -> None:
        """Start waiting; nothing where there is no terminal."""
        if self._descriptors:
            threading.Thread(target=self._work, name="gpuwatch-terminal", daemon=True).start()

    def close(self) -> None:
        """Stop: the app has ended, and what comes after it takes as long as it takes."""
        self._closed.set()

    def _work(self) -> None:
        poll = select.poll()
        for number in self._descriptors:
            poll.register(number, 0)  # what ends it is told unasked
        while not self._closed.is_set():
            if any(event & _GONE for _, event in poll.poll(_LOOK_MS)):
                break
        if self._closed.is_set():
            return
        with contextlib.suppress(Exception):  # it ends in any case
            self._gone()
        if not self._closed.wait(self._grace_s):
            self._end(HUNG_UP)
