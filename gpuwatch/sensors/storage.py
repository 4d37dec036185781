"""Which device a dataset lies on, found without touching its file system.

A path is matched against the mount table as text: a `stat` on a network file system whose server
is gone would hang for ever. So a symbolic link that leads to another mount is not followed.
"""

import os
import posixpath
from collections.abc import Callable
from typing import NamedTuple

__all__ = [
    "FileSystem",
    "NfsReads",
    "block_device",
    "locate",
    "parse_mountinfo",
    "parse_nfs",
    "unescaped",
]

_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))
MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
NFS = frozenset({"nfs", "nfs4"})


class FileSystem(NamedTuple):
    """One line of /proc/self/mountinfo: where it is, its device as major:minor, type, source."""

    path: str
    device: str
    kind: str
    source: str


class NfsReads(NamedTuple):
    """Totals of the READ calls of one NFS mount; `spent_ms` from the call to its answer."""

    calls: int
    received_bytes: int
    spent_ms: int


def unescaped(path: str) -> str:
    """Return a path of the mount table as it is: the kernel writes four characters in octal."""
    for escaped, character in _ESCAPES:
        path = path.replace(escaped, character)
    return path


def parse_mountinfo(text: str) -> list[FileSystem]:
    """Return the mounts in the order of the table: of two at one place the last one counts."""
    found = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if separator and len(fields) >= 5 and len(kind) >= 2:
            path, source = fields[4], kind[1]
            found.append(FileSystem(unescaped(path), fields[2], kind[0], unescaped(source)))
    return found


def locate(path: str, mounts: list[FileSystem]) -> FileSystem | None:
    """Return the mount that holds an absolute path, None for any other path."""
    if not path.startswith("/"):
        return None
    path = posixpath.normpath(path)
    best: FileSystem | None = None
    for mount in mounts:
        at = mount.path.rstrip("/")
        inside = path == at or path.startswith(at + "/")
        if inside and (best is None or len(mount.path) >= len(best.path)):
            best = mount
    return best


def parse_nfs(text: str) -> dict[str, NfsReads]:
    """Return the READ totals of every NFS mount in /proc/self/mountstats, by mount point."""
    found = {}
    path = ""
    for line in text.splitlines():
        words = line.split()
        if line.startswith("device "):
            path = ""
            if " mounted on " in line and " with fstype nfs" in line:
                path = line.split(" mounted on ", 1)[1].rsplit(" with fstype ", 1)[0]
                path = unescaped(path)
        elif path and len(words) >= 9 and words[0] == "READ:":
            numbers = words[1:9]
            if all(word.isdecimal() for word in numbers):
                found[path] = NfsReads(int(numbers[0]), int(numbers[4]), int(numbers[7]))
    return found


def block_device(
    mount: FileSystem,
    realpath: Callable[[str], str] = os.path.realpath,
    exists: Callable[[str], bool] = os.path.exists,
) -> str:
    """Return the name of the disk in /proc/diskstats below a mount, empty where there is none.

    A partition's disk, not the partition. The file systems asked are sysfs and devtmpfs only.
    """
    name = ""
    if not mount.device.startswith("0:"):
        name = posixpath.basename(realpath(f"/sys/dev/block/{mount.device}"))
    elif mount.source.startswith("/dev/"):  # btrfs and its like number their mounts themselves
        name = posixpath.basename(realpath(mount.source))
    if name and exists(f"/sys/class/block/{name}/partition"):
        name = posixpath.basename(posixpath.dirname(realpath(f"/sys/class/block/{name}")))
    return name
