"""A terminal that goes away is seen by its descriptors, and nothing outlives it for long."""

import os
import pty
import signal
import threading

from gpuwatch.tui.hangup import HUNG_UP, TerminalWatch, terminal_descriptors


class Heard:
    """Records what a watch does, and answers like an app that leaves, or one that does not."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self.ended: list[int] = []
        self.end_called = threading.Event()

    def end(self, code: int) -> None:
        self.ended.append(code)
        self.end_called.set()


def test_nothing_is_said_while_the_terminal_is_there() -> None:
    heard = Heard()
    main, child = pty.openpty()
    watch = TerminalWatch([child], heard.gone.set, grace_s=0.1, end=heard.end)
    watch.start()
    os.write(main, b"q")  # what is typed is no end
    assert not heard.gone.wait(0.3)
    watch.close()
    os.close(main)
    assert not heard.gone.wait(1.5)
    os.close(child)


def test_an_app_that_stays_is_ended() -> None:
    heard = Heard()
    main, child = pty.openpty()
    TerminalWatch([child], heard.gone.set, grace_s=0.1, end=heard.end).start()
    os.close(main)
    assert heard.gone.wait(20)
    assert heard.end_called.wait(20)
    assert heard.ended == [HUNG_UP] == [128 + signal.SIGHUP]
    os.close(child)


def test_an_app_that_leaves_may_take_its_time_afterwards() -> None:
    heard = Heard()
    main, child = pty.openpty()

    def leave() -> None:
        heard.gone.set()
        watch.close()

    watch = TerminalWatch([child], leave, grace_s=0.1, end=heard.end)
    watch.start()
    os.close(main)
    assert heard.gone.wait(20)
    assert not heard.end_called.wait(0.5)
    os.close(child)


def test_an_app_that_cannot_even_be_told_is_ended() -> None:
    heard = Heard()
    main, child = pty.openpty()

    def fail() -> None:
        raise RuntimeError("no loop")

    TerminalWatch([child], fail, grace_s=0.1, end=heard.end).start()
    os.close(main)
    assert heard.end_called.wait(20)
    os.close(child)


def test_only_terminals_are_watched() -> None:
    reading, writing = os.pipe()
    main, child = pty.openpty()
    try:
        assert terminal_descriptors([reading, writing, child]) == [child]
    finally:
        for number in (reading, writing, main, child):
            os.close(number)
    # Others come and go: those of the tests before may end meanwhile.
    before = set(threading.enumerate())
    TerminalWatch([], lambda: None).start()
    assert not [t for t in threading.enumerate() if t not in before and "gpuwatch" in t.name]
