"""Number formats: autocast, loss scaling, and fp16 by hand with fp32 master weights.

One object does what differs between the modes around a loop that is the same for all:
`autocast` around forward and loss, `backward` of the loss, then `step`. The order in `step` is what
matters: gradients are unscaled before they are clipped, a step whose gradients overflowed is left
out, and only a step that was done lets the schedule go on.
"""

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.config import PrecisionConfig
from trainer.errors import ConfigError

__all__ = ["MasterWeights", "Mode", "Precision", "StepResult", "resolve_mode", "tf32"]

Mode = Literal["fp32", "tf32", "bf16", "fp16", "fp16-manual"]

# The ends of the dynamic scale: below the first nothing is left to scale, the second is as far as
# fp32 products of fp16 losses go.
_SCALE_MIN = 1.0
_SCALE_MAX = 2.0**24
# Norms keep their scales, shifts and statistics in fp32: in fp16 their sums overflow.
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of an optimizer step attempt. Reading `grad_norm` may wait for the device."""

    stepped: bool
    """False: the gradients overflowed and the weights are as they were."""
    grad_norm: torch.Tensor | None
    """Before clipping, unscaled; None where nobody needed it."""


def resolve_mode(mode: str, device: torch.device) -> Mode:
    """Settle ``auto`` and refuse what the device cannot do.

    auto: bf16 from compute capability 8.0, fp16 below it, fp32 on the CPU.

    Raises:
        ConfigError: tf32 without CUDA or before compute capability 8.0.
    """
    cuda = device.type == "cuda"
    modern = cuda and torch.cuda.get_device_capability(device) >= (8, 0)
    match mode:
        case "auto":
            if not cuda:
                return "fp32"
            return "bf16" if modern else "fp16"
        case "tf32":
            if not modern:
                raise ConfigError(
                    "precision.mode=tf32 needs an NVIDIA GPU of compute capability 8.0 or higher; "
                    "fp32 does the same without rounding"
                )
            return "tf32"
        case "fp32" | "bf16" | "fp16" | "fp16-manual":
            return mode
        case _:
            raise ConfigError(f"there is no precision {mode!r}")


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Let fp32 matmuls and convolutions round their inputs to 10 bits, or not; put back after."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    # torch 2.9 gave the switches words and warns of the old ones.
    words = hasattr(cudnn, "conv")
    places = [matmul, getattr(cudnn, "conv", cudnn)]
    name = "fp32_precision" if words else "allow_tf32"
    value: str | bool = ("tf32" if allowed else "ieee") if words else allowed
    before = [getattr(place, name) for place in places]
    try:
        for place in places:
            setattr(place, name, value)
        yield
    finally:
        for place, old in zip(places, before, strict=True):
            setattr(place, name, old)


class MasterWeights:
    """fp32 copies of the parameters, in their order; the optimizer owns and updates these.

    An update of one thousandth of a weight is lost in fp16, which has 11 bits. In the copy it adds
    up until it shows.
    """

    def __init__(self, model: nn.Module) -> None:
        self.working = [p for p in model.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().clone().float()) for p in self.working]

    def take_gradients(self, inverse_scale: float) -> torch.Tensor:
        """Move the model's gradients to the masters, unscaled.

        Returns:
            Whether any of them is infinite or not a number: 1.0 or 0.0, on the device.
        """
        device = self.working[0].device
        overflow = torch.zeros(1, device=device)
        scale = torch.full((1,), inverse_scale, device=device)
        gradients = []
        for working, master in zip(self.working, self.masters, strict=True):
            if working.grad is None:
                master.grad = None
                continue
            master.grad = working.grad.detach().float()
            if master.grad is working.grad or master.grad.data_ptr() == working.grad.data_ptr():
                # An fp32 parameter's gradient may live in DDP's bucket, which is reduced anew.
                master.grad = master.grad.clone()
            working.grad = None
            gradients.append(master.grad)
        if gradients:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, scale)
        return overflow

    @torch.no_grad()
    def copy_back(self) -> None:
        """Round the masters into the model."""
        torch._foreach_copy_(list[torch.Tensor](self.working), list[torch.Tensor](self.masters))


class Precision:
    """The number formats of one training.

    Args:
        config: what is asked for.
        device: where is trained.
        model: must not be wrapped in DDP yet; for fp16-manual it is converted in place.
    """

    def __init__(self, config: PrecisionConfig, device: torch.device, model: nn.Module) -> None:
        self.mode: Mode = resolve_mode(config.mode, device)
        self.skipped = 0
        """Steps that were left out because their gradients overflowed."""
        self._device = device
        self._config = config
        self._stack = contextlib.ExitStack()
        self.scaler: torch.amp.GradScaler | None = None
        self.masters: MasterWeights | None = None
        self._scale = 1.0
        self._good_steps = 0
        dynamic = config.loss_scale == "dynamic"
        initial = config.initial_scale if dynamic else float(config.loss_scale)
        if self.mode == "fp16":
            self.scaler = torch.amp.GradScaler(
                device.type,
                init_scale=initial,
                # A static scale neither grows nor falls.
                growth_factor=2.0 if dynamic else 1.0 + 1e-9,
                backoff_factor=0.5 if dynamic else 1.0 - 1e-9,
                growth_interval=config.growth_interval_steps if dynamic else 2**31 - 1,
            )
        elif self.mode == "fp16-manual":
            self._scale = initial
            self.masters = MasterWeights(model)
            _to_half(model)

    @property
    def parameters(self) -> list[nn.Parameter] | None:
        """What the optimizer has to own in place of the model's parameters; None: those."""
        return self.masters.masters if self.masters is not None else None

    @property
    def input_dtype(self) -> torch.dtype | None:
        """What float inputs have to be; None: whatever they are, autocast converts."""
        return torch.float16 if self.masters is not None else None

    @property
    def loss_scale(self) -> float | None:
        """The scale of the next loss, None without one. May wait for the device."""
        if self.scaler is not None:
            return float(self.scaler.get_scale())
        return self._scale if self.masters is not None else None

    def __enter__(self) -> "Precision":
        if self._device.type == "cuda":
            self._stack.enter_context(tf32(self.mode == "tf32"))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def autocast(self) -> AbstractContextManager[Any]:
        """Around forward and loss; never around backward, which follows the forward's types."""
        if self.mode == "bf16":
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        if self.mode == "fp16":
            return torch.autocast(self._device.type, dtype=torch.float16)
        return contextlib.nullcontext()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to run backward from."""
        if self.scaler is not None:
            return self.scaler.scale(loss)
        return loss * self._scale if self.masters is not None else loss

    def step(self, optimizer: Optimizer, clip_norm: float | None) -> StepResult:
        """One optimizer step attempt with the gradients there are, which are freed by it.

        fp16 and fp16-manual read one number from the device: whether the gradients overflowed.
        """
        if self.masters is not None:
            result = self._manual_step(self.masters, optimizer, clip_norm)
        elif self.scaler is not None:
            result = self._scaled_step(self.scaler, optimizer, clip_norm)
        else:
            norm = _clip(optimizer, clip_norm)
            optimizer.step()
            result = StepResult(True, norm)
        if not result.stepped:
            self.skipped += 1
        # Freed, not filled with zeros: less memory traffic, and the next backward writes anew.
        optimizer.zero_grad(set_to_none=True)
        return result

    def _scaled_step(
        self, scaler: torch.amp.GradScaler, optimizer: Optimizer, clip_norm: float | None
    ) -> StepResult:
        norm = None
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            norm = _clip(optimizer, clip_norm)
        done = False

        # The scaler calls step() only where nothing overflowed. (Not so with a fused optimizer,
        # which looks for itself: `build_optimizer` makes none here.) Comparing scales instead would
        # miss it with a static one.
        def count(*_: Any) -> None:
            nonlocal done
            done = True

        handle = optimizer.register_step_post_hook(count)
        try:
            scaler.step(optimizer)
        finally:
            handle.remove()
        scaler.update()
        return StepResult(done, norm)

    def _manual_step(
        self, masters: MasterWeights, optimizer: Optimizer, clip_norm: float | None
    ) -> StepResult:
        overflow = bool(masters.take_gradients(1.0 / self._scale).item())
        norm = None
        if not overflow:
            norm = _clip(optimizer, clip_norm)
            optimizer.step()
            masters.copy_back()
        if self._config.loss_scale == "dynamic":
            self._follow(overflow)
        return StepResult(not overflow, norm)

    def _follow(self, overflow: bool) -> None:
        """Halve on overflow, double after enough steps without (Micikevicius et al. 2018)."""
        if overflow:
            self._scale = max(_SCALE_MIN, self._scale / 2.0)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps >= self._config.growth_interval_steps:
            self._scale = max(self._scale, min(_SCALE_MAX, self._scale * 2.0))
            self._good_steps = 0


def _clip(optimizer: Optimizer, clip_norm: float | None) -> torch.Tensor | None:
    """Scale all gradients so that together they are no longer than `clip_norm`; their norm."""
    if clip_norm is None:
        return None
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm: torch.Tensor = nn.utils.clip_grad_norm_(parameters, clip_norm, foreach=True)
    return norm


def _to_half(model: nn.Module) -> None:
    """fp16 parameters everywhere but in norms, whose input is converted and converted back."""
    for module in model.modules():
        if isinstance(module, _NORMS):
            module.register_forward_pre_hook(_widen)
            module.register_forward_hook(_narrow)
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.half()
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and math.prod(buffer.shape) > 0:
                setattr(module, name, buffer.half())


def _widen(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.float() if isinstance(x, torch.Tensor) else x for x in inputs)


def _narrow(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.half()
