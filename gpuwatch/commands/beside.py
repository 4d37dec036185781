"""The door beside a `gpuwatch run`: a process of its own that ends with the command.

As the lookout it is forked off before this process becomes the command, twice, so that it is no
child of the job's; it holds nothing of the job's (no terminal, no pipe, no directory) but the port.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpuwatch.commands.agent import say_where
from gpuwatch.commands.lookout import flush_output
from gpuwatch.errors import GpuwatchError

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwatch.wire.collect import JobKey
    from gpuwatch.wire.collect.listener import Address

__all__ = ["is_first_on_node", "start_door"]

_LOG_BYTES = 2**20
_PATIENCE_S = 1.0
"""So long may a port be taken: by the door of the command before this one, which is closing."""


def is_first_on_node(environ: Mapping[str, str]) -> bool:
    """Whether this `gpuwatch run` is the only one of its run on this node, or that of its first
    rank there: the door is one, for all of them.
    """
    if _count(environ, "WORLD_SIZE") > 1:
        return _count(environ, "LOCAL_RANK") == 0
    return _count(environ, "SLURM_NTASKS") <= 1 or _count(environ, "SLURM_LOCALID") == 0


def _count(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ.get(name, "0"))
    except ValueError:
        return 0


def start_door(address: "Address", key: "JobKey") -> str:
    """Open the door for the job that this process is about to become.

    Returns at once, or after a second where the port is taken. The sentence says where it is, or
    why there is none: the job goes on in any case.
    """
    from gpuwatch.wire.collect import listen
    from gpuwatch.wire.publish import run_directory

    try:
        directory = run_directory()
        listener = listen(address, patience_s=_PATIENCE_S)
    except GpuwatchError as exc:
        return f"nobody can attach over TCP: {exc}"
    with listener:
        sentence = say_where(listener, address.host)
        # Held here, before the fork: whoever becomes what, it is this process.
        ending = _ending_of(os.getpid())
        if ending is None:
            return "nobody can attach over TCP: this system does not tell when a process ends"
        flush_output()
        first = os.fork()
        if first:
            os.close(ending)
            os.waitpid(first, 0)
            return sentence
        # From here on nothing may return into the command line or print.
        try:
            os.setsid()
            if os.fork() == 0:
                _serve(listener, ending, key, directory)
        finally:
            os._exit(0)


def _ending_of(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _serve(listener: socket.socket, ending: int, key: "JobKey", directory: "Path") -> None:
    _let_go(directory, {listener.fileno(), ending})
    from gpuwatch import __version__
    from gpuwatch.commands.session import AGENT_ARGV
    from gpuwatch.wire.collect import Door

    def say(text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"gpuwatch: {text}\n".encode("utf-8", "replace"))

    door = Door(directory, AGENT_ARGV, listener, key, package=__version__, say=say, until=ending)
    signal.signal(signal.SIGTERM, door.stop)
    door.run()


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
        if os.fstat(log).st_size > _LOG_BYTES:
            os.ftruncate(log, 0)
    for at, descriptor in enumerate((null, log, log)):
        os.dup2(descriptor, at)
    os.chdir("/")
