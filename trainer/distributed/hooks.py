"""How DDP's gradients travel between the ranks: as they are, or in 16 bits.

DDP takes one communication hook, once. One that can be changed while it trains is therefore a hook
that looks up at each bucket what it is to do. Compression by low rank (PowerSGD) is not among it:
it keeps errors and factors from step to step, which mean nothing after a pause.
"""

from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from trainer.config import Compression, DistConfig
from trainer.errors import ConfigError

__all__ = ["NONE", "CommHook", "comm_hook"]

NONE = "none"
"""The mean of the gradients as they are."""

_NCCL_OF_BF16 = (2, 10)  # as DDP checks where it is given the hook itself

_Reduce = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


class CommHook:
    """The hook of a DistributedDataParallel, which follows `kind`.

    `kind` is `none` or the name of one of torch's default hooks, and is changed between two steps,
    in the same step of every rank: a collective of two formats fails or worse. With `none` the
    gradients are, bit for bit, those of DDP without a hook, which multiplies by 1 / ranks before it
    adds them up (`default_hooks.allreduce_hook` divides, and differs with three ranks).
    """

    def __init__(self, group: dist.ProcessGroup, kinds: tuple[str, ...]) -> None:
        self.kind = NONE
        self.kinds = kinds
        # DDP's logger takes it down once, where it is registered, and nothing is being done yet.
        self.__qualname__ = ""
        self._group = group
        self._reduce: _Reduce = _mean

    @property
    def __name__(self) -> str:
        """What DDP and monitors call it: what it does now, nothing where that is what DDP does."""
        return "" if self.kind == NONE else self.kind

    # DDP insists on these very annotations.
    def __call__(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Begin to reduce a bucket; of the last micro-batch of a window, in its backward."""
        return self._reduce(self._group, bucket)

    def use(self, kind: str) -> None:
        """Reduce in this way from the next backward on. Raises `ValueError` for an unknown one."""
        if kind not in self.kinds:
            raise ValueError(f"comm_hook must be one of {', '.join(self.kinds)}, not {kind!r}")
        self._reduce = _mean if kind == NONE else getattr(default_hooks, kind)
        self.kind = kind


def _mean(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer().mul_(1.0 / group.size())
    future: torch.futures.Future[torch.Tensor] = group.allreduce([buffer]).get_future()
    return future.then(_first)


def _first(future: Any) -> torch.Tensor:
    tensor: torch.Tensor = future.value()[0]
    return tensor


def comm_hook(replica: nn.Module, config: DistConfig, *, live: bool) -> CommHook | None:
    """Give a replica its hook where one is configured, or `live` may ask for one later.

    Otherwise nothing is registered: on CPU a hook in Python costs every bucket 0.1 to 0.2 ms. None
    too where there is no other rank. Raises `ConfigError` for a kind that cannot be had here.
    """
    several = isinstance(replica, DistributedDataParallel) and replica.process_group.size() > 1
    if not several or not (live or config.comm_hook):
        return None
    assert isinstance(replica, DistributedDataParallel)
    group = replica.process_group
    kinds = (NONE, *(kind for kind in get_args(Compression) if _is_known(kind, group)))
    if config.comm_hook and config.comm_hook not in kinds:
        least = ".".join(map(str, _NCCL_OF_BF16))
        raise ConfigError(f"dist.comm_hook={config.comm_hook} needs NCCL {least} or newer")
    hook = CommHook(group, kinds)
    replica.register_comm_hook(None, hook)
    hook.use(config.comm_hook or NONE)
    return hook


def _is_known(kind: str, group: dist.ProcessGroup) -> bool:
    if kind != "bf16_compress_hook" or "nccl" not in group.name():
        return True
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return version >= _NCCL_OF_BF16
