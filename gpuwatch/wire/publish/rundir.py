"""The run directory: where the processes of one user on one node find each other.

It holds a file `<name>.json` for every rank and node process beside its unix sockets. Being in a
private directory (0700, owner checked) is the authentication. It is not under XDG_RUNTIME_DIR,
which vanishes at logout and is unset under Slurm and cron, and not under TMPDIR, which is often
too long for a socket path (107 bytes).
"""

import contextlib
import os
import stat
from pathlib import Path

import msgspec

from gpuwatch.errors import FrameError, RunDirectoryError

__all__ = [
    "Presence",
    "boot_id",
    "process_start_ticks",
    "read_presence",
    "run_directory",
    "socket_path",
    "trace_folder",
    "write_atomic",
]

_SOCKET_PATH_BYTES = 107  # sizeof(sockaddr_un.sun_path) - 1 on Linux
_LONGEST_NAME = len("/agent-4194304-12345678.t")  # a 22-bit pid, the kernel's maximum
_PRESENCE_BYTES = 65536


class Presence(msgspec.Struct, frozen=True):
    """The content of a `<name>.json`: who is there, and on which sockets.

    `started_ticks` is the start time of the process in clock ticks since boot, so that a reused
    pid is not taken for the process; `boot` the boot id of the kernel it runs on.
    """

    version: int
    role: str
    pid: int
    started_ticks: int
    boot: str
    telemetry: str
    control: str
    run: str = ""
    rank: int = 0
    incarnation: str = ""


def run_directory() -> Path:
    """Return the run directory, made if there is none.

    `GPUWATCH_DIR` names another than `/tmp/gpuwatch-<uid>`.

    Raises:
        RunDirectoryError: it cannot be made, belongs to someone else, is open to others, or its
            path is too long for a socket.
    """
    named = os.environ.get("GPUWATCH_DIR", "")
    path = Path(named) if named else Path(f"/tmp/gpuwatch-{os.getuid()}")
    if len(os.fsencode(path)) + _LONGEST_NAME > _SOCKET_PATH_BYTES:
        raise RunDirectoryError(
            f"the run directory {path} is too long for a unix socket; set GPUWATCH_DIR to a path "
            f"of at most {_SOCKET_PATH_BYTES - _LONGEST_NAME} bytes"
        )
    try:
        path.mkdir(mode=0o700, parents=bool(named), exist_ok=True)
        info = path.lstat()
    except OSError as exc:
        raise RunDirectoryError(f"cannot use the run directory {path}: {exc.strerror}") from None
    if not stat.S_ISDIR(info.st_mode):
        raise RunDirectoryError(f"the run directory {path} is not a directory")
    if info.st_uid != os.getuid():
        raise RunDirectoryError(
            f"the run directory {path} belongs to another user; set GPUWATCH_DIR to one of yours"
        )
    if info.st_mode & 0o077:
        raise RunDirectoryError(
            f"the run directory {path} is open to other users; type: chmod 700 {path}"
        )
    return path


def trace_folder() -> Path:
    """Return the folder for the traces of profiles, in the run directory; made if there is none.

    Raises:
        RunDirectoryError: the run directory cannot be used.
        OSError: it cannot be made, or is no folder of this user's alone.
    """
    path = run_directory() / "traces"
    path.mkdir(mode=0o700, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(f"{path} must be a folder of this user's alone (0700)")
    return path


def socket_path(directory: Path, name: str) -> str:
    """Return the ZeroMQ address of a unix socket in the directory."""
    return f"ipc://{directory / name}"


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 so that a reader sees all of it or nothing.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()  # a full disk is not to fill up with these
        raise


def read_presence(path: Path) -> Presence:
    """Read one `<name>.json`.

    Raises:
        FrameError: it is no valid presence, or points outside its own directory.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(_PRESENCE_BYTES)
    try:
        presence = msgspec.json.decode(data, type=Presence)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise FrameError(f"{path} is not a valid discovery file: {exc}") from None
    inside = f"ipc://{path.parent}/"
    for address in (presence.telemetry, presence.control):
        if not address.startswith(inside) or "/" in address[len(inside) :]:
            raise FrameError(f"{path} points to a socket outside its directory")
    return presence


def boot_id() -> str:
    """Return the id of this boot of the kernel, empty where it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is no such process.

    A zombie counts as gone: it will never send again.
    """
    try:
        stat_line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command may hold spaces and parentheses: fields count from the last one.
    fields = stat_line[stat_line.rfind(b")") + 2 :].split()
    if not fields or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])
