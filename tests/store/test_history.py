"""The slower past: first batches, spans, memory over the whole run, means of sensors."""

import random
from collections.abc import Mapping

import pytest
from builders import record
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch.schema import HostSample, ProcessSample, Reading, SensorFrame, Span
from gpuwatch.store.history import (
    KEPT_FIRSTS,
    KEPT_SPANS,
    MEMORY_POINTS,
    History,
    Means,
    ProcessMeans,
    memory_slope,
)


def test_first_batches_but_the_very_first() -> None:
    history = History()
    for index in range(0, 2000, 10):
        history.add_steps([record(index, {"forward": 1.0}, tags=("first_batch",))])
        history.add_steps([record(index + 1, {"forward": 1.0})])
    firsts = [r.index for r in history.past().firsts]
    assert len(firsts) == KEPT_FIRSTS
    assert firsts[-1] == 1990
    history = History()
    history.add_steps([record(0, {"forward": 1.0}, tags=("first_batch", "warmup"))])
    assert history.past().firsts == ()


def test_spans_come_once_whatever_is_sent_again() -> None:
    history = History()
    spans = [Span("eval", 100.0 + n, 10**9, n) for n in range(5)]
    history.add_spans(spans[:3])
    history.add_spans(spans)
    assert history.past().spans == tuple(spans)
    history.add_spans(Span("eval", 200.0 + n, 1, n) for n in range(100))
    assert len(history.past().spans) == KEPT_SPANS


@given(st.integers(1, 3000), st.integers(0, 10**6), st.integers(-500, 10**4))
def test_memory_keeps_the_whole_run_in_view(steps: int, start: int, slope: int) -> None:
    history = History()
    for index in range(steps):
        history.add_steps(
            [record(index, {"forward": 1.0}, memory_bytes=max(0, 10**8 + slope * index))]
        )
    memory = history.past().memory
    assert len(memory) <= MEMORY_POINTS
    assert memory[0][0] == 0
    assert steps < 2 or memory[-1][0] >= steps * 0.9 - 2
    assert [step for step, _ in memory] == sorted({step for step, _ in memory})
    if len(memory) > 2:
        assert memory_slope(memory) == pytest.approx(slope, abs=1e-3 * abs(slope) + 1e-6)


def test_no_slope_without_points() -> None:
    assert memory_slope([]) is None
    assert memory_slope([(1, 5), (2, 6)]) is None
    assert memory_slope([(1, 5), (1, 6), (1, 7)]) is None


def tick(cpu: float | None, **processes: tuple[str, float]) -> SensorFrame:
    def readings(value: float | None) -> Mapping[str, Reading]:
        return {
            "cpu_percent": Reading(value, "%", "t", 0.0, "ok" if value is not None else "na", ""),
            "load1": Reading(3.0, "", "t"),
        }

    return SensorFrame(
        1, 0, 0.0,
        host=HostSample(4, dict(readings(cpu))),
        processes=tuple(
            ProcessSample(int(pid[1:]), 1, "worker", state, dict(readings(value)))
            for pid, (state, value) in processes.items()
        ),
    )  # fmt: skip


def test_means_over_six_seconds_and_no_longer() -> None:
    means = Means()
    assert means.host() == {}
    means.add(tick(100.0), 0.0)
    for second in range(1, 12):
        means.add(tick(20.0 + second % 2, p7=("D" if second % 2 else "S", 50.0)), float(second))
    assert means.host() == pytest.approx({"cpu_percent": 20.57}, abs=0.05)
    found = means.process(7)
    assert found is not None
    assert found.readings == {"cpu_percent": 50.0}
    assert found.blocked == pytest.approx(4 / 7)
    assert found.runnable == 0.0
    assert means.process(8) is None
    means.add(tick(None), 12.0)
    assert means.host()["cpu_percent"] == pytest.approx(20.5, abs=0.1)


@pytest.mark.parametrize("steady", [True, False])
def test_what_is_made_of_all_processes_at_once_is_what_each_has(steady: bool) -> None:
    chance, means = random.Random(int(steady)), Means()
    for second in range(30):
        states = {
            f"p{pid}": (chance.choice("RSD"), chance.choice([None, 100.0 * chance.random()]))
            for pid in range(1, 7)
            if steady or chance.random() < 0.9
        }
        means.add(tick(50.0, **states), float(second))
        picture = means.picture()
        for pid in range(1, 7):
            found, plain = picture.process(pid), ProcessMeans(picture._ticks, pid)
            if found is None:
                assert not plain._places()
                continue
            assert found.mean("cpu_percent") == plain.mean("cpu_percent")
            assert found.mean("cpu_percent") == found.readings.get("cpu_percent")
            assert (found.blocked, found.runnable) == (plain.blocked, plain.runnable)
    assert steady is (found is not None and found._columns is not None)


def test_one_mean_is_that_of_all_readings() -> None:
    means = Means()
    for second in range(6):
        # Of process 8 a reading is missing, and it is there later than the other.
        more = {"p8": ("S", None if second == 4 else 10.0 * second)} if second > 1 else {}
        means.add(tick(50.0, p7=("R", 20.0 + second), **more), float(second))
    for pid, expected in ((7, 22.5), (8, 100.0 / 3)):
        found = means.process(pid)
        assert found is not None
        for _ in range(2):
            assert found.mean("cpu_percent") == pytest.approx(expected)
            assert found.mean("cpu_percent") == found.readings["cpu_percent"]
            assert found.mean("major_faults_per_s") is None
            assert found.mean("no_such_reading") is None
