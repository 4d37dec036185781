"""The monitor's side of pipes: one thread starts their commands, reads them, and starts them again.

A far side is not trusted: what it sends is bounded in rate and in memory, what is no telemetry
ends its connection and nothing else. Every command is a child in a session of its own, without a
terminal to ask on, that is killed when the monitor is.
"""

import contextlib
import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

from gpuwatch.errors import FrameError, WireVersionError
from gpuwatch.frames import FrameStream, encode, packed, printable
from gpuwatch.schema import Command
from gpuwatch.wire.collect.complaints import Complaint, PipeTarget, why_ended, why_other_version
from gpuwatch.wire.collect.gather import wish
from gpuwatch.wire.collect.pipe import PreambleReader
from gpuwatch.wire.collect.wake import Wake
from gpuwatch.wire.collect.way import (
    BURST_BYTES,
    FRAME_BYTES,
    QUIET_S,
    RATE_BYTES,
    SETTLED_S,
    OnFrame,
    OnState,
    Way,
)

__all__ = ["Pipe", "PipeLink"]

ANSWER_S = 30.0
"""From the start of a command to the preamble: a login over jump hosts and a slow home directory
take seconds; a question that nobody can answer takes for ever."""
_STAGGER_S = 0.05
_POLL_S = 0.1
_TICK_S = 0.2
_LOOK_CALM_S = 1.0
_DRAIN_S = 0.02
_CHUNK_BYTES = 65536
_CHUNKS = 16
_STDERR_BYTES = 8192
_UNSENT_BYTES = 262_144
_LINGER_S = 1.0

# Ends with the thread that started it, whatever happens to that; becomes the command.
_CHILD = (
    "import ctypes,os,signal,sys\n"
    "ctypes.CDLL(None).prctl(1,signal.SIGKILL,0,0,0)\n"
    "os.getppid()==int(sys.argv[1]) or sys.exit(1)\n"
    "signal.signal(signal.SIGPIPE,signal.SIG_DFL)\n"
    "try: os.execvp(sys.argv[2],sys.argv[2:])\n"
    "except OSError as e: sys.exit(f'{sys.argv[2]}: {e.strerror}')\n"
)


class Pipe(Way):
    """One target: its command, and what came from it. All but the properties: the link's thread."""

    target: PipeTarget

    def __init__(
        self,
        target: PipeTarget,
        package: str,
        selector: selectors.BaseSelector,
        on_frame: OnFrame,
        on_state: OnState,
        start_s: float,
        interval_s: float = 0.0,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(on_frame, on_state, start_s, rng)
        self.target = target
        self._interval_s = interval_s
        self._package = package
        self._selector = selector
        self._process: subprocess.Popen[bytes] | None = None
        self._dying: list[tuple[subprocess.Popen[bytes], float]] = []
        self._reset(start_s)

    def _reset(self, now_s: float) -> None:
        self._begin()
        self._began_s = now_s
        self._moved_s = now_s
        self._reader: PreambleReader | None = PreambleReader()
        self._noise = b""
        self._stream = FrameStream()
        self._stderr = b""
        self._unsent = bytearray()
        self._tokens = float(BURST_BYTES)
        self._filled_s = now_s
        self._reading = False
        self._ended_s: float | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the command, None while there is none."""
        process = self._process
        return None if process is None else process.pid

    # --- the command ---------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Start, end and judge the command as the time demands."""
        self.look_s = now_s
        self._bury(now_s)
        process = self._process
        if process is None:
            if now_s >= self._start_s:
                self._start(now_s)
            return
        if self._ended_s is None and process.poll() is not None and self._reading and self._read():
            self._ended_s = now_s
        if self._process is None:
            return
        if self._ended_s is not None:
            status = process.poll()
            if status is not None or now_s - self._ended_s > _LINGER_S:
                self._finish(status)
            return
        if self._reader is not None and now_s - self._began_s > ANSWER_S:
            self._fail(Complaint(self._no_answer()))
        elif self._reader is None and now_s - self._moved_s > QUIET_S and self._reading:
            half = " in the middle of a frame" if self._stream.pending else ""
            self._fail(Complaint(f"it fell silent{half} and was let go after {QUIET_S:.0f} s"))
        elif self.state == "live" and now_s - self._live_s > SETTLED_S:
            self._backoff.reset()
        if self._process is not None:
            self._refill(now_s)
            if self._interval_s and self._reader is None and self._reading and not self._dying:
                self.look_s = now_s + _LOOK_CALM_S  # its end shows on its stdout

    def _no_answer(self) -> str:
        waited = f"no answer within {ANSWER_S:.0f} s"
        if not (self._stderr or self._noise).strip():
            return f"{waited}; to see more, type: {self.target.reach}"
        why = why_ended(self.target, None, self._stderr, self._noise, greeted=False).text
        return f"{waited}: {why}"

    def _start(self, now_s: float) -> None:
        self._reset(now_s)
        argv = self.target.argv
        if shutil.which(argv[0]) is None:
            self._fail(Complaint(f"there is no {printable(argv[0])!r} on this machine", False))
            return
        wrapper = [sys.executable, "-I", "-S", "-c", _CHILD, str(os.getpid())]
        try:
            self._process = process = subprocess.Popen(
                [*wrapper, *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as exc:
            self._fail(Complaint(f"its command cannot be started: {exc.strerror}"))
            return
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdin is not None
        for pipe in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(pipe.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, self._hear)
        self._selector.register(process.stderr, selectors.EVENT_READ, self._listen)
        self._reading = True

    def _finish(self, status: int | None) -> None:
        self._listen()
        greeted = self._reader is None
        self._fail(why_ended(self.target, status, self._stderr, self._noise, greeted=greeted))

    def end(self) -> None:
        """Close the pipe and ask the command to end; `tick` or `kill` see to it that it does."""
        process, self._process = self._process, None
        self.look_s = 0.0
        if process is None:
            return
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(pipe)
                with contextlib.suppress(OSError):
                    pipe.close()
        _signal(process, signal.SIGTERM)
        self._dying.append((process, time.monotonic()))

    def _bury(self, now_s: float) -> None:
        for process, since_s in list(self._dying):
            if process.poll() is not None:
                self._dying.remove((process, since_s))
            elif now_s - since_s > _LINGER_S / 2:
                _signal(process, signal.SIGKILL)

    def gone(self) -> bool:
        """Whether every command that was ended is gone."""
        self._bury(time.monotonic())
        return not self._dying and self._process is None

    def kill(self) -> None:
        """Kill what is there, at once; from any thread."""
        process = self._process
        for one in [*(p for p, _ in self._dying), *([process] if process is not None else [])]:
            _signal(one, signal.SIGKILL)

    # --- what comes ----------------------------------------------------------------------------

    def _refill(self, now_s: float) -> None:
        self._tokens = min(BURST_BYTES, self._tokens + RATE_BYTES * (now_s - self._filled_s))
        self._filled_s = now_s
        process = self._process
        if process is None or process.stdout is None:
            return
        if not self._reading and self._tokens > 0:
            self._selector.register(process.stdout, selectors.EVENT_READ, self._hear)
            self._reading = True
            self._moved_s = now_s

    def _hear(self) -> None:
        """Read what has come; what comes meanwhile is told again."""
        self._read(short=True)

    def _read(self, *, short: bool = False) -> bool:
        """Read what there is; returns whether all of it has been taken.

        With `short` it is taken to be all when less comes than is asked for.
        """
        process = self._process
        if process is None or process.stdout is None or self._ended_s is not None:
            return True
        for _ in range(_CHUNKS):
            try:
                data = os.read(process.stdout.fileno(), _CHUNK_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                data = b""
            if not data:
                self._selector.unregister(process.stdout)
                self._reading = False
                self._ended_s = self.look_s = time.monotonic()
                return True
            self._moved_s = time.monotonic()
            self._tokens -= len(data)
            try:
                self._take(data)
            except FrameError as exc:
                soon = not isinstance(exc, WireVersionError)
                self._fail(Complaint(f"its connection was let go: {printable(str(exc))}", soon))
            if self._process is not process:
                return True
            if self._tokens <= 0:
                # Too much at once: it waits in the pipe, and the far side with it.
                self._selector.unregister(process.stdout)
                self._reading = False
                self.look_s = 0.0
                return False
            if short and len(data) < _CHUNK_BYTES:
                return True
        return False

    def _take(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            FrameError: they are nothing that a far side sends.
        """
        if self._reader is not None:
            try:
                found = self._reader.feed(data)
            finally:
                self._noise = self._reader.noise
            if found is None:
                return
            self._reader = None
            there, data = found
            other = why_other_version(self.target, there, self._package)
            if other is not None:
                self._fail(other)
                return
            if self._interval_s:
                self.send(wish(self._interval_s))
        received_s = time.monotonic()
        process = self._process
        for frame in self._stream.feed(data):
            self._tokens -= max(0, FRAME_BYTES - len(frame))
            self._take_frame(frame, received_s)
            if self._process is not process:
                return

    def _listen(self) -> None:
        process = self._process
        if process is None or process.stderr is None or process.stderr.closed:
            return
        for _ in range(_CHUNKS):
            try:
                data = os.read(process.stderr.fileno(), _CHUNK_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(process.stderr)
                return
            self._stderr = (self._stderr + data)[-_STDERR_BYTES:]

    # --- what goes -----------------------------------------------------------------------------

    def send(self, command: Command) -> None:
        """Queue a command; without a connection it is forgotten: it would come too late."""
        if self._reader is None and len(self._unsent) < _UNSENT_BYTES:
            self._unsent += packed(encode(command))
            self._flush()

    def _flush(self) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        while self._unsent:
            try:
                done = os.write(process.stdin.fileno(), self._unsent[:_CHUNK_BYTES])
            except BlockingIOError:
                break
            except OSError:
                self._unsent.clear()  # its end shows on its stdout
                break
            del self._unsent[:done]
        registered = process.stdin in self._selector.get_map()
        if self._unsent and not registered:
            self._selector.register(process.stdin, selectors.EVENT_WRITE, self._flush)
        elif not self._unsent and registered:
            self._selector.unregister(process.stdin)


class PipeLink(threading.Thread):
    """Keeps pipes to any number of nodes, for ever.

    Args:
        targets: where they lead.
        package: the version of this package.
        on_frame: called in this thread with a pipe, the bytes of each node frame, the frame, and
            the monotonic time of its arrival in seconds.
        on_state: called in this thread when the state or the trouble of a pipe has changed.
        interval_s: how often the nodes are asked to send a frame, 0 for every frame as it comes.
    """

    def __init__(
        self,
        targets: Sequence[PipeTarget],
        package: str,
        on_frame: OnFrame,
        on_state: OnState,
        interval_s: float = 0.0,
    ) -> None:
        super().__init__(name="gpuwatch-pipes", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._stopping = threading.Event()
        self._commands: deque[tuple[Pipe, Command]] = deque()
        self._wake = Wake()
        self._selector.register(self._wake.fd, selectors.EVENT_READ, self._wake.clear)
        now_s = time.monotonic()
        # One after the other: an sshd, or a jump host that all share, takes few logins at a time.
        self.pipes = tuple(
            Pipe(
                target,
                package,
                self._selector,
                on_frame,
                on_state,
                now_s + at * _STAGGER_S,
                interval_s,
            )
            for at, target in enumerate(targets)
        )

    def send(self, pipe: Pipe, command: Command) -> None:
        """Queue a command for the node behind a pipe; returns at once."""
        self._commands.append((pipe, command))
        self._wake.set()

    def close(self, timeout_s: float = 0.4) -> None:
        """End the commands and the thread; waits at most `timeout_s`, then kills."""
        self._stopping.set()
        self._wake.set()
        if self.is_alive():
            self.join(timeout_s)
        for pipe in self.pipes:
            pipe.kill()

    def run(self) -> None:
        """The thread's body."""
        next_tick_s = 0.0
        try:
            while not self._stopping.is_set():
                now_s = time.monotonic()
                if now_s >= next_tick_s:
                    next_tick_s = now_s + _TICK_S
                    for pipe in self.pipes:
                        if now_s >= pipe.look_s:
                            pipe.tick(now_s)
                while self._commands:
                    pipe, command = self._commands.popleft()
                    pipe.send(command)
                ready = self._selector.select(_POLL_S)
                if any(key.fd != self._wake.fd for key, _ in ready):
                    time.sleep(_DRAIN_S)  # a burst gathers: a wake-up costs more than a frame
                for key, _ in ready:
                    key.data()
        finally:
            self._end()
            self._selector.close()

    def _end(self) -> None:
        for pipe in self.pipes:
            pipe.end()
        deadline_s = time.monotonic() + 0.2
        while time.monotonic() < deadline_s:
            if all(pipe.gone() for pipe in self.pipes):
                return
            time.sleep(0.01)
        for pipe in self.pipes:
            pipe.kill()
        deadline_s = time.monotonic() + 0.1
        while time.monotonic() < deadline_s and not all(pipe.gone() for pipe in self.pipes):
            time.sleep(0.01)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal a command and what it has started: it leads a session of its own."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
