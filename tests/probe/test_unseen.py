"""Optimizers that no mark sees: compiled into the step, or none of torch's."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from marks import MS, Loop, ms
from torch.utils.data import DataLoader

from gpuwatch.probe.accounting import RawStep
from gpuwatch.probe.events import Recorder, Replay
from gpuwatch.probe.patches import Marks
from gpuwatch.probe.telemetry import Telemetry
from gpuwatch.probe.weights import Weights

# --- the accounting ----------------------------------------------------------------------------


def backward(loop: Loop, updated: bool) -> None:
    loop.acc.backward_begin(updated)
    loop.work(20)
    loop.acc.backward_end()


def iteration(loop: Loop, updated: bool, samples: int = 8) -> None:
    loop.fetch(4, samples=samples)
    loop.work(10)
    backward(loop, updated)
    loop.work(3)  # an optimizer, and whatever else


def test_a_step_ends_at_the_fetch_before_the_backward_that_finds_other_weights() -> None:
    loop = Loop()
    for n in range(5):
        iteration(loop, n > 0, samples=1 << n)
    assert loop.acc.unseen
    loop.acc.finish()
    assert [step.samples for step in loop.steps] == [1, 2, 4, 8, 16]
    for step in loop.steps[:-1]:
        assert ms(step) == {"data_wait": 4, "forward": 10, "backward": 20, "other": 3}
        assert step.step_ns == 37 * MS
    # What follows the last backward may be anything.
    assert ms(loop.steps[-1]) == {"data_wait": 4, "forward": 10, "backward": 20}


def test_windows_epochs_and_an_evaluation() -> None:
    loop = Loop()
    for epoch in range(2):
        for n in range(6):
            iteration(loop, n % 3 == 0 and (n > 0 or epoch > 0), samples=1 << n)
        loop.exhaust(ms=1)
        for _ in range(2):
            loop.fetch(2, "val")
            loop.work(5)
        loop.exhaust("val", 1)
        loop.work(500)
    loop.acc.finish()
    assert [step.samples for step in loop.steps] == [7, 56] * 2
    assert [step.batches for step in loop.steps] == [3] * 4
    assert max(step.step_ns for step in loop.steps) == 3 * 37 * MS
    # What follows the very last evaluation is not known.
    assert loop.spans[0].duration_ns == 15 * MS
    assert [span.name for span in loop.spans] == ["eval", "eval"]


def test_without_a_loader_the_steps_end_with_their_backward() -> None:
    loop = Loop()
    for n in range(4):
        loop.work(10)
        backward(loop, n > 0)
        loop.work(3)
    loop.acc.finish()
    assert [step.step_ns for step in loop.steps] == [20 * MS, 33 * MS, 33 * MS, 33 * MS]
    # The optimizer and the forward cannot be told apart.
    assert ms(loop.steps[1]) == {"backward": 20, "other": 13}
    assert not any(step.fetched for step in loop.steps)


def test_where_nothing_tells_an_epoch_without_a_step_does() -> None:
    loop = Loop()
    for _ in range(2):
        for n in range(3):
            iteration(loop, False, samples=1 << n)
        loop.exhaust()
    loop.acc.finish()
    assert [(step.batches, step.samples) for step in loop.steps] == [(3, 7), (1, 1), (1, 2), (1, 4)]
    for step in loop.steps[1:]:
        assert ms(step) == {"data_wait": 4, "forward": 10, "backward": 20, "other": 3}


def test_an_endless_loader_has_its_steps_too() -> None:
    loop = Loop()
    for _ in range(520):
        iteration(loop, False)
    assert [step.batches for step in loop.steps] == [512] + [1] * 7
    assert loop.steps[-1].step_ns == 37 * MS


def test_one_optimizer_that_is_seen_ends_the_guessing() -> None:
    loop = Loop()
    for n in range(3):
        iteration(loop, n > 0)
    for _ in range(3):
        for _ in range(2):
            loop.fetch(4)
            loop.work(10)
            backward(loop, True)  # not asked any more once an optimizer was there
        loop.optimizer(2)
        loop.work(1)
    loop.acc.finish()
    assert not loop.acc.unseen
    assert [step.batches for step in loop.steps[-2:]] == [2, 2]
    assert ms(loop.steps[-2])["optimizer"] == 2


def test_a_closure_that_changes_weights_between_its_calls_is_one_step() -> None:
    loop = Loop()
    for _ in range(2):
        loop.fetch(1)
        loop.acc.optimizer_begin(1)
        for n in range(3):
            loop.work(1)
            backward(loop, n > 0)
        loop.acc.optimizer_end(1)
    loop.acc.finish()
    assert [step.batches for step in loop.steps] == [1, 1]


def test_step_alone_closes_steps_here_too() -> None:
    loop = Loop()
    loop.acc.step()
    for n in range(4):
        iteration(loop, n > 0)
        if n % 2 == 1:
            loop.acc.step()
    assert [step.batches for step in loop.steps] == [2, 2]


# --- torch -------------------------------------------------------------------------------------


class Plain:
    """An optimizer that is none of torch's."""

    def __init__(self, parameters: Iterator[torch.Tensor], *, through_data: bool = False) -> None:
        self.parameters = list(parameters)
        self.through_data = through_data

    def step(self) -> None:
        for p in self.parameters:
            assert p.grad is not None
            if self.through_data:
                p.data = p.data - 1e-3 * p.grad
            else:
                with torch.no_grad():
                    p.sub_(p.grad, alpha=1e-3)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


def steps_of(train: Callable[[], None]) -> tuple[list[RawStep], bool]:
    """What becomes of a training, and whether its optimizer was seen."""
    recorder = Recorder()
    warnings: list[str] = []
    marks = Marks(recorder, warnings.append)
    marks.install()
    try:
        train()
    finally:
        marks.remove()
    recorder.finish()
    replay = Replay(recorder, warnings.append)
    replay.catch_up()
    assert warnings == []
    out = replay.accountant.out
    return [item for item in out if isinstance(item, RawStep)], not replay.accountant.unseen


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("window", [1, 2])
def test_an_optimizer_that_is_none_of_torchs(through_data: bool, window: int) -> None:
    net = torch.nn.Linear(4, 1)
    optimizer = Plain(net.parameters(), through_data=through_data)

    def train() -> None:
        for n, batch in enumerate(DataLoader(torch.ones(32, 4), 4)):  # type: ignore[arg-type]
            net(batch).mean().backward()
            if n % window == window - 1:
                optimizer.step()
                optimizer.zero_grad()

    steps, seen = steps_of(train)
    assert not seen
    assert [step.batches for step in steps] == [window] * (8 // window)
    assert [step.samples for step in steps] == [4 * window] * (8 // window)


@pytest.mark.filterwarnings("ignore")  # the compiler's own; as errors they break what it compiles
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_optimizer_compiled_into_the_step(backend: str) -> None:
    torch._dynamo.reset()
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    @torch.compile(backend=backend)
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(batch).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def train() -> None:
        for batch in DataLoader(torch.ones(32, 4), 4):  # type: ignore[arg-type]
            step(batch)

    before = [p.clone() for p in net.parameters()]
    steps, seen = steps_of(train)
    assert not seen
    assert any(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert [step.batches for step in steps] == [1] * 8
    assert [step.samples for step in steps] == [4] * 8


def test_a_torch_optimizer_is_seen_at_its_first_step() -> None:
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def train() -> None:
        for n, batch in enumerate(DataLoader(torch.ones(32, 4), 4)):  # type: ignore[arg-type]
            net(batch).mean().backward()
            if n % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

    steps, seen = steps_of(train)
    assert seen
    assert [step.batches for step in steps] == [4, 4]


def test_which_weight_is_looked_at() -> None:
    frozen = torch.ones(4)
    weight = torch.ones(4, requires_grad=True)
    weights = Weights()
    assert not weights.updated((frozen * 2).sum())  # a graph without a weight
    loss = (frozen * weight).sum()
    assert not weights.updated(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    assert not weights.updated(loss)
    with torch.no_grad():
        weight.add_(1)
    assert weights.updated(loss)
    assert not weights.updated(loss)
    weight.grad = None
    assert weights.updated(loss)


class Node:
    def __init__(self) -> None:
        self.next_functions: Any = ((self, 0), (self, 0))


def test_a_graph_without_end_is_given_up() -> None:
    class Loss:
        grad_fn = Node()

    assert not Weights().updated(Loss())


# --- what is said of it ------------------------------------------------------------------------


def test_what_cannot_be_known_says_why() -> None:
    loop = Loop()
    telemetry = SimpleNamespace(_accountant=loop.acc)

    def unknown(*, fetched: bool = True) -> dict[str, str]:
        return Telemetry._unseen(telemetry, fetched)  # type: ignore[arg-type]

    assert unknown() == {}
    for n in range(2):
        iteration(loop, n > 0)
    assert list(unknown()) == ["optimizer"]
    # Without a fetch nothing lies between the optimizer and the forward.
    assert list(unknown(fetched=False)) == ["optimizer", "forward"]
    loop.optimizer(1)
    assert unknown() == {}


def test_a_step_compiled_as_a_whole_has_its_data_wait_and_no_more() -> None:
    loop = Loop()
    telemetry = SimpleNamespace(_accountant=loop.acc)
    for _ in range(3):
        loop.fetch(4)
        loop.work(30)
        loop.acc.step()
    assert [ms(step)["data_wait"] for step in loop.steps] == [4, 4, 4]
    unknown = Telemetry._unseen(telemetry, True)  # type: ignore[arg-type]
    assert set(unknown) == {"forward", "backward", "optimizer"}
    assert "compiled" in unknown["backward"]
