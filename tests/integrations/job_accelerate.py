"""A loop with Accelerate: gradients accumulated, evaluation and saving after every epoch.

Once as any script would, and once with our line. Run by the tests.
"""

import faulthandler
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

faulthandler.dump_traceback_later(100, exit=True)

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import gpuwatch  # noqa: E402

gpuwatch.watch()


def loader(samples: int, batch_size: int) -> Any:
    return DataLoader(TensorDataset(torch.randn(samples, 64)), batch_size=batch_size)


def train(folder: str, *, ours: bool) -> int:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if ours:
        import gpuwatch.integrations.accelerate

        gpuwatch.integrations.accelerate.watch(accelerator)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    # 7 batches: 3 windows and a half, 4 steps an epoch.
    net, optimizer, batches, held_out = accelerator.prepare(
        net, optimizer, loader(28, 4), loader(24, 8)
    )
    steps = 0
    for _ in range(2):
        for (x,) in batches:
            with accelerator.accumulate(net):
                loss = net(x).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                steps += accelerator.sync_gradients
        net.eval()
        with torch.no_grad():
            for (x,) in held_out:
                net(x)
        net.train()
        accelerator.save_state(folder)
    return steps


def main() -> None:
    steps = []
    for ours in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            steps.append(train(folder, ours=ours))
    print(json.dumps({"steps": steps}), flush=True)
    done = Path(os.environ["DONE"])
    while not done.exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
    sys.exit(0)
