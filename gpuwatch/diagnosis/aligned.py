"""The steps that all ranks of a run have in their windows, side by side."""

import statistics
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import sub

from gpuwatch.diagnosis.steps import OfStep, Row, Steps, read_phases
from gpuwatch.diagnosis.types import Abstain, RunPicture
from gpuwatch.schema import Loader, StepRecord
from gpuwatch.store.views import RankView

__all__ = [
    "MIN_STEPS",
    "Aligned",
    "align",
    "clock_missing",
    "counted",
    "loader_of",
    "mad_ms",
    "mean_ms",
    "median_of_others",
    "ranks_text",
    "too_few",
    "windows",
]


def mean_ms(values: Sequence[float]) -> float:
    """Mean of at least one value."""
    return statistics.fmean(values)


def mad_ms(values: Sequence[float]) -> float:
    """Median absolute deviation: scatter that a few odd steps do not move."""
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)


def counted(count: int, noun: str) -> str:
    """Say how many as a person would: `1 worker`, `4 workers`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks as a person would: `rank 3`, `ranks 0-7, 9`."""
    parts: list[str] = []
    start = previous = None
    for rank in [*sorted(ranks), None]:
        if start is None:
            start = previous = rank
        elif previous is not None and rank == previous + 1:
            previous = rank
        else:
            parts.append(f"{start}" if start == previous else f"{start}-{previous}")
            start = previous = rank
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(parts)}"


@dataclass(frozen=True)
class Aligned:
    """Steady steps by index: what is of every step is [rank][step], or [step][rank] in columns.

    Synchronous training keeps ranks in step, so the index aligns them without any clock. All times
    are by the clock that decides. A phase that is n/a counts as absent (0) in sums; `comm_known`
    says whether exposed communication was measured at all.
    """

    ranks: tuple[RankView, ...]
    indices: Sequence[int]
    records: tuple[Sequence[StepRecord], ...]
    rows: tuple[Steps, ...]
    loaders: tuple[str, ...]
    seen: dict[int, OfStep] = field(default_factory=dict, compare=False, repr=False)
    """What is known of steps from the picture before, by index: they are as they were told."""

    @property
    def count(self) -> int:
        """Number of aligned steps."""
        return len(self.indices)

    def phase_ns(self, name: str) -> "list[array[int]]":
        """Return one phase, [rank][step].

        Data wait on the device's clock is the part of the device stall that passes in a fetch: what
        the host waits while the device is busy costs nothing, and is not in it.
        """
        return [self._phases_of(row)[name] for row in range(len(self.records))]

    def _phases_of(self, row: int) -> "Mapping[str, array[int]]":
        """Return all phases of a rank's steps, in ns: most runs are judged without them."""
        found = self._phases.get(row)
        if found is None:
            found = self._phases[row] = read_phases(self.records[row])
        return found

    @cached_property
    def _phases(self) -> "dict[int, Mapping[str, array[int]]]":
        return {}

    @cached_property
    def step_ns(self) -> "list[array[int]]":
        """Step, [rank][step]."""
        return [row.step for row in self.rows]

    @cached_property
    def own_ns(self) -> "list[array[int]]":
        """Step without exposed communication, [rank][step]."""
        return [row.own for row in self.rows]

    @cached_property
    def own_columns_ns(self) -> list[tuple[int, ...]]:
        """Step without exposed communication, [step][rank]."""
        return list(zip(*self.own_ns, strict=True))

    @cached_property
    def own_sorted_ns(self) -> list[list[int]]:
        """The same, of each step the shortest first."""
        return list(map(sorted, self.own_columns_ns))

    @cached_property
    def _of_steps(self) -> list[OfStep]:
        seen = self.seen
        new = [place for place, index in enumerate(self.indices) if index not in seen]
        if new:
            found = _of_steps([row.at(new) for row in self.rows])
            seen.update(zip([self.indices[place] for place in new], found, strict=True))
        kept = [seen[index] for index in self.indices]
        if len(seen) > len(kept):
            seen.clear()
            seen.update(zip(self.indices, kept, strict=True))
        return kept

    @cached_property
    def transfer_ns(self) -> list[int]:
        """Minimum over ranks of exposed communication, [step]: what nobody's lateness explains."""
        return [step.transfer_ns for step in self._of_steps]

    @cached_property
    def without_wait_ms(self) -> list[float]:
        """The step if nobody waited for data, [step]: the slowest own time, plus transfer."""
        return [(step.slowest_ns + step.transfer_ns) / 1e6 for step in self._of_steps]

    @cached_property
    def last_lags_ms(self) -> list[float]:
        """By how much the last of at least two ranks is behind the median of the others, [step]."""
        return [step.last_lag_ms for step in self._of_steps]

    def without_ms(self, parts_ns: Sequence[Sequence[int]]) -> list[float]:
        """Return the step without a part of own time that is given as [rank][step]; [step]."""
        return [
            (max(map(sub, owns, parts)) + transfer) / 1e6
            for owns, parts, transfer in zip(
                self.own_columns_ns, zip(*parts_ns, strict=True), self.transfer_ns, strict=True
            )
        ]

    @cached_property
    def mean_step_ms(self) -> float:
        """Mean step over all ranks and steps."""
        return sum(map(sum, self.step_ns)) / (self.count * len(self.rows)) / 1e6

    @cached_property
    def mean_own_ms(self) -> list[float]:
        """Mean step without exposed communication, [rank]."""
        return self._means_ms(self.own_ns)

    @cached_property
    def mean_transfer_ms(self) -> float:
        """Mean transfer."""
        return sum(self.transfer_ns) / self.count / 1e6

    @cached_property
    def mean_wait_ms(self) -> list[float]:
        """Mean data wait, [rank]."""
        return self._means_ms([row.wait for row in self.rows])

    @cached_property
    def mean_comm_ms(self) -> list[float]:
        """Mean exposed communication, [rank]."""
        sums = zip(map(sum, self.step_ns), map(sum, self.own_ns), strict=True)
        return [(step - own) / self.count / 1e6 for step, own in sums]

    @cached_property
    def mean_other_ms(self) -> list[float]:
        """Mean of what is in no other phase, [rank]."""
        return self._means_ms([row.other for row in self.rows])

    def mean_phase_ms(self, name: str) -> list[float]:
        """Return the mean of a phase, [rank].

        Where all steps of a rank's window are among these, the picture has it already.
        """
        return [
            rank.phases_ms.get(name) or 0.0
            if len(rank.window) == self.count
            else sum(self._phases_of(row)[name]) / self.count / 1e6
            for row, rank in enumerate(self.ranks)
        ]

    def _means_ms(self, rows_ns: Sequence[Sequence[int]]) -> list[float]:
        return [sum(row) / self.count / 1e6 for row in rows_ns]

    def step_ms(self, row: int) -> float:
        """Return the mean step of a rank."""
        return sum(self.step_ns[row]) / self.count / 1e6

    def batches(self, row: int) -> float:
        """Return the mean number of batches in a step of a rank."""
        return sum(self.rows[row].batches) / self.count

    def wait_held(self, row: int, share: float) -> float:
        """Return in what share of a rank's steps the data wait is at least so much of the step."""
        waits, steps = self.rows[row].wait, self.step_ns[row]
        if min(waits) >= share * max(steps):
            return 1.0
        pairs = zip(waits, steps, strict=True)
        return sum([wait >= share * step for wait, step in pairs]) / self.count

    def host_wait_ms(self, row: int) -> float:
        """Return the mean time of a rank's host in fetching, whatever the device did meanwhile."""
        return sum([r.host.data_wait or 0 for r in self.records[row]]) / self.count / 1e6

    def loader(self, row: int) -> Loader | None:
        """Return the loader that a rank's newest step was fed by, None where it is not known."""
        return loader_of(self.ranks[row], self.loaders[row])

    @cached_property
    def comm_known(self) -> bool:
        """Whether every rank measured exposed communication in each of the steps."""
        return all(row.comm_known for row in self.rows)


def _of_steps(rows: Sequence[Steps]) -> list[OfStep]:
    """Return what there is to say of steps over all ranks, each of which has them all."""
    owns = list(zip(*[row.own for row in rows], strict=True))
    waits = zip(*[row.wait for row in rows], strict=True)
    comms = zip(*[map(sub, row.step, row.own) for row in rows], strict=True)
    found = []
    for own, wait, comm in zip(owns, waits, comms, strict=True):
        lag_ms = 0.0
        if len(own) > 1:
            ordered = sorted(own)
            lag_ms = (ordered[-1] - median_of_others(ordered, len(ordered) - 1)) / 1e6
        found.append(OfStep(min(comm), max(map(sub, own, wait)), lag_ms))
    return found


def loader_of(rank: RankView, key: str) -> Loader | None:
    """Return the loader of that key as the rank's hello describes it."""
    loaders = rank.hello.loaders if rank.hello is not None else ()
    return next((loader for loader in loaders if loader.key == key), None)


def median_of_others(ordered: Sequence[int], place: int) -> float:
    """Return the median of at least two sorted numbers without the one at a place."""
    middle = (len(ordered) - 1) // 2
    upper = ordered[middle + (middle >= place)]
    if len(ordered) % 2 == 0:
        return upper
    return (ordered[middle - 1 + (middle - 1 >= place)] + upper) / 2


MIN_STEPS = 8
"""Steady steps that all ranks share before anything is said: two seconds of steps of 0.25 s."""


def too_few(kind: str, aligned: "Aligned | None") -> Abstain | None:
    """Return the abstention of a rule that has seen too few steps, None if there are enough."""
    count = 0 if aligned is None else aligned.count
    if count >= MIN_STEPS:
        return None
    return Abstain(kind, f"{MIN_STEPS} steady steps that all ranks share; {count} so far")


def clock_missing(kind: str, aligned: Aligned) -> Abstain | None:
    """Return the abstention of a rule where a GPU was not timed, None where every clock fits.

    On a GPU the host runs ahead: its times say where it waited, not what took long.
    """
    for rank in aligned.ranks:
        if rank.hello is not None and rank.hello.device != "cpu" and rank.clock != "device":
            return Abstain(kind, "device timings: on a GPU the host clock runs ahead")
    return None


def windows(picture: RunPicture) -> Mapping[int, Row]:
    """Return what is known of the window of each rank that has steps, by its number."""
    return picture.once(
        "windows", lambda: picture.reader.read([r for r in picture.run.ranks if r.window])
    )


def align(picture: RunPicture) -> Aligned | None:
    """Return the steady steps that every rank of the run has, None if there is none."""
    return picture.once("aligned", lambda: _align(picture))


def _align(picture: RunPicture) -> Aligned | None:
    run = picture.run
    over = run.state == "ended"  # then its windows are all there is
    ranks = tuple(
        [r for r in run.ranks if r.window and (over or r.state not in {"gone", "silent"})]
    )
    if not ranks:
        return None
    known = [windows(picture)[r.rank] for r in ranks]
    each = [row.indices for row in known]
    if all(isinstance(indices, range) for indices in each):
        shared: Sequence[int] = range(max([i[0] for i in each]), min([i[-1] for i in each]) + 1)
        common: set[int] = set()
    else:
        common = set.intersection(*map(set, each))
        shared = sorted(common)
    if not shared:
        return None
    records: list[Sequence[StepRecord]] = []
    rows: list[Steps] = []
    for rank, row in zip(ranks, known, strict=True):
        window, indices, steps = rank.window, row.indices, row.steps
        if len(window) == len(shared):
            records.append(window)
            rows.append(steps)
        elif isinstance(shared, range):
            start = shared[0] - indices[0]
            records.append(window[start : start + len(shared)])
            rows.append(steps.between(start, start + len(shared)))
        else:
            places = [place for place, index in enumerate(indices) if index in common]
            records.append([window[place] for place in places])
            rows.append(steps.at(places))
    loaders = tuple([row.loader for row in known])
    seen = picture.reader.seen(tuple([(rank.rank, rank.incarnation) for rank in ranks]))
    return Aligned(ranks, shared, tuple(records), tuple(rows), loaders, seen)
