"""The loader model: how long a step would take with another number of workers.

Operational analysis (Plumber, MLSys 2022): with w workers a step is at least

* a batch's cost / w, for the worker that makes it is busy so long,
* the step without its data wait: the slowest rank's own time less its wait, plus the transfer,
* the CPU work of the node's ranks and their workers / the cores that others leave.

Without workers the training process makes the batches itself, and the costs add up.

On a machine whose cores are full the times that were measured hold waiting for a core, which
another number of workers changes: the bounds are then apart, the lower one from CPU time alone. Nor
do others keep the cores that they use today: more workers of ours leave them less.
"""

from collections.abc import Collection
from dataclasses import dataclass

from gpuwatch.diagnosis.aligned import MIN_STEPS, Aligned, align, clock_missing, mad_ms
from gpuwatch.diagnosis.input import (
    CROWDED,
    SPREAD,
    Model,
    cores_of_ranks,
    models_of,
    waits_for_batches,
)
from gpuwatch.diagnosis.types import RunPicture

__all__ = ["predict_step_ms"]

BELOW = 0.08
"""A step may be so much shorter than the bounds say: what a batch costs is a mean of ten seconds.
Above them it may be longer by `SPREAD`, for queues are not always full when they should be. With
both 90 % of the cells of a sweep hold (`benchmarks/bench_predictions.py`)."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    """A duration in ms between two bounds."""

    low: float
    high: float


def predict_step_ms(
    picture: RunPicture, num_workers: int, ranks: Collection[int] | None = None
) -> tuple[float, float] | None:
    """Return the mean step with so many workers on these ranks, as (low, high) in ms.

    `ranks` None means all; the others keep what they have. None where a batch's cost is not known,
    or too few steps were seen.
    """
    aligned = align(picture)
    if aligned is None or aligned.count < MIN_STEPS:
        return None
    if clock_missing("", aligned) is not None:
        return None
    models = models_of(picture, aligned)
    if any(m.batch_ms is None or m.workers is None for m in models):
        return None
    step_ms = aligned.mean_step_ms
    changing = None if ranks is None else frozenset(ranks)
    cores = cores_of_ranks(picture, aligned)
    crowded = cores is not None and cores.busy >= CROWDED * cores.cores
    rests = [_rest(aligned, row, model, crowded) for row, model in enumerate(models)]
    batches = [_batch(model, crowded) for model in models]
    transfer_ms = aligned.mean_transfer_ms
    high_ms = cores.floor_ms if cores is not None else 0.0
    free = cores.free if cores is not None and crowded else 1.0
    low_ms = high_ms * (cores.free if cores is not None else 1.0)
    for model, rest, batch in zip(models, rests, batches, strict=True):
        changed = changing is None or model.rank.rank in changing
        workers = num_workers if changed else model.workers
        if workers:
            low_ms = max(low_ms, rest.low + transfer_ms)
            high_ms = max(high_ms, rest.high + transfer_ms)
            if model.busy is not None or not model.workers or waits_for_batches(model, step_ms):
                # Else it is only known that a batch costs no more than the step leaves it time.
                low_ms = max(low_ms, batch.low / workers)
                high_ms = max(high_ms, batch.high / workers)
        else:
            low_ms = max(low_ms, rest.low + transfer_ms + batch.low)
            high_ms = max(high_ms, (rest.high + transfer_ms + batch.high) / free)
    return low_ms * (1 - BELOW), high_ms * (1 + SPREAD) + mad_ms(aligned.without_wait_ms)


def _batch(model: Model, crowded: bool) -> _Bounds:
    """Return what making the batches of a step costs one worker that has a core to itself."""
    wall_ms = (model.batch_ms or 0.0) * model.batches
    if not crowded:
        return _Bounds(wall_ms, wall_ms)
    if not model.workers:
        share = min(1.0, (model.main_cpu_percent or 100.0) / 100.0)
        return _Bounds(share * wall_ms, wall_ms)
    cpu_ms = wall_ms if model.batch_cpu_ms is None else model.batch_cpu_ms * model.batches
    cpu_ms = min(cpu_ms, wall_ms)
    if model.runnable is None:
        return _Bounds(cpu_ms, wall_ms)
    # Asleep between two batches is not asleep in one.
    asleep = max(0.0, min(1.0, model.busy or 1.0) - model.runnable)
    return _Bounds(cpu_ms, min(wall_ms, cpu_ms + asleep * wall_ms))


def _rest(aligned: Aligned, row: int, model: Model, crowded: bool) -> _Bounds:
    """Return a rank's own time without its data wait, with cores for it and as it was measured."""
    own_ms = aligned.mean_own_ms[row] - model.wait_ms
    if not crowded or model.main_cpu_percent is None or model.rank.clock == "device":
        return _Bounds(own_ms, own_ms)
    hello = model.rank.hello
    threads = max(1, (hello.torch_threads or 1) if hello is not None else 1)
    cpu_ms = model.main_cpu_percent / 100.0 * aligned.step_ms(row)
    if not model.workers:
        cpu_ms -= min(1.0, model.main_cpu_percent / 100.0) * model.wait_ms
    return _Bounds(min(own_ms, max(0.0, cpu_ms) / threads), own_ms)
