"""A small training that ends in the way named by the first argument; watched if WATCH is set."""

import os
import signal
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

manner = sys.argv[1]


class Items(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if manner == "worker raises" and index == 20:
            raise ValueError("bad item 20")
        return torch.full((4,), float(index))


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise ValueError("in backward")


def train(model: torch.nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    workers = 2 if manner in {"worker raises", "workers"} else 0
    done = 0
    for batch in DataLoader(Items(), batch_size=4, num_workers=workers):
        out = model(batch)
        if manner == "backward raises" and done == 5:
            out = Raises.apply(out)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done == steps:
            break
    # One write a line: the child of a fork shares the pipe.
    sys.stdout.write(f"steps {done}\n")
    sys.stdout.flush()


def main() -> None:
    if os.environ.get("WATCH"):
        import gpuwatch

        gpuwatch.watch(name=manner)
        gpuwatch.watch(name="again")
    time.sleep(0.3)  # a run that is over sooner than it is found is seen by nobody
    model = torch.nn.Linear(4, 1)
    if manner == "fork":
        child = os.fork()
        train(model, 6)
        if child == 0:
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        return
    train(model, 8)
    time.sleep(0.3)
    if manner == "raises":
        raise RuntimeError("on purpose")
    if manner == "exit 3":
        sys.exit(3)
    if manner == "exit words":
        sys.exit("words for stderr")
    if manner == "_exit 5":
        os._exit(5)
    if manner in {"SIGTERM", "SIGKILL", "SIGINT"}:
        os.kill(os.getpid(), getattr(signal, manner))
        time.sleep(5)
    if manner == "atexit raises":
        import atexit

        atexit.register(lambda: 1 / 0)
    if manner == "unwatch":
        if os.environ.get("WATCH"):
            import gpuwatch

            gpuwatch.unwatch()
        train(model, 4)


if __name__ == "__main__":
    main()
