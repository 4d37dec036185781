"""The last steady steps of one rank with running sums, and its seconds beyond them."""

import statistics
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isnan, nan
from operator import itemgetter
from typing import TypeVar, cast, overload

from gpuwatch.schema import PHASES, StepRecord
from gpuwatch.store.clocks import Times, times_of
from gpuwatch.store.packed import Packed, records_codec
from gpuwatch.store.rows import (
    DEVICE,
    HEAD_BYTES,
    HOST,
    INDEX,
    LANES,
    LANES_BYTES,
    LOADER,
    PHASES_LANE,
    QUEUE_CAPACITY,
    QUEUE_DEPTH,
    SAMPLES,
    STALL,
    STALL_LANE,
    STARTED,
    STEP,
    Flat,
    Mold,
    flat_of,
    is_timed,
    mold_of,
    read_rows,
    step_ns_of,
)
from gpuwatch.store.views import Rollup

__all__ = [
    "NOT_STEADY",
    "TIMELINE_S",
    "WINDOW_STEPS",
    "Seconds",
    "Timeline",
    "TimelinePicture",
    "Window",
    "is_steady",
    "seconds_of",
]

WINDOW_STEPS = 64
TIMELINE_S = 120

_ROW = struct.Struct("=IIffff")
"""A closed second: when, count, minimum, median, maximum, data wait (NaN: n/a)."""

_SHORT_ROW = struct.Struct("=Iff")
"""A closed second with one step: when, the step, data wait (NaN: n/a)."""

_CHUNK_ROWS = 16
"""Rows in one object of bytes behind the size of each: of consecutive pictures all but the last
have theirs in common."""

_COMM = PHASES.index("comm")
_DATA_WAIT = PHASES.index("data_wait")

_Number = TypeVar("_Number", int, float)

NOT_STEADY = frozenset({"first_batch", "warmup", "compile", "ddp_first"})
"""Tags of steps that are in no steady-state statistics."""


def is_steady(record: StepRecord) -> bool:
    """Whether a step belongs into steady-state statistics: no first batch, no warm-up."""
    return not record.tags or not NOT_STEADY.intersection(record.tags)


_NOTHING: Packed[StepRecord] = Packed((), records_codec)


_index_of = itemgetter(INDEX)

_EVERY_OTHER = sum([0xFFFF_FFFF << 64 * place for place in range(LANES // 2)])
"""Of the lanes of a row as one number: the first, third, ... each with room for a sum of 64."""

_HALF = struct.Struct(f"<{LANES // 2}Q")
_SUMS = struct.Struct(f"<{LANES}Q")
_even_first = [*range(0, LANES, 2), *range(1, LANES, 2)]
_in_order = itemgetter(*[_even_first.index(lane) for lane in range(LANES)])
"""Of the sums of the first, third, ... lanes and then of the others."""


def _total(values: Sequence[_Number | None]) -> tuple[_Number | int, int]:
    """Return the sum of those that are known, and how many they are."""
    if None not in values:
        return sum(cast("Sequence[_Number]", values)), len(values)
    known = [value for value in values if value is not None]
    return sum(known), len(known)


def _joined(steps_ns: "array[int]", new_ns: Sequence[int]) -> "array[int]":
    """Return an array with these after it: the same one, unless it was too narrow."""
    try:
        steps_ns.extend(array(steps_ns.typecode, new_ns))
    except OverflowError:  # longer than 4.2 s
        return array("Q", [*steps_ns, *new_ns])
    return steps_ns


def _followed_by(indices: "range | array[int]", new: list[int]) -> "range | array[int]":
    """Return the last 64 of these indices, the new ones included: a range where none is missing."""
    first = indices[0] if indices else new[0]
    count = len(indices) + len(new)
    if (
        isinstance(indices, range)
        and new[-1] - first == count - 1
        and new[0] == new[-1] - len(new) + 1
    ):
        return range(max(first, new[-1] + 1 - WINDOW_STEPS), new[-1] + 1)
    kept = array("q", [*indices, *new])[-WINDOW_STEPS:]
    if kept[-1] - kept[0] == len(kept) - 1:
        return range(kept[0], kept[-1] + 1)
    return kept


class Window:
    """The last 64 steady steps, their sums kept as they come and go.

    Sums are integers in ns, so that means add up and nothing drifts however long the run. They are
    all by one clock: where a device is timed, a step that it was not timed in stays out, unless a
    whole window of such steps has come in a row.

    What is asked for at every picture is kept until the next step. `packed` windows hold their
    steps as bytes.
    """

    __slots__ = (
        "_capacity",
        "_capacity_index",
        "_depth",
        "_depths",
        "_even",
        "_indices",
        "_mold",
        "_odd",
        "_on_device",
        "_percentiles_ms",
        "_phases_ms",
        "_phases_ns",
        "_phases_unknown",
        "_records",
        "_sampleless_ns",
        "_samples",
        "_samples_ns",
        "_stall_ns",
        "_stalls",
        "_step_ns",
        "_steps_ns",
        "_untimed",
        "loader",
        "packed",
    )

    def __init__(self, *, packed: bool = False) -> None:
        self.packed = packed
        self._clear()

    def _clear(self) -> None:
        self._records: tuple[StepRecord, ...] | Packed[StepRecord] = _NOTHING if self.packed else ()
        self._steps_ns = array("I")
        self._on_device = False
        self._indices: range | array[int] = range(0)
        self.loader = ""
        self._capacity: int | None = None
        self._capacity_index = -1
        self._step_ns = 0
        self._phases_ns: Sequence[int] = (0,) * len(PHASES)
        self._phases_unknown = [0] * len(PHASES)
        self._samples = 0
        self._samples_ns = 0
        self._depth = 0.0
        self._depths = 0
        self._stall_ns = 0
        self._stalls = 0
        self._untimed = 0
        self._even = self._odd = 0
        self._sampleless_ns = 0
        self._mold: Mold | None = None
        self._forget()

    def _forget(self) -> None:
        self._percentiles_ms: tuple[float | None, float | None] | None = None
        self._phases_ms: Mapping[str, float | None] | None = None

    def __len__(self) -> int:
        return len(self._steps_ns)

    def pack(self) -> None:
        """Hold the steps as bytes from now on."""
        if not self.packed:
            untimed, self.packed = self._untimed, True
            capacity = self._capacity, self._capacity_index
            self.replace(self._records)
            self._untimed = untimed
            self._capacity, self._capacity_index = capacity

    @property
    def first_index(self) -> int:
        """The index of the oldest step, -1 without any."""
        return self._indices[0] if self._indices else -1

    @property
    def last_index(self) -> int:
        """The index of the newest step, -1 without any."""
        return self._indices[-1] if self._indices else -1

    @property
    def records(self) -> Sequence[StepRecord]:
        """The steps, oldest first; what is returned never changes."""
        return self._records

    def append(self, record: StepRecord) -> None:
        """Add the newest step; the oldest leaves when there are more than 64."""
        self.extend((record,), (times_of(record),))

    def extend(self, records: Sequence[StepRecord], times: Sequence[Times]) -> None:
        """Add steps, oldest first, as they are timed; what is beyond 64 leaves."""
        if self.packed:
            self.extend_flats(list(map(flat_of, records)))
            return
        if records:
            before = self._on_device if self._steps_ns else times[0][0]
            if all(timed[0] is before for timed in times):
                self._untimed = 0
                self._on_device = before
                self._add(records, times)
                return
        for record, timed in zip(records, times, strict=True):
            if not self._is_left_out(timed[0]):
                self._add((record,), (timed,))

    def extend_flats(self, flats: Sequence[Flat]) -> None:
        """Add steps to a packed window, oldest first; what is beyond 64 leaves."""
        if not flats:
            return
        timed = list(map(is_timed, flats))
        before = self._on_device if self._steps_ns else timed[0]
        if (not before) not in timed:
            self._untimed = 0
            self._on_device = before
            self._add_flats(flats)
            return
        for flat, on_device in zip(flats, timed, strict=True):
            if not self._is_left_out(on_device):
                self._add_flats((flat,))

    def _is_left_out(self, on_device: bool) -> bool:
        """Whether the next step stays out for its clock; the window begins anew with another."""
        if self._steps_ns and on_device != self._on_device:
            self._untimed += 1
            if not on_device and self._untimed < WINDOW_STEPS:
                return True
            self._clear()
        self._untimed = 0
        self._on_device = on_device
        return False

    def _add(self, records: Sequence[StepRecord], times: Sequence[Times]) -> None:
        """Add steps by the clock of the window."""
        if len(records) > WINDOW_STEPS:
            self._add(records[:WINDOW_STEPS], times[:WINDOW_STEPS])
            self._add(records[WINDOW_STEPS:], times[WINDOW_STEPS:])
            return
        self._count(records, times, 1)
        self._steps_ns = _joined(self._steps_ns, [step_ns for _, _, step_ns in times])
        gone = len(self._steps_ns) - WINDOW_STEPS
        kept = cast("tuple[StepRecord, ...]", self._records)
        if gone > 0:
            old = kept[:gone] + tuple(records[: gone - len(kept)] if gone > len(kept) else ())
            self._count(old, [times_of(record) for record in old], -1)
            del self._steps_ns[:gone]
        self._records = (*kept, *records)[-WINDOW_STEPS:]
        self._indices = _followed_by(self._indices, [record.index for record in records])
        newest = records[-1]
        self.loader = newest.loader
        for record in reversed(records):
            if record.queue_capacity:
                self._capacity, self._capacity_index = record.queue_capacity, record.index
                break
        self._forget()

    def _add_flats(self, flats: Sequence[Flat]) -> None:
        """Add steps to a packed window by its clock."""
        if len(flats) > WINDOW_STEPS:
            self._add_flats(flats[:WINDOW_STEPS])
            self._add_flats(flats[WINDOW_STEPS:])
            return
        kept = cast("Packed[StepRecord]", self._records)
        self._steps_ns = steps_ns = _joined(self._steps_ns, list(map(step_ns_of, flats)))
        self._fold(flats, 1)
        gone = len(steps_ns) - WINDOW_STEPS
        if gone > 0:
            old = kept.first_flats(gone)
            self._fold([*old, *flats[: gone - len(old)]], -1)
            del steps_ns[:gone]
        self._records = records = kept.followed_by_flats(flats, WINDOW_STEPS)
        self._indices = _followed_by(self._indices, list(map(_index_of, flats)))
        self.loader = flats[-1][LOADER]
        for flat in reversed(flats):
            if flat[QUEUE_CAPACITY]:
                self._capacity, self._capacity_index = flat[QUEUE_CAPACITY], flat[INDEX]
                break
        mold = mold_of(records.newest)
        self._mold = mold if mold is not None and mold.quick else None
        self._unfold()
        self._forget()

    def _fold(self, flats: Iterable[Flat], sign: int) -> None:
        """Add steps to the sums of a packed window, or take them out."""
        place = DEVICE if self._on_device else HOST
        unknown = self._phases_unknown
        for flat in flats:
            lanes = [flat[STEP], flat[SAMPLES], flat[STALL], *flat[place]]
            if None in lanes:
                for at, ns in enumerate(flat[place]):
                    unknown[at] += sign * (ns is None)
                lanes = [value or 0 for value in lanes]
                if flat[SAMPLES] is None:
                    self._sampleless_ns += sign * step_ns_of(flat)
            self._even += sign * int.from_bytes(_HALF.pack(*lanes[0::2]), "little")
            self._odd += sign * int.from_bytes(_HALF.pack(*lanes[1::2]), "little")
            if flat[STALL] is not None:
                self._stalls += sign
            if flat[QUEUE_DEPTH] is not None:
                self._depth += sign * flat[QUEUE_DEPTH]
                self._depths += sign

    def _unfold(self) -> None:
        """Make the sums of a packed window those of its lanes."""
        lanes = self._even | self._odd << 8 * _HALF.size
        sums = _in_order(_SUMS.unpack(lanes.to_bytes(_SUMS.size, "little")))
        self._phases_ns = sums[PHASES_LANE:]
        steps_ns, self._samples, self._stall_ns = sums[:PHASES_LANE]
        self._step_ns = step_ns = sum(self._phases_ns) if self._on_device else steps_ns
        self._samples_ns = step_ns - self._sampleless_ns

    def extend_next(self, flats: Sequence[Flat], steps_ns: Sequence[int]) -> bool:
        """Add the steps that follow the newest one to a packed window, a few at a time.

        `steps_ns` is how long they took by their clock. False, with nothing changed, where they are
        not as the newest one is in what rows have in common: `extend_flats` takes them.
        """
        mold, indices = self._mold, self._indices
        count = len(flats)
        if mold is None or count >= WINDOW_STEPS or self._untimed:
            return False
        if not isinstance(indices, range) or indices[-1] != flats[0][INDEX] - 1:
            return False
        if flats[-1][INDEX] != indices[-1] + count:  # they rise: some are missing
            return False
        rows = list(map(mold.write, flats))
        if None in rows:
            return False
        written = cast("list[bytes]", rows)
        # Numbers of 64 bits side by side in one: all of a step are added at once.
        even, odd = self._even, self._odd
        for row in written:
            lanes = int.from_bytes(row[:LANES_BYTES], "little")
            even += lanes & _EVERY_OTHER
            odd += lanes >> 32 & _EVERY_OTHER
        self._even, self._odd = even, odd
        if mold.depth:
            self._depth += sum([row[-1] for row in written])
        self._note(mold, count)
        kept = cast("Packed[StepRecord]", self._records)
        self._steps_ns = known_ns = _joined(self._steps_ns, steps_ns)
        gone = len(known_ns) - WINDOW_STEPS
        if gone > 0:
            del known_ns[:gone]
            self._take_out(kept, gone)
        self._records = kept.followed_by_rows(mold, indices[-1] + 1, written, WINDOW_STEPS)
        newest = indices[-1] + count
        self._indices = range(newest + 1 - len(known_ns), newest + 1)
        if mold.capacity:
            self._capacity_index = newest
        self._unfold()
        self._percentiles_ms = self._phases_ms = None
        return True

    def _note(self, mold: Mold, count: int) -> None:
        """Count what is known of so many steps of a mold, fewer than none to take them out."""
        if mold.depth:
            self._depths += count
        if not mold.unknown:
            self._stalls += count
            return
        self._stalls += count * (STALL_LANE not in mold.unknown)
        for lane in mold.unknown:
            if lane != STALL_LANE:
                self._phases_unknown[lane - PHASES_LANE] += count

    def _take_out(self, kept: "Packed[StepRecord]", count: int) -> None:
        """Take the oldest so many steps out of the sums."""
        for chunk, start, end in kept.oldest(count):
            mold = mold_of(chunk)
            if mold is None or not mold.quick:
                self._fold(read_rows(chunk, start, end), -1)
                continue
            size = mold.size
            even, odd = self._even, self._odd
            for at in range(HEAD_BYTES + start * size, HEAD_BYTES + end * size, size):
                lanes = int.from_bytes(chunk[at : at + LANES_BYTES], "little")
                even -= lanes & _EVERY_OTHER
                odd -= lanes >> 32 & _EVERY_OTHER
                if mold.depth:
                    self._depth -= chunk[at + size - 1]
            self._even, self._odd = even, odd
            self._note(mold, start - end)

    def replace(self, records: Iterable[StepRecord]) -> None:
        """Start anew with these steps, oldest first."""
        self._clear()
        steps = tuple(records)
        self.extend(steps, [times_of(record) for record in steps])

    def _count(self, records: Sequence[StepRecord], times: Sequence[Times], sign: int) -> None:
        steps_ns = [step_ns for _, _, step_ns in times]
        self._step_ns += sign * sum(steps_ns)
        sums, unknown = list(self._phases_ns), self._phases_unknown
        if len(times) == 1:  # a step at a time: columns do not pay
            for i, value in enumerate(times[0][1]):
                if value is not None:
                    sums[i] += sign * value
                else:
                    unknown[i] += sign
        else:
            for i, column in enumerate(zip(*[phases for _, phases, _ in times], strict=True)):
                total_ns, count = _total(column)
                sums[i] += sign * total_ns
                unknown[i] += sign * (len(times) - count)
        self._phases_ns = sums
        samples = [record.samples for record in records]
        if None not in samples:
            self._samples += sign * sum(cast("list[int]", samples))
            self._samples_ns += sign * sum(steps_ns)
        else:
            for number, step_ns in zip(samples, steps_ns, strict=True):
                if number is not None:
                    self._samples += sign * number
                    self._samples_ns += sign * step_ns
        depth, depths = _total([record.queue_depth for record in records])
        self._depth += sign * depth
        self._depths += sign * depths
        stall_ns, stalls = _total([record.device_stall_ns for record in records])
        self._stall_ns += sign * stall_ns
        self._stalls += sign * stalls

    def count_between(self, first: int, last: int) -> int:
        """Return how many steps of the window have an index from `first` to `last`."""
        if first <= self.first_index and last >= self.last_index:
            return len(self._steps_ns)
        start = bisect_left(self._indices, first)
        return bisect_right(self._indices, last) - start

    @property
    def queue_capacity(self) -> int | None:
        """How many batches can be ready, by the newest step of the window that says so."""
        return self._capacity if self._capacity_index >= self.first_index else None

    @property
    def clock(self) -> str | None:
        """The clock of every step in the window, host or device; None without steps."""
        if not self._steps_ns:
            return None
        return "device" if self._on_device else "host"

    @property
    def device_stall_ms(self) -> float | None:
        """Mean time that the device had nothing to do between two steps, where it is known."""
        return self._stall_ns / self._stalls / 1e6 if self._stalls else None

    @property
    def step_ms(self) -> float | None:
        """Mean step."""
        return self._step_ns / len(self._steps_ns) / 1e6 if self._steps_ns else None

    @property
    def phases_ms(self) -> Mapping[str, float | None]:
        """Mean of each phase; None where no step of the window knows it.

        The divisor is the number of steps, known or not, so that the means add up to the step.
        """
        if self._phases_ms is None:
            count = len(self._steps_ns)
            self._phases_ms = {
                name: total_ns / count / 1e6 if unknown < count else None
                for name, total_ns, unknown in zip(
                    PHASES, self._phases_ns, self._phases_unknown, strict=True
                )
            }
        return self._phases_ms

    @property
    def own_ms(self) -> float | None:
        """Mean step without exposed communication; with one process the step itself."""
        if not self._steps_ns:
            return None
        return (self._step_ns - self._phases_ns[_COMM]) / len(self._steps_ns) / 1e6

    @property
    def data_wait_ratio(self) -> float | None:
        """Data wait / step, 0..1."""
        known = self._phases_unknown[_DATA_WAIT] < len(self._steps_ns)
        return self._phases_ns[_DATA_WAIT] / self._step_ns if known and self._step_ns else None

    @property
    def samples_per_s(self) -> float | None:
        """Samples of this rank a second, over the steps that know their samples."""
        return self._samples / (self._samples_ns / 1e9) if self._samples_ns else None

    @property
    def queue_depth(self) -> float | None:
        """Mean number of batches that were ready when a step began to wait."""
        return max(0.0, self._depth) / self._depths if self._depths else None

    def percentiles_ms(self) -> tuple[float | None, float | None]:
        """Return (p50, p95) of the step; p95 by the nearest rank."""
        if not self._steps_ns:
            return None, None
        if self._percentiles_ms is None:
            steps = sorted(self._steps_ns)
            nearest = max(0, -(-len(steps) * 95 // 100) - 1)
            middle = len(steps) // 2
            median = steps[middle] if len(steps) % 2 else (steps[middle - 1] + steps[middle]) / 2
            self._percentiles_ms = median / 1e6, steps[nearest] / 1e6
        return self._percentiles_ms


def _count_rows(chunk: bytes) -> int:
    return len(chunk) // chunk[0]


def _with_rows(chunks: tuple[bytes, ...], new: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return chunks of rows with new rows after them, without those that are out of sight."""
    found = [*chunks]
    for row in new:
        tail = found[-1] if found else b""
        if tail and tail[0] == len(row) and _count_rows(tail) < _CHUNK_ROWS:
            found[-1] = tail + row
        else:
            found.append(bytes((len(row),)) + row)
    if len(found) > len(chunks):
        counts = list(map(_count_rows, found))
        beyond, gone = sum(counts) - TIMELINE_S, 0
        while counts[gone] <= beyond:
            beyond -= counts[gone]
            gone += 1
        del found[:gone]
    return tuple(found)


def _read_row(chunk: bytes, place: int) -> tuple[int, int, float, float, float, float]:
    """Return a row of a chunk as a long one."""
    at = 1 + place * chunk[0]
    if chunk[0] == _ROW.size:
        return cast("tuple[int, int, float, float, float, float]", _ROW.unpack_from(chunk, at))
    second_s, step_ms, wait_ms = _SHORT_ROW.unpack_from(chunk, at)
    return second_s, 1, step_ms, step_ms, step_ms, wait_ms


_Open = tuple[int, Sequence[float], Sequence[float]]
"""A second that is not over: when, how long each of its steps took, and their data wait, in ms."""


TimelinePicture = tuple[tuple[bytes, ...], _Open]
"""Rows of seconds that are over, and the open one."""


class Seconds(Sequence[Rollup]):
    """Rollups of one rank, oldest first: rows of closed seconds, and the open one.

    An immutable picture; a row is made an object when it is asked for.
    """

    __slots__ = ("_ahead_s", "_count", "_open", "_rows", "_skipped")

    def __init__(
        self, rows: tuple[bytes, ...], open_second: _Open | None, ahead_s: int = 0
    ) -> None:
        count = sum(map(_count_rows, rows))
        self._rows = rows
        self._count = min(count, TIMELINE_S)
        self._skipped = count - self._count
        self._open = open_second
        self._ahead_s = ahead_s

    def __len__(self) -> int:
        return self._count + (self._open is not None)

    def _at(self, place: int) -> Rollup:
        if place == self._count and self._open is not None:
            second_s, steps_ms, waits_ms = self._open
            return _rollup(second_s - self._ahead_s, steps_ms, waits_ms)
        row = place + self._skipped
        for chunk in self._rows:
            count = _count_rows(chunk)
            if row < count:
                break
            row -= count
        second_s, number, least, middle, most, wait = _read_row(chunk, row)
        return Rollup(
            second_s - self._ahead_s, number, least, middle, most, None if isnan(wait) else wait
        )

    @overload
    def __getitem__(self, place: int) -> Rollup: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Rollup, ...]: ...
    def __getitem__(self, place: int | slice) -> Rollup | tuple[Rollup, ...]:
        places = range(len(self))[place]
        return self._at(places) if isinstance(places, int) else tuple(map(self._at, places))

    def __iter__(self) -> Iterator[Rollup]:
        return map(self._at, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Seconds, tuple)):
            return NotImplemented
        return tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


def _rollup(second_s: int, steps_ms: Sequence[float], waits_ms: Sequence[float]) -> Rollup:
    wait_ms = sum(waits_ms) / len(waits_ms) if waits_ms else None
    if len(steps_ms) == 1:  # a step a second is common, and a median takes its time
        return Rollup(second_s, 1, steps_ms[0], steps_ms[0], steps_ms[0], wait_ms)
    middle_ms = statistics.median(steps_ms)
    return Rollup(second_s, len(steps_ms), min(steps_ms), middle_ms, max(steps_ms), wait_ms)


def _row(second_s: int, steps_ms: Sequence[float], waits_ms: Sequence[float]) -> bytes:
    """Return a second that is over as a row."""
    if len(steps_ms) == 1:
        return _SHORT_ROW.pack(second_s, steps_ms[0], waits_ms[0] if waits_ms else nan)
    wait_ms = sum(waits_ms) / len(waits_ms) if waits_ms else nan
    middle_ms = statistics.median(steps_ms)
    return _ROW.pack(second_s, len(steps_ms), min(steps_ms), middle_ms, max(steps_ms), wait_ms)


class Timeline:
    """The last two minutes in one-second rollups; the open second is in it too."""

    __slots__ = ("_open", "_rows")

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._rows: tuple[bytes, ...] = ()
        self._open: _Open = 0, (), ()

    def add(self, record: StepRecord) -> None:
        """Count a step in the second in which it ended."""
        self.extend((record,), (times_of(record),))

    def extend(self, records: Sequence[StepRecord], times: Sequence[Times]) -> None:
        """Count steps as they are timed, each in the second in which it ended."""
        rows = zip(records, times, strict=True)
        self._take(
            [
                (record.started_s, record.step_ns, step_ns, phases[_DATA_WAIT])
                for record, (_, phases, step_ns) in rows
            ]
        )

    def extend_flats(
        self, flats: Sequence[Flat], steps_ns: Iterable[int], waits_ns: Iterable[int | None]
    ) -> None:
        """Count steps, each in the second in which it ended; times are by their clock."""
        began = [flat[STARTED] for flat in flats]
        took_ns = [flat[STEP] for flat in flats]
        self._take(zip(began, took_ns, steps_ns, waits_ns, strict=True))

    def _take(self, rows: Iterable[tuple[float, int, int, int | None]]) -> None:
        """Count steps by when they began, how long they took, the same by their clock, and wait."""
        closed: list[bytes] = []
        now_s, steps, waits = self._open
        steps_ms, waits_ms = [*steps], [*waits]
        for started_s, took_ns, step_ns, wait_ns in rows:
            second_s = int(started_s + took_ns / 1e9)
            if second_s < now_s - 1:
                # Steps come in order: the rank's clock was set back.
                self._close(closed)
                closed = []
                self._open = now_s, steps_ms, waits_ms
                self.move(second_s - now_s)
                now_s = self._open[0]
            if second_s > now_s:
                if steps_ms:
                    closed.append(_row(now_s, steps_ms, waits_ms))
                now_s, steps_ms, waits_ms = second_s, [], []
            steps_ms.append(step_ns / 1e6)
            if wait_ns is not None:
                waits_ms.append(wait_ns / 1e6)
        self._open = now_s, tuple(steps_ms), tuple(waits_ms)
        if closed:
            self._close(closed)

    def _close(self, rows: Sequence[bytes]) -> None:
        """Add the rows of seconds that are over; what is out of sight goes."""
        if rows:
            self._rows = _with_rows(self._rows, rows)

    def move(self, seconds: int) -> None:
        """Move what is known by whole seconds: the clock by which it is has been set."""
        second_s, steps_ms, waits_ms = self._open
        if steps_ms:
            self._open = max(0, second_s + seconds), steps_ms, waits_ms
        rows = []
        for chunk in self._rows:
            row = _ROW if chunk[0] == _ROW.size else _SHORT_ROW
            for when_s, *numbers in row.iter_unpack(chunk[1:]):
                rows.append(row.pack(max(0, when_s + seconds), *numbers))
        self._rows = _with_rows((), rows)

    def rebuild(self, records: Iterable[StepRecord]) -> None:
        """Start anew with these steps, oldest first."""
        self._clear()
        steps = tuple(records)
        self.extend(steps, [times_of(record) for record in steps])

    def rollups(self, ahead_s: int = 0) -> Sequence[Rollup]:
        """Return the seconds, oldest first; seconds without a step are absent.

        `ahead_s` is how far the clock of the rank is ahead of the observer's.
        """
        return seconds_of(self.picture, ahead_s)

    @property
    def picture(self) -> TimelinePicture:
        """What `seconds_of` makes rollups of; it never changes."""
        return self._rows, self._open


def seconds_of(picture: TimelinePicture, ahead_s: int = 0) -> Sequence[Rollup]:
    """Return the rollups of a timeline as it was at one moment."""
    rows, open_second = picture
    return Seconds(rows, open_second if open_second[1] else None, ahead_s)
