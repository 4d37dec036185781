"""What is compared in view 5: the two sides that are chosen, and recordings on their way in."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from gpuwatch.store.views import RunView
from gpuwatch.tui.tracks import Tracks

if TYPE_CHECKING:
    from gpuwatch.store.compare import Comparison, Driver
    from gpuwatch.store.track import Side
    from gpuwatch.store.views import NodeView

__all__ = ["Chosen", "Compared", "Recordings", "Sides", "Source"]

_ANEW_S = 2.0
"""A comparison of thousands of steps takes tens of ms: it is made this often at most."""


class Recordings(Protocol):
    """Where recordings come from."""

    given: tuple[str, ...]
    """Paths that the person named on the command line."""

    def paths(self) -> tuple[str, ...]:
        """Return the recordings that can be compared, those that were given first."""

    def load(self, path: str) -> Side:
        """Read one; takes as long as that takes.

        Raises:
            GpuwatchError: it cannot be read, or holds no run; one sentence.
        """

    def driver(self, path: str) -> Driver:
        """Return the driver below the run of one that was read."""


@dataclass(frozen=True, slots=True)
class Source:
    """Something that can be a side: a recording by its path, or a run by its id.

    `kind` is saved, live, ended, gone (no rank of it lives) or replay.
    """

    kind: str
    key: str
    name: str
    detail: str = ""
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """One side: what was chosen, None for nothing, and how far it is.

    `side` is None while a recording is read, and where it could not be: `problem` says why then.
    """

    source: Source | None = None
    side: Side | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Compared:
    """Both sides, and what differs between them, None as long as one is missing.

    The runs of sides that were compared are without their ranks.
    """

    before: Chosen
    after: Chosen
    comparison: Comparison | None = None


class Sides:
    """The choice of A and B. Recordings are read in a thread of their own, and kept.

    Without a choice B is the run on the screen, and A the run whose window was frozen to check a
    change, where that is another one; else nothing. Where two recordings or more were given on the
    command line, A and B are the first two.
    """

    def __init__(self, recordings: Recordings | None) -> None:
        self._recordings = recordings
        self._loaded: dict[str, Side | str] = {}
        self._loading: set[str] = set()
        self._rounds = 0
        self._chosen: list[tuple[str, str] | None] = [None, None]
        given = recordings.given if recordings is not None else ()
        if len(given) > 1:
            self._chosen = [("saved", given[0]), ("saved", given[1])]
        self._last: tuple[tuple[object, ...], float, Compared] | None = None

    @property
    def rounds(self) -> int:
        """How many recordings have been read, well or not."""
        return self._rounds

    @property
    def runs(self) -> frozenset[str]:
        """Ids of the runs that were chosen."""
        return frozenset(pick[1] for pick in self._chosen if pick and pick[0] == "run")

    def choose(self, place: int, source: Source) -> None:
        """Make something A (0) or B (1)."""
        self._chosen[place] = ("saved" if source.kind == "saved" else "run", source.key)
        self._last = None

    def sources(self, runs: Sequence[RunView], *, replayed: bool) -> tuple[Source, ...]:
        """Return what can be chosen: the runs of this session, then the recordings."""
        found = [_run_source(run, replayed=replayed) for run in runs]
        if self._recordings is not None:
            found += [_saved_source(path) for path in self._recordings.paths()]
        return tuple(found)

    def places(self, source: Source) -> str:
        """Return `A`, `B` or `AB` for what is chosen, empty for what is not."""
        key = ("saved" if source.kind == "saved" else "run", source.key)
        return "".join(name for name, pick in zip("AB", self._chosen, strict=True) if pick == key)

    def compared(
        self,
        runs: Sequence[RunView],
        shown: RunView | None,
        tracks: Tracks,
        now: float,
        *,
        replayed: bool,
        nodes: Sequence[NodeView] = (),
        checked: str | None = None,
    ) -> Compared:
        """Return how A and B compare now; `now` is a monotonic clock in seconds.

        `nodes` are those of the picture that `runs` are of, `checked` is the id of the run whose
        window was frozen last.
        """
        sides = []
        for place in (0, 1):
            pick = self._chosen[place]
            if pick is None and place == 1 and shown is not None:
                pick = ("run", shown.run)
            elif pick is None and place == 0 and shown is not None:
                other = any(run.run == checked and run.run != shown.run for run in runs)
                pick = ("run", checked) if checked is not None and other else None
            sides.append(self._side(pick, runs, tracks, replayed=replayed))
        before, after = sides
        if before.side is None or after.side is None:
            return Compared(before, after)
        # What has been compared is what it was as long as both have the same steps.
        names = tuple([(s.source.kind, s.source.key) for s in sides if s.source is not None])
        key = (names, before.side.steps.indices[-1:], after.side.steps.indices[-1:])
        if self._last is not None:
            of_key, made_at, known = self._last
            if of_key == key or (of_key[0] == names and now - made_at < _ANEW_S):
                return known
        from gpuwatch.store.compare import compare_sides

        drivers = self._driver(before, nodes), self._driver(after, nodes)
        comparison = compare_sides(before.side, after.side, drivers)
        made = Compared(_without_ranks(before), _without_ranks(after), comparison)
        self._last = (key, now, made)
        return made

    def _driver(self, chosen: Chosen, nodes: Sequence[NodeView]) -> Driver:
        from gpuwatch.store.compare import driver_of

        assert chosen.source is not None
        assert chosen.side is not None
        if chosen.source.kind == "saved" and self._recordings is not None:
            return self._recordings.driver(chosen.source.key)
        return driver_of(chosen.side.run, nodes)

    def _side(
        self,
        pick: tuple[str, str] | None,
        runs: Sequence[RunView],
        tracks: Tracks,
        *,
        replayed: bool,
    ) -> Chosen:
        if pick is None:
            return Chosen()
        kind, key = pick
        if kind == "saved":
            source = _saved_source(key)
            known = self._loaded.get(key)
            if isinstance(known, str):
                return Chosen(source, problem=known)
            if known is None:
                self._load(key)
                return Chosen(source)
            return Chosen(source, known)
        run = next((run for run in runs if run.run == key), None)
        if run is None:
            return Chosen(Source("live", key, key), problem="this run is not known any more")
        return Chosen(_run_source(run, replayed=replayed), tracks.side(run, replayed=replayed))

    def _load(self, path: str) -> None:
        if path in self._loading or self._recordings is None:
            return
        self._loading.add(path)
        threading.Thread(
            target=self._read, args=[path], name="gpuwatch-compare", daemon=True
        ).start()

    def _read(self, path: str) -> None:
        assert self._recordings is not None
        try:
            self._loaded[path] = self._recordings.load(path)
        except Exception as problem:
            # A file that cannot be read must not take the screen with it; the person is told.
            self._loaded[path] = str(problem) or type(problem).__name__
        self._loading.discard(path)
        self._rounds += 1


def _without_ranks(chosen: Chosen) -> Chosen:
    """Return what was chosen without the picture that it is of: of a large run that is megabytes,
    and a comparison is kept until there is another one.
    """
    assert chosen.side is not None
    return replace(chosen, side=replace(chosen.side, run=replace(chosen.side.run, ranks=())))


def _run_source(run: RunView, *, replayed: bool) -> Source:
    states = {rank.state for rank in run.ranks}
    kind = "live"
    if replayed:
        kind = "replay"
    elif run.state == "ended":
        kind = "ended"
    elif states and states <= {"gone", "ended"}:
        kind = "gone"
    name = run.name or run.run
    plural = "s" if run.world_size != 1 else ""
    detail = f"{run.world_size:,} rank{plural}  step {run.steps:,}"
    return Source(kind, run.run, name, detail, run.simulated)


def _saved_source(path: str) -> Source:
    name = os.path.basename(path)
    return Source("saved", path, os.path.splitext(name)[0], path)
