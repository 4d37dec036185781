"""The way to the library: one call at a time, its failure as a code, and what it is doing now."""

import ctypes
import importlib
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from gpuwatch.sensors.nvml.words import (
    FUNCTION_NOT_FOUND,
    LIBRARY_NOT_FOUND,
    UNREADABLE,
    WRONG_MODULE,
)

__all__ = ["Busy", "Calls", "FieldValue", "NvmlError"]

_LIBRARY = "libnvidia-ml.so.1"
# What pynvml of nvidia-ml-py has; the name is also claimed by older forks of it.
_NEEDED = (
    "NVMLError",
    "nvmlInitWithFlags",
    "nvmlGpmMetricsGet",
    "c_nvmlFieldValue_t",
    "c_nvmlProcessInfo_v3_t",
)


class NvmlError(Exception):
    """A call that failed: nvmlReturn `code` (or one of ours, below 0) of `function`."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function}: {code}")
        self.function = function
        self.code = code


class Busy(NamedTuple):
    """A call in flight: its function, the device (-1: none), and since when, in clock seconds."""

    function: str
    device: int
    since_s: float


class FieldValue(NamedTuple):
    """One field of a device: `code` 0 or why there is no value; `bits` of its type, 0 for a float.

    `at_s` is the driver's own clock at the reading, 0.0 where it gives none.
    """

    code: int
    value: float
    bits: int
    at_s: float


class Calls:
    """Calls functions of pynvml by name. One thread uses it; `busy` may be read by another.

    The module is imported, and the library loaded, by `load`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._module: ModuleType | None = None
        self._fields: dict[tuple[int, ...], Any] = {}
        self._room: Any = None
        self.device = -1
        self.busy: Busy | None = None

    def load(self) -> None:
        """Load the library.

        Raises:
            NvmlError: there is none, or the module pynvml is another project's.
        """
        if self._module is not None:
            return
        try:
            # First the library: without one, the module's 8,000 lines are not worth reading.
            ctypes.CDLL(_LIBRARY)
        except OSError:
            raise NvmlError("dlopen", LIBRARY_NOT_FOUND) from None
        try:
            module = importlib.import_module("pynvml")
        except ImportError:
            raise NvmlError("import", WRONG_MODULE) from None
        if not all(hasattr(module, name) for name in _NEEDED):
            raise NvmlError("import", WRONG_MODULE)
        self._module = module
        self._room = self._rooms(64)

    def make(self, name: str, *args: Any) -> Any:
        """Return a new object of a class of pynvml: a structure."""
        assert self._module is not None
        return getattr(self._module, name)(*args)

    def call(self, function: str, *args: Any) -> Any:
        """Call one function and return what it returns.

        Raises:
            NvmlError: it failed, or this pynvml or this library lacks it.
        """
        module = self._module
        assert module is not None
        found = getattr(module, function, None)
        if found is None:
            raise NvmlError(function, FUNCTION_NOT_FOUND)
        self.busy = Busy(function, self.device, self._clock())
        try:
            return found(*args)
        except module.NVMLError as exc:
            raise NvmlError(function, int(exc.value)) from None
        except (ValueError, TypeError, ctypes.ArgumentError):
            # A name that is no UTF-8, a NULL where a structure should be.
            raise NvmlError(function, UNREADABLE) from None
        finally:
            self.busy = None

    def fields(self, handle: Any, ids: Sequence[int]) -> list[FieldValue]:
        """Return these fields of a device, in their order.

        Not by pynvml's own function: some drivers write one entry past the last for NVLink fields,
        and it leaves no room for that.

        Raises:
            NvmlError: the call as a whole failed.
        """
        module = self._module
        assert module is not None
        key = tuple(ids)
        values = self._fields.get(key)
        if values is None:
            values = self._fields[key] = (module.c_nvmlFieldValue_t * (len(key) + 1))()
        for value, field in zip(values, key, strict=False):
            value.fieldId = field
            # All links of NVLink together; the other fields have no scope.
            value.scopeId = 0xFFFFFFFF if field in _ALL_LINKS else 0
            value.nvmlReturn = UNREADABLE
        function = "nvmlDeviceGetFieldValues"
        try:
            found = getattr(module.nvmlLib, function)
        except AttributeError:
            raise NvmlError(function, FUNCTION_NOT_FOUND) from None
        self.busy = Busy(function, self.device, self._clock())
        try:
            code = found(handle, ctypes.c_int(len(key)), values)
        finally:
            self.busy = None
        if code != 0:
            raise NvmlError(function, int(code))
        return [_field(values[i]) for i in range(len(key))]

    def processes(self, handle: Any, kind: str) -> list[tuple[int, int | None]]:
        """Return pid and bytes (None: not told) of the processes of a kind, Compute or Graphics.

        One call where pynvml makes two: a list costs the driver milliseconds.

        Raises:
            NvmlError: there is no list.
        """
        module = self._module
        assert module is not None
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        # Versions 2 and 3 share their structure.
        found = getattr(module.nvmlLib, f"{name}_v3", None) or getattr(
            module.nvmlLib, f"{name}_v2", None
        )
        if found is None:
            raise NvmlError(name, FUNCTION_NOT_FOUND)
        while True:
            number = ctypes.c_uint(len(self._room))
            self.busy = Busy(name, self.device, self._clock())
            try:
                code = int(found(handle, ctypes.byref(number), self._room))
            finally:
                self.busy = None
            if code != _INSUFFICIENT_SIZE or number.value > _MAX_ROOM:
                break
            self._room = self._rooms(max(2 * len(self._room), number.value + 16))
        if code != 0:
            raise NvmlError(name, code)
        entries = (self._room[i] for i in range(min(number.value, len(self._room))))
        return [(e.pid, None if e.usedGpuMemory == _NOT_TOLD else e.usedGpuMemory) for e in entries]

    def _rooms(self, number: int) -> Any:
        assert self._module is not None
        return (self._module.c_nvmlProcessInfo_v3_t * number)()


_INSUFFICIENT_SIZE = 7
_NOT_TOLD = 2**64 - 1
_MAX_ROOM = 1 << 16
_ALL_LINKS = frozenset({138, 139})
# Member of the union and width in bits, by NVML's type of value; c_ulong has 64 bits on Linux.
_TYPES = {
    0: ("dVal", 0),
    1: ("uiVal", 32),
    2: ("ulVal", 64),
    3: ("ullVal", 64),
    4: ("sllVal", 64),
    5: ("siVal", 32),
    6: ("usVal", 16),
}


def _field(raw: Any) -> FieldValue:
    member, bits = _TYPES.get(raw.valueType, ("", 0))
    if raw.nvmlReturn != 0 or not member:
        return FieldValue(raw.nvmlReturn or UNREADABLE, 0.0, 0, 0.0)
    return FieldValue(0, float(getattr(raw.value, member)), bits, max(0.0, raw.timestamp / 1e6))
