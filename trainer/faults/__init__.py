"""Faults on request, for demos and tests: each makes a training slow in one known way.

They act where the real cause would: an item waits in the loader's process, a fetch blocks the
training thread inside the iterator, forward and backward sleep inside autograd's own calls. Sleeps
are on the host; on CUDA the device idles for that time unless it has work queued.
"""

from collections.abc import Sequence

from trainer.config import FaultsConfig
from trainer.faults.data import collate_with, dataset_with, loader_with
from trainer.faults.loop import LoopFaults, model_with, optimizer_with, pin_process
from trainer.faults.sleeps import describe_sleeps, from_keys, requested
from trainer.faults.spec import FAULTS, Fault, parse_fault, parse_faults

__all__ = [
    "FAULTS",
    "Fault",
    "LoopFaults",
    "collate_with",
    "dataset_with",
    "describe",
    "from_keys",
    "loader_with",
    "model_with",
    "optimizer_with",
    "parse_fault",
    "parse_faults",
    "pin_process",
    "requested",
]


def describe(sleeps: FaultsConfig, faults: Sequence[Fault]) -> str | None:
    """One sentence with every fault that is on, marked SIMULATED; None if there is none."""
    named = "; ".join(fault.sentence for fault in faults)
    said = describe_sleeps(sleeps)
    if said:
        return f"SIMULATED {said}" + (f"; {named}" if named else "")
    return f"SIMULATED: {named}" if named else None
