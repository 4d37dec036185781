"""Where a door listens: what an address means, and the socket on it."""

import contextlib
import errno
import re
import socket
import threading
import time
from dataclasses import dataclass

from gpuwatch.errors import TargetError
from gpuwatch.frames import printable
from gpuwatch.wire.collect.scout import is_unknown

__all__ = ["Address", "ListenError", "listen", "parse_address"]

_BACKLOG = 128
_AGAIN_S = 0.05
_ADDRESS = re.compile(
    r"(?:tcp://)?(?P<host>\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9_.-]{1,15})?\]"
    r"|[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}|\*|):(?P<port>[0-9]{1,5})/?"
)


class ListenError(TargetError):
    """An address that cannot be listened on."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host, empty for every IPv4 address of this machine, and a port, 0 for any that is free."""

    host: str
    port: int

    @property
    def text(self) -> str:
        """As a person writes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return what `host:port`, `tcp://host:port` or `:port` means.

    Raises:
        ListenError: it is none of these.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise ListenError(
            f"{printable(text)!r} is no address to listen on; write :5555, host:5555 or "
            "[address]:5555 (port 0 is any that is free)"
        )
    return Address(found["host"].strip("[]").replace("*", ""), int(found["port"]))


def listen(
    address: Address, *, patience_s: float = 0.0, lookup_s: float | None = None
) -> socket.socket:
    """Return a socket that listens there; a port that is taken is waited for `patience_s`.

    The name of a machine is looked up for at most `lookup_s`, without it for as long as the
    resolver takes.

    Raises:
        ListenError: the port is taken, or the address is not one of this machine.
    """
    shown = address.text
    try:
        family, name = _looked_up(address, lookup_s)
    except (OSError, UnicodeError) as exc:
        why = f"no machine is called {address.host}"
        if not is_unknown(exc):
            why = f"{address.host} is looked up in vain; is the name server up?"
        raise ListenError(f"cannot listen on {shown}: {why}") from None
    deadline_s = time.monotonic() + patience_s
    while True:
        made: socket.socket | None = None
        try:
            made = socket.socket(family, socket.SOCK_STREAM)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(name)
            made.listen(_BACKLOG)
            made.setblocking(False)
        except OSError as exc:
            if made is not None:
                made.close()
            if exc.errno != errno.EADDRINUSE or time.monotonic() >= deadline_s:
                raise ListenError(f"cannot listen on {shown}: {_why(exc, address)}") from None
            time.sleep(_AGAIN_S)
        else:
            return made


_Name = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]


def _looked_up(address: Address, lookup_s: float | None) -> _Name:
    """Return the family and the name of a socket for an address.

    Raises:
        OSError, UnicodeError: the resolver's, or its word for "not now" when the time is up.
    """
    found: list[_Name | OSError | UnicodeError] = []

    def look() -> None:
        try:
            (family, _, _, _, name), *_ = socket.getaddrinfo(
                address.host or "0.0.0.0", address.port, type=socket.SOCK_STREAM
            )
            found.append((family, name))
        except (OSError, UnicodeError) as exc:
            found.append(exc)

    if lookup_s is None or not address.host:
        look()
    else:
        looking = threading.Thread(target=look, name="gpuwatch-lookup", daemon=True)
        with contextlib.suppress(RuntimeError):  # there can be no more threads
            looking.start()
            looking.join(lookup_s)
    answer = found[0] if found else socket.gaierror(socket.EAI_AGAIN, "not in time")
    if isinstance(answer, Exception):
        raise answer
    return answer


def _why(exc: OSError, address: Address) -> str:
    if exc.errno == errno.EADDRINUSE:
        return "the port is taken; name another one, or port 0 for any that is free"
    if exc.errno == errno.EADDRNOTAVAIL:
        return f"{address.host} is no address of this machine; :{address.port} is all of them"
    if exc.errno == errno.EACCES:
        return "a port below 1024 is the system's; name a higher one"
    return str(exc.strerror)
