"""Pure parts of the NVIDIA backend: bits, counters, percentages, lists of processes, words."""

import ctypes
import os
from collections import Counter as Counter_
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch.frames import decode_sensor_frame, encode
from gpuwatch.schema import GpuProcess, GpuSample, SensorFrame
from gpuwatch.sensors.backend import aged, failed, known, unknown
from gpuwatch.sensors.nvml.backend import asleep
from gpuwatch.sensors.nvml.calls import Calls, NvmlError
from gpuwatch.sensors.nvml.decode import (
    MAX_PROCESSES,
    Counter,
    Listed,
    ProcessTable,
    counter_rate,
    merge_processes,
    numa_node,
    percentage,
)
from gpuwatch.sensors.nvml.device import Device
from gpuwatch.sensors.nvml.words import (
    LIMITING_BITS,
    clock_reasons,
    driver_sentence,
    lost_sentence,
    value_sentence,
    xid_is_hardware,
    xid_sentence,
)

BITS = st.integers(0, 2**64 - 1)


@given(BITS, BITS)
def test_each_bit_is_one_word(one: int, other: int) -> None:
    assert len(clock_reasons(one)) == one.bit_count()
    assert set(clock_reasons(one | other)) == set(clock_reasons(one)) | set(clock_reasons(other))
    assert len(set(clock_reasons(one))) == one.bit_count()


def test_power_and_heat_are_told_apart() -> None:
    assert clock_reasons(0) == ()
    assert clock_reasons(0x1) == ("idle",)
    assert clock_reasons(0x84) == ("power cap", "hardware power brake")
    assert clock_reasons(0x60) == ("software thermal slowdown", "hardware thermal slowdown")
    assert clock_reasons(1 << 40) == ("clock event 0x10000000000",)
    for word in clock_reasons(LIMITING_BITS):
        assert any(cause in word for cause in ("power", "thermal", "slowdown"))


COUNTS = st.integers(0, 2**63)


@given(COUNTS, st.integers(0, 2**40), st.floats(0.01, 1e4))
def test_a_wide_counter_gives_growth_over_time(start: int, grown: int, passed_s: float) -> None:
    before, now = Counter(start, 64, 5.0), Counter(start + grown, 64, 5.0 + passed_s)
    rate = counter_rate(before, now, 0.0)
    assert isinstance(rate, float)
    # Above 2**53 a double has no room for single counts.
    assert rate * (now.at_s - before.at_s) == pytest.approx(grown, rel=1e-6, abs=2048)
    if grown > 4096 and start < 2**52:
        assert counter_rate(now._replace(at_s=1.0), before, 0.0) == "the counter was reset"


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.floats(0.5, 2.0))
def test_a_narrow_counter_wraps_once_or_tells_nothing(
    start: int, grown: int, passed_s: float
) -> None:
    before = Counter(float(start), 32, 0.0)
    now = Counter(float((start + grown) % 2**32), 32, passed_s)
    rate = counter_rate(before, now, 1e9)
    assert isinstance(rate, float)
    assert rate * passed_s == pytest.approx(grown, abs=0.01)
    for ceiling_per_s in (0.0, 64e9):  # PCIe 5 x16 passes 32 bits fifteen times a second
        assert "wrap" in str(counter_rate(before, now, ceiling_per_s))


@given(st.floats(), st.floats())
def test_time_that_did_not_pass_gives_no_rate(first: float, second: float) -> None:
    assert isinstance(counter_rate(Counter(first, 64, 7.0), Counter(second, 64, 7.0), 0.0), str)


@given(st.floats())
def test_a_percentage_is_one_or_says_that_it_is_none(value: float) -> None:
    found = percentage(value)
    if isinstance(found, str):
        assert found.startswith("implausible")
        assert not 0.0 <= value <= 100.0
    else:
        assert 0.0 <= found <= 100.0
        assert abs(found - value) <= 1.0


LISTED = st.lists(
    st.builds(
        Listed,
        st.integers(0, 50),
        st.one_of(st.none(), st.integers(0, 2**50), st.just(2**64 - 1)),
    ),
    max_size=30,
)


@given(LISTED, LISTED)
def test_every_process_is_there_once_with_its_memory(
    compute: list[Listed], graphics: list[Listed]
) -> None:
    merged = merge_processes(compute, graphics)
    pids = [pid for pid, _, _ in merged]
    assert sorted(pids) == sorted({item.pid for item in compute + graphics})
    amounts = [memory or 0 for _, memory, _ in merged]
    assert amounts == sorted(amounts, reverse=True)
    for pid, memory, kind in merged:
        mine = [[i for i in entries if i.pid == pid] for entries in (compute, graphics)]
        assert kind.split("+") == [
            name for name, found in zip(("compute", "graphics"), mine, strict=True) if found
        ]
        told = [
            [i.memory_bytes for i in found if i.memory_bytes is not None and i.memory_bytes < 2**60]
            for found in mine
        ]
        if not any(told):
            assert memory is None
        else:
            assert memory == max(sum(amounts) for amounts in told)


def test_the_largest_processes_are_kept_where_there_are_too_many() -> None:
    merged = merge_processes([Listed(pid, pid) for pid in (*range(1, 2000), 2**32 - 1)], [])
    described = ProcessTable("/nowhere").describe(merged)
    assert len(described) == MAX_PROCESSES
    assert described[1].memory_bytes == 1999
    # As many as the wire takes.
    frame = SensorFrame(1, 0, 0.0, gpus=(GpuSample(0, "u", processes=described),))
    assert decode_sensor_frame(encode(frame)) == frame


def process(root: Path, pid: int, device: str = "") -> None:
    (root / str(pid) / "fd").mkdir(parents=True)
    (root / str(pid) / "comm").write_text("python3\n")
    if device:
        (root / str(pid) / "fd" / "7").symlink_to(device)


@pytest.mark.parametrize(("namespace", "initial"), [(4026531836, True), (4026532999, False)])
def test_in_a_container_a_pid_of_the_same_number_may_be_another(
    tmp_path: Path, namespace: int, initial: bool
) -> None:
    process(tmp_path, 10)
    process(tmp_path, 11, "/dev/nvidia3")
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").symlink_to(f"pid:[{namespace}]")
    merged = [(10, 1, "compute"), (11, 2, "compute"), (12, 3, "graphics")]
    plain, user, gone = ProcessTable(str(tmp_path)).describe(merged)
    assert plain.visible is initial
    assert plain.name == ("python3" if initial else "pid 10 (not visible here)")
    assert (user.name, user.visible) == ("python3", True)
    assert user.user
    assert gone == GpuProcess(12, 3, "graphics", "pid 12 (not visible here)", "", False)


def test_only_gpus_that_all_sleep_are_left_alone(tmp_path: Path) -> None:
    def device(name: str, vendor: str, kind: str, status: str) -> None:
        (tmp_path / name / "power").mkdir(parents=True)
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
        (tmp_path / name / "power" / "runtime_status").write_text(f"{status}\n")

    assert not asleep(str(tmp_path))
    device("0000:00:02.0", "0x8086", "0x030000", "suspended")
    assert not asleep(str(tmp_path))  # no NVIDIA GPU at all
    device("0000:01:00.0", "0x10de", "0x030200", "suspended")
    device("0000:01:00.1", "0x10de", "0x040300", "active")  # its sound
    assert asleep(str(tmp_path))
    device("0000:02:00.0", "0x10de", "0x030200", "active")
    assert not asleep(str(tmp_path))


@given(st.integers(-100, 2000))
def test_every_code_is_one_sentence(code: int) -> None:
    for sentence in (driver_sentence(code), value_sentence(code), lost_sentence(code)):
        assert sentence
        assert "\n" not in sentence
        assert len(sentence) <= 256
    assert str(code) in xid_sentence(code)


def test_xids_of_programs_do_not_accuse_the_card() -> None:
    assert [xid for xid in (13, 31, 43, 45, 48, 68, 79, 94, 109, 119) if xid_is_hardware(xid)] == [
        48,
        79,
        94,
        119,
    ]


class Answers:
    """Calls of which only a few are supported; counts what it is asked."""

    device = -1
    busy = None

    def __init__(self) -> None:
        self.asked: Counter_[str] = Counter_()
        self.known = {
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetPcieThroughput": 7,
        }

    def call(self, function: str, *args: object) -> object:
        self.asked[function] += 1
        if function not in self.known:
            raise NvmlError(function, 3)
        return self.known[function]

    def fields(self, handle: object, ids: object) -> list[object]:
        return [self.call("fields")]

    def processes(self, handle: object, kind: str) -> list[tuple[int, int | None]]:
        self.call("processes")
        return []


def test_what_is_not_supported_is_asked_once_a_minute() -> None:
    answers, now_s = Answers(), [1000.0]
    # Every 7 s: so that the minute ends between two slow ticks.
    device = Device(answers, 0, lambda: now_s[0], lambda index, handle: None, slow_s=7.0)  # type: ignore[arg-type]
    for _ in range(130):
        (gpu,) = device.sample()
        now_s[0] += 1.0
        assert gpu.readings["pcie_rx"].value == 7 * 1024  # also when the counters are asked again
        for name in ("gpu_util", "memory_used", "power", "sm_active", "temperature", "nvlink_rx"):
            assert gpu.readings[name].value is None
            assert gpu.readings[name].state == "na"
            assert gpu.readings[name].reason
    assert gpu.readings["gpu_util"].age_s == 0.0  # it is as true as it was
    assert answers.asked["nvmlDeviceGetUtilizationRates"] == 3
    assert answers.asked["nvmlDeviceGetMemoryInfo"] == 3
    assert answers.asked["nvmlDeviceGetPcieThroughput"] == 2 * 19


def test_ages_and_states() -> None:
    util = aged(known(83, "%", "NVML"), 2.0)
    assert (util.value, util.age_s, util.state) == (83.0, 2.0, "ok")
    late = aged(util, 3.0, "stale", "NVML not answering for 3 s")
    assert (late.value, late.age_s, late.state) == (83.0, 5.0, "stale")
    assert late.reason == "NVML not answering for 3 s"
    assert aged(late, 1.0, "error", "lost").reason == "lost"
    for fact in (unknown("%", "GPM", "no GPM"), failed("W", "NVML", "unknown error")):
        old = aged(fact, 9.0, "error", "lost")
        assert (old.value, old.age_s, old.state) == (None, 9.0, fact.state)
        assert old.reason == fact.reason
    assert aged(util, 1e300).age_s <= 1e9
    assert aged(util, -5.0).age_s == 2.0


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def found(name: str, *args: object) -> object:
        return object()

    def missing(name: str, *args: object) -> object:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(NvmlError) as error:
        Calls().load()
    assert error.value.code == 12
    # The library is there, and the module pynvml is one of the older forks.
    (tmp_path / "pynvml.py").write_text("def nvmlInit(): pass\n")
    monkeypatch.setattr(ctypes, "CDLL", found)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "pynvml", raising=False)
    with pytest.raises(NvmlError) as error:
        Calls().load()
    assert "nvidia-ml-py" in driver_sentence(error.value.code)
    assert os.sep not in driver_sentence(error.value.code)[:20]


def test_the_numa_node_of_a_pci_address(tmp_path: Path) -> None:
    place = tmp_path / "0000:3b:00.0"
    place.mkdir()
    (place / "numa_node").write_text("1\n")
    assert numa_node("00000000:3B:00.0", str(tmp_path)).value == 1.0
    (place / "numa_node").write_text("-1\n")
    assert "one node" in numa_node("00000000:3B:00.0", str(tmp_path)).reason
    assert "does not tell" in numa_node("00000000:3C:00.0", str(tmp_path)).reason
    for bad in ("", "../../etc", "0000:3B:00", "zzzz:3B:00.0"):
        assert "no PCI address" in numa_node(bad, str(tmp_path)).reason
