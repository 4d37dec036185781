"""The telemetry thread's side of the device's clock: the same marks once more, at other times.

A device runs behind the host, so its times of a mark come later than the mark. The marks wait in
segments until their times are there, and are then lived through again by a second accountant. It
sees the same marks in the same order as the first one and comes to the same steps, under the same
indices; only the clock differs. Where times are missing it goes on by the host's, so that it never
falls out of step, and the steps in which that happened are known by nobody.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from gpuwatch.probe.accounting import H2D, Accountant, RawStep
from gpuwatch.probe.events import (
    BACKWARD_BEGIN,
    FETCH_BEGIN,
    FETCH_END,
    FETCH_STOP,
    NOTE,
    OPTIMIZER_BEGIN,
    OPTIMIZER_END,
    PHASE_BEGIN,
    PHASE_END,
    SPAN_BEGIN,
    UNTIMED,
    Event,
    methods_of,
)

__all__ = ["DeviceReplay", "DeviceStep", "Join", "Scalar"]

PATIENCE_NS = 2_000_000_000
PATIENCE_STEPS = 8
"""A step waits for its device times for so long, or as long as it took itself so many times: how
far the host may run ahead is counted in kernels (about a thousand), not in seconds."""

MOST_WAITING = 128

_OFF, _REST, _FETCH, _FETCHED = range(4)


class Scalar:
    """A number on its way from the device; `value` is None until it is there."""

    __slots__ = ("at", "value")

    def __init__(self, at: int) -> None:
        self.at = at
        self.value: float | None = None


class DeviceStep(NamedTuple):
    """A step on the device's clock, in ns, under the index that it has on the host's.

    `phases_ns` is None where a part of it was not timed, and so is `stall_ns` where other things
    than a fetch lay before the step.
    """

    step_index: int
    phases_ns: list[int] | None
    stall_ns: int | None


class DeviceReplay:
    """Lives through marks when their device times have come.

    Args:
        accountant: the host's, at this moment.
        at_ns: what its clock shows.
        out: takes the steps.
    """

    def __init__(self, accountant: Accountant, at_ns: int, out: deque[DeviceStep]) -> None:
        self._at_ns = at_ns
        self._true_ns = at_ns
        self._host_ns = at_ns
        self._unknown_ns = at_ns  # up to here the device was not timed
        self._accountant = accountant.twin(lambda: self._at_ns)
        self._handlers = methods_of(self._accountant)
        self._index = accountant.index  # of the step that comes next
        self._segments: deque[tuple[int, list[Event]]] = deque()
        self._out = out
        self._between = _OFF
        self._in_h2d = False
        self._stall_ns = 0
        self._step_stall_ns: int | None = None

    def segment(self, segment: int) -> None:
        """The marks that follow belong to `segment`; ids rise."""
        self._segments.append((segment, []))

    def take(self, event: Event) -> None:
        """A mark that waits for its time on the device."""
        if self._segments:
            self._segments[-1][1].append(event)

    def times(self, segment: int, times_ns: list[int | None] | None) -> None:
        """Live through the marks of `segment`.

        `times_ns` is for each of them the device time since the mark before it, None where it is
        not known; no list at all if nothing is known.
        """
        while self._segments and self._segments[0][0] <= segment:
            found, marks = self._segments.popleft()
            known = times_ns if found == segment else None
            if known is None or len(known) != len(marks):
                known = [None] * len(marks)
            for event, passed_ns in zip(marks, known, strict=True):
                self._live(event, passed_ns)

    def _live(self, event: Event, passed_ns: int | None) -> None:
        code = event[0]
        before_ns = self._at_ns
        if code in UNTIMED:
            self._true_ns += passed_ns or 0
        elif passed_ns is None:
            # At least a nanosecond passes between two marks, as on the host: the accounting asks
            # whether any time has passed, and must come to the same answer.
            self._at_ns += max(1, event[1] - self._host_ns)
            self._true_ns = self._unknown_ns = self._at_ns
        else:
            self._true_ns += passed_ns
            self._at_ns = max(self._at_ns + 1, self._true_ns)
        if code not in UNTIMED:
            self._host_ns = event[1]
            self._watch(code, event, self._at_ns - before_ns)
        try:
            if code == OPTIMIZER_END:
                self._handlers[code](event[2], skipped=event[3])
            elif code != NOTE:
                self._handlers[code](*event[2:])
        except Exception:
            self._accountant.abandon(1)  # as the host's accountant has done at this mark
        if self._accountant.out:
            self._emit()

    def _watch(self, code: int, event: Event, passed_ns: int) -> None:
        """Count how long the device had nothing to do between two steps.

        From the end of the optimizer to the batch, without the copying of one: what the user queues
        there besides (an average of weights, a metric) is in it. Fetches without a backward between
        them are of one step, and the time between those may be a forward.
        """
        between = self._between
        if (between == _REST and not self._in_h2d) or between == _FETCH:
            self._stall_ns += passed_ns
        if code == FETCH_BEGIN:
            if between != _OFF:
                self._between = _FETCH
        elif code in {FETCH_END, FETCH_STOP}:
            if between == _FETCH:
                self._between = _FETCHED
        elif code in {BACKWARD_BEGIN, OPTIMIZER_BEGIN}:
            if between in {_FETCH, _FETCHED}:
                self._step_stall_ns = self._stall_ns
            self._between = _OFF
        elif code == OPTIMIZER_END:
            self._between = _REST
            self._stall_ns = 0
        elif code == SPAN_BEGIN:
            self._between = _OFF
        elif code in {PHASE_BEGIN, PHASE_END} and event[2] == H2D:
            self._in_h2d = code == PHASE_BEGIN

    def _emit(self) -> None:
        out = self._accountant.out
        while out:
            item = out.popleft()
            if isinstance(item, RawStep):
                known = self._unknown_ns <= item.start_ns
                stall_ns = self._step_stall_ns if known else None
                phases_ns = item.phases_ns if known else None
                self._out.append(DeviceStep(item.step_index, phases_ns, stall_ns))
                self._index = item.step_index + 1
                self._step_stall_ns = None
            elif item.step <= self._index:
                self._step_stall_ns = None  # it lay before the step that runs


class Join:
    """Steps of the host's clock that wait for the same steps on the device's.

    They leave in the order in which they came. One whose device times do not come in time leaves
    without them.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[RawStep, int]] = deque()
        self._found: dict[int, DeviceStep] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, raw: RawStep, now_ns: int) -> None:
        """Take a step that has closed."""
        self._waiting.append((raw, now_ns))

    def find(self, step: DeviceStep) -> None:
        """Take what the device says of a step; of no use if that has left already."""
        waiting = self._waiting
        if waiting and step.step_index >= waiting[0][0].step_index:
            self._found[step.step_index] = step

    def leaving(self, now_ns: int, *, last: bool) -> Iterator[tuple[RawStep, DeviceStep | None]]:
        """Yield the steps that need wait no longer; with `last` no more device times come."""
        waiting = self._waiting
        while waiting:
            raw, since_ns = waiting[0]
            found = self._found.pop(raw.step_index, None)
            if found is None and not last and len(waiting) <= MOST_WAITING:
                patience_ns = max(PATIENCE_NS, PATIENCE_STEPS * raw.step_ns)
                if now_ns - since_ns < patience_ns:
                    return
            waiting.popleft()
            yield raw, found
        self._found.clear()
