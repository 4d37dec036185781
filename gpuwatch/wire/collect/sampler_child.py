"""The sampler as a child of the node process: fed with pids, watched, and restarted."""

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from gpuwatch.errors import FrameError
from gpuwatch.frames import FrameStream, decode_sensor_frame, packed

__all__ = ["SamplerChild"]

SILENT_S = 6.0
"""A sampler ticks once a second; a call into a driver that hangs shows after this."""

CRASHES = 3
CRASHES_WITHIN_S = 300.0
"""After so many crashes within that time the sampler is started without the GPU drivers."""

_CRASH_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
)
_BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_READ_BYTES = 1 << 20
_MOST_PATHS = 256


class SamplerChild:
    """Starts the sampler, reads its frames without blocking, and restarts it with back-off.

    Args:
        argv: the command; it reads what to watch on stdin and writes sensor frames on stdout. When
            it keeps crashing, `--without-gpus REASON` is added: what crashes a sampler is the
            library of a GPU driver, and the rest of its readings need none.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)
        self._process: subprocess.Popen[bytes] | None = None
        self._stream = FrameStream()
        self._wanted: tuple[tuple[int, ...], tuple[str, ...]] = ((), ())
        self._unsent = b""
        self._last_frame_s = 0.0
        self._start_after_s = 0.0
        self._failures = 0
        self._crashes: deque[float] = deque(maxlen=CRASHES)
        self._without_gpus = ""
        self.reason = "the sampler is starting"

    @property
    def fd(self) -> int | None:
        """Readable when there are frames; None while no sampler runs."""
        if self._process is None or self._process.stdout is None:
            return None
        return self._process.stdout.fileno()

    @property
    def pid(self) -> int | None:
        """Process id of the sampler, None while there is none."""
        return None if self._process is None else self._process.pid

    def watch(self, pids: Sequence[int], paths: Sequence[str] = ()) -> None:
        """Name the ranks whose processes are sampled, and the datasets whose devices are."""
        wanted = (
            tuple(sorted(pids)),
            tuple(sorted({path for path in paths if path}))[:_MOST_PATHS],
        )
        if wanted != self._wanted:
            self._wanted = wanted
            self._send_wanted()

    def tick(self) -> None:
        """Start, restart or end the child as needed; call it often."""
        now_s = time.monotonic()
        process = self._process
        if process is None:
            if now_s >= self._start_after_s:
                self._start(now_s)
            return
        if process.poll() is not None:
            self._ended(process.returncode, now_s)
        elif now_s - self._last_frame_s > SILENT_S:
            self._failed(f"the sampler did not answer for {SILENT_S:.0f} s")
        elif self._unsent:
            self._flush()

    def read(self) -> bytes | None:
        """Return the newest complete sensor frame that has arrived, None if there is none."""
        process = self._process
        if process is None or process.stdout is None:
            return None
        newest = None
        try:
            while data := os.read(process.stdout.fileno(), _READ_BYTES):
                for frame in self._stream.feed(data):
                    decode_sensor_frame(frame)
                    newest = frame
        except BlockingIOError:
            pass
        except (OSError, FrameError) as exc:
            self._failed(f"the sampler sent something unreadable: {exc}")
            return None
        if newest is not None:
            self._last_frame_s = time.monotonic()
            self._failures = 0
            self.reason = ""
        return newest

    def close(self) -> None:
        """End the child: its stdin closes, and it is killed, for it may hang in a driver."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.kill()
        # A process stuck in a driver call cannot be reaped; nobody waits for it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)

    def _ended(self, status: int, now_s: float) -> None:
        """Take note of an end that was not asked for."""
        if -status not in _CRASH_SIGNALS:
            self._failed(f"the sampler ended with status {status}")
            return
        name = signal.Signals(-status).name
        self._crashes.append(now_s)
        if len(self._crashes) == CRASHES and now_s - self._crashes[0] <= CRASHES_WITHIN_S:
            self._without_gpus = (
                f"reading the GPUs crashed {CRASHES} times in {CRASHES_WITHIN_S / 60:.0f} min "
                f"({name} in the driver's library); off until this node process starts anew"
            )
        self._failed(f"the sampler crashed ({name})")

    def _start(self, now_s: float) -> None:
        try:
            process = subprocess.Popen(
                self._command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as exc:
            self._failed(f"the sampler cannot be started: {exc.strerror}")
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
        self._process = process
        self._stream = FrameStream()
        self._last_frame_s = now_s
        self._send_wanted()

    def _command(self) -> list[str]:
        extra = ["--without-gpus", self._without_gpus] if self._without_gpus else []
        return [*self._argv, *extra]

    def _failed(self, reason: str) -> None:
        self.close()
        delay_s = _BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)]
        self._failures += 1
        self._start_after_s = time.monotonic() + delay_s
        self.reason = f"{reason}; next try in {delay_s:g} s"

    def _send_wanted(self) -> None:
        self._unsent = packed(msgspec.msgpack.encode(self._wanted))
        self._flush()

    def _flush(self) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        try:
            # Shorter than PIPE_BUF but for hundreds of ranks a node; what is left waits.
            written = os.write(process.stdin.fileno(), self._unsent)
        except BlockingIOError:
            return
        except OSError:
            return  # the child is ending: tick() sees it
        self._unsent = self._unsent[written:]
