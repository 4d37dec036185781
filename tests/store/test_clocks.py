"""Two clocks, never in one sum."""

import msgspec
import pytest
from builders import T0_S, hello, node_frame, rank_frame, record
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.schema import PHASES, RankState, StepRecord
from gpuwatch.store import RankView, Store
from gpuwatch.store.clocks import NodeClock, deciding, deciding_step_ns, is_on_device
from gpuwatch.store.windows import WINDOW_STEPS, Timeline, Window

HOST = {"data_wait": 30.0, "forward": 2.0, "backward": 3.0, "optimizer": 1.0, "other": 4.0}
DEVICE = {"data_wait": 1.0, "forward": 10.0, "backward": 20.0, "comm": 4.0, "optimizer": 3.0}


def on_device(index: int, **more: object) -> StepRecord:
    """A step whose host took 40 ms, mostly waiting, and whose device took 38."""
    host = record(index, HOST, **more)
    device = record(index, DEVICE).host
    return msgspec.structs.replace(host, device=device, clock="device")


def untimed(index: int) -> StepRecord:
    return record(index, HOST)


def view_of(records: list[StepRecord], **state: object) -> RankView:
    store = Store(lambda: 100.0)
    frame = rank_frame(
        1,
        records,
        hello=hello(device="cuda:0"),
        state=RankState(status="training", step=len(records), **state),
    )
    store.apply(node_frame(1, [frame]), 100.0)
    ((rank,),) = (run.ranks for run in store.view().runs)
    return rank


def test_everything_of_a_step_is_by_the_clock_that_decides() -> None:
    rank = view_of(
        [on_device(i, samples=8, device_stall_ns=2_000_000) for i in range(4)], device_dropped=3
    )
    assert rank.clock == "device"
    assert rank.step_ms == rank.step_p50_ms == pytest.approx(38)
    assert rank.own_ms == pytest.approx(34)
    assert rank.phases_ms["data_wait"] == pytest.approx(1)
    assert rank.data_wait_ratio == pytest.approx(1 / 38)
    assert rank.samples_per_s == pytest.approx(8 / 0.038)
    assert sum(v for v in rank.phases_ms.values() if v is not None) == pytest.approx(rank.step_ms)
    assert rank.device_stall_ms == pytest.approx(2)
    assert rank.device_dropped == 3


def test_a_stall_that_some_steps_do_not_know_is_the_mean_of_the_others() -> None:
    rank = view_of([on_device(0, device_stall_ns=4_000_000), on_device(1), on_device(2)])
    assert rank.device_stall_ms == pytest.approx(4)
    assert view_of([on_device(0)]).device_stall_ms is None


def test_a_step_that_the_device_was_not_timed_in_stays_out() -> None:
    rank = view_of([on_device(0), untimed(1), on_device(2)])
    assert [r.index for r in rank.window] == [0, 2]
    assert (rank.clock, rank.steps) == ("device", 3)
    assert rank.step_ms == pytest.approx(38)


def test_the_first_timed_step_begins_the_window_anew() -> None:
    rank = view_of([untimed(0), untimed(1), on_device(2)])
    assert [r.index for r in rank.window] == [2]


def test_a_device_that_is_timed_no_more_leaves_the_host() -> None:
    few = [on_device(i) for i in range(5)]
    rest = [untimed(i) for i in range(5, 5 + WINDOW_STEPS)]
    assert view_of(few + rest[:-1]).clock == "device"
    rank = view_of(few + rest)
    assert rank.clock == "host"
    assert rank.step_ms == pytest.approx(40)
    assert [r.index for r in rank.window] == [rest[-1].index]


def test_a_record_that_says_device_and_has_none_is_the_hosts() -> None:
    odd = msgspec.structs.replace(untimed(0), clock="device")
    assert not is_on_device(odd)
    assert deciding(odd) is odd.host
    assert deciding_step_ns(odd) == odd.step_ns


def test_the_timeline_is_by_the_clock_that_decides() -> None:
    timeline = Timeline()
    timeline.rebuild([on_device(0), on_device(1)])
    (rollup,) = timeline.rollups()
    assert rollup.median_ms == pytest.approx(38)
    assert rollup.data_wait_ms == pytest.approx(1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), max_size=3 * WINDOW_STEPS))
def test_a_window_is_of_one_clock_and_its_sums_are_those_of_its_steps(timed: list[bool]) -> None:
    window = Window()
    for index, yes in enumerate(timed):
        window.append(on_device(index) if yes else untimed(index))
    records = list(window.records)
    assert len({is_on_device(r) for r in records}) <= 1
    if not records:
        assert not timed
        return
    assert window.step_ms == pytest.approx(sum(map(deciding_step_ns, records)) / len(records) / 1e6)
    for name in PHASES:
        known = [getattr(deciding(r), name) for r in records]
        if known[0] is not None:
            assert window.phases_ms[name] == pytest.approx(sum(known) / len(known) / 1e6)


# --- the nodes' own clocks -----------------------------------------------------------------------


def test_a_node_whose_clock_is_hours_off_is_drawn_with_the_others() -> None:
    """Steps are aligned by their index, and ages come from the receiver's clock."""
    now = [100.0]
    store = Store(lambda: now[0], lambda: T0_S + 4.1)
    store.set_link("live")
    for rank, off_s in enumerate((0.0, 7200.0, -3600.0)):
        steps = [record(i, HOST, started_s=T0_S + off_s + i) for i in range(4)]
        frame = rank_frame(1, steps, rank=rank, sent_s=T0_S + off_s + 4)
        store.apply(node_frame(1, [frame], node=f"node{rank}", sent_s=T0_S + off_s + 4), 100.0)
    now[0] = 100.5
    (run,) = store.view().runs
    assert [r.age_s for r in run.ranks] == pytest.approx([0.5] * 3)
    assert [r.state for r in run.ranks] == ["training"] * 3
    assert run.window == 4
    seconds = [[s.second_s - int(T0_S) for s in r.timeline] for r in run.ranks]
    assert seconds == [[0, 1, 2, 3]] * 3
    store.set_link("replay")  # a recording is by its own clocks
    assert store.view().runs[0].ranks[1].timeline[0].second_s == int(T0_S) + 7200


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_in_mid_run_leaves_no_gap_and_no_fold(step_s: float) -> None:
    now = [0.0]
    store = Store(lambda: now[0], lambda: T0_S + now[0])
    store.set_link("live")
    for index in range(12):
        now[0] = index + 1.0
        at_s = T0_S + index + (step_s if index >= 6 else 0.0)
        frame = rank_frame(index + 1, [record(index, HOST, started_s=at_s)], sent_s=at_s + 1)
        store.apply(node_frame(index + 1, [frame], sent_s=at_s + 1), now[0])
    (rank,) = store.view().runs[0].ranks
    assert [(s.second_s - int(T0_S), s.count) for s in rank.timeline] == [(i, 1) for i in range(12)]


def test_a_link_that_was_held_up_is_no_step_of_the_clock() -> None:
    clock = NodeClock()
    assert clock.take(1, T0_S, 0.0, T0_S) == 0.0
    for i in range(19):
        received_s = 20.0 + i / 10
        assert clock.take(2 + i, T0_S + 1 + i, received_s, T0_S + received_s) == 0.0
    assert clock.ahead_s == 0
