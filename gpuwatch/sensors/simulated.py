"""GPUs that are not there, for a demo on a machine without one. Every one says SIMULATED.

Readings follow how busy the rank that stands for the device really is, so that a demo shows what a
real device would do beside the same training; nothing of it is measured. Only a demo shows them.
"""

import math
import time
import uuid
from collections.abc import Callable

from gpuwatch.schema import GpuProcess, GpuSample, Reading
from gpuwatch.sensors.backend import Devices

__all__ = ["NAME", "SimulatedGpus", "simulated_uuid"]

NAME = "SIMULATED GPU 80 GB"
_SOURCE = "simulated"
_GIB = 2.0**30
_PERIOD_S = 11.0
_MOST = 256


def simulated_uuid(index: int) -> str:
    """Return the uuid of a simulated device: always the same for an index, and no card's."""
    return f"SIMULATED-{uuid.uuid5(uuid.NAMESPACE_OID, f'gpuwatch simulated gpu {index}')}"


class SimulatedGpus:
    """The backend of so many made-up devices.

    Args:
        count: devices, 1..256.
        load: says of a device's index how busy it would be, 0..1, and None while nothing runs.
        pid: says which process would hold it, None for nobody.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        count: int,
        load: Callable[[int], float | None] = lambda _: 0.7,
        pid: Callable[[int], int | None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = max(1, min(_MOST, count))
        self._load = load
        self._pid = pid
        self._clock = clock

    def probe(self) -> str:
        """There is nothing to find out."""
        return ""

    name = _SOURCE

    def busy(self) -> str:
        """Nothing is waited for."""
        return ""

    def sample(self) -> Devices:
        """Make up the readings of this moment."""
        now_s = self._clock()
        return Devices(tuple(self._gpu(index, now_s) for index in range(self._count)))

    def close(self) -> None:
        """Nothing to let go of."""

    def _gpu(self, index: int, now_s: float) -> GpuSample:
        load = self._load(index)
        busy = 0.0 if load is None else max(0.0, min(1.0, load))
        wave = math.sin(2.0 * math.pi * now_s / _PERIOD_S + index)
        util = max(0.0, min(100.0, 100.0 * busy + 3.0 * wave * busy))
        active = 0.72 * util
        held = 0.0 if load is None else 38.0 + index % 3
        values = {
            "gpu_util": (util, "%"),
            "memory_used": ((0.6 + held) * _GIB, "B"),
            "memory_total": (80.0 * _GIB, "B"),
            "power": (90.0 + 5.2 * active, "W"),
            "power_limit": (700.0, "W"),
            "sm_clock": (1755.0 if busy else 345.0, "MHz"),
            "sm_clock_max": (1980.0, "MHz"),
            "sm_active": (active, "%"),
            "sm_occupancy": (0.55 * active, "%"),
            "tensor_active": (0.4 * active, "%"),
            "dram_active": (0.5 * active, "%"),
            "pcie_rx": (3.1e9 * busy, "B/s"),
            "pcie_tx": (0.4e9 * busy, "B/s"),
            "temperature": (34.0 + 0.3 * active, "°C"),
        }
        pid = self._pid(index)
        processes: tuple[GpuProcess, ...] = ()
        if pid is not None and load is not None:
            processes = (GpuProcess(pid, int(held * _GIB), "compute", "python"),)
        return GpuSample(
            index=index,
            uuid=simulated_uuid(index),
            name=NAME,
            readings={n: Reading(value, unit, _SOURCE) for n, (value, unit) in values.items()},
            processes=processes,
            driver_reason="a simulated device has no driver",
        )
