"""Unmodified scripts of three frameworks, and the same with the line that we offer for each."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import support

from gpuwatch.schema import RankFrame

HERE = Path(__file__).parent
EPOCHS, STEPS_AN_EPOCH = 2, 4
STEPS = EPOCHS * STEPS_AN_EPOCH
BATCHES = [2, 2, 2, 1] * EPOCHS  # seven batches, two a step: the last window is partial


def train(framework: str, directory: Path, tmp_path: Path) -> tuple[RankFrame, str]:
    """Run the script, which trains twice: by itself, and with our line. Return its past."""
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: pip install -e '.[integrations]'")
    done, out = tmp_path / "done", tmp_path / "out"
    env = support.environment(directory, DONE=str(done), HF_HUB_OFFLINE="1")
    argv = [support.PYTHON, str(HERE / f"job_{framework}.py")]
    with support.process(argv, env, output=out) as training:

        def finished() -> bool:
            assert training.poll() is None, support.text_of(out)
            return '"steps"' in support.text_of(out)

        support.wait_until(finished, 100, "the end of both trainings")
        (presence,) = support.rank_presences(directory)
        frame = support.ask(presence, "snapshot")
        done.touch()
        assert training.wait(20) == 0, support.text_of(out)
    (said,) = [json.loads(r) for r in support.text_of(out).splitlines() if r.startswith('{"steps"')]
    assert said["steps"] == [STEPS, STEPS]
    assert "gpuwatch:" not in support.text_of(out)
    return frame, support.text_of(out)


def check_steps(frame: RankFrame, samples_a_batch: int) -> None:
    """Both trainings, and both alike."""
    records = frame.records
    assert [r.index for r in records] == list(range(2 * STEPS))
    assert [r.batches for r in records] == BATCHES * 2
    assert [r.samples for r in records] == [n * samples_a_batch for n in BATCHES * 2]
    for record in records:
        host = record.host
        phases = [getattr(host, name) for name in host.__struct_fields__]
        assert sum(p for p in phases if p is not None) == record.step_ns
        for name in ("data_wait", "forward", "backward", "optimizer"):
            assert getattr(host, name) > 0, (record.index, name)
        assert host.comm is None
    firsts = [r.index for r in records if "first_batch" in r.tags]
    assert firsts == list(range(0, 2 * STEPS, STEPS_AN_EPOCH))
    # One loader in each training, and the evaluation's is another.
    assert len({r.loader for r in records}) == 2
    assert frame.ledger.samples == sum(BATCHES) * 2 * samples_a_batch
    # All of them clip, each in its own way.
    assert all(r.grad_norm is not None and r.grad_norm > 0 for r in records)
    assert frame.state.grad_norm == records[-1].grad_norm
    assert frame.state.learning_rate is not None
    # Ours passes the loss on where it costs nothing: not of every step, nothing in the first run.
    assert [r.loss for r in records[:STEPS]] == [None] * STEPS
    assert any(r.loss is not None for r in records[STEPS:])
    assert frame.dropped == 0


def spans(frame: RankFrame, name: str) -> Iterator[tuple[int, float]]:
    """(step that follows, ms) of the spans of that name, in order of time."""
    for span in sorted(frame.spans, key=lambda s: s.started_s):
        assert span.name in {"eval", "checkpoint"}
        if span.name == name:
            yield span.step, span.duration_ns / 1e6


@pytest.mark.process
def test_transformers(rundir: Path, tmp_path: Path) -> None:
    frame, _ = train("transformers", rundir, tmp_path)
    check_steps(frame, 2)
    assert frame.hello is not None
    assert frame.hello.frameworks == ("transformers",)
    assert [r.tokens for r in frame.records] == [n * 2 * 16 for n in BATCHES * 2]
    # 6 N + 12 L H Q T, for the tokens of the last step: attention 4 x 16 x 16, MLP 3 x 16 x 32,
    # norms 3 x 16, head 16 x 64.
    a_token = 6 * (4 * 256 + 3 * 512 + 3 * 16 + 1024) + 12 * 1 * 2 * 8 * 16
    assert frame.state.flops_source == "formula: 6N+12LHQT"
    assert frame.state.flops_per_step == a_token * 2 * 16
    # The Trainer has computed the loss of every step for its log. The last step of an epoch has
    # ended with its optimizer, before that.
    assert [r.loss is not None for r in frame.records[STEPS:]] == [True, True, True, False] * EPOCHS
    # Evaluated after steps 3, 6 and 8 of each; what follows the very last one is not known yet.
    assert [step for step, _ in spans(frame, "eval")] == [3, 6, 8, 11, 14]
    saved = {step for step, _ in spans(frame, "checkpoint")}
    assert saved == {4, 8, 12, 16}
    state = frame.state
    assert state.total_steps == STEPS
    assert state.epoch == EPOCHS
    assert state.loss is not None
    assert 3 < state.loss < 5  # ln 64 = 4.2


@pytest.mark.process
def test_lightning(rundir: Path, tmp_path: Path) -> None:
    frame, _ = train("lightning", rundir, tmp_path)
    check_steps(frame, 4)
    assert frame.hello is not None
    assert frame.hello.frameworks == ("lightning",)
    # The closure runs inside the optimizer, and is none of it.
    for name in ("forward", "backward"):
        assert sum(getattr(r.host, name) for r in frame.records) > 0
    evals = list(spans(frame, "eval"))
    # The sanity check and two validations, in both trainings.
    assert [step for step, _ in evals] == [0, 4, 8, 8, 12, 16]
    assert {step for step, _ in spans(frame, "checkpoint")} == {4, 8, 12, 16}
    state = frame.state
    assert state.total_steps == STEPS
    assert state.epoch is not None
    assert state.loss is not None
    assert 0 < state.loss < 10


@pytest.mark.process
def test_accelerate(rundir: Path, tmp_path: Path) -> None:
    frame, _ = train("accelerate", rundir, tmp_path)
    check_steps(frame, 4)
    assert frame.hello is not None
    assert frame.hello.frameworks == ("accelerate",)
    assert [step for step, _ in spans(frame, "eval")] == [4, 8, 12]
    saved = [step for step, _ in spans(frame, "checkpoint")]
    assert set(saved) == {4, 8, 12, 16}
    assert saved.count(4) > saved.count(12) == 1  # `save_state` as one
    assert frame.state.loss is not None
