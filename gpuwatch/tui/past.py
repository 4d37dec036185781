"""The last ten minutes, packed: what is needed to draw curves and to scroll back.

A moment holds the numbers of every rank and device as 4-byte floats, NaN for what is not known.
A whole view of a large run takes megabytes; a moment of it takes 64 bytes a rank and 52 a device,
and about a third of that where there are many, which are kept compressed, each field by itself.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import ceil, inf, isfinite, nan
from typing import TYPE_CHECKING, TypeAlias

from gpuwatch.schema import PHASES, GpuSample, Reading
from gpuwatch.store.packed import PACK_ABOVE
from gpuwatch.store.quick import stalls_of
from gpuwatch.store.views import NodeView, RankView, RunView
from gpuwatch.tui.render import numbers

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Finding

__all__ = [
    "GPU_FIELDS",
    "KEPT_S",
    "RANK_FIELDS",
    "Moment",
    "Past",
    "Point",
    "grid",
    "nodes_at",
    "run_at",
]

KEPT_S = 600.0
"""How far back one can scroll."""

_RANKS_A_SECOND = 128
"""Larger runs are kept less often, so that keeping them costs the same."""

_KEPT_RUNS = 4
_KEPT_COLUMNS = 32

_FINDINGS_S = 10.0
"""Findings that only changed their numbers are kept this often."""

RANK_FIELDS = (
    "own_ms",
    "step_ms",
    *PHASES,
    "second_max_ms",
    "second_wait_ms",
    "stall_ms",
    "queue_depth",
    "memory_gb",
    "samples_per_s",
    "cpu_percent",
)
"""Numbers of a rank. `second_*` are of the newest whole second, the others means of the window."""

GPU_FIELDS = (
    "gpu_util",
    "sm_active",
    "sm_occupancy",
    "tensor_active",
    "dram_active",
    "memory_used",
    "power",
    "temperature",
    "sm_clock",
    "pcie_rx",
    "pcie_tx",
    "nvlink_rx",
    "nvlink_tx",
)
"""Readings of a device that are kept, by their names."""

_RANK_PLACE = {name: i for i, name in enumerate(RANK_FIELDS)}
_GPU_PLACE = {name: i for i, name in enumerate(GPU_FIELDS)}

Point = tuple[float, float | None]
"""A wall-clock time in seconds and a value."""


class Columns:
    """Rows of numbers, compressed a column at a time: a curve reads one, and they are alike.

    Of each number the bytes of the same weight are together, of which the first ones hardly differ.
    """

    __slots__ = ("_columns",)

    def __init__(self, rows: Iterable[Sequence[float | None]]) -> None:
        self._columns = tuple([_squeezed(column) for column in zip(*rows, strict=True)])

    def column(self, place: int) -> array[float]:
        """Return a number of every row, NaN for what is not known."""
        if not self._columns:
            return array("f")
        planes = zlib.decompress(self._columns[place])
        count = len(planes) // 4
        data = bytearray(len(planes))
        for i in range(4):
            data[i::4] = planes[i * count : (i + 1) * count]
        return array("f", bytes(data))


def _squeezed(column: Sequence[float | None]) -> bytes:
    data = array("f", [nan if value is None else value for value in column]).tobytes()
    return zlib.compress(b"".join([data[i::4] for i in range(4)]), 1)


Numbers: TypeAlias = "array[float] | Columns"
"""A row of numbers after the other, or columns of them."""


def _column_of(values: Numbers, place: int, width: int) -> array[float]:
    """Return a number of every row."""
    return values.column(place) if isinstance(values, Columns) else values[place::width]


@dataclass(frozen=True, slots=True)
class Moment:
    """One run at one time. The tuples of names are shared between moments where they are equal."""

    at_s: float
    steps: int
    loss: float | None
    epoch: float | None
    samples_per_s: float | None
    step_ms: float | None
    state: str
    ranks: Mapping[int, int]
    values: Numbers
    states: tuple[str, ...]
    gpus: Mapping[str, int]
    gpu_values: Numbers
    findings: tuple[Finding, ...]

    def rank(self, rank: int, field: str) -> float | None:
        """Return a number of a rank, None where it was not known."""
        place = self.ranks.get(rank)
        return None if place is None else _known(self.rank_column(field)[place])

    def gpu(self, uuid: str, field: str) -> float | None:
        """Return a reading of a device, None where it was not known."""
        place = self.gpus.get(uuid)
        return None if place is None else _known(self.gpu_column(field)[place])

    def rank_column(self, field: str) -> array[float]:
        """Return a number of every rank, in the order of `ranks`; NaN where it was not known."""
        return _column_of(self.values, _RANK_PLACE[field], len(RANK_FIELDS))

    def gpu_column(self, field: str) -> array[float]:
        """Return a reading of every device, in the order of `gpus`; NaN where it was not known."""
        return _column_of(self.gpu_values, _GPU_PLACE[field], len(GPU_FIELDS))


def _known(value: float) -> float | None:
    return value if isfinite(value) else None


def _stall_ms(rank: RankView, since_s: float) -> float | None:
    """Return the mean device stall of the steps since then, n/a where none has one."""
    found: list[float] = []
    for started_s, stall_ns in stalls_of(rank.window):
        if started_s < since_s and found:
            break
        if stall_ns is not None:
            found.append(stall_ns / 1e6)
        elif started_s < since_s:
            break
    return sum(found) / len(found) if found else None


def _memory_gb(rank: RankView) -> float | None:
    if rank.last is not None and rank.last.memory_bytes is not None:
        return rank.last.memory_bytes / 1e9
    return None


def _rank_values(rank: RankView, since_s: float) -> list[float | None]:
    # The second that is open now has not seen all of its steps.
    second = rank.timeline[max(0, len(rank.timeline) - 2)] if rank.timeline else None
    process = rank.process
    return [
        rank.own_ms,
        rank.step_ms,
        *(rank.phases_ms.get(name) for name in PHASES),
        None if second is None else second.max_ms,
        None if second is None else second.data_wait_ms,
        _stall_ms(rank, since_s + rank.ahead_s),
        rank.queue_depth,
        _memory_gb(rank),
        rank.samples_per_s,
        None if process is None else numbers.reading_value(process.readings.get("cpu_percent")),
    ]


def _packed(rows: Sequence[Sequence[float | None]]) -> Numbers:
    if len(rows) > PACK_ABOVE:
        return Columns(rows)
    return array("f", [nan if value is None else value for row in rows for value in row])


class Past:
    """The moments of each run, oldest first, at most `KEPT_S` of them."""

    def __init__(self) -> None:
        self._runs: dict[str, deque[Moment]] = {}
        self._findings_at: dict[str, float] = {}
        self._columns: dict[tuple[str, int | str, str], tuple[Moment | None, list[Point]]] = {}

    def moments(self, run: str) -> Sequence[Moment]:
        """Return what is kept of a run, oldest first."""
        return self._runs.get(run, ())

    def interval_s(self, ranks: int) -> float:
        """Return how often a run of so many ranks is kept."""
        return float(max(1, ceil(ranks / _RANKS_A_SECOND)))

    def keep(
        self,
        run: RunView,
        gpus: Mapping[str, GpuSample],
        findings: tuple[Finding, ...],
        at_s: float,
    ) -> bool:
        """Keep a run as it is at a wall-clock time; False where it is too early for that."""
        kept = self._runs.get(run.run)
        if kept is None:
            if len(self._runs) >= _KEPT_RUNS:
                del self._runs[next(iter(self._runs))]
            kept = self._runs[run.run] = deque()
        last = kept[-1] if kept else None
        # A clock that was set back must not stop the recording.
        if last is not None and 0.0 <= at_s - last.at_s < self.interval_s(len(run.ranks)) * 0.95:
            return False
        since_s = last.at_s if last is not None else at_s - 1.0
        ranks: Mapping[int, int] = {rank.rank: i for i, rank in enumerate(run.ranks)}
        states = tuple([rank.state for rank in run.ranks])
        places: Mapping[str, int] = {uuid: i for i, uuid in enumerate(gpus)}
        if last is not None:
            ranks = last.ranks if last.ranks == ranks else ranks
            states = last.states if last.states == states else states
            places = last.gpus if last.gpus == places else places
            findings = self._shared(run.run, last, findings, at_s)
        moment = Moment(
            at_s,
            run.steps,
            run.loss,
            run.epoch,
            run.samples_per_s,
            run.step_ms,
            run.state,
            ranks,
            _packed([_rank_values(rank, since_s) for rank in run.ranks]),
            states,
            places,
            _packed(
                [
                    [numbers.reading_value(gpu.readings.get(name)) for name in GPU_FIELDS]
                    for gpu in gpus.values()
                ]
            ),
            findings,
        )
        kept.append(moment)
        while kept and (kept[0].at_s < at_s - KEPT_S or kept[0].at_s > at_s):
            kept.popleft()
        return True

    def _shared(
        self, run: str, last: Moment, findings: tuple[Finding, ...], at_s: float
    ) -> tuple[Finding, ...]:
        same = [(f.id, f.state, f.severity) for f in findings] == [
            (f.id, f.state, f.severity) for f in last.findings
        ]
        if same and 0.0 <= at_s - self._findings_at.get(run, -inf) < _FINDINGS_S:
            return last.findings
        self._findings_at[run] = at_s
        return findings

    def at(self, run: str, at_s: float) -> Moment | None:
        """Return the newest moment that is not after `at_s`, else the oldest; None without any."""
        found: Moment | None = None
        for moment in self._runs.get(run, ()):
            if found is not None and moment.at_s > at_s:
                break
            found = moment
        return found

    def rank_points(self, run: str, rank: int, field: str) -> list[Point]:
        """Return a number of a rank over time."""
        return self._column(run, rank, field)

    def gpu_points(self, run: str, uuid: str, field: str) -> list[Point]:
        """Return a reading of a device over time."""
        return self._column(run, uuid, field)

    def _column(self, run: str, item: int | str, field: str) -> list[Point]:
        """Return one number of a rank or a device over time; made once a moment."""
        moments = self._runs.get(run)
        if not moments:
            return []
        newest, found = self._columns.get((run, item, field), (None, []))
        if newest is moments[-1]:
            return found
        # Of the moments before only the oldest have gone since.
        new = list(takewhile(lambda moment: moment is not newest, reversed(moments)))[::-1]
        kept = len(moments) - len(new)
        found = found[-kept:] if kept else []
        for moment in new:
            value = moment.rank(item, field) if isinstance(item, int) else moment.gpu(item, field)
            found.append((moment.at_s, value))
        if len(self._columns) >= _KEPT_COLUMNS:
            self._columns.clear()
        self._columns[run, item, field] = (moments[-1], found)
        return found


def run_at(run: RunView, moment: Moment) -> RunView:
    """Return a run as it was: numbers and states of that moment, everything else as it is now."""
    ranks = []
    columns = [moment.rank_column(name) for name in RANK_FIELDS]
    for rank in run.ranks:
        place = moment.ranks.get(rank.rank)
        if place is None:
            continue
        value = {
            name: _known(column[place]) for name, column in zip(RANK_FIELDS, columns, strict=True)
        }
        step_ms, wait_ms = value["step_ms"], value["data_wait"]
        state = moment.states[place]
        ranks.append(
            replace(
                rank,
                own_ms=value["own_ms"],
                step_ms=step_ms,
                step_p50_ms=None,
                step_p95_ms=None,
                phases_ms={name: value[name] for name in PHASES},
                data_wait_ratio=wait_ms / step_ms if wait_ms is not None and step_ms else None,
                samples_per_s=value["samples_per_s"],
                queue_depth=value["queue_depth"],
                state=state,
                state_reason=rank.state_reason if state == rank.state else "",
                age_s=0.0,
                steps=min(rank.steps, moment.steps),
                window=(),
            )
        )
    return replace(
        run,
        ranks=tuple(ranks),
        steps=moment.steps,
        loss=moment.loss,
        epoch=moment.epoch,
        samples_per_s=moment.samples_per_s,
        step_ms=moment.step_ms,
        state=moment.state,
        age_s=0.0,
    )


def nodes_at(nodes: Sequence[NodeView], moment: Moment) -> tuple[NodeView, ...]:
    """Return nodes with the readings of their devices as they were; others are left as they are."""
    columns = {name: moment.gpu_column(name) for name in GPU_FIELDS}

    def then(gpu: GpuSample) -> GpuSample:
        place = moment.gpus.get(gpu.uuid)
        if place is None:
            return gpu
        readings = dict(gpu.readings)
        for name in GPU_FIELDS:
            now, value = readings.get(name), _known(columns[name][place])
            if now is None:
                continue
            if value is None:
                reason = now.reason or "not known at that time"
                readings[name] = Reading(None, now.unit, now.source, 0.0, "na", reason)
            else:
                readings[name] = Reading(value, now.unit, now.source)
        return GpuSample(
            gpu.index,
            gpu.uuid,
            gpu.name,
            readings,
            parent=gpu.parent,
            slice=gpu.slice,
            driver=gpu.driver,
            driver_reason=gpu.driver_reason,
        )

    return tuple(replace(node, gpus=tuple(then(gpu) for gpu in node.gpus)) for node in nodes)


def grid(
    points: Sequence[Point], end_s: float, span_s: float, slots: int, hold_s: float = 1.0
) -> list[float | None]:
    """Put points on a time axis of `slots` equal parts that ends at `end_s`.

    The greatest value of a part is kept, so that spikes stay. A part without a point has the value
    before it for up to `hold_s`, and is a gap beyond that.
    """
    if slots <= 0 or span_s <= 0.0:
        return []
    out: list[float | None] = [None] * slots
    seen = [False] * slots
    start_s = end_s - span_s
    scale = slots / span_s
    for at_s, value in points:
        slot = int((at_s - start_s) * scale)
        if at_s >= end_s and at_s - end_s <= hold_s:
            slot = slots - 1
        if not 0 <= slot < slots:
            continue
        seen[slot] = True
        if value is None or not isfinite(value):
            continue
        before = out[slot]
        out[slot] = value if before is None else max(before, value)
    room = ceil(hold_s * scale)
    last: float | None = None
    left = 0
    for i in range(slots):
        if seen[i]:
            last, left = out[i], room
        elif left > 0:
            out[i] = last
            left -= 1
    return out
