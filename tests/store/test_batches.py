"""What a batch costs, from totals that come in any way they can."""

from collections.abc import Callable

import pytest
from builders import T0_S, hello, node_frame, rank_frame, record, worker_costs
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.schema import Loader, WorkerCost
from gpuwatch.store import RankView, Store
from gpuwatch.store.batches import WINDOW_S, WorkerTotals

MS = 10**6


def cost(batches: int, wall_ms: float, pid: int = 7, age_s: float = 0.0) -> WorkerCost:
    """Totals; CPU is a tenth of the wall, collating a quarter."""
    wall_ns = int(wall_ms * MS)
    return WorkerCost("loader0", pid, batches, wall_ns, wall_ns // 10, wall_ns // 4, age_s=age_s)


def wall_ms(totals: WorkerTotals, loader: str = "loader0") -> float | None:
    found = totals.per_batch(loader)[0]
    return None if found is None else found.wall_ms


def test_a_mean_is_a_difference_and_the_first_batch_is_not_in_it() -> None:
    totals = WorkerTotals()
    totals.add(T0_S, [cost(1, 900)])
    assert totals.per_batch("loader0")[0] is None
    totals.add(T0_S + 1, [cost(2, 940)])
    assert totals.per_batch("loader0")[0] is None
    totals.add(T0_S + 2, [cost(3, 980)])
    found = totals.per_batch("loader0")[0]
    assert found is not None
    assert (found.wall_ms, found.cpu_ms, found.collate_ms) == pytest.approx((40, 4, 10))
    assert found.batches == 2
    assert totals.per_batch("loader1")[0] is None


def test_what_is_older_than_the_window_is_forgotten() -> None:
    totals = WorkerTotals()
    wall = 0.0
    for second in range(60):
        wall += 10 * (100.0 if second < 30 else 20.0)
        totals.add(T0_S + second, [cost(10 * (second + 1), wall)])
    assert wall_ms(totals) == pytest.approx(20)


def test_slow_batches_make_the_window_longer() -> None:
    totals = WorkerTotals()
    for second in range(200):
        batches = second // 30
        totals.add(T0_S + second, [cost(batches, 30_000.0 * batches)])
    assert wall_ms(totals) == pytest.approx(30_000)


def test_a_worker_that_waits_keeps_its_mean_and_one_that_has_ended_goes() -> None:
    totals = WorkerTotals()
    totals.add(T0_S, [cost(1, 10), cost(1, 500, pid=8)])
    totals.add(T0_S + 1, [cost(5, 50), cost(5, 2500, pid=8)])
    assert wall_ms(totals) == pytest.approx((40 + 2000) / 8)
    for second in range(2, 40):
        totals.add(T0_S + second, [cost(5, 50)])
    assert wall_ms(totals) == pytest.approx(10)


def test_a_pid_that_comes_again_is_another_worker() -> None:
    totals = WorkerTotals()
    totals.add(T0_S, [cost(100, 1000)])
    totals.add(T0_S + 1, [cost(200, 2000)])
    totals.add(T0_S + 2, [cost(2, 200)])
    assert totals.per_batch("loader0")[0] is None
    totals.add(T0_S + 3, [cost(6, 600)])
    assert wall_ms(totals) == pytest.approx(100)


def test_a_clock_that_is_set_back_starts_anew() -> None:
    totals = WorkerTotals()
    for number, at_s in enumerate((T0_S, T0_S + 1, T0_S - 3600, T0_S - 3599)):
        totals.add(at_s, [cost(1 + 5 * number, 100 * number**2)])
    assert wall_ms(totals) == pytest.approx(100)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_live_and_late_watchers_agree(data: st.DataObject) -> None:
    """However the same readings arrive: one by one, all at once, or in a snapshot between."""
    count = data.draw(st.integers(2, 12))
    made = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    readings, batches = [], 1
    for second, more in enumerate(made):
        batches += more
        readings.append((second, cost(batches, 30.0 * batches)))

    def past(upto: int) -> list[WorkerCost]:
        return [
            cost(c.batches, c.wall_ns / MS, age_s=float(upto - at))
            for at, c in readings[: upto + 1]
        ]

    live, late, between = WorkerTotals(), WorkerTotals(), WorkerTotals()
    joined = data.draw(st.integers(0, count - 1))
    for second, reading in readings:
        live.add(T0_S + second, [reading])
        if second >= joined:
            between.add(T0_S + second, [reading])
        if second == joined:
            between.add(T0_S + second, past(second))
    late.add(T0_S + count - 1, past(count - 1))
    found = [wall_ms(totals) for totals in (live, late, between)]
    enough = batches - readings[0][1].batches >= 2
    if count - 1 <= WINDOW_S:
        assert found == [pytest.approx(30) if enough else None] * 3
    else:
        assert all(value is None or value == pytest.approx(30) for value in found)


# --- in the view -------------------------------------------------------------------------------


def view_of(loader: Loader, costs: tuple[WorkerCost, ...], key: str = "loader0") -> RankView:
    store = Store(lambda: 100.0)
    records = [record(i, {"data_wait": 5.0, "forward": 20.0}, loader=key) for i in range(4)]
    frame = rank_frame(1, records, hello=hello(loaders=(loader,)), workers=costs)
    store.apply(node_frame(1, [frame]), 100.0)
    (rank,) = store.view().runs[0].ranks
    return rank


def test_a_view_says_what_a_batch_costs() -> None:
    rank = view_of(Loader("loader0", 2), worker_costs((7, 8), (40.0, 4.0, 10.0)))
    assert (rank.batch_wall_ms, rank.batch_cpu_ms, rank.collate_ms) == pytest.approx((40, 4, 10))
    assert rank.batch_na == ""


def few() -> tuple[WorkerCost, ...]:
    return (cost(1, 50),)


@pytest.mark.parametrize(
    ("workers", "costs", "key", "reason"),
    [
        (0, tuple, "loader0", "num_workers=0: the data wait is the batch cost"),
        (2, tuple, "loader0", "the workers of this loader do not time themselves"),
        (2, few, "loader0", "too few batches a worker yet"),
        (2, few, "loader1", "the workers of this loader do not time themselves"),
        (2, few, "", "no DataLoader fetch was seen in a steady step"),
    ],
)
def test_a_view_says_why_it_does_not_know(
    workers: int, costs: Callable[[], tuple[WorkerCost, ...]], key: str, reason: str
) -> None:
    rank = view_of(Loader("loader0", workers), costs(), key)
    assert (rank.batch_wall_ms, rank.batch_cpu_ms, rank.collate_ms) == (None, None, None)
    assert rank.batch_na == reason


def test_a_new_incarnation_has_new_workers() -> None:
    store = Store(lambda: 100.0)
    old = worker_costs((7,), (40.0, 4.0, 10.0))
    row = [record(0, {"forward": 1.0}, loader="loader0")]
    store.apply(node_frame(1, [rank_frame(1, row, workers=old)]), 100.0)
    store.apply(node_frame(2, [rank_frame(1, row, incarnation="new")]), 100.0)
    (rank,) = store.view().runs[0].ranks
    assert rank.batch_wall_ms is None
