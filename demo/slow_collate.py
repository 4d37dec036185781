"""A collate_fn that normalises and copies images row by row, in Python.

    torchrun --standalone --nproc-per-node 2 demo/slow_collate.py
    gpuwatch demo demo/slow_collate.py

gpuwatch finds `collate_ipc`: the workers are busy, and most of a batch's time in them goes into
collating, not into reading or decoding.

The fix (--fixed) is what the hint names: default_collate, which stacks items of one shape, and
normalising on the device.
"""

import sys

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.utils.data import DataLoader, default_collate

import gpuwatch
from demo._common import CLASSES, IMAGES, Job, ignore_interrupt, run
from trainer.data import ImageSet, make_jpegs, normalise, scan
from trainer.models import SmallCNN

PX = 96
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def collate(items: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the images and put them into one batch, one row after the other."""
    batch = torch.zeros(len(items), 3, PX, PX)
    labels = torch.zeros(len(items), dtype=torch.int64)
    for number, (image, label) in enumerate(items):
        for channel in range(3):
            mean, deviation = MEAN[channel], STD[channel]
            for y in range(PX):
                row = [(float(v) / 255 - mean) / deviation for v in image[channel, y].tolist()]
                batch[number, channel, y] = torch.tensor(row)
        labels[number] = label
    return batch, labels


def train(job: Job) -> None:
    """Train on batches that are put together in Python."""
    gpuwatch.watch(name="slow-collate")
    dataset = ImageSet(scan(make_jpegs(images=IMAGES, classes=CLASSES, px=96)), px=PX, augment=True)
    loader = DataLoader(
        dataset,
        batch_size=8,
        sampler=job.sampler(dataset),
        num_workers=1,
        collate_fn=default_collate if job.fixed else collate,
        worker_init_fn=ignore_interrupt,
    )
    model = job.replicate(SmallCNN(CLASSES, width=16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for images, labels in job.batches(loader):
        batch = normalise(images) if job.fixed else images
        loss = F.cross_entropy(model(batch), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        job.report(loss)


if __name__ == "__main__":
    sys.exit(run(train, __doc__, fix="default_collate, and normalising the whole batch at once"))
