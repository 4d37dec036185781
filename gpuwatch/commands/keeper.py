"""The keeper: runs a command in a terminal of its own and writes all that it prints to a file.

It is forked off twice, in a session of its own, so that it is no child of the monitor's: whatever
becomes of the screen, the command goes on and its output goes on into the file. The command never
waits for a reader, only for the disk; what a full disk does not take is counted and said.

To the monitor the keeper says two things, a JSON object a line on a pipe: that the command runs
(`pid`), and what it ended with (`exit`, as a shell counts: 128 + the number of a signal).
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import termios
from collections.abc import Callable
from pathlib import Path

from gpuwatch.commands.lookout import flush_output

__all__ = ["descendants", "start_keeper"]

_READ_BYTES = 65536
_LOOK_MS = 200
"""Where no descriptor tells of the command's end, it is looked for so often."""

_OURS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTERM)
"""Meant for the screen or the command; the keeper ends with the command."""


def start_keeper(become: Callable[[], int], log: Path, columns: int, lines: int) -> int:
    """Fork the keeper of a command and return the descriptor on which it speaks.

    `become` turns the process that it is called in into the command, or returns an exit code.
    The command has a terminal of that size for its output, none for its input, a session of its
    own, and the working directory of the caller. `log` is appended to.

    Raises:
        OSError: the file cannot be opened, or there is no more terminal or process to be had.
    """
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    told, telling = os.pipe()
    try:
        main, terminal = os.openpty()
    except OSError:
        for descriptor in (file, told, telling):
            os.close(descriptor)
        raise
    _prepare(terminal, columns, lines)
    flush_output()
    first = os.fork()
    if first:
        for descriptor in (file, telling, main, terminal):
            os.close(descriptor)
        os.waitpid(first, 0)
        return told
    # From here on nothing may return into the command line.
    try:
        os.close(told)
        os.setsid()
        if os.fork() == 0:
            _keep(become, file, telling, main, terminal)
    finally:
        os._exit(0)


def _prepare(terminal: int, columns: int, lines: int) -> None:
    """Let the terminal pass on what is printed as it is."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    settings = termios.tcgetattr(terminal)
    settings[1] &= ~termios.OPOST
    settings[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
    termios.tcsetattr(terminal, termios.TCSANOW, settings)


def _keep(become: Callable[[], int], file: int, telling: int, main: int, terminal: int) -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # One that comes before the command has begun ends it as one after that would.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = os.fork()
    if command == 0:
        code = 1
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDONLY)
            for descriptor, number in ((null, 0), (terminal, 1), (terminal, 2)):
                os.dup2(descriptor, number)
            # Whoever is forked from here before the command is, is not to hold these.
            for descriptor in (file, telling, main, terminal, null):
                os.close(descriptor)
            code = become()
        finally:
            os._exit(code)
    for number in _OURS:
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    _close_others({0, 1, 2, file, telling, main})
    os.chdir("/")
    _Keeper(command, file, telling, main).stay()


def _close_others(kept: set[int]) -> None:
    """Close what came with the fork: readers of a pipe wait until the last writer has closed it."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))


class _Keeper:
    """Reads what the command `command` (a pid) prints until the last one that prints is gone."""

    def __init__(self, command: int, file: int, telling: int, main: int) -> None:
        self._command = command
        self._file = file
        self._telling = telling
        self._main = main
        self._lost_bytes = 0
        self._running = True

    def stay(self) -> None:
        self._tell(pid=self._command)
        os.set_blocking(self._main, False)
        poll = select.poll()
        poll.register(self._main, select.POLLIN)
        timeout_ms: int | None = None
        try:
            ending = os.pidfd_open(self._command)
            poll.register(ending, select.POLLIN)
        except (OSError, AttributeError):
            ending, timeout_ms = -1, _LOOK_MS
        open_still = True
        while open_still or self._running:
            poll.poll(timeout_ms)
            if open_still and not self._read():
                # A descriptor that has hung up is always ready: nobody looks at it again.
                poll.unregister(self._main)
                open_still = False
            if self._running and (code := self._ended()) is not None:
                self._running = False
                if ending >= 0:
                    poll.unregister(ending)
                timeout_ms = None
                open_still = open_still and self._read()  # its last words before its end
                self._tell(exit=code)

    def _ended(self) -> int | None:
        pid, status = os.waitpid(self._command, os.WNOHANG)
        if not pid:
            return None
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _read(self) -> bool:
        """Write down what there is; False when nobody is left who could print."""
        while True:
            try:
                data = os.read(self._main, _READ_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False  # EIO: the other end is closed
            if not data:
                return False
            self._write(data)

    def _write(self, data: bytes) -> None:
        """Append to the file. What does not go in is left out: the command must not wait."""
        if self._lost_bytes:
            data = b"\n[gpuwatch: %d bytes could not be written]\n%b" % (self._lost_bytes, data)
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            self._lost_bytes += len(data)
        else:
            self._lost_bytes = 0

    def _tell(self, **words: int) -> None:
        with contextlib.suppress(OSError):  # the monitor has gone
            os.write(self._telling, json.dumps(words).encode() + b"\n")


def descendants(pid: int) -> list[int]:
    """Return a process and all that it has started and that are still its, itself first."""
    found: list[int] = []
    parents = [pid]
    while parents:
        parent = parents.pop()
        if parent in found:
            continue
        found.append(parent)
        with contextlib.suppress(OSError, ValueError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children", "rb") as file:
                    parents += [int(word) for word in file.read().split()]
    return found
