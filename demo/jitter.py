"""Batches of uneven size: in every step another rank has the large images.

    torchrun --standalone --nproc-per-node 2 demo/jitter.py
    gpuwatch demo demo/jitter.py

Training at two resolutions, with one batch of large images in each step, and a random rank that
gets it. No rank is slower than the others on the whole, yet each step takes as long as the large
batch.

gpuwatch finds `straggler`: the ranks are late in turn.

The fix (--fixed) is what the hint asks for: find what is uneven. All ranks get large images in the
same step, one step out of as many as there are ranks: the same mixture, without the waiting.
"""

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.utils.data import ConcatDataset, DataLoader, Sampler

import gpuwatch
from demo._common import CLASSES, IMAGES, Job, decoded, run
from trainer.data import normalise
from trainer.models import SmallCNN

SMALL_PX, LARGE_PX = 32, 128


class Buckets(Sampler[list[int]]):
    """Batches of 8 indices, small images from 0 on and large ones from `IMAGES` on.

    One rank of each step gets the large ones, or all ranks of one step.
    """

    def __init__(self, rank: int, ranks: int, *, together: bool) -> None:
        self.rank = rank
        self.ranks = ranks
        self.together = together

    def __iter__(self) -> Iterator[list[int]]:
        dice = random.Random(0)  # the same on every rank, so that they agree on whose turn it is
        mine = random.Random(self.rank)
        while True:
            turn = dice.randrange(self.ranks)
            large = turn == (0 if self.together else self.rank)
            first = IMAGES if large else 0
            yield [first + mine.randrange(IMAGES) for _ in range(8)]


def train(job: Job) -> None:
    """Train at two resolutions."""
    gpuwatch.watch(name="jitter")
    dataset: ConcatDataset[Any] = ConcatDataset([decoded(SMALL_PX), decoded(LARGE_PX)])
    buckets = Buckets(job.rank, job.ranks, together=job.fixed)
    loader = DataLoader(dataset, batch_sampler=buckets)
    model = job.replicate(SmallCNN(CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for images, labels in job.batches(loader):
        loss = F.cross_entropy(model(normalise(images)), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        job.report(loss)


if __name__ == "__main__":
    sys.exit(run(train, __doc__, fix="images of one size in a step, on all ranks", ranks=2))
