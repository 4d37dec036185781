"""A rank that runs out of data and leaves the collectives: the others wait for it, for ever.

    torchrun --standalone --nproc-per-node 2 demo/hang.py
    gpuwatch demo demo/hang.py

The images are dealt out by hand, 1,200 a rank, and the last rank gets what is left of 2,048. When
it has seen them it waits for rank 0 to choose the next learning rate, while rank 0 waits for its
gradients.

gpuwatch finds `hang`, ten seconds later: who stands where, and the rank that the others wait for.
On that rank's screen `t` shows its stack.

The fix (--fixed) is what the hint names: the same number of batches on every rank. A
DistributedSampler deals out as many images to each.
"""

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset

import gpuwatch
from demo._common import CLASSES, Job, decoded, run
from trainer.data import normalise
from trainer.models import SmallCNN

SHARE = 1200


def shard(job: Job) -> DataLoader[Any]:
    """Return the loader over this rank's part of the images."""
    dataset: ConcatDataset[Any] = ConcatDataset([decoded(96)] * 4)
    if job.fixed:
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, job.ranks, job.rank)
        return DataLoader(dataset, batch_size=32, sampler=sampler)
    first = job.rank * SHARE
    part = Subset(dataset, range(first, min(first + SHARE, len(dataset))))
    return DataLoader(part, batch_size=32, shuffle=True)


def next_rate(job: Job, epoch: int, rate: float) -> float:
    """Return the learning rate of the next epoch: rank 0's choice, which it leaves in the store.

    The store is the one in which the ranks of the job found each other.
    """
    chosen = max(1e-3, 0.9 * rate)
    if not dist.is_initialized():
        return chosen
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    key = f"rate-{epoch}"
    if job.rank == 0:
        store.set(key, str(chosen))
    while not store.check([key]):
        time.sleep(0.05)
    return float(store.get(key))


def train(job: Job) -> None:
    """Train epoch by epoch, with one learning rate for all ranks in each."""
    gpuwatch.watch(name="hang")
    loader = shard(job)
    model = job.replicate(SmallCNN(CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    epoch = 0
    while not job.done:
        for images, labels in job.batches(loader):
            loss = F.cross_entropy(model(normalise(images)), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            job.report(loss)
        group = optimizer.param_groups[0]
        group["lr"] = next_rate(job, epoch, group["lr"])
        epoch += 1


if __name__ == "__main__":
    sys.exit(run(train, __doc__, fix="a DistributedSampler instead of parts by hand", ranks=2))
