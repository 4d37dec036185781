import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from trainer.errors import MissingPackageError
from trainer.models.cnn import SmallCNN
from trainer.models.mlp import MLP
from trainer.models.recompute import recomputed
from trainer.models.resnet import ResNet

CLASSES, PX = 5, 32

Make = Callable[[], Any]


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


def cnn() -> SmallCNN:
    return SmallCNN(CLASSES, width=8)


def mlp() -> MLP:
    return MLP(CLASSES, px=PX, width=256, depth=8)


def resnet() -> ResNet:
    return ResNet(CLASSES, width=4, stages=(1, 2, 1, 1))


every_model = pytest.mark.parametrize("make", [cnn, mlp, resnet])


def trained(model: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Logits after forward and backward, and the bytes kept between the two: activations."""
    kept: dict[int, int] = {}
    there_anyway = {
        tensor.untyped_storage().data_ptr() for tensor in [images, *model.state_dict().values()]
    }

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there_anyway:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    labels = torch.arange(len(images)) % CLASSES
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        total = sum(kept.values())
    loss.backward()  # type: ignore[no-untyped-call]
    return logits.detach(), total


@every_model
def test_logits(make: Make) -> None:
    model = make()
    logits = model(torch.randn(3, 3, PX, PX))
    assert logits.shape == (3, CLASSES)
    assert logits.dtype == torch.float32


@every_model
def test_checkpointing_changes_nothing_but_the_memory(make: Make) -> None:
    plain = make()
    model = copy.deepcopy(plain)
    model.enable_checkpointing()
    images = torch.randn(8, 3, PX, PX)
    for _ in range(2):
        expected, all_bytes = trained(plain, images)
        logits, kept_bytes = trained(model, images)
        assert torch.equal(logits, expected)
        assert kept_bytes < 0.7 * all_bytes
    for (name, weight), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert weight.grad is not None
        assert other.grad is not None, name
        assert torch.equal(weight.grad, other.grad), name
    # BatchNorm's statistics have seen each batch once.
    for (name, buffer), other in zip(plain.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(buffer, other), name
    counted = [b for name, b in model.named_buffers() if name.endswith("num_batches_tracked")]
    assert all(int(count) == 2 for count in counted)
    assert plain.state_dict().keys() == model.state_dict().keys()


def test_checkpointing_in_bf16_and_in_evaluation() -> None:
    plain = cnn()
    model = copy.deepcopy(plain)
    model.enable_checkpointing()
    images = torch.randn(4, 3, PX, PX)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained(plain, images)
        trained(model, images)
    assert torch.equal(plain.head.weight.grad, model.head.weight.grad)  # type: ignore[arg-type]
    plain.eval()
    model.eval()
    with torch.inference_mode():
        assert torch.equal(plain(images), model(images))
    # With gradients, too, it keeps to the running statistics.
    trained(plain, images)
    trained(model, images)
    first, other = (next(m.parameters()).grad for m in (plain, model))
    assert torch.equal(first, other)  # type: ignore[arg-type]


def test_random_layers_draw_the_same_again() -> None:
    stage = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5))
    inputs = torch.ones(4, 16, requires_grad=True)
    outputs = recomputed(stage, inputs)
    outputs.sum().backward()  # type: ignore[no-untyped-call]
    # What was dropped gives its row of the weights no gradient.
    dropped = (outputs == 0).all(0)
    assert stage[0].weight.grad is not None
    assert torch.equal(stage[0].weight.grad.abs().sum(1) == 0, dropped)
    assert dropped.any()


def test_statistics_come_back_after_an_error() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            outputs: torch.Tensor = self.norm(inputs)
            if self.calls == 2:
                raise MemoryError
            return outputs * outputs

    stage = Fails()
    mean = stage.norm.running_mean
    outputs = recomputed(stage, torch.randn(8, 4, requires_grad=True))
    with pytest.raises(MemoryError):
        outputs.sum().backward()  # type: ignore[no-untyped-call]
    assert stage.norm.running_mean is mean
    assert int(stage.norm.num_batches_tracked) == 1  # type: ignore[arg-type]


def test_mlp_has_the_layers_asked_for() -> None:
    shapes = [tuple(p.shape) for p in MLP(5, px=4, width=8, depth=3).parameters() if p.ndim == 2]
    assert shapes == [(8, 48), (8, 8), (8, 8), (5, 8)]


def test_resnet_50() -> None:
    with torch.device("meta"):
        model = ResNet(1000)
    # What is published for it: 25.56 M.
    assert sum(weight.numel() for weight in model.parameters()) == 25_557_032
    strides = {
        (m.kernel_size, m.stride)
        for m in model.modules()
        if isinstance(m, nn.Conv2d) and m.stride != (1, 1)
    }
    assert strides == {((7, 7), (2, 2)), ((3, 3), (2, 2)), ((1, 1), (2, 2))}


def test_resnet_computes_what_transformers_does() -> None:
    model = resnet().eval()
    images = torch.randn(2, 3, PX, PX)
    with torch.inference_mode():
        assert torch.equal(model(images), model.network(images).logits)


def test_resnet_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match="pip install transformers"):
        resnet()
