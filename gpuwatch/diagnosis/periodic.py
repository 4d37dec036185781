"""Stalls that come and go: checkpoints, validation, new epochs, logging, loaders in bursts.

They hide in means, and their look-alikes differ by *when* they come: at a span, at the first batch
of an iterator, every step, or once in as many steps as the loader has workers.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuwatch.diagnosis.aligned import (
    MIN_STEPS,
    Aligned,
    align,
    clock_missing,
    counted,
    loader_of,
    mad_ms,
    mean_ms,
    ranks_text,
    too_few,
    windows,
)
from gpuwatch.diagnosis.input import Starvation, starvation, starved_ranks
from gpuwatch.diagnosis.loading import one_slow_worker, other_cause, uneven
from gpuwatch.diagnosis.types import Abstain, Evidence, Finding, Hint, Outcome, RunPicture
from gpuwatch.schema import Loader, Span
from gpuwatch.store.clocks import deciding
from gpuwatch.store.views import RankView

__all__ = [
    "stall_checkpoint",
    "stall_log_sync",
    "stall_prefetch_burst",
    "stall_validation",
    "worker_restart",
]

SHARE_NOTE = 0.03
SHARE_WARNING = 0.10
SHARE_CRITICAL = 0.20
"""Of the step with its part of the stall. A checkpoint of 40 s every three hours is 0.4 %, and no
finding; the warning line is TraceML's for any part of the step."""

FLOOR_MS = 2.0
CRITICAL_STEPS = 20
HELD_IN = 0.5
HELD_HIGH = 0.9

LEAST_SPANS = 2
"""One says nothing about the next: the period is the distance of two."""

FIRST_FLOOR_MS = 50.0
FIRST_TIMES = 3.0
"""A first batch counts as late above both: workers take 20-90 ms to start where nothing is slow,
and measured first batches of new workers were 5-100 times a steady one."""

FIRST_ALIKE = 0.5
"""... and where one rank's is, those of others from half of that on: in synchronous training who is
ready first waits in a collective instead."""

CORRELATED = 0.5
CONCENTRATED = 0.6
"""Of the wait that must lie in one of as many steps as there are workers."""


# --- checkpoints and validation -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Periodic:
    """What spans of one name cost a rank: ms a step, their mean length, steps between them."""

    rank: RankView
    cost_ms: float
    mean_ms: float
    period: float
    count: int
    after_ms: float


def _spans(picture: RunPicture) -> Sequence[tuple[RankView, Mapping[str, Sequence[Span]]]]:
    """Return the spans of each rank that has steady steps, by their name."""

    def sorted_out() -> Sequence[tuple[RankView, Mapping[str, Sequence[Span]]]]:
        found = []
        for rank in picture.run.ranks:
            by_name: dict[str, list[Span]] = {}
            for span in rank.past.spans:
                by_name.setdefault(span.name, []).append(span)
            if rank.step_ms is not None:
                found.append((rank, by_name))
        return found

    return picture.once("spans", sorted_out)


def _periodic(picture: RunPicture, rank: RankView, spans: Sequence[Span]) -> _Periodic | None:
    """Return the cost of spans that come again, None for fewer than two of them."""
    starts = [span for i, span in enumerate(spans) if not i or span.step > spans[i - 1].step]
    if len(starts) < LEAST_SPANS:
        return None
    steps = starts[-1].step - starts[0].step
    total_ms = sum(span.duration_ns for span in spans if span.step < starts[-1].step) / 1e6
    after_ms = _slower_after(picture, rank, {span.step for span in starts})
    periods = len(starts) - 1
    return _Periodic(
        rank,
        (total_ms + after_ms * periods) / steps,
        total_ms / periods,
        steps / periods,
        len(starts),
        after_ms,
    )


def _slower_after(picture: RunPicture, rank: RankView, steps: set[int]) -> float:
    """Return how much longer the steps right after such a span are, in ms; 0 if not much."""
    window = windows(picture).get(rank.rank)
    if window is None or steps.isdisjoint(window.indices):
        return 0.0
    usual: list[int] = []
    after: list[int] = []
    for index, step_ns in zip(window.indices, window.steps.step, strict=True):
        (after if index in steps else usual).append(step_ns)
    if len(usual) < MIN_STEPS:
        return 0.0
    excess_ms = (statistics.median(after) - statistics.median(usual)) / 1e6
    if excess_ms <= FLOOR_MS:
        return 0.0
    return excess_ms if excess_ms > 5 * mad_ms(usual) / 1e6 else 0.0


def _stall(picture: RunPicture, kind: str, name: str, what: str) -> Outcome:
    ranks = _spans(picture)
    if not ranks:
        return Abstain(kind, f"{MIN_STEPS} steady steps; none so far")
    found = [
        periodic
        for rank, spans in ranks
        if name in spans and (periodic := _periodic(picture, rank, spans[name])) is not None
    ]
    if not found:
        return None
    worst = max(found, key=lambda p: p.cost_ms)
    step_ms = worst.rank.step_ms or 0.0
    share = worst.cost_ms / (step_ms + worst.cost_ms) if worst.cost_ms else 0.0
    if share < SHARE_NOTE or worst.cost_ms < FLOOR_MS / 4:
        return None
    if share >= SHARE_CRITICAL and worst.count > LEAST_SPANS:
        severity = "critical"
    else:
        severity = "warning" if share >= SHARE_WARNING else "note"
    numbers = tuple(sorted(p.rank.rank for p in found))
    every = f"{worst.period:.0f}"
    evidence = [
        Evidence(
            f"{name}_time",
            round(worst.mean_ms, 1),
            "ms",
            f"every {every} steps of {step_ms:.1f} ms; {worst.count} of them seen",
            "spans of the training",
        ),
        Evidence(
            "cost_a_step",
            round(worst.cost_ms, 2),
            "ms",
            f"{share:.0%} of the step with its part of it",
            f"{name} time / steps between",
        ),
    ]
    if worst.after_ms:
        evidence.append(
            Evidence(
                "step_after",
                round(worst.after_ms, 1),
                "ms",
                f"longer than the usual {step_ms:.1f} ms",
                "the step right after it",
            )
        )
    return Finding(
        kind=kind,
        severity=severity,
        ranks=numbers,
        nodes=tuple(sorted({p.rank.node for p in found})),
        cost_ms=worst.cost_ms,
        share=share,
        confidence="high" if worst.count > LEAST_SPANS else "medium",
        summary=(
            f"{what} {worst.mean_ms / 1e3:.2f} s every {every} steps: {worst.cost_ms:.1f} ms a "
            f"step, {share:.0%} of the time"
        ),
        evidence=tuple(evidence),
        ruled_out=(
            "loading: the time lies in spans of that name, outside the steps",
            f"every step: the steps between take {step_ms:.1f} ms",
        ),
        hints=_stall_hints(kind, worst, step_ms),
    )


def _stall_hints(kind: str, worst: _Periodic, step_ms: float) -> tuple[Hint, ...]:
    period = max(1, round(worst.period))
    # So rare that it costs 2 % of the time.
    rarer = max(2 * period, round(period * worst.cost_ms / (0.02 * step_ms) / 10) * 10)
    rare_ms = step_ms + worst.cost_ms * period / rarer
    whole_ms = step_ms + worst.cost_ms
    if kind == "stall_checkpoint":
        return (
            Hint(
                change=(
                    f"checkpoint every {period} -> {rarer} steps: predicted step with its part "
                    f"{whole_ms:.0f} -> {rare_ms:.0f} ms"
                ),
                knob="checkpoint_interval_steps",
                old=period,
                new=rarer,
                predicted_ms=(step_ms, rare_ms),
            ),
            Hint(
                change=(
                    "write it in the background: torch.distributed.checkpoint.async_save, or copy "
                    "to the CPU and save from a thread"
                ),
                knob="async_save",
                predicted_ms=(step_ms, step_ms + worst.cost_ms / 2),
            ),
        )
    return (
        Hint(
            change=(
                f"validate every {period} -> {rarer} steps, or on a part of the data: predicted "
                f"step with its part {whole_ms:.0f} -> {rare_ms:.0f} ms"
            ),
            knob="eval_interval_steps",
            old=period,
            new=rarer,
            predicted_ms=(step_ms, rare_ms),
        ),
        Hint(
            change=(
                "validate faster: a larger batch than in training (nothing is kept for a "
                "backward), workers for its loader too, torch.inference_mode(), autocast"
            ),
            knob="eval_batch_size",
        ),
    )


def stall_checkpoint(picture: RunPicture) -> Outcome:
    """Writing checkpoints holds the training up.

    cost = checkpoint time / steps between, with what the step right after one takes longer.
    """
    return picture.once(
        "stall_checkpoint",
        lambda: _stall(picture, "stall_checkpoint", "checkpoint", "checkpoints take"),
    )


def stall_validation(picture: RunPicture) -> Outcome:
    """Validation takes a large part of the time. cost = eval time / steps between."""
    return picture.once(
        "stall_validation", lambda: _stall(picture, "stall_validation", "eval", "validation takes")
    )


# --- a new epoch --------------------------------------------------------------------------------


def worker_restart(picture: RunPicture) -> Outcome:
    """The loader starts its workers anew at every epoch, and the first batch is late.

    cost = data wait of first batches beyond a steady one / steps between them.
    """
    return picture.once("worker_restart", lambda: _worker_restart(picture))


def _restarts(loader: Loader) -> bool:
    """Whether a loader starts workers anew for each of its iterators."""
    return bool(loader.num_workers) and not loader.persistent_workers


def _worker_restart(picture: RunPicture) -> Outcome:
    rows = []
    for rank in picture.run.ranks:
        loaders = rank.hello.loaders if rank.hello is not None else ()
        if len(rank.past.firsts) < 2 or rank.step_ms is None or not any(map(_restarts, loaders)):
            continue
        firsts = [r for r in rank.past.firsts if deciding(r).data_wait is not None]
        if len(firsts) < 2:
            continue
        loader = loader_of(rank, firsts[-1].loader)
        if loader is None or not _restarts(loader):
            continue
        window = windows(picture).get(rank.rank)
        steady = window.steps.known_waits if window is not None else ()
        if not steady:
            continue
        usual_ms = statistics.median(steady) / 1e6
        waits_ms = [(deciding(r).data_wait or 0) / 1e6 for r in firsts]
        excess_ms = statistics.median(waits_ms) - usual_ms
        least_ms = max(FIRST_TIMES * usual_ms, 1e-3)
        late = min(excess_ms / FIRST_FLOOR_MS, statistics.median(waits_ms) / least_ms)
        steps = (firsts[-1].index - firsts[0].index) / (len(firsts) - 1)
        if steps >= 1 and late >= FIRST_ALIKE:
            rows.append((rank, loader, excess_ms, usual_ms, steps, len(firsts), late))
    if max((row[-1] for row in rows), default=0.0) < 1.0:
        return None
    rank, loader, excess_ms, usual_ms, steps, count, _ = max(rows, key=lambda r: r[2] / r[4])
    cost_ms = excess_ms / steps
    step_ms = rank.step_ms or 0.0
    share = cost_ms / (step_ms + cost_ms)
    if share < SHARE_NOTE or cost_ms < FLOOR_MS / 4:
        return None
    severity = "warning" if share >= SHARE_WARNING else "note"
    if share >= SHARE_CRITICAL and count > 2:
        severity = "critical"
    numbers = tuple(sorted(r[0].rank for r in rows))
    return Finding(
        kind="worker_restart",
        severity=severity,
        ranks=numbers,
        nodes=tuple(sorted({r[0].node for r in rows})),
        cost_ms=cost_ms,
        share=share,
        confidence="high" if count > 2 else "medium",
        summary=(
            f"loader workers start anew every {steps:.0f} steps: the first batch takes "
            f"{excess_ms / 1e3:.2f} s longer on {ranks_text(numbers)}"
        ),
        evidence=(
            Evidence(
                "first_batch_wait",
                round(excess_ms + usual_ms, 1),
                "ms",
                f"{usual_ms:.1f} ms for a steady one",
                f"median of the first batches of {count} iterators",
            ),
            Evidence(
                "persistent_workers",
                "False",
                "",
                f"{counted(loader.num_workers, 'worker')} a rank",
                "DataLoader arguments",
            ),
        ),
        ruled_out=(
            f"a slow loader: a steady batch is waited for {usual_ms:.1f} ms",
            f"a cold start: it comes again at each of {count} epochs",
        ),
        hints=(
            Hint(
                change=(
                    f"persistent_workers False -> True: predicted step with its part "
                    f"{step_ms + cost_ms:.0f} -> {step_ms:.0f}..{step_ms + cost_ms / 4:.0f} ms"
                ),
                knob="persistent_workers",
                old=False,
                new=True,
                predicted_ms=(step_ms, step_ms + cost_ms / 4),
            ),
            Hint(
                change=(
                    "make a worker's start cheaper: less to import and to pickle, files opened "
                    "at the first item, multiprocessing_context='forkserver'"
                ),
                knob="worker_start",
            ),
        ),
    )


# --- bursts -------------------------------------------------------------------------------------


def _autocorrelation(values: Sequence[float], lag: int) -> float:
    mean = statistics.fmean(values)
    centred = [v - mean for v in values]
    total = sum(v * v for v in centred)
    if total <= 0.0 or lag >= len(values):
        return 0.0
    pairs = zip(centred, centred[lag:], strict=False)
    return sum(a * b for a, b in pairs) / total * len(values) / (len(values) - lag)


def stall_prefetch_burst(picture: RunPicture) -> Outcome:
    """One step in as many as there are workers waits: they finish together, or one of them is slow.

    cost = mean wait x (1 - 1 / workers): what spreading the batches evenly would save at most; of
    one slow worker: step - max(step with zero data wait, a batch in the others / workers).
    """
    return picture.once("stall_prefetch_burst", lambda: _slow_or_burst(picture))


def _slow_or_burst(picture: RunPicture) -> Outcome:
    seen = starvation(picture, "stall_prefetch_burst")
    if isinstance(seen, Starvation) and other_cause(picture, seen) == "stall_prefetch_burst":
        return one_slow_worker(seen, uneven(seen))
    return _burst(picture)


def _burst(picture: RunPicture) -> Outcome:
    aligned = align(picture)
    few = too_few("stall_prefetch_burst", aligned)
    if few is not None or aligned is None:
        return few
    missing = clock_missing("stall_prefetch_burst", aligned)
    if missing is not None:
        return missing
    found = []
    starved = set(starved_ranks(picture, aligned))
    for row, rank in enumerate(aligned.ranks):
        mean = aligned.mean_wait_ms[row]
        if mean < max(FLOOR_MS, SHARE_WARNING / 2 * aligned.mean_step_ms) or rank.rank in starved:
            continue  # or its workers are the limit all the time
        loader = aligned.loader(row)
        if loader is None or loader.num_workers < 2:
            continue
        lag = round(loader.num_workers / aligned.batches(row))
        if lag < 2 or aligned.count < 3 * lag:
            continue
        waits = [ns / 1e6 for ns in aligned.rows[row].wait]
        correlation = _autocorrelation(waits, lag)
        others = max((_autocorrelation(waits, n) for n in range(1, lag)), default=0.0)
        high = sorted(waits, reverse=True)[: max(1, round(len(waits) / lag))]
        held = sum(high) / sum(waits)
        if correlation >= CORRELATED and correlation > others and held >= CONCENTRATED:
            found.append((rank, loader, lag, mean, correlation, held, statistics.median(high)))
    if not found:
        return None
    rank, loader, lag, mean, correlation, held, high_ms = max(found, key=lambda f: f[3])
    cost_ms = mean * (1 - 1 / lag)
    step_ms = aligned.mean_step_ms
    numbers = tuple(sorted(f[0].rank for f in found))
    prefetch = loader.prefetch_factor or 2
    return Finding(
        kind="stall_prefetch_burst",
        severity="note",
        ranks=numbers,
        nodes=tuple(sorted({f[0].node for f in found})),
        cost_ms=cost_ms,
        share=cost_ms / step_ms,
        confidence="high" if correlation >= 0.8 and held >= 0.9 else "medium",
        summary=(
            f"batches come in bursts on {ranks_text(numbers)}: one step in {lag} waits "
            f"{high_ms:.0f} ms, as many as the loader has workers"
        ),
        evidence=(
            Evidence(
                "autocorrelation",
                round(correlation, 2),
                "",
                f"of the data wait at a lag of {lag} steps; counts from {CORRELATED}",
                "steady steps of the window",
            ),
            Evidence(
                "wait_in_bursts",
                round(100 * held),
                "%",
                f"of the wait lies in one step of {lag}",
                "steady steps of the window",
            ),
        ),
        ruled_out=(
            f"checkpoints and logging: the period is the number of workers, {loader.num_workers}",
            f"too few workers all the time: {lag - 1} of {lag} steps hardly wait",
        ),
        hints=(
            Hint(
                change=(
                    f"prefetch_factor {prefetch} -> {2 * prefetch}: more batches bridge the gap "
                    f"if the workers are fast enough on the whole"
                ),
                knob="prefetch_factor",
                old=prefetch,
                new=2 * prefetch,
                predicted_ms=(max(step_ms - cost_ms, 0.0), step_ms),
            ),
        ),
    )


# --- logging and synchronizing ------------------------------------------------------------------


def stall_log_sync(picture: RunPicture) -> Outcome:
    """Every step (or every few) spends time outside loading, forward, backward and optimizer.

    Logging, metrics, progress bars, writing files, and on a GPU whatever waits for it. cost = step
    - step without that time, where the slowest rank decides, step by step.
    """
    return picture.once("stall_log_sync", lambda: _log_sync(picture))


def _other_ns(aligned: Aligned) -> list[Sequence[int]]:
    """Return `other` without pauses of the garbage collector, [rank][step]."""
    return [
        row.other
        if not any(row.gc)
        else [max(0, other - paused) for other, paused in zip(row.other, row.gc, strict=True)]
        for row in aligned.rows
    ]


def _log_sync(picture: RunPicture) -> Outcome:
    aligned = align(picture)
    few = too_few("stall_log_sync", aligned)
    if few is not None or aligned is None:
        return few
    missing = clock_missing("stall_log_sync", aligned)
    if missing is not None:
        return missing
    step_ms = aligned.mean_step_ms
    floor_ms = max(FLOOR_MS, SHARE_WARNING * step_ms)
    if 2 * sum([ms >= floor_ms for ms in aligned.mean_other_ms]) <= len(aligned.ranks):
        return None  # nobody, or so few ranks that they are stragglers
    others = _other_ns(aligned)
    means_ms = [sum(values) / aligned.count / 1e6 for values in others]
    guilty = [row for row, ms in enumerate(means_ms) if ms >= floor_ms]
    if 2 * len(guilty) <= len(others):
        return None
    if any(
        rank.phases_na.get(name)
        for rank in aligned.ranks
        for name in ("forward", "backward", "optimizer")
    ):
        return Abstain("stall_log_sync", "the split of the step: a part of it is n/a")
    without = aligned.without_ms(others)
    cost_ms = step_ms - mean_ms(without)
    if cost_ms < max(FLOOR_MS, SHARE_WARNING / 2 * step_ms, 2 * mad_ms(without)):
        return None
    row = max(guilty, key=means_ms.__getitem__)
    other_ms = means_ms[row]
    held = mean_ms([ns / 1e6 >= SHARE_WARNING * step_ms for ns in others[row]])
    share = cost_ms / step_ms
    critical = share >= SHARE_CRITICAL and aligned.count >= CRITICAL_STEPS
    numbers = tuple(sorted(aligned.ranks[r].rank for r in guilty))
    when = "every step" if held >= HELD_HIGH else f"{held:.0%} of the steps"
    low_ms = step_ms - cost_ms
    return Finding(
        kind="stall_log_sync",
        severity="critical" if critical else "warning",
        ranks=numbers,
        nodes=tuple(sorted({aligned.ranks[r].node for r in guilty})),
        cost_ms=cost_ms,
        share=share,
        confidence="high" if held >= HELD_HIGH else "medium",
        summary=(
            f"{ranks_text(numbers)} {'spends' if len(numbers) == 1 else 'spend'} "
            f"{other_ms:.0f} of {step_ms:.0f} ms a step "
            f"outside the training itself, in {when}: logging, metrics or waiting for the device"
        ),
        evidence=(
            Evidence(
                "other",
                round(other_ms, 2),
                "ms",
                f"{step_ms:.1f} ms step; {SHARE_WARNING:.0%} is where it counts",
                "between the marks of fetching, backward and optimizer",
            ),
            Evidence(
                "steps_with_it",
                round(held * aligned.count),
                "steps",
                f"of {aligned.count} in the window",
                f"over {SHARE_WARNING:.0%} of the step",
            ),
        ),
        ruled_out=_excluded(aligned, row),
        hints=(
            Hint(
                change=(
                    f"log every 1 -> 50 steps: predicted step {step_ms:.0f} -> "
                    f"{low_ms:.0f}..{low_ms + cost_ms / 4:.0f} ms"
                ),
                knob="log_interval_steps",
                old=1,
                new=50,
                predicted_ms=(low_ms, low_ms + cost_ms / 4),
            ),
            Hint(
                change=(
                    "keep metrics on the device between logs: no .item(), float(), print of a "
                    "tensor or torch.cuda.synchronize() in each step"
                ),
                knob="sync",
            ),
        ),
    )


def _excluded(aligned: Aligned, row: int) -> tuple[str, ...]:
    pauses_ms = sum(aligned.rows[row].gc) / aligned.count / 1e6
    return (
        f"garbage collection: {pauses_ms:.1f} ms a step",
        f"loading: {aligned.mean_wait_ms[row]:.1f} ms a step",
        "checkpoints and validation: their spans are outside the steps",
    )
