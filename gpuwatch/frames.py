"""Encoding, decoding and range checks of frames, and length-prefixed streams of them.

A decoder returns a frame whose every number lies in the range that `gpuwatch.schema` states, or
raises `FrameError`; nothing else escapes, whatever the bytes. Pipes and recordings carry frames
one after the other, each behind its length as four bytes, big-endian.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from types import GenericAlias
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

import msgspec

from gpuwatch.errors import FrameError, WireVersionError
from gpuwatch.schema import (
    WIRE_VERSION,
    Command,
    Count,
    Ledger,
    Name,
    NodeFrame,
    PhasesNs,
    Rank,
    RankFrame,
    RankState,
    SensorFrame,
    StepRecord,
    WallSeconds,
    WorkerCost,
)

__all__ = [
    "MAX_FRAME_BYTES",
    "UNREADABLE",
    "Columns",
    "FrameStream",
    "Heartbeat",
    "Ordinary",
    "decode_all_steps",
    "decode_columns",
    "decode_command",
    "decode_costs",
    "decode_heartbeat",
    "decode_node_frame",
    "decode_ordinary",
    "decode_rank_frame",
    "decode_sensor_frame",
    "decode_steps",
    "decode_told",
    "encode",
    "packed",
    "printable",
]

MAX_FRAME_BYTES = 64 * 2**20
"""Largest frame in a stream or on a socket: 10,000 ranks a frame stay far below it."""

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, UnicodeError)
"""What a decoder of msgspec may raise, whatever the bytes."""

_LENGTH = struct.Struct(">I")

_NIL = b"\xc0"
_EMPTY = b"\x90"


class _NodeWire(NodeFrame, frozen=True):
    """`NodeFrame` as msgspec decodes it: `Raw | None` accepts nothing but nil, `Raw` anything."""

    sensors: msgspec.Raw = msgspec.Raw(_NIL)


_SENSORS = NodeFrame.__struct_fields__.index("sensors")

_None = Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=0)]


class Heartbeat(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A `RankFrame` that holds nothing new but its state and totals, and these as raw bytes.

    Nine of ten frames are such, and each replaces the one before it: `told` decodes what is looked
    at. What is not raw has been checked.
    """

    version: Annotated[int, msgspec.Meta(ge=WIRE_VERSION, le=WIRE_VERSION)]
    run: Name
    rank: Rank
    incarnation: Name
    seq: Count
    sent_s: WallSeconds
    dropped: Count
    records: _None
    spans: _None
    state: msgspec.Raw
    ledger: msgspec.Raw
    hello: None
    replies: _None
    bye: None
    snapshot: Literal[False]
    simulated: bool
    workers: _None = ()
    commands: _None = ()
    merged: Count = 0

    def told(self) -> tuple[RankState, Ledger]:
        """Decode and check state and totals.

        Raises:
            FrameError: they are none, or a value is out of range.
        """
        return decode_told(self.state, self.ledger)


class Ordinary(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A `RankFrame` of a rank that goes on: nothing in it but steps, its workers' totals, its state
    and its totals, and all of these as raw bytes.

    Of many ranks only the head is read as frames arrive; `decode_steps`, `decode_costs` and
    `decode_told` read the rest when somebody looks. What is not raw has been checked.
    """

    version: Annotated[int, msgspec.Meta(ge=WIRE_VERSION, le=WIRE_VERSION)]
    run: Name
    rank: Rank
    incarnation: Name
    seq: Count
    sent_s: WallSeconds
    dropped: Count
    records: msgspec.Raw
    spans: _None
    state: msgspec.Raw
    ledger: msgspec.Raw
    hello: None
    replies: _None
    bye: None
    snapshot: Literal[False]
    simulated: bool
    workers: msgspec.Raw = msgspec.Raw(_EMPTY)
    commands: _None = ()
    merged: Count = 0


class Columns(NamedTuple):
    """The fields of ordinary frames of several ranks, each field a tuple with one value a frame."""

    version: tuple[int, ...]
    run: tuple[str, ...]
    rank: tuple[int, ...]
    incarnation: tuple[str, ...]
    seq: tuple[int, ...]
    sent_s: tuple[float, ...]
    dropped: tuple[int, ...]
    records: tuple[msgspec.Raw, ...]
    spans: tuple[object, ...]
    state: tuple[msgspec.Raw, ...]
    ledger: tuple[msgspec.Raw, ...]
    hello: tuple[None, ...]
    replies: tuple[object, ...]
    bye: tuple[None, ...]
    snapshot: tuple[bool, ...]
    simulated: tuple[bool, ...]
    workers: tuple[msgspec.Raw, ...]
    commands: tuple[object, ...]
    merged: tuple[int, ...]


_Steps = Annotated[tuple[StepRecord, ...], msgspec.Meta(max_length=4096)]
_Costs = Annotated[tuple[WorkerCost, ...], msgspec.Meta(max_length=4096)]

_encoder = msgspec.msgpack.Encoder()
_heartbeat_decoder = msgspec.msgpack.Decoder(Heartbeat)
_Row = GenericAlias(tuple, tuple(get_type_hints(Ordinary, include_extras=True).values()))
_rows_decoder: msgspec.msgpack.Decoder[tuple[tuple[Any, ...], ...]] = msgspec.msgpack.Decoder(
    GenericAlias(tuple, (_Row, ...))
)
_ordinary_decoder = msgspec.msgpack.Decoder(Ordinary)
_steps_decoder = msgspec.msgpack.Decoder(_Steps)
_costs_decoder = msgspec.msgpack.Decoder(_Costs)
_state_decoder = msgspec.msgpack.Decoder(RankState)
_ledger_decoder = msgspec.msgpack.Decoder(Ledger)
_rank_decoder = msgspec.msgpack.Decoder(RankFrame)
_node_decoder = msgspec.msgpack.Decoder(_NodeWire)
_sensor_decoder = msgspec.msgpack.Decoder(SensorFrame)
_command_decoder = msgspec.msgpack.Decoder(Command)


class _Head(msgspec.Struct, array_like=True):
    """The first field of every frame."""

    version: int


_head_decoder = msgspec.msgpack.Decoder(_Head)

_T = TypeVar("_T")


def encode(frame: msgspec.Struct) -> bytes:
    """Encode one frame as MessagePack.

    Ranges are checked where frames are decoded, not here.

    Raises:
        FrameError: text with lone surrogates (a file name that is not UTF-8, as Python decodes
            it: `os.fsencode(name).decode("utf-8", "replace")` is safe), or an integer over 64 bits.
    """
    try:
        return _encoder.encode(frame)
    except (UnicodeError, OverflowError) as exc:
        raise FrameError(f"cannot be encoded: {exc}") from None


def _decode(decoder: "msgspec.msgpack.Decoder[_T]", data: bytes | memoryview, what: str) -> _T:
    try:
        frame = decoder.decode(data)
    except UNREADABLE as exc:
        _raise_if_other_version(data)
        raise FrameError(f"not a valid {what}: {exc}") from None
    version = getattr(frame, "version", WIRE_VERSION)
    if version != WIRE_VERSION:
        raise WireVersionError(_other_version(version))
    return frame


def _raise_if_other_version(data: bytes | memoryview) -> None:
    """A frame of another major version may not fit our types: name the version instead."""
    try:
        version = _head_decoder.decode(data).version
    except UNREADABLE:
        return
    if WIRE_VERSION < version <= 1000:
        raise WireVersionError(_other_version(version))


def _other_version(version: int) -> str:
    side = "newer" if version > WIRE_VERSION else "older"
    return (
        f"the other side speaks wire version {version}, this gpuwatch {WIRE_VERSION}: "
        f"it is {side}; install the same gpuwatch-monitor on both sides"
    )


def decode_rank_frame(data: bytes | memoryview) -> RankFrame:
    """Decode and check the frame of one rank.

    Raises:
        FrameError: the bytes are no rank frame, or a value is out of range.
        WireVersionError: it is one of another major version.
    """
    frame = _decode(_rank_decoder, data, "rank frame")
    hello = frame.hello
    if hello is not None and frame.rank >= hello.world_size:
        raise FrameError(f"rank {frame.rank} in a world of {hello.world_size}")
    _check_steps(frame.records)
    return frame


def _check_steps(records: tuple[StepRecord, ...]) -> None:
    for record in records:
        if _total_ns(record.host) > record.step_ns:
            raise FrameError(f"step {record.index}: phases are longer than the step")


def _decoded_or_none(decoder: "msgspec.msgpack.Decoder[_T]", data: bytes | memoryview) -> _T | None:
    try:
        return decoder.decode(data)
    except UNREADABLE:
        return None


def decode_heartbeat(data: bytes | memoryview) -> Heartbeat | None:
    """Decode the frame of one rank if it is a heartbeat, else return None.

    None says nothing of the bytes: `decode_rank_frame` takes the frame, or says what is wrong.
    """
    return _decoded_or_none(_heartbeat_decoder, data)


def decode_ordinary(data: bytes | memoryview) -> Ordinary | None:
    """Decode the head of the frame of one rank if it is an ordinary one, else return None.

    None says nothing of the bytes: `decode_rank_frame` takes the frame, or says what is wrong.
    """
    return _decoded_or_none(_ordinary_decoder, data)


def decode_columns(frames: Sequence[msgspec.Raw]) -> Columns | None:
    """Decode the heads of the rank frames of a node if all are ordinary, else return None.

    None says nothing of any one of them; nor that they are not, where they have more or fewer
    fields than this version writes.
    """
    head = b"\xdd" + len(frames).to_bytes(4, "big")
    rows = _decoded_or_none(_rows_decoder, head + b"".join(frames))
    return Columns(*zip(*rows, strict=True)) if rows else None


def decode_steps(data: bytes | memoryview) -> tuple[StepRecord, ...]:
    """Decode and check the records of a rank frame by themselves.

    Raises:
        FrameError: they are none, or a value is out of range.
    """
    records = _decode_part(_steps_decoder, data)
    _check_steps(records)
    return records


def decode_all_steps(parts: Sequence[bytes]) -> tuple[StepRecord, ...]:
    """Decode and check the records of rank frames that follow each other, in one go.

    Raises:
        FrameError: some are none, or a value is out of range; `decode_steps` tells which.
    """
    if len(parts) == 1 or not all(part[0] >> 4 == _EMPTY[0] >> 4 for part in parts):
        return tuple([record for part in parts for record in decode_steps(part)])
    count = sum([part[0] & 0xF for part in parts])
    head = bytes((0xDD,)) + count.to_bytes(4, "big")
    return decode_steps(head + b"".join([part[1:] for part in parts]))


def decode_costs(data: bytes | memoryview) -> tuple[WorkerCost, ...]:
    """Decode and check the workers' totals of a rank frame by themselves.

    Raises:
        FrameError: they are none, or a value is out of range.
    """
    return _decode_part(_costs_decoder, data)


def decode_told(
    state: bytes | memoryview | msgspec.Raw, ledger: bytes | memoryview | msgspec.Raw
) -> tuple[RankState, Ledger]:
    """Decode and check state and totals of a rank frame by themselves.

    Raises:
        FrameError: they are none, or a value is out of range.
    """
    return (
        _decode_part(_state_decoder, memoryview(state)),
        _decode_part(_ledger_decoder, memoryview(ledger)),
    )


def _decode_part(decoder: "msgspec.msgpack.Decoder[_T]", data: bytes | memoryview) -> _T:
    try:
        return decoder.decode(data)
    except UNREADABLE as exc:
        raise FrameError(f"not a valid rank frame: {exc}") from None


def _total_ns(phases: PhasesNs) -> int:
    known = msgspec.structs.astuple(phases)
    return sum(known) if None not in known else sum(filter(None, known))


def decode_node_frame(data: bytes | memoryview) -> NodeFrame:
    """Decode the frame of a node; its rank and sensor frames stay raw, to be decoded one by one.

    Raises:
        FrameError: the bytes are no node frame, or a value is out of range.
        WireVersionError: it is one of another major version.
    """
    wire = _decode(_node_decoder, data, "node frame")
    values = list(msgspec.structs.astuple(wire))
    if memoryview(wire.sensors) == _NIL:
        values[_SENSORS] = None
    return NodeFrame(*values)


def decode_sensor_frame(data: bytes | memoryview) -> SensorFrame:
    """Decode one tick of the sampler.

    Raises:
        FrameError: the bytes are no sensor frame, or a value is out of range.
    """
    return _decode(_sensor_decoder, data, "sensor frame")


def decode_command(data: bytes | memoryview) -> Command:
    """Decode a command.

    Raises:
        FrameError: the bytes are no command, or a value is out of range.
        WireVersionError: it is one of another major version.
    """
    return _decode(_command_decoder, data, "command")


def packed(frame: bytes) -> bytes:
    """Return the frame behind its length, as pipes and recordings carry it.

    Raises:
        FrameError: the frame is longer than `MAX_FRAME_BYTES`.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(frame)) + frame


class FrameStream:
    """Cuts a stream of bytes into frames; what is incomplete waits for the rest."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take the next bytes and return an iterator of the frames that are complete now.

        The bytes are taken at once; a frame leaves the buffer when the iterator gives it, so what
        is not asked for comes with the next call.

        Raises:
            FrameError: a length over `MAX_FRAME_BYTES`, while iterating; the stream is lost from
                there on.
        """
        self._buffer += data
        return self._complete()

    def _complete(self) -> Iterator[bytes]:
        buffer = self._buffer
        while len(buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame announces {length} bytes, over {MAX_FRAME_BYTES}")
            end = _LENGTH.size + length
            if end > len(buffer):
                return
            frame = bytes(buffer[_LENGTH.size : end])
            del buffer[:end]  # moves the start of the bytearray, not its contents
            yield frame

    @property
    def pending(self) -> int:
        """Bytes that wait for the rest of their frame."""
        return len(self._buffer)


# C0 and C1 controls and the two separators end lines or start escape sequences; the bidirectional
# marks and overrides turn text around; a lone surrogate cannot be written at all. A name with any
# of them must not reach a terminal.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Return text that a terminal can show: control and direction characters become U+FFFD."""
    if text.isascii() and text.isprintable():
        return text
    return _UNPRINTABLE.sub("\ufffd", text)
