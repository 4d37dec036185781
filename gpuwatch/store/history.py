"""The slower past that trends and periods need: first batches, spans, memory, sensor means.

Bounded for every rank and process: raw steps beyond the window would cost too much at a thousand
ranks.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpuwatch.schema import ProcessSample, Reading, SensorFrame, Span, StepRecord

__all__ = ["MEAN_S", "History", "Means", "Past", "ProcessMeans", "memory_slope"]

KEPT_FIRSTS = 16
KEPT_SPANS = 64
MEMORY_POINTS = 128
"""When there are more, every other one goes and the stride doubles: the whole run stays in view."""

MEAN_S = 6.0
"""Sensor readings are averaged over so many seconds: one of /proc/stat counts in whole ticks."""

_MOST_TICKS = 16
_AVERAGED = frozenset(
    {
        "cpu_percent",
        "cpu_iowait_percent",
        "cpu_throttled_percent",
        "cpu_throttled_ms_per_s",
        "psi_cpu_some",
        "psi_io_some",
        "psi_io_full",
        "psi_memory_some",
        "major_faults_per_s",
        "read_bytes_per_s",
    }
)


@dataclass(frozen=True, slots=True)
class Past:
    """What is kept of one rank beyond its window.

    `firsts` are the latest steps that began an iterator, but the very first; `spans` the latest
    named times outside the steps; `memory` is (step, bytes) over the whole run, ever sparser.
    """

    firsts: tuple[StepRecord, ...] = ()
    spans: tuple[Span, ...] = ()
    memory: tuple[tuple[int, int], ...] = ()


class ProcessMeans(NamedTuple):
    """Readings of one process by name, and the shares of ticks in which it was blocked on a device
    (state D) and had a core or waited for one (state R).
    """

    readings: Mapping[str, float]
    blocked: float
    runnable: float


class History:
    """Collects a rank's `Past`."""

    def __init__(self) -> None:
        self._firsts: deque[StepRecord] = deque(maxlen=KEPT_FIRSTS)
        self._spans: deque[Span] = deque(maxlen=KEPT_SPANS)
        self._memory: list[tuple[int, int]] = []
        self._stride = 1
        self._last_span_s = 0.0
        self._past: Past | None = None

    def add_steps(self, records: Iterable[StepRecord]) -> None:
        """Take steps in their order, each once."""
        for record in records:
            self._past = None
            if "first_batch" in record.tags and record.index:
                self._firsts.append(record)
            if record.memory_bytes is not None and (
                not self._memory or record.index >= self._memory[-1][0] + self._stride
            ):
                self._memory.append((record.index, record.memory_bytes))
                if len(self._memory) > MEMORY_POINTS:
                    del self._memory[1::2]
                    self._stride *= 2

    def add_spans(self, spans: Iterable[Span]) -> None:
        """Take spans; those that are known already, from a snapshot say, change nothing."""
        for span in spans:
            if span.started_s > self._last_span_s:
                self._last_span_s = span.started_s
                self._spans.append(span)
                self._past = None

    def past(self) -> Past:
        """Return what is known by now."""
        if self._past is None:
            self._past = Past(tuple(self._firsts), tuple(self._spans), tuple(self._memory))
        return self._past


def memory_slope(memory: Iterable[tuple[int, int]]) -> float | None:
    """Return bytes a step by least squares, None with fewer than three points."""
    points = list(memory)
    if len(points) < 3:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        return None
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


class Means:
    """Means of sensor readings over the last six seconds: of the host, and of each process."""

    def __init__(self) -> None:
        self._ticks: deque[tuple[float, SensorFrame]] = deque(maxlen=_MOST_TICKS)
        self._host: Mapping[str, float] | None = None
        self._processes: dict[int, ProcessMeans] | None = None

    def add(self, frame: SensorFrame, at_s: float) -> None:
        """Take a tick; `at_s` by the receiver's clock."""
        self._ticks.append((at_s, frame))
        while self._ticks[0][0] < at_s - MEAN_S:
            self._ticks.popleft()
        self._host = self._processes = None

    def host(self) -> Mapping[str, float]:
        """Return the host's means; what is not known is not in it."""
        if self._host is None:
            self._host = _means(frame.host.readings for _, frame in self._ticks)
        return self._host

    def process(self, pid: int) -> ProcessMeans | None:
        """Return a process's means, None for one that was not seen."""
        if self._processes is None:
            samples: dict[int, list[ProcessSample]] = {}
            for _, frame in self._ticks:
                for sample in frame.processes:
                    samples.setdefault(sample.pid, []).append(sample)
            self._processes = {
                pid: ProcessMeans(
                    _means(sample.readings for sample in found),
                    sum(sample.status == "D" for sample in found) / len(found),
                    sum(sample.status == "R" for sample in found) / len(found),
                )
                for pid, found in samples.items()
            }
        return self._processes.get(pid)


def _means(readings: Iterable[Mapping[str, Reading]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for row in readings:
        for name, reading in row.items():
            if name in _AVERAGED and reading.value is not None:
                sums[name] = sums.get(name, 0.0) + reading.value
                counts[name] = counts.get(name, 0) + 1
    return {name: total / counts[name] for name, total in sums.items()}
