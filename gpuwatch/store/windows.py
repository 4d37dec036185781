"""The last steady steps of one rank with running sums, and its seconds beyond them."""

import statistics
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isnan, nan
from operator import attrgetter
from typing import cast, overload

from gpuwatch.schema import PHASES, StepRecord
from gpuwatch.store.clocks import deciding, deciding_step_ns, is_on_device
from gpuwatch.store.packed import Packed, records_codec
from gpuwatch.store.views import Rollup

__all__ = ["TIMELINE_S", "WINDOW_STEPS", "Seconds", "Timeline", "Window", "is_steady"]

WINDOW_STEPS = 64
TIMELINE_S = 120

_SPARE_ROWS = TIMELINE_S // 4
"""So many rows that are out of sight are let go at once."""

_COLUMNS = 5
"""Of a closed second: count, minimum, median, maximum, data wait (NaN: n/a)."""

_COMM = PHASES.index("comm")
_phases_of = attrgetter(*PHASES)

_NOT_STEADY = frozenset({"first_batch", "warmup", "compile", "ddp_first"})


def is_steady(record: StepRecord) -> bool:
    """Whether a step belongs into steady-state statistics: no first batch, no warm-up."""
    return not record.tags or not _NOT_STEADY.intersection(record.tags)


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
        "_indices",
        "_items",
        "_on_device",
        "_percentiles_ms",
        "_phases_known",
        "_phases_ms",
        "_phases_ns",
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
        self._items: tuple[StepRecord, ...] | tuple[bytes, ...] = ()
        self._steps_ns = array("q")
        self._on_device = False
        self._indices = array("q")
        self.loader = ""
        self._capacity: int | None = None
        self._capacity_index = -1
        self._step_ns = 0
        self._phases_ns = [0] * len(PHASES)
        self._phases_known = [0] * len(PHASES)
        self._samples = 0
        self._samples_ns = 0
        self._depth = 0.0
        self._depths = 0
        self._stall_ns = 0
        self._stalls = 0
        self._untimed = 0
        self._forget()

    def _forget(self) -> None:
        self._percentiles_ms: tuple[float | None, float | None] | None = None
        self._phases_ms: Mapping[str, float | None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def pack(self) -> None:
        """Hold the steps as bytes from now on."""
        if not self.packed:
            self._items = tuple(map(records_codec.encode, self.records))
            self.packed = True

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
        if self.packed:
            return Packed(cast("tuple[bytes, ...]", self._items), records_codec)
        return cast("tuple[StepRecord, ...]", self._items)

    def append(self, record: StepRecord) -> None:
        """Add the newest step; the oldest leaves when there are more than 64."""
        on_device = is_on_device(record)
        if self._items and on_device != self._on_device:
            self._untimed += 1
            if not on_device and self._untimed < WINDOW_STEPS:
                return
            self._clear()
        self._untimed = 0
        self._on_device = on_device
        step_ns = deciding_step_ns(record)
        self._count(record, step_ns, 1)
        self._steps_ns.append(step_ns)
        if len(self._items) >= WINDOW_STEPS:
            self._count(self.records[0], self._steps_ns.pop(0), -1)
            kept = self._items[1 - WINDOW_STEPS :]
        else:
            kept = self._items
        item = records_codec.encode(record) if self.packed else record
        self._items = cast("tuple[StepRecord, ...]", (*kept, item))
        self._indices.append(record.index)
        if len(self._indices) > len(self._items):
            self._indices.pop(0)
        self.loader = record.loader
        if record.queue_capacity:
            self._capacity, self._capacity_index = record.queue_capacity, record.index
        self._forget()

    def replace(self, records: Iterable[StepRecord]) -> None:
        """Start anew with these steps, oldest first."""
        self._clear()
        for record in records:
            self.append(record)

    def _count(self, record: StepRecord, step_ns: int, sign: int) -> None:
        self._step_ns += sign * step_ns
        sums, known = self._phases_ns, self._phases_known
        for i, value in enumerate(_phases_of(deciding(record))):
            if value is not None:
                sums[i] += sign * value
                known[i] += sign
        if record.samples is not None:
            self._samples += sign * record.samples
            self._samples_ns += sign * step_ns
        if record.queue_depth is not None:
            self._depth += sign * record.queue_depth
            self._depths += sign
        if record.device_stall_ns is not None:
            self._stall_ns += sign * record.device_stall_ns
            self._stalls += sign

    def count_between(self, first: int, last: int) -> int:
        """Return how many steps of the window have an index from `first` to `last`."""
        if first <= self.first_index and last >= self.last_index:
            return len(self._items)
        start = bisect_left(self._indices, first)
        return bisect_right(self._indices, last) - start

    @property
    def queue_capacity(self) -> int | None:
        """How many batches can be ready, by the newest step of the window that says so."""
        return self._capacity if self._capacity_index >= self.first_index else None

    @property
    def clock(self) -> str | None:
        """The clock of every step in the window, host or device; None without steps."""
        if not self._items:
            return None
        return "device" if self._on_device else "host"

    @property
    def device_stall_ms(self) -> float | None:
        """Mean time that the device had nothing to do between two steps, where it is known."""
        return self._stall_ns / self._stalls / 1e6 if self._stalls else None

    @property
    def step_ms(self) -> float | None:
        """Mean step."""
        return self._step_ns / len(self._items) / 1e6 if self._items else None

    @property
    def phases_ms(self) -> Mapping[str, float | None]:
        """Mean of each phase; None where no step of the window knows it.

        The divisor is the number of steps, known or not, so that the means add up to the step.
        """
        if self._phases_ms is None:
            count = len(self._items)
            self._phases_ms = {
                name: self._phases_ns[i] / count / 1e6 if self._phases_known[i] else None
                for i, name in enumerate(PHASES)
            }
        return self._phases_ms

    @property
    def own_ms(self) -> float | None:
        """Mean step without exposed communication; with one process the step itself."""
        if not self._items:
            return None
        return (self._step_ns - self._phases_ns[_COMM]) / len(self._items) / 1e6

    @property
    def data_wait_ratio(self) -> float | None:
        """Data wait / step, 0..1."""
        if not self._phases_known[0] or not self._step_ns:
            return None
        return self._phases_ns[0] / self._step_ns

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
        if not self._items:
            return None, None
        if self._percentiles_ms is None:
            steps = sorted(self._steps_ns)
            nearest = max(0, -(-len(steps) * 95 // 100) - 1)
            middle = len(steps) // 2
            median = steps[middle] if len(steps) % 2 else (steps[middle - 1] + steps[middle]) / 2
            self._percentiles_ms = median / 1e6, steps[nearest] / 1e6
        return self._percentiles_ms


class Seconds(Sequence[Rollup]):
    """Rollups of one rank, oldest first: rows of arrays that only grow, and the open second.

    An immutable picture; a row is made an object when it is asked for.
    """

    __slots__ = ("_ahead_s", "_numbers", "_open", "_seconds", "_start", "_stop")

    def __init__(
        self,
        seconds: "array[int]",
        numbers: "array[float]",
        start: int,
        stop: int,
        open_second: Rollup | None,
        ahead_s: int = 0,
    ) -> None:
        self._seconds = seconds
        self._numbers = numbers
        self._start = start
        self._stop = stop
        self._open = open_second
        self._ahead_s = ahead_s

    def __len__(self) -> int:
        return self._stop - self._start + (self._open is not None)

    def _at(self, place: int) -> Rollup:
        row = self._start + place
        if row == self._stop:
            return cast("Rollup", self._open)
        at = row * _COLUMNS
        count, least, middle, most, wait = self._numbers[at : at + _COLUMNS]
        known = None if isnan(wait) else wait
        second_s = self._seconds[row] - self._ahead_s
        return Rollup(second_s, int(count), least, middle, most, known)

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


class Timeline:
    """The last two minutes in one-second rollups; the open second is in it too."""

    __slots__ = (
        "_ahead_s",
        "_numbers",
        "_picture",
        "_second_s",
        "_seconds",
        "_start",
        "_steps_ms",
        "_waits_ms",
    )

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._seconds = array("I")
        self._numbers = array("f")
        self._start = 0
        self._second_s = 0
        self._steps_ms: list[float] = []
        self._waits_ms: list[float] = []
        self._picture: Seconds | None = None
        self._ahead_s = 0

    def add(self, record: StepRecord) -> None:
        """Count a step in the second in which it ended."""
        self._picture = None
        second_s = int(record.started_s + record.step_ns / 1e9)
        if second_s < self._second_s - 1:
            # Steps come in order: the rank's clock was set back.
            self.move(second_s - self._second_s)
        if second_s > self._second_s:
            if self._steps_ms:
                self._close()
            self._second_s = second_s
            self._steps_ms = []
            self._waits_ms = []
        self._steps_ms.append(deciding_step_ns(record) / 1e6)
        wait_ns = deciding(record).data_wait
        if wait_ns is not None:
            self._waits_ms.append(wait_ns / 1e6)

    def move(self, seconds: int) -> None:
        """Move what is known by whole seconds: the clock by which it is has been set."""
        if self._steps_ms:
            self._second_s = max(0, self._second_s + seconds)
        self._seconds = array("I", [max(0, s + seconds) for s in self._seconds])
        self._picture = None

    def _close(self) -> None:
        self._start = max(self._start, len(self._seconds) + 1 - TIMELINE_S)
        if self._start >= _SPARE_ROWS:
            # Pictures that are out there keep the old rows.
            self._seconds = self._seconds[self._start :]
            self._numbers = self._numbers[self._start * _COLUMNS :]
            self._start = 0
        self._seconds.append(self._second_s)
        wait_ms = self._wait_ms()
        self._numbers.extend((*self._of_steps(), nan if wait_ms is None else wait_ms))

    def _of_steps(self) -> tuple[int, float, float, float]:
        """Return count, minimum, median and maximum of the open second's steps."""
        steps_ms = self._steps_ms
        if len(steps_ms) == 1:  # a step a second is common, and a median takes its time
            return 1, steps_ms[0], steps_ms[0], steps_ms[0]
        return len(steps_ms), min(steps_ms), statistics.median(steps_ms), max(steps_ms)

    def _wait_ms(self) -> float | None:
        return sum(self._waits_ms) / len(self._waits_ms) if self._waits_ms else None

    def _rollup(self) -> Rollup:
        return Rollup(self._second_s, *self._of_steps(), self._wait_ms())

    def rebuild(self, records: Iterable[StepRecord]) -> None:
        """Start anew with these steps, oldest first."""
        self._clear()
        for record in records:
            self.add(record)

    def rollups(self, ahead_s: int = 0) -> Sequence[Rollup]:
        """Return the seconds, oldest first; seconds without a step are absent.

        `ahead_s` is how far the clock of the rank is ahead of the observer's.
        """
        if self._picture is None or self._ahead_s != ahead_s:
            self._ahead_s = ahead_s
            last = self._rollup() if self._steps_ms else None
            if last is not None and ahead_s:
                last = replace(last, second_s=last.second_s - ahead_s)
            self._picture = Seconds(
                self._seconds, self._numbers, self._start, len(self._seconds), last, ahead_s
            )
        return self._picture
