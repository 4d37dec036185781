"""The descriptor that wakes a waiting thread."""

import os
import select

from gpuwatch.wire.collect.wake import Wake


def test_it_is_readable_from_set_to_clear_however_often_it_is_set() -> None:
    wake = Wake()
    try:
        assert select.select([wake.fd], [], [], 0)[0] == []
        wake.clear()  # nothing to clear: it does not wait
        for _ in range(100_000):  # more than a pipe holds: it does not wait either
            wake.set()
        assert select.select([wake.fd], [], [], 0)[0] == [wake.fd]
        for _ in range(100):
            wake.clear()
        assert select.select([wake.fd], [], [], 0)[0] == []
        wake.set()
        assert select.select([wake.fd], [], [], 0)[0] == [wake.fd]
    finally:
        os.close(wake.fd)
        os.close(wake._write_fd)
