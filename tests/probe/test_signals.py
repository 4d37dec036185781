"""Signals beside the marks, on the real torch, up to what the telemetry thread makes of them."""

import contextlib
import copy
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import traceback
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import support
import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from gpuwatch.probe.batches import Padding, look, measure
from gpuwatch.probe.config import build_hello
from gpuwatch.probe.describe import describe_loader
from gpuwatch.probe.events import NOTE, Recorder
from gpuwatch.probe.flops import COUNTED, FORMULA, Formula
from gpuwatch.probe.identity import identify
from gpuwatch.probe.patches import Marks
from gpuwatch.probe.telemetry import Telemetry, _number
from gpuwatch.schema import Hello, RankState, StepRecord


class Watched:
    """Marks that are on, and the telemetry without its thread and sockets."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.warnings: list[str] = []
        self.marks = Marks(self.recorder, self.warnings.append)
        self.signals = self.marks.signals
        self.marks.install()
        self._telemetry = Telemetry(
            self.recorder,
            self.marks,
            name="",
            control=False,
            notices=[],
            warn=self.warnings.append,
        )

    @property
    def records(self) -> list[StepRecord]:
        self._telemetry._collect()
        return list(self._telemetry._records)

    @property
    def state(self) -> RankState:
        self._telemetry._collect()
        return self._telemetry._state(None)

    @property
    def hello(self) -> Hello:
        return build_hello(
            identify(), self.marks, name="", started_s=0.0, dataset_path="", control=False
        )

    def notes(self, name: str) -> list[Any]:
        """What is noted under the name and not collected yet."""
        return [e[3] for e in self.recorder.events if e[0] == NOTE and e[2] == name]


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what other tests of this process have had compiled."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None:
        counts = type(frames.FRAME_COMPILE_COUNTER)()
        monkeypatch.setattr(frames, "FRAME_COMPILE_COUNTER", counts)


@pytest.fixture
def watched() -> Iterator[Watched]:
    found = Watched()
    try:
        yield found
        assert found.warnings == []
    finally:
        found.marks.remove()


@pytest.fixture
def often(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Marks that look at everything in every step."""
    monkeypatch.setattr("gpuwatch.probe.patches._DEAR_NS", 0)
    return watched


class Job:
    def __init__(self, **options: Any) -> None:
        self.model = torch.nn.Linear(8, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), **{"lr": 0.01, **options})

    def backward(self, x: torch.Tensor) -> None:
        self.model(x).mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, x: torch.Tensor) -> None:
        self.backward(x)
        self.update()


X = torch.ones(4, 8)


def batches(many: int) -> Iterator[torch.Tensor]:
    for (x,) in DataLoader(TensorDataset(torch.ones(4 * many, 8)), batch_size=4):
        yield x


# --- batches -----------------------------------------------------------------------------------

IDS = torch.zeros(2, 6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.ones(4, 8), (4, None)),
        (torch.tensor(1.0), (None, None)),
        ([torch.ones(3, 2), torch.ones(5)], (3, None)),
        (({"x": torch.ones(7)},), (7, None)),
        ({"input_ids": IDS, "labels": IDS}, (2, 12)),
        (UserDict({"input_ids": IDS}), (2, 12)),
        ({"input_ids": [[1, 2], [3]]}, (None, None)),
        ({"x": torch.ones(3, 2)}, (3, None)),
        ([], (None, None)),
        ("text", (None, None)),
        (None, (None, None)),
    ],
)
def test_samples_and_tokens_of_a_batch(batch: Any, expected: tuple[int | None, int | None]) -> None:
    assert measure(batch) == expected


@pytest.mark.parametrize(
    ("batch", "size_bytes"),
    [
        (torch.ones(4, 8), 128),
        ([torch.ones(4, 8), torch.ones(2, dtype=torch.int64)], 144),
        ({"a": [{"b": torch.ones(3)}], "c": 1}, 12),
        (UserDict({"a": torch.ones(3)}), 12),
        ([1, 2], None),
        ([torch.ones(1)] * 5000, None),  # too many to be looked at
    ],
)
def test_bytes_of_a_batch(batch: Any, size_bytes: int | None) -> None:
    assert look(batch).size_bytes == size_bytes


def test_padding_is_what_the_mask_leaves_out() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    for found in (mask, mask.bool()):
        padding = look({"input_ids": mask, "attention_mask": found}).padding
        assert padding is not None
        assert float(padding) == pytest.approx(3 / 8)
        assert copy.deepcopy(padding) is padding
    assert look({"input_ids": mask, "attention_mask": mask}).sequence == 4


def test_the_padding_of_a_large_batch_is_that_of_its_first_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpuwatch.probe.batches._MOST_MASKED", 4)
    assert float(Padding(torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]]))) == pytest.approx(0.25)


def test_a_long_mask_is_counted_without_help_from_other_threads() -> None:
    mask = (torch.arange(200_000) % 4 > 0).reshape(2, 100_000)
    found = []

    def count() -> None:
        threads = len(os.listdir("/proc/self/task"))
        found.append(float(Padding(mask)))
        found.append(len(os.listdir("/proc/self/task")) - threads)

    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    assert found == [pytest.approx(0.25), 0]


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 1, 4, 4, dtype=torch.int64),
        torch.ones(6, dtype=torch.int64),
        torch.zeros(2, 6),  # of floats: it is added
        torch.ones(2, 6, dtype=torch.int64, device="meta"),  # not on the CPU
        torch.ones(0, 6, dtype=torch.int64),
        None,
    ],
)
def test_other_masks_say_nothing_of_padding(mask: torch.Tensor | None) -> None:
    assert look({"input_ids": IDS, "attention_mask": mask}).padding is None


def test_packed_sequences_have_no_length_in_common() -> None:
    row = IDS.reshape(1, 12)
    assert look({"input_ids": row}).sequence == 12
    assert look({"input_ids": row, "position_ids": row}).sequence is None


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Item n has n tokens of 8, the rest is padding; a batch is one item."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(8) <= index).long()
        return {"input_ids": mask, "attention_mask": mask, "x": torch.ones(8)}


@pytest.mark.parametrize("ahead", [0, 2])
def test_tokens_and_padding_go_with_the_step_that_consumes_them(often: Watched, ahead: int) -> None:
    job = Job()
    held = []
    for batch in DataLoader(Texts(), batch_size=1):
        held.append(batch)
        if len(held) > ahead:
            job.step(held.pop(0)["x"])
    for batch in held:
        job.step(batch["x"])
    records = often.records
    assert [r.tokens for r in records] == [8] * 8
    assert [r.samples for r in records] == [1] * 8
    assert [r.padding_share for r in records] == pytest.approx([1 - n / 8 for n in range(1, 9)])


def test_padding_is_looked_at_ten_times_a_second(watched: Watched) -> None:
    job = Job()
    for batch in DataLoader(Texts(), batch_size=1):
        job.step(batch["x"])
    assert [r.padding_share is not None for r in watched.records].count(True) <= 2


def test_tokens_of_a_window_add_up_and_the_user_goes_first(watched: Watched) -> None:
    job = Job()
    for n, batch in enumerate(DataLoader(Texts(), batch_size=1)):
        job.backward(batch["x"])
        if n % 2:
            if n == 7:
                watched.recorder.annotate(tokens=5)
            job.update()
    assert [r.tokens for r in watched.records] == [16, 16, 16, 5]


# --- loaders -----------------------------------------------------------------------------------


class SlowStart(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        if index == 0:
            time.sleep(0.03)
        return super().__getitem__(index)


def take_all(items: list[Any]) -> torch.Tensor:
    return torch.stack([item[0] for item in items])


def test_a_loader_tells_its_bytes_and_how_long_the_first_batch_took(watched: Watched) -> None:
    job = Job()
    data = SlowStart(torch.ones(16, 8))
    for x in DataLoader(data, batch_size=4, collate_fn=take_all):
        job.step(x)
    (loader,) = watched.hello.loaders
    assert loader.batch_bytes == 4 * 8 * 4
    assert loader.first_batch_ns is not None
    assert 30e6 <= loader.first_batch_ns < 3e9
    assert loader.collate == "take_all"
    assert loader.start_method == ""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_loader_tells_how_its_workers_were_started(method: str) -> None:
    context = multiprocessing.get_context(method)
    iterator = iter(DataLoader(torch.ones(4)))  # type: ignore[arg-type]
    iterator._workers = [context.Process()]
    assert describe_loader("loader0", iterator).start_method == method
    iterator._workers = [multiprocessing.Process()]
    expected = multiprocessing.get_start_method()
    assert describe_loader("loader0", iterator).start_method == expected


def test_bytes_are_told_again_when_they_have_changed_by_a_quarter(often: Watched) -> None:
    sizes = iter([100, 110, 110, 200])
    versions = []
    for batch in DataLoader(torch.ones(4), collate_fn=lambda _: torch.ones(next(sizes), 8)):  # type: ignore[arg-type]
        Job().step(batch)
        versions.append((often.hello.loaders[0].batch_bytes, often.marks.config_version))
    told, seen = zip(*versions, strict=True)
    assert told == (3200, 3200, 3200, 6400)
    assert seen[1] == seen[2] < seen[3]


# --- learning rate -----------------------------------------------------------------------------


def test_the_learning_rate_is_the_largest_of_the_groups(often: Watched) -> None:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD([{"params": model.weight, "lr": 0.5}, {"params": model.bias}], lr=2)
    for x in batches(3):
        model(x).mean().backward()
        optimizer.step()
        optimizer.param_groups[1]["lr"] /= 8
    assert [r.learning_rate for r in often.records] == [2.0, 0.5, 0.5]
    assert often.state.learning_rate == 0.5


def test_a_tensor_is_read_by_the_telemetry_thread(often: Watched) -> None:
    rate = torch.tensor(0.25)
    job = Job(lr=rate, foreach=False)
    job.step(X)
    assert often.notes("learning_rate")[0] is rate
    job.step(X)
    assert often.records[0].learning_rate == 0.25


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([torch.tensor(1.0), torch.tensor(3.0)], 3.0),
        ([torch.tensor(1.0), 2.0], 2.0),
        ([torch.tensor(1.0, device="meta"), 2.0], None),  # comparing would wait for the device
        (["high"], None),
    ],
)
def test_rates_of_several_kinds(watched: Watched, rates: list[Any], expected: float | None) -> None:
    optimizer = SimpleNamespace(param_groups=[{"lr": rate} for rate in rates])
    watched.signals.look(optimizer, time.perf_counter_ns())
    assert watched.notes("learning_rate") == ([] if expected is None else [expected])


def test_rates_are_read_ten_times_a_second_and_of_one_optimizer(watched: Watched) -> None:
    jobs = [Job(lr=0.1), Job(lr=0.2)]
    began_s = time.monotonic()
    while time.monotonic() - began_s < 0.35:
        for job in jobs:
            job.step(X)
    rates = watched.notes("learning_rate")
    assert set(rates) == {0.1}
    assert 2 <= len(rates) <= 10 * (time.monotonic() - began_s) + 1


def test_what_is_on_a_device_is_not_read() -> None:
    assert _number(torch.tensor(2.5)) == 2.5

    class OnDevice:
        is_cpu = False

        def __float__(self) -> float:
            return 1.0  # and would have waited for the device

    assert _number(OnDevice()) is None


# --- gradient norm -----------------------------------------------------------------------------


def test_the_norm_before_clipping_goes_with_its_step(watched: Watched) -> None:
    job = Job()
    norms = []
    for n, x in enumerate(batches(4)):
        job.backward(x)
        if n == 1:
            norms.append(clip_grad_norm_(job.model.parameters(), 0.1))
        elif n == 2:
            norms.append(torch.nn.utils.clip_grad.clip_grad_norm_(job.model.parameters(), 0.1))
        job.update()
    found = [r.grad_norm for r in watched.records]
    # The batch is all ones: the gradient of every weight and of the bias is 1.
    assert found == [None, 3.0, 3.0, None]
    assert found[1:3] == [float(norm) for norm in norms]
    assert watched.state.grad_norm == 3.0


def test_a_norm_that_was_put_together_elsewhere(watched: Watched) -> None:
    job = Job()
    for x in batches(2):
        job.backward(x)
        parts = [torch.nn.utils.get_total_norm([p.grad]) for p in job.model.parameters()]  # type: ignore[list-item]
        total = torch.stack(parts).norm() * 2  # of two ranks, say
        torch.nn.utils.clip_grads_with_norm_(job.model.parameters(), 1.0, total_norm=total)
        job.update()
    assert watched.records[0].grad_norm == pytest.approx(6.0)


def test_no_frame_of_ours_where_clipping_raises(watched: Watched) -> None:
    job = Job()
    job.backward(X * float("inf"))
    with pytest.raises(RuntimeError, match="non-finite") as raised:
        clip_grad_norm_(job.model.parameters(), 1.0, error_if_nonfinite=True)
    with pytest.raises(TypeError) as raised_too:
        torch.nn.utils.clip_grads_with_norm_(job.model.parameters(), None, torch.ones(()))  # type: ignore[arg-type]
    for found in (raised, raised_too):
        files = [frame.filename for frame in traceback.extract_tb(found.tb)]
        assert any("clip_grad" in name for name in files)
        assert not any("gpuwatch/probe" in name for name in files)


def test_without_source_the_norm_is_seen_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuwatch.probe import swap

    monkeypatch.setattr(swap.linecache, "getlines", lambda name: [])
    found = Watched()
    try:
        job = Job()
        job.backward(X)
        clip_grad_norm_(job.model.parameters(), 0.1)
        assert [float(norm) for norm in found.notes("grad_norm")] == [3.0]
    finally:
        found.marks.remove()


@pytest.mark.parametrize("replicated", [True, False])
def test_a_distributed_norm_is_read_only_where_it_is_whole(
    watched: Watched, replicated: bool
) -> None:
    placement = SimpleNamespace(is_replicate=lambda: replicated)
    norm = SimpleNamespace(_local_tensor=torch.tensor(2.0), placements=[placement])
    watched.signals._note_norm(norm)
    assert watched.notes("grad_norm") == ([torch.tensor(2.0)] if replicated else [])


@pytest.mark.filterwarnings("ignore")
def test_fsdp_clips_in_a_method_of_its_own(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for x in batches(1):  # a new iterator: what has been imported is marked
            model = FullyShardedDataParallel(torch.nn.Linear(8, 1), device_id=torch.device("cpu"))
            model(x).mean().backward()
            # What it does with a single rank; with several it computes by itself.
            monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda *_: torch.tensor(5.0))
            norm = model.clip_grad_norm_(100.0)
        assert [float(n) for n in watched.notes("grad_norm")] == [float(norm)] == [5.0]
    finally:
        dist.destroy_process_group()


def test_the_scale_of_a_scaler(often: Watched) -> None:
    job = Job()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for x in batches(2):
        scaler.scale(job.model(x).mean()).backward()
        scaler.step(job.optimizer)
        scaler.update()
    assert [r.loss_scale for r in often.records] == [8.0, 8.0]
    assert often.state.loss_scale == 8.0


# --- precision ---------------------------------------------------------------------------------


def test_autocast_is_that_of_the_last_forward_that_was_looked_at(often: Watched) -> None:
    job = Job()
    dtypes = []
    for n, x in enumerate(batches(3)):
        if n == 1:
            with torch.autocast("cpu", torch.bfloat16):
                loss = job.model(x).mean()
        else:
            with torch.no_grad(), torch.autocast("cpu", torch.float16):
                job.model(x)
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                loss = job.model(x).mean()
        loss.backward()
        job.optimizer.step()
        dtypes.append((often.hello.precision.autocast, often.marks.config_version))
    assert [dtype for dtype, _ in dtypes] == ["", "bfloat16", ""]
    assert dtypes[0][1] < dtypes[1][1] < dtypes[2][1]


def test_flags_of_a_device_are_read_only_where_one_is_in_use(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watched.hello.precision.cudnn_tf32 is None
    assert watched.hello.versions.nccl == ""
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    monkeypatch.setattr("gpuwatch.probe.config._cuda_in_use", lambda: True)
    monkeypatch.setattr("gpuwatch.probe.config._device", lambda device: ("", ""))
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 5))
    hello = watched.hello
    assert hello.precision.cudnn_tf32 is torch.backends.cudnn.allow_tf32
    assert hello.versions.nccl == "2.27.5"


def test_mixed_flags_of_precision_are_not_known(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises where the old word for them does not fit what the new flags say."""

    def raises() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", raises)
    assert watched.hello.precision.float32_matmul == ""


# --- garbage collection ------------------------------------------------------------------------


@contextlib.contextmanager
def collecting_by_hand() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_collection_counts_into_its_step(watched: Watched) -> None:
    job = Job()
    with collecting_by_hand():
        gc.collect()  # before any step
        for n, x in enumerate(batches(4)):
            if n == 1:
                gc.collect()
                gc.collect()
                watched.recorder.span_begin("checkpoint")
                gc.collect()
                watched.recorder.span_end()
            if n == 2:
                gc.collect(0)
                gc.collect(1)
            job.step(x)
    found = [r.gc_ns for r in watched.records]
    assert [ns is not None for ns in found] == [False, True, False, False]
    state = watched.state
    assert state.gc_pauses == 4
    assert found[1] is not None
    assert 0 < found[1] < state.gc_pause_ns


def test_a_collection_elsewhere_counts_into_the_totals_only(watched: Watched) -> None:
    with collecting_by_hand():
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
    assert watched.state.gc_pauses == 1
    assert watched.notes("gc_ns") == []


def test_collections_are_no_longer_heard_after_the_marks_are_off() -> None:
    before = list(gc.callbacks)
    found = Watched()
    assert len(gc.callbacks) == len(before) + 1
    found.marks.silence()  # as in a forked child
    gc.collect()
    assert found.signals.gc_pauses == 0
    assert not found.recorder.events
    found.marks.remove()
    assert gc.callbacks == before


# --- compiling ---------------------------------------------------------------------------------

COMPILING = """
import gc, json, sys, torch
from gpuwatch.probe.events import Recorder
from gpuwatch.probe.patches import Marks
from gpuwatch.probe.telemetry import Telemetry
from torch.utils.data import DataLoader

recorder = Recorder()
marks = Marks(recorder, sys.exit)
marks.install()
telemetry = Telemetry(recorder, marks, name="", control=False, notices=[], warn=sys.exit)
told = {name: f"torch.{name}" in sys.modules for name in ("_dynamo", "utils.flop_counter")}
told["before"] = telemetry._state(None).recompiles
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model, backend="eager", dynamic=False)
told["idle"] = telemetry._state(None).recompiles
marks.signals.ask_for_flops()
sizes = iter([4, 4, 4, 5, 5, 6, 6, 6])
told["states"] = []
for batch in DataLoader(torch.ones(8), collate_fn=lambda _: torch.ones(next(sizes), 8)):
    compiled(batch).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    told["states"].append(telemetry._state(None).recompiles)
torch._dynamo.reset()
telemetry._collect()
told["tags"] = [record.tags for record in telemetry._records]
told["flops"] = marks.signals.flops(None, "")
told["reset"] = telemetry._state(None).recompiles
for batch in DataLoader(torch.ones(2), collate_fn=lambda _: torch.ones(4, 8)):
    compiled(batch).mean().backward()
    optimizer.step()
telemetry._collect()
told["again"] = [telemetry._state(None).recompiles, [r.tags for r in telemetry._records][8:]]

from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters
heard = len(callback_handler.start_callbacks)
marks.remove()
told["heard"] = heard - len(callback_handler.start_callbacks)

def whole(x):
    loss = model(x).mean()
    torch.nn.utils.clip_grad_norm_([x], 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        return loss + model(x).mean()

def graphs():
    torch._dynamo.reset()
    counters.clear()
    torch.compile(whole, backend="eager")(torch.ones(4, 8))
    return {n: dict(counters[n]) for n in ("stats", "graph_break", "unimplemented")}

told["bare"] = graphs()
marks.install()
told["watched"] = graphs()
print(json.dumps(told))
"""


def test_compiling_tags_its_step_and_recompiling_is_counted() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILING], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["_dynamo"] is told["utils.flop_counter"] is False
    assert told["before"] is told["idle"] is None
    assert told["states"] == [0, 0, 0, 1, 1, 2, 2, 2]
    compiled = [n for n, tags in enumerate(told["tags"]) if "compile" in tags]
    assert compiled == [0, 3, 5]
    assert told["flops"][0] is None
    assert "torch.compile" in told["flops"][1]
    # torch._dynamo.reset() forgets its counters and whom it calls.
    assert told["reset"] == 2
    assert told["again"] == [2, [["first_batch", "compile"], []]]
    assert told["heard"] == 1
    assert told["watched"] == told["bare"]
    assert told["bare"]["stats"]["unique_graphs"] == 1


# --- FLOPs -------------------------------------------------------------------------------------

MLP_FLOPS = 2 * 4 * (8 * 16 + 16) * 2 + 2 * 4 * 16
"""Forward and the gradients of the weights of both layers, and of the second one's input."""


class Mlp:
    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, x: torch.Tensor) -> None:
        self.model(x).mean().backward()
        self.optimizer.step()


@pytest.fixture
def counting(watched: Watched) -> Iterator[Watched]:
    watched.signals.ask_for_flops()
    yield watched
    assert torch._C._len_torch_dispatch_stack() == 0


def plain(job: Mlp, x: torch.Tensor) -> None:
    job.step(x)


def closure(job: Mlp, x: torch.Tensor) -> None:
    def compute() -> torch.Tensor:
        loss: torch.Tensor = job.model(x).mean()
        loss.backward()
        return loss

    job.optimizer.step(compute)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [plain, closure])
@pytest.mark.parametrize("loader", [True, False])
def test_one_step_is_counted_and_tagged(
    counting: Watched, step: Callable[[Mlp, torch.Tensor], None], loader: bool
) -> None:
    job = Mlp()
    assert counting.state.flops_source == "not counted yet"
    for x in batches(9) if loader else [X] * 9:
        step(job, x)
    counting.recorder.finish()
    state = counting.state
    assert state.flops_per_step == MLP_FLOPS
    assert state.flops_source == COUNTED
    steady = [n for n, r in enumerate(counting.records) if "warmup" not in r.tags]
    assert 0 not in steady
    assert {0, 1, 2, 7, 8} - set(steady) == {0} | ({2} if loader else set())
    assert 3 not in steady  # the step that was counted


def test_accumulated_batches_are_one_step(counting: Watched) -> None:
    job = Mlp()
    for n, x in enumerate(batches(16)):
        job.model(x).mean().backward()
        if n % 2:
            job.optimizer.step()
    assert counting.state.flops_per_step == 2 * MLP_FLOPS


def test_two_optimizers_are_one_step(counting: Watched) -> None:
    jobs = [Mlp(), Mlp()]
    for x in batches(8):
        for job in jobs:
            job.step(x)
    assert counting.state.flops_per_step == 2 * MLP_FLOPS


def test_a_disturbed_step_is_not_the_one(counting: Watched) -> None:
    job = Mlp()
    for n, x in enumerate(batches(12)):
        if n in {3, 4}:
            with torch.no_grad():
                for held_out in batches(1):
                    job.model(held_out)
        job.step(x)
    assert counting.state.flops_per_step == MLP_FLOPS


def test_a_skipped_attempt_is_not_the_one(counting: Watched) -> None:
    job = Mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for n, x in enumerate(batches(12)):
        job.optimizer.zero_grad()
        scaler.scale(job.model(x * (float("inf") if n == 3 else 1.0)).mean()).backward()
        scaler.step(job.optimizer)
        scaler.update()
    assert counting.state.flops_per_step == MLP_FLOPS


def test_nothing_is_counted_inside_a_mode_of_the_users(counting: Watched) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    job = Mlp()
    for x in batches(8):
        with FlopCounterMode(display=False) as mine:  # type: ignore[no-untyped-call]
            job.step(x)
        assert mine.get_total_flops() == MLP_FLOPS
    state = counting.state
    assert state.flops_per_step is None
    assert state.flops_source == "not counted: another dispatch mode is on"


def test_nothing_is_left_on_where_the_marks_come_off_in_between(counting: Watched) -> None:
    job = Mlp()
    for x in batches(3):
        job.step(x)
    assert torch._C._len_torch_dispatch_stack() == 1
    counting.marks.silence()  # as in a worker that is forked now
    assert torch._C._len_torch_dispatch_stack() == 0


def test_nobody_counts_unasked(watched: Watched) -> None:
    job = Mlp()
    for x in batches(6):
        job.step(x)
        assert torch._C._len_torch_dispatch_stack() == 0
    assert watched.state.flops_per_step is None
    assert "--count-flops" in watched.state.flops_source


def test_watch_and_run_ask(rundir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpuwatch
    from gpuwatch import probe

    for asked in (False, True):
        monkeypatch.setenv("GPUWATCH_DIR", str(rundir))
        gpuwatch.watch(count_flops=asked)
        try:
            assert probe._probe is not None
            assert (probe._probe.marks.signals.count is not None) is asked
        finally:
            gpuwatch.unwatch()
    monkeypatch.setenv("GPUWATCH_COUNT_FLOPS", "1")
    gpuwatch.watch()
    try:
        assert probe._probe is not None
        assert probe._probe.marks.signals.count is not None
    finally:
        gpuwatch.unwatch()
    said = subprocess.run(
        [*support.GPUWATCH, "run", "--count-flops", "--", "printenv", "GPUWATCH_COUNT_FLOPS"],
        env=support.environment(rundir),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout == "1\n"


class Attention(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        # As matrices, so that the counter sees them whatever kernel this torch would take.
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        found: torch.Tensor = self.out((weights @ v).transpose(1, 2).reshape(b, t, d))
        return found


class Transformer(torch.nn.Module):
    def __init__(self, *, tied: bool = False, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            **{"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab": 50, **config}
        )
        width = 32
        self.table = torch.nn.Embedding(50, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(Attention(width, 4), torch.nn.Linear(width, width))
            for _ in range(2)
        )
        self.head = torch.nn.Linear(width, 50, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_is_what_counting_gives(tied: bool) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = Transformer(tied=tied)
    ids = torch.zeros(2, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as mode:  # type: ignore[no-untyped-call]
        model(ids).mean().backward()
    a_token = Formula(model).a_token(64)
    assert a_token is not None
    # Biases and the sum of gradients of what is used twice are in one of them only.
    assert a_token * ids.numel() == pytest.approx(mode.get_total_flops(), rel=0.03)


def frozen(model: torch.nn.Module) -> torch.nn.Module:
    model.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.nn.Linear(2, 2), "known configuration"),
        (lambda: Transformer(n_head=None), "known configuration"),
        (lambda: Transformer(is_encoder_decoder=True), "decoder"),
        (lambda: Transformer(num_local_experts=8), "mixture"),
        (lambda: frozen(Transformer()), "frozen"),
    ],
)
def test_the_formula_says_why_it_does_not_know(
    make: Callable[[], torch.nn.Module], words: str
) -> None:
    model = make()
    formula = Formula(model)
    assert words in formula.reason
    assert formula.a_token(64) is None


def test_a_known_model_under_ddp_has_flops_in_every_state(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Transformer()
    wrapper = SimpleNamespace(module=model)
    monkeypatch.setattr(watched.marks.comm, "shown", lambda: wrapper)
    assert watched.state.flops_per_step is None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Texts(), batch_size=2):
        model(batch["input_ids"]).mean().backward()
        optimizer.step()
    for _ in DataLoader([{"input_ids": IDS}] * 2):  # type: ignore[arg-type]
        pass  # an evaluation with sequences of another length
    a_token = Formula(model).a_token(8)
    assert a_token is not None
    assert watched.state.flops_per_step == a_token * 16
    assert watched.state.flops_source == FORMULA
    watched.marks.parallel["tensor"] = None
    assert watched.state.flops_per_step is None
    assert "split" in watched.state.flops_source


# --- whose loop --------------------------------------------------------------------------------


def test_no_framework_where_none_runs_the_loop(watched: Watched) -> None:
    for _ in batches(1):
        pass
    assert watched.hello.frameworks == ()


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["transformers.trainer", "accelerate.data_loader"], ("transformers",)),
        (["lightning.pytorch.loops.fit_loop"], ("lightning",)),
        (["pytorch_lightning.loops.fit_loop"], ("lightning",)),
        (["accelerate.data_loader"], ("accelerate",)),
        (["lightning_tools", "accelerated", "transformers.models.llama"], ()),
    ],
)
def test_the_loop_belongs_to_whoever_is_on_the_stack(
    watched: Watched, modules: list[str], expected: tuple[str, ...]
) -> None:
    def fetch() -> None:
        for _ in batches(1):
            pass

    call: Any = fetch
    for name in reversed(modules):
        names = {"__name__": name, "call": call}
        exec("def calls():\n    call()", names)
        call = names["calls"]
    call()
    assert watched.hello.frameworks == expected


def test_what_the_training_tells_is_kept_once_and_the_last_sixteen(watched: Watched) -> None:
    for number in range(20):
        watched._telemetry.tell(f"sentence {number}")
        watched._telemetry.tell(f"sentence {number}")
    watched._telemetry.tell("x" * 10_000)
    notices = watched.state.notices
    assert notices[:-1] == tuple(f"sentence {number}" for number in range(5, 20))
    assert set(notices[-1]) == {"x"}
    assert len(notices[-1]) == 500
