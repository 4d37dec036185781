"""What can be shown of a rank as one number: for the heat map, for columns and for sorting."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from gpuwatch.schema import GpuSample
from gpuwatch.store.views import RankView
from gpuwatch.tui.render import numbers

__all__ = ["METRICS", "OWN", "Metric", "metric_text", "next_metric"]

Getter = Callable[[RankView, GpuSample | None], float | None]


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a rank or of the device that it computes on.

    `label` is at most 9 cells; `unit` is ms, %, GB, W, °C, /s or empty; `words` say what it is.
    """

    name: str
    label: str
    unit: str
    words: str
    get: Getter


def _phase(name: str) -> Getter:
    return lambda rank, _: rank.phases_ms.get(name)


def _device(name: str, factor: float = 1.0) -> Getter:
    def get(_: RankView, gpu: GpuSample | None) -> float | None:
        value = None if gpu is None else numbers.reading_value(gpu.readings.get(name))
        return None if value is None else value * factor

    return get


def _memory(rank: RankView, gpu: GpuSample | None) -> float | None:
    """Memory in GB: of the device where there is one, else of the process."""
    if gpu is not None:
        used = numbers.reading_bytes(gpu.readings.get("memory_used"))
    elif rank.process is not None:
        used = numbers.reading_bytes(rank.process.readings.get("rss"))
    else:
        used = None
    return None if used is None else used / 1e9


def _rate(rank: RankView, _: GpuSample | None) -> float | None:
    return rank.samples_per_s


def _queue(rank: RankView, _: GpuSample | None) -> float | None:
    return rank.queue_depth


OWN = Metric("own", "own ms", "ms", "step without exposed communication", lambda r, _: r.own_ms)

METRICS: tuple[Metric, ...] = (
    OWN,
    Metric("data_wait", "data ms", "ms", "blocked in fetching a batch", _phase("data_wait")),
    Metric("comm", "comm ms", "ms", "blocked by communication", _phase("comm")),
    Metric("forward", "fwd ms", "ms", "forward, with the loss", _phase("forward")),
    Metric("backward", "bwd ms", "ms", "backward, local gradients only", _phase("backward")),
    Metric("optimizer", "opt ms", "ms", "optimizer", _phase("optimizer")),
    Metric("h2d", "h2d ms", "ms", "copies to the device", _phase("h2d")),
    Metric("other", "other ms", "ms", "what no mark covers", _phase("other")),
    Metric("step", "step ms", "ms", "the whole step", lambda r, _: r.step_ms),
    Metric("queue", "queue", "", "batches that were ready when a step began to wait", _queue),
    Metric("rate", "samples/s", "/s", "samples a second of this rank", _rate),
    Metric("gpu_util", "gpu %", "%", "GPU-Util: time with any kernel", _device("gpu_util")),
    Metric("sm_active", "sm %", "%", "SM active: share of cycles", _device("sm_active")),
    Metric("memory", "mem GB", "GB", "memory of the device, else of the process", _memory),
    Metric("power", "power W", "W", "power of the device", _device("power")),
    Metric("temperature", "temp °C", "°C", "temperature of the device", _device("temperature")),
)
"""In the order in which `m` goes through them."""


def metric_text(metric: Metric, value: float | None) -> str:
    """Return the number as it stands in a table; the unit is in the label."""
    if value is None or not isfinite(value):
        return numbers.NA
    if metric.unit == "ms":
        return numbers.ms(value)
    if metric.unit in ("%", "W", "°C"):
        return f"{value:.0f}"
    if metric.unit == "/s":
        return numbers.count(value)
    return f"{value:.1f}"


def next_metric(
    name: str, ranks: Sequence[RankView], gpus: Sequence[GpuSample | None], step: int = 1
) -> str:
    """Return the metric after `name` that any rank knows; `name` where no other is known."""
    names = [metric.name for metric in METRICS]
    place = names.index(name) if name in names else 0
    for i in range(1, len(names)):
        metric = METRICS[(place + i * step) % len(names)]
        if any(metric.get(rank, gpu) is not None for rank, gpu in zip(ranks, gpus, strict=True)):
            return metric.name
    return name
