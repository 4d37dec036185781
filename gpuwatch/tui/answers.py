"""What ranks answer as JSON, decoded into types whose ranges are checked.

The text comes from another machine, or from another version: whatever is in it, either all of it
is as it must be or there is one sentence about what is not.
"""

import base64
import binascii
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from gpuwatch.errors import GpuwatchError
from gpuwatch.frames import printable

__all__ = [
    "MOST_PIECE",
    "AnswerError",
    "Child",
    "CudaMemory",
    "MemoryAnswer",
    "Operator",
    "Piece",
    "ProfileAnswer",
    "PythonMemory",
    "TensorKind",
    "Tensors",
    "read_memory",
    "read_piece",
    "read_profile",
]

MOST_PIECE = 150_000
"""Bytes of a file that one answer brings at most."""

_SCHEMA = 1

Name = Annotated[str, Meta(max_length=512)]
Words = Annotated[str, Meta(max_length=4096)]
Bytes = Annotated[int, Meta(ge=0, le=2**60)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Pid = Annotated[int, Meta(ge=0, le=2**31)]
# 10**9 ms are 11.6 days: what is longer is no profile.
Ms = Annotated[float, Meta(ge=0.0, le=1e9)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class AnswerError(GpuwatchError):
    """An answer that cannot be read; the message is one sentence."""


class _Answer(Struct, frozen=True, kw_only=True):
    """Base of everything here: fields that are not known are ignored, missing ones are n/a."""


class Child(_Answer, frozen=True, kw_only=True):
    """A child of the training process, as a loader worker."""

    pid: Pid | None = None
    rss_bytes: Bytes | None = None
    name: Name = ""


class CudaMemory(_Answer, frozen=True, kw_only=True):
    """What the allocator holds of one device, its peaks since the user last reset them.

    `free_bytes` and `total_bytes` are the driver's, with what other processes hold taken off;
    `ooms` counts requests that failed, `retries` those that first had to free the cache.
    """

    device: Annotated[int, Meta(ge=0, le=4096)] | Name | None = None
    name: Name = ""
    allocated_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    peak_allocated_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None
    free_bytes: Bytes | None = None
    total_bytes: Bytes | None = None
    ooms: Count | None = None
    retries: Count | None = None


class PythonMemory(_Answer, frozen=True, kw_only=True):
    """The collector's counters (one a generation) and how many objects it watches."""

    gc_counts: Annotated[tuple[Count | None, ...], Meta(max_length=16)] | None = None
    objects: Count | None = None


class TensorKind(_Answer, frozen=True, kw_only=True):
    """Tensors that are alike; `bytes` are those of all `count` together."""

    shape: Annotated[tuple[Count, ...], Meta(max_length=64)] | Name | None = None
    dtype: Name = ""
    device: Name = ""
    bytes: Bytes | None = None
    count: Count | None = None


class Tensors(_Answer, frozen=True, kw_only=True):
    """The tensors that Python holds: how many, their bytes, and the largest kinds."""

    count: Count | None = None
    bytes: Bytes | None = None
    largest: Annotated[tuple[TensorKind, ...], Meta(max_length=256)] = ()


class MemoryAnswer(_Answer, frozen=True, kw_only=True):
    """The memory of one rank. `cuda_reason` and `tensors_reason` say why there is nothing."""

    schema: Count = _SCHEMA
    rss_bytes: Bytes | None = None
    vms_bytes: Bytes | None = None
    shared_bytes: Bytes | None = None
    children: Annotated[tuple[Child, ...], Meta(max_length=4096)] | None = ()
    cuda: Annotated[tuple[CudaMemory, ...], Meta(max_length=256)] | None = ()
    cuda_reason: Words | None = ""
    python: PythonMemory | None = None
    tensors: Tensors | None = None
    tensors_reason: Words | None = ""


class Operator(_Answer, frozen=True, kw_only=True):
    """One operator over all steps of a profile; `share` is its own time of that of all of them."""

    name: Name = ""
    calls: Count | None = None
    self_ms: Ms | None = None
    total_ms: Ms | None = None
    share: Share | None = None
    device_self_ms: Ms | None = None


class ProfileAnswer(_Answer, frozen=True, kw_only=True):
    """Where the time of a few steps went, by operator; `na` says why a figure is missing.

    `kernel_share` is the share of the time in which a kernel ran, `comm_overlap_share` the part of
    the communication that compute hid. `trace` is the name to fetch the whole trace by, and
    `trace_path` where it lies on the rank's node. `note` says why it ended before its last step.
    """

    schema: Count = _SCHEMA
    first_step: Count | None = None
    last_step: Count | None = None
    wall_ms: Ms | None = None
    clock: Name = ""
    operators: Annotated[tuple[Operator, ...], Meta(max_length=256)] = ()
    kernel_share: Share | None = None
    comm_ms: Ms | None = None
    comm_overlap_share: Share | None = None
    na: Annotated[dict[Name, Words], Meta(max_length=64)] = {}
    trace: Name | None = ""
    trace_path: Words | None = ""
    trace_bytes: Bytes | None = None
    note: Words = ""


class Piece(_Answer, frozen=True, kw_only=True):
    """A piece of a file: `bytes` of it from `offset` on, of `total_bytes`."""

    schema: Count = _SCHEMA
    name: Name
    offset: Count
    bytes: Annotated[int, Meta(ge=0, le=MOST_PIECE)]
    total_bytes: Bytes
    base64: Annotated[str, Meta(max_length=262_144)] = ""


_T = TypeVar("_T", MemoryAnswer, ProfileAnswer, Piece)


def _clean(value: Any) -> Any:
    """Return the value with every text in it fit for a terminal: JSON can hide control signs."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Struct):
        cleaned = {name: _clean(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **cleaned)
    if isinstance(value, tuple):
        return tuple(_clean(item) for item in value)
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value


def _read(data: str, kind: type[_T], what: str) -> _T:
    try:
        answer = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as exc:
        reason = printable(str(exc).splitlines()[0] if str(exc) else type(exc).__name__)
        raise AnswerError(f"the {what} came damaged: {reason[:200]}") from None
    if answer.schema != _SCHEMA:
        raise AnswerError(
            f"the {what} is of version {answer.schema}, this gpuwatch reads {_SCHEMA}: update it"
        )
    return answer


def read_memory(data: str) -> MemoryAnswer:
    """Return the answer to `memory`.

    Raises:
        AnswerError: it cannot be read.
    """
    answer: MemoryAnswer = _clean(_read(data, MemoryAnswer, "memory summary"))
    return answer


def read_profile(data: str) -> ProfileAnswer:
    """Return the answer to `profile`.

    Raises:
        AnswerError: it cannot be read.
    """
    answer: ProfileAnswer = _clean(_read(data, ProfileAnswer, "profile"))
    return answer


def read_piece(data: str) -> tuple[Piece, bytes]:
    """Return the answer to `fetch` and the bytes in it.

    Raises:
        AnswerError: it cannot be read, or its bytes are not as many as it says.
    """
    piece = _read(data, Piece, "piece of the trace")
    try:
        content = base64.b64decode(piece.base64, validate=True)
    except (binascii.Error, ValueError):
        raise AnswerError("the piece of the trace came damaged: it is no base64") from None
    if len(content) != piece.bytes:
        raise AnswerError(
            f"the piece of the trace came damaged: {len(content)} bytes, it says {piece.bytes}"
        )
    return piece, content
