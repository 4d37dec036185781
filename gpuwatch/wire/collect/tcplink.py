"""The monitor's side of TCP with CURVE: one thread and one context for any number of doors.

Each try is a socket of its own, closed with all that waits in it when the try has failed: nothing
of an old connection can mix with a new one. What is live is judged by the age of what comes, never
by the state of the connection, which says nothing when a machine or a network has vanished.

A door is not trusted with more than a pipe: what it sends is bounded in rate and in memory.

With a thousand doors it is the calls a second that cost: what waits is told by one epoll over
libzmq's descriptors, a connection that is well is looked at every two seconds, and the doors are
asked for a frame a second (see `gather`).
"""

import contextlib
import errno
import ipaddress
import random
import select
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import zmq
from zmq.utils.monitor import parse_monitor_message

from gpuwatch.errors import FrameError, WireVersionError
from gpuwatch.frames import MAX_FRAME_BYTES, encode, printable
from gpuwatch.schema import WIRE_VERSION, Command, NodeFrame
from gpuwatch.wire.collect.complaints import (
    Complaint,
    TcpTarget,
    why_no_connection,
    why_no_handshake,
    why_other_version,
)
from gpuwatch.wire.collect.gather import wish
from gpuwatch.wire.collect.pipe import PreambleReader, preamble
from gpuwatch.wire.collect.scout import Found, Scout, addresses_of, greeting_of
from gpuwatch.wire.collect.tcpinfo import Unread, received_bytes, resident_bytes
from gpuwatch.wire.collect.wake import Wake
from gpuwatch.wire.collect.way import (
    BURST_BYTES,
    FRAME_BYTES,
    QUIET_S,
    RATE_BYTES,
    SETTLED_S,
    OnFrame,
    OnState,
    Turns,
    Way,
)

__all__ = ["TcpLink", "TcpWay"]

CONNECT_S = 5.0
HANDSHAKE_S = 5.0
ANSWER_S = 15.0
"""From the start of a try to the door's first word."""
ATTACH_S = 1.0
ATTACH_CALM_S = 4.0
"""To who is asked for fewer frames: a door forgets who says nothing for ten seconds."""
_LOOK_S = 10.0
"""So long may it take to find out why a connection has failed, a hung resolver included."""
_AHEAD_BYTES = 2 * MAX_FRAME_BYTES
"""So much may have come that is no frame yet: one of the largest, and those that wait."""
_MOVED_BYTES = 8192
"""Fewer bytes are the pulse of a connection, not a large frame on its way over a slow one."""
_QUEUE_FRAMES = 64
_BUFFER_CALM_BYTES = 256 * 1024
"""Of a thousand connections to a monitor that is behind: the kernel would keep 6 MB for each."""
_COMMANDS = 64
_ASKED_IDS = 16
_FRAMES_A_TURN = 64
_STAGGER_S = 0.002
AT_A_TIME = 64
"""So many connections are being made: a handshake costs both sides a millisecond of computing, and
one that takes more than `HANDSHAKE_S` has failed."""
_POLL_S = 0.1
_TICK_S = 0.2
_LOOK_CALM_S = 2.0
_GROWTH_BYTES = 32 * 2**20
_DRAIN_S = 0.02
_SOCKETS = 65535

_READABLE = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class _Watch:
    """Tells which sockets have news, at a cost that does not grow with those that have none.

    The descriptor of a socket says that something has changed, not that there is something to
    read: a socket is read until nothing is left. Sending takes notice of changes too, and then the
    descriptor says nothing: see `again`.
    """

    def __init__(self, wake: int) -> None:
        self._epoll = select.epoll()
        self._epoll.register(wake, select.EPOLLIN)
        self._readers: dict[int, tuple[zmq.Socket[bytes], Callable[[], bool]]] = {}
        self._again: set[int] = set()
        self._wake = wake

    def add(self, one: "zmq.Socket[bytes]", read: Callable[[], bool]) -> int:
        """Call `read` on news, first of all now; it takes one message, or returns False.

        Returns the descriptor, by which it is removed.
        """
        descriptor = int(one.getsockopt(zmq.FD))
        self._epoll.register(descriptor, select.EPOLLIN)
        self._readers[descriptor] = (one, read)
        self._again.add(descriptor)
        return descriptor

    def remove(self, descriptor: int) -> None:
        """Forget a socket, before it is closed."""
        if self._readers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def again(self, descriptor: int) -> None:
        """Look at a socket whatever its descriptor says."""
        self._again.add(descriptor)

    def turn(self) -> bool:
        """Wait for news and have it read; returns whether someone has woken this thread."""
        again, self._again = self._again, set()
        found = self._epoll.poll(0 if again else _POLL_S)
        if any(descriptor != self._wake for descriptor, _ in found):
            time.sleep(_DRAIN_S)  # a burst gathers: a wake-up costs more than a frame
            found = self._epoll.poll(0)
        ready = {descriptor for descriptor, _ in found}
        woken = self._wake in ready
        ready |= self._readable(again - ready)
        for _ in range(_FRAMES_A_TURN):
            had = self._read(ready)
            if not had:
                return woken
            ready = self._readable(had)
        self._again |= ready
        return woken

    def _readable(self, descriptors: set[int]) -> set[int]:
        """Return those with something to read, for a third of what it costs to ask each."""
        sockets = [(self._readers[d][0], d) for d in descriptors if d in self._readers]
        if not sockets:
            return set()
        ready = {one for one, _ in zmq.zmq_poll([(one, _READABLE) for one, _ in sockets], 0)}
        return {descriptor for one, descriptor in sockets if one in ready}

    def _read(self, descriptors: set[int]) -> set[int]:
        """Have a message read of each; returns those that had one."""
        had = set()
        for descriptor in descriptors:
            found = self._readers.get(descriptor)
            if found is not None and found[1]():
                had.add(descriptor)
        return had

    def close(self) -> None:
        """Close what it watches by."""
        self._epoll.close()


class _Gate:
    """Lets `AT_A_TIME` ways make their connection, in the order in which they came."""

    def __init__(self) -> None:
        self._inside: set[TcpWay] = set()
        self._queue: dict[TcpWay, None] = {}

    def wait(self, way: "TcpWay") -> None:
        """Queue who is to begin, unless it waits already."""
        self._queue.setdefault(way)

    def admit(self) -> "list[TcpWay]":
        """Return who may begin now."""
        found = []
        while self._queue and len(self._inside) < AT_A_TIME:
            way = next(iter(self._queue))
            del self._queue[way]
            self._inside.add(way)
            found.append(way)
        return found

    def leave(self, way: "TcpWay") -> None:
        """Make room: it has a connection, or has failed."""
        self._inside.discard(way)
        self._queue.pop(way, None)


class TcpWay(Way):
    """One door: the connection to it, and what came through. All of it: the thread of the link."""

    target: TcpTarget

    def __init__(
        self,
        target: TcpTarget,
        package: str,
        context: "zmq.Context[zmq.Socket[bytes]]",
        watch: _Watch,
        gate: _Gate,
        turns: Turns["TcpWay"],
        ask: Callable[[tuple["TcpWay", int], Callable[[], Found]], None],
        on_frame: OnFrame,
        on_state: OnState,
        start_s: float,
        interval_s: float = 0.0,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(on_frame, on_state, start_s, rng)
        self.target = target
        self._package = package
        self._greeting = preamble(package) + (encode(wish(interval_s)) if interval_s else b"")
        self._calm = interval_s > 0
        self._context = context
        self._watch = watch
        self._gate = gate
        self._turns = turns
        self._ask = ask
        self._socket: zmq.Socket[bytes] | None = None
        self._socket_fd = -1
        self._monitor: zmq.Socket[bytes] | None = None
        self._monitor_fd = -1
        self._address = ""
        self._addresses: list[str] = []  # not tried yet, of the name
        self._good_address = ""  # the last one that was a door
        self._numbers: list[int] = []  # why the tried ones were none
        self._waiting: Callable[[Found], None] | None = None
        self._question = 0
        self._reset(start_s)

    def _reset(self, now_s: float) -> None:
        self._begin()
        self._began_s = now_s
        self._moved_s = now_s
        self._moved_bytes = 0
        self._descriptor: int | None = None
        self._opened = False  # the handshake is done
        self._greeted = False
        self._attach_s = 0.0
        self._asked_ids: deque[str] = deque(maxlen=_ASKED_IDS)
        self._whole = False  # a whole frame has come since the last look
        self._unread = Unread(now_s)
        self._tokens = float(BURST_BYTES)
        self._filled_s = now_s
        self._reading = False

    # --- the connection ------------------------------------------------------------------------

    def tick(self, now_s: float, *, grown: bool = True) -> None:
        """Start, serve and judge the connection as the time demands.

        `grown` says that this process holds much more memory than at the last look.
        """
        self.look_s = now_s
        if self._waiting is not None:
            if now_s - self._began_s > _LOOK_S:
                self.answer(self._question, Found(number=errno.ETIMEDOUT))
            return
        if self._socket is None:
            if now_s >= self._start_s:
                self._gate.wait(self)
            return
        if not self._greeted and now_s - self._began_s > ANSWER_S:
            if self._opened:
                self._fail(Complaint("it took the key and said nothing more; is it stopped?"))
            else:
                self._look(now_s)
            return
        if not self._opened:
            return
        self._refill(now_s)
        # What has no end comes after all that is whole: a connection that gives frames is well.
        whole, self._whole = self._whole, False
        received = None
        if self._descriptor is not None and (grown or not (whole and self._calm)):
            received = received_bytes(self._descriptor)
        if received is not None:
            if self._unread.count(received, now_s) > _AHEAD_BYTES:
                self._fail(Complaint("it sends a frame without an end and was let go", False))
                return
            if received - self._moved_bytes >= _MOVED_BYTES:
                self._moved_bytes, self._moved_s = received, now_s
        if self._greeted and self._reading and now_s - self._moved_s > QUIET_S:
            self._fail(Complaint(f"it fell silent and was let go after {QUIET_S:.0f} s"))
            return
        if self.state == "live" and self._live_s and now_s - self._live_s > SETTLED_S:
            self._backoff.reset()
        if now_s - self._attach_s >= (ATTACH_CALM_S if self._calm else ATTACH_S):
            self._attach_s = now_s
            self._send(self._greeting)
        if self._calm and self._greeted and self._reading:
            self.look_s = now_s + _LOOK_CALM_S

    def ask(self) -> None:
        """Ask for all that the node knows: it is this one's turn."""
        self._asked_ids.append(uuid.uuid4().hex)
        self._send(encode(Command(WIRE_VERSION, self._asked_ids[-1], "snapshot")))

    def begin(self, now_s: float) -> None:
        """Begin a try: a name is looked up first, each time anew."""
        self._reset(now_s)
        self._addresses = []
        self._numbers = []
        try:
            ipaddress.ip_address(self.target.host.partition("%")[0])
        except ValueError:
            self._wait(self._named, partial(addresses_of, self.target.host, self.target.port))
        else:
            self._connect(self.target.host)

    def _wait(self, then: Callable[[Found], None], question: Callable[[], Found]) -> None:
        self._waiting = then
        self._question += 1
        self._ask((self, self._question), question)

    def answer(self, question: int, found: Found) -> None:
        """Take what the scout has found; the answer to an older question is forgotten."""
        then = self._waiting
        if then is not None and question == self._question:
            self._waiting = None
            then(found)

    def _named(self, found: Found) -> None:
        if found.addresses:
            addresses = sorted(found.addresses, key=lambda one: one != self._good_address)
            self._addresses = addresses[1:]
            self._connect(addresses[0])
        elif found.unknown:
            self._fail(
                Complaint(f"no machine is called {self.target.host}; look at the spelling", False)
            )
        else:
            self._fail(Complaint("its name is looked up in vain; is the name server up?"))

    def _connect(self, address: str) -> None:
        self._address = address
        key = self.target.key
        try:
            one = self._context.socket(zmq.DEALER)
            self._socket = one
            one.linger = 0
            one.setsockopt(zmq.RECONNECT_IVL, -1)
            one.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_S * 1000))
            one.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
            one.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            one.setsockopt(zmq.IPV6, int(":" in address))
            one.rcvhwm = _QUEUE_FRAMES
            if self._calm:
                one.setsockopt(zmq.RCVBUF, _BUFFER_CALM_BYTES)
            one.sndhwm = _COMMANDS
            one.curve_serverkey = key.public
            one.curve_publickey = key.public
            one.curve_secretkey = key.secret
            self._monitor = one.get_monitor_socket(_EVENTS)
            self._monitor.linger = 0
            self._monitor_fd = self._watch.add(self._monitor, self._happened)
            where = f"[{address}]" if ":" in address else address
            one.connect(f"tcp://{where}:{self.target.port}")
        except zmq.ZMQError as exc:
            self._fail(Complaint(f"no connection can be made: {exc.strerror}"))

    def _happened(self) -> bool:
        """Read all that libzmq tells of the connection; returns False: nothing is left."""
        while self._monitor is not None:
            try:
                parts = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
            told = parse_monitor_message(parts)
            event, value = told["event"], told["value"]
            now_s = time.monotonic()
            if event == zmq.EVENT_CONNECTED:
                self._descriptor = value
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._opened = True
                self._good_address = self._address
                self._moved_s = now_s
                self._refill(now_s)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._fail(Complaint(f"the key is refused on {self.target.host}", False))
            elif self._opened:
                while self._read():  # what came before the end
                    pass
                if self._socket is not None:
                    self._fail(Complaint("the connection was closed there, or lost on the way"))
            else:
                self._look(now_s)
        return False

    def _look(self, now_s: float) -> None:
        """Find out why it has failed, then say so."""
        self.end()
        self._began_s = now_s
        self._wait(self._looked, partial(greeting_of, self._address, self.target.port))

    def _looked(self, found: Found) -> None:
        if found.number:
            self._numbers.append(found.number)
            if self._addresses:
                self._reset(time.monotonic())
                self._connect(self._addresses.pop(0))
                return
            told = (n for n in (errno.ECONNREFUSED, errno.ETIMEDOUT) if n in self._numbers)
            self._fail(why_no_connection(self.target, next(told, found.number)))
        else:
            self._fail(why_no_handshake(self.target, found.greeting))

    def end(self) -> None:
        """Let go of the connection and of all that waits in it."""
        self._turns.done(self)
        self._gate.leave(self)
        self._pause()
        one, self._socket = self._socket, None
        monitor, self._monitor = self._monitor, None
        self._opened = False
        if monitor is not None and one is not None:
            self._watch.remove(self._monitor_fd)
            one.disable_monitor()
            monitor.close(linger=0)
        if one is not None:
            one.close(linger=0)

    # --- what comes ----------------------------------------------------------------------------

    def _refill(self, now_s: float) -> None:
        self._tokens = min(BURST_BYTES, self._tokens + RATE_BYTES * (now_s - self._filled_s))
        self._filled_s = now_s
        if not self._reading and self._tokens > 0 and self._socket is not None:
            self._socket_fd = self._watch.add(self._socket, self._read)
            self._reading = True
            self._moved_s = now_s

    def _pause(self) -> None:
        """Too much at once: it waits in its queue, then at the other side."""
        if self._reading and self._socket is not None:
            self._watch.remove(self._socket_fd)
        self._reading = False

    def _read(self) -> bool:
        """Read a frame; returns whether there was one, and there may be more."""
        one = self._socket
        if one is None or not self._reading:
            return False
        try:
            part = one.recv(_NOBLOCK, copy=False)
            data = part.bytes
            parts, size = 1, len(data)
            while part.more:
                part = one.recv(_NOBLOCK, copy=False)
                parts, size = parts + 1, size + len(part)
        except zmq.ZMQError:
            return False
        self._whole = True
        self._unread.take(parts, size)
        self._tokens -= max(size, FRAME_BYTES)
        self._moved_s = received_s = time.monotonic()
        try:
            if parts > 1:
                self._take_bad(FrameError(f"a frame in {parts} parts"))
            elif self._greeted:
                self._take_frame(data, received_s)
            else:
                self._greet(data)
        except FrameError as exc:
            soon = not isinstance(exc, WireVersionError)
            self._fail(Complaint(f"its connection was let go: {printable(str(exc))}", soon))
        if self._socket is one and self._tokens <= 0:
            self._pause()
        return self._reading

    def _greet(self, data: bytes) -> None:
        """Take the first words of the door.

        Raises:
            FrameError: it is no door of ours.
        """
        found = PreambleReader().feed(data)
        if found is None:
            raise FrameError("whoever has the key there is no gpuwatch")
        other = why_other_version(self.target, found[0], self._package)
        if other is not None:
            self._fail(other)
            return
        self._greeted = True
        self._gate.leave(self)
        self._turns.want(self, time.monotonic())

    def _brings_past(self, frame: NodeFrame) -> bool:
        if not any(reply.id in self._asked_ids for reply in frame.replies):
            return False
        self._turns.done(self)
        return True

    # --- what goes -----------------------------------------------------------------------------

    def send(self, command: Command) -> None:
        """Send a command; without a connection it is forgotten: it would come too late."""
        if self._greeted:
            self._send(encode(command))

    def _send(self, data: bytes) -> None:
        if self._socket is not None and self._opened:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send(data, _NOBLOCK)
            if self._reading:
                self._watch.again(self._socket_fd)


class TcpLink(threading.Thread):
    """Keeps connections to any number of doors, for ever.

    Args:
        targets: where they are, and the key to each.
        package: the version of this package.
        on_frame: called in this thread with the way, the bytes of a frame of a node process, the
            frame, and the monotonic time of its arrival in seconds.
        on_state: called in this thread when the state or the trouble of a way has changed.
        interval_s: how often the doors are asked to send a frame, 0 for every frame as it comes.
    """

    def __init__(
        self,
        targets: Sequence[TcpTarget],
        package: str,
        on_frame: OnFrame,
        on_state: OnState,
        interval_s: float = 0.0,
    ) -> None:
        super().__init__(name="gpuwatch-tcp", daemon=True)
        self._stopping = threading.Event()
        self._commands: deque[tuple[TcpWay, Command]] = deque()
        self._answers: deque[tuple[tuple[TcpWay, int], Found]] = deque()
        self._wake = Wake()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS)
        self._watch = _Watch(self._wake.fd)
        self._turns: Turns[TcpWay] = Turns()
        self._gate = _Gate()
        self._resident_bytes = resident_bytes()
        self._scout: Scout[tuple[TcpWay, int]] = Scout(self._answered)
        now_s = time.monotonic()
        # One after the other, not all in one turn.
        self.ways = tuple(
            TcpWay(
                target,
                package,
                self._context,
                self._watch,
                self._gate,
                self._turns,
                self._scout.ask,
                on_frame,
                on_state,
                now_s + at * _STAGGER_S,
                interval_s,
            )
            for at, target in enumerate(targets)
        )

    def send(self, way: TcpWay, command: Command) -> None:
        """Queue a command for the node behind a door; returns at once."""
        self._commands.append((way, command))
        self._wake.set()

    def close(self, timeout_s: float = 0.4) -> None:
        """End the connections and the thread; waits at most `timeout_s`."""
        self._stopping.set()
        self._wake.set()
        if self.is_alive():
            self.join(timeout_s)

    def _answered(self, who: tuple[TcpWay, int], found: Found) -> None:
        self._answers.append((who, found))
        self._wake.set()

    def run(self) -> None:
        """The thread's body."""
        next_tick_s = 0.0
        try:
            while not self._stopping.is_set():
                now_s = time.monotonic()
                if now_s >= next_tick_s:
                    next_tick_s = now_s + _TICK_S
                    grown = self._has_grown()
                    for way in self.ways:
                        if grown or now_s >= way.look_s:
                            way.tick(now_s, grown=grown)
                for way in self._gate.admit():
                    way.begin(now_s)
                while self._answers:
                    (way, question), found = self._answers.popleft()
                    way.answer(question, found)
                while self._commands:
                    way, command = self._commands.popleft()
                    way.send(command)
                if len(self._turns):
                    for way in self._turns.due(now_s):
                        way.ask()
                if self._watch.turn():
                    self._wake.clear()
        finally:
            for way in self.ways:
                way.end()
            self._watch.close()
            self._context.destroy(linger=0)

    def _has_grown(self) -> bool:
        """Whether much more memory is held than at the last look: somebody sends without an end."""
        now_bytes = resident_bytes()
        grown = now_bytes > self._resident_bytes + _GROWTH_BYTES
        self._resident_bytes = now_bytes if grown else min(now_bytes, self._resident_bytes)
        return grown
