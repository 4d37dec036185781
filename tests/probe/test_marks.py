"""The marks on the real torch, in this process: checkpoints, errors, reentrant backward."""

import contextlib
import io
import pickle
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from gpuwatch.probe import events
from gpuwatch.probe.accounting import BACKWARD, COMM, RawSpan, RawStep
from gpuwatch.probe.events import Recorder, Replay
from gpuwatch.probe.patches import Marks


class Watched:
    """Marks that are on, and what became of them."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.warnings: list[str] = []
        self.marks = Marks(self.recorder, self.warnings.append)
        self.marks.install()
        self._replay = Replay(self.recorder)
        self._out: list[RawStep | RawSpan] = []

    def codes(self) -> list[int]:
        return [event[0] for event in self.recorder.events]

    def out(self) -> list[RawStep | RawSpan]:
        self._replay.catch_up()
        self._out += self._replay.accountant.out
        self._replay.accountant.out.clear()
        return self._out

    @property
    def steps(self) -> list[RawStep]:
        return [item for item in self.out() if isinstance(item, RawStep)]

    @property
    def spans(self) -> list[RawSpan]:
        return [item for item in self.out() if isinstance(item, RawSpan)]


@pytest.fixture
def watched() -> Iterator[Watched]:
    found = Watched()
    try:
        yield found
        assert found.warnings == []
    finally:
        found.marks.remove()


def data(batches: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(4 * batches, 8)), batch_size=4, **options)


class Job:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(8, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, batch: list[torch.Tensor]) -> None:
        self.model(batch[0]).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


# --- checkpoints -------------------------------------------------------------------------------


def test_saving_is_a_span_and_leaves_the_step(watched: Watched, tmp_path: Path) -> None:
    job = Job()
    for n, batch in enumerate(data(4)):
        job.step(batch)
        if n == 1:
            torch.save(job.model.state_dict(), tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt")["weight"].shape == (1, 8)
    (span,) = watched.spans
    assert (span.name, span.step) == ("checkpoint", 2)
    assert span.duration_ns > 0
    assert len(watched.steps) == 4
    saved_in = watched.steps[1]
    assert saved_in.start_ns < span.start_ns
    # The step's own time and the span cover it all: the saving is not in both.
    end_ns = watched.steps[2].start_ns
    assert saved_in.step_ns + span.duration_ns == end_ns - saved_in.start_ns


def test_safetensors_are_spans_under_whatever_name_they_were_imported(
    watched: Watched, tmp_path: Path
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    from safetensors.torch import save_file as bound_before

    for _ in data(1):  # imported after the marks went on: seen when an iterator begins
        pass
    model = torch.nn.Linear(2, 2)
    bound_before({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    safetensors.save_model(model, str(tmp_path / "b.safetensors"))  # calls save_file
    assert [span.name for span in watched.spans] == ["checkpoint", "checkpoint"]
    assert safetensors.load_file(tmp_path / "b.safetensors").keys() == {"weight", "bias"}


def test_a_loop_without_a_loader_has_checkpoints_too(watched: Watched, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    Job().step([torch.ones(4, 8)])
    safetensors.save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    assert [span.name for span in watched.spans] == ["checkpoint"]


def test_a_distributed_checkpoint_counts_once(watched: Watched, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    for _ in data(1):
        pass
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.save({"model": torch.nn.Linear(2, 2).state_dict()}, checkpoint_id=tmp_path / "dcp")
    assert (tmp_path / "dcp" / ".metadata").exists()
    assert [span.name for span in watched.spans] == ["checkpoint"]


def test_nothing_imports_what_writes_checkpoints() -> None:
    import subprocess
    import sys

    code = (
        "import sys, gpuwatch; gpuwatch.watch(); "
        "print([m for m in ('safetensors.torch', 'torch.distributed.checkpoint')"
        " if m in sys.modules]); gpuwatch.unwatch()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_saving_in_another_thread_is_no_span(watched: Watched) -> None:
    thread = threading.Thread(target=torch.save, args=(torch.ones(1), io.BytesIO()))
    thread.start()
    thread.join()
    assert watched.codes() == []


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle of this")


def test_a_saving_that_raises_ends_its_span(watched: Watched) -> None:
    with pytest.raises(RuntimeError, match="no pickle of this") as raised:
        torch.save({"x": Unpicklable()}, io.BytesIO())
    files = {frame.filename for frame in traceback.extract_tb(raised.tb)}
    assert not any("gpuwatch/probe" in name for name in files)
    assert watched.codes() == [events.SPAN_BEGIN, events.SPAN_END]


def test_the_saving_function_stays_what_it_was(watched: Watched) -> None:
    assert pickle.loads(pickle.dumps(torch.save)) is torch.save
    assert torch.save is torch.serialization.save


def test_the_marks_are_taken_off_the_savers() -> None:
    found = Watched()
    found.marks.remove()
    torch.save(torch.ones(1), io.BytesIO())
    assert found.codes() == []


# --- loaders -----------------------------------------------------------------------------------


def test_two_loaders_over_the_same_data_are_told_apart(watched: Watched) -> None:
    dataset = TensorDataset(torch.ones(16, 8))
    train = DataLoader(dataset, batch_size=4, shuffle=True)
    accuracy = DataLoader(dataset, batch_size=8)
    job = Job()
    for _ in range(2):
        for n, batch in enumerate(train):
            job.step(batch)
            if n == 1:
                for _ in accuracy:
                    pass
        # A loader made anew in every epoch stays the same one.
        train = DataLoader(dataset, batch_size=4, shuffle=True)
    assert [step.samples for step in watched.steps] == [4] * 8
    assert len({step.loader for step in watched.steps}) == 1
    assert len(watched.marks.loaders) == 2
    assert [span.name for span in watched.spans] == ["eval"] * 2


class Faulty(TensorDataset):
    def __init__(self, error: BaseException) -> None:
        super().__init__(torch.ones(24, 8))
        self.error = error
        self.raised = False

    def __getitem__(self, index: int) -> Any:
        if index == 8 and not self.raised:
            self.raised = True
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a broken file")])
def test_a_fetch_that_raises_leaves_nothing_behind(watched: Watched, error: BaseException) -> None:
    job = Job()
    iterator = iter(DataLoader(Faulty(error), batch_size=4))
    for _ in range(2):
        job.step(next(iterator))
    with pytest.raises(type(error)):
        next(iterator)
    for batch in iterator:
        job.step(batch)
    assert [step.samples for step in watched.steps] == [4] * 5
    assert [step.batches for step in watched.steps] == [1] * 5


def test_a_first_fetch_ahead_that_raises_keeps_what_was_fetched(watched: Watched) -> None:
    job = Job()
    dataset = Faulty(ValueError("a broken file"))
    iterator = iter(DataLoader(dataset, batch_size=8))
    ahead = next(iterator)
    with pytest.raises(ValueError, match="broken"):
        next(iterator)
    for batch in iterator:
        job.step(ahead)
        ahead = batch
    job.step(ahead)
    assert [step.samples for step in watched.steps] == [8, 8]


# --- backward and optimizer --------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fail: bool) -> torch.Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.fail:
            raise RuntimeError("in backward")
        return grads[0], None


@pytest.mark.parametrize("where", ["backward", "closure", "optimizer", "reentrant"])
@pytest.mark.parametrize("distributed", [False, True])
def test_what_raises_leaves_nothing_behind(watched: Watched, where: str, distributed: bool) -> None:
    watched.recorder.distributed = distributed
    job = Job()

    def loss(batch: list[torch.Tensor], fail: bool) -> torch.Tensor:
        out = job.model(batch[0])
        if where == "reentrant":
            out = checkpoint(Fails.apply, out, fail, use_reentrant=True)
        return Fails.apply(out, fail and where != "optimizer").mean()

    def closure(batch: list[torch.Tensor], fail: bool) -> torch.Tensor:
        found = loss(batch, fail)
        found.backward()
        if fail and where == "optimizer":
            raise RuntimeError("in the optimizer")
        return found

    raised = 0
    for n, batch in enumerate(data(8)):
        fail = n == 3
        try:
            if where in {"closure", "optimizer"}:
                job.optimizer.step(lambda b=batch, f=fail: closure(b, f))
            else:
                loss(batch, fail).backward()
                job.optimizer.step()
        except RuntimeError:
            raised += 1
    assert raised == 1
    steps = watched.steps
    assert len(steps) == 7
    # The failed attempt took time and is in the step after it; its batch is in none, unless its
    # backward went through.
    wasted = int(where == "optimizer")
    assert [step.samples for step in steps] == [4, 4, 4, 4 + 4 * wasted, 4, 4, 4]
    for step in steps:
        assert sum(step.phases_ns) == step.step_ns
        assert all(value >= 0 for value in step.phases_ns)
    names = dict(
        zip(("wait", "h2d", "fwd", "bwd", "comm", "opt"), steps[-2].phases_ns, strict=False)
    )
    assert all(names[name] > 0 for name in ("wait", "fwd", "bwd", "opt")), names


class SleepsAndFails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(0.05)
        raise RuntimeError("in backward")


def test_a_backward_that_raises_after_one_inside_it_was_not_communication(
    watched: Watched,
) -> None:
    watched.recorder.distributed = True
    job = Job()
    for n, batch in enumerate(data(3)):
        out = job.model(batch[0])
        if n == 0:
            out = SleepsAndFails.apply(out)
        loss = checkpoint(torch.sigmoid, out, use_reentrant=True).mean()
        with contextlib.suppress(RuntimeError):
            loss.backward()
            job.optimizer.step()
    first = watched.steps[0]
    assert first.phases_ns[BACKWARD] > 50e6
    assert first.phases_ns[COMM] < 25e6


@pytest.mark.parametrize("deep", [1, 70])
def test_reentrant_checkpointing_is_one_backward(watched: Watched, deep: int) -> None:
    """From some depth on, the engine goes on in threads of its own."""
    watched.recorder.distributed = True  # so that the end of computing is looked for
    job = Job()

    def nested(x: torch.Tensor, levels: int) -> torch.Tensor:
        if not levels:
            return x * 1.0
        return checkpoint(nested, x, levels - 1, use_reentrant=True)

    for batch in data(3):
        nested(job.model(batch[0]), deep).mean().backward()
        job.optimizer.step()
    steps = watched.steps
    assert [step.batches for step in steps] == [1] * 3
    for step in steps:
        assert sum(step.phases_ns) == step.step_ns
        wait, _, forward, backward, comm, optimizer, _ = step.phases_ns
        assert min(wait, forward, backward, optimizer) > 0
        # There is no communication: what lies between the mark and the return is microseconds.
        assert comm < backward


def test_an_attempt_under_a_scaler_counts_once_skipped_or_not(watched: Watched) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for n, (batch,) in enumerate(DataLoader(TensorDataset(torch.ones(3, 4)), batch_size=1)):
        loss = model(batch).sum() * (float("inf") if n == 1 else 1.0)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    watched.recorder.finish()
    assert watched.recorder.attempts == 3
    assert ["skipped" in step.tags for step in watched.steps] == [False, True, False]
