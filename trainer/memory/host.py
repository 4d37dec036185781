"""What Linux says of this process's memory, and how much of it there may be."""

from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_bytes", "cgroup_limit_bytes", "status_bytes"]

_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
# cgroup v1 has no word for "unlimited": its default is the largest page-aligned 63-bit number.
_UNLIMITED = 1 << 60


def status_bytes(name: str, proc: Path = _PROC) -> int | None:
    """A line of ``/proc/self/status`` in bytes: VmSize, VmPeak, VmRSS, VmHWM; None if missing."""
    try:
        text = (proc / "self/status").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None


def cgroup_limit_bytes(cgroup: Path = _CGROUP, proc: Path = _PROC) -> int | None:
    """The tightest limit over this process's cgroup and those above it; None if there is none."""
    limits = [limit for limit, _ in _levels(cgroup, proc)]
    return min(limits, default=None)


def available_bytes(cgroup: Path = _CGROUP, proc: Path = _PROC) -> int | None:
    """Bytes that this process and its children can still take without swapping or being killed.

    The smaller of the kernel's MemAvailable and what the cgroup's limit leaves; its page cache
    that is not in use counts as free, for the kernel drops it first. None where neither is known.
    """
    known = [max(0, limit - used) for limit, used in _levels(cgroup, proc)]
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        known += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass
    return min(known, default=None)


def _levels(cgroup: Path, proc: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use without idle page cache) of each cgroup that has a limit."""
    for folder, v2 in _folders(cgroup, proc):
        names = (
            ("memory.max", "memory.current", "inactive_file")
            if v2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        try:
            limit = (folder / names[0]).read_text().strip()
            used = int((folder / names[1]).read_text())
            if limit == "max" or int(limit) >= _UNLIMITED:
                continue
            idle = 0
            for line in (folder / "memory.stat").read_text().splitlines():
                if line.startswith(f"{names[2]} "):
                    idle = int(line.split()[1])
        except (OSError, ValueError, IndexError):
            continue
        yield int(limit), max(0, used - idle)


def _folders(cgroup: Path, proc: Path) -> Iterator[tuple[Path, bool]]:
    """This process's memory cgroup and its ancestors: (folder, whether it is version 2).

    In a container the path that the kernel names may lie above what is mounted; then the mount's
    root is the process's own.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        v2 = not controllers
        if not v2 and "memory" not in controllers.split(","):
            continue
        root = cgroup if v2 else cgroup / "memory"
        parts = Path(path.lstrip("/")).parts
        for length in range(len(parts), -1, -1):
            folder = root.joinpath(*parts[:length])
            if folder.is_dir():
                yield folder, v2
