"""Steps of the session's runs beyond their windows, for comparing and for checking a change."""

from __future__ import annotations

from collections.abc import Container, Sequence

from gpuwatch.store.track import Side, Track, side_of
from gpuwatch.store.views import RunView

__all__ = ["Tracks"]

_ALWAYS = 64
"""Runs of so many ranks are followed from the start: about a millisecond a second. Larger ones
from when somebody compares or checks them; their window is there at once."""

_KEPT = 4
"""Tracks, 3 MB each at most."""


class Tracks:
    """One track a run; those of the runs that were seen last are kept."""

    def __init__(self) -> None:
        self._tracks: dict[str, Track] = {}
        self._followed: set[str] = set()
        self._seeks = 0

    def take(self, runs: Sequence[RunView], wanted: Container[str], seeks: int = 0) -> None:
        """Take what is new in the windows.

        `wanted` are ids of runs to follow whatever their size. `seeks` counts jumps in a
        recording: what was before one is not what leads to the picture after it.
        """
        if seeks != self._seeks:
            self._seeks = seeks
            self._tracks.clear()
        self._followed.clear()
        for run in reversed(runs[:_KEPT]):
            if len(run.ranks) > _ALWAYS and run.run not in wanted:
                continue
            self._followed.add(run.run)
            self._take(run)

    def _take(self, run: RunView) -> None:
        track = self._tracks.pop(run.run, None)
        if track is None:
            track = Track()
        # The newest at the end: the first ones go.
        self._tracks[run.run] = track
        track.take(run)
        while len(self._tracks) > _KEPT:
            del self._tracks[next(iter(self._tracks))]

    def side(self, run: RunView, *, replayed: bool = False) -> Side:
        """Return a run as one side of a comparison."""
        if run.run not in self._followed:
            self._take(run)
        side = side_of(run, track=self._tracks.get(run.run))
        return Side(side.name, "replay", run, side.steps) if replayed else side

    def generation(self, run: str) -> int:
        """Return how often a run has begun anew under its id."""
        track = self._tracks.get(run)
        return 0 if track is None else track.generation
