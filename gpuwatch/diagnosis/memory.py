"""Memory that grows with every step.

On a device the allocator's own count is exact; on the CPU the resident set is noisy, and freed heap
can absorb growth. The test is the same for both: the minima of twelve blocks of steps must rise
almost without exception (Mann-Kendall), by a floor, and still at the end. Slopes under noise were
found unreliable in trials; the alarm was not.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import combinations

from gpuwatch.diagnosis.aligned import ranks_text
from gpuwatch.diagnosis.machine import reading
from gpuwatch.diagnosis.types import Abstain, Evidence, Finding, Hint, Outcome, RunPicture
from gpuwatch.store.history import memory_slope
from gpuwatch.store.packed import Points
from gpuwatch.store.views import RankView, same_device

__all__ = ["cpu_leak", "gpu_leak", "grows", "rising"]

BLOCKS = 12
Z_RISES = 3.5
"""Of 12 blocks 66 pairs are compared; 3.5 lets 7 of them fall."""

FLOOR_BYTES = 8 * 2**20
RESIDENT_FLOOR_BYTES = 32 * 2**20
"""Of a resident set: heaps and caches settle for hundreds of steps; a healthy small model was seen
to drift by 0.15 MiB a step."""

EARLY_S = 60.0
EARLY_FLOOR_BYTES = 128 * 2**20
"""... and in the first minute: the heaps of two healthy ranks grew by 43 and 86 MiB within 200
steps (8 s), and not at all in the 1,500 steps after."""

WARM_SHARE = 0.2
"""The first part of a run: allocators fill their pools, workers and caches are made."""

MIN_STEPS = 96
STILL_SHARE = 0.12
"""Of the growth that must lie in the last quarter: a pool that fills up flattens out."""

CRITICAL_STEPS_LEFT = 2000


def rising(
    memory: Sequence[tuple[int, int]], floor_bytes: float = FLOOR_BYTES
) -> tuple[float, float] | None:
    """Return (growth in bytes, z of Mann-Kendall) if memory rises, None if not or not known."""
    if len(memory) < 2 * BLOCKS or memory[-1][0] - memory[0][0] < MIN_STEPS:
        return None
    values: Sequence[int]
    values = memory.values if isinstance(memory, Points) else [value for _, value in memory]
    values = values[int(len(values) * WARM_SHARE) :]
    size = len(values) / BLOCKS
    # Most memory does not grow, and the first block and the newest value say so.
    if values[-1] - min(values[: int(size)]) < floor_bytes:
        return None

    def least(block: int) -> int:
        first = int(block * size)
        return min(values[first : max(first + 1, int((block + 1) * size))])

    growth = least(BLOCKS - 1) - least(0)
    late = least(BLOCKS - 1) - least(BLOCKS - 1 - BLOCKS // 4)
    if growth < floor_bytes or late < STILL_SHARE * growth:
        return None
    minima = list(map(least, range(BLOCKS)))
    pairs = sum([(after > before) - (after < before) for before, after in combinations(minima, 2)])
    z = (pairs - 1) / math.sqrt(BLOCKS * (BLOCKS - 1) * (2 * BLOCKS + 5) / 18)
    if z < Z_RISES:
        return None
    return float(growth), z


def grows(rank: RankView) -> tuple[float, float] | None:
    """Return (growth in bytes, z of Mann-Kendall) if the rank's memory grows by what counts."""
    return rising(rank.past.memory, _floor_bytes(rank))


def gpu_leak(picture: RunPicture) -> Outcome:
    """Allocated device memory rises with the steps. It costs no time until it runs out."""
    return picture.once("gpu_leak", lambda: _leak(picture, "gpu_leak"))


def cpu_leak(picture: RunPicture) -> Outcome:
    """The training process's resident memory rises with the steps."""
    return picture.once("cpu_leak", lambda: _leak(picture, "cpu_leak"))


def _on_device(rank: RankView) -> bool:
    return rank.hello is not None and rank.hello.device.startswith("cuda")


def _floor_bytes(rank: RankView) -> float:
    """Return the growth that counts: an allocator's count is exact, a heap settles first."""
    if _on_device(rank):
        return FLOOR_BYTES
    early = rank.ledger.wall_ns < EARLY_S * 1e9
    return EARLY_FLOOR_BYTES if early else RESIDENT_FLOOR_BYTES


def _leak(picture: RunPicture, kind: str) -> Outcome:
    ranks = [
        r
        for r in picture.run.ranks
        if r.state not in {"gone", "ended"} and _on_device(r) == (kind == "gpu_leak")
    ]
    if not ranks:
        return None
    if not any(rank.past.memory for rank in ranks):
        return Abstain(kind, "memory by step: no record carries it")
    leaking = [(rank, found) for rank in ranks if (found := grows(rank)) is not None]
    if not leaking:
        return None
    rank, (growth, z) = max(leaking, key=lambda item: item[1][0])
    slope = memory_slope(rank.past.memory[len(rank.past.memory) // 4 :]) or 0.0
    if slope <= 0.0:
        return None
    used = rank.past.memory[-1][1]
    limit, limit_name = _limit(picture, rank)
    left = (limit - used) / slope if limit is not None and limit > used else None
    numbers = tuple(sorted(r.rank for r, _ in leaking))
    where = "device memory" if kind == "gpu_leak" else "memory of the training process"
    steps = rank.past.memory[-1][0] - rank.past.memory[0][0]
    evidence = [
        Evidence(
            "growth",
            round(growth / 2**20, 1),
            "MiB",
            f"over {steps:,} steps, {slope / 2**20:.2f} MiB a step",
            "minima of 12 blocks of steps",
        ),
        Evidence(
            "mann_kendall_z",
            round(z, 2),
            "",
            f"rises from {Z_RISES}",
            "memory by step of the whole run",
        ),
    ]
    if left is not None:
        evidence.append(
            Evidence(
                "steps_left",
                round(left),
                "steps",
                f"until {limit_name} of {limit / 2**30:.1f} GiB is full",  # type: ignore[operator]
                "at this slope",
            )
        )
    workers = _workers_mib(rank)
    return Finding(
        kind=kind,
        severity="critical" if left is not None and left < CRITICAL_STEPS_LEFT else "warning",
        ranks=numbers,
        nodes=tuple(sorted({r.node for r, _ in leaking})),
        cost_ms=0.0,
        share=0.0,
        confidence="high" if kind == "gpu_leak" else "medium",
        summary=(
            f"{where} of {ranks_text(numbers)} grows by {slope / 2**20:.2f} MiB a step"
            + (f": full in {left:,.0f} steps" if left is not None else "")
        ),
        evidence=tuple(evidence),
        ruled_out=tuple(
            text
            for text in (
                "warm-up: it still grows in the last quarter of the run",
                f"loader workers: they are other processes, {workers}" if workers else "",
            )
            if text
        ),
        hints=(
            Hint(
                change=(
                    "keep numbers, not tensors with a graph: loss.item() or loss.detach() where "
                    "losses, outputs or metrics are collected over steps"
                ),
                knob="detach",
            ),
            Hint(
                change=(
                    "no retain_graph=True without need; optimizer.zero_grad(set_to_none=True) "
                    "in every step; end hooks and caches that hold outputs"
                ),
                knob="retain_graph",
            ),
        ),
    )


def _limit(picture: RunPicture, rank: RankView) -> tuple[float | None, str]:
    if _on_device(rank) and rank.hello is not None:
        for each in picture.nodes:
            for gpu in each.gpus:
                total = gpu.readings.get("memory_total")
                if total is not None and same_device(rank.hello.device_uuid, gpu.uuid):
                    return total.value, "the device"
        return None, ""
    limit = reading(rank, "memory_limit")
    if limit is not None:
        return limit, "the memory limit"
    node = picture.node(rank.node)
    if node is None or node.host is None:
        return None, ""
    total = node.host.readings.get("memory_total")
    return (total.value if total is not None else None), "the machine's memory"


def _workers_mib(rank: RankView) -> str:
    sizes = [
        found.value / 2**20
        for worker in rank.workers
        if (found := worker.readings.get("rss")) is not None and found.value is not None
    ]
    return f"{statistics.fmean(sizes):.0f} MiB each" if sizes else ""
