"""The life of findings: opened late, closed late, numbered once."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from gpuwatch.diagnosis.aligned import ranks_text
from gpuwatch.diagnosis.communication import comm_bound, straggler
from gpuwatch.diagnosis.hang import hang, stands_still
from gpuwatch.diagnosis.host import cpu_affinity, cpu_quota
from gpuwatch.diagnosis.input import loader_few_workers
from gpuwatch.diagnosis.loading import (
    collate_ipc,
    cpu_decode_aug,
    loader_oversub,
    storage_slow,
)
from gpuwatch.diagnosis.memory import cpu_leak, gpu_leak
from gpuwatch.diagnosis.periodic import (
    stall_checkpoint,
    stall_log_sync,
    stall_prefetch_burst,
    stall_validation,
    worker_restart,
)
from gpuwatch.diagnosis.stacks import Ask, HangStacks
from gpuwatch.diagnosis.steps import Reader
from gpuwatch.diagnosis.types import Abstain, Finding, LifeEvent, Rule, RunDiagnosis, RunPicture
from gpuwatch.store.views import RunView, View

__all__ = ["RULES", "Engine", "Memory", "diagnose_run"]

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "loader_few_workers": loader_few_workers,
        "cpu_decode_aug": cpu_decode_aug,
        "storage_slow": storage_slow,
        "loader_oversub": loader_oversub,
        "collate_ipc": collate_ipc,
        "worker_restart": worker_restart,
        "stall_prefetch_burst": stall_prefetch_burst,
        "stall_checkpoint": stall_checkpoint,
        "stall_validation": stall_validation,
        "stall_log_sync": stall_log_sync,
        "straggler": straggler,
        "comm_bound": comm_bound,
        "hang": hang,
        "gpu_leak": gpu_leak,
        "cpu_leak": cpu_leak,
        "cpu_quota": cpu_quota,
        "cpu_affinity": cpu_affinity,
    }
)
"""Every rule under the kind it finds. A new kind is a function and a line here."""

OPEN_AFTER = 2
CLOSE_AFTER = 5
"""Evaluations in a row, one a second: a finding must hold to open and be gone to close. So must a
greater and a lesser severity than the one that is shown."""

ABSTAINED = 6
"""Abstentions that weigh as much as one evaluation without the finding."""

RANKS_A_SECOND = 100.0
LONGEST_S = 10.0
EAGER = 5
"""A full pass costs about 0.1 ms of CPU a rank. Beyond the first so many passes it is made once in
as many seconds as there are hundreds of ranks, ten at most; in between only the hang is looked for.
"""

COST_CHANGED = 0.25
"""Of the cost when it was told last: a smaller change is no update."""

_HANG = ("hang",)
_SEVERITIES = ("note", "warning", "critical")
_KEPT_EVENTS = 16
_KEPT_RESOLVED = 16
_KEPT_RUNS = 64


def picture_of(view: View, run: RunView, reader: Reader | None = None) -> RunPicture:
    """Return what the rules see of one run; `reader` may be that of the picture before."""
    mine = frozenset(run.nodes)
    nodes = tuple([n for n in view.nodes if n.node in mine])
    return RunPicture(run, nodes, reader if reader is not None else Reader())


def _by_cost(finding: Finding) -> tuple[bool, float]:
    return finding.cost_ms is None, -(finding.cost_ms or 0.0)


def diagnose_run(
    picture: RunPicture, kinds: Iterable[str] = RULES
) -> tuple[list[Finding], list[Abstain]]:
    """Ask every rule once, or those of some kinds. No life cycle: what holds now, dearest first."""
    findings: list[Finding] = []
    abstained: list[Abstain] = []
    for kind in kinds:
        outcome = RULES[kind](picture)
        if isinstance(outcome, Finding):
            findings.append(replace(outcome, run=picture.run.run))
        elif isinstance(outcome, Abstain):
            abstained.append(outcome)
    findings.sort(key=_by_cost)
    return findings, abstained


@dataclass(slots=True)
class _Life:
    """One finding over time."""

    id: str
    finding: Finding
    seen: int = 1
    missed: float = 0.0
    open: bool = False
    events: list[LifeEvent] = field(default_factory=list)
    told: Finding | None = None
    """As it was when its last event was told."""
    other: int = 0
    """Evaluations in a row of another severity than the one that is shown."""

    def steadied(self, now: Finding, rise_after: int, fall_after: int) -> Finding:
        """Return an open finding with the severity to show: a new one has to hold first.

        Near a limit, or on a machine that others use now and then, it would change every second. A
        consequence is a note at once: its cause carries the severity.
        """
        shown = self.finding.severity
        if now.severity == shown or now.follows is not None:
            self.other = 0
            return now
        self.other += 1
        rises = _SEVERITIES.index(now.severity) > _SEVERITIES.index(shown)
        if self.other >= (rise_after if rises else fall_after):
            self.other = 0
            return now
        return replace(now, severity=shown)

    def tell(self, what: str, step: int, at_s: float, text: str = "") -> None:
        """Note an event; the first one is kept for ever, of the others the latest."""
        self.events.append(LifeEvent(what, step, at_s, text))
        del self.events[1 : max(1, len(self.events) - _KEPT_EVENTS)]


def _change(before: Finding, now: Finding) -> str:
    """Return what of a finding has changed so much that it is news, empty if nothing has."""
    words = [
        f"{name} {old} -> {new}"
        for name in ("severity", "confidence")
        if (old := getattr(before, name)) != (new := getattr(now, name))
    ]
    if before.ranks != now.ranks:
        words.append(f"{ranks_text(before.ranks)} -> {ranks_text(now.ranks)}")
    if before.cost_ms is not None and now.cost_ms is not None and before.share is not None:
        # What only says how long it has lasted, of a hang say, grows at every look.
        least_ms = COST_CHANGED * max(before.cost_ms, now.cost_ms)
        if abs(now.cost_ms - before.cost_ms) > least_ms and now.kind != "hang":
            words.append(f"cost {before.cost_ms:.1f} -> {now.cost_ms:.1f} ms")
    return ", ".join(words)


@dataclass(slots=True)
class _RunState:
    lives: dict[str, _Life] = field(default_factory=dict)
    numbered: int = 0
    settled: tuple[int, int, int] | None = None
    """How much was known of a run that is over when it was judged: ranks, steps, shared window."""
    last: RunDiagnosis | None = None
    stacks: HangStacks | None = None
    passes: int = 0
    passed_s: float = 0.0
    reader: Reader = field(default_factory=Reader)

    def copy(self) -> "_RunState":
        """Return the same, which goes its own way; without what is only kept for speed."""
        lives = {kind: replace(life, events=list(life.events)) for kind, life in self.lives.items()}
        return replace(self, lives=lives, stacks=None, reader=Reader())

    def kinds(self, run: RunView, at_s: float) -> Collection[str]:
        """Return the kinds to be looked for now."""
        if self.settled is None and self.last is not None and stands_still(run):
            return _HANG  # while nothing moves there is nothing new to judge a step by
        pause_s = min(LONGEST_S, len(run.ranks) / RANKS_A_SECOND)
        if pause_s >= 1.0 and self.passes >= EAGER and 0 <= at_s - self.passed_s < pause_s:
            return _HANG
        self.passes += 1
        self.passed_s = at_s
        return RULES


Memory = Mapping[str, _RunState]
"""What an engine knows; it never changes."""


class Engine:
    """Evaluates views and keeps the findings' identities. Call it about once a second.

    Args:
        open_after: evaluations in a row in which a cause must be found before it is shown; 1 for
            one-shot commands, whose window is the only evidence there is.
        late: it begins in the middle of what there is to see: when that which it finds at its first
            look has begun is not known.
        ask: sends (verb, run, rank) to a rank. With it the stacks of a hang are asked for when it
            opens; they are in the finding as soon as they have come.
    """

    def __init__(
        self,
        *,
        open_after: int = OPEN_AFTER,
        close_after: int = CLOSE_AFTER,
        late: bool = False,
        ask: Ask | None = None,
    ) -> None:
        self._ask = ask
        self._late = late
        self._open_after = open_after
        self._close_after = close_after
        self._runs: dict[str, _RunState] = {}

    def remember(self) -> Memory:
        """Return what is known of every run, for `recall`."""
        return {run: state.copy() for run, state in self._runs.items()}

    def recall(self, memory: Memory) -> None:
        """Know what was known when it was remembered, and nothing else."""
        self._runs = {run: state.copy() for run, state in memory.items()}

    def __call__(self, view: View) -> tuple[RunDiagnosis, ...]:
        """Evaluate every run of the view."""
        return tuple(self.evaluate(view, run) for run in view.runs)

    def evaluate(self, view: View, run: RunView) -> RunDiagnosis:
        """Evaluate one run. One that has ended keeps what was found while it ran.

        One that is over when it is first seen, or soon after, gives no second look: it is judged by
        what it leaves, and anew only when more of that is known.
        """
        state = self._runs.get(run.run)
        if state is None:
            if len(self._runs) >= _KEPT_RUNS:
                del self._runs[next(iter(self._runs))]
            state = self._runs[run.run] = _RunState()
        known = (len(run.ranks), run.steps, run.window) if run.state == "ended" else None
        if (
            known is not None
            and state.last is not None
            and (state.settled == known or (state.settled is None and state.last.findings))
        ):
            return state.last
        state.settled = known
        kinds = state.kinds(run, view.at_s)
        findings, abstained = diagnose_run(picture_of(view, run, state.reader), kinds)
        if state.settled:
            state.reader.forget()
        if state.last is not None:
            abstained += [a for a in state.last.abstained if a.kind not in kinds]
        brief = state.settled is not None and state.passes <= EAGER
        open_after = 1 if brief else self._open_after
        # A one-shot command finds at its only look; there the step of that look is told.
        joined = state.last is None and (self._late or (brief and self._open_after > 1))
        self._live(
            state, run, kinds, findings, {a.kind for a in abstained}, view.at_s, open_after, joined
        )
        shown = self._shown(state)
        if self._ask is not None:
            shown = self._with_stacks(self._ask, state, run, shown)
        state.last = RunDiagnosis(run.run, shown, tuple(abstained))
        return state.last

    @property
    def waiting(self) -> bool:
        """Whether the stacks of a hang have been asked for and have not come."""
        return any(s.stacks is not None and s.stacks.waiting for s in self._runs.values())

    @staticmethod
    def _with_stacks(
        ask: Ask, state: _RunState, run: RunView, shown: tuple[Finding, ...]
    ) -> tuple[Finding, ...]:
        hang = next((f for f in shown if f.kind == "hang" and f.state == "open"), None)
        if hang is None and state.stacks is None:
            return shown
        if state.stacks is None:
            state.stacks = HangStacks(ask)
        told = state.stacks.take(run, hang)
        return tuple(told if f is hang and told is not None else f for f in shown)

    def _live(
        self,
        state: _RunState,
        run: RunView,
        kinds: Collection[str],
        findings: list[Finding],
        abstained: set[str],
        at_s: float,
        open_after: int,
        joined: bool,
    ) -> None:
        """Let the findings of these kinds live on; those of others stay as they are.

        What opens when a run has just been `joined` has been there before, nobody knows since when.
        """
        found = {f.kind: f for f in findings}
        for kind, now in found.items():
            finding = now
            life = state.lives.get(kind)
            if life is None:
                life = state.lives[kind] = _Life("", finding, seen=0)
            life.seen += 1
            life.missed = 0
            if not life.open and life.seen >= open_after:
                life.open = True
                what = "reopened" if life.id else "opened"
                if not life.id:
                    state.numbered += 1
                    life.id = f"F{state.numbered}"
                life.told = finding
                if not joined:
                    life.tell(what, run.steps, at_s)
                    finding = replace(finding, opened_step=run.steps, opened_s=at_s)
            elif life.open:
                finding = life.steadied(now, open_after, self._close_after)
                text = _change(life.told, finding) if life.told is not None else ""
                if text:
                    life.tell("updated", run.steps, at_s, text)
                    life.told = finding
                finding = replace(
                    finding,
                    opened_step=life.finding.opened_step,
                    opened_s=life.finding.opened_s,
                )
            if life.open or not life.id:
                life.finding = replace(finding, id=life.id, state="open", life=tuple(life.events))
        for kind, life in list(state.lives.items()):
            if kind in found or kind not in kinds:
                continue
            life.seen = 0
            # A rule that cannot judge any more says nothing for its finding, for a while.
            life.missed += 1 / ABSTAINED if kind in abstained else 1
            if not life.open and not life.id:
                del state.lives[kind]
            elif life.open and life.missed >= self._close_after:
                life.open = False
                life.tell("resolved", run.steps, at_s)
                life.finding = replace(
                    life.finding,
                    state="resolved",
                    resolved_step=run.steps,
                    life=tuple(life.events),
                )

    @staticmethod
    def _shown(state: _RunState) -> tuple[Finding, ...]:
        ids = {life.finding.kind: life.id for life in state.lives.values() if life.open}
        opened = []
        for life in state.lives.values():
            if life.open:
                follows = life.finding.follows
                opened.append(replace(life.finding, follows=ids.get(follows) if follows else None))
        opened.sort(key=_by_cost)
        resolved = [life.finding for life in state.lives.values() if life.id and not life.open]
        return (*opened, *resolved[-_KEPT_RESOLVED:])
