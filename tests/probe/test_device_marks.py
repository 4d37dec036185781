"""The device's clock within the probe: the real marks, records on the wire, batches that move."""

import importlib
import statistics
import sys
from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any

import pytest
import torch
from devices import MS, FakeDevice, FakeTensor, Job
from torch.utils.data import DataLoader, TensorDataset

import gpuwatch.probe
from gpuwatch.frames import decode_rank_frame
from gpuwatch.probe import _annotate, _Probe, events, patches
from gpuwatch.probe.accounting import H2D, RawStep
from gpuwatch.probe.device import DeviceClock
from gpuwatch.probe.events import Recorder, Replay
from gpuwatch.probe.patches import Marks
from gpuwatch.probe.telemetry import Telemetry
from gpuwatch.schema import Bye, StepRecord


class _RealClock:
    @property
    def ns(self) -> int:
        return perf_counter_ns()


class _Watched:
    """Marks on the real torch, and a fake device that is always done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = FakeDevice(_RealClock())  # type: ignore[arg-type]
        monkeypatch.setattr(patches, "Cuda", self._cuda)
        # The marks of communication ask torch itself, and the CPU's build has no such question.
        name = "_cuda_getCurrentStream"
        monkeypatch.setattr(torch._C, name, lambda index: (0, index, 1), raising=False)
        self.recorder = Recorder()
        self.warnings: list[str] = []
        self.marks = Marks(self.recorder, self.warnings.append)
        self.marks.install()
        self.replay = Replay(self.recorder)

    def _cuda(self, index: int) -> FakeDevice:
        assert index == 1
        return self.device

    def see(self, kind: str = "cuda", index: int | None = 1) -> None:
        device = torch.device(kind, index) if index is not None else torch.device(kind)
        self.marks.device = str(device)
        self.marks._see_device(device)

    def h2d(self) -> list[int]:
        return [
            event[0]
            for event in self.recorder.events
            if event[0] in {events.PHASE_BEGIN, events.PHASE_END} and event[2] == H2D
        ]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Watched]:
    found = _Watched(monkeypatch)
    try:
        yield found
    finally:
        found.marks.remove()


def train(steps: int) -> None:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (batch,) in DataLoader(TensorDataset(torch.ones(4 * steps, 8)), batch_size=4):
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_on_the_cpu_the_marks_pay_nothing_for_a_device(watched: _Watched) -> None:
    train(3)
    assert watched.recorder.push == watched.recorder.events.append
    assert watched.marks.device_clock is None
    assert watched.device.made == 0


def test_the_marks_are_timed_on_a_device_from_the_first_backward_on(watched: _Watched) -> None:
    watched.see()
    train(20)
    watched.recorder.finish()
    watched.replay.catch_up()
    host = [s for s in watched.replay.accountant.out if isinstance(s, RawStep)]
    device = {s.step_index: s for s in watched.replay.device_steps}
    assert [s.step_index for s in host] == list(range(20))
    apart_ns = []
    for step in host:
        found = device[step.step_index].phases_ns
        assert found is not None
        apart_ns.append(abs(sum(found) - step.step_ns))
    # It does as the host does: the events lie microseconds behind the marks, on a quiet machine.
    assert statistics.median(apart_ns) < 2 * MS
    assert watched.warnings == []


def test_a_kind_of_device_without_events_is_said(watched: _Watched) -> None:
    watched.see("mps")
    assert watched.warnings == ["no device times on mps: the host's clock runs ahead of it"]
    assert watched.marks.device_clock is None
    assert watched.recorder.push == watched.recorder.events.append


# --- batches that move ---------------------------------------------------------------------------

BEGIN, END = events.PHASE_BEGIN, events.PHASE_END


def _accelerate() -> Any:
    return importlib.import_module("accelerate.utils.operations").send_to_device


def _fabric() -> Any:
    return importlib.import_module("lightning.fabric.utilities.apply_func").move_data_to_device


def _pytorch_lightning() -> Any:
    return importlib.import_module("lightning_fabric.utilities.apply_func").move_data_to_device


@pytest.mark.parametrize("mover", [_accelerate, _fabric, _pytorch_lightning])
@pytest.mark.filterwarnings("ignore")
def test_a_library_that_moves_a_batch_is_marked_once_for_it(watched: _Watched, mover: Any) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    pytest.importorskip("pytorch_lightning")
    move = mover()
    batch = {"a": torch.ones(2), "b": [torch.ones(2), torch.ones(3)]}
    assert move(batch, torch.device("cpu"))["b"][1].shape == (3,)
    train(1)
    assert watched.h2d() == []  # on the CPU nothing moves

    watched.see()
    train(1)
    move(batch, torch.device("cpu"))
    assert watched.h2d() == [BEGIN, END]
    with pytest.raises(Exception, match="nowhere"):
        move(batch, "nowhere")
    assert watched.h2d() == [BEGIN, END] * 2
    move([torch.ones(1, device="meta")], torch.device("meta"))
    assert watched.h2d() == [BEGIN, END] * 2  # not from the host


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightnings_trainer_moves_a_batch_with_the_hooks_of_the_user(
    watched: _Watched, package: str
) -> None:
    pytest.importorskip(package)
    strategies = importlib.import_module(f"{package}.strategies.single_device")
    strategy = strategies.SingleDeviceStrategy(torch.device("cpu"))
    watched.see()
    train(1)
    strategy.batch_to_device([torch.ones(2)], torch.device("cpu"))
    assert watched.h2d() == [BEGIN, END]


def test_nothing_imports_the_libraries(watched: _Watched) -> None:
    before = set(sys.modules)
    watched.see()
    train(1)
    new = {name.split(".")[0] for name in set(sys.modules) - before}
    assert not new & {"accelerate", "lightning", "pytorch_lightning"}


# --- records -------------------------------------------------------------------------------------


class Wired:
    """A job on the fake device whose telemetry is asked by hand."""

    def __init__(self) -> None:
        self.job = Job(start=False)
        self.marks = Marks(self.job.recorder, self.job.told.append)
        self.marks.device = "cuda:0"
        self.marks.device_clock = DeviceClock(
            self.job.recorder, self.job.device, self.job.told.append
        )
        self.marks.device_clock.start()
        self.telemetry = Telemetry(
            self.job.recorder,
            self.marks,
            name="",
            control=False,
            notices=[],
            warn=self.job.told.append,
        )
        self.probe = _Probe(self.job.recorder, self.marks, self.telemetry)
        self.got: list[StepRecord] = []

    def frame(self, bye: Bye | None = None) -> Any:
        frame = decode_rank_frame(self.telemetry._frame(bye=bye))
        self.got += frame.records
        return frame


@pytest.fixture
def wired() -> Iterator[Wired]:
    found = Wired()
    yield found
    assert found.job.told == []


def test_a_record_waits_for_its_device_times_and_the_state_does_not(wired: Wired) -> None:
    job = wired.job
    for _ in range(5):
        job.step(wait=5, forward=(2, 50))
    frame = wired.frame()
    assert frame.records == ()  # the host is five steps ahead of a device that is at its first
    assert frame.state.step == 4
    snapshot = decode_rank_frame(wired.telemetry._past(None))
    assert snapshot.records == ()
    for _ in range(3):
        job.drain()
        job.step(wait=5, forward=(2, 50))
    wired.frame()
    assert [r.index for r in wired.got] == list(range(len(wired.got)))
    assert len(wired.got) >= 5
    for record in wired.got:
        assert record.clock == "device"
        assert record.device is not None
        assert record.device.forward == pytest.approx(50 * MS, rel=0.01)
        assert record.device.comm is record.device.h2d is None
        assert record.host.forward == pytest.approx(2 * MS, rel=0.01)
    assert wired.got[4].device_stall_ns is not None
    assert decode_rank_frame(wired.telemetry._past(None)).records == tuple(wired.got)


def test_records_that_have_waited_long_enough_go_without(wired: Wired) -> None:
    job = wired.job
    for _ in range(4):
        job.step(forward=(2, 100_000))
    wired.frame()
    job.clock.pass_ms(1_900)
    assert wired.frame().records == ()
    job.clock.pass_ms(200)
    frame = wired.frame()
    assert [(r.index, r.clock, r.device) for r in frame.records] == [
        (i, "host", None) for i in range(3)
    ]
    assert frame.state.device_dropped == 3


def test_the_last_words_take_along_what_waits(wired: Wired) -> None:
    job = wired.job
    for _ in range(4):
        job.step()
    wired.frame()
    job.recorder.finish()
    frame = wired.frame(Bye("finished"))
    assert [r.index for r in frame.records] == [0, 1, 2, 3]
    assert {r.clock for r in frame.records} == {"host"}
    assert frame.state.device_dropped == 4


def test_the_last_words_tell_of_the_device_where_it_is_done(wired: Wired) -> None:
    job = wired.job
    for _ in range(4):
        job.step()
    job.drain()
    job.recorder.finish()
    frame = wired.frame(Bye("finished"))
    assert [r.clock for r in frame.records] == ["device"] * 4


def test_the_ledger_counts_by_the_device(wired: Wired) -> None:
    job = wired.job
    for _ in range(10):
        job.step(wait=100)
        job.drain()
    job.recorder.finish()
    ledger = wired.frame().ledger
    assert ledger.steps == 10
    waited = sum(r.device.data_wait or 0 for r in wired.got if r.device is not None)
    assert ledger.data_wait_ns == waited
    assert ledger.training_ns == pytest.approx(10 * 33 * MS, rel=0.05)


def test_numbers_of_the_device_reach_the_wire(wired: Wired) -> None:
    job = wired.job
    for n in range(6):
        job.fetch(100)
        job.run(2, 10)
        _annotate(wired.probe, None, None, FakeTensor(job.device, 5.0 - n), None, None, None)
        job.backward(2, 20)
        job.recorder.note("grad_norm", FakeTensor(job.device, 2.0))
        job.recorder.note("loss_scale", FakeTensor(job.device, 1024.0))
        job.optimizer(1, 3)
    assert wired.frame().state.loss is None or wired.got
    job.drain()
    job.recorder.finish()
    state = wired.frame().state
    assert [r.loss for r in wired.got] == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert {r.grad_norm for r in wired.got} == {2.0}
    assert (state.loss, state.grad_norm, state.loss_scale) == (0.0, 2.0, 1024.0)


def test_a_number_before_the_device_is_known_is_not_read(wired: Wired) -> None:
    wired.job.recorder.push = wired.job.recorder.events.append
    _annotate(wired.probe, None, None, FakeTensor(wired.job.device, 1.0), None, None, None)
    assert wired.telemetry.loss is None
    assert wired.frame().state.loss is None


def test_memory_and_copies_that_nobody_marked(wired: Wired) -> None:
    job = wired.job
    for _ in range(5):
        job.step()
        job.drain()
    frame = wired.frame()
    assert frame.records[-1].memory_bytes == 1000
    state = frame.state
    assert (state.memory_peak_bytes, state.memory_reserved_bytes) == (2000, 3000)
    assert state.memory_retries == job.device.memory_reads
    assert state.phases_na["h2d"].startswith("forward includes them")
    job.recorder.phase_begin(H2D)
    job.recorder.phase_end(H2D)
    assert "h2d" not in wired.frame().state.phases_na


def test_after_an_error_of_the_device_records_go_on_by_the_host() -> None:
    wired = Wired()
    job = wired.job
    for n in range(6):
        if n == 3:
            job.device.memory = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
            job.clock.pass_ms(200)
        job.step()
        job.drain()
    wired.frame()
    assert len(job.told) == 1
    assert [r.index for r in wired.got] == [0, 1, 2, 3, 4]
    assert wired.got[-1].clock == "host"
    assert wired.got[-1].memory_bytes is None


def test_the_probe_stops_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`unwatch()` takes the marks off first; what waits is still told."""
    wired = Wired()
    job = wired.job
    for _ in range(3):
        job.step()
        job.drain()
    monkeypatch.setattr(gpuwatch.probe, "_probe", wired.probe)
    gpuwatch.probe.unwatch()
    assert job.recorder.push == job.recorder.events.append
    wired.frame()
    assert [r.clock for r in wired.got] == ["device"] * 3
