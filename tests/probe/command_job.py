"""One rank of the test of commands: the trainer's own loop, and then a hang.

Started by torchrun from test_commands_live.py with the folder of the images and one for signs. A
line of JSON a rank and epoch says which images were trained on. Each image has a class of its own,
so a label names it.
"""

import faulthandler
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gpuwatch
from trainer.report import Reporter
from trainer.run import open_trainer
from trainer.sources import load

STEP_MS = 15


def train(path: str, signs: Path) -> None:
    config = load(
        [
            "--data.path", path, "--data.eval_fraction", "0", "--data.image_px", "16",
            "--model.width", "4", "--loader.batch_size", "4", "--loader.num_workers", "1",
            "--train.steps", "100000", "--train.threads", "1", "--train.eval_interval_epochs", "0",
            "--train.allow_control", "true", "--faults.forward_ms", str(STEP_MS),
        ]
    )  # fmt: skip
    turned: list[int] = []
    with open_trainer(config, reporter=Reporter(enabled=False)) as trainer:
        gpuwatch.knob("turns", 0, turned.append)
        micro_batch = trainer.micro_batch
        seen: list[int] = []
        windows: list[tuple[int, float]] = []

        def recorded(batch: Any, part: Any) -> torch.Tensor:
            seen.extend(batch[1].tolist())
            if part.last:
                windows.append((trainer.step, part.window_samples))
            return micro_batch(batch, part)

        trainer.micro_batch = recorded  # type: ignore[method-assign]
        over = torch.zeros(1)
        epoch = 0
        while not over:
            trainer.train_epoch(epoch)
            row = {
                "rank": trainer.placement.rank,
                "epoch": epoch,
                "seen": seen.copy(),
                "windows": windows.copy(),
                "turned": turned,
                "workers": trainer.loaders.plan.num_workers,
                "in_use": trainer.loaders.train.num_workers,
            }
            # One write: both ranks share the pipe.
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            seen.clear()
            windows.clear()
            epoch += 1
            over[0] = (signs / "trained").exists()
            dist.all_reduce(over)
        hang(signs)


def hang(signs: Path) -> None:
    """Rank 1 does not come to a collective, and then to no backward; nobody may change anything."""
    gpuwatch.unwatch()
    gpuwatch.watch()
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    if dist.get_rank() == 1:
        while not (signs / "done").exists():
            time.sleep(0.05)
    dist.all_reduce(torch.ones(1))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for last in (False, False, True):
        if last and dist.get_rank() == 1:
            while not (signs / "done again").exists():
                time.sleep(0.05)
        model(torch.ones(2, 4)).sum().backward()


def main() -> None:
    faulthandler.dump_traceback_later(80, exit=True)
    path, signs = sys.argv[1:]
    train(path, Path(signs))


if __name__ == "__main__":
    main()
