"""What the sensors say of a rank's machine, smoothed where the store has means."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from gpuwatch.diagnosis.types import RunPicture
from gpuwatch.schema import Reading
from gpuwatch.store.views import NodeView, RankView

__all__ = [
    "Use",
    "by_node",
    "cores_of",
    "cpu_of",
    "host_mean",
    "host_most",
    "nodes_text",
    "others_of",
    "reading",
    "setting",
    "use_of",
    "value",
]


def value(found: Reading | None) -> float | None:
    """Return a reading's value, also a stale one; None where it is n/a."""
    if found is None or found.state not in {"ok", "stale"}:
        return None
    return found.value


def reading(rank: RankView, name: str) -> float | None:
    """Return a reading of the rank's own process: its mean over six seconds, or the last one."""
    if rank.process_means is not None:
        mean = rank.process_means.mean(name)
        if mean is not None:
            return mean
    return setting(rank, name)


def setting(rank: RankView, name: str) -> float | None:
    """Return the last reading of the rank's own process, of what is set and has no mean."""
    return value(rank.process.readings.get(name)) if rank.process is not None else None


def host_mean(node: NodeView | None, name: str) -> float | None:
    """Return a reading of the host: its mean over six seconds, or the last one."""
    if node is None:
        return None
    if name in node.host_means:
        return node.host_means[name]
    return value(node.host.readings.get(name)) if node.host is not None else None


def host_most(node: NodeView | None, name: str) -> float | None:
    """Return the larger of a reading's mean and its last value: a run that has just begun shows in
    the one, what happens now and then in the other.
    """
    mean = host_mean(node, name)
    last = value(node.host.readings.get(name)) if node is not None and node.host else None
    return mean if last is None else last if mean is None else max(mean, last)


def by_node(ranks: Iterable[RankView]) -> dict[str, list[RankView]]:
    """Return the ranks of each node, in the order of the nodes' names."""
    found: dict[str, list[RankView]] = {}
    for rank in ranks:
        found.setdefault(rank.node, []).append(rank)
    return dict(sorted(found.items()))


def cpu_of(rank: RankView) -> float | None:
    """Return the CPU that a rank and its workers use, in cores; None where it is not known."""
    shares = [reading(rank, "cpu_percent")]
    if rank.worker_means:
        shares += [means.mean("cpu_percent") for means in rank.worker_means]
    else:
        shares += [value(w.readings.get("cpu_percent")) for w in rank.workers]
    known = [share for share in shares if share is not None]
    if not known or len(known) < len(shares):
        return None
    return sum(known) / 100.0


def cores_of(node: NodeView | None, ranks: Iterable[RankView]) -> int | None:
    """Return the cores that these ranks of one node may use: the machine's, or fewer."""
    if node is None or node.host is None or not node.host.cores:
        return None
    allowed = [r.hello.cores for r in ranks if r.hello is not None and r.hello.cores]
    return min([node.host.cores, *allowed])


@dataclass(frozen=True, slots=True)
class Use:
    """CPU of one node: its cores, how many are busy, and how many of these are the ranks'."""

    cores: int
    busy: float
    ours: float


def use_of(picture: RunPicture, name: str, ranks: list[RankView]) -> Use | None:
    """Return the CPU use of a node with these ranks on it, None where a part is not known."""
    node = picture.node(name)
    cores = cores_of(node, ranks)
    total = host_mean(node, "cpu_percent")
    used = [cpu_of(rank) for rank in ranks]
    if node is None or node.host is None or cores is None or total is None or not used:
        return None
    known = [cpu for cpu in used if cpu is not None]
    if len(known) < len(used):
        return None
    ours = sum(known)
    # The kernel counts whole ticks: what the processes used was surely busy.
    return Use(cores, max(total / 100.0 * node.host.cores, ours), ours)


def others_of(picture: RunPicture, name: str, ranks: list[RankView]) -> float | None:
    """Return how many cores of a node other programs keep busy; None where a part is not known.

    The less of two counts: of the last six seconds, in which a launcher may have started the ranks,
    and of the last one.
    """
    use = use_of(picture, name, ranks)
    if use is None:
        return None
    others = use.busy - use.ours
    node = picture.node(name)
    host = node.host if node is not None else None
    percent = value(host.readings.get("cpu_percent")) if host is not None else None
    shares = [
        value(sample.readings.get("cpu_percent")) if sample is not None else None
        for rank in ranks
        for sample in (rank.process, *rank.workers)
    ]
    known = [share for share in shares if share is not None]
    if host is not None and percent is not None and len(known) == len(shares):
        others = min(others, max(0.0, percent * host.cores - sum(known)) / 100.0)
    return others


def nodes_text(names: Iterable[str]) -> str:
    """Name nodes as a person would."""
    found = sorted(set(names))
    return (
        ", ".join(found) if len(found) <= 3 else f"{', '.join(found[:2])} and {len(found) - 2} more"
    )


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are known."""
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None
