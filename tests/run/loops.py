"""Unmodified loops of many kinds, one after the other in one process; each prints what it did.

One JSON line a loop: {"loop": name, "steps": [[batches, samples] of each step]}; the samples are
null where no loader gave them. Then it waits for the file DONE.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

Steps = Sequence[tuple[int, int | None]]

LOOPS: dict[str, Callable[[], Steps]] = {}


def loop(function: Callable[[], Steps]) -> Callable[[], Steps]:
    LOOPS[function.__name__] = function
    return function


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.ones(26, 4)


class Mine(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def data(batches: int = 6, **options: Any) -> "DataLoader[Any]":
    return DataLoader(TensorDataset(torch.ones(4 * batches, 4)), batch_size=4, **options)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


@loop
def plain() -> Steps:
    model = net()
    optimizer = sgd(model)
    for (x,) in data(num_workers=1):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    return [(1, 4)] * 6


@loop
def stream() -> Steps:
    model = net()
    optimizer = sgd(model)
    for x in DataLoader(Stream(), batch_size=4):
        model(x).mean().backward()
        optimizer.step()
    return [(1, 4)] * 6 + [(1, 2)]


@loop
def accumulation_with_a_partial_window() -> Steps:
    model = net()
    optimizer = sgd(model)
    for _ in range(2):
        for n, (x,) in enumerate(data(7)):
            (model(x).mean() / 3).backward()
            if n % 3 == 2 or n == 6:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return [(3, 12), (3, 12), (1, 4)] * 2


@loop
def amp_with_a_scaler() -> Steps:
    model = net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    for n, (x,) in enumerate(data()):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).mean()
        if n == 3:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [(1, 4)] * 6


@loop
def validation_with_gradients_on_or_off() -> Steps:
    model = net()
    optimizer = sgd(model)
    held_out = data(3, shuffle=True)
    for epoch in range(2):
        for n, (x,) in enumerate(data()):
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if n == 2:
                with torch.set_grad_enabled(epoch == 0):
                    for (y,) in held_out:
                        model(y)
    return [(1, 4)] * 12


@loop
def two_optimizers_in_turn() -> Steps:
    one, other = net(), net()
    first, second = sgd(one), sgd(other)
    for (x,) in data():
        one(x).mean().backward()
        first.step()
        other(x).mean().backward()
        second.step()
    return [(1, 4)] * 6


@loop
def a_critic_five_times_as_often() -> Steps:
    critic, generator = net(), net()
    often, seldom = sgd(critic), sgd(generator)
    for n, (x,) in enumerate(data(10)):
        critic(x).mean().backward()
        often.step()
        if n % 5 == 4:
            generator(x).mean().backward()
            seldom.step()
    return [(1, 4)] * 10


@loop
def two_models_with_an_optimizer_each_and_one_loss() -> Steps:
    one, other = net(), net()
    first, second = sgd(one), sgd(other)
    for (x,) in data():
        (one(x) + other(x)).mean().backward()
        first.step()
        second.step()
    return [(1, 4)] * 6


@loop
def closures() -> Steps:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=3)

    def closure(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for (x,) in data():
        optimizer.step(lambda x=x: closure(x))  # type: ignore[no-untyped-call]
    return [(1, 4)] * 6


@loop
def an_optimizer_that_calls_its_base() -> Steps:
    model = net()
    torch.optim.Adam(model.parameters())
    optimizer = Mine(model.parameters(), lr=1e-3)
    for (x,) in data():
        model(x).mean().backward()
        optimizer.step()
    return [(1, 4)] * 6


@loop
def reentrant_checkpointing() -> Steps:
    model = net()
    optimizer = sgd(model)
    for n, (x,) in enumerate(data()):
        x.requires_grad_()
        checkpoint(model, x, use_reentrant=n % 2 == 0).mean().backward()
        optimizer.step()
    return [(1, 4)] * 6


@loop
def a_compiled_model() -> Steps:
    model = net()
    optimizer = sgd(model)
    compiled = torch.compile(model, backend="aot_eager")
    for (x,) in data():
        compiled(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [(1, 4)] * 6


@loop
def an_error_that_is_survived() -> Steps:
    model = net()
    optimizer = sgd(model)
    before = optimizer.register_step_pre_hook(fail)
    failed = 0
    for n, (x,) in enumerate(data()):
        model(x).mean().backward()
        try:
            optimizer.step()
        except RuntimeError:
            failed += 1
            before.remove()
        assert failed == 1, n
    # The attempt that failed took its batch, and is part of the step that followed.
    return [(2, 8)] + [(1, 4)] * 4


def fail(*_: Any) -> None:
    raise RuntimeError("a hook of the user's")


@loop
def a_batch_fetched_between_forward_and_backward() -> Steps:
    model = net()
    optimizer = sgd(model)
    batches = iter(data())
    x = next(batches)[0]
    while x is not None:
        loss = model(x).mean()
        x = next(batches, (None,))[0]
        loss.backward()
        optimizer.step()
    return [(1, 4)] * 6


@loop
def without_a_loader() -> Steps:
    model = net()
    optimizer = sgd(model)
    for x in iter(lambda: torch.ones(4, 4), None):
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        without_a_loader.left -= 1  # type: ignore[attr-defined]
        if not without_a_loader.left:  # type: ignore[attr-defined]
            break
    return [(1, None)] * 6


without_a_loader.left = 6  # type: ignore[attr-defined]


def in_a_thread() -> Steps:
    """In a process of its own: what trains first is what is watched."""
    done: list[Steps] = []
    thread = threading.Thread(target=lambda: done.append(plain()))
    thread.start()
    thread.join()
    return done[0]


def none_of_torchs() -> Steps:
    """In a process of its own, which never sees an optimizer of torch's."""
    model = net()
    for (x,) in data():
        model(x).mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(p.grad, alpha=1e-3)
                p.grad = None
    return [(1, 4)] * 6


ALONE = {"in_a_thread": in_a_thread, "none_of_torchs": none_of_torchs}


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or LOOPS:
        steps = {**LOOPS, **ALONE}[name]()
        print(json.dumps({"loop": name, "steps": steps}), flush=True)
    while not Path(os.environ["DONE"]).exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
