"""Counters of the kernel that only grow, as rates: pressure, faults, disks, network.

Each `parse_*` turns the text of one file of /proc into totals; `Rates` turns two looks into
readings. The files are documented in the kernel tree: accounting/psi, iostats, proc(5).
"""

from collections.abc import Mapping
from typing import NamedTuple

from gpuwatch.schema import Reading
from gpuwatch.sensors.backend import FIRST_TICK, known, unknown

__all__ = [
    "Disk",
    "Rates",
    "disk_readings",
    "parse_diskstats",
    "parse_net",
    "parse_pressure",
    "parse_vmstat",
]

SECTOR_BYTES = 512
"""What /proc/diskstats counts in, whatever the device's own sectors are."""


class Disk(NamedTuple):
    """Totals of one block device since boot."""

    reads: int
    read_sectors: int
    read_ms: int
    write_sectors: int
    busy_ms: int


def parse_pressure(text: str) -> dict[str, int]:
    """Return the stall totals in µs of a file under /proc/pressure: `some`, `full`."""
    found = {}
    for line in text.splitlines():
        fields = line.split()
        for field in fields[1:]:
            key, _, value = field.partition("=")
            if key == "total" and value.isdecimal():
                found[fields[0]] = int(value)
    return found


def parse_vmstat(text: str) -> dict[str, int]:
    """Return major faults and pages swapped in and out since boot."""
    wanted = {"pgmajfault", "pswpin", "pswpout"}
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in wanted and value.isdecimal():
            found[name] = int(value)
    return found


def parse_diskstats(text: str) -> dict[str, Disk]:
    """Return the block devices by name; lines that are no such line are left out."""
    found = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 14 and all(field.isdecimal() for field in fields[3:14]):
            numbers = [int(field) for field in fields[3:14]]
            found[fields[2]] = Disk(numbers[0], numbers[2], numbers[3], numbers[6], numbers[9])
    return found


def parse_net(text: str) -> dict[str, tuple[int, int]]:
    """Return (received, sent) bytes by interface from /proc/net/dev."""
    found = {}
    for line in text.splitlines()[2:]:
        name, separator, rest = line.rpartition(":")
        fields = rest.split()
        if separator and len(fields) >= 9 and fields[0].isdecimal() and fields[8].isdecimal():
            found[name.strip()] = (int(fields[0]), int(fields[8]))
    return found


class Rates:
    """Turns growing totals into rates a second.

    A counter that is seen first, or has stepped back (another device by that name, or a wrap),
    gives n/a.
    """

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._at_s: float | None = None
        self._passed_s = 0.0

    def look(self, totals: Mapping[str, float], at_s: float) -> dict[str, float | None]:
        """Return the rate of every total since the last look, None where it is not known."""
        passed_s = at_s - self._at_s if self._at_s is not None else 0.0
        rates: dict[str, float | None] = {}
        for name, total in totals.items():
            before = self._before.get(name)
            grown = None if before is None else total - before
            known_rate = grown is not None and grown >= 0 and passed_s > 0
            rates[name] = grown / passed_s if known_rate and grown is not None else None
        self._before = dict(totals)
        self._at_s = at_s
        return rates


def rate_reading(rate: float | None, unit: str, source: str, factor: float = 1.0) -> Reading:
    """Return a rate as a reading, n/a where it is None."""
    if rate is None:
        return unknown(unit, source, FIRST_TICK)
    return known(rate * factor, unit, source)


def disk_readings(before: Disk | None, now: Disk, passed_s: float) -> dict[str, Reading]:
    """Return what a block device did between two looks.

    `read_bytes_per_s`, `write_bytes_per_s` (B/s), `read_latency` (ms, mean of the reads that
    ended), `busy_percent` (share of the time in which anything was under way; on a device that
    serves many requests at once 100 is not its limit).
    """
    source = "/proc/diskstats"
    units = {
        "read_bytes_per_s": "B/s",
        "write_bytes_per_s": "B/s",
        "read_latency": "ms",
        "busy_percent": "%",
    }
    if before is None or passed_s <= 0:
        return {name: unknown(unit, source, FIRST_TICK) for name, unit in units.items()}
    grown = Disk(*(new - old for new, old in zip(now, before, strict=True)))
    if min(grown) < 0:
        return {
            name: unknown(unit, source, "its counters began anew") for name, unit in units.items()
        }
    latency = (
        known(grown.read_ms / grown.reads, "ms", source)
        if grown.reads
        else unknown("ms", source, "nothing was read")
    )
    return {
        "read_bytes_per_s": known(grown.read_sectors * SECTOR_BYTES / passed_s, "B/s", source),
        "write_bytes_per_s": known(grown.write_sectors * SECTOR_BYTES / passed_s, "B/s", source),
        "read_latency": latency,
        "busy_percent": known(min(100.0, grown.busy_ms / (10.0 * passed_s)), "%", source),
    }
