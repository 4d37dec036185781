"""Faults of the model and of the training loop."""

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainer.faults.spec import Fault

__all__ = ["LoopFaults", "model_with", "optimizer_with", "pin_process"]

_CHECKPOINT_MB = 96
_EVALUATION_BATCHES = 40
_LONGEST_S = 0.05  # a sleep that stands still looks at signals so often
_MOST_KEPT = 4096


def pin_process(faults: Sequence[Fault], rank: int) -> None:
    """Restrict this process, and the workers it will start, to as many CPUs as `affinity1` says."""
    for fault in faults:
        if fault.name == "affinity1" and fault.on(rank):
            cpus = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, cpus[: max(1, int(fault.strength))])


class _Heavy(nn.Module):
    """The model with parameters that change nothing, for their gradients' sake."""

    def __init__(self, model: nn.Module, megabytes: float) -> None:
        super().__init__()
        self.model = model
        self.ballast = nn.Parameter(torch.zeros(max(1, int(megabytes * 2**20 / 4))))

    def forward(self, *args: Any) -> Any:
        # One element is enough for a gradient of them all.
        return self.model(*args) + 0.0 * self.ballast[0]


def model_with(model: nn.Module, faults: Sequence[Fault], rank: int, ranks: int) -> nn.Module:
    """Return the model (not wrapped in DDP yet) with this rank's faults in it.

    A fault that changes the parameters is on all ranks or none: replicas must have the same.
    """
    for fault in faults:
        seconds = fault.strength / 1e3
        if fault.name == "comm_heavy":
            model = _Heavy(model, fault.strength)
        elif fault.name == "jitter":
            model.register_forward_pre_hook(_jitter(seconds, rank, ranks))
        elif not fault.on(rank):
            continue
        elif fault.name == "slow_forward":
            model.register_forward_pre_hook(lambda *_, s=seconds: time.sleep(s))
        elif fault.name == "slow_backward":
            model.register_forward_hook(_sleep_in_backward(seconds))
    return model


def _jitter(seconds: float, rank: int, ranks: int) -> Callable[..., None]:
    late = random.Random(0)  # the same on every rank, so that exactly one of them is late

    def sleep(_module: nn.Module, _inputs: Any) -> None:
        if late.randrange(ranks) == rank:
            time.sleep(seconds)

    return sleep


def _sleep_in_backward(seconds: float) -> Callable[..., None]:
    def sleep(_gradient: torch.Tensor) -> None:
        time.sleep(seconds)

    def after_forward(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(sleep)  # type: ignore[no-untyped-call]

    return after_forward


def optimizer_with(optimizer: Optimizer, faults: Sequence[Fault], rank: int) -> None:
    """Make each step of the optimizer sleep, within ``step()``, as `slow_optimizer` says."""
    seconds = sum(f.strength for f in faults if f.name == "slow_optimizer" and f.on(rank)) / 1e3
    if seconds:

        def sleep(*_: Any) -> None:
            time.sleep(seconds)

        optimizer.register_step_pre_hook(sleep)


class LoopFaults:
    """What goes wrong between the parts of a step.

    Args:
        faults: as asked for.
        rank: of this process.
        folder: takes checkpoints and logs.
        evaluate: runs an evaluation of so many batches.
        check: raises if the training has been asked to stop.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        rank: int,
        folder: Path,
        evaluate: Callable[[int], None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._mine = {f.name: f.strength for f in faults if f.on(rank)}
        # A collective, or what runs one, is on all ranks or none.
        self._all = {f.name: f.strength for f in faults}
        self._rank = rank
        self._folder = folder
        self._evaluate = evaluate
        self._check = check
        self._kept: list[Any] = []
        self._buffer: torch.Tensor | None = None
        self.any = bool(self._mine) or bool(self._all)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of the loop's loss, with what is wrong about it."""
        times = int(self._mine.get("retain_graph", 0.0))
        loss.backward(retain_graph=times > 0)  # type: ignore[no-untyped-call]
        if times:
            self._kept += [loss] * times
        if "all_reduce" in self._all:
            self._reduce(self._all["all_reduce"], loss.device)

    def _reduce(self, megabytes: float, device: torch.device) -> None:
        if not dist.is_initialized():
            return
        if self._buffer is None:
            size = max(1, int(megabytes * 2**20 / 4))
            self._buffer = torch.zeros(size, device=device)
        dist.all_reduce(self._buffer)

    def after_step(self, step: int, model: nn.Module, loss: torch.Tensor) -> None:
        """After an optimizer step; `step` counts from 1."""
        mine = self._mine
        if "sync_every_step" in mine:
            self._log(step, loss, mine["sync_every_step"] / 1e3)
        if "grow_list" in mine and len(self._kept) < _MOST_KEPT:
            self._kept.append(torch.ones(int(mine["grow_list"] * 2**20 / 4)))
        if "ckpt_every" in mine and step % max(1, int(mine["ckpt_every"])) == 0:
            self._save(step, model)
        if "eval_every" in self._all and step % max(1, int(self._all["eval_every"])) == 0:
            self._evaluate(_EVALUATION_BATCHES)
        if "hang" in mine and step >= mine["hang"]:
            while True:
                self._check()
                time.sleep(_LONGEST_S)

    def _log(self, step: int, loss: torch.Tensor, seconds: float) -> None:
        """A logger that writes through to the disk after every step, and takes its time."""
        until = time.perf_counter() + seconds
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / f"log-{self._rank}.txt", "a", encoding="utf-8") as file:
            file.write(f"{step} {float(loss)}\n")
            file.flush()
            os.fsync(file.fileno())
        time.sleep(max(0.0, until - time.perf_counter()))

    def _save(self, step: int, model: nn.Module) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"checkpoint-{self._rank}.pt"
        ballast = torch.zeros(int(_CHECKPOINT_MB * 2**20 / 4))
        torch.save({"step": step, "model": model.state_dict(), "ballast": ballast}, path)
