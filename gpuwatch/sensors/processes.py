"""The watched ranks and their children, read from /proc.

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

__all__ = ["MAX_PROCESSES", "ProcessBackend", "Stat", "parse_children", "parse_io", "parse_stat"]

MAX_PROCESSES = 4096
"""Samples in one tick, as many as `SensorFrame.processes` takes: ranks first, then workers."""

_FULL_EVERY = 5
"""Ticks between two looks at the children of all threads. The main thread's are read every tick:
loaders start their workers there, and a rank can have hundreds of threads."""

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


class _Seen(NamedTuple):
    """The last look at one process."""

    started_ticks: int
    cpu_ticks: int
    at_s: float
    read_bytes: int | None
    read_at_s: float


class ProcessBackend:
    """Reads the ranks that `watch` names and all their descendants.

    Readings of each: `cpu_percent` (% of one core since the last tick), `rss` (B), `threads` and
    `read_bytes_per_s` (B/s from storage since the last tick, not from the page cache).

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
        self._tick += 1
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
        seen[pid] = _Seen(stat.started_ticks, stat.cpu_ticks, at_s, read_bytes, self._clock())
        readings = {
            "cpu_percent": cpu,
            "rss": known(stat.rss_pages * self._page_bytes, "B", _STAT_SOURCE),
            "threads": known(stat.threads, "", _STAT_SOURCE),
            "read_bytes_per_s": rate,
        }
        return ProcessSample(pid, rank, role, stat.state, readings)

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
