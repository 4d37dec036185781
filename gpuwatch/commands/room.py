"""Whether the run directory takes what a node process has to write into it."""

import contextlib
import errno
import os
from pathlib import Path

__all__ = ["no_room", "why_unwritable"]

_PROBE_BYTES = 4096
"""A page, and a block of most file systems: what announces a node process takes one."""


def no_room(directory: Path) -> str:
    """Return why no file can be written in a run directory and what to do, empty if one can."""
    path = directory / f".room.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
        try:
            if os.write(fd, bytes(_PROBE_BYTES)) < _PROBE_BYTES:
                return why_unwritable(directory, errno.ENOSPC)
        finally:
            os.close(fd)  # a file system on a network says it here
    except OSError as exc:
        return why_unwritable(directory, exc.errno or 0)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return ""


def why_unwritable(directory: Path, number: int) -> str:
    """Return a sentence on a directory that could not be written to, by the system's number."""
    other = "set GPUWATCH_DIR to another directory, for the training as well"
    if number == errno.ENOSPC:
        what, option = ("inodes", " -i") if _has_no_inode(directory) else ("space", "")
        return (
            f"no {what} left in {directory}: remove something there (df{option} {directory} says "
            f"how full it is), or {other}"
        )
    if number == errno.EDQUOT:
        return f"your quota is used up in {directory}: remove something there, or {other}"
    return f"nothing can be written in {directory} ({os.strerror(number)}): {other}"


def _has_no_inode(directory: Path) -> bool:
    try:
        found = os.statvfs(directory)
    except OSError:
        return False
    return found.f_files > 0 and found.f_favail == 0
