"""What one drawing needs, gathered once a tick: the view, what was found, and what is selected.

Nothing here knows Textual; `render` draws a `Scene`, widgets put the lines on the screen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING

from gpuwatch.schema import PHASES, GpuSample
from gpuwatch.store.views import NodeView, RankView, RunView, View
from gpuwatch.tui.render.order import steady_order

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import Abstain, Finding

__all__ = [
    "PROBLEM_STATES",
    "Scene",
    "Summary",
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
    own_low_ms: float | None
    own_high_ms: float | None
    wait_worst: float | None
    wait_median: float | None
    comm_share: float | None
    goodput: float | None
    states: Mapping[str, int]
    first_trouble: RankView | None


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything on the screen at one moment.

    `order` holds positions in `run.ranks`, most noteworthy first. `since_s` is the time since the
    view was taken and is added to every age in it. `selected` is a rank number. `devices` are
    label and text of the mean figures of the devices that the run uses.
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

    @property
    def open_findings(self) -> tuple[Finding, ...]:
        """The findings that are open, in their order."""
        return tuple(item for item in self.findings if item.state == "open")


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
    owns = _known([rank.own_ms for rank in ranks])
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
        own_low_ms=min(owns) if owns else None,
        own_high_ms=max(owns) if owns else None,
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


def order_ranks(run: RunView, previous: Sequence[int]) -> tuple[int, ...]:
    """Return positions in `run.ranks`: ranks in trouble, then by own time, slowest first.

    Ranks that are about equal stay where they were in `previous`.
    """
    weights = {i: _rank_weight(rank) for i, rank in enumerate(run.ranks)}
    return steady_order(weights, previous, _OWN_TOLERANCE)


def order_findings(findings: Sequence[Finding], previous: Sequence[str]) -> tuple[Finding, ...]:
    """Order findings by cost, consequences and resolved ones last, keeping places where near."""
    keyed = {item.id or f"{item.kind}/{i}": item for i, item in enumerate(findings)}
    weights: dict[str, float] = {}
    for key, item in keyed.items():
        weight = item.cost_ms if item.cost_ms is not None and isfinite(item.cost_ms) else 0.0
        if item.cost_ms is None or item.follows is not None:
            weight = -1.0
        if item.state != "open":
            weight = -2.0
        weights[key] = weight
    return tuple(keyed[key] for key in steady_order(weights, previous, _COST_TOLERANCE))


def run_nodes(view: View, run: RunView | None) -> tuple[NodeView, ...]:
    """Return the nodes that a run is on, all nodes without a run or where none is known."""
    if run is None:
        return view.nodes
    names = set(run.nodes)
    found = tuple(node for node in view.nodes if node.node in names)
    return found or view.nodes


def gpus_of(nodes: Sequence[NodeView], run: RunView | None) -> list[GpuSample]:
    """Return the devices that the run computes on; all of its nodes' where that is unknown."""
    gpus = [gpu for node in nodes for gpu in node.gpus]
    if run is None or not gpus:
        return gpus
    used = {rank.hello.device_uuid for rank in run.ranks if rank.hello and rank.hello.device_uuid}
    return [gpu for gpu in gpus if gpu.uuid in used] or gpus
