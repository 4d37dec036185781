"""For the Trainer of Transformers: `trainer.add_callback(GpuwatchCallback())`."""

import contextlib
from typing import Any

from transformers import TrainerCallback

import gpuwatch

__all__ = ["GpuwatchCallback"]


class GpuwatchCallback(TrainerCallback):
    """Watches the process from the beginning of the training on.

    Adds loss, epoch and the number of steps to come. Evaluation and saving are seen without it:
    the Trainer tells its callbacks only when they are over.

    Args:
        name: what people call this run.
        allow_control: let a monitor change what the script has registered as a knob.
    """

    def __init__(self, *, name: str | None = None, allow_control: bool = False) -> None:
        self._name = name
        self._allow_control = allow_control

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch."""
        gpuwatch.watch(name=self._name, allow_control=self._allow_control)
        if state.max_steps > 0:
            gpuwatch.annotate(total_steps=state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Pass on what the Trainer has computed already."""
        loss = (logs or {}).get("loss")
        if loss is not None:
            with contextlib.suppress(TypeError, ValueError):
                gpuwatch.annotate(loss=float(loss))
        if state.epoch is not None:
            gpuwatch.annotate(epoch=state.epoch)
