"""The thread between a driver that may hang and a sampler that must not."""

import threading
import time

import pytest

from gpuwatch.schema import GpuSample
from gpuwatch.sensors import gpus
from gpuwatch.sensors.backend import Devices, known
from gpuwatch.sensors.gpus import GpuBackend, NoGpus

PATIENCE_S = 20.0


class Vendor:
    """A backend whose calls can be held and made to fail."""

    name = "VND"

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.samples = 0
        self.closed = False
        self.takes_s = 0.0
        self.error: Exception | None = None

    def probe(self) -> str:
        return ""

    def sample(self) -> Devices:
        self.go.wait(PATIENCE_S)
        time.sleep(self.takes_s)
        if self.error is not None:
            raise self.error
        self.samples += 1
        gpu = GpuSample(0, "uuid", readings={"gpu_util": known(self.samples, "%", "VND")})
        return Devices((gpu,), "a reason")

    def close(self) -> None:
        self.closed = True

    def busy(self) -> str:
        return "" if self.go.is_set() else "vndRead of GPU 0"


class Clock:
    """Seconds that pass when told to."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def tick(backend: GpuBackend) -> Devices:
    backend.ask()
    return backend.sample()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that answers at once is waited for, however busy the machine is."""
    monkeypatch.setattr(gpus, "_PATIENCE_S", PATIENCE_S)


def test_a_sample_a_tick_and_ages_while_one_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor, clock = Vendor(), Clock()
    backend = GpuBackend(vendor, clock=clock)
    backend.probe()
    try:
        first = tick(backend)
        assert first.gpus[0].readings["gpu_util"].state == "ok"
        assert first.reason == "a reason"
        before = vendor.samples
        second = tick(backend)
        assert second.gpus[0].readings["gpu_util"].value == before + 1

        monkeypatch.setattr(gpus, "_PATIENCE_S", 0.6)
        vendor.go.clear()
        waited_s = time.monotonic()
        held = tick(backend)
        waited_s = time.monotonic() - waited_s
        assert 0.5 < waited_s < PATIENCE_S  # once, it waits a moment
        assert held.gpus[0].readings["gpu_util"].value == before + 1
        clock.now_s += 2.0
        began_s = time.monotonic()
        aging = tick(backend)
        assert time.monotonic() - began_s < 0.5  # and then not again
        assert aging.gpus[0].readings["gpu_util"].age_s == 2.0
        assert aging.gpus[0].readings["gpu_util"].state == "ok"
        clock.now_s += 2.0
        late = tick(backend).gpus[0].readings["gpu_util"]
        assert (late.age_s, late.state, late.value) == (4.0, "stale", before + 1)
        assert late.reason == "VND not answering for 4 s (vndRead of GPU 0)"
        clock.now_s += 40.0
        assert tick(backend).gpus[0].readings["gpu_util"].state == "error"

        monkeypatch.setattr(gpus, "_PATIENCE_S", PATIENCE_S)
        vendor.takes_s = 0.05
        vendor.go.set()
        deadline_s = time.monotonic() + PATIENCE_S
        while vendor.samples == before + 1:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        time.sleep(0.1)
        # Now it is waited for again: what is shown is of this tick, not of the one before.
        for _ in range(3):
            so_far = vendor.samples
            assert tick(backend).gpus[0].readings["gpu_util"].value == so_far + 1
    finally:
        vendor.go.set()
        assert backend.close()
    assert vendor.closed


def test_nothing_is_closed_beneath_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_PATIENCE_S", 0.25)
    vendor = Vendor()
    vendor.go.clear()
    backend = GpuBackend(vendor)
    backend.probe()
    assert tick(backend) == Devices((), "VND is starting")
    began_s = time.monotonic()
    assert backend.close() is False
    assert time.monotonic() - began_s < 10
    assert not vendor.closed
    vendor.go.set()


def test_an_error_of_ours_is_a_reason_and_the_thread_goes_on() -> None:
    vendor = Vendor()
    vendor.error = RuntimeError("boom")
    backend = GpuBackend(vendor)
    backend.probe()
    try:
        assert tick(backend) == Devices((), "reading VND failed: RuntimeError: boom")
        vendor.error = None
        assert tick(backend).gpus
    finally:
        assert backend.close()


def test_no_gpus_for_a_reason() -> None:
    none = NoGpus("they crashed")
    none.probe()
    none.ask()
    assert none.sample() == Devices((), "they crashed")
    assert none.close()
