"""What the kernel knows of a TCP connection that libzmq owns, by its descriptor.

libzmq bounds a message, and the number of messages that wait, but not one message of ever more
parts: that grows for as long as the other side sends. The kernel counts every byte, so the count
is held against what has come out.
"""

import contextlib
import os
import resource
import socket
import struct

__all__ = ["Unread", "cut", "peer_address", "received_bytes", "resident_bytes"]

# tcp_info of linux/tcp.h: tcpi_bytes_received, since Linux 4.1.
_RECEIVED = struct.Struct("=Q")
_RECEIVED_AT = 128
_INFO_BYTES = _RECEIVED_AT + _RECEIVED.size

_PART_BYTES = 35
"""What a message of CURVE (ZeroMQ RFC 26) and its ZMTP 3 frame add to each part, at the least: 2 of
the frame, 8 of the command's name, 8 of the nonce, 16 of the box and 1 of flags."""
_REST_BYTES_A_S = 512
"""For all else: 7 bytes more of a long part, a heartbeat now and then."""


class Unread:
    """How much of what has come over a connection is no whole message yet, as a bound.

    What comes out is less than what has come in, by what the protocol adds: on a connection of days
    that is more than the largest message. So it is counted, and what remains of it is excused by
    time; never more than is missing, so that nothing can be saved up.
    """

    def __init__(self, now_s: float) -> None:
        self._seen_s = now_s
        self._taken_bytes = 0
        self._excused_bytes = 0.0

    def take(self, parts: int, size_bytes: int) -> None:
        """Count a message that has come out."""
        self._taken_bytes += size_bytes + parts * _PART_BYTES

    def count(self, received_bytes: int, now_s: float) -> float:
        """Return the bytes that wait, given how many have come in."""
        missing = max(0, received_bytes - self._taken_bytes)
        excused = self._excused_bytes + _REST_BYTES_A_S * (now_s - self._seen_s)
        self._seen_s = now_s
        self._excused_bytes = min(missing, excused)
        return missing - self._excused_bytes


def received_bytes(descriptor: int) -> int | None:
    """Return how many bytes a connection has received; None if it is none, or not known."""
    try:
        one = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
    except OSError:
        return None
    try:
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return None
    finally:
        one.detach()  # it is not ours
    if len(info) < _INFO_BYTES:
        return None
    (count,) = _RECEIVED.unpack_from(info, _RECEIVED_AT)
    return int(count)


def peer_address(descriptor: int) -> str:
    """Return the address at the other end of a connection, without its port; empty if unknown."""
    try:
        one = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
    except OSError:
        return ""
    try:
        name = one.getpeername()
    except OSError:
        return ""
    finally:
        one.detach()  # it is not ours
    return str(name[0]) if isinstance(name, tuple) else ""


def resident_bytes() -> int:
    """Return how much memory this process holds; 0 where it is not known."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def cut(descriptor: int, port: int) -> None:
    """End a connection of our port; its owner sees the end and closes it.

    The descriptor may have been closed and given to something else meanwhile. That is looked at on
    a copy, which stays what it is: at worst another connection to the port is cut.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        name = one.getsockname()
        if one.family in (socket.AF_INET, socket.AF_INET6) and name[1] == port:
            one.shutdown(socket.SHUT_RDWR)
