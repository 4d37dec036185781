"""The sampler's loop and its protocol.

stdin: messages behind their length (`gpuwatch.frames.packed`), each a `Watched`: the ranks and
datasets to watch from now on. What cannot be read as that is ignored; after a length that cannot
be, everything is. stdout: one `SensorFrame` behind its length per interval, the first at once.

It ends when stdin closes, when nobody reads stdout any more, on SIGTERM and with its parent. It
never waits for its reader: while a frame is not taken, further ticks are skipped.
"""

import contextlib
import errno
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Protocol

import msgspec

from gpuwatch.errors import FrameError
from gpuwatch.frames import FrameStream, encode, packed
from gpuwatch.schema import WIRE_VERSION, HostSample, ProcessSample, SensorFrame
from gpuwatch.sensors.backend import Backend, Devices
from gpuwatch.sensors.processes import MAX_PROCESSES

__all__ = [
    "Cadence",
    "GpuSource",
    "ProcessSource",
    "Sampler",
    "Watched",
    "decode_watched",
    "die_with_parent",
    "run",
]

_PR_SET_PDEATHSIG = 1

MAX_PATHS = 256


class Watched(msgspec.Struct, array_like=True, frozen=True):
    """What the node process wants to know about: pids of ranks, and where their data lies."""

    pids: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=2**31)], ...],
        msgspec.Meta(max_length=MAX_PROCESSES),
    ]
    paths: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=4096)], ...],
        msgspec.Meta(max_length=MAX_PATHS),
    ] = ()


_watched_decoder = msgspec.msgpack.Decoder(Watched)


class ProcessSource(Backend[tuple[ProcessSample, ...]], Protocol):
    """The backend of processes, which has to be told whom to watch."""

    def watch(self, pids: Iterable[int]) -> None:
        """Watch these ranks from now on instead of the former."""
        ...


class HostSource(Backend[HostSample], Protocol):
    """The backend of the host, which has to be told where the data lies."""

    def paths(self, paths: Iterable[str]) -> None:
        """Tell from now on about the devices under these dataset paths."""
        ...


class GpuSource(Protocol):
    """The accelerators, read by someone who may wait for a driver while nobody waits for him."""

    def probe(self) -> str:
        """Start."""
        ...

    def ask(self) -> None:
        """Start a sample unless one is under way. Does not wait."""
        ...

    def sample(self) -> Devices:
        """Return the newest sample, or an older one with its age. Waits a moment at most."""
        ...

    def close(self) -> bool:
        """End; False if a driver call holds it."""
        ...


def decode_watched(message: bytes) -> Watched | None:
    """Return one message from the node process, None if it is no such message."""
    try:
        return _watched_decoder.decode(message)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class Sampler:
    """Turns three backends into sensor frames.

    Backends are probed when it is made; `wall` gives seconds since the epoch.
    """

    def __init__(
        self,
        host: HostSource,
        gpus: GpuSource,
        processes: ProcessSource,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._host = host
        self._gpus = gpus
        self._processes = processes
        self._wall = wall
        self._seq = 0
        host.probe()
        gpus.probe()
        processes.probe()

    def watch(self, watched: Watched) -> None:
        """Watch these ranks and datasets from now on instead of the former."""
        self._processes.watch(watched.pids)
        self._host.paths(watched.paths)

    def tick(self) -> SensorFrame:
        """Read everything once; `seq` counts from 0."""
        self._gpus.ask()  # the driver works while the rest is read
        host = self._host.sample()
        processes = self._processes.sample()
        devices = self._gpus.sample()
        frame = SensorFrame(
            version=WIRE_VERSION,
            seq=self._seq,
            host=host,
            gpus=devices.gpus,
            gpus_reason="" if devices.gpus else devices.reason or "no reason given",
            processes=processes,
            sent_s=self._wall(),
        )
        self._seq += 1
        return frame

    def close(self) -> bool:
        """Close the backends; False if a driver call is still in flight."""
        self._host.close()
        self._processes.close()
        return self._gpus.close()


class Cadence:
    """Due times `start + k * interval`: a late tick delays none after it, missed ones are skipped.

    All in seconds of one monotonic clock.
    """

    def __init__(self, interval_s: float, start_s: float) -> None:
        self._interval_s = interval_s
        self._start_s = start_s
        self.due_s = start_s

    def advance(self, now_s: float) -> None:
        """Set `due_s` to the first due time after `now_s`."""
        passed = math.floor((now_s - self._start_s) / self._interval_s)
        self.due_s = self._start_s + (passed + 1) * self._interval_s
        if self.due_s <= now_s:  # rounding; a due time that has come would be a second tick
            self.due_s += self._interval_s


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux).

    That is the thread, not its process: whoever starts the sampler does so from a thread that
    lives as long as the sampler shall.
    """
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def run(
    sampler: Sampler,
    interval_s: float,
    stdin: int,
    stdout: int,
    parent: int,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Tick until the end (see the module) and return.

    `stdin` and `stdout` are descriptors, `parent` the pid of the process to end with. `stdout` is
    made non-blocking for the time of the call.
    """
    blocking = os.get_blocking(stdout)
    os.set_blocking(stdout, False)
    try:
        _loop(sampler, Cadence(interval_s, clock()), stdin, stdout, parent, clock)
    except BrokenPipeError:
        pass
    finally:
        with contextlib.suppress(OSError):
            os.set_blocking(stdout, blocking)


def _loop(
    sampler: Sampler,
    cadence: Cadence,
    stdin: int,
    stdout: int,
    parent: int,
    clock: Callable[[], float],
) -> None:
    poll = select.poll()
    poll.register(stdin, select.POLLIN)
    poll.register(stdout, 0)  # 0: only that its reader is gone
    stream: FrameStream | None = FrameStream()
    unsent = b""
    while True:
        for fd, events in poll.poll(max(0.0, cadence.due_s - clock()) * 1000.0):
            if fd == stdin:
                # A read of a descriptor that is ready does not wait.
                data = os.read(stdin, 65536)
                if not data:
                    return
                stream = _take(sampler, stream, data)
            elif events & ~select.POLLOUT:
                return
        if os.getppid() != parent:
            return
        now_s = clock()
        if now_s >= cadence.due_s:
            cadence.advance(now_s)
            if not unsent:
                unsent = packed(encode(sampler.tick()))
        if unsent:
            unsent = _write(stdout, unsent)
            poll.modify(stdout, select.POLLOUT if unsent else 0)


def _take(sampler: Sampler, stream: FrameStream | None, data: bytes) -> FrameStream | None:
    """Follow the newest list in `data`; None once the stream cannot be cut any more."""
    newest = None
    try:
        for message in stream.feed(data) if stream is not None else ():
            watched = decode_watched(message)
            newest = watched if watched is not None else newest
    except FrameError:
        stream = None
    if newest is not None:
        sampler.watch(newest)
    return stream


def _write(fd: int, data: bytes) -> bytes:
    """Write what fits now and return the rest.

    Raises:
        BrokenPipeError: nobody reads any more.
    """
    try:
        return data[os.write(fd, data) :]
    except BlockingIOError:
        return data
    except OSError as exc:
        if exc.errno in (errno.EIO, errno.ECONNRESET):
            raise BrokenPipeError from None
        raise
