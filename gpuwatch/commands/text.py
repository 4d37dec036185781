"""Plain text for terminals, pipes and screen readers."""

from collections.abc import Sequence

from gpuwatch.diagnosis import Finding, RunDiagnosis
from gpuwatch.diagnosis.howto import lines_of
from gpuwatch.store.views import RankView, RunView, View

__all__ = ["diagnosis_lines", "runs_lines", "status_lines"]

_MARKS = {"critical": "✖", "warning": "▲", "note": "·"}


def _number(value: float | None, digits: int = 1) -> str:
    return "n/a" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0%}"


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[i]) for row in lines) for i in range(len(lines[0]))]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], gap: str = "  ") -> list[str]:
    """Return lines with the columns right-aligned, the first one left-aligned."""
    widths = _widths([head, *rows])
    return [
        gap.join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    ]


def runs_lines(view: View) -> list[str]:
    """Return the table of runs, newest first."""
    rows = [
        [
            run.run,
            run.name,
            run.state,
            f"{len(run.ranks)}/{run.world_size}",
            f"{run.steps:,}",
            _number(run.step_ms),
            ",".join(run.nodes),
        ]
        for run in view.runs
    ]
    return _table(["run", "name", "state", "ranks", "steps", "step ms", "nodes"], rows)


def _rank_row(rank: RankView) -> list[str]:
    phases = rank.phases_ms
    return [
        str(rank.rank),
        rank.state,
        f"{rank.steps:,}",
        _number(rank.step_ms),
        _number(rank.own_ms),
        _number(phases.get("data_wait")),
        _number(phases.get("forward")),
        _number(phases.get("backward")),
        _number(phases.get("comm")),
        _number(phases.get("optimizer")),
        _number(phases.get("other")),
        _percent(rank.data_wait_ratio),
        str(rank.lost),
    ]


_RANK_HEAD = [
    "rank",
    "state",
    "steps",
    "step ms",
    "own ms",
    "data",
    "fwd",
    "bwd",
    "comm",
    "opt",
    "other",
    "data %",
    "lost",
]


_SPARE = ("lost", "other", "data %", "opt", "comm", "bwd", "fwd")
"""Columns that go, one after the other, where all of them are too wide; `--json` has them all."""


def _rank_table(run: RunView, width: int) -> list[str]:
    """Return the table of ranks in at most `width` characters, as many columns as fit."""
    lines = [_RANK_HEAD, *(_rank_row(rank) for rank in run.ranks)]
    kept = list(range(len(_RANK_HEAD)))
    if not any(rank.lost for rank in run.ranks):
        kept.remove(_RANK_HEAD.index("lost"))
    spare = [_RANK_HEAD.index(name) for name in _SPARE]
    widths = _widths(lines)

    def wide(gap: int) -> int:
        return sum(widths[i] for i in kept) + gap * (len(kept) - 1)

    for column in spare:
        if wide(1) <= width:
            break
        if column in kept:
            kept.remove(column)
    gap = "  " if wide(2) <= width else " "
    head, *rows = [[row[i] for i in kept] for row in lines]
    return _table(head, rows, gap)


def status_lines(view: View, width: int = 80) -> list[str]:
    """Return one picture of everything: runs with their ranks, then hosts and GPUs.

    Tables are at most `width` characters wide.
    """
    lines: list[str] = []
    for run in view.runs:
        simulated = "  SIMULATED" if run.simulated else ""
        lines.append(
            f"run {run.run}  {run.name}  {run.state}  {len(run.ranks)} of {run.world_size} ranks  "
            f"{run.steps:,} steps{simulated}"
        )
        lines += [f"  {line}" for line in _rank_table(run, width - 2)]
        lines += [
            f"  rank {r.rank}: {r.state}, {r.state_reason}" for r in run.ranks if r.state_reason
        ]
        lines.append("")
    if not view.runs:
        lines += ["no run of yours on this machine", ""]
    for node in view.nodes:
        host = node.host
        if host is None:
            lines.append(f"host {node.node}: no sensor reading, {node.sensors_reason}")
            continue
        cpu = host.readings.get("cpu_percent")
        used = host.readings.get("memory_used")
        total = host.readings.get("memory_total")
        memory = (
            f"{used.value / 2**30:.1f} of {total.value / 2**30:.1f} GiB"
            if used and total and used.value is not None and total.value is not None
            else "n/a"
        )
        lines.append(
            f"host {node.node}: {host.cores} cores, CPU "
            f"{_number(cpu.value if cpu else None, 0)} %, memory {memory}"
        )
        if not node.gpus:
            lines.append(f"GPUs: {node.gpus_reason}")
    lines += [f"note: {notice}" for notice in view.notices]
    return lines


_STACKS = 4
_FRAMES = 12
"""Of a hang, as text; `--json` has them all."""


def _finding_lines(finding: Finding, place: str) -> list[str]:
    cost = (
        f"follows {finding.follows}"
        if finding.follows
        else "no cost"
        if finding.cost_ms is None
        else f"+{finding.cost_ms:.1f} ms/step"
    )
    lines = [
        f"{_MARKS[finding.severity]} {finding.severity} {finding.id} {finding.kind}: "
        f"{finding.summary} ({cost}, confidence {finding.confidence})"
    ]
    lines += [
        f"    why    {e.metric} {e.value:,g} {e.unit}, {e.compared_with} [{e.source}]"
        if not isinstance(e.value, str)
        else f"    why    {e.metric} {e.value} {e.unit}, {e.compared_with} [{e.source}]"
        for e in finding.evidence
    ]
    lines += [f"    not    {text}" for text in finding.ruled_out]
    for stack in finding.stacks[:_STACKS]:
        lines.append(f"    stack  of rank {stack.rank}, innermost first")
        lines += [f"             {frame}" for frame in stack.frames[:_FRAMES]]
    for hint in finding.hints:
        lines.append(f"    try    {hint.change}")
        line = lines_of(hint).get(place)
        if line is not None:
            lines.append(f"             {line}")
    return lines


def _place(run: RunView) -> str:
    """Return whose loop it is, as `lines_of` knows it."""
    known = {name for r in run.ranks if r.hello is not None for name in r.hello.frameworks}
    return next((name for name in ("transformers", "lightning") if name in known), "plain")


def diagnosis_lines(run: RunView | None, diagnosis: RunDiagnosis | None) -> list[str]:
    """Return the findings of a run, dearest first."""
    if run is None or diagnosis is None:
        return ["no run of yours on this machine"]
    lines = [
        f"run {run.run}  {run.name}  {run.state}  {run.steps:,} steps, {run.window} in the window"
    ]
    place = _place(run)
    opened = [f for f in diagnosis.findings if f.state == "open"]
    for finding in opened:
        lines += _finding_lines(finding, place)
    if not opened:
        lines.append("nothing found" if not diagnosis.abstained else "nothing found yet")
    lines += [f"- {a.kind} cannot be judged: it needs {a.needs}" for a in diagnosis.abstained]
    return lines
