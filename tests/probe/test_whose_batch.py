"""Batches fetched ahead, evaluation between steps, and what an error leaves behind."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import MS, Loop, ms


class Ahead:
    """A loader that hands out a batch only when it has fetched `ahead` more, as Accelerate's do.

    Every batch has its own number of samples: 1, 2, 4, ... So a sum tells which ones are in it.
    """

    def __init__(self, loop: Loop, batches: int, ahead: int = 1, key: str = "train") -> None:
        self._loop = loop
        self._left = [1 << n for n in range(batches)]
        self._ahead = ahead
        self._key = key
        self._held: list[int] = []
        self._ended = False

    def __iter__(self) -> "Ahead":
        return self

    def __next__(self) -> int:
        while not self._ended and len(self._held) <= self._ahead:
            if self._left:
                self._held.append(self._left.pop(0))
                self._loop.fetch(1, self._key, self._held[-1])
            else:
                self._loop.exhaust(self._key, 1)
                self._ended = True
        if not self._held:
            raise StopIteration
        return self._held.pop(0)


def samples(loop: Loop) -> list[int | None]:
    return [step.samples for step in loop.steps]


def train(loop: Loop, batch: int) -> None:
    loop.work(10)
    loop.backward(20)


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("batches", [1, 2, 3, 5])
def test_a_batch_belongs_to_the_step_that_consumes_it(batches: int, ahead: int) -> None:
    loop = Loop()
    for _ in range(4):  # epochs
        for batch in Ahead(loop, batches, ahead):
            train(loop, batch)
            loop.optimizer(2)
        loop.work(500)
    loop.acc.finish()
    assert samples(loop) == [1 << n for n in range(batches)] * 4
    assert {step.batches for step in loop.steps} == {1}
    # What lies between the epochs is in no step.
    assert max(step.step_ns for step in loop.steps) <= 32 * MS + (ahead + 2) * MS


def test_the_time_of_a_fetch_belongs_to_the_step_in_which_it_was_spent() -> None:
    loop = Loop()
    for batch in Ahead(loop, 4):
        train(loop, batch)
        loop.optimizer(2)
    loop.acc.finish()
    assert [ms(step)["data_wait"] for step in loop.steps] == [2, 1, 1, 1]
    assert [ms(step)["forward"] for step in loop.steps] == [10] * 4
    assert [step.tags for step in loop.steps] == [("first_batch", "warmup"), (), (), ()]
    assert [(step.fetched, step.loader) for step in loop.steps] == [(True, "train")] * 4


@pytest.mark.parametrize(
    ("batches", "window", "expected"),
    [
        (3, 2, [3, 4]),
        (4, 2, [3, 12]),
        (5, 2, [3, 12, 16]),
        (2, 2, [3]),
        (1, 2, [1]),
        (7, 3, [7, 56, 64]),
    ],
)
@pytest.mark.parametrize("whole_window", [True, False])
@pytest.mark.parametrize("ahead", [0, 1])
def test_windows_and_what_is_left_of_them(
    batches: int, window: int, expected: list[int], whole_window: bool, ahead: int
) -> None:
    """Transformers takes the whole window before its first forward, Accelerate batch by batch."""
    loop = Loop()
    for _ in range(3):
        loader = Ahead(loop, batches, ahead)
        while True:
            taken = 0
            if whole_window:
                held = [b for _, b in zip(range(window), loader, strict=False)]
                for batch in held:
                    train(loop, batch)
                taken = len(held)
            else:
                for _, batch in zip(range(window), loader, strict=False):
                    train(loop, batch)
                    taken += 1
            if not taken:
                break
            loop.optimizer(2)
            if taken < window:
                break
        loop.work(500)
    loop.acc.finish()
    assert samples(loop) == expected * 3
    assert sum(step.batches for step in loop.steps) == 3 * batches


def gan(loop: Loop, batch: int) -> None:
    for key in (1, 2):
        train(loop, batch)
        loop.optimizer(2, key=key)


def critics(loop: Loop, batch: int) -> None:
    train(loop, batch)
    loop.optimizer(2, key=1)
    if batch & 0b1001001001:  # every third
        train(loop, batch)
        loop.optimizer(2, key=2)


def closure(loop: Loop, batch: int) -> None:
    loop.acc.optimizer_begin(1)
    for _ in range(3):
        train(loop, batch)
    loop.acc.optimizer_end(1)


@pytest.mark.parametrize("iteration", [gan, critics, closure])
@pytest.mark.parametrize("ahead", [0, 1])
def test_several_backwards_of_a_batch(iteration: Callable[[Loop, int], None], ahead: int) -> None:
    loop = Loop()
    for _ in range(2):
        for batch in Ahead(loop, 9, ahead):
            iteration(loop, batch)
    loop.acc.finish()
    assert samples(loop) == [1 << n for n in range(9)] * 2


def test_two_losses_of_a_batch_fetched_ahead_are_learnt() -> None:
    loop = Loop()
    for _ in range(2):
        for batch in Ahead(loop, 9):
            train(loop, batch)
            train(loop, batch)
            loop.optimizer(2)
    loop.acc.finish()
    found = samples(loop)
    # The first step takes one too many: a window of two fetched ahead looks the same.
    assert found[0] == 3
    assert found[1:8] == [1 << n for n in range(2, 9)]
    assert found[8] is None
    assert found[9:] == [1 << n for n in range(9)]  # in the second epoch it is known
    assert sum(n or 0 for n in found) == 2 * 511


def test_two_batches_of_a_loss_are_learnt() -> None:
    loop = Loop()
    for _ in range(8):
        loop.fetch(1)
        loop.fetch(1)
        loop.work(5)
        loop.backward(5)
        loop.optimizer(1)
    loop.acc.finish()
    assert samples(loop) == [8, 8] + [16] * 6


def test_loops_that_leave_an_epoch_early_start_the_next_one_clean() -> None:
    loop = Loop()
    for _ in range(3):
        for taken, batch in enumerate(Ahead(loop, 9)):
            if taken == 3:
                break
            train(loop, batch)
            loop.optimizer(2)
        loop.leave()
    loop.acc.finish()
    assert samples(loop) == [1, 2, 4] * 3


def test_a_list_of_batches_fetched_at_once() -> None:
    loop = Loop()
    loop.fetch(1, samples=1)
    loop.fetch(1, samples=2)
    loop.fetch(1, samples=4)
    loop.exhaust()
    for _ in range(6):  # two epochs over the list
        loop.work(10)
        loop.backward(20)
        loop.optimizer(2)
    loop.acc.finish()
    assert samples(loop) == [1, 2, 4, None, None, None]
    assert [ms(step)["forward"] for step in loop.steps] == [10] * 6


def test_samples_that_the_user_gives_go_before_what_was_seen() -> None:
    loop = Loop()
    for batch in Ahead(loop, 3):
        loop.acc.annotate(samples=100 + batch)
        train(loop, batch)
        loop.optimizer(1)
    loop.acc.finish()
    assert samples(loop) == [101, 102, 104]


# --- evaluation --------------------------------------------------------------------------------


def evaluate(loop: Loop, batches: int = 3, *, ended: bool = True, ahead: int = 0) -> None:
    """Five milliseconds a batch, the end of the iterator one; or left early."""
    for n, _ in enumerate(Ahead(loop, batches + (not ended), ahead, "val")):
        loop.work(4)
        if n == batches - 1 and not ended:
            break
    loop.leave("val")


def evals(loop: Loop) -> list[float]:
    return [span.duration_ns / MS for span in loop.spans if span.name == "eval"]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("eval_ahead", [0, 1])
@pytest.mark.parametrize("ended", [True, False])
def test_evaluation_every_other_step(ahead: int, eval_ahead: int, ended: bool) -> None:
    loop = Loop()
    for n, batch in enumerate(Ahead(loop, 6, ahead)):
        train(loop, batch)
        loop.optimizer(2)
        if n % 2 == 1:
            evaluate(loop, ended=ended, ahead=eval_ahead)
    loop.acc.finish()
    assert samples(loop) == [1, 2, 4, 8, 16, 32]
    assert [ms(step)["forward"] for step in loop.steps] == [10] * 6
    assert max(step.step_ns for step in loop.steps) <= 35 * MS
    first = 15 + ended + (eval_ahead and not ended)
    assert evals(loop)[:2] == [first] * 2
    # Nothing follows the last one that would tell where it ended, but its iterator does.
    assert evals(loop)[2] == first - 4 * (ahead and eval_ahead and ended)
    assert len(evals(loop)) == 3


@pytest.mark.parametrize("ended", [True, False])
def test_a_sanity_check_before_the_training(ended: bool) -> None:
    loop = Loop()
    evaluate(loop, 2, ended=ended)
    for batch in Ahead(loop, 3):
        train(loop, batch)
        loop.optimizer(2)
    loop.acc.finish()
    assert evals(loop) == [10 + ended]
    assert samples(loop) == [1, 2, 4]
    assert [step.step_ns for step in loop.steps] == [34 * MS, 33 * MS, 33 * MS]
    assert loop.steps[0].start_ns == loop.spans[0].start_ns + loop.spans[0].duration_ns


def test_a_batch_that_the_user_fetched_before_the_evaluation_is_kept() -> None:
    loop = Loop()
    loop.fetch(1, samples=1)
    for n in range(4):
        train(loop, n)
        loop.optimizer(2)
        loop.fetch(1, samples=2 << n)
        if n == 1:
            evaluate(loop)
    loop.acc.finish()
    assert samples(loop)[:3] == [1, 2, 4]
    assert [ms(step)["forward"] for step in loop.steps[:4]] == [10] * 4
    assert evals(loop) == [16]


def test_evaluation_on_the_training_loader_itself() -> None:
    loop = Loop()
    for _ in range(2):
        for batch in Ahead(loop, 3, 0):
            train(loop, batch)
            loop.optimizer(2)
        for _ in Ahead(loop, 3, 0):  # training accuracy
            loop.work(4)
    loop.acc.finish()
    assert samples(loop) == [1, 2, 4] * 2
    assert evals(loop) == [16, 16]
    assert max(step.step_ns for step in loop.steps) == 33 * MS


def test_a_pass_over_the_same_loader_inside_an_epoch() -> None:
    loop = Loop()
    for n, batch in enumerate(Ahead(loop, 4, 0)):
        train(loop, batch)
        loop.optimizer(2)
        if n == 1:
            for fetched in range(4):
                loop.acc.fetch_begin("train", fetched == 0)
                loop.work(1)
                if fetched == 3:
                    loop.acc.fetch_stop()
                else:
                    loop.acc.fetch_end(100)
                    loop.work(4)
    loop.acc.finish()
    assert samples(loop) == [1, 2, 4, 8]
    assert evals(loop)[0] == pytest.approx(16)


def test_two_optimizers_in_a_loop_that_makes_its_own_batches() -> None:
    loop = Loop()
    for n in range(6):
        gan(loop, n)
    loop.acc.finish()
    assert len(loop.steps) == 6
    for step in loop.steps[1:]:
        assert ms(step) == {"forward": 20, "backward": 40, "optimizer": 4}


def test_two_loaders_side_by_side_both_train() -> None:
    loop = Loop()
    for _ in range(5):
        loop.fetch(1, "labelled", 8)
        loop.fetch(2, "unlabelled", 64)
        loop.work(10)
        loop.backward(20)
        loop.optimizer(2)
    loop.acc.finish()
    # In the first step the one fetched first could be an evaluation.
    assert samples(loop) == [64] + [72] * 4
    assert [ms(step)["data_wait"] for step in loop.steps[1:]] == [3] * 4
    assert evals(loop) == [1]


def test_waiting_after_the_last_evaluation_is_not_evaluation() -> None:
    loop = Loop()
    for batch in Ahead(loop, 3):
        train(loop, batch)
        loop.optimizer(2)
    loop.fetch(1, "val")
    assert loop.acc.now(loop.clock())[:2] == ("eval", "forward")
    loop.leave("val")
    evaluate(loop)
    assert loop.acc.now(loop.clock())[:2] == ("training", "")
    loop.work(10_000)
    loop.acc.finish()
    assert evals(loop) == [17]


def test_what_lies_between_an_evaluation_and_the_next_epoch_is_not_evaluation() -> None:
    loop = Loop()
    for _ in range(2):
        for batch in Ahead(loop, 3, 0):
            train(loop, batch)
            loop.optimizer(2)
        evaluate(loop)
        loop.work(500)
    loop.acc.finish()
    assert evals(loop) == [16, 16]
    assert max(step.step_ns for step in loop.steps) == 33 * MS


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("named", [False, True])
def test_an_evaluation_in_a_span_gives_the_same_steps(ahead: int, named: bool) -> None:
    loop = Loop()
    for n, batch in enumerate(Ahead(loop, 4, ahead)):
        train(loop, batch)
        loop.optimizer(2)
        if n % 2 == 1:
            loop.work(3)
            if named:
                loop.acc.span_begin("eval")
            evaluate(loop)
            if named:
                loop.acc.span_end()
    # The last step is over although nothing was fetched since.
    assert samples(loop) == [1, 2, 4, 8]
    loop.acc.finish()
    assert [span.step for span in loop.spans] == [2, 4]
    assert evals(loop) == [16, 16]
    waits = [2, 1, 1, 1] if ahead else [1] * 4
    assert [ms(step).get("data_wait", 0) for step in loop.steps] == waits
    assert [ms(step)["forward"] for step in loop.steps] == [10] * 4


def test_an_evaluation_in_a_span_ends_the_step_before_it() -> None:
    loop = Loop()
    for _ in range(3):
        loop.fetch(1)
        train(loop, 0)
        loop.optimizer(2)
    loop.acc.span_begin("eval")
    loop.work(50)
    assert len(loop.steps) == 3
    loop.acc.span_end()
    loop.work(5)
    loop.fetch(1)
    train(loop, 0)
    loop.optimizer(2)
    loop.acc.finish()
    assert [step.step_ns for step in loop.steps] == [33 * MS] * 4


def test_a_checkpoint_after_the_optimizer_is_before_the_next_step() -> None:
    loop = Loop()
    loop.iteration()
    loop.acc.span_begin("checkpoint")
    loop.work(5)
    loop.acc.span_end()
    loop.work(1)
    loop.iteration()
    loop.acc.finish()
    assert [(span.step, span.duration_ns) for span in loop.spans] == [(1, 5 * MS)]
    assert ms(loop.steps[0])["other"] == 2


def test_another_training_has_its_own_optimizers() -> None:
    loop = Loop()
    for key in range(2):
        for batch in Ahead(loop, 3, key=f"train{key}"):
            train(loop, batch)
            loop.optimizer(2, key=key)
    assert samples(loop) == [1, 2, 4] * 2


def test_the_last_step_is_there_before_the_process_ends() -> None:
    loop = Loop()
    for batch in Ahead(loop, 3):
        gan(loop, batch)
    assert samples(loop) == [1, 2, 4]
    assert loop.acc.now(loop.clock())[:2] == ("training", "")


# --- errors ------------------------------------------------------------------------------------


def clean_step(loop: Loop) -> None:
    """Three iterations; the second one is as if nothing had happened before."""
    for _ in range(3):
        loop.iteration()
    loop.acc.finish()
    assert [step.samples for step in loop.steps[-3:]] == [8, 8, 8]
    assert loop.steps[-2].batches == 1
    assert ms(loop.steps[-2]) == {
        "data_wait": 4,
        "forward": 10,
        "backward": 20,
        "optimizer": 2,
        "other": 1,
    }


def test_a_backward_that_raised_throws_its_batch_away() -> None:
    loop = Loop()
    loop.iteration()
    loop.fetch(1, samples=100)
    loop.work(2)
    loop.backward(3, failed=True)
    loop.iteration()
    assert (loop.steps[-1].batches, loop.steps[-1].samples) == (1, 8)
    clean_step(loop)


def test_a_closure_whose_backward_raised() -> None:
    loop = Loop()
    loop.iteration()
    loop.fetch(1, samples=100)
    loop.acc.optimizer_begin(1)
    loop.work(2)
    loop.backward(3, failed=True)
    clean_step(loop)


@pytest.mark.parametrize("raised_again", [False, True])
def test_an_optimizer_that_raised_in_a_loop_that_makes_its_own_batches(raised_again: bool) -> None:
    loop = Loop()
    for n in range(6):
        loop.work(5)
        loop.backward(3)
        loop.acc.optimizer_begin(1)
        loop.work(2)
        if n == 2 or (n == 3 and raised_again):
            continue
        loop.acc.optimizer_end(1)
    loop.acc.finish()
    assert len(loop.steps) == 5 - raised_again
    assert ms(loop.steps[-1]) == {"forward": 5, "backward": 3, "optimizer": 2}
    assert ms(loop.steps[1]) == {"forward": 5, "backward": 3, "optimizer": 2}


def test_an_interrupted_fetch() -> None:
    loop = Loop()
    loop.iteration()
    loop.fail_to_fetch(50)
    clean_step(loop)


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupted_fetch_keeps_what_was_fetched_ahead(at: int) -> None:
    loop = Loop()
    loop.fetch(1, samples=1)
    for n in range(3):
        if n == at:
            loop.fail_to_fetch(5)
        loop.fetch(1, samples=2 << n)
        loop.work(10)
        loop.backward(20)
        loop.optimizer(2)
    loop.acc.finish()
    assert samples(loop) == [1, 2, 4]


def test_a_fetch_whose_end_was_never_seen() -> None:
    loop = Loop()
    loop.iteration()
    loop.acc.fetch_begin("train", False)
    loop.work(3)
    clean_step(loop)


def test_a_backward_whose_end_was_never_seen() -> None:
    loop = Loop()
    loop.iteration()
    loop.fetch(1)
    loop.acc.backward_begin()
    loop.work(3)
    clean_step(loop)


def test_reentrant_backward_is_measured_once_and_its_communication_is_kept() -> None:
    loop = Loop(distributed=True)
    loop.fetch(1)
    loop.work(10)
    loop.acc.backward_begin()
    loop.work(5)
    loop.acc.backward_begin()  # reentrant checkpointing
    loop.work(6)
    loop.acc.compute_end()
    loop.work(4)
    loop.acc.backward_end()
    loop.work(7)
    loop.acc.compute_end()
    loop.work(3)
    loop.acc.backward_end()
    loop.optimizer(2)
    loop.acc.finish()
    assert ms(loop.steps[0]) == {
        "data_wait": 1,
        "forward": 10,
        "backward": 18,
        "comm": 7,
        "optimizer": 2,
    }
    assert (loop.steps[0].batches, loop.steps[0].samples) == (1, 8)


def test_a_wait_in_the_forward_of_a_closure_leaves_the_forward_a_forward() -> None:
    loop = Loop(distributed=True)
    loop.fetch(1)
    loop.acc.optimizer_begin(1)
    loop.work(4)
    loop.comm(3)
    loop.work(2)
    loop.backward(6)
    loop.work(5)
    loop.acc.optimizer_end(1)
    loop.acc.finish()
    assert ms(loop.steps[0]) == {
        "data_wait": 1,
        "forward": 6,
        "comm": 3,
        "backward": 6,
        "optimizer": 5,
    }


def test_a_fetch_inside_a_phase_that_the_user_marked() -> None:
    loop = Loop()
    for _ in range(3):
        loop.acc.phase_begin(0)
        loop.fetch(4)
        loop.acc.phase_end(0)
        loop.work(10)
        loop.backward(20)
        loop.optimizer(2)
    loop.acc.finish()
    assert samples(loop) == [8] * 3
    assert [ms(step)["data_wait"] for step in loop.steps] == [4] * 3


# --- any regular loop --------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    epochs=st.integers(1, 4),
    batches=st.integers(1, 12),
    window=st.integers(1, 4),
    ahead=st.integers(0, 3),
    eval_every=st.integers(0, 3),
    eval_batches=st.integers(1, 3),
    optimizers=st.integers(1, 2),
)
def test_every_batch_is_counted_once_and_no_evaluation(
    epochs: int,
    batches: int,
    window: int,
    ahead: int,
    eval_every: int,
    eval_batches: int,
    optimizers: int,
) -> None:
    loop = Loop()
    steps = 0
    for _ in range(epochs):
        sums = []
        held = 0
        for n, batch in enumerate(Ahead(loop, batches, ahead)):
            train(loop, batch)
            held += batch
            if (n + 1) % window == 0 or n == batches - 1:
                loop.optimizer(2)
                for key in range(2, 2 + optimizers - 1):
                    train(loop, batch)
                    loop.optimizer(1, key=key)
                sums.append(held)
                held = 0
                steps += 1
                if eval_every and steps % eval_every == 0:
                    evaluate(loop, eval_batches)
        evaluate(loop, eval_batches)
        before = len(loop.steps) - len(sums)
        assert samples(loop)[before:] == sums
    loop.acc.finish()
    assert len(loop.steps) == steps
    for step in loop.steps:
        assert sum(step.phases_ns) == step.step_ns
        assert ms(step)["forward"] == 10 * (window and step.batches + optimizers - 1)
