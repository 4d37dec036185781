"""A small training without a line of ours, which ends in the way named by the first argument.

With more names it forks a child for each, because importing torch takes seconds: their output goes
to files in the current directory, their exit codes to stdout. The steps are taken by hand: the
first optimizer of a process imports for seconds. With STAY set it waits at the end for that file.
"""

import atexit
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


class Items(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        if manner in {"worker raises", "item raises"} and index == 20:
            raise ValueError("bad item 20")
        if manner == "interrupted in a fetch" and index == 20:
            raise KeyboardInterrupt
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


def train() -> None:
    torch.manual_seed(0)
    weight = torch.ones(4, requires_grad=True)
    loss = torch.zeros(())
    workers = int(manner == "worker raises")
    for number, batch in enumerate(DataLoader(Items(), batch_size=4, num_workers=workers)):
        wide = 3 if manner == "forward raises" and number == 5 else 4
        loss = (batch[:, :wide] @ weight).mean()
        if manner == "hook raises" and number == 5:
            loss.register_hook(fail)
        if manner == "backward raises" and number == 5:
            loss = Raises.apply(loss)
        loss.backward()
        with torch.no_grad():
            assert weight.grad is not None
            weight -= 1e-3 * weight.grad
            weight.grad = None
    print("loss", loss.item(), flush=True)
    if manner == "backward twice":
        loss.backward()


def end() -> None:
    stay = os.environ.get("STAY")
    while stay and not Path(stay).exists():
        time.sleep(0.05)
    if manner == "raises":
        raise RuntimeError("on purpose")
    if manner == "exit 3":
        sys.exit(3)
    if manner == "exit words":
        sys.exit("words for stderr")
    if manner == "_exit 5":
        os._exit(5)
    if manner == "atexit raises":
        atexit.register(fail)
    if manner.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, manner))
        time.sleep(5)


if __name__ == "__main__":
    manner = sys.argv[1]
    gc.freeze()  # or the last collections of every child look at all of torch
    for name in sys.argv[2:]:
        child = os.fork()
        if child == 0:
            manner = name
            for fd in (1, 2):
                os.dup2(os.open(f"{name}.{fd}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
            break
        print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    if manner == "thread raises":
        manner = "forward raises"
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    else:
        train()
    end()
