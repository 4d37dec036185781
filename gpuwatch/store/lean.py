"""Readings of devices and processes that take a fifth of the memory of a dict of them.

What a sampler says of a thousand devices and their processes differs in its numbers; names, units
and sources are the same for all of one kind, every second.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from math import nan
from typing import cast

from msgspec.structs import replace

from gpuwatch.schema import GpuSample, ProcessSample, Reading, SensorFrame
from gpuwatch.store.shared import clean

__all__ = ["Lean", "lean_frame"]

_MOST = 1024
"""Layouts that are known; beyond that it begins anew, which costs nothing but sharing."""

_Kind = tuple[str, str, str, str, bool]


class _Layout:
    """Names in their order, and of each unit, source, state, reason and whether it is unknown."""

    __slots__ = ("kinds", "places")

    def __init__(self, names: tuple[str, ...], kinds: tuple[_Kind, ...]) -> None:
        self.places = {clean(name): place for place, name in enumerate(names)}
        self.kinds = clean(kinds)


_layouts: dict[tuple[tuple[str, ...], tuple[_Kind, ...]], _Layout] = {}


class Lean(Mapping[str, Reading]):
    """Immutable readings by name, made when they are asked for."""

    __slots__ = ("_layout", "_numbers")

    def __init__(self, readings: Mapping[str, Reading]) -> None:
        names = tuple(readings)
        found = readings.values()
        kinds = tuple(
            [(one.unit, one.source, one.state, one.reason, one.value is None) for one in found]
        )
        layout = _layouts.get((names, kinds))
        if layout is None:
            if len(_layouts) >= _MOST:
                _layouts.clear()
            layout = _layouts[names, kinds] = _Layout(names, kinds)
        self._layout = layout
        values = [nan if one.value is None else one.value for one in found]
        self._numbers = array("d", values + [one.age_s for one in found])

    def __getitem__(self, name: str) -> Reading:
        layout = self._layout
        place = layout.places[name]
        unit, source, state, reason, unknown = layout.kinds[place]
        value = None if unknown else self._numbers[place]
        age_s = self._numbers[place + len(layout.kinds)]
        return Reading(value, unit, source, age_s, state, reason)  # type: ignore[arg-type]

    def number(self, name: str) -> float:
        """Return a value, NaN where it is not known."""
        place = self._layout.places.get(name)
        return nan if place is None else self._numbers[place]

    def __contains__(self, name: object) -> bool:
        return name in self._layout.places

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.places)

    def __len__(self) -> int:
        return len(self._layout.places)

    def __repr__(self) -> str:
        return repr(dict(self))


def _lean(readings: Mapping[str, Reading]) -> dict[str, Reading]:
    # A Struct holds what it is given; nobody writes to the readings of a picture.
    return cast("dict[str, Reading]", Lean(readings))


def lean_frame(frame: SensorFrame) -> SensorFrame:
    """Return a sampler's tick with lean readings and every text in it fit for a terminal."""
    gpus: list[GpuSample] = [replace(gpu, readings=_lean(gpu.readings)) for gpu in frame.gpus]
    processes: list[ProcessSample] = [
        replace(sample, readings=_lean(sample.readings)) for sample in frame.processes
    ]
    return clean(replace(frame, gpus=tuple(gpus), processes=tuple(processes)))
