import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import OptimConfig, PrecisionConfig
from trainer.optim import build_optimizer, build_schedule
from trainer.precision import Precision
from trainer.schedule import lr_factor, lr_for_batch, warmup_length


def factors(total: int, warmup: int, **more: object) -> list[float]:
    return [
        lr_factor(s, total_steps=total, warmup_steps=warmup, **more)  # type: ignore[arg-type]
        for s in range(total)
    ]


def test_warm_up_starts_above_zero_and_peaks_at_its_last_step() -> None:
    assert factors(20, 5)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("warmup", [0, 1])
def test_without_warm_up_the_first_step_is_the_peak(warmup: int) -> None:
    assert factors(20, warmup)[0] == 1.0


def test_cosine_falls_to_the_floor_and_stays_there() -> None:
    got = factors(100, 10, min_ratio=0.1)
    after = got[9:]
    assert all(a > b for a, b in itertools.pairwise(after))
    assert 0.1 < got[-1] < 0.102
    assert lr_factor(10**6, total_steps=100, warmup_steps=10, min_ratio=0.1) == 0.1
    # Half way between peak and end: half of the range.
    assert lr_factor(54, total_steps=99, warmup_steps=10) == pytest.approx(0.5)


def test_constant_stays() -> None:
    assert factors(30, 3, kind="constant")[3:] == [1.0] * 27


def test_warm_up_longer_than_the_run_never_exceeds_one() -> None:
    assert max(factors(5, 50)) == pytest.approx(0.1)


def test_linear_falls_evenly() -> None:
    after = factors(100, 10, kind="linear")[9:]
    drops = [a - b for a, b in itertools.pairwise(after)]
    assert drops == pytest.approx([drops[0]] * len(drops))
    assert 0.0 < after[-1] < 0.02


def test_wsd_is_flat_until_its_last_share() -> None:
    got = factors(100, 10, kind="wsd", decay_share=0.3)
    assert got[9:70] == [1.0] * 61
    assert all(a > b for a, b in itertools.pairwise(got[69:]))
    assert 0.0 < got[-1] < 0.05


def test_inverse_sqrt_is_steady_at_the_end_of_the_warm_up() -> None:
    got = factors(400, 100, kind="inverse_sqrt")
    assert got[99] == 1.0
    assert got[399] == pytest.approx(0.5)


@given(
    total=st.integers(1, 400),
    warmup=st.integers(0, 450),
    kind=st.sampled_from(["cosine", "linear", "wsd", "inverse_sqrt", "constant"]),
    floor=st.floats(0.0, 1.0),
    decay=st.floats(0.01, 1.0),
)
def test_rises_to_one_then_never_again(
    total: int, warmup: int, kind: str, floor: float, decay: float
) -> None:
    got = factors(total, warmup, kind=kind, min_ratio=floor, decay_share=decay)
    top = min(total, max(1, warmup)) - 1
    assert all(0.0 < value <= 1.0 for value in got[: top + 1])
    assert all(a < b for a, b in itertools.pairwise(got[: top + 1]))
    assert all(a >= b for a, b in itertools.pairwise(got[top:]))
    if total >= max(1, warmup):
        assert got[top] == 1.0
    if total >= max(1, warmup) and kind in ("cosine", "linear", "wsd"):
        assert all(value >= floor - 1e-9 for value in got[top:])


def test_warm_up_is_a_share_of_the_steps_unless_it_is_said() -> None:
    assert warmup_length("auto", share=0.05, total_steps=1000) == 50
    assert warmup_length("auto", share=0.05, total_steps=3) == 1
    assert warmup_length(7, share=0.05, total_steps=1000) == 7
    assert warmup_length(0, share=0.05, total_steps=1000) == 1


@pytest.mark.parametrize(
    ("scaling", "optimizer", "factor"),
    [
        ("auto", "sgd", 4.0),
        ("auto", "adamw", 2.0),
        ("linear", "adamw", 4.0),
        ("sqrt", "sgd", 2.0),
        ("none", "sgd", 1.0),
    ],
)
def test_lr_follows_the_samples_of_a_step(scaling: str, optimizer: str, factor: float) -> None:
    got = lr_for_batch(
        0.1,
        samples=1024,
        base_samples=256,
        scaling=scaling,  # type: ignore[arg-type]
        optimizer=optimizer,  # type: ignore[arg-type]
    )
    assert got == pytest.approx(0.1 * factor)


def test_without_a_base_batch_lr_is_what_was_said() -> None:
    assert lr_for_batch(0.1, samples=9, base_samples=None, scaling="auto", optimizer="sgd") == 0.1


@settings(deadline=None, max_examples=30)
@given(total=st.integers(2, 60), at=st.integers(1, 59))
def test_a_resumed_schedule_goes_on_where_it_was(total: int, at: int) -> None:
    config = OptimConfig(base_batch_size=8)

    def course(first: int, state: dict[str, object] | None) -> list[float]:
        model = torch.nn.Linear(2, 2)
        precision = Precision(PrecisionConfig(), torch.device("cpu"), model)
        optimizer = build_optimizer(model, config, precision, samples=16)
        schedule = build_schedule(optimizer, config, total_steps=total)
        if state is not None:
            schedule.load_state_dict(state)
        rates = []
        for _ in range(first, total):
            rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        states.append(schedule.state_dict())
        return rates

    states: list[dict[str, object]] = []
    whole = course(0, None)
    at = min(at, total - 1)
    model = torch.nn.Linear(2, 2)
    precision = Precision(PrecisionConfig(), torch.device("cpu"), model)
    optimizer = build_optimizer(model, config, precision, samples=16)
    schedule = build_schedule(optimizer, config, total_steps=total)
    for _ in range(at):
        optimizer.step()
        schedule.step()
    assert course(at, schedule.state_dict()) == pytest.approx(whole[at:])
    assert max(whole) == pytest.approx(0.1)
