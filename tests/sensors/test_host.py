"""Host readings."""

import os
from pathlib import Path

import psutil
import pytest

from gpuwatch.schema import Reading
from gpuwatch.sensors.host import CpuTimes, HostBackend, core_percents, cpu_readings

NAMES = {
    "cpu_percent": "%",
    "cpu_iowait_percent": "%",
    "cpu_core_max_percent": "%",
    "memory_used": "B",
    "memory_total": "B",
    "swap_used": "B",
    "load1": "",
    "shm_used": "B",
    "shm_total": "B",
    "psi_cpu_some": "%",
    "psi_memory_some": "%",
    "psi_memory_full": "%",
    "psi_io_some": "%",
    "psi_io_full": "%",
    "major_faults_per_s": "1/s",
    "swap_in": "B/s",
    "swap_out": "B/s",
}


def values(readings: dict[str, Reading]) -> dict[str, float | None]:
    return {name: reading.value for name, reading in readings.items()}


def test_cpu_percentages() -> None:
    before = [CpuTimes(10.0, 1.0, 100.0), CpuTimes(20.0, 2.0, 100.0)]
    now = [CpuTimes(10.5, 1.5, 101.0), CpuTimes(20.9, 2.0, 101.0)]
    assert values(cpu_readings(before, now)) == pytest.approx(
        {"cpu_percent": 70.0, "cpu_iowait_percent": 25.0, "cpu_core_max_percent": 90.0}
    )


def test_each_core_alone() -> None:
    before = [CpuTimes(10.0, 1.0, 100.0), CpuTimes(20.0, 2.0, 100.0), CpuTimes(1.0, 0.0, 5.0)]
    now = [CpuTimes(10.5, 1.5, 101.0), CpuTimes(20.9, 2.0, 101.0), CpuTimes(1.0, 0.0, 5.0)]
    assert core_percents(before, now) == (50.0, 90.0, 0.0)
    assert core_percents(None, now) == ()
    assert core_percents(before[:2], now) == ()


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


class Proc:
    """A directory with the files of /proc that the host backend reads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "pressure").mkdir()
        (root / "net").mkdir()
        (root / "self").mkdir()
        self.write(stalled_us=1_000_000, faults=100, reads=10, sectors=1000, read_ms=50, sent=5000)

    def write(
        self, *, stalled_us: int, faults: int, reads: int, sectors: int, read_ms: int, sent: int
    ) -> None:
        line = "avg10=0.00 avg60=0.00 avg300=0.00 total="
        for name in ("cpu", "memory", "io"):
            text = f"some {line}{stalled_us}\nfull {line}{stalled_us // 2}\n"
            (self.root / "pressure" / name).write_text(text)
        (self.root / "vmstat").write_text(
            f"nr_free_pages 7\npgmajfault {faults}\npswpin {faults}\npswpout 0\n"
        )
        numbers = f"{reads} 0 {sectors} {read_ms} 5 0 40 3 0 {read_ms} 60 0 0 0 0 0 0"
        (self.root / "diskstats").write_text(
            f" 254 0 gwdisk {numbers}\n 7 0 loop0 {numbers}\n 254 1 gwidle 0 0 0 0 0 0 0 0 0 0 0\n"
        )
        head = "Inter-|   Receive\n face |bytes\n"
        (self.root / "net" / "dev").write_text(
            f"{head}  eth9: {sent * 2} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n"
            "unused0: 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n"
        )
        (self.root / "self" / "mountinfo").write_text(
            "25 30 0:23 / / rw - ext4 /dev/gone rw\n"
            "26 25 0:24 / /data rw - nfs4 server:/export rw\n"
            "27 25 0:25 / /ram rw - tmpfs tmpfs rw\n"
        )
        (self.root / "self" / "mountstats").write_text(
            "device server:/export mounted on /data with fstype nfs4 statvers=1.1\n"
            f"\t    READ: {reads} {reads} 0 100 {sectors} 1 2 {read_ms} 0\n"
        )


def test_counters_as_rates(tmp_path: Path) -> None:
    proc, now_s = Proc(tmp_path), [100.0]
    backend = HostBackend(str(tmp_path), lambda: now_s[0])
    backend.paths(["/data/images", "/ram/x", "relative", "/elsewhere"])
    first = backend.sample()
    for name in ("psi_io_some", "major_faults_per_s", "swap_in"):
        assert (first.readings[name].value, first.readings[name].reason) == (None, "first tick")
    now_s[0] += 2.0
    proc.write(stalled_us=1_500_000, faults=150, reads=30, sectors=5000, read_ms=150, sent=9000)
    sample = backend.sample()
    got = values(sample.readings)
    assert got["psi_io_some"] == pytest.approx(25.0)
    assert got["psi_io_full"] == pytest.approx(12.5)
    assert got["major_faults_per_s"] == pytest.approx(25.0)
    assert got["swap_in"] == pytest.approx(25.0 * os.sysconf("SC_PAGE_SIZE"))
    assert got["swap_out"] == 0.0
    io = {(item.kind, item.name or item.path): item for item in sample.io}
    assert set(io) == {
        ("disk", "gwdisk"),
        ("network", "eth9"),
        ("dataset", "server:/export"),
        ("dataset", "/ram/x"),
        ("dataset", "relative"),
        ("dataset", "gone"),
    }
    disk = values(io["disk", "gwdisk"].readings)
    assert disk == pytest.approx(
        {
            "read_bytes_per_s": 4000 * 512 / 2.0,
            "write_bytes_per_s": 0.0,
            "read_latency": 5.0,
            "busy_percent": 5.0,
        }
    )
    assert values(io["network", "eth9"].readings) == {"rx": 4000.0, "tx": 2000.0}
    nfs = io["dataset", "server:/export"]
    assert (nfs.path, nfs.filesystem) == ("/data/images", "nfs4")
    assert values(nfs.readings) == {"read_bytes_per_s": 2000.0, "read_latency": 5.0}
    assert io["dataset", "/ram/x"].readings["read_latency"].reason == "it lies in memory"
    assert io["dataset", "relative"].readings["read_latency"].reason == "no absolute path"
    assert "no disk of this machine" in io["dataset", "gone"].readings["read_latency"].reason


def test_nothing_read_is_no_latency_and_a_smaller_counter_no_rate(tmp_path: Path) -> None:
    proc, now_s = Proc(tmp_path), [100.0]
    backend = HostBackend(str(tmp_path), lambda: now_s[0])
    backend.paths(["/data/images"])
    backend.sample()
    now_s[0] += 1.0
    idle = {item.kind: item for item in backend.sample().io}
    assert idle["disk"].readings["read_latency"].reason == "nothing was read"
    assert idle["dataset"].readings["read_latency"].reason == "nothing was read"
    now_s[0] += 1.0
    proc.write(stalled_us=0, faults=0, reads=1, sectors=1, read_ms=1, sent=1)
    sample = backend.sample()
    for item in sample.io:
        for reading in item.readings.values():
            assert reading.value is None
    assert sample.readings["psi_io_some"].value is None
    assert sample.readings["major_faults_per_s"].value is None


def test_a_kernel_without_pressure_says_so(tmp_path: Path) -> None:
    backend = HostBackend(str(tmp_path))
    sample = backend.sample()
    assert sample.io == ()
    assert "does not tell pressure" in sample.readings["psi_cpu_some"].reason
    assert sample.readings["major_faults_per_s"].value is None
