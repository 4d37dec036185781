"""Writing a recording: one append a frame, so that a killed recorder leaves all it was given.

The file is a head of 16 bytes and then the frames of node processes, each behind its length, as a
pipe carries them. Every frame is one `write` to an unbuffered file: what has been written survives
the death of the recorder at once, and that of the machine as soon as the kernel has written its
pages (30 s by default). There is no fsync: on a journaling file system it makes the checkpoints
of the training wait as well.
"""

import errno
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from gpuwatch.errors import FrameError, GpuwatchError, TargetError
from gpuwatch.frames import decode_node_frame, encode, packed

__all__ = ["HEAD", "LIMIT_BYTES", "MAGIC", "VERSION", "Encoder", "Recorder", "RecordingFullError"]

MAGIC = b"\x89GPUWATCH\r\n\x1a\n\x00"
"""No text begins so, and a transfer that changes line ends or drops high bits damages it."""

VERSION = 1
HEAD = MAGIC + struct.pack(">H", VERSION)

LIMIT_BYTES = 4 * 2**30
"""Where a recording ends unless told otherwise. One rank with its machine took 20 MB an hour, eight
ranks 35 MB: this stops what was forgotten. A recording is one file; there is no rotation."""


class RecordingFullError(GpuwatchError):
    """The file cannot grow: the disk, a quota or the limit is reached. What is there is whole."""


class _Head(msgspec.Struct, array_like=True):
    """The first fields of a rank frame: enough to tell whose it is."""

    version: int
    run: str


_head_decoder = msgspec.msgpack.Decoder(_Head)


class Encoder(Protocol):
    """Turns frames into what the file holds."""

    def head(self) -> bytes:
        """Return what the file begins with."""

    def encode(self, frame: bytes) -> bytes:
        """Return what stands for one frame of a node process; FrameError if it is none."""

    @property
    def refused(self) -> int:
        """How many frames within the frames could not be read and are missing."""


class _Binary:
    """The frames as they came, each behind its length."""

    def head(self) -> bytes:
        return HEAD

    def encode(self, frame: bytes) -> bytes:
        return packed(frame)

    @property
    def refused(self) -> int:
        return 0


class Recorder:
    """Appends the frames of node processes to a new file.

    Not thread-safe: one thread writes. It belongs into a monitor or recorder, never into a
    training process.

    Args:
        path: the file; it must not exist. `-` is stdout.
        encoder: what the file holds; the frames themselves by default.
        run: keep the frames of this run only (as its owner spells it); None keeps all.
        limit_bytes: the file does not become longer than this.

    Raises:
        TargetError: the file exists or cannot be made.
        RecordingFullError: not even its head has room.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        encoder: Encoder | None = None,
        run: str | None = None,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self.path = str(path)
        self.run = run
        self.frames = 0
        self.size_bytes = 0
        self._limit_bytes = limit_bytes
        self._encoder: Encoder = _Binary() if encoder is None else encoder
        self._refused = 0
        self._fd = 1 if self.path == "-" else _create(self.path)
        try:
            self._append(self._encoder.head())
        except BaseException:
            self.close()
            raise

    @property
    def refused(self) -> int:
        """How many frames could not be read, and are missing."""
        return self._refused + self._encoder.refused

    def write(self, frame: bytes) -> None:
        """Append one frame; returns when the kernel has it. What is no frame is counted.

        Raises:
            RecordingFullError: there is no room for it; the file ends with the frame before.
        """
        try:
            data = self._encoder.encode(frame if self.run is None else _only(frame, self.run))
        except FrameError:
            self._refused += 1
            return
        self._append(data)
        self.frames += 1

    def _append(self, data: bytes) -> None:
        if self.size_bytes + len(data) > self._limit_bytes:
            raise RecordingFullError(
                f"{self.path} has reached its limit of {self._limit_bytes:,} bytes "
                f"after {self.frames:,} frames"
            )
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except BrokenPipeError:
            raise
        except OSError as exc:
            self._cut_back()
            raise RecordingFullError(
                f"cannot write to {self.path}: {_words(exc)}; it holds {self.frames:,} frames"
            ) from None
        self.size_bytes += len(data)

    def _cut_back(self) -> None:
        """Drop the half of a frame that had room."""
        try:
            os.ftruncate(self._fd, self.size_bytes)
            os.lseek(self._fd, self.size_bytes, os.SEEK_SET)
        except OSError:
            pass  # a pipe or a device: a reader skips an incomplete frame as well

    def close(self) -> None:
        """Close the file."""
        if self._fd > 2:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _create(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        if not os.path.isfile(path) and not os.path.isdir(path):
            return _open_device(path)
        raise TargetError(f"{path} exists; name another file or remove it") from None
    except OSError as exc:
        raise TargetError(f"cannot make {path}: {_words(exc)}") from None


def _open_device(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise TargetError(f"cannot write to {path}: {_words(exc)}") from None


def _words(exc: OSError) -> str:
    known = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EFBIG: "the file size limit is reached",
    }
    return known.get(exc.errno or 0) or (exc.strerror or str(exc)).lower()


def _only(frame: bytes, run: str) -> bytes:
    """Return the frame without the ranks of other runs.

    Raises:
        FrameError: the bytes are no frame of a node process.
    """
    node_frame = decode_node_frame(frame)
    kept = tuple(raw for raw in node_frame.frames if _run_of(raw) == run)
    ages = tuple(age for age in node_frame.ages if age.run == run)
    if len(kept) == len(node_frame.frames) and len(ages) == len(node_frame.ages):
        return frame
    return encode(msgspec.structs.replace(node_frame, frames=kept, ages=ages))


def _run_of(raw: msgspec.Raw) -> str | None:
    try:
        return _head_decoder.decode(raw).run
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
