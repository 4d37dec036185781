"""A multi-layer perceptron: as little compute as there can be, to see the loader and the loop."""

import itertools
import math

import torch
from torch import nn

from trainer.models.recompute import recomputed

__all__ = ["MLP"]


class MLP(nn.Module):
    """`depth` hidden layers of `width`: float images (N, 3, px, px) -> logits (N, classes)."""

    def __init__(self, classes: int, *, px: int, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        sizes = [3 * px * px, *[width] * depth]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(before, after), nn.ReLU(inplace=True))
            for before, after in itertools.pairwise(sizes)
        )
        self.head = nn.Linear(width, classes)
        # In a list, not registered: the layers are the model's under one name.
        self._segments: list[nn.Sequential] = []

    def enable_checkpointing(self) -> None:
        """Keep only the input of every few layers from now on, and compute those layers again in
        the backward. A layer keeps its output alone, so one by one there is nothing to save: it
        takes segments of about sqrt(depth) layers.
        """
        size = math.ceil(math.sqrt(len(self.layers)))
        self._segments = [
            nn.Sequential(*self.layers[start : start + size])
            for start in range(0, len(self.layers), size)
        ]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits; every image must be px square."""
        hidden = images.flatten(1)
        if self._segments:
            for segment in self._segments:
                hidden = recomputed(segment, hidden)
        else:
            for layer in self.layers:
                hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits
