"""Several processes: where a rank is, its process group, its replica of the model."""

from trainer.distributed.group import Placement, process_group
from trainer.distributed.hooks import CommHook, comm_hook
from trainer.distributed.replicas import checksum, replicate, sync_buffers

__all__ = [
    "CommHook",
    "Placement",
    "checksum",
    "comm_hook",
    "process_group",
    "replicate",
    "sync_buffers",
]
