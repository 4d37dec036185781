"""No rank moves: who stands where, and whom do the others wait for."""

import statistics

from gpuwatch.diagnosis.aligned import ranks_text
from gpuwatch.diagnosis.types import Abstain, Evidence, Finding, Hint, Outcome, RunPicture
from gpuwatch.store.views import RankView, RunView

__all__ = ["STANDS_S", "hang", "stands_still"]

STANDS_S = 10.0
"""Below, a slow checkpoint, a page-in or a rebuild may explain it."""

STEPS = 20.0
"""... and below so many steps of this run."""

LOADING_S = 60.0
"""A fetch may be the first of an epoch, whose workers take their time."""

STILL_S = 1.0
STILL_STEPS = 10.0
"""Readings of the machine come once a second: the next one is of a machine that does nothing."""

LEFT_S = 3.0
"""A rank that has left so shortly after the others came to stand may be what they wait for."""

_BUSY = frozenset({"starting", "eval", "checkpoint", "compile"})
_WAITING = frozenset({"comm", "backward"})


def _since_s(rank: RankView) -> float:
    return rank.phase_age_s


def _stands(rank: RankView) -> bool:
    if rank.state in _BUSY:
        return False
    usual_s = (rank.step_p95_ms or rank.step_ms or 0.0) / 1e3
    least_s = max(LOADING_S if rank.phase == "data_wait" else STANDS_S, STEPS * usual_s)
    return rank.phase_age_s >= least_s


def stands_still(run: RunView) -> bool:
    """Whether no rank has moved for so long that its window is of another time than the sensors.

    A machine on which nothing runs looks as if the steps before had had it to themselves.
    """
    there = [r for r in run.ranks if r.state not in {"gone", "ended"}]
    return bool(there) and all(
        r.phase_age_s >= max(STILL_S, STILL_STEPS * (r.step_p95_ms or 0.0) / 1e3) for r in there
    )


def hang(picture: RunPicture) -> Outcome:
    """No rank has moved for longer than any step of this run took.

    cost = how long the present step stands already, in ms. Evaluation, checkpoints, compiling and
    the first step are no hang.
    """
    return picture.once("hang", lambda: _hang(picture))


def _hang(picture: RunPicture) -> Outcome:
    run = picture.run
    there = [r for r in run.ranks if r.state not in {"gone", "ended"}]
    if run.state != "running" or not there:
        return None
    if not any(r.window for r in there):
        return Abstain("hang", "a step that was finished: a first one may take long")
    if not all(_stands(r) for r in there):
        return None
    age_s = min(_since_s(r) for r in there)
    left = [r for r in run.ranks if r.state in {"gone", "ended"}]
    # Who leaves a job that stands already, because somebody ends it, is not why it stands.
    missing = [r for r in left if r.age_s >= age_s - LEFT_S]
    if len(missing) < len(left):
        return Abstain("hang", "every rank that stood: some have left since")
    culprits, why = _culprits(there, missing)
    usual_s = statistics.median([r.step_ms for r in there if r.step_ms is not None] or [0.0]) / 1e3
    numbers = tuple(sorted(r.rank for r in culprits))
    named = set(numbers)
    waiting = [r for r in there if r.rank not in named]
    return Finding(
        kind="hang",
        severity="critical",
        ranks=numbers,
        nodes=tuple(sorted({r.node for r in culprits})),
        cost_ms=age_s * 1e3,
        share=1.0,
        confidence="high" if len(culprits) < len(run.ranks) else "medium",
        summary=(
            f"no step for {age_s:.0f} s: {why}"
            + (f", {ranks_text([r.rank for r in waiting])} waits for it" if waiting else "")
        ),
        evidence=(
            Evidence(
                "stands_for",
                round(age_s, 1),
                "s",
                f"a step of this run takes {usual_s:.3g} s",
                "time since the last mark of any rank",
            ),
            *(
                Evidence(
                    f"rank_{r.rank}",
                    r.phase or r.state,
                    "",
                    f"for {_since_s(r):.0f} s, at step {r.steps:,}"
                    + (f" ({r.state_reason})" if r.state_reason else ""),
                    "state of the rank",
                )
                for r in sorted(there, key=lambda r: (r.rank not in named, r.rank))[:8]
            ),
        ),
        ruled_out=(
            "evaluation, checkpoint, compiling: no rank says that it is in one",
            f"a slow step: it stands for {age_s / max(usual_s, 1e-3):,.0f} steps' time",
        ),
        hints=(
            Hint(
                change=(
                    f"look at the stacks of {ranks_text(numbers)}: press t on the rank's screen, "
                    f"or py-spy dump --pid {culprits[0].pid}"
                ),
                knob="stack",
            ),
            *_hints(culprits, missing),
        ),
    )


def _culprits(there: list[RankView], missing: list[RankView]) -> tuple[list[RankView], str]:
    """Return whom the others wait for, and a clause that says why it is them."""
    if missing:
        names = ranks_text([r.rank for r in missing])
        return missing, f"{names} {'is' if len(missing) == 1 else 'are'} gone"
    elsewhere = [r for r in there if r.phase not in _WAITING]
    if elsewhere and len(elsewhere) < len(there):
        phases = sorted({r.phase or r.state for r in elsewhere})
        return elsewhere, f"{ranks_text([r.rank for r in elsewhere])} stands in {', '.join(phases)}"
    least = min(r.steps for r in there)
    behind = [r for r in there if r.steps == least]
    if len(behind) < len(there):
        names = ranks_text([r.rank for r in behind])
        return behind, f"{names} stands at step {least:,}, the others are further"
    phases = sorted({r.phase or r.state for r in there})
    return there, f"{ranks_text([r.rank for r in there])} stands in {', '.join(phases)}"


def _hints(culprits: list[RankView], missing: list[RankView]) -> tuple[Hint, ...]:
    if missing:
        return (
            Hint(
                change="end the job: a rank that is gone does not come back into its collectives; "
                "torchrun --max-restarts starts all ranks anew",
                knob="restart",
            ),
        )
    if all(r.phase == "data_wait" for r in culprits):
        return (
            Hint(
                change="DataLoader(timeout=60) turns a worker that hangs into an error that names "
                "it; look for locks taken before a fork, and for a storage that is gone",
                knob="timeout",
            ),
        )
    return (
        Hint(
            change="see that every rank calls the same collectives: batches that differ in number "
            "(drop_last, Join), a branch on rank, an exception that one rank swallowed",
            knob="collectives",
        ),
    )
