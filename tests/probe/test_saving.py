"""Checkpoints that are written in the background: what the training waits for is the span."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuwatch.probe.accounting import RawSpan
from gpuwatch.probe.events import Recorder, Replay
from gpuwatch.probe.patches import Marks


class SlowWeights:
    """Takes its time to hand out its state, and more of it to be written."""

    def __init__(self) -> None:
        self.tensor = torch.ones(4)

    def state_dict(self) -> dict[str, Any]:
        time.sleep(0.05)
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


@pytest.mark.filterwarnings("ignore")  # there is no process group
def test_what_is_saved_in_the_background_counts_until_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed.checkpoint
    from torch.distributed.checkpoint import filesystem

    dcp: Any = torch.distributed.checkpoint
    bound_before = dcp.async_save
    write = filesystem.FileSystemWriter.write_data

    returned = threading.Event()

    def write_slowly(*args: Any, **kwargs: Any) -> Any:
        assert returned.wait(60)
        return write(*args, **kwargs)

    monkeypatch.setattr(filesystem.FileSystemWriter, "write_data", write_slowly)
    recorder = Recorder()
    marks = Marks(recorder, pytest.fail)
    marks.install()
    try:
        began_ns = time.perf_counter_ns()
        futures = [
            save({"model": SlowWeights()}, checkpoint_id=tmp_path / name, no_dist=True)
            for name, save in (("a", dcp.async_save), ("b", bound_before))
        ]
        both_ns = time.perf_counter_ns() - began_ns
        time.sleep(0.2)  # nothing is written before, and that is in no span
        returned.set()
        for future in futures:
            future.result()
    finally:
        returned.set()
        marks.remove()
    assert {path.parent.name for path in tmp_path.glob("*/.metadata")} == {"a", "b"}
    replay = Replay(recorder, pytest.fail)
    replay.catch_up()
    spans = [item for item in replay.accountant.out if isinstance(item, RawSpan)]
    assert [span.name for span in spans] == ["checkpoint"] * 2
    for span in spans:
        assert 0.05e9 <= span.duration_ns < both_ns
    assert sum(span.duration_ns for span in spans) <= both_ns
