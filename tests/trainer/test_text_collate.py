import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from trainer.data.text import (
    ByteTokenizer,
    Collate,
    Corpus,
    PlannedBatches,
    TokenSet,
    largest_batch,
    plan_epoch,
    tokenize,
)
from trainer.data.text.plan import Padding
from trainer.errors import DataError


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


ROWS = [[(ids(5, 6, 7), 1)], [(ids(8, 9), 0)]]


def test_language_labels_are_the_ids_that_follow_something() -> None:
    batch = Collate("dynamic", 16, pad_id=99, multiple=4, task="lm")(ROWS)
    assert {part.dtype for part in batch.values()} == {torch.int64}
    assert batch["input_ids"].tolist() == [[5, 6, 7, 99], [8, 9, 99, 99]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100], [-100, 9, -100, -100]]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}


@pytest.mark.parametrize(
    ("padding", "multiple", "width"),
    [("fixed", 4, 9), ("dynamic", 1, 3), ("bucket", 8, 8), ("bucket", 16, 9), ("pack", 4, 9)],
)
def test_rows_are_as_long_as_planned(padding: Padding, multiple: int, width: int) -> None:
    batch = Collate(padding, 9, pad_id=0, multiple=multiple, task="classify")(ROWS)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, width)
    assert batch["labels"].tolist() == [1, 0]


def test_packed_documents_are_apart() -> None:
    rows = [[(ids(5, 6, 7), 1), (ids(8, 9), 0)], [(ids(3, 4), 2)]]
    batch = Collate("pack", 6, pad_id=0, multiple=8, task="lm")(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 0], [3, 4, 0, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0]]
    assert batch["document_ids"].tolist() == [[1, 1, 1, 2, 2, 0], [1, 1, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9, -100], [-100, 4] + [-100] * 4]
    batch = Collate("pack", 6, pad_id=0, multiple=8, task="classify")(rows)
    assert batch["labels"].tolist() == [1, 0, 2]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(DataError, match="no class"):
        Collate("dynamic", 16, pad_id=0, multiple=1, task="classify")([[(ids(1, 2), -1)]])
    with pytest.raises(ValueError, match="max_tokens=2"):
        Collate("fixed", 2, pad_id=0, multiple=1, task="lm")(ROWS)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenSet:
    chance = np.random.default_rng(0)
    texts = ["".join(chance.choice(list("abcdef "), size)) for size in chance.integers(0, 40, 90)]
    return tokenize(
        Corpus(texts, np.arange(90) % 3, ("a", "b", "c"), "test"),
        ByteTokenizer(),
        max_tokens=48,
        split_long=True,
        num_proc=1,
        cache=Path("unused"),
    )


def planned(tokens: TokenSet, padding: Padding, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"batch_size": 4, "world_size": 2, "seed": 0, "epoch": 0}
    return plan_epoch(tokens.lengths, padding=padding, max_tokens=48, **{**arguments, **changes})


@pytest.mark.parametrize("padding", ["bucket", "pack"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_delivers_the_plan(tokens: TokenSet, padding: Padding, workers: int) -> None:
    collate = pickle.loads(pickle.dumps(Collate(padding, 48, pad_id=256, multiple=8, task="lm")))
    seen: list[list[int]] = []
    for rank in range(2):
        sampler = PlannedBatches(rank)
        loader = DataLoader(
            tokens,
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        for epoch in range(2):
            plan = planned(tokens, padding, epoch=epoch)
            sampler.set_epoch(plan)
            assert len(loader) == len(plan)
            held = plan.of_rank(rank)
            batches = list(loader)
            assert [int(b["attention_mask"].sum()) for b in batches] == [b.tokens for b in held]
            assert [b["input_ids"].numel() for b in batches] == [b.padded_tokens for b in held]
            assert [int((b["labels"] != -100).sum()) for b in batches] == [b.targets for b in held]
            if epoch == 0:
                seen += [
                    row[mask == 1].tolist()
                    for b in batches
                    for row, mask in zip(b["input_ids"], b["attention_mask"], strict=True)
                ]
        sampler.set_epoch(plan, first_batch=2)
        rest = list(loader)
        assert len(loader) == len(rest) == len(plan) - 2
        for resumed, batch in zip(rest, batches[2:], strict=True):
            assert torch.equal(resumed["input_ids"], batch["input_ids"])
    assert planned(tokens, padding).dropped == 0
    assert sorted(one for row in seen for one in row) == sorted(tokens.ids.tolist())


def test_ranks_can_share_a_plan_made_for_one(tokens: TokenSet) -> None:
    plan = planned(tokens, "bucket", world_size=1, shuffle=False)
    drawn = []
    for rank in range(3):
        sampler = PlannedBatches(0)
        sampler.set_epoch(plan, every=3, offset=rank)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        drawn += [sample for batch in batches for row in batch for sample in row]
    assert sorted(drawn) == list(range(90))


def test_a_sampler_without_a_plan_says_so(tokens: TokenSet) -> None:
    sampler = PlannedBatches(0)
    with pytest.raises(RuntimeError, match="set_epoch"):
        iter(sampler)
    with pytest.raises(ValueError, match="first_batch=99"):
        sampler.set_epoch(planned(tokens, "fixed"), 99)


@pytest.mark.parametrize("padding", ["fixed", "dynamic", "bucket", "pack"])
def test_the_largest_batch_is_full(padding: Padding) -> None:
    batch = largest_batch(3, 20, 7, "lm", padding)
    assert batch["input_ids"].shape == (3, 20)
    assert batch["input_ids"].max() == 6
    assert batch["attention_mask"].all()
    assert int((batch["labels"] == -100).sum()) == 3
    assert ("document_ids" in batch) == (padding == "pack")
    assert largest_batch(3, 20, 7, "classify", padding)["labels"].tolist() == [0, 0, 0]
