"""Where the time of a step goes: marks in, records out. Pure Python, no torch, no sockets.

The training thread calls a mark where something begins or ends. Between two marks time belongs to
exactly one place: the innermost open phase, or a gap whose name is settled by what follows it (a
gap that leads into a backward was the forward with its loss; before a fetch or an optimizer it is
`other`). So the phases of a step add up to it exactly.

**Training or evaluation.** What begins with a fetch is `pending` until a backward (or an optimizer)
follows. When one does, what was fetched last is training and belongs to the step; pending time of
other loaders was evaluation and leaves the step as a span. Two loaders that go on side by side in
every step both train. A pass over the training loader that begins anew before a backward came was
evaluation too.

**Whose batch.** Loops fetch ahead: Accelerate one batch, the Trainer of Transformers a whole
accumulation window and one more. The time of a fetch belongs to the step in which it was spent; the
batch and its samples belong to the step that consumes them. Each loader has a queue of batches
fetched and not consumed yet, and a step that closes takes the oldest of them:

- as many as it has backwards. Those of several optimizers in turn use the same batches (a GAN), so
  the optimizer with most counts; a closure that is called again uses the same batch; a backward
  that raised throws its batch away;
- scaled, once the loop has shown three times in a row that a step of so many backwards goes with so
  many fetches (two losses on a batch, a loss on two batches): from then on as many as were fetched;
- never more than there are. So a loop without look-ahead is right whatever it does, and what a
  first step took too many the last one lacks.

A pass that begins anew drops what the pass before it left.

**Where a step ends.** It closes at the first fetch after an optimizer attempt, at the end of the
iterator, or, where nothing fetches, at the optimizer's end. Where the iterator ended before the
last backward (look-ahead), the optimizer's end is the end of the last step. `step()` alone closes
steps once it has been used.

**An optimizer that nobody sees**: compiled into a step with the rest, or none of torch's. As long
as there was no attempt, every backward says whether the weights have changed since the one before.
If so, a step has ended in between: at the fetch, or, where nothing fetches, at the end of the
backward. The optimizer's time is in `other` then. Where weights change unseen as well, a whole
epoch without an attempt (or `_MOST_UNSEEN` backwards) tells it, and from then on each backward is a
step.

The marks arrive as events (`gpuwatch.probe.events`) and are lived through again in the telemetry
thread, on a clock that shows the time each mark was made.
"""

import copy
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

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

_WARMUP_STEPS = 1
# DDP rebuilds its buckets after the first backward, and broadcasts the new order in the second
# forward: both iterations differ from the rest.
_DDP_FIRST_STEPS = 2
# So many equal steps after the first tell how many batches a backward consumes.
_EQUAL_STEPS = 2
_MOST_UNSEEN = 512
_MOST_AHEAD = 4096
"""Batches a loader may be ahead; of an evaluation the older ones are forgotten."""


class RawStep(NamedTuple):
    """One closed step; times in ns on the clock of the accountant. `notes` is what else was left
    with it, by name.
    """

    step_index: int
    start_ns: int
    step_ns: int
    phases_ns: list[int]
    fetched: bool
    batches: int
    samples: int | None
    tokens: int | None
    queue_depth: int | None
    queue_capacity: int | None
    tags: tuple[str, ...]
    loader: str
    notes: dict[str, Any] | None


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


_GAP, _OPEN = 7, 8
"""Slots of the time whose name is not settled yet, behind the seven phases: outside an optimizer,
and inside one, where a closure may run a forward."""

_PHASE_NAMES = (*PHASE_INDEX, "other", "optimizer")

_BUCKET = [0] * 9


_Batch = tuple[int | None, int | None, Any]
"""Samples, tokens and padding of a batch, None where that cannot be told or was not looked at."""


class _Loader:
    """What is known of one loader."""

    __slots__ = (
        "ahead",
        "began",
        "ended",
        "equal",
        "fetched",
        "key",
        "last_fetched",
        "last_passes",
        "rate",
        "step",
        "step_before",
        "trained",
    )

    def __init__(self, key: str) -> None:
        self.key = key
        # Of the batches that nobody has consumed yet.
        self.ahead: deque[_Batch] = deque(maxlen=_MOST_AHEAD)
        self.fetched = 0  # batches in this step
        self.ended = False  # its iterator is exhausted
        self.trained = False
        self.began = -1  # the step in which its pass began
        self.step = self.step_before = -1  # the last two steps in which it fetched
        self.last_fetched = self.last_passes = 0  # of the step before
        self.equal = 0  # steps in a row with these two numbers, after the first
        self.rate = (1, 1)  # (batches, backwards) that go together

    def due(self, passes: int) -> int:
        """How many batches a step of so many backwards consumes."""
        if not passes:
            due = self.fetched or 1  # a compiled step: its backward is not marked
        elif (
            self.equal >= _EQUAL_STEPS - 1
            and self.fetched == self.last_fetched > 0
            and passes == self.last_passes
        ):
            due = self.fetched
        else:
            batches, backwards = self.rate
            due = passes * batches // backwards or 1
        return min(due, len(self.ahead))

    def closed(self, passes: int) -> None:
        """A step of so many backwards has closed."""
        fetched = self.fetched
        if passes:
            if fetched == self.last_fetched and passes == self.last_passes:
                self.equal += 1
                if self.equal == _EQUAL_STEPS and fetched:
                    self.rate = (fetched, passes)
            else:
                self.equal = 0
                self.last_fetched = fetched
                self.last_passes = passes
        self.fetched = 0

    def forget(self) -> None:
        """Nobody trains on what has been fetched."""
        self.ahead.clear()
        self.fetched = 0


class _Stretch:
    """Time since a fetch that no backward has followed yet; `acc` holds a step's phases and gaps.

    Without `batches` it is the time since the end of an iterator.
    """

    __slots__ = ("acc", "batches", "capacity", "depth", "evaluated", "first", "loader", "start_ns")

    def __init__(self, loader: _Loader, start_ns: int) -> None:
        self.loader = loader
        self.start_ns = start_ns
        self.acc = _BUCKET.copy()
        self.batches = 0
        self.first = False
        self.evaluated = False
        self.depth: int | None = None
        self.capacity: int | None = None


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
        self.unseen = False  # weights change, and no optimizer step is seen
        self.stepped = self.went_back = False  # an optimizer has, a backward has been seen
        self._each = False  # of those unseen, each backward is taken for one
        self.last_ns = clock()
        self._nowhere = _BUCKET.copy()
        self._loaders: dict[str, _Loader] = {}
        self._optimizer_keys: set[int] = set()  # of this loop: since it trains with this loader
        self._turns = 0  # steps that have closed since
        self._trained: list[_Loader] = []  # of the last step that consumed batches
        self.finished_in = ""  # the phase in which the process ended
        self._begin_anew()

    def twin(self, clock: Callable[[], int]) -> "Accountant":
        """Return one that goes on from this moment on another clock, with nothing in `out`."""
        # The memo says what is not to be copied, and what is there instead.
        memo: dict[int, Any] = {id(self.clock): clock, id(self.out): deque()}
        memo[id(self._notes)] = None
        for loader in self._loaders.values():
            # What is left with a step and with a batch may be a tensor, and means nothing there.
            memo.update((id(padding), None) for *_, padding in loader.ahead)
        return copy.deepcopy(self, memo)

    def _begin_anew(self) -> None:
        """Nothing is open, pending or counted."""
        self._stack: list[int] = []
        self._fetching: _Loader | None = None
        self._in_backward = False
        self._compute_end_ns: int | None = None
        self._nested_fetches = self._nested_backwards = self._nested_comm = 0
        self._optimizers = 0
        self._open_key = 0
        self._open_backwards = 0
        self._spans: list[tuple[str, int]] = []
        self._pending: list[_Stretch] = []
        self._idle = True  # nothing of a step has happened yet: time is start-up, or between epochs
        self._no_fetch = False
        self._bucket = self._nowhere
        self._slot = _GAP
        self._reset(self.last_ns)

    def _reset(self, now: int) -> None:
        """The next step begins."""
        self._acc = _BUCKET.copy()
        self._fresh = True  # nothing has been put into `_acc`
        self._start_ns = now
        self._attempted = self._fetched = self._first = self._skipped = False
        self._told: tuple[str, ...] = ()  # tags from outside
        self._stepped: dict[int, int] = {}  # the optimizers and their backwards
        self._at_attempt: tuple[list[int], int, int] | None = None
        self._at_backward: tuple[list[int], int, int] | None = None
        self._used: list[_Loader] = []
        self._between = False  # an epoch has ended and nothing but time has passed since
        self._backwards = 0
        self._passes = 0  # backwards since the last attempt
        self._samples: int | None = None
        self._tokens: int | None = None
        self._notes: dict[str, Any] | None = None
        self._depth: int | None = None
        self._capacity: int | None = None
        self._loader = ""

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

    def _give_up_open(self) -> None:
        """Something raised and never reported its end: it is over, and its time is what it was."""
        self._tick()
        bucket = self._bucket
        bucket[OPTIMIZER] += bucket[_OPEN]
        bucket[_OPEN] = 0
        if self._in_backward:
            self._in_backward = False
            self._throw_away()
        self._stack.clear()
        self._fetching = None
        self._optimizers = 0
        self._nested_fetches = self._nested_backwards = self._nested_comm = 0
        self._slot = _GAP

    # --- fetching ------------------------------------------------------------------------------

    def fetch_begin(
        self, key: str, first: bool, depth: int | None = None, capacity: int | None = None
    ) -> None:
        """The training thread asks loader `key` for a batch; `first` of its iterator.

        `depth` of `capacity` batches are ready, None if it was not looked at.
        """
        if self._spans:
            return
        loader = self._loaders.get(key)
        if loader is None:
            loader = self._loaders[key] = _Loader(key)
        stack = self._stack
        if stack:
            if self._fetching is not None and self._fetching is not loader:
                self._nested_fetches += 1
                return
            if self._fetching is not None or self._in_backward or self._optimizers:
                # Nothing fetches inside these, and no loader inside itself: it raised.
                self._give_up_open()
        now = self.clock()
        self._bucket[self._slot] += now - self.last_ns
        self.last_ns = now
        self._no_fetch = False
        if self._attempted and not self.manual:
            self._close_before_fetch(now)
        elif self._each and self._backwards and not self.manual:
            if self._pending:
                self._commit(OTHER)
            self._settle(OTHER)
            self._close(now)
        elif not self._pending and not self._idle:
            if self._between and not self._backwards:
                self._drop(now)
            else:
                self._settle(OTHER)
        if self._idle:
            self._idle = False
            self._start_ns = now
        pending = self._pending
        if first:
            self._pass_begins(loader)
            stretch = _Stretch(loader, now)
            stretch.first = True
            pending.append(stretch)
        elif pending and pending[-1].loader is loader and not loader.ended:
            stretch = pending[-1]
        else:
            stretch = _Stretch(loader, now)
            pending.append(stretch)
        if loader.step != self.index:
            loader.step_before = loader.step
            loader.step = self.index
        if depth is not None:
            stretch.depth = depth
            stretch.capacity = capacity
        self._fetching = loader
        stack.append(DATA_WAIT)
        self._bucket = stretch.acc
        self._slot = DATA_WAIT

    def _pass_begins(self, loader: _Loader) -> None:
        """What is left of the loader's pass before this one, nobody has trained on."""
        loader.began = self.index
        loader.forget()
        for stretch in self._pending:
            if stretch.loader is loader:
                stretch.evaluated = True

    def _close_before_fetch(self, now: int) -> None:
        """Close the step: here, or where its optimizer ended if that was the end of an epoch."""
        at_attempt = self._at_attempt
        if at_attempt is not None and at_attempt[2] == self._backwards and self._is_drained():
            self._close_at_attempt()
            self._drop(now)
        else:
            self._close(now)

    def _drop(self, now: int) -> None:
        """What has passed since the last step lies between two epochs."""
        self._acc = self._bucket = _BUCKET.copy()
        self._fresh = True
        self._start_ns = now
        self._between = False

    def fetch_end(
        self, samples: int | None, tokens: int | None = None, padding: Any = None
    ) -> None:
        """The batch is there, with so many samples and tokens, None if that cannot be told.

        `padding` is its share, or what `float()` makes it of, where it was looked at.
        """
        if self._spans:
            return
        if self._nested_fetches:
            self._nested_fetches -= 1
            return
        loader = self._fetching
        if loader is not None:
            now = self.clock()
            self._bucket[DATA_WAIT] += now - self.last_ns
            self.last_ns = now
            self._fetching = None
            stack = self._stack
            if stack:
                stack.pop()
            self._slot = stack[-1] if stack else _GAP
            if loader.ended:
                self._resumed(loader)
            self._pending[-1].batches += 1
            loader.ahead.append((samples, tokens, padding))
            loader.fetched += 1

    def _resumed(self, loader: _Loader) -> None:
        """A pass has ended and one from before goes on: the one that ended was evaluation."""
        loader.ended = False
        if loader.began == self.index and not self._pending[-1].first:
            loader.forget()
            for stretch in self._pending[:-1]:
                if stretch.loader is loader:
                    stretch.evaluated = True

    def fetch_stop(self, failed: bool = False) -> None:
        """No batch came: the iterator is exhausted, or the fetch has `failed`."""
        if self._spans:
            return
        if self._nested_fetches:
            self._nested_fetches -= 1
            return
        loader = self._fetching
        if loader is None:
            return
        now = self._tick()
        self._fetching = None
        if self._stack:
            self._stack.pop()
        loader.ended = not failed
        pending = self._pending
        if self._backwards and not self.stepped and not self.manual:
            self._end_unseen()
        if pending[-1].batches:
            # What follows is not of these batches, unless a backward comes.
            pending.append(_Stretch(loader, now))
        elif not loader.ahead:
            # The usual end of an epoch; what other loaders did before was evaluation.
            stretch = pending.pop()
            if loader.trained and pending:
                self._leave(pending)
                pending.clear()
            if pending:
                pass
            elif any(self._acc):
                self._add(stretch)
            else:
                self._idle = True
        self._aim()

    # --- backward ------------------------------------------------------------------------------

    def backward_begin(self, updated: bool = False) -> None:
        """A backward starts: what led to it was a forward, and its batches are training.

        The weights have been `updated` since the last one; only told before the first optimizer.
        """
        if self._spans or self._fetching is not None:
            return  # a dataset may train a model of its own to make an item: that is loading
        stack = self._stack
        self._compute_end_ns = None
        if self._in_backward:
            self._nested_backwards += 1
            return
        now = self.clock()
        self._bucket[self._slot] += now - self.last_ns
        self.last_ns = now
        if self._idle:
            self._idle = False
            self._start_ns = now
        self.went_back = True
        if self._backwards and not self.stepped and not self.manual:
            self._look_for_step(updated)
        if self._pending:
            self._commit(FORWARD)
        acc = self._acc
        acc[FORWARD] += acc[_GAP]
        acc[_GAP] = 0
        if self._optimizers:
            # A closure: what ran since the optimizer began was its forward.
            acc[FORWARD] += acc[_OPEN]
            acc[_OPEN] = 0
            self._open_backwards += 1
        self._backwards += 1
        if self._open_backwards < 2:
            self._passes += 1
        self._in_backward = True
        stack.append(BACKWARD)
        self._fresh = False
        self._bucket = acc
        self._slot = BACKWARD

    def compute_end(self) -> None:
        """The backward that runs has nothing left to compute: the rest is communication."""
        self._compute_end_ns = self.clock()

    def backward_end(self, failed: bool = False) -> None:
        """The backward has returned. It has `failed` if it raised."""
        if self._spans:
            return
        stack = self._stack
        if not self._in_backward or stack[-1] != BACKWARD:
            return
        last_ns = self.last_ns
        now = self.clock()
        bucket = self._bucket
        bucket[BACKWARD] += now - last_ns
        self.last_ns = now
        compute_end_ns = self._compute_end_ns
        if compute_end_ns is not None:
            self._compute_end_ns = None
            exposed_ns = now - (last_ns if last_ns > compute_end_ns else compute_end_ns)
            # One that raised may have left the end of a backward inside it.
            if exposed_ns > 0 and not failed:
                bucket[BACKWARD] -= exposed_ns
                bucket[COMM] += exposed_ns
        if self._nested_backwards:
            self._nested_backwards -= 1
            return
        self._in_backward = False
        stack.pop()
        self._slot = stack[-1] if stack else _GAP
        if failed:
            self._throw_away()
        elif not self.stepped:
            self._at_backward = (self._acc.copy(), now, self._backwards)

    # --- steps whose optimizer nobody sees -----------------------------------------------------

    def _look_for_step(self, updated: bool) -> None:
        """Before another backward: has a step ended since the last one, though nobody saw it?"""
        if not updated and self._backwards < _MOST_UNSEEN:
            return
        self.unseen = True
        self._each = self._each or not updated
        if self._pending:
            self._close(self._pending[0].start_ns)
        else:
            # What came since, nobody can tell apart: the optimizer, a batch, a forward.
            self._close_at(self._at_backward)
            self._settle(OTHER)

    def _end_unseen(self) -> None:
        """An iterator has ended before any attempt: is that the end of the last step?"""
        pending = self._pending
        if len(pending) > 1 or pending[0].batches or not self._is_drained():
            return
        if not self.unseen:
            if self._backwards < 2:
                return
            self.unseen = self._each = True
        self._settle(OTHER)
        self._close(pending[0].start_ns)

    def _throw_away(self) -> None:
        """The batch of a backward that raised is consumed, and nobody has trained on it."""
        self._backwards -= 1
        fresh = self._open_backwards < 2
        if self._optimizers:
            self._open_backwards -= 1
        if fresh:
            self._passes -= 1
            for loader in self._used:
                if loader.ahead:
                    del loader.ahead[min(self._passes, len(loader.ahead) - 1)]
                    loader.fetched = max(0, loader.fetched - 1)

    # --- training or evaluation ----------------------------------------------------------------

    def _commit(self, gap_phase: int) -> None:
        """What was fetched last is training: it belongs to the step, and so does its loader."""
        pending = self._pending
        last = pending[-1]
        loader = last.loader
        if len(pending) == 1 and (last.batches or loader.ahead):
            self._take(last)
        else:
            found = self._commit_many()
            if found is None:
                self._aim()
                return
            loader = found
        pending.clear()
        self._settle(gap_phase)
        self._fresh = False
        self._fetched = True
        self._loader = loader.key

    def _commit_many(self) -> _Loader | None:
        """Tell training from evaluation; returns the loader that trains, None if there is none."""
        pending = self._pending
        last = pending[-1]
        main: _Loader | None = last.loader
        if self._fresh:
            self._start_ns = last.start_ns
        if self._trained and not last.batches and not last.loader.trained:
            # An evaluation has ended, and nothing was fetched since: an older batch is consumed.
            main = next((loader for loader in self._trained if loader.ahead), None)
            for slot in (_GAP, _OPEN):
                self._acc[slot] += last.acc[slot]
                last.acc[slot] = 0
            self._fresh = False
        index = self.index
        evaluated = []
        epoch_began = False
        for stretch in pending:
            loader = stretch.loader
            together = loader.began < index and loader.step_before == index - 1 >= 0
            if not stretch.evaluated and (loader is main or together):
                if self._fresh:
                    self._start_ns = stretch.start_ns
                self._take(stretch)
                epoch_began = epoch_began or stretch.first
            else:
                evaluated.append(stretch)
        while epoch_began and evaluated and not evaluated[-1].batches:
            evaluated.pop()  # what lies between an evaluation and a new epoch may be anything
        self._leave(evaluated)
        if main is None:
            pending.clear()
        return main

    def _leave(self, evaluated: list[_Stretch]) -> None:
        """The time of these was evaluation, and a little of what follows it."""
        start_ns = duration_ns = 0
        for stretch in evaluated:
            if stretch.batches:
                start_ns = start_ns or stretch.start_ns
            if start_ns:
                duration_ns += sum(stretch.acc)
            if stretch.loader not in self._used:
                stretch.loader.forget()
        if duration_ns:
            self.out.append(RawSpan("eval", start_ns, duration_ns, self.index))

    def _add(self, stretch: _Stretch) -> None:
        acc = self._acc
        for slot, value in enumerate(stretch.acc):
            acc[slot] += value

    def _take(self, stretch: _Stretch) -> None:
        """Put what has been pending into the step."""
        if self._fresh:
            # The usual loop: nothing else is in the step yet. The bucket becomes the step's.
            self._acc = stretch.acc
            self._fresh = False
        else:
            self._add(stretch)
        loader = stretch.loader
        if loader not in self._used:
            self._used.append(loader)
            if not loader.trained:
                loader.trained = True
                self._optimizer_keys.clear()
                self._turns = 0
        if stretch.first:
            self._first = True
        if stretch.depth is not None:
            self._depth = stretch.depth
            self._capacity = stretch.capacity

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
        if self._spans or self._fetching is not None:
            return
        if self._optimizers:
            if key != self._open_key or not self._open_backwards:
                self._optimizers += 1
                return
            # It never ended, for it raised; or it calls its base class after its closure.
            self._give_up_open()
        now = self.clock()
        self._bucket[self._slot] += now - self.last_ns
        self.last_ns = now
        if self._idle:
            self._begin(now)
        if not self._pending:
            self._settle(OTHER)
            if self._attempted and key in self._stepped and not self.manual:
                self._no_fetch = True
                self._close_at_attempt()
        self.stepped = True
        self.unseen = self._each = False
        self._optimizers = 1
        self._open_key = key
        self._open_backwards = 0
        self._stack.append(_OPEN)
        self._slot = _OPEN

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
        stack = self._stack
        if stack:
            stack.pop()
        if self._pending:
            self._commit(OTHER)
        acc = self._acc
        acc[OPTIMIZER] += acc[_OPEN]
        acc[_OPEN] = 0
        self._attempted = True
        if skipped:
            self._skipped = True
        stepped = self._stepped
        stepped[key] = stepped.get(key, 0) + self._passes
        self._optimizer_keys.add(key)
        self._passes = self._open_backwards = 0
        self._at_attempt = (acc.copy(), now, self._backwards)
        if len(stepped) == len(self._optimizer_keys) and not self.manual:
            # Every optimizer has had its turn; in a first step there may be more of them.
            loaders = self._used or self._trained
            ended = bool(loaders) and loaders[-1].ended
            drained = ended and self._turns > 0 and self._is_drained()
            if self._no_fetch or drained:
                self._close(now)
                self._between = drained
        self._bucket = self._acc
        self._fresh = False
        self._slot = stack[-1] if stack else _GAP

    def _is_drained(self) -> bool:
        """Whether this step consumes the last batches of an iterator that has ended."""
        loaders = self._used or self._trained
        for loader in loaders:
            if not loader.ended:
                return False
        passes = self._all_passes()
        return bool(loaders) and all(0 < len(ld.ahead) == ld.due(passes) for ld in loaders)

    def _close_at_attempt(self) -> None:
        """The step ended with its optimizer."""
        self._close_at(self._at_attempt)

    def _close_at(self, end: tuple[list[int], int, int] | None) -> None:
        """Close the step as it was at that moment; what came after it goes to the next one."""
        if end is None:
            return
        acc, ended_ns, backwards = end
        rest = [value - before for value, before in zip(self._acc, acc, strict=True)]
        later, passes = self._backwards - backwards, self._passes
        self._acc = acc
        self._backwards = backwards
        if end is self._at_attempt:
            self._passes = 0
        else:
            passes = 0
        self._close(ended_ns)
        self._acc = self._bucket = rest
        self._fresh = False
        self._backwards, self._passes = later, passes

    # --- the end of a step ---------------------------------------------------------------------

    def step(self) -> None:
        """The user says that an iteration ends here. From now on only this closes steps."""
        if self._spans or self._fetching is not None:
            return  # said by a dataset
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
        acc[OPTIMIZER] += acc.pop()
        acc[OTHER] += acc.pop()
        batches, samples, tokens, padding = self._consume()
        if padding is not None:
            self.note("padding_share", padding)
        index = self.index
        self.out.append(
            RawStep(
                index,
                self._start_ns,
                sum(acc),
                acc,
                self._fetched or batches > 0,
                batches or self._backwards,
                samples if self._samples is None else self._samples,
                tokens if self._tokens is None else self._tokens,
                self._depth,
                self._capacity,
                self._tags()
                if index < _DDP_FIRST_STEPS or self._first or self._skipped or self._told
                else (),
                self._loader or (self._trained[-1].key if batches else ""),
                self._notes,
            )
        )
        self.index = index + 1
        self._turns += 1
        self._reset(now)
        self._bucket = self._acc

    def _all_passes(self) -> int:
        """How many backwards went over fresh batches in this step."""
        stepped = self._stepped
        if not stepped:
            return self._passes
        return max(stepped.values()) + self._passes

    def _consume(self) -> tuple[int, int | None, int | None, Any]:
        """Take this step's batches out of the queues; returns how many, and what is in them."""
        loaders = self._used
        if not loaders:
            # Nothing was fetched in this step: it may consume what was fetched before.
            loaders = self._trained
        passes = self._all_passes()
        if passes == 1 == len(loaders):
            # The usual loop, for some steps now; what follows says the same in more words.
            loader = loaders[0]
            same = loader.fetched == loader.last_fetched == loader.last_passes == 1
            if same and loader.equal > _EQUAL_STEPS and len(loader.ahead) == 1:
                loader.fetched = 0
                self._trained = loaders
                return 1, *loader.ahead.popleft()
        batches = 0
        samples: int | None = None
        tokens: int | None = None
        padding = None
        for loader in loaders:
            if passes or loader.fetched:
                ahead = loader.ahead
                due = loader.due(passes)
                batches += due
                for _ in range(due):
                    more_samples, more_tokens, seen = ahead.popleft()
                    if more_samples is not None:
                        samples = (samples or 0) + more_samples
                    if more_tokens is not None:
                        tokens = (tokens or 0) + more_tokens
                    if seen is not None:
                        padding = seen
            loader.closed(passes)
        self._trained = loaders
        return batches, samples, tokens, padding

    def _tags(self) -> tuple[str, ...]:
        tags: tuple[str, ...] = ("first_batch",) if self._first else ()
        if self.index < _WARMUP_STEPS:
            tags += ("warmup",)
        if self.distributed and self.index < _DDP_FIRST_STEPS:
            tags += ("ddp_first",)
        if self._skipped:
            tags += ("skipped",)
        return tags + tuple(tag for tag in self._told if tag not in tags)

    def attempts_closed(self, attempts: int) -> tuple[int, int]:
        """Of so many attempts those before the step that runs now, and how many make a step."""
        return attempts - len(self._stepped), max(1, len(self._optimizer_keys))

    def abandon(self, attempts: int) -> None:
        """Marks are missing, and with them `attempts` steps: count them and begin anew."""
        self.dropped += attempts
        self.index += attempts
        for loader in self._loaders.values():
            loader.forget()
        self._begin_anew()

    def finish(self) -> None:
        """The process ends: close the step whose optimizer has run, settle what is pending."""
        self.finished_in = self.now(self.last_ns)[1]
        while self._spans:
            self.span_end()
        now = self._tick()
        if self._attempted and not self.manual:
            if self._at_attempt is not None and not self._pending:
                self._close_at_attempt()
            else:
                self._close(now)
        elif self.unseen and self._backwards and not self.manual:
            if not self._pending:
                self._close_at(self._at_backward)
            else:
                self._close(self._pending[0].start_ns)
        pending = self._pending
        if pending and not any(self._acc):
            while pending and not pending[-1].batches:
                pending.pop()  # what came after the end of an iterator
            self._leave([s for s in pending if s.first or s.evaluated or not s.loader.trained])
        pending.clear()
        self._begin_anew()

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
        if self._spans:
            self._spans.append((name, self.clock()))
            return
        now = self._tick()
        if name == "eval" and self._attempted and not self.manual and not self._stack:
            # As if its loader had been seen: the step before it is over.
            self._close_before_fetch(now)
            self._between = True
            self._aim()
        self._spans.append((name, now))

    def span_end(self) -> None:
        """The innermost span ends."""
        if not self._spans:
            return
        name, start_ns = self._spans.pop()
        if not self._spans:
            self.last_ns = now = self.clock()
            follows = self.index + (self._attempted and not self.manual)
            self.out.append(RawSpan(name, start_ns, now - start_ns, follows))

    def annotate(self, samples: int | None = None, tokens: int | None = None) -> None:
        """What the user knows of the step that runs; it goes before what was seen."""
        if samples is not None:
            self._samples = samples
        if tokens is not None:
            self._tokens = tokens

    def note(self, name: str, value: Any, add: bool = False) -> None:
        """Leave a value with the step that runs; with `add` it is summed up over the step."""
        if self._between or (add and (self._idle or self._spans)):
            return  # of no step; what is summed up is a part of a step's time
        if self._notes is None:
            self._notes = {}
        self._notes[name] = self._notes.get(name, 0) + value if add else value

    def tag(self, name: str) -> None:
        """The step that runs is out of the ordinary."""
        if name not in self._told:
            self._told += (name,)

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
        over = False  # an evaluation has ended, and nothing tells yet what this is
        evaluating = False
        if pending and self._trained and not pending[0].loader.trained:
            over = not pending[0].batches
            evaluating = not over
        status = "eval" if evaluating else "training"
        if self.index == 0:
            status = "starting" if self._idle or self._backwards == 0 else "training"
        stack = self._stack[-1:]
        ended_ns = self._compute_end_ns
        if stack and stack[0] == BACKWARD and ended_ns is not None:
            # All gradients are there; a backward that has not returned waits for the other ranks.
            return status, _PHASE_NAMES[COMM], max(0, at_ns - max(self.last_ns, ended_ns))
        if stack:
            return status, _PHASE_NAMES[stack[0]], age_ns
        if self._idle or self._between or over:
            return status, "", age_ns
        return status, "forward" if pending else "other", age_ns
