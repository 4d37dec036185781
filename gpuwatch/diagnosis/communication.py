"""Communication: the network is the limit, or one rank is late and the others wait for it.

Under synchronous training every rank has the same step, so step times say nothing. Own time
(step - exposed communication) tells ranks apart, and the minimum over ranks of the exposed
communication is the transfer that no rank's lateness explains.
"""

import math
import statistics
from bisect import bisect_left
from dataclasses import replace

from gpuwatch.diagnosis.aligned import (
    MIN_STEPS,
    Aligned,
    align,
    clock_missing,
    mad_ms,
    mean_ms,
    median_of_others,
    ranks_text,
    too_few,
)
from gpuwatch.diagnosis.host import cpu_affinity, cpu_quota
from gpuwatch.diagnosis.input import loader_few_workers, starved_ranks
from gpuwatch.diagnosis.machine import by_node, cores_of, host_most, others_of
from gpuwatch.diagnosis.types import Abstain, Evidence, Finding, Hint, Outcome, RunPicture
from gpuwatch.schema import Ddp

__all__ = ["comm_bound", "straggler"]

SHARE_WARNING = 0.10
SHARE_CRITICAL = 0.20
CRITICAL_STEPS = 20
FLOOR_MS = 2.0
HELD_IN = 0.5
HELD_HIGH = 0.9

SHARE_FIXED = 0.05
"""... for a rank that is last in nearly every step: on 384 GPUs one slow card cost all of them 5 %
of their iterations, and nothing else moved."""

ALIKE = 0.5
"""Of the lag of the last rank: who is late by so much of it is late too, as the ranks of a slow
machine are. Mending the last one alone would leave the step where the next one ends."""

LAST_IN = 0.7
LAST_IN_OF_TWO = 0.8
"""Share of steps in which the same rank must be last. Below it lateness rotates: a trial with one
random late rank of three gave 52 %, fixed ones gave 100 %. Of two ranks one is last in half the
steps by chance, and 73 % were seen on a machine that other work kept busy."""

BUSY_PERCENT = 90.0
"""Host CPU above which ranks that compute on it may wait for a core instead of for each other."""

STALLED_PERCENT = 20.0
"""Of the time in which some task waited for a core (PSI): a collective of small gradients on CPUs
takes as long as its threads wait for one. Two ranks with two workers each on two cores that were
70 % busy were seen at 30-60 %."""

OTHERS_SHARE = 0.15
"""Of the cores that other programs use: then bytes that have to be moved may wait for them."""

MOSTLY = 0.5
"""... unless communication is most of the step."""

SCATTER = 3.0
"""A lag must exceed this many standard errors of its median; on a busy machine a share of the step
alone called a healthy run late."""

ROTATES = 4.0
"""... and where the late rank changes, the lag must exceed so many MADs of own times, and one more
for each doubling of the ranks: the largest of n samples lies 1.7 MADs above the others for two
ranks, 4.8 for 1,024, by chance alone."""

MEDIAN_ERROR = 1.858
"""Standard error of a median from the MAD: 1.4826 (MAD to sigma) x 1.2533 (mean to median)."""

BULK_BYTES = 2**20
"""Gradients below this are bound by latency: halving their bytes changes nothing."""

COMPRESSED = (0.5, 0.7)
"""Share of the transfer that is left when gradients travel in 16 bits: half the bytes, and what
latency does not let go."""

BUCKETS = 4
"""Of gradients, so that all but the last one travel while the backward goes on."""

SPREAD = 0.3
"""Of a gain that may not come: what is saved of waiting is not all saved of the step."""

WAKING_MS = 10.0
"""80 kB over gloo took 6-7 ms between two ranks of one machine that slept for most of the step, and
1 ms where they did not: what is seen below is processes that have to be woken up."""

_OWN_PHASES = ("data_wait", "h2d", "forward", "backward", "optimizer", "other")


def _distributed(picture: RunPicture, kind: str) -> Aligned | Abstain | None:
    if picture.run.world_size < 2:
        return None
    aligned = align(picture)
    if aligned is None or aligned.count < MIN_STEPS:
        return too_few(kind, aligned)
    if len(aligned.ranks) < picture.run.world_size:
        return Abstain(
            kind, f"all {picture.run.world_size} ranks; {len(aligned.ranks)} report steady steps"
        )
    if not aligned.comm_known:
        return Abstain(kind, "exposed communication of every rank")
    return clock_missing(kind, aligned) or aligned


def straggler(picture: RunPicture) -> Outcome:
    """One rank is last in most steps, or another one in each, and the others wait for it.

    cost = own time of that rank - median own time of the others; where the late rank changes, the
    mean over the steps of the same difference.
    """
    return picture.once("straggler", lambda: _straggler(picture))


def _straggler(picture: RunPicture) -> Outcome:
    aligned = _distributed(picture, "straggler")
    if not isinstance(aligned, Aligned):
        return aligned
    own = aligned.mean_own_ms
    row = max(range(len(own)), key=own.__getitem__)
    others = [i for i in range(len(own)) if i != row]
    lag_ms = own[row] - statistics.median(own[i] for i in others)
    step_ms = aligned.mean_step_ms
    if lag_ms < max(FLOOR_MS, SHARE_FIXED * step_ms):
        return _rotating(picture, aligned)
    times = [column[row] for column in aligned.own_columns_ns]
    ordered = aligned.own_sorted_ns
    lags_ms = [
        (time - median_of_others(column, bisect_left(column, time))) / 1e6
        for time, column in zip(times, ordered, strict=True)
    ]
    last_in = mean_ms([t == column[-1] for t, column in zip(times, ordered, strict=True)])
    error_ms = MEDIAN_ERROR * mad_ms(lags_ms) / aligned.count**0.5
    share = SHARE_FIXED if last_in >= HELD_HIGH else SHARE_WARNING
    if (
        lag_ms < max(FLOOR_MS, share * step_ms)
        or statistics.median(lags_ms) < SCATTER * error_ms
        or last_in < (LAST_IN_OF_TWO if len(own) == 2 else LAST_IN)
    ):
        return _rotating(picture, aligned)
    excess = {
        phase: means[row] - statistics.median(means[i] for i in others)
        for phase in _OWN_PHASES
        for means in [aligned.mean_phase_ms(phase)]
    }
    phase = max(excess, key=excess.__getitem__)
    rank = aligned.ranks[row]
    if phase == "data_wait" and rank.rank in starved_ranks(picture, aligned):
        return None  # the loader is the cause, and its own finding names this rank
    found = _straggler_finding(aligned, row, own, lag_ms, last_in, phase, excess)
    return found if last_in >= HELD_HIGH else _doubted(picture, found)


def _rotating(picture: RunPicture, aligned: Aligned) -> Finding | None:
    """Return the finding of ranks that are late in turn, None where their lateness is scatter."""
    count = len(aligned.ranks)
    lags_ms = aligned.last_lags_ms
    step_ms = aligned.mean_step_ms
    lag_ms = mean_ms(lags_ms)
    held = mean_ms([lag >= SHARE_WARNING * step_ms for lag in lags_ms])
    middle_ms = statistics.median(lags_ms)
    if held < HELD_IN or middle_ms < max(FLOOR_MS, SHARE_WARNING * step_ms):
        return None
    lasts = [column.index(max(column)) for column in aligned.own_columns_ns]
    # How much a rank's own time scatters where it is not the late one.
    scatters = [
        mad_ms(calm) / 1e6
        for r, own in enumerate(aligned.own_ns)
        if len(calm := [t for t, last in zip(own, lasts, strict=True) if last != r]) >= MIN_STEPS
    ]
    if not scatters:
        return None
    scatter_ms = statistics.median(scatters)
    if middle_ms < (ROTATES + math.log2(count)) * scatter_ms:
        return None
    phase, covered = _late_phase(aligned, lasts, lag_ms)
    if phase == "data_wait" and starved_ranks(picture, aligned):
        return None  # the loader is the cause, and names them
    times = {r: lasts.count(r) for r in range(count)}
    late = [r for r in range(count) if times[r] >= 0.1 * aligned.count] or [
        max(times, key=times.__getitem__)
    ]
    numbers = tuple(aligned.ranks[r].rank for r in late)
    share = lag_ms / step_ms
    critical = share >= SHARE_CRITICAL and aligned.count >= CRITICAL_STEPS
    finding = Finding(
        kind="straggler",
        severity="critical" if critical else "warning",
        ranks=tuple(sorted(numbers)),
        nodes=tuple(sorted({aligned.ranks[r].node for r in late})),
        cost_ms=lag_ms,
        share=share,
        confidence="high" if held >= HELD_HIGH and covered >= 0.8 else "medium",
        summary=(
            f"another rank is late in each step, by {lag_ms:.0f} of {step_ms:.0f} ms in {phase}: "
            f"{ranks_text(numbers)} take turns"
        ),
        evidence=(
            Evidence(
                "lag",
                round(lag_ms, 2),
                "ms",
                f"own times scatter by {scatter_ms:.1f} ms otherwise",
                "largest own time of a step - median of the other ranks",
            ),
            Evidence(
                "last_in",
                round(max(times.values()) / aligned.count * 100),
                "%",
                f"of the steps the same rank is last, at most; fixed from {LAST_IN:.0%}",
                "largest own time of the step",
            ),
            Evidence(
                f"{phase}_excess",
                round(covered * lag_ms, 2),
                "ms",
                f"{covered:.0%} of the lag",
                "phase of the late rank, against the median of the others",
            ),
        ),
        ruled_out=(
            "one slow rank: the late rank changes",
            f"network: transfer {aligned.mean_transfer_ms:.1f} ms",
        ),
        hints=(
            Hint(
                change=(
                    f"find what is uneven in {phase}: batches of different length, garbage "
                    f"collection, a shared disk or core; predicted step {step_ms:.0f} -> "
                    f"{step_ms - lag_ms:.0f}..{step_ms - lag_ms / 2:.0f} ms"
                ),
                knob=phase,
                predicted_ms=(step_ms - lag_ms, step_ms - lag_ms / 2),
            ),
        ),
    )
    return _doubted(picture, finding)


def _late_phase(aligned: Aligned, lasts: list[int], lag_ms: float) -> tuple[str, float]:
    """Return the phase in which the late ranks are late, and its share of the lag.

    Against the other ranks in the same step: a rank that is slow in every step, as several may be,
    is not late against its own past.
    """
    excess = {}
    for phase in _OWN_PHASES:
        columns = zip(*aligned.phase_ns(phase), strict=True)
        excess[phase] = mean_ms(
            [
                (column[last] - statistics.median(column[:last] + column[last + 1 :])) / 1e6
                for column, last in zip(columns, lasts, strict=True)
            ]
        )
    phase = max(excess, key=excess.__getitem__)
    return phase, max(0.0, min(1.0, excess[phase] / lag_ms)) if lag_ms else 0.0


def _moves_bulk(aligned: Aligned) -> bool:
    """Whether the gradients of a step are so many that bandwidth decides, not latency."""
    return any(
        r.hello is not None
        and r.hello.ddp is not None
        and (r.hello.ddp.gradient_bytes or 0) >= BULK_BYTES
        for r in aligned.ranks
    )


def _is_small(aligned: Aligned) -> bool:
    """Whether ranks on CPUs reduce so little that it is known not to be about bandwidth."""
    sizes = [
        r.hello.ddp.gradient_bytes
        for r in aligned.ranks
        if r.hello is not None and r.hello.device == "cpu" and r.hello.ddp is not None
    ]
    known = [size for size in sizes if size is not None]
    return len(known) == len(aligned.ranks) and max(known) < BULK_BYTES


def _doubted(
    picture: RunPicture, finding: Finding, *, waiting: bool = False, by_others: bool = False
) -> Finding:
    """Return the finding as a note where its ranks compute on CPUs that have no core to spare.

    On a contended machine ranks wait for cores inside their collectives, which looks like a slow
    network, or like one rank being late. `waiting`: also where tasks often wait for a core though
    not all are busy on average. `by_others`: only where other programs keep cores busy; what the
    ranks themselves spend on moving much data is the communication.
    """
    on_cpu = any(r.hello is not None and r.hello.device == "cpu" for r in picture.run.ranks)
    limits = [rule(picture) for rule in (cpu_quota, cpu_affinity)]
    limited = next((f.kind for f in limits if isinstance(f, Finding)), "")
    if on_cpu and limited:
        return replace(
            finding,
            severity="note",
            confidence="low",
            ruled_out=(*finding.ruled_out, f"contention: not ruled out, there is {limited}"),
        )
    by_name = by_node(picture.run.ranks)
    for name in finding.nodes:
        node = picture.node(name)
        busy, stalled = host_most(node, "cpu_percent"), host_most(node, "psi_cpu_some")
        crowded = busy is None or busy >= BUSY_PERCENT
        if waiting and stalled is not None and stalled >= STALLED_PERCENT:
            crowded = True
        if by_others and crowded:
            ranks = by_name[name]
            others, cores = others_of(picture, name, ranks), cores_of(node, ranks)
            crowded = others is None or cores is None or others >= OTHERS_SHARE * cores
        if on_cpu and crowded:
            seen = f"at {busy:.0f} % CPU" if busy is not None else "not seen yet"
            if stalled is not None:
                seen += f", some task waits for a core {stalled:.0f} % of the time"
            return replace(
                finding,
                severity="note",
                confidence="low",
                ruled_out=(
                    *finding.ruled_out,
                    f"contention: not ruled out, {name} is {seen}",
                ),
            )
    return finding


def _straggler_finding(
    aligned: Aligned,
    row: int,
    own: list[float],
    lag_ms: float,
    last_in: float,
    phase: str,
    excess: dict[str, float],
) -> Finding:
    middle_ms = statistics.median(own[:row] + own[row + 1 :])
    late = [i for i in range(len(own)) if own[i] - middle_ms >= ALIKE * lag_ms]
    ranks = tuple(sorted(aligned.ranks[i].rank for i in late))
    nodes = tuple(sorted({aligned.ranks[i].node for i in late}))
    others = sorted(set(range(len(own))) - set(late))
    step_ms = aligned.mean_step_ms
    share = lag_ms / step_ms
    transfer_ms = aligned.mean_transfer_ms
    covered = excess[phase] / lag_ms if lag_ms else 0.0
    waits_ms = mean_ms([aligned.mean_comm_ms[i] for i in others])
    high = last_in >= HELD_HIGH and covered >= 0.8
    return Finding(
        kind="straggler",
        severity=(
            "critical" if share >= SHARE_CRITICAL and aligned.count >= CRITICAL_STEPS else "warning"
        ),
        ranks=ranks,
        nodes=nodes,
        cost_ms=lag_ms,
        share=share,
        confidence="high" if high else "medium",
        summary=(
            f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} late by {lag_ms:.0f} ms of "
            f"{step_ms:.0f} ms a step, in {phase}: the others wait for "
            f"{'it' if len(ranks) == 1 else 'them'}"
        ),
        evidence=(
            Evidence(
                "own_ms",
                round(own[row], 2),
                "ms",
                f"{middle_ms:.1f} ms, median of the others",
                "step - exposed communication",
            ),
            Evidence(
                f"{phase}_excess",
                round(excess[phase], 2),
                "ms",
                f"{covered:.0%} of the lag",
                "mean of window, against the median of the others",
            ),
            Evidence(
                "last_in",
                round(last_in * aligned.count),
                "steps",
                f"of {aligned.count} in the window",
                "largest own time of the step",
            ),
        ),
        ruled_out=(
            f"network: transfer {transfer_ms:.1f} of {waits_ms:.0f} ms that the others wait",
            f"rotating lateness: the same rank is last in {last_in:.0%} of the steps",
        ),
        hints=(
            Hint(
                change=(
                    f"find what slows {phase} on {ranks_text(ranks)} ({', '.join(nodes)}): "
                    f"predicted step {step_ms:.0f} -> "
                    f"{step_ms - lag_ms:.0f}..{step_ms - lag_ms / 2:.0f} ms"
                ),
                knob=phase,
                predicted_ms=(step_ms - lag_ms, step_ms - lag_ms / 2),
            ),
        ),
    )


def comm_bound(picture: RunPicture) -> Outcome:
    """All ranks wait alike for the network; or, as a note, they wait for a cause named elsewhere.

    cost = mean transfer.
    """
    aligned = _distributed(picture, "comm_bound")
    if not isinstance(aligned, Aligned):
        return aligned
    step_ms = aligned.mean_step_ms
    transfer_ms = aligned.mean_transfer_ms
    exposed_ms = mean_ms(aligned.mean_comm_ms)
    peer_wait_ms = exposed_ms - transfer_ms
    held = mean_ms([ns / 1e6 >= SHARE_WARNING * step_ms for ns in aligned.transfer_ns])
    floor_ms = max(FLOOR_MS, SHARE_WARNING * step_ms)
    if transfer_ms >= floor_ms and held >= HELD_IN:
        found = _comm_finding(aligned, transfer_ms, peer_wait_ms, held)
        if transfer_ms < WAKING_MS and _is_small(aligned):
            found = replace(
                found,
                severity="note",
                confidence="low",
                ruled_out=(
                    *found.ruled_out,
                    "contention: not ruled out, little data between processes on CPUs waits to be "
                    "woken up",
                ),
            )
        # Bytes that have to be moved explain themselves better than small ones that wait.
        small = not _moves_bulk(aligned) and (found.share or 0.0) < MOSTLY
        return _doubted(picture, found, waiting=small, by_others=not small)
    if peer_wait_ms >= floor_ms:
        for rule in (straggler, loader_few_workers):
            cause = rule(picture)
            if isinstance(cause, Finding):
                return _follows(aligned, cause, transfer_ms, exposed_ms)
    return None


def _overlap_hints(aligned: Aligned, ddp: Ddp | None, transfer_ms: float) -> list[Hint]:
    """Return what hides communication behind the backward, where nothing does that today.

    At most the backward's own time can be hidden, and of it what comes before the last gradients.
    """
    step_ms = aligned.mean_step_ms
    backward_ms = mean_ms(aligned.mean_phase_ms("backward"))
    known = {way for r in aligned.ranks if r.hello is not None for way in r.hello.parallel}
    if ddp is None:
        hidden_ms = min(transfer_ms, backward_ms)
        if known or hidden_ms < FLOOR_MS:
            return []  # another way of parallel training that has its own overlap
        change = (
            "reduce the gradients during the backward instead of after it: "
            "DistributedDataParallel(model) does it bucket by bucket"
        )
        hint = Hint(change, "overlap")
    else:
        megabytes = (ddp.gradient_bytes or 0) / 2**20
        if len(ddp.bucket_bytes) != 1 or megabytes * 2**20 < BULK_BYTES:
            return []
        # One bucket is complete with the last gradient: nothing is left to hide it behind.
        hidden_ms = min(transfer_ms, backward_ms) * (1 - 1 / BUCKETS)
        new = max(1, round(megabytes / BUCKETS))
        old = None if ddp.bucket_cap_mb is None else round(ddp.bucket_cap_mb)
        change = f"bucket_cap_mb {old or 'as it is'} -> {new}: {BUCKETS} buckets instead of one"
        hint = Hint(change, "bucket_cap_mb", old, new)
    low_ms, high_ms = step_ms - hidden_ms, step_ms - hidden_ms / 4
    return [
        replace(
            hint,
            change=f"{change}: predicted step {step_ms:.0f} -> {low_ms:.0f}..{high_ms:.0f} ms",
            predicted_ms=(low_ms, high_ms),
        )
    ]


def _comm_finding(
    aligned: Aligned, transfer_ms: float, peer_wait_ms: float, held: float
) -> Finding:
    step_ms = aligned.mean_step_ms
    share = transfer_ms / step_ms
    ddp = next((r.hello.ddp for r in aligned.ranks if r.hello is not None and r.hello.ddp), None)
    evidence = [
        Evidence(
            "transfer",
            round(transfer_ms, 2),
            "ms",
            f"{step_ms:.1f} ms step; {SHARE_WARNING:.0%} is where it counts",
            "minimum over ranks of exposed communication, mean of window",
        ),
        Evidence(
            "peer_wait",
            round(peer_wait_ms, 2),
            "ms",
            "transfer",
            "mean exposed communication - transfer",
        ),
    ]
    hints = []
    if ddp is not None and ddp.gradient_bytes:
        rate = ddp.gradient_bytes / 2**20 / (transfer_ms / 1e3)
        evidence.append(
            Evidence(
                "gradient_bytes",
                round(ddp.gradient_bytes / 2**10, 1),
                "KiB",
                f"at least {rate:.1f} MiB/s of gradients in the exposed time",
                f"DDP over {ddp.backend or 'an unnamed backend'}",
            )
        )
    # Between CPUs of one machine nothing is slow but the CPU, and converting takes that too.
    loopback = len({r.node for r in aligned.ranks}) == 1 and all(
        r.hello is not None and r.hello.device == "cpu" for r in aligned.ranks
    )
    bulk = ddp is not None and (ddp.gradient_bytes or 0) >= BULK_BYTES
    if ddp is not None and bulk and not ddp.comm_hook and not loopback:
        hook = "bf16_compress_hook" if "nccl" in ddp.backend else "fp16_compress_hook"
        low_ms = step_ms - transfer_ms * (1 - COMPRESSED[0])
        high_ms = step_ms - transfer_ms * (1 - COMPRESSED[1])
        hints.append(
            Hint(
                change=(
                    f"comm hook none -> {hook}: predicted step {step_ms:.0f} -> "
                    f"{low_ms:.0f}..{high_ms:.0f} ms"
                ),
                knob="comm_hook",
                old="none",
                new=hook,
                predicted_ms=(low_ms, high_ms),
            )
        )
    hints += _overlap_hints(aligned, ddp, transfer_ms)
    batches = round(mean_ms([aligned.batches(row) for row in range(len(aligned.ranks))]))
    more = 2 * batches
    # As many samples as a step has today: half of a step that reduces once for twice as many.
    low_ms = step_ms - transfer_ms * (1 - batches / more)
    high_ms = low_ms + SPREAD * (step_ms - low_ms)
    hints.append(
        Hint(
            change=(
                f"gradient accumulation {batches} -> {more} with no_sync: predicted time of as "
                f"many samples {step_ms:.0f} -> {low_ms:.0f}..{high_ms:.0f} ms; the batch grows "
                "with it"
            ),
            knob="gradient_accumulation",
            old=batches,
            new=more,
            predicted_ms=(low_ms, high_ms),
        )
    )
    alike = peer_wait_ms < transfer_ms
    return Finding(
        kind="comm_bound",
        severity=(
            "critical" if share >= SHARE_CRITICAL and aligned.count >= CRITICAL_STEPS else "warning"
        ),
        ranks=tuple(r.rank for r in aligned.ranks),
        nodes=tuple(sorted({r.node for r in aligned.ranks})),
        cost_ms=transfer_ms,
        share=share,
        confidence="high" if held >= HELD_HIGH and alike else "medium",
        summary=(
            f"communication that compute does not hide takes {transfer_ms:.0f} of "
            f"{step_ms:.0f} ms a step on every rank"
        ),
        evidence=tuple(evidence),
        ruled_out=(
            (
                f"straggler: waiting for peers is {peer_wait_ms:.1f} ms "
                f"beside {transfer_ms:.1f} ms of transfer",
            )
            if alike
            else ()
        ),
        hints=tuple(hints),
    )


def _follows(aligned: Aligned, cause: Finding, transfer_ms: float, exposed_ms: float) -> Finding:
    causing = frozenset(cause.ranks)
    waiting = tuple(r.rank for r in aligned.ranks if r.rank not in causing)
    ranks = waiting or tuple(r.rank for r in aligned.ranks)
    named = frozenset(ranks)
    whom = (
        f"waiting for {ranks_text(cause.ranks)}"
        if waiting
        else "the ranks waiting for each other's batches"
    )
    return replace(
        cause,
        kind="comm_bound",
        severity="note",
        ranks=ranks,
        nodes=tuple(sorted({r.node for r in aligned.ranks if r.rank in named})),
        cost_ms=None,
        share=None,
        summary=(
            f"communication time is {whom}, not bandwidth: "
            f"{exposed_ms:.0f} ms exposed, {transfer_ms:.1f} ms of it transfer"
        ),
        evidence=(
            Evidence(
                "transfer",
                round(transfer_ms, 2),
                "ms",
                f"{exposed_ms:.1f} ms exposed, mean over ranks",
                "minimum over ranks of exposed communication",
            ),
        ),
        ruled_out=(f"bandwidth: transfer {transfer_ms:.1f} of {exposed_ms:.1f} ms",),
        hints=(),
        follows=cause.kind,
    )
