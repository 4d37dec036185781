"""One rank of the test of the comm hook: trains until it is told that it is enough.

Started from test_comm_hook.py with the folder of the images and the file that says so; prints one
JSON object a rank.
"""

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainer.config import DistConfig
from trainer.distributed import checksum, comm_hook
from trainer.report import Reporter
from trainer.run import open_trainer
from trainer.sources import load


def is_bf16(gradient: torch.Tensor | None) -> bool:
    """Whether all its numbers are of that format: then it has travelled in it."""
    return gradient is not None and torch.equal(gradient, gradient.bfloat16().float())


def gradients(*, hooked: bool) -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    net = DistributedDataParallel(model, bucket_cap_mb=0.005)
    if hooked:
        assert comm_hook(net, DistConfig(), live=True) is not None
    for _ in range(2):
        net.zero_grad()
        net(torch.randn(8, 32)).square().sum().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def main() -> None:
    faulthandler.dump_traceback_later(80, exit=True)
    path, enough, *more = sys.argv[1:]
    config = load(["--data.path", path, *more])
    coarse: list[int] = []
    equal: list[bool] = []
    with open_trainer(config, reporter=Reporter(enabled=False)) as trainer:
        micro_batch, update = trainer.micro_batch, trainer.update

        def reduced(batch: Any, part: Any) -> torch.Tensor:
            loss = micro_batch(batch, part)
            if part.last and all(is_bf16(p.grad) for p in trainer.model.parameters()):
                coarse.append(trainer.step)
            return loss

        def compared() -> None:
            update()
            if trainer.step % 8 == 0:
                sums = ["", ""]
                weights = torch.nn.ParameterList(trainer.model.parameters())
                dist.all_gather_object(sums, checksum(weights))
                equal.append(sums[0] == sums[1])

        trainer.micro_batch = reduced  # type: ignore[method-assign]
        trainer.update = compared  # type: ignore[method-assign]
        over = torch.zeros(1)
        epoch = 0
        while not over:
            trainer.train_epoch(epoch)
            epoch += 1
            over[0] = Path(enough).exists()
            dist.all_reduce(over)
        pairs = zip(gradients(hooked=True), gradients(hooked=False), strict=True)
        report = {
            "rank": trainer.placement.rank,
            "steps": trainer.step,
            "coarse": coarse,
            "equal": equal,
            "as_without": all(torch.equal(ours, theirs) for ours, theirs in pairs),
        }
        # One write: both ranks share the file.
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
