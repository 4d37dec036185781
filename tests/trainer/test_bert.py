import sys
from typing import Any

import pytest
import torch

from trainer.data.text import Collate
from trainer.errors import MissingPackageError
from trainer.models.bert import Bert

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def bert() -> Bert:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = Bert(3, vocabulary=50, width=32, depth=2, heads=4, max_tokens=24)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                # Attention that looks everywhere alike would hide a mask.
                parameter.mul_(5)
    return made.eval()


def rows(*lengths: tuple[int, ...]) -> list[list[tuple[torch.Tensor, int]]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [(torch.randint(1, 50, (n,), generator=generator, dtype=torch.int32), n % 3) for n in row]
        for row in lengths
    ]


def collate(padding: Any) -> Collate:
    return Collate(padding, 24, pad_id=0, multiple=8, task="classify")


def test_missing_transformers_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=r"gpuwatch-trainer\[text\]"):
        Bert(3, vocabulary=50, width=32, depth=2, heads=4, max_tokens=24)


@torch.no_grad()
def test_padding_and_packing_change_nothing(bert: Bert) -> None:
    texts = rows((7,), (3,), (9,), (20,))
    alone = torch.cat([bert(collate("dynamic")([row])) for row in texts])
    assert alone.shape == (4, 3)
    assert (alone[1:] - alone[:1]).abs().amax(dim=1).min() > 1e-3
    for padding in ("fixed", "bucket"):
        padded = bert(collate(padding)(texts))
        torch.testing.assert_close(padded, alone, atol=1e-5, rtol=0)
    packed = collate("pack")([[*texts[0], *texts[1], *texts[2]], texts[3]])
    torch.testing.assert_close(bert(packed), alone, atol=1e-5, rtol=0)
    # The mask and the positions are both needed for that.
    for name in ("document_ids", "position_ids"):
        wrong = {**packed, name: packed[name].clone()}
        if name == "document_ids":
            wrong[name][0] = wrong[name][0].clamp(max=1)
        else:
            wrong[name][0, 1:] += 1
        assert (bert(wrong)[0] - alone[0]).abs().max() > 1e-4


def test_checkpointing_gives_the_same_gradients(bert: Bert) -> None:
    batch = collate("pack")(rows((7, 3), (20,)))
    bert.train()
    gradients = []
    for recompute in (False, True):
        if recompute:
            bert.enable_checkpointing()
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        torch.manual_seed(2)
        bert.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = torch.nn.functional.cross_entropy(bert(batch), batch["labels"])
        held = sum(saved.values())
        loss.backward()
        assert all(p.grad is not None for p in bert.parameters())
        gradients.append((held, [p.grad.clone() for p in bert.parameters() if p.grad is not None]))
    assert gradients[1][0] < 0.8 * gradients[0][0]
    for one, other in zip(gradients[0][1], gradients[1][1], strict=True):
        torch.testing.assert_close(one, other)
    bert.eval()
