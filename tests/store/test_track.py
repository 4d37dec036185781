"""The steps of a run beyond its windows, taken from its views."""

import tracemalloc
from array import array
from collections.abc import Mapping
from dataclasses import replace
from math import nan
from statistics import fmean, median

import msgspec
import pytest
from builders import T0_S, hello, node_frame, rank_frame, record
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.schema import PHASES, PhasesNs, StepRecord
from gpuwatch.store import RunView, Store, track
from gpuwatch.store.clocks import deciding, deciding_step_ns, is_on_device
from gpuwatch.store.packed import Packed, records_codec
from gpuwatch.store.track import FIELDS, Track

STEP = {"data_wait": 3.0, "forward": 10.0, "backward": 20.0, "comm": 4.0}


def steps(rank: int, number: int, missing: int = 0) -> list[StepRecord]:
    """So many steps of a rank, without the one of index `missing`."""
    return [
        record(i, {**STEP, "forward": 10.0 + (i * (rank + 3)) % 7}, samples=8)
        for i in range(number)
        if i != missing
    ]


def view_of(ranks: list[list[StepRecord]], pack_above: int) -> RunView:
    """A run whose ranks have told these steps."""
    store = Store(lambda: 100.0, pack_above=pack_above)
    for rank, told in enumerate(ranks):
        who = hello(rank, len(ranks))
        store.apply(node_frame(rank + 1, [rank_frame(1, told, rank=rank, hello=who)]), 100.0)
    return store.view().runs[0]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=5),
    st.sampled_from([0, 10**9]),
)
def test_windows_are_taken_as_records_are(ranks: list[tuple[int, int]], pack_above: int) -> None:
    told = [steps(rank, number, missing) for rank, (number, missing) in enumerate(ranks)]
    told = [one or steps(9, 2) for one in told]
    taken, added = Track(), Track()
    half = [one[: (len(one) + 1) // 2] for one in told]
    taken.take(view_of(half, pack_above))
    taken.take(view_of(told, pack_above))
    for part in (half, told):
        for rank, one in enumerate(part):
            added.add(
                rank, f"inc{rank}", [r for r in one if r.index > (added._taken.get(rank, -1))]
            )
        added.settle(min(one[-1].index for one in part))
    assert repr(taken.steps()) == repr(added.steps())  # NaN is not equal to itself
    assert taken.last_index == added.last_index
    taken.settle()
    added.settle()
    assert repr(taken.steps()) == repr(added.steps())  # NaN is not equal to itself


def test_whole_windows_are_not_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large run a few steps are taken at a time, as numbers, a tenth of an object each."""
    number, ranks = 60, 64
    run = view_of([steps(rank, number, missing=-1) for rank in range(ranks)], 0)
    found = Track()
    monkeypatch.setattr(track, "_AT_ONCE", 10 * ranks)
    tracemalloc.start()
    found.take(run)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == number
    assert peak < 70 * number * ranks


def plain_row(records: Mapping[int, StepRecord], ranks: int) -> "array[float]":
    """The row of a step from whole records, as it is defined."""
    row = array("f", [nan]) * (len(FIELDS) + ranks)
    place = FIELDS.index
    row[place("wall")] = fmean([record.step_ns for record in records.values()]) / 1e6
    row[place("step")] = fmean([deciding_step_ns(record) for record in records.values()]) / 1e6
    for name in PHASES:
        told = [getattr(deciding(record), name) for record in records.values()]
        known = [ns for ns in told if ns is not None]
        if known:
            row[place(name)] = fmean(known) / 1e6
        if name == "comm" and len(known) > 1:
            row[place("comm_median")] = median(known) / 1e6
            row[place("transfer")] = min(known) / 1e6
    samples = [record.samples for record in records.values() if record.samples is not None]
    if samples:
        row[place("samples")] = sum(samples)
    for rank, one in records.items():
        wait = deciding(one).data_wait
        if wait is not None:
            row[len(FIELDS) + rank] = wait / 1e6
    return row


_NONE = Packed((), records_codec)

times = st.one_of(st.none(), st.integers(0, 10**10))
phases = st.builds(PhasesNs, *[times] * len(PHASES))


@st.composite
def a_record(draw: st.DrawFn, index: int) -> StepRecord:
    host = draw(phases)
    known = sum(ns for ns in msgspec.structs.astuple(host) if ns is not None)
    return StepRecord(
        index,
        T0_S + index,
        known + draw(st.integers(0, 10**9)),
        host,
        draw(st.one_of(st.none(), phases)),
        draw(st.sampled_from(["host", "device"])),
        samples=draw(st.one_of(st.none(), st.integers(0, 10**6))),
        tags=draw(st.sampled_from([(), (), (), ("skipped",), ("user",)])),
        loader=draw(st.sampled_from(["", "train"])),
    )


@settings(deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.booleans(), st.sampled_from([1, 9, 99]))
def test_a_row_is_what_the_plain_way_gives(
    data: st.DataObject, ranks: int, number: int, packed: bool, at_once: int
) -> None:
    told = [[data.draw(a_record(index)) for index in range(number)] for _ in range(ranks)]
    found = Track()
    half = [one[: (number + 1) // 2] for one in told]
    run = view_of([steps(rank, 2) for rank in range(ranks)], 10**9)
    for part in (half, told):
        windows = [_NONE.followed_by(one, 64) if packed else tuple(one) for one in part]
        pairs = zip(run.ranks, windows, strict=True)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(track, "_AT_ONCE", at_once)
            found.take(replace(run, ranks=tuple(replace(r, window=w) for r, w in pairs)))
    expected = {}
    for index in range(number):
        records = {
            rank: one[index] for rank, one in enumerate(told) if "skipped" not in one[index].tags
        }
        clocks = {is_on_device(record) for record in records.values()}
        if len(clocks) == 1:
            expected[index] = (clocks.pop(), plain_row(records, ranks))
    rows = {index: (on_device, row) for index, on_device, _, row in found._rows}
    assert rows.keys() == expected.keys()
    for index, (on_device, row) in rows.items():
        assert on_device is expected[index][0]
        assert row.tobytes() == expected[index][1].tobytes()


def test_what_is_told_once_more_counts_once() -> None:
    found = Track()
    first, again = (record(3, {**STEP, "forward": ms}, samples=8) for ms in (10.0, 30.0))
    skipped = record(4, STEP, samples=8, tags=("skipped",))
    for told in (first, again), (skipped, skipped):
        for one in told:
            found.add(0, "inc0", [one])
    found.add(1, "inc1", [first])
    found.settle()
    (row,) = found.steps().rows
    assert row.tobytes() == plain_row({0: again, 1: first}, 2).tobytes()
    assert found.last_index == 4


def test_a_rank_that_is_far_behind_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(track, "_MOST_WAITING", 60)
    found = Track()
    for number in range(1, 60):
        run = view_of([steps(0, 2, missing=-1), steps(1, number, missing=-1)], 0)
        found.take(run)
        assert len(found._pending) * 2 <= 60
    assert found.steps().indices[:2] == (0, 1)
    assert len(found) >= 29
