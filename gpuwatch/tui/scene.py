"""What one drawing needs, gathered once a tick: the view, what was found, and what is selected.

Nothing here knows Textual; `render` draws a `Scene`, widgets put the lines on the screen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any

from gpuwatch.schema import PHASES, GpuSample
from gpuwatch.store.views import Event, NodeView, RankView, RunView, View
from gpuwatch.tui.filters import filter_gpus
from gpuwatch.tui.metrics import METRICS, OWN, Metric
from gpuwatch.tui.past import Past
from gpuwatch.tui.render.numbers import reading_value
from gpuwatch.tui.render.order import steady_order

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Abstain, Finding
    from gpuwatch.diagnosis.verify import CheckResult
    from gpuwatch.tui.job import JobState

__all__ = [
    "FINDING_SORTS",
    "GPU_SORTS",
    "PROBLEM_STATES",
    "RANK_SORTS",
    "Replay",
    "Scene",
    "Summary",
    "gpu_rows",
    "gpus_of",
    "order_findings",
    "order_ranks",
    "run_nodes",
    "summarise",
]

PROBLEM_STATES = ("hung", "gone", "silent")
"""States of a rank that the person must see first, in this order."""

_OWN_TOLERANCE = 0.01
"""Ranks whose own times differ by less keep their places."""

_COST_TOLERANCE = 0.25
"""Findings keep their places until their costs differ by more."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers, over its ranks. Durations in ms, ratios 0..1, None where unknown.

    `phases_ms` are means over the ranks that know the phase.
    """

    phases_ms: Mapping[str, float | None]
    step_ms: float | None
    p95_ms: float | None
    scale_ms: float | None
    wait_worst: float | None
    wait_median: float | None
    comm_share: float | None
    goodput: float | None
    states: Mapping[str, int]
    first_trouble: RankView | None


@dataclass(frozen=True, slots=True)
class Replay:
    """Where a recording is: seconds from its start, its length, and whether it stands still."""

    position_s: float
    duration_s: float
    paused: bool


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything on the screen at one moment.

    `order` holds the positions in `run.ranks` that pass the filter, in the order chosen. `since_s`
    is the time since the view was taken and is added to every age in it. `selected` is a rank
    number. `devices` are label and text of the mean figures of the devices that the run uses.

    `filters` and `sorts` are those of each list, by its name (ranks, gpus, findings); `metric` is
    the name of the one that the heat map shows. `past` is what curves are drawn from, and
    `cursor_s` the wall-clock time that is shown where the person has scrolled back, with `end_s`
    the newest time. `snoozed` are ids of findings, `events` the log, newest first. `checks` are
    the findings whose window was frozen, of any run, with what has come since. `job` is the command
    that the screen was opened with, None where it only watches. `rows` is room for what panes make
    of the scene and need again.
    """

    view: View
    run: RunView | None = None
    summary: Summary | None = None
    order: tuple[int, ...] = ()
    selected: int | None = None
    findings: tuple[Finding, ...] = ()
    abstained: tuple[Abstain, ...] = ()
    diagnosed: bool = False
    diagnosis_error: str = ""
    since_s: float = 0.0
    paused: bool = False
    hz: float = 4.0
    nodes: tuple[NodeView, ...] = ()
    devices: tuple[tuple[str, str], ...] = ()
    gpus: Mapping[str, GpuSample] = field(default_factory=dict)
    filters: Mapping[str, str] = field(default_factory=dict)
    sorts: Mapping[str, str] = field(default_factory=dict)
    metric_name: str = OWN.name
    past: Past | None = None
    cursor_s: float | None = None
    end_s: float = 0.0
    span_s: float = 120.0
    snoozed: frozenset[str] = frozenset()
    events: tuple[Event, ...] = ()
    replay: Replay | None = None
    selected_gpu: str = ""
    checks: tuple[CheckResult, ...] = ()
    job: JobState | None = None
    rows: dict[str, Any] = field(default_factory=dict, compare=False)

    def release(self) -> None:
        """Let go of the picture, which is not on the screen any more.

        Screens that are covered keep the scene that they were fed last until they are fed again; of
        a large run that is megabytes for each.
        """
        for name, nothing in _RELEASED.items():
            object.__setattr__(self, name, nothing)
        self.rows.clear()

    @property
    def metric(self) -> Metric:
        """What the heat map shows."""
        return next((item for item in METRICS if item.name == self.metric_name), OWN)

    def gpu(self, rank: RankView) -> GpuSample | None:
        """Return the device that a rank computes on, None where that is not known."""
        return None if rank.hello is None else self.gpus.get(rank.hello.device_uuid)

    @property
    def behind_s(self) -> float:
        """How far back the picture is, 0 for the newest."""
        return 0.0 if self.cursor_s is None else max(0.0, self.end_s - self.cursor_s)

    @property
    def rank(self) -> RankView | None:
        """The selected rank, else the first one in `order`, else None."""
        if self.run is None:
            return None
        if self.selected is not None:
            for item in self.run.ranks:
                if item.rank == self.selected:
                    return item
        return self.run.ranks[self.order[0]] if self.order else None

    def check(self, item: Finding) -> CheckResult | None:
        """Return the check of a finding, None where its window was not frozen."""
        for result in self.checks:
            if (result.check.run, result.check.finding.id) == (item.run, item.id):
                return result
        return None

    @property
    def open_findings(self) -> tuple[Finding, ...]:
        """The findings that are open, in their order."""
        return tuple(
            item for item in self.findings if item.state == "open" and item.id not in self.snoozed
        )


_RELEASED: Mapping[str, Any] = {
    "view": View(version=-1, at_s=0.0),
    "run": None,
    "summary": None,
    "order": (),
    "nodes": (),
    "gpus": {},
}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _known(values: list[float | None]) -> list[float]:
    """Leave out None and, where there is any, NaN and infinity; fast where there is none."""
    present = [value for value in values if value is not None]
    return present if isfinite(sum(present)) else [value for value in present if isfinite(value)]


def _first_trouble(ranks: Sequence[RankView], states: Mapping[str, int]) -> RankView | None:
    for state in PROBLEM_STATES:
        if state in states:
            return next(rank for rank in ranks if rank.state == state)
    return None


def summarise(run: RunView) -> Summary:
    """Reduce the ranks of a run to what header, bars and scales need.

    It runs at every drawing over every rank, hence one list a field and no call a rank.
    """
    ranks = run.ranks
    splits = [rank.phases_ms for rank in ranks]
    phases: dict[str, float | None] = {}
    for name in PHASES:
        phases[name] = _mean(_known([split.get(name) for split in splits]))
    states = Counter([rank.state for rank in ranks])
    waits = _known([rank.data_wait_ratio for rank in ranks])
    steps = _known([rank.step_ms for rank in ranks])
    p95s = _known([rank.step_p95_ms for rank in ranks])
    wall_ns = sum([rank.ledger.wall_ns for rank in ranks])
    training_ns = sum([rank.ledger.training_ns for rank in ranks])
    step_ms = run.step_ms
    if step_ms is None or not isfinite(step_ms):
        step_ms = _mean(steps)
    comm = phases["comm"]
    return Summary(
        phases_ms=phases,
        step_ms=step_ms,
        p95_ms=max(p95s) if p95s else None,
        scale_ms=max(steps) if steps else None,
        wait_worst=max(waits) if waits else None,
        wait_median=median(waits) if waits else None,
        comm_share=comm / step_ms if comm is not None and step_ms else None,
        goodput=training_ns / wall_ns if wall_ns else None,
        states=states,
        first_trouble=_first_trouble(ranks, states),
    )


def _rank_weight(rank: RankView) -> float:
    """Trouble first, then own time; ranks without a time last."""
    if rank.state in PROBLEM_STATES:
        return 1e15 / (1 + PROBLEM_STATES.index(rank.state))
    own = rank.own_ms
    return own if own is not None and isfinite(own) else -1.0


RANK_SORTS = ("own", "rank", "data_wait", "comm", "step", "gpu_util", "sm_active", "memory")
GPU_SORTS = ("index", "gpu_util", "sm_active", "memory_used", "power", "temperature")
FINDING_SORTS = ("cost", "severity", "newest")
"""What `s` goes through in each list; the first is how it starts."""

_SEVERITY_WEIGHT = {"critical": 3.0, "warning": 2.0, "note": 1.0}


def order_ranks(
    run: RunView,
    previous: Sequence[int],
    sort: str = "own",
    gpus: Mapping[str, GpuSample] | None = None,
) -> tuple[int, ...]:
    """Return positions in `run.ranks`: ranks in trouble, then by own time, slowest first.

    `sort` may be another metric (greatest first) or `rank`. Ranks that are about equal stay where
    they were in `previous`.
    """
    if sort == "rank":
        return tuple(range(len(run.ranks)))
    metric = next((item for item in METRICS if item.name == sort), OWN)
    weights: dict[int, float] = {}
    for i, rank in enumerate(run.ranks):
        if metric is OWN:
            weights[i] = _rank_weight(rank)
            continue
        gpu = (gpus or {}).get(rank.hello.device_uuid) if rank.hello is not None else None
        value = metric.get(rank, gpu)
        weights[i] = value if value is not None and isfinite(value) else -1.0
    return steady_order(weights, previous, _OWN_TOLERANCE)


def order_findings(
    findings: Sequence[Finding],
    previous: Sequence[str],
    sort: str = "cost",
    snoozed: frozenset[str] = frozenset(),
) -> tuple[Finding, ...]:
    """Order findings by cost, consequences and resolved ones last, keeping places where near.

    `sort` may be `severity` or `newest` instead; those that are snoozed come after the open ones.
    """
    keyed = {item.id or f"{item.kind}/{i}": item for i, item in enumerate(findings)}
    weights: dict[str, float] = {}
    for key, item in keyed.items():
        weight = item.cost_ms if item.cost_ms is not None and isfinite(item.cost_ms) else 0.0
        if item.cost_ms is None or item.follows is not None:
            weight = -1.0
        if sort == "severity":
            # Within a severity by cost: no step is longer than 10**9 ms.
            weight = _SEVERITY_WEIGHT.get(item.severity, 1.0) + max(0.0, weight) / 1e9
        elif sort == "newest":
            weight = max(0.0, item.opened_s)
        if item.id in snoozed:
            weight = -2.0
        if item.state != "open":
            weight = -3.0
        weights[key] = weight
    if sort != "cost":
        previous = ()
    return tuple(keyed[key] for key in steady_order(weights, previous, _COST_TOLERANCE))


def run_nodes(view: View, run: RunView | None) -> tuple[NodeView, ...]:
    """Return the nodes that a run is on, all nodes without a run or where none is known."""
    if run is None:
        return view.nodes
    names = set(run.nodes)
    found = tuple(node for node in view.nodes if node.node in names)
    return found or view.nodes


def gpu_rows(scene: Scene) -> list[tuple[str, GpuSample, RankView | None]]:
    """Return the devices of the nodes as (node, device, rank on it), filtered and sorted."""
    ranks = {
        rank.hello.device_uuid: rank
        for rank in (scene.run.ranks if scene.run is not None else ())
        if rank.hello is not None and rank.hello.device_uuid
    }
    found = [(node.node, gpu, ranks.get(gpu.uuid)) for node in scene.nodes for gpu in node.gpus]
    passing = {
        id(gpu)
        for _, gpu, _ in filter_gpus(
            scene.filters.get("gpus", ""),
            [(node, gpu, None if rank is None else rank.rank) for node, gpu, rank in found],
        )
    }
    found = [item for item in found if id(item[1]) in passing]
    sort = scene.sorts.get("gpus", GPU_SORTS[0])
    if sort != GPU_SORTS[0]:

        def weight(item: tuple[str, GpuSample, RankView | None]) -> float:
            value = reading_value(item[1].readings.get(sort))
            return -1.0 if value is None else value

        found.sort(key=lambda item: -weight(item))
    return found


def gpus_of(nodes: Sequence[NodeView], run: RunView | None) -> list[GpuSample]:
    """Return the devices that the run computes on; all of its nodes' where that is unknown."""
    gpus = [gpu for node in nodes for gpu in node.gpus]
    if run is None or not gpus:
        return gpus
    used = {rank.hello.device_uuid for rank in run.ranks if rank.hello and rank.hello.device_uuid}
    return [gpu for gpu in gpus if gpu.uuid in used] or gpus
