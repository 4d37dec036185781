"""The steps of a run beyond its windows, taken from its views."""

import pytest
from builders import hello, node_frame, rank_frame, record
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.schema import StepRecord
from gpuwatch.store import RunView, Store, track
from gpuwatch.store.track import Track

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
    st.sampled_from([1, 5, 4096]),
)
def test_windows_are_taken_as_records_are(
    ranks: list[tuple[int, int]], pack_above: int, at_once: int
) -> None:
    told = [steps(rank, number, missing) for rank, (number, missing) in enumerate(ranks)]
    told = [one or steps(9, 2) for one in told]
    taken, added = Track(), Track()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(track, "_AT_ONCE", at_once)
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


def test_few_records_are_objects_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a large run are not made objects as a whole."""
    most = 0
    settle = Track.settle

    def counted(self: Track, until: int | None = None) -> None:
        nonlocal most
        held = [r for ranks in self._pending.values() for r in ranks.values()]
        most = max(most, sum(isinstance(r, StepRecord) for r in held))
        settle(self, until)

    monkeypatch.setattr(Track, "settle", counted)
    monkeypatch.setattr(track, "_AT_ONCE", 8)
    run = view_of([steps(rank, 60, missing=-1) for rank in range(4)], 0)
    found = Track()
    found.take(run)
    assert len(found) == 60
    assert most == 8


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
