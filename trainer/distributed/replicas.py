"""The model's replicas: kept equal by DDP, checked by a checksum."""

import hashlib
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.config import DistConfig
from trainer.distributed.group import Placement

__all__ = ["checksum", "replicate", "sync_buffers"]


def replicate(
    model: nn.Module, placement: Placement, config: DistConfig
) -> nn.Module | DistributedDataParallel:
    """The model itself in a single process, else wrapped in DDP (which copies rank 0's weights)."""
    if not placement.launched:
        return model
    cuda = placement.device.type == "cuda"
    buffers: dict[str, Any] = {}
    if not config.broadcast_buffers:
        # torch 2.13 renamed the argument and warns about the old name; the default is to sync.
        known = inspect.signature(DistributedDataParallel).parameters
        new = "forward_sync_buffers"
        buffers[new if new in known else "broadcast_buffers"] = False
    return DistributedDataParallel(
        model,
        device_ids=[placement.device.index] if cuda else None,
        bucket_cap_mb=config.bucket_cap_mb,
        **buffers,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        find_unused_parameters=config.find_unused_parameters,
    )


def sync_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's buffers (BatchNorm statistics).

    DDP does so at the start of a forward, so after the last step of an epoch they differ, and an
    evaluation would judge another model on each rank.
    """
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def checksum(model: nn.Module) -> str:
    """SHA-256 over the names, parameters and buffers of the model, bit by bit."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
