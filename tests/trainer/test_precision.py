"""Number formats: what each does to a step, on the CPU, where all of them but tf32 work."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from trainer.config import OptimConfig, PrecisionConfig
from trainer.errors import ConfigError
from trainer.optim import build_optimizer, build_schedule
from trainer.precision import MasterWeights, Precision, resolve_mode

CPU = torch.device("cpu")
LOW_LR = OptimConfig(lr=3e-4, momentum=0.0, weight_decay=0.0, schedule="constant", warmup_steps=0)


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Regression whose updates of 3e-4 of a gradient are less than fp16's last bit of a weight."""
    torch.manual_seed(0)
    inputs, weights = torch.randn(256, 16), torch.randn(16, 1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, inputs, inputs @ weights * 0.5


def train(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    config: PrecisionConfig,
    steps: int = 600,
) -> tuple[float, Precision]:
    precision = Precision(config, CPU, model)
    optimizer = build_optimizer(model, LOW_LR, precision, samples=256)
    if precision.input_dtype is not None:
        inputs = inputs.to(precision.input_dtype)
    loss = torch.zeros(())
    for _ in range(steps):
        with precision.autocast():
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
        precision.scaled(loss).backward()  # type: ignore[no-untyped-call]
        precision.step(optimizer, None)
    return float(loss.detach()), precision


def test_master_weights_keep_what_pure_fp16_loses() -> None:
    model, inputs, targets = problem()
    plain, _ = train(copy.deepcopy(model), inputs, targets, PrecisionConfig(mode="fp32"))
    manual, _ = train(
        copy.deepcopy(model),
        inputs,
        targets,
        PrecisionConfig(mode="fp16-manual", loss_scale=64.0),
    )
    half = copy.deepcopy(model).half()
    optimizer = SGD(half.parameters(), lr=LOW_LR.base_lr)
    loss = torch.zeros(())
    for _ in range(600):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(half(inputs.half()).float(), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    first = float(nn.functional.mse_loss(model(inputs), targets).detach())
    assert plain < 0.9 * first
    assert manual == pytest.approx(plain, rel=1e-3)
    assert abs(float(loss.detach()) - plain) > 0.05 * plain


def overflowing(mode: str) -> tuple[nn.Module, Precision, Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    precision = Precision(PrecisionConfig(mode=mode, initial_scale=2.0**16), CPU, model)  # type: ignore[arg-type]
    optimizer = build_optimizer(model, LOW_LR, precision, samples=4)
    dtype = precision.input_dtype or torch.float32
    return model, precision, optimizer, torch.randn(4, 8).to(dtype)


@pytest.mark.parametrize("mode", ["fp16", "fp16-manual"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_an_overflow_halves_the_scale_and_changes_no_weight(
    mode: str, clip_norm: float | None
) -> None:
    model, precision, optimizer, inputs = overflowing(mode)
    schedule = build_schedule(optimizer, LOW_LR, total_steps=10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    masters = [p.detach().clone() for p in precision.parameters or []]
    assert precision.loss_scale == 2.0**16
    with precision.autocast():
        loss = model(inputs).float().sum() * 1e6
    precision.scaled(loss).backward()  # type: ignore[no-untyped-call]
    result = precision.step(optimizer, clip_norm)
    assert not result.stepped
    assert precision.skipped == 1
    assert precision.loss_scale == 2.0**15
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for master, kept in zip(precision.parameters or [], masters, strict=True):
        assert torch.equal(master, kept)
    assert all(p.grad is None for p in model.parameters())
    # And it recovers: the next step is an ordinary one.
    with precision.autocast():
        loss = model(inputs).float().square().mean()
    precision.scaled(loss).backward()  # type: ignore[no-untyped-call]
    result = precision.step(optimizer, clip_norm)
    schedule.step()
    assert result.stepped
    assert precision.skipped == 1
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"]) or mode == (
        "fp16-manual"
    )
    for master, kept in zip((precision.parameters or [])[:1], masters[:1], strict=False):
        assert not torch.equal(master, kept)


@pytest.mark.parametrize("mode", ["fp16", "fp16-manual"])
def test_a_static_scale_stays_and_still_leaves_overflows_out(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    precision = Precision(PrecisionConfig(mode=mode, loss_scale=128.0), CPU, model)  # type: ignore[arg-type]
    optimizer = build_optimizer(model, LOW_LR, precision, samples=4)
    inputs = torch.randn(4, 4).to(precision.input_dtype or torch.float32)
    for factor, stepped in ((1.0, True), (float("inf"), False), (1.0, True)):
        with precision.autocast():
            loss = model(inputs).float().sum() * factor
        precision.scaled(loss).backward()  # type: ignore[no-untyped-call]
        assert precision.step(optimizer, None).stepped is stepped
        assert precision.loss_scale == pytest.approx(128.0)


def test_the_manual_scale_doubles_after_enough_good_steps() -> None:
    model = nn.Linear(4, 2)
    config = PrecisionConfig(mode="fp16-manual", initial_scale=4.0, growth_interval_steps=3)
    precision = Precision(config, CPU, model)
    optimizer = build_optimizer(model, LOW_LR, precision, samples=4)
    scales = []
    for _ in range(7):
        loss = model(torch.ones(4, 4, dtype=torch.float16)).float().mean()
        precision.scaled(loss).backward()  # type: ignore[no-untyped-call]
        precision.step(optimizer, None)
        scales.append(precision.loss_scale)
    assert scales == [4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0]


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "fp16-manual"])
def test_gradients_are_clipped_after_they_are_unscaled(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    reference = copy.deepcopy(model)
    config = PrecisionConfig(mode=mode, initial_scale=256.0)  # type: ignore[arg-type]
    precision = Precision(config, CPU, model)
    optimizer = build_optimizer(model, LOW_LR, precision, samples=4)
    inputs = torch.randn(4, 8)
    reference(inputs).square().sum().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])  # type: ignore[misc]
    with precision.autocast():
        loss = model(inputs.to(precision.input_dtype or torch.float32)).float().square().sum()
    precision.scaled(loss).backward()  # type: ignore[no-untyped-call]
    result = precision.step(optimizer, 0.5)
    assert result.grad_norm is not None
    # Scaled it would be 256 times as long.
    assert float(result.grad_norm) == pytest.approx(float(norm), rel=0.02)


def test_norms_stay_in_fp32_and_the_optimizer_owns_the_masters() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    precision = Precision(PrecisionConfig(mode="fp16-manual"), CPU, model)
    kinds = {name: p.dtype for name, p in model.named_parameters()}
    assert kinds["1.weight"] == torch.float32
    assert kinds["0.weight"] == kinds["3.bias"] == torch.float16
    assert model[1].running_var.dtype == torch.float32
    optimizer = build_optimizer(model, LOW_LR, precision, samples=1)
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(p.dtype == torch.float32 for p in owned)
    assert {id(p) for p in owned} == {id(p) for p in precision.parameters or []}
    assert model(torch.randn(2, 3, 8, 8).half()).dtype == torch.float16


def test_gradients_of_fp32_parameters_are_copied_not_shared() -> None:
    """DDP's gradients are views of its buckets: unscaling them in place would spoil those."""
    model = nn.LayerNorm(4)
    masters = MasterWeights(model)
    bucket = torch.full((8,), 8.0)
    model.weight.grad, model.bias.grad = bucket[:4], bucket[4:]
    assert float(masters.take_gradients(0.25)) == 0.0
    assert torch.equal(bucket, torch.full((8,), 8.0))
    assert torch.equal(masters.masters[0].grad, torch.full((4,), 2.0))  # type: ignore[arg-type]


def test_auto_is_fp32_on_the_cpu_and_tf32_is_refused_there() -> None:
    assert resolve_mode("auto", CPU) == "fp32"
    with pytest.raises(ConfigError, match=r"tf32 needs an NVIDIA GPU"):
        resolve_mode("tf32", CPU)


def test_auto_follows_the_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    for capability, mode in (((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert resolve_mode("auto", device) == mode


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_tf32_rounds_and_is_put_back() -> None:
    device = torch.device("cuda", 0)
    a = torch.randn(512, 512, device=device)
    before = torch.backends.cuda.matmul.fp32_precision
    model = nn.Linear(4, 4).to(device)
    with Precision(PrecisionConfig(mode="fp32"), device, model):
        exact = a @ a
    with Precision(PrecisionConfig(mode="tf32"), device, model):
        rounded = a @ a
    assert not torch.equal(exact, rounded)
    assert torch.backends.cuda.matmul.fp32_precision == before
