"""Host and GPU readings."""

import psutil
import pytest

from gpuwatch.schema import Reading
from gpuwatch.sensors.gpus import GpuBackend
from gpuwatch.sensors.host import CpuTimes, HostBackend, cpu_readings

NAMES = {
    "cpu_percent": "%",
    "cpu_iowait_percent": "%",
    "cpu_core_max_percent": "%",
    "memory_used": "B",
    "memory_total": "B",
    "swap_used": "B",
    "load1": "",
}


def values(readings: dict[str, Reading]) -> dict[str, float | None]:
    return {name: reading.value for name, reading in readings.items()}


def test_cpu_percentages() -> None:
    before = [CpuTimes(10.0, 1.0, 100.0), CpuTimes(20.0, 2.0, 100.0)]
    now = [CpuTimes(10.5, 1.5, 101.0), CpuTimes(20.9, 2.0, 101.0)]
    assert values(cpu_readings(before, now)) == pytest.approx(
        {"cpu_percent": 70.0, "cpu_iowait_percent": 25.0, "cpu_core_max_percent": 90.0}
    )


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        (None, [CpuTimes(1.0, 0.0, 2.0)], "first tick"),
        ([CpuTimes(1.0, 0.0, 2.0)], [CpuTimes(1.0, 0.0, 2.0)], "no CPU time passed"),
        ([CpuTimes(1.0, 0.0, 2.0)], [CpuTimes(1.0, 0.0, 2.0)] * 2, "cores changed"),
        ([], [], "no CPU time passed"),
    ],
)
def test_cpu_percentages_that_are_not_known(
    before: list[CpuTimes] | None, now: list[CpuTimes], reason: str
) -> None:
    for reading in cpu_readings(before, now).values():
        assert reading.value is None
        assert reading.state == "na"
        assert reason in reading.reason


def test_counters_that_step_back_stay_in_range() -> None:
    before = [CpuTimes(10.0, 5.0, 100.0)]
    now = [CpuTimes(11.0, 4.0, 100.5)]
    found = values(cpu_readings(before, now))
    assert found == {"cpu_percent": 100.0, "cpu_iowait_percent": 0.0, "cpu_core_max_percent": 100.0}


def test_host_has_every_reading_with_its_unit() -> None:
    backend = HostBackend()
    assert backend.probe() == ""
    first, second = backend.sample(), backend.sample()
    backend.close()
    for sample in (first, second):
        assert {name: reading.unit for name, reading in sample.readings.items()} == NAMES
        assert sample.cores == psutil.cpu_count(logical=True)
    assert first.readings["cpu_percent"].reason == "first tick"
    used, total = first.readings["memory_used"].value, first.readings["memory_total"].value
    assert used is not None
    assert total is not None
    assert 0 < used < total


def test_what_cannot_be_read_costs_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no meminfo in this container")

    monkeypatch.setattr(psutil, "virtual_memory", broken)
    readings = HostBackend().sample().readings
    assert readings["memory_used"].value is None
    assert readings["memory_used"].state == "na"
    assert "no meminfo" in readings["memory_used"].reason
    assert readings["swap_used"].value is not None
    assert set(readings) == set(NAMES)


def test_no_driver_is_one_sentence() -> None:
    backend = GpuBackend("libnvidia-ml-is-not-here.so.1")
    assert backend.probe() == (
        "no NVIDIA driver on this machine (libnvidia-ml-is-not-here.so.1 not found)"
    )
    assert backend.sample() == ()


def test_a_driver_is_not_read_yet() -> None:
    assert GpuBackend("libc.so.6").probe() == "GPU readings are not read by this version"
