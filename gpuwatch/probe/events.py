"""From the training thread to the telemetry thread: marks as tuples, replayed into the accounting.

The training thread pays for one tuple and one append a mark; what a mark means is worked out by
the telemetry thread, ten times a second, from the times that the marks carry. Between the two is a
bounded deque: appending to it and taking from it are atomic under the GIL.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpuwatch.probe.accounting import Accountant
from gpuwatch.probe.pace import Pace

if TYPE_CHECKING:
    from gpuwatch.probe.twin import DeviceReplay, DeviceStep

__all__ = [
    "ANNOTATE",
    "BACKWARD_BEGIN",
    "BACKWARD_END",
    "COMM_BEGIN",
    "COMM_END",
    "COMPUTE_END",
    "DEVICE_TIMES",
    "EVENT_LIMIT",
    "FETCH_BEGIN",
    "FETCH_END",
    "FETCH_STOP",
    "FINISH",
    "NOTE",
    "OPTIMIZER_BEGIN",
    "OPTIMIZER_END",
    "PHASE_BEGIN",
    "PHASE_END",
    "SEGMENT",
    "SPAN_BEGIN",
    "SPAN_END",
    "STEP",
    "TAG",
    "UNTIMED",
    "Event",
    "Recorder",
    "Replay",
    "methods_of",
]

(
    FETCH_BEGIN,
    FETCH_END,
    FETCH_STOP,
    BACKWARD_BEGIN,
    BACKWARD_END,
    COMM_BEGIN,
    COMM_END,
    OPTIMIZER_BEGIN,
    OPTIMIZER_END,
    STEP,
    PHASE_BEGIN,
    PHASE_END,
    SPAN_BEGIN,
    SPAN_END,
    ANNOTATE,
    FINISH,
    COMPUTE_END,
    NOTE,
    TAG,
    SEGMENT,
    DEVICE_TIMES,
) = range(21)
"""The last two are no marks. `(SEGMENT, ns, id)`: those that follow are timed on the device too, as
that segment. `(DEVICE_TIMES, ns, id, times)`: what came of it."""

UNTIMED = frozenset({ANNOTATE, NOTE, TAG, FINISH})
"""Marks whose time means nothing to the accountant."""

_METHODS = (
    "fetch_begin",
    "fetch_end",
    "fetch_stop",
    "backward_begin",
    "backward_end",
    "comm_begin",
    "comm_end",
    "optimizer_begin",
    "optimizer_end",
    "step",
    "phase_begin",
    "phase_end",
    "span_begin",
    "span_end",
    "annotate",
    "finish",
    "compute_end",
    "note",
    "tag",
)

EVENT_LIMIT = 65_536
"""About 8,000 steps: more wait only if the telemetry thread does not run at all."""

_ATTEMPT = 4  # where an OPTIMIZER_END carries the number of attempts so far

Event = tuple[Any, ...]


class Recorder:
    """The training thread's side. A mark is `(code, ns, *arguments of the accountant's method)`.

    `push` takes a mark. It may be exchanged while marks are made, so it is looked up each time.

    Args:
        clock: monotonic nanoseconds.
        distributed: whether other ranks exist; may change later.
    """

    def __init__(
        self, clock: Callable[[], int] = time.perf_counter_ns, *, distributed: bool = False
    ) -> None:
        self.clock = clock
        self.distributed = distributed
        self.started_ns = clock()
        self.events: deque[Event] = deque(maxlen=EVENT_LIMIT)
        self.push: Callable[[Event], None] = self.events.append
        self.attempts = 0
        self.said = 0  # calls of `step`

    def optimizer_end(self, key: int, skipped: bool = False, counted: bool = False) -> None:
        """An optimizer step has returned; the count of attempts shows what is missing.

        `counted`: another mark, inside this one, has ended the same attempt.
        """
        if not counted:
            self.attempts += 1
        self.push((OPTIMIZER_END, self.clock(), key, skipped, self.attempts))

    def step(self) -> None:
        """The user says that an iteration ends here."""
        self.said += 1
        self.push((STEP, self.clock()))

    def phase_begin(self, phase: int) -> None:
        """The user's own phase starts, an index of `PHASE_INDEX`."""
        self.push((PHASE_BEGIN, self.clock(), phase))

    def phase_end(self, phase: int) -> None:
        """The user's own phase ends."""
        self.push((PHASE_END, self.clock(), phase))

    def span_begin(self, name: str) -> None:
        """Time that belongs to no step starts."""
        self.push((SPAN_BEGIN, self.clock(), name))

    def span_end(self) -> None:
        """The innermost span ends."""
        self.push((SPAN_END, self.clock()))

    def annotate(self, samples: int | None = None, tokens: int | None = None) -> None:
        """What the user knows of the step that runs."""
        self.push((ANNOTATE, self.clock(), samples, tokens))

    def note(self, name: str, value: Any, add: bool = False) -> None:
        """Leave a value with the step that runs: a number, or a tensor that is read later.

        With `add` it is a number that is summed up over the step.
        """
        self.push((NOTE, self.clock(), name, value, add))

    def tag(self, name: str) -> None:
        """The step that runs is out of the ordinary: one of `TAGS` in `gpuwatch.schema`."""
        self.push((TAG, self.clock(), name))

    def finish(self) -> None:
        """The process ends, or is no longer watched."""
        self.push((FINISH, self.clock()))


def methods_of(accountant: Accountant) -> tuple[Callable[..., None], ...]:
    """Return the method of each mark, by its code."""
    return tuple(getattr(accountant, name) for name in _METHODS)


class Replay:
    """The telemetry thread's side: an accountant that lives through the marks again.

    Args:
        recorder: where the marks are left.
        warn: told when an order of marks could not be understood.
    """

    def __init__(self, recorder: Recorder, warn: Callable[[str], None] = lambda _: None) -> None:
        self._recorder = recorder
        self._warn = warn
        self._at_ns = recorder.started_ns
        self.accountant = Accountant(lambda: self._at_ns, distributed=recorder.distributed)
        self._handlers: tuple[Callable[..., None], ...] = (
            *methods_of(self.accountant),
            self._segment,
            self._device_times,
        )
        self._attempts = self._said = 0
        self._device: DeviceReplay | None = None
        self.device_steps: deque[DeviceStep] = deque()

    @property
    def on_device(self) -> bool:
        """Whether marks are timed on a device too, so that `device_steps` come."""
        return self._device is not None

    def catch_up(self) -> None:
        """Take every mark that has been left by now."""
        events = self._recorder.events
        self.accountant.distributed = self._recorder.distributed
        if len(events) >= EVENT_LIMIT:
            self._give_up()
        handlers = self._handlers
        for _ in range(len(events)):
            event = events.popleft()
            code = event[0]
            self._at_ns = event[1]
            if self._device is not None and code < SEGMENT:
                self._device.take(event)
            try:
                if code == OPTIMIZER_END:
                    self._attempts = event[_ATTEMPT]
                    handlers[OPTIMIZER_END](event[2], skipped=event[3])
                elif code == STEP:
                    self._said += 1
                    handlers[STEP]()
                else:
                    handlers[code](*event[2:])
            except Exception as exc:
                # An order of marks that nobody has thought of costs the step it is in, no more.
                self.accountant.abandon(1)
                self._warn(f"a step was not counted: {type(exc).__name__} after {code}")

    def _segment(self, segment: int) -> None:
        """The marks that follow are timed on the device, by `segment`; a negative one ends it."""
        if segment < 0:
            self._device = None
            return
        if self._device is None:
            from gpuwatch.probe.twin import DeviceReplay

            self._device = DeviceReplay(self.accountant, self._at_ns, self.device_steps)
        self._device.segment(segment)

    def _device_times(self, segment: int, times_ns: list[int | None] | None) -> None:
        if self._device is not None:
            self._device.times(segment, times_ns)

    def _give_up(self) -> None:
        """The deque has run over: what is in it begins in the middle of something."""
        self._recorder.events.clear()
        attempts = self._recorder.attempts
        self.accountant.abandon(attempts - self._attempts)
        self._attempts = attempts
        self._said = self._recorder.said
        self._at_ns = self._recorder.clock()
        self._device = None  # what it waits for may be among what is missing

    def pace(self, fetches: int) -> Pace:
        """Return which step is at which tick; `fetches` are the ticks without any optimizer."""
        accountant = self.accountant
        if accountant.manual:
            return Pace(accountant.index, self._said)
        if not self._attempts:
            return Pace(accountant.index, fetches, by_fetches=True)
        closed, per_step = accountant.attempts_closed(self._attempts)
        return Pace(accountant.index, closed, per_step)

    def now(self) -> tuple[str, str, int]:
        """Return (status, phase, ns since the last mark) at this moment."""
        return self.accountant.now(self._recorder.clock())
