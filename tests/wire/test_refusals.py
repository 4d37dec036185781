"""Who is refused at a door is said, seldom, and costs nothing that grows."""

import socket
import tracemalloc

from gpuwatch.wire.collect.refusals import KEYLESS, LONGEST_PAUSE_S, WRONG_KEY, Refusals
from gpuwatch.wire.collect.tcpinfo import peer_address


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.refusals = Refusals(self.lines.append)

    def at(self, now_s: float, count: int = 0, address: str = "10.0.0.7") -> list[str]:
        """Let so many come, look, and return what was said of it."""
        before = len(self.lines)
        for _ in range(count):
            self.refusals.add(WRONG_KEY, address, now_s)
        self.refusals.look(now_s)
        return self.lines[before:]


def test_the_first_is_said_at_once_and_the_next_in_a_minute() -> None:
    log = Log()
    assert log.at(100, 1) == [
        "a peer with a wrong key was refused (from 10.0.0.7): who is to watch needs a copy of the "
        "key file of this door"
    ]
    assert log.at(130, 1) == []
    assert log.at(150, 1, "10.0.0.8") == []
    assert log.at(159, 1, "") == []  # gone too soon to be known
    assert log.at(160) == [
        "3 peers with a wrong key refused in the last minute (last from 10.0.0.8)"
    ]
    assert log.at(200, 1, "") == []
    # It goes on: seldomer.
    assert log.at(279) == []
    assert log.at(280) == ["1 peer with a wrong key refused in the last 2 minutes"]
    # It has ended: the next one is the first again.
    assert log.at(600) == []
    assert log.at(601, 1)[0].startswith("a peer with a wrong key was refused (from 10.0.0.7)")


def test_kinds_are_counted_apart() -> None:
    log = Log()
    for what in (WRONG_KEY, KEYLESS, KEYLESS, WRONG_KEY, KEYLESS):
        log.refusals.add(what, "", 0.0)
    log.refusals.look(61.0)
    assert [line.partition(":")[0] for line in log.lines] == [
        "a peer with a wrong key was refused",
        "a peer without a key was refused",
        "1 peer with a wrong key refused in the last minute",
        "2 peers without a key refused in the last minute",
    ]


def test_a_flood_of_a_day_is_some_lines_and_no_memory() -> None:
    log = Log()
    for second in range(3600):
        log.at(second, 3, f"10.0.{second % 250}.1")
    first = len(log.lines)
    tracemalloc.start()
    try:
        log.at(3601, 10_000)
        before = tracemalloc.get_traced_memory()[0]
        for second in range(3602, 86400, 10):
            log.at(second, 3, f"10.0.{second % 250}.1")
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert first < 10
    assert len(log.lines) - first <= 86400 / LONGEST_PAUSE_S
    assert grown < 20_000
    assert all(len(line) < 200 for line in log.lines)


def test_the_other_end_of_a_connection_by_its_descriptor() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname(), source_address=("127.0.0.3", 0)):
            far, _ = listener.accept()
            with far:
                assert peer_address(far.fileno()) == "127.0.0.3"
                assert far.getsockname()[0] == "127.0.0.1"  # it is still open
        assert peer_address(listener.fileno()) == ""
    assert peer_address(10_000) == ""
    one, other = socket.socketpair()
    with one, other:
        assert peer_address(one.fileno()) == ""
