"""Steps of a large run as they are quickly read: for whoever looks at each of them once."""

import msgspec

from gpuwatch.store.packed import Codec

__all__ = ["QuickStep", "quick_codec"]

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
