"""Steps of a large run as rows of numbers in bytes.

A step of a GPU takes 150 to 190 bytes as it came and about 90 as a row: of the steps of a run most
have the same loader, tags and clock, and know and do not know the same things. What is the same is
kept once, in a mold, and a row is written and read in a fraction of the time.

Here a step is a tuple of the fields of its `StepRecord` in their order, each set of phases a tuple
of its own.
"""

import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec.structs import astuple

from gpuwatch.errors import FrameError
from gpuwatch.schema import (
    PHASES,
    Bytes,
    Count,
    DurationNs,
    Name,
    PhasesNs,
    StepRecord,
    UserFloat,
    WallSeconds,
)

__all__ = [
    "ARRAY",
    "DEVICE",
    "HEAD_BYTES",
    "HOST",
    "INDEX",
    "LANES",
    "LANES_BYTES",
    "LOADER",
    "MEMORY",
    "PHASES_LANE",
    "QUEUE_CAPACITY",
    "QUEUE_DEPTH",
    "SAMPLES",
    "SAMPLES_LANE",
    "STALL",
    "STALL_LANE",
    "STARTED",
    "STEP",
    "TAGS",
    "Flat",
    "Mold",
    "array_chunks",
    "cut_chunk",
    "decode_flats",
    "first_index",
    "flat_of",
    "is_timed",
    "mold_of",
    "phases_of",
    "read_rows",
    "record_of",
    "row_chunks",
    "step_ns_of",
    "times_of_flats",
    "written_after",
]

Flat = tuple[Any, ...]
"""A step: the fields of a `StepRecord`, each set of phases a tuple of seven, in ns."""

_FIELDS = StepRecord.__struct_fields__
INDEX, STARTED, STEP, HOST, DEVICE, _CLOCK = range(6)
SAMPLES = _FIELDS.index("samples")
MEMORY = _FIELDS.index("memory_bytes")
QUEUE_DEPTH = _FIELDS.index("queue_depth")
QUEUE_CAPACITY = _FIELDS.index("queue_capacity")
TAGS = _FIELDS.index("tags")
LOADER = _FIELDS.index("loader")
STALL = _FIELDS.index("device_stall_ns")

_CHUNK_BYTES = 479
"""Of one object of bytes: with its 33 of overhead Python's own allocator has room for it, from
which memory is used again without gaps; larger ones come from the C library."""

_CHUNK_ITEMS = 15
"""Most items of an array whose head is one byte."""

ARRAY = 0x90
"""The head of a MessagePack array of up to 15 items. That of rows is less: their number."""

# --- as they come ------------------------------------------------------------------------------

_Ns = DurationNs | None
_Parts = tuple[_Ns, _Ns, _Ns, _Ns, _Ns, _Ns, _Ns]


class _Step(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A `StepRecord` that is quickly made: phases are tuples, of which none may be left out."""

    index: Count
    started_s: WallSeconds
    step_ns: DurationNs
    host: _Parts
    device: _Parts | None = None
    clock: Literal["host", "device"] = "host"
    batches: Count = 1
    samples: Count | None = None
    tokens: Count | None = None
    loss: UserFloat | None = None
    memory_bytes: Bytes | None = None
    queue_depth: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] | None = None
    queue_capacity: Annotated[int, msgspec.Meta(ge=0, le=2**20)] | None = None
    tags: Annotated[tuple[Name, ...], msgspec.Meta(max_length=8)] = ()
    loader: Name = ""
    device_stall_ns: DurationNs | None = None
    grad_norm: UserFloat | None = None
    learning_rate: UserFloat | None = None
    loss_scale: UserFloat | None = None
    padding_share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    gc_ns: DurationNs | None = None


_decode_steps = msgspec.msgpack.Decoder(
    Annotated[tuple[_Step, ...], msgspec.Meta(max_length=4096)]
).decode
_decode_records = msgspec.msgpack.Decoder(tuple[StepRecord, ...]).decode
_encode = msgspec.msgpack.Encoder().encode


def decode_flats(parts: Sequence[bytes]) -> list[Flat]:
    """Decode and check the records of rank frames that follow each other, in one go.

    What it returns is what `gpuwatch.frames.decode_all_steps` does.

    Raises:
        FrameError: something is wrong with them, or they are of an older or newer version, which
            `decode_all_steps` may read.
    """
    data = parts[0]
    if len(parts) > 1:
        if not all(part[0] >> 4 == ARRAY >> 4 for part in parts):
            raise FrameError("not all of it is short")
        count = sum([part[0] & 0xF for part in parts])
        data = b"\xdd" + count.to_bytes(4, "big") + b"".join([part[1:] for part in parts])
    try:
        flats = list(map(astuple, _decode_steps(data)))
    except (msgspec.MsgspecError, ValueError, RecursionError, UnicodeError) as exc:
        raise FrameError(f"not ordinary steps: {exc}") from None
    for flat in flats:
        host = flat[HOST]
        if (sum(host) if None not in host else sum(filter(None, host))) > flat[STEP]:
            raise FrameError("phases are longer than the step")
    return flats


def flat_of(record: StepRecord) -> Flat:
    """Return a step as a tuple."""
    values = astuple(record)
    device = record.device
    timed = None if device is None else astuple(device)
    return (*values[:HOST], astuple(record.host), timed, *values[DEVICE + 1 :])


def record_of(flat: Flat) -> StepRecord:
    """Return a step as an object."""
    timed = flat[DEVICE]
    device = None if timed is None else PhasesNs(*timed)
    index, started_s, step_ns, host = flat[:DEVICE]
    return StepRecord(index, started_s, step_ns, PhasesNs(*host), device, *flat[DEVICE + 1 :])


def is_timed(flat: Flat) -> bool:
    """Whether the device's clock decides."""
    return flat[DEVICE] is not None and flat[_CLOCK] == "device"


def phases_of(flat: Flat) -> tuple[int | None, ...]:
    """Return the phases by the clock that decides."""
    return cast("tuple[int | None, ...]", flat[DEVICE] if is_timed(flat) else flat[HOST])


def times_of_flats(flats: Sequence[Flat]) -> tuple[list[int], list[int | None]]:
    """Return how long steps took, and their data wait, by the clock that decides, in ns."""
    steps_ns: list[int] = []
    waits_ns: list[int | None] = []
    for flat in flats:
        part = flat[DEVICE]
        if part is None or flat[_CLOCK] != "device":
            steps_ns.append(flat[STEP])
            part = flat[HOST]
        else:
            steps_ns.append(sum(part) if None not in part else sum(filter(None, part)))
        waits_ns.append(part[0])
    return steps_ns, waits_ns


def step_ns_of(flat: Flat) -> int:
    """Return how long a step took by the clock that decides."""
    if not is_timed(flat):
        return cast("int", flat[STEP])
    device = flat[DEVICE]
    return sum(device) if None not in device else sum(filter(None, device))


# --- as rows -----------------------------------------------------------------------------------

_BATCHES = _FIELDS.index("batches")
_GC = _FIELDS.index("gc_ns")

_KEPT = (_CLOCK, _BATCHES, QUEUE_CAPACITY, TAGS, LOADER)
"""What is the same in all rows of a mold, beside what is not known in any."""

_WRITTEN = {
    _FIELDS.index("tokens"): "n",
    _GC: "n",
    MEMORY: "Q",
    _FIELDS.index("loss"): "d",
    _FIELDS.index("grad_norm"): "d",
    _FIELDS.index("learning_rate"): "d",
    _FIELDS.index("loss_scale"): "d",
    _FIELDS.index("padding_share"): "d",
}
"""What is behind the lanes of a row and the phases by the other clock, where it is known, and how
it is written: n in four bytes, as most durations are up to 4.2 s, or else in eight."""

LANES = 10
"""At the beginning of a row: the step by the host's clock, samples, device stall, and the phases by
the clock that decides; 0 for what is not known."""

SAMPLES_LANE, STALL_LANE, PHASES_LANE = 1, 2, 3

_HEAD = struct.Struct("=BHQ")
"""Of a chunk: number of rows, mold, index of the first step; those of the others follow it."""

HEAD_BYTES = _HEAD.size

LANES_BYTES = 4 * LANES
"""Of a narrow row."""

_MOST_MOLDS = 2048
"""Beyond that, and where texts are long, steps are kept as MessagePack."""

_LONGEST = 128

_NARROW = 2**32

_started_of = itemgetter(slice(STARTED, STARTED + 1))

_UNFIT = (struct.error, TypeError, ValueError, OverflowError)


def _unknown(part: Sequence[int | None] | None) -> tuple[int, ...]:
    """Return where phases are not known."""
    return tuple([at for at, ns in enumerate(part or ()) if ns is None])


def _is_small(depth: float | None) -> bool:
    """Whether the depth of a queue is written as a byte."""
    return depth is not None and 0.0 <= depth < 256.0 and depth == int(depth)


class Mold:
    """What steps have in common, and how the rest of each is written and read.

    `quick` where rows can be added up as they are, `unknown` are the lanes that are not known,
    `depth` says whether the last byte of a row is the depth of the queue.
    """

    __slots__ = (
        "_constants",
        "_constants_of",
        "_decides",
        "_gaps",
        "_gc_at",
        "_lanes",
        "_lead_of",
        "_numbers_of",
        "_other",
        "_rest",
        "_row",
        "_timed",
        "batches",
        "capacity",
        "depth",
        "loader",
        "most",
        "narrow",
        "number",
        "on_device",
        "quick",
        "size",
        "tagged",
        "unknown",
    )

    def __init__(self, number: int, flat: Flat, *, narrow: bool) -> None:
        self.number = number
        self.narrow = narrow
        self.on_device = is_timed(flat)
        self.capacity = flat[QUEUE_CAPACITY]
        self.batches = cast("int", flat[_BATCHES])
        self.loader = cast("str", flat[LOADER])
        self.tagged = bool(flat[TAGS])
        depth = flat[QUEUE_DEPTH]
        self.depth = _is_small(depth)
        self.quick = narrow and not self.tagged and flat[SAMPLES] is not None
        self.quick &= depth is None or self.depth
        self._timed = flat[DEVICE] is not None
        self._decides = DEVICE if self.on_device else HOST
        self._other = HOST if self.on_device else DEVICE
        self._lead_of = itemgetter(STEP, SAMPLES, STALL)
        self.unknown = _unknown((*self._lead_of(flat), *flat[self._decides]))
        unknown = self.unknown
        others = _unknown(flat[self._other])
        self._gaps = (self.unknown, others) if unknown or others else None
        written = dict(_WRITTEN)
        if not self.depth:
            written[QUEUE_DEPTH] = "d"
        known = [at for at in written if flat[at] is not None]
        constants = [*_KEPT, *[at for at in written if flat[at] is None]]
        self._constants_of = itemgetter(*constants)
        self._constants = self._constants_of(flat)
        # One item alone would not be a tuple.
        self._numbers_of = itemgetter(STARTED, *known) if known else _started_of
        width = LANES + len(PHASES) * self._timed
        letters = "n" * width + "d" + "".join([written[at] for at in known]) + "B" * self.depth
        self._row = struct.Struct("=" + letters.replace("n", "I" if narrow else "Q"))
        self.size = self._row.size
        letter = "I" if narrow else "Q"
        lanes = f"={LANES}{letter}{(width - LANES) * struct.calcsize('=' + letter)}xd"
        self._lanes = struct.Struct(f"{lanes}{self.size - struct.calcsize(lanes)}x")
        self._gc_at = width + 1 + known.index(_GC) if _GC in known else None
        self.most = min(_CHUNK_ITEMS, (_CHUNK_BYTES - HEAD_BYTES) // self.size)
        # The fields behind the phases are picked from a row, what is the same, None, and the depth.
        end = width + 1 + len(known) + self.depth
        found = {STARTED: width, SAMPLES: SAMPLES_LANE, STALL: STALL_LANE}
        found |= {at: width + 1 + place for place, at in enumerate(known)}
        found |= {at: end + place for place, at in enumerate(constants)}
        if flat[SAMPLES] is None:
            found[SAMPLES] = end + len(constants)
        if flat[STALL] is None:
            found[STALL] = end + len(constants)
        found.setdefault(QUEUE_DEPTH, end + len(constants) + 1)
        self._rest = itemgetter(*[found[at] for at in (STARTED, *range(DEVICE + 1, len(_FIELDS)))])

    def write(self, flat: Flat) -> bytes | None:
        """Return a step as a row, None where it is of another mold."""
        if self._constants_of(flat) != self._constants:
            return None
        decides, other = flat[self._decides], flat[self._other] or ()
        if bool(other) is not self._timed:
            return None
        lead = self._lead_of(flat)
        try:
            if self._gaps is not None:
                lanes = (*lead, *decides)
                if (_unknown(lanes), _unknown(other)) != self._gaps:
                    return None
                lead, decides = (), [value or 0 for value in lanes]
                other = [ns or 0 for ns in other]
            if not self.depth:
                return self._row.pack(*lead, *decides, *other, *self._numbers_of(flat))
            queued = flat[QUEUE_DEPTH]
            depth = int(queued)
            if depth != queued:
                return None
            return self._row.pack(*lead, *decides, *other, *self._numbers_of(flat), depth)
        except _UNFIT:
            return None

    def lanes(self, chunk: bytes, start: int, end: int) -> Iterator[tuple[Any, ...]]:
        """Return the lanes of a chunk's rows from one place up to another.

        Behind them is when the step began, by the rank's clock in seconds.
        """
        rows = chunk[HEAD_BYTES + start * self.size : HEAD_BYTES + end * self.size]
        return self._lanes.iter_unpack(rows)

    def gc_ns(self, chunk: bytes, start: int, end: int) -> list[int]:
        """Return the pauses of the garbage collector in the same rows, 0 where none is known."""
        at = self._gc_at
        if at is None:
            return [0] * (end - start)
        rows = chunk[HEAD_BYTES + start * self.size : HEAD_BYTES + end * self.size]
        return [values[at] for values in self._row.iter_unpack(rows)]

    def read(self, index: int, rows: bytes) -> list[Flat]:
        """Return the steps of these rows; that of the first has the index."""
        constants, rest, timed = self._constants, self._rest, self._timed
        found: list[Flat] = []
        for values in self._row.iter_unpack(rows):
            decides = values[PHASES_LANE:LANES]
            other = values[LANES : LANES + len(PHASES)] if timed else None
            if self._gaps is not None:
                decides = _without(decides, [lane - PHASES_LANE for lane in self.unknown])
                other = None if other is None else _without(other, self._gaps[1])
            fill = (*values, *constants, None)
            if self.depth:
                fill = (*fill, float(values[-1]))
            started_s, *others = rest(fill)
            host, device = (other, decides) if self.on_device else (decides, other)
            found.append((index, started_s, values[0], host, device, *others))
            index += 1
        return found


def _without(part: Sequence[int], places: Sequence[int]) -> tuple[int | None, ...]:
    """Return phases, those at these places as not known."""
    return tuple([None if at in places else ns for at, ns in enumerate(part)])


_molds: list[Mold] = []
_known_molds: dict[tuple[Any, ...], Mold] = {}
_lock = threading.Lock()


def _mold_of(flat: Flat) -> Mold | None:
    """Return the mold of a step, None where it is too odd to have one."""
    host, device, depth = flat[HOST], flat[DEVICE], flat[QUEUE_DEPTH]
    durations = [flat[at] for at, letter in _WRITTEN.items() if letter == "n"]
    durations += [flat[STEP], flat[SAMPLES], flat[STALL], *host, *(device or ())]
    narrow = all(ns is None or ns < _NARROW for ns in durations)
    key = (
        narrow,
        tuple([flat[at] for at in _KEPT]),
        tuple([flat[at] is None for at in (SAMPLES, STALL, *_WRITTEN)]),
        None if depth is None else _is_small(depth),
        _unknown(host),
        None if device is None else _unknown(device),
    )
    mold = _known_molds.get(key)
    if mold is None and len(flat[LOADER]) + sum(map(len, flat[TAGS])) <= _LONGEST:
        with _lock:
            mold = _known_molds.get(key)
            if mold is None and len(_molds) < _MOST_MOLDS:
                mold = Mold(len(_molds), flat, narrow=narrow)
                _molds.append(mold)
                _known_molds[key] = mold
    return mold


def mold_of(chunk: bytes) -> Mold | None:
    """Return the mold of a chunk of rows, None of another one."""
    return _molds[_HEAD.unpack_from(chunk)[1]] if chunk[0] < ARRAY else None


def row_chunks(flats: Iterable[Flat], tail: bytes = b"") -> list[bytes]:
    """Return these steps after those of a chunk, as chunks of some rows each.

    What finds no mold is in arrays of MessagePack.
    """
    found = [tail] if tail else []
    mold: Mold | None = None
    rows: list[bytes] = []
    first = 0
    for flat in flats:
        index = flat[INDEX]
        row = mold.write(flat) if mold is not None else None
        if row is None or index != first + len(rows):
            if rows and mold is not None:
                found += written_after(found.pop() if found else b"", mold, first, rows)
            mold, rows, first = _mold_of(flat), [], index
            row = mold.write(flat) if mold is not None else None
        if row is not None and mold is not None:
            rows.append(row)
            if mold.narrow:
                continue
            # A wide mold is left again as soon as may be.
            found += written_after(found.pop() if found else b"", mold, first, rows)
        else:
            last = found.pop() if found and found[-1][0] >= ARRAY else bytes((ARRAY,))
            found += array_chunks((_encode(flat),), last)
        mold, rows = None, []
    if rows and mold is not None:
        found += written_after(found.pop() if found else b"", mold, first, rows)
    return found


def written_after(tail: bytes, mold: Mold, index: int, rows: Sequence[bytes]) -> list[bytes]:
    """Return rows of a mold after those of a chunk; the first of them is of the step `index`."""
    found = []
    if tail:
        count, number, first = _HEAD.unpack_from(tail)
        if count < mold.most and number == mold.number and index == first + count:
            some = rows[: mold.most - count]
            found.append(b"".join((bytes((count + len(some),)), tail[1:], *some)))
            rows, index = rows[len(some) :], index + len(some)
        else:
            found.append(tail)
    while rows:
        some = rows[: mold.most]
        found.append(_HEAD.pack(len(some), mold.number, index) + b"".join(some))
        rows, index = rows[len(some) :], index + len(some)
    return found


def read_rows(chunk: bytes, start: int = 0, end: int = _CHUNK_ITEMS) -> list[Flat]:
    """Return the steps of a chunk from one place up to another."""
    if chunk[0] >= ARRAY:
        return list(map(flat_of, _decode_records(chunk)[start:end]))
    _, number, first = _HEAD.unpack_from(chunk)
    mold: Mold = _molds[number]
    rows = chunk[HEAD_BYTES + start * mold.size : HEAD_BYTES + end * mold.size]
    return mold.read(first + start, rows)


def first_index(chunk: bytes) -> int | None:
    """Return the index of the first step of a chunk of rows, None of another one."""
    return int(_HEAD.unpack_from(chunk)[2]) if chunk[0] < ARRAY else None


def cut_chunk(chunk: bytes, count: int) -> bytes:
    """Return a chunk of rows with the first so many alone."""
    size = _molds[_HEAD.unpack_from(chunk)[1]].size
    return bytes((count,)) + chunk[1 : HEAD_BYTES + count * size]


def array_chunks(items: Iterable[bytes], tail: bytes = b"\x90") -> list[bytes]:
    """Return encoded objects after those of a chunk, as arrays of some of them each."""
    found: list[bytes] = []
    count, parts, size = tail[0] & 0xF, [tail[1:]], len(tail)
    for item in items:
        if count and (size + len(item) > _CHUNK_BYTES or count == _CHUNK_ITEMS):
            found.append(bytes((ARRAY | count,)) + b"".join(parts))
            count, parts, size = 0, [], 1
        count += 1
        parts.append(item)
        size += len(item)
    if count:
        found.append(bytes((ARRAY | count,)) + b"".join(parts))
    return found
