"""Input: the step waits for data.

The loader model is operational analysis (Plumber, MLSys 2022): a step cannot be shorter than
batch cost / w with w workers, nor than the step without its data wait, nor than the CPU work of
the node over the cores it may use. Workers time their own batches. Where they do not, a batch
costs w x the interval between batches, which holds while none of them is ever idle: while the
queue is empty.
"""

import math
import statistics
from dataclasses import dataclass, replace

from gpuwatch.diagnosis.aligned import (
    MIN_STEPS,
    Aligned,
    align,
    clock_missing,
    counted,
    mad_ms,
    mean_ms,
    ranks_text,
    too_few,
)
from gpuwatch.diagnosis.machine import by_node, host_mean, reading, use_of, value
from gpuwatch.diagnosis.types import Abstain, Evidence, Finding, Hint, Outcome, RunPicture
from gpuwatch.schema import Loader, ProcessSample
from gpuwatch.store.batches import WorkerBatch
from gpuwatch.store.views import RankView

__all__ = ["Model", "Starvation", "loader_few_workers", "starvation", "starved_ranks"]

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

SATURATED = 0.85
"""... and from here on they are the limit whatever the queue looks like: workers that started
together finish together, so that one step waits for all of them and the next for none."""

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
class Model:
    """What the loader model knows of one rank; times in ms, CPU in cores."""

    rank: RankView
    loader: Loader | None
    wait_ms: float
    held: float
    """Share of the steps in which the wait is at least 10 % of the step; 0 where it is short."""
    batches: float
    batch_ms: float | None
    batch_cpu_ms: float | None
    collate_ms: float | None
    busy: float | None
    """Share of its time that a worker spends on batches, by its own clock; None if not timed."""
    worker_cpu: float | None
    blocked: float | None
    runnable: float | None
    """Share of their time in which workers had a core, or waited for one."""
    main_cpu_percent: float | None
    depth: float | None
    slowest: WorkerBatch | None
    """The worker whose batches take longest; None where fewer than two of them are timed."""
    others_ms: float | None
    """A batch in the other workers: their median."""

    @property
    def slowest_busy(self) -> float:
        """Share of its time that the slowest worker spends on batches; 0 where it is not known.

        Batches come in order, one from each worker in turn: the slowest sets the pace.
        """
        step_ms = self.rank.step_ms
        if self.slowest is None or not self.workers or not step_ms:
            return 0.0
        return self.slowest.wall_ms * self.batches / (self.workers * step_ms)

    @property
    def workers(self) -> int | None:
        """As configured; None where the loader's arguments are not known."""
        return None if self.loader is None else self.loader.num_workers


def _workers_of(rank: RankView, loader: Loader | None) -> tuple[ProcessSample, ...]:
    pids = set(loader.worker_pids) if loader is not None else set()
    named = tuple(w for w in rank.workers if w.pid in pids)
    return named or rank.workers


def _model(aligned: Aligned, row: int) -> Model:
    rank = aligned.ranks[row]
    loader = aligned.loader(row)
    wait_ms = aligned.mean_wait_ms[row]
    step_ms = aligned.step_ms(row)
    batches = aligned.batches(row)
    runnable: float | None = None
    if rank.worker_means:
        means = rank.worker_means
        found = [one.mean("cpu_percent") for one in means]
        blocked: float | None = sum([one.blocked for one in means]) / len(means)
        runnable = sum([one.runnable for one in means]) / len(means)
    else:
        processes = _workers_of(rank, loader)
        found = [value(process.readings.get("cpu_percent")) for process in processes]
        stuck = [process.status == "D" for process in processes]
        blocked = sum(stuck) / len(stuck) if stuck else None
    shares = [percent / 100 for percent in found if percent is not None]
    worker_cpu = sum(shares) / len(shares) if shares else None
    batch_ms = batch_cpu_ms = collate_ms = busy = None
    if loader is not None and loader.num_workers == 0:
        # Fetching is making the batch then, behind a busy device or not.
        batch_ms = aligned.host_wait_ms(row) / batches
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
    slowest = others_ms = None
    if len(rank.worker_batches) > 1:
        slowest = max(rank.worker_batches, key=lambda w: w.wall_ms)
        others_ms = statistics.median(w.wall_ms for w in rank.worker_batches if w is not slowest)
    return Model(
        rank=rank,
        loader=loader,
        wait_ms=wait_ms,
        held=aligned.wait_held(row, SHARE_WARNING) if wait_ms >= FLOOR_MS else 0.0,
        batches=batches,
        batch_ms=batch_ms,
        batch_cpu_ms=batch_cpu_ms,
        collate_ms=collate_ms,
        busy=busy,
        worker_cpu=worker_cpu,
        blocked=blocked,
        runnable=runnable,
        main_cpu_percent=reading(rank, "cpu_percent"),
        depth=rank.queue_depth,
        slowest=slowest,
        others_ms=others_ms,
    )


def _least_wait_ms(step_ms: float) -> float:
    """Return what a rank must wait at least, on average, to be called waiting."""
    return max(FLOOR_MS, SHARE_WARNING * step_ms)


def waits_for_batches(model: Model, step_ms: float) -> bool:
    """Whether the rank waits for an empty queue, whoever leaves it empty."""
    if model.wait_ms < _least_wait_ms(step_ms):
        return False
    busy = max(model.busy or 0.0, model.slowest_busy)
    if model.workers and busy >= SATURATED:
        return True  # the loader's rate is the step's, however the waits fall
    if model.held < HELD_IN:
        return False
    if not model.workers:
        return True
    return model.depth is None or model.depth < EMPTY_QUEUE


def models_of(picture: RunPicture, aligned: Aligned) -> list[Model]:
    return picture.once(
        "loader_models", lambda: [_model(aligned, row) for row in range(len(aligned.ranks))]
    )


def starved_ranks(picture: RunPicture, aligned: Aligned) -> tuple[int, ...]:
    """Return the ranks that wait for their loader."""
    seen = picture.once("starvation", lambda: _starvation(picture, aligned))
    if seen is None:
        return ()
    return tuple(m.rank.rank for m in seen.starved if m.busy is None or m.busy >= BUSY)


@dataclass(frozen=True, slots=True)
class Cores:
    """CPU of the nodes that hold the starved ranks: the tightest of them."""

    cores: int
    busy: float
    ours: float
    floor_ms: float
    """The step cannot be shorter: CPU work of a step over the cores that others leave."""

    @property
    def free(self) -> float:
        """Share of the cores that others leave."""
        others = max(0.0, self.busy - self.ours)
        return max(FAIR_SHARE, 1.0 - others / self.cores)


def cores_of_ranks(picture: RunPicture, aligned: Aligned) -> Cores | None:
    """Return the tightest of the nodes that the run is on, None where none is known."""
    return picture.once("cores", lambda: _tightest(picture, aligned))


def _tightest(picture: RunPicture, aligned: Aligned) -> Cores | None:
    tightest: Cores | None = None
    for name, ranks in by_node(aligned.ranks).items():
        found = _node_cores(picture, name, ranks, aligned.mean_step_ms)
        if found is not None and (tightest is None or found.floor_ms > tightest.floor_ms):
            tightest = found
    return tightest


def _node_cores(
    picture: RunPicture, name: str, ranks: list[RankView], step_ms: float
) -> Cores | None:
    use = use_of(picture, name, ranks)
    if use is None:
        return None
    cores = Cores(use.cores, use.busy, use.ours, 0.0)
    return replace(cores, floor_ms=use.ours * step_ms / (cores.free * use.cores))


@dataclass(frozen=True, slots=True)
class Starvation:
    """Ranks that wait for data, and what is known about why; times in ms a step."""

    aligned: Aligned
    starved: list[Model]
    models: list[Model]
    cores: Cores | None

    @property
    def step_ms(self) -> float:
        """Mean step over all ranks and steps."""
        return self.aligned.mean_step_ms

    @property
    def without_wait(self) -> list[float]:
        """The step if nobody waited for data, [step]."""
        return self.aligned.without_wait_ms

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that wait, sorted."""
        return tuple(sorted(m.rank.rank for m in self.starved))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Their nodes, sorted."""
        return tuple(sorted({m.rank.node for m in self.starved}))

    @property
    def worst(self) -> Model:
        """The rank that waits longest."""
        return max(self.starved, key=lambda m: m.wait_ms)

    def severity(self, share: float) -> str:
        """Return how severe a cost of this share of the step is."""
        critical = share >= SHARE_CRITICAL and self.aligned.count >= CRITICAL_STEPS
        return "critical" if critical else "warning"

    @property
    def floor_ms(self) -> float:
        """A cost below it may be scatter."""
        return max(FLOOR_MS, SHARE_WARNING / 2 * self.step_ms, SCATTER * mad_ms(self.without_wait))


def starvation(picture: RunPicture, kind: str) -> Starvation | Abstain | None:
    """Return the ranks that wait for data, whatever the cause; or why that cannot be said."""
    aligned = align(picture)
    if aligned is None or aligned.count < MIN_STEPS:
        return too_few(kind, aligned)
    missing = clock_missing(kind, aligned)
    if missing is not None:
        return missing
    if all(r.phases_ms.get("data_wait") is None for r in aligned.ranks):
        return Abstain(kind, "a DataLoader: no batch fetch was seen")
    return picture.once("starvation", lambda: _starvation(picture, aligned))


def _starvation(picture: RunPicture, aligned: Aligned) -> Starvation | None:
    step_ms = aligned.mean_step_ms
    if max(aligned.mean_wait_ms) < _least_wait_ms(step_ms):
        return None
    models = models_of(picture, aligned)
    starved: list[Model] = []
    others: list[Model] = []
    for model in models:
        (starved if waits_for_batches(model, step_ms) else others).append(model)
    if not starved:
        return None
    # A rank whose loader is as slow may do its waiting in a collective, for the others.
    starved += [
        m for m in others if m.workers and (m.busy or 0.0) >= SATURATED and m.wait_ms >= FLOOR_MS
    ]
    cores = cores_of_ranks(picture, aligned)
    return Starvation(aligned, starved, models, cores)


def loader_few_workers(picture: RunPicture) -> Outcome:
    """The workers are always busy and the queue is empty: more of them would shorten the step.

    cost = step - max(step with zero data wait, CPU work / cores), where the step with zero data
    wait is, step by step, the slowest rank's own time without its wait, plus the transfer.
    """
    return picture.once("loader_few_workers", lambda: _loader_few_workers(picture))


def _loader_few_workers(picture: RunPicture) -> Outcome:
    from gpuwatch.diagnosis.loading import other_cause

    seen = starvation(picture, "loader_few_workers")
    if not isinstance(seen, Starvation):
        return seen
    step_ms = seen.step_ms
    starved = [m for m in seen.starved if m.busy is None or m.busy >= BUSY]
    if other_cause(picture, seen):
        return None
    if not starved:
        idle = [m.busy for m in seen.starved if m.busy is not None]
        return Abstain(
            "loader_few_workers",
            f"what is between the workers and the step: they make batches {max(idle):.0%} of "
            f"the time, so more of them would not help, yet none is ready",
        )
    if any(m.batch_ms is None for m in starved):
        return Abstain("loader_few_workers", "the loader's arguments: no hello names them")
    seen = replace(seen, starved=starved)
    limit_ms = max(
        mean_ms(seen.without_wait), seen.cores.floor_ms if seen.cores is not None else 0.0
    )
    if step_ms - limit_ms < seen.floor_ms:
        return None
    return _finding(
        seen.aligned,
        starved,
        seen.models,
        seen.cores,
        step_ms,
        limit_ms,
        picture,
    )


def _finding(
    aligned: Aligned,
    starved: list[Model],
    models: list[Model],
    cores: Cores | None,
    step_ms: float,
    limit_ms: float,
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
    named = frozenset(ranks)
    others = [m for m in models if m.rank.rank not in named]
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
        hints=_hints(starved, cores, step_ms, limit_ms, picture),
    )


def _evidence(
    aligned: Aligned, worst: Model, others: list[Model], step_ms: float
) -> tuple[Evidence, ...]:
    elsewhere = (
        f"{mean_ms([m.wait_ms for m in others]):.1f} ms "
        f"on {ranks_text([m.rank.rank for m in others])}"
        if others
        else f"{step_ms:.1f} ms step; {SHARE_WARNING:.0%} is where it counts"
    )
    found = [
        Evidence(
            "data_wait",
            round(worst.wait_ms, 2),
            "ms",
            elsewhere,
            f"{worst.rank.clock} clock, mean of window",
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


def _batch_evidence(model: Model, workers: int) -> list[Evidence]:
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
            f"of the time of {counted(workers, 'worker')}; idle below {BUSY:.0%}",
            WORKERS_CLOCK,
        ),
    ]


def _look_alikes(
    aligned: Aligned, starved: list[Model], cores: Cores | None, picture: RunPicture
) -> tuple[list[str], list[str]]:
    """Return (what a number excluded, what no number could exclude)."""
    out: list[str] = []
    unsure: list[str] = []
    node = picture.node(starved[0].rank.node)
    iowait = host_mean(node, "cpu_iowait_percent")
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
        transfer_ms = aligned.mean_transfer_ms
        if transfer_ms < SHARE_WARNING * aligned.mean_step_ms:
            out.append(
                f"communication: transfer {transfer_ms:.1f} of {aligned.mean_step_ms:.0f} ms"
            )
    return out, unsure


def _hints(
    starved: list[Model],
    cores: Cores | None,
    step_ms: float,
    limit_ms: float,
    picture: RunPicture,
) -> tuple[Hint, ...]:
    from gpuwatch.diagnosis.prediction import predict_step_ms

    dearest = max(starved, key=lambda m: (m.batch_ms or 0.0) * m.batches)
    now = dearest.workers or 0
    work_ms = (dearest.batch_ms or 0.0) * dearest.batches
    wanted = min(MOST_WORKERS, math.ceil(MARGIN * work_ms / max(limit_ms, 1e-3)))
    if wanted <= now:
        return ()
    numbers = [m.rank.rank for m in starved]
    predicted = predict_step_ms(picture, wanted, numbers)
    if predicted is None:
        return ()
    low_ms, high_ms = predicted
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
                f"num_workers {now} -> {wanted} on {ranks_text(numbers)}: "
                f"predicted step {step_ms:.0f} -> {low_ms:.0f}..{high_ms:.0f} ms; {where}"
            ),
            knob="num_workers",
            old=now,
            new=wanted,
            predicted_ms=(low_ms, high_ms),
        ),
    )
