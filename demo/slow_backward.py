"""One rank computes more than the others in its backward: it alone watches the gradients.

    torchrun --standalone --nproc-per-node 2 demo/slow_backward.py
    gpuwatch demo demo/slow_backward.py

A hook on every weight takes the spectrum of its gradient, as people do who watch how a network
learns; and as one watches on one rank only, the last one alone has the hooks.

gpuwatch finds `straggler`, late in backward: the other rank has the same step, but spends the
difference waiting in the all-reduce.

The fix (--fixed) is what the hint asks for: find what slows the backward there. The gradients
are looked at in one step out of fifty.
"""

import functools
import sys

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.utils.data import DataLoader

import gpuwatch
from demo._common import CLASSES, Job, decoded, run
from trainer.data import normalise
from trainer.models import SmallCNN


class GradientWatch:
    """Keeps the singular values of every weight's gradient, of the latest step it looked at."""

    def __init__(self, job: Job, every_steps: int) -> None:
        self.job = job
        self.every_steps = every_steps
        self.spectra: dict[str, torch.Tensor] = {}

    def attach(self, model: torch.nn.Module) -> None:
        """Be called by each backward with the gradient of each weight."""
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                look = functools.partial(self._look, name)
                weight.register_hook(look)  # type: ignore[no-untyped-call]

    def _look(self, name: str, gradient: torch.Tensor) -> None:
        if self.job.step % self.every_steps == 0:
            self.spectra[name] = torch.linalg.svdvals(gradient.detach().flatten(1))


def train(job: Job) -> None:
    """Train with a watch on the last rank's gradients."""
    gpuwatch.watch(name="slow-backward")
    dataset = decoded(48)
    loader = DataLoader(dataset, batch_size=8, sampler=job.sampler(dataset))
    model = SmallCNN(CLASSES, width=64)
    if job.rank == job.ranks - 1:
        GradientWatch(job, every_steps=50 if job.fixed else 1).attach(model)
    replica = job.replicate(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.02, momentum=0.9)
    for images, labels in job.batches(loader):
        loss = F.cross_entropy(replica(normalise(images)), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        job.report(loss)


if __name__ == "__main__":
    sys.exit(run(train, __doc__, fix="gradients watched in one step out of fifty", ranks=2))
