"""For the Trainer of Lightning: `Trainer(callbacks=[GpuwatchCallback()])`."""

import contextlib
import math
import time
from typing import Any

from lightning.pytorch.callbacks import Callback

import gpuwatch

__all__ = ["GpuwatchCallback"]

_ANNOTATE_S = 0.1


class GpuwatchCallback(Callback):
    """Watches the process from the trainer's setup on.

    Adds loss, epoch and the number of steps to come, and the whole of validation, sanity check and
    test as evaluation, with what your hooks do in them.

    Args:
        name: what people call this run.
        allow_control: let a monitor change what the script has registered as a knob.
    """

    def __init__(self, *, name: str | None = None, allow_control: bool = False) -> None:
        self._name = name
        self._allow_control = allow_control
        self._spans = contextlib.ExitStack()
        self._next_s = 0.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin to watch."""
        gpuwatch.watch(name=self._name, allow_control=self._allow_control)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Say how many steps there will be, if that is known."""
        steps = trainer.estimated_stepping_batches
        if math.isfinite(steps) and steps > 0:
            gpuwatch.annotate(total_steps=int(steps))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Pass on loss and epoch, ten times a second at most."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _ANNOTATE_S
        gpuwatch.annotate(epoch=trainer.current_epoch)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            shares = trainer.accumulate_grad_batches
            # Lightning gives its share of the accumulated loss.
            gpuwatch.annotate(loss=loss if shares == 1 else loss.detach() * shares)

    def _begin(self, *_: Any) -> None:
        self._spans.enter_context(gpuwatch.span("eval"))

    def _end(self, *_: Any) -> None:
        self._spans.close()

    on_validation_start = on_test_start = _begin
    on_validation_end = on_test_end = _end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """An evaluation that raised is over."""
        self._spans.close()
