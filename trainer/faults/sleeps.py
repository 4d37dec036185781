"""Sleeps by configuration key: each makes one phase of a step slower by a known time."""

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainer.config import FaultsConfig
from trainer.faults.data import slow_next

__all__ = ["SlowItems", "describe_sleeps", "slow_fetch", "slow_items", "slow_model"]


class SlowItems(Dataset[Any]):
    """A dataset whose items arrive `latency_ms` later, asleep: a simulated remote read."""

    def __init__(self, dataset: Dataset[Any], latency_ms: float) -> None:
        self.dataset = dataset
        self.latency_ms = latency_ms

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        time.sleep(self.latency_ms / 1e3)
        return item


def describe_sleeps(faults: FaultsConfig) -> str | None:
    """What is on, in words; None if nothing is."""
    named = {
        "item_latency_ms": "each item waits {:g} ms (simulated remote-read latency)",
        "data_ms": "each fetch blocks {:g} ms longer",
        "forward_ms": "each forward sleeps {:g} ms",
        "backward_ms": "each backward sleeps {:g} ms",
    }
    on = [text.format(getattr(faults, key)) for key, text in named.items() if getattr(faults, key)]
    if not on:
        return None
    where = "all ranks" if faults.rank is None else f"rank {faults.rank}"
    return f"on {where}: {', '.join(on)}"


def slow_items(dataset: Dataset[Any], faults: FaultsConfig, rank: int) -> Dataset[Any]:
    """The dataset itself, or the same with `item_latency_ms` on every item."""
    if faults.item_latency_ms and faults.rank in (None, rank):
        return SlowItems(dataset, faults.item_latency_ms)
    return dataset


def slow_fetch(loader: DataLoader[Any], faults: FaultsConfig, rank: int) -> None:
    """Make each fetch of `loader` block the calling thread `data_ms` longer, within ``next()``."""
    if not faults.data_ms or faults.rank not in (None, rank):
        return
    slow_next(loader, faults.data_ms / 1e3)


def slow_model(model: nn.Module, faults: FaultsConfig, rank: int) -> None:
    """Make each forward and each backward of `model` (not wrapped in DDP) sleep as configured."""
    if faults.rank not in (None, rank):
        return
    if faults.forward_ms:

        def before_forward(_module: nn.Module, _inputs: Any) -> None:
            time.sleep(faults.forward_ms / 1e3)

        model.register_forward_pre_hook(before_forward)
    if faults.backward_ms:

        def sleep_in_backward(_gradient: torch.Tensor) -> None:
            time.sleep(faults.backward_ms / 1e3)

        def after_forward(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(sleep_in_backward)  # type: ignore[no-untyped-call]

        model.register_forward_hook(after_forward)
