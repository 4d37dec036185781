"""The monitor's side: a thread that owns the sockets to the node process.

It starts the node process if there is none, starts it again if it dies, tells it every second
that somebody watches, and hands every frame on as bytes. It decides nothing.
"""

import contextlib
import os
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from gpuwatch.errors import AgentError
from gpuwatch.frames import MAX_FRAME_BYTES, encode, printable
from gpuwatch.schema import WIRE_VERSION, Command
from gpuwatch.wire.collect.discovery import agent_presence
from gpuwatch.wire.collect.wake import Wake
from gpuwatch.wire.publish import Presence

__all__ = ["NodeLink", "ensure_agent"]

_POLL_MS = 50
_DRAIN_S = 0.02  # poll, then let a burst gather: a wake-up costs more than a message
_ATTACH_S = 1.0
_SILENT_S = 1.5
_START_S = 10.0
_RESTART_BACKOFF_S = 1.0
_LOG_BYTES = 4096
_WORDS = 200


def ensure_agent(directory: Path, agent_argv: Sequence[str]) -> tuple[Presence, bool]:
    """Return the node process of the directory and whether this call started it.

    Raises:
        AgentError: it cannot be started.
    """
    presence = agent_presence(directory)
    if presence is not None:
        return presence, False
    try:
        # It forks twice and returns, so that nothing done to this terminal reaches it.
        done = subprocess.run(
            list(agent_argv),
            env={**os.environ, "GPUWATCH_DIR": str(directory)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_START_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise AgentError(f"the node process cannot be started: {exc}") from None
    if done.returncode:
        why = _last_line(done.stderr) or "no reason given"
        raise AgentError(f"the node process cannot be started: {why}")
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        presence = agent_presence(directory)
        if presence is not None:
            return presence, True
        time.sleep(0.02)
    log = directory / "agent.log"
    last = _last_line(_end_of(log))
    raise AgentError(
        f"the node process did not come up: {last} (more in {log})"
        if last
        else f"the node process did not come up, and has said nothing in {log}"
    )


def _end_of(log: Path) -> bytes:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            return file.read(_LOG_BYTES)
    except OSError:
        return b""


def _last_line(said: bytes) -> str:
    """Return the last line that a process of ours has said, empty if there is none."""
    lines = said.decode("utf-8", "replace").strip().splitlines()
    return printable(lines[-1].removeprefix("gpuwatch: "))[:_WORDS] if lines else ""


class NodeLink(threading.Thread):
    """Connects to the node process of one run directory and keeps connected.

    Args:
        directory: the run directory.
        agent_argv: the command that starts a node process and returns.
        on_frame: called in this thread with the bytes of each node frame and the monotonic time
            of its arrival in seconds.
        on_state: called in this thread with (link, message): `live` or `lost`, and a sentence.
    """

    def __init__(
        self,
        directory: Path,
        agent_argv: Sequence[str],
        on_frame: Callable[[bytes, float], None],
        on_state: Callable[[str, str], None],
    ) -> None:
        super().__init__(name="gpuwatch-link", daemon=True)
        self._directory = directory
        self._agent_argv = list(agent_argv)
        self._on_frame = on_frame
        self._on_state = on_state
        self._commands: deque[Command] = deque()
        self._stopping = threading.Event()
        self._wake = Wake()
        self.started_agent = False
        self.agent_pid: int | None = None
        self.asked_id = ""  # of the request for the past; its reply says that all of it is sent

    def send(self, command: Command) -> None:
        """Queue a command for the node process; returns at once."""
        self._commands.append(command)
        self._wake.set()

    def close(self, timeout_s: float = 0.4) -> None:
        """End the thread; waits at most `timeout_s`."""
        self._stopping.set()
        self._wake.set()
        if self.is_alive():
            self.join(timeout_s)

    def run(self) -> None:
        """The thread's body."""
        while not self._stopping.is_set():
            try:
                presence, started = ensure_agent(self._directory, self._agent_argv)
            except AgentError as exc:
                self._on_state("lost", str(exc))
                self._stopping.wait(_RESTART_BACKOFF_S)
                continue
            self.started_agent = self.started_agent or started
            self.agent_pid = presence.pid
            self._stay(presence)
            if not self._stopping.is_set():
                self._on_state("lost", f"the node process {presence.pid} is gone; starting another")

    def _stay(self, presence: Presence) -> None:
        """Serve one node process until it is gone or we are told to stop."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            frames = context.socket(zmq.SUB)
            requests = context.socket(zmq.DEALER)
            for one in (frames, requests):
                one.linger = 0
                one.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            frames.rcvhwm = 10_000
            frames.subscribe(b"")
            frames.connect(presence.telemetry)
            requests.connect(presence.control)
            self._exchange(presence, frames, requests)
            if self._stopping.is_set():
                self._flush(requests)
                self._say(requests, "detach")
                requests.close(linger=100)
        finally:
            context.destroy(linger=100 if self._stopping.is_set() else 0)

    def _exchange(
        self, presence: Presence, frames: zmq.Socket[bytes], requests: zmq.Socket[bytes]
    ) -> None:
        poller = zmq.Poller()
        poller.register(frames, zmq.POLLIN)
        poller.register(requests, zmq.POLLIN)
        poller.register(self._wake.fd, zmq.POLLIN)
        next_attach_s = 0.0
        heard_s = time.monotonic()
        heard = False
        silent = False
        while not self._stopping.is_set():
            now_s = time.monotonic()
            if now_s >= next_attach_s:
                next_attach_s = now_s + _ATTACH_S
                self._say(requests, "attach")
            self._flush(requests)
            ready = dict(poller.poll(_POLL_MS))
            if self._wake.fd in ready:
                self._wake.clear()
            if frames in ready:
                time.sleep(_DRAIN_S)
                heard_s = time.monotonic()
                for data in _drain(frames):
                    self._on_frame(data, heard_s)
                if not heard:
                    # The subscription works from here on: now the past can be asked for.
                    heard = True
                    self.asked_id = self._say(requests, "snapshot")
                    self._on_state("live", "")
                if silent:
                    silent = False
                    self._on_state("live", "")
            elif time.monotonic() - heard_s > _SILENT_S:
                current = agent_presence(self._directory)
                if current is None or current.control != presence.control:
                    return
                if not silent:
                    silent = True
                    self._on_state(
                        "lost", f"the node process {presence.pid} does not answer (is it stopped?)"
                    )
            if requests in ready:
                for _ in _drain(requests):
                    pass

    def _flush(self, requests: zmq.Socket[bytes]) -> None:
        while self._commands:
            with contextlib.suppress(zmq.ZMQError):
                requests.send(encode(self._commands.popleft()), zmq.NOBLOCK)

    def _say(self, requests: zmq.Socket[bytes], verb: str) -> str:
        command = Command(WIRE_VERSION, uuid.uuid4().hex, verb)
        with contextlib.suppress(zmq.ZMQError):
            requests.send(encode(command), zmq.NOBLOCK)
        return command.id


def _drain(source: zmq.Socket[bytes]) -> list[bytes]:
    messages: list[bytes] = []
    while True:
        try:
            parts = source.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:
            return messages
        if len(parts) == 1:
            messages.append(parts[0])
