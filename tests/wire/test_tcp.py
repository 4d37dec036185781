"""TCP with CURVE: who gets in, what a network carries, what the door and the monitor withstand."""

import contextlib
import itertools
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import support
import zmq
from builders import node_frame

from gpuwatch.commands.remote import open_session
from gpuwatch.errors import TargetError
from gpuwatch.frames import decode_node_frame, decode_rank_frame, encode
from gpuwatch.schema import WIRE_VERSION, Command, NodeFrame, RankFrame
from gpuwatch.store import RankView
from gpuwatch.wire.collect import (
    Door,
    JobKey,
    TcpLink,
    TcpTarget,
    TcpWay,
    agent_presence,
    listen,
    load_key,
    make_key,
    parse_address,
    scout,
    tcplink,
    way,
)
from gpuwatch.wire.collect import door as doors
from gpuwatch.wire.collect.complaints import why_no_connection, why_no_handshake
from gpuwatch.wire.collect.gather import CALM_S, wish
from gpuwatch.wire.collect.listener import Address
from gpuwatch.wire.collect.pipe import MAGIC, PIPE_VERSION, preamble
from gpuwatch.wire.collect.scout import Found, addresses_of
from gpuwatch.wire.collect.tcpinfo import Unread, cut, received_bytes

pytestmark = pytest.mark.process

FAKE_RANK = str(Path(__file__).parent / "fake_rank.py")
TESTS = str(Path(__file__).parent.parent)
AGENT = [*support.GPUWATCH, "agent", "--detach"]
NAME = b"a-run"  # of the fake ranks, in every hello
KEY = JobKey(*zmq.curve_keypair())
OTHER = JobKey(*zmq.curve_keypair())


# --- key files ---------------------------------------------------------------------------------


def test_a_key_file_is_for_its_owner_alone_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    umask = os.umask(0)
    try:
        made = make_key(str(path))
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_key(str(path)) == made
    assert made.secret.decode() not in repr(made)
    before = path.read_bytes()
    with pytest.raises(TargetError, match="is there already"):
        make_key(str(path))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(TargetError):
        make_key(str(tmp_path / "link"))
    assert path.read_bytes() == before
    with pytest.raises(TargetError, match="cannot be made: No such file"):
        make_key(str(tmp_path / "no" / "key"))
    # Kubernetes mounts a secret as a link to a link.
    (tmp_path / "mounted").symlink_to(path)
    assert load_key(str(tmp_path / "mounted")) == made


def test_a_key_file_that_is_not_to_be_trusted_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(TargetError) as caught:
            load_key(str(path))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    good = tmp_path / "good"
    make_key(str(good))
    text = good.read_text()
    public, secret = text.split()[5], text.split()[7]
    path = tmp_path / "bad\x1b[2J"
    for damaged in (
        "",
        text[:-20],
        text.replace("public", "publik"),
        text * 40,
        text.replace(public, secret),
        text.replace("job key 1", "job key 2"),
        text.replace(secret[:4], "\udcff\udcfe~~"),
        text.replace(secret, f"{'%' * 40}"),
    ):
        path.write_bytes(damaged.encode("utf-8", "surrogateescape"))
        path.chmod(0o600)
        said = refused(path)
        assert "damaged" in said
        assert "\x1b" not in said
    for mode in (0o640, 0o604, 0o620):
        good.chmod(mode)
        assert "is open to other users; type: chmod 600" in refused(good)
    good.chmod(0o600)
    assert "there is no key file" in refused(tmp_path / "missing")
    assert "is no file" in refused(tmp_path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    assert "is no file" in refused(tmp_path / "fifo")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "belongs to another user" in refused(good)


# --- addresses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node1:5555", "node1", 5555),
        ("tcp://node1:5555", "node1", 5555),
        (":0", "", 0),
        ("*:7", "", 7),
        ("tcp://[::1]:7", "::1", 7),
        ("0.0.0.0:7", "0.0.0.0", 7),
    ],
)
def test_what_an_address_means(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host, port)


@pytest.mark.parametrize(
    "text", ["", "5555", "node1", "node1:", ":70000", "http://a:1", "a b:1", "\x1b[2J:1", "-a:1"]
)
def test_what_is_no_address_is_one_sentence(text: str) -> None:
    with pytest.raises(TargetError, match="is no address to listen on") as caught:
        parse_address(text)
    assert "\x1b" not in str(caught.value)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that knows what nobody is called, and does not answer for others."""
    true = socket.getaddrinfo
    errors = {
        "nowhere.invalid": socket.EAI_NONAME,
        "later.invalid": socket.EAI_AGAIN,
        "broken.invalid": socket.EAI_FAIL,
    }

    def look(host: str, *args: Any, **kwargs: Any) -> Any:
        if host in errors:
            raise socket.gaierror(errors[host], "no")
        return true(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", look)


@pytest.mark.usefixtures("names")
def test_a_port_that_is_taken_and_an_address_of_another_machine() -> None:
    with listen(Address("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(TargetError, match="the port is taken"):
            listen(Address("127.0.0.1", port))
    with pytest.raises(TargetError, match="no address of this machine"):
        listen(Address("192.0.2.1", port))
    with pytest.raises(TargetError, match=r"no machine is called nowhere\.invalid"):
        listen(Address("nowhere.invalid", port))
    for host in ("later.invalid", "broken.invalid"):
        with pytest.raises(TargetError, match=f"{host} is looked up in vain; is the name server"):
            listen(Address(host, port))
    listen(Address("127.0.0.1", port)).close()


def test_a_name_that_is_looked_up_for_ever_and_a_family_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = threading.Event()
    no_family = [(9999, socket.SOCK_STREAM, 0, "", ("", 0))]
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(60) and no_family)
        try:
            with pytest.raises(TargetError, match=r"slow is looked up in vain"):
                listen(Address("slow", 0), lookup_s=0.05)
        finally:
            answered.set()
        with pytest.raises(TargetError, match=r"cannot listen on slow:0: Address family not"):
            listen(Address("slow", 0))


@pytest.mark.usefixtures("names")
def test_the_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses_of("nowhere.invalid", 1).unknown
    assert not addresses_of("later.invalid", 1).unknown
    assert addresses_of("a" * 100 + ".invalid", 1).unknown  # no name at all
    found = [
        (family, 0, 0, "", (host, 1))
        for family, host in (
            (socket.AF_INET6, "::1"),
            (socket.AF_INET, "127.0.0.1"),
            (socket.AF_INET, "127.0.0.1"),
        )
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert addresses_of("both", 1).addresses == ("127.0.0.1", "::1")


# --- sentences ---------------------------------------------------------------------------------


def greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize(
    ("said", "words", "soon"),
    [
        (greeting(b"CURVE"), "the key does not fit", False),
        (greeting(b"NULL"), "takes no key", False),
        (b"SSH-2.0-OpenSSH_9", "is an ssh server; write ssh://node1", False),
        (b"HTTP/1.1 400 Bad", "is a web server", False),
        (b"\xff\x00", "is no gpuwatch", False),
        (b"", "does not say a word", True),
    ],
)
def test_why_a_door_does_not_open(said: bytes, words: str, soon: bool) -> None:
    target = TcpTarget("tcp://node1:5555", "node1", 5555, KEY)
    complaint = why_no_handshake(target, said)
    assert words in complaint.text
    assert complaint.soon is soon
    assert "type there: gpuwatch agent --listen :5555" in why_no_connection(target, 111).text
    assert "is it up" in why_no_connection(target, 110).text
    assert "no route to host" in why_no_connection(target, 113).text


# --- what both sides of a test are made of -----------------------------------------------------


class Watcher:
    """A `TcpLink` to some ports, and all that came over it."""

    def __init__(
        self,
        *ports: int,
        key: JobKey = KEY,
        host: str = "127.0.0.1",
        interval_s: float = 0.0,
    ) -> None:
        self.frames: list[tuple[str, NodeFrame]] = []
        self.bytes = b""
        self.said: list[str] = []
        targets = [TcpTarget(f"{key.public[:4]!r}:{port}", host, port, key) for port in ports]
        self.link = TcpLink(targets, "1", self._take, self._hear, interval_s)
        self.link.start()

    def _take(self, way: TcpWay, data: bytes, frame: NodeFrame, _received_s: float) -> None:
        self.frames.append((way.target.label, frame))
        self.bytes = (self.bytes + data)[-300_000:]

    def _hear(self, way: TcpWay) -> None:
        if way.trouble:
            self.said.append(way.trouble)

    @property
    def way(self) -> TcpWay:
        return self.link.ways[0]

    def ranks(self) -> set[int]:
        return {decode_rank_frame(raw).rank for _, f in list(self.frames) for raw in f.frames}

    def answers(self) -> list[str]:
        return [
            reply.data
            for _, frame in list(self.frames)
            for raw in frame.frames
            for reply in decode_rank_frame(raw).replies
        ]

    def more(self) -> None:
        """Wait until more frames have come."""
        before = len(self.frames)
        support.wait_until(lambda: len(self.frames) > before + 3, 15, "more frames")


@contextlib.contextmanager
def watching(
    *ports: int, key: JobKey = KEY, host: str = "127.0.0.1", interval_s: float = 0.0
) -> Iterator[Watcher]:
    watcher = Watcher(*ports, key=key, host=host, interval_s=interval_s)
    try:
        yield watcher
    finally:
        watcher.link.close(2.0)


@contextlib.contextmanager
def open_door(directory: Path) -> Iterator[tuple[Door, int, list[str]]]:
    """A door in a thread of this process, its port, and what it says."""
    said: list[str] = []
    with listen(Address("127.0.0.1", 0)) as listener:
        door = Door(directory, AGENT, listener, KEY, package="1", say=said.append)
        thread = threading.Thread(target=door.run, name="door")
        thread.start()
        try:
            yield door, listener.getsockname()[1], said
        finally:
            door.stop()
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def node() -> Iterator[Path]:
    """A run directory with two ranks that publish."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(support.run_directory())
        env = support.environment(directory, PYTHONPATH=TESTS, GPUWATCH_RUN_ID="fake")
        for rank in range(2):
            argv = [sys.executable, FAKE_RANK, str(rank), "2"]
            stack.enter_context(support.process(argv, env))
        yield directory


@pytest.fixture
def opened(node: Path) -> Iterator[tuple[Door, int, list[str]]]:
    with open_door(node) as made:
        yield made


class Wire:
    """A network between a monitor and a port: it keeps what it carries, and can be frozen."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._flows = threading.Event()
        self._flows.set()
        self._open = True
        self.carried = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def freeze(self) -> None:
        """From now on nothing gets through, and nobody is told."""
        self._flows.clear()

    def heal(self) -> None:
        self._flows.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while self._open:
                near = self._listener.accept()[0]
                self._flows.wait()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [near, far]
                for one, other in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._carry, args=(one, other))
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                self._flows.wait()
                self.carried += data
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._open = False
        self._flows.set()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for one in self._sockets:
            one.close()


@contextlib.contextmanager
def wire_to(port: int) -> Iterator[Wire]:
    wire = Wire(port)
    try:
        yield wire
    finally:
        wire.close()


@contextlib.contextmanager
def peer(port: int, key: JobKey | None, kind: int = zmq.DEALER) -> "Iterator[zmq.Socket[bytes]]":
    """A socket of somebody else's making."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        one = context.socket(kind)
        one.linger = 0
        one.reconnect_ivl = -1
        if key is not None:
            one.curve_serverkey = key.public
            one.curve_publickey, one.curve_secretkey = key.public, key.secret
        one.connect(f"tcp://127.0.0.1:{port}")
        yield one
    finally:
        context.destroy(linger=0)


# --- how often ---------------------------------------------------------------------------------


def numbers(frames: list[NodeFrame]) -> list[int]:
    """The numbers of node frames, those that are in others included."""
    return [seq for f in frames for seq in range(f.seq - f.merged, f.seq + 1)]


def rank_numbers(frames: list[NodeFrame], rank: int) -> tuple[list[int], list[int]]:
    """The numbers of a rank's frames, and the indices of its steps, without the past."""
    told = [decode_rank_frame(raw) for frame in frames for raw in frame.frames]
    own = [f for f in told if f.rank == rank and not f.snapshot and not f.replies]
    seqs = [seq for f in own for seq in range(f.seq - f.merged, f.seq + 1)]
    return seqs, [r.index for f in own for r in f.records]


def whole(found: list[int]) -> bool:
    """Whether each number follows the one before it."""
    return found == list(range(found[0], found[0] + len(found)))


def test_who_asks_for_a_frame_a_second_gets_all_in_a_tenth_of_the_frames(
    opened: tuple[Door, int, list[str]],
) -> None:
    door, port, _ = opened
    with watching(port) as often, watching(port, interval_s=CALM_S) as calm:
        support.wait_until(lambda: often.way.had_past and calm.way.had_past, 20, "the past")
        at = len(often.frames), len(calm.frames)
        began_s = time.monotonic()
        support.wait_until(lambda: len(calm.frames) >= at[1] + 6, 30, "six frames")
        took_s = time.monotonic() - began_s
        every = [frame for _, frame in often.frames[at[0] :]]
        few = [frame for _, frame in calm.frames[at[1] :]]
        assert took_s > 3.5
        assert len(every) > 4 * len(few)
        assert {frame.merged for frame in every} == {0}
        assert sum(frame.merged for frame in few) > 4 * len(few)
        assert whole(numbers(few))
        for rank in (0, 1):
            seqs, steps = rank_numbers(few, rank)
            assert whole(seqs)
            assert whole(steps)
            assert len(steps) > 25
            frames = [f for frame in few for f in map(decode_rank_frame, frame.frames)]
            assert sum(f.rank == rank and not f.snapshot for f in frames) == len(few)
        # An answer waits for nothing, and comes with what was before it.
        before = len(calm.frames)
        calm.link.send(calm.way, Command(WIRE_VERSION, "c1", "stack", "fake", 1))
        support.wait_until(lambda: "stack of rank 1" in calm.answers(), 10, "an answer")
        assert whole(numbers([frame for _, frame in calm.frames[before - 1 :]]))
        assert door.clients == 2


def test_a_wish_that_changes_costs_no_frame_and_gives_none_twice(
    opened: tuple[Door, int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, port, _ = opened
    monkeypatch.setattr(tcplink, "ATTACH_S", 0.1)
    with watching(port) as watcher:
        support.wait_until(lambda: watcher.way.had_past, 20, "the past")
        plain, wished = preamble("1"), preamble("1") + encode(wish(CALM_S))
        for greeting in (wished, plain, wished, preamble("1") + encode(wish(0.1))):
            watcher.way._greeting = greeting
            watcher.more()
        time.sleep(0.3)
        before = len(watcher.frames)
        watcher.more()
        assert {frame.merged for _, frame in watcher.frames[before:]} == {0}
        frames = [frame for _, frame in watcher.frames]
        assert max(frame.merged for frame in frames) > 3
        assert whole(numbers(frames))
        assert all(whole(rank_numbers(frames, rank)[1]) for rank in (0, 1))


def test_a_door_that_knows_no_wishes_goes_on_as_before(
    opened: tuple[Door, int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It reads no further than the preamble, and nothing of one that it knows.
    monkeypatch.setattr(Door, "_heed", lambda *_: None)
    door, port, said = opened
    with watching(port, interval_s=CALM_S) as watcher:
        support.wait_until(lambda: watcher.way.had_past, 20, "the past")
        watcher.more()
        began_s, before = time.monotonic(), len(watcher.frames)
        support.wait_until(lambda: len(watcher.frames) > before + 20, 20, "frames")
        assert time.monotonic() - began_s < 10
        assert {frame.merged for _, frame in watcher.frames} == {0}
        assert whole(numbers([frame for _, frame in watcher.frames]))
        assert door.clients == 1
    assert not any("refused" in line for line in said)


def test_a_node_process_that_stops_leaves_nothing_unsaid(
    node: Path, opened: tuple[Door, int, list[str]]
) -> None:
    _, port, _ = opened
    with watching(port) as often, watching(port, interval_s=CALM_S) as calm:
        support.wait_until(lambda: often.way.had_past and calm.way.had_past, 20, "the past")
        calm.more()
        presence = agent_presence(node)
        assert presence is not None
        for _ in range(3):  # wherever in its second it stops
            os.kill(presence.pid, signal.SIGSTOP)
            try:
                support.wait_until(
                    lambda: often.frames[-1][1].seq == calm.frames[-1][1].seq, 10, "the last one"
                )
            finally:
                os.kill(presence.pid, signal.SIGCONT)
            often.more()
        frames = [frame for _, frame in calm.frames]
        assert whole(numbers(frames))


def test_a_door_keeps_nothing_back_for_longer_than_a_second(node: Path) -> None:
    with listen(Address("127.0.0.1", 0)) as listener:
        door = Door(node, AGENT, listener, KEY, package="1")
        sent: list[bytes] = []
        try:
            door._send = lambda _who, data: bool(sent.append(data))  # type: ignore[method-assign,func-returns-value]
            door._clients[b"calm"] = client = doors._Client(time.monotonic(), "somebody")
            client.calm = True
            door._on_frame(node_frame(1), 0.0)
            door._on_frame(node_frame(2), 0.0)
            began_s = time.monotonic()
            support.wait_until(lambda: door._relay() or bool(sent), 5, "both as one")  # type: ignore[func-returns-value]
            assert time.monotonic() - began_s > 0.5
            assert [decode_node_frame(data).merged for data in sent] == [1]
            # A word about trouble comes after what was before it.
            door._on_frame(node_frame(3), 0.0)
            door._on_state("lost", "it is gone")
            door._relay()
            door._speak(time.monotonic())
            assert sent[1] == node_frame(3)
            assert decode_node_frame(sent[2]).notices == ("it is gone",)
        finally:
            door._close(0)


def test_of_many_doors_each_is_looked_at_when_it_is_quiet_or_memory_grows(
    opened: tuple[Door, int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, port, _ = opened
    looks: list[float] = []
    grown = iter(range(0, 2**60, 2**26))

    def look(descriptor: int) -> int | None:
        looks.append(time.monotonic())
        return received_bytes(descriptor)

    with watching(port, interval_s=CALM_S) as watcher:
        support.wait_until(lambda: watcher.way.had_past, 20, "the past")
        watcher.more()
        monkeypatch.setattr(tcplink, "received_bytes", look)
        watcher.more()
        calm = len(looks)
        monkeypatch.setattr(tcplink, "resident_bytes", lambda: next(grown))
        watcher.more()
        assert calm <= 1
        assert len(looks) - calm > 8
        assert watcher.way.state == "live"


def test_few_connections_are_made_at_a_time_and_in_the_end_all(
    opened: tuple[Door, int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    door, port, _ = opened
    with listen(Address("127.0.0.1", 0)) as free:
        nobody = free.getsockname()[1]
    making: list[int] = []
    connect = TcpWay._connect

    def counted(self: TcpWay, address: str) -> None:
        connect(self, address)
        ways = watchers[0].link.ways
        making.append(sum(w._socket is not None and not w._greeted for w in ways))

    monkeypatch.setattr(tcplink, "AT_A_TIME", 3)
    monkeypatch.setattr(TcpWay, "_connect", counted)
    watchers: list[Watcher] = []
    made = Watcher.__init__

    def known(self: Watcher, *ports: int, **more: Any) -> None:
        watchers.append(self)
        made(self, *ports, **more)

    monkeypatch.setattr(Watcher, "__init__", known)
    # Those that cannot be reached hold up nobody, and are tried again.
    with watching(*[nobody] * 4, *[port] * 12) as watcher:
        ways = watcher.link.ways
        support.wait_until(lambda: all(way.had_past for way in ways[4:]), 30, "all of them")
        support.wait_until(lambda: len(watcher.said) >= 4, 20, "a word on the others")
        support.wait_until(lambda: len(making) >= 20, 30, "another try")
        assert door.clients == 12
    assert max(making) == 3


def test_a_wish_that_is_none_is_said_and_changes_nothing(
    opened: tuple[Door, int, list[str]],
) -> None:
    door, port, said = opened
    with peer(port, KEY) as one:
        one.send(preamble("1") + b"\xff\xff")
        support.wait_until(lambda: door.clients == 1, 10, "a client")
        support.wait_until(lambda: one.poll(10) > 0, 10, "a frame")
    assert any("a wish of 127.0.0.1 was refused" in line for line in said)


# --- who gets in -------------------------------------------------------------------------------


def test_the_right_key_sees_all_ranks_and_asks_and_nothing_of_it_can_be_read_on_the_way(
    opened: tuple[Door, int, list[str]],
) -> None:
    door, port, said = opened
    with wire_to(port) as wire:
        with watching(wire.port) as watcher:
            support.wait_until(lambda: watcher.ranks() == {0, 1}, 20, "both ranks")
            support.wait_until(lambda: watcher.way.had_past, 10, "their past")
            assert (watcher.way.state, watcher.way.attached, door.clients) == ("live", 1, 1)
            assert watcher.way.fresh
            watcher.link.send(watcher.way, Command(WIRE_VERSION, "c1", "stack", "fake", 1))
            # What concerns the node process is not for those who come through the door.
            watcher.link.send(watcher.way, Command(WIRE_VERSION, "c2", "retire"))
            support.wait_until(lambda: "stack of rank 1" in watcher.answers(), 10, "an answer")
            assert "stack of rank 0" not in watcher.answers()
            assert NAME in watcher.bytes
        carried = wire.carried
    assert len(carried) > 2000
    assert NAME not in carried
    assert b"fake" not in carried
    assert b"GPUWATCH" not in carried
    support.wait_until(lambda: any("has gone" in line for line in said), 5, "its leaving")
    assert any("'retire'" in line for line in said)


def test_whoever_has_not_the_key_sees_nothing(opened: tuple[Door, int, list[str]]) -> None:
    door, port, said = opened
    mixed = JobKey(KEY.public, OTHER.secret)
    strangers = {
        "no key at all": None,
        "another key": OTHER,
        "half of it": mixed,
    }
    with contextlib.ExitStack() as stack:
        sockets = {}
        for name, key in strangers.items():
            kinds = (zmq.DEALER, zmq.SUB) if key is None else (zmq.DEALER,)
            for kind in kinds:
                one = stack.enter_context(peer(port, key, kind))
                if kind == zmq.SUB:
                    one.subscribe(b"")
                else:
                    with contextlib.suppress(zmq.Again):  # it is refused already
                        one.send(preamble("1"), zmq.NOBLOCK)
                sockets[name, kind] = one
        # The server's public half, and a pair of one's own: known to who has seen the file only.
        context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        forged = context.socket(zmq.DEALER)
        forged.linger = 0
        forged.curve_serverkey = KEY.public
        forged.curve_publickey, forged.curve_secretkey = OTHER.public, OTHER.secret
        forged.connect(f"tcp://127.0.0.1:{port}")
        forged.send(preamble("1"))
        with watching(port, key=OTHER) as stranger, watching(port) as watcher:
            support.wait_until(lambda: bool(stranger.said), 15, "a sentence")
            support.wait_until(lambda: len(watcher.frames) > 5, 15, "frames for the right one")
            assert stranger.frames == []
            assert stranger.said[0].startswith("the key does not fit: what listens on port")
            for name, one in [*sockets.items(), ("forged", forged)]:
                assert not one.poll(0), name
            assert door.clients == 1
        forged.close()
    assert sum("is attached" in line for line in said) == 1


def test_without_an_authenticator_nobody_gets_in(node: Path) -> None:
    with listen(Address("127.0.0.1", 0)) as listener:
        door = Door(node, AGENT, listener, KEY, package="1")
        door._poller.unregister(door._zap)
        door._zap.close()
        door._zap = door._context.socket(zmq.PAIR)  # answers nothing
        thread = threading.Thread(target=door.run)
        thread.start()
        try:
            with watching(listener.getsockname()[1]) as watcher:
                support.wait_until(lambda: bool(watcher.said), 15, "a sentence")
                assert "lets nobody in now" in watcher.said[0]
                assert (watcher.frames, door.clients) == ([], 0)
        finally:
            door.stop()
            thread.join(10)


def test_a_door_of_another_version_is_named(
    opened: tuple[Door, int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, port, said = opened
    own = preamble("9.0")
    at = len(MAGIC)
    newer = own[:at] + (PIPE_VERSION + 1).to_bytes(2, "big") + own[at + 2 :]
    monkeypatch.setattr(doors, "preamble", lambda _: newer)
    monkeypatch.setattr(tcplink, "preamble", lambda _: newer)
    with watching(port) as watcher:
        support.wait_until(lambda: bool(watcher.said), 15, "a sentence")
        assert "gpuwatch 9.0 on 127.0.0.1 is newer than this 1" in watcher.said[0]
        assert watcher.frames == []
    support.wait_until(lambda: any("another version" in line for line in said), 5, "a line")


def test_so_many_monitors_and_no_more(
    opened: tuple[Door, int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    door, port, _ = opened
    monkeypatch.setattr(doors, "CLIENTS", 1)
    with watching(port) as first:
        support.wait_until(lambda: len(first.frames) > 1, 15, "frames")
        with watching(port) as second:
            support.wait_until(lambda: bool(second.said), 15, "a sentence")
            assert second.said[0] == "1 monitors are attached, and it takes no more"
            assert (second.frames, door.clients) == ([], 1)
        first.more()


# --- what is no door ---------------------------------------------------------------------------


@contextlib.contextmanager
def stranger(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Something else that listens; `serve` is called with each connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                one = listener.accept()[0]
                kept.append(one)
                serve(one)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for one in (listener, *kept):
            one.close()


@pytest.mark.usefixtures("names")
def test_what_is_no_door_has_a_sentence_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scout, "LOOK_S", 0.5)
    monkeypatch.setattr(tcplink, "HANDSHAKE_S", 0.5)
    with contextlib.ExitStack() as stack:
        ports = {
            "silent": stack.enter_context(stranger(lambda _: None)),
            "ssh": stack.enter_context(stranger(lambda one: one.sendall(b"SSH-2.0-X\r\n"))),
            "closes": stack.enter_context(stranger(socket.socket.close)),
        }
        with listen(Address("127.0.0.1", 0)) as free:
            ports["nobody"] = free.getsockname()[1]
        context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        router = stack.enter_context(context.socket(zmq.ROUTER))
        router.linger = 0
        ports["keyless"] = router.bind_to_random_port("tcp://127.0.0.1")
        watcher = stack.enter_context(watching(*ports.values(), host="localhost"))
        unknown = stack.enter_context(watching(1, host="nowhere.invalid"))
        later = stack.enter_context(watching(1, host="later.invalid"))
        ways = [*watcher.link.ways, *unknown.link.ways, *later.link.ways]
        support.wait_until(lambda: all(w.state == "lost" for w in ways), 20, "a word on each")
        said = {
            name: way.trouble for name, way in zip([*ports, "unknown", "later"], ways, strict=True)
        }
    assert "does not say a word" in said["silent"]
    assert "is an ssh server; write ssh://localhost" in said["ssh"]
    assert "does not say a word" in said["closes"]
    assert said["nobody"].startswith(f"nobody listens on port {ports['nobody']} of localhost")
    assert "takes no key" in said["keyless"]
    assert said["unknown"].startswith("no machine is called nowhere.invalid")
    assert said["later"] == "its name is looked up in vain; is the name server up?"
    assert watcher.frames == []


# --- a door among strangers --------------------------------------------------------------------


def raw(port: int, data: bytes) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port))
    with contextlib.suppress(OSError):
        one.sendall(data)
    return one


def is_closed(one: socket.socket) -> bool:
    try:
        while one.recv(4096, socket.MSG_DONTWAIT):
            pass  # a greeting that came before the end
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_strangers_cost_bounded_memory_and_nobody_else_notices(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "CONNECTIONS", 40)
    monkeypatch.setattr(doors, "HANDSHAKE_S", 60.0)
    rng = random.Random(1)
    huge = b"\x06" + (2**62).to_bytes(8, "big")  # a command that announces so many bytes
    with (
        open_door(node) as (_, port, said),
        watching(port) as watcher,
        contextlib.ExitStack() as stack,
    ):
        support.wait_until(lambda: watcher.way.had_past, 20, "the past")
        before_bytes = psutil.Process().memory_info().rss
        attacks = [
            rng.randbytes(100_000),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100,
            greeting(b"CURVE") + huge + bytes(1_000_000),
            greeting(b"NULL") + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER",
            greeting(b"PLAIN") + rng.randbytes(1000),
            b"\xff",
        ]
        for attack in attacks:
            stack.callback(raw(port, attack).close)
        # 200 that never say a word: the first ones may wait, the others are cut.
        half = [raw(port, b"") for _ in range(200)]
        for one in half:
            stack.callback(one.close)
        watcher.more()
        support.wait_until(lambda: any("are cut" in line for line in said), 10, "a limit")
        support.wait_until(lambda: sum(map(is_closed, half)) >= 160, 15, "the end of the others")
        assert watcher.way.attached == 1
        assert psutil.Process().memory_info().rss - before_bytes < 50e6


def test_one_with_the_key_who_means_ill_is_bounded_too(
    opened: tuple[Door, int, list[str]],
) -> None:
    door, port, said = opened
    with watching(port) as watcher, peer(port, KEY) as one, peer(port, KEY) as many:
        support.wait_until(lambda: watcher.way.had_past, 20, "the past")
        # Words that are none, and more than is answered.
        many.send(preamble("1"))
        many.send(b"\xc1nonsense")
        many.send_multipart([b"a", b"b"])
        for at in range(100):
            many.send(encode(Command(WIRE_VERSION, str(at), "stack", "fake", 0)))
        for words in ("was refused", "several parts", "asks more than 20 things"):
            support.wait_until(lambda w=words: any(w in line for line in said), 10, words)
        # One message of so many parts that no queue bounds them: they count as one.
        for _ in range(500):
            one.send(bytes(60_000), zmq.SNDMORE)
        one.send(b"")
        support.wait_until(lambda: any("and is cut" in line for line in said), 20, "a word")
        support.wait_until(lambda: door.connections == 2, 10, "its end")
        watcher.more()
        assert watcher.way.attached == 1
        assert door.clients == 2


def test_a_monitor_that_does_not_read_misses_frames_and_holds_up_nobody(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "_CLIENT_FRAMES", 10)
    blob = b"\xc6" + (200_000).to_bytes(4, "big") + bytes(200_000)
    big = node_frame(1, [blob], node=socket.gethostname())
    with (
        open_door(node) as (door, port, _),
        watching(port) as watcher,
        peer(port, KEY) as stuck,
    ):
        stuck.rcvhwm = 1
        stuck.send(preamble("1"))
        support.wait_until(lambda: door.clients == 2 and watcher.way.had_past, 20, "both")
        deadline_s = time.monotonic() + 20
        while not any(client.dropped for client in list(door._clients.values())):
            assert time.monotonic() < deadline_s
            door._on_frame(big, 0.0)
            time.sleep(0.005)
        assert sorted(bool(client.dropped) for client in door._clients.values()) == [False, True]
        watcher.more()
        assert watcher.way.attached == 1


def test_a_door_that_grows_too_large_lets_everybody_go_and_they_come_back(
    opened: tuple[Door, int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    door, port, said = opened
    with watching(port) as watcher:
        support.wait_until(lambda: watcher.way.had_past, 20, "the past")
        true = doors.resident_bytes
        grown = iter([true() + doors.GROWTH_BYTES * 3])
        monkeypatch.setattr(doors, "resident_bytes", lambda: next(grown, true()))
        support.wait_until(lambda: watcher.way.attached == 2, 20, "back again")
        support.wait_until(lambda: watcher.way.had_past, 10, "the past again")
        assert any("everybody is let go" in line for line in said)
        assert watcher.said[0] == "the connection was closed there, or lost on the way"
        assert door.clients == 1


def test_a_connection_is_cut_by_its_descriptor_and_nothing_else_is(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as near, listener.accept()[0] as far:
            near.sendall(bytes(1234))
            support.wait_until(lambda: received_bytes(far.fileno()) == 1234, 5, "a count")
            assert len(far.recv(2000)) == 1234
            near.settimeout(5)
            far.settimeout(5)
            cut(far.fileno(), port + 1)
            near.sendall(b"x")
            assert far.recv(1) == b"x"
            cut(far.fileno(), port)
            assert near.recv(1) == b""
            assert far.fileno() > 0
    with (tmp_path / "file").open("wb") as file:
        assert received_bytes(file.fileno()) is None
        cut(file.fileno(), port)
        file.write(b"still open")
    closed = os.dup(0)
    os.close(closed)
    assert received_bytes(closed) is None
    cut(closed, port)


# --- a network that is cut ---------------------------------------------------------------------


def test_a_network_that_carries_nothing_is_noticed_by_silence_and_comes_back(
    opened: tuple[Door, int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcplink, "QUIET_S", 1.0)
    monkeypatch.setattr(tcplink, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(scout, "LOOK_S", 0.3)
    monkeypatch.setattr(doors, "CLIENT_TTL_S", 2.0)
    monkeypatch.setattr(way, "LONGEST_S", 0.5)
    door, port, _ = opened
    with wire_to(port) as wire, watching(wire.port) as watcher:
        support.wait_until(lambda: watcher.way.had_past, 20, "the past")
        wire.freeze()
        support.wait_until(lambda: watcher.way.state == "lost", 10, "a word")
        assert watcher.said[0] == "it fell silent and was let go after 1 s"
        # The door has not been told either, and lets go by itself.
        support.wait_until(lambda: door.clients == 0, 10, "its leaving")
        support.wait_until(lambda: len(watcher.said) > 1, 10, "another try")
        assert "does not say a word" in watcher.said[1]
        wire.heal()
        support.wait_until(lambda: watcher.way.attached == 2, 30, "back again")
        support.wait_until(lambda: watcher.way.had_past, 10, "the past again")
        watcher.more()
        assert watcher.way.trouble == ""


CUT_S = float(os.environ.get("GPUWATCH_TEST_CUT_S", "6"))
"""How long a network is cut. From 60 on nothing is scaled down, and the test takes 70 to 110 s."""

REAL_S = 60.0
REACH = 4000
FORGETS = 20


class Seen:
    """What came to a session, frame by frame: the order in which it did, of one rank."""

    def __init__(self) -> None:
        self.frames: list[RankFrame] = []

    def __call__(self, data: bytes) -> None:
        self.frames += [decode_rank_frame(raw) for raw in decode_node_frame(data).frames]

    def of(self, rank: int, at: int = 0, *, snapshot: bool = False) -> list[RankFrame]:
        """The frames of a rank from a place on: its past, or what goes on."""
        found = list(self.frames)[at:]
        return [f for f in found if f.rank == rank and f.snapshot is snapshot]


def scaled_down(patch: pytest.MonkeyPatch) -> None:
    """Shorten what the two sides wait for as the cut is shortened."""
    patch.setattr(tcplink, "QUIET_S", 1.0)
    patch.setattr(tcplink, "HANDSHAKE_S", 0.5)
    patch.setattr(scout, "LOOK_S", 0.3)
    patch.setattr(doors, "CLIENT_TTL_S", 2.0)
    patch.setattr(way, "LONGEST_S", 0.5)


@pytest.mark.alone
@pytest.mark.timeout(120 + 3 * CUT_S)
def test_a_partition_is_told_with_its_age_and_heals_with_what_was_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A minute, at a tenth of its length; `GPUWATCH_TEST_CUT_S=60` takes the whole of it."""
    if CUT_S < REAL_S:
        scaled_down(monkeypatch)
    seen = Seen()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(support.run_directory())
        env = support.environment(directory, PYTHONPATH=TESTS, GPUWATCH_RUN_ID="fake")
        # One that remembers all of the cut, and one that does not.
        training = [
            stack.enter_context(
                support.process([sys.executable, FAKE_RANK, str(rank), "2", str(memory)], env)
            )
            for rank, memory in enumerate((REACH, FORGETS))
        ]
        _, port, _ = stack.enter_context(open_door(directory))
        wire = stack.enter_context(wire_to(port))
        beside = stack.enter_context(watching(port))  # on a network of its own
        session, _ = open_session([f"tcp://127.0.0.1:{wire.port}"], key=KEY, tap=seen)
        stack.callback(session.close)
        (pipe,) = session.pipes

        def ranks() -> list[RankView]:
            run = session.view().run("fake")
            return [] if run is None else list(run.ranks)

        def are(state: str) -> bool:
            return [r.state for r in ranks()] == [state] * 2

        support.wait_until(lambda: are("training") and pipe.had_past, 30, "both ranks")
        support.wait_until(lambda: beside.way.had_past, 30, "who looks from beside")
        assert [r.lost for r in ranks()] == [0, 0]

        wire.freeze()
        cut_s = time.monotonic()
        support.wait_until(lambda: are("silent"), 10, "silence")
        mark, steps = len(seen.frames), [r.steps for r in ranks()]
        before = [seen.of(rank)[-1] for rank in (0, 1)]
        there = len(beside.frames)
        while time.monotonic() - cut_s < CUT_S:
            time.sleep(0.2)
            apart_s = time.monotonic() - cut_s
            for one in ranks():
                assert one.state == "silent"
                assert one.state_reason == f"no contact with {pipe.target.label}"
                # As old as the cut, give or take what was on its way.
                assert apart_s - 0.5 <= one.age_s <= apart_s + 1.0
            assert [r.steps for r in ranks()] == steps
            assert len(seen.frames) == mark
        assert pipe.state != "live"

        wire.heal()
        support.wait_until(lambda: are("training") and pipe.had_past, 75, "both ranks again")
        support.wait_until(
            lambda: all(seen.of(rank, mark) for rank in (0, 1)) and len(seen.of(1, mark)) > 5,
            20,
            "frames after it",
        )
        # Training has gone on all the while, each frame of it: who was not cut off has seen them.
        assert [process.poll() for process in training] == [None, None]
        for rank in (0, 1):
            numbers = [
                frame.seq
                for _, node in list(beside.frames)[there:]
                for frame in map(decode_rank_frame, node.frames)
                if frame.rank == rank and not frame.snapshot
            ]
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
            assert len(numbers) > 10 * (CUT_S - 3.0) * 0.5

        # What the one remembers has come; what the other has forgotten is lost, to the frame.
        missed = [seen.of(rank, mark)[0].seq - before[rank].seq - 1 for rank in (0, 1)]
        assert min(missed) > 10 * CUT_S * 0.5

        def skipped(rank: int) -> int:
            """How many frames of a rank have not come, of the cut and after it."""
            seqs = [before[rank].seq, *[frame.seq for frame in seen.of(rank, mark)]]
            return sum(max(0, after - seq - 1) for seq, after in itertools.pairwise(seqs))

        def lost() -> list[int]:
            return [r.lost for r in ranks()]

        with contextlib.suppress(AssertionError):
            support.wait_until(lambda: lost() == [0, skipped(1)], 20)
        assert lost() == [0, skipped(1)], missed
        gap = set(range(before[0].seq, before[0].seq + missed[0]))
        assert gap <= {r.index for f in seen.of(0, mark, snapshot=True) for r in f.records}
        assert not gap & {r.index for f in seen.of(0, mark) for r in f.records}
        indices = [record.index for record in ranks()[0].window]
        assert indices == list(range(indices[0], indices[0] + len(indices)))
        support.wait_until(
            lambda: all(r.steps > s + missed[0] for r, s in zip(ranks(), steps, strict=True)),
            20,
            "new steps",
        )
        assert pipe.attached == 2
        assert pipe.trouble == ""


# --- a door that means ill ---------------------------------------------------------------------


@contextlib.contextmanager
def false_door(behave: "Callable[[zmq.Socket[bytes], bytes], None]") -> Iterator[int]:
    """Somebody who has the key; `behave` is called over and over once a monitor is there."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.sndhwm = 20
    router.curve_server = True
    router.curve_secretkey = KEY.secret
    port = router.bind_to_random_port("tcp://127.0.0.1")
    ending = threading.Event()

    def serve() -> None:
        who = b""
        while not ending.is_set():
            if router.poll(0 if who else 50):
                came = router.recv_multipart()[0]
                if came != who:
                    who = came
                    router.send_multipart([who, preamble("1")])
            if who:
                behave(router, who)
        context.destroy(linger=0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield port
    finally:
        ending.set()
        thread.join(10)


@pytest.mark.parametrize("interval_s", [0.0, CALM_S], ids=["of few", "of many"])
def test_a_door_that_means_ill_costs_bounded_memory_and_rate(
    interval_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcplink, "BURST_BYTES", 2**21)
    monkeypatch.setattr(tcplink, "RATE_BYTES", 2**18)
    monkeypatch.setattr(tcplink, "_AHEAD_BYTES", 2**22)
    frame = node_frame(1)

    def say(data: bytes, more: int = 0) -> "Callable[[zmq.Socket[bytes], bytes], None]":
        def behave(router: "zmq.Socket[bytes]", who: bytes) -> None:
            with contextlib.suppress(zmq.Again):
                for _ in range(50):
                    router.send(who, zmq.SNDMORE | zmq.NOBLOCK)
                    router.send(data, zmq.NOBLOCK | more)
            time.sleep(0.002)

        return behave

    def endless(router: "zmq.Socket[bytes]", who: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            router.send(who, zmq.SNDMORE | zmq.NOBLOCK)
            for _ in range(400):
                router.send(bytes(60_000), zmq.SNDMORE | zmq.NOBLOCK)
                time.sleep(0.0005)
            router.send(b"", zmq.NOBLOCK)

    kinds = {
        "junk": say(b"abc"),
        "flood": say(frame),
        "parts": say(b"x" * 10, zmq.SNDMORE),
        "endless": endless,
        "mute": lambda *_: time.sleep(0.05),
    }
    before_bytes = psutil.Process().memory_info().rss
    with contextlib.ExitStack() as stack:
        ports = {name: stack.enter_context(false_door(kind)) for name, kind in kinds.items()}
        monkeypatch.setattr(tcplink, "QUIET_S", 2.0)
        watcher = stack.enter_context(watching(*ports.values(), interval_s=interval_s))
        ways = dict(zip(ports, watcher.link.ways, strict=True))
        told = ("junk", "endless", "mute")
        support.wait_until(
            lambda: all(ways[name].state == "lost" for name in told), 25, "a word on each"
        )
        said = {name: ways[name].trouble for name in told}
        count = len([1 for label, _ in watcher.frames if label == ways["flood"].target.label])
        grown_bytes = psutil.Process().memory_info().rss - before_bytes
    assert "no telemetry" in said["junk"]
    assert "a frame without an end" in said["endless"]
    assert "silent" in said["mute"] or "nothing more" in said["mute"]
    # Of a flood as much is read as the rate allows: 512 at once, and 64 a second.
    assert 100 < count < 3000
    assert grown_bytes < 150e6


def test_what_the_protocol_adds_is_no_frame_that_waits() -> None:
    unread = Unread(0.0)
    received = now_s = 0
    most = 0.0
    while now_s < 10 * 86400:  # ten days of ten frames a second, with 430 bytes a second on top
        now_s += 60
        received += 60 * (30_000 + 430)
        unread.take(600, 60 * 30_000)
        most = max(most, unread.count(received, now_s))
    assert most < 4096
    # Nothing has been saved up meanwhile: what has no end is noticed as on the first day.
    assert unread.count(received + 2**24, now_s + 1) > 2**24 - 4096
    assert unread.count(received + 2**24, now_s + 601) > 2**24 - 602 * 512
    unread.take(1, 2**24)  # a large frame on its way
    assert unread.count(received + 2**24 + 42, now_s + 602) == 0


def test_a_name_of_two_addresses_leads_to_the_one_where_a_door_is(
    opened: tuple[Door, int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, port, _ = opened
    two = Found(addresses=("127.0.0.2", "127.0.0.1"))
    monkeypatch.setattr(tcplink, "addresses_of", lambda *_: two)
    with watching(port, host="two") as watcher:
        support.wait_until(lambda: watcher.way.attached == 1, 20, "a connection")
        assert watcher.said == []
        assert watcher.way._good_address == "127.0.0.1"
    with listen(Address("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with watching(port, host="two") as watcher:
        support.wait_until(lambda: bool(watcher.said), 20, "a sentence")
        assert watcher.said[0].startswith(f"nobody listens on port {port} of two")
        assert len(watcher.way._numbers) == 2


def test_frames_of_a_door_are_what_its_node_process_sends(
    opened: tuple[Door, int, list[str]],
) -> None:
    _, port, _ = opened
    with watching(port) as watcher:
        watcher.more()
        way = watcher.way
        assert way._descriptor is not None

        def added() -> int:
            """What has come beyond whole frames."""
            return (received_bytes(way._descriptor or 0) or 0) - way._unread._taken_bytes

        # The handshake, and never less than what is counted for a frame.
        support.wait_until(lambda: 0 < added() < 4096, 10, "all that has come")
        data = encode(watcher.frames[-1][1])
        assert decode_node_frame(data).incarnation != "pipe"
        seqs = [frame.seq for _, frame in watcher.frames]
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
