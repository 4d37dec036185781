"""Steps of a large run as they are quickly read: for whoever looks at each of them once."""

from collections.abc import Iterator, Sequence

import msgspec

from gpuwatch.schema import StepRecord
from gpuwatch.store.packed import Codec, Packed
from gpuwatch.store.rows import LANES, STALL_LANE, mold_of

__all__ = ["QuickStep", "quick_codec", "stalls_of"]

_Number = int | None
_Parts = tuple[_Number, _Number, _Number, _Number, _Number, _Number, _Number]


class QuickStep(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A `StepRecord` that is quickly made of what a window holds: phases are tuples, in the order
    of `PHASES`, and nothing is checked.
    """

    index: int
    started_s: float
    step_ns: int
    host: _Parts
    device: _Parts | None = None
    clock: str = "host"
    batches: int = 1
    samples: int | None = None
    tokens: int | None = None
    loss: float | None = None
    memory_bytes: int | None = None
    queue_depth: float | None = None
    queue_capacity: int | None = None
    tags: tuple[str, ...] = ()
    loader: str = ""
    device_stall_ns: int | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    loss_scale: float | None = None
    padding_share: float | None = None
    gc_ns: int | None = None


quick_codec = Codec(QuickStep)


def stalls_of(window: Sequence[StepRecord]) -> Iterator[tuple[float, int | None]]:
    """Yield when steps began (s) and their device stalls (ns), the newest first."""
    if not isinstance(window, Packed):
        for record in reversed(window):
            yield record.started_s, record.device_stall_ns
        return
    for chunk, start, end in window.latest(len(window)):
        mold = mold_of(chunk)
        if mold is None:
            for step in reversed(quick_codec.read(chunk, start, end)):
                yield step.started_s, step.device_stall_ns
            continue
        known = STALL_LANE not in mold.unknown
        for lanes in reversed(list(mold.lanes(chunk, start, end))):
            yield lanes[LANES], lanes[STALL_LANE] if known else None
