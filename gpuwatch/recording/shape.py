"""Structs as JSON objects with names, and back, with one sentence for every mistake.

The shape follows from `gpuwatch.schema` alone, so a new field there is a new field here:

* an object has the fields of its Struct, those with their default value left out;
* a duration `x_ns` is written `x_ms`, a number of milliseconds with all its digits; read, it may
  also be `x_s` or `x_ns`;
* phases are `phases_ms` and `device_phases_ms`, objects from phase to milliseconds;
* NaN and infinity, which JSON has not, are the texts "nan", "inf" and "-inf".
"""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect as mi

from gpuwatch.schema import PhasesNs, Reading

__all__ = ["FieldError", "names_of", "parse", "read_fields", "read_struct", "shown", "written"]

_T = TypeVar("_T", bound=msgspec.Struct)

_UNITS_NS = {"_ms": 10**6, "_s": 10**9, "_us": 10**3, "_ns": 1}
_RENAMED = {"host": "phases_ms", "device": "device_phases_ms"}
"""Fields of type `PhasesNs`."""

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_SHOWN_CHARACTERS = 40


class FieldError(ValueError):
    """A mistake in one field; the text says which and what is expected, without its line."""


# --- writing -----------------------------------------------------------------------------------


def _milliseconds(value_ns: int) -> msgspec.Raw:
    whole, rest = divmod(value_ns, 10**6)
    digits = f"{whole}.{rest:06d}".rstrip("0").rstrip(".") if rest else str(whole)
    return msgspec.Raw(digits.encode())


def _value(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return written(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple):
        return [_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    return value


def written(struct: msgspec.Struct, leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """Return the JSON object of a Struct, to be encoded by msgspec; defaults are left out."""
    found: dict[str, Any] = {}
    phases = isinstance(struct, PhasesNs)
    for field in _fields(type(struct)):
        value = getattr(struct, field.name)
        if field.name in leave_out or (not field.required and _is_default(field, value)):
            continue
        if phases:
            found[field.name] = _milliseconds(value)
        elif field.name.endswith("_ns"):
            found[_stem(field.name) + "_ms"] = None if value is None else _milliseconds(value)
        elif isinstance(value, PhasesNs):
            found[_RENAMED.get(field.name, field.name)] = written(value)
        else:
            found[field.name] = _value(value)
    return found


def _is_default(field: mi.Field, value: Any) -> bool:
    if field.default is not msgspec.NODEFAULT:
        return bool(type(value) is type(field.default) and value == field.default)
    return field.default_factory is not msgspec.NODEFAULT and value == field.default_factory()


def _stem(name: str) -> str:
    return name.removesuffix("_ns")


@cache
def _fields(cls: type[msgspec.Struct]) -> tuple[mi.Field, ...]:
    kind = mi.type_info(cls)
    assert isinstance(kind, mi.StructType)
    return kind.fields


# --- reading -----------------------------------------------------------------------------------


def parse(line: str) -> dict[str, Any]:
    """Return the object of one line; numbers with a point are Decimals.

    Raises:
        FieldError: it is no JSON object.
    """
    try:
        found = json.loads(
            line,
            parse_float=Decimal,
            parse_constant=_refuse_constant,
            object_pairs_hook=_object,
        )
    except FieldError:
        raise
    except json.JSONDecodeError as exc:
        what = exc.msg.lower().removesuffix(" at")
        raise FieldError(f"no JSON: {what} at column {exc.colno}") from None
    except (ValueError, RecursionError) as exc:
        raise FieldError(f"no JSON that can be read: {exc}") from None
    if not isinstance(found, dict):
        raise FieldError(f"a line is an object, {{...}}, not {shown(found)}")
    return found


def _refuse_constant(word: str) -> float:
    name = {"NaN": "nan", "Infinity": "inf"}.get(word, "-inf")
    raise FieldError(f'{word} is no JSON; write "{name}", or null for what is not known')


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FieldError(f'"{twice}" is there twice')
    return found


def shown(value: Any) -> str:
    """Return a value as its writer may recognise it, in a few characters."""
    text = json.dumps(value, default=float, ensure_ascii=True)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def read_struct(
    cls: type[_T],
    found: Mapping[str, Any],
    what: str,
    *,
    more: Iterable[str] = (),
    defaults: Mapping[str, Any] | None = None,
    strict: bool = True,
) -> _T:
    """Return the Struct that an object of a line stands for.

    Args:
        cls: the Struct.
        found: the object; its keys named in `more` are somebody else's.
        what: what the object is, with its article, for sentences.
        more: further keys that it may have.
        defaults: values of the Struct's fields that the object does not have.
        strict: whether a name that is not known is a mistake.

    Raises:
        FieldError: a field is missing, unknown, of the wrong type or out of range.
    """
    return cast("_T", _struct(cls, found, what, "", set(more), defaults or {}, strict))


def read_fields(
    cls: type[msgspec.Struct], found: Mapping[str, Any], what: str, *, more: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the fields of the Struct that an object names, and no others.

    Raises:
        FieldError: a field is unknown, of the wrong type or out of range.
    """
    return _fields_of(cls, found, what, "", set(more), strict=True)


def names_of(cls: type[msgspec.Struct]) -> list[str]:
    """Return the names that an object of the Struct may have, as they are documented."""
    return [_documented(field) for field in _fields(cls)]


def _documented(field: mi.Field) -> str:
    if field.name.endswith("_ns"):
        return _stem(field.name) + "_ms"
    return _RENAMED.get(field.name, field.name) if _is_phases(field.type) else field.name


def _is_phases(kind: mi.Type) -> bool:
    options = kind.types if isinstance(kind, mi.UnionType) else (kind,)
    return any(isinstance(option, mi.StructType) and option.cls is PhasesNs for option in options)


@cache
def _readers(cls: type[msgspec.Struct]) -> dict[str, tuple[mi.Field, int]]:
    """Return, by name in JSON, the field and by what its number is multiplied (0: not at all)."""
    found: dict[str, tuple[mi.Field, int]] = {}
    for field in _fields(cls):
        if field.name.endswith("_ns"):
            for suffix, scale in _UNITS_NS.items():
                found[_stem(field.name) + suffix] = (field, scale)
        else:
            found[_documented(field)] = (field, 10**6 if cls is PhasesNs else 0)
    return found


def _struct(
    cls: type[msgspec.Struct],
    found: Mapping[str, Any],
    what: str,
    path: str,
    more: set[str],
    defaults: Mapping[str, Any],
    strict: bool,
) -> msgspec.Struct:
    values = {**defaults, **_fields_of(cls, found, what, path, more, strict)}
    for field in _fields(cls):
        if field.required and field.name not in values:
            raise FieldError(f'{what} needs "{path}{_documented(field)}"')
    return cls(**values)


def _fields_of(
    cls: type[msgspec.Struct],
    found: Mapping[str, Any],
    what: str,
    path: str,
    more: set[str],
    strict: bool,
) -> dict[str, Any]:
    readers = _readers(cls)
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    for name, value in found.items():
        if name in more:
            continue
        reader = readers.get(name)
        if reader is None:
            if strict:
                raise FieldError(_unknown(name, what, path, [*names_of(cls), *more]))
            continue
        field, scale = reader
        if field.name in given:
            raise FieldError(f'"{path}{given[field.name]}" and "{path}{name}" say the same')
        given[field.name] = name
        values[field.name] = _read(field.type, value, what, f"{path}{name}", scale, strict)
    return values


def _unknown(name: str, what: str, path: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f'; did you mean "{path}{near[0]}"?' if near else ""
    return f'{what} has no "{path}{name}"{hint}'


def _read(kind: mi.Type, value: Any, what: str, path: str, scale: int, strict: bool) -> Any:
    options = kind.types if isinstance(kind, mi.UnionType) else (kind,)
    if value is None:
        if any(isinstance(option, mi.NoneType) for option in options):
            return None
        if isinstance(kind, mi.StructType) and kind.cls is Reading:
            return Reading(None, source="trace", state="na", reason="not known to the trace")
        return _fail(kind, value, what, path, scale)
    for option in options:
        reader = _BY_TYPE.get(type(option))
        if reader is None:
            continue
        result = reader(option, value, what, path, scale, strict)
        if result is not _NO:
            return result
    return _fail(kind, value, what, path, scale)


_NO = object()
"""What a reader returns for a value that is none of its type."""


def _whole(kind: mi.Type, value: Any, what: str, path: str, scale: int, strict: bool) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return _NO
    if scale:
        try:
            value = int((Decimal(value) * scale).to_integral_value())
        except (InvalidOperation, OverflowError):
            return _NO
    elif not isinstance(value, int):
        return _NO
    return value if _within(kind, value) else _NO


def _number(kind: mi.Type, value: Any, what: str, path: str, scale: int, strict: bool) -> Any:
    if isinstance(value, str) and value in _NOT_FINITE:
        value = _NOT_FINITE[value]
    elif isinstance(value, bool) or not isinstance(value, int | Decimal):
        return _NO
    try:
        number = float(value)
    except OverflowError:
        return _NO
    return number if _within(kind, number) else _NO


def _within(kind: Any, value: float) -> bool:
    return not (
        (kind.ge is not None and not value >= kind.ge)
        or (kind.le is not None and not value <= kind.le)
        or (kind.lt is not None and not value < kind.lt)
    )


def _text(kind: Any, value: Any, what: str, path: str, scale: int, strict: bool) -> Any:
    if not isinstance(value, str):
        return _NO
    if kind.max_length is not None and len(value) > kind.max_length:
        return _NO
    try:
        value.encode()
    except UnicodeError:
        raise FieldError(f'"{path}" of {what} holds half a character') from None
    return value


def _flag(kind: mi.Type, value: Any, what: str, path: str, scale: int, strict: bool) -> Any:
    return value if isinstance(value, bool) else _NO


def _literal(kind: Any, value: Any, what: str, path: str, scale: int, strict: bool) -> Any:
    return value if isinstance(value, str) and value in kind.values else _NO


def _list(kind: Any, value: Any, what: str, path: str, scale: int, strict: bool) -> Any:
    if not isinstance(value, list):
        return _NO
    if kind.max_length is not None and len(value) > kind.max_length:
        return _NO
    return tuple(
        _read(kind.item_type, item, what, f"{path}[{i}]", scale, strict)
        for i, item in enumerate(value)
    )


def _map(kind: Any, value: Any, what: str, path: str, scale: int, strict: bool) -> Any:
    if not isinstance(value, dict):
        return _NO
    if kind.max_length is not None and len(value) > kind.max_length:
        return _NO
    read = {}
    for key, item in value.items():
        read_key = _read(kind.key_type, key, what, f"{path}.{key}", 0, strict)
        read[read_key] = _read(kind.value_type, item, what, f"{path}.{key}", scale, strict)
    return read


def _nested(kind: Any, value: Any, what: str, path: str, scale: int, strict: bool) -> Any:
    if kind.cls is Reading and not isinstance(value, dict):
        return _plain_reading(value, what, path)
    if not isinstance(value, dict):
        return _NO
    return _struct(kind.cls, value, what, f"{path}.", set(), {}, strict)


def _plain_reading(value: Any, what: str, path: str) -> Any:
    """A reading may be a number alone; its unit follows from its name where that says it."""
    name = path.rpartition(".")[2]
    number = _number(_ANY_NUMBER, value, what, path, 0, strict=True)
    if number is _NO:
        return _NO
    return Reading(number, _unit_of(name), "trace")


def _unit_of(name: str) -> str:
    """Return the unit that the sensors measure a reading of that name in, empty for a count."""
    if name in _UNITS:
        return _UNITS[name]
    return next((unit for ending, unit in _UNIT_ENDINGS if name.endswith(ending)), "")


_UNITS: Mapping[str, str] = {
    **dict.fromkeys(("gpu_util", "memory_util", "fan", "dram_active", "tensor_active"), "%"),
    **dict.fromkeys(("sm_active", "sm_occupancy"), "%"),
    **dict.fromkeys(("psi_cpu_some", "psi_io_some", "psi_io_full"), "%"),
    **dict.fromkeys(("psi_memory_some", "psi_memory_full"), "%"),
    **dict.fromkeys(("rss", "uss", "pss", "memory_limit", "processes_memory"), "B"),
    **dict.fromkeys(("pcie_rx", "pcie_tx", "nvlink_rx", "nvlink_tx", "swap_in", "swap_out"), "B/s"),
    **dict.fromkeys(("power", "power_limit"), "W"),
    "read_latency": "ms",
}
_UNIT_ENDINGS = (
    ("_percent", "%"),
    ("_bytes_per_s", "B/s"),
    ("_ms_per_s", "ms/s"),
    ("_per_s", "1/s"),
    ("_bytes", "B"),
    ("_used", "B"),
    ("_total", "B"),
    ("temperature", "°C"),
    ("_clock", "MHz"),
    ("_clock_max", "MHz"),
)
"""As `gpuwatch.sensors` gives them; the first ending that fits decides."""


_ANY_NUMBER = mi.FloatType()

_BY_TYPE: Mapping[type[mi.Type], Callable[[Any, Any, str, str, int, bool], Any]] = {
    mi.IntType: _whole,
    mi.FloatType: _number,
    mi.StrType: _text,
    mi.BoolType: _flag,
    mi.LiteralType: _literal,
    mi.VarTupleType: _list,
    mi.DictType: _map,
    mi.StructType: _nested,
}


# --- sentences ---------------------------------------------------------------------------------


def _fail(kind: mi.Type, value: Any, what: str, path: str, scale: int) -> Any:
    raise FieldError(f'"{path}" of {what} must be {_described(kind, scale)}, not {shown(value)}')


def _described(kind: mi.Type, scale: int) -> str:
    match kind:
        case mi.UnionType():
            # What is not known may always be left out: null needs no word.
            return " or ".join(
                _described(option, scale)
                for option in kind.types
                if not isinstance(option, mi.NoneType)
            )
        case mi.IntType() if scale:
            high = kind.le if kind.le is not None else math.inf
            return f"a number from 0 to {high / scale:g}"
        case mi.IntType():
            return f"a whole number{_bounds(kind)}"
        case mi.FloatType():
            return f"a number{_bounds(kind)}"
        case mi.StrType():
            return "a text" if kind.max_length is None else f"a text up to {kind.max_length} long"
        case mi.BoolType():
            return "true or false"
        case mi.LiteralType():
            return "one of " + ", ".join(f'"{value}"' for value in kind.values)
        case mi.VarTupleType():
            most = "" if kind.max_length is None else f" of up to {kind.max_length}"
            return f"a list{most}"
        case mi.StructType() if kind.cls is Reading:
            return "a number or an object with a value"
        case _:
            return "an object"


def _bounds(kind: Any) -> str:
    low, high = kind.ge, kind.le if kind.le is not None else kind.lt
    if low is None and high is None:
        return ""
    most = "" if high is None else f" to {high:,g}" if isinstance(high, float) else f" to {high:,}"
    if kind.le is None and kind.lt is not None:
        most = f" to {kind.lt - 1:,}"
    return f" from {low:g}{most}"
