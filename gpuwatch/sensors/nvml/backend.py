"""NVIDIA GPUs through the driver's management library."""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from gpuwatch.schema import GpuSample
from gpuwatch.sensors.backend import Devices
from gpuwatch.sensors.nvml.calls import Calls, NvmlError
from gpuwatch.sensors.nvml.device import SLOW_S, Device
from gpuwatch.sensors.nvml.events import XidWatch
from gpuwatch.sensors.nvml.words import (
    DRIVER_GONE,
    LIBRARY_NOT_FOUND,
    WRONG_MODULE,
    driver_sentence,
    value_sentence,
)

__all__ = ["NvmlBackend", "asleep"]

_RETRY_S = (2.0, 5.0, 10.0, 30.0)
_NO_GPU = "the NVIDIA driver lists no GPU (a container has to be given them: docker run --gpus all)"
_ASLEEP = (
    "the GPU is asleep (runtime power management) and left so: it is read once something wakes it"
)
_MAX_GPUS = 64
_MAX_ROWS = 256  # what a frame takes, MIG devices included
_MAX_NAME = 256


def asleep(root: str = "/sys/bus/pci/devices") -> bool:
    """Say whether every NVIDIA GPU of this machine is suspended, as in a laptop on battery.

    Initialising NVML would wake them, and hold them awake.
    """
    found = []
    for device in Path(root).glob("*"):
        try:
            if (device / "vendor").read_text().strip() != "0x10de":
                continue
            if (device / "class").read_text().startswith("0x03"):  # a display controller
                found.append((device / "power" / "runtime_status").read_text().strip())
        except OSError:
            continue
    return bool(found) and all(status == "suspended" for status in found)


class NvmlBackend:
    """Reads every GPU that NVML lists, and each of their MIG devices.

    NVML is initialised once and held: where persistence mode is off, each initialisation wakes the
    GPU, for seconds. When the driver as a whole fails, the rows stay with the reason, and it is
    initialised anew after 2, 5, 10 and then every 30 s.
    """

    name = "NVML"

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, slow_s: float = SLOW_S
    ) -> None:
        self._clock = clock
        self._slow_s = slow_s
        self._calls = Calls(clock)
        self._watch = XidWatch(self._calls)
        self._devices: list[Device] = []
        self._gone: list[Device] = []
        self._up = False
        self._wedged = False
        self._driver, self._driver_reason = "", ""
        self._reason = ""
        self._tries = 0
        self._retry_s = 0.0

    def probe(self) -> str:
        """Load and initialise the library; the reason if that fails."""
        try:
            self._calls.load()
            if asleep():
                self._reason, self._retry_s = _ASLEEP, self._clock() + _RETRY_S[0]
                return self._reason
            self._calls.call("nvmlInit")
            self._up = True
            number = int(self._calls.call("nvmlDeviceGetCount"))
            self._ask_driver()
        except NvmlError as exc:
            self._fail(exc.code)
            return self._reason
        former = self._devices
        self._devices = [
            Device(self._calls, i, self._clock, self._watch.register, slow_s=self._slow_s)
            for i in range(min(number, _MAX_GPUS))
        ]
        for device, before in zip(self._devices, former, strict=False):
            device.adopt(before)
        if not self._devices:
            self._shut_down()
            self._put_off(_NO_GPU)
        else:
            self._reason = ""
        self._gone += former
        return self._reason

    def sample(self) -> Devices:
        """Return every GPU as it is now, or as it was last and why that is all."""
        if not self._up and self._clock() >= self._retry_s and not self._wedged:
            self.probe()
        if not self._up:
            return self._last()
        samples: list[GpuSample] = []
        for device in self._devices:
            try:
                samples += device.sample(self._watch.events(device.index))
            except NvmlError as exc:
                self._fail(exc.code)
                return self._last()
        self._tries = 0
        # After a new start the driver may list fewer: what is missing keeps its row.
        listed = {sample.uuid for sample in samples if sample.uuid}
        self._gone = [d for d in self._gone if d.uuid and d.uuid not in listed]
        for device in self._gone:
            samples += device.last(driver_reason="the driver does not list this GPU any more")
        return Devices(self._rows(samples))

    def busy(self) -> str:
        """Say which call it is in: `nvmlDeviceGetUtilizationRates of GPU 1`."""
        busy = self._calls.busy
        if busy is None:
            return ""
        return busy.function if busy.device < 0 else f"{busy.function} of GPU {busy.device}"

    def close(self) -> None:
        """Shut the library down, unless a thread is in it: it must not go away beneath a call."""
        self._shut_down()

    def _last(self) -> Devices:
        samples: list[GpuSample] = []
        for device in (*self._devices, *self._gone):
            events = self._watch.events(device.index)
            samples += device.last(events, driver_reason=self._reason)
        return Devices(self._rows(samples), self._reason)

    def _rows(self, samples: Sequence[GpuSample]) -> tuple[GpuSample, ...]:
        told = {"driver": self._driver, "driver_reason": self._driver_reason}
        return tuple(replace(sample, **told) for sample in samples[:_MAX_ROWS])

    def _ask_driver(self) -> None:
        """Ask for the driver's version, at every start: it is updated between two.

        Raises:
            NvmlError: the driver as a whole is gone (a code of `DRIVER_GONE`).
        """
        try:
            answer = self._calls.call("nvmlSystemGetDriverVersion")
        except NvmlError as exc:
            if exc.code in DRIVER_GONE:
                raise
            self._driver, self._driver_reason = "", value_sentence(exc.code)[:_MAX_NAME]
            return
        text = answer.decode("ascii", "replace") if isinstance(answer, bytes) else str(answer)
        self._driver = text.strip()[:_MAX_NAME]
        self._driver_reason = "" if self._driver else "NVML gives an empty version"

    def _fail(self, code: int) -> None:
        self._shut_down()
        self._put_off(driver_sentence(code))
        if code in {LIBRARY_NOT_FOUND, WRONG_MODULE}:
            self._retry_s = self._clock() + _RETRY_S[-1]

    def _put_off(self, reason: str) -> None:
        self._reason = reason
        self._retry_s = self._clock() + _RETRY_S[min(self._tries, len(_RETRY_S) - 1)]
        self._tries += 1

    def _shut_down(self) -> None:
        if not self._up:
            return
        self._up = False
        if not self._watch.stop():
            # Without a shutdown there is no new start either: the library counts its users.
            self._wedged = True
            return
        for device in self._devices:
            device.close()
        with contextlib.suppress(NvmlError):
            self._calls.call("nvmlShutdown")
        self._watch = XidWatch(self._calls, before=self._watch)
