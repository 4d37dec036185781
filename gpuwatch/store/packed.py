"""Sequences that look like tuples of objects and are kept as bytes or numbers.

A `StepRecord` of a GPU takes about 900 bytes as an object with its numbers and 150 to 190 as the
bytes that it came in. At a thousand ranks with 64 of them that decides the monitor's memory; up to
`PACK_ABOVE` ranks it does not, and what is read at every tick had better be there.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, overload

import msgspec

from gpuwatch.schema import Span, StepRecord

__all__ = [
    "PACK_ABOVE",
    "Codec",
    "Packed",
    "Points",
    "records_codec",
    "spans_codec",
    "step_indices",
]

PACK_ABOVE = 128
"""A store of more ranks than this keeps steps and spans as bytes."""

_T = TypeVar("_T")


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


_head_of = msgspec.msgpack.Decoder(_Head).decode

records_codec = Codec(StepRecord)
spans_codec = Codec(Span)


def _array_head(count: int) -> bytes:
    """Return what MessagePack writes before so many items of an array."""
    return bytes((0x90 | count,)) if count < 16 else b"\xdd" + count.to_bytes(4, "big")


class Packed(Sequence[_T]):
    """An immutable sequence of objects as bytes; what is asked for is made, and not kept.

    The bytes are one block, so that a window of 64 small ones does not cost 64 objects.
    """

    __slots__ = ("_codec", "_data", "_sizes")

    def __init__(self, items: Iterable[bytes], codec: Codec[_T]) -> None:
        found = tuple(items)
        self._codec = codec
        self._data = b"".join(found)
        self._sizes = _numbers([*map(len, found)])

    @classmethod
    def _block(cls, codec: Codec[_T], data: bytes, sizes: "bytes | array[int]") -> "Packed[_T]":
        block: Packed[_T] = cls.__new__(cls)
        block._codec, block._data, block._sizes = codec, data, sizes
        return block

    def followed_by(self, items: Iterable[_T], most: int) -> "Packed[_T]":
        """Return the last `most` of these objects with the given ones after them."""
        new = list(map(self._codec.encode, items))[-most:]
        old, data = self._sizes, self._data
        gone = len(old) + len(new) - most
        if gone > 0:
            data = data[sum(old[:gone]) :]
            old = old[gone:]
        sizes = _numbers([*old, *map(len, new)])
        return self._block(self._codec, data + b"".join(new), sizes)

    def first(self, count: int) -> tuple[_T, ...]:
        """Return the oldest so many as objects."""
        data = self._data[: sum(self._sizes[:count])]
        return self._codec.decode_all(_array_head(min(count, len(self._sizes))) + data)

    def held(self, first: int = 0) -> list[bytes]:
        """Return the objects from a place on, each as its bytes."""
        end = sum(self._sizes[:first])
        found = []
        for size in self._sizes[first:]:
            found.append(self._data[end : end + size])
            end += size
        return found

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, place: int) -> _T: ...
    @overload
    def __getitem__(self, place: slice) -> "Packed[_T]": ...
    def __getitem__(self, place: int | slice) -> "_T | Packed[_T]":
        if isinstance(place, slice):
            first, end, step = place.indices(len(self._sizes))
            if step != 1:
                held = self.held()
                return Packed([held[i] for i in range(first, end, step)], self._codec)
            sizes = self._sizes[first:end]
            cut = sum(self._sizes[:first])
            return self._block(self._codec, self._data[cut : cut + sum(sizes)], sizes)
        at = range(len(self._sizes))[place]
        cut = sum(self._sizes[:at])
        return self._codec.decode(self._data[cut : cut + self._sizes[at]])

    def __iter__(self) -> Iterator[_T]:
        return iter(self._codec.decode_all(_array_head(len(self._sizes)) + self._data))

    def __reversed__(self) -> Iterator[_T]:
        end = len(self._data)
        for size in reversed(self._sizes):
            yield self._codec.decode(self._data[end - size : end])
            end -= size

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Packed):
            return self._data == other._data
        return NotImplemented if not isinstance(other, tuple) else tuple(self) == other

    def __hash__(self) -> int:
        return hash(self._data)


def _numbers(sizes: list[int]) -> "bytes | array[int]":
    """Return sizes with a byte each where they are small, as those of steps are."""
    try:
        return bytes(sizes)
    except ValueError:
        return array("I", sizes)


def step_indices(window: Sequence[StepRecord]) -> Sequence[int]:
    """Return the indices of steps that are in order; a range where none is missing."""
    if not window:
        return range(0)
    if isinstance(window, Packed):
        data = memoryview(window._data)
        first = _head_of(data[: window._sizes[0]]).index
        last = _head_of(data[len(data) - window._sizes[-1] :]).index
    else:
        first, last = window[0].index, window[-1].index
    if last - first == len(window) - 1:
        return range(first, last + 1)
    if isinstance(window, Packed):
        return [_head_of(item).index for item in window.held()]
    return [record.index for record in window]


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
