"""Sequences that look like tuples of objects and are kept as bytes or numbers.

A `StepRecord` of a GPU takes about 900 bytes as an object with its numbers and about 100 as a row.
At a thousand ranks with 64 of them that decides the monitor's memory; up to `PACK_ABOVE` ranks it
does not, and what is read at every tick had better be there.
"""

import gc
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Generic, TypeVar, cast, overload

import msgspec

from gpuwatch.schema import Span, StepRecord
from gpuwatch.store.rows import (
    ARRAY,
    Flat,
    Mold,
    array_chunks,
    cut_chunk,
    first_index,
    flat_of,
    read_rows,
    record_of,
    row_chunks,
    written_after,
)

__all__ = [
    "PACK_ABOVE",
    "Codec",
    "Packed",
    "Points",
    "collect_seldom",
    "records_codec",
    "spans_codec",
    "step_indices",
]

PACK_ABOVE = 128
"""A store of more ranks than this keeps steps and spans as bytes."""

_SELDOM = (50_000, 20, 100)
"""When the collector of cycles runs once there are many ranks; Python's own is 700, 10, 10."""

_S = TypeVar("_S")
_T = TypeVar("_T")


def collect_seldom() -> None:
    """Let the collector of cycles run less often in this process, which watches many ranks.

    A picture of a thousand of them is ten thousand objects in no cycle; going through all that is
    there after every few hundred of them would cost more than all of the rest.
    """
    gc.set_threshold(*_SELDOM)


class Codec(Generic[_T]):
    """Turns objects of one type into bytes and back.

    Args:
        kind: the type.
        of_flat: makes one of a step, for a type that stands for steps; such are read of rows too.
    """

    def __init__(self, kind: type[_T], of_flat: Callable[[Flat], _T] | None = None) -> None:
        self.encode: Callable[[_T], bytes] = msgspec.msgpack.Encoder().encode
        self.decode: Callable[[bytes | memoryview], _T] = msgspec.msgpack.Decoder(kind).decode
        self.decode_all: Callable[[bytes], tuple[_T, ...]] = msgspec.msgpack.Decoder(
            tuple[kind, ...]  # type: ignore[valid-type]
        ).decode
        if of_flat is None and "host" in getattr(kind, "__struct_fields__", ()):
            of_flat = _maker(kind)
        self._of_flat = of_flat

    def read(self, chunk: bytes, start: int = 0, end: int | None = None) -> Sequence[_T]:
        """Return the objects of a chunk from one place up to another."""
        if chunk[0] >= ARRAY or self._of_flat is None:
            found = self.decode_all(chunk)
            return found[start:end] if start or end is not None else found
        flats = read_rows(chunk, start, chunk[0] if end is None else end)
        return list(map(self._of_flat, flats))

    def chunks(self, items: Iterable[_T], tail: bytes = b"") -> list[bytes]:
        """Return objects after those of a chunk, as chunks of some of them each."""
        return array_chunks(map(self.encode, items), tail or b"\x90")


def _maker(kind: type[_T]) -> Callable[[Flat], _T]:
    """Return what makes a step of a type whose phases are tuples or `PhasesNs`."""
    if kind is StepRecord:
        return cast("Callable[[Flat], _T]", record_of)
    return lambda flat: kind(*flat)


class _Records(Codec[StepRecord]):
    """Steps, which are kept as rows."""

    def chunks(self, items: Iterable[StepRecord], tail: bytes = b"") -> list[bytes]:
        return row_chunks(map(flat_of, items), tail)


class _Head(msgspec.Struct, array_like=True, frozen=True):
    """The beginning of a `StepRecord`: what follows is skipped, not made."""

    index: int


_heads_codec = Codec(_Head, lambda flat: _Head(flat[0]))
_raw_items = msgspec.msgpack.Decoder(tuple[msgspec.Raw, ...]).decode
records_codec: Codec[StepRecord] = _Records(StepRecord)
spans_codec = Codec(Span)


class Packed(Sequence[_T]):
    """An immutable sequence of objects as bytes; what is asked for is made, and not kept.

    A few objects are in a chunk of bytes, and sequences that follow each other have their chunks
    in common: pictures that were made one after the other hold most of a window once.
    """

    __slots__ = ("_chunks", "_codec", "_count", "_skipped")

    def __init__(self, items: Iterable[bytes], codec: Codec[_T]) -> None:
        self._codec = codec
        self._chunks = tuple(array_chunks(items))
        self._skipped = 0
        self._count = sum([chunk[0] & 0xF for chunk in self._chunks])

    def followed_by(self, items: Sequence[_T], most: int) -> "Packed[_T]":
        """Return the last `most` of these objects with the given ones after them."""
        old = self._chunks
        new = self._codec.chunks(items, old[-1] if old else b"")
        return self._followed(new, len(items), most)

    def followed_by_flats(self, flats: Sequence[Flat], most: int) -> "Packed[_T]":
        """Return the same of steps that are tuples."""
        old = self._chunks
        return self._followed(row_chunks(flats, old[-1] if old else b""), len(flats), most)

    def followed_by_rows(
        self, mold: Mold, index: int, rows: Sequence[bytes], most: int
    ) -> "Packed[_T]":
        """Return the same of rows that go on where the newest chunk ends, and are of its mold."""
        tail = self._chunks[-1]
        count = tail[0] + len(rows)
        if count > mold.most:
            return self._followed(written_after(tail, mold, index, rows), len(rows), most)
        # The usual case: the newest chunk is of the same mold, and has room.
        new = b"".join((bytes((count,)), tail[1:], *rows))
        return self._followed((new,), len(rows), most)

    @property
    def newest(self) -> bytes:
        """The newest chunk, of a sequence that is not empty."""
        return self._chunks[-1]

    def _followed(self, new: Sequence[bytes], added: int, most: int) -> "Packed[_T]":
        """Return the last `most` with chunks in the place of the last one."""
        chunks = (*self._chunks[:-1], *new)
        count, skipped = self._count + added, self._skipped
        if count > most:
            skipped, count = skipped + count - most, most
            whole = 0
            while skipped >= (held := chunks[whole][0] & 0xF):
                skipped -= held
                whole += 1
            if whole:
                chunks = chunks[whole:]
        return self._of(chunks, skipped, count)

    def _of(self, chunks: tuple[bytes, ...], skipped: int, count: int) -> "Packed[_T]":
        other: Packed[_T] = Packed.__new__(Packed)
        other._codec, other._chunks = self._codec, chunks
        other._skipped, other._count = skipped, count
        return other

    def first(self, count: int) -> tuple[_T, ...]:
        """Return the oldest so many as objects."""
        found: list[_T] = []
        for chunk, start, end in self.oldest(count):
            found += self._codec.read(chunk, start, end)
        return tuple(found)

    def first_flats(self, count: int) -> list[Flat]:
        """Return the oldest so many steps as tuples."""
        found: list[Flat] = []
        for chunk, start, end in self.oldest(count):
            found += read_rows(chunk, start, end)
        return found

    def oldest(self, count: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield chunks with the places in them of the oldest so many."""
        start, left = self._skipped, min(count, self._count)
        for chunk in self._chunks:
            if left <= 0:
                return
            end = min(chunk[0] & 0xF, start + left)
            yield chunk, start, end
            left -= end - start
            start = 0

    def latest(self, count: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield chunks with the places in them of the newest so many; the newest chunk first."""
        left = min(count, self._count)
        for chunk in reversed(self._chunks):
            if left <= 0:
                return
            end = chunk[0] & 0xF
            start = max(0, end - left)
            yield chunk, start, end
            left -= end - start

    def as_codec(self, codec: "Codec[_S]") -> "Packed[_S]":
        """Return the same bytes as objects of another type, which can read them."""
        other: Packed[_S] = Packed.__new__(Packed)
        other._codec = codec
        other._chunks, other._skipped, other._count = self._chunks, self._skipped, self._count
        return other

    def read_as(self, codec: "Codec[_S]") -> "tuple[_S, ...]":
        """Return all of it as objects of another type, which the same bytes are read as."""
        return tuple(self.as_codec(codec))

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> _T: ...
    @overload
    def __getitem__(self, place: slice) -> "Packed[_T]": ...
    def __getitem__(self, place: int | slice) -> "_T | Packed[_T]":
        if isinstance(place, slice):
            places = range(self._count)[place]
            if places.step == 1 or not places:
                return self._part(places.start, len(places))
            return Packed(map(self._codec.encode, map(self.__getitem__, places)), self._codec)
        at = range(self._count)[place] + self._skipped
        for chunk in self._chunks:
            held = chunk[0] & 0xF
            if at < held:
                return self._codec.read(chunk, at, at + 1)[0]
            at -= held
        raise IndexError(place)

    def index_at(self, place: int) -> int | None:
        """Return the index of the step at a place, None where it must be read for that."""
        at = place + self._skipped
        for chunk in self._chunks:
            held = chunk[0] & 0xF
            if at < held:
                first = first_index(chunk)
                return None if first is None else first + at
            at -= held
        return None

    def _part(self, first: int, count: int) -> "Packed[_T]":
        if not count:
            return self._of((), 0, 0)
        first += self._skipped
        begin, seen = 0, 0
        while seen + (held := self._chunks[begin][0] & 0xF) <= first:
            seen += held
            begin += 1
        end, last = begin, seen
        while last < first + count:
            last += self._chunks[end][0] & 0xF
            end += 1
        chunks = self._chunks[begin:end]
        beyond = last - first - count
        if beyond:
            # The last chunk ends where the sequence does: others can go on from there.
            final = chunks[-1]
            if final[0] < ARRAY:
                kept = [cut_chunk(final, final[0] - beyond)]
            else:
                kept = array_chunks(map(bytes, _raw_items(final)[:-beyond]))
            chunks = (*chunks[:-1], *kept)
        return self._of(chunks, first - seen, count)

    def __iter__(self) -> Iterator[_T]:
        found = chain.from_iterable(map(self._codec.read, self._chunks))
        return islice(found, self._skipped, None)

    def __reversed__(self) -> Iterator[_T]:
        return islice(self._backwards(), self._count)

    def _backwards(self) -> Iterator[_T]:
        read = self._codec.read
        for chunk in reversed(self._chunks):
            if chunk[0] >= ARRAY:
                yield from reversed(read(chunk))
            else:  # the newest few are wanted mostly
                for at in range(chunk[0] - 1, -1, -1):
                    yield read(chunk, at, at + 1)[0]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Packed, tuple)):
            return NotImplemented
        return self is other or tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


def step_indices(window: Sequence[StepRecord]) -> Sequence[int]:
    """Return the indices of steps that are in order; a range where none is missing."""
    if not window:
        return range(0)
    heads = window.as_codec(_heads_codec) if isinstance(window, Packed) else window
    count = len(window)
    first = last = None
    if isinstance(window, Packed):
        first, last = window.index_at(0), window.index_at(count - 1)
    if first is None or last is None:
        first, last = heads[0].index, heads[-1].index
    if last - first == count - 1:
        return range(first, last + 1)
    return [head.index for head in heads]


class Points(Sequence[tuple[int, int]]):
    """An immutable sequence of pairs: the first so many of an array that only grows."""

    __slots__ = ("_numbers", "_pairs")

    def __init__(self, numbers: "array[int]", pairs: int) -> None:
        self._numbers = numbers
        self._pairs = pairs

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> "Points":
        """Return these pairs, of numbers of 0 to 2**63 - 1."""
        numbers = array("q", [value for pair in pairs for value in pair])
        return cls(numbers, len(numbers) // 2)

    @property
    def values(self) -> "array[int]":
        """The second number of each pair."""
        return self._numbers[1 : 2 * self._pairs : 2]

    def __len__(self) -> int:
        return self._pairs

    @overload
    def __getitem__(self, place: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[tuple[int, int], ...]: ...
    def __getitem__(self, place: int | slice) -> tuple[int, int] | tuple[tuple[int, int], ...]:
        if isinstance(place, slice):
            return tuple([self[i] for i in range(*place.indices(self._pairs))])
        at = range(self._pairs)[place] * 2
        return self._numbers[at], self._numbers[at + 1]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        numbers = self._numbers
        return ((numbers[i], numbers[i + 1]) for i in range(0, 2 * self._pairs, 2))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Points, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))
