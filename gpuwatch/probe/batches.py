"""What a batch tells of itself: samples and tokens by its shapes, and, looked at closer, its bytes.

A device tensor is never read, for that would synchronize; its shape lies on the host.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["Padding", "Sight", "batch_samples", "look", "measure"]

_NESTING = 3
_SEQUENCES = (list, tuple)  # a union of types would be made anew at every look
_MOST_TENSORS = 1024
"""A batch of more tensors is not summed up: at 0.3 µs each, that would be felt."""
_MOST_MASKED = 2**22
"""Elements of a mask that are counted; of a larger one the first rows."""
_CHUNK = 2**15 - 1
"""torch would share out more elements at once, among threads that it starts for this one alone."""
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class Padding:
    """The share of padding in a batch; `float()` works it out, in the telemetry thread.

    Args:
        mask: (batch, sequence) on the CPU, 0 where there is padding.
    """

    __slots__ = ("_mask",)

    def __init__(self, mask: torch.Tensor) -> None:
        self._mask = mask

    def __deepcopy__(self, _: object) -> "Padding":
        return self  # nobody changes it

    def __float__(self) -> float:
        seen = self._mask.flatten()[:_MOST_MASKED]
        tokens = 0
        for part in torch.split(seen, _CHUNK):
            tokens += int(torch.count_nonzero(part))
        return 1.0 - tokens / seen.numel()


class Sight(NamedTuple):
    """A batch looked at closer: bytes of its tensors, padding, tokens in a sequence, and whether
    its first tensor is on a device.

    None is what cannot be told. Packed sequences (`position_ids` beside a single row) have no
    length in common.
    """

    size_bytes: int | None
    padding: Padding | None
    sequence: int | None
    on_device: bool = False


def batch_samples(batch: object, nesting: int = _NESTING) -> int | None:
    """Return the first dimension of the first tensor in a batch, None if there is none near."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else None
    if nesting == 0:
        return None
    values: Any
    if isinstance(batch, _SEQUENCES):
        values = batch
    elif type(batch) is dict or isinstance(batch, Mapping):
        values = batch.values()
    else:
        return None
    for value in values:
        return batch_samples(value, nesting - 1)
    return None


def measure(batch: object) -> tuple[int | None, int | None]:
    """Return (samples, tokens) of a batch.

    Tokens are the elements of `input_ids`, padding included: what the device computes on. They are
    None for a batch without it.
    """
    # The usual ones first: this is done for every batch.
    first = batch[0] if isinstance(batch, _SEQUENCES) and batch else batch
    if isinstance(first, torch.Tensor):
        return (first.shape[0] if first.dim() else None), None
    ids = _part(batch, "input_ids")
    if ids is None:
        return batch_samples(batch), None
    return batch_samples(batch), ids.numel()


def look(batch: object) -> Sight:
    """Look closer at a batch. At most ten times a second: 5 to 10 µs for a handful of tensors."""
    ids, mask = _part(batch, "input_ids"), _part(batch, "attention_mask")
    return Sight(
        _size_bytes(batch),
        Padding(mask) if mask is not None and _is_padding_mask(mask) else None,
        _sequence(batch, ids),
        _on_device(batch),
    )


def _part(batch: object, name: str) -> torch.Tensor | None:
    """Return a tensor of a batch of named parts; transformers' BatchEncoding is a mapping too."""
    if type(batch) is not dict and (
        isinstance(batch, torch.Tensor) or not isinstance(batch, Mapping)
    ):
        return None
    part: object = batch.get(name)
    return part if isinstance(part, torch.Tensor) else None


def _is_padding_mask(mask: torch.Tensor) -> bool:
    """Masks of more dimensions, or of floats that are added, say who sees whom."""
    return (
        mask.device.type == "cpu"
        and mask.dim() == 2
        and mask.dtype in _INTEGERS
        and mask.numel() > 0
    )


def _sequence(batch: object, ids: torch.Tensor | None) -> int | None:
    if ids is None or ids.dim() != 2:
        return None
    if ids.shape[0] == 1 and _part(batch, "position_ids") is not None:
        return None
    return int(ids.shape[1])


def _on_device(batch: object) -> bool:
    """Whether the first tensor of a batch is on a device; not if there is none near."""
    for _ in range(_NESTING + 1):
        if isinstance(batch, torch.Tensor):
            return batch.device.type != "cpu"
        values = batch.values() if isinstance(batch, Mapping) else batch
        if not isinstance(batch, (*_SEQUENCES, Mapping)):
            return False
        batch = next(iter(values), None)  # type: ignore[call-overload]
    return False


def _size_bytes(batch: object) -> int | None:
    """Return the bytes of the tensors in a batch, None without one or with too many."""
    total = tensors = 0
    level: list[Any] = [batch]
    for _ in range(_NESTING + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, torch.Tensor):
                total += value.nbytes
                tensors += 1
            elif isinstance(value, _SEQUENCES):
                below += value[: _MOST_TENSORS + 1]
            elif isinstance(value, Mapping):
                below += value.values()
            if tensors > _MOST_TENSORS or len(below) > _MOST_TENSORS:
                return None
        level = below
    return total if tensors else None
