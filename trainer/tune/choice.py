"""What a sweep over loader settings measures next, and what it concludes: pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "WORKERS_MAX",
    "Measurement",
    "Verdict",
    "busy_machine",
    "choose",
    "faster",
    "next_workers",
    "verdict",
]

WORKERS_MAX = 64
"""Of each rank. More has never been seen to help, and each is a process."""

# A setting is as good as the best if it is this near: below that, runs of the same one differ.
_GOOD_ENOUGH = 0.95
# What more workers have to bring for still more of them to be tried.
_GROWTH = 1.10
# Overlap is fine when both together take little more than the longer of the two.
_OVERLAP = 1.15
# Between two rounds of one setting.
_SPREAD = 1.25
# Share of the step in data wait from which the loader is what limits.
_WAITS = 0.1


@dataclass(frozen=True, slots=True)
class Measurement:
    """Training with one setting."""

    num_workers: int
    prefetch_factor: int | None
    """None without workers."""
    batches_per_s: float
    samples_per_s: float
    data_wait_ms: float
    """Mean per batch."""
    step_ms: float
    """Mean time of a batch, wait included."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits the training, and the sentence that says so."""

    kind: Literal["compute-bound", "loader-bound", "balanced", "no-overlap", "competing"]
    sentence: str


def choose(measurements: Sequence[Measurement]) -> Measurement:
    """The smallest setting within 5 % of the fastest: fewest workers, then least prefetched.

    Workers and prefetched batches cost memory, and start-up in every run; what is left of noise
    should not buy more of them. Raises `ValueError` without measurements.
    """
    if not measurements:
        raise ValueError("nothing was measured")
    best = max(it.batches_per_s for it in measurements)
    good = [it for it in measurements if it.batches_per_s >= _GOOD_ENOUGH * best]
    return min(good, key=lambda it: (it.num_workers, it.prefetch_factor or 0))


def faster(first: Measurement, second: Measurement) -> Measurement:
    """The better of two measurements of one setting: other work on the machine only slows."""
    return max(first, second, key=lambda it: it.batches_per_s)


def busy_machine(ratios: Sequence[float]) -> str | None:
    """A sentence where the same settings differed too much between two rounds, else None.

    `ratios` are second / first of the batches a second.
    """
    off = sum(not 1 / _SPREAD <= ratio <= _SPREAD for ratio in ratios)
    if 3 * off <= len(ratios):
        return None
    return (
        f"Other work was going on: {off} of {len(ratios)} settings differed by more than "
        f"{_SPREAD - 1:.0%} between two rounds. Repeat this on a quiet machine."
    )


def next_workers(measured: Mapping[int, float], *, cpus: int, cap: int = WORKERS_MAX) -> int | None:
    """How many workers to try next, None if it is enough.

    `measured` is workers -> batches a second so far, the best over other settings. The ladder is
    0, 1, 2, 4, ...: it ends at `cap`, or where more workers have twice in a row not brought 10 %;
    beyond the CPUs once is enough, for there only waiting items gain.
    """
    if not measured:
        return 0
    highest = max(measured)
    flat = 0
    best = 0.0
    for workers in sorted(measured):
        flat = flat + 1 if best and measured[workers] < _GROWTH * best else 0
        best = max(best, measured[workers])
    if flat >= 2 or (flat and highest >= max(2, cpus)):
        return None
    following = 1 if highest == 0 else 2 * highest
    if following > cap:
        # A cap between two rungs is one.
        return cap if highest < cap else None
    return following


def verdict(
    *,
    loader_ms: float,
    compute_ms: float,
    both_ms: float,
    wait_ms: float,
    num_workers: int,
    cpu: bool,
) -> Verdict:
    """What the times of a batch say: fetching alone, computing alone, and both at once.

    Where the two overlap, both take what the longer one takes. `wait_ms` is the data wait in
    `both_ms`: a training that hardly waits is not bound by its loader. `cpu` says that it computes
    on the CPUs that the workers use.
    """
    figures = (
        f"a batch takes {loader_ms:.1f} ms to load, {compute_ms:.1f} ms to compute and "
        f"{both_ms:.1f} ms in training"
    )
    longer = max(loader_ms, compute_ms)
    lost = both_ms - longer
    if both_ms > _OVERLAP * longer:
        if num_workers == 0:
            return Verdict(
                "no-overlap",
                f"no overlap: {figures}; without workers the two come one after the other",
            )
        if cpu:
            return Verdict(
                "competing",
                f"loader and training compete: {figures}, {lost:.1f} ms more than the longer of "
                "the two, because both compute on the same CPUs",
            )
        return Verdict(
            "no-overlap",
            f"overlap is lost: {figures}, {lost:.1f} ms more than the longer of the two; look for "
            "what makes the training thread wait, such as a synchronization or a busy main process",
        )
    if loader_ms > _GROWTH * compute_ms and wait_ms > _WAITS * both_ms:
        return Verdict(
            "loader-bound",
            f"loader-bound: {figures}; the overlap is fine, only a faster loader helps",
        )
    if compute_ms > _GROWTH * loader_ms:
        return Verdict(
            "compute-bound",
            f"compute-bound: {figures}; the overlap is fine, a faster loader would not help",
        )
    return Verdict("balanced", f"balanced: {figures}; the overlap is fine, neither waits for long")
