"""What every source of sensor values offers, and the ways to say a value."""

from typing import Literal, NamedTuple, Protocol, TypeVar

from gpuwatch.schema import GpuSample, Reading

__all__ = [
    "FIRST_SAMPLE",
    "FIRST_TICK",
    "Backend",
    "DeviceBackend",
    "Devices",
    "aged",
    "failed",
    "known",
    "unknown",
]

FIRST_TICK = "first tick"
"""Reason of a rate or percentage that needs two ticks and has seen one."""

FIRST_SAMPLE = "first sample"
"""The same of a device's own counters, which are sampled in pairs."""

_MAX_REASON = 256
_MAX_AGE_S = 1e9

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


class Devices(NamedTuple):
    """The accelerators of this machine; `reason` says why there are none, or none any more."""

    gpus: tuple[GpuSample, ...]
    reason: str = ""


class DeviceBackend(Backend[Devices], Protocol):
    """The backend of one vendor's accelerators.

    It tries again by itself, within `sample`, what failed before. Its calls go into a driver and
    may take any time: `gpuwatch.sensors.gpus` runs it on a thread of its own.
    """

    name: str
    """What reads, as the reader knows it: NVML."""

    def busy(self) -> str:
        """Say what it waits for now, empty for nothing; called from another thread."""
        ...


def known(value: float, unit: str, source: str) -> Reading:
    """Return a reading taken now."""
    return Reading(float(value), unit, source)


def unknown(unit: str, source: str, reason: str) -> Reading:
    """Return n/a with its reason (cut to what the wire allows)."""
    return Reading(None, unit, source, 0.0, "na", reason[:_MAX_REASON] or "no reason given")


def failed(unit: str, source: str, reason: str) -> Reading:
    """Return no value for a reason that should not be: an error, where `unknown` is a fact."""
    return Reading(None, unit, source, 0.0, "error", reason[:_MAX_REASON] or "no reason given")


def aged(
    reading: Reading,
    age_s: float,
    state: Literal["stale", "error"] | None = None,
    reason: str = "",
) -> Reading:
    """Return a reading as of `age_s` seconds later, with another state and why if given.

    An error keeps its own reason and n/a stays n/a: there is no value that could grow stale.
    """
    age_s = min(_MAX_AGE_S, reading.age_s + max(0.0, age_s))
    if state is None or reading.state in {"na", "error"}:
        return Reading(
            reading.value, reading.unit, reading.source, age_s, reading.state, reading.reason
        )
    return Reading(reading.value, reading.unit, reading.source, age_s, state, reason[:_MAX_REASON])
