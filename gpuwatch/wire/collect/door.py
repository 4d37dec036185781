"""The door: one TCP port, behind CURVE, through which monitors attach to this node's process.

It is a process of its own beside the node process, which never listens. One thread owns every
socket, the authenticator's too: if that thread ends, nobody answers for a key any more, and
libzmq refuses everyone (`ZAP_ENFORCE_DOMAIN`; without it a missing authenticator lets all in).

Inside the encryption a monitor and the door say what a pipe carries: every few seconds the monitor
its preamble, which means that it is there, and behind it how often it wishes to hear; the door its
own once, then frames of the node process and, where there are none, words of the incarnation
`PIPE`.

A peer without the key gets no further than the handshake. One with the key is still bounded: in
commands a second, in bytes a connection, in connections, and in what the process may grow by.
"""

import contextlib
import ctypes
import hmac
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from gpuwatch.errors import FrameError
from gpuwatch.frames import MAX_FRAME_BYTES, decode_command, encode, printable
from gpuwatch.schema import WIRE_VERSION, NodeFrame
from gpuwatch.wire.collect.gather import Gather, is_calm
from gpuwatch.wire.collect.keys import JobKey
from gpuwatch.wire.collect.link import NodeLink
from gpuwatch.wire.collect.pipe import (
    KEEPALIVE_S,
    MAGIC,
    PIPE,
    PIPE_VERSION,
    PreambleReader,
    preamble,
)
from gpuwatch.wire.collect.refusals import KEYLESS, WRONG_KEY, Refusals
from gpuwatch.wire.collect.tcpinfo import cut, peer_address, received_bytes, resident_bytes
from gpuwatch.wire.collect.wake import Wake

__all__ = ["VERBS", "Door"]

VERBS = frozenset({"snapshot", "stack", "memory", "profile", "fetch", "set"})
"""What a monitor may ask through a door. The rest concerns the node process itself."""

CLIENTS = 32
CONNECTIONS = 256
CLIENT_TTL_S = 10.0
"""A client says that it is there each second, or each fourth."""
HANDSHAKE_S = 5.0
AFTER_END_S = 0.5
"""So long does the door stay when the command that it stands beside has ended: its last words."""
GROWTH_BYTES = 256 * 2**20
INBOUND_BYTES = 2**20
INBOUND_RATE = 16384
"""Bytes a second; a monitor sends 150, and some more for each command."""

_MESSAGE_BYTES = 65536
_CLIENT_FRAMES = 300  # half a minute
_WAITING_FRAMES = 300
PULSE_S = 8.0
PULSE_TTL_S = 20.0
"""After this the connection of a machine that has vanished is closed. A monitor answers each pulse:
with a thousand doors more of them cost it as much as their frames."""
_COMMANDS = 40.0
_COMMANDS_A_S = 20.0
_TURN = 256
_POLL_MS = 200
_LOOK_S = 0.1
_COMPLAINTS = 50
_DOMAIN = b"gpuwatch"
_ZAP = "inproc://zeromq.zap.01"
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_REFUSED: dict[tuple[int, int], str] = {
    # libzmq gives no more with the event than why; which connection it was is said next.
    (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): WRONG_KEY,
    (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): KEYLESS,
}
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | _FAILED


class _Client:
    """A monitor that is attached."""

    def __init__(self, now_s: float, address: str) -> None:
        self.seen_s = now_s
        self.address = address
        self.calm = False  # gets about a frame a second
        self.greeting = b""
        self.dropped = 0
        self._commands = _COMMANDS
        self._filled_s = now_s

    def may_ask(self, now_s: float) -> bool:
        """Whether a command more is within its bound."""
        more = _COMMANDS_A_S * (now_s - self._filled_s)
        self._commands = min(_COMMANDS, self._commands + more)
        self._filled_s = now_s
        if self._commands < 1:
            return False
        self._commands -= 1
        return True


class Door:
    """Serves the node process of a run directory on a port; starts one if there is none.

    Args:
        directory: the run directory.
        agent_argv: the command that starts a node process and returns.
        listener: a socket that listens; it stays the caller's.
        key: the job key.
        package: the version of this package, for the preamble.
        say: called with a line for whoever keeps the door: who comes, goes, or is refused.
        until: a descriptor that becomes readable when the door is to close soon.
    """

    def __init__(
        self,
        directory: Path,
        agent_argv: Sequence[str],
        listener: socket.socket,
        key: JobKey,
        *,
        package: str,
        say: Callable[[str], None] = lambda _: None,
        until: int | None = None,
    ) -> None:
        self._listener = listener
        self._port = int(listener.getsockname()[1])
        self._key = key
        self._package = package
        self._say = say
        self._until = until
        self._node = socket.gethostname()[:256]
        self._stop = False
        self._clients: dict[bytes, _Client] = {}
        self._connections: dict[int, float] = {}
        self._addresses: dict[int, str] = {}  # of connections that are not closed yet
        self._refused = ""  # why, of the connection that is closed next
        self._refusals = Refusals(say)
        self._frames: deque[bytes] = deque(maxlen=_WAITING_FRAMES)
        self._gather = Gather()
        self._trouble = ""
        self._told = ""
        self._words = 0
        self._spoke_s = 0.0
        self._complaints: set[str] = set()
        self._wake = Wake()
        self._link = NodeLink(directory, agent_argv, self._on_frame, self._on_state)
        self._open()
        self._first_bytes = resident_bytes()

    @property
    def clients(self) -> int:
        """How many monitors are attached."""
        return len(self._clients)

    @property
    def connections(self) -> int:
        """How many connections there are, those that are not through their handshake included."""
        return len(self._connections)

    # --- sockets -------------------------------------------------------------------------------

    def _open(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # First whoever answers for a key, then what asks: libzmq refuses in any other case.
        self._zap = self._context.socket(zmq.ROUTER)
        self._zap.linger = 0
        self._zap.bind(_ZAP)
        self._router = router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES)
        router.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        router.setsockopt(zmq.HEARTBEAT_IVL, int(PULSE_S * 1000))
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(PULSE_TTL_S * 1000))
        router.rcvhwm = _TURN
        router.sndhwm = _CLIENT_FRAMES
        router.curve_server = True
        router.curve_secretkey = self._key.secret
        router.zap_domain = _DOMAIN
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._monitor = router.get_monitor_socket(_EVENTS)
        self._monitor.linger = 0
        # A copy: libzmq closes what it is given, and the port stays ours when all is made anew.
        router.setsockopt(zmq.USE_FD, os.dup(self._listener.fileno()))
        router.bind(f"tcp://127.0.0.1:{self._port}")
        self._poller = zmq.Poller()
        for one in (self._zap, self._router, self._monitor):
            self._poller.register(one, zmq.POLLIN)
        for fd in (self._wake.fd, self._until):
            if fd is not None:
                self._poller.register(fd, zmq.POLLIN)

    def _close(self, linger_ms: int) -> None:
        self._router.disable_monitor()
        for one in (self._monitor, self._zap):
            one.close(linger=0)
        self._router.close(linger=linger_ms)
        self._context.destroy(linger=linger_ms)
        self._clients.clear()
        self._connections.clear()
        self._addresses.clear()

    # --- in the thread of the link -------------------------------------------------------------

    def _on_frame(self, data: bytes, _received_s: float) -> None:
        if self._clients:
            self._frames.append(data)
            self._wake.set()

    def _on_state(self, link: str, message: str) -> None:
        self._trouble = message if link == "lost" else ""
        self._wake.set()

    # --- the loop ------------------------------------------------------------------------------

    def stop(self, _number: int = 0, _frame: object = None) -> None:
        """End `run`; usable as a signal handler, and from any thread."""
        self._stop = True
        self._wake.set()

    def run(self) -> None:
        """Serve until `stop`, or until the descriptor `until` says that it is time."""
        self._link.start()
        try:
            self._loop()
        finally:
            self._link.close()
            self._close(linger_ms=200)

    def _loop(self) -> None:
        end_s: float | None = None
        next_look_s = 0.0
        while not self._stop:
            ready = dict(self._poller.poll(_POLL_MS))
            if self._wake.fd in ready:
                self._wake.clear()
            if self._zap in ready:
                self._admit()
            if self._monitor in ready:
                self._count()
            if self._router in ready:
                self._hear()
            self._relay()
            now_s = time.monotonic()
            self._speak(now_s)
            if now_s >= next_look_s:
                next_look_s = now_s + _LOOK_S
                self._look(now_s)
            if end_s is None and self._until is not None and self._until in ready:
                self._poller.unregister(self._until)
                end_s = now_s + AFTER_END_S
            if end_s is not None and now_s >= end_s:
                return

    def _look(self, now_s: float) -> None:
        """Let go of who is gone, and of who is more than is good."""
        self._refusals.look(now_s)
        for who, client in list(self._clients.items()):
            if now_s - client.seen_s > CLIENT_TTL_S:
                self._forget(who, "has gone silent")
        for descriptor, since_s in list(self._connections.items()):
            count = received_bytes(descriptor)
            if count is None:
                del self._connections[descriptor]
            elif count > INBOUND_BYTES + INBOUND_RATE * (now_s - since_s):
                self._complain(f"a connection has sent {count / 2**20:.0f} MB and is cut")
                self._cut(descriptor)
        if resident_bytes() - self._first_bytes > GROWTH_BYTES:
            # Whatever it is made of, it goes with the sockets.
            self._complain("so much waits here that everybody is let go; they come back")
            self._close(linger_ms=0)
            _give_back()
            self._open()
            self._first_bytes = max(self._first_bytes, resident_bytes() - GROWTH_BYTES // 2)

    # --- who comes -----------------------------------------------------------------------------

    def _admit(self) -> None:
        """Answer libzmq's questions whether a key may enter (ZeroMQ RFC 27)."""
        for _ in range(_TURN):
            try:
                parts = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            if len(parts) != 9:
                continue
            who, empty, version, request, domain, address, _, mechanism, key = parts
            known = (
                (version, domain, mechanism) == (b"1.0", _DOMAIN, b"CURVE")
                and len(key) == 32
                and hmac.compare_digest(z85.encode(key), self._key.public)
            )
            status, text = (b"200", b"OK") if known else (b"400", b"unknown key")
            if not known:
                shown = printable(address.decode("utf-8", "replace"))[:64]
                self._refusals.add(WRONG_KEY, shown, time.monotonic())
            with contextlib.suppress(zmq.ZMQError):
                answer = [who, empty, b"1.0", request, status, text, b"", b""]
                self._zap.send_multipart(answer, zmq.NOBLOCK)

    def _count(self) -> None:
        """Note connections that come and go; what is too much is cut at once."""
        while True:
            try:
                told = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.ZMQError:
                return
            event, value = told["event"], told["value"]
            if event & _FAILED:
                self._refused = _REFUSED.get((event, value), "")
            elif event != zmq.EVENT_ACCEPTED:
                self._connections.pop(value, None)
                address = self._addresses.pop(value, "")
                if self._refused:
                    self._refusals.add(self._refused, address, time.monotonic())
                    self._refused = ""
            elif len(self._connections) < CONNECTIONS:
                self._connections[value] = time.monotonic()
                self._addresses[value] = peer_address(value)
            else:
                self._complain(f"more than {CONNECTIONS} connections: the last ones are cut")
                cut(value, self._port)

    def _cut(self, descriptor: int) -> None:
        cut(descriptor, self._port)
        self._connections.pop(descriptor, None)

    def _forget(self, who: bytes, why: str) -> None:
        client = self._clients.pop(who)
        lost = f"; {client.dropped:,} frames were too many for it" if client.dropped else ""
        self._say(f"{client.address} {why}{lost}; {len(self._clients)} watch")

    def _complain(self, text: str) -> None:
        """Say what is wrong, each thing once."""
        if text not in self._complaints and len(self._complaints) < _COMPLAINTS:
            self._complaints.add(text)
            self._say(text)

    # --- what comes ----------------------------------------------------------------------------

    def _hear(self) -> None:
        for _ in range(_TURN):
            try:
                who = self._router.recv(zmq.NOBLOCK)
                if not self._router.getsockopt(zmq.RCVMORE):
                    continue
                part = self._router.recv(zmq.NOBLOCK, copy=False)
                data = part.bytes
                more = False
                while self._router.getsockopt(zmq.RCVMORE):
                    more = True
                    self._router.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            if more:
                self._complain("a message in several parts was refused")
            elif data.startswith(MAGIC):
                self._attach(who, data, _address(part))
            else:
                self._obey(who, data)

    def _attach(self, who: bytes, data: bytes, address: str) -> None:
        now_s = time.monotonic()
        known = self._clients.get(who)
        if known is not None:
            known.seen_s = now_s
            if data != known.greeting:
                self._heed(known, data)
            return
        try:
            found = PreambleReader().feed(data)
        except FrameError:
            found = None
        if found is None:
            self._complain(f"{address} says what is no greeting")
            return
        there = found[0]
        # Who is of another version reads ours, and says what is to be done.
        if not self._send(who, preamble(self._package)):
            return
        if (there.pipe_version, there.wire_version) != (PIPE_VERSION, WIRE_VERSION):
            self._complain(f"{address} has another version of gpuwatch")
            return
        if len(self._clients) >= CLIENTS:
            self._send(who, self._word(f"{CLIENTS} monitors are attached, and it takes no more"))
            self._complain(f"{address} is one monitor too many")
            return
        self._clients[who] = _Client(now_s, address)
        self._heed(self._clients[who], data)
        self._say(f"{address} is attached; {len(self._clients)} watch")
        self._send(who, self._word(self._trouble))

    def _heed(self, client: _Client, data: bytes) -> None:
        """Take the wish behind the preamble: how often this client is to be sent a frame."""
        client.greeting = data
        calm = False
        try:
            found = PreambleReader().feed(data)
            if found is not None and found[1]:
                calm = is_calm(decode_command(found[1]))
        except FrameError as exc:
            self._complain(f"a wish of {client.address} was refused: {exc}")
        if calm is not client.calm:
            # What has been gathered is for those who have been calm: nobody gets a frame twice.
            self._give(self._gather.take(time.monotonic()))
            client.calm = calm

    def _obey(self, who: bytes, data: bytes) -> None:
        client = self._clients.get(who)
        if client is None:
            return
        try:
            command = decode_command(data)
        except FrameError as exc:
            self._complain(f"a command of {client.address} was refused: {exc}")
            return
        if command.verb not in VERBS:
            self._complain(f"a command of {client.address} was refused: {command.verb[:64]!r}")
        elif client.may_ask(time.monotonic()):
            self._link.send(command)
        else:
            self._complain(f"{client.address} asks more than {_COMMANDS_A_S:.0f} things a second")

    # --- what goes -----------------------------------------------------------------------------

    def _relay(self) -> None:
        while self._frames:
            data = self._frames.popleft()
            now_s = self._spoke_s = time.monotonic()
            self._told = ""
            if len(data) > MAX_FRAME_BYTES:
                continue
            if any(client.calm for client in self._clients.values()):
                self._give(self._gather.add(data, now_s))
            for who, client in list(self._clients.items()):
                if not client.calm:
                    self._send(who, data)
        overdue_s = self._gather.overdue_s
        if overdue_s is not None and time.monotonic() >= overdue_s:
            self._give(self._gather.take(time.monotonic()))

    def _give(self, frames: list[bytes]) -> None:
        """Send what was gathered to those who have asked for fewer frames."""
        for data in frames:
            for who, client in list(self._clients.items()):
                if client.calm:
                    self._send(who, data)

    def _speak(self, now_s: float) -> None:
        """Say what is wrong between here and the node process, or that the way is open."""
        trouble = self._trouble
        if trouble == self._told and now_s - self._spoke_s < KEEPALIVE_S:
            return
        self._told = trouble
        if trouble:
            self._complain(trouble)
        self._spoke_s = now_s
        self._give(self._gather.take(now_s))
        word = self._word(trouble)
        for who in list(self._clients):
            self._send(who, word)

    def _word(self, trouble: str) -> bytes:
        self._words += 1
        text = trouble.encode("utf-8", "replace").decode()[:1024]
        return encode(
            NodeFrame(
                version=WIRE_VERSION,
                node=self._node,
                incarnation=PIPE,
                seq=self._words,
                sent_s=time.time(),
                notices=(text,) if text else (),
            )
        )

    def _send(self, who: bytes, data: bytes) -> bool:
        """Send to a client; one that is slower than the frames misses some, and sees the gap."""
        client = self._clients.get(who)
        try:
            self._router.send_multipart([who, data], zmq.NOBLOCK)
        except zmq.Again:
            if client is not None:
                client.dropped += 1
            return False
        except zmq.ZMQError:
            if client is not None:
                self._forget(who, "has gone")
            return False
        return True


def _address(part: zmq.Frame) -> str:
    try:
        return str(part.get("Peer-Address"))
    except (zmq.ZMQError, ValueError):
        return "somebody"


def _give_back() -> None:
    """Return freed memory to the system, where the C library can (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
