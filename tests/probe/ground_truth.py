"""A training whose every phase sleeps a known time, run by the tests alone or under torchrun.

Prints one JSON line for each scenario with the range of its steps, then waits for the file named
in DONE so that its past can be asked for.
"""

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import gpuwatch

faulthandler.dump_traceback_later(100, exit=True)

STEPS = 14

slept_s: dict[str, float] = {}


def nap(phase: str, seconds: float) -> None:
    """Sleep, and count how long it really was: on a busy machine a sleep ends late."""
    began = time.perf_counter()
    time.sleep(seconds)
    slept_s[phase] = slept_s.get(phase, 0.0) + time.perf_counter() - began


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        nap("forward", forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        nap("backward", ctx.backward_s)
        return grads[0], None, None


class Items(Dataset[torch.Tensor]):
    def __init__(self, data_s: float, batches: int) -> None:
        self.data_s = data_s
        self.batches = batches

    def __len__(self) -> int:
        return 4 * self.batches

    def __getitem__(self, index: int) -> torch.Tensor:
        nap("data_wait", self.data_s / 4)
        return torch.ones(16)


class SlowSGD(torch.optim.SGD):
    optimizer_s = 0.0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        nap("optimizer", self.optimizer_s)
        return super().step(closure)


def model(norm: bool, distributed: bool) -> torch.nn.Module:
    layers: list[torch.nn.Module] = [torch.nn.Linear(16, 16)]
    if norm:
        layers.append(torch.nn.BatchNorm1d(16))
    net: torch.nn.Module = torch.nn.Sequential(*layers, torch.nn.Linear(16, 1))
    return DistributedDataParallel(net) if distributed else net


def scenario(name: str, first: int, ms: dict[str, float], norm: bool, accumulate: int) -> int:
    distributed = dist.is_initialized()
    torch.manual_seed(0)
    net = model(norm, distributed)
    optimizer = SlowSGD(net.parameters(), lr=0.01)
    optimizer.optimizer_s = ms["optimizer"] / 1e3
    loader = DataLoader(Items(ms["data_wait"] / 1e3, STEPS * accumulate), batch_size=4)
    steps: list[dict[str, float]] = []
    slept_s.clear()
    for i, batch in enumerate(loader):
        x = Slow.apply(net(batch), ms["forward"] / 1e3, ms["backward"] / 1e3)
        loss = x.mean() / accumulate
        loss.backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            nap("other", ms["other"] / 1e3)
            steps.append({phase: seconds * 1e3 for phase, seconds in slept_s.items()})
            slept_s.clear()
    last = first + STEPS
    # One write a line: two ranks share the pipe.
    rank = dist.get_rank() if distributed else 0
    row = {"scenario": name, "rank": rank, "first": first, "last": last, "slept_ms": steps}
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    return last


def main() -> None:
    torch.set_num_threads(1)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    gpuwatch.watch(name="ground-truth")
    rank = dist.get_rank() if distributed else 0
    base = {"data_wait": 12.0, "forward": 15.0, "backward": 20.0, "optimizer": 8.0, "other": 6.0}
    at = 0
    for norm in (False, True):
        at = scenario(f"even norm={norm}", at, base, norm, 1)
        at = scenario(f"accumulate norm={norm}", at, base, norm, 2)
        if distributed:
            for phase in ("data_wait", "forward", "backward"):
                late = {**base, phase: base[phase] + (30.0 if rank == 1 else 0.0)}
                at = scenario(f"late {phase} norm={norm}", at, late, norm, 1)
    done = Path(os.environ["DONE"])
    while not done.exists():
        time.sleep(0.05)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.exit(0)
