"""How many CPUs this process may really use."""

import os
from pathlib import Path

__all__ = ["usable_cpus"]

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus(cgroup: Path = _CGROUP) -> int:
    """CPUs in the affinity mask, bounded by the cgroup's quota (v2 ``cpu.max``, or v1), at least 1.

    In a container the mask often shows the whole machine while the quota allows a part of it.
    """
    masked = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpus = float(masked or 1)
    quota = _quota(cgroup)
    return max(1, int(min(cpus, quota) if quota is not None else cpus))


def _quota(cgroup: Path) -> float | None:
    try:
        try:
            limit, period = (cgroup / "cpu.max").read_text().split()
        except FileNotFoundError:
            limit = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        if limit.strip() in ("max", "-1"):
            return None
        return int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
