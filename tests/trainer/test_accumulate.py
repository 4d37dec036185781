import copy
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from trainer.accumulate import Accumulation
from trainer.models import SmallCNN
from trainer.report import Reporter
from trainer.run import open_trainer
from trainer.sources import load


def test_windows_of_an_epoch_with_a_tail() -> None:
    epoch = Accumulation(samples=70, batch_size=8, every=4)
    parts = [epoch.micro_batch(i) for i in range(epoch.batches)]
    assert (epoch.batches, epoch.steps) == (9, 3)
    assert [i for i, part in enumerate(parts) if part.last] == [3, 7, 8]
    assert [part.window_samples for part in parts if part.last] == [32, 32, 6]
    assert sum(part.window_samples for part in parts if part.last) == 70
    assert parts[8].share == 1.0


@pytest.mark.parametrize(("samples", "every"), [(64, 4), (60, 4), (57, 3), (5, 7)])
def test_shares_of_each_window_add_up_to_one(samples: int, every: int) -> None:
    epoch = Accumulation(samples=samples, batch_size=8, every=every)
    total = sum(epoch.micro_batch(i).share for i in range(epoch.batches))
    assert total == pytest.approx(epoch.steps)


def test_equals_one_big_batch(jpegs: Path) -> None:
    """Three micro-batches of 8, 8 and 5 images are one step on 21 (without BatchNorm's help)."""
    config = load(
        f"--data.path={jpegs} --data.eval_fraction=0 --data.image_px=16 --train.watch=false "
        "--train.accumulate=3 --train.threads=1 --loader.batch_size=8 "
        "--loader.num_workers=0".split(),
        environ={},
    )
    images = torch.randint(0, 256, (21, 3, 16, 16), dtype=torch.uint8)
    labels = torch.randint(0, 4, (21,))
    with open_trainer(config, reporter=Reporter(enabled=False)) as trainer:
        # BatchNorm's statistics are those of a micro-batch, whatever accumulates: fix them.
        trainer.model.eval()
        big = copy.deepcopy(trainer.model)
        epoch = Accumulation(samples=21, batch_size=8, every=3)
        losses = []
        for i in range(3):
            part = epoch.micro_batch(i)
            batch = images[8 * i : 8 * i + 8], labels[8 * i : 8 * i + 8]
            losses.append(trainer.micro_batch(batch, part))
        from trainer.data import normalise

        whole = cross_entropy(big(normalise(images)), labels)
        whole.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(sum(losses), whole.detach())
        for small, large in zip(trainer.model.parameters(), big.parameters(), strict=True):
            torch.testing.assert_close(small.grad, large.grad)
        trainer.update()
        assert trainer.step == 1
        assert all(p.grad is None for p in trainer.model.parameters())
    assert isinstance(big, SmallCNN)
