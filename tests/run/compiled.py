"""Compiles a model, a whole step and a whole epoch, and prints what the compiler did, as JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def parts() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    return net, torch.optim.SGD(net.parameters(), lr=0.01), DataLoader(torch.ones(32, 4), 4)


def model() -> None:
    net, optimizer, loader = parts()
    compiled = torch.compile(net, backend="aot_eager")
    for batch in loader:
        compiled(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def step() -> None:
    net, optimizer, loader = parts()

    @torch.compile(backend="eager")
    def train(batch: torch.Tensor) -> torch.Tensor:
        loss = net(batch).sum() * 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss + 1

    for batch in loader:
        train(batch)


def epoch() -> None:
    net, optimizer, loader = parts()

    @torch.compile(backend="eager")
    def train(batches: Any) -> Any:
        total = 0
        for batch in batches:
            loss = net(batch).sum() * 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = total + loss.detach()
        return total

    train(loader)
    train(loader)


def collectives() -> None:
    """Waiting for other ranks inside what is compiled: traced, inlined, or broken off."""
    net, optimizer, loader = parts()
    world = dist.group.WORLD

    @torch.compile(backend="eager")
    def reduce(x: torch.Tensor, work: Any, future: Any) -> torch.Tensor:
        y = functional.all_reduce(x * 2, "sum", world)
        y = functional.wait_tensor(y) + 1
        dist.all_reduce(y)
        work.wait()
        future.wait()
        dist.barrier()
        return y + 1

    for batch in loader:
        work = dist.all_reduce(batch, async_op=True)
        reduce(batch, work, dist.all_reduce(batch, async_op=True).get_future())
        net(batch).sum().backward()
        optimizer.step()


def replica() -> None:
    """DDP with a compiled model in it, and all of it compiled."""
    for whole in (False, True):
        net, _, loader = parts()
        norm: Any = torch.nn.Sequential(net, torch.nn.BatchNorm1d(1))
        optimizer = torch.optim.SGD(norm.parameters(), lr=0.01)
        if not whole:
            norm = torch.compile(norm, backend="aot_eager")
        model: Any = DistributedDataParallel(norm)
        if whole:
            model = torch.compile(model, backend="aot_eager")
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()


def sharded() -> None:
    """FSDP2 around tensor parallel."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    compiled = torch.compile(net, backend="aot_eager")
    for batch in DataLoader(torch.ones(32, 4), 4):
        compiled(batch).sum().backward()
        optimizer.step()


def told(part: Callable[[], None]) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    part()
    names = ("frames", "stats", "graph_break", "recompiles", "unimplemented")
    return {name: dict(counters[name]) for name in names}


def script(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch.autograd.backward([y])
    return y


PARTS = (model, step, epoch, collectives, replica, sharded)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(json.dumps({part.__name__: told(part) for part in PARTS}, sort_keys=True))
print(torch.jit.script(script).graph)
probe = sys.modules.get("gpuwatch.probe")
print("watched" if getattr(probe, "_probe", None) else "bare", file=sys.stderr)
