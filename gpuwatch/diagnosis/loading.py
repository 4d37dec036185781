"""Why batches are late, where more workers would not be the answer.

All of these look like a loader with too few workers. The signals that separate them: workers
blocked on the disk (storage); workers that compute while the cores are full (decoding), with many
threads each (oversubscription); collating as most of a batch, or workers that idle while the
training process itself is busy receiving (collating and handing over).
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from gpuwatch.diagnosis.aligned import counted, mad_ms, mean_ms, ranks_text
from gpuwatch.diagnosis.host import cpu_affinity, cpu_quota
from gpuwatch.diagnosis.input import (
    BLOCKED_SHARE,
    BUSY,
    COLLATE_SHARE,
    CPU_BOUND,
    CROWDED,
    HELD_HIGH,
    IOWAIT_PERCENT,
    LATENCY_BOUND,
    MAIN_BUSY_PERCENT,
    SATURATED,
    SPREAD,
    WORKERS_CLOCK,
    Model,
    Starvation,
    starvation,
)
from gpuwatch.diagnosis.machine import host_mean, mean_or_none, value
from gpuwatch.diagnosis.types import Abstain, Evidence, Finding, Hint, Outcome, RunPicture
from gpuwatch.schema import IoSample

__all__ = [
    "collate_ipc",
    "cpu_decode_aug",
    "loader_oversub",
    "one_slow_worker",
    "other_cause",
    "storage_slow",
    "uneven",
]

DISK_BUSY_PERCENT = 90.0
"""iostat's %util: on one disk a limit, on an array that serves many requests at once not yet."""

NFS_LATENCY_MS = 20.0
"""A read over a network file system that answers from its cache takes 1-5 ms."""

AT_THE_LIMIT = 0.75
"""CPU work of a step over the cores, as a share of the step: the cores are the limit."""

MANY_THREADS = 4.0
"""Threads of a worker: main and feeder are two, a pinned-memory or library thread a third."""

THREADS_PER_CORE = 1.5
"""Compute threads of all workers over the cores: above, they take turns."""

UNEVEN = 2.0
"""A worker takes so many times as long for a batch as the others' median. Workers of a healthy
loader were within 20 % of each other over ten seconds."""

TAKES_PART = 0.5
"""Of the CPU that the workers of the busiest rank use: who uses so much is a part of the load."""

IDLE_WORKER = 0.3
"""CPU share below which a worker that is not blocked waits for orders or to hand over."""


def other_cause(picture: RunPicture, seen: Starvation) -> str:
    """Return the kind that explains the wait better than too few workers, empty if none does."""
    return picture.once("loading_cause", lambda: _cause(picture, seen))


def _cause(picture: RunPicture, seen: Starvation) -> str:
    for rule in (cpu_quota, cpu_affinity):
        found = rule(picture)
        if isinstance(found, Finding) and found.severity != "note":
            return found.kind
    if _storage(picture, seen) is not None:
        return "storage_slow"
    if uneven(seen):
        return "stall_prefetch_burst"
    if _collating(seen) is not None or _receiving(seen) is not None:
        return "collate_ipc"
    if _threads(picture, seen) is not None:
        return "loader_oversub"
    if _computing(seen):
        return "cpu_decode_aug"
    return ""


def _seen(picture: RunPicture, kind: str) -> Starvation | Abstain | None:
    """Return the starvation if its cause is of this kind."""
    seen = starvation(picture, kind)
    if isinstance(seen, Starvation) and other_cause(picture, seen) != kind:
        return None
    return seen


def _made(
    seen: Starvation,
    kind: str,
    *,
    limit_ms: float,
    summary: str,
    evidence: Iterable[Evidence],
    ruled_out: Iterable[str],
    hints: Iterable[Hint],
    sure: bool = True,
    ranks: tuple[int, ...] = (),
) -> Outcome:
    """Return the finding; `ranks` where they are others than those that wait."""
    cost_ms = seen.step_ms - limit_ms
    if cost_ms < seen.floor_ms:
        return None
    share = cost_ms / seen.step_ms
    worst = seen.worst
    held = min(m.held for m in seen.starved)
    return Finding(
        kind=kind,
        severity=seen.severity(share),
        ranks=ranks or seen.ranks,
        nodes=seen.nodes,
        cost_ms=cost_ms,
        share=share,
        confidence="high" if sure and held >= HELD_HIGH else "medium",
        summary=summary,
        evidence=(
            Evidence(
                "data_wait",
                round(worst.wait_ms, 2),
                "ms",
                f"{seen.step_ms:.1f} ms step, in {worst.held:.0%} of the steps",
                f"{worst.rank.clock} clock, mean of window",
            ),
            *evidence,
        ),
        ruled_out=tuple(text for text in ruled_out if text),
        hints=tuple(hints),
    )


def _range(seen: Starvation, low_ms: float) -> tuple[float, float]:
    """Return a prediction around a modelled step, never above what it is today."""
    high_ms = low_ms * (1 + SPREAD) + mad_ms(seen.without_wait)
    return low_ms, min(high_ms, (low_ms + seen.step_ms) / 2 if high_ms >= seen.step_ms else high_ms)


def _predicted(seen: Starvation, low_ms: float) -> str:
    low, high = _range(seen, low_ms)
    return f"predicted step {seen.step_ms:.0f} -> {low:.0f}..{high:.0f} ms"


def _batch(model: Model) -> str:
    if model.batch_ms is None:
        return "what a batch costs is not known"
    cpu = f", {model.batch_cpu_ms:.0f} ms of it CPU" if model.batch_cpu_ms is not None else ""
    return f"a batch costs {model.batch_ms:.0f} ms{cpu}"


# --- storage ------------------------------------------------------------------------------------


def _datasets(picture: RunPicture, seen: Starvation) -> list[IoSample]:
    """Return the datasets of the starved ranks' nodes, or their disks where no path is known."""
    found: list[IoSample] = []
    for name in seen.nodes:
        node = picture.node(name)
        io = node.host.io if node is not None and node.host is not None else ()
        datasets = [item for item in io if item.kind == "dataset"]
        found += datasets or [item for item in io if item.kind == "disk"]
    return found


def _storage(picture: RunPicture, seen: Starvation) -> list[Evidence] | None:
    """Return the evidence that storage is at its limit, None if it is not."""
    cpu = mean_or_none(m.worker_cpu for m in seen.starved)
    if cpu is not None and cpu >= CPU_BOUND:
        return None
    evidence = []
    blocked = mean_or_none(m.blocked for m in seen.starved)
    if blocked is not None and blocked > BLOCKED_SHARE:
        evidence.append(
            Evidence(
                "workers_blocked",
                round(100 * blocked),
                "%",
                f"of their time in state D; counts from {BLOCKED_SHARE:.0%}",
                "/proc of the loader workers",
            )
        )
    iowait = mean_or_none(
        host_mean(picture.node(name), "cpu_iowait_percent") for name in seen.nodes
    )
    if iowait is not None and iowait > IOWAIT_PERCENT:
        evidence.append(
            Evidence(
                "cpu_iowait",
                round(iowait, 1),
                "%",
                f"of all cores; counts from {IOWAIT_PERCENT:.0f} %",
                "/proc/stat",
            )
        )
    for item in _datasets(picture, seen):
        busy = value(item.readings.get("busy_percent"))
        latency_ms = value(item.readings.get("read_latency"))
        rate = value(item.readings.get("read_bytes_per_s"))
        network = item.filesystem.startswith("nfs")
        if (busy is not None and busy >= DISK_BUSY_PERCENT) or (
            network and latency_ms is not None and latency_ms >= NFS_LATENCY_MS
        ):
            moved = f"{rate / 1e6:,.0f} MB/s read" if rate is not None else "its rate is not known"
            waited = f", {latency_ms:.1f} ms a read" if latency_ms is not None else ""
            evidence.append(
                Evidence(
                    "storage_busy",
                    round(busy if busy is not None else 100.0),
                    "%",
                    f"{item.name or item.path}: {moved}{waited}",
                    "mountstats" if network else "/proc/diskstats",
                )
            )
            break
    return evidence or None


def storage_slow(picture: RunPicture) -> Outcome:
    """The workers wait for the storage, and it is at its limit.

    cost = step - step with zero data wait.
    """
    return picture.once("storage_slow", lambda: _storage_slow(picture))


def _storage_slow(picture: RunPicture) -> Outcome:
    seen = _seen(picture, "storage_slow")
    if not isinstance(seen, Starvation):
        return seen
    evidence = _storage(picture, seen) or []
    limit_ms = mean_ms(seen.without_wait)
    worst = seen.worst
    cpu = mean_or_none(m.worker_cpu for m in seen.starved)
    datasets = [d for d in _datasets(picture, seen) if d.kind == "dataset"]
    where = f" ({datasets[0].path}, {datasets[0].filesystem})" if datasets else ""
    return _made(
        seen,
        "storage_slow",
        limit_ms=limit_ms,
        summary=(
            f"the storage starves {ranks_text(seen.ranks)}: {worst.wait_ms:.0f} of "
            f"{seen.step_ms:.0f} ms of a step wait for data that is read{where}"
        ),
        evidence=evidence,
        ruled_out=(
            f"decode and augmentation: {cpu:.0%} of a batch's time is CPU"
            if cpu is not None
            else "decode and augmentation: not ruled out, worker CPU is not known",
            f"too few workers: {_batch(worst)}, and it is spent blocked on the storage",
        ),
        hints=(
            Hint(
                change=(
                    "keep the data on a local disk or in memory (copy it before the run, or cache "
                    f"it in the first epoch): {_predicted(seen, limit_ms)}"
                ),
                knob="dataset_path",
                predicted_ms=_range(seen, limit_ms),
            ),
            Hint(
                change=(
                    "fewer, larger reads: shards (tar, webdataset, parquet) instead of a file an "
                    "item, smaller or better compressed items"
                ),
                knob="dataset_format",
            ),
        ),
        sure=len(evidence) > 1,
    )


# --- one slow worker ----------------------------------------------------------------------------


def uneven(seen: Starvation) -> list[Model]:
    """Return the ranks of whose workers one is much slower than the others, and sets the pace."""
    return [
        model
        for model in seen.starved
        if model.slowest is not None
        and model.others_ms is not None
        and model.slowest.wall_ms >= UNEVEN * model.others_ms
        and model.slowest_busy >= SATURATED
    ]


def one_slow_worker(seen: Starvation, models: list[Model]) -> Outcome:
    """Batches come in order: every step that is the slow worker's turn waits for it.

    cost = step - max(step with zero data wait, a batch in the other workers / workers).
    """
    worst = max(models, key=lambda m: m.wait_ms)
    others_ms = max((m.others_ms or 0.0) * m.batches / (m.workers or 1) for m in models)
    limit_ms = max(mean_ms(seen.without_wait), others_ms)
    slowest, workers = worst.slowest, worst.workers or 1
    if slowest is None or worst.others_ms is None:
        return None
    ranks = [m.rank.rank for m in models]
    found = _made(
        replace(seen, starved=models),
        "stall_prefetch_burst",
        limit_ms=limit_ms,
        summary=(
            f"one loader worker of {workers} on {ranks_text(ranks)} is slow: every step in "
            f"{workers} waits for it, {worst.wait_ms:.0f} of {seen.step_ms:.0f} ms on average"
        ),
        evidence=(
            Evidence(
                "slowest_worker",
                round(slowest.wall_ms, 1),
                "ms",
                f"a batch, pid {slowest.pid} of rank {worst.rank.rank}; {worst.others_ms:.1f} ms "
                "in the others",
                WORKERS_CLOCK,
            ),
            Evidence(
                "slowest_worker_busy",
                round(100 * min(1.0, worst.slowest_busy)),
                "%",
                f"of its time; {100 * (worst.busy or 0.0):.0f} % is the mean of the workers",
                WORKERS_CLOCK,
            ),
        ),
        ruled_out=(
            f"too few workers: the others are idle, a batch takes them {worst.others_ms:.0f} ms",
            "checkpoints and logging: the period is the number of workers",
        ),
        hints=(
            Hint(
                change=(
                    f"see what worker {slowest.pid} does (py-spy dump --pid {slowest.pid}): a "
                    "shard on slower storage, longer items, a lock; shards of equal cost a "
                    f"worker: {_predicted(seen, limit_ms)}"
                ),
                knob="shards",
                predicted_ms=_range(seen, limit_ms),
            ),
            Hint(
                change=(
                    "let ready batches overtake it, where their order does not matter: "
                    "in_order=False (PyTorch 2.6 and later)"
                ),
                knob="in_order",
                old=True,
                new=False,
            ),
        ),
    )
    # The wait comes once in as many steps as there are workers: it never holds in most of them.
    return replace(found, confidence="high") if isinstance(found, Finding) else found


# --- collating and handing over -----------------------------------------------------------------


def _collating(seen: Starvation) -> Model | None:
    """Return the rank whose workers spend most of a batch in collating."""
    for model in seen.starved:
        if (
            model.collate_ms is not None
            and model.batch_ms
            and (model.busy or 0.0) >= BUSY
            and model.collate_ms >= COLLATE_SHARE * model.batch_ms
        ):
            return model
    return None


def _receiving(seen: Starvation) -> Model | None:
    """Return the rank whose workers idle while its own process is busy taking batches in."""
    for model in seen.starved:
        if not model.workers or (model.main_cpu_percent or 0.0) < MAIN_BUSY_PERCENT:
            continue
        if model.busy is not None:
            idle = model.busy < BUSY
        else:
            cpu, blocked = model.worker_cpu, model.blocked
            idle = cpu is not None and cpu < IDLE_WORKER and (blocked or 0.0) <= BLOCKED_SHARE
        if idle:
            return model
    return None


def collate_ipc(picture: RunPicture) -> Outcome:
    """Collating, or handing batches over to the training process, is what takes long.

    cost = step - max(step with zero data wait, batch without its collating / workers); where the
    workers idle, step - step with zero data wait.
    """
    return picture.once("collate_ipc", lambda: _collate_ipc(picture))


def _collate_ipc(picture: RunPicture) -> Outcome:
    seen = _seen(picture, "collate_ipc")
    if not isinstance(seen, Starvation):
        return seen
    limit_ms = mean_ms(seen.without_wait)
    model = _collating(seen)
    if model is not None and model.collate_ms is not None and model.batch_ms and model.workers:
        rest_ms = (model.batch_ms - model.collate_ms) * model.batches / model.workers
        limit_ms = max(limit_ms, rest_ms)
        return _made(
            seen,
            "collate_ipc",
            limit_ms=limit_ms,
            summary=(
                f"collating takes {model.collate_ms:.0f} of the {model.batch_ms:.0f} ms that a "
                f"batch costs in a worker of {ranks_text(seen.ranks)}: {model.wait_ms:.0f} of "
                f"{seen.step_ms:.0f} ms of a step wait for data"
            ),
            evidence=(
                Evidence(
                    "collate",
                    round(model.collate_ms, 1),
                    "ms",
                    f"of {model.batch_ms:.1f} ms a batch; counts from {COLLATE_SHARE:.0%}",
                    WORKERS_CLOCK,
                ),
            ),
            ruled_out=(
                f"decode and augmentation: {model.batch_ms - model.collate_ms:.0f} ms of a batch",
                f"idle workers: busy {min(1.0, model.busy or 0.0):.0%} of the time",
            ),
            hints=(
                Hint(
                    change=(
                        "a cheaper collate_fn: items of one shape stacked by default_collate, "
                        "padding and normalizing on the device, no Python loop over elements: "
                        f"{_predicted(seen, limit_ms)}"
                    ),
                    knob="collate_fn",
                    predicted_ms=_range(seen, limit_ms),
                ),
            ),
        )
    model = _receiving(seen)
    if model is None:
        return None
    busy = (
        f"busy {model.busy:.0%} of the time"
        if model.busy is not None
        else f"{model.worker_cpu or 0.0:.0%} CPU"
    )
    return _made(
        seen,
        "collate_ipc",
        limit_ms=limit_ms,
        summary=(
            f"the training process of {ranks_text(seen.ranks)} is busy taking batches in, its "
            f"{counted(model.workers or 0, 'worker')}: {busy}"
        ),
        evidence=(
            Evidence(
                "main_cpu",
                round(model.main_cpu_percent or 0.0),
                "%",
                f"of one core; counts from {MAIN_BUSY_PERCENT:.0f} %",
                "/proc of the rank",
            ),
            Evidence("workers", busy, "", f"idle below {BUSY:.0%}", WORKERS_CLOCK),
        ),
        ruled_out=(
            f"too few workers: they are {busy}",
            "storage: no worker is blocked" if not model.blocked else "",
        ),
        hints=(
            Hint(
                change=(
                    "hand over tensors, not Python objects: many small objects a batch are "
                    f"pickled and unpickled in the training process: {_predicted(seen, limit_ms)}"
                ),
                knob="batch_type",
                predicted_ms=_range(seen, limit_ms),
            ),
        ),
        sure=model.busy is not None,
    )


# --- threads and cores --------------------------------------------------------------------------


def _worker_threads(model: Model) -> float | None:
    pids = set(model.loader.worker_pids) if model.loader is not None else set()
    workers = [w for w in model.rank.workers if w.pid in pids] or list(model.rank.workers)
    return mean_or_none(value(w.readings.get("threads")) for w in workers)


def _threads(picture: RunPicture, seen: Starvation) -> tuple[float, int] | None:
    """Return (threads a worker, workers) if the workers' threads outnumber the cores."""
    cores = seen.cores
    if cores is None or cores.busy < CROWDED * cores.cores:
        return None
    starved = [m for m in seen.starved if m.workers]
    threads = mean_or_none(_worker_threads(m) for m in starved)
    if threads is None:
        return None
    count = sum(m.workers or 0 for m in starved)
    cpu = mean_or_none(m.worker_cpu for m in starved) or 0.0
    # Main, feeder and the like wait; what is beyond them computes.
    computing = max(1.0, threads - 2.0)
    many = threads >= MANY_THREADS or cpu > 1.2
    if many and computing * count > THREADS_PER_CORE * cores.cores:
        return threads, count
    return None


def loader_oversub(picture: RunPicture) -> Outcome:
    """The workers compute on more threads than there are cores, and get in each other's way.

    cost = step - step with zero data wait: what the threads waste beyond that is not known before
    they are fewer, so the prediction is wide.
    """
    return picture.once("loader_oversub", lambda: _oversub(picture))


def _oversub(picture: RunPicture) -> Outcome:
    seen = _seen(picture, "loader_oversub")
    if not isinstance(seen, Starvation):
        return seen
    found = _threads(picture, seen)
    cores = seen.cores
    if found is None or cores is None:
        return None
    threads, count = found
    limit_ms = mean_ms(seen.without_wait)
    worst = seen.worst
    ranks_here = max(1, len(seen.aligned.ranks) // max(1, len(picture.nodes) or 1))
    fitting = max(1, min(worst.workers or 1, cores.cores // ranks_here))
    # They share the cores: who waits for data, and who for a peer that does, is chance.
    nodes, waiting = frozenset(seen.nodes), frozenset(seen.ranks)
    crowding = tuple(
        sorted(
            m.rank.rank
            for m in seen.models
            if m.workers
            and m.rank.node in nodes
            and (m.rank.rank in waiting or (_worker_threads(m) or 0.0) >= MANY_THREADS)
        )
    )
    return _made(
        seen,
        "loader_oversub",
        limit_ms=limit_ms,
        summary=(
            f"{counted(count, 'loader worker')} with {threads:.0f} threads each on "
            f"{counted(cores.cores, 'core')}: "
            f"{worst.wait_ms:.0f} of {seen.step_ms:.0f} ms of a step wait for data"
        ),
        evidence=(
            Evidence(
                "threads",
                round(threads * count),
                "",
                f"in {counted(count, 'worker')} on {counted(cores.cores, 'core')}",
                "/proc of the loader workers",
            ),
            Evidence(
                "busy_cores",
                round(cores.busy, 1),
                "cores",
                f"of {cores.cores}; full from {CROWDED:.0%}",
                "/proc/stat, mean of six seconds",
            ),
        ),
        ruled_out=(
            "too few workers: no core is free for another one",
            _storage_excluded(picture, seen),
        ),
        hints=(
            Hint(
                change=(
                    "one thread a worker: torch.set_num_threads(1), cv2.setNumThreads(0) or "
                    "OMP_NUM_THREADS=1 in worker_init_fn: predicted step "
                    f"{seen.step_ms:.0f} -> {limit_ms:.0f}..{0.9 * seen.step_ms:.0f} ms"
                ),
                knob="worker_threads",
                old=round(threads),
                new=1,
                predicted_ms=(limit_ms, 0.9 * seen.step_ms),
            ),
            *(
                (
                    Hint(
                        change=f"num_workers {worst.workers} -> {fitting} a rank: a core each",
                        knob="num_workers",
                        old=worst.workers,
                        new=fitting,
                    ),
                )
                if fitting < (worst.workers or 0)
                else ()
            ),
        ),
        sure=threads >= 2 * MANY_THREADS,
        ranks=crowding,
    )


def _storage_excluded(picture: RunPicture, seen: Starvation) -> str:
    iowait = mean_or_none(
        host_mean(picture.node(name), "cpu_iowait_percent") for name in seen.nodes
    )
    if iowait is None:
        return "storage: not ruled out, iowait is not known"
    return f"storage: iowait {iowait:.0f} %"


def _computing(seen: Starvation) -> bool:
    """Whether the CPU work of making batches is the limit: the cores are full of it."""
    cores = seen.cores
    if cores is None:
        return False
    worker_ms = sum(_worker_cores(m) for m in seen.models) * seen.step_ms
    if worker_ms < 0.5 * cores.ours * seen.step_ms:
        return False  # most of the CPU work is the training's own
    crowded = cores.busy >= CROWDED * cores.cores
    full = cores.floor_ms >= AT_THE_LIMIT * seen.step_ms
    if any(not m.workers for m in seen.starved):
        return crowded and full  # else workers come first: they would have cores
    runnable = mean_or_none(m.runnable for m in seen.starved)
    if crowded and runnable is not None and runnable >= CPU_BOUND:
        return True  # they never sleep: what is not CPU in a batch is waiting for a core
    cpu = mean_or_none(m.worker_cpu for m in seen.starved) or 0.0
    if runnable is not None and runnable < LATENCY_BOUND:
        return False  # they sleep
    return full and (cpu >= LATENCY_BOUND or crowded)


def _worker_cores(model: Model) -> float:
    """CPU of a rank's workers, in cores; without workers that of its process while it fetches."""
    if not model.workers and model.rank.step_ms:
        fetching = min(1.0, model.wait_ms / model.rank.step_ms)
        return fetching * (model.main_cpu_percent or 0.0) / 100.0
    if model.rank.worker_means:
        means = model.rank.worker_means
        return sum([m.mean("cpu_percent") or 0.0 for m in means]) / 100.0
    shares = [value(w.readings.get("cpu_percent")) for w in model.rank.workers]
    return sum(share or 0.0 for share in shares) / 100.0


def cpu_decode_aug(picture: RunPicture) -> Outcome:
    """Decoding and augmenting take more CPU than the machine has; more workers have no core.

    cost = step - max(step with zero data wait, CPU work without that of the workers / cores).
    """
    return picture.once("cpu_decode_aug", lambda: _decode(picture))


def _decode(picture: RunPicture) -> Outcome:
    seen = _seen(picture, "cpu_decode_aug")
    if not isinstance(seen, Starvation):
        return seen
    cores = seen.cores
    if cores is None:
        return Abstain("cpu_decode_aug", "CPU of the ranks, their workers and the machine")
    taken = {m.rank.rank: _worker_cores(m) for m in seen.models}
    workers = sum(taken.values())
    rest = max(0.0, cores.ours - workers)
    limit_ms = max(mean_ms(seen.without_wait), cores.floor_ms * rest / max(cores.ours, 1e-9))
    worst = seen.worst
    half_ms = max(limit_ms, cores.floor_ms * (rest + workers / 2) / max(cores.ours, 1e-9))
    per_item = (
        f"{worst.batch_cpu_ms / worst.loader.batch_size:.1f} ms CPU an item"
        if worst.batch_cpu_ms is not None and worst.loader is not None and worst.loader.batch_size
        else _batch(worst)
    )
    needed = math.ceil(workers * seen.step_ms / max(limit_ms, 1e-3))
    # The cores are one: whose workers take them, not who happens to wait.
    most = max(taken.values())
    nodes, waiting = frozenset(seen.nodes), frozenset(seen.ranks)
    taking = tuple(
        sorted(
            m.rank.rank
            for m in seen.models
            if m.rank.node in nodes
            and (m.rank.rank in waiting or taken[m.rank.rank] >= TAKES_PART * most)
        )
    )
    return _made(
        seen,
        "cpu_decode_aug",
        limit_ms=limit_ms,
        summary=(
            f"making batches takes all {cores.cores} cores: {worst.wait_ms:.0f} of "
            f"{seen.step_ms:.0f} ms of a step wait for data on {ranks_text(taking)}"
        ),
        evidence=(
            Evidence(
                "worker_cpu",
                round(workers, 2),
                "cores",
                f"of {cores.cores}, {cores.busy:.1f} busy; {per_item}",
                "/proc of the loader workers, mean of six seconds",
            ),
            Evidence(
                "cpu_work",
                round(cores.floor_ms, 1),
                "ms",
                f"a step at least, on the cores there are; the step takes {seen.step_ms:.1f} ms",
                "CPU of ranks and workers / cores that others leave",
            ),
        ),
        ruled_out=(
            f"too few workers: another one has no core ({cores.busy:.1f} of {cores.cores} busy)",
            _storage_excluded(picture, seen),
        ),
        hints=(
            Hint(
                change=(
                    "decode once: keep resized or decoded items (shards, numpy, LMDB) and do the "
                    f"rest on the device: {_predicted(seen, limit_ms)}"
                ),
                knob="cache_decoded",
                predicted_ms=_range(seen, limit_ms),
            ),
            Hint(
                change=(
                    "decode for less: libjpeg-turbo at a reduced scale, Image.draft, smaller "
                    f"source images; at half the cost {_predicted(seen, half_ms)}"
                ),
                knob="decode",
                predicted_ms=_range(seen, half_ms),
            ),
            Hint(
                change=f"or a machine with about {needed} cores for the workers of these ranks",
                knob="cores",
                old=cores.cores,
                new=needed,
            ),
        ),
        ranks=taking,
    )
