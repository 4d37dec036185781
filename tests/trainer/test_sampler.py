import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from trainer.data.sampler import ShardedSampler
from trainer.errors import ConfigError


def ranks(size: int, world: int, **options: object) -> list[ShardedSampler]:
    return [
        ShardedSampler(size, world_size=world, rank=rank, **options)  # type: ignore[arg-type]
        for rank in range(world)
    ]


def dealt(samplers: list[ShardedSampler]) -> list[int]:
    """The global order, put together again."""
    return [index for row in zip(*samplers, strict=True) for index in row]


sizes, worlds, epochs = st.integers(1, 60), st.integers(1, 9), st.integers(0, 5)


@given(sizes, worlds, st.integers(0, 2**70), epochs)
@settings(deadline=None)
def test_every_sample_once_but_for_the_filling(
    size: int, world: int, seed: int, epoch: int
) -> None:
    samplers = ranks(size, world, seed=seed)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    order = dealt(samplers)
    assert {len(sampler) for sampler in samplers} == {len(order) // world}
    assert sorted(order[:size]) == list(range(size))
    assert len(order) - size == samplers[0].repeated < world
    assert order[size:] == (order[:size] * world)[: len(order) - size]
    # As many for each rank as torch's sampler gives.
    theirs = DistributedSampler(range(size), num_replicas=world, rank=0)  # type: ignore[arg-type]
    assert len(samplers[0]) == len(theirs)


@given(sizes, worlds, epochs, st.data(), st.booleans())
@settings(deadline=None)
def test_resumed_order_is_the_tail(
    size: int, world: int, epoch: int, data: st.DataObject, weighted: bool
) -> None:
    weights = np.arange(1.0, size + 1) if weighted else None
    rank = data.draw(st.integers(0, world - 1))
    whole = ShardedSampler(size, world_size=world, rank=rank, seed=4, weights=weights)
    whole.set_epoch(epoch)
    order = list(whole)
    assert list(whole) == order
    consumed = data.draw(st.integers(0, len(order)))
    state = json.loads(json.dumps(whole.state(consumed)))
    resumed = ShardedSampler(size, world_size=world, rank=rank, seed=4, weights=weights)
    resumed.load_state(state)
    assert len(resumed) == len(order) - consumed
    assert list(resumed) == order[consumed:]
    assert resumed.state(consumed) == state
    resumed.set_epoch(epoch + 1)
    whole.set_epoch(epoch + 1)
    assert list(resumed) == list(whole)


@given(sizes, worlds, worlds, st.data(), st.booleans())
@settings(deadline=None)
def test_another_world_size_goes_on_in_the_same_order_or_refuses(
    size: int, before: int, after: int, data: st.DataObject, weighted: bool
) -> None:
    weights = np.arange(1.0, size + 1) if weighted else None
    old = ranks(size, before, weights=weights)
    consumed = data.draw(st.integers(0, len(old[0])))
    state = old[data.draw(st.integers(0, before - 1))].state(consumed)
    new = ranks(size, after, weights=weights)
    done = consumed * before
    if done < size and done % after:
        with pytest.raises(ConfigError, match=rf"resume with {before} ranks"):
            new[0].load_state(state)
        return
    for sampler in new:
        sampler.load_state(state)
    rest = dealt(new)
    if done >= size:
        assert rest == []
    else:
        assert rest[: size - done] == dealt(old)[done:size]


def test_seed_and_epoch_decide_alone() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = ShardedSampler(500, world_size=1, rank=0, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    first = order(1, 1)
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    assert order(1, 1) == first
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    # A promise: the same numbers on every machine and under every NumPy.
    sampler = ShardedSampler(8, world_size=1, rank=0)
    assert list(sampler) == [0, 3, 7, 5, 1, 2, 6, 4]


def test_not_shuffled() -> None:
    assert dealt(ranks(5, 2, shuffle=False)) == [0, 1, 2, 3, 4, 0]


def test_shuffling_is_even() -> None:
    # Each sample at each place equally often: chi-square with 81 degrees of freedom.
    sampler = ShardedSampler(10, world_size=1, rank=0)
    seen = np.zeros((10, 10))
    for epoch in range(2000):
        sampler.set_epoch(epoch)
        seen[np.arange(10), list(sampler)] += 1
    chi_square = ((seen - 200) ** 2 / 200).sum()
    assert 81 - 5 * np.sqrt(162) < chi_square < 81 + 5 * np.sqrt(162)


@pytest.mark.parametrize("world", [1, 3])
def test_weights_decide_how_often(world: int) -> None:
    weights = np.array([1.0, 0, 2, 5, 0])
    weights = np.tile(weights, 4000)
    samplers = ranks(len(weights), world, weights=weights, seed=2)
    order = np.array(dealt(samplers))
    assert samplers[0].repeated == 0
    counts = np.bincount(order % 5, minlength=5)
    assert counts[1] == counts[4] == 0
    for place in (0, 2, 3):
        share = weights[place] / 8
        deviation = np.sqrt(len(order) * share * (1 - share))
        assert abs(counts[place] - len(order) * share) < 4 * deviation
    # With replacement.
    assert len(set(order.tolist())) < len(order)


def test_a_weight_of_nothing_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = ShardedSampler(4, world_size=1, rank=0, weights=np.array([0.0, 1, 1, 0]))
    ends = np.array([0, 2**64 - 1, 2**63, 2**63 - 1], dtype=np.uint64)
    monkeypatch.setattr(sampler, "_raw", lambda count: ends[:count])
    assert list(sampler) == [1, 2, 2, 1]


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1], [0, 0], [1, np.nan], [1, np.inf]])
def test_impossible_weights(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be 2 numbers"):
        ShardedSampler(2, world_size=1, rank=0, weights=np.array(weights, dtype=np.float64))


def test_impossible_places() -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        ShardedSampler(4, world_size=2, rank=2)
    sampler = ShardedSampler(4, world_size=2, rank=1)
    with pytest.raises(ValueError, match="position 3"):
        sampler.set_epoch(0, 3)
    with pytest.raises(ValueError, match="3 consumed"):
        sampler.state(3)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"size": 11}, "training samples was 11 and is 10"),
        ({"seed": 1}, r"train\.seed was 1 and is 0"),
        ({"shuffle": False}, "shuffling was False and is True"),
        ({"weights": "0123"}, r"other weights \(data\.balance"),
        ({"position": None}, "its position is missing"),
        ({"epoch": -1}, "its position is missing"),
    ],
)
def test_another_order_is_refused(changed: dict[str, int], sentence: str) -> None:
    sampler = ShardedSampler(10, world_size=2, rank=0)
    with pytest.raises(ConfigError, match=sentence):
        sampler.load_state(sampler.state(2) | changed)
    weighted = ShardedSampler(10, world_size=2, rank=0, weights=np.arange(10.0))
    other = ShardedSampler(10, world_size=2, rank=0, weights=np.arange(10.0) + 1)
    with pytest.raises(ConfigError, match="other weights"):
        other.load_state(weighted.state(2))


def test_nothing_to_draw() -> None:
    assert list(ShardedSampler(0, world_size=2, rank=1)) == []


def test_in_a_loader() -> None:
    sampler = ShardedSampler(10, world_size=2, rank=1)
    sampler.set_epoch(3)
    loader: DataLoader[int] = DataLoader(range(10), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    order = list(sampler)
    assert torch.cat(list(loader)).tolist() == order
    sampler.set_epoch(3, 2)
    assert len(loader) == 2
    assert torch.cat(list(loader)).tolist() == order[2:]


def test_many_samples_come_in_pieces() -> None:
    samplers = ranks(50_000, 2)
    order = dealt(samplers)
    assert sorted(order) == list(range(50_000))
    assert all(type(index) is int for index in order[:3])
