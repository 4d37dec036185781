"""What a rule may answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from gpuwatch.diagnosis.steps import Reader
from gpuwatch.store.views import NodeView, RunView

__all__ = [
    "CONFIDENCES",
    "SEVERITIES",
    "Abstain",
    "Evidence",
    "Finding",
    "Hint",
    "LifeEvent",
    "Outcome",
    "RankStack",
    "Rule",
    "RunDiagnosis",
    "RunPicture",
]

_T = TypeVar("_T")

SEVERITIES = ("note", "warning", "critical")
"""From least to most severe."""

CONFIDENCES = ("low", "medium", "high")
"""From least to most confident."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number behind a finding, what it is compared with, and where it was read."""

    metric: str
    value: float | str
    unit: str
    compared_with: str
    source: str


@dataclass(frozen=True, slots=True)
class Hint:
    """One concrete change. `predicted_ms` is the mean step after it, as (low, high) in ms; of
    gradient accumulation the time of as many samples as a step has today.

    `old` and `new` are the values of `knob` before and after; None where the change is no value.
    """

    change: str
    knob: str
    old: str | int | float | bool | None = None
    new: str | int | float | bool | None = None
    predicted_ms: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class LifeEvent:
    """A turn in the life of a finding: opened, updated, resolved or reopened, at a step.

    `text` says what an update changed, as `severity warning -> critical`; empty otherwise.
    """

    what: str
    step: int
    at_s: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class RankStack:
    """Where the main thread of a rank stands: `FILE:LINE in NAME`, innermost first."""

    rank: int
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnosed cause.

    `cost_ms` is what the step would lose if the cause were gone, None for a consequence that
    `follows` another kind; `share` is cost / step. `ranks` is sorted and never empty. `id`,
    `opened_step`, `opened_s` (of the last time that it opened) and `life`, oldest first, are given
    by the engine; a rule leaves them empty, and says in `follows` the kind it follows, which the
    engine replaces by that finding's id. `stacks` are those of a hang, whom it waits for first.
    """

    kind: str
    severity: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    cost_ms: float | None
    share: float | None
    confidence: str
    summary: str
    evidence: tuple[Evidence, ...] = ()
    ruled_out: tuple[str, ...] = ()
    hints: tuple[Hint, ...] = ()
    follows: str | None = None
    id: str = ""
    run: str = ""
    opened_step: int = 0
    opened_s: float = 0.0
    state: str = "open"
    resolved_step: int | None = None
    life: tuple[LifeEvent, ...] = ()
    stacks: tuple[RankStack, ...] = ()


@dataclass(frozen=True, slots=True)
class Abstain:
    """A rule that cannot judge, and what it would need."""

    kind: str
    needs: str


Outcome = Finding | Abstain | None


@dataclass(frozen=True, slots=True)
class RunPicture:
    """What a rule sees: one run with its nodes, at one moment.

    Rules look at the same derived numbers, and at each other's outcomes; `once` makes each of
    them one time a picture. What it makes must depend on the picture alone. `reader` may know the
    windows from the picture before; outcomes do not depend on that.
    """

    run: RunView
    nodes: tuple[NodeView, ...] = field(default=())
    reader: Reader = field(default_factory=Reader, compare=False, repr=False)
    _made: dict[str, object] = field(default_factory=dict, compare=False, repr=False)

    def once(self, name: str, make: Callable[[], _T]) -> _T:
        """Return what `make` gave for this picture the first time."""
        if name not in self._made:
            self._made[name] = make()
        return cast("_T", self._made[name])

    def node(self, name: str) -> NodeView | None:
        """Return the node of that name, or None."""
        return self.once("nodes", lambda: {n.node: n for n in reversed(self.nodes)}).get(name)


Rule = Callable[[RunPicture], Outcome]
"""A pure function; its kind is the name it is registered under."""


@dataclass(frozen=True, slots=True)
class RunDiagnosis:
    """What was found in one run, and which rules could not judge it."""

    run: str
    findings: tuple[Finding, ...] = ()
    abstained: tuple[Abstain, ...] = ()
