from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.data import normalise
from trainer.data.augment import Mix, Mixing, Schedule, strength_at

SCHEDULES: list[Schedule] = ["constant", "linear", "late_off"]
unit = st.floats(0, 1)


@given(st.sampled_from(SCHEDULES), unit, unit, unit)
def test_strength_never_rises(schedule: Schedule, one: float, other: float, late: float) -> None:
    early, later = sorted((one, other))
    before, after = (strength_at(progress, schedule, late) for progress in (early, later))
    assert 0 <= after <= before <= 1


def test_strengths() -> None:
    assert strength_at(1.0, "constant") == 1
    assert strength_at(0.25, "linear") == 0.75
    assert (strength_at(0.0, "linear"), strength_at(1.0, "linear")) == (1, 0)
    for late, on in ((0.2, 8), (0.3, 7), (0.7, 3), (0.9, 1), (1.0, 0), (0.0, 10)):
        steps = [strength_at(step / 10, "late_off", late) for step in range(10)]
        assert steps == [1.0] * on + [0.0] * (10 - on)
    # A run that goes on longer than was planned.
    assert (strength_at(1.2, "linear"), strength_at(1.2, "late_off")) == (0, 0)


def batch(count: int = 6, px: int = 16, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, px, px, generator=generator)
    return images, torch.randint(classes, (count,), generator=generator)


class Fixed(Mixing):
    """Does what it is told."""

    def __init__(self, mix: Mix, classes: int = 5) -> None:
        super().__init__(classes)
        self._mix = mix

    def draw(self, shape: torch.Size, step: int, strength: float = 1.0) -> Mix:
        return self._mix


@pytest.mark.parametrize("mix", [Mix("mixup", 0.0, 2), Mix("cutmix", 0.0, 2, (3, 3, 3, 3))])
def test_a_share_of_nothing_is_the_identity(mix: Mix) -> None:
    images, labels = batch()
    mixed, targets = Fixed(mix).mix(images, labels, 0)
    assert torch.equal(mixed, images)
    assert torch.equal(targets, nn.functional.one_hot(labels, 5).float())
    loss = nn.functional.cross_entropy(images.flatten(1)[:, :5], targets)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(images.flatten(1)[:, :5], labels))


def test_mixup_blends_with_the_partner() -> None:
    images, labels = batch()
    mixed, targets = Fixed(Mix("mixup", 0.25, 2)).mix(images, labels, 0)
    for i in range(6):
        partner = (i - 2) % 6
        torch.testing.assert_close(mixed[i], 0.75 * images[i] + 0.25 * images[partner])
        expected = torch.zeros(5)
        expected[labels[i]] += 0.75
        expected[labels[partner]] += 0.25
        torch.testing.assert_close(targets[i], expected)


@given(
    kind=st.sampled_from(["mixup", "cutmix", "both"]),
    count=st.integers(2, 7),
    height=st.integers(1, 20),
    width=st.integers(1, 20),
    step=st.integers(0, 10**6),
    strength=st.floats(0.01, 1),
    alpha=st.floats(0.1, 5),
)
@settings(deadline=None, max_examples=60)
def test_targets_are_the_shares_of_the_pixels(
    kind: str, count: int, height: int, width: int, step: int, strength: float, alpha: float
) -> None:
    # Image i is all i, and every image has a class of its own.
    labels = torch.arange(count)
    images = labels.float().view(-1, 1, 1, 1).expand(-1, 2, height, width).contiguous()
    mixing = Mixing(
        count,
        mixup_alpha=alpha if kind != "cutmix" else 0,
        cutmix_alpha=alpha if kind != "mixup" else 0,
    )
    mixed, targets = mixing.mix(images, labels, step, strength)
    mix = mixing.draw(images.shape, step, strength)
    assert mix is not None
    assert kind in (mix.kind, "both")
    torch.testing.assert_close(targets.sum(1), torch.ones(count))
    assert (targets.diagonal() >= 1 - strength - (1 / height + 1 / width) - 1e-6).all()
    if mix.kind == "mixup":
        # The mean pixel of image i is a blend of i and its partner's number.
        expected = (targets * torch.arange(count)).sum(1)
        torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), expected, atol=1e-4, rtol=1e-4)
        assert targets.diagonal().min() >= 1 - strength - 1e-6
    else:
        for i in range(count):
            shares = torch.bincount(mixed[i, 0].long().flatten(), minlength=count)
            torch.testing.assert_close(targets[i], shares / (height * width))
        assert torch.equal(mixed[:, 0], mixed[:, 1])
    assert torch.equal(images[:, 0, 0, 0], labels.float())  # the input is left alone


def test_strength_scales_the_share() -> None:
    mixup = Mixing(5, mixup_alpha=0.4, seed=3)
    cutmix = Mixing(5, cutmix_alpha=1.0, seed=3)
    shape = torch.Size((8, 3, 64, 64))
    for step in range(20):
        full, half = mixup.draw(shape, step), mixup.draw(shape, step, 0.5)
        assert full is not None
        assert half is not None
        assert half.share == pytest.approx(full.share / 2)
        assert half.shift == full.shift
    mean = {}
    for strength in (1.0, 0.5, 0.25):
        mixes = [cutmix.draw(shape, step, strength) for step in range(300)]
        mean[strength] = sum(mix.share for mix in mixes if mix) / 300
    # Cut at the edges, so less than the half, quarter, eighth that was drawn.
    assert 0.2 < mean[1.0] < 0.5
    assert 0.45 < mean[0.5] / mean[1.0] < 0.75
    assert 0.45 < mean[0.25] / mean[0.5] < 0.75


def test_off_returns_the_very_same() -> None:
    images, labels = batch()
    for mixing, strength in ((Mixing(5), 1.0), (Mixing(5, 1.0, 1.0), 0.0)):
        mixed, targets = mixing.mix(images, labels, 0, strength)
        assert mixed is images
        assert targets is labels
    alone, own = Mixing(5, 1.0).mix(images[:1], labels[:1], 0)
    assert torch.equal(alone, images[:1])
    assert torch.equal(own, labels[:1])
    assert (Mixing(5).on, Mixing(5, 1.0).on, Mixing(5, 0, 1.0).on) == (False, True, True)


def test_seed_and_step_decide() -> None:
    shape = torch.Size((8, 3, 64, 64))
    one, same, other = (Mixing(5, 0.4, 1.0, seed) for seed in (7, 7, 8))
    draws = [one.draw(shape, step) for step in range(40)]
    torch.rand(3)  # torch's generator has no say
    assert draws == [same.draw(shape, step) for step in range(40)]
    assert len(set(draws)) == 40
    assert draws != [other.draw(shape, step) for step in range(40)]
    kinds = [mix.kind for mix in draws if mix]
    assert 10 < kinds.count("mixup") < 30
    images, labels = batch()
    for first, second in zip(one.mix(images, labels, 5), same.mix(images, labels, 5), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alphas", [(1.0, 0.0), (0.0, 1.0)])
def test_dtype_and_memory_format_are_kept(dtype: torch.dtype, alphas: tuple[float, float]) -> None:
    images, labels = batch()
    exact, exact_targets = Mixing(5, *alphas).mix(images, labels, 3)
    mixed, targets = Mixing(5, *alphas).mix(
        images.to(dtype).to(memory_format=torch.channels_last), labels, 3
    )
    assert mixed.dtype == dtype
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(targets, exact_targets)
    assert targets.dtype == torch.float32
    torch.testing.assert_close(mixed.float(), exact, atol=0.05, rtol=0.02)


class NoWaiting(TorchDispatchMode):
    """Fails on what would make the host wait for a GPU, or copy to one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero")
        assert name not in forbidden, name
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        assert not (name == "index" and any(t.dtype == torch.bool for t in tensors)), name
        result = func(*args, **(kwargs or {}))
        devices = {t.device.type for t in [*tensors, result] if isinstance(t, torch.Tensor)}
        assert len(devices) <= 1, f"{name} goes from device to device"
        return result


def test_nothing_waits_for_the_device() -> None:
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWaiting():
        torch.ones(1).item()
    # Meta tensors have no values: whoever asks for one fails.
    images = torch.empty(6, 3, 16, 16, device="meta")
    labels = torch.empty(6, dtype=torch.int64, device="meta")
    with NoWaiting():
        for alphas in ((1.0, 0.0), (0.0, 1.0)):
            for step in range(5):
                mixed, targets = Mixing(5, *alphas).mix(images, labels, step)
                assert mixed.shape == images.shape
                assert targets.shape == (6, 5)


def test_normalising_copies_nothing_to_the_device_after_the_first_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    expected = normalise(images)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch, "tensor", fail)
    monkeypatch.setattr(torch.Tensor, "new_tensor", fail)
    assert torch.equal(normalise(images), expected)
