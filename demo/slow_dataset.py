"""Images that come one by one from a slow remote store, through one loader worker.

    torchrun --standalone --nproc-per-node 2 demo/slow_dataset.py
    gpuwatch demo demo/slow_dataset.py

gpuwatch finds `loader_few_workers`: the worker is always busy, the queue is always empty, and most
of a batch's time in the worker is no CPU time, so another worker is nearly free.

The fix (--fixed) is what the hint names: a larger num_workers. Eight requests are then on their way
at once, and the step is as short as the CPUs allow.
"""

import io
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.utils.data import DataLoader, Dataset

import gpuwatch
from demo._common import CLASSES, IMAGES, Job, ignore_interrupt, run
from trainer.data import ImageFiles, make_jpegs, normalise, scan
from trainer.models import SmallCNN

LATENCY_MS = 25.0


def get_object(path: Path) -> bytes:
    """Fetch one object as from a bucket: the round trip is simulated, the bytes are a real JPEG."""
    time.sleep(LATENCY_MS / 1e3)
    return path.read_bytes()


def decode(data: bytes) -> torch.Tensor:
    """Return the image as a uint8 tensor (3, 64, 64)."""
    from PIL import Image  # here, so that a missing Pillow is one sentence when images are made

    image = Image.open(io.BytesIO(data)).convert("RGB").resize((64, 64))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class Bucket(Dataset[tuple[torch.Tensor, int]]):
    """Item i: (uint8 tensor (3, 64, 64), label), one request each."""

    def __init__(self, files: ImageFiles) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = decode(get_object(self.files.root / self.files.paths[index]))
        return image, int(self.files.labels[index])


def train(job: Job) -> None:
    """Train on what the store delivers."""
    gpuwatch.watch(name="slow-dataset")
    job.simulated(f"{LATENCY_MS:g} ms for every request to the store")
    dataset = Bucket(scan(make_jpegs(images=IMAGES, classes=CLASSES, px=384)))
    loader = DataLoader(
        dataset,
        batch_size=8,
        sampler=job.sampler(dataset),
        num_workers=8 if job.fixed else 1,
        worker_init_fn=ignore_interrupt,
    )
    model = job.replicate(SmallCNN(CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for images, labels in job.batches(loader):
        loss = F.cross_entropy(model(normalise(images)), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        job.report(loss)


if __name__ == "__main__":
    sys.exit(run(train, __doc__, fix="eight loader workers a rank instead of one"))
