"""Whoever keeps a door is told who was refused at it, and what is wrong behind it."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import support
import zmq

from gpuwatch.errors import AgentError
from gpuwatch.wire.collect import Door, JobKey, door, link, listen, make_key, refusals
from gpuwatch.wire.collect.listener import Address

pytestmark = pytest.mark.process


@contextlib.contextmanager
def peer(port: int, server: JobKey, pair: JobKey) -> Iterator[None]:
    """Somebody who tries once."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        one = context.socket(zmq.DEALER)
        one.linger = 0
        one.reconnect_ivl = -1
        one.curve_serverkey = server.public
        one.curve_publickey, one.curve_secretkey = pair.public, pair.secret
        one.connect(f"tcp://127.0.0.1:{port}")
        yield
    finally:
        context.destroy(linger=0)


KEYLESS = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(52, b"\0")
"""How ZMTP 3 greets without a key."""


@contextlib.contextmanager
def a_door(directory: Path, key: JobKey) -> Iterator[tuple[Door, int, list[str]]]:
    """A door in a thread, its port and what it says."""
    said: list[str] = []
    with listen(Address("127.0.0.1", 0)) as listener:
        made = Door(directory, ["false"], listener, key, package="1", say=said.append)
        thread = threading.Thread(target=made.run)
        thread.start()
        try:
            yield made, listener.getsockname()[1], said
        finally:
            made.stop()
            thread.join(10)
            assert not thread.is_alive()


def test_who_has_another_key_is_said_by_the_command(rundir: Path, tmp_path: Path) -> None:
    key, other, log = (str(tmp_path / name) for name in ("key", "other", "log"))
    make_key(key)
    make_key(other)
    env = support.environment(rundir)
    argv = [*support.GPUWATCH, "agent", "--listen", "127.0.0.1:0", "--key", key]
    with support.process(argv, env, output=Path(log)):
        support.wait_until(lambda: "port" in support.text_of(Path(log)), 20, "a port")
        port = support.text_of(Path(log)).partition("port ")[2].partition(";")[0]
        done = support.gpuwatch(rundir, "status", f"tcp://127.0.0.1:{port}", "--key", other)
        assert done.returncode == 3
        assert "the key does not fit" in done.stderr
        line = "gpuwatch: a peer with a wrong key was refused"
        support.wait_until(lambda: line in support.text_of(Path(log)), 10, "a line")


def test_each_way_of_not_having_the_key_is_counted_and_others_are_not(
    rundir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "FIRST_PAUSE_S", 2.0)
    key, other = make_key(str(tmp_path / "key")), make_key(str(tmp_path / "other"))
    half = JobKey(key.public, other.secret)
    with a_door(rundir, key) as (made, port, said), contextlib.ExitStack() as stack:

        def lines(what: str) -> list[str]:
            return [line for line in said if line.startswith(what)]

        # Who has it is none of them.
        stack.enter_context(peer(port, key, key))
        one = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        # Its address is known once it was looked at: who is refused at once has none.
        support.wait_until(lambda: made.connections == 2, 10, "both")
        one.sendall(KEYLESS)
        support.wait_until(
            lambda: bool(lines("a peer without a key was refused (from 127.0.0.1)")), 10, "a line"
        )
        assert not lines("a peer with a wrong key")
        for server, pair in ((other, other), (key, other), (key, half), (other, key)):
            stack.enter_context(peer(port, server, pair))

        def counted() -> int:
            told = [line.partition(" ") for line in said if "with a wrong key" in line]
            return sum(1 if number == "a" else int(number) for number, _, _ in told)

        support.wait_until(lambda: counted() == 4, 20, "a count")
        assert len(lines("a peer with a wrong key was refused")) == 1


def test_what_is_wrong_behind_a_door_is_said_once(
    rundir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise AgentError("the node process cannot be started: no space left in /x")

    monkeypatch.setattr(link, "ensure_agent", fails)
    monkeypatch.setattr(door, "KEEPALIVE_S", 0.1)
    key = make_key(str(tmp_path / "key"))
    with a_door(rundir, key) as (_, _, said):
        support.wait_until(lambda: bool(said), 10, "a line")
        threading.Event().wait(1.0)
        assert said == ["the node process cannot be started: no space left in /x"]
