"""Which run this process belongs to, and as which rank."""

import hashlib
import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from gpuwatch.probe.text import wire_text
from gpuwatch.wire.publish import process_start_ticks

__all__ = ["Identity", "has_group", "identify"]

# Looked at once: a launcher may end while its ranks live, and the run must keep its id.
_LAUNCHER = os.getppid()
_LAUNCHER_TICKS = process_start_ticks(_LAUNCHER)


@dataclass(frozen=True, slots=True)
class Identity:
    """Run and place of this process. `run_source` says where the run id came from."""

    run: str
    run_source: str
    rank: int
    world_size: int
    local_rank: int | None


def _integer(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        return None
    return value if value >= 0 else None


def _initialized() -> tuple[int, int] | None:
    """Return (rank, world size) of the default process group, None before it is there."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return int(dist.get_rank()), int(dist.get_world_size())


def has_group() -> bool:
    """Whether the default process group is there, which knows rank and world size for certain."""
    return _initialized() is not None


def identify(environ: Mapping[str, str] = os.environ) -> Identity:
    """Find run, rank and world size: the process group if it is there, else the launcher's words.

    The run id is, in this order: `GPUWATCH_RUN_ID`; `TORCHELASTIC_RUN_ID` unless empty or `none`
    (torchrun's default when no id was given, shared by every such job); Slurm's job and step; with
    more than one rank a hash of MASTER_ADDR, MASTER_PORT and, on one node, the launcher's pid and
    start time, because two jobs may use one port after the other; else random.
    """
    group = _initialized()
    rank = _integer(environ.get("RANK"))
    world_size = _integer(environ.get("WORLD_SIZE"))
    if rank is None and "SLURM_STEP_ID" in environ:
        rank = _integer(environ.get("SLURM_PROCID"))
        world_size = _integer(environ.get("SLURM_NTASKS"))
    if group is not None:
        rank, world_size = group
    world_size = max(1, world_size or 1)
    rank = min(rank or 0, world_size - 1)
    local_rank = _integer(environ.get("LOCAL_RANK"))
    if local_rank is None and "SLURM_STEP_ID" in environ:
        local_rank = _integer(environ.get("SLURM_LOCALID"))
    run, source = _run_id(environ, world_size)
    return Identity(run, source, rank, world_size, local_rank)


_random = uuid.uuid4().hex[:12]


def _run_id(environ: Mapping[str, str], world_size: int) -> tuple[str, str]:
    if named := environ.get("GPUWATCH_RUN_ID"):
        return wire_text(named, 128), "GPUWATCH_RUN_ID"
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    if elastic and elastic != "none":
        return wire_text(elastic, 128), "TORCHELASTIC_RUN_ID"
    if (job := environ.get("SLURM_JOB_ID")) and (step := environ.get("SLURM_STEP_ID")):
        return wire_text(f"slurm-{job}.{step}", 128), "SLURM_JOB_ID"
    if world_size > 1:
        parts = [environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")]
        local_world = _integer(environ.get("LOCAL_WORLD_SIZE"))
        if local_world in (None, world_size):
            parts += [str(_LAUNCHER), str(_LAUNCHER_TICKS)]
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12], "MASTER_ADDR"
    return _random, "random"
