"""Steady steps of a run beyond the window, reduced over its ranks: what a comparison is made of.

A row a step, by step index. At a thousand ranks the records themselves would cost megabytes a
minute; a row keeps what a comparison reads, and each rank's data wait, since which rank waits
longest is known only at the end.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import nan
from statistics import fmean, median

from gpuwatch.schema import PHASES, StepRecord
from gpuwatch.store.clocks import deciding, deciding_step_ns, is_on_device
from gpuwatch.store.packed import Packed, records_codec, step_indices
from gpuwatch.store.views import RankView, RunView
from gpuwatch.store.windows import is_steady

__all__ = ["FIELDS", "PAUSES", "Side", "Steps", "Track", "side_of"]

FIELDS = ("wall", "step", *PHASES, "comm_median", "transfer", "samples")
"""Of a row, in ms, NaN for n/a. `wall` is the step by the host's clock, `step` by the one that
decides; phases are means over the ranks that know them, `comm_median` and `transfer` the median
and the least of the ranks' exposed communication (n/a for one rank); `samples` is their sum."""

_PLACE = {name: i for i, name in enumerate(FIELDS)}

_KEPT_FLOATS = 2**19
_MOST_ROWS = 8192
_LEAST_ROWS = 320
"""Of a track: 2 MB of numbers and 8,192 steps at most, and never too few for a check of 256."""

_MOST_PENDING = 1024
"""Steps that some ranks have told and others not yet, before they are taken as they are."""

_AT_ONCE = 4096
"""Records that are made objects at the same time, a kilobyte each."""

_MOST_WAITING = 2**17
"""Records that wait for a rank that moves and is far behind, 200 bytes each in a large run."""

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


class _Fresh:
    """The new steps of one rank, which are made objects as they are taken."""

    __slots__ = ("_at", "_indices", "_records", "packed", "rank")

    def __init__(self, rank: int, records: Sequence[StepRecord], indices: Sequence[int]) -> None:
        self.rank = rank
        self.packed = isinstance(records, Packed)
        self._records = iter(records)
        self._indices = indices
        self._at = 0

    def up_to(self, index: int) -> Iterable[tuple[int, StepRecord]]:
        """Return the steps up to an index that were not returned yet, each with its own."""
        first, self._at = self._at, bisect_right(self._indices, index)
        found = islice(self._records, self._at - first)
        return zip(self._indices[first : self._at], found, strict=True)


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
        self._pending: dict[int, dict[int, StepRecord | bytes]] = {}
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
        windows = {r.rank: (r.window, step_indices(r.window)) for r in run.ranks if r.window}
        if not windows:
            return
        there = [rank for rank in run.ranks if rank.rank in windows]
        for rank in there:
            self._begin(rank.rank, rank.incarnation)
        for rank in there:
            self._pause(rank)
        known = {rank.rank: windows[rank.rank][1][-1] for rank in there}
        moving = [known[rank.rank] for rank in there if rank.state not in _STILL]
        until = min(moving) if moving else max(known.values())
        # A few steps of all ranks at a time: whole windows of a large run as objects are megabytes.
        fresh: list[_Fresh] = []
        new: set[int] = set()
        for rank in there:
            window, indices = windows[rank.rank]
            taken = max(self._taken.get(rank.rank, -1), self._settled)
            first = bisect_right(indices, taken)
            if first < len(indices):
                fresh.append(_Fresh(rank.rank, window[first:], indices[first:]))
                new.update(indices[first:])
        ready = sorted(index for index in new if index <= until)
        some = max(1, _AT_ONCE // len(windows))
        for end in ready[some - 1 :: some]:
            self._add_fresh(fresh, end)
            self.settle(end)
        self._add_fresh(fresh, until)
        self.settle(until)
        self._add_fresh(fresh, max(known.values()), waiting=True)
        if len(self._pending) * len(windows) > _MOST_WAITING:
            self._settle_older_half()

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
            records = _taken_steps(self._pending.pop(index))
            on_device = {is_on_device(record) for record in records.values()}
            if len(on_device) == 1:
                paused = index in self._pauses
                self._rows.append((index, on_device.pop(), paused, self._row(records)))
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
        for span in reversed(spans):
            if span.step <= self._settled:
                break
            if span.name in PAUSES:
                self._pauses.add(span.step)

    def _add_fresh(self, fresh: Iterable[_Fresh], until: int, *, waiting: bool = False) -> None:
        """Take what is new up to an index; of large runs as bytes if it has to wait."""
        for one in fresh:
            place = self._places[one.rank]
            for index, record in one.up_to(until):
                held = records_codec.encode(record) if waiting and one.packed else record
                self._pending.setdefault(index, {})[place] = held
                self._taken[one.rank] = index

    def _add(self, rank: int, records: Iterable[StepRecord]) -> None:
        place = self._places[rank]
        newest = self._taken.get(rank, -1)
        for record in records:
            newest = max(newest, record.index)
            if record.index > self._settled and is_steady(record):
                self._pending.setdefault(record.index, {})[place] = record
        self._taken[rank] = newest

    def _row(self, records: Mapping[int, StepRecord]) -> array[float]:
        phases = {place: deciding(record) for place, record in records.items()}
        row = array("f", [nan]) * (len(FIELDS) + len(self._places))
        row[0] = fmean([record.step_ns for record in records.values()]) / 1e6
        row[1] = fmean([deciding_step_ns(record) for record in records.values()]) / 1e6
        for name in PHASES:
            known = [v for part in phases.values() if (v := getattr(part, name)) is not None]
            if known:
                row[_PLACE[name]] = fmean(known) / 1e6
            if name == "comm" and len(known) > 1:
                row[_PLACE["comm_median"]] = median(known) / 1e6
                row[_PLACE["transfer"]] = min(known) / 1e6
        samples = [r.samples for r in records.values() if r.samples is not None]
        if samples:
            row[_PLACE["samples"]] = sum(samples)
        for place, part in phases.items():
            if part.data_wait is not None:
                row[len(FIELDS) + place] = part.data_wait / 1e6
        return row


def _taken_steps(held: Mapping[int, StepRecord | bytes]) -> dict[int, StepRecord]:
    """Return the ranks' steady records of a step, without those that the optimizer skipped."""
    found = {
        place: records_codec.decode(record) if isinstance(record, bytes) else record
        for place, record in held.items()
    }
    return {
        place: record
        for place, record in found.items()
        if is_steady(record) and "skipped" not in record.tags
    }


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
