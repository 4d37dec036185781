"""Unmodified distributed trainings, 8 steps a rank each: DDP, DDP with a static graph, FSDP2.

Then they wait for DONE.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Items(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        # A worker may train itself: it is still no rank.
        weight = torch.ones(4, requires_grad=True)
        (weight * index).sum().backward()
        assert weight.grad is not None
        return weight.grad


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    items = Items()
    sampler = DistributedSampler(items)
    loader = DataLoader(
        items, batch_size=4, num_workers=2, sampler=sampler, persistent_workers=True
    )
    train(DistributedDataParallel(net()), loader)
    train(DistributedDataParallel(net(), static_graph=True), loader)
    sharded = net()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    train(sharded, loader)
    while not Path(os.environ["DONE"]).exists():
        time.sleep(0.05)
    dist.destroy_process_group()


def net() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    )


def train(model: torch.nn.Module, loader: "DataLoader[torch.Tensor]") -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for batch in loader:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
