"""A file of a rank, brought here in pieces over the way that its telemetry comes."""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpuwatch.store.session import Session
from gpuwatch.store.views import View
from gpuwatch.tui.answers import AnswerError, read_piece
from gpuwatch.tui.export import free_path
from gpuwatch.tui.requests import Request, Told

__all__ = ["MOST_BYTES", "Fetch"]

MOST_BYTES = 256 * 2**20
"""A larger file is better copied from its node: every piece goes to every monitor of the run."""

_AHEAD = 2
"""Pieces that are asked for at once: more would hold up the telemetry on a thin line."""

_LATE_S = 15.0
"""A piece that has not come by then was lost; on 1 Mbit/s two pieces take 3 s."""

_TRIES = 3
_UNPACKED_AT_ONCE = 2**20


@dataclass(slots=True)
class _Asked:
    request: Request
    tries: int


class Fetch:
    """Brings one trace of a rank to a file of its own. A `Task`: it goes on in the background.

    `at` of `total` bytes are there. `error` is the sentence why it stands; `start` goes on from
    where it stands. The file has another name until it is whole and its checksum was right.
    """

    def __init__(
        self,
        run: str,
        rank: int,
        name: str,
        session: Session,
        target: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.rank, self.name = run, rank, name
        self.target = target
        self.at = 0
        self.total: int | None = None
        self.error = ""
        self.path: Path | None = None
        self._session = session
        self._clock = clock
        self._size = 0
        self._asked: dict[int, _Asked] = {}
        self._pieces: dict[int, bytes] = {}
        self._tries: dict[int, int] = {}
        self._part = target.with_name(f"{target.name}.{os.getpid()}.part")
        self._file: BinaryIO | None = None
        self._unpack: zlib._Decompress | None = None
        self._whole = not name.endswith(".gz")

    @property
    def finished(self) -> bool:
        """Whether it is there, or stands."""
        return self.path is not None or bool(self.error)

    def start(self, view: View) -> None:
        """Begin, or go on after an error."""
        self.error = ""
        self._tries.clear()
        self._asked.clear()
        self._ask(view)

    def advance(self, view: View) -> Told | None:
        """Take the pieces that came and ask for the next ones."""
        if self.finished:
            return None
        try:
            self._take(view)
            if not self.finished:
                self._ask(view)
        except OSError as exc:
            self._fail(f"the trace cannot be written: {exc.strerror or exc}")
        if self.path is not None:
            return f"fetched: {self.path}", "ok", 12.0
        if self.error:
            return f"the trace was not fetched: {self.error}", "warning", 8.0
        return None

    def close(self) -> None:
        """Leave no half of a file behind."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self.path is None:
            with contextlib.suppress(OSError):
                self._part.unlink(missing_ok=True)

    # --- pieces --------------------------------------------------------------------------------

    def _ask(self, view: View) -> None:
        """Ask for what comes next, as far ahead as is wanted."""
        for i in range(_AHEAD if self._size else 1):
            offset = self.at + i * self._size
            if self.total is not None and offset >= self.total:
                break
            if offset in self._asked or offset in self._pieces:
                continue
            tries = self._tries.get(offset, 0) + 1
            if tries > _TRIES:
                self._fail(f"no answer to a piece at {offset:,} bytes, asked {_TRIES} times")
                return
            self._tries[offset] = tries
            args: dict[str, str | int | float | bool] = {"name": self.name, "offset": offset}
            request = Request("fetch", self.run, (self.rank,), args, clock=self._clock)
            request.send(self._session, view)
            if request.error:
                self._fail(request.error)
                return
            self._asked[offset] = _Asked(request, tries)

    def _take(self, view: View) -> None:
        for offset, asked in list(self._asked.items()):
            asked.request.take(view)
            answer = asked.request.answers[self.rank]
            if answer.status in ("error", "lost"):
                self._fail(answer.message or "the rank refused")
                return
            if answer.status == "done":
                del self._asked[offset]
                try:
                    self._check(offset, answer.data)
                except AnswerError as exc:
                    # Damaged on the way: once more, unless it always is.
                    if asked.tries >= _TRIES:
                        self._fail(f"{exc} (asked {_TRIES} times)")
                if self.error:
                    return
            elif asked.request.waited_s >= _LATE_S:
                del self._asked[offset]
        while self.at in self._pieces and self.path is None:
            self._append(self._pieces.pop(self.at))
        # A piece that was shorter than the others has moved those after it.
        self._pieces = {at: piece for at, piece in self._pieces.items() if at > self.at}

    def _check(self, offset: int, data: str) -> None:
        piece, content = read_piece(data)
        if piece.name != self.name or piece.offset != offset:
            raise AnswerError("the piece of the trace came damaged: it is another one")
        if self.total is None:
            if piece.total_bytes > MOST_BYTES:
                most = MOST_BYTES // 2**20
                self._fail(f"it has over {most} MiB: copy it from its node")
                return
            self.total = piece.total_bytes
        if piece.total_bytes != self.total:
            self._fail("the trace became another one meanwhile", anew=True)
            return
        end = offset + len(content)
        if end > self.total or (not content and end < self.total):
            raise AnswerError("the piece of the trace came damaged: its length is wrong")
        self._size = max(self._size, len(content))
        self._pieces[offset] = content

    def _append(self, content: bytes) -> None:
        if self._file is None:
            # Only for the person: a trace names files and functions of the training.
            self._file = os.fdopen(
                os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
            )
        self._file.write(content)
        self.at += len(content)
        self._check_sum(content)
        if self.error or self.at != self.total:
            return
        if not self._whole:
            self._fail("the trace came damaged: its end is missing", anew=True)
            return
        self._file.close()
        self._file = None
        path = free_path(self.target)
        self._part.rename(path)
        self.path = path

    def _check_sum(self, content: bytes) -> None:
        """Unpack it as it comes and throw that away: gzip knows what it must be."""
        if not self.name.endswith(".gz"):
            return
        if self._unpack is None:
            self._unpack = zlib.decompressobj(wbits=31)
        try:
            while content and not self._unpack.eof:
                self._unpack.decompress(content, _UNPACKED_AT_ONCE)
                content = self._unpack.unconsumed_tail
        except zlib.error:
            self._fail("the trace came damaged: its checksum is wrong", anew=True)
            return
        self._whole = self._unpack.eof

    def _fail(self, error: str, *, anew: bool = False) -> None:
        """Stand, with what is there kept for the next attempt; `anew` where it is worth nothing."""
        self.error = error
        self._asked.clear()
        if not anew:
            return
        self.close()
        self.at, self.total, self._size = 0, None, 0
        self._pieces.clear()
        self._unpack, self._whole = None, not self.name.endswith(".gz")
