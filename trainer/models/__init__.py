"""The models, by name. What needs transformers imports it when it is asked for."""

from torch import nn

from trainer.config import ModelConfig
from trainer.models.cnn import SmallCNN

__all__ = ["SmallCNN", "build_model"]


def build_model(
    config: ModelConfig, *, classes: int, px: int = 64, vocabulary: int = 0, max_tokens: int = 256
) -> nn.Module:
    """The model `config.name`, with random weights from torch's generator, on the CPU.

    Args:
        config: which one, and how large.
        classes: what it tells apart (not of gpt, which tells its vocabulary apart).
        px: side of the images.
        vocabulary: tokens there are.
        max_tokens: tokens of the longest row.

    Raises:
        MissingPackageError: resnet and bert need transformers.
    """
    match config.name:
        case "cnn":
            return SmallCNN(classes, width=config.width)
        case "mlp":
            from trainer.models.mlp import MLP

            return MLP(classes, px=px, width=config.width, depth=config.depth)
        case "resnet":
            from trainer.models.resnet import ResNet

            return ResNet(classes, width=config.width, stages=config.stages)
        case "gpt":
            from trainer.models.gpt import TinyGPT

            return TinyGPT(
                vocabulary,
                width=config.width,
                depth=config.depth,
                heads=config.heads,
                max_tokens=max_tokens,
            )
        case "bert":
            from trainer.models.bert import Bert

            return Bert(
                classes,
                vocabulary=vocabulary,
                width=config.width,
                depth=config.depth,
                heads=config.heads,
                max_tokens=max_tokens,
            )
