"""The optimizer and its schedule, from the configuration."""

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainer.config import OptimConfig
from trainer.schedule import lr_factor

__all__ = ["build_optimizer", "build_schedule"]


def build_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """SGD with Nesterov momentum or AdamW; weight decay on matrices and kernels only.

    Decaying norms' scales and biases costs accuracy and regularises nothing (Goyal et al. 2017).
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    lr: float | torch.Tensor = config.peak_lr
    # fused: one kernel over all parameters instead of several per parameter.
    if config.name == "adamw":
        return AdamW(groups, lr=lr, fused=True)
    return SGD(groups, lr=lr, momentum=config.momentum, nesterov=config.momentum > 0, fused=True)


def build_schedule(optimizer: Optimizer, config: OptimConfig, *, total_steps: int) -> LambdaLR:
    """`lr_factor` over the optimizer's steps; to be stepped once after each of them."""
    return LambdaLR(
        optimizer,
        lambda step: lr_factor(
            step,
            total_steps=total_steps,
            warmup_steps=config.warmup_steps,
            kind=config.schedule,
            min_ratio=config.lr_min_ratio,
        ),
    )
