"""The machine as a whole: CPU, memory, swap, load.

The figures are those of the machine, not of a container or of this process's affinity: a quota
shows beside them, not in them.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import psutil

from gpuwatch.schema import HostSample, Reading
from gpuwatch.sensors.backend import FIRST_TICK, known, unknown

__all__ = ["CpuTimes", "HostBackend", "cpu_readings"]

_SOURCE = "psutil"
_CPU_NAMES = ("cpu_percent", "cpu_iowait_percent", "cpu_core_max_percent")


class CpuTimes(NamedTuple):
    """Seconds since boot of one logical CPU.

    `busy_s` is everything but idle and iowait (so it includes time stolen by a hypervisor).
    """

    busy_s: float
    iowait_s: float
    total_s: float


def cpu_readings(before: Sequence[CpuTimes] | None, now: Sequence[CpuTimes]) -> dict[str, Reading]:
    """Return the CPU percentages between two looks at all CPUs.

    `cpu_percent` and `cpu_iowait_percent` are shares of all cores together, `cpu_core_max_percent`
    is the busiest core; all 0..100. n/a at the first look, when no time has passed, and when cores
    came or went.
    """
    if before is None:
        return _all_unknown(FIRST_TICK)
    if len(before) != len(now):
        return _all_unknown("the number of cores changed")
    busy = iowait = total = core_max = 0.0
    for old, new in zip(before, now, strict=True):
        # The kernel's idle and iowait counters can step back by a tick.
        core_busy = max(0.0, new.busy_s - old.busy_s)
        core_total = max(0.0, new.total_s - old.total_s)
        busy += core_busy
        iowait += max(0.0, new.iowait_s - old.iowait_s)
        total += core_total
        if core_total > 0.0:
            core_max = max(core_max, core_busy / core_total)
    if total <= 0.0:
        return _all_unknown("no CPU time passed since the last tick")
    shares = (busy / total, iowait / total, core_max)
    return {
        name: known(min(100.0, 100.0 * share), "%", _SOURCE)
        for name, share in zip(_CPU_NAMES, shares, strict=True)
    }


def _all_unknown(reason: str) -> dict[str, Reading]:
    return {name: unknown("%", _SOURCE, reason) for name in _CPU_NAMES}


class HostBackend:
    """Reads the host through psutil.

    Readings: `cpu_percent`, `cpu_iowait_percent`, `cpu_core_max_percent` (%, over the time since
    the last tick), `memory_used`, `memory_total`, `swap_used` (B) and `load1` (runnable and
    uninterruptible tasks, mean over a minute). Used memory is what is not available to a new
    process: total - MemAvailable.
    """

    def __init__(self) -> None:
        self._before: list[CpuTimes] | None = None

    def probe(self) -> str:
        """Nothing to find out: what fails, fails by itself."""
        return ""

    def sample(self) -> HostSample:
        """Read the host now; `cores` is the number of logical CPUs that are online."""
        readings: dict[str, Reading] = {}
        cores = 0
        # psutil raises many types (OSError, RuntimeError, NotImplementedError ...) where a
        # container hides a part of /proc: each group is on its own.
        try:
            now = _cpu_times()
            cores = len(now)
            readings.update(cpu_readings(self._before, now))
            self._before = now
        except Exception as exc:
            readings.update(_all_unknown(_sentence(exc)))
        try:
            memory = psutil.virtual_memory()
            readings["memory_used"] = known(memory.total - memory.available, "B", _SOURCE)
            readings["memory_total"] = known(memory.total, "B", _SOURCE)
        except Exception as exc:
            for name in ("memory_used", "memory_total"):
                readings[name] = unknown("B", _SOURCE, _sentence(exc))
        try:
            readings["swap_used"] = known(psutil.swap_memory().used, "B", _SOURCE)
        except Exception as exc:
            readings["swap_used"] = unknown("B", _SOURCE, _sentence(exc))
        try:
            readings["load1"] = known(os.getloadavg()[0], "", "getloadavg")
        except OSError as exc:
            readings["load1"] = unknown("", "getloadavg", _sentence(exc))
        return HostSample(cores, readings)

    def close(self) -> None:
        """Nothing to let go of."""


def _cpu_times() -> list[CpuTimes]:
    cpus = []
    for times in psutil.cpu_times(percpu=True):
        iowait: float = getattr(times, "iowait", 0.0)
        # The guests' time is in user and nice already.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        cpus.append(CpuTimes(total - times.idle - iowait, iowait, total))
    return cpus


def _sentence(exc: Exception) -> str:
    return f"not readable here: {exc}" if str(exc) else f"not readable here: {type(exc).__name__}"
