"""The host holds the ranks back: a CPU quota that runs out, or too few CPUs allowed.

Both look like a slow loader or a slow model. What separates them is not in the steps: throttled
periods of the control group, and cores that stand idle beside ones that are full.
"""

from gpuwatch.diagnosis.aligned import Aligned, align, ranks_text, too_few
from gpuwatch.diagnosis.machine import by_node, cpu_of, host_mean, nodes_text, reading, setting
from gpuwatch.diagnosis.types import Abstain, Evidence, Finding, Hint, Outcome, RunPicture
from gpuwatch.store.views import NodeView, RankView

__all__ = ["cpu_affinity", "cpu_quota"]

THROTTLED_PERCENT = 25.0
"""Of the enforcement periods: below, a burst ran out now and then (kernel: sched-bwc.rst)."""

SHARE_WARNING = 0.10
SHARE_CRITICAL = 0.20
CRITICAL_STEPS = 20
FLOOR_MS = 2.0

FULL_PERCENT = 85.0
IDLE_PERCENT = 40.0
"""A core above the one has no time left; below the other it could have taken half of that work."""

WANTED = 0.85
"""Of the allowed CPUs that the ranks must use before these are too few."""


def _shown(cores: float) -> str:
    return f"{cores:.1f}".removesuffix(".0")


def cpu_quota(picture: RunPicture) -> Outcome:
    """The control group's quota runs out in many of its periods, and threads stand still.

    cost = step x (1 - quota / min(quota + time that threads were held, cores)): what of the step
    the missing CPU time stretches, if all of it waits for the CPU; on a device's clock at most the
    data wait, for the rest is the device's.
    """
    return picture.once("cpu_quota", lambda: _cpu_quota(picture))


def _cpu_quota(picture: RunPicture) -> Outcome:
    aligned = align(picture)
    few = too_few("cpu_quota", aligned)
    if few is not None or aligned is None:
        return few
    limited = []
    unknown = 0
    for rank in aligned.ranks:
        quota = setting(rank, "cpu_quota_cores")
        throttled = None if quota is None else reading(rank, "cpu_throttled_percent")
        if quota is None or throttled is None:
            reasons = rank.process.readings.get("cpu_quota_cores") if rank.process else None
            unknown += reasons is None or reasons.reason != "no CPU quota"
            continue
        if throttled >= THROTTLED_PERCENT:
            limited.append((rank, quota, throttled))
    if not limited:
        if unknown == len(aligned.ranks):
            return Abstain("cpu_quota", "the control group of the ranks: no reading of its quota")
        return None
    rank, quota, throttled = max(limited, key=lambda item: item[2])
    held = (reading(rank, "cpu_throttled_ms_per_s") or 0.0) / 1e3
    node = picture.node(rank.node)
    cores = node.host.cores if node is not None and node.host is not None else None
    allowed = setting(rank, "affinity_cores") or cores
    wanted = quota + held
    reach = min(wanted, allowed) if allowed else wanted
    step_ms = aligned.mean_step_ms
    cost_ms = step_ms * (1.0 - quota / reach) if reach > quota else 0.0
    cost_ms = _bounded(aligned, cost_ms)
    if cost_ms < max(FLOOR_MS, SHARE_WARNING / 2 * step_ms):
        return None
    share = cost_ms / step_ms
    ranks = tuple(sorted(r.rank for r, _, _ in limited))
    nodes = tuple(sorted({r.node for r, _, _ in limited}))
    busy = host_mean(node, "cpu_percent")
    low_ms, high_ms = step_ms - cost_ms, step_ms - cost_ms / 2
    raised = _shown(max(quota + 1, round(reach)))
    return Finding(
        kind="cpu_quota",
        severity=_severity(share, aligned),
        ranks=ranks,
        nodes=nodes,
        cost_ms=cost_ms,
        share=share,
        confidence="high" if throttled >= 2 * THROTTLED_PERCENT and held else "medium",
        summary=(
            f"the CPU quota of {_shown(quota)} cores holds {ranks_text(ranks)} back: it runs out "
            f"in {throttled:.0f} % of its periods"
        ),
        evidence=(
            Evidence(
                "throttled_periods",
                round(throttled, 1),
                "%",
                f"counts from {THROTTLED_PERCENT:.0f} %",
                "cpu.stat of the control group",
            ),
            Evidence(
                "throttled_time",
                round(held, 2),
                "core-s/s",
                f"beside {_shown(quota)} cores granted",
                "cpu.stat of the control group, summed over threads",
            ),
            Evidence(
                "cpu_quota",
                quota,
                "cores",
                f"{_shown(allowed)} CPUs allowed" if allowed else "CPUs allowed are not known",
                "cpu.max of the control group",
            ),
        ),
        ruled_out=(
            (
                f"a full machine: {busy:.0f} % of {cores} cores are busy"
                if busy is not None and busy < FULL_PERCENT
                else "a full machine: not ruled out"
            ),
            (
                f"affinity: {_shown(allowed)} CPUs are allowed, more than the quota"
                if allowed and allowed > quota
                else "affinity: not ruled out"
            ),
        ),
        hints=(
            Hint(
                change=(
                    f"CPU quota {_shown(quota)} -> {raised} cores (docker --cpus, Kubernetes "
                    f"limits.cpu, systemd CPUQuota): predicted step {step_ms:.0f} -> "
                    f"{low_ms:.0f}..{high_ms:.0f} ms"
                ),
                knob="cpu_quota",
                old=quota,
                new=float(raised),
                predicted_ms=(low_ms, high_ms),
            ),
            Hint(
                change=(
                    f"or fit threads to the quota: OMP_NUM_THREADS and num_workers together at "
                    f"most {max(1, int(quota))} a rank; Python sees {_shown(allowed or quota)} CPUs"
                ),
                knob="num_workers",
            ),
        ),
    )


def _bounded(aligned: Aligned, cost_ms: float) -> float:
    """On a device's clock the host can cost no more than the device waits for it."""
    if aligned.ranks[0].clock != "device":
        return cost_ms
    return min(cost_ms, max(aligned.mean_wait_ms))


def _severity(share: float, aligned: Aligned) -> str:
    if share >= SHARE_CRITICAL and aligned.count >= CRITICAL_STEPS:
        return "critical"
    return "warning" if share >= SHARE_WARNING else "note"


def cpu_affinity(picture: RunPicture) -> Outcome:
    """The ranks may use a few CPUs, which are full, while others of the machine stand idle.

    cost = step x (1 - CPU in use / CPU that could be used): the idle cores would take their share
    of the work; the work that wants them is bounded by the processes that there are.
    """
    return picture.once("cpu_affinity", lambda: _cpu_affinity(picture))


def _cpu_affinity(picture: RunPicture) -> Outcome:
    aligned = align(picture)
    few = too_few("cpu_affinity", aligned)
    if few is not None or aligned is None:
        return few
    found = None
    known = False
    for name, ranks in by_node(aligned.ranks).items():
        node = picture.node(name)
        if node is None or node.host is None or not node.host.core_percents:
            continue
        known = True
        found = found or _pinned(picture, aligned, node, ranks)
    if not known:
        return Abstain("cpu_affinity", "how busy each core is, from the sampler")
    return found


def _pinned(
    picture: RunPicture, aligned: Aligned, node: NodeView, ranks: list[RankView]
) -> Finding | None:
    assert node.host is not None
    percents = node.host.core_percents
    cores = len(percents)
    allowed = [
        int(found)
        for rank in ranks
        if (found := setting(rank, "affinity_cores") or (rank.hello and rank.hello.cores))
    ]
    if len(allowed) < len(ranks) or max(allowed) >= cores:
        return None
    full = sum(percent >= FULL_PERCENT for percent in percents)
    idle = sum(percent <= IDLE_PERCENT for percent in percents)
    used = [cpu_of(rank) for rank in ranks]
    ours = sum(cpu for cpu in used if cpu is not None)
    if None in used or not full or full > sum(allowed) or not idle:
        return None
    if ours < WANTED * min(full, sum(allowed)):
        return None  # somebody else fills those cores
    # Each process can fill a core; the idle ones take what these do not get now.
    wanting = sum(1 + len(rank.workers) for rank in ranks)
    reach = min(float(wanting), full + float(idle))
    step_ms = aligned.mean_step_ms
    cost_ms = _bounded(aligned, step_ms * (1.0 - full / reach)) if reach > full else 0.0
    if cost_ms < max(FLOOR_MS, SHARE_WARNING / 2 * step_ms):
        return None
    share = cost_ms / step_ms
    numbers = tuple(sorted(rank.rank for rank in ranks))
    low_ms, high_ms = step_ms - cost_ms, step_ms - cost_ms / 4
    tightest = min(allowed)
    return Finding(
        kind="cpu_affinity",
        severity=_severity(share, aligned),
        ranks=numbers,
        nodes=(node.node,),
        cost_ms=cost_ms,
        share=share,
        confidence="high" if idle >= cores / 2 else "medium",
        summary=(
            f"{ranks_text(numbers)} may use {tightest} of {cores} CPUs of {nodes_text([node.node])}"
            f": {full} {'is' if full == 1 else 'are'} full, {idle} nearly idle"
        ),
        evidence=(
            Evidence(
                "affinity_cores",
                tightest,
                "CPUs",
                f"of {cores} on this machine",
                "sched_getaffinity of the rank",
            ),
            Evidence(
                "full_cores",
                full,
                "cores",
                f"above {FULL_PERCENT:.0f} %; {idle} below {IDLE_PERCENT:.0f} %",
                "/proc/stat by core",
            ),
            Evidence(
                "cpu_of_the_ranks",
                round(ours, 2),
                "cores",
                f"{wanting} processes want to run",
                "/proc of ranks and loader workers",
            ),
        ),
        ruled_out=(
            f"a full machine: {idle} of {cores} cores are below {IDLE_PERCENT:.0f} %",
            "a quota: " + ("none" if not _has_quota(ranks) else "not ruled out"),
        ),
        hints=(
            Hint(
                change=(
                    f"CPUs allowed {tightest} -> {cores} (taskset, srun --cpus-per-task and "
                    f"--cpu-bind, OMP_PROC_BIND, sched_setaffinity in the code or a library): "
                    f"predicted step {step_ms:.0f} -> {low_ms:.0f}..{high_ms:.0f} ms"
                ),
                knob="affinity",
                old=tightest,
                new=cores,
                predicted_ms=(low_ms, high_ms),
            ),
        ),
    )


def _has_quota(ranks: list[RankView]) -> bool:
    return any(setting(rank, "cpu_quota_cores") is not None for rank in ranks)
