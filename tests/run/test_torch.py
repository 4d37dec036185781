"""The marks on torch itself: nobody who looks, compiles or scripts can tell."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import support

COMPILED = [support.PYTHON, str(Path(__file__).parent / "compiled.py")]
RUN = [*support.GPUWATCH, "run", "--no-card", "--"]


@pytest.mark.process
def test_compilers_do_the_same(rundir: Path) -> None:
    def run(prefix: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, *COMPILED],
            env=support.environment(rundir),
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )

    with ThreadPoolExecutor(2) as pool:
        bare, watched = pool.map(run, ([], RUN))
    assert bare.stderr.splitlines()[-1] == "bare"
    assert watched.stderr.splitlines()[-1] == "watched"
    (told, scripted), (told_bare, scripted_bare) = (
        done.stdout.split("\n", 1) for done in (watched, bare)
    )
    assert scripted == scripted_bare
    assert "aten::backward" in scripted
    for part, counts in json.loads(told).items():
        expected = json.loads(told_bare)[part]
        # None of ours is offered to the compiler. One of torch's may be less: with a step hook it
        # inlines an empty function that it calls without.
        assert counts.pop("frames")["total"] <= expected.pop("frames")["total"], part
        assert counts == expected, part
        assert counts["stats"]["unique_graphs"] > 0
    assert len(watched.stderr.splitlines()) == len(bare.stderr.splitlines()) + 1


@pytest.fixture
def marked() -> list[tuple[Any, str]]:
    """The functions of torch whose code is exchanged."""
    torch = pytest.importorskip("torch")
    return [
        (torch.autograd, "backward"),
        (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__"),
        (torch.nn.parallel.DistributedDataParallel, "_pre_forward"),
        (torch.nn.parallel.DistributedDataParallel, "_sync_buffers"),
    ]


def test_removing_the_marks_leaves_nothing(marked: list[tuple[Any, str]]) -> None:
    from gpuwatch.probe.events import Recorder
    from gpuwatch.probe.patches import Marks

    functions = [getattr(owner, name) for owner, name in marked]
    codes = [function.__code__ for function in functions]
    recorder = Recorder()
    marks = Marks(recorder, pytest.fail)
    for _ in range(2):
        marks.install()
        assert [getattr(owner, name) for owner, name in marked] == functions
        assert all(f.__code__ is not c for f, c in zip(functions, codes, strict=True))
        assert [f.__code__.co_firstlineno for f in functions] == [c.co_firstlineno for c in codes]
        marks.remove()
        assert [getattr(owner, name) for owner, name in marked] == functions
        assert [f.__code__ for f in functions] == codes
    assert not recorder.events


def test_without_source_the_marks_are_wrappers(
    marked: list[tuple[Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torch.utils.data import DataLoader

    from gpuwatch.probe import events, swap
    from gpuwatch.probe.patches import Marks

    monkeypatch.setattr(swap.linecache, "getlines", lambda name: [])
    functions = [getattr(owner, name) for owner, name in marked]
    recorder = events.Recorder()
    marks = Marks(recorder, pytest.fail)
    marks.install()
    try:
        weight = torch.ones(4, requires_grad=True)
        for batch in DataLoader(torch.ones(8, 4), batch_size=4):  # type: ignore[arg-type]
            torch.autograd.backward(tensors=(batch @ weight).sum())
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(()).backward()
    finally:
        marks.remove()
    assert [getattr(owner, name) for owner, name in marked] == functions
    codes = [event[0] for event in recorder.events]
    step = [events.FETCH_BEGIN, events.FETCH_END, events.BACKWARD_BEGIN, events.BACKWARD_END]
    failed = [events.BACKWARD_BEGIN, events.BACKWARD_END]
    assert codes == [*step, *step, events.FETCH_BEGIN, events.FETCH_STOP, *failed]
    assert sys.modules["gpuwatch.probe.swap"] is swap
