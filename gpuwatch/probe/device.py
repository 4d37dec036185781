"""The device's clock: an event on the user's stream at every mark, read when the device is there.

On CUDA the host only queues work, and its own times say where it waited, not what the device did.
So each mark also records a timing event on the current stream. Events are pooled; a segment of
them, about a step, is resolved by `query()` at a later mark in the training thread. Nothing here
ever waits for the device: where the ring of segments is full the next steps are not timed on it.

In the training thread, because an event must not be asked for while a graph is captured, and no
other thread can know when that is. While one is, nothing is recorded and nothing is asked.

Numbers that lie on the device (a loss, the scale of a GradScaler) travel beside the events: copied
without blocking into pinned memory, and read once an event recorded after the copy is done.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.compiler import is_compiling

from gpuwatch.probe.events import (
    BACKWARD_BEGIN,
    BACKWARD_END,
    COMPUTE_END,
    DEVICE_TIMES,
    FETCH_BEGIN,
    FETCH_END,
    FINISH,
    NOTE,
    OPTIMIZER_END,
    SEGMENT,
    UNTIMED,
    Event,
    Recorder,
)
from gpuwatch.probe.twin import Scalar

__all__ = ["Backend", "Cuda", "DeviceClock", "DeviceMemory"]

RING = 64
"""Segments that wait for the device, about as many steps."""

SEGMENT_MARKS = 64
"""A segment without an end of its own (an evaluation) is cut here."""

SCALARS = 64
"""Numbers on their way at a time."""

_RESOLVED_A_MARK = 2
_DEAR_NS = 100_000_000  # what costs over a microsecond is done at most ten times a second
_VALUE = 3  # where a NOTE carries its value


class DeviceMemory(NamedTuple):
    """What torch's allocator says of the device, in bytes; `retries` counts freed caches."""

    allocated: int
    peak: int
    reserved: int
    retries: int


class Backend(Protocol):
    """One device. `stream()` returns the same object while the current stream is the same."""

    index: int

    def event(self) -> Any:
        """Return a new event with `record(stream)`, `query()` and `elapsed_time(later)` in ms."""

    def stream(self) -> Any:
        """Return the stream that the calling thread uses now."""

    def capturing(self) -> bool:
        """Whether the calling thread captures a graph."""

    def memory(self) -> DeviceMemory | None:
        """Read the allocator's own counters, None if it keeps none."""

    def pinned(self, count: int) -> Any:
        """Return a tensor of so many float32 in pinned memory."""


class Cuda:
    """A CUDA (or ROCm) device.

    Args:
        index: of the device that trains, which need not be the current one.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._stream_data: Any = None
        self._stream: Any = None

    def event(self) -> Any:
        """Return a new timing event."""
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def stream(self) -> Any:
        """Return the current stream. A Stream object costs a microsecond: made when it changes."""
        data = torch._C._cuda_getCurrentStream(self.index)
        if data != self._stream_data:
            self._stream = torch.cuda.current_stream(self.index)
            self._stream_data = data
        return self._stream

    def capturing(self) -> bool:
        """Whether the current stream captures a graph."""
        return torch.cuda.is_current_stream_capturing()

    def memory(self) -> DeviceMemory | None:
        """Read the caching allocator's counters; other allocators keep none."""
        try:
            found = torch.cuda.memory_stats_as_nested_dict(self.index)
            allocated = found["allocated_bytes"]["all"]
            return DeviceMemory(
                allocated["current"],
                allocated["peak"],
                found["reserved_bytes"]["all"]["current"],
                found["num_alloc_retries"],
            )
        except (RuntimeError, KeyError, TypeError):
            return None

    def pinned(self, count: int) -> Any:
        """Return pinned memory that may be written to in any mode of autograd."""
        with torch.inference_mode(False):
            return torch.zeros(count, dtype=torch.float32, device="cpu", pin_memory=True)


class _Segment:
    """Marks in a row: an event for each, None for those at which no time passes.

    Of one that is lost there is at most one event, at its end: what follows counts from there.
    """

    __slots__ = ("events", "id", "lost", "marks", "mixed", "scalars", "stream")

    def __init__(self, segment: int, lost: bool) -> None:
        self.id = segment
        self.lost = lost
        self.marks = 0
        self.events: list[Any] = []
        self.scalars: list[Scalar] = []
        self.stream: Any = None
        self.mixed = False  # its events are on more streams than one, and end in no known order

    def is_done(self) -> bool:
        """Whether the device has passed every event; never waits."""
        if self.lost:
            return not self.events or bool(self.events[0].query())
        if self.mixed:
            return all(event.query() for event in self.events if event is not None)
        last = next((event for event in reversed(self.events) if event is not None), None)
        return last is None or bool(last.query())


class DeviceClock:
    """Takes the place of `Recorder.push` where the training is on a device.

    Args:
        recorder: whose marks are timed.
        backend: the device.
        warn: told if the device cannot be timed; the marks go on without it.
    """

    def __init__(self, recorder: Recorder, backend: Backend, warn: Callable[[str], None]) -> None:
        self._recorder = recorder
        self._backend = backend
        self._warn = warn
        self._append = recorder.events.append
        self._pool: list[Any] = []
        self._ring: deque[_Segment] = deque()
        self._ids = 0
        self._segment = _Segment(0, lost=False)
        self._before: Any = None  # the last event of the segment that was resolved last
        self._backward_stream: Any = None
        self._attempted = self._fetched = False
        self._places: list[Any] = []
        self._free: list[int] = []
        self._noted_ns: dict[str, int] = {}
        self._memory_ns = 0
        self.memory: DeviceMemory | None = None

    def start(self) -> None:
        """Time every mark from now on."""
        self._open()
        self._recorder.push = self.push

    # --- marks ---------------------------------------------------------------------------------

    def push(self, event: Event) -> None:
        """Leave a mark, and an event on the device with it."""
        code = event[0]
        on_device = None
        try:
            if code not in UNTIMED:
                on_device = self._record(code)
            elif code == NOTE and hasattr(event[_VALUE], "is_cuda"):
                noted = self._note(event)
                if noted is None:
                    return
                event, on_device = noted
        except Exception as exc:
            self._fail(exc)
            self._append(event)
            return
        self._append(event)
        try:
            self._pushed(code, on_device)
        except Exception as exc:
            self._fail(exc)

    def _record(self, code: int) -> Any:
        segment = self._segment
        if code == BACKWARD_BEGIN:
            self._backward_stream = None
        if segment.lost:
            return None
        backend = self._backend
        if code == COMPUTE_END:
            # The engine calls back in a thread of its own, whose stream need not be the user's.
            stream = self._backward_stream
        else:
            stream = None if backend.capturing() else backend.stream()
            if code == BACKWARD_BEGIN:
                self._backward_stream = stream
        if stream is None:
            self._lose(segment)
            return None
        event = self._recorded(stream)
        if stream is not segment.stream:
            segment.mixed = segment.stream is not None
            segment.stream = stream
        return event

    def _recorded(self, stream: Any) -> Any:
        event = self._pool.pop() if self._pool else self._backend.event()
        event.record(stream)
        return event

    def _lose(self, segment: _Segment) -> None:
        """Of this segment nothing will be known."""
        segment.lost = True
        self._give_back(segment.events)

    def _pushed(self, code: int, on_device: Any) -> None:
        """The mark has been left: does a segment end with it?"""
        segment = self._segment
        segment.marks += 1
        if not segment.lost:
            segment.events.append(on_device)
        if code in UNTIMED:
            # One of these may come in the midst of another mark: a collection of garbage does.
            if code == FINISH:
                self._finish()
            return
        if code == FETCH_BEGIN:
            self._fetched = True
            ends = self._attempted
        elif code == OPTIMIZER_END:
            ends = not self._fetched  # where nothing fetches, the step ends here
            self._attempted = not ends
            self._fetched = False
        else:
            ends = False
        if ends or (segment.marks >= SEGMENT_MARKS and code != COMPUTE_END):
            self._close()
        elif code in {FETCH_END, BACKWARD_END} and self._ring and not self._is_capturing():
            self._resolve(_RESOLVED_A_MARK)

    def _is_capturing(self) -> bool:
        return self._segment.lost and self._backend.capturing()

    # --- segments ------------------------------------------------------------------------------

    def _open(self) -> None:
        full = len(self._ring) >= RING
        if full and self._ring[-1].lost:
            self._segment = self._ring.pop()  # goes on
            self._segment.marks = 0
            self._give_back(self._segment.events)
            return
        self._ids += 1
        self._segment = _Segment(self._ids, lost=full)
        self._append((SEGMENT, self._recorder.clock(), self._ids))

    def _close(self) -> None:
        self._attempted = False
        segment = self._segment
        capturing = self._is_capturing()
        if segment.lost and not capturing and len(self._ring) < RING:
            segment.events = [self._recorded(self._backend.stream())]
        self._ring.append(segment)
        if not capturing:
            self._resolve(_RESOLVED_A_MARK)
            now_ns = self._recorder.clock()
            if now_ns - self._memory_ns >= _DEAR_NS:
                self._memory_ns = now_ns
                self.memory = self._backend.memory()
        self._open()

    def _resolve(self, most: int) -> None:
        """Take the times of the oldest segments that the device has passed."""
        ring = self._ring
        while ring and most and ring[0].is_done():
            segment = ring.popleft()
            self._settle(segment, None if segment.lost else self._times_ns(segment))
            most -= 1

    def _times_ns(self, segment: _Segment) -> list[int | None]:
        """Return the time on the device since the mark before, for each mark.

        Between neighbours: `elapsed_time` is a float32 of ms, too coarse over long times.
        """
        times: list[int | None] = []
        before = self._before
        for event in segment.events:
            if event is None:
                times.append(0)
                continue
            times.append(None if before is None else round(before.elapsed_time(event) * 1e6))
            before = event
        return times

    def _settle(self, segment: _Segment, times_ns: list[int | None] | None) -> None:
        """Tell what came of a segment, and have its events back."""
        for scalar in segment.scalars:
            if times_ns is not None:
                scalar.value = self._places[scalar.at].item()  # pinned: lies on the host
            self._free.append(scalar.at)
        passed = [event for event in segment.events if event is not None]
        if passed or segment.lost:
            if self._before is not None:
                self._pool.append(self._before)
            self._before = passed.pop() if passed else None
            self._pool += passed
        self._append((DEVICE_TIMES, self._recorder.clock(), segment.id, times_ns))

    def _give_back(self, events: list[Any]) -> None:
        self._pool += (event for event in events if event is not None)
        events.clear()

    def _finish(self) -> None:
        """The process ends: take what is there, and wait for nothing."""
        self._ring.append(self._segment)
        if not self._is_capturing():
            self._resolve(len(self._ring))
        self._end()

    def _end(self) -> None:
        """Time no more marks."""
        self._recorder.push = self._append
        now_ns = self._recorder.clock()
        for segment in self._ring:
            self._append((DEVICE_TIMES, now_ns, segment.id, None))
        self._ring.clear()
        self._append((SEGMENT, now_ns, -1))

    def _fail(self, exc: Exception) -> None:
        self.memory = None
        if self._recorder.push == self.push:
            if self._segment not in self._ring:
                self._ring.append(self._segment)
            self._end()
            self._warn(f"no device times after an error of their own ({type(exc).__name__}: {exc})")

    # --- numbers on the device -----------------------------------------------------------------

    def _note(self, event: Event) -> tuple[Event, Any] | None:
        """Send a number on its way; returns the mark to leave and its event, None for neither."""
        code, now_ns, name, value, *rest = event
        if not value.is_cuda:
            return event, None
        if value.get_device() != self._backend.index:
            return None  # events of this device say nothing of a copy from another one
        segment = self._segment
        if now_ns - self._noted_ns.get(name, -_DEAR_NS) < _DEAR_NS or segment.lost:
            return None
        if is_compiling() or self._backend.capturing():
            return None
        if not self._places:
            ring = self._backend.pinned(SCALARS)
            self._places = [ring[at] for at in range(SCALARS)]
            self._free = list(range(SCALARS))
        if not self._free:
            return None
        self._noted_ns[name] = now_ns
        scalar = Scalar(self._free.pop())
        segment.scalars.append(scalar)
        try:
            # The type is changed on the device: between devices that would not be asynchronous.
            number = value.detach().reshape(()).to(torch.float32)
            self._places[scalar.at].copy_(number, non_blocking=True)
        except Exception:
            return None  # no number: many elements, a tensor of a kind of its own
        return (code, now_ns, name, scalar, *rest), self._record(code)
