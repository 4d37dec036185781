"""A small CNN with BatchNorm: real layers, a few milliseconds a batch on one core."""

import itertools

import torch
from torch import nn

from trainer.models.recompute import recomputed

__all__ = ["SmallCNN"]


class SmallCNN(nn.Module):
    """Four strided 3x3 stages and a linear head: float images (N, 3, H, W) -> logits (N, classes).

    H and W at least 8 (each stage halves them).
    """

    def __init__(self, classes: int, *, width: int = 32) -> None:
        super().__init__()
        channels = [3, width, width, 2 * width, 4 * width]
        self.stages = nn.Sequential(
            *(_stage(before, after) for before, after in itertools.pairwise(channels))
        )
        self.head = nn.Linear(channels[-1], classes)
        self._checkpointing = False

    def enable_checkpointing(self) -> None:
        """Keep only each stage's input from now on, and compute the stage again in the backward."""
        self._checkpointing = True

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits; the mean over the positions makes the head independent of the image size."""
        features = images
        for stage in self.stages:
            features = recomputed(stage, features) if self._checkpointing else stage(features)
        logits: torch.Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


def _stage(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        # BatchNorm's shift makes a bias here redundant.
        nn.Conv2d(before, after, kernel_size=3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )
