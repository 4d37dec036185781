"""What the rules read of every step of a rank, and only once of each step.

Sums are of whole ns: they are the same in whatever order and however often steps were added up.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, sub
from typing import NamedTuple

from msgspec.structs import astuple

from gpuwatch.schema import PHASES, StepRecord
from gpuwatch.store.clocks import deciding, is_on_device
from gpuwatch.store.views import RankView

__all__ = ["Reader", "Steps", "read_steps"]

_WIDTH = len(PHASES)
_PLACES = {name: place for place, name in enumerate(PHASES)}
_COMM = _PLACES["comm"]

_NO_COMM = 1
_NO_WAIT = 2
"""Bits of `Steps.unknown`."""

_device_of = attrgetter("device")
_step_of = attrgetter("step_ns")
_batches_of = attrgetter("batches")


class Steps(NamedTuple):
    """Steps of one rank, oldest first: a number a step in each array, durations in ns.

    Times are by the clock that decides; a phase that is n/a counts as 0. `own` is the step without
    exposed communication. As arrays they take a quarter of what objects would.
    """

    step: "array[int]"
    own: "array[int]"
    phases: "array[int]"
    """All phases of a step, in the order of `PHASES`, then those of the next one."""

    unknown: "array[int]"
    """Whether exposed communication or data wait is n/a, see `comm_known` and `known_waits`."""

    batches: "array[int]"
    gc: "array[int]"

    def phase(self, name: str) -> "array[int]":
        """Return one phase."""
        return self.phases[_PLACES[name] :: _WIDTH]

    @property
    def comm_known(self) -> bool:
        """Whether exposed communication is known in every step."""
        return not any(self.unknown) or not any(bits & _NO_COMM for bits in self.unknown)

    @property
    def known_waits(self) -> Sequence[int]:
        """The data wait of the steps in which it is known."""
        waits = self.phase("data_wait")
        if not any(self.unknown):
            return waits
        pairs = zip(waits, self.unknown, strict=True)
        return [wait for wait, bits in pairs if not bits & _NO_WAIT]

    def between(self, first: int, end: int) -> "Steps":
        """Return the steps from one place up to another."""
        return Steps(
            self.step[first:end],
            self.own[first:end],
            self.phases[first * _WIDTH : end * _WIDTH],
            self.unknown[first:end],
            self.batches[first:end],
            self.gc[first:end],
        )

    def at(self, places: Sequence[int]) -> "Steps":
        """Return the steps at these places, of which there is one at least, in rising order."""
        first, last = places[0], places[-1]
        if last - first == len(places) - 1:
            return self.between(first, last + 1)
        parts = [self.between(place, place + 1) for place in places]
        return Steps(
            *[
                array(column.typecode, chain(*columns))
                for column, columns in zip(self, zip(*parts, strict=True), strict=True)
            ]
        )

    def followed_by(self, other: "Steps") -> "Steps":
        """Return these steps and others after them."""
        return Steps(
            self.step + other.step,
            self.own + other.own,
            self.phases + other.phases,
            self.unknown + other.unknown,
            self.batches + other.batches,
            self.gc + other.gc,
        )


def read_steps(records: Iterable[StepRecord]) -> Steps:
    """Read steps, of one rank or of several after each other."""
    found = tuple(records)
    timed = any(map(_device_of, found))
    # Without device times, by far the usual case where time matters here, the host's decide.
    parts = list(map(deciding, found)) if timed else [r.host for r in found]
    unknown: bytes | list[int] = bytes(len(found))
    numbers = list(chain.from_iterable(map(astuple, parts)))
    if None in numbers:
        numbers = [ns or 0 for ns in numbers]
        unknown = [
            (_NO_COMM if part.comm is None else 0) | (_NO_WAIT if part.data_wait is None else 0)
            for part in parts
        ]
    phases = array("q", numbers)
    step = array("q", map(_step_of, found))
    if timed:
        sums = map(sum, zip(*[iter(phases)] * _WIDTH, strict=True))
        step = array(
            "q",
            [ns if is_on_device(r) else r.step_ns for r, ns in zip(found, sums, strict=True)],
        )
    return Steps(
        step,
        array("q", map(sub, step, phases[_COMM::_WIDTH])),
        phases,
        array("b", unknown),
        array("q", map(_batches_of, found)),
        array("q", [r.gc_ns or 0 for r in found]),
    )


class Reader:
    """Reads windows: of each rank what is new since the last time.

    It keeps what it read of windows that are objects, 6 kB a rank, which those of `PACK_ABOVE`
    ranks at most are. Of windows that are bytes it keeps nothing: there are many of them, and most
    of their steps are new at the next pass. What it returns does not depend on what it kept.
    """

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows: dict[int, tuple[tuple[StepRecord, ...], Steps]] = {}

    def read(self, ranks: Iterable[RankView]) -> list[Steps]:
        """Return the steps of each rank's window."""
        before, self._rows = self._rows, {}
        found: list[Steps] = []
        new: list[StepRecord] = []
        unread: list[tuple[int, RankView, tuple[StepRecord, ...], Steps]] = []
        for rank in ranks:
            window = rank.window
            if not isinstance(window, tuple):
                found.append(read_steps(window))
                continue
            known = before.get(rank.rank)
            kept = _shared(window, *known) if known is not None else _NONE
            if len(kept.step) < len(window):
                unread.append((len(found), rank, window, kept))
                new += window[len(kept.step) :]
            else:
                self._rows[rank.rank] = window, kept
            found.append(kept)
        if not unread:
            return found
        # Those of all ranks in one go: a call costs as much as reading some steps.
        read = read_steps(new)
        start = 0
        for place, rank, window, kept in unread:
            end = start + len(window) - len(kept.step)
            found[place] = kept.followed_by(read.between(start, end))
            self._rows[rank.rank] = window, found[place]
            start = end
        return found

    def forget(self) -> None:
        """Keep nothing any more."""
        self._rows.clear()


_NONE = read_steps(())


def _shared(window: tuple[StepRecord, ...], before: tuple[StepRecord, ...], steps: Steps) -> Steps:
    """Return what a window has in common with the one before, if it goes on from that."""
    if window is before:
        return steps
    oldest = window[0]
    place = next((at for at, record in enumerate(before) if record is oldest), len(before))
    # Items of tuples are compared by identity first: these are the same objects.
    if before[place:] != window[: len(before) - place]:
        return _NONE
    return steps.between(place, len(before))
