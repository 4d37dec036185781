"""Sequences that look like tuples of objects and are kept as bytes or numbers.

A `StepRecord` of a GPU takes about 900 bytes as an object with its numbers and 150 to 190 as the
bytes that it came in. At a thousand ranks with 64 of them that decides the monitor's memory; up to
`PACK_ABOVE` ranks it does not, and what is read at every tick had better be there.
"""

import gc
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Generic, TypeVar, overload

import msgspec

from gpuwatch.schema import Span, StepRecord

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
    """Turns objects of one type into bytes and back."""

    def __init__(self, kind: type[_T]) -> None:
        self.encode: Callable[[_T], bytes] = msgspec.msgpack.Encoder().encode
        self.decode: Callable[[bytes | memoryview], _T] = msgspec.msgpack.Decoder(kind).decode
        self.decode_all: Callable[[bytes], tuple[_T, ...]] = msgspec.msgpack.Decoder(
            tuple[kind, ...]  # type: ignore[valid-type]
        ).decode


class _Head(msgspec.Struct, array_like=True, frozen=True):
    """The beginning of a `StepRecord`: what follows is skipped, not made."""

    index: int


_heads_codec = Codec(_Head)
_raw_items = msgspec.msgpack.Decoder(tuple[msgspec.Raw, ...]).decode
records_codec = Codec(StepRecord)
spans_codec = Codec(Span)


_CHUNK_BYTES = 479
"""Of one object of bytes: with its 33 of overhead Python's own allocator has room for it, from
which memory is used again without gaps; larger ones come from the C library."""

_CHUNK_ITEMS = 15
"""Most items of an array whose head is one byte."""


def _chunks(items: Iterable[bytes], tail: bytes = b"\x90") -> list[bytes]:
    """Return these items after those of a chunk, as arrays of some of them each."""
    found: list[bytes] = []
    count, parts, size = tail[0] & 0xF, [tail[1:]], len(tail)
    for item in items:
        if count and (size + len(item) > _CHUNK_BYTES or count == _CHUNK_ITEMS):
            found.append(bytes((0x90 | count,)) + b"".join(parts))
            count, parts, size = 0, [], 1
        count += 1
        parts.append(item)
        size += len(item)
    if count:
        found.append(bytes((0x90 | count,)) + b"".join(parts))
    return found


class Packed(Sequence[_T]):
    """An immutable sequence of objects as bytes; what is asked for is made, and not kept.

    A few objects are in a chunk of bytes, and sequences that follow each other have their chunks
    in common: pictures that were made one after the other hold most of a window once.
    """

    __slots__ = ("_chunks", "_codec", "_count", "_skipped")

    def __init__(self, items: Iterable[bytes], codec: Codec[_T]) -> None:
        self._codec = codec
        self._chunks = tuple(_chunks(items))
        self._skipped = 0
        self._count = sum([chunk[0] & 0xF for chunk in self._chunks])

    def followed_by(self, items: Iterable[_T], most: int) -> "Packed[_T]":
        """Return the last `most` of these objects with the given ones after them."""
        new = list(map(self._codec.encode, items))
        old = self._chunks
        chunks = (*old[:-1], *_chunks(new, old[-1])) if old else tuple(_chunks(new))
        count, skipped = self._count + len(new), self._skipped
        if count > most:
            skipped, count = skipped + count - most, most
            whole = 0
            while skipped >= (held := chunks[whole][0] & 0xF):
                skipped -= held
                whole += 1
            chunks = chunks[whole:]
        return self._of(chunks, skipped, count)

    def _of(self, chunks: tuple[bytes, ...], skipped: int, count: int) -> "Packed[_T]":
        other = self.as_codec(self._codec)
        other._chunks, other._skipped, other._count = chunks, skipped, count
        return other

    def first(self, count: int) -> tuple[_T, ...]:
        """Return the oldest so many as objects."""
        found: list[_T] = []
        end = min(count, self._count) + self._skipped
        for chunk in self._chunks:
            found += self._codec.decode_all(chunk)
            if len(found) >= end:
                break
        return tuple(found[self._skipped : end])

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
                return self._codec.decode_all(chunk)[at]
            at -= held
        raise IndexError(place)

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
            kept = _raw_items(chunks[-1])[:-beyond]
            chunks = (*chunks[:-1], *_chunks(map(bytes, kept)))
        return self._of(chunks, first - seen, count)

    def __iter__(self) -> Iterator[_T]:
        found = chain.from_iterable(map(self._codec.decode_all, self._chunks))
        return islice(found, self._skipped, None)

    def __reversed__(self) -> Iterator[_T]:
        chunks = map(self._codec.decode_all, reversed(self._chunks))
        return islice(chain.from_iterable(map(reversed, chunks)), self._count)

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
    first, last = heads[0].index, heads[-1].index
    if last - first == len(window) - 1:
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
