"""An unmodified DistributedDataParallel training: 8 steps a rank, then it waits for DONE."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
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
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    items = Items()
    sampler = DistributedSampler(items)
    loader = DataLoader(
        items, batch_size=4, num_workers=2, sampler=sampler, persistent_workers=True
    )
    for batch in loader:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    while not Path(os.environ["DONE"]).exists():
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
