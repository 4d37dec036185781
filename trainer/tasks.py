"""What a training computes on a batch: the loss to learn from, and how well the model does."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from trainer.accumulate import MicroBatch
from trainer.data.augment import Mixing
from trainer.data.images import normalise
from trainer.data.text.plan import Padding

__all__ = ["ClassifyTextTask", "ImageTask", "LanguageTask", "Task", "to_device"]


class Task(Protocol):
    """One kind of training. Batches are on the device, but for `largest_batch`."""

    rate_unit: str
    """What the rate counts: ``img/s`` or ``tok/s``."""

    def loss(
        self, model: nn.Module, batch: Any, part: MicroBatch, *, draw: int, strength: float
    ) -> torch.Tensor:
        """The micro-batch's share of its window's mean loss, fp32 and scalar.

        `draw`, another number for each micro-batch, and `strength` (0..1) decide on augmentations
        that are made on the device.
        """
        ...

    def judge(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """(sum of losses, right answers, answers) as float64, shape (3,), on the device."""
        ...

    def largest_batch(self, batch_size: int) -> Any:
        """A batch on the CPU that needs as much memory as one of that size ever will."""
        ...


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on the device, copied without waiting where its memory is pinned."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(part, device) for name, part in batch.items()}
    return tuple(to_device(part, device) for part in batch)


class ImageTask:
    """Classes of images: batches are (uint8 (N, 3, px, px), int64 labels (N,))."""

    rate_unit = "img/s"

    def __init__(
        self, *, px: int, classes: int, mixing: Mixing | None, dtype: torch.dtype | None = None
    ) -> None:
        self._px = px
        self._classes = classes
        self._mixing = mixing
        self._dtype = dtype

    def loss(
        self, model: nn.Module, batch: Any, part: MicroBatch, *, draw: int, strength: float
    ) -> torch.Tensor:
        """Cross-entropy, on mixed images and labels where that is asked for."""
        images, labels = batch
        images, targets = self._floats(images), labels
        if self._mixing is not None:
            images, targets = self._mixing.mix(images, labels, draw, strength)
        logits = model(images)
        return F.cross_entropy(logits.float(), targets) * part.share

    def judge(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Without augmentation of any kind."""
        images, labels = batch
        return _judged(model(self._floats(images)), labels)

    def largest_batch(self, batch_size: int) -> Any:
        """All images have one size."""
        shape = (batch_size, 3, self._px, self._px)
        labels = torch.arange(batch_size) % self._classes
        return torch.randint(0, 256, shape, dtype=torch.uint8), labels

    def _floats(self, images: torch.Tensor) -> torch.Tensor:
        # uint8 has travelled: a quarter of the bytes of floats.
        floats = normalise(images)
        return floats if self._dtype is None else floats.to(self._dtype)


class _TextTask:
    """What both kinds of text have in common: batches are dicts of tensors."""

    rate_unit = "tok/s"
    _kind: Literal["lm", "classify"]

    def __init__(self, *, vocabulary: int, max_tokens: int, padding: Padding) -> None:
        self._vocabulary = vocabulary
        self._max_tokens = max_tokens
        self._padding = padding

    def largest_batch(self, batch_size: int) -> Any:
        """Every row is full."""
        from trainer.data.text import largest_batch

        return largest_batch(
            batch_size, self._max_tokens, self._vocabulary, self._kind, self._padding
        )


class LanguageTask(_TextTask):
    """The next token of text: batches have `input_ids`, `attention_mask`, `labels`."""

    _kind = "lm"

    def loss(
        self, model: nn.Module, batch: Any, part: MicroBatch, *, draw: int, strength: float
    ) -> torch.Tensor:
        """The mean over every predicted token of the window on all ranks, padding left out."""
        from trainer.models.gpt import lm_loss

        total, _count = lm_loss(model(batch), batch["labels"])
        return total * part.per_unit

    def judge(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Of the tokens that are predicted."""
        logits = model(batch)[:, :-1]
        labels = batch["labels"][:, 1:]
        return _judged(logits.flatten(0, 1), labels.flatten())


class ClassifyTextTask(_TextTask):
    """Classes of texts: batches as a language model's, with one label a text."""

    _kind = "classify"

    def loss(
        self, model: nn.Module, batch: Any, part: MicroBatch, *, draw: int, strength: float
    ) -> torch.Tensor:
        """Cross-entropy, each text of the window the same weight."""
        logits = model(batch).float()
        return F.cross_entropy(logits, batch["labels"], reduction="sum") * part.per_unit

    def judge(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Of all texts."""
        return _judged(model(batch), batch["labels"])


def _judged(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Labels of -100 do not count."""
    loss = F.cross_entropy(logits.float(), labels, reduction="sum")
    right = ((logits.argmax(dim=-1) == labels) & (labels != -100)).sum()
    return torch.stack([loss.double(), right.double(), (labels != -100).sum().double()])
