"""Reading a recording: what can be read of it, and one sentence on what cannot.

A damaged frame is left out; where a length is damaged, reading goes on at the next place at which
a whole frame stands. Nothing in a file is believed before it has been checked: no length makes us
take more memory than the file has bytes, and no clock makes us wait.
"""

import contextlib
import os
import re
import stat
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from gpuwatch.errors import FrameError, TargetError, WireVersionError
from gpuwatch.frames import MAX_FRAME_BYTES, decode_node_frame
from gpuwatch.recording.jsonl import LINE_BYTES, read_lines
from gpuwatch.recording.write import HEAD, MAGIC, VERSION

__all__ = ["SUFFIXES", "Recording", "is_recording", "open_recording"]

SUFFIXES = (".gpuwatch", ".jsonl")

_LENGTH = struct.Struct(">I")
_CHUNK_BYTES = 2**20

_START = re.compile(rb"[\x95-\x9f]\x01[\xa0-\xbf\xd9-\xdb]|\xdc..\x01[\xa0-\xbf\xd9-\xdb]", re.S)
"""How the frame of a node process begins: an array, the version, the node's name."""

_SKEW_S = 2.0
"""Clocks of nodes, and of one node before and after, may differ so much and still be believed."""

_LONGEST_GAP_S = 86_400.0
"""A clock that goes on by more between two frames was set: no time is taken to have passed."""


def is_recording(target: str) -> bool:
    """Whether a command's TARGET means a file: by its ending, or because there is such a file."""
    return target.endswith(SUFFIXES) or (os.path.exists(target) and not os.path.isdir(target))


class Recording:
    """The frames of a file in their order, each with its time.

    `started_s` is the wall clock of the first frame, `problem` one sentence on what could not be
    read (empty if all could). Use it as a context manager, or close it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.started_s = 0.0
        self.problem = ""
        self._file: IO[bytes] | None = None
        self._held: list[bytes] = []
        self._offsets = array("q")
        self._lengths = array("q")
        self._times_s = array("d")

    def __len__(self) -> int:
        return len(self._times_s)

    @property
    def duration_s(self) -> float:
        """Seconds from the first frame to the last."""
        return self._times_s[-1] if self._times_s else 0.0

    def time_s(self, at: int) -> float:
        """Return when frame `at` was sent, in seconds since the first one; never decreasing."""
        return self._times_s[at]

    def frame(self, at: int) -> bytes:
        """Return the bytes of frame `at`.

        Raises:
            TargetError: the file is not what it was when it was opened.
        """
        if self._file is None:
            return self._held[at]
        data = os.pread(self._file.fileno(), self._lengths[at], self._offsets[at])
        if len(data) != self._lengths[at]:
            raise TargetError(f"{self.path} has been cut while it was read")
        return data

    def frames(self) -> Iterator[tuple[float, bytes]]:
        """Yield (time in s since the first frame, bytes) of every frame."""
        for at in range(len(self)):
            yield self._times_s[at], self.frame(at)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_recording(path: str | Path) -> Recording:
    """Open a recording, binary or JSON lines; it is read through once.

    Raises:
        TargetError: there is no such file, it is no recording, nothing in it can be read, or it is
            a trace with a mistake; one sentence.
    """
    name = str(path)
    file = _open(name)
    recording = Recording(name)
    try:
        head = _peek(file, len(HEAD))
        if not head:
            raise TargetError(f"{name} is empty")
        if head[:1] == MAGIC[:1]:
            _check_head(name, head)
            _index(recording, file)
        else:
            _read_trace(recording, file, head)
    except BaseException:
        file.close()
        raise
    if not len(recording):
        file.close()
        why = f": {recording.problem}" if recording.problem else ""
        raise TargetError(f"{name} holds no frame{why}")
    return recording


def _open(name: str) -> IO[bytes]:
    try:
        return open(name, "rb")
    except FileNotFoundError:
        raise TargetError(f"there is no file {name}") from None
    except OSError as exc:
        raise TargetError(f"cannot read {name}: {(exc.strerror or str(exc)).lower()}") from None


def _peek(file: IO[bytes], size: int) -> bytes:
    found = file.peek(size)[:size]  # type: ignore[attr-defined]
    return bytes(found)


def _check_head(name: str, head: bytes) -> None:
    if not head.startswith(MAGIC) and not MAGIC.startswith(head):
        raise TargetError(
            f"{name} is no recording, or was damaged by a transfer as text: its first bytes are "
            "not those of one"
        )
    if len(head) < len(HEAD):
        raise TargetError(f"{name} holds no frame: it ends after {len(head)} bytes")
    version = int.from_bytes(head[len(MAGIC) :], "big")
    if version != VERSION:
        raise TargetError(
            f"{name} is a recording of version {version}, this gpuwatch reads {VERSION}; "
            "a newer gpuwatch-monitor can read it"
        )


# --- JSON lines --------------------------------------------------------------------------------


def _read_trace(recording: Recording, file: IO[bytes], head: bytes) -> None:
    text = head.lstrip(b"\xef\xbb\xbf").lstrip()
    if text and text[:1] not in (b"{", b"#"):
        raise TargetError(
            f"{recording.path} is no recording: it begins neither as one of gpuwatch record nor "
            "with a JSON line"
        )
    try:
        frames, problem = read_lines(_lines(file))
    except TargetError as exc:
        raise TargetError(f"{recording.path}: {exc}") from None
    clock = _Clock()
    for data in frames:
        frame = decode_node_frame(data)
        if not recording._held:
            recording.started_s = frame.sent_s
        recording._held.append(data)
        recording._times_s.append(clock.place(frame.node, frame.sent_s))
    recording.problem = f"{recording.path}: {problem}" if problem else ""
    file.close()


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    while line := file.readline(LINE_BYTES + 1):
        yield line


# --- binary ------------------------------------------------------------------------------------


class _Damage:
    """Counts what could not be read."""

    def __init__(self) -> None:
        self.first = -1
        self.skipped = 0
        self.cut_at = -1
        self.words = ""

    def skip(self, at: int, size: int, words: str) -> None:
        if self.first < 0:
            self.first, self.words = at, words
        self.skipped += size

    def sentence(self, path: str) -> str:
        said = []
        if self.first >= 0:
            said.append(
                f"{path} is damaged at byte {self.first:,} ({self.words}): {self.skipped:,} bytes "
                "are left out"
            )
        if self.cut_at >= 0:
            name = "it" if said else path
            said.append(f"{name} ends in the middle of a frame at byte {self.cut_at:,}")
        return ", and ".join(said)


def _index(recording: Recording, file: IO[bytes]) -> None:
    """Note where the frames are; the file is read once, in pieces."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise TargetError(f"{recording.path} is no file: a recording is read more than once")
    fd = file.fileno()
    size = os.fstat(fd).st_size
    clock, damage = _Clock(), _Damage()
    other: WireVersionError | None = None
    at = len(HEAD)
    while at < size:
        found = _frame_at(fd, at, size)
        if isinstance(found, bytes):
            try:
                frame = decode_node_frame(found)
            except FrameError as exc:
                # One of another version among others is one whose version was damaged.
                other = exc if isinstance(exc, WireVersionError) else other
                found = "what stands there is no frame"
            else:
                if not len(recording):
                    recording.started_s = frame.sent_s
                recording._offsets.append(at + _LENGTH.size)
                recording._lengths.append(len(found))
                recording._times_s.append(clock.place(frame.node, frame.sent_s))
                at += _LENGTH.size + len(found)
                continue
        following = _next_frame(fd, at + 1, size)
        if following is None and found == _CUT:
            damage.cut_at = size
            break
        following = size if following is None else following
        damage.skip(at, following - at, found)
        at = following
    if other is not None and not len(recording):
        raise TargetError(f"{recording.path}: {other}")
    recording.problem = damage.sentence(recording.path)
    recording._file = file


_CUT = "the file ends before the frame does"


def _frame_at(fd: int, at: int, size: int) -> bytes | str:
    """Return the bytes of the frame at a place, or why there is none."""
    head = os.pread(fd, _LENGTH.size, at)
    if len(head) < _LENGTH.size:
        return _CUT
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        return f"a frame of {length:,} bytes is announced, over {MAX_FRAME_BYTES:,}"
    if at + _LENGTH.size + length > size:
        return _CUT
    return os.pread(fd, length, at + _LENGTH.size)


def _next_frame(fd: int, at: int, size: int) -> int | None:
    """Return the next place from `at` on where a whole frame stands, None if there is none."""
    overlap = 16
    while at < size:
        piece = os.pread(fd, _CHUNK_BYTES, at)
        for match in _START.finditer(piece):
            place = at + match.start() - _LENGTH.size
            if place < at:
                continue
            found = _frame_at(fd, place, size)
            if isinstance(found, bytes):
                with contextlib.suppress(FrameError):
                    decode_node_frame(found)
                    return place
        if len(piece) < _CHUNK_BYTES:
            return None
        at += len(piece) - overlap
    return None


class _Clock:
    """Places the frames of all nodes on one axis, though their clocks differ or are set.

    The nodes' own clocks count where they agree within seconds. One that does not, or that goes
    back or ahead by much, is taken to stand where the frames before it in the file stand.
    """

    def __init__(self) -> None:
        self._start_s: float | None = None
        self._last_s = 0.0
        self._offsets_s: dict[str, float] = {}

    def place(self, node: str, sent_s: float) -> float:
        """Return the time of the next frame, in s since the first; never decreasing."""
        if self._start_s is None:
            self._start_s = sent_s
        offset_s = self._offsets_s.get(node, -self._start_s)
        at_s = sent_s + offset_s
        new = node not in self._offsets_s
        if at_s < self._last_s - _SKEW_S or at_s > self._last_s + (
            _SKEW_S if new else _LONGEST_GAP_S
        ):
            at_s = self._last_s
        self._offsets_s[node] = at_s - sent_s
        self._last_s = max(self._last_s, at_s)
        return self._last_s
