"""Who belongs to a run: ranks that a smaller restart has left out, and jobs that share a run id."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from gpuwatch.schema import Hello

__all__ = ["DOUBLE_FRAMES", "DOUBT_S", "LEFT_S", "Doubts", "Member", "leavers"]

LEFT_S = 10.0
"""A rank that was not heard for so long has no say in how large the run is now."""

DOUBT_S = 5.0
"""Ranks of several world sizes are a restart under way, until it has lasted longer than this."""

DOUBLE_FRAMES = 3
"""Of a replaced process, after its successor's first and from another node: one may be late."""

_KEPT = 64

_ADVICE = "if two jobs have one run id, give each its own GPUWATCH_RUN_ID"


class Member(Protocol):
    """What is known of a rank."""

    rank: int
    node: str
    hello: Hello | None
    heard_s: float

    @property
    def over(self) -> bool:
        """Whether its process has said goodbye or is known to be dead."""


def _worlds(ranks: Iterable[Member], now_s: float) -> set[int]:
    return {
        r.hello.world_size
        for r in ranks
        if r.hello is not None and not r.over and now_s - r.heard_s <= LEFT_S
    }


def leavers(ranks: Sequence[Member], now_s: float) -> list[Member]:
    """Return the ranks that are over and for which the world of those that live has no place.

    An elastic launcher that goes on with fewer processes starts them under the same run id.
    """
    worlds = _worlds(ranks, now_s)
    if not worlds:
        return []
    world = max(worlds)
    return [
        r
        for r in ranks
        if r.hello is not None
        and r.rank >= world
        and r.hello.world_size > world
        and (r.over or now_s - r.heard_s > LEFT_S)
    ]


class Doubts:
    """Signs that two jobs have one run id: what to say of them, as long as they last."""

    def __init__(self) -> None:
        self._doubles: dict[tuple[str, int], tuple[int, float, tuple[str, str]]] = {}
        self._differ_s: dict[str, float] = {}

    def note_double(self, run: str, rank: int, nodes: tuple[str, str], at_s: float) -> None:
        """Note a frame of a process that another one, on another node, has taken the place of."""
        count, last_s, _ = self._doubles.get((run, rank), (0, at_s, nodes))
        if at_s - last_s > LEFT_S:
            count = 0
        if (run, rank) not in self._doubles and len(self._doubles) >= _KEPT:
            del self._doubles[next(iter(self._doubles))]
        first, second = sorted(nodes)
        self._doubles[run, rank] = (count + 1, at_s, (first, second))

    def sentences(self, runs: Iterable[tuple[str, Sequence[Member]]], now_s: float) -> list[str]:
        """Return what to say; `runs` are those whose ranks do not agree on how many they are."""
        said = []
        for (run, rank), (count, last_s, (first, second)) in self._doubles.items():
            if count >= DOUBLE_FRAMES and now_s - last_s <= LEFT_S:
                said.append(
                    f"rank {rank} of run {run} is sent by two processes, on {first} and {second}, "
                    f"and one of them is shown: {_ADVICE}"
                )
        differ_s: dict[str, float] = {}
        for run, ranks in runs:
            worlds = _worlds(ranks, now_s)
            if len(worlds) < 2:
                continue
            differ_s[run] = self._differ_s.get(run, now_s)
            if now_s - differ_s[run] >= DOUBT_S:
                sizes = " and ".join(map(str, sorted(worlds)[:4]))
                said.append(f"the ranks of run {run} say that they are {sizes}: {_ADVICE}")
        self._differ_s = differ_s
        return said
