"""What a command prints, as a terminal would show it: the last lines, clean, to be searched."""

from __future__ import annotations

import codecs
import re
import threading
from collections import deque

__all__ = ["MOST_LINES", "OutputRing"]

MOST_LINES = 10_000
_MOST_CHARACTERS = 4_000_000
"""In all lines together; with Python's four bytes for the widest ones at most 16 MB."""
_LINE_CHARACTERS = 4_000
_ROWS_BACK = 50
"""Progress bars under each other go up so many rows at most."""
_SEQUENCE_CHARACTERS = 4_096
"""Longer than this no control sequence is waited for."""

_CSI = r"\x1b\[[0-?]*[ -/]*[@-~]"
_OTHER = r"\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-OQ-WYZ\\`-~]"
_PIECES = re.compile(rf"({_CSI})|({_OTHER})|([\r\n\t\x08])|([^\x1b\r\n\t\x08]+)|\x1b")
_BEGUN = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?|[ -/]*)?\Z")
_ROW_OR_COLUMN = re.compile(r"\x1b\[(\d*)([ABCDGK])")


class OutputRing:
    """The last `most` lines of a stream of bytes; safe between the thread that feeds and others.

    Colours and titles are left out. A carriage return goes back to the start of the line, whose
    characters are then replaced, and a cursor that goes up goes to the lines before: so a progress
    bar is one line, as on a terminal. Lines are counted from the first one ever; `first` is the
    number of the oldest that is kept.
    """

    def __init__(self, most: int = MOST_LINES) -> None:
        self._lock = threading.Lock()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._most = most
        self._lines: deque[str] = deque([""])
        self._characters = 0
        self._dropped = 0
        self._row = 0
        self._column = 0
        self._rest = ""
        self._version = 0

    @property
    def version(self) -> int:
        """Rises with everything that is fed."""
        return self._version

    @property
    def first(self) -> int:
        """The number of the oldest line that is kept."""
        return self._dropped

    @property
    def end(self) -> int:
        """The number after that of the last line; a line that is empty yet is not counted."""
        with self._lock:
            return self._end()

    def _end(self) -> int:
        return self._dropped + len(self._lines) - (0 if self._lines[-1] else 1)

    def lines(self, start: int, count: int) -> list[str]:
        """Return lines by number; those that are not kept, or not there yet, are left out."""
        with self._lock:
            low = max(0, start - self._dropped)
            high = min(start + count, self._end()) - self._dropped
            return [self._lines[i] for i in range(low, high)]

    def find(self, words: str) -> list[int]:
        """Return the numbers of the lines that hold the words, whatever their case."""
        wanted = words.casefold()
        if not wanted:
            return []
        with self._lock:
            lines, dropped = list(self._lines), self._dropped
        return [dropped + i for i, line in enumerate(lines) if wanted in line.casefold()]

    def feed(self, data: bytes) -> None:
        """Take more of the stream; it may end anywhere, within a character or a sequence."""
        text = self._rest + self._decode(data)
        begun = _BEGUN.search(text, max(0, len(text) - _SEQUENCE_CHARACTERS))
        self._rest = ""
        if begun is not None:
            text, self._rest = text[: begun.start()], begun[0]
        with self._lock:
            for sequence, _, control, plain in _PIECES.findall(text):
                if plain:
                    self._write(plain)
                elif control == "\n":
                    self._new_line()
                elif control:
                    self._step(control)
                elif sequence:
                    self._move(sequence)
            self._version += 1

    def _write(self, text: str) -> None:
        if not text.isprintable():
            text = "".join([c for c in text if c.isprintable()])
        line = self._lines[self._row]
        if self._column > len(line):
            line = line.ljust(self._column)
        line = line[: self._column] + text + line[self._column + len(text) :]
        self._column = min(self._column + len(text), _LINE_CHARACTERS)
        self._replace(line[:_LINE_CHARACTERS])

    def _replace(self, line: str) -> None:
        self._characters += len(line) - len(self._lines[self._row])
        self._lines[self._row] = line

    def _new_line(self) -> None:
        self._column = 0
        if self._row < len(self._lines) - 1:
            self._row += 1
            return
        self._lines.append("")
        self._row = len(self._lines) - 1
        while len(self._lines) > self._most or self._characters > _MOST_CHARACTERS:
            self._characters -= len(self._lines.popleft())
            self._dropped += 1
            self._row -= 1

    def _step(self, control: str) -> None:
        if control == "\r":
            self._column = 0
        elif control == "\t":
            self._column = min((self._column // 8 + 1) * 8, _LINE_CHARACTERS)
        else:
            self._column = max(0, self._column - 1)

    def _move(self, sequence: str) -> None:
        found = _ROW_OR_COLUMN.fullmatch(sequence)
        if found is None:
            return
        number, what = int(found[1] or "0"), found[2]
        by = max(1, number)
        last = len(self._lines) - 1
        if what == "A":
            self._row = max(0, last - _ROWS_BACK, self._row - by)
        elif what == "B":
            self._row = min(last, self._row + by)
        elif what == "C":
            self._column = min(self._column + by, _LINE_CHARACTERS)
        elif what == "D":
            self._column = max(0, self._column - by)
        elif what == "G":
            self._column = min(by - 1, _LINE_CHARACTERS)
        elif number in (0, 2):
            line = self._lines[self._row]
            self._replace(line[: self._column] if number == 0 else "")
