"""Sleeps by configuration key: the same faults as by name, with a key each and one rank for all."""

from trainer.config import FaultsConfig
from trainer.faults.spec import Fault, parse_faults

__all__ = ["describe_sleeps", "from_keys", "requested"]

_KEYS = {
    "item_latency_ms": ("slow_dataset", "each item waits {:g} ms (simulated remote-read latency)"),
    "data_ms": ("slow_data", "each fetch blocks {:g} ms longer"),
    "forward_ms": ("slow_forward", "each forward sleeps {:g} ms"),
    "backward_ms": ("slow_backward", "each backward sleeps {:g} ms"),
}
"""Configuration key: the fault that it is, and how it is said."""


def from_keys(faults: FaultsConfig) -> tuple[Fault, ...]:
    """Return the faults that keys ask for."""
    return tuple(
        Fault(name, strength, faults.rank)
        for key, (name, _) in _KEYS.items()
        if (strength := getattr(faults, key))
    )


def requested(faults: FaultsConfig) -> tuple[Fault, ...]:
    """Return all faults that are asked for, by key or by name.

    Raises:
        ConfigError: a name is none.
    """
    return (*from_keys(faults), *parse_faults(faults.inject))


def describe_sleeps(faults: FaultsConfig) -> str | None:
    """What keys ask for, in words; None if nothing."""
    on = [
        text.format(getattr(faults, key))
        for key, (_, text) in _KEYS.items()
        if getattr(faults, key)
    ]
    if not on:
        return None
    where = "all ranks" if faults.rank is None else f"rank {faults.rank}"
    return f"on {where}: {', '.join(on)}"
