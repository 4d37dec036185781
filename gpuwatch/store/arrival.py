"""Ranks of one node whose frames arrive together, each the next one of its rank.

Of many ranks nearly every frame is such. Who notes it in the picture of each rank pays for ten
thousand pictures that are in no cache; so what has come is looked at as it comes, is kept in one
place a node, and goes into the pictures when somebody looks at them, or when it has become much.
"""

from collections.abc import Sequence
from operator import le
from typing import Generic, Protocol, Self, TypeVar

import msgspec

from gpuwatch.frames import Columns

__all__ = ["EMPTY", "Convoy", "Follower"]

EMPTY = b"\x90"
"""No steps, no worker totals: an empty array."""

_MOST_FRAMES = 32
_MOST_BYTES_A_RANK = 8192
"""Steps and worker totals that wait, the mean of the ranks."""


class Follower(Protocol):
    """The picture of a rank; `convoy` is the one that it goes on with."""

    convoy: "Convoy[Self] | None"

    def be_at(
        self,
        received_s: float,
        seq: int,
        sent_s: float,
        dropped: int,
        simulated: bool,
        state: msgspec.Raw,
        ledger: msgspec.Raw,
    ) -> None:
        """Note what of a frame the next one replaces."""

    def wait(self, steps: Sequence[bytes], costs: Sequence[tuple[float, bytes]]) -> None:
        """Note steps and worker totals, as bytes; of totals also when they were sent."""


_F = TypeVar("_F", bound=Follower)


class Convoy(Generic[_F]):
    """What has come of ranks that go on together, and is not in their pictures yet.

    Args:
        ranks: their pictures, each another one, up to date.
        heads: the frame of each that came last.
    """

    __slots__ = ("_bytes", "_heads", "_received_s", "_steps", "_waits", "_who", "_workers", "ranks")

    def __init__(self, ranks: Sequence[_F], heads: Columns) -> None:
        self.ranks = tuple(ranks)
        self._heads = heads
        self._who = (heads.run, heads.rank, heads.incarnation)
        self._clear()
        for rank in ranks:
            rank.convoy = self

    def _clear(self) -> None:
        self._waits = self._bytes = 0
        self._received_s = 0.0
        self._steps: list[list[bytes]] = []
        self._workers: list[list[tuple[float, bytes]]] = []

    def take(self, heads: Columns, received_s: float) -> bool:
        """Take the frames of a node if each is the next one of its rank; else nothing."""
        if (heads.run, heads.rank, heads.incarnation) != self._who:
            return False
        last = self._heads
        for seq, merged, before in zip(heads.seq, heads.merged, last.seq, strict=True):
            if not seq - merged <= before + 1 <= seq:
                return False
        if not all(map(le, last.sent_s, heads.sent_s)):
            return False
        self._heads = heads
        self._received_s = received_s
        self._waits += 1
        # As bytes of their own: raw ones keep the whole frame of the node alive.
        steps = list(map(bytes, heads.records))
        if steps.count(EMPTY) != len(steps):
            self._steps.append(steps)
            self._bytes += sum(map(len, steps))
        workers = list(map(bytes, heads.workers))
        if workers.count(EMPTY) != len(workers):
            self._workers.append(list(zip(heads.sent_s, workers, strict=True)))
            self._bytes += sum(map(len, workers))
        return True

    @property
    def full(self) -> bool:
        """Whether so much waits that it must go on now."""
        return self._waits >= _MOST_FRAMES or self._bytes > _MOST_BYTES_A_RANK * len(self.ranks)

    def catch_up(self) -> None:
        """Bring the pictures up to date."""
        if not self._waits:
            return
        heads, received_s = self._heads, self._received_s
        frames, totals = self._steps, self._workers
        self._clear()
        for at, rank in enumerate(self.ranks):
            rank.be_at(
                received_s,
                heads.seq[at],
                heads.sent_s[at],
                heads.dropped[at],
                heads.simulated[at],
                heads.state[at],
                heads.ledger[at],
            )
            rank.wait(
                [parts[at] for parts in frames if parts[at] != EMPTY],
                [parts[at] for parts in totals if parts[at][1] != EMPTY],
            )

    def disband(self) -> None:
        """Bring the pictures up to date, and take nothing for them any more."""
        self.catch_up()
        ranks, self.ranks, self._who = self.ranks, (), ((), (), ())
        for rank in ranks:
            rank.convoy = None
