"""The steps that all ranks of a run have in their windows, side by side."""

import statistics
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from gpuwatch.diagnosis.types import Abstain, RunPicture
from gpuwatch.schema import PHASES, StepRecord
from gpuwatch.store.clocks import deciding, deciding_step_ns
from gpuwatch.store.packed import step_indices
from gpuwatch.store.views import RankView, RunView

__all__ = [
    "MIN_STEPS",
    "Aligned",
    "align",
    "clock_missing",
    "counted",
    "mad_ms",
    "mean_ms",
    "ranks_text",
    "too_few",
]

_OF = {name: attrgetter(name) for name in PHASES}


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


class _Columns(NamedTuple):
    """Steps and phases in ms, [rank][step]; whether all of `comm` is known; what else counts."""

    steps_ms: "list[array[float]]"
    phases_ms: "Mapping[str, list[array[float]]]"
    comm_known: bool
    batches: "list[float]"
    gc_ms: "list[array[float]]"


@dataclass(frozen=True)
class Aligned:
    """Steady steps by index: every list is [rank][step], in ms.

    Synchronous training keeps ranks in step, so the index aligns them without any clock. All times
    are by the clock that decides. A phase that is n/a counts as absent (0) in sums; `comm_known`
    says whether exposed communication was measured at all.
    """

    ranks: tuple[RankView, ...]
    indices: tuple[int, ...]
    records: tuple[Sequence[StepRecord], ...]

    @property
    def count(self) -> int:
        """Number of aligned steps."""
        return len(self.indices)

    @cached_property
    def _columns(self) -> "_Columns":
        """What the rules ask of every record, [rank][step].

        All in one go: of a large run each look at a record makes it anew, and as numbers in arrays
        they take a quarter of what they would as objects.
        """
        steps: list[array[float]] = []
        phases: dict[str, list[array[float]]] = {name: [] for name in PHASES}
        known = True
        batches: list[float] = []
        collecting: list[array[float]] = []
        for row in self.records:
            found = tuple(row)
            batches.append(mean_ms([r.batches for r in found]) if found else 1.0)
            collecting.append(array("d", [(r.gc_ns or 0) / 1e6 for r in found]))
            # A step without device times is by far the usual one where time matters here.
            parts = [r.host if r.device is None else deciding(r) for r in found]
            whole = [r.step_ns if r.device is None else deciding_step_ns(r) for r in found]
            steps.append(array("d", [ns / 1e6 for ns in whole]))
            for name, column in phases.items():
                values = list(map(_OF[name], parts))
                column.append(array("d", [(ns or 0) / 1e6 for ns in values]))
                known = known and (name != "comm" or None not in values)
        return _Columns(steps, phases, known, batches, collecting)

    def phase_ms(self, name: str) -> "list[array[float]]":
        """Return one phase, [rank][step]."""
        return self._columns.phases_ms[name]

    @property
    def step_ms(self) -> "list[array[float]]":
        """Step, [rank][step]."""
        return self._columns.steps_ms

    @property
    def comm_ms(self) -> "list[array[float]]":
        """Exposed communication, [rank][step]."""
        return self.phase_ms("comm")

    @property
    def data_wait_ms(self) -> "list[array[float]]":
        """Data wait, [rank][step].

        On the device's clock it is the part of the device stall that passes in a fetch: what the
        host waits while the device is busy costs nothing, and is not in it.
        """
        return self.phase_ms("data_wait")

    @property
    def batches(self) -> "list[float]":
        """Mean number of batches a step, [rank]."""
        return self._columns.batches

    @property
    def gc_ms(self) -> "list[array[float]]":
        """Pauses of the garbage collector, [rank][step]; 0 where none is known."""
        return self._columns.gc_ms

    def host_wait_ms(self, row: int) -> list[float]:
        """Time of a rank's host in fetching, [step], whatever the device did meanwhile."""
        return [(r.host.data_wait or 0) / 1e6 for r in self.records[row]]

    @cached_property
    def own_ms(self) -> "list[array[float]]":
        """Step without exposed communication, [rank][step]."""
        return [
            array("d", [step - comm for step, comm in zip(steps, comms, strict=True)])
            for steps, comms in zip(self.step_ms, self.comm_ms, strict=True)
        ]

    @cached_property
    def own_columns_ms(self) -> list[tuple[float, ...]]:
        """Step without exposed communication, [step][rank]."""
        return list(zip(*self.own_ms, strict=True))

    @cached_property
    def transfer_ms(self) -> list[float]:
        """Minimum over ranks of exposed communication, [step]: what nobody's lateness explains."""
        return [min(column) for column in zip(*self.comm_ms, strict=True)]

    @cached_property
    def without_wait_ms(self) -> list[float]:
        """The step if nobody waited for data, [step]: the slowest own time, plus transfer."""
        return [
            max(own - wait for own, wait in zip(owns, waits, strict=True)) + transfer
            for owns, waits, transfer in zip(
                self.own_columns_ms,
                zip(*self.data_wait_ms, strict=True),
                self.transfer_ms,
                strict=True,
            )
        ]

    @cached_property
    def mean_step_ms(self) -> float:
        """Mean step over all ranks and steps."""
        return mean_ms([value for row in self.step_ms for value in row])

    @cached_property
    def comm_known(self) -> bool:
        """Whether every rank measured exposed communication in each of the steps."""
        return self._columns.comm_known


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


def align(picture: RunPicture) -> Aligned | None:
    """Return the steady steps that every rank of the run has, None if there is none."""
    return picture.once("aligned", lambda: _align(picture.run))


def _align(run: RunView) -> Aligned | None:
    over = run.state == "ended"  # then its windows are all there is
    ranks = tuple(r for r in run.ranks if r.window and (over or r.state not in {"gone", "silent"}))
    if not ranks:
        return None
    each = [step_indices(r.window) for r in ranks]
    if all(isinstance(indices, range) for indices in each):
        first, end = max(i[0] for i in each), min(i[-1] for i in each) + 1
        shared: Sequence[int] = range(first, end)
        records: tuple[Sequence[StepRecord], ...] = tuple(
            r.window
            if len(r.window) == len(shared)
            else r.window[first - indices[0] : end - indices[0]]
            for r, indices in zip(ranks, each, strict=True)
        )
    else:
        common = set.intersection(*map(set, each))
        shared = sorted(common)
        records = tuple(
            r.window
            if len(r.window) == len(shared)
            else tuple(s for s in r.window if s.index in common)
            for r in ranks
        )
    return Aligned(ranks, tuple(shared), records) if shared else None
