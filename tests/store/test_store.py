"""Frames in, views out."""

import itertools
import statistics

import msgspec
import pytest
from builders import T0_S, hello, node_frame, percent, rank_frame, record, sensors
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.commands.shapes import status_document
from gpuwatch.frames import decode_node_frame
from gpuwatch.schema import (
    Bye,
    GpuSample,
    NodeFrame,
    RankAge,
    RankFrame,
    RankState,
    Reading,
    Reply,
    StepRecord,
)
from gpuwatch.store import RankView, Store, live
from gpuwatch.store.windows import WINDOW_STEPS, Timeline, Window

PHASES_MS = {"data_wait": 3.0, "forward": 10.0, "backward": 20.0, "comm": 5.0, "other": 2.0}


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def a_record(index: int, **more: object) -> StepRecord:
    return record(index, PHASES_MS, **more)


def only_rank(store: Store) -> RankView:
    (run,) = store.view().runs
    (rank,) = run.ranks
    return rank


def feed(store: Store, seq: int, *frames: RankFrame, at_s: float = 100.0) -> list[tuple[str, int]]:
    return store.apply(node_frame(seq, frames), at_s)


def test_a_rank_and_its_means() -> None:
    store = Store(Clock())
    feed(store, 1, rank_frame(1, [a_record(i, samples=8) for i in range(4)], hello=hello()))
    rank = only_rank(store)
    assert rank.steps == 4
    assert len(rank.window) == 4
    assert rank.step_ms == pytest.approx(40)
    assert rank.own_ms == pytest.approx(35)
    assert rank.phases_ms["data_wait"] == pytest.approx(3)
    assert rank.phases_ms["h2d"] is None
    assert sum(v for v in rank.phases_ms.values() if v is not None) == pytest.approx(rank.step_ms)
    assert rank.data_wait_ratio == pytest.approx(3 / 40)
    assert rank.samples_per_s == pytest.approx(8 / 0.040)
    assert rank.state == "training"
    assert store.view().runs[0].name == "a-run"


def test_first_batches_and_warm_up_stay_out_of_the_window_but_count_as_steps() -> None:
    store = Store(Clock())
    records = [
        record(0, {"forward": 900.0}, tags=("first_batch", "warmup")),
        a_record(1),
        record(2, {"forward": 900.0}, tags=("first_batch",)),
        a_record(3, tags=("skipped",)),
    ]
    feed(store, 1, rank_frame(1, records))
    rank = only_rank(store)
    assert rank.steps == 4
    assert [r.index for r in rank.window] == [1, 3]
    assert rank.step_ms == pytest.approx(40)


def test_frames_that_come_twice_count_once_and_old_ones_not_at_all() -> None:
    store = Store(Clock())
    first = rank_frame(1, [a_record(0), a_record(1)])
    second = rank_frame(2, [a_record(2)])
    feed(store, 1, first, second, second, first)
    rank = only_rank(store)
    assert (len(rank.window), rank.steps, rank.lost) == (3, 3, 0)


def test_a_gap_is_counted_asked_for_and_healed_by_a_snapshot() -> None:
    store = Store(Clock())
    records = [a_record(i) for i in range(6)]
    assert feed(store, 1, rank_frame(1, records[:2])) == []
    assert feed(store, 2, rank_frame(5, records[4:])) == [("run-1", 0)]
    assert only_rank(store).lost == 3
    feed(store, 3, rank_frame(5, records, snapshot=True))
    rank = only_rank(store)
    assert rank.lost == 0
    assert [r.index for r in rank.window] == [0, 1, 2, 3, 4, 5]


def test_a_gap_that_the_rank_has_forgotten_too_stays_lost() -> None:
    store = Store(Clock())
    feed(store, 1, rank_frame(1, [a_record(0)]))
    feed(store, 2, rank_frame(9, [a_record(80)]))
    feed(store, 3, rank_frame(9, [a_record(i) for i in range(40, 81)], snapshot=True))
    assert only_rank(store).lost == 7


def test_a_late_monitor_sees_the_last_minutes_at_once() -> None:
    store = Store(Clock())
    feed(store, 1, rank_frame(500, [a_record(700)]))
    feed(store, 2, rank_frame(501, [a_record(i) for i in range(101, 702)], snapshot=True))
    rank = only_rank(store)
    assert len(rank.window) == WINDOW_STEPS
    assert rank.window[-1].index == 701
    assert rank.lost == 0
    assert sum(r.count for r in rank.timeline) == 601


def test_a_new_incarnation_starts_anew_and_the_old_one_is_not_heard_again() -> None:
    store = Store(Clock())
    feed(store, 1, rank_frame(7, [a_record(50)], incarnation="old"))
    feed(store, 2, rank_frame(1, [a_record(0)], incarnation="new"))
    feed(store, 3, rank_frame(8, [a_record(51)], incarnation="old"))
    rank = only_rank(store)
    assert (rank.incarnation, rank.restarts, rank.steps) == ("new", 1, 1)
    assert rank.lost == 0
    assert any("restarted" in e.text for e in store.view().events)


def test_silence_is_amber_and_death_needs_a_proof() -> None:
    clock = Clock()
    store = Store(clock)
    feed(store, 1, rank_frame(1, [a_record(0)], hello=hello()))

    def quiet(seconds: float, **age: object) -> RankView:
        clock.s = 100.0 + seconds
        known = {"pid_alive": True, "process_state": "T", **age}
        ages = [RankAge("run-1", 0, "inc0", seconds, **known)]  # type: ignore[arg-type]
        store.apply(node_frame(2, ages=ages), clock.s)
        return only_rank(store)

    assert quiet(2.0).state == "training"
    silent = quiet(4.0)
    assert (silent.state, silent.state_reason) == ("silent", "stopped by a signal")
    assert silent.age_s == pytest.approx(4.0)
    assert "GIL" in quiet(5.0, process_state="S").state_reason
    gone = quiet(6.0, pid_alive=False, gone_reason="process 1000 ended without a goodbye")
    assert (gone.state, gone.state_reason) == ("gone", "process 1000 ended without a goodbye")
    assert store.view().runs[0].state == "ended"
    texts = [e.text for e in store.view().events]
    assert any("silent" in t for t in texts)
    assert any("gone" in t for t in texts)


def test_no_rank_is_called_silent_because_the_node_process_is() -> None:
    clock = Clock()
    store = Store(clock)
    feed(store, 1, rank_frame(1, [a_record(0)]))
    clock.s += 60
    assert only_rank(store).state == "training"
    assert only_rank(store).age_s == pytest.approx(60)


def test_last_words() -> None:
    store = Store(Clock())
    feed(store, 1, rank_frame(1, [a_record(0)]))
    feed(store, 2, rank_frame(2, bye=Bye("exception", "ValueError: \x1b[31mboom")))
    rank = only_rank(store)
    assert rank.state == "ended"
    assert rank.state_reason == "exception: ValueError: \ufffd[31mboom"


def test_names_from_the_wire_cannot_reach_the_terminal_as_escapes() -> None:
    store = Store(Clock())
    evil = "\x1b]0;owned\x07\x9b31m"
    greeting = hello(run_name=evil, script=evil, host=evil)
    state = RankState(status=evil, phase=evil, phases_na={evil: evil}, notices=(evil,))
    feed(
        store,
        1,
        rank_frame(1, hello=greeting, run=evil, state=state, replies=(Reply("1", "done", evil),)),
    )
    store.apply(node_frame(2, node=evil, notices=(evil,), sensors_reason=evil), 100.0)
    assert "\x1b" not in repr(store.view()).replace("\\x1b", "\x1b")
    assert store.raw_run(store.view().runs[0].run) == evil


def test_a_frame_that_makes_no_sense_costs_only_itself() -> None:
    store = Store(Clock())
    good = rank_frame(1, [a_record(0)])
    # The node process has decoded what it relays, so it is at least MessagePack.
    store.apply(node_frame(1, [msgspec.msgpack.encode(["no", "frame"]), good]), 100.0)
    store.apply(b"nonsense", 100.0)
    view = store.view()
    assert view.refused == 2
    assert view.runs[0].steps == 1
    assert any("2 frames refused" in n for n in view.notices)


def test_a_damaged_state_of_a_heartbeat_is_refused_when_it_is_looked_at() -> None:
    store = Store(Clock())
    feed(store, 1, rank_frame(1, [a_record(0)], state=RankState("training", "forward", step=1)))
    damaged = rank_frame(2, state=RankState("training", "backward", step=-5))
    assert feed(store, 2, damaged) == []
    rank = only_rank(store)
    assert (rank.phase, rank.told.step, rank.lost) == ("forward", 1, 0)
    view = store.view()
    assert view.refused == 1
    assert any("1 frames refused; the last: not a valid rank frame" in n for n in view.notices)
    assert feed(store, 3, rank_frame(3, state=RankState("training", "other", step=2))) == []
    assert only_rank(store).phase == "other"
    assert store.view().refused == 1
    # One that is out of line is looked at at once.
    assert feed(store, 4, rank_frame(9, state=RankState(step=-5))) == []
    assert store.view().refused == 2


_EVIL = RankState("training", "bad\x1b[2J", notices=("bad\x07",), phases_na={"comm": "\x9b"})
_STATES = [
    RankState("training"),
    RankState("eval", "forward", step=3),
    RankState("training", notices=("slow",)),
    RankState("training", flops_source="counted"),
    RankState("training", phases_na={"comm": "one process"}),
    _EVIL,
]
_FRAMES = st.lists(
    st.tuples(
        st.integers(1, 6),
        st.sampled_from("ab"),
        st.sampled_from(_STATES),
        st.sampled_from([{}, {"simulated": True}, {"snapshot": True}, {"bye": Bye("finished")}]),
        st.booleans(),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=60)
@given(_FRAMES, st.integers(1, 3))
def test_heartbeats_lead_to_the_picture_that_whole_frames_lead_to(
    frames: list[tuple[int, str, RankState, dict[str, object], bool]], often: int
) -> None:
    clock = Clock()
    # One wall clock: whole seconds that a node is ahead of it are rounded.
    lazy, whole = (Store(clock, lambda: T0_S) for _ in range(2))
    for i, (seq, incarnation, state, more, steps) in enumerate(frames):
        records = [a_record(seq)] if steps else []
        frame = rank_frame(seq, records, incarnation=incarnation, state=state, **more)
        data = node_frame(i, [frame])
        missing = lazy.apply(data, clock.s)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(live, "decode_heartbeat", lambda _: None)
            # As it was decoded elsewhere, which is all the same.
            assert whole.apply(decode_node_frame(data), clock.s) == missing
        clock.s += 0.1
        if i % often == 0 or i == len(frames) - 1:
            assert lazy.view().runs == whole.view().runs
            assert "\x1b" not in repr(lazy.view().runs[0].ranks[0].told if lazy.view().runs else "")


def test_a_state_is_told_as_it_came_whatever_came_before_it() -> None:
    store = Store(Clock())
    states = [state for state in _STATES if state is not _EVIL]
    for seq, state in enumerate(itertools.chain(*itertools.permutations(states, 2)), 1):
        feed(store, seq, rank_frame(seq, state=state))
        assert only_rank(store).told == state


def test_where_a_run_is_heard_from() -> None:
    store = Store(Clock())
    for node in ("n0", "n1"):
        rank = int(node[1])
        store.apply(node_frame(1, [rank_frame(1, rank=rank, hello=hello(rank, 2))], node=node), 1.0)
    run = store.view().runs[0].run
    assert store.nodes_of(run) == {"n0", "n1"}
    assert store.nodes_of(run, 1) == {"n1"}
    assert store.nodes_of(run, 7) == store.nodes_of("another") == set()
    # A heartbeat tells it too: the rank is relayed by another node process now.
    store.apply(node_frame(2, [rank_frame(2, rank=1)], node="n0"), 1.0)
    assert store.nodes_of(run, 1) == {"n0"}


def test_sensors_find_their_ranks_and_workers() -> None:
    store = Store(Clock())
    tick = sensors(ranks={1000: 80.0, 1001: 10.0}, workers={1000: [(2000, 5.0, "S")]})
    frames = [rank_frame(1, [a_record(0)], rank=r, hello=hello(r, 2)) for r in range(2)]
    store.apply(node_frame(1, frames, sensors=tick), 100.0)
    view = store.view()
    first, second = view.runs[0].ranks
    assert first.process is not None
    assert first.process.readings["cpu_percent"] == percent(80.0)
    assert [w.pid for w in first.workers] == [2000]
    assert second.workers == ()
    node = view.node("node0")
    assert node is not None
    assert node.gpus == ()
    assert node.gpus_reason == "no NVIDIA driver"


def test_runs_are_newest_first_and_what_has_ended_longest_goes_first() -> None:
    clock = Clock()
    store = Store(clock)
    feed(store, 1, rank_frame(1, run="long", hello=hello(started_s=T0_S - 100)))
    for i in range(50):
        clock.s += 1
        greeting = hello(started_s=T0_S + i)
        goodbye = Bye("finished")
        frame = rank_frame(1, run=f"r{i}", incarnation=f"i{i}", hello=greeting, bye=goodbye)
        feed(store, i + 2, frame, at_s=clock.s)
    runs = [r.run for r in store.view().runs]
    assert len(runs) == 32
    assert runs[0] == "r49"
    # Heard last before all the others, but it lives.
    assert runs[-1] == "long"


def test_a_past_that_comes_late_does_not_replace_a_rank_that_lives() -> None:
    store = Store(Clock())
    feed(store, 1, rank_frame(1, [a_record(0)], incarnation="new", sent_s=T0_S + 60))
    old = [a_record(i) for i in range(600)]
    past = rank_frame(700, old, incarnation="old", snapshot=True, hello=hello(), sent_s=T0_S)
    feed(store, 2, past)
    feed(store, 3, rank_frame(2, [a_record(1)], incarnation="new", sent_s=T0_S + 61))
    rank = only_rank(store)
    # It tells that there was one before, and no more.
    assert (rank.incarnation, rank.steps, rank.restarts) == ("new", 2, 1)


def test_a_rank_that_moved_to_another_run_leaves_nothing_behind() -> None:
    store = Store(Clock())
    feed(store, 1, rank_frame(1, run="alone", incarnation="a", hello=hello()))
    feed(store, 2, rank_frame(2, run="alone", incarnation="a", bye=Bye("moved")))
    feed(store, 3, rank_frame(1, run="group", incarnation="b", hello=hello(0, 2)))
    assert [r.run for r in store.view().runs] == ["group"]


def test_lost_node_frames_are_counted_and_a_new_node_process_is_no_loss() -> None:
    store = Store(Clock())
    for seq, incarnation in [(1, "a"), (2, "a"), (5, "a"), (1, "b"), (2, "b")]:
        store.apply(node_frame(seq, incarnation=incarnation), 100.0)
    assert store.view().nodes[0].lost == 2


def test_the_version_rises_with_every_change() -> None:
    store = Store(Clock())
    seen = [store.version]
    for data in (node_frame(1), b"nonsense", node_frame(2, [rank_frame(1, [a_record(0)])])):
        store.apply(data, 100.0)
        seen.append(store.version)
    store.set_link("live")
    seen.append(store.version)
    store.set_link("live")
    assert seen == sorted(set(seen))
    assert store.version == seen[-1]


VALUES_MS = st.one_of(st.none(), st.floats(0, 1e6))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(VALUES_MS, VALUES_MS, VALUES_MS), min_size=1, max_size=150))
def test_running_sums_equal_sums_from_scratch(rows: list[tuple[float | None, ...]]) -> None:
    window = Window()
    records = [
        record(
            i,
            {"data_wait": data, "forward": forward, "comm": comm, "other": 1.0},
            queue_depth=i % 3,
        )
        for i, (data, forward, comm) in enumerate(rows)
    ]
    for item in records:
        window.append(item)
    kept = records[-WINDOW_STEPS:]
    assert list(window.records) == kept
    assert window.step_ms == pytest.approx(statistics.fmean(r.step_ns for r in kept) / 1e6)
    for phase in ("data_wait", "forward", "comm"):
        values = [getattr(r.host, phase) for r in kept]
        known = [v for v in values if v is not None]
        mean = window.phases_ms[phase]
        if known:
            assert mean == pytest.approx(sum(known) / len(kept) / 1e6)
        else:
            assert mean is None
    means = [v for v in window.phases_ms.values() if v is not None]
    assert sum(means) == pytest.approx(window.step_ms)
    assert window.queue_depth == pytest.approx(statistics.fmean(r.queue_depth or 0 for r in kept))
    p50_ms, p95_ms = window.percentiles_ms()
    assert p50_ms is not None
    assert p95_ms is not None
    assert p50_ms <= p95_ms <= max(r.step_ns for r in kept) / 1e6


def test_the_timeline_keeps_two_minutes_in_seconds() -> None:
    timeline = Timeline()
    steps_ms = itertools.cycle([100.0, 200.0, 300.0])
    for i in range(3000):
        timeline.add(record(i, {"forward": next(steps_ms)}, started_s=T0_S + i / 10))
    rollups = timeline.rollups()
    assert 120 <= len(rollups) <= 121
    assert [r.second_s for r in rollups] == sorted({r.second_s for r in rollups})
    middle = rollups[60]
    assert (middle.min_ms, middle.max_ms) == (100.0, 300.0)
    assert 8 <= middle.count <= 12


def test_a_node_frame_is_what_it_says() -> None:
    # The builders are what every test here rests on.
    assert NodeFrame.__struct_fields__[:2] == ("version", "node")
    assert only_rank_of(node_frame(1, [rank_frame(3)])) == 3


def only_rank_of(data: bytes) -> int:
    from gpuwatch.frames import decode_node_frame, decode_rank_frame

    (raw,) = decode_node_frame(data).frames
    return decode_rank_frame(bytes(raw)).seq


def test_torch_and_nvml_name_one_device_whatever_their_order_and_prefix() -> None:
    """Torch's order reversed against NVML's, one device a slice: each rank gets its own."""
    gpus = (
        GpuSample(0, "GPU-aaaa", "card", {"gpu_util": Reading(10.0, "%")}),
        GpuSample(1, "MIG-bbbb", "card", {"gpu_util": Reading(90.0, "%")}),
    )
    frames = [
        rank_frame(1, [], rank=0, hello=hello(0, 2, device="cuda:0", device_uuid="GPU-bbbb")),
        rank_frame(1, [], rank=1, hello=hello(1, 2, device="cuda:1", device_uuid="aaaa")),
    ]
    seen = msgspec.structs.replace(sensors(), gpus=gpus, gpus_reason="")
    store = Store(lambda: 100.0)
    store.apply(node_frame(1, frames, sensors=seen), 100.0)
    view = store.view()
    named = {r.rank: r.hello.device_uuid for r in view.runs[0].ranks if r.hello is not None}
    assert named == {0: "MIG-bbbb", 1: "GPU-aaaa"}
    by_index = {gpu["index"]: gpu["ranks"] for gpu in status_document(view)["gpus"]}
    assert [r["rank"] for r in by_index[0]] == [1]
    assert [r["rank"] for r in by_index[1]] == [0]
