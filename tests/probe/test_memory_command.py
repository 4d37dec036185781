"""The `memory` command: what it tells, and that it disturbs nothing."""

import itertools
import json
import os
import subprocess
import weakref
from typing import Any

import pytest
import torch

from gpuwatch.probe import memory as module
from gpuwatch.probe.device import DeviceMemory
from gpuwatch.probe.memory import memory_document, tensors_of


def document(**more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "moving": True, "index": None, "last": None, "want_tensors": False, **more,
    }  # fmt: skip
    found: dict[str, Any] = json.loads(memory_document(**given))
    return found


def test_the_process_and_its_children() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        found = document()
    finally:
        child.kill()
        child.wait()
    assert found["schema"] == 1
    assert found["vms_bytes"] > found["rss_bytes"] > found["shared_bytes"] > 0
    assert found["rss_bytes"] > 50e6  # torch is in it
    mine = {row["pid"]: row for row in found["children"]}
    assert mine[child.pid]["rss_bytes"] > 0
    assert mine[child.pid]["name"]
    assert os.getpid() not in mine


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_not_touched() -> None:
    found = document()
    assert (found["cuda"], found["cuda_reason"]) == ([], "CUDA is not in use in this process")
    assert not torch.cuda.is_initialized()


def test_a_training_that_stands_still_is_told_from_what_it_read_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(_: object) -> list[object]:
        raise AssertionError("the allocator's lock may be held for ever")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(module, "_asked", asked)
    found = document(moving=False, index=1, last=DeviceMemory(10, 30, 20, 4))
    (device,) = found["cuda"]
    assert device["device"] == 1
    assert (device["allocated_bytes"], device["peak_allocated_bytes"]) == (10, 30)
    assert (device["reserved_bytes"], device["retries"]) == (20, 4)
    assert device["free_bytes"] is None
    assert "stands still" in found["cuda_reason"]
    assert document(moving=False)["cuda"] == []
    found = document(moving=True)
    assert "the allocator's lock" in found["cuda_reason"]


def test_tensors_only_where_they_are_asked_for() -> None:
    found = document()
    assert found["tensors"] is found["python"]["objects"] is None
    assert found["tensors_reason"].startswith("press T on the memory page")
    assert len(found["python"]["gc_counts"]) == 3


def test_tensors_by_their_form(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [torch.zeros(1234, 567) for _ in range(3)]
    views = [kept[0].t(), kept[0][5:]]
    listed = [*views, *kept, torch.nn.Parameter(torch.zeros(7)), "no tensor", object()]
    monkeypatch.setattr(module.gc, "get_objects", lambda: listed)
    found, objects, reason = tensors_of()
    assert found is not None
    assert (objects, reason, found["count"]) == (8, "", 6)
    size = 1234 * 567 * 4
    assert found["bytes"] == 3 * size + 7 * 4
    # The first storage is that of a view of it, which came before.
    assert found["largest"][0] == {
        "shape": "(1234, 567)", "dtype": "float32", "device": "cpu", "bytes": 2 * size, "count": 3,
    }  # fmt: skip


def test_the_walk_is_bounded() -> None:
    none, objects, reason = tensors_of(most_objects=10)
    assert none is None
    assert objects is not None
    assert objects > 10
    assert reason == f"{objects:,} objects are over the 10 that are walked over"
    kept = torch.zeros(3)
    none, _, reason = tensors_of(most_objects=10**9, most_cpu_s=0.0)
    assert none is None
    assert reason.endswith("takes over 0 ms")
    del kept


def test_time_in_which_the_walk_gave_way_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_s = itertools.count(0.0, 1.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(wall_s))
    monkeypatch.setattr(module.gc, "get_objects", lambda: [torch.zeros(3)])
    # A second has passed, of which this thread had next to nothing.
    assert tensors_of(most_cpu_s=0.5)[2] == ""
    assert tensors_of(most_cpu_s=0.5, most_wall_s=0.5)[0] is None


def test_the_walk_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, kept = torch.zeros(5), torch.zeros(6)
    ended: list[str] = []
    weakref.finalize(gone, ended.append, "gone")
    listed = [gone, kept]
    monkeypatch.setattr(module.gc, "get_objects", listed.copy)
    seen: list[list[str]] = []

    def late() -> float:
        # Between the list and the reading of the first tensor: the training drops one.
        nonlocal gone
        if listed and seen:
            listed.clear()
            gone = kept
        seen.append(ended.copy())
        return 0.0

    monkeypatch.setattr(module.time, "perf_counter", late)
    found, objects, _ = tensors_of()
    assert found is not None
    assert (objects, found["count"], ended) == (2, 1, ["gone"])
