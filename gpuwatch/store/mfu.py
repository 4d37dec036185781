"""Model FLOPs utilization: model FLOPs per second over the dense peak of the training dtype."""

from typing import NamedTuple

from gpuwatch.store.peaks import peak_tflops
from gpuwatch.store.views import RankView

__all__ = ["Mfu", "mfu_of", "training_dtype"]

_AUTOCAST = {"bfloat16": "bf16", "float16": "fp16"}


class Mfu(NamedTuple):
    """MFU of one rank, 0..1, or None and why; `peak_tflops` and where that comes from."""

    value: float | None
    reason: str
    peak_tflops: float | None
    peak_source: str


def training_dtype(rank: RankView) -> str:
    """Return bf16 or fp16 under autocast, else empty: the weights' own dtype is not known."""
    if rank.hello is None:
        return ""
    return _AUTOCAST.get(rank.hello.precision.autocast.removeprefix("torch."), "")


def mfu_of(rank: RankView, said_tflops: float | None = None) -> Mfu:
    """Return the MFU of a rank over its window of steady steps.

    Args:
        rank: has FLOPs where a formula fits its model or counting was asked for.
        said_tflops: the dense peak as `--peak-tflops` gave it; goes before the table of cards.
    """
    flops, step_ms = rank.told.flops_per_step, rank.step_ms
    card = rank.hello.device_name if rank.hello is not None else ""
    peak, source = peak_tflops(card, training_dtype(rank), said_tflops)
    if flops is None:
        why = rank.told.flops_source or "the FLOPs of a step are not known"
        return Mfu(None, why.removeprefix("n/a: "), peak, source)
    if peak is None:
        return Mfu(None, source, None, "")
    if not step_ms:
        return Mfu(None, "no steady step yet", peak, source)
    return Mfu(flops / (step_ms / 1e3) / (peak * 1e12), "", peak, source)
