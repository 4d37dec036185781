"""A checkpoint every few steps, with everything in it, frozen parts included.

    torchrun --standalone --nproc-per-node 2 demo/ckpt_every.py
    gpuwatch demo demo/ckpt_every.py

Images are matched with word vectors, which are frozen and most of the state: 73 MiB that never
change are written again and again, by rank 0, while the other rank waits for it in the next step.

gpuwatch finds `stall_checkpoint`: the time lies in spans of `torch.save`, outside the steps.

The fix (--fixed) is what the hint names: a checkpoint every 500 steps instead of every 5.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.utils.data import DataLoader

import gpuwatch
from demo._common import CLASSES, Job, decoded, run
from trainer.data import normalise
from trainer.models import SmallCNN

WORDS = 150_000
SIZE = 128


class Matcher(nn.Module):
    """Images (N, 3, H, W) to scores (N, classes): how near each is to the words of the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.images = SmallCNN(SIZE)
        self.words = nn.Embedding(WORDS, SIZE)
        self.words.requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of each image for the first words, one a class."""
        classes = self.words(torch.arange(CLASSES, device=images.device))
        scores: torch.Tensor = self.images(images) @ classes.T
        return scores


def train(job: Job) -> None:
    """Train, and save as often as asked."""
    gpuwatch.watch(name="ckpt-every")
    every_steps = 500 if job.fixed else 5
    dataset = decoded(64)
    loader = DataLoader(dataset, batch_size=8, sampler=job.sampler(dataset))
    matcher = Matcher()
    model = job.replicate(matcher)
    optimizer = torch.optim.AdamW(matcher.images.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        for images, labels in job.batches(loader):
            loss = F.cross_entropy(model(normalise(images)), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            job.report(loss)
            if job.step % every_steps == 0 and job.rank == 0:
                state = {"model": matcher.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, Path(folder) / "latest.pt")


if __name__ == "__main__":
    sys.exit(run(train, __doc__, fix="a checkpoint every 500 steps instead of every 5"))
