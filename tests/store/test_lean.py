"""What a large run is held as: bytes and numbers that read like the objects they stand for."""

from math import isnan

import pytest
from builders import T0_S, node_frame, rank_frame, record
from hypothesis import example, given
from hypothesis import strategies as st

from gpuwatch.schema import Bye, GpuSample, HostSample, ProcessSample, Reading, SensorFrame, Span
from gpuwatch.store import Store
from gpuwatch.store.history import MEMORY_POINTS, History
from gpuwatch.store.lean import Lean, lean_frame
from gpuwatch.store.packed import (
    PACK_ABOVE,
    Packed,
    Points,
    records_codec,
    spans_codec,
    step_indices,
)
from gpuwatch.store.shared import Shared, clean
from gpuwatch.store.windows import TIMELINE_S, WINDOW_STEPS, Timeline, Window

STEP = {"data_wait": 3.0, "forward": 10.0, "backward": 20.0, "comm": 4.0}


def a_step(index: int, **more: object):  # type: ignore[no-untyped-def]
    return record(index, {**STEP, "forward": 10.0 + index % 7}, samples=8, **more)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=90))
def test_a_packed_window_is_the_window(gaps: list[int]) -> None:
    plain, packed, late = Window(), Window(packed=True), Window()
    index = 0
    for place, gap in enumerate(gaps):
        index += gap
        for window in (plain, packed, late):
            window.append(a_step(index))
        if place == len(gaps) // 2:
            late.pack()
    for window in (packed, late):
        assert isinstance(window.records, Packed)
        assert window.records == plain.records
        assert list(reversed(window.records)) == list(reversed(plain.records))
        assert window.records[-3:] == plain.records[-3:]
        assert (window.step_ms, window.own_ms) == (plain.step_ms, plain.own_ms)
        assert window.percentiles_ms() == plain.percentiles_ms()
        assert (window.phases_ms, window.first_index) == (plain.phases_ms, plain.first_index)
    indices = [r.index for r in plain.records]
    assert list(step_indices(plain.records)) == list(step_indices(packed.records)) == indices
    low, high = indices[len(indices) // 3], indices[-1] - 1
    assert packed.count_between(low, high) == sum(low <= i <= high for i in indices)


@given(
    st.lists(st.one_of(st.just(0), st.integers(0, 700)), max_size=60),
    st.lists(st.integers(1, 9), max_size=30),
    st.integers(1, 40),
    st.slices(40),
)
@example([0] * 50, [40], 40, slice(3, -3))
def test_packed_is_a_tuple(sizes: list[int], parts: list[int], most: int, where: slice) -> None:
    """Of any sizes, however many come at a time and whatever part of it is asked for."""
    spans = [Span("x" * min(256, size), float(i), size) for i, size in enumerate(sizes)]
    found: Packed[Span] = Packed((), spans_codec)
    rest = list(spans)
    for number in [*parts, len(rest)]:
        new, rest = rest[:number], rest[number:]
        before, known = found, tuple(found)
        found = found.followed_by(new, most)
        assert tuple(before) == known
        assert not found or found._skipped < found._chunks[0][0] & 0xF  # nothing is kept in vain
    kept = tuple(spans[-most:])
    assert (len(found), tuple(found), tuple(reversed(found))) == (len(kept), kept, kept[::-1])
    assert tuple(found[where]) == kept[where]
    assert tuple(reversed(found[where])) == kept[where][::-1]
    assert tuple(found[where].followed_by(spans[:2], 99)) == (*kept[where], *spans[:2])
    assert [found[i] for i in range(-len(kept), len(kept))] == [*kept, *kept]
    assert found.first(3) == kept[:3]
    assert found == kept
    assert found == Packed(map(spans_codec.encode, kept), spans_codec)
    with pytest.raises(IndexError):
        found[len(kept)]


def test_a_picture_does_not_change_when_more_comes() -> None:
    window, timeline, history = Window(packed=True), Timeline(), History(packed=True)
    for index in range(200):
        step = a_step(index, started_s=T0_S + index, memory_bytes=10**9 + index)
        window.append(step)
        timeline.add(step)
        history.add_steps([step])
        if index == 150:
            held = (window.records, timeline.rollups(), history.past().memory)
            known = tuple(tuple(one) for one in held)
    assert tuple(tuple(one) for one in held) == known
    assert [len(one) for one in held] == [WINDOW_STEPS, TIMELINE_S + 1, len(known[2])]
    assert [r.second_s for r in timeline.rollups()][-1] == int(T0_S) + 199
    assert timeline.rollups()[-1] == tuple(timeline.rollups())[-1]
    assert len(history.past().memory) <= MEMORY_POINTS


def test_points_are_pairs() -> None:
    pairs = [(n, n * n) for n in range(9)]
    points = Points.of(pairs)
    assert (list(points), points[3], points[-2:]) == (pairs, (3, 9), tuple(pairs[-2:]))
    assert points == tuple(pairs)
    assert points != tuple(pairs[:-1])


def test_a_large_store_holds_bytes_and_tells_the_same() -> None:
    """The ranks that came before there were many are packed too."""
    store = Store(lambda: 100.0)
    ranks = PACK_ABOVE + 2
    for rank in range(ranks):
        spans = (Span("eval", T0_S, 10**9, 3),)
        frame = rank_frame(1, [a_step(i) for i in range(5)], rank=rank, spans=spans)
        store.apply(node_frame(rank + 1, [frame]), 100.0)
    (run,) = store.view().runs
    assert len(run.ranks) == ranks
    assert all(isinstance(r.window, Packed) for r in run.ranks)
    assert {tuple(s.index for s in r.window) for r in run.ranks} == {(0, 1, 2, 3, 4)}
    assert {r.past.spans[0].name for r in run.ranks} == {"eval"}
    assert run.window == 5
    assert run.ranks[0].window[0] == records_codec.decode(records_codec.encode(a_step(0)))


readings = st.dictionaries(
    st.sampled_from(["gpu_util", "power", "fan"]),
    st.builds(
        Reading,
        st.none() | st.floats(allow_nan=False),
        st.sampled_from(["%", "W"]),
        st.sampled_from(["NVML", "GPM"]),
        st.floats(0, 100),
        st.sampled_from(["ok", "na", "stale"]),
        st.sampled_from(["", "no rights"]),
    ),
)


@given(readings)
def test_lean_readings_are_the_readings(known: dict[str, Reading]) -> None:
    lean = Lean(known)
    assert dict(lean) == known
    assert (len(lean), "fan" in lean, lean.get("none")) == (len(known), "fan" in known, None)
    for names in (("fan", "none", "power"), ("power",)):
        values = [reading.value if (reading := known.get(name)) else None for name in names]
        assert [None if isnan(value) else value for value in lean.some(names)] == values


def test_the_sensors_of_a_frame_are_fit_for_a_terminal() -> None:
    bad = {"power": Reading(1.0, "W\x1b[2J", "NV\nML")}
    frame = SensorFrame(
        1, 0, 0.0,
        host=HostSample(4, {"load1": Reading(1.0, "\x07", "os")}),
        gpus=(GpuSample(0, "GPU-\x1b0", "H100", bad),),
        processes=(ProcessSample(7, 7, "rank", "R\x1b", bad),),
    )  # fmt: skip
    shown = lean_frame(frame)
    texts = [
        *(shown.gpus[0].uuid, shown.processes[0].status, shown.host.readings["load1"].unit),
        *(shown.gpus[0].readings["power"].unit, shown.processes[0].readings["power"].source),
    ]
    assert all(text.isprintable() for text in texts)
    assert shown.gpus[0].readings["power"].value == 1.0


def test_equal_parts_are_one_object() -> None:
    shared = Shared()
    one, other = (shared.parts(Span("".join(["check", "point"]), float(n), n)) for n in range(2))
    assert one != other
    assert one.name is other.name
    bye = Bye("".join(["fin", "ished"]), "a\x1bb")
    assert clean(bye).detail == "a\ufffdb"
    assert clean(bye).reason is clean(Bye("finished")).reason
