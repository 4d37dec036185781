"""The node process: one per user and node, between the ranks and every monitor.

It subscribes to the ranks of this node, keeps the past of those that cannot answer any more,
relays one frame an interval, passes commands on, and supervises the sampler. A monitor talks to
node processes only, so one box and many are the same. It ends when it has had no run and no
monitor for a minute.
"""

import contextlib
import fcntl
import os
import signal
import socket
import time
import uuid
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from gpuwatch.errors import FrameError, GpuwatchError
from gpuwatch.frames import MAX_FRAME_BYTES, decode_command, decode_rank_frame, encode
from gpuwatch.schema import (
    WIRE_VERSION,
    Bye,
    Command,
    Hello,
    Logged,
    NodeFrame,
    RankAge,
    RankFrame,
    Reply,
    Span,
    StepRecord,
)
from gpuwatch.wire.collect.discovery import AGENT_FILE, RankFiles, is_alive
from gpuwatch.wire.collect.sampler_child import SamplerChild
from gpuwatch.wire.publish import Presence, process_start_ticks, socket_path, write_atomic
from gpuwatch.wire.publish.rundir import boot_id

__all__ = ["Agent", "AgentRunningError"]

INTERVAL_S = 0.1
IDLE_S = 60.0
MONITOR_TTL_S = 5.0
_SCAN_S = 1.0  # at the latest: a change of the directory is seen at the next frame
_PID_CHECK_S = 0.5
_QUIET_S = 0.5  # five missed flushes: worth a word about the process
_KEPT_RECORDS = 600
_KEPT_COMMANDS = 64
_KEPT_ENDED = 256  # ranks; what ended longest ago is forgotten first
_ASK_AGAIN_S = 1.0
_TALKS_S = 3.0
_REQUEST_BYTES = 65536  # a command, or a subscription: nothing longer comes from a monitor
_REPLIES_A_FRAME = 64  # more of them make a frame that nobody can read
_KEPT_REPLIES = 1024
_FRAMES_A_CALL = 1024
_OUTGOING_BYTES = MAX_FRAME_BYTES // 2


class AgentRunningError(GpuwatchError):
    """Another node process of this user holds the lock."""


class _Rank:
    """What the agent knows of one rank."""

    def __init__(self, presence: Presence, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.presence = presence
        self.requests: zmq.Socket[bytes] | None = context.socket(zmq.DEALER)
        self.requests.linger = 0
        self.requests.sndhwm = 64
        self.requests.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.requests.connect(presence.control)
        self.heard_s = time.monotonic()
        self.last: RankFrame | None = None
        self.hello: Hello | None = None
        self.records: deque[StepRecord] = deque(maxlen=_KEPT_RECORDS)
        self.spans: deque[Span] = deque(maxlen=64)
        self.commands: deque[Logged] = deque(maxlen=_KEPT_COMMANDS)
        self.bye: Bye | None = None
        self.alive: bool | None = True
        self.process_state = ""
        self.gone_reason = ""
        self.asked_s = 0.0
        self.relayed_s = 0.0
        self.answered = False

    def take(self, frame: RankFrame) -> None:
        self.heard_s = time.monotonic()
        if frame.hello is not None:
            self.hello = frame.hello
        if frame.snapshot:
            self.answered = True
            have = {r.index for r in self.records}
            merged = sorted(
                [*self.records, *(r for r in frame.records if r.index not in have)],
                key=lambda r: r.index,
            )
            self.records = deque(merged, maxlen=_KEPT_RECORDS)
            self.commands = deque(frame.commands, maxlen=_KEPT_COMMANDS)
        else:
            self.records.extend(frame.records)
            self.spans.extend(frame.spans)
            self.commands.extend(frame.commands)
        if frame.bye is not None:
            self.bye = frame.bye
        if self.last is None or frame.seq >= self.last.seq:
            self.last = frame

    def remembered(self) -> bytes | None:
        """Return a snapshot in the name of a rank that cannot answer any more."""
        last = self.last
        if last is None:
            return None
        return encode(
            msgspec.structs.replace(
                last,
                records=tuple(self.records),
                spans=tuple(self.spans),
                hello=self.hello,
                replies=(),
                bye=self.bye,
                snapshot=True,
                commands=tuple(self.commands),
            )
        )

    @property
    def gone(self) -> bool:
        return self.bye is not None or self.alive is False

    def close(self) -> None:
        if self.requests is not None:
            self.requests.close(linger=0)
            self.requests = None


class Agent:
    """The node process. `run` returns when it has been idle, or was told to end.

    Args:
        directory: the run directory.
        sampler_argv: the sampler's command; empty for none.
        idle_s: how long to stay without run and monitor.

    Raises:
        AgentRunningError: another one holds the lock of this directory.
    """

    def __init__(
        self, directory: Path, *, sampler_argv: Sequence[str] = (), idle_s: float = IDLE_S
    ) -> None:
        self._directory = directory
        self._lock_fd = _take_lock(directory / "agent.lock")
        self._idle_s = idle_s
        self._node = socket.gethostname()[:256]
        self._incarnation = uuid.uuid4().hex[:12]
        self._seq = 0
        self._stop = False
        self._files = RankFiles(directory)
        self._ranks: dict[str, _Rank] = {}  # by control address: unique to a process
        self._by_incarnation: dict[str, _Rank] = {}
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._replies: list[Reply] = []
        self._monitors: dict[bytes, float] = {}
        self._refused = 0
        self._adopted_s = 0.0
        self._other_version = ""
        self._sampler = SamplerChild(sampler_argv) if sampler_argv else None
        self._sampler_fd: int | None = None
        self._sensors: bytes | None = None
        self._new_sensors = False
        for left_over in directory.glob("agent-*.[tc]"):
            # We hold the lock: whoever made these is dead.
            with contextlib.suppress(OSError):
                left_over.unlink()
        name = f"agent-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._own_files = [directory / f"{name}.t", directory / f"{name}.c"]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, 65535)
        self._telemetry = self._socket(zmq.PUB, _REQUEST_BYTES)
        self._telemetry.bind(socket_path(directory, self._own_files[0].name))
        self._control = self._socket(zmq.ROUTER, _REQUEST_BYTES)
        self._control.bind(socket_path(directory, self._own_files[1].name))
        self._subscription = self._socket(zmq.SUB)
        self._subscription.rcvhwm = 10_000
        self._subscription.subscribe(b"")
        self._poller = zmq.Poller()
        self._poller.register(self._control, zmq.POLLIN)
        self._poller.register(self._subscription, zmq.POLLIN)
        self._announce()

    def _socket(self, kind: int, most_bytes: int = MAX_FRAME_BYTES) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.linger = 0
        made.sndhwm = 1000
        made.setsockopt(zmq.MAXMSGSIZE, most_bytes)
        return made

    def _announce(self) -> None:
        presence = Presence(
            version=WIRE_VERSION,
            role="agent",
            pid=os.getpid(),
            started_ticks=process_start_ticks(os.getpid()) or 0,
            boot=boot_id(),
            telemetry=socket_path(self._directory, self._own_files[0].name),
            control=socket_path(self._directory, self._own_files[1].name),
            incarnation=self._incarnation,
        )
        write_atomic(self._directory / AGENT_FILE, msgspec.json.encode(presence))

    # --- the loop ------------------------------------------------------------------------------

    def stop(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        """End the loop; usable as a signal handler."""
        self._stop = True

    def run(self) -> None:
        """Relay until idle or stopped, then clean up."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)
        try:
            self._loop()
        finally:
            self._close()

    def _loop(self) -> None:
        now_s = time.monotonic()
        next_frame_s = now_s
        next_scan_s = next_pids_s = now_s
        busy_s = now_s
        while not self._stop:
            now_s = time.monotonic()
            if now_s >= next_scan_s or self._files.changed():
                next_scan_s = now_s + _SCAN_S
                self._scan()
                if not (self._directory / AGENT_FILE).exists():
                    with contextlib.suppress(OSError):  # a full disk: at the next look
                        self._announce()  # cleaners of /tmp remove old files
            if now_s >= next_pids_s:
                next_pids_s = now_s + _PID_CHECK_S
                self._check_processes()
                self._tick_sampler()
            if now_s >= next_frame_s:
                next_frame_s = max(next_frame_s + INTERVAL_S, now_s + INTERVAL_S / 2)
                self._publish()
            self._monitors = {
                who: seen_s
                for who, seen_s in self._monitors.items()
                if now_s - seen_s < MONITOR_TTL_S
            }
            if self._monitors or any(not rank.gone for rank in self._ranks.values()):
                busy_s = now_s
            elif now_s - busy_s > self._idle_s:
                return
            timeout_ms = max(0, int((next_frame_s - time.monotonic()) * 1000) + 1)
            ready = dict(self._poller.poll(timeout_ms))
            if self._subscription in ready:
                self._receive(self._subscription)
            if self._control in ready:
                self._requests()
            for rank in list(self._ranks.values()):
                if rank.requests is not None and rank.requests in ready:
                    self._receive(rank.requests)
            if self._sampler_fd is not None and self._sampler_fd in ready:
                self._read_sampler()

    # --- ranks ---------------------------------------------------------------------------------

    def _scan(self) -> None:
        new, gone = self._files.scan()
        for presence in new:
            other = self._impostor(presence)
            if other is not None:
                self._refuse(
                    f"process {presence.pid} calls itself rank {presence.rank} of "
                    f"{presence.run[:64]}, which process {other.pid} is"
                )
                self._files.put_back(presence)
                continue
            try:
                rank = _Rank(presence, self._context)
                self._subscription.connect(presence.telemetry)
            except zmq.ZMQError as exc:
                self._refused += 1
                self._other_version = f"a discovery file names a socket that cannot be used ({exc})"
                continue
            self._succeed(rank)
            self._ranks[presence.control] = rank
            self._by_incarnation[presence.incarnation] = rank
            self._poller.register(rank.requests, zmq.POLLIN)
        for presence in gone:
            # The rank took its files away: it has said goodbye, or is about to.
            self._let_go(presence)
        if new or gone:
            self._watch_processes()

    def _impostor(self, presence: Presence) -> Presence | None:
        """Return the process that is this rank, if it lives, talks, and is another one."""
        now_s = time.monotonic()
        for rank in self._ranks.values():
            known = rank.presence
            same = known.incarnation == presence.incarnation or (known.run, known.rank) == (
                presence.run,
                presence.rank,
            )
            talks = not rank.gone and now_s - rank.heard_s < _TALKS_S
            if same and known.pid != presence.pid and talks and is_alive(known):
                return known
        return None

    def _succeed(self, rank: _Rank) -> None:
        """A rank that announces itself again (its files were removed) goes on where it was."""
        former = self._by_incarnation.get(rank.presence.incarnation)
        if former is None:
            return
        rank.last, rank.hello = former.last, former.hello
        rank.records, rank.spans = former.records, former.spans
        rank.commands = former.commands
        if former.requests is not None:
            self._poller.unregister(former.requests)
            former.close()
            with contextlib.suppress(zmq.ZMQError):
                self._subscription.disconnect(former.presence.telemetry)
        self._ranks.pop(former.presence.control, None)

    def _let_go(self, presence: Presence) -> None:
        rank = self._ranks.get(presence.control)
        if rank is None or rank.requests is None:
            return
        self._receive(rank.requests)
        self._receive(self._subscription)
        self._poller.unregister(rank.requests)
        rank.close()
        with contextlib.suppress(zmq.ZMQError):
            self._subscription.disconnect(presence.telemetry)
        # To the end of the order: what ended longest ago is forgotten first.
        self._ranks[presence.control] = self._ranks.pop(presence.control)
        if rank.bye is not None and rank.bye.reason == "moved":
            del self._ranks[presence.control]
        ended = [r for r in self._ranks.values() if r.requests is None]
        for old in ended[: max(0, len(ended) - _KEPT_ENDED)]:
            del self._ranks[old.presence.control]
            self._by_incarnation.pop(old.presence.incarnation, None)

    def _put(self, frame: bytes) -> None:
        """Queue a rank's frame for the next frame of the node; one too many is lost, and counted
        by its number.
        """
        if self._outgoing_bytes + len(frame) > _OUTGOING_BYTES:
            self._refuse("the ranks send more than a frame holds")
            return
        self._outgoing.append(frame)
        self._outgoing_bytes += len(frame)

    def _refuse(self, why: str) -> None:
        self._refused += 1
        self._other_version = why

    def _receive(self, source: zmq.Socket[bytes]) -> None:
        for _ in range(_FRAMES_A_CALL):
            try:
                parts = source.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            if len(parts) != 1:
                self._refused += 1
                continue
            try:
                frame = decode_rank_frame(parts[0])
            except FrameError as exc:
                self._refused += 1
                self._other_version = str(exc)
                continue
            rank = self._by_incarnation.get(frame.incarnation)
            if rank is None:
                rank = self._adopt(frame)
            if rank is None or (frame.run, frame.rank) != (rank.presence.run, rank.presence.rank):
                self._refuse("a rank that has not announced itself")
                continue
            rank.take(frame)
            if frame.hello is not None:
                self._watch_processes()  # it may say where its data lies
            self._put(parts[0])
            if not rank.answered and not frame.snapshot:
                self._ask_for_past(rank)

    def _adopt(self, frame: RankFrame) -> _Rank | None:
        """A frame of an incarnation that the last scan has not seen yet: look again."""
        now_s = time.monotonic()
        if now_s - self._adopted_s >= INTERVAL_S:
            self._adopted_s = now_s
            self._scan()
        return self._by_incarnation.get(frame.incarnation)

    def _ask_for_past(self, rank: _Rank) -> None:
        # Asked when the first published frame is there: the subscription is known to work, so
        # nothing can fall between it and the snapshot.
        now_s = time.monotonic()
        if now_s - rank.asked_s < _ASK_AGAIN_S:
            return
        rank.asked_s = now_s
        self._send(rank, Command(WIRE_VERSION, uuid.uuid4().hex, "snapshot"))

    def _send(self, rank: _Rank, command: Command) -> bool:
        if rank.requests is None:
            return False
        try:
            rank.requests.send(encode(command), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _check_processes(self) -> None:
        now_s = time.monotonic()
        changed = False
        for rank in list(self._ranks.values()):
            if rank.gone or now_s - rank.heard_s < _QUIET_S:
                continue
            rank.alive = is_alive(rank.presence)
            rank.process_state = _process_state(rank.presence.pid) if rank.alive else ""
            if not rank.alive:
                rank.gone_reason = (
                    f"process {rank.presence.pid} ended without a goodbye (killed or crashed)"
                )
                self._files.forget(rank.presence)
                self._let_go(rank.presence)
                changed = True
        if changed:
            self._watch_processes()

    # --- sensors -------------------------------------------------------------------------------

    def _watch_processes(self) -> None:
        if self._sampler is not None:
            live = [r for r in self._ranks.values() if not r.gone]
            paths = [r.hello.dataset_path for r in live if r.hello is not None]
            self._sampler.watch([r.presence.pid for r in live], paths)

    def _tick_sampler(self) -> None:
        if self._sampler is None:
            return
        self._sampler.tick()
        if self._sampler.fd != self._sampler_fd:
            if self._sampler_fd is not None:
                self._poller.unregister(self._sampler_fd)
            self._sampler_fd = self._sampler.fd
            if self._sampler_fd is not None:
                self._poller.register(self._sampler_fd, zmq.POLLIN)

    def _read_sampler(self) -> None:
        assert self._sampler is not None
        frame = self._sampler.read()
        if frame is not None:
            self._sensors = frame
            self._new_sensors = True
        self._tick_sampler()

    # --- monitors ------------------------------------------------------------------------------

    def _publish(self) -> None:
        now_s = time.monotonic()
        ages = tuple(
            RankAge(
                run=rank.last.run,
                rank=rank.last.rank,
                incarnation=rank.last.incarnation,
                age_s=now_s - rank.heard_s,
                pid_alive=rank.alive,
                process_state=rank.process_state,
                gone_reason=rank.gone_reason,
            )
            for rank in self._ranks.values()
            if rank.last is not None and rank.bye is None and now_s - rank.heard_s > _QUIET_S
        )
        notices = []
        if self._files.unreadable:
            notices.append(
                f"{self._files.unreadable} unreadable discovery files in {self._directory}"
            )
        if self._refused:
            notices.append(f"{self._refused} frames refused; the last: {self._other_version}")
        self._seq += 1
        frame = NodeFrame(
            version=WIRE_VERSION,
            node=self._node,
            incarnation=self._incarnation,
            seq=self._seq,
            sent_s=time.time(),
            frames=tuple(msgspec.Raw(data) for data in self._outgoing),
            ages=ages,
            sensors=msgspec.Raw(self._sensors) if self._new_sensors and self._sensors else None,
            sensors_reason=self._sensors_reason(),
            agent_pid=os.getpid(),
            notices=tuple(notices),
            replies=tuple(self._replies[:_REPLIES_A_FRAME]),
        )
        self._outgoing.clear()
        self._outgoing_bytes = 0
        del self._replies[:_REPLIES_A_FRAME]
        del self._replies[_KEPT_REPLIES:]
        self._new_sensors = False
        with contextlib.suppress(zmq.Again):
            self._telemetry.send(encode(frame), zmq.NOBLOCK)

    def _sensors_reason(self) -> str:
        return "no sampler was started" if self._sampler is None else self._sampler.reason

    def _requests(self) -> None:
        for _ in range(256):
            try:
                parts = self._control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) != 2:
                self._refused += 1
                continue
            try:
                command = decode_command(parts[1])
            except FrameError as exc:
                self._refused += 1
                self._other_version = str(exc)
                continue
            self._obey(parts[0], command)

    def _obey(self, who: bytes, command: Command) -> None:
        if command.verb == "attach":
            self._monitors[who] = time.monotonic()
        elif command.verb == "detach":
            self._monitors.pop(who, None)
        elif command.verb == "retire":
            self._monitors.pop(who, None)
            if not self._monitors and all(rank.gone for rank in self._ranks.values()):
                self._stop = True
        elif command.verb == "snapshot":
            self._relay_past(command)
        else:
            # To all of them: `any` alone would stop at the first one that takes it.
            sent = [self._send(rank, command) for rank in self._targets(command)]
            if not any(sent):
                self._replies.append(Reply(command.id, "error", "no such run or rank lives here"))

    def _targets(self, command: Command) -> list[_Rank]:
        return [
            rank
            for rank in self._ranks.values()
            if rank.last is not None
            and command.run in ("", rank.last.run)
            and command.rank in (None, rank.last.rank)
        ]

    def _relay_past(self, command: Command) -> None:
        """Ask the ranks for their past; answer for those that cannot."""
        now_s = time.monotonic()
        for rank in self._targets(command):
            silent = rank.gone or now_s - rank.heard_s > _QUIET_S
            if now_s - rank.relayed_s < INTERVAL_S:
                continue  # everybody gets the one that was asked for just now
            rank.relayed_s = now_s
            if silent or not self._send(rank, command):
                past = rank.remembered()
                if past is not None:
                    self._put(past)
        if self._sensors is not None:
            self._new_sensors = True
        self._replies.append(Reply(command.id, "done"))

    # --- the end -------------------------------------------------------------------------------

    def _close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
        for rank in self._ranks.values():
            rank.close()
        self._context.destroy(linger=0)
        for file in (*self._own_files, self._directory / AGENT_FILE):
            with contextlib.suppress(OSError):
                file.unlink()
        os.close(self._lock_fd)


def _take_lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise AgentRunningError(f"a node process already runs for {path.parent}") from None
    return fd


def _process_state(pid: int) -> str:
    """Return the kernel's letter for a process (R, S, D, T, Z), empty if it is gone."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return line[line.rfind(b")") + 2 :][:1].decode("ascii", "replace")
