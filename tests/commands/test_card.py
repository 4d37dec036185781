"""The card of any run that can be: true, short, and of a width that a log can hold."""

from collections.abc import Sequence
from typing import Any

import pytest
from builders import T0_S, Trace, node_frame
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwatch.commands.card import MOST_LINES, card_lines, first_failure
from gpuwatch.diagnosis import Engine
from gpuwatch.schema import Bye, Ledger, RankAge, RankFrame, RankState, Span
from gpuwatch.store import Store
from gpuwatch.store.views import View

HEALTHY = {"data_wait": 1.0, "forward": 30.0, "backward": 60.0, "optimizer": 5.0, "other": 2.0}
STARVED = {**HEALTHY, "data_wait": 102.0}
LEDGER = Ledger(
    steps=70,
    training_ns=6 * 10**9,
    data_wait_ns=3 * 10**9,
    lost_ns=10**9,
    wall_ns=10 * 10**9,
)


class Job:
    """A run that a monitor has watched, and how its ranks ended."""

    def __init__(self, trace: Trace) -> None:
        trace.frames = [replace(frame, ledger=LEDGER) for frame in trace.frames]
        self.trace = trace
        self.store = Store(lambda: 100.0)
        self.engine = Engine(open_after=1)
        self.store.apply(trace.node_frame, 100.0)
        self.engine(self.store.view())
        self._seq = 1

    def end(self, byes: Sequence[tuple[int, float, Bye | None]]) -> None:
        """Let ranks end: (rank, seconds after the start of the end, last words)."""
        for rank, after_s, bye in byes:
            self._seq += 1
            frame: RankFrame = replace(
                self.trace.frames[rank],
                seq=self._seq,
                records=(),
                snapshot=False,
                hello=None,
                sent_s=T0_S + 100 + after_s,
                bye=bye,
            )
            ages = [RankAge("run-1", rank, f"inc{rank}", 1.0, pid_alive=False)] if not bye else []
            self.store.apply(node_frame(self._seq, [frame], ages=ages), 100.0)

    def card(self, **more: Any) -> list[str]:
        view = self.store.view()
        (diagnosis,) = self.engine(view)
        return card_lines(view.runs[0], diagnosis, nodes=view.nodes, **more)


def starving(**more: Any) -> Trace:
    return Trace([STARVED] * 2, queue_depth=0.0, worker_cpu=10.0, **more)


def finished(job: Job) -> Job:
    job.end([(rank, 0.0, Bye("finished")) for rank in range(len(job.trace.frames))])
    return job


def row(card: Sequence[str], name: str) -> str:
    found = [line for line in card if line.startswith(f"  {name}")]
    assert found, (name, card)
    return found[0].removeprefix(f"  {name}").strip()


def test_a_run_with_a_slow_loader() -> None:
    card = finished(Job(starving())).card()
    assert card[0] == "gpuwatch: run run-1  a-run  2 ranks  70 steps in 10.0 s"
    assert row(card, "verdict").startswith("the loader starves ranks 0-1: ")
    assert row(card, "time") == (
        "training 60%, data wait 30%, start-up and between 10%; goodput 60% of the wall time"
    )
    assert "data 10" in row(card, "step")
    text = "\n".join(card)
    assert "✖ F1 loader_few_workers  ranks 0-1  +" in text
    assert "try  num_workers 2 -> 5 on ranks 0-1: predicted step" in text
    assert "DataLoader(..., num_workers=5)" in text
    assert "1.0 GB resident, steady" in row(card, "memory")
    assert "no NVIDIA driver" in row(card, "n/a")


def test_a_healthy_run_is_told_that_its_model_takes_the_time() -> None:
    card = finished(Job(Trace([HEALTHY] * 2))).card()
    assert row(card, "verdict") == (
        "nothing found: 95% of the step is forward, backward and optimizer"
    )
    assert not [line for line in card if "try" in line]


def test_a_finding_that_was_resolved_is_told_as_such() -> None:
    job = Job(starving())
    good = Trace([HEALTHY] * 2, steps=140)
    good.frames = [replace(f, seq=9, ledger=LEDGER) for f in good.frames]
    job.trace = good
    job.store.apply(node_frame(9, good.frames, sensors=good.sensors), 100.0)
    job._seq = 9
    for _ in range(6):
        job.engine(job.store.view())
    card = finished(job).card()
    assert row(card, "verdict").startswith("nothing is wrong at the end; loader_few_workers was")
    assert any("✓ F1 loader_few_workers" in line and "resolved at step" in line for line in card)


BOOM = Bye("exception", "ValueError: boom", "/a/train.py:3 in f\n/a/train.py:9 in main", "forward")
PEER = Bye("exception", "RuntimeError: Connection closed by peer", "", "backward")


@pytest.mark.parametrize(
    ("byes", "first", "says"),
    [
        ([(1, 0.0, BOOM), (0, 0.3, PEER)], 1, "ValueError: boom"),
        # A launcher ends the others with a signal: they leave no word, and later.
        ([(1, 0.0, BOOM), (0, 0.2, None)], 1, "ValueError: boom"),
        # Killed: the others' exceptions come after its last heartbeat.
        ([(1, 0.0, None), (0, 0.1, PEER)], 1, "ended without a word"),
    ],
)
def test_who_failed_first(
    byes: Sequence[tuple[int, float, Bye | None]], first: int, says: str
) -> None:
    job = Job(starving())
    job.end(byes)
    view = job.store.view()
    failed = first_failure(view.runs[0])
    assert failed is not None
    assert failed.rank == first
    card = job.card()
    assert row(card, "verdict") == f"rank {first} failed first: {says}"
    assert row(card, "then") == f"rank {1 - first} failed in consequence"
    if says.startswith("ValueError"):
        assert "at step 70, in forward, 1.0 GB resident" in row(card, "failed")
        assert row(card, "stack") == "/a/train.py:3 in f"
    else:
        assert "last seen at step 70" in row(card, "failed")


def test_a_rank_that_leaves_the_others_is_why_they_fail() -> None:
    job = Job(starving())
    job.end([(1, 0.0, Bye("finished")), (0, 0.4, PEER)])
    card = job.card()
    assert row(card, "verdict") == "rank 1 left the others at step 70, and they failed"
    assert "in the middle of the training" in row(card, "left")
    assert row(card, "then") == "rank 0 failed in consequence"
    # One that ended long before has nothing to do with it.
    job = Job(starving())
    job.end([(1, -100.0, Bye("finished")), (0, 0.4, PEER)])
    assert row(job.card(), "verdict").startswith("rank 0 failed first")


def test_a_run_that_was_interrupted_says_so() -> None:
    job = Job(starving())
    job.end([(rank, 0.0, Bye("interrupted", "KeyboardInterrupt")) for rank in range(2)])
    card = job.card()
    assert row(card, "stopped") == "by Ctrl-C (SIGINT) at step 70"
    assert row(card, "verdict").startswith("the loader starves")


def test_a_wait_that_is_too_short_to_be_found_is_not_passed_over() -> None:
    quick = {"data_wait": 1.6, "forward": 0.5, "backward": 0.4, "optimizer": 0.1}
    card = finished(Job(Trace([quick], num_workers=8, queue_depth=5.0))).card()
    assert "% waits for data (1.6 ms)" in " ".join(" ".join(card).split())
    assert "below 2 ms a step" in " ".join(" ".join(card).split())


def test_a_run_that_stood_and_was_ended_is_called_a_hang() -> None:
    trace = Trace([HEALTHY] * 2)
    states = [("forward", 60), ("comm", 60)]
    trace.frames = [
        replace(
            frame,
            state=RankState(status="training", phase=phase, phase_age_ns=s * 10**9, step=70),
        )
        for frame, (phase, s) in zip(trace.frames, states, strict=True)
    ]
    job = Job(trace)
    job.end([(0, 0.0, None), (1, 0.1, None)])
    card = job.card()
    assert row(card, "verdict").startswith("no step for 60 s: rank 0 stands in forward")
    assert not [line for line in card if line.startswith("  failed")]
    assert "standing still" in row(card, "time")
    assert not [line for line in card if "py-spy" in line]  # it is gone


def test_what_was_not_seen_is_not_made_up() -> None:
    job = Job(Trace([{"forward": 5.0}], steps=1))
    card = finished(job).card()
    assert row(card, "verdict") == "too few steps to judge: 1, none of them steady"
    assert not [line for line in card if line.startswith("  step")]


def test_other_trainings_and_notes_are_named() -> None:
    job = finished(Job(starving()))
    run = job.store.view().runs[0]
    card = job.card(others=[run], notes=["the kernel killed 1 process"])
    assert row(card, "also") == "1 more training of this command: run-1"
    assert row(card, "note") == "the kernel killed 1 process"


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    ranks=st.integers(1, 5),
    wait_ms=st.floats(0, 500),
    other_ms=st.floats(0, 300),
    transfer_ms=st.floats(0, 300),
    spans=st.integers(0, 4),
    steps=st.integers(1, 80),
)
def test_no_card_is_longer_than_it_may_be(
    data: st.DataObject,
    ranks: int,
    wait_ms: float,
    other_ms: float,
    transfer_ms: float,
    spans: int,
    steps: int,
) -> None:
    stalls = [
        Span(name, T0_S + i, 10**9, step=10 * i + 1)
        for i in range(spans)
        for name in ("checkpoint", "eval")
    ]
    trace = Trace(
        [{**HEALTHY, "data_wait": wait_ms, "other": other_ms}] * ranks,
        queue_depth=0.0,
        transfer_ms=transfer_ms,
        steps=steps,
        spans=stalls,
    )
    job = Job(trace)
    text = st.text(max_size=300)
    words = st.none() | st.builds(Bye, st.sampled_from(["finished", "exception"]), text, text)
    job.end([(rank, 0.1 * rank, data.draw(words)) for rank in range(ranks)])
    notes = data.draw(st.lists(text, max_size=3))
    view: View = job.store.view()
    card = job.card(others=list(view.runs) * 5, notes=notes)
    assert 3 <= len(card) <= MOST_LINES
    assert all(len(line) <= 100 and "\n" not in line for line in card)
