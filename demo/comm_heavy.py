"""A model with far more parameters than compute: a head for a hundred thousand identities.

    torchrun --standalone --nproc-per-node 2 demo/comm_heavy.py
    gpuwatch demo demo/comm_heavy.py

As in face recognition, nearly all parameters are in the last layer: 49 MiB of gradients travel
for a few images a step. The transfer is real, over the loopback interface.

gpuwatch finds `comm_bound`: all ranks wait alike for the all-reduce, which compute does not hide.

The fix (--fixed) is what the hint names: gradient accumulation with no_sync, here over four
batches. A step takes longer then, but a batch less: gradients travel once for four of them. (The
other hint, gradients in 16 bits, is for a real network: over loopback, converting them on the CPU
costs what it saves.)
"""

import contextlib
import sys

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import gpuwatch
from demo._common import Job, decoded, run
from trainer.data import normalise
from trainer.models import SmallCNN

IDENTITIES = 100_000


def quiet(model: torch.nn.Module, *, last: bool) -> contextlib.AbstractContextManager[None]:
    """Return where a backward runs: gradients travel in that of the last batch of a step only."""
    if last or not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    return model.no_sync()


def train(job: Job) -> None:
    """Train a small network with a large head."""
    gpuwatch.watch(name="comm-heavy")
    dataset = decoded(32)
    loader = DataLoader(dataset, batch_size=8, sampler=job.sampler(dataset))
    model = job.replicate(SmallCNN(IDENTITIES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    accumulate = 4 if job.fixed else 1
    for number, (images, labels) in enumerate(job.batches(loader), start=1):
        last = number % accumulate == 0
        with quiet(model, last=last):
            loss = F.cross_entropy(model(normalise(images)), labels)
            (loss / accumulate).backward()  # type: ignore[no-untyped-call]
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            job.report(loss, batches=accumulate)


if __name__ == "__main__":
    sys.exit(run(train, __doc__, fix="gradients of four batches travel at once (no_sync)", ranks=2))
