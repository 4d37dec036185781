"""A job on several machines, two ranks on each: DDP over gloo, until the file `stop` is there.

    python job.py DIRECTORY MACHINE...

Each MACHINE is a JSON object: `holder`, whose namespaces its ranks enter, and `environment`, what
they have beyond this process. torch is imported once: a rank is a fork that has done nothing yet.
While the file `slow` in DIRECTORY names a machine, the forward sleeps there.
"""

import ctypes
import faulthandler
import gc
import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gpuwatch

WIDE = 256  # two layers: half a megabyte of gradients a step
STEP_S = 0.04
SLOW_S = 0.12
LONGEST_S = 140.0


class Sleep(torch.nn.Module):
    """Stands for a computation that takes no core: eight ranks share two of them here."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP_S + (SLOW_S if is_slow(self.directory) else 0.0))
        return x


def is_slow(directory: Path) -> bool:
    try:
        return (directory / "slow").read_text() == socket.gethostname()
    except FileNotFoundError:
        return False


def enter(holder: int) -> None:
    """Go to the machine of the holder: its network and its hostname."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts"):
        fd = os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY)
        if libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), f"setns {kind}")
        os.close(fd)


def train(directory: Path) -> None:
    faulthandler.dump_traceback_later(LONGEST_S + 10, exit=True)
    torch.set_num_threads(1)
    gpuwatch.watch(name="four-hosts")
    dist.init_process_group("gloo")
    layers = [torch.nn.Linear(WIDE, WIDE) for _ in range(2)]
    model = DistributedDataParallel(torch.nn.Sequential(Sleep(directory), *layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    ends_s = time.monotonic() + LONGEST_S
    going = torch.ones(1)
    while bool(going):
        model(torch.ones(1, WIDE)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and ((directory / "stop").exists() or time.monotonic() > ends_s):
            going.zero_()
        dist.broadcast(going, src=0)  # all leave after the same step
    dist.destroy_process_group()


def main() -> None:
    directory, machines = Path(sys.argv[1]), [json.loads(word) for word in sys.argv[2:]]
    world_size = 2 * len(machines)
    gc.freeze()  # else each of them looks at all of torch, three times, when it ends
    children = []
    for rank in range(world_size):
        pid = os.fork()
        if not pid:
            machine = machines[rank // 2]
            enter(machine["holder"])
            os.environ.update(machine["environment"])
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % 2), WORLD_SIZE=str(world_size))
            train(directory)
            return
        children.append(pid)
    failed = [pid for pid in children if os.waitpid(pid, 0)[1]]
    sys.exit(f"{len(failed)} ranks failed" if failed else 0)


if __name__ == "__main__":
    main()
