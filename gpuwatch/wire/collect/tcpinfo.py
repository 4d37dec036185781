"""What the kernel knows of a TCP connection that libzmq owns, by its descriptor.

libzmq bounds a message, and the number of messages that wait, but not one message of ever more
parts: that grows for as long as the other side sends. The kernel counts every byte, so the count
is held against what has come out.
"""

import contextlib
import os
import socket
import struct

__all__ = ["cut", "received_bytes"]

# tcp_info of linux/tcp.h: tcpi_bytes_received, since Linux 4.1.
_RECEIVED = struct.Struct("=Q")
_RECEIVED_AT = 128
_INFO_BYTES = _RECEIVED_AT + _RECEIVED.size


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


def cut(descriptor: int, port: int) -> None:
    """End a connection of our port; its owner sees the end and closes it.

    The descriptor may have been closed and given to something else meanwhile. That is looked at on
    a copy, which stays what it is: at worst another connection to the port is cut.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        name = one.getsockname()
        if one.family in (socket.AF_INET, socket.AF_INET6) and name[1] == port:
            one.shutdown(socket.SHUT_RDWR)
