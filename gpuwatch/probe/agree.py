"""A change that every rank has to make on the same step: agreed through the group's store.

The key-value store that a process group was made with is there already, and asking it is no
collective: nobody waits for anybody. A rank that has the command says so; when all have, rank 0
writes down a step a little ahead. One key decides and its first writer wins, so there is one
decision: that step, or, when somebody has waited for too long, that nothing changes.

In synchronous training no rank is more than one step ahead of another, and rank 0 writes before it
takes part in the next reduction: three steps ahead everyone has read it.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Agreement", "group_store"]

_AHEAD_STEPS = 3
LEADER_S = 10.0
FOLLOWER_S = 20.0
"""So long rank 0 waits for the others, and they for its decision."""

_NO = "no"


def group_store() -> tuple[Any, int, int] | None:
    """Return (store, rank, world size) of the default process group, None if there is none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    try:
        store = dist.distributed_c10d._get_default_store()
        return store, dist.get_rank(), dist.get_world_size()
    except (AttributeError, RuntimeError, ValueError):
        return None


class Agreement:
    """One rank's part in one decision. Used in the training thread, at step boundaries.

    Args:
        store: with `add`, `check`, `get` and `compare_set`, shared by the ranks.
        key: the same on every rank, and used once.
        rank: of this process; 0 decides.
        world_size: how many have to have it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Any,
        key: str,
        rank: int,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._have, self._when = f"gpuwatch/{key}/have", f"gpuwatch/{key}/when"
        self._rank = rank
        self._world_size = world_size
        self._clock = clock
        self._until_s: float | None = None

    def look(self, tick: int, per_step: int) -> int | None:
        """Return the tick to act at; None as long as that is open.

        Raises:
            TimeoutError: it was decided that nothing changes.
        """
        store = self._store
        if self._until_s is None:
            self._until_s = self._clock() + (FOLLOWER_S if self._rank else LEADER_S)
            have = store.add(self._have, 1)
        else:
            have = store.add(self._have, 0) if self._rank == 0 else 0
        decided = ""
        if self._rank == 0 and have >= self._world_size:
            decided = self._decide(str(tick + _AHEAD_STEPS * per_step))
        elif store.check([self._when]):
            decided = store.get(self._when).decode()
        elif self._clock() > self._until_s:
            decided = self._decide(_NO)
        if decided == _NO:
            raise TimeoutError
        return int(decided) if decided else None

    def _decide(self, what: str) -> str:
        """Write the decision down if there is none; returns the one that holds."""
        found: bytes = self._store.compare_set(self._when, "", what)
        return found.decode()
