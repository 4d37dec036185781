"""A plain DistributedDataParallel loop with one fault, for TraceML and gpuwatch to judge alike.

    torchrun --nproc-per-node=2 benchmarks/traceml_faults.py FAULT FOLDER [--batchnorm] [--traceml]

It knows nothing of gpuwatch, whose `gpuwatch run` needs no change; with `--traceml` it is set up as
TraceML's documentation says. Each rank writes the wall clock at the end of its first step to
`FOLDER/first.RANK`: what either tool says is timed from when all have. `FOLDER/last.RANK` is the
number of its last step. Sleeps stand for what takes long elsewhere, so that the fault is the same
however busy the machine is.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

BATCH = 8
WORKERS = 2
PIXELS = 64
SECONDS = 15.0

ITEM_S = 0.020
"""What each item waits where the dataset is slow: 80 ms a batch of 8 with two workers."""

ITEM_ON_ONE_S = 0.010
"""... and where it is slow on one rank."""

SLEEP_S = 0.030
BALLAST_MB = 48
"""Gradients of parameters that change nothing: far more to send than the step computes."""

REDUCED_MB = 128
"""What the loop reduces by itself where that is to be most of the step."""

BETWEEN_S = 0.010
LAST_STEPS = 10
"""Steps that are still made once it is time to stop: ranks are never so many apart."""

FAULTS = (
    "slow_dataset", "slow_data@1", "slow_forward@1", "slow_backward@1", "all_reduce", "ddp",
    "healthy",
)  # fmt: skip


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Random images that cost nothing but the wait for each."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self.image = torch.randn(3, PIXELS, PIXELS)

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.wait_s:
            time.sleep(self.wait_s)
        return self.image, index % 10


class Net(nn.Module):
    """A small CNN: about 10 ms of one core a step and 80 kB of gradients, and its fault."""

    def __init__(self, fault: str, late: bool, batchnorm: bool) -> None:
        super().__init__()
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d if batchnorm else lambda _: nn.Identity()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), norm(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), norm(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 48, 3, padding=1), norm(48), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10),
        )  # fmt: skip
        self.ballast = (
            nn.Parameter(torch.zeros(BALLAST_MB * 2**20 // 4)) if fault == "ddp" else None
        )
        self.forward_s = SLEEP_S if late and fault == "slow_forward@1" else 0.0
        self.backward_s = SLEEP_S if late and fault == "slow_backward@1" else 0.0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.forward_s:
            time.sleep(self.forward_s)
        output: torch.Tensor = self.layers(images)
        if self.backward_s:
            output.register_hook(lambda _: time.sleep(self.backward_s))
        if self.ballast is not None:
            output = output + 0.0 * self.ballast[0]  # a gradient for all of them
        return output


def compute(seconds: float) -> None:
    """Compute for so much CPU time of this thread, as metrics or a loss in plain torch would."""
    matrix = torch.ones(64, 64)
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        torch.mm(matrix, matrix)


def stopping(folder: Path, rank: int, seconds: float) -> Callable[[int], bool]:
    """Return what says, after so many steps, whether the loop is to end: on all ranks after the
    same step, and without a collective, which a tool could see.
    """
    began_s = time.monotonic()
    stop, last = folder / "stop", 0

    def is_last(steps: int) -> bool:
        nonlocal last
        if last == 0 and rank == 0 and time.monotonic() - began_s > seconds:
            last = steps + LAST_STEPS
            say(stop, last)
        elif last == 0 and stop.exists():
            last = int(stop.read_text())
        return 0 < last <= steps

    return is_last


def say(path: Path, value: float) -> None:
    """Write a number so that nobody reads half of it."""
    new = path.with_suffix(f"{path.suffix}.new")
    new.write_text(repr(value))
    os.replace(new, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after the first step")
    parser.add_argument("--batchnorm", action="store_true")
    parser.add_argument("--traceml", action="store_true")
    options = parser.parse_args()
    fault: str = options.fault
    traced: Callable[[nn.Module], Any] = lambda _: contextlib.nullcontext()  # noqa: E731
    if options.traceml:
        import traceml_ai as traceml

        traceml.init(mode="auto")
        traced = traceml.trace_step
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    late = rank == 1
    model = DistributedDataParallel(Net(fault, late, options.batchnorm))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    wait_s = ITEM_S if fault == "slow_dataset" else 0.0
    if fault == "slow_data@1" and late:
        wait_s = ITEM_ON_ONE_S
    loader = DataLoader(Images(wait_s), batch_size=BATCH, num_workers=WORKERS)
    buffer = torch.zeros(REDUCED_MB * 2**20 // 4)
    is_last = None
    for steps, (images, labels) in enumerate(loader, start=1):
        with traced(model):
            optimizer.zero_grad(set_to_none=True)
            output = model(images)
            if fault == "healthy":
                compute(BETWEEN_S)
            loss = criterion(output, labels)
            loss.backward()
            if fault == "all_reduce":
                dist.all_reduce(buffer)
            optimizer.step()
        if is_last is None:
            say(options.folder / f"first.{rank}", time.time())
            is_last = stopping(options.folder, rank, options.seconds)
        if is_last(steps):
            say(options.folder / f"last.{rank}", steps)
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
