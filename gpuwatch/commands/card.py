"""The card at the end of a watched run: at most 25 lines that say what came of it.

Verdict, where the time went, findings with their best hint, memory, what could not be measured; of
a run that crashed, who failed first, where, and the end of its stack.
"""

import statistics
import textwrap
from collections.abc import Iterable, Sequence

from gpuwatch.diagnosis import Finding, RunDiagnosis
from gpuwatch.diagnosis.aligned import counted, ranks_text
from gpuwatch.diagnosis.howto import lines_of
from gpuwatch.diagnosis.input import FLOOR_MS
from gpuwatch.diagnosis.memory import grows
from gpuwatch.diagnosis.types import SEVERITIES
from gpuwatch.schema import PHASES
from gpuwatch.store.history import memory_slope
from gpuwatch.store.views import NodeView, RankView, RunView

__all__ = ["MOST_LINES", "card_lines"]

MOST_LINES = 25
_WIDTH = 100
_FINDINGS = 4
_STEADY_POINTS = 24
_FRAMES = 5
_STACKS, _HANG_FRAMES = 2, 3
_MARKS = {"critical": "✖", "warning": "▲", "note": "·"}
_SHORT = {
    "data_wait": "data", "h2d": "h2d", "forward": "fwd", "backward": "bwd", "comm": "comm",
    "optimizer": "opt", "other": "other",
}  # fmt: skip

LEFT_S = 30.0
"""A rank that ended so shortly before another one failed may be why: a collective notices a peer
that is gone at once, a launcher within seconds."""

_APART = 2
"""Steps that ranks of one job may be apart at their end."""

COMPUTE_SHARE = 0.7
"""Of the step in forward, backward and optimizer: then the model itself is what takes the time."""

WAIT_SHARE = 0.1
"""Of the step, from which a wait for data is mentioned in any case."""


def card_lines(
    run: RunView,
    diagnosis: RunDiagnosis | None,
    *,
    nodes: Sequence[NodeView] = (),
    others: Sequence[RunView] = (),
    notes: Sequence[str] = (),
    width: int = _WIDTH,
) -> list[str]:
    """Return the card of a run.

    Args:
        run: as it was seen last.
        diagnosis: what is open at its end and what was resolved before; None: nothing was judged.
        nodes: where it ran.
        others: earlier trainings of the same command.
        notes: sentences about the run that no view holds.
        width: in characters, to which rows are folded; beyond a few lines what is left is cut.
    """
    findings = list(diagnosis.findings) if diagnosis is not None else []
    shown = [f for f in findings if f.state == "open" and f.severity != "note"]
    shown += [f for f in findings if f.state == "resolved" and f.severity != "note"]
    shown += [f for f in findings if f.state == "open" and f.severity == "note" and not f.follows]
    hang = next((f for f in findings if f.kind == "hang" and f.state == "open"), None)
    first = first_failure(run)
    if hang is not None and first is not None and first.bye is None:
        first = None  # it stood, and somebody ended it
    out = [_head(run)]
    stopped = [r for r in run.ranks if r.bye is not None and r.bye.reason == "interrupted"]
    if stopped and hang is None:
        out += _row(
            "stopped", f"by Ctrl-C (SIGINT) at step {max(r.steps for r in stopped):,}", width
        )
    out += _row(
        "verdict", hang.summary if hang is not None else _verdict(run, findings, first), width
    )
    if first is not None:
        out += _crash(run, first, width)
    out += _row(
        "time", _time(run, "standing still" if hang is not None else "start-up and between"), width
    )
    out += _row("step", _step(run), width)
    tail = [
        *_row("memory", _memory(run), width),
        *_row("n/a", _unknown(run, diagnosis, nodes), width, 3),
    ]
    if others:
        names = ", ".join(r.run for r in others[:3]) + (" ..." if len(others) > 3 else "")
        tail += _row(
            "also", f"{counted(len(others), 'more training')} of this command: {names}", width
        )
    for note in notes:
        tail += _row("note", note, width)
    room = MOST_LINES - len(out) - len(tail)
    out += _findings(shown, room, width)
    return [line[:width] for line in (out + tail)[:MOST_LINES]]


def _row(name: str, text: str, width: int, lines: int = 2) -> list[str]:
    """Return a row with its name, folded to at most so many lines; nothing for an empty text."""
    if not text:
        return []
    indent = " " * 12
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"  {name:<10}",
        subsequent_indent=indent,
        max_lines=lines,
        placeholder=" ...",
        break_on_hyphens=False,
    )


def _seconds(value_s: float) -> str:
    if value_s < 90:
        return f"{value_s:.1f} s"
    minutes, seconds = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} m" if hours else f"{minutes} m {seconds} s"


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _head(run: RunView) -> str:
    ranks = f"{len(run.ranks)} rank{'s' if len(run.ranks) != 1 else ''}"
    if run.world_size > len(run.ranks):
        ranks = f"{len(run.ranks)} of {run.world_size} ranks (those of this node)"
    wall_s = max((r.ledger.wall_ns for r in run.ranks), default=0) / 1e9
    name = f"  {run.name}" if run.name != run.run else ""
    mark = "  SIMULATED" if run.simulated else ""
    return (
        f"gpuwatch: run {run.run}{name}  {ranks}  {run.steps:,} steps in {_seconds(wall_s)}{mark}"
    )


# --- how it ended -------------------------------------------------------------------------------


def _failed(rank: RankView) -> bool:
    return rank.state == "gone" or (rank.bye is not None and rank.bye.reason == "exception")


def first_failure(run: RunView) -> RankView | None:
    """Return the rank that failed first, None if none did.

    The others fail in consequence, within a moment: a peer that is gone raises in their
    collectives, and a launcher ends them with a signal, which leaves no last words. So an
    exception goes before an end without a word that comes after it. A rank that left the others
    in the middle, with `sys.exit` say, is what they failed of, though it did not fail itself.
    """
    failed = [r for r in run.ranks if _failed(r)]
    if not failed:
        return None
    first = min(failed, key=lambda r: (r.ended_s or 0.0, r.rank))
    left = [
        r
        for r in run.ranks
        if not _failed(r)
        and r.bye is not None
        and r.ended_s is not None
        and r.steps < first.steps + _APART
        and 0.0 <= (first.ended_s or 0.0) - r.ended_s <= LEFT_S
    ]
    return min(left, key=lambda r: (r.ended_s or 0.0, r.rank), default=first)


def _crash(run: RunView, rank: RankView, width: int) -> list[str]:
    bye = rank.bye
    phase = (bye.phase if bye is not None else "") or rank.phase
    why = f"at step {rank.steps:,}"
    if phase:
        why += f", in {phase}"
    if rank.state == "gone":
        # The last it said is up to a tenth of a second older than its end.
        why = f"last seen {why}"
    memory = _memory_of(rank)
    why += f", {memory}" if memory else ""
    if rank.state == "gone":
        why += (
            "; its process ended without a word: killed by a signal (SIGTERM, SIGKILL, out of "
            "memory, SIGSEGV) or left through os._exit"
        )
    elif not _failed(rank):
        why += "; it ended in the middle of the training, through sys.exit or its end of data"
    name = "failed" if _failed(rank) else "left"
    out = _row(name, f"rank {rank.rank} on {rank.node}, {why}", width, lines=3)
    others = [r.rank for r in run.ranks if r is not rank and _failed(r)]
    if others:
        out += _row("then", f"{ranks_text(others)} failed in consequence", width)
    frames = bye.stack.splitlines() if bye is not None else []
    return out + _stack("stack", frames[:_FRAMES], width)


def _stack(name: str, frames: Sequence[str], width: int) -> list[str]:
    """Return frames, innermost first, without the way to the installed packages."""
    return [
        f"  {'' if i else name:<10}{frame.rpartition('-packages/')[2]}"[:width]
        for i, frame in enumerate(frames)
    ]


def _verdict(run: RunView, findings: Sequence[Finding], first: RankView | None) -> str:
    if first is not None and not _failed(first):
        return f"rank {first.rank} left the others at step {first.steps:,}, and they failed"
    if first is not None:
        bye = first.bye
        what = bye.detail if bye is not None and bye.detail else "ended without a word"
        return f"rank {first.rank} failed first: {what}"
    opened = [f for f in findings if f.state == "open"]
    serious = [f for f in opened if f.severity != "note"]
    if serious:
        top = max(serious, key=lambda f: (SEVERITIES.index(f.severity), f.cost_ms or 0.0))
        return top.summary
    if not run.window:
        return f"too few steps to judge: {run.steps:,}, none of them steady"
    before = [f for f in findings if f.state == "resolved" and f.severity != "note"]
    if before:
        return (
            f"nothing is wrong at the end; {before[-1].kind} was, until step "
            f"{before[-1].resolved_step or 0:,}"
        )
    share = _compute_share(run)
    if share is None:
        return "nothing found"
    if share >= COMPUTE_SHARE:
        return f"nothing found: {share:.0%} of the step is forward, backward and optimizer"
    words = f"nothing found that costs much; {share:.0%} of the step is the model's own"
    wait_ms = statistics.fmean([r.phases_ms.get("data_wait") or 0.0 for r in run.ranks])
    if run.step_ms and wait_ms >= WAIT_SHARE * run.step_ms:
        words += f", {wait_ms / run.step_ms:.0%} waits for data ({wait_ms:.1f} ms)"
        if wait_ms < FLOOR_MS:
            words += f"; below {FLOOR_MS:.0f} ms a step that is a loader's own bookkeeping"
    return words


def _compute_share(run: RunView) -> float | None:
    shares = []
    for rank in run.ranks:
        known = [rank.phases_ms.get(p) for p in ("forward", "backward", "optimizer")]
        if rank.step_ms and any(v is not None for v in known):
            shares.append(sum(v or 0.0 for v in known) / rank.step_ms)
    return statistics.fmean(shares) if shares else None


# --- where the time went ------------------------------------------------------------------------


def _time(run: RunView, lost: str) -> str:
    """Return where the wall time went; `lost` is what the time in no phase is called."""
    total: dict[str, int] = {}
    for rank in run.ranks:
        for name in ("training", "data_wait", "comm", "eval", "checkpoint", "lost", "wall"):
            total[name] = total.get(name, 0) + getattr(rank.ledger, f"{name}_ns")
    wall_ns = total.get("wall", 0)
    if not wall_ns:
        return ""
    words = {
        "training": "training", "data_wait": "data wait", "comm": "communication", "eval": "eval",
        "checkpoint": "checkpoints", "lost": lost,
    }  # fmt: skip
    parts = [
        f"{word} {total[name] / wall_ns:.0%}"
        for name, word in words.items()
        if total[name] / wall_ns >= 0.005
    ]
    return f"{', '.join(parts)}; goodput {total['training'] / wall_ns:.0%} of the wall time"


def _step(run: RunView) -> str:
    if run.step_ms is None:
        return ""
    means: list[str] = []
    for phase in PHASES:
        known = [v for r in run.ranks if (v := r.phases_ms.get(phase)) is not None]
        if known and (mean := statistics.fmean(known)) >= 0.005 * run.step_ms:
            means.append(f"{_SHORT[phase]} {mean:,.1f}")
    rate = f", {run.samples_per_s:,.0f} samples/s" if run.samples_per_s else ""
    return (
        f"{run.step_ms:,.1f} ms: {'  '.join(means)}  (mean of the last {run.window} steady "
        f"steps{rate})"
    )


# --- findings -----------------------------------------------------------------------------------


def _findings(found: Sequence[Finding], room: int, width: int) -> list[str]:
    out: list[str] = []
    for i, finding in enumerate(found[:_FINDINGS]):
        block = _finding(finding, width)
        left = room - len(out) - (1 if len(found) > i + 1 else 0)
        if len(block) > left:
            block = block[: max(0, left)]
        out += block
    hidden = len(found) - min(len(found), _FINDINGS)
    if hidden and len(out) < room:
        out.append(f"  ... {hidden} more")
    return out[: max(0, room)]


def _finding(finding: Finding, width: int) -> list[str]:
    cost = f"  +{finding.cost_ms:,.1f} ms/step" if finding.cost_ms is not None else ""
    if finding.kind == "hang":
        cost = ""
    share = f" ({finding.share:.0%})" if cost and finding.share is not None else ""
    until = ""
    mark = _MARKS[finding.severity]
    if finding.state == "resolved":
        mark = "✓"
        until = f"  resolved at step {finding.resolved_step or 0:,}"
    out = [
        f"  {mark} {finding.id} {finding.kind}  {ranks_text(finding.ranks)}{cost}{share}"
        f"  confidence {finding.confidence}{until}"
    ]
    for stack in finding.stacks[:_STACKS]:
        out += _stack(f"  rank {stack.rank}", stack.frames[:_HANG_FRAMES], width)
    # The processes are gone: nobody can look at their stacks any more.
    hints = [h for h in finding.hints if h.knob != "stack"]
    if hints and finding.state == "open":
        hint = hints[0]
        out += textwrap.wrap(
            f"try  {hint.change}",
            width,
            initial_indent="      ",
            subsequent_indent="           ",
            max_lines=2,
            placeholder=" ...",
            break_on_hyphens=False,
        )
        line = lines_of(hint).get("plain")
        if line is not None:
            out.append(f"           {line}")
    return out


# --- memory, and what is not known --------------------------------------------------------------


def _memory_of(rank: RankView) -> str:
    peak = rank.told.memory_peak_bytes
    last = rank.last.memory_bytes if rank.last is not None else None
    points = rank.past.memory
    if last is None and points:
        last = points[-1][1]
    if last is None and peak is None:
        return ""
    kind = "allocated" if _on_device(rank) else "resident"
    text = f"{_bytes(last)} {kind}" if last is not None else ""
    if peak is not None:
        text += f"{', ' if text else ''}peak {_bytes(peak)}"
    return text


def _on_device(rank: RankView) -> bool:
    return rank.hello is not None and rank.hello.device != "cpu"


def _memory(run: RunView) -> str:
    known = [r for r in run.ranks if _memory_of(r)]
    if not known:
        return ""
    most = max(known, key=lambda r: r.past.memory[-1][1] if r.past.memory else 0)
    text = f"rank {most.rank} {_memory_of(most)}" if len(run.ranks) > 1 else _memory_of(most)
    found = grows(most)
    if found is not None:
        slope = memory_slope(most.past.memory[len(most.past.memory) // 4 :]) or 0.0
        text += f", growing by {_bytes(max(0.0, slope * 1000))} in 1,000 steps"
    elif len(most.past.memory) >= _STEADY_POINTS:
        text += ", steady"
    return text


def _unknown(run: RunView, diagnosis: RunDiagnosis | None, nodes: Iterable[NodeView]) -> str:
    reasons: dict[str, list[str]] = {}
    for rank in run.ranks:
        for phase, why in rank.phases_na.items():
            known = reasons.setdefault(why, [])
            if phase not in known:
                known.append(phase)
    parts = [f"{', '.join(phases)} ({why})" for why, phases in reasons.items()]
    gpus = sorted({n.gpus_reason for n in nodes if not n.gpus and n.gpus_reason})
    parts += [f"GPUs ({reason})" for reason in gpus]
    if diagnosis is not None and diagnosis.abstained and run.window:
        needs: dict[str, list[str]] = {}
        for abstain in diagnosis.abstained:
            needs.setdefault(abstain.needs, []).append(abstain.kind)
        parts += [f"{', '.join(kinds)} (needs {what})" for what, kinds in needs.items()]
    if run.lost or run.dropped:
        parts.append(f"{run.lost:,} frames lost, {run.dropped:,} steps not reported")
    return "; ".join(parts)
