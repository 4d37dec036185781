"""The machine as a whole: CPU, memory, swap, load, pressure, disks, network.

The figures are those of the machine, not of a container or of this process's affinity: a quota
shows with the ranks that it holds back (`gpuwatch.sensors.processes`).
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import psutil

from gpuwatch.schema import HostSample, IoSample, Reading
from gpuwatch.sensors.backend import FIRST_TICK, known, unknown
from gpuwatch.sensors.counters import (
    Disk,
    Rates,
    disk_readings,
    parse_diskstats,
    parse_net,
    parse_pressure,
    parse_vmstat,
    rate_reading,
)
from gpuwatch.sensors.storage import (
    MEMORY,
    NFS,
    FileSystem,
    NfsReads,
    block_device,
    locate,
    parse_mountinfo,
    parse_nfs,
)

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


def core_percents(before: Sequence[CpuTimes] | None, now: Sequence[CpuTimes]) -> tuple[float, ...]:
    """Return how busy each core was, 0..100; empty where that cannot be told."""
    if before is None or len(before) != len(now):
        return ()
    found = []
    for old, new in zip(before, now, strict=True):
        total = new.total_s - old.total_s
        busy = max(0.0, new.busy_s - old.busy_s)
        found.append(round(min(100.0, 100.0 * busy / total), 1) if total > 0.0 else 0.0)
    return tuple(found)


def _all_unknown(reason: str) -> dict[str, Reading]:
    return {name: unknown("%", _SOURCE, reason) for name in _CPU_NAMES}


_PRESSURES = ("cpu", "memory", "io")
_VMSTAT = {"major_faults_per_s": "pgmajfault", "swap_in": "pswpin", "swap_out": "pswpout"}
_MOST_DISKS = 32
_MOST_INTERFACES = 32
_MOUNTS_EVERY = 30
"""Ticks between two looks at the mount table."""


class HostBackend:
    """Reads the host through psutil and the counters of /proc.

    Readings: `cpu_percent`, `cpu_iowait_percent`, `cpu_core_max_percent` (%, over the time since
    the last tick), `memory_used`, `memory_total`, `swap_used` (B) and `load1` (runnable and
    uninterruptible tasks, mean over a minute). Used memory is what is not available to a new
    process: total - MemAvailable. `shm_used` and `shm_total` (B) are /dev/shm, where loader workers
    hand batches over. `psi_cpu_some`, `psi_memory_some`, `psi_memory_full`, `psi_io_some`,
    `psi_io_full` (%) are the share of the last tick in which some or all runnable tasks stood still
    for want of it. `major_faults_per_s`, `swap_in` and `swap_out` (B/s) are the whole machine's.

    `io` has each disk, each network interface, and where the datasets lie that `paths` names.

    `root`, `clock`: where proc is mounted, and seconds that only grow.
    """

    def __init__(self, root: str = "/proc", clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._before: list[CpuTimes] | None = None
        self._rates = {name: Rates() for name in ("pressure", "vmstat", "network")}
        self._disks: dict[str, Disk] = {}
        self._disks_at_s = 0.0
        self._partitions: dict[str, bool] = {}
        self._nfs: dict[str, NfsReads] = {}
        self._nfs_at_s = 0.0
        self._paths: tuple[str, ...] = ()
        self._mounts: list[FileSystem] = []
        self._ticks = 0
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def probe(self) -> str:
        """Nothing to find out: what fails, fails by itself."""
        return ""

    def paths(self, paths: Iterable[str]) -> None:
        """Tell from now on about the devices under these dataset paths."""
        self._paths = tuple(dict.fromkeys(path for path in paths if path))
        self._ticks = 0

    def sample(self) -> HostSample:
        """Read the host now; `cores` is the number of logical CPUs that are online."""
        readings: dict[str, Reading] = {}
        cores = 0
        percents: tuple[float, ...] = ()
        # psutil raises many types (OSError, RuntimeError, NotImplementedError ...) where a
        # container hides a part of /proc: each group is on its own.
        try:
            now = _cpu_times()
            cores = len(now)
            readings.update(cpu_readings(self._before, now))
            percents = core_percents(self._before, now)
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
        self._shared_memory(readings)
        self._pressure(readings)
        self._vmstat(readings)
        io = (*self._look_at_disks(), *self._network())
        self._ticks += 1
        return HostSample(cores, readings, percents, io)

    def close(self) -> None:
        """Nothing to let go of."""

    def _shared_memory(self, readings: dict[str, Reading]) -> None:
        try:
            found = os.statvfs("/dev/shm")
            total = found.f_blocks * found.f_frsize
            readings["shm_used"] = known(
                (found.f_blocks - found.f_bfree) * found.f_frsize, "B", "/dev/shm"
            )
            readings["shm_total"] = known(total, "B", "/dev/shm")
        except OSError as exc:
            for name in ("shm_used", "shm_total"):
                readings[name] = unknown("B", "/dev/shm", _sentence(exc))

    def _pressure(self, readings: dict[str, Reading]) -> None:
        totals: dict[str, float] = {}
        reasons: dict[str, str] = {}
        for name in _PRESSURES:
            try:
                for kind, total in parse_pressure(self._text(f"pressure/{name}")).items():
                    totals[f"psi_{name}_{kind}"] = total
            except OSError as exc:
                reasons[name] = f"this kernel does not tell pressure: {exc.strerror}"
        rates = self._rates["pressure"].look(totals, self._clock())
        for name in _PRESSURES:
            for kind in ("some", "full"):
                key = f"psi_{name}_{kind}"
                if key in ("psi_cpu_full",):
                    continue  # for the machine as a whole it is 0 by definition
                source = f"/proc/pressure/{name}"
                if key not in totals:
                    readings[key] = unknown("%", source, reasons.get(name, "not told"))
                    continue
                rate = rates[key]  # µs a second
                readings[key] = rate_reading(
                    None if rate is None else min(rate, 1e6), "%", source, 1e-4
                )

    def _vmstat(self, readings: dict[str, Reading]) -> None:
        source = "/proc/vmstat"
        try:
            totals: dict[str, float] = dict(parse_vmstat(self._text("vmstat")))
        except OSError as exc:
            totals = {}
            reason = _sentence(exc)
        else:
            reason = "this kernel does not count it"
        rates = self._rates["vmstat"].look(totals, self._clock())
        for name, key in _VMSTAT.items():
            pages = name != "major_faults_per_s"
            unit = "B/s" if pages else "1/s"
            if key not in totals:
                readings[name] = unknown(unit, source, reason)
            else:
                factor = float(self._page_bytes) if pages else 1.0
                readings[name] = rate_reading(rates[key], unit, source, factor)

    def _look_at_disks(self) -> list[IoSample]:
        try:
            now = parse_diskstats(self._text("diskstats"))
        except OSError:
            now = {}
        at_s = self._clock()
        passed_s = at_s - self._disks_at_s if self._disks else 0.0
        before, self._disks, self._disks_at_s = self._disks, now, at_s
        found: list[IoSample] = []
        for name, disk in now.items():
            if disk.reads and not self._is_part(name) and len(found) < _MOST_DISKS:
                readings = disk_readings(before.get(name), disk, passed_s)
                found.append(IoSample(name, "disk", readings=readings))
        by_name = {sample.name: sample for sample in found}
        return found + self._datasets(by_name)

    def _is_part(self, name: str) -> bool:
        """Whether a block device is a partition, or a file that pretends to be one."""
        part = self._partitions.get(name)
        if part is None:
            part = name.startswith(("loop", "ram", "zram")) or os.path.exists(
                f"/sys/class/block/{name}/partition"
            )
            self._partitions[name] = part
        return part

    def _datasets(self, disks: dict[str, IoSample]) -> list[IoSample]:
        if not self._paths:
            return []
        if self._ticks % _MOUNTS_EVERY == 0:
            try:
                self._mounts = parse_mountinfo(self._text("self/mountinfo"))
            except OSError:
                self._mounts = []
        mounts = {path: locate(path, self._mounts) for path in self._paths}
        nfs = self._look_at_nfs() if any(m and m.kind in NFS for m in mounts.values()) else {}
        found: list[IoSample] = []
        for path, mount in mounts.items():
            kind = mount.kind if mount is not None else ""
            name = ""
            readings: dict[str, Reading] = {}
            if mount is None:
                reason = "no absolute path" if not path.startswith("/") else "no mount holds it"
            elif kind in MEMORY:
                reason = "it lies in memory"
            elif kind in NFS:
                name, reason = mount.source, "this kernel does not tell"
                readings = nfs.get(mount.path, {})
            else:
                name = block_device(mount)
                reason = f"no disk of this machine is below it ({kind})"
                readings = disks[name].readings if name in disks else {}
            if not readings:
                readings = {
                    "read_bytes_per_s": unknown("B/s", "", reason),
                    "read_latency": unknown("ms", "", reason),
                }
            found.append(IoSample(name[:256], "dataset", path[:4096], kind[:64], readings))
        return found

    def _look_at_nfs(self) -> dict[str, dict[str, Reading]]:
        source = "/proc/self/mountstats"
        try:
            now = parse_nfs(self._text("self/mountstats"))
        except OSError:
            now = {}
        at_s = self._clock()
        passed_s = at_s - self._nfs_at_s
        found: dict[str, dict[str, Reading]] = {}
        for path, reads in now.items():
            before = self._nfs.get(path)
            if before is None or passed_s <= 0 or reads.calls < before.calls:
                found[path] = {
                    "read_bytes_per_s": unknown("B/s", source, FIRST_TICK),
                    "read_latency": unknown("ms", source, FIRST_TICK),
                }
                continue
            calls = reads.calls - before.calls
            rate = (reads.received_bytes - before.received_bytes) / passed_s
            found[path] = {
                "read_bytes_per_s": known(rate, "B/s", source),
                "read_latency": (
                    known((reads.spent_ms - before.spent_ms) / calls, "ms", source)
                    if calls
                    else unknown("ms", source, "nothing was read")
                ),
            }
        self._nfs, self._nfs_at_s = now, at_s
        return found

    def _network(self) -> list[IoSample]:
        source = "/proc/net/dev"
        try:
            totals = parse_net(self._text("net/dev"))
        except OSError:
            return []
        flat: dict[str, float] = {}
        for name, (received, sent) in totals.items():
            flat[f"{name} rx"], flat[f"{name} tx"] = received, sent
        rates = self._rates["network"].look(flat, self._clock())
        used = [name for name, (received, sent) in totals.items() if received or sent]
        return [
            IoSample(
                name[:256],
                "network",
                readings={
                    "rx": rate_reading(rates[f"{name} rx"], "B/s", source),
                    "tx": rate_reading(rates[f"{name} tx"], "B/s", source),
                },
            )
            for name in used[:_MOST_INTERFACES]
        ]

    def _text(self, name: str) -> str:
        fd = os.open(f"{self._root}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = []
            while part := os.read(fd, 65536):
                parts.append(part)
        finally:
            os.close(fd)
        return b"".join(parts).decode("utf-8", "replace")


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
