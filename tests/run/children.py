"""A process that never trains, and its children by every start method, which do; no optimizer,
because the first one of a process imports for seconds. They wait at the end for the file DONE.
"""

import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Items(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        weight = torch.ones(4, requires_grad=True)
        if get_worker_info() is not None:
            (weight * index).sum().backward()
        return weight.detach()


def train(method: str) -> None:
    weight = torch.ones(4, requires_grad=True)
    # A spawned worker imports this script and torch again, runs a backward, and stays.
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}
    options: dict[str, Any] = spawned if method == "spawn" else {}
    loader = DataLoader(Items(), 4, **options)
    for batch in loader:
        (batch @ weight).sum().backward()
    print(method, "trained", flush=True)
    while not Path(os.environ["DONE"]).exists():
        time.sleep(0.05)


if __name__ == "__main__":
    children = [
        multiprocessing.get_context(method).Process(target=train, args=(method,))
        for method in ("fork", "spawn", "forkserver")
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    sys.exit(any(child.exitcode for child in children))
