"""A training of one rank whose steps mostly sleep; prints how many it took.

It says that it is up. With GO and DONE, names of files, it trains from the one until the other is
there, else for SECONDS.
"""

import os
import time
from pathlib import Path

import torch

import gpuwatch

GO, DONE = os.environ.get("GO"), os.environ.get("DONE")

if os.environ.get("WATCH"):
    gpuwatch.watch(name="sleeper")
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
print("up", flush=True)
while GO and not Path(GO).exists():
    time.sleep(0.01)
ends_s = time.monotonic() + float(os.environ.get("SECONDS", "inf"))
steps = 0
while time.monotonic() < ends_s and not (DONE and Path(DONE).exists()):
    time.sleep(0.02)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    steps += 1
print("steps", steps, flush=True)
