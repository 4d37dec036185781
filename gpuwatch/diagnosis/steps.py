"""What the rules read of every step of a rank, and only once of each step.

Sums are of whole ns: they are the same in whatever order and however often steps were added up.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import sub
from sys import intern
from typing import NamedTuple, cast

from msgspec.structs import astuple

from gpuwatch.schema import PHASES, StepRecord
from gpuwatch.store.clocks import deciding, is_on_device
from gpuwatch.store.packed import Packed, step_indices
from gpuwatch.store.quick import QuickStep, quick_codec
from gpuwatch.store.rows import LANES, PHASES_LANE, mold_of
from gpuwatch.store.views import RankView

__all__ = ["OfStep", "Reader", "Row", "Steps", "read_phases", "read_steps"]

_COMM, _WAIT, _OTHER = (PHASES.index(name) for name in ("comm", "data_wait", "other"))

_COMM_LANE, _WAIT_LANE, _OTHER_LANE = (PHASES_LANE + at for at in (_COMM, _WAIT, _OTHER))

_NO_COMM = 1
_NO_WAIT = 2
"""Bits of `Steps.unknown`."""

_TIMES = 4
_MARKS = 3
"""Numbers a step in `Steps.times` and `Steps.marks`."""

_TYPECODES = "BIq"
"""Of arrays of numbers, the narrowest first."""


class Steps(NamedTuple):
    """Steps of one rank, oldest first, durations in ns: interleaved columns, a number a step.

    Times are by the clock that decides; a phase that is n/a counts as 0. As arrays they take a
    twentieth of what objects would: 1.3 kB for 64 steps, 2.4 if one takes more than four seconds.
    """

    times: "array[int]"
    """Of each step itself, its own time, data wait and `other`."""

    marks: "array[int]"
    """Of each step its batches, pauses of the garbage collector, and what of it is not known."""

    @property
    def size(self) -> int:
        """Number of steps."""
        return len(self.times) // _TIMES

    @property
    def step(self) -> "array[int]":
        """The step."""
        return self.times[0::_TIMES]

    @property
    def own(self) -> "array[int]":
        """The step without exposed communication."""
        return self.times[1::_TIMES]

    @property
    def wait(self) -> "array[int]":
        """Data wait."""
        return self.times[2::_TIMES]

    @property
    def other(self) -> "array[int]":
        """What is in no other phase."""
        return self.times[3::_TIMES]

    @property
    def batches(self) -> "array[int]":
        """Batches that the step consumed."""
        return self.marks[0::_MARKS]

    @property
    def gc(self) -> "array[int]":
        """Pauses of the garbage collector; 0 where none is known."""
        return self.marks[1::_MARKS]

    @property
    def comm_known(self) -> bool:
        """Whether exposed communication is known in every step."""
        unknown = self.marks[2::_MARKS]
        return not any(unknown) or not any(bits & _NO_COMM for bits in unknown)

    @property
    def known_waits(self) -> Sequence[int]:
        """The data wait of the steps in which it is known."""
        unknown = self.marks[2::_MARKS]
        if not any(unknown):
            return self.wait
        pairs = zip(self.wait, unknown, strict=True)
        return [wait for wait, bits in pairs if not bits & _NO_WAIT]

    def between(self, first: int, end: int) -> "Steps":
        """Return the steps from one place up to another."""
        return Steps(
            self.times[first * _TIMES : end * _TIMES], self.marks[first * _MARKS : end * _MARKS]
        )

    def at(self, places: Sequence[int]) -> "Steps":
        """Return the steps at these places, of which there is one at least, in rising order."""
        first, last = places[0], places[-1]
        if last - first == len(places) - 1:
            return self.between(first, last + 1)
        return reduce(Steps.followed_by, [self.between(place, place + 1) for place in places])

    def followed_by(self, other: "Steps") -> "Steps":
        """Return these steps and others after them."""
        return Steps(_joined(self.times, other.times), _joined(self.marks, other.marks))


def _joined(one: "array[int]", other: "array[int]") -> "array[int]":
    if one.typecode == other.typecode:
        return one + other
    typecode = max(one.typecode, other.typecode, key=_TYPECODES.index)
    return array(typecode, [*one, *other])


def _numbers(found: Sequence[int], typecodes: str) -> "array[int]":
    """Return numbers in the first of these types that holds them all."""
    try:
        return array(typecodes[0], found)
    except OverflowError:
        return _numbers(found, typecodes[1:])


class _Found(NamedTuple):
    """Records with their phases by the clock that decides."""

    records: Sequence[StepRecord] | Sequence[QuickStep]
    on_device: Sequence[bool]
    parts: Sequence[tuple[int | None, ...]]


def _find(records: Sequence[StepRecord]) -> _Found:
    if not isinstance(records, Packed):
        on_device = list(map(is_on_device, records))
        return _Found(records, on_device, list(map(astuple, map(deciding, records))))
    lean = records.read_as(quick_codec)
    on_device = [r.clock == "device" and r.device is not None for r in lean]
    if any(on_device):
        pairs = zip(lean, on_device, strict=True)
        return _Found(lean, on_device, [(r.device or r.host) if on else r.host for r, on in pairs])
    return _Found(lean, on_device, [r.host for r in lean])


def read_steps(records: Sequence[StepRecord]) -> Steps:
    """Read steps, of one rank or of several after each other."""
    if isinstance(records, Packed):
        return _newest_of(records, len(records))[0]
    return _steps_of(_find(records))


def _newest_of(window: "Packed[StepRecord]", count: int) -> tuple[Steps, str]:
    """Read the newest so many steps, and the key of the loader that the last of them is of."""
    times: list[int] = []
    marks: list[int] = []
    loader = ""
    for chunk, start, end in reversed(list(window.latest(count))):
        mold = mold_of(chunk)
        if mold is None:  # a step that is odd: all are read as records
            found = _find(window[len(window) - count :])
            return _steps_of(found), found.records[-1].loader
        timed, loader = mold.on_device, mold.loader
        for lanes in mold.lanes(chunk, start, end):
            step = sum(lanes[PHASES_LANE:LANES]) if timed else lanes[0]
            times += (step, step - lanes[_COMM_LANE], lanes[_WAIT_LANE], lanes[_OTHER_LANE])
        bits = 0
        if mold.unknown:
            bits = (_COMM_LANE in mold.unknown and _NO_COMM) | (
                _WAIT_LANE in mold.unknown and _NO_WAIT
            )
        for gc_ns in mold.gc_ns(chunk, start, end):
            marks += (mold.batches, gc_ns, bits)
    return Steps(_numbers(times, _TYPECODES[1:]), _numbers(marks, _TYPECODES)), loader


def _steps_of(found: _Found) -> Steps:
    records, on_device, parts = found
    count = len(parts)
    columns = list(zip(*parts, strict=True)) or [()] * len(PHASES)
    comms, waits, others = columns[_COMM], columns[_WAIT], columns[_OTHER]
    step: Sequence[int] = [r.step_ns for r in records]
    if any(on_device):
        sums = [sum([ns or 0 for ns in part]) for part in parts]
        rows = zip(on_device, sums, step, strict=True)
        step = [total if timed else ns for timed, total, ns in rows]
    times = [0] * (_TIMES * count)
    times[0::_TIMES] = step
    times[1::_TIMES] = map(sub, step, _known_ns(comms))
    times[2::_TIMES] = _known_ns(waits)
    times[3::_TIMES] = _known_ns(others)
    marks = [0] * (_MARKS * count)
    marks[0::_MARKS] = [r.batches for r in records]
    marks[1::_MARKS] = [r.gc_ns or 0 for r in records]
    if None in comms or None in waits:
        marks[2::_MARKS] = [
            (comm is None and _NO_COMM) | (wait is None and _NO_WAIT)
            for comm, wait in zip(comms, waits, strict=True)
        ]
    return Steps(_numbers(times, _TYPECODES[1:]), _numbers(marks, _TYPECODES))


def _known_ns(column: Sequence[int | None]) -> Sequence[int]:
    """Return durations with 0 for what is not known."""
    if None in column:
        return [ns or 0 for ns in column]
    return cast("Sequence[int]", column)


def read_phases(records: Sequence[StepRecord]) -> "dict[str, array[int]]":
    """Read all phases of steps of which there is one at least, in ns, by name."""
    columns = zip(*_find(records).parts, strict=True)
    return {name: array("q", _known_ns(c)) for name, c in zip(PHASES, columns, strict=True)}


class Row(NamedTuple):
    """What is known of one rank's window; `loader` is that which the newest step was fed by."""

    incarnation: str
    indices: Sequence[int]
    steps: Steps
    loader: str


class OfStep(NamedTuple):
    """One step over all ranks; times in ns.

    They are the least exposed communication, the longest own time without data wait, and by how
    much the last rank is behind the median of the others (ms; 0 for one rank).
    """

    transfer_ns: int
    slowest_ns: int
    last_lag_ms: float


class Reader:
    """Reads windows: of each rank what is new since the last time.

    What it read last it keeps, less than 2 kB a rank, and of each step a few numbers. A step of an
    incarnation that has an index is told once and never changes, so that what was read under one
    stays true; what it returns does not depend on what it kept.
    """

    __slots__ = ("_rows", "_seen", "_who")

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._who: tuple[tuple[int, str], ...] = ()
        self._seen: dict[int, OfStep] = {}

    def seen(self, who: tuple[tuple[int, str], ...]) -> "dict[int, OfStep]":
        """Return room for what is known of the steps that these ranks share, by index.

        `who` are their numbers and incarnations. As long as they are the same it is the same room.
        """
        if who != self._who:
            self._who, self._seen = who, {}
        return self._seen

    def read(self, ranks: Iterable[RankView]) -> Mapping[int, Row]:
        """Return what is known of the window of each rank, by its number; none may be empty."""
        before = self._rows
        rows: dict[int, Row] = {}
        new: list[StepRecord] = []
        unread: list[tuple[RankView, Row]] = []
        for rank in ranks:
            window = rank.window
            indices = step_indices(window)
            known = before.get(rank.rank)
            steps = _known(known, rank.incarnation, indices)
            loader = known.loader if known is not None else ""
            held = steps.size
            if held < len(window):
                if isinstance(window, Packed):
                    new_steps, loader = _newest_of(window, len(window) - held)
                    steps = steps.followed_by(new_steps)
                    loader = intern(loader)
                else:
                    loader = window[-1].loader
                    new += window[held:]
            rows[rank.rank] = Row(rank.incarnation, indices, steps, loader)
            if steps.size < len(window):
                unread.append((rank, rows[rank.rank]))
        if unread:
            # Those of all ranks in one go: a call costs as much as reading some steps.
            read = read_steps(new)
            start = 0
            for rank, row in unread:
                end = start + len(rank.window) - row.steps.size
                steps = row.steps.followed_by(read.between(start, end))
                rows[rank.rank] = row._replace(steps=steps)
                start = end
        self._rows = rows
        return rows

    def forget(self) -> None:
        """Keep nothing any more."""
        self._rows = {}
        self._who, self._seen = (), {}


_NONE = read_steps(())


def _known(row: Row | None, incarnation: str, indices: Sequence[int]) -> Steps:
    """Return the steps at the beginning of a window that are known, if it goes on from a row."""
    if row is None or row.incarnation != incarnation or not indices:
        return _NONE
    before = row.indices
    if indices == before:
        return row.steps
    place = bisect_left(before, indices[0])
    shared = len(before) - place
    if not shared or shared > len(indices) or list(before[place:]) != list(indices[:shared]):
        return _NONE
    return row.steps.between(place, len(before))
