"""Questions about a TCP port that take their time: which address a name has, who listens there.

libzmq says of a connection that failed no more than that it failed, and looks names up in the
thread that carries everything. So both are asked here, in threads of their own.
"""

import contextlib
import errno
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Found", "Scout", "addresses_of", "greeting_of", "is_unknown"]

_THREADS = 8
LOOK_S = 3.0
_GREETING_BYTES = 64
_ADDRESSES = 8
_UNSURE = {socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_MEMORY, socket.EAI_SYSTEM}
# The signature and the version of ZMTP 3.1: what a libzmq waits for before it says its mechanism.
# With one of ours it would close before it had said its own, if they differ.
_OURS = b"\xff" + bytes(8) + b"\x7f\x03\x01"

_Who = TypeVar("_Who")


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a question: addresses, or the error number of a connection, or a greeting.

    `unknown` says that no machine has the name; without it and without addresses nobody knows.
    """

    addresses: tuple[str, ...] = ()
    unknown: bool = False
    number: int = 0
    greeting: bytes = b""


def is_unknown(exc: OSError | UnicodeError) -> bool:
    """Whether getaddrinfo has failed since no machine has the name, and not for the moment."""
    return not isinstance(exc, OSError) or exc.errno not in _UNSURE


def addresses_of(host: str, port: int) -> Found:
    """Return the addresses of a name; it may take as long as the resolver does.

    Those of IPv4 come first: a door listens there unless it was told otherwise.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        return Found(unknown=is_unknown(exc))
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    return Found(addresses=tuple(addresses)[:_ADDRESSES])


def greeting_of(address: str, port: int) -> Found:
    """Return how whoever listens there greets a ZeroMQ peer, or why there is no connection."""
    deadline_s = time.monotonic() + LOOK_S
    try:
        with socket.create_connection((address, port), LOOK_S) as one:
            greeting = b""
            with contextlib.suppress(OSError):
                one.sendall(_OURS)
                while len(greeting) < _GREETING_BYTES:
                    one.settimeout(max(0.01, deadline_s - time.monotonic()))
                    data = one.recv(_GREETING_BYTES - len(greeting))
                    if not data:
                        break
                    greeting += data
            return Found(greeting=greeting)
    except TimeoutError:
        return Found(number=errno.ETIMEDOUT)
    except OSError as exc:
        return Found(number=exc.errno or errno.EHOSTUNREACH)


class Scout(Generic[_Who]):
    """Asks in the background; a hung resolver holds up nobody else, nor the end.

    Args:
        answer: called in a thread of the scout with what was passed to `ask` and what was found.
    """

    def __init__(self, answer: Callable[[_Who, Found], None]) -> None:
        self._answer = answer
        self._questions: queue.SimpleQueue[tuple[_Who, Callable[[], Found]]] = queue.SimpleQueue()
        self._threads = 0

    def ask(self, who: _Who, question: Callable[[], Found]) -> None:
        """Queue a question; returns at once."""
        self._questions.put((who, question))
        if self._threads < _THREADS:
            self._threads += 1
            threading.Thread(target=self._work, name="gpuwatch-scout", daemon=True).start()

    def _work(self) -> None:
        while True:
            who, question = self._questions.get()
            self._answer(who, question())
