"""The last steady steps of one rank with running sums, and its seconds beyond them."""

import statistics
from collections import deque
from collections.abc import Iterable

from gpuwatch.schema import PHASES, StepRecord
from gpuwatch.store.clocks import deciding, deciding_step_ns, is_on_device
from gpuwatch.store.views import Rollup

__all__ = ["TIMELINE_S", "WINDOW_STEPS", "Timeline", "Window", "is_steady"]

WINDOW_STEPS = 64
TIMELINE_S = 120

_NOT_STEADY = frozenset({"first_batch", "warmup", "compile", "ddp_first"})


def is_steady(record: StepRecord) -> bool:
    """Whether a step belongs into steady-state statistics: no first batch, no warm-up."""
    return not record.tags or not _NOT_STEADY.intersection(record.tags)


class Window:
    """The last 64 steady steps, their sums kept as they come and go.

    Sums are integers in ns, so that means add up and nothing drifts however long the run. They are
    all by one clock: where a device is timed, a step that it was not timed in stays out, unless a
    whole window of such steps has come in a row.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.records: deque[StepRecord] = deque()
        self._step_ns = 0
        self._phases_ns = [0] * len(PHASES)
        self._phases_known = [0] * len(PHASES)
        self._samples = 0
        self._samples_ns = 0
        self._depth = 0.0
        self._depths = 0
        self._stall_ns = 0
        self._stalls = 0
        self._untimed = 0

    def __len__(self) -> int:
        return len(self.records)

    def append(self, record: StepRecord) -> None:
        """Add the newest step; the oldest leaves when there are more than 64."""
        on_device = is_on_device(record)
        if self.records and on_device != is_on_device(self.records[-1]):
            self._untimed += 1
            if not on_device and self._untimed < WINDOW_STEPS:
                return
            self._clear()
        self._untimed = 0
        self.records.append(record)
        self._count(record, 1)
        if len(self.records) > WINDOW_STEPS:
            self._count(self.records.popleft(), -1)

    def replace(self, records: Iterable[StepRecord]) -> None:
        """Start anew with these steps, oldest first."""
        self._clear()
        for record in records:
            self.append(record)

    def _count(self, record: StepRecord, sign: int) -> None:
        step_ns = deciding_step_ns(record)
        self._step_ns += sign * step_ns
        phases = deciding(record)
        for i, name in enumerate(PHASES):
            value = getattr(phases, name)
            if value is not None:
                self._phases_ns[i] += sign * value
                self._phases_known[i] += sign
        if record.samples is not None:
            self._samples += sign * record.samples
            self._samples_ns += sign * step_ns
        if record.queue_depth is not None:
            self._depth += sign * record.queue_depth
            self._depths += sign
        if record.device_stall_ns is not None:
            self._stall_ns += sign * record.device_stall_ns
            self._stalls += sign

    @property
    def clock(self) -> str | None:
        """The clock of every step in the window, host or device; None without steps."""
        if not self.records:
            return None
        return "device" if is_on_device(self.records[-1]) else "host"

    @property
    def device_stall_ms(self) -> float | None:
        """Mean time that the device had nothing to do between two steps, where it is known."""
        return self._stall_ns / self._stalls / 1e6 if self._stalls else None

    @property
    def step_ms(self) -> float | None:
        """Mean step."""
        return self._step_ns / len(self.records) / 1e6 if self.records else None

    @property
    def phases_ms(self) -> dict[str, float | None]:
        """Mean of each phase; None where no step of the window knows it.

        The divisor is the number of steps, known or not, so that the means add up to the step.
        """
        count = len(self.records)
        return {
            name: self._phases_ns[i] / count / 1e6 if self._phases_known[i] else None
            for i, name in enumerate(PHASES)
        }

    @property
    def own_ms(self) -> float | None:
        """Mean step without exposed communication; with one process the step itself."""
        if not self.records:
            return None
        comm_ns = self._phases_ns[PHASES.index("comm")]
        return (self._step_ns - comm_ns) / len(self.records) / 1e6

    @property
    def data_wait_ratio(self) -> float | None:
        """Data wait / step, 0..1."""
        if not self._phases_known[0] or not self._step_ns:
            return None
        return self._phases_ns[0] / self._step_ns

    @property
    def samples_per_s(self) -> float | None:
        """Samples of this rank a second, over the steps that know their samples."""
        return self._samples / (self._samples_ns / 1e9) if self._samples_ns else None

    @property
    def queue_depth(self) -> float | None:
        """Mean number of batches that were ready when a step began to wait."""
        return max(0.0, self._depth) / self._depths if self._depths else None

    def percentiles_ms(self) -> tuple[float | None, float | None]:
        """Return (p50, p95) of the step; p95 by the nearest rank."""
        if not self.records:
            return None, None
        steps = sorted(map(deciding_step_ns, self.records))
        nearest = max(0, -(-len(steps) * 95 // 100) - 1)
        return statistics.median(steps) / 1e6, steps[nearest] / 1e6


class Timeline:
    """The last two minutes in one-second rollups; the open second is in it too."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._closed: deque[Rollup] = deque(maxlen=TIMELINE_S)
        self._second_s = 0
        self._steps_ms: list[float] = []
        self._waits_ms: list[float] = []

    def add(self, record: StepRecord) -> None:
        """Count a step in the second in which it ended."""
        second_s = int(record.started_s + record.step_ns / 1e9)
        if second_s > self._second_s:
            if self._steps_ms:
                self._closed.append(self._rollup())
            self._second_s = second_s
            self._steps_ms = []
            self._waits_ms = []
        self._steps_ms.append(deciding_step_ns(record) / 1e6)
        wait_ns = deciding(record).data_wait
        if wait_ns is not None:
            self._waits_ms.append(wait_ns / 1e6)

    def _rollup(self) -> Rollup:
        return Rollup(
            self._second_s,
            len(self._steps_ms),
            min(self._steps_ms),
            statistics.median(self._steps_ms),
            max(self._steps_ms),
            statistics.fmean(self._waits_ms) if self._waits_ms else None,
        )

    def rebuild(self, records: Iterable[StepRecord]) -> None:
        """Start anew with these steps, oldest first."""
        self._clear()
        for record in records:
            self.add(record)

    def rollups(self) -> tuple[Rollup, ...]:
        """Return the seconds, oldest first; seconds without a step are absent."""
        if not self._steps_ms:
            return tuple(self._closed)
        return (*self._closed, self._rollup())
