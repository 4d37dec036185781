"""The door beside a `gpuwatch run`: a process of its own that ends with the command.

As the lookout it is forked off before this process becomes the command, twice, so that it is no
child of the job's; it holds nothing of the job's (no terminal, no pipe, no directory) but the port.
"""

import contextlib
import fcntl
import os
import signal
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpuwatch.commands.agent import say_where
from gpuwatch.commands.lookout import start_apart
from gpuwatch.errors import GpuwatchError

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwatch.wire.collect import JobKey
    from gpuwatch.wire.collect.listener import Address

__all__ = ["is_first_on_node", "start_door"]

_LOG_BYTES = 2**20
_PATIENCE_S = 1.0
"""So long may a port be taken, by the door of the command before this one, which is closing; and so
long may it take to look up a name."""

_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Set by torchrun, by Open MPI, and by MPICH and Intel MPI."""
_NOBODY = "nobody can attach over TCP:"


def is_first_on_node(environ: Mapping[str, str]) -> bool:
    """Whether this `gpuwatch run` is the only one of its run on this node, or that of its first
    rank there: the door is one, for all of them.
    """
    # A script between the launcher and us may have set some of them, for all of its ranks alike.
    ranks = [_count(environ, name) for name in _LOCAL_RANKS]
    if _count(environ, "SLURM_NTASKS") > 1:
        ranks.append(_count(environ, "SLURM_LOCALID"))
    return not any(ranks)


def _count(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ.get(name, "0"))
    except ValueError:
        return 0


def start_door(address: "Address", key: "JobKey") -> str:
    """Open the door for the job that this process is about to become.

    Returns at once, or after a second where the port is taken, and another one where the name is
    looked up in vain. The sentence says where it is, or why there is none: the job goes on in any
    case.
    """
    from gpuwatch.wire.collect import listen
    from gpuwatch.wire.publish import run_directory

    if os.getpid() == 1:
        # It adopts every orphan: the door would be a child of the job's.
        return (
            f"{_NOBODY} this is the first process of a container; start it with an init "
            "(docker run --init)"
        )
    try:
        directory = run_directory().absolute()  # the door leaves the one that it is started in
        listener = listen(address, patience_s=_PATIENCE_S, lookup_s=_PATIENCE_S)
    except GpuwatchError as exc:
        return f"{_NOBODY} {exc}"
    with listener:
        sentence = say_where(listener, address.host)
        # Held here, before the fork: whoever becomes what, it is this process.
        ending = _ending_of(os.getpid())
        if ending is None:
            return f"{_NOBODY} this system does not tell when a process ends"
        try:
            start_apart(lambda: _serve(listener, ending, key, directory))
        except OSError as exc:
            return f"{_NOBODY} it needs a process of its own ({exc.strerror})"
        finally:
            os.close(ending)
        return sentence


def _ending_of(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _serve(listener: socket.socket, ending: int, key: "JobKey", directory: "Path") -> None:
    # Where a standard stream was closed one of them has its number, which the log is to have.
    if listener.fileno() < 3:
        listener = socket.socket(fileno=_above_streams(listener.fileno()))
    if ending < 3:
        ending = _above_streams(ending)
    _let_go(directory, {listener.fileno(), ending})
    try:
        from gpuwatch import __version__
        from gpuwatch.commands.session import AGENT_ARGV
        from gpuwatch.wire.collect import Door

        door = Door(
            directory, AGENT_ARGV, listener, key, package=__version__, say=_log, until=ending
        )
        signal.signal(signal.SIGTERM, door.stop)
        door.run()
    except BaseException as exc:
        _log(f"the door has ended: {type(exc).__name__}: {exc}")
        raise


def _above_streams(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


def _log(text: str) -> None:
    """Write a line to stderr, which is the log by now; that begins anew when it is full."""
    with contextlib.suppress(OSError):
        if os.fstat(2).st_size > _LOG_BYTES:
            os.ftruncate(2, 0)
        os.write(2, f"gpuwatch: {text}\n".encode("utf-8", "replace"))


def _let_go(directory: "Path", kept: set[int]) -> None:
    """Give up everything that others wait for, and speak into a file."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))
    null = os.open(os.devnull, os.O_RDWR)
    log = null
    with contextlib.suppress(OSError):
        path = directory / "door.log"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        log = os.open(path, flags, 0o600)
    for at, descriptor in enumerate((null, log, log)):
        os.dup2(descriptor, at)
    os.chdir("/")
