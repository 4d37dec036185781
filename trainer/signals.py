"""Ctrl-C and SIGTERM: leave promptly, without noise, with the exit code a shell expects."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Stop", "Stopped", "stop_signals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """The process was asked to stop. Not an Exception: nothing on the way may swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class Stop:
    """Whether the process was asked to stop. One that nobody tells says no for ever."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.deferred = False

    def check(self) -> None:
        """Raise `Stopped` if so. To be called in every turn of a loop."""
        if self.signum is not None:
            raise Stopped(self.signum)

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """Keep a short block whole: a signal in it takes effect at its end.

        For starting loader workers: Python swallows what is raised around a fork, and torch's
        iterator cannot clean up half of itself. The death of a worker is held back too, for torch
        raises there: a signal to the whole group may reach the worker before this process. What
        is forked meanwhile inherits that mask.
        """
        self.deferred = True
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        try:
            yield
        finally:
            self.deferred = False
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.check()


@contextlib.contextmanager
def stop_signals(grace_s: float = 5.0) -> Iterator[Stop]:
    """Turn the first SIGINT or SIGTERM into `Stopped` in the main thread; ignore later ones.

    It is raised wherever the main thread is, so that waiting ends at once. Python swallows an
    exception in some places (a finalizer, a fork), so a loop calls `check` of what is yielded too.

    Whatever else fails while stopping (a collective whose peer has left, a loader worker that got
    the same signal) is the consequence, so `Stopped` is raised in its place. A main thread that is
    stuck in C code, such as a collective of a rank that hangs, never runs a Python handler: then
    the process kills its children and ends by itself after `grace_s`. The process is expected to
    exit after `Stopped`, and that limit stays in force until it does. Main thread only.
    """
    owner = os.getpid()
    stop = Stop()

    def handler(signum: int, _frame: FrameType | None) -> None:
        # Loader workers inherit the handler in a fork; their parent ends them.
        if os.getpid() == owner and stop.signum is None:
            stop.signum = signum
            # Loader workers that got the same signal are gone already; DataLoader's handler would
            # complain about them in the middle of the clean-up. (Not SIG_DFL: Python complains
            # about a signal that is pending while its handler goes.)
            signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
            if not stop.deferred:
                raise Stopped(signum)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    done = threading.Event()
    guard = threading.Thread(target=_guard, args=(reader, done, grace_s), daemon=True)
    guard.start()
    before = [signal.signal(signum, handler) for signum in _SIGNALS]
    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield stop
        stop.check()
    except Exception:
        if stop.signum is not None:
            raise Stopped(stop.signum) from None
        raise
    finally:
        if stop.signum is None:
            done.set()
            signal.set_wakeup_fd(wakeup_before)
            for signum, previous in zip(_SIGNALS, before, strict=True):
                signal.signal(signum, previous)
            os.write(writer, b"\0")
            guard.join()
            os.close(writer)
            os.close(reader)


def _guard(reader: int, done: threading.Event, grace_s: float) -> None:
    """Wait for a signal's byte (written by the C-level handler), then for the end or the limit."""
    while not done.is_set():
        for signum in os.read(reader, 64):
            if signum in _SIGNALS and not done.wait(grace_s):
                for child in multiprocessing.active_children():
                    child.kill()
                os._exit(128 + signum)
