"""ResNets of bottleneck blocks (He et al. 2015), from the transformers package's layers."""

from collections.abc import Sequence

import torch
from torch import nn

from trainer.errors import MissingPackageError
from trainer.models.recompute import recomputed

__all__ = ["ResNet"]


class ResNet(nn.Module):
    """Float images (N, 3, H, W) -> logits (N, classes), with random weights.

    `width` is the number of channels after the stem; the four stages, of `stages` blocks each,
    put out 4, 8, 16 and 32 times as many. Width 64 and stages (3, 4, 6, 3) are ResNet-50 with the
    stride in the 3x3 convolution ("v1.5"): 25.56 M parameters for 1000 classes.

    Raises `MissingPackageError` where transformers is not installed.
    """

    def __init__(
        self, classes: int, *, width: int = 64, stages: Sequence[int] = (3, 4, 6, 3)
    ) -> None:
        super().__init__()
        # Seconds to import, and needed for this model only.
        try:
            from transformers import ResNetConfig, ResNetForImageClassification
        except ImportError:
            raise MissingPackageError(
                "model.name=resnet needs transformers: "
                'pip install transformers (or "gpuwatch-trainer[text]")'
            ) from None
        self.network = ResNetForImageClassification(
            ResNetConfig(
                num_channels=3,
                embedding_size=width,
                hidden_sizes=[4 * width * 2**stage for stage in range(len(stages))],
                depths=list(stages),
                layer_type="bottleneck",
                num_labels=classes,
            )
        )
        self._checkpointing = False

    def enable_checkpointing(self) -> None:
        """Keep only each stage's input from now on, and compute the stage again in the backward."""
        self._checkpointing = True

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits; H and W at least 32 for the last stage to see more than one position."""
        body = self.network.resnet
        hidden = body.embedder(images)
        for stage in body.encoder.stages:
            hidden = recomputed(stage, hidden) if self._checkpointing else stage(hidden)
        logits: torch.Tensor = self.network.classifier(body.pooler(hidden))
        return logits
