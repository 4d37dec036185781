"""How what the training thread counts becomes the index of a step."""

from typing import NamedTuple

__all__ = ["CommandError", "Pace", "ahead_of"]

_MOST_AHEAD = 10_000


class CommandError(Exception):
    """A command cannot be obeyed; the sentence says why."""


class Pace(NamedTuple):
    """How the ticks that the training thread counts become steps.

    Step `step` runs (or is about to begin) at `tick`, and `per_step` ticks make a step: attempts
    of optimizers, or calls of `step()` where there are some. `by_fetches` says that there is
    neither: fetches are counted while somebody looks, and only on this rank.
    """

    step: int
    tick: int
    per_step: int = 1
    by_fetches: bool = False

    def step_at(self, tick: int) -> int:
        """The index of the step that begins at a boundary with that tick."""
        return self.step + (tick - self.tick) // self.per_step

    def tick_of(self, step: int) -> int:
        """The tick of the boundary at which a step begins."""
        return self.tick + (step - self.step) * self.per_step


def ahead_of(at: int, pace: Pace) -> None:
    """Raise `CommandError` unless step `at` is still to come, and soon."""
    if at <= pace.step:
        raise CommandError(f"step {at:,} has begun already: this rank is at step {pace.step:,}")
    if at > pace.step + _MOST_AHEAD:
        raise CommandError(f"step {at:,} is over {_MOST_AHEAD:,} steps ahead of {pace.step:,}")
