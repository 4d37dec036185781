"""Several processes: where a rank is, its process group, its replica of the model."""

from trainer.distributed.group import Placement, process_group
from trainer.distributed.replicas import checksum, replicate, sync_buffers

__all__ = ["Placement", "checksum", "process_group", "replicate", "sync_buffers"]
