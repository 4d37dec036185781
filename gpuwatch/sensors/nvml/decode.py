"""Pure functions between NVML's answers and readings: counters, percentages, process lists."""

import math
import os
import pwd
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpuwatch.schema import GpuProcess, Reading
from gpuwatch.sensors.backend import known, unknown

__all__ = [
    "MAX_PROCESSES",
    "Counter",
    "Listed",
    "ProcessTable",
    "counter_rate",
    "merge_processes",
    "numa_node",
    "percentage",
]

MAX_PROCESSES = 1024
_MAX_BYTES = 2**60
_MAX_PID = 2**31  # of the wire; the library's type has room for more
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel, the same everywhere


def numa_node(bus_id: str, root: str = "/sys/bus/pci/devices") -> Reading:
    """Return the NUMA node that a PCI device hangs on, n/a where the kernel does not say.

    `bus_id` as NVML writes it, `00000000:3B:00.0`; sysfs has four digits of the domain.
    """
    match = re.fullmatch(r"([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})\.(\d)", bus_id)
    if match is None:
        return unknown("", root, f"{bus_id[:64]!r} is no PCI address")
    domain, bus, device, function = match.groups()
    name = f"{domain[-4:]}:{bus}:{device}.{function}".lower()
    try:
        with open(f"{root}/{name}/numa_node", encoding="ascii") as file:
            node = int(file.read(16))
    except (OSError, ValueError):
        return unknown("", root, "this kernel does not tell")
    if node < 0:
        return unknown("", root, "this machine has one node, or its firmware does not tell")
    return known(node, "", root)


class Counter(NamedTuple):
    """A look at a counter that only grows: its value, its width in bits, when (s)."""

    value: float
    bits: int
    at_s: float


def counter_rate(before: Counter, now: Counter, ceiling_per_s: float) -> float | str:
    """Return growth per second between two looks, or why it cannot be told.

    A narrow counter may have wrapped. Once is undone; a counter that what it counts, at
    `ceiling_per_s` (0: unknown), could pass more than once between the looks tells nothing.
    """
    passed_s = now.at_s - before.at_s
    if passed_s <= 0.0:
        return "no time passed since the last look"
    grown = now.value - before.value
    if 0 < now.bits < 64:
        span = 2.0**now.bits
        if ceiling_per_s <= 0.0 or ceiling_per_s * passed_s >= span:
            return f"the driver counts in {now.bits} bits, which wrap between two looks"
        if grown < 0.0:
            grown += span
    if grown < 0.0:
        return "the counter was reset"
    return grown / passed_s


def percentage(value: float) -> float | str:
    """Return a percentage within 0..100, or why it is none.

    Up to 1 % beyond is rounding of the counters; more has been garbage wherever it was seen.
    """
    if not math.isfinite(value) or not -1.0 <= value <= 101.0:
        return f"implausible: {value:.4g} %"
    return min(100.0, max(0.0, value))


class Listed(NamedTuple):
    """One entry of a list of processes; `memory_bytes` None: not told."""

    pid: int
    memory_bytes: int | None


def merge_processes(
    compute: Iterable[Listed], graphics: Iterable[Listed]
) -> list[tuple[int, int | None, str]]:
    """Return pid, bytes and kind of each process once, the largest first.

    The two lists say the same memory of a process that is in both. None is left out, whether it
    lives or not; entries that repeat a pid are its slices of the device and add up.
    """
    by_kind: list[dict[int, int | None]] = []
    for entries in (compute, graphics):
        found: dict[int, int | None] = {}
        for pid, told in entries:
            memory = told if told is not None and 0 <= told <= _MAX_BYTES else None
            former = found.get(pid)
            if former is not None:
                memory = former if memory is None else min(_MAX_BYTES, former + memory)
            found[pid] = memory
        by_kind.append(found)
    merged = []
    for pid in by_kind[0].keys() | by_kind[1].keys():
        kinds = [
            kind
            for kind, found in zip(("compute", "graphics"), by_kind, strict=True)
            if pid in found
        ]
        told_of = [m for m in (found.get(pid) for found in by_kind) if m is not None]
        merged.append((pid, max(told_of) if told_of else None, "+".join(kinds)))
    return sorted(merged, key=lambda item: (-(item[1] or 0), item[0]))


class ProcessTable:
    """What the process table says about the pids that NVML lists.

    Those may be the host's while this process sees a container's: outside the initial namespace a
    process of that number counts as the one meant only if it holds a device file of the driver.
    """

    def __init__(self, root: str = "/proc") -> None:
        self._root = root
        try:
            self._initial = os.readlink(f"{root}/self/ns/pid") == _INITIAL_PID_NAMESPACE
        except OSError:
            self._initial = True

    def describe(self, merged: Sequence[tuple[int, int | None, str]]) -> tuple[GpuProcess, ...]:
        """Return the processes with names and users; those that are not here say so."""
        return tuple(self._one(*item) for item in merged[:MAX_PROCESSES])

    def _one(self, pid: int, memory_bytes: int | None, kind: str) -> GpuProcess:
        name, user = "", ""
        path = f"{self._root}/{pid}"
        pid = min(pid, _MAX_PID)
        try:
            owner = os.stat(path).st_uid
            with open(f"{path}/comm", "rb") as file:
                name = file.read(256).decode(errors="replace").strip()
            user = _user(owner)
        except OSError:
            name = ""
        if not name or not (self._initial or self._uses_gpu(path)):
            name = f"pid {pid} (not visible here)"
            return GpuProcess(pid, memory_bytes, kind, name, "", visible=False)
        return GpuProcess(pid, memory_bytes, kind, name, user)

    def _uses_gpu(self, path: str) -> bool:
        try:
            with os.scandir(f"{path}/fd") as fds:
                for fd in fds:
                    try:
                        if os.readlink(fd.path).startswith("/dev/nvidia"):
                            return True
                    except OSError:
                        continue  # closed meanwhile
        except OSError:
            return False  # another user's
        return False


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name[:256]
    except KeyError:
        return str(uid)
