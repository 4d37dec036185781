"""For loops with Accelerate: `gpuwatch.integrations.accelerate.watch(accelerator)`."""

import functools
import time
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

import gpuwatch

__all__ = ["watch"]

_ANNOTATE_S = 0.1


def watch(
    accelerator: Accelerator, *, name: str | None = None, allow_control: bool = False
) -> None:
    """Watch this process; call it once, before the loop.

    Adds the loss given to `accelerator.backward`, and the whole of `save_state` and `save_model` as
    checkpoints.

    Args:
        accelerator: the one that the loop uses.
        name: what people call this run.
        allow_control: let a monitor change what the script has registered as a knob.
    """
    gpuwatch.watch(name=name, allow_control=allow_control)
    if getattr(accelerator.backward, "__wrapped__", None) is not None:
        return
    accelerator.backward = _telling(accelerator.backward)
    for method in ("save_state", "save_model"):
        setattr(accelerator, method, _saving(getattr(accelerator, method)))


def _telling(backward: Callable[..., Any]) -> Callable[..., Any]:
    next_s = 0.0

    @functools.wraps(backward)
    def telling(loss: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal next_s
        now_s = time.monotonic()
        if now_s >= next_s:
            next_s = now_s + _ANNOTATE_S
            gpuwatch.annotate(loss=loss)
        return backward(loss, *args, **kwargs)

    return telling


def _saving(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def saving(*args: Any, **kwargs: Any) -> Any:
        with gpuwatch.span("checkpoint"):
            return save(*args, **kwargs)

    return saving
