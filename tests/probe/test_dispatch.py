"""Accelerate's loader that fetches for all ranks, here of one rank."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from gpuwatch.probe.accounting import RawStep
from gpuwatch.probe.dispatch import shared_samples
from gpuwatch.probe.events import Recorder, Replay
from gpuwatch.probe.patches import Marks


def test_each_rank_has_its_share_of_the_samples() -> None:
    assert shared_samples(torch.ones(8, 3), 2) == 4
    assert shared_samples({"x": [torch.ones(5, 3)], "y": 1}, 2) == 3
    assert shared_samples((torch.ones(()),), 2) is None
    assert shared_samples([[[[torch.ones(8)]]]], 2) is None
    assert shared_samples({}, 2) is None
    assert shared_samples("words", 2) is None


class Items(Dataset[torch.Tensor]):
    broken = -1

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.broken:
            raise ValueError("a broken file")
        return torch.ones(4)


@contextlib.contextmanager
def dispatched(found: list[RawStep]) -> Iterator[tuple[Any, Items]]:
    """A loader and its data; what was trained in between is in `found` afterwards."""
    accelerate = pytest.importorskip("accelerate")
    recorder = Recorder()
    warnings: list[str] = []
    marks = Marks(recorder, warnings.append)
    marks.install()
    items = Items()
    try:
        accelerator = accelerate.Accelerator(
            cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(dispatch_batches=True)
        )
        yield accelerator.prepare(DataLoader(items, batch_size=4)), items
    finally:
        marks.remove()
    recorder.finish()
    replay = Replay(recorder, warnings.append)
    replay.catch_up()
    found += [item for item in replay.accountant.out if isinstance(item, RawStep)]
    assert warnings == []


def train(loader: Any, batches: int | None = None) -> None:
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for n, batch in enumerate(loader):
        if n == batches:
            break
        net(batch).mean().backward()
        optimizer.step()


def test_passes_that_are_left_early_or_end() -> None:
    found: list[RawStep] = []
    with dispatched(found) as (loader, _):
        train(loader, 2)
        train(loader)
        train(loader, 3)
    assert [step.samples for step in found] == [4, 4, 4, 4, 4, 4, 2, 4, 4, 4]
    assert [step.batches for step in found] == [1] * 10
    assert [n for n, step in enumerate(found) if "first_batch" in step.tags] == [0, 2, 7]
    assert {step.loader for step in found} == {"loader0"}


def test_a_fetch_that_raises() -> None:
    found: list[RawStep] = []
    with dispatched(found) as (loader, items):
        items.broken = 9
        with pytest.raises(ValueError, match="a broken file"):
            train(loader)
        items.broken = -1
        train(loader)
    # One batch was trained on; the one fetched ahead of the broken one was lost with it.
    assert [step.samples for step in found] == [4, 4, 4, 4, 4, 2]
