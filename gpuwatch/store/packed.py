"""Sequences that look like tuples of objects and are kept as bytes or numbers.

A `StepRecord` of a GPU takes about 900 bytes as an object with its numbers and 190 as the bytes
that it came in. At a thousand ranks with 64 of them that is what decides the monitor's memory;
up to `PACK_ABOVE` ranks it does not, and what is read at every tick had better be there.
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
        self._encoder = msgspec.msgpack.Encoder()
        self.decode: Callable[[bytes], _T] = msgspec.msgpack.Decoder(kind).decode

    def encode(self, item: _T) -> bytes:
        """Return an object as bytes."""
        return self._encoder.encode(item)


class _Head(msgspec.Struct, array_like=True, frozen=True):
    """The beginning of a `StepRecord`: what follows is skipped, not made."""

    index: int


_head_of = msgspec.msgpack.Decoder(_Head).decode

records_codec = Codec(StepRecord)
spans_codec = Codec(Span)


class Packed(Sequence[_T]):
    """An immutable sequence of objects; each is made when it is asked for, and not kept."""

    __slots__ = ("_codec", "items")

    def __init__(self, items: tuple[bytes, ...], codec: Codec[_T]) -> None:
        self.items = items
        self._codec = codec

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, place: int) -> _T: ...
    @overload
    def __getitem__(self, place: slice) -> "Packed[_T]": ...
    def __getitem__(self, place: int | slice) -> "_T | Packed[_T]":
        if isinstance(place, slice):
            return Packed(self.items[place], self._codec)
        return self._codec.decode(self.items[place])

    def __iter__(self) -> Iterator[_T]:
        return map(self._codec.decode, self.items)

    def __reversed__(self) -> Iterator[_T]:
        return map(self._codec.decode, reversed(self.items))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Packed):
            return self.items == other.items
        return NotImplemented if not isinstance(other, tuple) else tuple(self) == other

    def __hash__(self) -> int:
        return hash(self.items)


def step_indices(window: Sequence[StepRecord]) -> Sequence[int]:
    """Return the indices of steps that are in order; a range where none is missing."""
    if not window:
        return range(0)
    if isinstance(window, Packed):
        first, last = _head_of(window.items[0]).index, _head_of(window.items[-1]).index
    else:
        first, last = window[0].index, window[-1].index
    if last - first == len(window) - 1:
        return range(first, last + 1)
    if isinstance(window, Packed):
        return [_head_of(item).index for item in window.items]
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
