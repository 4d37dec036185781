"""Steady steps of a run beyond the window, reduced over its ranks: what a comparison is made of.

A row a step, by step index. At a thousand ranks the records themselves would cost megabytes a
minute; a row keeps what a comparison reads, and each rank's data wait, since which rank waits
longest is known only at the end.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan
from statistics import median
from typing import cast

from msgspec.structs import astuple

from gpuwatch.schema import PHASES, PhasesNs, Span, StepRecord
from gpuwatch.store.packed import Packed
from gpuwatch.store.quick import QuickStep, quick_codec
from gpuwatch.store.rows import LANES, PHASES_LANE, SAMPLES_LANE, first_index, mold_of
from gpuwatch.store.views import RankView, RunView
from gpuwatch.store.windows import WINDOW_STEPS, is_steady

__all__ = ["FIELDS", "PAUSES", "Side", "Steps", "Track", "side_of"]

FIELDS = ("wall", "step", *PHASES, "comm_median", "transfer", "samples")
"""Of a row, in ms, NaN for n/a. `wall` is the step by the host's clock, `step` by the one that
decides; phases are means over the ranks that know them, `comm_median` and `transfer` the median
and the least of the ranks' exposed communication (n/a for one rank); `samples` is their sum."""

_PLACE = {name: i for i, name in enumerate(FIELDS)}
_COMM, _WAIT = PHASES.index("comm"), PHASES.index("data_wait")

_KEPT_FLOATS = 2**19
_MOST_ROWS = 8192
_LEAST_ROWS = 320
"""Of a track: 2 MB of numbers and 8,192 steps at most, and never too few for a check of 256."""

_MOST_PENDING = 1024
"""Steps that some ranks have told and others not yet, before they are taken as they are."""

_AT_ONCE = 2**14
"""Records that are taken at a time, 80 bytes each."""

_MOST_WAITING = 2**17
"""Records that wait for a rank that moves and is far behind, 80 bytes each."""

_STILL = ("silent", "gone", "ended")
"""States of a rank that nothing is waited for."""

PAUSES = ("checkpoint", "eval")
"""The step after one of these finds other queues and caches: it is left out, as they are. Where it
is every other step or more, as with a checkpoint a step, that is how this run goes: all stay."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Steady steps, oldest first: their indices, and a row (see `FIELDS`) for each.

    After the fields a row has the data wait of each rank in ms, in the order of `ranks`; rows from
    before a rank was known are shorter. All are by one `clock`, host or device; None without steps.
    """

    ranks: tuple[int, ...] = ()
    indices: tuple[int, ...] = ()
    rows: tuple[array[float], ...] = ()
    clock: str | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def column(self, name: str) -> list[float]:
        """Return one field of every row, NaN where it is n/a."""
        place = _PLACE[name]
        return [row[place] for row in self.rows]

    def waits(self, rank: int) -> list[float]:
        """Return the data wait of a rank in every row, NaN where it is n/a."""
        place = len(FIELDS) + self.ranks.index(rank)
        return [row[place] if place < len(row) else nan for row in self.rows]

    def after(self, index: int) -> Steps:
        """Return the steps of a greater index."""
        return self._where([i for i, at in enumerate(self.indices) if at > index])

    def last(self, number: int) -> Steps:
        """Return the newest so many."""
        return self._where(range(max(0, len(self) - number), len(self)))

    def first(self, number: int) -> Steps:
        """Return the oldest so many."""
        return self._where(range(min(number, len(self))))

    def of(self, indices: frozenset[int]) -> Steps:
        """Return the steps of these indices."""
        return self._where([i for i, at in enumerate(self.indices) if at in indices])

    def _where(self, places: Iterable[int]) -> Steps:
        kept = list(places)
        return Steps(
            self.ranks,
            tuple([self.indices[i] for i in kept]),
            tuple([self.rows[i] for i in kept]),
            self.clock,
        )


_Record = StepRecord | QuickStep


def _is_steady(record: _Record) -> bool:
    # A quick record has the tags of a whole one.
    return not record.tags or is_steady(cast("StepRecord", record))


_Told = tuple[int, _Record | tuple[int, ...]]
"""Of a step its index, and its record or the numbers that a `_Step` keeps of it."""


def _newest_index(window: Sequence[StepRecord]) -> int:
    if isinstance(window, Packed):
        first = first_index(window.newest)
        if first is not None:
            return first + window.newest[0] - 1
    return window[-1].index


def _told_after(window: Sequence[StepRecord], index: int, end: int) -> list[_Told]:
    """Return the steps of a window after one and up to another, oldest first.

    They are read from the end: mostly they are few, and a large run's are bytes.
    """
    if isinstance(window, Packed):
        rows = _rows_after(window, index, end)
        if rows is not None:
            return rows
    records: Sequence[_Record] = window
    if isinstance(window, Packed):
        records = cast("Sequence[_Record]", window.as_codec(quick_codec))
    found: list[_Told] = []
    for record in reversed(records):
        if record.index <= index:
            break
        if record.index <= end:
            found.append((record.index, record))
    return found[::-1]


def _rows_after(window: Packed[StepRecord], index: int, end: int) -> list[_Told] | None:
    """Return the same from rows as they are, None where a step is no plain row."""
    found: list[_Told] = []
    # There are no more of them than that; fewer where indices are missing.
    most = max(0, _newest_index(window) - index)
    for chunk, start, stop in reversed(list(window.latest(most))):
        mold, at = mold_of(chunk), first_index(chunk)
        if mold is None or at is None or mold.tagged:
            return None
        first = max(start, min(stop, index + 1 - at))
        last = min(stop, end + 1 - at)
        if last <= first:
            continue
        timed = int(mold.on_device)
        for place, row in enumerate(mold.lanes(chunk, first, last), at + first):
            lanes: Sequence[int] = row[:LANES]
            if mold.unknown:
                lanes = [_UNKNOWN if lane in mold.unknown else n for lane, n in enumerate(lanes)]
            found.append((place, (timed, lanes[0], lanes[SAMPLES_LANE], *lanes[PHASES_LANE:])))
    return found


_UNKNOWN = -1
"""For a number that is n/a."""

_WIDTH = 3 + len(PHASES)


class _Step:
    """What the ranks have told of one step: `_WIDTH` numbers a rank, as whole ns.

    They are whether the device's clock decides (0, 1), the step by the host's clock, samples, and
    the phases by the clock that decides. Nothing else is kept of a record.
    """

    __slots__ = ("_numbers", "_places")

    def __init__(self) -> None:
        self._places = array("I")
        self._numbers = array("q")

    def tell(self, place: int, record: _Record | tuple[int, ...]) -> None:
        """Take a steady record of a rank; that of a step which the optimizer skipped is none."""
        if isinstance(record, tuple):
            self._places.append(place)
            self._numbers.extend(record)
            return
        if record.tags and "skipped" in record.tags:
            return
        timed = record.clock == "device" and record.device is not None
        phases = record.device if timed else record.host
        parts = phases if isinstance(phases, tuple) else astuple(cast("PhasesNs", phases))
        self._places.append(place)
        try:
            self._numbers.fromlist([timed, record.step_ns, cast("int", record.samples), *parts])
        except TypeError:
            numbers = (record.samples, *parts)
            known = [_UNKNOWN if number is None else number for number in numbers]
            self._numbers.fromlist([timed, record.step_ns, *known])

    def forget(self, place: int) -> None:
        """Leave out what a rank has told."""
        if place in self._places:
            at = self._places.index(place)
            del self._places[at]
            del self._numbers[at * _WIDTH : (at + 1) * _WIDTH]

    @property
    def on_device(self) -> bool | None:
        """Whether the device's clock decides; None without ranks, and where they differ in that."""
        clocks = set(self._numbers[0::_WIDTH])
        return bool(clocks.pop()) if len(clocks) == 1 else None

    def row(self, ranks: int) -> array[float]:
        """Return the row of the step, of a run of so many ranks; see `Steps`."""
        first = len(FIELDS)
        row = array("f", [nan]) * (first + ranks)
        columns = [self._numbers[i::_WIDTH] for i in range(_WIDTH)]
        timed, step_ns, samples, *phases = columns
        known = [_known(column) for column in phases]
        row[0] = row[1] = _mean_ms(step_ns)
        if timed[0]:
            # The mean of sums: whole ns may be added up in any order.
            row[1] = sum(map(sum, known)) / len(timed) / 1e6
        for name, column in zip(PHASES, known, strict=True):
            if column:
                row[_PLACE[name]] = _mean_ms(column)
        if len(known[_COMM]) > 1:
            row[_PLACE["comm_median"]] = median(known[_COMM]) / 1e6
            row[_PLACE["transfer"]] = min(known[_COMM]) / 1e6
        if told := _known(samples):
            row[_PLACE["samples"]] = sum(told)
        for place, ns in zip(self._places, phases[_WAIT], strict=True):
            if ns != _UNKNOWN:
                row[first + place] = ns / 1e6
        return row


def _known(column: array[int]) -> array[int]:
    if _UNKNOWN not in column:
        return column
    return array("q", [value for value in column if value != _UNKNOWN])


def _mean_ms(column: Sequence[int]) -> float:
    return sum(column) / len(column) / 1e6


class Track:
    """Collects the steps of one run, from its views or from its records; bounded.

    A step is taken when every rank that still moves has told it. A rank that restarts begins
    anew, and so does the track; `generation` counts that. Not thread-safe.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._places: dict[int, int] = {}
        self._incarnations: dict[int, str] = {}
        self._former: set[tuple[int, str]] = set()
        self._clear()

    def _clear(self) -> None:
        self._settled = -1
        self._taken: dict[int, int] = {}
        self._pauses: set[int] = set()
        self._pending: dict[int, _Step] = {}
        self._spans: dict[int, Sequence[Span]] = {}
        self._rows: deque[tuple[int, bool, bool, array[float]]] = deque()
        self._steps: Steps | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def last_index(self) -> int:
        """The newest step that was taken, -1 without any."""
        return self._settled

    def take(self, run: RunView) -> None:
        """Take what is new in the windows of a run; call it at least once a window."""
        there = [rank for rank in run.ranks if rank.window]
        if not there:
            return
        for rank in there:
            self._begin(rank.rank, rank.incarnation)
        newest = [_newest_index(rank.window) for rank in there]
        still = [rank.state in _STILL for rank in there]
        moving = [index for index, stands in zip(newest, still, strict=True) if not stands]
        until = min(moving) if moving else max(newest)
        for rank in there:
            self._pause(rank)
        for end in self._bands(max(newest), len(there)):
            for rank, last in zip(there, newest, strict=True):
                taken = max(self._taken.get(rank.rank, -1), self._settled)
                if last > taken:
                    self._tell(rank.rank, _told_after(rank.window, taken, end))
            self.settle(min(end, until))
        if len(self._pending) * len(there) > _MOST_WAITING:
            self._settle_older_half()

    def _bands(self, newest: int, ranks: int) -> Iterable[int]:
        """Return up to which steps to go at a time: windows of a large run are megabytes."""
        some = max(1, _AT_ONCE // ranks)
        return (*range(max(self._settled, newest - WINDOW_STEPS) + some, newest, some), newest)

    def _settle_older_half(self) -> None:
        self.settle(sorted(self._pending)[len(self._pending) // 2])

    def add(
        self,
        rank: int,
        incarnation: str,
        records: Iterable[StepRecord],
        pauses: Iterable[int] = (),
    ) -> None:
        """Take records of a rank as they come; `pauses` are indices of steps after a pause.

        Steps are settled by `settle`, or when many wait for it.
        """
        if not self._begin(rank, incarnation):
            return
        self._pauses.update(pauses)
        self._add(rank, records)
        if len(self._pending) > _MOST_PENDING:
            self._settle_older_half()

    def settle(self, until: int | None = None) -> None:
        """Take the steps up to that index (all) as they are known now."""
        ready = sorted(i for i in self._pending if until is None or i <= until)
        for index in ready:
            step = self._pending.pop(index)
            on_device = step.on_device
            if on_device is not None:
                row = step.row(len(self._places))
                self._rows.append((index, on_device, index in self._pauses, row))
                self._steps = None
        if ready:
            self._settled = max(self._settled, ready[-1])
            self._pauses = {i for i in self._pauses if i > self._settled}
            width = len(FIELDS) + len(self._places)
            kept = max(_LEAST_ROWS, min(_MOST_ROWS, _KEPT_FLOATS // width))
            while len(self._rows) > kept:
                self._rows.popleft()

    def steps(self) -> Steps:
        """Return what was taken, by the clock of the newest step."""
        if self._steps is None:
            newest = self._rows[-1][1] if self._rows else False
            steady = sum(paused for _, _, paused, _ in self._rows) * 2 < len(self._rows)
            rows = [
                (index, row)
                for index, on_device, paused, row in self._rows
                if on_device is newest and not (steady and paused)
            ]
            self._steps = Steps(
                tuple(self._places),
                tuple([index for index, _ in rows]),
                tuple([row for _, row in rows]),
                ("device" if newest else "host") if rows else None,
            )
        return self._steps

    def _begin(self, rank: int, incarnation: str) -> bool:
        """Note whose steps these are; False for those of a process that has been replaced."""
        before = self._incarnations.get(rank)
        if before != incarnation:
            if (rank, incarnation) in self._former:
                return False
            if before is not None:
                self._former.add((rank, before))
                self.generation += 1
                self._clear()
            self._incarnations[rank] = incarnation
        if rank not in self._places:
            self._places[rank] = len(self._places)
            self._steps = None
        return True

    def _pause(self, rank: RankView) -> None:
        spans = rank.past.spans
        if not spans or spans is self._spans.get(rank.rank):
            return
        self._spans[rank.rank] = spans
        for span in reversed(spans):
            if span.step <= self._settled:
                break
            if span.name in PAUSES:
                self._pauses.add(span.step)

    def _add(self, rank: int, records: Iterable[StepRecord]) -> None:
        place = self._places[rank]
        for record in records:
            taken = self._taken.get(rank, -1)
            if record.index <= taken and record.index in self._pending and _is_steady(record):
                self._pending[record.index].forget(place)  # told once more
            if record.index > self._settled and _is_steady(record):
                self._tell(rank, ((record.index, record),))
            self._taken[rank] = max(taken, record.index)

    def _tell(self, rank: int, told: Iterable[_Told]) -> None:
        """Take steady steps of a rank that are not settled yet, in their order."""
        place = self._places[rank]
        pending = self._pending
        for index, record in told:
            step = pending.get(index)
            if step is None:
                step = pending[index] = _Step()
            step.tell(place, record)
            self._taken[rank] = index


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: a run as it was last seen, its steps, and where it is from.

    `source` is saved, live, ended or replay, `name` what a person knows it by.
    """

    name: str
    source: str
    run: RunView
    steps: Steps

    @property
    def simulated(self) -> bool:
        """Whether nothing about it was measured."""
        return self.run.simulated

    @property
    def clock(self) -> str | None:
        """The clock that its steps are by, None without steps or where its ranks differ."""
        clocks = {rank.clock for rank in self.run.ranks if rank.window}
        return clocks.pop() if len(clocks) == 1 else None


def side_of(run: RunView, name: str = "", track: Track | None = None) -> Side:
    """Return a run as a side: by its track where there is one, else by its windows alone."""
    if track is None or not len(track):
        track = Track()
        track.take(run)
        track.settle()
    source = "ended" if run.state == "ended" else "live"
    return Side(name or run.name or run.run, source, run, track.steps())
