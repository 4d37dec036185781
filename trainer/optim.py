"""The optimizer and its schedule, from the configuration."""

from collections.abc import Sequence

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainer.config import OptimConfig
from trainer.precision import Precision
from trainer.schedule import lr_factor, lr_for_batch, warmup_length

__all__ = ["build_optimizer", "build_schedule"]


def build_optimizer(
    model: nn.Module, config: OptimConfig, precision: Precision, *, samples: int
) -> Optimizer:
    """SGD with Nesterov momentum or AdamW, for steps of `samples` samples over all ranks.

    Weight decay on matrices and kernels only: decaying norms' scales and biases costs accuracy and
    regularises nothing (Goyal et al. 2017).
    """
    own = precision.parameters
    parameters: Sequence[nn.Parameter] = (
        own if own is not None else [p for p in model.parameters() if p.requires_grad]
    )
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    lr = lr_for_batch(
        config.base_lr,
        samples=samples,
        base_samples=config.base_batch_size,
        scaling=config.lr_scaling,
        optimizer=config.name,
    )
    # fused: one kernel over all parameters instead of several per parameter. Under a GradScaler a
    # fused step looks for overflow by itself and tells nobody whether it did anything.
    fused = precision.scaler is None
    if config.name == "adamw":
        return AdamW(groups, lr=lr, fused=fused)
    return SGD(groups, lr=lr, momentum=config.momentum, nesterov=config.momentum > 0, fused=fused)


def build_schedule(optimizer: Optimizer, config: OptimConfig, *, total_steps: int) -> LambdaLR:
    """`lr_factor` over the optimizer's steps; to be stepped once after each that was done."""
    warmup_steps = warmup_length(
        config.warmup_steps, share=config.warmup_share, total_steps=total_steps
    )
    return LambdaLR(
        optimizer,
        lambda step: lr_factor(
            step,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            kind=config.schedule,
            min_ratio=config.lr_min_ratio,
            decay_share=config.decay_share,
        ),
    )
