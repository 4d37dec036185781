"""A loop that logs every step: the loss as a number, a line on the disk, a call to a server.

    torchrun --standalone --nproc-per-node 2 demo/sync_every_step.py
    gpuwatch demo demo/sync_every_step.py

On a GPU `loss.item()` alone would wait for the device; on a CPU it costs nothing, and the rest
remains: a log that is flushed to the disk, and a tracking server that answers before the loop goes
on (its time is simulated).

gpuwatch finds `stall_log_sync`: the time lies between the marks, outside loading, forward, backward
and optimizer, on every rank and in every step.

The fix (--fixed) is what the hint names: log every 50 steps.
"""

import json
import os
import sys
import tempfile
import time
from typing import TextIO

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.utils.data import DataLoader

import gpuwatch
from demo._common import CLASSES, Job, decoded, run
from trainer.data import normalise
from trainer.models import SmallCNN

SERVER_MS = 20.0


class Tracker:
    """Keeps metrics in a file and on a server; the server is simulated, the file is real."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one line, wait until it is on the disk, and until the server has answered."""
        self.file.write(json.dumps({"step": step, **metrics}) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        time.sleep(SERVER_MS / 1e3)


def train(job: Job) -> None:
    """Train, and log as often as asked."""
    gpuwatch.watch(name="sync-every-step")
    job.simulated(f"{SERVER_MS:g} ms until a tracking server answers")
    every_steps = 50 if job.fixed else 1
    dataset = decoded(64)
    loader = DataLoader(dataset, batch_size=8, sampler=job.sampler(dataset))
    model = job.replicate(SmallCNN(CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    with tempfile.TemporaryFile("w", encoding="utf-8") as file:
        tracker = Tracker(file)
        for images, labels in job.batches(loader):
            logits = model(normalise(images))
            loss = F.cross_entropy(logits, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if job.step % every_steps == 0:
                right = (logits.argmax(dim=1) == labels).float().mean()
                tracker.log(job.step, {"loss": loss.item(), "accuracy": right.item()})
            job.report(loss)


if __name__ == "__main__":
    sys.exit(run(train, __doc__, fix="log every 50 steps instead of every step"))
