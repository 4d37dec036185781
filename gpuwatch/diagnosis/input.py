"""Input: the step waits for data.

The loader model is operational analysis (Plumber, MLSys 2022): a step cannot be shorter than
batch cost / w with w workers, nor than the step without its data wait, nor than the CPU work of
the node over the cores it may use. Workers time their own batches. Where they do not, a batch
costs w x the interval between batches, which holds while none of them is ever idle: while the
queue is empty.
"""

import math
import statistics
from dataclasses import dataclass

from gpuwatch.diagnosis.aligned import (
    MIN_STEPS,
    Aligned,
    align,
    mad_ms,
    mean_ms,
    ranks_text,
    too_few,
)
from gpuwatch.diagnosis.types import Abstain, Evidence, Finding, Hint, Outcome, RunPicture
from gpuwatch.schema import Loader, ProcessSample, Reading
from gpuwatch.store.views import NodeView, RankView

__all__ = ["loader_few_workers", "starved_ranks"]

SHARE_WARNING = 0.10
SHARE_CRITICAL = 0.20
"""Of the step, as TraceML draws the lines; critical also needs 20 steps."""

CRITICAL_STEPS = 20

FLOOR_MS = 2.0
"""Below this a wait is the loader's own bookkeeping: 1 ms median, 2 ms at the 90th percentile on
a loader that keeps up."""

HELD_IN = 0.5
HELD_HIGH = 0.9
"""Share of the window's steps in which the wait must hold: to be said, and for confidence high."""

EMPTY_QUEUE = 0.5
"""Mean batches ready. Measured: 0.0-0.3 where workers are the limit, 1.7 of 2 where not."""

SCATTER = 2.0
"""The cost must exceed this many MADs of the step without its wait."""

CPU_BOUND = 0.8
LATENCY_BOUND = 0.5
"""CPU share of a busy worker: above, more workers need cores; below, they mostly wait."""

IOWAIT_PERCENT = 20.0
BLOCKED_SHARE = 0.3
"""Of the workers in state D, or of time in iowait: the storage cannot be ruled out."""

MAIN_BUSY_PERCENT = 90.0
"""CPU of the rank's own process: above, collating or receiving may be the limit."""

BUSY = 0.7
"""Share of the time that workers must spend on batches to be the limit. Measured with an empty
queue: 0.96-1.00 (`benchmarks/bench_workers.py`); the rest is taking orders and handing over."""

CROWDED = 0.9
"""Of the cores busy: time that is not CPU may be waiting for a core."""

COLLATE_SHARE = 0.5
"""Of a batch's time in a worker: above, collating is what the workers do."""

MARGIN = 1.2
"""Spare workers: items of uneven cost need some."""

FAIR_SHARE = 0.5
"""Of the cores that a busy machine is assumed to grant: the scheduler takes from others too."""

MOST_WORKERS = 64
WORKERS_CLOCK = "the workers' own timing"

SPREAD = 0.15
"""Width of a prediction. The model was within 13 % in 27 of 27 cells of a sweep."""


@dataclass(frozen=True, slots=True)
class _Model:
    """What the loader model knows of one rank; times in ms, CPU in cores."""

    rank: RankView
    loader: Loader | None
    wait_ms: float
    held: float
    batches: float
    batch_ms: float | None
    batch_cpu_ms: float | None
    collate_ms: float | None
    busy: float | None
    """Share of its time that a worker spends on batches, by its own clock; None if not timed."""
    worker_cpu: float | None
    blocked: float | None
    main_cpu_percent: float | None
    depth: float | None

    @property
    def workers(self) -> int | None:
        return None if self.loader is None else self.loader.num_workers


def _value(reading: Reading | None) -> float | None:
    if reading is None or reading.state not in {"ok", "stale"}:
        return None
    return reading.value


def _workers_of(rank: RankView, loader: Loader | None) -> tuple[ProcessSample, ...]:
    pids = set(loader.worker_pids) if loader is not None else set()
    named = tuple(w for w in rank.workers if w.pid in pids)
    return named or rank.workers


def _model(aligned: Aligned, row: int) -> _Model:
    rank = aligned.ranks[row]
    waits_ms = aligned.data_wait_ms[row]
    steps_ms = aligned.step_ms[row]
    key = aligned.records[row][-1].loader
    loaders = rank.hello.loaders if rank.hello is not None else ()
    loader = next((x for x in loaders if x.key == key), None)
    wait_ms = mean_ms(waits_ms)
    step_ms = mean_ms(steps_ms)
    batches = mean_ms([r.batches for r in aligned.records[row]])
    held = mean_ms([w >= SHARE_WARNING * s for w, s in zip(waits_ms, steps_ms, strict=True)])
    processes = _workers_of(rank, loader)
    shares = [
        v / 100 for p in processes if (v := _value(p.readings.get("cpu_percent"))) is not None
    ]
    worker_cpu = statistics.fmean(shares) if shares else None
    batch_ms = batch_cpu_ms = collate_ms = busy = None
    if loader is not None and loader.num_workers == 0:
        batch_ms = wait_ms / batches
    elif loader is not None and rank.batch_wall_ms:
        batch_ms = rank.batch_wall_ms
        batch_cpu_ms = rank.batch_cpu_ms
        collate_ms = rank.collate_ms
        busy = batch_ms * batches / (loader.num_workers * step_ms)
        if batch_cpu_ms is not None:
            worker_cpu = batch_cpu_ms / batch_ms
    elif loader is not None:
        batch_ms = loader.num_workers * step_ms / batches
        if shares:
            batch_cpu_ms = sum(shares) * step_ms / batches
    return _Model(
        rank=rank,
        loader=loader,
        wait_ms=wait_ms,
        held=held,
        batches=batches,
        batch_ms=batch_ms,
        batch_cpu_ms=batch_cpu_ms,
        collate_ms=collate_ms,
        busy=busy,
        worker_cpu=worker_cpu,
        blocked=(sum(p.status == "D" for p in processes) / len(processes) if processes else None),
        main_cpu_percent=(
            _value(rank.process.readings.get("cpu_percent")) if rank.process is not None else None
        ),
        depth=rank.queue_depth,
    )


def _waits(model: _Model, step_ms: float) -> bool:
    """Whether the rank waits for an empty queue, whoever leaves it empty."""
    if model.wait_ms < max(FLOOR_MS, SHARE_WARNING * step_ms) or model.held < HELD_IN:
        return False
    if not model.workers:
        return True
    return model.depth is None or model.depth < EMPTY_QUEUE


def _is_starved(model: _Model, step_ms: float) -> bool:
    return _waits(model, step_ms) and (model.busy is None or model.busy >= BUSY)


def _models(picture: RunPicture, aligned: Aligned) -> list[_Model]:
    return picture.once(
        "loader_models", lambda: [_model(aligned, row) for row in range(len(aligned.ranks))]
    )


def starved_ranks(picture: RunPicture, aligned: Aligned) -> tuple[int, ...]:
    """Return the ranks that wait for an empty loader queue in most of their steps."""
    step_ms = aligned.mean_step_ms
    return tuple(m.rank.rank for m in _models(picture, aligned) if _is_starved(m, step_ms))


@dataclass(frozen=True, slots=True)
class _Cores:
    """CPU of the nodes that hold the starved ranks: the tightest of them."""

    cores: int
    busy: float
    ours: float
    floor_ms: float
    """The step cannot be shorter: CPU work of a step over the cores that others leave."""


def _cores(picture: RunPicture, ranks: list[RankView], step_ms: float) -> _Cores | None:
    tightest: _Cores | None = None
    for name in sorted({r.node for r in ranks}):
        found = _node_cores(picture.node(name), [r for r in ranks if r.node == name], step_ms)
        if found is not None and (tightest is None or found.floor_ms > tightest.floor_ms):
            tightest = found
    return tightest


def _node_cores(node: NodeView | None, ranks: list[RankView], step_ms: float) -> _Cores | None:
    if node is None or node.host is None:
        return None
    total = _value(node.host.readings.get("cpu_percent"))
    if total is None or not node.host.cores:
        return None
    allowed = [r.hello.cores for r in ranks if r.hello is not None and r.hello.cores]
    cores = min([node.host.cores, *allowed])
    shares = [
        _value(process.readings.get("cpu_percent"))
        for rank in ranks
        for process in (rank.process, *rank.workers)
        if process is not None
    ]
    if any(share is None for share in shares) or not shares:
        return None
    ours = sum(share or 0.0 for share in shares) / 100
    busy = total / 100 * node.host.cores
    free = max(FAIR_SHARE * cores, cores - max(0.0, busy - ours))
    return _Cores(cores, busy, ours, ours * step_ms / free)


def loader_few_workers(picture: RunPicture) -> Outcome:
    """The workers are always busy and the queue is empty: more of them would shorten the step.

    cost = step - max(step with zero data wait, CPU work / cores), where the step with zero data
    wait is, step by step, the slowest rank's own time without its wait, plus the transfer.
    """
    return picture.once("loader_few_workers", lambda: _loader_few_workers(picture))


def _loader_few_workers(picture: RunPicture) -> Outcome:
    aligned = align(picture)
    if aligned is None or aligned.count < MIN_STEPS:
        return too_few("loader_few_workers", aligned)
    first = aligned.ranks[0]
    if first.hello is not None and first.hello.device != "cpu" and first.clock == "host":
        return Abstain("loader_few_workers", "device timings: on a GPU the host clock runs ahead")
    if all(r.phases_ms.get("data_wait") is None for r in aligned.ranks):
        return Abstain("loader_few_workers", "a DataLoader: no batch fetch was seen")
    step_ms = aligned.mean_step_ms
    models = _models(picture, aligned)
    starved = [m for m in models if _is_starved(m, step_ms)]
    if not starved:
        idle = [m.busy for m in models if m.busy is not None and _waits(m, step_ms)]
        if idle:
            return Abstain(
                "loader_few_workers",
                f"what is between the workers and the step: they make batches {max(idle):.0%} of "
                f"the time, so more of them would not help, yet none is ready",
            )
        return None
    if any(m.batch_ms is None for m in starved):
        return Abstain("loader_few_workers", "the loader's arguments: no hello names them")
    without_wait = [
        max(own - wait for own, wait in zip(owns, waits, strict=True)) + transfer
        for owns, waits, transfer in zip(
            zip(*aligned.own_ms, strict=True),
            zip(*aligned.data_wait_ms, strict=True),
            aligned.transfer_ms,
            strict=True,
        )
    ]
    cores = _cores(picture, list(aligned.ranks), step_ms)
    limit_ms = max(mean_ms(without_wait), cores.floor_ms if cores is not None else 0.0)
    cost_ms = step_ms - limit_ms
    floor_ms = max(FLOOR_MS, SHARE_WARNING / 2 * step_ms, SCATTER * mad_ms(without_wait))
    if cost_ms < floor_ms:
        return None
    return _finding(aligned, starved, models, cores, step_ms, limit_ms, without_wait, picture)


def _finding(
    aligned: Aligned,
    starved: list[_Model],
    models: list[_Model],
    cores: _Cores | None,
    step_ms: float,
    limit_ms: float,
    without_wait: list[float],
    picture: RunPicture,
) -> Finding:
    cost_ms = step_ms - limit_ms
    share = cost_ms / step_ms
    ranks = tuple(sorted(m.rank.rank for m in starved))
    worst = max(starved, key=lambda m: m.wait_ms)
    ruled_out, open_questions = _look_alikes(aligned, starved, cores, picture)
    held = min(m.held for m in starved)
    if open_questions:
        confidence = "low"
    elif held >= HELD_HIGH and cores is not None:
        confidence = "high"
    else:
        confidence = "medium"
    critical = share >= SHARE_CRITICAL and aligned.count >= CRITICAL_STEPS
    others = [m for m in models if m.rank.rank not in ranks]
    return Finding(
        kind="loader_few_workers",
        severity="critical" if critical else "warning",
        ranks=ranks,
        nodes=tuple(sorted({m.rank.node for m in starved})),
        cost_ms=cost_ms,
        share=share,
        confidence=confidence,
        summary=(
            f"the loader starves {ranks_text(ranks)}: "
            f"{worst.wait_ms:.0f} of {step_ms:.0f} ms of a step wait for data"
        ),
        evidence=_evidence(aligned, worst, others, step_ms),
        ruled_out=tuple(ruled_out + open_questions),
        hints=_hints(starved, cores, step_ms, limit_ms, without_wait),
    )


def _evidence(
    aligned: Aligned, worst: _Model, others: list[_Model], step_ms: float
) -> tuple[Evidence, ...]:
    elsewhere = (
        f"{mean_ms([m.wait_ms for m in others]):.1f} ms "
        f"on {ranks_text([m.rank.rank for m in others])}"
        if others
        else f"{step_ms:.1f} ms step; {SHARE_WARNING:.0%} is where it counts"
    )
    found = [
        Evidence(
            "data_wait", round(worst.wait_ms, 2), "ms", elsewhere, "host clock, mean of window"
        ),
        Evidence(
            "steps_that_wait",
            round(worst.held * aligned.count),
            "steps",
            f"of {aligned.count} in the window",
            f"wait over {SHARE_WARNING:.0%} of the step",
        ),
    ]
    if worst.workers:
        if worst.depth is not None:
            found.append(
                Evidence(
                    "queue_depth",
                    round(worst.depth, 2),
                    "batches",
                    f"of {worst.rank.queue_capacity} when the step begins to wait",
                    "DataLoader queue",
                )
            )
        found += _batch_evidence(worst, worst.workers)
    elif worst.batch_ms is not None:
        found.append(
            Evidence(
                "batch_cost",
                round(worst.batch_ms, 1),
                "ms",
                "spent in the training process itself",
                "data wait with num_workers=0",
            )
        )
    return tuple(found)


def _batch_evidence(model: _Model, workers: int) -> list[Evidence]:
    """What a batch costs, by the best clock there is."""
    cpu = (
        f"{model.batch_cpu_ms:.0f} ms of it CPU"
        if model.batch_cpu_ms is not None
        else "its CPU share is not known"
    )
    cost_ms = round(model.batch_ms or 0.0, 1)
    if model.busy is None:
        source = "workers x interval of batches while the queue is empty"
        return [Evidence("batch_cost", cost_ms, "ms", cpu, source)]
    if model.collate_ms is not None:
        cpu += f", {model.collate_ms:.0f} ms collating"
    return [
        Evidence("batch_cost", cost_ms, "ms", cpu, WORKERS_CLOCK),
        Evidence(
            "workers_busy",
            round(100 * min(1.0, model.busy)),
            "%",
            f"of the time of {workers} workers; idle below {BUSY:.0%}",
            WORKERS_CLOCK,
        ),
    ]


def _look_alikes(
    aligned: Aligned, starved: list[_Model], cores: _Cores | None, picture: RunPicture
) -> tuple[list[str], list[str]]:
    """Return (what a number excluded, what no number could exclude)."""
    out: list[str] = []
    unsure: list[str] = []
    node = picture.node(starved[0].rank.node)
    iowait = _value(node.host.readings.get("cpu_iowait_percent")) if node and node.host else None
    blocked = [m.blocked for m in starved if m.blocked is not None]
    in_process = not starved[0].workers
    if iowait is None or (not blocked and not in_process):
        unsure.append("storage: not ruled out, worker states or iowait are not known")
    elif iowait > IOWAIT_PERCENT or any(b > BLOCKED_SHARE for b in blocked):
        unsure.append(
            f"storage: not ruled out, iowait {iowait:.0f} %, "
            f"{max(blocked, default=0.0):.0%} of the workers blocked on disk"
        )
    else:
        out.append(f"storage: iowait {iowait:.0f} %, no worker blocked on disk")
    shares = [m.worker_cpu for m in starved if m.worker_cpu is not None]
    if shares:
        share = max(shares)
        timed = any(m.busy is not None for m in starved)
        used = f"{share:.0%} of a batch's time in a worker is CPU"
        if not timed:
            used = f"a worker uses {share:.0%} of a core"
        if share < LATENCY_BOUND and cores is not None and cores.busy > CROWDED * cores.cores:
            unsure.append(
                f"decode and augmentation: not ruled out, {used}, but {cores.busy:.1f} of "
                f"{cores.cores} cores are busy"
            )
        elif share < LATENCY_BOUND:
            out.append(f"decode and augmentation: {used}")
        elif cores is not None:
            free = cores.cores - cores.busy
            out.append(
                f"oversubscription: {used}, {max(0.0, free):.1f} of {cores.cores} cores are free"
            )
        else:
            unsure.append("oversubscription: not ruled out, busy cores are not known")
    elif not in_process:
        unsure.append("decode and augmentation: not ruled out, worker CPU is not known")
    for model in starved:
        if model.collate_ms is None or not model.batch_ms:
            continue
        collating = f"{model.collate_ms:.1f} of {model.batch_ms:.1f} ms of a batch"
        if model.collate_ms >= COLLATE_SHARE * model.batch_ms:
            unsure.append(f"collating: not ruled out, {collating}")
        else:
            out.append(f"collating: {collating}")
        break
    mains = [m.main_cpu_percent for m in starved if m.main_cpu_percent is not None]
    if mains and not in_process:
        if max(mains) < MAIN_BUSY_PERCENT:
            out.append(f"collate and transfer: the training process uses {max(mains):.0f} % CPU")
        else:
            unsure.append(
                f"collate and transfer: not ruled out, the training process is at "
                f"{max(mains):.0f} % CPU"
            )
    if len(aligned.ranks) > 1 and aligned.comm_known:
        out.append(
            f"communication: transfer {mean_ms(aligned.transfer_ms):.1f} of "
            f"{aligned.mean_step_ms:.0f} ms"
        )
    return out, unsure


def _hints(
    starved: list[_Model],
    cores: _Cores | None,
    step_ms: float,
    limit_ms: float,
    without_wait: list[float],
) -> tuple[Hint, ...]:
    dearest = max(starved, key=lambda m: (m.batch_ms or 0.0) * m.batches)
    now = dearest.workers or 0
    work_ms = (dearest.batch_ms or 0.0) * dearest.batches
    wanted = min(MOST_WORKERS, math.ceil(MARGIN * work_ms / max(limit_ms, 1e-3)))
    if wanted <= now:
        return ()
    low_ms = max(limit_ms, work_ms / wanted)
    high_ms = low_ms * (1 + SPREAD) + mad_ms(without_wait)
    if high_ms >= step_ms:
        high_ms = (low_ms + step_ms) / 2
    where = (
        f"{cores.cores} cores, {cores.busy:.1f} busy"
        if cores is not None
        else "free cores are not known"
    )
    return (
        Hint(
            change=(
                f"num_workers {now} -> {wanted} on {ranks_text([m.rank.rank for m in starved])}: "
                f"predicted step {step_ms:.0f} -> {low_ms:.0f}..{high_ms:.0f} ms; {where}"
            ),
            knob="num_workers",
            old=now,
            new=wanted,
            predicted_ms=(low_ms, high_ms),
        ),
    )
