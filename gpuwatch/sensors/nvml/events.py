"""Xids: the driver's error reports, waited for on a thread of its own."""

import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gpuwatch.schema import GpuEvent
from gpuwatch.sensors.nvml.calls import Calls, NvmlError
from gpuwatch.sensors.nvml.words import GPU_LOST, TIMEOUT, xid_is_hardware, xid_sentence

__all__ = ["XidWatch"]

XID = 0x8  # nvmlEventTypeXidCriticalError

WAIT_MS = 2000
"""An event ends the wait at once; its length only says how long `stop` may have to wait."""

_KEEP = 16
_STOP_S = WAIT_MS / 1000.0 + 1.0


class XidWatch:
    """Collects the Xids of the registered devices. The driver reports each one once, so that a
    new watch takes over what the one `before` it has heard.

    Some never come this way (79, 119 and 120 have been missed): a device that is lost says so by
    its readings, not here.
    """

    def __init__(
        self,
        calls: Calls,
        wall: Callable[[], float] = time.time,
        before: "XidWatch | None" = None,
    ) -> None:
        self._calls = calls
        self._wall = wall
        self._lock = threading.Lock()
        self._index: dict[int, int] = {}
        self._events: dict[int, deque[GpuEvent]] = {} if before is None else before._events
        self._set: Any = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def register(self, index: int, handle: Any) -> None:
        """Wait for Xids of this device too. One without events, or refused, has none."""
        address = ctypes.cast(handle, ctypes.c_void_p).value or 0
        with self._lock:
            again = address in self._index
            self._index[address] = index
        if again:
            return
        try:
            if self._set is None:
                self._set = self._calls.call("nvmlEventSetCreate")
            types = self._calls.call("nvmlDeviceGetSupportedEventTypes", handle)
            if types & XID:
                self._calls.call("nvmlDeviceRegisterEvents", handle, XID, self._set)
        except NvmlError:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="gpuwatch-xid", daemon=True)
            self._thread.start()

    def events(self, index: int) -> tuple[GpuEvent, ...]:
        """Return the last events of a device, the oldest first."""
        with self._lock:
            return tuple(self._events.get(index, ()))

    def stop(self) -> bool:
        """End the thread and free the set; False if it is still in a call, where it stays."""
        self._stopping.set()
        thread = self._thread
        if thread is not None:
            thread.join(_STOP_S)
            if thread.is_alive():
                return False
        if self._set is not None:
            with contextlib.suppress(NvmlError):
                self._calls.call("nvmlEventSetFree", self._set)
            self._set = None
        return True

    def _work(self) -> None:
        # Calls of its own: what the sampling thread does is told apart from this endless wait.
        calls = Calls()
        try:
            calls.load()
        except NvmlError:
            return
        while not self._stopping.is_set():
            try:
                data = calls.call("nvmlEventSetWait_v2", self._set, WAIT_MS)
            except NvmlError as exc:
                if exc.code == TIMEOUT:
                    continue
                if exc.code not in GPU_LOST:
                    return
                # Returned at once while a device is lost: do not spin.
                self._stopping.wait(WAIT_MS / 1000.0)
                continue
            self._take(data)

    def _take(self, data: Any) -> None:
        if not data.eventType & XID:
            return
        address = ctypes.cast(data.device, ctypes.c_void_p).value or 0
        xid = int(data.eventData)
        event = GpuEvent(min(xid, 2**53), xid_sentence(xid), self._wall(), xid_is_hardware(xid))
        with self._lock:
            index = self._index.get(address)
            if index is not None:
                self._events.setdefault(index, deque(maxlen=_KEEP)).append(event)
