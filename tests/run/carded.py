"""A training of some seconds with a loader that is too slow, without a line of ours.

The first argument says how it ends: plainly, raises, or kills (itself, with SIGKILL); with RANK
set, rank 1 of a gloo job does that and the others go on.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS = 60


class Items(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.full((16,), float(index))


def end(manner: str) -> None:
    if manner == "raises":
        raise RuntimeError("on purpose\nand more of it")
    if manner == "kills":
        os.kill(os.getpid(), signal.SIGKILL)


def train(manner: str) -> None:
    torch.set_num_threads(1)
    model: torch.nn.Module = torch.nn.Linear(16, 1)
    rank = 1
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(DataLoader(Items(), batch_size=6, num_workers=1)):
        loss = model(batch / 1e4).mean()
        if step == STEPS - 5 and rank == 1:
            end(manner)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == STEPS:
            break
    print("done", flush=True)


if __name__ == "__main__":
    train(sys.argv[1])
