"""A change that every rank has to make on the same step: agreed through the group's store.

The key-value store that a process group was made with is there already, and asking it is no
collective: nobody waits for anybody. A rank that has the command says so; when all have, rank 0
writes down a step a little ahead. One key decides and its first writer wins, so there is one
decision: that step, or, when somebody has waited for too long, that nothing changes.

In synchronous training no rank's device is more than one step ahead of another's. The host runs
ahead of its device, so on CUDA a rank waits for its device before it looks, at each step as long as
the decision is open: a few steps, or `FOLLOWER_S` at the most where a rank never gets the command.
Rank 0 writes before it takes part in the next reduction: three steps ahead everyone has read it.
Training that is not synchronous can miss that step. Then this rank changes nothing and says so.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Agreement", "MissedError", "group_store"]

_AHEAD_STEPS = 3
LEADER_S = 10.0
FOLLOWER_S = 20.0
"""So long rank 0 waits for the others, and they for its decision."""

_NO = "no"


class MissedError(Exception):
    """The others have changed, or may have, and this rank has not."""


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
        store: with `set`, `check`, `get` and `compare_set`, shared by the ranks.
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
        # A key for each rank: what is said again after an error of the store counts once.
        self._have = [f"gpuwatch/{key}/have/{each}" for each in range(world_size)]
        self._when = f"gpuwatch/{key}/when"
        self._rank = rank
        self._clock = clock
        self._until_s: float | None = None
        self._said = False
        self._looked: int | None = None  # the tick of the last look
        self._agreed: int | None = None

    def look(self, tick: int, per_step: int, least: int = 0) -> int | None:
        """Return the tick to act at, `least` or later; None as long as that is open.

        An error of the store is tried again at the next look, until the time is over.

        Raises:
            TimeoutError: it was decided that nothing changes.
            MissedError: the tick was agreed upon and is over, or the store cannot be asked.
        """
        if self._until_s is None:
            self._until_s = self._clock() + (FOLLOWER_S if self._rank else LEADER_S)
        if self._agreed is None:
            _wait_for_device()
            try:
                decided = self._ask(tick, per_step)
            except Exception as exc:
                if self._clock() > self._until_s:
                    why = f"{type(exc).__name__}: {exc}".splitlines()[0][:200]
                    raise MissedError(f"the group's store cannot be asked ({why})") from None
                return None
            if decided == _NO:
                raise TimeoutError
            before, self._looked = self._looked, tick
            if not decided:
                return None
            self._agreed = max(int(decided), least)
            # A boundary at that tick or after it, where nothing was done, lies behind.
            if tick > self._agreed and (before is None or before >= self._agreed):
                raise MissedError("this rank had passed the step already that was agreed upon")
        return self._agreed

    def _ask(self, tick: int, per_step: int) -> str:
        store = self._store
        if not self._said:
            store.set(self._have[self._rank], "1")
            self._said = True
        if store.check([self._when]):
            decided: bytes = store.get(self._when)
            return decided.decode()
        if self._rank == 0 and store.check(self._have):
            return self._decide(str(tick + _AHEAD_STEPS * per_step))
        assert self._until_s is not None
        return self._decide(_NO) if self._clock() > self._until_s else ""

    def _decide(self, what: str) -> str:
        """Write the decision down if there is none; returns the one that holds."""
        found: bytes = self._store.compare_set(self._when, "", what)
        return found.decode()


def _wait_for_device() -> None:
    """Have the device come to where the host is, and with it to where the other ranks are."""
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):
        # While a graph is captured, waiting would break the capture.
        if (
            torch is not None
            and torch.cuda.is_initialized()
            and not torch.cuda.is_current_stream_capturing()
        ):
            torch.cuda.synchronize()
