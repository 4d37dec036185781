"""Node frames for who watches many nodes: about one a second, with all that ten of them say.

A monitor asks for it (see `wish`); who does not ask gets every frame as it came. What is left out
is what a later frame replaces: states, totals, ages. Every record, span, answer, reading of a
worker and tick of the sensors stays, and `merged` says how many frames one stands for, so that what
is lost on the way is counted as exactly as before.
"""

import msgspec

from gpuwatch.errors import FrameError
from gpuwatch.frames import MAX_FRAME_BYTES, UNREADABLE, decode_node_frame, encode
from gpuwatch.schema import (
    WIRE_VERSION,
    Command,
    Count,
    Ledger,
    Name,
    NodeFrame,
    Rank,
    RankAge,
    RankFrame,
    RankState,
    Reply,
    WallSeconds,
    WorkerCost,
)

__all__ = ["CALM_S", "Gather", "is_calm", "wish"]

CALM_S = 1.0
"""Between frames for who has asked. A rank counts as silent after three seconds."""

_FRAME_S = 0.1  # a node process sends ten a second
_MOST_BYTES = MAX_FRAME_BYTES // 8
_MOST_PARTS = 65536
_MOST = {"records": 4096, "spans": 4096, "workers": 4096, "commands": 64}
"""Of one node frame, and of one rank frame: no decoder takes more."""

_Raws = tuple[msgspec.Raw, ...]
_Key = tuple[str, int]

_NIL = b"\xc0"


def wish(interval_s: float) -> Command:
    """Return what asks the far side of a pipe, or a door, for a frame each `interval_s`.

    A far side that does not know it takes it for the word that a monitor is there, as any
    `attach`, and goes on as before.
    """
    return Command(WIRE_VERSION, "pace", "attach", args={"interval_s": interval_s})


def is_calm(command: Command) -> bool:
    """Whether a wish is for about a frame a second; else it is for every frame as it comes."""
    interval_s = command.args.get("interval_s", 0.0)
    return isinstance(interval_s, int | float) and interval_s >= CALM_S


class _Frame(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A `RankFrame`; what is only passed on is raw."""

    version: int
    run: Name
    rank: Rank
    incarnation: Name
    seq: Count
    sent_s: WallSeconds
    dropped: Count
    records: _Raws = ()
    spans: _Raws = ()
    state: msgspec.Raw = msgspec.Raw(encode(RankState()))
    ledger: msgspec.Raw = msgspec.Raw(encode(Ledger()))
    hello: msgspec.Raw = msgspec.Raw(_NIL)
    replies: _Raws = ()
    bye: msgspec.Raw = msgspec.Raw(_NIL)
    snapshot: bool = False
    simulated: bool = False
    workers: tuple[WorkerCost, ...] = ()
    commands: _Raws = ()
    merged: Count = 0


_decoder = msgspec.msgpack.Decoder(_Frame)
_RANK_FIELDS = len(RankFrame.__struct_fields__)
_NODE_FIELDS = len(NodeFrame.__struct_fields__)


def _fields(data: memoryview | bytes) -> int:
    """Return how many fields an encoded Struct has; more than there can be if it is none."""
    head = data[0] if len(data) else 0
    if head >> 4 == 0x9:
        return head & 0xF
    return int.from_bytes(data[1:3], "big") if head == 0xDC and len(data) > 2 else 2**16


class _Part:
    """Frames of one rank that follow each other, and are to become one."""

    def __init__(self, raw: msgspec.Raw, frame: _Frame | None) -> None:
        self._raw = raw
        self._frames = [] if frame is None or _stands_alone(frame) else [frame]
        self._sizes = {} if frame is None else {name: len(getattr(frame, name)) for name in _MOST}

    def take(self, frame: _Frame) -> bool:
        """Take the frame if it is the next one and fits."""
        if not self._frames or _stands_alone(frame):
            return False
        last = self._frames[-1]
        if (
            frame.incarnation != last.incarnation
            or frame.seq - frame.merged != last.seq + 1
            or frame.sent_s < last.sent_s  # its clock was set back: ages are by it
            or frame.simulated is not last.simulated
        ):
            return False
        for name, most in _MOST.items():
            size = len(getattr(frame, name))
            if size:
                if self._sizes[name] + size > most:
                    return False
                self._sizes[name] += size
        self._frames.append(frame)
        return True

    def raw(self) -> msgspec.Raw:
        """Return them as one."""
        frames = self._frames
        if len(frames) < 2:
            return self._raw
        last = frames[-1]
        hellos = [frame.hello for frame in frames if memoryview(frame.hello) != _NIL]
        whole = msgspec.structs.replace(
            last,
            records=tuple([record for frame in frames for record in frame.records]),
            spans=tuple([span for frame in frames for span in frame.spans]),
            hello=hellos[-1] if hellos else last.hello,
            workers=tuple([cost for frame in frames for cost in _aged(frame, last.sent_s)]),
            commands=tuple([command for frame in frames for command in frame.commands]),
            merged=last.seq - frames[0].seq + frames[0].merged,
        )
        return msgspec.Raw(encode(whole))


def _stands_alone(frame: _Frame) -> bool:
    """Whether it is no telemetry that goes on: the past, an answer, last words."""
    return bool(frame.snapshot or frame.replies) or memoryview(frame.bye) != _NIL


def _aged(frame: _Frame, sent_s: float) -> tuple[WorkerCost, ...]:
    """Return its readings of workers as of a frame that is sent later."""
    later_s = sent_s - frame.sent_s
    if not later_s or not frame.workers:
        return frame.workers
    return tuple([msgspec.structs.replace(c, age_s=c.age_s + later_s) for c in frame.workers])


class Gather:
    """Takes the frames of one node process, and gives fewer that say the same.

    What somebody waits for (an answer, the past of a rank, last words) waits for nothing, nor does
    what came before it. Frames that this version does not know all of pass as they came, in their
    place. Times are monotonic, in seconds. Not thread-safe.
    """

    def __init__(self) -> None:
        self._due_s = 0.0
        self._given_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self._frames: list[NodeFrame] = []
        self._alone = b""  # the only one so far, as it came
        self._bytes = 0
        self._parts: list[_Part] = []
        self._open: dict[_Key, _Part] = {}
        self._ages: dict[tuple[str, int, str], RankAge] = {}
        self._sensors: msgspec.Raw | None = None
        self._replies: list[Reply] = []

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def overdue_s(self) -> float | None:
        """When what is there has waited too long: nothing more comes. None if nothing is there."""
        return self._due_s + _FRAME_S if self._frames else None

    def add(self, data: bytes, now_s: float) -> list[bytes]:
        """Take the next frame; returns those that are to be sent now, in their order."""
        frame = _known(data)
        if frame is None:
            return [*self.take(now_s), data]
        out = []
        if not self._follows(frame, len(data)):
            out = self.take(now_s)
        if not self._frames:
            self._due_s = max(self._given_s, now_s - _FRAME_S) + CALM_S - _FRAME_S / 2
            self._alone = data
        urgent = self._put(frame)
        self._bytes += len(data)
        if urgent or now_s >= self._due_s or self._bytes >= _MOST_BYTES:
            out += self.take(now_s)
        return out

    def _follows(self, frame: NodeFrame, size: int) -> bool:
        """Whether it can become one with those that wait."""
        if not self._frames:
            return True
        last = self._frames[-1]
        return (
            (frame.node, frame.incarnation) == (last.node, last.incarnation)
            and frame.seq - frame.merged == last.seq + 1
            and self._bytes + size <= _MOST_BYTES
            and len(self._parts) + len(frame.frames) <= _MOST_PARTS
            and len(self._ages) + len(frame.ages) <= _MOST_PARTS
            # Means are made of every tick: each goes in a frame of its own.
            and (frame.sensors is None or self._sensors is None)
        )

    def _put(self, frame: NodeFrame) -> bool:
        """Keep what it says; returns whether that can wait no longer."""
        self._frames.append(frame)
        urgent = bool(frame.replies)
        for raw in frame.frames:
            found = _decoded(raw)
            if found is None:
                self._parts.append(_Part(raw, None))
                self._open.clear()  # whatever it is, nothing passes it
                continue
            urgent = urgent or _stands_alone(found)
            key = (found.run, found.rank)
            self._ages.pop((*key, found.incarnation), None)
            part = self._open.get(key)
            if part is None or not part.take(found):
                part = self._open[key] = _Part(raw, found)
                self._parts.append(part)
        for age in frame.ages:
            self._ages[age.run, age.rank, age.incarnation] = age
        if frame.sensors is not None:
            self._sensors = frame.sensors
        self._replies.extend(frame.replies)
        return urgent

    def take(self, now_s: float) -> list[bytes]:
        """Return what has been gathered, as one frame, or none."""
        frames, alone = self._frames, self._alone
        if not frames:
            return []
        self._given_s = now_s
        if len(frames) == 1:
            self._clear()
            return [alone]
        whole = msgspec.structs.replace(
            frames[-1],
            frames=tuple([part.raw() for part in self._parts]),
            ages=tuple(self._ages.values()),
            sensors=self._sensors,
            replies=tuple(self._replies),
            merged=frames[-1].seq - frames[0].seq + frames[0].merged,
        )
        self._clear()
        return [encode(whole)]


def _known(data: bytes) -> NodeFrame | None:
    """Return a frame, if all of it is known here."""
    if _fields(data) > _NODE_FIELDS:
        return None
    try:
        return decode_node_frame(data)
    except FrameError:
        return None


def _decoded(raw: msgspec.Raw) -> _Frame | None:
    """Return the frame of a rank, if all of it is known here."""
    data = memoryview(raw)
    if _fields(data) > _RANK_FIELDS:
        return None
    try:
        frame = _decoder.decode(data)
    except UNREADABLE:
        return None
    return frame if frame.version == WIRE_VERSION else None
