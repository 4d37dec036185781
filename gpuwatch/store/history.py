"""The slower past that trends and periods need: first batches, spans, memory, sensor means.

Bounded for every rank and process: raw steps beyond the window would cost too much at a thousand
ranks.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isnan, nan
from operator import itemgetter
from typing import NamedTuple

from gpuwatch.schema import Reading, SensorFrame, Span, StepRecord
from gpuwatch.store.lean import Lean
from gpuwatch.store.packed import Packed, Points, records_codec, spans_codec
from gpuwatch.store.rows import INDEX, MEMORY, TAGS, Flat, record_of

__all__ = ["MEAN_S", "History", "Means", "MeansPicture", "Past", "ProcessMeans", "memory_slope"]

KEPT_FIRSTS = 16
KEPT_SPANS = 64
MEMORY_POINTS = 128
"""When there are more, every other one goes and the stride doubles: the whole run stays in view."""

MEAN_S = 6.0
"""Sensor readings are averaged over so many seconds: one of /proc/stat counts in whole ticks."""

_MOST_TICKS = 16
_AVERAGED = (
    "cpu_percent",
    "cpu_iowait_percent",
    "cpu_throttled_percent",
    "cpu_throttled_ms_per_s",
    "psi_cpu_some",
    "psi_io_some",
    "psi_io_full",
    "psi_memory_some",
    "major_faults_per_s",
    "read_bytes_per_s",
)

_PLACES = {name: place for place, name in enumerate(_AVERAGED)}

_tags_of = itemgetter(TAGS)

_Records = tuple[StepRecord, ...] | Packed[StepRecord]
_Spans = tuple[Span, ...] | Packed[Span]


@dataclass(frozen=True, slots=True)
class Past:
    """What is kept of one rank beyond its window.

    `firsts` are the latest steps that began an iterator, but the very first; `spans` the latest
    named times outside the steps; `memory` is (step, bytes) over the whole run, ever sparser.
    """

    firsts: Sequence[StepRecord] = ()
    spans: Sequence[Span] = ()
    memory: Sequence[tuple[int, int]] = ()


_NO_RECORDS: Packed[StepRecord] = Packed((), records_codec)
_NO_SPANS: Packed[Span] = Packed((), spans_codec)


class History:
    """Collects a rank's `Past`; `packed` where steps and spans are held as bytes."""

    __slots__ = ("_firsts", "_last_span_s", "_memory", "_past", "_spans", "_stride", "packed")

    def __init__(self, *, packed: bool = False) -> None:
        self.packed = packed
        self._firsts: _Records = ()
        self._spans: _Spans = ()
        self._memory = array("q")
        self._stride = 1
        self._last_span_s = 0.0
        self._past: Past | None = None

    def pack(self) -> None:
        """Hold steps and spans as bytes from now on."""
        if not self.packed:
            if self._firsts:
                self._firsts = _NO_RECORDS.followed_by(self._firsts, KEPT_FIRSTS)
            if self._spans:
                self._spans = _NO_SPANS.followed_by(self._spans, KEPT_SPANS)
            self.packed = True
            self._past = None

    def add_steps(self, records: Iterable[StepRecord]) -> None:
        """Take steps in their order, each once."""
        for record in records:
            if record.tags and "first_batch" in record.tags and record.index:
                self._firsts = self._with_first(record)
                self._past = None
            self._add_memory(record.index, record.memory_bytes)

    def add_flats(self, flats: Sequence[Flat]) -> None:
        """Take steps as tuples in their order, each once."""
        if any(map(_tags_of, flats)):
            self.add_steps(map(record_of, flats))
            return
        memory = self._memory
        due = memory[-2] + self._stride if memory else -1
        if flats[-1][INDEX] >= due:
            for flat in flats:
                self._add_memory(flat[INDEX], flat[MEMORY])

    def _with_first(self, record: StepRecord) -> _Records:
        firsts = self._firsts
        if self.packed:
            block = firsts if isinstance(firsts, Packed) else _NO_RECORDS
            return block.followed_by((record,), KEPT_FIRSTS)
        return (*firsts[1 - KEPT_FIRSTS :], record)

    def _with_span(self, span: Span) -> _Spans:
        spans = self._spans
        if self.packed:
            block = spans if isinstance(spans, Packed) else _NO_SPANS
            return block.followed_by((span,), KEPT_SPANS)
        return (*spans[1 - KEPT_SPANS :], span)

    def _add_memory(self, index: int, allocated: int | None) -> None:
        memory = self._memory
        if allocated is not None and (not memory or index >= memory[-2] + self._stride):
            memory.extend((index, allocated))
            self._past = None
            if len(memory) > 2 * MEMORY_POINTS:
                self._thin()

    def _thin(self) -> None:
        """Leave every other point out; what was told keeps the old ones."""
        pairs = (len(self._memory) // 2 + 1) // 2
        thinner = array("q", bytes(16 * pairs))
        thinner[0::2] = self._memory[0::4]
        thinner[1::2] = self._memory[1::4]
        self._memory = thinner
        self._stride *= 2

    def add_spans(self, spans: Iterable[Span]) -> None:
        """Take spans; those that are known already, from a snapshot say, change nothing."""
        for span in spans:
            if span.started_s > self._last_span_s:
                self._last_span_s = span.started_s
                self._spans = self._with_span(span)
                self._past = None

    def past(self) -> Past:
        """Return what is known by now."""
        if self._past is None:
            points = Points(self._memory, len(self._memory) // 2)
            self._past = Past(self._firsts, self._spans, points)
        return self._past


def memory_slope(memory: Iterable[tuple[int, int]]) -> float | None:
    """Return bytes a step by least squares, None with fewer than three points."""
    points = list(memory)
    if len(points) < 3:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        return None
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


class _Tick(NamedTuple):
    """What is kept of one tick of the sampler, a row of `_AVERAGED` a process; NaN for n/a."""

    at_s: float
    host: "array[float]"
    pids: tuple[int, ...]
    rows: "array[float]"
    states: str


class Means:
    """Means of sensor readings over the last six seconds: of the host, and of each process."""

    def __init__(self) -> None:
        self._ticks: deque[_Tick] = deque(maxlen=_MOST_TICKS)
        self._host: Mapping[str, float] | None = None
        self._picture: MeansPicture | None = None

    def add(self, frame: SensorFrame, at_s: float) -> None:
        """Take a tick; `at_s` by the receiver's clock."""
        rows = array("f")
        for sample in frame.processes:
            rows.extend(_row(sample.readings))
        pids = tuple([sample.pid for sample in frame.processes])
        if self._ticks and self._ticks[-1].pids == pids:
            pids = self._ticks[-1].pids
        states = "".join([sample.status[:1] or "?" for sample in frame.processes])
        host = array("f", _row(frame.host.readings))
        self._ticks.append(_Tick(at_s, host, pids, rows, states))
        while self._ticks[0].at_s < at_s - MEAN_S:
            self._ticks.popleft()
        self._host = self._picture = None

    def host(self) -> Mapping[str, float]:
        """Return the host's means; what is not known is not in it."""
        if self._host is None:
            self._host = _means([tick.host for tick in self._ticks])
        return self._host

    def process(self, pid: int) -> "ProcessMeans | None":
        """Return a process's means, None for one that was not seen."""
        return self.picture().process(pid)

    def picture(self) -> "MeansPicture":
        """Return the means of the processes by now, made when they are asked for."""
        if self._picture is None:
            self._picture = MeansPicture(tuple(self._ticks))
        return self._picture


class MeansPicture:
    """The means of all processes of a node at one moment."""

    __slots__ = ("_processes", "_ticks")

    def __init__(self, ticks: tuple[_Tick, ...]) -> None:
        self._ticks = ticks
        self._processes: dict[int, ProcessMeans] | None = None

    def process(self, pid: int) -> "ProcessMeans | None":
        """Return a process's means, None for one that was not seen."""
        if self._processes is None:
            ticks = self._ticks
            pids = {id(tick.pids): tick.pids for tick in ticks}.values()
            columns = _Columns(ticks) if len(pids) == 1 else None
            self._processes = {
                known: ProcessMeans(ticks, known, columns)
                for known in set(chain.from_iterable(pids))
            }
        return self._processes.get(pid)


class _Columns:
    """What is asked of each process of a node, of all in one go: their ticks have the same ones."""

    __slots__ = ("_means", "_places", "_shares", "_ticks")

    def __init__(self, ticks: tuple[_Tick, ...]) -> None:
        self._ticks = ticks
        pids = ticks[0].pids
        self._places = dict(zip(reversed(pids), range(len(pids) - 1, -1, -1), strict=True))
        self._means: dict[int, list[float | None]] = {}
        self._shares: dict[str, list[float]] = {}

    def mean(self, column: int, pid: int) -> float | None:
        found = self._means.get(column)
        if found is None:
            width = len(_AVERAGED)
            rows = zip(*[tick.rows[column::width] for tick in self._ticks], strict=True)
            found = self._means[column] = list(map(_mean, rows))
        return found[self._places[pid]]

    def share(self, letter: str, pid: int) -> float:
        found = self._shares.get(letter)
        if found is None:
            states = zip(*[tick.states for tick in self._ticks], strict=True)
            count = len(self._ticks)
            found = self._shares[letter] = [of_one.count(letter) / count for of_one in states]
        return found[self._places[pid]]


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean of what is known, None where nothing is."""
    total = sum(values)
    if isnan(total):
        values = [value for value in values if not isnan(value)]
        total = sum(values)
    return total / len(values) if values else None


class ProcessMeans:
    """Readings of one process by name, and the shares of ticks in which it was blocked on a device
    (state D) and had a core or waited for one (state R).

    Immutable; made when it is asked for: of thousands of processes few are looked at.
    """

    __slots__ = ("_columns", "_found", "_pid", "_readings", "_ticks")

    def __init__(self, ticks: tuple[_Tick, ...], pid: int, columns: _Columns | None = None) -> None:
        self._ticks = ticks
        self._pid = pid
        self._columns = columns
        self._found: list[tuple[_Tick, int]] | None = None
        self._readings: Mapping[str, float] | None = None

    def _places(self) -> list[tuple[_Tick, int]]:
        """Return the ticks that know the process, with its place in them."""
        if self._found is None:
            self._found = []
            pids: tuple[int, ...] = ()
            place = -1
            for tick in self._ticks:
                if tick.pids is not pids:  # mostly the same ones, in one tuple
                    pids = tick.pids
                    place = pids.index(self._pid) if self._pid in pids else -1
                if place >= 0:
                    self._found.append((tick, place))
        return self._found

    @property
    def readings(self) -> Mapping[str, float]:
        """Means by name; what is not known is not in it."""
        if self._readings is None:
            width = len(_AVERAGED)
            self._readings = _means(
                [tick.rows[at * width : (at + 1) * width] for tick, at in self._places()]
            )
        return self._readings

    def mean(self, name: str) -> float | None:
        """Return one of the readings, None where it is not known: of thousands few are wanted."""
        column = _PLACES.get(name)
        if column is None:
            return None
        if self._columns is not None:
            return self._columns.mean(column, self._pid)
        width = len(_AVERAGED)
        return _mean([tick.rows[at * width + column] for tick, at in self._places()])

    @property
    def blocked(self) -> float:
        """Share of ticks in state D."""
        return self._share("D")

    @property
    def runnable(self) -> float:
        """Share of ticks in state R."""
        return self._share("R")

    def _share(self, letter: str) -> float:
        if self._columns is not None:
            return self._columns.share(letter, self._pid)
        places = self._places()
        return sum([tick.states[at] == letter for tick, at in places]) / max(1, len(places))

    def _told(self) -> tuple[Mapping[str, float], float, float]:
        return self.readings, self.blocked, self.runnable

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessMeans):
            return NotImplemented
        return self._told() == other._told()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ProcessMeans{self._told()}"


def _row(readings: Mapping[str, Reading]) -> list[float]:
    if isinstance(readings, Lean):
        return readings.some(_AVERAGED)
    found = [readings.get(name) for name in _AVERAGED]
    return [nan if one is None or one.value is None else one.value for one in found]


def _means(rows: Sequence["array[float]"]) -> dict[str, float]:
    means: dict[str, float] = {}
    if not rows:
        return means
    for name, column in zip(_AVERAGED, zip(*rows, strict=True), strict=True):
        total = sum(column)
        if not isnan(total):  # the usual case: known in every tick
            means[name] = total / len(column)
            continue
        known = [value for value in column if not isnan(value)]
        if known:
            means[name] = sum(known) / len(known)
    return means
