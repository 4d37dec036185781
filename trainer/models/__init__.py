"""The models, by name."""

from torch import nn

from trainer.config import ModelConfig
from trainer.models.cnn import SmallCNN

__all__ = ["SmallCNN", "build_model"]


def build_model(config: ModelConfig, *, classes: int) -> nn.Module:
    """The model `config.name`, with random weights from torch's generator, on the CPU."""
    match config.name:
        case "cnn":
            return SmallCNN(classes, width=config.width)
