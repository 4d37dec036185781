"""Augmentation that walks over every pixel in Python, in the loader workers.

    torchrun --standalone --nproc-per-node 2 demo/cpu_decode.py
    gpuwatch demo demo/cpu_decode.py

gpuwatch finds `cpu_decode_aug`: the workers compute all the time and the cores are full of them,
so that more workers would have no core to run on.

The fix (--fixed) is what the hint names: decode once, keep the resized items, and do the rest on
the device. The same turn of the hue is one matrix product for the whole batch then.
"""

import math
import random
import sys
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.utils.data import DataLoader, Dataset

import gpuwatch
from demo._common import CLASSES, IMAGES, Job, decoded, ignore_interrupt, run
from trainer.data import ImageSet, make_jpegs, normalise, scan
from trainer.models import SmallCNN

PX = 112
MOST_RADIANS = math.pi / 6

TO_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
"""RGB to brightness and two axes of colour (NTSC, 1953), about whose plane a hue turns."""


def hue_matrix(radians: float) -> torch.Tensor:
    """Return the 3 x 3 matrix that turns the hue of RGB colours."""
    cos, sin = math.cos(radians), math.sin(radians)
    turn = torch.tensor([[1.0, 0.0, 0.0], [0.0, cos, -sin], [0.0, sin, cos]])
    matrix: torch.Tensor = torch.linalg.inv(TO_YIQ) @ turn @ TO_YIQ
    return matrix


def turn_pixels(image: torch.Tensor, radians: float) -> torch.Tensor:
    """Turn the hue of a uint8 image (3, H, W), pixel by pixel."""
    rows: list[list[float]] = hue_matrix(radians).tolist()
    red, green, blue = (channel.flatten().tolist() for channel in image)
    turned = torch.empty(image.shape[0], len(red), dtype=torch.uint8)
    for channel, (of_red, of_green, of_blue) in enumerate(rows):
        values = []
        for r, g, b in zip(red, green, blue, strict=True):
            value = of_red * r + of_green * g + of_blue * b
            values.append(int(min(255.0, max(0.0, value))))
        turned[channel] = torch.tensor(values, dtype=torch.uint8)
    return turned.view(image.shape)


def turn_batch(images: torch.Tensor) -> torch.Tensor:
    """Turn the hue of each image of a uint8 batch (N, 3, H, W) at once, on its device."""
    turns = [hue_matrix(random.uniform(-MOST_RADIANS, MOST_RADIANS)) for _ in images]
    matrices = torch.stack(turns).to(images.device)
    return torch.einsum("nij,njhw->nihw", matrices, images.float()).clamp_(0.0, 255.0)


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Item i: a decoded image whose hue has been turned at random, and its label."""

    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.images[index]
        return turn_pixels(image, random.uniform(-MOST_RADIANS, MOST_RADIANS)), label


def train(job: Job) -> None:
    """Train on images of many hues."""
    gpuwatch.watch(name="cpu-decode")
    dataset: Dataset[Any]
    if job.fixed:
        dataset = decoded(PX)
    else:
        files = scan(make_jpegs(images=IMAGES, classes=CLASSES, px=384))
        dataset = Augmented(ImageSet(files, px=PX, augment=True))
    loader = DataLoader(
        dataset,
        batch_size=8,
        sampler=job.sampler(dataset),
        num_workers=2,
        worker_init_fn=ignore_interrupt,
    )
    model = job.replicate(SmallCNN(CLASSES, width=16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for images, labels in job.batches(loader):
        batch = turn_batch(images) if job.fixed else images
        loss = F.cross_entropy(model(normalise(batch)), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        job.report(loss)


if __name__ == "__main__":
    sys.exit(run(train, __doc__, fix="images decoded once, their hue turned batch by batch"))
