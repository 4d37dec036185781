"""Accelerators of any vendor, read on a thread of their own.

A call into a driver may take seconds, or never return. Whoever asks here never waits for that: it
gets the last readings with their ages, and after a while the word that the driver does not answer.
"""

import threading
import time
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from gpuwatch.schema import GpuSample
from gpuwatch.sensors.backend import DeviceBackend, Devices, aged

__all__ = ["GpuBackend", "NoGpus"]

_LATE_TICKS = 3.0  # a sample under way for longer is a driver that does not answer
_SLOW_TICKS = 5.0
_LEAST_LATE_S = 0.5
_OLD_S = 30.0  # from then on the last readings are no picture of now
_PATIENCE_S = 0.25  # 8 GPUs at a slow tick take a tenth of this, or less
_STOP_S = 0.3

ResultT = TypeVar("ResultT")


class NoGpus:
    """No accelerators, for a reason that whoever made it gives."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def probe(self) -> str:
        """Return the reason."""
        return self._reason

    def ask(self) -> None:
        """There is nothing to start."""

    def sample(self) -> Devices:
        """Return no GPUs and the reason."""
        return Devices((), self._reason)

    def close(self) -> bool:
        """Nothing to let go of."""
        return True


class GpuBackend:
    """Runs a vendor's backend on a thread, for ticks every `interval_s`; `clock` gives seconds.

    `ask` starts a sample and `sample`, called a moment later, takes it. That waits at most a
    quarter of a second, and not again for one that it has waited for in vain.
    """

    def __init__(
        self,
        backend: DeviceBackend | None = None,
        *,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend or _default(interval_s * _SLOW_TICKS)
        self._late_s = max(_LEAST_LATE_S, interval_s * _LATE_TICKS)
        self._clock = clock
        self._lock = threading.Condition()
        self._asked_s: float | None = None  # since when a sample is under way
        self._closing = False
        self._closed = False
        self._asked = 0  # how many samples were started
        self._given_up = 0  # the one that was waited for in vain
        self._devices: Devices | None = None
        self._taken_s = 0.0
        self._thread: threading.Thread | None = None

    def probe(self) -> str:
        """Start the thread, which probes; what it finds is in the first samples."""
        self._thread = threading.Thread(target=self._work, name="gpuwatch-gpus", daemon=True)
        self._thread.start()
        return ""

    def ask(self) -> None:
        """Start a sample unless one is under way. Does not wait."""
        with self._lock:
            if self._asked_s is None:
                self._asked_s = self._clock()
                self._asked += 1
                self._lock.notify_all()

    def sample(self) -> Devices:
        """Return the newest sample, aged, with the reason if the driver does not answer."""
        with self._lock:
            if self._asked != self._given_up:
                self._lock.wait_for(lambda: self._asked_s is None, _PATIENCE_S)
            now_s = self._clock()
            asked_s = self._asked_s
            devices, age_s = self._devices, now_s - self._taken_s
            self._given_up = self._asked if asked_s is not None else 0
        if asked_s is None:
            return devices or Devices((), f"{self._backend.name} is starting")
        waited_s = now_s - asked_s
        if waited_s < self._late_s:
            if devices is None:
                return Devices((), f"{self._backend.name} is starting")
            return Devices(tuple(_aged(gpu, age_s) for gpu in devices.gpus), devices.reason)
        busy = self._backend.busy()
        why = f"{self._backend.name} not answering for {waited_s:.0f} s"
        if busy:
            why += f" ({busy})"
        if devices is None:
            return Devices((), why)
        state: Literal["stale", "error"] = "error" if waited_s > _OLD_S else "stale"
        gpus = tuple(_aged(gpu, age_s, state, why) for gpu in devices.gpus)
        return Devices(gpus, devices.reason or why)

    def close(self) -> bool:
        """Let the thread close the backend; False if a call holds it, and nothing was closed."""
        thread = self._thread
        if thread is None:
            return True
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        thread.join(_STOP_S)
        return self._closed

    def _work(self) -> None:
        self.ask()
        self._guard(self._backend.probe)
        while True:
            devices = self._guard(self._backend.sample)
            with self._lock:
                self._devices = devices if isinstance(devices, Devices) else Devices((), devices)
                self._taken_s = self._clock()
                self._asked_s = None
                self._lock.notify_all()
                self._lock.wait_for(lambda: self._closing or self._asked_s is not None)
                if self._closing:
                    break
        self._guard(self._backend.close)
        self._closed = True

    def _guard(self, step: Callable[[], ResultT]) -> ResultT | str:
        """Return what a step returns, or what went wrong: this thread does not end before time."""
        try:
            return step()
        except Exception as exc:
            return f"reading {self._backend.name} failed: {type(exc).__name__}: {exc}"


def _aged(
    gpu: GpuSample, age_s: float, state: Literal["stale", "error"] | None = None, why: str = ""
) -> GpuSample:
    readings = {name: aged(r, age_s, state, why) for name, r in gpu.readings.items()}
    return msgspec.structs.replace(gpu, readings=readings)


def _default(slow_s: float) -> DeviceBackend:
    # The one place that knows which vendors there are.
    from gpuwatch.sensors.nvml import NvmlBackend

    return NvmlBackend(slow_s=slow_s)
