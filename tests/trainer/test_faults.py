"""Faults by name: what they are called, where they act, and that they cost what they say."""

import contextlib
import io
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainer.config import FaultsConfig
from trainer.errors import ConfigError, TrainerError
from trainer.faults import (
    FAULTS,
    Fault,
    LoopFaults,
    collate_with,
    dataset_with,
    describe,
    loader_with,
    model_with,
    optimizer_with,
    parse_fault,
    parse_faults,
    pin_process,
)
from trainer.report import Reporter
from trainer.run import open_trainer
from trainer.sources import load


class Items(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


def seconds(work: Any, *, cpu: bool = False) -> float:
    clock = time.thread_time if cpu else time.perf_counter
    began = clock()
    work()
    return float(clock() - began)


def least_seconds(work: Any) -> float:
    """The quickest of several tries: what else the machine does only adds."""
    return min(seconds(work) for _ in range(5))


# --- names --------------------------------------------------------------------------------------


@given(
    st.sampled_from(sorted(FAULTS)),
    st.none() | st.floats(0.01, 9999),
    st.none() | st.integers(0, 9999),
)
def test_what_is_said_is_read(name: str, strength: float | None, rank: int | None) -> None:
    text = name + ("" if strength is None else f":{strength!r}")
    text += "" if rank is None else f"@{rank}"
    fault = parse_fault(text)
    assert fault == Fault(name, FAULTS[name].strength if strength is None else strength, rank)
    assert fault.on(rank or 0)
    assert fault.on(1) == (rank in {None, 1})
    assert ("on rank" in fault.sentence) == (rank is not None)


@given(st.text())
def test_anything_else_is_one_sentence(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert all(fault.name in FAULTS for fault in parse_faults(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slow_datset", "did you mean slow_dataset?"),
        ("x", "there are slow_dataset, cpu_decode"),
        ("jitter:fast", "strength of 'jitter:fast' is no number"),
        ("jitter:0", "above 0"),
        ("jitter:nan", "above 0"),
        ("jitter:1e9", "below a million"),
        ("jitter@one", "rank of 'jitter@one' is no number"),
        ("jitter@-1", "no number"),
    ],
)
def test_mistakes(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=None) as raised:
        parse_fault(text)
    assert says in str(raised.value)


def test_all_that_is_on_is_said_once() -> None:
    faults = parse_faults("slow_forward:5@1, hang")
    assert describe(FaultsConfig(), faults) == (
        "SIMULATED: each forward sleeps 5 ms on rank 1; the loop stands still after 30 steps"
    )
    assert describe(FaultsConfig(), ()) is None
    both = describe(FaultsConfig(data_ms=3, rank=0), faults[1:])
    assert both == (
        "SIMULATED on rank 0: each fetch blocks 3 ms longer; the loop stands still after 30 steps"
    )


# --- items and batches --------------------------------------------------------------------------


def with_fault(text: str, folder: Path, rank: int = 0) -> Dataset[Any]:
    return dataset_with(Items(), parse_faults(text), rank, folder)


def test_items_wait_compute_or_stay_as_they_are(tmp_path: Path) -> None:
    asleep = with_fault("slow_dataset:20", tmp_path)
    assert len(asleep) == 8  # type: ignore[arg-type]
    assert seconds(lambda: asleep[3]) >= 0.020
    assert seconds(lambda: asleep[3], cpu=True) < 0.010
    assert asleep[3] == 3.0
    busy = with_fault("cpu_decode:20", tmp_path)
    assert seconds(lambda: busy[3], cpu=True) >= 0.020
    assert isinstance(with_fault("slow_dataset@1", tmp_path), Items)
    assert isinstance(with_fault("slow_forward", tmp_path), Items)


def test_the_first_time_only(tmp_path: Path) -> None:
    cold = with_fault("cold_epoch:20", tmp_path)
    assert seconds(lambda: cold[3]) >= 0.020
    assert least_seconds(lambda: cold[3]) < 0.015
    assert seconds(lambda: cold[4]) >= 0.020


def test_items_of_the_first_worker_only(tmp_path: Path) -> None:
    slow = with_fault("slow_worker:40", tmp_path)
    assert least_seconds(lambda: slow[0]) < 0.030  # in no worker
    batches = DataLoader(slow, batch_size=4, num_workers=2, prefetch_factor=1)
    assert seconds(lambda: list(batches)) >= 0.160


def test_a_batch_waits_once(tmp_path: Path) -> None:
    bursts = DataLoader(with_fault("burst:30", tmp_path), batch_size=4)
    assert 0.060 <= least_seconds(lambda: list(bursts)) < 0.200
    assert [b.tolist() for b in bursts] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_disk_is_read_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.faults.data._SCRATCH_MB", 4)
    try:
        slow = with_fault("slow_storage:6", tmp_path)
    except TrainerError as error:
        pytest.skip(str(error))

    def read_bytes() -> int:
        with open("/proc/self/io", "rb") as file:
            return next(int(x.split()[1]) for x in file if x.startswith(b"read_bytes"))

    before = read_bytes()
    assert slow[2] == 2.0
    assert read_bytes() - before >= 4 * 2**20


def test_a_file_system_without_direct_reads_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainerError, match="slow_storage cannot read"):
        with_fault("slow_storage", tmp_path / "file")


def test_collating_and_fetching() -> None:
    collate = collate_with(parse_faults("slow_collate:20"), 0)
    assert collate is not None
    assert seconds(lambda: collate([1, 2]), cpu=True) >= 0.020
    assert collate_with(parse_faults("slow_collate:20@1"), 0) is None
    loader = DataLoader(Items(), batch_size=4)
    loader_with(loader, parse_faults("slow_data:20"), 0)
    batches = iter(loader)
    assert seconds(lambda: next(batches)) >= 0.020


def test_many_threads_in_a_worker(tmp_path: Path) -> None:
    slow = with_fault("oversub:2", tmp_path)
    before = set(threading.enumerate())
    assert slow[1] == 1.0  # not in a worker: nothing
    assert set(threading.enumerate()) <= before
    batches = iter(DataLoader(slow, batch_size=1, num_workers=1))
    assert next(batches).tolist() == [0.0]
    (worker,) = batches._workers  # type: ignore[attr-defined]
    threads = len(os.listdir(f"/proc/{worker.pid}/task"))
    assert threads >= 2 * (os.cpu_count() or 1)


# --- the model and the loop ---------------------------------------------------------------------


def test_forward_backward_and_optimizer() -> None:
    model = model_with(nn.Linear(2, 1), parse_faults("slow_forward:20,slow_backward:20"), 0, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer_with(optimizer, parse_faults("slow_optimizer:20"), 0)
    out: list[torch.Tensor] = []
    assert seconds(lambda: out.append(model(torch.ones(3, 2)))) >= 0.020
    assert seconds(lambda: out[0].sum().backward()) >= 0.020
    assert seconds(optimizer.step) >= 0.020


def test_exactly_one_rank_is_late_in_each_step() -> None:
    models = [model_with(nn.Linear(2, 1), parse_faults("jitter:15"), rank, 3) for rank in range(3)]
    late = [0, 0, 0]
    for _ in range(12):
        slow = [seconds(lambda m=m: m(torch.ones(1, 2))) >= 0.015 for m in models]
        assert sum(slow) == 1
        late[slow.index(True)] += 1
    assert max(late) < 12


def test_more_gradients_change_nothing_else() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(2, 1)
    heavy = model_with(plain, parse_faults("comm_heavy:1@1"), 0, 2)  # on all ranks all the same
    assert sum(p.numel() * 4 for p in heavy.parameters()) >= 2**20
    data = torch.ones(3, 2)
    assert torch.equal(heavy(data), plain(data))
    heavy(data).sum().backward()
    assert all(p.grad is not None for p in heavy.parameters())


@pytest.fixture
def evaluations() -> list[int]:
    return []


def test_the_loop(tmp_path: Path, evaluations: list[int]) -> None:
    faults = parse_faults("sync_every_step:10,ckpt_every:2,eval_every:3,grow_list:1,retain_graph:2")
    loop = LoopFaults(faults, 0, tmp_path, evaluations.append)
    model = nn.Linear(2, 1)
    for step in range(1, 5):
        loss = model(torch.ones(1, 2)).sum()
        loop.backward(loss)
        assert seconds(lambda s=step, x=loss: loop.after_step(s, model, x.detach())) >= 0.010
    assert evaluations == [40]
    saved = torch.load(tmp_path / "checkpoint-0.pt")
    assert saved["step"] == 4
    assert len((tmp_path / "log-0.txt").read_text().splitlines()) == 4
    assert len(loop._kept) == 4 * 3
    assert (
        sum(isinstance(kept, torch.Tensor) and kept.grad_fn is not None for kept in loop._kept) == 8
    )


class StopError(Exception):
    pass


def test_a_hang_still_hears_a_signal(tmp_path: Path) -> None:
    looked: Iterator[int] = iter(range(3))

    def check() -> None:
        if next(looked) == 2:
            raise StopError

    loop = LoopFaults(parse_faults("hang:2"), 0, tmp_path, check=check)
    model = nn.Linear(2, 1)
    loop.after_step(1, model, torch.zeros(()))
    with pytest.raises(StopError):
        loop.after_step(2, model, torch.zeros(()))


def test_one_cpu() -> None:
    before = os.sched_getaffinity(0)
    try:
        pin_process(parse_faults("affinity1"), 0)
        assert len(os.sched_getaffinity(0)) == 1
    finally:
        os.sched_setaffinity(0, before)


def test_a_training_with_faults_says_so_and_ends(jpegs: Path) -> None:
    err = io.StringIO()
    config = load(
        [
            "--data.path", str(jpegs), "--data.image_px=16", "--model.width=8", "--train.threads=1",
            "--train.steps=9", "--train.watch=false", "--loader.num_workers=1",
            "--loader.batch_size=4",
            "--faults.inject", "respawn_workers:3,eval_every:4,slow_data:1",
        ],
        environ={},
    )  # fmt: skip
    with open_trainer(config, reporter=Reporter(err=err, out=io.StringIO())) as trainer:
        assert not trainer.loaders.plan.persistent_workers
        assert len(trainer.loaders.train) == 3
        trainer.fit()
        assert trainer.step == 9
    assert err.getvalue().count("SIMULATED") == 1


def test_a_fault_that_is_none_is_refused_before_training(jpegs: Path) -> None:
    config = load(["--data.path", str(jpegs), "--faults.inject", "nope"], environ={})
    with pytest.raises(ConfigError, match="no such fault"), open_trainer(config):
        pass
