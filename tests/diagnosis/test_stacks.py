"""Stacks of a hang: asked for once, read, and used to tell who is missing."""

from collections.abc import Mapping, Sequence

import pytest
from builders import T0_S, Trace, node_frame, rank_frame
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwatch.diagnosis import Engine, Finding
from gpuwatch.diagnosis.stacks import MOST_RANKS, in_collective, read_stack
from gpuwatch.errors import TargetError
from gpuwatch.schema import RankState, Reply
from gpuwatch.store import Store

HEALTHY = {"data_wait": 1.0, "forward": 30.0, "backward": 60.0, "optimizer": 5.0, "other": 2.0}

WAITS = """Thread gpuwatch-telemetry:
  File "/venv/lib/python3.11/threading.py", line 1002, in _bootstrap
    self._bootstrap_inner()
Thread MainThread:
  File "/home/ada/train.py", line 90, in <module>
    main()
  File "/home/ada/train.py", line 71, in main
    dist.all_reduce(flag)
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2810, in all_reduce
    work.wait()
"""  # noqa: E501
ALONE = """Thread MainThread:
  File "/home/ada/train.py", line 90, in <module>
    main()
  File "/home/ada/train.py", line 66, in main
    validate(model)
  File "/home/ada/evaluation.py", line 12, in validate
    time.sleep(1e9)
"""


class Ranks:
    """A job that stands, and ranks that answer what they are told to."""

    def __init__(self, answers: Sequence[str | None], phase: str = "comm") -> None:
        self.trace = Trace([HEALTHY] * len(answers))
        state = RankState(status="training", phase=phase, phase_age_ns=60 * 10**9, step=70)
        self.trace.frames = [replace(frame, state=state) for frame in self.trace.frames]
        self.store = Store(lambda: 100.0)
        self.store.apply(self.trace.node_frame, 100.0)
        self.answers = answers
        self.asked: list[tuple[str, str, int | None]] = []
        self.refuses = False

    def ask(self, verb: str, run: str, rank: int | None) -> str:
        if self.refuses:
            raise TargetError("a recording has no ranks to ask")
        self.asked.append((verb, run, rank))
        return f"id{rank}"

    def answer(self, said: Mapping[int, str] | None = None) -> None:
        frames = [
            rank_frame(
                2,
                rank=rank,
                state=self.trace.frames[rank].state,
                replies=(Reply(f"id{rank}", "done", (said or {}).get(rank, ""), text),),
            )
            for rank, text in enumerate(self.answers)
            if text is not None
        ]
        self.store.apply(node_frame(2, frames, sent_s=T0_S + 1), 100.0)

    def hang(self, engine: Engine) -> Finding:
        (diagnosis,) = engine(self.store.view())
        return next(f for f in diagnosis.findings if f.kind == "hang")


def test_the_ranks_are_asked_once_and_their_stacks_come_into_the_finding() -> None:
    ranks = Ranks([WAITS, ALONE])
    engine = Engine(open_after=1, ask=ranks.ask)
    assert ranks.hang(engine).stacks == ()
    assert engine.waiting
    ranks.answer()
    for _ in range(3):
        finding = ranks.hang(engine)
    assert not engine.waiting
    assert sorted(ranks.asked) == [("stack", "run-1", 0), ("stack", "run-1", 1)]
    # By phase and step nobody could tell them apart: the stacks do.
    assert finding.ranks == (1,)
    assert finding.confidence == "high"
    assert "rank 1 is missing in the collective, in evaluation.py:12 in validate" in finding.summary
    assert "rank 0 waits there" in finding.summary
    assert [s.rank for s in finding.stacks] == [1, 0]
    assert finding.stacks[0].frames[0] == "/home/ada/evaluation.py:12 in validate"
    evidence = {e.metric: e for e in finding.evidence}
    assert evidence["stack_of_rank_0"].value == "train.py:71 in main"
    assert evidence["stack_of_rank_0"].compared_with == (
        "innermost distributed_c10d.py:2810 in all_reduce"
    )


def test_what_a_rank_says_of_a_place_below_its_stack_is_in_the_evidence() -> None:
    ranks = Ranks([WAITS, ALONE])
    engine = Engine(open_after=1, ask=ranks.ask)
    ranks.hang(engine)
    words = "waits in DistributedDataParallel's all-reduce of the gradients over gloo"
    ranks.answer({0: words})
    evidence = {e.metric: e for e in ranks.hang(engine).evidence}
    assert evidence["stack_of_rank_0"].compared_with == words
    assert evidence["stack_of_rank_1"].compared_with.startswith("innermost ")


@pytest.mark.parametrize("answers", [[WAITS, WAITS], [ALONE, ALONE], [WAITS, None]])
def test_stacks_that_do_not_tell_the_ranks_apart_blame_nobody(
    answers: Sequence[str | None],
) -> None:
    ranks = Ranks(answers)
    engine = Engine(open_after=1, ask=ranks.ask)
    before = ranks.hang(engine)
    ranks.answer()
    after = ranks.hang(engine)
    assert after.ranks == before.ranks == (0, 1)
    assert after.summary == before.summary
    assert after.stacks


def test_who_cannot_be_asked_is_not() -> None:
    ranks = Ranks([WAITS, ALONE])
    ranks.refuses = True
    engine = Engine(open_after=1, ask=ranks.ask)
    assert ranks.hang(engine).ranks == (0, 1)
    assert not engine.waiting


def test_of_many_ranks_some_are_asked() -> None:
    ranks = Ranks([WAITS] * 40)
    ranks.hang(Engine(open_after=1, ask=ranks.ask))
    assert len(ranks.asked) == MOST_RANKS


def test_an_answer_to_somebody_else_is_none_of_ours() -> None:
    ranks = Ranks([ALONE, ALONE])
    ranks.answer()  # before anybody has asked: what a person wanted to see a while ago
    engine = Engine(open_after=1, ask=lambda verb, run, rank: f"other{rank}")
    ranks.hang(engine)
    assert ranks.hang(engine).stacks == ()


@given(st.text() | st.text(alphabet='Thread MainThread:\n File "x", line 1, in f'))
def test_any_text_can_be_read(text: str) -> None:
    frames = read_stack(text)
    assert len(frames) <= 40
    in_collective(frames)
