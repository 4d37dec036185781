"""Readings of devices and processes that take a fifth of the memory of a dict of them.

What a sampler says of a thousand devices and their processes differs in its numbers; names, units
and sources are the same for all of one kind, every second.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from math import nan
from typing import Any, TypeVar, cast

from msgspec.structs import astuple, replace

from gpuwatch.schema import GpuSample, ProcessSample, Reading, SensorFrame
from gpuwatch.store.shared import PLAIN, clean

__all__ = ["Lean", "lean_frame"]

_MOST = 1024
"""Layouts that are known; beyond that it begins anew, which costs nothing but sharing."""

_Kinds = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[bool, ...]]


class _Layout:
    """Names in their order, and of each unit, source, state, reason and whether it is unknown."""

    __slots__ = ("kinds", "picked", "places")

    def __init__(self, names: tuple[str, ...], kinds: _Kinds) -> None:
        self.places = {clean(name): place for place, name in enumerate(names)}
        *texts, unknown = clean(kinds)
        self.kinds = tuple(zip(*texts, unknown or (False,) * len(names), strict=True))
        self.picked: dict[tuple[str, ...], tuple[int | None, ...]] = {}


_layouts: dict[tuple[tuple[str, ...], _Kinds], _Layout] = {}

_NO_KINDS: _Kinds = ((), (), (), (), ())


class Lean(Mapping[str, Reading]):
    """Immutable readings by name, made when they are asked for."""

    __slots__ = ("_layout", "_numbers")

    def __init__(self, readings: Mapping[str, Reading]) -> None:
        names = tuple(readings)
        values: tuple[float | None, ...] = ()
        ages: tuple[float, ...] = ()
        kinds = _NO_KINDS
        if names:
            columns = zip(*map(astuple, readings.values()), strict=True)
            values, units, sources, ages, states, reasons = columns
            unknown = tuple([value is None for value in values]) if None in values else ()
            kinds = (units, sources, states, reasons, unknown)
        layout = _layouts.get((names, kinds))
        if layout is None:
            if len(_layouts) >= _MOST:
                _layouts.clear()
            layout = _layouts[names, kinds] = _Layout(names, kinds)
        self._layout = layout
        if kinds[4]:
            values = tuple([nan if value is None else value for value in values])
        self._numbers: array[float] = array("d", cast("tuple[float, ...]", values) + ages)

    def __getitem__(self, name: str) -> Reading:
        layout = self._layout
        place = layout.places[name]
        unit, source, state, reason, unknown = layout.kinds[place]
        value = None if unknown else self._numbers[place]
        age_s = self._numbers[place + len(layout.kinds)]
        return Reading(value, unit, source, age_s, state, reason)

    def get(self, name: object, default: Any = None) -> Any:
        """Return a reading by its name, or the default."""
        return self[name] if name in self._layout.places else default

    def some(self, names: tuple[str, ...]) -> list[float]:
        """Return the values of some names, NaN where one is not known."""
        picked = self._layout.picked.get(names)
        if picked is None:
            picked = self._layout.picked[names] = tuple(map(self._layout.places.get, names))
        numbers = self._numbers
        return [nan if place is None else numbers[place] for place in picked]

    def __contains__(self, name: object) -> bool:
        return name in self._layout.places

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.places)

    def __len__(self) -> int:
        return len(self._layout.places)

    def __repr__(self) -> str:
        return repr(dict(self))


_S = TypeVar("_S", GpuSample, ProcessSample)


def _lean(sample: _S, place: int) -> _S:
    """Return a sample with lean readings, which are at that place, and its texts cleaned."""
    values = list(astuple(sample))
    readings, values[place] = values[place], None
    shown = [item if type(item) in PLAIN else clean(item) for item in values]
    # A Struct holds what it is given; nobody writes to the readings of a picture.
    shown[place] = Lean(readings)
    return type(sample)(*shown)


_GPU_READINGS = GpuSample.__struct_fields__.index("readings")
_PROCESS_READINGS = ProcessSample.__struct_fields__.index("readings")


def lean_frame(frame: SensorFrame) -> SensorFrame:
    """Return a sampler's tick with lean readings and every text in it fit for a terminal."""
    rest: SensorFrame = clean(replace(frame, gpus=(), processes=()))
    return replace(
        rest,
        gpus=tuple([_lean(gpu, _GPU_READINGS) for gpu in frame.gpus]),
        processes=tuple([_lean(sample, _PROCESS_READINGS) for sample in frame.processes]),
    )
