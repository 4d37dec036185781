"""The device's clock on a real card."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gpuwatch.frames import decode_rank_frame
from gpuwatch.probe import _annotate, _Probe
from gpuwatch.probe.events import Recorder
from gpuwatch.probe.patches import Marks
from gpuwatch.probe.telemetry import Telemetry
from gpuwatch.schema import Bye, RankState, StepRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

MS = 1_000_000
CYCLES = 20_000_000  # of the card's own counter: some 10 ms


class Watched:
    """Marks that are on, and a telemetry that is asked by hand."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.recorder = Recorder()
        self.marks = Marks(self.recorder, self.told.append)
        self.marks.install()
        self.telemetry = Telemetry(
            self.recorder, self.marks, name="", control=False, notices=[], warn=self.told.append
        )
        self.probe = _Probe(self.recorder, self.marks, self.telemetry)
        self.records: list[StepRecord] = []

    def annotate(self, loss: torch.Tensor) -> None:
        _annotate(self.probe, None, None, loss, None, None, None)

    def ask(self, bye: Bye | None = None) -> RankState:
        frame = decode_rank_frame(self.telemetry._frame(bye=bye))
        self.records += frame.records
        return frame.state

    def finish(self) -> RankState:
        torch.cuda.synchronize()
        self.recorder.finish()
        return self.ask(Bye("finished"))


@pytest.fixture
def watched() -> Iterator[Watched]:
    torch.cuda.init()
    found = Watched()
    try:
        yield found
        assert found.told == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
        found.marks.remove()


class Job:
    def __init__(self, width: int = 64) -> None:
        self.model = torch.nn.Linear(width, 1, device="cuda")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)
        self.data = torch.ones(512, width).pin_memory()

    def batches(self, count: int) -> DataLoader[Any]:
        return DataLoader(TensorDataset(self.data[: 4 * count]), batch_size=4, pin_memory=True)

    def step(self, batch: torch.Tensor, *, sleep: int = 0) -> torch.Tensor:
        x = batch.to("cuda", non_blocking=True)
        if sleep:
            torch.cuda._sleep(sleep)
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


def slept_ms(cycles: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def known(watched: Watched) -> list[StepRecord]:
    return [record for record in watched.records if record.clock == "device"]


def test_the_device_is_timed_while_the_host_runs_ahead(watched: Watched) -> None:
    truth_ms = slept_ms(CYCLES)
    job = Job()
    for (batch,) in job.batches(24):
        job.step(batch, sleep=CYCLES)
    state = watched.finish()
    records = known(watched)[3:]
    assert len(records) >= 15
    for record in records:
        assert record.device is not None
        assert record.device.forward is not None
        assert record.device.forward / MS == pytest.approx(truth_ms, rel=0.3)
    assert "forward" in state.phases_na["h2d"]
    assert state.device_dropped <= 2


def test_nothing_ever_waits_for_the_device(watched: Watched) -> None:
    job = Job()
    loader = job.batches(64)
    for n, (batch,) in enumerate(loader):
        if n == 2:
            torch.cuda.set_sync_debug_mode("error")
        watched.annotate(job.step(batch, sleep=CYCLES // 20))
        watched.ask()
    torch.cuda.set_sync_debug_mode("default")
    watched.finish()
    assert len(known(watched)) >= 50


def test_numbers_are_what_they_were(watched: Watched) -> None:
    job = Job()
    truth = []
    for n, (batch,) in enumerate(job.batches(8)):
        loss = job.step(batch, sleep=CYCLES)
        truth.append(loss.detach().clone())
        watched.annotate(loss if n % 2 else loss.double())
        loss.detach().zero_()  # it has been copied, in the order of the stream
        time.sleep(0.12)  # ten a second are taken
    watched.finish()
    found = [record.loss for record in watched.records]
    assert found == pytest.approx([value.item() for value in truth])


def test_the_scale_of_a_scaler_is_read_beside_the_training(watched: Watched) -> None:
    job = Job()
    scaler = torch.amp.GradScaler("cuda", init_scale=512.0)
    for (batch,) in job.batches(6):
        with torch.autocast("cuda", torch.float16):
            loss = job.model(batch.cuda()).square().mean()
        scaler.scale(loss).backward()
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()
    state = watched.finish()
    assert state.loss_scale == 512.0


def test_a_graph_is_captured_as_without_us(watched: Watched) -> None:
    job = Job()
    x = torch.ones(4, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            job.optimizer.zero_grad(set_to_none=True)
            job.model(x).square().mean().backward()
            job.optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    job.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = job.model(x).square().mean()
        watched.annotate(loss)
        loss.backward()
        job.optimizer.step()
    before = job.model.weight.detach().clone()
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(before, job.model.weight)
    for (batch,) in job.batches(12):
        job.step(batch)
    watched.finish()
    assert len(known(watched)) >= 8


def test_a_stream_of_the_users_own_is_the_one_that_is_timed(watched: Watched) -> None:
    truth_ms = slept_ms(CYCLES)
    watched.recorder.distributed = True  # so that the end of computing is marked too
    job = Job()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for (batch,) in job.batches(16):
            job.step(batch, sleep=CYCLES)
    watched.finish()
    records = known(watched)[3:]
    assert records
    for record in records:
        assert record.device is not None
        assert (record.device.forward or 0) / MS == pytest.approx(truth_ms, rel=0.3)
        assert (record.device.comm or 0) < 2 * MS


def test_memory_is_the_allocators_own_and_no_peak_is_reset(watched: Watched) -> None:
    job = Job()
    torch.cuda.reset_peak_memory_stats()
    big = torch.ones(2**24, device="cuda")  # 64 MiB
    del big
    peak = torch.cuda.max_memory_allocated()
    for (batch,) in job.batches(8):
        job.step(batch)
    state = watched.finish()
    assert torch.cuda.max_memory_allocated() == peak
    assert state.memory_peak_bytes == peak
    assert watched.records[-1].memory_bytes is not None
    assert state.memory_reserved_bytes is not None
    assert state.memory_reserved_bytes >= peak
