import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from trainer.accumulate import Accumulation, PlannedAccumulation
from trainer.config import PrecisionConfig
from trainer.models import SmallCNN
from trainer.precision import Precision
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


@given(
    units=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=12),
    every=st.integers(1, 5),
)
def test_uneven_ranks_weigh_by_what_they_hold(units: list[tuple[int, int]], every: int) -> None:
    """Of every window the mean over ranks of the weighted sums is the mean over all units."""
    ranks = [
        PlannedAccumulation(
            units=[a + b for a, b in units],
            own_units=[pair[rank] for pair in units],
            own_samples=[1] * len(units),
            own_tokens=[pair[rank] for pair in units],
            ranks=2,
            every=every,
        )
        for rank in range(2)
    ]
    assert ranks[0].steps == -(-len(units) // every)
    weighed = [0.0, 0.0]
    for index in range(len(units)):
        parts = [epoch.micro_batch(index) for epoch in ranks]
        for rank, part in enumerate(parts):
            # Every unit's loss is 1: so is the mean over all.
            weighed[rank] += units[index][rank] * part.per_unit
            assert part.share == pytest.approx(units[index][rank] * part.per_unit)
        if parts[0].last:
            assert sum(weighed) / 2 == pytest.approx(1.0)
            assert [part.window_share for part in parts] == pytest.approx(weighed)
            weighed = [0.0, 0.0]


def test_the_articles_loop_steps_five_times_as_often() -> None:
    """Eight micro-batches, four to a step: two optimizer steps here, ten in article B's loop.

    That loop calls zero_grad and scaler.step for each micro-batch, divides nothing, and steps once
    more where step % 4 is 0. Ours is one large batch; theirs is neither.
    """
    torch.manual_seed(0)
    inputs, targets = torch.randn(8, 4, 6), torch.randint(0, 3, (8, 4))
    start = torch.nn.Linear(6, 3)

    def counted(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, list[int]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps: list[int] = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        return optimizer, steps

    article = copy.deepcopy(start)
    optimizer, article_steps = counted(article)
    for step in range(8):
        optimizer.zero_grad()
        cross_entropy(article(inputs[step]), targets[step]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 4 == 0:
            optimizer.step()

    ours = copy.deepcopy(start)
    optimizer, our_steps = counted(ours)
    precision = Precision(PrecisionConfig(), torch.device("cpu"), ours)
    epoch = Accumulation(samples=32, batch_size=4, every=4)
    for index in range(8):
        part = epoch.micro_batch(index)
        (cross_entropy(ours(inputs[index]), targets[index]) * part.share).backward()  # type: ignore[no-untyped-call]
        if part.last:
            precision.step(optimizer, None)

    large = copy.deepcopy(start)
    optimizer, _ = counted(large)
    for half in (slice(0, 4), slice(4, 8)):
        optimizer.zero_grad()
        cross_entropy(large(inputs[half].flatten(0, 1)), targets[half].flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    assert (len(article_steps), len(our_steps)) == (10, 2)
    for mine, theirs, right in zip(
        ours.parameters(), article.parameters(), large.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, right)
        assert not torch.allclose(theirs, right, rtol=1e-2)
