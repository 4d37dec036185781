"""What is said of memory, and what counts as having run out of it."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer.distributed import Placement
from trainer.errors import ConfigError
from trainer.memory import report
from trainer.memory.host import available_bytes, cgroup_limit_bytes, status_bytes
from trainer.memory.report import (
    dump_snapshot,
    is_out_of_memory,
    memory_summary,
    oom_sentence,
    record_snapshot,
    saved_bytes,
)

CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.69 GiB of "
    "which 1.12 GiB is free. Process 7 has 22.5 GiB memory in use."
)
CPU_OOM = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 268435456 bytes. Error code 12 (Cannot allocate memory)"
)


def placement(device: str = "cpu", ranks: int = 1) -> Placement:
    return Placement(0, ranks, 0, ranks, ranks > 1, torch.device(device))


def test_the_summary_of_a_cpu_process_has_a_unit_or_a_reason_in_every_line() -> None:
    lines = memory_summary(torch.device("cpu"))
    assert [line.partition(":")[0] for line in lines] == [
        "resident",
        "resident, peak",
        "limit of the cgroup",
        "left",
    ]
    for line in lines:
        assert re.search(r": ([\d,]+\.\d MiB|n/a \(.+\))$", line), line
    assert float(lines[0].split()[1].replace(",", "")) > 50  # torch is loaded


def test_the_summary_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {
        "allocated_bytes.all.current": 3 * 2**20,
        "allocated_bytes.all.peak": 5 * 2**20,
        "reserved_bytes.all.current": 8 * 2**20,
        "num_alloc_retries": 2,
        "num_ooms": 0,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**31))
    assert memory_summary(torch.device("cuda", 0)) == [
        "in tensors: 3.0 MiB",
        "in tensors, peak: 5.0 MiB",
        "held by torch: 8.0 MiB",
        "held by torch, peak: n/a (the allocator does not count it)",
        "free on the device: 1,024.0 MiB",
        "on the device: 2,048.0 MiB",
        "allocator retries: 2 times",
        "out of memory: 0 times",
    ]


def test_the_snapshot_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"memory\.snapshot needs train\.device=cuda"):
        dump_snapshot(tmp_path / "snapshot.pickle")
    with pytest.raises(ConfigError):
        record_snapshot()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(CUDA_OOM),
        torch.OutOfMemoryError("no words"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(CPU_OOM),
        MemoryError(),
        MemoryError("std::bad_alloc"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_what_is_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x4 and 8x4)"),
        ValueError("out of memory"),
        KeyboardInterrupt(),
        OSError(28, "No space left on device"),
    ],
)
def test_what_is_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_the_allocators_real_error_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**46, dtype=torch.float64)
    assert is_out_of_memory(caught.value)
    assert "536,870,912.0 MiB more were wanted" in oom_sentence(caught.value, 64, placement())


def test_the_sentence_says_what_was_wanted_what_there_is_and_what_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sentence = oom_sentence(torch.OutOfMemoryError(CUDA_OOM), 64, placement("cuda:0", 2))
    assert sentence.startswith(
        "rank 0 ran out of memory with loader.batch_size=64: 2.50 GiB more were wanted and cuda:0 "
        "has 23.69 GiB, of which 1.12 GiB are free; lower loader.batch_size"
    )
    for key in ("train.accumulate", "memory.checkpoint_activations=true", "find-batch-size"):
        assert key in sentence
    assert "\n" not in sentence
    monkeypatch.setattr(report, "available_bytes", lambda: 100 * 2**20)
    sentence = oom_sentence(RuntimeError(CPU_OOM), 8, placement())
    assert "256.0 MiB more were wanted and the machine has 100.0 MiB left" in sentence
    monkeypatch.setattr(report, "available_bytes", lambda: None)
    assert "the machine has no more" in oom_sentence(MemoryError(), 8, placement())


def test_saved_bytes_rise_by_the_activations_of_a_sample() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))

    def saved(batch_size: int, without: nn.Module | None = None) -> int:
        return saved_bytes(lambda: model(torch.randn(batch_size, 64)), without=without)

    # Kept for each sample: the input and the ReLU's output, which the next layer shares.
    per_sample = (64 + 32) * 4
    assert saved(8, model) == 8 * per_sample
    assert saved(32) - saved(8) == 24 * per_sample
    assert saved(8) - saved(8, model) == 32 * 16 * 4  # the second layer's weight


def test_views_of_one_storage_count_once() -> None:
    x = torch.randn(1024, requires_grad=True)
    assert saved_bytes(lambda: (x[:512] ** 2).sum() + (x[512:] ** 2).sum()) == 4096


def _cgroup(root: Path, level: str, **files: str) -> None:
    folder = root / level
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def _proc(root: Path, cgroup: str, meminfo: str = "MemAvailable:  8192 kB\n") -> Path:
    (root / "self").mkdir(parents=True)
    (root / "self/cgroup").write_text(cgroup)
    (root / "meminfo").write_text(meminfo)
    return root


def test_the_tightest_cgroup_counts(tmp_path: Path) -> None:
    proc = _proc(tmp_path / "proc", "0::/job/step\n")
    group = tmp_path / "cgroup"
    _cgroup(group, "job", memory__max="4000000", memory__current="3000000", memory__stat="x 1\n")
    _cgroup(group, "job/step", memory__max="max", memory__current="3", memory__stat="")
    assert cgroup_limit_bytes(group, proc) == 4_000_000
    assert available_bytes(group, proc) == 1_000_000
    # Cache that nobody uses goes first.
    _cgroup(group, "job", memory__stat="anon 9\ninactive_file 500000\n")
    assert available_bytes(group, proc) == 1_500_000
    _cgroup(group, "job", memory__max="max")
    assert cgroup_limit_bytes(group, proc) is None
    assert available_bytes(group, proc) == 8192 * 1024


def test_cgroup_version_1(tmp_path: Path) -> None:
    proc = _proc(tmp_path / "proc", "5:cpu:/\n4:memory:/pod/nowhere\n0::/\n")
    group = tmp_path / "cgroup"
    _cgroup(
        group,
        "memory",
        memory__limit_in_bytes="9223372036854771712",
        memory__usage_in_bytes="1",
        memory__stat="",
    )
    assert cgroup_limit_bytes(group, proc) is None
    _cgroup(
        group,
        "memory/pod",
        memory__limit_in_bytes="6000000",
        memory__usage_in_bytes="2000000",
        memory__stat="inactive_file 9\ntotal_inactive_file 1000000\n",
    )
    assert cgroup_limit_bytes(group, proc) == 6_000_000
    assert available_bytes(group, proc) == 5_000_000


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None
    assert cgroup_limit_bytes(tmp_path, tmp_path) is None
    assert status_bytes("VmRSS", tmp_path) is None
    assert status_bytes("VmNonsense") is None
