"""MixUp and CutMix on the device, and how strong augmentation is in the course of training.

Both blend a batch with itself, moved by some places: a few passes over memory that the device
has anyway. Everything random is drawn on the host from (seed, step), so that nothing here waits
for the device.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

__all__ = ["Mix", "Mixing", "Schedule", "strength_at"]

Schedule = Literal["constant", "linear", "late_off"]


def strength_at(progress: float, schedule: Schedule, late_share: float = 0.2) -> float:
    """How strong augmentation is, 0 to 1, after `progress` (0 to 1) of the steps.

    ``constant``: 1. ``linear``: falls to 0 at the end. ``late_off``: 1, then 0 in the last
    `late_share` of the steps, so that the model ends on images like those it will see.
    """
    progress = min(1.0, max(0.0, progress))
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "late_off":
            # Added, because 1 - 0.7 is more than 0.3: step 3 of 10 would still be on.
            return 0.0 if late_share > 0 and progress + late_share >= 1 else 1.0


@dataclass(frozen=True, slots=True)
class Mix:
    """What is done to one batch."""

    kind: Literal["mixup", "cutmix"]
    share: float
    """Of the partner in each image and target, 0 to 1; for CutMix the box's share of the pixels."""
    shift: int
    """The partner of image i is image i - shift."""
    box: tuple[int, int, int, int] | None = None
    """Top, left, bottom, right in pixels, the last two exclusive; CutMix only."""


class Mixing:
    """Blends each image of a batch with another of it, and their labels alike.

    MixUp (Zhang et al. 2017) with a share from Beta(`mixup_alpha`, `mixup_alpha`); CutMix (Yun et
    al. 2019) with a box whose area is from Beta(`cutmix_alpha`, `cutmix_alpha`), cut at the
    image's edges. An alpha of 0 turns one off; with both on, each batch draws one of them.
    """

    def __init__(
        self, classes: int, mixup_alpha: float = 0.0, cutmix_alpha: float = 0.0, seed: int = 0
    ) -> None:
        self.classes = classes
        self.mixup_alpha = mixup_alpha
        self.cutmix_alpha = cutmix_alpha
        self.seed = seed

    @property
    def on(self) -> bool:
        """Whether `mix` ever does anything."""
        return self.mixup_alpha > 0 or self.cutmix_alpha > 0

    def draw(self, shape: torch.Size, step: int, strength: float = 1.0) -> Mix | None:
        """What `mix` does to a batch of that shape (N, C, H, W); None where it is left alone."""
        count, _, height, width = shape
        if not self.on or strength <= 0 or count < 2:
            return None
        chance = np.random.default_rng((self.seed, step))
        both = self.mixup_alpha > 0 and self.cutmix_alpha > 0
        cut = chance.random() < 0.5 if both else self.cutmix_alpha > 0
        alpha = self.cutmix_alpha if cut else self.mixup_alpha
        share = min(1.0, strength) * float(chance.beta(alpha, alpha))
        # The order is random already, so moving all by one amount is as random a pairing as a
        # permutation, needs no indices on the device, and nobody is paired with itself.
        shift = int(chance.integers(1, count))
        if not cut:
            return Mix("mixup", share, shift)
        box = _box(height, width, share, *chance.random(2).tolist())
        top, left, bottom, right = box
        return Mix("cutmix", (bottom - top) * (right - left) / (height * width), shift, box)

    def mix(
        self, images: torch.Tensor, labels: torch.Tensor, step: int, strength: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float images (N, C, H, W) and int64 labels (N,) to new images and fp32 targets
        (N, classes), which ``F.cross_entropy`` takes; the very same two where nothing is mixed.

        (seed, step) decide all that is random; give each rank another seed, or all mix alike.
        `strength`, 0 to 1, scales the partner's share. Memory format and dtype are kept; the
        inputs are not changed. Launches work on the device without waiting for it.
        """
        mix = self.draw(images.shape, step, strength)
        if mix is None:
            return images, labels
        classes = torch.arange(self.classes, device=labels.device)
        own = (labels[:, None] == classes).float()
        targets = torch.lerp(own, own.roll(mix.shift, 0), mix.share)
        mixed = torch.empty_like(images) if mix.box is None else images.clone()
        # Two parts instead of a rolled copy of the whole batch.
        for here, there in (
            (slice(mix.shift, None), slice(None, -mix.shift)),
            (slice(None, mix.shift), slice(-mix.shift, None)),
        ):
            if mix.box is None:
                torch.lerp(images[here], images[there], mix.share, out=mixed[here])
            else:
                top, left, bottom, right = mix.box
                window = (slice(None), slice(top, bottom), slice(left, right))
                mixed[(here, *window)].copy_(images[(there, *window)])
        return mixed, targets


def _box(
    height: int, width: int, area: float, down: float, along: float
) -> tuple[int, int, int, int]:
    """A box of the image's proportions around a random centre, cut at the edges."""
    side = math.sqrt(area)
    tall, wide = round(height * side), round(width * side)
    top, left = round(down * height - tall / 2), round(along * width - wide / 2)
    return (
        max(0, top),
        max(0, left),
        min(height, top + tall),
        min(width, left + wide),
    )
