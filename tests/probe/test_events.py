"""What the training thread leaves behind is lived through again by another thread, exactly."""

import pytest

from gpuwatch.probe import events
from gpuwatch.probe.accounting import RawStep
from gpuwatch.probe.events import Recorder, Replay

MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def __call__(self) -> int:
        return self.ns


def iteration(recorder: Recorder, clock: Clock) -> None:
    """A step of 37 ms: 4 wait, 10 forward, 20 backward of which 5 exposed, 2 optimizer, 1 other."""
    recorder.push((events.FETCH_BEGIN, clock.ns, "train", False))
    clock.ns += 4 * MS
    recorder.push((events.FETCH_END, clock.ns, 8))
    clock.ns += 10 * MS
    recorder.push((events.BACKWARD_BEGIN, clock.ns))
    clock.ns += 15 * MS
    recorder.push((events.COMPUTE_END, clock.ns))
    clock.ns += 5 * MS
    recorder.push((events.BACKWARD_END, clock.ns))
    recorder.push((events.OPTIMIZER_BEGIN, clock.ns, 1))
    clock.ns += 2 * MS
    recorder.optimizer_end(1)
    clock.ns += 1 * MS


def steps(replay: Replay) -> list[RawStep]:
    return [item for item in replay.accountant.out if isinstance(item, RawStep)]


def test_late_is_as_good_as_at_once() -> None:
    clock = Clock()
    recorder = Recorder(clock)
    replay = Replay(recorder)
    for _ in range(5):
        iteration(recorder, clock)
    clock.ns += 10**9  # nobody looks for a second
    replay.catch_up()
    assert [s.step_ns for s in steps(replay)] == [37 * MS] * 4
    assert steps(replay)[0].phases_ns == [4 * MS, 0, 10 * MS, 15 * MS, 5 * MS, 2 * MS, 1 * MS]
    assert replay.now() == ("training", "other", 10**9 + MS)
    recorder.finish()
    replay.catch_up()
    assert len(steps(replay)) == 5
    assert not recorder.events


def test_every_method_has_its_code() -> None:
    recorder = Recorder(Clock())
    replay = Replay(recorder)
    recorder.span_begin("mine")
    recorder.span_end()
    recorder.phase_begin(1)
    recorder.phase_end(1)
    recorder.annotate(samples=3, tokens=5)
    recorder.step()
    recorder.finish()
    names = [events._METHODS[event[0]] for event in recorder.events]
    assert names == [
        "span_begin",
        "span_end",
        "phase_begin",
        "phase_end",
        "annotate",
        "step",
        "finish",
    ]
    replay.catch_up()
    assert replay.accountant.manual


def test_a_deque_that_ran_over_is_counted_and_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "EVENT_LIMIT", 60)
    clock = Clock()
    recorder = Recorder(clock)
    replay = Replay(recorder)
    for _ in range(3):
        iteration(recorder, clock)
    replay.catch_up()
    for _ in range(50):
        iteration(recorder, clock)
    assert len(recorder.events) == 60
    replay.catch_up()
    assert replay.accountant.dropped == 50
    for _ in range(3):
        iteration(recorder, clock)
    replay.catch_up()
    taken = steps(replay)
    # The third step was open when the marks went missing; the index goes on where the loop is.
    assert [s.step_index for s in taken] == [0, 1, 52, 53]
    assert [s.step_ns for s in taken] == [37 * MS] * 4


def test_an_order_of_marks_that_breaks_the_accounting_costs_a_step_and_no_more() -> None:
    clock = Clock()
    recorder = Recorder(clock)
    told: list[str] = []
    replay = Replay(recorder, told.append)
    iteration(recorder, clock)
    recorder.push((events.BACKWARD_BEGIN, clock.ns, True, "one argument too many"))
    for _ in range(2):
        iteration(recorder, clock)
    replay.catch_up()
    assert len(told) == 1
    assert replay.accountant.dropped == 1
    recorder.finish()
    replay.catch_up()
    # The last one ends with its optimizer: what follows belongs to no step.
    assert [s.step_ns for s in steps(replay)[-2:]] == [37 * MS, 36 * MS]
