from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.text import EpochPlan, bundled_prose, plan_epoch, tokenize, train_wordpiece
from trainer.data.text.plan import Padding, row_tokens
from trainer.errors import DataError

PADDINGS: tuple[Padding, ...] = get_args(Padding)


def plan(lengths: Any, padding: Padding, **changes: Any) -> EpochPlan:
    arguments: dict[str, Any] = {
        "batch_size": 4, "world_size": 1, "seed": 0, "epoch": 0, "max_tokens": 64,
    }  # fmt: skip
    return plan_epoch(np.asarray(lengths), padding=padding, **{**arguments, **changes})


def every_batch(made: EpochPlan) -> list[list[list[list[int]]]]:
    return [list(made.batches(rank)) for rank in range(made.world_size)]


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=150),
    padding=st.sampled_from(PADDINGS),
    batch_size=st.integers(1, 6),
    world_size=st.integers(1, 4),
    epoch=st.integers(0, 3),
    multiple=st.sampled_from([1, 8, 24]),
    bucket_batches=st.integers(1, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_every_plan_is_sound(
    lengths: list[int],
    padding: Padding,
    batch_size: int,
    world_size: int,
    epoch: int,
    multiple: int,
    bucket_batches: int,
    shuffle: bool,
    drop_last: bool,
) -> None:
    changes: dict[str, Any] = {
        "batch_size": batch_size,
        "world_size": world_size,
        "epoch": epoch,
        "multiple": multiple,
        "bucket_batches": bucket_batches,
        "shuffle": shuffle,
        "drop_last": drop_last,
    }
    step = batch_size * world_size
    try:
        made = plan(lengths, padding, **changes)
    except DataError:
        assert len(lengths) < (step if drop_last else world_size) or padding == "pack"
        return
    ranks = every_batch(made)
    # As many batches on each rank, none empty, all full but for the last.
    assert {len(batches) for batches in ranks} == {len(made)}
    for index in range(len(made)):
        sizes = [len(batches[index]) for batches in ranks]
        if index < len(made) - 1 or drop_last:
            assert sizes == [batch_size] * world_size
        assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1
    # Each sample once, but for those that are counted.
    drawn = [sample for batches in ranks for batch in batches for row in batch for sample in row]
    assert len(drawn) == len(set(drawn)) == len(lengths) - made.dropped
    assert set(drawn) <= set(range(len(lengths)))
    if padding != "pack":
        assert made.dropped < (step if drop_last else world_size)
    # No row too long, and the sums are those of the rows.
    for rank, batches in enumerate(ranks):
        for batch, held in zip(batches, made.of_rank(rank), strict=True):
            rows = [sum(lengths[sample] for sample in row) for row in batch]
            width = row_tokens(max(rows), padding=padding, max_tokens=64, multiple=multiple)
            assert max(rows) <= width <= 64
            assert padding == "pack" or all(len(row) == 1 for row in batch)
            assert held.samples == sum(map(len, batch))
            assert held.tokens == sum(rows)
            assert held.targets == sum(rows) - held.samples
            assert held.padded_tokens == width * len(batch)
    held = [made.of_rank(rank) for rank in range(world_size)]
    for index, batches in enumerate(zip(*held, strict=True)):
        assert made.weight(index) == made.weights[index] == sum(b.tokens for b in batches)
        assert made.targets[index] == sum(b.targets for b in batches)
        assert made.samples[index] == sum(b.samples for b in batches)
        assert made.padded_tokens[index] == sum(b.padded_tokens for b in batches)
    assert made.waste == pytest.approx(1 - sum(made.weights) / sum(made.padded_tokens))
    # From the arguments alone.
    assert every_batch(plan(lengths, padding, **changes)) == ranks


@pytest.mark.parametrize("padding", PADDINGS)
def test_epochs_and_seeds_differ_and_resuming_does_not(padding: Padding) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 200)
    first = every_batch(plan(lengths, padding))
    assert every_batch(plan(lengths, padding)) == first
    assert every_batch(plan(lengths, padding, epoch=1)) != first
    assert every_batch(plan(lengths, padding, seed=1)) != first
    ordered = plan(lengths, padding, shuffle=False)
    assert every_batch(ordered) == every_batch(plan(lengths, padding, shuffle=False, epoch=1))
    made = plan(lengths, padding)
    assert list(made.batches(0, 3)) == first[0][3:]
    assert list(made.batches(0, 1, 3)) == first[0][1::3]


def test_without_shuffling_the_order_stays() -> None:
    batches = every_batch(plan([5] * 10, "dynamic", shuffle=False))[0]
    assert batches == [[[0], [1], [2], [3]], [[4], [5], [6], [7]], [[8], [9]]]


def test_bucket_gives_ranks_alike_work_in_a_random_order() -> None:
    lengths = np.random.default_rng(0).permutation(np.arange(1, 1025))
    made = plan(lengths, "bucket", world_size=4, batch_size=8, multiple=1, max_tokens=1024)
    held = [made.of_rank(rank) for rank in range(4)]
    wide = [[b.padded_tokens / 8 for b in batches] for batches in zip(*held, strict=True)]
    # The longest four of each 32 neighbours are on four ranks.
    assert {max(widths) - min(widths) for widths in wide} == {3}
    means = np.array([np.mean(widths) for widths in wide])
    assert (np.abs(np.diff(means)) > 100).mean() > 0.5


def test_bucket_makes_its_batches_anew_each_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 65, 4000)
    first, second = (
        {
            frozenset(row[0] for row in batch)
            for batch in plan(lengths, "bucket", epoch=epoch).batches(0)
        }
        for epoch in (0, 1)
    )
    assert len(first & second) < len(first) / 10


def test_pack_is_first_fit_decreasing() -> None:
    lengths = np.random.default_rng(1).integers(1, 65, 300).tolist()
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        for row in rows:
            if sum(row) + length <= 64:
                row.append(length)
                break
        else:
            rows.append([length])
    made = plan(lengths, "pack", batch_size=1, bucket_batches=1000)
    packed = [[lengths[sample] for sample in row] for (row,) in every_batch(made)[0]]
    assert sorted(packed) == sorted(rows)


def test_a_window_of_pack_leaves_its_last_row_to_the_next() -> None:
    # Windows of 256 tokens hold 25 of these: four rows of six, and one left.
    made = plan([10] * 600, "pack", batch_size=1, bucket_batches=4)
    assert [batch.samples for batch in made.of_rank(0)] == [6] * 100


def test_waste_on_real_prose(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    prose = bundled_prose()
    tokens = tokenize(
        prose,
        train_wordpiece(prose.texts, 4000, tmp_path),
        max_tokens=256,
        split_long=True,
        num_proc=1,
        cache=tmp_path,
    )
    waste = {
        (padding, multiple): plan_epoch(
            tokens.lengths,
            batch_size=32,
            world_size=1,
            seed=0,
            epoch=0,
            padding=padding,
            max_tokens=256,
            multiple=multiple,
        ).waste
        for padding in PADDINGS
        for multiple in (1, 8)
    }
    assert waste["fixed", 1] > waste["dynamic", 8] > 0.6
    assert waste["dynamic", 1] > 0.6
    assert waste["bucket", 1] < 0.08
    # Half of these texts have at most 30 tokens: rounding them up to 8 is what is left.
    assert waste["bucket", 8] < 0.12
    assert waste["pack", 8] < 0.01


def test_too_little_for_all_ranks_is_one_sentence() -> None:
    with pytest.raises(DataError, match="2 rows, too few for a row on each of 3 ranks"):
        plan([5, 5], "bucket", world_size=3)
    with pytest.raises(DataError, match="3 texts make 1 rows, too few for a batch of 4"):
        plan([5, 5, 5], "pack", drop_last=True)
    with pytest.raises(DataError, match="0 texts"):
        plan([], "pack")
    for bad in ([65], [0]):
        with pytest.raises(ValueError, match="empty or longer"):
            plan(bad, "fixed")
