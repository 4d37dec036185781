"""NVML through the real ctypes path, on a stand-in for the library."""

import itertools
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nvml.child import ARGV, SamplerRun
from nvml.stub import COUNTERS, GPM, H100, Stub, compiler, library, total

import gpuwatch
from gpuwatch.frames import decode_sensor_frame
from gpuwatch.schema import GpuSample, Reading, SensorFrame
from gpuwatch.wire.collect import sampler_child

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler for the stand-in")


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    return Stub(library(), tmp_path)


def reading(gpu: GpuSample, name: str) -> Reading:
    return gpu.readings[name]


def value(gpu: GpuSample, name: str) -> float:
    found = gpu.readings[name]
    assert found.state == "ok", found
    assert found.value is not None
    return found.value


EXPECTED = {
    "gpu_util": (83, "%"),
    "memory_util": (41, "%"),
    "memory_used": (61e9, "B"),
    "memory_total": (85520809984, "B"),
    "power": (412, "W"),
    "power_limit": (700, "W"),
    "sm_clock": (1755, "MHz"),
    "sm_clock_max": (1980, "MHz"),
    "memory_clock": (2619, "MHz"),
    "memory_clock_max": (2619, "MHz"),
    "temperature": (56, "°C"),
    "memory_temperature": (71, "°C"),
    "ecc_corrected": (2, ""),
    "ecc_uncorrected": (0, ""),
    "link_gen": (5, ""),
    "link_gen_max": (5, ""),
    "link_width": (16, "lanes"),
    "link_width_max": (16, "lanes"),
    "persistence": (1, ""),
    "mig": (0, ""),
    "sm_active": (74.5, "%"),
    "sm_occupancy": (33.25, "%"),
    "tensor_active": (22, "%"),
    "dram_active": (48, "%"),
    "pcie_rx": (3100 * 2**20, "B/s"),
    "pcie_tx": (400 * 2**20, "B/s"),
    "nvlink_rx": (20000 * 2**20, "B/s"),
    "nvlink_tx": (21000 * 2**20, "B/s"),
}


@pytest.mark.process
def test_every_value_with_its_unit_and_gpm_from_the_second_tick(stub: Stub) -> None:
    stub.write(
        *("count 2", *H100, *GPM, "gpu 1 sm 1200", "gpu 1 reasons 0x44"),
        *("gpu 0 uuid GPU-ffffffff-0000-0000-0000-000000000009", "gpmfault 1 3 3"),
        "gpm 1 2 250",  # not a percentage
    )
    with SamplerRun(stub) as child:
        first = child.until(lambda f: f.gpus).gpus[0]
        for name in ("sm_active", "pcie_rx", "nvlink_tx"):
            assert reading(first, name).value is None
            assert (reading(first, name).state, reading(first, name).reason) == (
                "na",
                "first sample",
            )
        gpus = child.gpus()
    found = {name: (r.value, r.unit) for name, r in gpus[0].readings.items() if r.state == "ok"}
    assert {name: found.get(name) for name in EXPECTED} == EXPECTED
    assert reading(gpus[0], "fan").state == "na"
    assert "not supported" in reading(gpus[0], "fan").reason
    # The driver's order, whatever the UUIDs' order is.
    assert [(g.index, g.uuid[-1]) for g in gpus] == [(0, "9"), (1, "1")]
    assert gpus[0].name == "NVIDIA H100 80GB HBM3"
    assert [(g.driver, g.driver_reason) for g in gpus] == [("570.00.00", "")] * 2
    assert stub.counts()["nvmlSystemGetDriverVersion"].total == 1
    assert gpus[0].reasons == ()
    # Clocks that are held down are told with their causes, one by power and one by heat.
    assert value(gpus[1], "sm_clock") == 1200
    assert gpus[1].reasons == ("power cap", "hardware thermal slowdown")
    assert value(gpus[1], "clock_events") == 0x44
    # One metric that fails takes no other with it.
    assert reading(gpus[1], "sm_occupancy").state == "na"
    assert reading(gpus[1], "sm_active").value is None
    assert "implausible" in reading(gpus[1], "sm_active").reason
    assert value(gpus[1], "tensor_active") == 22


@pytest.mark.process
def test_without_gpm_it_says_why_and_counts_bytes(stub: Stub) -> None:
    state = ("count 2", *H100, *COUNTERS, "field 1 139 0 0 3", "gpu 1 gpm_query 1")
    stub.write(*state)
    with SamplerRun(stub) as child:
        child.until(lambda f: f.gpus)
        for _ in range(4):
            child.frame()
        first, second = child.frame().gpus
    for name in ("sm_active", "sm_occupancy", "tensor_active", "dram_active"):
        assert reading(first, name).value is None
        assert reading(first, name).state == "na"
        assert reading(first, name).reason.startswith("no GPM before Hopper")
        assert "dcgm-exporter" in reading(first, name).reason
    assert value(first, "pcie_rx") == pytest.approx(3e9, rel=0.02)
    assert value(first, "pcie_tx") == pytest.approx(4e8, rel=0.02)
    assert value(first, "nvlink_rx") == pytest.approx(2e6 * 1024, rel=0.02)
    assert value(first, "nvlink_tx") == pytest.approx(1e6 * 1024, rel=0.02)
    # The query says yes and the sample no.
    assert "no GPM sample" in reading(second, "sm_active").reason
    assert value(second, "pcie_rx") == pytest.approx(3e9, rel=0.02)


@pytest.mark.process
def test_without_counters_pcie_is_sampled_now_and_then(stub: Stub) -> None:
    stub.write("count 1", *H100, "gpu * pcie_rx_kib 1000", "gpu * pcie_tx_kib 10")
    began_s = time.monotonic()
    with SamplerRun(stub, interval_s=0.1) as child:
        child.until(lambda f: f.gpus)
        for _ in range(12):
            gpu = child.frame().gpus[0]
        counts, passed_s = stub.counts(), time.monotonic() - began_s
    assert value(gpu, "pcie_rx") == 1000 * 1024
    assert "20 ms" in reading(gpu, "pcie_rx").source
    assert reading(gpu, "nvlink_rx").state == "na"
    # Two calls at every fifth tick, of 0.1 s.
    assert counts["nvmlDeviceGetPcieThroughput"].total <= 2 * (2 + passed_s / 0.5)
    assert counts["nvmlDeviceGetUtilizationRates"].total >= 8


FIELDS = """
from gpuwatch.sensors.nvml.calls import Calls
calls = Calls()
calls.load()
calls.call("nvmlInit")
handle = calls.call("nvmlDeviceGetHandleByIndex", 0)
print([value.code for value in calls.fields(handle, (198, 138, 150))])
(values,) = calls._fields.values()
print([hex(value.fieldId) for value in values])
"""


def test_a_driver_that_writes_past_the_fields_finds_room(stub: Stub) -> None:
    stub.write("count 1", *H100, *COUNTERS)
    done = subprocess.run(
        [sys.executable, "-c", FIELDS], env=stub.env(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[0, 0, 3]", "['0xc6', '0x8a', '0x96', '0x5a5a5a5a']"]


@pytest.mark.process
def test_what_an_old_driver_lacks_has_an_elder_or_a_reason(stub: Stub) -> None:
    stub.write(
        *("count 2", *H100, "gpu 1 total 0"),
        "fault 0 nvmlDeviceGetMemoryInfo_v2 13",
        "fault 0 nvmlDeviceGetCurrentClocksEventReasons 13",
        "fault 0 nvmlDeviceGetTemperatureV 13",
        "fault 0 nvmlGpmQueryDeviceSupport 13",
        *("fault 0 nvmlDeviceGetPowerUsage 999", "fault 0 nvmlDeviceGetClockInfo 4"),
        "fault * nvmlSystemGetDriverVersion 3",
    )
    with SamplerRun(stub) as child:
        old, unified = child.gpus()
    assert (old.driver, old.driver_reason) == ("", "not supported by this GPU or driver (NVML 3)")
    assert value(old, "memory_used") == 61_500_000_000  # the first version counts the reserve
    assert "v1" in reading(old, "memory_used").source
    assert value(old, "temperature") == 56
    assert value(old, "clock_events") == 0
    assert (
        reading(old, "sm_active").reason == "GPM: the driver is too old for it (NVML 13): update it"
    )
    assert reading(old, "power").state == "error"
    assert "unknown error" in reading(old, "power").reason
    assert "no permission" in reading(old, "sm_clock").reason
    # No memory of its own: n/a, and neither 0 nor the host's.
    for name in ("memory_used", "memory_total"):
        assert (reading(unified, name).value, reading(unified, name).state) == (None, "na")
        assert "not supported" in reading(unified, name).reason


@pytest.mark.process
def test_no_process_is_dropped(stub: Stub) -> None:
    dead = 2**22 + 7  # above the kernel's largest pid
    me = os.getpid()
    many = [f"proc 1 compute {dead + i} 1000" for i in range(150)]
    stub.write(
        *("count 3", *H100, f"proc 0 compute {dead} 30000000000", f"proc 0 compute {me} 5"),
        *(f"proc 0 graphics {me} 5", "proc 0 graphics 1 7", *many, "proc 1 graphics 1 -1"),
        *("fault 2 nvmlDeviceGetComputeRunningProcesses_v3 3",),
        *("fault 2 nvmlDeviceGetGraphicsRunningProcesses_v3 3",),
    )
    with SamplerRun(stub) as child:
        first, second, third = child.gpus()
    assert [p.pid for p in first.processes] == [dead, 1, me]
    ghost, init, mine = first.processes
    assert ghost.memory_bytes == 30_000_000_000
    assert ghost.name == f"pid {dead} (not visible here)"
    assert not ghost.visible
    assert mine.kind == "compute+graphics"
    assert mine.memory_bytes == 5  # one process, one amount, though both lists have it
    assert init.kind == "graphics"
    assert value(first, "processes_memory") == 30_000_000_012
    assert len(second.processes) == 151
    assert reading(second, "processes_memory").value is None
    assert "1 of its processes" in reading(second, "processes_memory").reason
    assert third.processes == ()
    assert "not supported" in third.processes_reason
    assert reading(third, "processes_memory").value is None


@pytest.mark.process
def test_a_lost_gpu_keeps_its_row_and_comes_back(stub: Stub) -> None:
    state = ("count 2", *H100, *GPM)
    stub.write(*state)
    with SamplerRun(stub) as child:
        child.gpus()
        stub.write(*state, "gpu 0 util 17", "fault 1 * 15", "event 1 1 79")
        lost = child.until(lambda f: f.gpus[1].lost)
        frames = [child.frame() for _ in range(4)]
        assert stub.counts()["nvmlDeviceGetHandleByIndex_v2"].gpus[1] <= 3  # no hammering
        stub.write(*state, "gpu 1 util 55")
        back = child.until(lambda f: not f.gpus[1].lost, "GPU 1 again")
        healed = child.until(lambda f: f.gpus[1].readings["sm_active"].value is not None)
    gpu = lost.gpus[1]
    assert gpu.lost.startswith("GPU is lost (NVML 15)")
    assert gpu.uuid.endswith("1")
    assert reading(gpu, "power").state == "error"
    assert reading(gpu, "power").reason == "GPU is lost (NVML 15)"
    assert reading(gpu, "power").value == 412  # the last good one, and how old it is
    ages = [reading(f.gpus[1], "gpu_util").age_s for f in frames]
    assert ages == sorted(ages)
    assert ages[-1] > 0.4
    # The other one goes on.
    assert value(frames[-1].gpus[0], "gpu_util") == 17
    assert reading(frames[-1].gpus[0], "gpu_util").age_s < 1.5
    assert value(back.gpus[1], "gpu_util") == 55
    assert reading(back.gpus[1], "gpu_util").age_s < 1.5
    assert value(healed.gpus[1], "sm_active") == 74.5
    event = back.gpus[1].events[0]
    assert (event.code, event.hardware) == (79, True)
    assert event.text == "Xid 79: the GPU has fallen off the bus"
    assert abs(event.time_s - time.time()) < 60
    assert back.gpus[0].events == ()


@pytest.mark.process
def test_a_gpu_that_is_lost_from_the_start_has_a_row(stub: Stub) -> None:
    stub.write("count 2", *H100, *GPM, "fault 0 * 15")
    with SamplerRun(stub) as child:
        lost, other = child.until(lambda f: f.gpus).gpus
        assert lost.index == 0
        assert lost.lost.startswith("GPU is lost")
        assert reading(lost, "gpu_util").reason == "GPU is lost (NVML 15)"
        assert value(other, "gpu_util") == 83
        stub.write("count 2", *H100, *GPM)
        found = child.until(lambda f: not f.gpus[0].lost, "GPU 0").gpus[0]
    assert value(found, "gpu_util") == 83
    assert found.name == "NVIDIA H100 80GB HBM3"


@pytest.mark.process
def test_a_call_that_hangs_costs_only_gpu_readings(stub: Stub) -> None:
    state = ("count 2", *H100, *GPM)
    stub.write(*state)
    with SamplerRun(stub) as child:
        child.gpus()
        stub.write(*state, "delay 1 nvmlDeviceGetPowerUsage 2500000")
        late = child.until(lambda f: "not answering" in f.gpus[0].readings["gpu_util"].reason)
        sent = [late.sent_s]
        following = [child.frame() for _ in range(5)]
        sent += [frame.sent_s for frame in following]
        stub.write(*state)
        child.until(lambda f: f.gpus[0].readings["gpu_util"].state == "ok", "an answer")
    util = late.gpus[0].readings["gpu_util"]
    assert re.fullmatch(
        r"NVML not answering for \d+ s \(nvmlDeviceGetPowerUsage of GPU 1\)", util.reason
    )
    assert util.state == "stale"
    assert util.value == 83
    ages = [f.gpus[1].readings["gpu_util"].age_s for f in following]
    assert ages == sorted(ages)
    assert ages[-1] - ages[0] > 0.3
    # The host goes on at its own beat, with readings of now.
    assert max(b - a for a, b in itertools.pairwise(sent)) < 1.5
    assert all(f.host.readings["memory_used"].state == "ok" for f in following)


@pytest.mark.process
def test_it_quits_at_once_beneath_a_hanging_call(stub: Stub) -> None:
    stub.write("count 1", *H100, "delay * nvmlDeviceGetUtilizationRates 60000000")
    with SamplerRun(stub) as child:
        frame = child.until(lambda f: "not answering" in f.gpus_reason)
        assert frame.gpus == ()
        assert "nvmlDeviceGetUtilizationRates of GPU 0" in frame.gpus_reason
        began_s = time.monotonic()
        child.stdin.close()
        assert child.process.wait(10) == 0
        assert time.monotonic() - began_s < 5.0
    assert "nvmlShutdown" not in stub.counts()


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (9, "the NVIDIA driver is not loaded (NVML 9): load it"),
        (17, "the operating system blocks the GPUs (NVML 17): give"),
        (18, "the NVIDIA library and the loaded driver differ in version (NVML 18): reboot"),
        (999, "the NVIDIA driver gives an unknown error (NVML 999): in a container, restart it"),
    ],
)
def test_an_initialisation_that_fails_is_one_sentence_and_is_tried_again(
    stub: Stub, code: int, words: str
) -> None:
    stub.write("count 1", *H100, f"init {code}")
    with SamplerRun(stub) as child:
        frame = child.until(lambda f: "starting" not in f.gpus_reason)
        assert frame.gpus == ()
        assert frame.gpus_reason.startswith(words)
        assert "\n" not in frame.gpus_reason
        assert frame.host.cores > 0
        if code == 18:
            stub.write("count 1", *H100)
            assert child.until(lambda f: f.gpus, "a GPU after all").gpus_reason == ""


@pytest.mark.process
def test_without_the_library_or_gpus(stub: Stub) -> None:
    stub.write("count 0")
    with SamplerRun(stub) as child:
        frame = child.until(lambda f: "starting" not in f.gpus_reason)
        assert "lists no GPU" in frame.gpus_reason
    with SamplerRun(stub, LD_LIBRARY_PATH="") as child:
        frame = child.until(lambda f: "starting" not in f.gpus_reason)
        if "libnvidia-ml.so.1" not in frame.gpus_reason:
            pytest.skip("this machine has an NVIDIA driver")
        assert frame.gpus_reason.startswith("no NVIDIA driver on this machine")
        assert child.process.poll() is None


@pytest.mark.process
def test_a_driver_that_goes_away_takes_no_row_with_it(stub: Stub) -> None:
    state = ("count 2", *H100, *GPM)
    stub.write(*state)
    with SamplerRun(stub) as child:
        child.gpus()
        stub.write(*state, "event 1 0 31")
        child.until(lambda f: f.gpus[0].events)
        stub.write("count 1", *H100, *GPM, "fault * nvmlDeviceGetUtilizationRates 9", "init 9")
        frame = child.until(lambda f: "not loaded" in f.gpus[0].lost)
        assert [gpu.uuid[-1] for gpu in frame.gpus] == ["0", "1"]
        assert all("not loaded" in r.reason for r in frame.gpus[1].readings.values() if r.value)
        # Back again, but one is not: it is still known which one that is.
        stub.write("count 1", *H100, *GPM, "fault 0 * 15")
        frame = child.until(lambda f: "GPU is lost" in f.gpus[0].lost)
        assert [gpu.uuid[-1] for gpu in frame.gpus] == ["0", "1"]
        assert frame.gpus[0].readings["power"].value == 412
        # Back altogether, and one GPU fewer: its row stays too.
        stub.write("count 1", *H100, *GPM)
        frame = child.until(lambda f: not f.gpus[0].lost, "the driver again")
        assert [gpu.uuid[-1] for gpu in frame.gpus] == ["0", "1"]
        assert "does not list" in frame.gpus[1].lost
        # What was heard is not forgotten.
        assert [(e.code, e.hardware) for e in frame.gpus[0].events] == [(31, False)]
        # What was shut down was not in a call, and every start has its end.
        counts = stub.counts()
        assert counts["nvmlShutdown"].total == 1


@pytest.mark.process
def test_mig_devices_are_listed_with_their_parent(stub: Stub) -> None:
    stub.write(
        *("count 1", *H100, *GPM, "gpu 0 mig_mode 1"),
        "mig 0 1 0 MIG-aaaaaaaa-0000-0000-0000-000000000001 10000000000 2000000000",
        "mig 0 2 0 MIG-aaaaaaaa-0000-0000-0000-000000000002 20000000000 1000000000",
    )
    with SamplerRun(stub) as child:
        child.gpus()
        frame = child.until(lambda f: f.gpus[-1].readings["sm_active"].value is not None)
        parent, one, two = frame.gpus
        stub.write(
            *("count 1", *H100, *GPM, "gpu 0 mig_mode 1"),
            "mig 0 3 0 MIG-aaaaaaaa-0000-0000-0000-000000000003 10000000000 0",
        )
        began_s = time.monotonic()
        remade = child.until(lambda f: [g.slice for g in f.gpus] == ["", "gi 3 ci 0"]).gpus[1]
        # Its absence tells; the next look at the modes would be 4 s away.
        assert time.monotonic() - began_s < 3.0
    assert parent.parent == ""
    assert "not supported" in reading(parent, "gpu_util").reason
    assert value(parent, "mig") == 1
    assert (one.parent, one.uuid[-1], one.slice) == (parent.uuid, "1", "gi 1 ci 0")
    assert (value(one, "memory_used"), value(two, "memory_total")) == (2e9, 2e10)
    assert value(two, "sm_active") == 74.5
    assert reading(one, "gpu_util").value is None
    assert "MIG" in reading(one, "gpu_util").reason
    assert value(remade, "memory_used") == 0
    assert reading(remade, "sm_active").reason == "first sample"


@pytest.mark.process
def test_few_calls(stub: Stub) -> None:
    """At most ten calls a GPU and second, at the real beat, beyond the first tick's once."""
    stub.write("count 4", *H100, *GPM, "proc * compute 1 5000")
    with SamplerRun(stub, interval_s=1.0) as child:
        child.gpus()
        before, began_s = total(stub.counts()), time.monotonic()
        for _ in range(3):
            child.frame()
        calls, passed_s = total(stub.counts()) - before, time.monotonic() - began_s
    assert "nvmlDeviceGetPcieThroughput" not in stub.counts()
    assert calls / passed_s / 4 <= 10.0
    assert calls / passed_s / 4 >= 4.0  # and it does look


class Watched:
    """The agent's supervisor of a sampler, driven as the agent does."""

    def __init__(self) -> None:
        self.child = sampler_child.SamplerChild([*ARGV, "0.15"])

    def until(self, done: object, timeout_s: float = 20.0) -> SensorFrame | None:
        """Return the newest frame once `done` (a function of it and the reason) says so."""
        assert callable(done)
        newest = None
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            self.child.tick()
            fd = self.child.fd
            if fd is None:
                time.sleep(0.02)
            else:
                select.select([fd], [], [], 0.05)
            data = self.child.read()
            newest = decode_sensor_frame(data) if data else newest
            if done(newest, self.child.reason):
                return newest
        raise AssertionError(f"not in {timeout_s} s: {self.child.reason} {newest}")


def use(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let children of this process find the stand-in."""
    here = {"PYTHONPATH": str(Path(gpuwatch.__file__).parents[1])}
    for name, text in stub.env(here).items():
        monkeypatch.setenv(name, text)


@pytest.mark.process
def test_the_supervisor_does_not_take_a_hanging_driver_for_a_dead_sampler(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(stub, monkeypatch)
    monkeypatch.setattr(sampler_child, "SILENT_S", 1.0)
    stub.write("count 1", *H100, "delay 0 nvmlDeviceGetUtilizationRates 2500000")
    watched = Watched()
    try:
        watched.until(lambda frame, reason: frame and "not answering" in frame.gpus_reason)
        pid = watched.child.pid
        watched.until(lambda frame, reason: frame and frame.gpus)
        assert watched.child.pid == pid
        assert watched.child.reason == ""
    finally:
        watched.child.close()


@pytest.mark.process
def test_a_library_that_crashes_costs_only_gpu_readings(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(stub, monkeypatch)
    monkeypatch.setattr(sampler_child, "_BACKOFF_S", (0.1,))
    state = ("count 1", *H100)
    stub.write(*state)
    watched = Watched()
    try:
        watched.until(lambda frame, reason: frame is not None and frame.gpus)
        stub.write(*state, "crash 0 nvmlDeviceGetTemperatureV")
        watched.until(lambda frame, reason: "crashed (SIGSEGV)" in reason)
        frame = watched.until(lambda frame, reason: frame and "crashed" in frame.gpus_reason)
        assert frame is not None
        assert frame.gpus == ()
        assert frame.gpus_reason.startswith("reading the GPUs crashed 3 times in 5 min (SIGSEGV")
        assert frame.host.readings["memory_used"].value
        pid = watched.child.pid
        calls = total(stub.counts())
        watched.until(lambda frame, reason: frame and frame.seq >= 5)
        assert watched.child.pid == pid  # and so it stays
        assert total(stub.counts()) == calls
    finally:
        watched.child.close()


@pytest.mark.process
@pytest.mark.gpu
def test_a_real_gpu(tmp_path: Path) -> None:
    """Shapes and ranges on whatever card is here; n/a needs a reason."""
    stub = Stub(library(), tmp_path)
    with SamplerRun(stub, interval_s=1.0, LD_LIBRARY_PATH="") as child:
        frame = child.until(lambda f: "starting" not in f.gpus_reason)
        if not frame.gpus:
            pytest.skip(f"no NVIDIA GPU: {frame.gpus_reason}")
        for gpu in child.gpus():
            assert gpu.uuid.startswith(("GPU-", "MIG-"))
            for name, found in gpu.readings.items():
                assert found.value is not None or found.reason, name
            for name in ("gpu_util", "sm_active", "dram_active"):
                share = gpu.readings[name].value
                assert share is None or 0.0 <= share <= 100.0
