"""A small training that ends in the way named by the first argument; watched if WATCH is set."""

import os
import resource
import signal
import sys
import threading
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


def fail(*_: Any) -> None:
    raise ValueError("in a hook")


def train(model: torch.nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def closure(out: torch.Tensor) -> torch.Tensor:
        if done == 5:
            raise ValueError("in a closure")
        out.sum().backward()  # type: ignore[no-untyped-call]
        return out

    workers = 2 if manner in {"worker raises", "workers"} else 0
    done = 0
    for batch in DataLoader(Items(), batch_size=4, num_workers=workers):
        if manner == "forward raises" and done == 5:
            batch = batch[:, :3]  # noqa: PLW2901
        out = model(batch)
        if manner == "step hook raises" and done == 5:
            optimizer.register_step_pre_hook(fail)
        if manner == "closure raises":
            optimizer.step(lambda out=out: closure(out))
            done += 1
            continue
        if manner == "backward raises" and done == 5:
            out = Raises.apply(out)  # type: ignore[no-untyped-call]
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done == steps:
            break
    # One write a line: the child of a fork shares the pipe.
    sys.stdout.write(f"steps {done}\n")
    sys.stdout.flush()


def fill_the_disk() -> None:
    """From now on no file can grow, as on a full disk; what torch imports late needs some."""
    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.01).step()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def main() -> None:
    if manner == "full":
        fill_the_disk()
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
    if manner == "thread":
        thread = threading.Thread(target=train, args=(model, 8))
        thread.start()
        thread.join()
    else:
        train(model, 8)
    if os.environ.get("WATCH"):
        time.sleep(0.3)
    if manner == "raises":
        raise RuntimeError("on purpose")
    if manner == "exit 3":
        sys.exit(3)
    if manner == "exit words":
        sys.exit("words for stderr")
    if manner == "_exit 5":
        os._exit(5)
    if manner.startswith("SIG"):
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
