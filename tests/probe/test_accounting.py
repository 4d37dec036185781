"""The step accounting, mark by mark, on a clock that the test moves."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import MS, Loop, ms

from gpuwatch.probe import accounting


def test_a_plain_loop_is_split_where_the_time_went() -> None:
    loop = Loop()
    for _ in range(3):
        loop.iteration()
    loop.fetch(4)
    assert [s.step_index for s in loop.steps] == [0, 1, 2]
    for step in loop.steps:
        assert ms(step) == {
            "data_wait": 4,
            "forward": 10,
            "backward": 20,
            "optimizer": 2,
            "other": 1,
        }
        assert step.step_ns == 37 * MS
        assert (step.batches, step.samples, step.fetched) == (1, 8, True)
    assert loop.steps[0].tags == ("first_batch", "warmup")
    assert loop.steps[1].tags == loop.steps[2].tags == ()


def test_the_first_two_steps_of_ddp_are_tagged() -> None:
    loop = Loop(distributed=True)
    for _ in range(4):
        loop.iteration()
    assert [("ddp_first" in s.tags) for s in loop.steps] == [True, True, False]


def test_accumulation_is_one_step_of_many_batches() -> None:
    loop = Loop()
    for _ in range(2):
        for _ in range(3):
            loop.fetch(1)
            loop.work(2)
            loop.backward(3)
        loop.optimizer(4)
    loop.fetch(1)
    assert ms(loop.steps[0]) == {"data_wait": 3, "forward": 6, "backward": 9, "optimizer": 4}
    assert (loop.steps[0].batches, loop.steps[0].samples) == (3, 24)


def test_exposed_communication_is_what_follows_the_end_of_computing() -> None:
    loop = Loop(distributed=True)
    loop.fetch(1)
    loop.comm(2)  # the buffer broadcast in the forward
    loop.work(5)
    loop.backward(7, exposed_ms=11)
    loop.optimizer(1)
    loop.fetch(1)
    assert ms(loop.steps[0]) == {
        "data_wait": 1,
        "comm": 13,
        "forward": 5,
        "backward": 7,
        "optimizer": 1,
    }


def test_a_wait_inside_backward_is_communication_once() -> None:
    loop = Loop(distributed=True)
    loop.fetch(1)
    loop.acc.backward_begin()
    loop.work(3)
    loop.comm(4)
    loop.acc.compute_end()
    loop.work(2)
    loop.comm(5)  # a collective waited for in a final callback
    loop.acc.backward_end()
    loop.optimizer(1)
    loop.fetch(1)
    assert ms(loop.steps[0])["backward"] == pytest.approx(5)
    assert ms(loop.steps[0])["comm"] == pytest.approx(9)
    assert loop.steps[0].step_ns == 16 * MS


def test_batches_of_another_loader_leave_the_step_as_evaluation() -> None:
    loop = Loop()
    loop.iteration()
    for _ in range(3):
        loop.fetch(5, key="val")
        loop.work(6)
    loop.exhaust("val", 1)
    loop.iteration()
    loop.fetch(4)
    assert [s.step_ns for s in loop.steps] == [37 * MS, 37 * MS]
    assert [(s.name, s.duration_ns) for s in loop.spans] == [("eval", 34 * MS)]
    assert loop.totals.eval_ns == 34 * MS
    assert [s.samples for s in loop.steps] == [8, 8]


def test_evaluation_at_the_very_end_is_settled_when_the_process_ends() -> None:
    loop = Loop()
    loop.iteration()
    loop.exhaust()
    loop.fetch(5, key="val")
    loop.work(6)
    loop.acc.finish()
    assert len(loop.steps) == 1
    assert [(s.name, s.duration_ns) for s in loop.spans] == [("eval", 11 * MS)]


def test_a_window_fetched_ahead_is_training_also_when_the_iterator_ends_first() -> None:
    loop = Loop()
    loop.fetch(1)
    loop.fetch(1)
    loop.exhaust()
    for _ in range(2):
        loop.work(2)
        loop.backward(3)
    loop.optimizer(1)
    loop.acc.finish()
    assert len(loop.steps) == 1
    assert (loop.steps[0].batches, loop.steps[0].samples) == (2, 16)
    assert not loop.spans


def test_a_fetch_between_forward_and_backward_keeps_the_forward() -> None:
    loop = Loop()
    loop.fetch(1)
    loop.work(10)
    loop.fetch(2)
    loop.work(3)
    loop.backward(4)
    loop.optimizer(1)
    loop.acc.finish()
    assert ms(loop.steps[0]) == {"data_wait": 3, "forward": 13, "backward": 4, "optimizer": 1}


def test_a_loop_without_a_loader_closes_at_the_optimizer() -> None:
    loop = Loop()
    for _ in range(4):
        loop.work(5)
        loop.backward(3)
        loop.optimizer(2)
    loop.acc.finish()
    assert len(loop.steps) == 4
    assert not any(s.fetched for s in loop.steps)
    for step in loop.steps[1:]:
        assert ms(step) == {"forward": 5, "backward": 3, "optimizer": 2}


def test_two_optimizers_in_one_iteration_are_one_step() -> None:
    loop = Loop()
    for _ in range(3):
        loop.fetch(1)
        for key in (1, 2):
            loop.work(2)
            loop.backward(3)
            loop.optimizer(1, key=key)
    loop.fetch(1)
    assert len(loop.steps) == 3
    assert ms(loop.steps[0]) == {"data_wait": 1, "forward": 4, "backward": 6, "optimizer": 2}


def test_a_closure_runs_forward_and_backward_inside_the_optimizer() -> None:
    loop = Loop()
    loop.fetch(1)
    loop.acc.optimizer_begin(1)
    loop.work(4)
    loop.backward(6)
    loop.work(2)
    loop.acc.optimizer_end(1)
    loop.fetch(1)
    assert ms(loop.steps[0]) == {"data_wait": 1, "forward": 4, "backward": 6, "optimizer": 2}


def test_an_optimizer_that_calls_its_base_class_is_one_attempt() -> None:
    loop = Loop()
    loop.fetch(1)
    loop.backward(1)
    loop.acc.optimizer_begin(1)
    loop.acc.optimizer_begin(1)
    loop.work(3)
    loop.acc.optimizer_end(1)
    loop.acc.optimizer_end(1)
    loop.fetch(1)
    assert len(loop.steps) == 1
    assert ms(loop.steps[0])["optimizer"] == 3


def test_an_optimizer_that_raised_leaves_nothing_behind() -> None:
    loop = Loop()
    loop.fetch(1)
    loop.backward(1)
    loop.acc.optimizer_begin(1)
    loop.work(3)  # raises: no end
    loop.iteration()
    loop.iteration()
    loop.fetch(1)
    assert [ms(s)["optimizer"] for s in loop.steps[1:]] == [2]
    assert len(loop.steps) == 2


def test_a_skipped_attempt_is_a_step_with_a_tag() -> None:
    loop = Loop()
    loop.iteration()
    loop.fetch(1)
    loop.backward(1)
    loop.optimizer(1, skipped=True)
    loop.fetch(1)
    assert loop.steps[1].tags == ("skipped",)
    assert loop.totals.skipped == 1


def test_step_alone_closes_steps_once_it_is_used() -> None:
    loop = Loop()
    for _ in range(3):
        for _ in range(2):
            loop.fetch(1)
            loop.backward(2)
            loop.optimizer(1)
        loop.acc.step()
    # Before the first call the second fetch has closed a step; from then on only step() does.
    assert [s.batches for s in loop.steps] == [1, 1, 2, 2]
    assert [s.step_ns for s in loop.steps] == [4 * MS, 4 * MS, 8 * MS, 8 * MS]


def test_spans_and_marked_phases() -> None:
    loop = Loop()
    loop.fetch(1)
    loop.acc.phase_begin(accounting.H2D)
    loop.work(2)
    loop.acc.phase_end(accounting.H2D)
    loop.work(3)
    loop.backward(4)
    loop.optimizer(1)
    loop.acc.span_begin("checkpoint")
    loop.iteration()  # whatever happens inside is not a step
    loop.acc.span_end()
    loop.fetch(1)
    assert ms(loop.steps[0]) == {
        "data_wait": 1,
        "h2d": 2,
        "forward": 3,
        "backward": 4,
        "optimizer": 1,
    }
    assert len(loop.steps) == 1
    assert [(s.name, s.duration_ns) for s in loop.spans] == [("checkpoint", 37 * MS)]


def test_time_between_epochs_belongs_to_no_step() -> None:
    loop = Loop()
    loop.iteration()
    loop.exhaust()
    loop.work(500)
    loop.iteration()
    loop.fetch(1)
    assert [s.step_ns for s in loop.steps] == [37 * MS, 37 * MS]
    assert "first_batch" in loop.steps[1].tags


def test_what_is_said_of_the_present_moment() -> None:
    loop = Loop()
    assert loop.acc.now(loop.clock())[:2] == ("starting", "")
    loop.acc.fetch_begin("train", True)
    loop.work(7)
    assert loop.acc.now(loop.clock()) == ("starting", "data_wait", 7 * MS)
    loop.acc.fetch_end(8)
    loop.acc.backward_begin()
    assert loop.acc.now(loop.clock())[:2] == ("training", "backward")
    loop.acc.backward_end()
    loop.optimizer(1)
    loop.exhaust()
    for _ in range(2):
        loop.fetch(1, key="val")
    assert loop.acc.now(loop.clock())[:2] == ("eval", "forward")


def test_a_backward_that_has_computed_everything_waits_for_the_others() -> None:
    """So a hang in DDP's all-reduce is told apart from one in the backward of a module."""
    loop = Loop()
    loop.fetch(7.0)
    loop.acc.backward_begin()
    loop.clock.pass_ms(3.0)
    assert loop.acc.now(loop.clock()) == ("training", "backward", 3 * MS)
    loop.acc.compute_end()
    loop.clock.pass_ms(50.0)
    assert loop.acc.now(loop.clock()) == ("training", "comm", 50 * MS)
    loop.acc.backward_end()
    assert loop.acc.now(loop.clock())[1] != "comm"


def test_marks_that_went_missing_are_counted_and_the_next_step_is_whole() -> None:
    loop = Loop()
    loop.iteration()
    loop.fetch(1)
    loop.acc.backward_begin()
    loop.acc.abandon(5)
    loop.work(100)
    loop.iteration()
    loop.fetch(4)
    assert loop.acc.dropped == 5
    # Step 0 had not been closed when the marks went missing.
    assert [(s.step_index, s.step_ns) for s in loop.steps] == [(0, 37 * MS), (6, 37 * MS)]


def test_a_dataset_that_trains_to_make_an_item_is_loading() -> None:
    loop = Loop()
    for _ in range(2):
        loop.acc.fetch_begin("train", False)
        loop.work(1)
        loop.backward(2)
        loop.optimizer(3)
        loop.acc.fetch_end(8)
        loop.work(5)
        loop.backward(6)
        loop.optimizer(1)
    loop.fetch(1)
    assert len(loop.steps) == 2
    for step in loop.steps:
        assert ms(step) == {"data_wait": 6, "forward": 5, "backward": 6, "optimizer": 1}


MARKS: dict[str, Callable[[Loop], None]] = {
    "fetch": lambda o: o.fetch(1),
    "fetch_val": lambda o: o.fetch(1, key="val"),
    "leave": lambda o: o.leave(),
    "fetch_failed": lambda o: o.fail_to_fetch(1),
    "fetch_end": lambda o: o.acc.fetch_end(8),
    "fetch_stop": lambda o: o.acc.fetch_stop(),
    "fetch_begin": lambda o: o.acc.fetch_begin("train", False),
    "backward_failed": lambda o: o.backward(1, failed=True),
    "data_begin": lambda o: o.acc.phase_begin(accounting.DATA_WAIT),
    "data_end": lambda o: o.acc.phase_end(accounting.DATA_WAIT),
    "abandon": lambda o: o.acc.abandon(0),
    "exhaust": lambda o: o.exhaust(),
    "exhaust_val": lambda o: o.exhaust("val"),
    "work": lambda o: o.work(1),
    "backward": lambda o: o.backward(1, 1),
    "backward_begin": lambda o: o.acc.backward_begin(),
    "compute_end": lambda o: o.acc.compute_end(),
    "backward_end": lambda o: o.acc.backward_end(),
    "comm": lambda o: o.comm(1),
    "comm_begin": lambda o: o.acc.comm_begin(),
    "comm_end": lambda o: o.acc.comm_end(),
    "optimizer": lambda o: o.optimizer(1),
    "optimizer_2": lambda o: o.optimizer(1, key=2),
    "optimizer_begin": lambda o: o.acc.optimizer_begin(1),
    "optimizer_end": lambda o: o.acc.optimizer_end(1),
    "step": lambda o: o.acc.step(),
    "span_begin": lambda o: o.acc.span_begin("mine"),
    "eval_begin": lambda o: o.acc.span_begin("eval"),
    "span_end": lambda o: o.acc.span_end(),
    "h2d_begin": lambda o: o.acc.phase_begin(accounting.H2D),
    "h2d_end": lambda o: o.acc.phase_end(accounting.H2D),
    "annotate": lambda o: o.acc.annotate(samples=3),
    "finish": lambda o: o.acc.finish(),
}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(sorted(MARKS)), max_size=60))
def test_whatever_the_marks_phases_add_up_and_no_time_is_invented(names: list[str]) -> None:
    loop = Loop()
    begun = loop.clock()
    for name in names:
        MARKS[name](loop)
        loop.work(0.5)
    loop.acc.finish()
    elapsed = loop.clock() - begun
    for step in loop.steps:
        assert all(value >= 0 for value in step.phases_ns)
        assert sum(step.phases_ns) == step.step_ns
    assert [s.step_index for s in loop.steps] == list(range(len(loop.steps)))
    assert all(span.duration_ns >= 0 for span in loop.spans)
    counted = sum(s.step_ns for s in loop.steps) + sum(s.duration_ns for s in loop.spans)
    assert counted <= elapsed
    totals = loop.totals
    assert totals.training_ns + totals.data_wait_ns + totals.comm_ns == sum(
        s.step_ns for s in loop.steps
    )
