"""Leaks are found where they are injected, and nowhere else."""

import collections
import gc
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainer.memory import leaks
from trainer.memory.leaks import Leak, LeakChecks

pytestmark = pytest.mark.usefixtures("one_thread")


class Loop:
    """A training loop of short steps, with something done around each of them."""

    def __init__(self, *, interval: int = 10, optimizer: str = "sgd", clear: str = "after") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)
            if optimizer == "sgd"
            else torch.optim.AdamW(parameters, fused=True)
        )
        self.interval = interval
        self.clear = clear
        self.checks = LeakChecks(self.model, interval_steps=interval)
        self.found: list[tuple[int, Leak]] = []
        self.step = 0

    def run(
        self,
        steps: int,
        after: Callable[[torch.Tensor], object] = lambda loss: None,
        samples: Callable[[], int] = lambda: 8,
    ) -> None:
        for _ in range(steps):
            self.step += 1
            count = samples()
            if self.clear == "before":
                self.optimizer.zero_grad(set_to_none=False)
            output = self.model(torch.randn(count, 8))
            loss = nn.functional.cross_entropy(output, torch.randint(0, 4, (count,)))
            loss.backward()
            self.optimizer.step()
            if self.clear == "after":
                self.optimizer.zero_grad()
            after(loss)
            self.found += [(self.step, leak) for leak in self.checks.after_step(self.step, loss)]

    @property
    def kinds(self) -> list[str]:
        return [leak.kind for _, leak in self.found]

    @property
    def looks(self) -> float:
        """Looks that it took to find the first."""
        return self.found[0][0] / self.interval


@pytest.mark.parametrize("clear", ["after", "before"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_clean_run_gives_no_alarm(optimizer: str, clear: str) -> None:
    loop = Loop(optimizer=optimizer, clear=clear)
    loop.run(1000)
    assert loop.found == []


def test_kept_losses_are_found_once() -> None:
    loop, kept = Loop(), []
    loop.run(200, kept.append)
    assert loop.kinds == ["kept_graph"]
    assert loop.looks <= 5
    assert "losses of earlier steps" in loop.found[0][1].sentence
    assert "1 a step" in loop.found[0][1].sentence


def test_kept_results_are_found_when_the_loss_handed_over_is_detached() -> None:
    loop = Loop()
    kept: list[torch.Tensor] = []
    original = loop.checks.after_step
    loop.checks.after_step = lambda step, loss=None: original(step, loss.detach())  # type: ignore[method-assign,union-attr]
    loop.run(200, lambda loss: kept.append(loss * 2))
    assert loop.kinds == ["kept_graph"]
    assert "float32 scalar" in loop.found[0][1].sentence


def test_the_bytes_of_kept_graphs_are_told_where_they_stand_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, kept = Loop(), []
    # Resident memory as it would rise with graphs of 1 MiB.
    monkeypatch.setattr(leaks, "status_bytes", lambda _: 2**30 + loop.step * 2**20)
    loop.run(60, kept.append)
    assert loop.found[0][1].bytes_per_step == 2**20


def test_growing_tensors_are_found_and_weighed() -> None:
    loop, kept = Loop(), []
    loop.run(200, lambda _: kept.append(torch.ones(4096)))
    assert loop.kinds == ["growing_tensors"]
    assert loop.looks <= 5
    (leak,) = (leak for _, leak in loop.found)
    assert leak.bytes_per_step == pytest.approx(4096 * 4, rel=0.2)
    assert "float32 4096" in leak.sentence
    assert "16 KiB a step" in leak.sentence


def test_a_leak_that_begins_late_is_found_within_five_looks() -> None:
    loop, kept = Loop(), []
    loop.run(305)
    loop.run(100, lambda _: kept.append(torch.ones(4096)))
    assert loop.kinds == ["growing_tensors"]
    assert loop.found[0][0] <= 305 + 5 * loop.interval


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_forgotten_zero_grad_is_found(optimizer: str) -> None:
    loop = Loop(optimizer=optimizer, clear="never")
    loop.run(200)
    assert loop.kinds == ["forgotten_zero_grad"]
    assert loop.looks <= 5
    assert not any(p._backward_hooks for p in loop.model.parameters())  # type: ignore[attr-defined]


def test_gradients_that_wait_for_another_optimizers_turn_are_no_alarm() -> None:
    loop = Loop(clear="never")
    turns = 0

    def seldom() -> None:
        nonlocal turns
        turns += 1
        if turns % 25 == 0:
            step()
            loop.optimizer.zero_grad()

    step, loop.optimizer.step = loop.optimizer.step, seldom  # type: ignore[method-assign,assignment]
    loop.run(300)
    assert loop.found == []


def test_tensors_that_are_few_or_small_are_left_alone() -> None:
    loop, kept = Loop(), []
    loop.run(300, lambda loss: kept.append(loss.detach()))
    assert loop.found == []


def test_cycles_that_await_collection_are_no_leak() -> None:
    loop = Loop()

    def tie(loss: torch.Tensor) -> None:
        knot: list[object] = [loss, torch.ones(4096)]
        knot.append(knot)

    before = gc.isenabled()
    gc.disable()
    try:
        loop.run(100, tie)
    finally:
        if before:
            gc.enable()
    assert loop.found == []


def test_nothing_is_looked_at_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(interval=50)
    looked: list[int] = []
    young, gradients = leaks._young_tensors, loop.checks._gradients.after_step

    def counted() -> list[torch.Tensor]:
        looked.append(loop.step)
        return young()

    def asked(*, due: bool) -> bool:
        looked.append(-loop.step)
        return gradients(due=due)

    monkeypatch.setattr(leaks, "_young_tensors", counted)
    monkeypatch.setattr(loop.checks._gradients, "after_step", asked)
    loop.run(160)
    assert looked == [-50, 50, -100, 100, -150, 150]


def test_no_tensor_is_kept_alive() -> None:
    import weakref

    loop = Loop(interval=1)
    losses: list[weakref.ref[torch.Tensor]] = []
    loop.run(20, lambda loss: losses.append(weakref.ref(loss)))
    gc.collect()
    assert sum(ref() is not None for ref in losses) == 0


def test_cuda_memory_that_python_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(series: Callable[[int], int]) -> list[str]:
        loop = Loop()
        loop.checks._device = torch.device("cuda", 0)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: series(loop.step))
        loop.run(150)
        return loop.kinds

    rng = random.Random(1)
    assert found(lambda step: 2**30 + 2**20 * step) == ["growing_tensors"]
    assert found(lambda step: 2**30) == []
    assert found(lambda step: 2**30 + rng.randrange(2**28)) == []
    assert found(lambda step: 2**30 + 2**10 * step) == []  # below the floor
    assert found(lambda step: 2**30 + 2 ** (20 + step // 10)) == []  # no straight line
    assert found(lambda step: 2**30 + 2**20 * (step + step // 10 % 2 * 24)) == []  # with dips


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    optimizer=st.sampled_from(["sgd", "adamw"]),
    clear=st.sampled_from(["after", "before"]),
    buffered=st.integers(0, 20),
    keeps_losses=st.booleans(),
)
def test_clean_loops_of_any_kind_give_no_alarm(
    seed: int, optimizer: str, clear: str, buffered: int, keeps_losses: bool
) -> None:
    """Batches of random size, the last so many results kept, an epoch's losses in a list."""
    rng = random.Random(seed)
    loop = Loop(optimizer=optimizer, clear=clear)
    # Up to two intervals: what is kept longer cannot be told from a leak before it is full.
    last: collections.deque[torch.Tensor] = collections.deque(maxlen=buffered)
    losses: list[torch.Tensor] = []

    def after(loss: torch.Tensor) -> None:
        last.append(torch.ones(rng.randrange(1, 8192)))
        if keeps_losses:
            losses.append(loss.detach())
        if rng.random() < 0.02:
            losses.clear()

    loop.run(150, after, lambda: rng.randrange(1, 64))
    assert loop.found == []
