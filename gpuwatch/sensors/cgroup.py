"""What a control group allows a process: CPU quota and throttling, memory limit; versions 1 and 2.

A limit may sit at any level above the process: the tightest counts, and the throttling is that of
the group which has it. Inside a container only the levels that its mounts show can be read.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

from gpuwatch.sensors.storage import unescaped

__all__ = ["Cgroups", "Cpu", "Memory", "Mount", "parse_cgroup", "parse_mounts", "parse_stat"]

_MOST_LEVELS = 32
# Version 1 writes "no limit" as the largest number of pages, rounded: anything this large is none.
_NO_LIMIT_BYTES = 2**60


class Mount(NamedTuple):
    """Where the groups of a controller are: `root` is the group shown at `path`.

    `controllers` are those of version 1; none for version 2.
    """

    root: str
    path: str
    controllers: frozenset[str]


class Cpu(NamedTuple):
    """The tightest CPU quota above a process, in cores, and what it has held back so far.

    `periods` and `throttled_periods` count enforcement periods, `throttled_ns` is the time that
    threads stood still for it, summed over threads. `quota_cores` None: no level has a quota.
    """

    quota_cores: float | None
    periods: int = 0
    throttled_periods: int = 0
    throttled_ns: int = 0


class Memory(NamedTuple):
    """The tightest memory limit above a process and what its group uses; None without a limit."""

    limit_bytes: int | None
    used_bytes: int | None = None


def parse_cgroup(text: str) -> dict[str, str]:
    """Return the group of each controller from `/proc/<pid>/cgroup`; "" is version 2's."""
    found = {}
    for line in text.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for controller in controllers.split(","):
            found[controller] = path
    return found


def parse_mounts(text: str) -> list[Mount]:
    """Return the mounts of control groups from `/proc/self/mountinfo` (proc(5))."""
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        root, path = unescaped(fields[3]), unescaped(fields[4])
        if kind[0] == "cgroup2":
            found.append(Mount(root, path, frozenset()))
        elif kind[0] == "cgroup":
            found.append(Mount(root, path, frozenset(kind[2].split(","))))
    return found


def parse_stat(text: str) -> dict[str, int]:
    """Return the numbers of a flat keyed file such as `cpu.stat`."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdecimal():
            found[name] = int(value)
    return found


class Cgroups:
    """Reads the limits above a process.

    Args:
        root: where proc is mounted.
        read: returns the text of a file; raises OSError.
    """

    def __init__(self, root: str = "/proc", read: Callable[[str], str] | None = None) -> None:
        self._root = root
        self._read = read or _text
        self._mounts: list[Mount] | None = None
        self._cpu: dict[str, Cpu] = {}
        self._memory: dict[str, Memory] = {}

    def begin(self) -> None:
        """A new look begins: what was read of a group before is read again."""
        self._cpu.clear()
        self._memory.clear()

    def cpu(self, pid: int) -> Cpu:
        """Return the CPU limit of a process.

        Raises:
            OSError: no group of this process can be read here.
        """
        levels = self._levels(pid, "cpu")
        at = levels[0][0]
        if at in self._cpu:
            return self._cpu[at]
        tightest = Cpu(None)
        for level, two in levels:
            found = self._cpu_two(level) if two else self._cpu_one(level)
            if found is None or found.quota_cores is None:
                continue
            if tightest.quota_cores is None or found.quota_cores < tightest.quota_cores:
                tightest = found
        self._cpu[at] = tightest
        return tightest

    def memory(self, pid: int) -> Memory:
        """Return the memory limit of a process.

        Raises:
            OSError: no group of this process can be read here.
        """
        levels = self._levels(pid, "memory")
        at = levels[0][0]
        if at in self._memory:
            return self._memory[at]
        tightest = Memory(None)
        for level, two in levels:
            names = ("memory.max", "memory.current")
            if not two:
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            limit = self._number(f"{level}/{names[0]}")
            if limit is None or limit >= _NO_LIMIT_BYTES:
                continue
            if tightest.limit_bytes is None or limit < tightest.limit_bytes:
                tightest = Memory(limit, self._number(f"{level}/{names[1]}"))
        self._memory[at] = tightest
        return tightest

    def _levels(self, pid: int, controller: str) -> list[tuple[str, bool]]:
        """Return the directories from the process's group up, and whether they are version 2.

        Raises:
            OSError: nothing of it can be seen here.
        """
        if self._mounts is None:
            self._mounts = parse_mounts(self._read(f"{self._root}/self/mountinfo"))
        groups = parse_cgroup(self._read(f"{self._root}/{pid}/cgroup"))
        one = next((m for m in self._mounts if controller in m.controllers), None)
        if one is not None and controller in groups:
            mount, group = one, groups[controller]
        else:
            two = next((m for m in self._mounts if not m.controllers), None)
            if two is None or "" not in groups:
                raise OSError("no control groups are mounted here")
            mount, group = two, groups[""]
        below = _below(group, mount.root)
        if below is None:
            raise OSError("the control group of this process is outside what is mounted here")
        parts = [part for part in below.split("/") if part][:_MOST_LEVELS]
        top = mount.path.rstrip("/")
        return [
            ("/".join([top, *parts[:depth]]), not mount.controllers)
            for depth in range(len(parts), -1, -1)
        ]

    def _cpu_two(self, level: str) -> Cpu | None:
        try:
            limit, period = self._read(f"{level}/cpu.max").split()[:2]
            if limit == "max" or int(period) <= 0:
                return None
            cores = int(limit) / int(period)
        except (OSError, ValueError):
            return None
        stat = self._stat(f"{level}/cpu.stat")
        return Cpu(
            cores,
            stat.get("nr_periods", 0),
            stat.get("nr_throttled", 0),
            stat.get("throttled_usec", 0) * 1000,
        )

    def _cpu_one(self, level: str) -> Cpu | None:
        limit = self._number(f"{level}/cpu.cfs_quota_us")
        period = self._number(f"{level}/cpu.cfs_period_us")
        if not limit or not period or limit < 0:
            return None
        stat = self._stat(f"{level}/cpu.stat")
        return Cpu(
            limit / period,
            stat.get("nr_periods", 0),
            stat.get("nr_throttled", 0),
            stat.get("throttled_time", 0),
        )

    def _stat(self, path: str) -> dict[str, int]:
        try:
            return parse_stat(self._read(path))
        except OSError:
            return {}

    def _number(self, path: str) -> int | None:
        """Return the number in a file, None where there is none or it says there is no limit."""
        try:
            return int(self._read(path))
        except (OSError, ValueError):
            return None


def _below(group: str, root: str) -> str | None:
    """Return the group's path below the mount's root, None where it lies elsewhere."""
    if group.startswith("/.."):
        return None  # in a namespace of its own
    root = root.rstrip("/")
    if not root or group == root or group.startswith(root + "/"):
        return group[len(root) :]
    # A container without a namespace for groups sees its host's path, and its own group mounted.
    return ""


def _text(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 65536).decode("utf-8", "replace")
    finally:
        os.close(fd)
