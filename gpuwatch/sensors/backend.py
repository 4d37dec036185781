"""What every source of sensor values offers, and the two ways to say a value."""

from typing import Protocol, TypeVar

from gpuwatch.schema import Reading

__all__ = ["FIRST_TICK", "Backend", "known", "unknown"]

FIRST_TICK = "first tick"
"""Reason of a rate or percentage that needs two ticks and has seen one."""

_MAX_REASON = 256

SampleT_co = TypeVar("SampleT_co", covariant=True)


class Backend(Protocol[SampleT_co]):
    """One source of sensor values, used by one thread.

    The order of calls is `probe` once, `sample` at every tick, `close` once.
    """

    def probe(self) -> str:
        """Find out what can be read here.

        Returns:
            An empty string, or one sentence that says why this backend has nothing to give.
        """
        ...

    def sample(self) -> SampleT_co:
        """Read everything now.

        A value that cannot be read is a `Reading` without a value and with the reason; a device or
        process that is gone costs its own sample only. Does not raise.
        """
        ...

    def close(self) -> None:
        """Let go of what `probe` took. Does not raise."""
        ...


def known(value: float, unit: str, source: str) -> Reading:
    """Return a reading taken now."""
    return Reading(float(value), unit, source)


def unknown(unit: str, source: str, reason: str) -> Reading:
    """Return n/a with its reason (cut to what the wire allows)."""
    return Reading(None, unit, source, 0.0, "na", reason[:_MAX_REASON] or "no reason given")
