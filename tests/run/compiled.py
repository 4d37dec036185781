"""Compiles a model, a whole step and a whole epoch, and prints what the compiler did, as JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader


def parts() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    return net, torch.optim.SGD(net.parameters(), lr=0.01), DataLoader(torch.ones(32, 4), 4)


def model() -> None:
    net, optimizer, loader = parts()
    compiled = torch.compile(net, backend="aot_eager")
    for batch in loader:
        compiled(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def step() -> None:
    net, optimizer, loader = parts()

    @torch.compile(backend="eager")
    def train(batch: torch.Tensor) -> torch.Tensor:
        loss = net(batch).sum() * 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss + 1

    for batch in loader:
        train(batch)


def epoch() -> None:
    net, optimizer, loader = parts()

    @torch.compile(backend="eager")
    def train(batches: Any) -> Any:
        total = 0
        for batch in batches:
            loss = net(batch).sum() * 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = total + loss.detach()
        return total

    train(loader)
    train(loader)


def told(part: Callable[[], None]) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    part()
    names = ("frames", "stats", "graph_break", "recompiles", "unimplemented")
    return {name: dict(counters[name]) for name in names}


def script(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch.autograd.backward([y])
    return y


print(json.dumps({part.__name__: told(part) for part in (model, step, epoch)}, sort_keys=True))
print(torch.jit.script(script).graph)
probe = sys.modules.get("gpuwatch.probe")
print("watched" if getattr(probe, "_probe", None) else "bare", file=sys.stderr)
