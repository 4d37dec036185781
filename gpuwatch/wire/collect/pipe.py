"""What a pipe between a monitor and a node carries, and the far side of it.

Towards the monitor: a preamble, then the frames of a node process, each behind its length, as in a
recording. Away from it: commands, each behind its length; `attach` among them says how often the
monitor wishes to hear. The preamble lets a reader skip what a
login prints before it, and tells versions that do not fit before anything is decoded.

Frames of the incarnation `PIPE` come from the pipe's far end itself: they hold no rank. They say
that the way is open, and in their notices what is wrong between it and the node process.
"""

import contextlib
import os
import select
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from gpuwatch.errors import FrameError, GpuwatchError
from gpuwatch.frames import FrameStream, decode_command, encode, packed
from gpuwatch.schema import WIRE_VERSION, NodeFrame
from gpuwatch.wire.collect.gather import CALM_S, Gather, is_calm
from gpuwatch.wire.collect.link import NodeLink
from gpuwatch.wire.collect.wake import Wake

__all__ = [
    "MAGIC",
    "NOISE_BYTES",
    "PIPE",
    "PIPE_VERSION",
    "Preamble",
    "PreambleReader",
    "Stdio",
    "preamble",
]

MAGIC = b"\x89GPUWATCH-PIPE\n\x00"
"""No text begins so, and a terminal in between, which makes CR LF of the LF, damages it."""

_WORD = MAGIC[:-2]
PIPE_VERSION = 1
PIPE = "pipe"

NOISE_BYTES = 65536
"""So much may come before the preamble: banners, messages of the day, what a shell profile says."""

KEEPALIVE_S = 1.0
_TAIL = struct.Struct(">HHB")
_QUEUE_BYTES = 4 * 2**20  # a minute of eight ranks; what is older is dropped first
_COMMAND_BYTES = 65536
_CHUNK_BYTES = 65536
_LOOK_MS = 500
_COMPLAINTS = 10


@dataclass(frozen=True, slots=True)
class Preamble:
    """The versions of the far side: of the pipe, of the frames, and of the package."""

    pipe_version: int
    wire_version: int
    package: str


def preamble(package: str) -> bytes:
    """Return the first bytes on a pipe. Their layout is the same for every version."""
    name = package.encode("ascii", "replace")[:255]
    return MAGIC + _TAIL.pack(PIPE_VERSION, WIRE_VERSION, len(name)) + name


class PreambleReader:
    """Finds the preamble behind whatever a login prints.

    `noise` is what came before it, at most `NOISE_BYTES`.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.noise = b""

    def feed(self, data: bytes) -> tuple[Preamble, bytes] | None:
        """Take the next bytes; returns (preamble, what came after it) once it is complete.

        Raises:
            FrameError: there is no preamble among the first bytes, or a terminal has damaged it.
        """
        self._buffer += data
        at = self._buffer.find(MAGIC)
        if at < 0:
            self.noise = bytes(self._buffer[:NOISE_BYTES])
            if _WORD + b"\r\n" in self._buffer:
                raise FrameError("a terminal stands in the way: leave out -t (and -tt, --tty)")
            if len(self._buffer) > NOISE_BYTES:
                raise FrameError(
                    f"its first {NOISE_BYTES:,} bytes are not from gpuwatch agent --stdio: what "
                    "prints there (a shell profile?)"
                )
            return None
        if at > NOISE_BYTES:
            raise FrameError(f"more than {NOISE_BYTES:,} bytes came before gpuwatch's own")
        self.noise = bytes(self._buffer[:at])
        start = at + len(MAGIC)
        if len(self._buffer) < start + _TAIL.size:
            return None
        pipe_version, wire_version, length = _TAIL.unpack_from(self._buffer, start)
        end = start + _TAIL.size + length
        if len(self._buffer) < end:
            return None
        package = bytes(self._buffer[start + _TAIL.size : end]).decode("ascii", "replace")
        return Preamble(pipe_version, wire_version, package), bytes(self._buffer[end:])


class _Outbox:
    """Frames that wait for a slow reader; the oldest are dropped, and counted.

    `put` is called by one thread, `take` by another.
    """

    def __init__(self, limit_bytes: int = _QUEUE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self.dropped = 0

    def put(self, frame: bytes) -> None:
        with self._lock:
            self._frames.append(frame)
            self._bytes += len(frame)
            while self._bytes > self._limit_bytes and len(self._frames) > 1:
                self._bytes -= len(self._frames.popleft())
                self.dropped += 1

    def take(self) -> bytes:
        """Return the oldest frame, empty if there is none."""
        with self._lock:
            if not self._frames:
                return b""
            frame = self._frames.popleft()
            self._bytes -= len(frame)
            return frame

    def __len__(self) -> int:
        return len(self._frames)


class Stdio:
    """The far side: the frames of this node's process to a pipe, commands from another one.

    It starts the node process if there is none, as a monitor does. Nothing listens.

    Args:
        directory: the run directory.
        agent_argv: the command that starts a node process and returns.
        package: the version of this package, for the preamble.
        source: the descriptor that commands are read from; its end is ours.
        sink: the descriptor that frames are written to; nothing else is.
    """

    def __init__(
        self,
        directory: Path,
        agent_argv: Sequence[str],
        *,
        package: str,
        source: int,
        sink: int,
    ) -> None:
        self._source = source
        self._sink = sink
        self._parent = os.getppid()
        self._outbox = _Outbox()
        self._gathering = threading.Lock()  # of what follows: the link's thread fills it
        self._gather = Gather()
        self._calm = False  # the reader has asked for about a frame a second
        self._unsent = memoryview(preamble(package))
        self._commands = FrameStream()
        self._node = socket.gethostname()[:256]
        self._trouble = ""
        self._told = ""
        self._words = 0
        self._written_s = time.monotonic()
        self._ending = ""
        self._complaints = 0
        self._wake = Wake()
        self._link = NodeLink(directory, agent_argv, self._on_frame, self._on_state)

    @property
    def dropped(self) -> int:
        """How many frames were dropped because the reader was slower than they came."""
        return self._outbox.dropped

    # --- in the thread of the link -------------------------------------------------------------

    def _on_frame(self, data: bytes, received_s: float) -> None:
        with self._gathering:
            frames = self._gather.add(data, received_s) if self._calm else [data]
            self._give(frames)
        if frames:
            self._wake.set()

    def _give(self, frames: list[bytes]) -> None:
        for data in frames:
            self._outbox.put(packed(data))

    def _on_state(self, link: str, message: str) -> None:
        self._trouble = message if link == "lost" else ""
        self._wake.set()

    # --- in the main thread --------------------------------------------------------------------

    def stop(self, number: int = 0, _frame: FrameType | None = None) -> None:
        """End `run`; usable as a signal handler."""
        self._ending = f"signal {number}"
        self._wake.set()

    def run(self) -> str:
        """Carry frames and commands until an end of the pipe is closed; returns why it ended.

        Raises:
            GpuwatchError: the other side sends what is no command.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.stop)
        before = [(fd, os.get_blocking(fd)) for fd in (self._source, self._sink)]
        for fd, _ in before:
            os.set_blocking(fd, False)
        self._link.start()
        try:
            self._loop()
        finally:
            self._link.close()
            for fd, blocking in before:
                with contextlib.suppress(OSError):
                    os.set_blocking(fd, blocking)
        return self._ending

    def _loop(self) -> None:
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        poll.register(self._wake.fd, select.POLLIN)
        while not self._ending:
            # Without an event to wait for, poll still tells that nobody reads any more.
            shared = self._source == self._sink
            waiting = select.POLLOUT if self._unsent or len(self._outbox) else 0
            poll.register(self._sink, waiting | (select.POLLIN if shared else 0))
            ready = dict(poll.poll(self._patience_ms()))
            if ready.get(self._wake.fd):
                self._wake.clear()
            if ready.get(self._source, 0) & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._read()
            if ready.get(self._sink, 0) & (select.POLLERR | select.POLLNVAL):
                self._ending = self._ending or "nobody reads"
            self._gathered()
            self._speak()
            self._write()
            if os.getppid() != self._parent:
                self._ending = self._ending or "the parent is gone"

    def _read(self) -> None:
        try:
            data = os.read(self._source, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError as exc:
            self._ending = f"stdin: {exc.strerror}"
            return
        if not data:
            self._ending = "end of stdin"
            return
        try:
            for frame in self._commands.feed(data):
                self._obey(frame)
        except FrameError as exc:
            raise GpuwatchError(f"stdin carries no commands of gpuwatch attach: {exc}") from None
        if self._commands.pending > _COMMAND_BYTES + 4:
            raise GpuwatchError(f"a command on stdin is longer than {_COMMAND_BYTES} bytes")

    def _obey(self, frame: bytes) -> None:
        try:
            command = decode_command(frame)
            if command.verb == "attach":
                self._heed(is_calm(command))
            else:
                self._link.send(command)
        except FrameError as exc:
            self._complaints += 1
            if self._complaints <= _COMPLAINTS:
                with contextlib.suppress(OSError):
                    os.write(2, f"gpuwatch: a command was refused: {exc}\n".encode())

    def _heed(self, calm: bool) -> None:
        """Send fewer frames from now on, or all of them."""
        with self._gathering:
            self._give(self._gather.take(time.monotonic()))
            self._calm = calm

    def _patience_ms(self) -> int:
        """Return how long nothing is to be done, unless something happens."""
        overdue_s = self._gather.overdue_s
        if overdue_s is None:
            return _LOOK_MS
        return max(0, min(_LOOK_MS, int((overdue_s - time.monotonic()) * 1000) + 1))

    def _gathered(self) -> None:
        """Send what has waited for a frame that does not come."""
        with self._gathering:
            now_s = time.monotonic()
            overdue_s = self._gather.overdue_s
            if overdue_s is not None and now_s >= overdue_s:
                self._give(self._gather.take(now_s))

    def _speak(self) -> None:
        """Say what is wrong between here and the node process, or that the way is open."""
        now_s = time.monotonic()
        trouble = self._trouble.encode("utf-8", "replace").decode()[:1024]
        if self._unsent or len(self._outbox):
            return
        quiet_s = KEEPALIVE_S + (CALM_S if self._calm else 0.0)
        if trouble == self._told and now_s - self._written_s < quiet_s:
            return
        self._told = trouble
        with self._gathering:
            self._give(self._gather.take(now_s))
        self._words += 1
        word = NodeFrame(
            version=WIRE_VERSION,
            node=self._node,
            incarnation=PIPE,
            seq=self._words,
            sent_s=time.time(),
            notices=(trouble,) if trouble else (),
        )
        self._outbox.put(packed(encode(word)))

    def _write(self) -> None:
        while not self._ending:
            if not self._unsent:
                self._unsent = memoryview(self._outbox.take())
                if not self._unsent:
                    return
            try:
                done = os.write(self._sink, self._unsent[:_CHUNK_BYTES])
            except BlockingIOError:
                return
            except OSError:
                self._ending = "nobody reads"
                return
            self._unsent = self._unsent[done:]
            self._written_s = time.monotonic()
