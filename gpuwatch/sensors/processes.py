"""The watched ranks and their children, read from /proc, and what holds a rank back.

One `/proc/<pid>/stat` holds the state, the CPU time, the threads, the resident set and the start
time; `/proc/<pid>/task/<tid>/children` names the children. psutil's `children(recursive=True)`
reads the stat of every process of the machine for each rank instead.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from gpuwatch.schema import ProcessSample, Reading
from gpuwatch.sensors.backend import FIRST_TICK, known, unknown
from gpuwatch.sensors.cgroup import Cgroups, Cpu

__all__ = [
    "MAX_PROCESSES",
    "ProcessBackend",
    "Stat",
    "parse_children",
    "parse_cpu_list",
    "parse_io",
    "parse_rollup",
    "parse_stat",
]

MAX_PROCESSES = 4096
"""Samples in one tick, as many as `SensorFrame.processes` takes: ranks first, then workers."""

_FULL_EVERY = 5
"""Ticks between two looks at the children of all threads. The main thread's are read every tick:
loaders start their workers there, and a rank can have hundreds of threads."""

_SHARED_EVERY = 10
"""Ticks between two looks at one process's private memory: the kernel walks all of its pages."""

_SHARED_LIMIT_S = 0.05
"""A look that took longer (84 ms at 2.2 GB) is not repeated for a hundred times as long."""

_STAT_SOURCE = "/proc/pid/stat"
_IO_SOURCE = "/proc/pid/io"
_NOT_PERMITTED = "not permitted: the process belongs to someone else"
_NOT_READABLE = "not readable: the process ended, or this kernel does not count"


class Stat(NamedTuple):
    """What is used of `/proc/<pid>/stat` (proc(5)).

    `cpu_ticks` and `started_ticks` are in clock ticks (`os.sysconf("SC_CLK_TCK")` a second), the
    latter since boot; together with the pid it names a process for good.
    """

    comm: str
    state: str
    ppid: int
    cpu_ticks: int
    threads: int
    started_ticks: int
    rss_pages: int
    major_faults: int = 0


def parse_stat(data: bytes) -> Stat:
    """Parse `/proc/<pid>/stat`.

    Raises:
        ValueError: this is no such line.
    """
    # The name is in parentheses and may hold spaces, newlines and parentheses itself; behind the
    # last one are only letters and numbers.
    start, end = data.find(b"("), data.rfind(b")")
    fields = data[end + 1 :].split()
    if start < 0 or end < start or len(fields) < 22:
        raise ValueError("not a line of /proc/pid/stat")
    state = fields[0].decode("ascii")
    return Stat(
        comm=data[start + 1 : end].decode("utf-8", "replace"),
        state="T" if state == "t" else state,  # stopped by a tracer is stopped
        ppid=int(fields[1]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        threads=int(fields[17]),
        started_ticks=int(fields[19]),
        rss_pages=int(fields[21]),
        major_faults=int(fields[9]),
    )


def parse_io(data: bytes) -> int:
    """Return the bytes read from storage so far, from `/proc/<pid>/io`.

    Raises:
        ValueError: the line is not there.
    """
    for line in data.splitlines():
        if line.startswith(b"read_bytes:"):
            return int(line[11:])
    raise ValueError("no read_bytes in /proc/pid/io")


def parse_children(data: bytes) -> list[int]:
    """Return the pids in `/proc/<pid>/task/<tid>/children`.

    Raises:
        ValueError: something in it is no number.
    """
    return [int(pid) for pid in data.split()]


def parse_rollup(data: bytes) -> tuple[int, int]:
    """Return (private, proportional) bytes in memory, from `/proc/<pid>/smaps_rollup`.

    Private (USS) is what ending the process would give back.

    Raises:
        ValueError: a line of it is not there.
    """
    kib: dict[bytes, int] = {}
    for line in data.splitlines():
        name, _, value = line.partition(b":")
        if name in {b"Pss", b"Private_Clean", b"Private_Dirty"}:
            kib[name] = int(value.split()[0])
    if len(kib) < 3:
        raise ValueError("no Pss or Private in /proc/pid/smaps_rollup")
    private = kib[b"Private_Clean"] + kib[b"Private_Dirty"]
    return private * 1024, kib[b"Pss"] * 1024


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the CPUs of a list such as `0-3,8` (cpuset(7)).

    Raises:
        ValueError: this is no such list.
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            low, dash, high = part.partition("-")
            first, last = int(low), int(high if dash else low)
            if not 0 <= first <= last < 65536:
                raise ValueError(f"{part!r} is no range of CPUs")
            found.update(range(first, last + 1))
    return frozenset(found)


class _Seen(NamedTuple):
    """The last look at one process."""

    started_ticks: int
    cpu_ticks: int
    at_s: float
    read_bytes: int | None
    read_at_s: float
    major_faults: int


class _Shared(NamedTuple):
    """A look at the private memory of one process; `reason` where it cannot be told."""

    started_ticks: int
    at_s: float
    took_s: float
    private_bytes: int | None
    proportional_bytes: int | None
    reason: str


class ProcessBackend:
    """Reads the ranks that `watch` names and all their descendants.

    Readings of each: `cpu_percent` (% of one core since the last tick), `rss` (B), `threads`,
    `read_bytes_per_s` (B/s from storage since the last tick, not from the page cache),
    `major_faults_per_s`, and rarely, one process after the other, `uss` and `pss` (B, with the
    age of the look).

    Of a rank besides: `affinity_cores` (CPUs it may run on), `numa_node` (the one they are all
    on), `cpu_quota_cores`, `cpu_throttled_percent` (of the quota's periods since the last tick in
    which it ran out), `cpu_throttled_ms_per_s` (summed over the group's threads), `memory_limit`
    and `memory_limit_used` (B) of its control group.

    A rank is bound to the process that has its pid when it is first seen: when that ends and
    another process gets the number, the rank stays away until a list without the pid has come.

    `root`, `clock`: where proc is mounted, and seconds that only grow.
    """

    def __init__(self, root: str = "/proc", clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._has_children_file = True
        self._watched: dict[int, int | None] = {}
        self._cgroups = Cgroups(root)
        self._cpu_limits: dict[int, Cpu] = {}
        self._cpu_limits_at_s: dict[int, float] = {}
        self._numa: list[tuple[int, frozenset[int]]] | None = None
        self._shared: dict[int, _Shared] = {}
        self._next_shared_s = 0.0
        self._seen: dict[int, _Seen] = {}
        self._children: dict[int, tuple[int, ...]] = {}
        self._tick = 0

    def probe(self) -> str:
        """Look whether proc is there, and whether this kernel names children."""
        if not os.path.isdir(self._root):
            return f"no {self._root} on this machine"
        pid = os.getpid()
        self._has_children_file = os.path.exists(f"{self._root}/{pid}/task/{pid}/children")
        return ""

    def watch(self, pids: Iterable[int]) -> None:
        """Watch these ranks from now on instead of the former."""
        self._watched = {pid: self._watched.get(pid) for pid in pids}
        self._tick = 0

    def sample(self) -> tuple[ProcessSample, ...]:
        """Read the ranks, then their descendants. Who vanished meanwhile is left out."""
        full = self._tick % _FULL_EVERY == 0
        look_at_memory = self._tick % _SHARED_EVERY == _SHARED_EVERY - 1
        self._tick += 1
        self._cgroups.begin()
        scanned = self._scan() if full and self._watched and not self._has_children_file else {}
        seen: dict[int, _Seen] = {}
        children: dict[int, tuple[int, ...]] = {}
        ranks: list[ProcessSample] = []
        workers: list[ProcessSample] = []
        for rank, started_ticks in self._watched.items():
            stat = self._stat(rank)
            if stat is None:
                continue
            if started_ticks is None:
                self._watched[rank] = stat.started_ticks
            elif stat.started_ticks != started_ticks:
                continue
            ranks.append(self._process(rank, rank, "rank", stat, seen))
            parents = [rank]
            while parents and len(workers) < MAX_PROCESSES:
                parent = parents.pop()
                found = []
                for pid in self._candidates(parent, full, scanned):
                    if pid in self._watched or pid in seen:
                        continue
                    child = self._stat(pid)
                    if child is None or child.ppid != parent:
                        continue  # ended, and perhaps another process by now
                    found.append(pid)
                    workers.append(self._process(pid, rank, "worker", child, seen))
                if found:
                    children[parent] = tuple(found)
                    parents += found
        self._seen = seen
        self._children = children
        self._shared = {pid: look for pid, look in self._shared.items() if pid in seen}
        for limits in (self._cpu_limits, self._cpu_limits_at_s):
            for pid in [pid for pid in limits if pid not in seen]:
                del limits[pid]
        if look_at_memory:
            self._look_at_memory()
        return tuple((ranks + workers)[:MAX_PROCESSES])

    def close(self) -> None:
        """Nothing to let go of."""

    def _process(
        self,
        pid: int,
        rank: int,
        role: Literal["rank", "worker"],
        stat: Stat,
        seen: dict[int, _Seen],
    ) -> ProcessSample:
        at_s = self._clock()
        before = self._seen.get(pid)
        if before is not None and before.started_ticks != stat.started_ticks:
            before = None
        if before is None or at_s <= before.at_s:
            cpu = unknown("%", _STAT_SOURCE, FIRST_TICK)
        else:
            busy_s = max(0, stat.cpu_ticks - before.cpu_ticks) / self._ticks_per_s
            cpu = known(100.0 * busy_s / (at_s - before.at_s), "%", _STAT_SOURCE)
        read_bytes, rate = self._read_rate(pid, before)
        if before is None or at_s <= before.at_s:
            faults = unknown("1/s", _STAT_SOURCE, FIRST_TICK)
        else:
            grown = max(0, stat.major_faults - before.major_faults)
            faults = known(grown / (at_s - before.at_s), "1/s", _STAT_SOURCE)
        seen[pid] = _Seen(
            stat.started_ticks,
            stat.cpu_ticks,
            at_s,
            read_bytes,
            self._clock(),
            stat.major_faults,
        )
        readings = {
            "cpu_percent": cpu,
            "rss": known(stat.rss_pages * self._page_bytes, "B", _STAT_SOURCE),
            "threads": known(stat.threads, "", _STAT_SOURCE),
            "read_bytes_per_s": rate,
            "major_faults_per_s": faults,
        }
        if role == "rank" or pid in self._shared:
            readings.update(self._private(pid, stat))
        if role == "rank":
            readings.update(self._limits(pid))
        return ProcessSample(pid, rank, role, stat.state, readings)

    # --- what a rank may use -------------------------------------------------------------------

    def _limits(self, pid: int) -> dict[str, Reading]:
        readings: dict[str, Reading] = {}
        source = "sched_getaffinity"
        try:
            allowed = frozenset(os.sched_getaffinity(pid))
        except (OSError, AttributeError) as exc:
            reason = getattr(exc, "strerror", None) or "not on this system"
            readings["affinity_cores"] = unknown("", source, reason)
            readings["numa_node"] = unknown("", source, reason)
        else:
            readings["affinity_cores"] = known(len(allowed), "", source)
            readings["numa_node"] = self._node_of(allowed)
        readings.update(self._cpu_limit(pid))
        source = "cgroup"
        try:
            memory = self._cgroups.memory(pid)
        except OSError as exc:
            reason = str(exc) or "not readable"
            readings["memory_limit"] = unknown("B", source, reason)
            readings["memory_limit_used"] = unknown("B", source, reason)
            return readings
        for name, value in (
            ("memory_limit", memory.limit_bytes),
            ("memory_limit_used", memory.used_bytes),
        ):
            readings[name] = (
                unknown("B", source, "no memory limit")
                if value is None
                else known(value, "B", source)
            )
        return readings

    def _cpu_limit(self, pid: int) -> dict[str, Reading]:
        units = {
            "cpu_quota_cores": "",
            "cpu_throttled_percent": "%",
            "cpu_throttled_ms_per_s": "ms/s",
        }
        source = "cgroup"
        at_s = self._clock()
        try:
            now = self._cgroups.cpu(pid)
        except OSError as exc:
            reason = str(exc) or "not readable"
            return {name: unknown(unit, source, reason) for name, unit in units.items()}
        if now.quota_cores is None:
            self._cpu_limits.pop(pid, None)
            return {name: unknown(unit, source, "no CPU quota") for name, unit in units.items()}
        before = self._cpu_limits.get(pid)
        passed_s = at_s - self._cpu_limits_at_s.get(pid, at_s)
        self._cpu_limits[pid], self._cpu_limits_at_s[pid] = now, at_s
        readings = {"cpu_quota_cores": known(now.quota_cores, "", source)}
        periods = now.periods - before.periods if before is not None else 0
        throttled = now.throttled_periods - before.throttled_periods if before is not None else 0
        held_ns = now.throttled_ns - before.throttled_ns if before is not None else 0
        if before is None or passed_s <= 0 or min(periods, throttled, held_ns) < 0:
            for name in ("cpu_throttled_percent", "cpu_throttled_ms_per_s"):
                readings[name] = unknown(units[name], source, FIRST_TICK)
            return readings
        # No period has been enforced: nothing ran in the group, so nothing was held back.
        share = min(100.0, 100.0 * throttled / periods) if periods else 0.0
        readings["cpu_throttled_percent"] = known(share, "%", source)
        readings["cpu_throttled_ms_per_s"] = known(held_ns / 1e6 / passed_s, "ms/s", source)
        return readings

    def _node_of(self, allowed: frozenset[int]) -> Reading:
        """Return the NUMA node that all allowed CPUs are on."""
        source = "/sys/devices/system/node"
        if self._numa is None:
            self._numa = _numa_nodes(source)
        if not self._numa:
            return unknown("", source, "this kernel does not tell")
        nodes = [number for number, cpus in self._numa if cpus & allowed]
        if len(nodes) == 1:
            return known(nodes[0], "", source)
        return unknown("", source, f"it may run on {len(nodes)} nodes")

    # --- private memory ------------------------------------------------------------------------

    def _look_at_memory(self) -> None:
        """Look at the process whose last look is the longest ago."""
        if not self._seen or self._clock() < self._next_shared_s:
            return
        pid = min(self._seen, key=lambda p: self._shared[p].at_s if p in self._shared else -1.0)
        began_s = self._clock()
        private = proportional = None
        reason = ""
        try:
            private, proportional = parse_rollup(_read(f"{self._root}/{pid}/smaps_rollup"))
        except PermissionError:
            reason = _NOT_PERMITTED
        except (OSError, ValueError):
            reason = _NOT_READABLE
        took_s = self._clock() - began_s
        started = self._seen[pid].started_ticks
        self._shared[pid] = _Shared(started, self._clock(), took_s, private, proportional, reason)
        if took_s > _SHARED_LIMIT_S:
            self._next_shared_s = self._clock() + 100.0 * took_s

    def _private(self, pid: int, stat: Stat) -> dict[str, Reading]:
        source = "/proc/pid/smaps_rollup"
        look = self._shared.get(pid)
        if look is None or look.started_ticks != stat.started_ticks:
            reason = "looked at rarely, not yet"
            return {name: unknown("B", source, reason) for name in ("uss", "pss")}
        age_s = max(0.0, self._clock() - look.at_s)
        readings = {}
        for name, value in (("uss", look.private_bytes), ("pss", look.proportional_bytes)):
            if value is None:
                readings[name] = unknown("B", source, look.reason)
            else:
                readings[name] = Reading(float(value), "B", source, age_s)
        return readings

    # --- /proc ---------------------------------------------------------------------------------

    def _read_rate(self, pid: int, before: _Seen | None) -> tuple[int | None, Reading]:
        try:
            total = parse_io(_read(f"{self._root}/{pid}/io"))
        except PermissionError:
            return None, unknown("B/s", _IO_SOURCE, _NOT_PERMITTED)
        except (OSError, ValueError):
            return None, unknown("B/s", _IO_SOURCE, _NOT_READABLE)
        at_s = self._clock()
        if before is None or before.read_bytes is None or at_s <= before.read_at_s:
            return total, unknown("B/s", _IO_SOURCE, FIRST_TICK)
        delta = max(0, total - before.read_bytes)
        return total, known(delta / (at_s - before.read_at_s), "B/s", _IO_SOURCE)

    def _stat(self, pid: int) -> Stat | None:
        """Return the stat of a process, None if there is none."""
        try:
            return parse_stat(_read(f"{self._root}/{pid}/stat"))
        except (OSError, ValueError):
            return None

    def _candidates(self, parent: int, full: bool, scanned: dict[int, list[int]]) -> Iterator[int]:
        """Yield, perhaps twice, the pids that are or were children of `parent`.

        The kernel may leave one out while others exit, so those of the last tick are asked again.
        """
        yield from self._children.get(parent, ())
        if not self._has_children_file:
            yield from scanned.get(parent, ())
            return
        task = f"{self._root}/{parent}/task"
        try:
            threads = os.listdir(task) if full else [str(parent)]
        except OSError:
            return
        for thread in threads:
            try:
                yield from parse_children(_read(f"{task}/{thread}/children"))
            except (OSError, ValueError):
                continue  # the thread ended

    def _scan(self) -> dict[int, list[int]]:
        """Return the children of every process: the way without a children file."""
        children: dict[int, list[int]] = {}
        for name in os.listdir(self._root):
            if name.isdecimal():
                stat = self._stat(int(name))
                if stat is not None:
                    children.setdefault(stat.ppid, []).append(int(name))
        return children


def _numa_nodes(root: str) -> list[tuple[int, frozenset[int]]]:
    found = []
    try:
        for name in os.listdir(root):
            if name.startswith("node") and name[4:].isdecimal():
                text = _read(f"{root}/{name}/cpulist").decode("ascii", "replace")
                found.append((int(name[4:]), parse_cpu_list(text)))
    except (OSError, ValueError):
        return []
    return sorted(found)


def _read(path: str) -> bytes:
    """Return a small file of proc; os.read costs a third of open().read() here.

    Raises:
        OSError: not there, not permitted, or the process ended between open and read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(fd, 65536)
        # One read gives all of it but for a list of children that is longer than a page.
        if len(data) >= 4000:
            while more := os.read(fd, 65536):
                data += more
        return data
    finally:
        os.close(fd)
