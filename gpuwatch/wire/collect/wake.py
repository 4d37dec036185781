"""Wakes a thread that waits for descriptors."""

import contextlib
import os

__all__ = ["Wake"]


class Wake:
    """A descriptor that becomes readable when any thread, or a signal handler, says so.

    `fd` is what the waiting thread polls beside its own descriptors.
    """

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        for fd in (self.fd, self._write_fd):
            os.set_blocking(fd, False)

    def set(self) -> None:
        """Make it readable; returns at once. Nothing where it is already."""
        with contextlib.suppress(OSError):
            os.write(self._write_fd, b"x")

    def clear(self) -> None:
        """Make it unreadable again; in the waiting thread, before it looks at what there is."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)
