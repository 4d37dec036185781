"""Two ranks under torchrun that meet in every way there is; rank 1 comes 30 ms late to each.

Prints one JSON line for each scenario with the range of its steps, then waits for the file named
in DONE so that its past can be asked for.
"""

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gpuwatch

faulthandler.dump_traceback_later(100, exit=True)

LATE_S = 0.03
WIDE = 64
step = 0


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None


def late() -> None:
    time.sleep(LATE_S * dist.get_rank())


def scenario(name: str, steps: int, train: Callable[[torch.Tensor], None]) -> None:
    """Train `steps` batches and print which steps they were."""
    global step
    first = step
    for (batch,) in DataLoader(TensorDataset(torch.ones(4 * steps, WIDE)), batch_size=4):
        train(batch)
        step += 1
    row = {"scenario": name, "rank": dist.get_rank(), "first": first, "last": step}
    # One write a line: two ranks share the pipe.
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-4)


# --- one collective a step ---------------------------------------------------------------------


def exchange(batch: bool) -> None:
    peer = 1 - dist.get_rank()
    x, y = torch.ones(8), torch.ones(8)
    if batch:
        both = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
    elif dist.get_rank():
        dist.send(x, 0)
    else:
        dist.recv(x, 1)


def coalesced() -> None:
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(torch.ones(8))
    manager.wait()


def two() -> list[torch.Tensor]:
    return [torch.ones(4), torch.ones(4)]


def calls() -> dict[str, Callable[[], Any]]:
    world = dist.group.WORLD
    root = dist.get_rank() == 0
    return {
        "all_reduce": lambda: dist.all_reduce(torch.ones(8)),
        "all_reduce async": lambda: dist.all_reduce(torch.ones(8), async_op=True).wait(),
        "future": lambda: dist.all_reduce(torch.ones(8), async_op=True).get_future().wait(),
        "all_gather": lambda: dist.all_gather(two(), torch.ones(4)),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(8), torch.ones(4)),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.ones(4), two()),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.ones(4), torch.ones(8)),
        "broadcast": lambda: dist.broadcast(torch.ones(8), src=1),
        "reduce": lambda: dist.reduce(torch.ones(8), dst=0),
        "gather": lambda: dist.gather(torch.ones(4), two() if root else None, dst=0),
        "scatter": lambda: dist.scatter(torch.ones(4), None if root else two(), src=1),
        "all_to_all": lambda: dist.all_to_all(two(), two()),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(8), torch.ones(8)),
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
        "all_gather_object": lambda: dist.all_gather_object([None, None], "x"),
        "broadcast_object_list": lambda: dist.broadcast_object_list(["x"], src=1),
        "gather_object": lambda: dist.gather_object("x", [None, None] if root else None),
        "scatter_object_list": lambda: dist.scatter_object_list([None], ["x", "y"], src=1),
        "send recv": lambda: exchange(batch=False),
        "batch_isend_irecv": lambda: exchange(batch=True),
        "coalesced": coalesced,
        "functional": lambda: funcol.all_reduce(torch.ones(8), "sum", world) + 1,
        "functional wait": lambda: funcol.wait_tensor(
            funcol.all_gather_tensor(torch.ones(8), 0, world)
        ),
    }


def collectives() -> None:
    net = torch.nn.Linear(WIDE, 1)
    optimizer = sgd(net)
    for name, call in calls().items():

        def train(batch: torch.Tensor, call: Callable[[], Any] = call) -> None:
            late()
            call()
            net(batch).mean().backward()
            optimizer.step()

        dist.barrier()
        scenario(name, 3, train)


# --- ways to train -----------------------------------------------------------------------------


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDE, WIDE), torch.nn.ReLU(), torch.nn.Linear(WIDE, WIDE)
    )


def sharded() -> None:
    net = layers()
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    optimizer = sgd(net)

    def train(batch: torch.Tensor, where: str) -> None:
        if where == "forward":
            late()
        out = net(batch)
        if where == "backward":
            out = SlowBackward.apply(out, LATE_S * dist.get_rank())
        out.mean().backward()
        # The norm is a DTensor that is redistributed, and nothing is tensor parallel.
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).full_tensor()
        optimizer.step()

    scenario("fsdp2 forward", 5, lambda batch: train(batch, "forward"))
    scenario("fsdp2 backward", 5, lambda batch: train(batch, "backward"))


def tensor_parallel() -> None:
    net = layers()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(net, init_device_mesh("cpu", (2,)), plan)
    optimizer = sgd(net)

    def train(batch: torch.Tensor) -> None:
        late()
        net(batch).mean().backward()
        optimizer.step()

    scenario("tensor", 5, train)


def batch_norm() -> None:
    """SyncBatchNorm's own function, with stand-ins for the kernels that only a GPU has."""
    channels = torch.ones(WIDE)
    torch.batch_norm_stats = lambda x, eps: (x.mean(0), channels)
    torch.batch_norm_gather_stats_with_counts = lambda *args: (channels, channels)
    torch.batch_norm_elemt = lambda x, weight, bias, mean, invstd, eps: x * weight
    torch.batch_norm_backward_reduce = lambda grad, *args: (grad.sum(0),) * 4
    torch.batch_norm_backward_elemt = lambda grad, *args: grad.clone()
    net = torch.nn.Linear(WIDE, WIDE)
    weight, bias = torch.nn.Parameter(channels.clone()), torch.nn.Parameter(channels.clone())
    optimizer = sgd(net)

    def train(batch: torch.Tensor, where: str) -> None:
        if where == "forward":
            late()
        x = net(batch)
        x = SyncBatchNorm.apply(x, weight, bias, None, None, 1e-5, 0.1, dist.group.WORLD, 2)
        if where == "backward":
            x = SlowBackward.apply(x, LATE_S * dist.get_rank())
        x.mean().backward()
        optimizer.step()

    scenario("syncbn forward", 4, lambda batch: train(batch, "forward"))
    scenario("syncbn backward", 4, lambda batch: train(batch, "backward"))


def joined() -> None:
    net = DistributedDataParallel(layers())
    optimizer = sgd(net)

    def train(batch: torch.Tensor) -> None:
        net(batch).mean().backward()
        optimizer.step()

    with net.join():
        scenario("join", 6 + 2 * dist.get_rank(), train)


def pipeline() -> None:
    rank = dist.get_rank()
    stage = PipelineStage(torch.nn.Linear(WIDE, WIDE), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    optimizer = sgd(stage.submod)

    def train(batch: torch.Tensor) -> None:
        if rank:
            schedule.step(target=batch)
        else:
            schedule.step(batch)
        optimizer.step()
        optimizer.zero_grad()

    scenario("pipeline", 5, train)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gpuwatch.watch()
    collectives()
    batch_norm()
    sharded()
    tensor_parallel()
    time.sleep(0.3)  # what becomes n/a must not reach the steps before
    joined()
    time.sleep(0.3)
    pipeline()
    done = Path(os.environ["DONE"])
    while not done.exists():
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.exit(0)
