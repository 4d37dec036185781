"""The device's clock, on a fake device that runs behind the host."""

from collections import deque
from typing import Any

import pytest
from devices import MS, FakeTensor, Job, Stream
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.probe import device as device_module
from gpuwatch.probe import events
from gpuwatch.probe.accounting import DATA_WAIT, H2D, Accountant
from gpuwatch.probe.device import RING, SCALARS, SEGMENT_MARKS
from gpuwatch.probe.twin import DeviceReplay, DeviceStep, Join, Scalar

USUAL = {"forward": 10.0, "backward": 20.0, "optimizer": 3.0}


def stalls_ms(job: Job) -> list[float | None]:
    return [
        None if step is None or step.stall_ns is None else round(step.stall_ns / MS, 1)
        for _, step in job.taken()
    ]


# --- what the device does ------------------------------------------------------------------------


def test_a_host_that_runs_ahead_sees_nothing_and_the_device_all() -> None:
    job = Job()
    for _ in range(12):
        job.step()
    job.drain()
    for _ in range(3):
        job.step()
    host, device = job.taken()[6]
    assert host.step_ns < 7 * MS  # the host has only queued: 6 ms of 33
    assert device is not None
    found = job.device_ms()
    assert [found[i] for i in range(1, 11)] == [USUAL] * 10
    assert stalls_ms(job)[3:10] == [0.0] * 7


def test_a_long_wait_of_the_host_for_data_is_none_for_a_busy_device() -> None:
    job = Job()
    for _ in range(12):
        job.step(wait=30, forward=(0.5, 10), backward=(0.5, 20), optimizer=(0.5, 3))
    for host, step in job.taken()[2:5]:
        assert host.phases_ns[DATA_WAIT] == pytest.approx(30 * MS, abs=0.1 * MS)
        assert step is not None
        assert step.phases_ns is not None
        assert step.phases_ns[DATA_WAIT] < 0.1 * MS
        assert step.stall_ns is not None
        assert step.stall_ns < 0.1 * MS


def test_a_loader_that_starves_the_device_stalls_it() -> None:
    job = Job()
    for _ in range(6):
        job.step(wait=100)
    # The device is done with 33 ms of work, queued at the host's 0, 2 and 4, when the host is in
    # the fetch: it waits for the rest of the 100.
    assert job.device_ms()[3] == {**USUAL, "data_wait": 72.0}
    assert stalls_ms(job)[2:4] == [72.0, 72.0]


def test_work_between_the_optimizer_and_the_fetch_is_no_data_wait() -> None:
    job = Job()
    for _ in range(6):
        job.step(wait=1)
        job.drain()
        job.run(20)  # the user logs
    found = job.device_ms()[3]
    assert found is not None
    assert found["data_wait"] == 1.0
    assert found["other"] == 20.0
    assert stalls_ms(job)[3] == 21.0


def test_exposed_communication_is_from_the_end_of_computing_to_the_end_of_backward() -> None:
    job = Job()
    for _ in range(6):
        job.step(exposed=7)
        job.drain()
    assert job.device_ms()[3] == {**USUAL, "comm": 7.0, "data_wait": 1.0}


def test_the_end_of_computing_is_recorded_on_the_stream_of_the_backward() -> None:
    job = Job()
    mine, engines = job.device.current, Stream(job.clock)
    for _ in range(4):
        job.fetch(1)
        job.run(2, 10)
        job.mark(events.BACKWARD_BEGIN)
        job.run(2, 20)
        job.device.current = engines  # in the engine's thread another stream is current
        job.mark(events.COMPUTE_END)
        job.device.current = mine
        job.run(0, 7)
        job.mark(events.BACKWARD_END)
        job.optimizer(1, 3)
        job.drain()
    found = job.device_ms()[2]
    assert found is not None
    assert found["comm"] == 7.0


def test_copies_that_are_marked_are_h2d_and_no_stall() -> None:
    job = Job()
    for _ in range(6):
        job.fetch(50)
        job.recorder.phase_begin(H2D)
        job.run(0.2, 4)
        job.recorder.phase_end(H2D)
        job.run(2, 10)
        job.backward(2, 20)
        job.optimizer(1, 3)
    found = job.device_ms()[3]
    assert found is not None
    assert found == {**USUAL, "h2d": 4.0, "data_wait": found["data_wait"]}
    assert stalls_ms(job)[3] == found["data_wait"]


def test_a_copy_ahead_of_the_fetch_is_no_stall() -> None:
    """Accelerate moves the batch that it has before it fetches the next one."""
    job = Job()
    for _ in range(6):
        job.recorder.phase_begin(H2D)
        job.run(0.2, 4)
        job.recorder.phase_end(H2D)
        job.fetch(1)
        job.run(2, 10)
        job.backward(2, 20)
        job.optimizer(1, 3)
        job.drain()
    found = job.device_ms()[3]
    assert found is not None
    assert found["h2d"] == 4.0
    stall = stalls_ms(job)[3]
    assert stall is not None
    assert stall < 0.2  # the copy covers the fetch


def test_accumulated_micro_batches_are_one_step() -> None:
    job = Job()
    for _ in range(4):
        for _ in range(3):
            job.fetch(1)
            job.run(1, 10)
            job.backward(1, 20)
        job.optimizer(1, 3)
    job.drain()
    for _ in range(2):
        job.step()
    assert job.device_ms()[2] == {"forward": 30.0, "backward": 60.0, "optimizer": 3.0}


def test_an_evaluation_between_steps_is_in_no_step() -> None:
    job = Job()
    for n in range(8):
        job.step()
        if n == 3:
            for k in range(5):
                job.fetch(1, "eval", first=k == 0)
                job.run(1, 40)
            job.mark(events.FETCH_BEGIN, "eval", False)
            job.mark(events.FETCH_STOP)
        job.drain()
    found = job.device_ms()
    assert found[3] == found[5] == {**USUAL, "data_wait": 1.0}
    assert found[4] is not None
    assert found[4] == {**USUAL, "data_wait": 1.0}
    assert stalls_ms(job)[3:6] == [1.0, None, 1.0]


def test_a_checkpoint_before_a_step_leaves_its_stall_unknown() -> None:
    job = Job()
    for n in range(8):
        job.step()
        if n == 3:
            job.recorder.span_begin("checkpoint")
            job.run(500)
            job.recorder.span_end()
        job.drain()
    assert job.device_ms()[4] == {**USUAL, "data_wait": 1.0}
    assert stalls_ms(job)[3:6] == [1.0, None, 1.0]


def test_a_loop_that_fetches_nothing_has_no_stall() -> None:
    job = Job()
    for _ in range(6):
        job.run(2, 10)
        job.backward(2, 20)
        job.optimizer(1, 3)
        job.drain()
    assert job.device_ms()[3] == USUAL
    assert set(stalls_ms(job)) == {None}


def test_two_optimizers_in_turn_are_one_step() -> None:
    job = Job()
    for _ in range(6):
        job.fetch(1)
        for key in (1, 2):
            job.run(1, 10)
            job.backward(1, 20)
            job.optimizer(1, 3, key)
        job.drain()
    assert job.device_ms()[3] == {
        "data_wait": 1.0,
        "forward": 20.0,
        "backward": 40.0,
        "optimizer": 6.0,
    }
    assert stalls_ms(job)[3] == 1.0


def test_events_on_several_streams_may_end_in_any_order() -> None:
    job = Job()
    mine, other = job.device.current, Stream(job.clock)
    for n in range(6):
        job.fetch(1)
        job.run(1, 10)
        if n == 3:
            job.device.current = other
            job.run(0, 500)  # on a stream that nothing waits for
            job.mark(events.COMM_BEGIN)
            job.mark(events.COMM_END)
            job.device.current = mine
        job.backward(1, 20)
        job.optimizer(1, 3)
        job.drain()
    assert [index for index, found in job.device_ms().items() if found] == [0, 1, 2]
    job.clock.pass_ms(500)
    for _ in range(3):
        job.step()
        job.drain()
    found = job.taken()
    for _, step in found[1:6]:
        assert step is not None
        assert step.phases_ns is not None
        assert min(step.phases_ns) >= 0
    assert job.told == []


# --- what is not timed ---------------------------------------------------------------------------


def test_a_full_ring_times_no_more_steps_and_then_goes_on() -> None:
    job = Job()
    for _ in range(RING + 40):
        job.step(wait=0.01, forward=(0.01, 100), backward=(0.01, 100), optimizer=(0.01, 100))
    assert job.device.made < (RING + 2) * 8
    assert job.device_ms() == {}
    made = job.device.made
    for _ in range(RING):
        job.drain()
        job.step()
    found = job.device_ms()
    assert set(found) >= set(range(RING + 80))
    known = [index for index, phases in found.items() if phases is not None]
    unknown = [index for index, phases in found.items() if phases is None]
    assert unknown == list(range(RING, RING + 41))
    assert known == [i for i in sorted(found) if i not in unknown]
    assert job.device.made == made  # the same events over and over


def test_nothing_is_recorded_or_asked_while_a_graph_is_captured() -> None:
    job = Job()
    for n in range(10):
        job.fetch(1)
        job.run(2, 10)
        job.device.captures = n == 4
        job.backward(2, 20)
        job.optimizer(1, 3)
        job.device.captures = False
        job.drain()
    found = job.device_ms()
    assert [index for index, phases in found.items() if phases is None] == [4]
    assert found[5] == {**USUAL, "data_wait": 1.0}


def test_a_long_evaluation_is_cut_into_segments() -> None:
    job = Job()
    for n in range(4):
        job.step()
        if n == 2:
            for k in range(40 * SEGMENT_MARKS):
                job.fetch(1, "eval", first=k == 0)
                job.run(1, 0.5)
        job.drain()
    assert job.device.made < 4 * SEGMENT_MARKS
    assert job.device_ms()[2] == {**USUAL, "data_wait": 1.0}


def test_an_evaluation_behind_a_full_ring_is_known_again_soon() -> None:
    job = Job()
    for _ in range(RING + 4):
        job.step(wait=0.01, forward=(0.01, 100), backward=(0.01, 100), optimizer=(0.01, 100))
    for k in range(3 * SEGMENT_MARKS):
        job.fetch(1, "eval", first=k == 0)
        job.run(1, 0.5)
        job.drain()
    # The ring has been read meanwhile, and what was lost ended with the marks of a segment.
    assert {step.step_index for _, step in job.taken() if step is not None} == set(range(RING + 4))
    made = job.device.made
    for _ in range(3):
        job.step()
        job.drain()
    assert job.device.made == made
    found = job.device_ms()
    assert found[RING + 3] is None
    assert found[RING + 4] == found[RING + 5] == {**USUAL, "data_wait": 1.0}


def test_the_end_waits_for_nothing() -> None:
    job = Job()
    for _ in range(5):
        job.step()
    job.recorder.finish()
    at_ns = job.clock.ns
    assert [step is None or step.phases_ns is None for _, step in job.taken()] == [True] * 5
    assert job.clock.ns == at_ns
    assert job.recorder.push == job.recorder.events.append
    assert not job.replay.on_device


def test_the_end_takes_what_is_there() -> None:
    job = Job()
    for _ in range(5):
        job.step()
    job.drain()
    job.recorder.finish()
    found = job.device_ms()
    assert [found[i] for i in (1, 2, 3, 4)] == [USUAL] * 4


def test_an_error_of_the_device_ends_its_times_and_nothing_else() -> None:
    job = Job()
    for n in range(8):
        if n == 4:
            job.device.stream = lambda: 1 / 0  # type: ignore[method-assign,assignment]
        job.step()
        job.drain()
    assert len(job.told) == 1
    assert "ZeroDivisionError" in job.told[0]
    assert [step.step_index for step, _ in job.taken()] == list(range(7))
    assert job.recorder.push == job.recorder.events.append
    assert not job.replay.on_device


def test_marks_that_went_missing_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    for _ in range(3):
        job.step()
        job.drain()
    job.replay.catch_up()
    monkeypatch.setattr(events, "EVENT_LIMIT", 60)
    for _ in range(20):
        job.step()
        job.drain()
    job.replay.catch_up()
    assert job.replay.accountant.dropped == 20
    for _ in range(6):
        job.step()
        job.drain()
        job.replay.catch_up()
    found = job.device_ms()
    assert list(found)[:2] == [0, 1]
    # The third step was open when they went missing; the first segment after that is begun.
    assert [found[i] for i in (23, 24, 25)] == [{**USUAL, "data_wait": 1.0}] * 3
    for host, step in job.taken():
        if step is not None and step.phases_ns is not None:
            assert host.step_index == step.step_index


# --- numbers -------------------------------------------------------------------------------------


def notes(job: Job, name: str) -> list[Any]:
    found = []
    for host, _ in job.taken():
        value = (host.notes or {}).get(name)
        found.append(value.value if isinstance(value, Scalar) else value)
    return found


def test_a_number_on_the_device_is_read_when_it_has_arrived() -> None:
    job = Job()
    for n in range(6):
        job.fetch(100)
        job.run(2, 50)
        job.recorder.note("loss", FakeTensor(job.device, n + 0.5))
        job.backward(2, 20)
        job.optimizer(1, 3)
    # The device is at the last step: the one before it has just been closed.
    assert notes(job, "loss") == [0.5, 1.5, 2.5, 3.5, 4.5]
    job.drain()
    job.recorder.finish()
    assert notes(job, "loss") == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert not job.device.wrong
    # The event that goes with it lies between the forward and the backward.
    assert job.device_ms()[3] == {**USUAL, "forward": 50.0, "data_wait": 32.0}


def test_numbers_are_copied_ten_times_a_second_at_most() -> None:
    job = Job()
    for n in range(101):
        job.fetch(1)
        job.run(2, 1)
        job.recorder.note("loss", FakeTensor(job.device, float(n)))
        job.backward(2, 2)
        job.optimizer(5, 3)
        job.drain()
    found = [value for value in notes(job, "loss") if value is not None]
    assert 8 <= len(found) <= 12
    assert found == sorted(found)


def test_a_number_that_is_not_there_in_time_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_DEAR_NS", 0)
    job = Job()
    for n in range(3):
        job.fetch(1)
        job.run(2, 10_000)
        for k in range(SCALARS):
            job.recorder.note(f"n{k}", FakeTensor(job.device, float(n)))
        job.backward(2, 20)
        job.optimizer(1, 3)
    job.recorder.finish()
    assert {value for k in range(SCALARS) for value in notes(job, f"n{k}")} == {None}


def test_a_tensor_of_many_elements_or_of_another_device_is_no_number() -> None:
    job = Job()

    class Many(FakeTensor):
        def reshape(self, shape: tuple[int, ...]) -> FakeTensor:
            raise RuntimeError("shape '[]' is invalid for input of size 3")

    class Elsewhere(FakeTensor):
        def get_device(self) -> int:
            return 1

    for kind in (Many, Elsewhere, FakeTensor):
        job.fetch(1)
        job.recorder.note("loss", kind(job.device, 1.0))
        job.backward(2, 20)
        job.optimizer(1, 3)
        job.drain()
        job.clock.pass_ms(200)
    job.recorder.finish()
    assert notes(job, "loss") == [None, None, 1.0]
    assert job.told == []


def test_no_number_is_copied_into_a_graph() -> None:
    job = Job()
    job.fetch(1)
    job.device.captures = True
    job.recorder.note("loss", FakeTensor(job.device, 1.0))
    job.device.captures = False
    job.backward(2, 20)
    job.optimizer(1, 3)
    job.recorder.finish()
    assert notes(job, "loss") == [None]
    assert not job.device.wrong


def test_a_number_among_marks_that_are_lost_is_not_read() -> None:
    job = Job()
    for n in range(3):
        job.fetch(1)
        job.run(2, 10_000)
        job.recorder.note("loss", FakeTensor(job.device, 1.0))
        job.device.captures = n == 1
        job.backward(2, 20)
        job.optimizer(1, 3)
        job.device.captures = False
        job.clock.pass_ms(100)
    job.drain()
    job.recorder.finish()
    assert notes(job, "loss") == [1.0, None, 1.0]
    assert job.told == []


def test_memory_is_read_ten_times_a_second_at_most() -> None:
    job = Job()
    for _ in range(100):
        job.step()
        job.drain()
    assert job.clock.ns > 3e9
    assert 20 <= job.device.memory_reads <= 38
    assert job.timer.memory is not None
    assert job.timer.memory.peak == 2000


# --- the join ------------------------------------------------------------------------------------


def test_steps_leave_in_order_and_wait_for_a_bounded_time() -> None:
    job = Job()
    for _ in range(4):
        job.step()
        job.drain()
    taken = job.taken()
    join = Join()
    for host, _ in taken:
        join.add(host, 0)
    for _, step in reversed(taken):
        if step is not None and step.step_index != 1:
            join.find(step)
    first = list(join.leaving(1, last=False))
    assert [(h.step_index, s is not None) for h, s in first] == [(0, True)]
    assert list(join.leaving(1_999_999_999, last=False)) == []
    rest = list(join.leaving(2_000_000_001, last=False))
    assert [(h.step_index, s is not None) for h, s in rest] == [(1, False), (2, True)]
    late = taken[1][1]
    assert late is not None
    join.add(taken[2][0], 0)
    join.find(late)  # it has left: nobody waits for this
    assert not join._found
    assert [s for _, s in join.leaving(0, last=True)] == [None]
    assert list(join.leaving(0, last=True)) == []


def test_nothing_waits_when_no_device_times_come() -> None:
    job = Job()
    for _ in range(3):
        job.step()
    join = Join()
    for host, _ in job.taken():
        join.add(host, 0)
    assert [s for _, s in join.leaving(0, last=True)] == [None, None]
    assert len(join) == 0


# --- the twin -------------------------------------------------------------------------------------

BEGIN, END = events.OPTIMIZER_BEGIN, events.OPTIMIZER_END


def twin_of_a_loop(optimizers: int) -> tuple[DeviceReplay, deque[DeviceStep]]:
    """A replay to which so many optimizer steps of 10 ms have been given, one a segment."""
    out: deque[DeviceStep] = deque()
    replay = DeviceReplay(Accountant(lambda: 0), 0, out)
    for n in range(optimizers):
        at_ns = n * 10 * MS
        replay.segment(n + 1)
        replay.take((BEGIN, at_ns, 1))
        replay.take((END, at_ns + 10 * MS - 1, 1, False, n + 1))
    return replay, out


def test_marks_that_coincide_do_not_push_the_clock_ahead() -> None:
    replay, out = twin_of_a_loop(1002)
    for n in range(1001):
        replay.times(n + 1, [0, 0])
    replay.times(1002, [5 * MS, 0])
    assert sum(sum(step.phases_ns or ()) for step in out) == pytest.approx(5 * MS, abs=3)


def test_a_segment_that_nothing_is_heard_of_is_not_known() -> None:
    replay, out = twin_of_a_loop(5)
    for segment in (1, 2, 4, 5):
        replay.times(segment, [MS, 3 * MS])
    known = [step.phases_ns is not None for step in out]
    assert [step.step_index for step in out] == list(range(len(out)))
    assert known == [True, True, False, True, True][: len(out)]


def test_a_number_of_times_that_does_not_fit_is_no_time() -> None:
    replay, out = twin_of_a_loop(3)
    replay.times(1, [MS, MS])
    replay.times(2, [MS])
    replay.times(3, [MS, MS])
    assert [step.phases_ns is None for step in out][1]


class Stays:
    def __deepcopy__(self, memo: object) -> Any:
        raise AssertionError("copied")

    def __float__(self) -> float:
        raise AssertionError("read")


def test_what_the_user_left_with_a_step_or_a_batch_is_not_copied() -> None:
    accountant = Accountant(lambda: 0)
    accountant.fetch_begin("train", True)
    accountant.fetch_end(8, None, Stays())
    accountant.note("loss", Stays())
    twin = accountant.twin(lambda: 1)
    assert twin.clock() == 1
    assert twin.index == accountant.index
    assert not twin.out
    for one in (accountant, twin):
        one.backward_begin()
        one.backward_end()
        one.optimizer_begin(1)
        one.optimizer_end(1)
        one.fetch_begin("train", False)
    assert len(accountant.out) == len(twin.out) == 1


# --- whatever a loop does ------------------------------------------------------------------------

_MS = st.integers(0, 40).map(lambda n: n / 4)
_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), _MS, _MS),
        st.tuples(st.just("accumulate"), _MS, _MS),
        st.tuples(st.just("eval"), _MS, _MS),
        st.tuples(st.just("save"), _MS, _MS),
        st.tuples(st.just("h2d"), _MS, _MS),
        st.tuples(st.just("comm"), _MS, _MS),
        st.tuples(st.just("gan"), _MS, _MS),
        st.tuples(st.just("epoch"), _MS, _MS),
        st.tuples(st.just("capture"), _MS, _MS),
        st.tuples(st.just("drain"), _MS, _MS),
        st.tuples(st.just("note"), _MS, _MS),
        st.tuples(st.just("bare"), _MS, _MS),
    ),
    max_size=60,
)


def act(job: Job, what: str, host: float, device: float) -> None:
    if what in {"step", "capture"}:
        job.device.captures = what == "capture"
        job.step(host, (host, device), (host, device), (host, device), exposed=device / 2)
        job.device.captures = False
    elif what == "accumulate":
        for _ in range(2):
            job.fetch(host)
            job.run(host, device)
            job.backward(host, device)
        job.optimizer(host, device)
    elif what == "eval":
        for k in range(2):
            job.fetch(host, "eval", first=k == 0)
            job.run(host, device)
        job.mark(events.FETCH_BEGIN, "eval", False)
        job.mark(events.FETCH_STOP)
    elif what == "save":
        job.recorder.span_begin("checkpoint")
        job.run(host, device)
        job.recorder.span_end()
    elif what == "h2d":
        job.recorder.phase_begin(H2D)
        job.run(host, device)
        job.recorder.phase_end(H2D)
    elif what == "comm":
        job.mark(events.COMM_BEGIN)
        job.run(host, device)
        job.mark(events.COMM_END)
    elif what == "gan":
        job.fetch(host)
        for key in (1, 2):
            job.backward(host, device)
            job.optimizer(host, device, key)
    elif what == "epoch":
        job.mark(events.FETCH_BEGIN, "train", False)
        job.mark(events.FETCH_STOP)
        job.fetch(host, first=True)
    elif what == "drain":
        job.drain()
    elif what == "note":
        job.recorder.note("loss", FakeTensor(job.device, device))
        job.recorder.annotate(samples=3)
    elif what == "bare":
        job.backward(host, device)
        job.optimizer(host, device)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step", "accumulate", "h2d", "comm", "note", "drain"]), _MS, _MS
        ),
        min_size=1,
        max_size=60,
    )
)
def test_phases_add_up_to_the_step_of_the_device(actions: list[tuple[str, float, float]]) -> None:
    job = Job()
    begun_ns: list[int] = []  # when the device comes to the first fetch of each step, by itself
    for what, host, device in actions:
        if what in {"step", "accumulate"}:
            begun_ns.append(max(job.device.current.free_ns, job.clock.ns))
        act(job, what, host, device)
    begun_ns.append(max(job.device.current.free_ns, job.clock.ns))
    job.fetch(1)
    job.drain()
    job.recorder.finish()
    steps = [step for _, step in job.taken() if step is not None]
    assert [step.step_index for step in steps] == list(range(len(begun_ns) - 1))
    at_ns = begun_ns[0]
    for step, end_ns in zip(steps, begun_ns[1:], strict=True):
        assert step.phases_ns is not None
        assert min(step.phases_ns) >= 0
        at_ns += sum(step.phases_ns)
        # A clock that never shows the same twice, and float32 between neighbours: no drift.
        assert at_ns == pytest.approx(end_ns, abs=1_000)


@settings(max_examples=150, deadline=None)
@given(_ACTIONS, st.integers(0, 5))
def test_the_device_comes_to_the_same_steps(
    actions: list[tuple[str, float, float]], later: int
) -> None:
    job = Job(start=False)
    for n, (what, host, device) in enumerate(actions):
        if n == later:
            job.timer.start()
        act(job, what, host, device)
        if n % 7 == 3:
            job.replay.catch_up()
    job.drain()
    job.recorder.finish()
    assert job.told == []
    taken = job.taken()
    begun = len(actions) > later
    for host_step, step in taken:
        if step is None:
            assert not begun or host_step.step_index < later
            continue
        if step.phases_ns is not None:
            assert min(step.phases_ns) >= 0
            assert step.stall_ns is None or step.stall_ns >= 0
        assert step.step_index == host_step.step_index
    indices = {step.step_index for _, step in taken if step is not None}
    assert indices == {step.step_index for step in job.replay.device_steps}
