"""From the training thread to the telemetry thread: marks as tuples, replayed into the accounting.

The training thread pays for one tuple and one append a mark; what a mark means is worked out by
the telemetry thread, ten times a second, from the times that the marks carry. Between the two is a
bounded deque: appending to it and taking from it are atomic under the GIL.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gpuwatch.probe.accounting import Accountant

__all__ = [
    "BACKWARD_BEGIN",
    "BACKWARD_END",
    "COMM_BEGIN",
    "COMM_END",
    "COMPUTE_END",
    "EVENT_LIMIT",
    "FETCH_BEGIN",
    "FETCH_END",
    "FETCH_STOP",
    "NOTE",
    "OPTIMIZER_BEGIN",
    "OPTIMIZER_END",
    "SPAN_BEGIN",
    "SPAN_END",
    "Recorder",
    "Replay",
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
) = range(18)

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

    def optimizer_end(self, key: int, skipped: bool = False) -> None:
        """An optimizer step has returned; the count of attempts shows what is missing."""
        self.attempts = attempts = self.attempts + 1
        self.push((OPTIMIZER_END, self.clock(), key, skipped, attempts))

    def step(self) -> None:
        """The user says that an iteration ends here."""
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

    def finish(self) -> None:
        """The process ends, or is no longer watched."""
        self.push((FINISH, self.clock()))


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
        self._handlers = tuple(getattr(self.accountant, name) for name in _METHODS)
        self._attempts = 0

    def catch_up(self) -> None:
        """Take every mark that has been left by now."""
        events = self._recorder.events
        self.accountant.distributed = self._recorder.distributed
        if len(events) >= EVENT_LIMIT:
            self._give_up()
        handlers = self._handlers
        for _ in range(len(events)):
            event = events.popleft()
            self._at_ns = event[1]
            try:
                if event[0] == OPTIMIZER_END:
                    self._attempts = event[_ATTEMPT]
                    handlers[OPTIMIZER_END](event[2], skipped=event[3])
                else:
                    handlers[event[0]](*event[2:])
            except Exception as exc:
                # An order of marks that nobody has thought of costs the step it is in, no more.
                self.accountant.abandon(1)
                self._warn(f"a step was not counted: {type(exc).__name__} after {event[0]}")

    def _give_up(self) -> None:
        """The deque has run over: what is in it begins in the middle of something."""
        self._recorder.events.clear()
        attempts = self._recorder.attempts
        self.accountant.abandon(attempts - self._attempts)
        self._attempts = attempts
        self._at_ns = self._recorder.clock()

    def now(self) -> tuple[str, str, int]:
        """Return (status, phase, ns since the last mark) at this moment."""
        return self.accountant.now(self._recorder.clock())
