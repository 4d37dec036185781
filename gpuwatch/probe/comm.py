"""The marks of communication: where the training thread waits for other ranks, and with whom.

What a backward waits for under DDP is marked with the backward itself (`gpuwatch.probe.patches`).
Here is the rest: DDP's broadcast of buffers and every wait for a collective in Python.
"""

import weakref
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from gpuwatch.probe.describe import describe_ddp
from gpuwatch.probe.events import COMM_BEGIN, COMM_END, Recorder
from gpuwatch.probe.swap import Calls

if TYPE_CHECKING:
    from gpuwatch.probe.patches import Marks

__all__ = ["Comm"]


class Comm:
    """Installs its marks through `marks` and leaves events with `recorder`."""

    def __init__(self, marks: "Marks", recorder: Recorder) -> None:
        self._marks = marks
        self._recorder = recorder
        self._ddp: weakref.ref[Any] | None = None

    def install(self) -> None:
        """Put the marks on; torch.distributed must be there."""
        from torch.nn.parallel import DistributedDataParallel

        self._marks.mark(DistributedDataParallel, "_pre_forward", self._ddp_forward())
        # Without it a straggler vanishes on any model with BatchNorm: the others wait here.
        self._marks.mark(DistributedDataParallel, "_sync_buffers", self._wait())
        self._marks.mark(torch._C._distributed_c10d.Work, "wait", self._wait())

    def _wait(self) -> Calls:
        marks, recorder = self._marks, self._recorder

        def wait_begins(owner: Any) -> bool:
            if is_compiling() or get_ident() != marks.thread:
                return False
            recorder.push((COMM_BEGIN, perf_counter_ns()))
            return True

        def wait_ends(begun: bool, value: Any) -> Any:
            if begun:
                recorder.push((COMM_END, perf_counter_ns()))
            return value

        return wait_begins, wait_ends

    def _ddp_forward(self) -> Calls:
        marks = self._marks

        def forward_begins(ddp: Any) -> None:
            if not is_compiling() and get_ident() == marks.thread:
                try:
                    self._see_ddp(ddp)
                except Exception:
                    marks.fail()

        def forward_ends(_: None, value: Any) -> Any:
            return value

        return forward_begins, forward_ends

    def _see_ddp(self, ddp: Any) -> None:
        marks = self._marks
        if self._ddp is None or self._ddp() is not ddp:
            self._ddp = weakref.ref(ddp)
            marks.ddp = describe_ddp(ddp)
            marks.parallel["ddp"] = None
            marks.config_version += 1
