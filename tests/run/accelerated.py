"""An unmodified loop with Accelerate whose first rank loads for all; waits for DONE at the end."""

import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, Dataset

ITEM_S = 0.005
BATCHES = 10


class Items(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        # The last batch is one item short of being shared evenly.
        return 4 * 2 * BATCHES - 3

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(ITEM_S)
        return torch.ones(4)


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
    )
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    loader = DataLoader(Items(), batch_size=4)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            accelerator.backward(net(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
    print("trained", flush=True)
    while not Path(os.environ["DONE"]).exists():
        time.sleep(0.05)
    accelerator.end_training()


if __name__ == "__main__":
    main()
