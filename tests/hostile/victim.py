"""Trainings to be attacked. Reads a JSON line each: {"figures": path, "env": {...}}, and forks one.

A training is a plain loop of steps of about 5 ms that is watched and never ends. `figures` is a
file of two 64-bit numbers that it keeps: its steps, and the CPU time of the training thread in ns.
torch is imported once for all of them.
"""

import json
import mmap
import os
import signal
import struct
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # what the first optimizer step imports

import gpuwatch

WIDE = 64


def train(figures: Path) -> None:
    figures.write_bytes(bytes(16))
    with figures.open("r+b") as file:
        kept = mmap.mmap(file.fileno(), 16)
    torch.set_num_threads(1)
    gpuwatch.watch(name="victim")
    net = torch.nn.Sequential(torch.nn.Linear(WIDE, WIDE), torch.nn.Linear(WIDE, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    batch = torch.ones(4, WIDE)
    steps = 0
    while True:
        net(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.004)
        steps += 1
        kept[:] = struct.pack("=QQ", steps, time.thread_time_ns())


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    print(0, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.environ.update(task["env"])
            train(Path(task["figures"]))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
