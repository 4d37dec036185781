"""The two sockets of one rank: PUB for telemetry, ROUTER for requests.

One thread creates, uses and closes them. The rank binds, everyone else connects: no ports, no
order of start, and a monitor that hangs or vanishes costs the rank nothing (a full queue drops,
and the sequence numbers tell).
"""

import contextlib
import os
import time
import uuid
from collections import OrderedDict, deque
from pathlib import Path

import msgspec
import zmq

from gpuwatch.wire.publish.rundir import (
    Presence,
    boot_id,
    process_start_ticks,
    socket_path,
    write_atomic,
)

__all__ = ["RankSockets"]

_SEND_QUEUE_FRAMES = 1000  # at 10 frames a second: over a minute of a stopped subscriber
_REQUEST_BYTES = 65536
_REQUESTS_A_CALL = 8
_READ_A_CALL = 512
_WAITING_OF_ONE = 16
_WAITING_PEERS = 16
_REST = 9.0
"""Times as long as requests took, none are answered: a flood of them would have the GIL, and the
training thread none of it: one peer that asked on and on made 24 of 185 steps a second."""


class RankSockets:
    """Telemetry and control sockets of one rank, announced in the run directory.

    Raises:
        OSError, zmq.ZMQError: the sockets cannot be made there.
    """

    def __init__(self, directory: Path, *, version: int, run: str, rank: int, incarnation: str):
        pid = os.getpid()
        name = f"rank-{pid}-{uuid.uuid4().hex[:8]}"
        self._pid = pid
        self._presence_path = directory / f"{name}.json"
        self._files = [directory / f"{name}.t", directory / f"{name}.c", self._presence_path]
        self._context = zmq.Context(io_threads=1)
        try:
            self._telemetry = self._context.socket(zmq.PUB)
            self._telemetry.linger = 0
            self._telemetry.sndhwm = _SEND_QUEUE_FRAMES
            self._telemetry.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES)
            self._telemetry.bind(socket_path(directory, f"{name}.t"))
            self._control = self._context.socket(zmq.ROUTER)
            self._control.linger = 0
            self._control.sndhwm = 16
            self._control.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES)
            self._control.bind(socket_path(directory, f"{name}.c"))
            self._presence = msgspec.json.encode(
                Presence(
                    version=version,
                    role="rank",
                    pid=pid,
                    started_ticks=process_start_ticks(pid) or 0,
                    boot=boot_id(),
                    telemetry=socket_path(directory, f"{name}.t"),
                    control=socket_path(directory, f"{name}.c"),
                    run=run,
                    rank=rank,
                    incarnation=incarnation,
                )
            )
            write_atomic(self._presence_path, self._presence)
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._control, zmq.POLLIN)
        self._resting = zmq.Poller()
        self._waiting: OrderedDict[bytes, deque[bytes]] = OrderedDict()
        self._busy_since_s: float | None = None
        self._rest_until_s = 0.0

    @property
    def announced(self) -> bool:
        """Whether the discovery file is still there (cleaners of /tmp remove old files)."""
        return self._presence_path.exists()

    def wake_on(self, fd: int) -> None:
        """Let `wait` return when the file descriptor becomes readable."""
        self._poller.register(fd, zmq.POLLIN)
        self._resting.register(fd, zmq.POLLIN)

    def publish(self, frame: bytes) -> None:
        """Send one frame to whoever listens; never blocks, may drop."""
        with contextlib.suppress(zmq.Again):
            self._telemetry.send(frame, zmq.NOBLOCK)

    def wait(self, timeout_ms: int) -> list[tuple[bytes, bytes]]:
        """Wait for requests and return at most 8 of them, as (identity, payload).

        What passes from there to the next call counts as spent on them, and nine times as long
        none are returned. Peers take turns; of what one of them asks meanwhile 16 requests wait,
        and the rest is dropped: it is read all the same, since a peer that has gone costs memory
        until its last message is.
        """
        now_s = time.monotonic()
        if self._busy_since_s is not None:
            self._rest_until_s = now_s + _REST * (now_s - self._busy_since_s)
            self._busy_since_s = None
        if now_s < self._rest_until_s:
            rest_ms = int((self._rest_until_s - now_s) * 1000) + 1
            self._resting.poll(min(timeout_ms, rest_ms))
            self._read()
            return []
        if not self._waiting:
            self._poller.poll(timeout_ms)
        now_s = time.monotonic()
        if self._read():
            self._busy_since_s = now_s
        requests: list[tuple[bytes, bytes]] = []
        while self._waiting and len(requests) < _REQUESTS_A_CALL:
            self._busy_since_s = now_s
            who, payloads = self._waiting.popitem(last=False)
            requests.append((who, payloads.popleft()))
            if payloads:
                self._waiting[who] = payloads
        return requests

    def _read(self) -> bool:
        """Take what has come, and keep what may wait; returns whether there was anything."""
        for count in range(_READ_A_CALL):
            try:
                parts = self._control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return count > 0
            if len(parts) != 2:
                continue
            payloads = self._waiting.get(parts[0])
            if payloads is not None:
                if len(payloads) < _WAITING_OF_ONE:
                    payloads.append(parts[1])
            elif len(self._waiting) < _WAITING_PEERS:
                self._waiting[parts[0]] = deque((parts[1],))
        return True

    def reply(self, identity: bytes, frame: bytes) -> None:
        """Answer one request; an asker that has gone or does not read is forgotten."""
        with contextlib.suppress(zmq.ZMQError):
            self._control.send_multipart([identity, frame], zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets and remove the files; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        # destroy() closes what is open first: term() alone hangs for ever on an open socket.
        self._context.destroy(linger=0)
        for file in self._files:
            with contextlib.suppress(OSError):
                file.unlink()
