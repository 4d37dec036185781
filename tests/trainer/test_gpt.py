import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from trainer.data.text import Collate
from trainer.models import build_model
from trainer.models.gpt import TinyGPT, lm_loss

VOCABULARY = 50


pytestmark = pytest.mark.usefixtures("one_thread")


def model(**changes: Any) -> TinyGPT:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"width": 32, "depth": 2, "heads": 4, "max_tokens": 24}
    made = TinyGPT(VOCABULARY, **{**arguments, **changes})
    # Larger weights than at the start: attention that looks everywhere alike would hide a mask.
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
    return made


def documents(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, VOCABULARY, (n,), generator=generator, dtype=torch.int32) for n in lengths
    ]


def batch_of(rows: list[list[torch.Tensor]], padding: Any) -> dict[str, torch.Tensor]:
    collate = Collate(padding, 24, pad_id=0, multiple=8, task="lm")
    return collate([[(ids, -1) for ids in row] for row in rows])


def test_logits_see_the_past_only() -> None:
    gpt = model()
    (ids,) = documents(12)
    batch = {"input_ids": ids[None].long()}
    logits = gpt(batch)
    assert logits.shape == (1, 12, VOCABULARY)
    changed = batch["input_ids"].clone()
    changed[0, 7] = (changed[0, 7] + 1) % VOCABULARY
    moved = (gpt({"input_ids": changed}) - logits).abs().amax(dim=2)[0]
    assert moved[:7].max() == 0
    assert moved[7:].min() > 1e-4


def test_padding_changes_nothing() -> None:
    gpt = model()
    short, long = documents(5, 16)
    alone = gpt(batch_of([[short]], "dynamic"))
    together = gpt(batch_of([[short], [long]], "dynamic"))
    torch.testing.assert_close(together[0, :5], alone[0, :5], atol=1e-5, rtol=0)


def test_packed_documents_are_as_alone() -> None:
    gpt = model()
    rows = [documents(7, 3, 9), documents(20)]
    packed = batch_of(rows, "pack")
    logits = gpt(packed)
    assert torch.isfinite(logits).all()
    total, count = lm_loss(logits, packed["labels"])
    losses, counts = [], []
    for index, row in enumerate(rows):
        start = 0
        for ids in row:
            single = batch_of([[ids]], "dynamic")
            alone = gpt(single)
            torch.testing.assert_close(
                logits[index, start : start + len(ids)], alone[0, : len(ids)], atol=1e-5, rtol=0
            )
            start += len(ids)
            loss, predicted = lm_loss(alone, single["labels"])
            losses.append(loss)
            counts.append(int(predicted))
    assert int(count) == sum(counts) == 6 + 2 + 8 + 19
    torch.testing.assert_close(total, torch.stack(losses).sum(), atol=1e-3, rtol=1e-5)


def test_loss_is_the_sum_over_what_is_predicted() -> None:
    logits = torch.randn(2, 6, VOCABULARY, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[-100, 3, 4, -100, 5, -100], [-100, 1, -100, -100, -100, -100]])
    total, count = lm_loss(logits, labels)
    pairs = [(0, 0, 3), (0, 1, 4), (0, 3, 5), (1, 0, 1)]
    expected = torch.stack(
        [functional.cross_entropy(logits[n, t], torch.tensor(label)) for n, t, label in pairs]
    ).sum()
    assert int(count) == 4
    torch.testing.assert_close(total, expected)
    half, _ = lm_loss(logits.bfloat16(), labels)
    assert half.dtype == torch.float32
    nothing, none = lm_loss(logits, torch.full((2, 6), -100))
    assert (nothing.item(), none.item()) == (0.0, 0)


def test_head_and_embedding_are_one_and_the_start_knows_nothing() -> None:
    torch.manual_seed(0)
    gpt = TinyGPT(VOCABULARY, width=32, depth=2, heads=4, max_tokens=24)
    block = 2 * 64 + (32 * 96 + 96) + (32 * 32 + 32) + (32 * 128 + 128) + (128 * 32 + 32)
    assert sum(p.numel() for p in gpt.parameters()) == (VOCABULARY + 24) * 32 + 2 * block + 64
    batch = batch_of([documents(24)], "fixed")
    total, count = lm_loss(gpt(batch), batch["labels"])
    assert (total / count).item() == pytest.approx(math.log(VOCABULARY), rel=0.05)


def saved_bytes(gpt: TinyGPT, batch: dict[str, torch.Tensor]) -> tuple[int, list[torch.Tensor]]:
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    gpt.zero_grad()
    torch.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total, _ = lm_loss(gpt(batch), batch["labels"])
    held = sum(kept.values())
    total.backward()
    return held, [p.grad.clone() for p in gpt.parameters() if p.grad is not None]


def test_checkpointing_keeps_less_and_gives_the_same_gradients() -> None:
    gpt = model(dropout=0.2, depth=6)
    batch = batch_of([documents(9, 11), documents(24)], "pack")
    plain_bytes, plain = saved_bytes(gpt, batch)
    gpt.enable_checkpointing()
    held_bytes, again = saved_bytes(gpt, batch)
    assert held_bytes < 0.6 * plain_bytes
    assert len(plain) == len(again) == len(list(gpt.parameters()))
    for one, other in zip(plain, again, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        assert torch.isfinite(gpt(batch)).all()


def test_learns_to_count() -> None:
    torch.manual_seed(0)
    gpt = TinyGPT(VOCABULARY, width=32, depth=2, heads=4, max_tokens=24)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3)
    starts = torch.arange(16)[:, None]
    ids = (starts + torch.arange(8)) % VOCABULARY
    labels = torch.where(torch.arange(8) > 0, ids, -100)
    for _ in range(40):
        total, count = lm_loss(gpt({"input_ids": ids}), labels)
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < math.log(VOCABULARY) / 3


def test_is_built_by_name() -> None:
    from trainer.config import ModelConfig

    config = ModelConfig(name="gpt", width=16, depth=1, heads=2)
    built = build_model(config, classes=0, vocabulary=VOCABULARY, max_tokens=8)
    assert isinstance(built, TinyGPT)
    assert built({"input_ids": torch.zeros(1, 8, dtype=torch.int64)}).shape == (1, 8, VOCABULARY)
