"""The one place that talks to gpuwatch; a fake can take its place."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Silent", "Telemetry", "Watched"]


class Telemetry(Protocol):
    """What the loop reports. No method may wait for the device."""

    @property
    def controlled(self) -> bool:
        """Whether a monitor may change knobs."""
        ...

    def annotate(
        self,
        *,
        samples: int | None = None,
        loss: "torch.Tensor | None" = None,
        epoch: float | None = None,
        total_steps: int | None = None,
        dataset_path: str | None = None,
        notice: str | None = None,
    ) -> None:
        """Facts of the current step (samples, loss, epoch) or of the run; a sentence to show."""
        ...

    def span(self, name: str) -> AbstractContextManager[object]:
        """Time outside steady training."""
        ...

    def phase(self, name: str) -> AbstractContextManager[object]:
        """A part of the step that gpuwatch cannot see by itself."""
        ...

    def knob(
        self,
        name: str,
        value: int | float | str,
        apply: Callable[[Any], object],
        *,
        low: float | None = None,
        high: float | None = None,
        choices: Sequence[str] = (),
        effective: str,
        together: bool = False,
    ) -> None:
        """A number or one of some words, which a monitor may change; `together`: in the same step
        on every rank.
        """
        ...

    def close(self) -> None:
        """End of the run."""
        ...


class Silent:
    """No telemetry."""

    controlled = False

    def annotate(self, **_facts: object) -> None:
        """Nothing."""

    def span(self, name: str) -> AbstractContextManager[object]:
        """Nothing around the block."""
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Nothing around the block."""
        return nullcontext()

    def knob(self, name: str, *_args: object, **_limits: object) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Watched:
    """gpuwatch's probe. Made after the process group, so that it knows its rank, and before the
    loader, so that it sees the first batch. Step boundaries it finds by itself.
    """

    def __init__(self, name: str, *, allow_control: bool = False) -> None:
        import gpuwatch

        self._gpuwatch = gpuwatch
        gpuwatch.watch(name=name, allow_control=allow_control)
        # As `gpuwatch run --allow-control` says it to what it starts.
        self.controlled = allow_control or os.environ.get("GPUWATCH_ALLOW_CONTROL") == "1"

    def annotate(
        self,
        *,
        samples: int | None = None,
        loss: "torch.Tensor | None" = None,
        epoch: float | None = None,
        total_steps: int | None = None,
        dataset_path: str | None = None,
        notice: str | None = None,
    ) -> None:
        """Hand the facts on; a loss on the device is handed on as it is."""
        self._gpuwatch.annotate(
            samples=samples,
            loss=loss,
            epoch=epoch,
            total_steps=total_steps,
            dataset_path=dataset_path,
            notice=notice,
        )

    def span(self, name: str) -> AbstractContextManager[object]:
        """A gpuwatch span."""
        return self._gpuwatch.span(name)

    def phase(self, name: str) -> AbstractContextManager[object]:
        """A gpuwatch phase."""
        return self._gpuwatch.phase(name)

    def knob(
        self,
        name: str,
        value: int | float | str,
        apply: Callable[[Any], object],
        *,
        low: float | None = None,
        high: float | None = None,
        choices: Sequence[str] = (),
        effective: str,
        together: bool = False,
    ) -> None:
        """A gpuwatch knob."""
        self._gpuwatch.knob(
            name,
            value,
            apply,
            low=low,
            high=high,
            choices=choices,
            effective=effective,
            together=together,
        )

    def close(self) -> None:
        """Say goodbye, so that the monitor need not guess."""
        self._gpuwatch.unwatch()
