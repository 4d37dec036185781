"""Where the time of a step goes: marks in, records out. Pure Python, no torch, no sockets.

The training thread calls a mark where something begins or ends. Between two marks time belongs to
exactly one place: the innermost open phase, or a gap whose name is settled by what follows it (a
gap that leads into a backward was the forward with its loss; before a fetch or an optimizer it is
`other`). So the phases of a step add up to it exactly.

A fetched batch is `pending` until a backward (or an optimizer) follows. When one does, batches of
the loader fetched last belong to the step; batches of any other loader were evaluation, and their
time leaves the step as a span. A step closes at the first fetch after an optimizer attempt, at
the end of the iterator, or, where nothing fetches, at the optimizer's end; `step()` alone closes
steps once it has been used.

The marks arrive as events (`gpuwatch.probe.events`) and are lived through again in the telemetry
thread, on a clock that shows the time each mark was made.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

__all__ = [
    "BACKWARD",
    "COMM",
    "DATA_WAIT",
    "FORWARD",
    "H2D",
    "OPTIMIZER",
    "OTHER",
    "PHASE_INDEX",
    "Accountant",
    "RawSpan",
    "RawStep",
    "Totals",
]

DATA_WAIT, H2D, FORWARD, BACKWARD, COMM, OPTIMIZER, OTHER = range(7)

PHASE_INDEX = {
    "data_wait": DATA_WAIT,
    "h2d": H2D,
    "forward": FORWARD,
    "backward": BACKWARD,
    "comm": COMM,
    "optimizer": OPTIMIZER,
    "other": OTHER,
}

_PHASE_NAMES = tuple(PHASE_INDEX)

_WARMUP_STEPS = 1
# DDP rebuilds its buckets after the first backward, and broadcasts the new order in the second
# forward: both iterations differ from the rest.
_DDP_FIRST_STEPS = 2


class RawStep(NamedTuple):
    """One closed step as the training thread hands it over; times in ns on its clock."""

    step_index: int
    start_ns: int
    step_ns: int
    phases_ns: list[int]
    fetched: bool
    batches: int
    samples: int | None
    tokens: int | None
    loss: float | None
    queue_depth: int | None
    queue_capacity: int | None
    tags: tuple[str, ...]
    loader: str


class RawSpan(NamedTuple):
    """Named time outside the steps; `step` is the index of the step that follows."""

    name: str
    start_ns: int
    duration_ns: int
    step: int


class Totals:
    """The running sums behind the ledger, in ns."""

    __slots__ = (
        "checkpoint_ns",
        "comm_ns",
        "data_wait_ns",
        "eval_ns",
        "samples",
        "skipped",
        "steps",
        "training_ns",
    )

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self.skipped = 0
        self.training_ns = 0
        self.data_wait_ns = 0
        self.comm_ns = 0
        self.eval_ns = 0
        self.checkpoint_ns = 0

    def add(self, item: RawStep | RawSpan) -> None:
        """Count one step or span."""
        if isinstance(item, RawStep):
            data_wait_ns, comm_ns = item.phases_ns[DATA_WAIT], item.phases_ns[COMM]
            self.steps += 1
            self.samples += item.samples or 0
            self.skipped += "skipped" in item.tags
            self.data_wait_ns += data_wait_ns
            self.comm_ns += comm_ns
            self.training_ns += item.step_ns - data_wait_ns - comm_ns
        elif item.name == "eval":
            self.eval_ns += item.duration_ns
        elif item.name == "checkpoint":
            self.checkpoint_ns += item.duration_ns


_GAP = 7
"""Slot of the time whose name is not settled yet, behind the seven phases."""

_BUCKET = [0] * 8


class _Batch:
    """A fetched batch that no backward has followed yet; `acc` holds a step's phases and gap."""

    __slots__ = ("acc", "capacity", "depth", "first", "key", "samples", "start_ns")

    def __init__(
        self, key: str, start_ns: int, first: bool, depth: int | None, capacity: int | None
    ) -> None:
        self.key = key
        self.start_ns = start_ns
        self.first = first
        self.depth = depth
        self.capacity = capacity
        self.acc = _BUCKET.copy()
        self.samples: int | None = None


class Accountant:
    """Turns marks into `RawStep`s and `RawSpan`s.

    Time goes into one slot of one bucket; a mark adds what has passed and points to the next. The
    usual case comes first and calls little: a thousand steps a second are replayed here.

    Args:
        clock: monotonic nanoseconds.
        distributed: whether the first steps are also DDP's first iterations; may change later.
    """

    def __init__(
        self, clock: Callable[[], int] = time.perf_counter_ns, *, distributed: bool = False
    ) -> None:
        self.clock = clock
        self.distributed = distributed
        self.out: deque[RawStep | RawSpan] = deque()
        self.dropped = 0
        self.index = 0
        self.manual = False
        self.h2d_marked = False
        self.last_ns = clock()
        self._stack: list[int] = []
        self._acc = _BUCKET.copy()
        self._fresh = True  # nothing has been put into `_acc` since the last step closed
        self._pending: list[_Batch] = []
        self._idle = True  # nothing of a step has happened yet: time is start-up, or between epochs
        self._nowhere = _BUCKET.copy()
        self._bucket = self._nowhere
        self._slot = _GAP
        self._start_ns = self.last_ns
        self._attempted = False
        self._stepped: set[int] = set()
        self._at_attempt: tuple[list[int], int] | None = None
        self._no_fetch = False
        self._fetched = False
        self._fetches = 0
        self._backwards = 0
        self._samples: int | None = None
        self._tokens: int | None = None
        self._loss: float | None = None
        self._depth: int | None = None
        self._capacity: int | None = None
        self._first = False
        self._skipped = False
        self._loader = ""
        self._trained_key = ""
        self._nested_fetches = 0
        self._nested_backwards = 0
        self._nested_comm = 0
        self._optimizers = 0
        self._spans: list[tuple[str, int]] = []

    # --- the passing of time -------------------------------------------------------------------

    def _tick(self) -> int:
        """Give the time since the last mark to where it belongs and return now."""
        now = self.clock()
        self._bucket[self._slot] += now - self.last_ns
        self.last_ns = now
        return now

    def _aim(self) -> None:
        """Point to where time goes from here on."""
        if self._idle:
            self._bucket = self._nowhere
            self._slot = _GAP
            return
        if self._pending:
            self._bucket = self._pending[-1].acc
        else:
            self._bucket = self._acc
            self._fresh = False
        self._slot = self._stack[-1] if self._stack else _GAP

    def _push(self, phase: int) -> None:
        self._stack.append(phase)
        if not self._idle:
            self._slot = phase

    def _pop(self) -> None:
        self._stack.pop()
        if not self._idle:
            self._slot = self._stack[-1] if self._stack else _GAP

    def _begin(self, now: int) -> None:
        """Start a step if none is running."""
        if self._idle:
            self._idle = False
            self._start_ns = now
            self._aim()

    def _settle(self, phase: int) -> None:
        """The gap of the step has a name now."""
        acc = self._acc
        acc[phase] += acc[_GAP]
        acc[_GAP] = 0

    # --- fetching ------------------------------------------------------------------------------

    def fetch_begin(
        self, key: str, first: bool, depth: int | None = None, capacity: int | None = None
    ) -> None:
        """The training thread asks loader `key` for a batch; `first` of its iterator.

        `depth` of `capacity` batches are ready, None if it was not looked at.
        """
        if self._spans:
            return
        stack = self._stack
        if stack:
            if stack[-1] == DATA_WAIT:
                self._nested_fetches += 1
                return
            if self._optimizers:
                # An optimizer that raised never reported its end.
                self._tick()
                stack.clear()
                self._optimizers = self._nested_backwards = self._nested_comm = 0
        now = self.clock()
        self._bucket[self._slot] += now - self.last_ns
        self.last_ns = now
        self._no_fetch = False
        if self._attempted and not self.manual:
            self._close(now)
        elif not self._pending and not self._idle:
            self._settle(OTHER)
        if self._idle:
            self._idle = False
            self._start_ns = now
        batch = _Batch(key, now, first, depth, capacity)
        self._pending.append(batch)
        stack.append(DATA_WAIT)
        self._bucket = batch.acc
        self._slot = DATA_WAIT

    def fetch_end(self, samples: int | None) -> None:
        """The batch is there; `samples` in it, None if that cannot be told."""
        if self._spans:
            return
        if self._nested_fetches:
            self._nested_fetches -= 1
            return
        stack = self._stack
        if stack and stack[-1] == DATA_WAIT:
            now = self.clock()
            self._bucket[DATA_WAIT] += now - self.last_ns
            self.last_ns = now
            stack.pop()
            self._slot = stack[-1] if stack else _GAP
            self._pending[-1].samples = samples

    def fetch_stop(self) -> None:
        """The iterator is exhausted, or the fetch raised: no batch came."""
        if self._spans:
            return
        if self._nested_fetches:
            self._nested_fetches -= 1
            return
        if not self._stack or self._stack[-1] != DATA_WAIT:
            return
        self._tick()
        self._stack.pop()
        waited_ns = self._pending.pop().acc[DATA_WAIT]
        if self._pending:
            # Evaluation that has ended, or a window fetched ahead: settled by what follows.
            self._pending[-1].acc[_GAP] += waited_ns
        elif any(self._acc):
            self._acc[DATA_WAIT] += waited_ns
        else:
            self._idle = True
        self._aim()

    # --- backward ------------------------------------------------------------------------------

    def backward_begin(self) -> None:
        """A backward starts: what led to it was a forward, and its batches are training."""
        if self._spans:
            return
        stack = self._stack
        if stack:
            if self._nested_backwards or stack[-1] == BACKWARD:
                self._nested_backwards += 1
                return
            if stack[-1] == OPTIMIZER:
                # A closure: what ran since the optimizer began was its forward.
                self._slot = FORWARD
        now = self.clock()
        self._bucket[self._slot] += now - self.last_ns
        self.last_ns = now
        if self._idle:
            self._idle = False
            self._start_ns = now
        if self._pending:
            self._commit(FORWARD)
        acc = self._acc
        acc[FORWARD] += acc[_GAP]
        acc[_GAP] = 0
        self._backwards += 1
        stack.append(BACKWARD)
        self._fresh = False
        self._bucket = acc
        self._slot = BACKWARD

    def backward_end(self, compute_end_ns: int | None = None) -> None:
        """The backward has returned. Its own computing ended at `compute_end_ns`, if known: from
        there on it was blocked by communication.
        """
        if self._spans:
            return
        if self._nested_backwards:
            self._nested_backwards -= 1
            return
        stack = self._stack
        if not stack or stack[-1] != BACKWARD:
            return
        last_ns = self.last_ns
        now = self.clock()
        bucket = self._bucket
        bucket[BACKWARD] += now - last_ns
        self.last_ns = now
        stack.pop()
        self._slot = stack[-1] if stack else _GAP
        if compute_end_ns is not None:
            exposed_ns = now - (last_ns if last_ns > compute_end_ns else compute_end_ns)
            if exposed_ns > 0:
                bucket[BACKWARD] -= exposed_ns
                bucket[COMM] += exposed_ns

    def _commit(self, gap_phase: int) -> None:
        """The batch fetched last is training: it and those of its loader belong to the step."""
        pending = self._pending
        last = pending[-1]
        key = last.key
        if len(pending) == 1 and self._fresh:
            # The usual loop: one batch, and nothing else in the step yet. Its bucket is the step's.
            self._acc = last.acc
            self._take(last)
        else:
            self._commit_many(key)
        pending.clear()
        self._settle(gap_phase)
        self._fresh = False
        self._fetched = True
        self._loader = self._trained_key = key

    def _commit_many(self, key: str) -> None:
        evaluated_ns = 0
        evaluated_from = 0
        acc = self._acc
        for batch in self._pending:
            if batch.key == key:
                for slot, value in enumerate(batch.acc):
                    acc[slot] += value
                self._take(batch)
            else:
                evaluated_from = evaluated_from or batch.start_ns
                evaluated_ns += sum(batch.acc)
        if evaluated_ns:
            self.out.append(RawSpan("eval", evaluated_from, evaluated_ns, self.index))

    def _take(self, batch: _Batch) -> None:
        self._fetches += 1
        if batch.first:
            self._first = True
        samples = batch.samples
        if samples is not None:
            self._samples = samples if self._samples is None else self._samples + samples
        if batch.depth is not None:
            self._depth = batch.depth
            self._capacity = batch.capacity

    # --- communication -------------------------------------------------------------------------

    def comm_begin(self) -> None:
        """The training thread starts to wait for a collective."""
        if self._spans:
            return
        if self._nested_comm or (self._stack and self._stack[-1] == COMM):
            self._nested_comm += 1
            return
        self._tick()
        self._push(COMM)

    def comm_end(self) -> None:
        """The wait is over."""
        if self._spans:
            return
        if self._nested_comm:
            self._nested_comm -= 1
            return
        if self._stack and self._stack[-1] == COMM:
            self._tick()
            self._pop()

    # --- optimizer -----------------------------------------------------------------------------

    def optimizer_begin(self, key: int) -> None:
        """An optimizer step starts; `key` tells optimizers apart."""
        if self._spans:
            return
        if self._optimizers:
            self._optimizers += 1
            return
        now = self.clock()
        self._bucket[self._slot] += now - self.last_ns
        self.last_ns = now
        if self._idle:
            self._begin(now)
        if not self._pending:
            self._settle(OTHER)
            if self._attempted and key in self._stepped and not self.manual:
                self._close_at_attempt()
        self._optimizers = 1
        self._stack.append(OPTIMIZER)
        self._slot = OPTIMIZER

    def optimizer_end(self, key: int, *, skipped: bool = False) -> None:
        """The optimizer step has returned; `skipped` if it left the weights alone."""
        if self._spans or not self._optimizers:
            return
        self._optimizers -= 1
        if self._optimizers:
            return
        now = self.clock()
        self._bucket[self._slot] += now - self.last_ns
        self.last_ns = now
        if self._stack:
            self._stack.pop()
        if self._pending:
            self._commit(OTHER)
        self._attempted = True
        if skipped:
            self._skipped = True
        self._stepped.add(key)
        if self._no_fetch and not self.manual:
            self._close(now)
        elif not self._fetched:
            self._at_attempt = (self._acc.copy(), now)
        else:
            self._at_attempt = None
        self._bucket = self._acc
        self._fresh = False
        self._slot = self._stack[-1] if self._stack else _GAP

    def _close_at_attempt(self) -> None:
        """The same optimizer steps again and nothing was fetched between: this loop makes its own
        batches, so the step before this one ended with its optimizer.
        """
        self._no_fetch = True
        if self._at_attempt is None:
            return
        at_attempt, ended_ns = self._at_attempt
        rest = [value - before for value, before in zip(self._acc, at_attempt, strict=True)]
        backwards = max(0, self._backwards - 1)
        self._acc = at_attempt
        self._backwards -= backwards
        self._close(ended_ns)
        self._acc = self._bucket = rest
        self._fresh = False
        self._backwards = backwards

    # --- the end of a step ---------------------------------------------------------------------

    def step(self) -> None:
        """The user says that an iteration ends here. From now on only this closes steps."""
        if self._spans:
            return
        now = self._tick()
        self.manual = True
        if self._idle:
            return
        if self._pending:
            self._commit(OTHER)
        self._close(now)
        self._aim()

    def _close(self, now: int) -> None:
        """Emit the step and begin the next one; the caller aims afterwards."""
        acc = self._acc
        acc[OTHER] += acc.pop()
        if self._pending:
            self._spend_pending(now)
        index = self.index
        self.out.append(
            RawStep(
                index,
                self._start_ns,
                sum(acc),
                acc,
                self._fetched,
                self._fetches or self._backwards,
                self._samples,
                self._tokens,
                self._loss,
                self._depth,
                self._capacity,
                self._tags() if index < _DDP_FIRST_STEPS or self._first or self._skipped else (),
                self._loader,
            )
        )
        self.index = index + 1
        self._acc = self._bucket = _BUCKET.copy()
        self._fresh = True
        self._start_ns = now
        self._attempted = self._fetched = self._first = self._skipped = False
        self._stepped.clear()
        self._at_attempt = None
        self._fetches = self._backwards = 0
        self._samples = self._tokens = self._loss = self._depth = self._capacity = None

    def _spend_pending(self, now: int) -> None:
        """Batches fetched ahead for a later step: their time was spent in this one, their samples
        were not.
        """
        acc = self._acc
        for batch in self._pending:
            gap_ns = batch.acc.pop()
            for phase, value in enumerate(batch.acc):
                acc[phase] += value
            acc[OTHER] += gap_ns
            batch.acc = _BUCKET.copy()
            batch.start_ns = now

    def _tags(self) -> tuple[str, ...]:
        tags: tuple[str, ...] = ("first_batch",) if self._first else ()
        if self.index < _WARMUP_STEPS:
            tags += ("warmup",)
        if self.distributed and self.index < _DDP_FIRST_STEPS:
            tags += ("ddp_first",)
        if self._skipped:
            tags += ("skipped",)
        return tags

    def abandon(self, attempts: int) -> None:
        """Marks are missing, and with them `attempts` steps: count them and begin anew."""
        self.dropped += attempts
        self.index += attempts
        self._stack.clear()
        self._pending.clear()
        self._spans.clear()
        self._stepped.clear()
        self._acc = _BUCKET.copy()
        self._idle = self._fresh = True
        self._attempted = self._fetched = self._first = self._skipped = False
        self._at_attempt = None
        self._fetches = self._backwards = self._optimizers = 0
        self._nested_fetches = self._nested_backwards = self._nested_comm = 0
        self._samples = self._tokens = self._loss = self._depth = self._capacity = None
        self._aim()

    def finish(self) -> None:
        """The process ends: close the step whose optimizer has run, settle what is pending."""
        while self._spans:
            self.span_end()
        now = self._tick()
        if self._attempted and not self.manual:
            self._close(now)
        if self._pending and not any(self._acc):
            start_ns = self._pending[0].start_ns
            evaluated_ns = sum(sum(b.acc) for b in self._pending)
            self._pending.clear()
            self.out.append(RawSpan("eval", start_ns, evaluated_ns, self.index))
        self._aim()

    # --- what the user says --------------------------------------------------------------------

    def phase_begin(self, phase: int) -> None:
        """The user's own phase starts, an index of `PHASE_INDEX`."""
        if self._spans:
            return
        self._tick()
        self.h2d_marked = self.h2d_marked or phase == H2D
        self._push(phase)

    def phase_end(self, phase: int) -> None:
        """The user's own phase ends."""
        if self._spans:
            return
        if self._stack and self._stack[-1] == phase:
            self._tick()
            self._pop()

    def span_begin(self, name: str) -> None:
        """Time that belongs to no step starts; marks inside it are not counted."""
        now = self._tick() if not self._spans else self.clock()
        self._spans.append((name, now))

    def span_end(self) -> None:
        """The innermost span ends."""
        if not self._spans:
            return
        name, start_ns = self._spans.pop()
        if not self._spans:
            self.last_ns = now = self.clock()
            self.out.append(RawSpan(name, start_ns, now - start_ns, self.index))

    def annotate(
        self, samples: int | None = None, tokens: int | None = None, loss: float | None = None
    ) -> None:
        """What the user knows of the step that runs."""
        if samples is not None:
            self._samples = samples
            for batch in self._pending:
                batch.samples = None
        if tokens is not None:
            self._tokens = tokens
        if loss is not None:
            self._loss = loss

    # --- what happens now ----------------------------------------------------------------------

    def now(self, at_ns: int) -> tuple[str, str, int]:
        """Return (status, phase, ns since the last mark) at the moment `at_ns`."""
        age_ns = max(0, at_ns - self.last_ns)
        spans = self._spans[-1:]
        if spans:
            name, since_ns = spans[0]
            status = name if name in {"eval", "checkpoint", "compile"} else "training"
            return status, name, max(0, at_ns - since_ns)
        pending = self._pending[-1:]
        evaluating = (
            len(self._pending) > 1
            and bool(self._trained_key)
            and pending != []
            and pending[0].key != self._trained_key
        )
        status = "eval" if evaluating else "training"
        if self.index == 0:
            status = "starting" if self._idle or self._backwards == 0 else "training"
        stack = self._stack[-1:]
        if stack:
            return status, _PHASE_NAMES[stack[0]], age_ns
        if self._idle:
            return status, "", age_ns
        return status, "forward" if pending else "other", age_ns
