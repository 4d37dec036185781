"""The marks of batches on their way to the device, where a library moves them.

Only where the training is on a device: on the CPU the same functions move nothing. What a script
copies by itself is marked by `gpuwatch.phase("h2d")` alone, and else part of the forward.
"""

import sys
from collections.abc import Mapping
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from gpuwatch.probe.accounting import H2D
from gpuwatch.probe.events import PHASE_BEGIN, PHASE_END, Recorder
from gpuwatch.probe.swap import Calls

if TYPE_CHECKING:
    from gpuwatch.probe.patches import Marks

__all__ = ["Transfers"]

# The Trainer of Transformers moves batches by Accelerate's loader, the Fabric of Lightning by a
# function, its Trainer by a method (which calls that function, and the user's own hooks).
_MOVERS = {
    "accelerate.utils.operations": ("", "send_to_device"),
    "lightning.pytorch.strategies.strategy": ("Strategy", "batch_to_device"),
    "pytorch_lightning.strategies.strategy": ("Strategy", "batch_to_device"),
    "lightning.fabric.utilities.apply_func": ("", "move_data_to_device"),
    "lightning_fabric.utilities.apply_func": ("", "move_data_to_device"),
}
_NESTING = 3


class Transfers:
    """Installs its marks through `marks` and leaves events with `recorder`."""

    def __init__(self, marks: "Marks", recorder: Recorder) -> None:
        self._marks = marks
        self._recorder = recorder
        self._movers = dict(_MOVERS)
        self._moving = False

    def mark_imported(self) -> None:
        """Mark the functions whose modules the script has imported by now."""
        for name in [name for name in self._movers if name in sys.modules]:
            owner_name, function = self._movers.pop(name)
            module = sys.modules[name]
            owner = getattr(module, owner_name, None) if owner_name else module
            if hasattr(owner, function):
                self._marks.mark(owner, function, self._move(function == "batch_to_device"))

    def _move(self, is_method: bool) -> Calls:
        """Return the calls around a function that takes a batch, or a method of what takes one."""
        marks, recorder = self._marks, self._recorder

        def move_begins(first: Any) -> bool:
            # They call themselves, for the parts of a batch, and each other: the outermost counts.
            if self._moving or get_ident() != marks.thread or is_compiling():
                return False
            if not is_method and not _on_host(first):
                return False  # from the device, or nothing to move
            self._moving = True
            recorder.push((PHASE_BEGIN, perf_counter_ns(), H2D))
            return True

        def move_ends(begun: bool, value: Any) -> Any:
            if begun:
                self._moving = False
                recorder.push((PHASE_END, perf_counter_ns(), H2D))
            return value

        return move_begins, move_ends


def _on_host(batch: object, nesting: int = _NESTING) -> bool:
    """Whether the first tensor in a batch is on the host; True for an object of another kind."""
    if isinstance(batch, torch.Tensor):
        return batch.device.type == "cpu"
    if nesting and isinstance(batch, Mapping | list | tuple):
        values = batch.values() if isinstance(batch, Mapping) else batch
        return any(_on_host(value, nesting - 1) for value in values)
    return hasattr(batch, "to")
