import itertools

import pytest

from trainer.schedule import lr_factor


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
