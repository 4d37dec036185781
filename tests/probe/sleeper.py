"""A training of one rank whose steps mostly sleep; prints how many it took in SECONDS."""

import os
import time

import torch

import gpuwatch

SECONDS = float(os.environ["SECONDS"])

if os.environ.get("WATCH"):
    gpuwatch.watch(name="sleeper")
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
print("up", flush=True)
ends_s = time.monotonic() + SECONDS
steps = 0
while time.monotonic() < ends_s:
    time.sleep(0.02)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    steps += 1
print("steps", steps, flush=True)
