"""The process group of a torchrun job, or none for a single process."""

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.config import DistConfig
from trainer.errors import ConfigError, TrainingError

__all__ = ["Placement", "process_group"]

_LEAVE_S = 10


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this process stands. Without a launcher: rank 0 of 1 and no process group."""

    rank: int
    world_size: int
    local_rank: int
    ranks_here: int
    """Ranks on this node."""
    launched: bool
    """Started by torchrun, also as one process: then there is a process group."""
    device: torch.device

    @classmethod
    def from_environment(cls, device: str, environ: Mapping[str, str] = os.environ) -> "Placement":
        """Read torchrun's variables; `device` is auto, cpu or cuda.

        Raises `ConfigError` for cuda where there is none, `TrainingError` for more ranks than
        GPUs on the node.
        """
        launched = "RANK" in environ and "WORLD_SIZE" in environ
        world_size = int(environ["WORLD_SIZE"]) if launched else 1
        local_rank = int(environ.get("LOCAL_RANK", "0")) if launched else 0
        return cls(
            rank=int(environ["RANK"]) if launched else 0,
            world_size=world_size,
            local_rank=local_rank,
            ranks_here=int(environ.get("LOCAL_WORLD_SIZE", world_size)) if launched else 1,
            launched=launched,
            device=_device(device, local_rank),
        )


def _device(wanted: str, local_rank: int) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("train.device=cuda, but torch finds no CUDA device here")
    if local_rank >= torch.cuda.device_count():
        raise TrainingError(
            f"this node has {torch.cuda.device_count()} GPUs and no free one for local rank "
            f"{local_rank}: start at most one process per GPU"
        )
    return torch.device("cuda", local_rank)


@contextlib.contextmanager
def process_group(config: DistConfig, device: str) -> Iterator[Placement]:
    """Join the group torchrun describes (env://) and leave it at the end.

    On an exception a rank of several under NCCL does not wait for the others to leave with it: the
    process is expected to end, and is ended after 10 s.
    """
    placement = Placement.from_environment(device)
    cuda = placement.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(placement.device)
    backend = config.backend
    if backend == "auto":
        backend = "nccl" if cuda else "gloo"
    if backend == "nccl" and not cuda:
        raise ConfigError("dist.backend=nccl needs train.device=cuda; gloo works on CPU")
    if not placement.launched:
        yield placement
        return
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        dist.init_process_group(
            backend,
            init_method="env://",
            timeout=timedelta(seconds=config.timeout_s),
            # Binding the device at once makes NCCL connect now, where a failure is easy to read.
            device_id=placement.device if cuda else None,
        )
    except ValueError as error:
        # A variable is missing: torch names it.
        raise TrainingError(f"cannot join the other ranks: {error}") from None
    except RuntimeError as error:
        raise TrainingError(_unreachable(str(error), address, config.timeout_s)) from None
    try:
        yield placement
    except BaseException:
        if backend == "nccl" and placement.world_size > 1:
            # Leaving is collective there, and the others are in another collective: this process
            # has to end, so that they see it. The alarm ends it even inside C code.
            signal.alarm(_LEAVE_S)
        else:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _unreachable(error: str, address: str, timeout_s: float) -> str:
    """Why the ranks did not meet, in one sentence."""
    if "EADDRINUSE" in error or "already in use" in error:
        return (
            f"the ranks cannot meet at {address}: the port is in use; choose another with "
            "torchrun --master-port, or let torchrun --standalone find one"
        )
    if "imeout" in error or "timed out" in error.lower():
        return (
            f"not every rank came to {address} within {timeout_s:g} s: see that all nodes were "
            "started with the same address, port and number of ranks"
        )
    first = error.strip().splitlines()[0] if error.strip() else "no reason given"
    return f"the ranks cannot meet at {address}: {first}"
