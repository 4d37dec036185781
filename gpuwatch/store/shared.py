"""Text that is fit for a terminal, and one object for equal ones.

A thousand ranks say almost the same of themselves, and their sensors the same units and sources
every second: as objects of their own these would take more memory than the numbers beside them.
"""

from operator import is_not
from typing import Any, TypeVar, cast

from msgspec import Struct
from msgspec.structs import astuple

from gpuwatch.frames import printable

__all__ = ["PLAIN", "Shared", "clean"]

_T = TypeVar("_T")
_S = TypeVar("_S", bound=Struct)

PLAIN = frozenset({int, float, bool, type(None)})
"""Types of what needs no cleaning."""

_MOST = 8192
"""Of what is known; beyond that it begins anew, which costs nothing but sharing."""

_LONGEST = 64
"""Longer texts come once."""

_texts: dict[str, str] = {}


def _text(text: str) -> str:
    known = _texts.get(text)
    if known is not None:
        return known
    shown = printable(text)
    if len(text) <= _LONGEST:
        if len(_texts) >= _MOST:
            _texts.clear()
        _texts[text] = shown
    return shown


def clean(value: _T) -> _T:
    """Return the value with every text in it fit for a terminal; equal short texts are shared.

    It may be a text, a number, a Struct, or a tuple or dict of them.
    """
    kind = type(value)
    if kind in PLAIN or value == ():
        return value
    if kind is str:  # mostly one that was seen before
        known: Any = _texts.get(value)  # type: ignore[call-overload]
        if known is not None:
            return known  # type: ignore[no-any-return]
    found: Any = value
    if isinstance(value, str):
        found = _text(value)
    elif isinstance(value, Struct):
        old = astuple(value)
        new = [item if type(item) in PLAIN else clean(item) for item in old]
        if any(map(is_not, old, new)):
            found = kind(*new)
    elif isinstance(value, tuple):
        if value:
            found = tuple([clean(item) for item in value])
    elif isinstance(value, dict) and value:
        found = {_text(key): clean(item) for key, item in value.items()}
    return cast("_T", found)


class Shared:
    """Knows texts, tuples and Structs that were seen, and gives the first one of equal ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[type, Any], Any] = {}

    def parts(self, value: _S) -> _S:
        """Return an equal Struct of shared parts; it is not remembered itself."""
        return type(value)(*[self.one(item) for item in astuple(value)])

    def one(self, value: _T) -> _T:
        """Return an equal object, its parts shared as far as they are equal to known ones."""
        if not isinstance(value, (str, tuple, Struct)):
            return value
        try:
            known = self._known.get((type(value), value))
        except TypeError:
            return value  # something in it has no hash
        if known is not None:
            return cast("_T", known)
        shared: Any = value
        if isinstance(value, tuple):
            shared = tuple([self.one(item) for item in value])
        elif isinstance(value, Struct):
            shared = self.parts(value)
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[type(value), shared] = shared
        return cast("_T", shared)
