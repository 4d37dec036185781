"""What is read of steps is read once, and nothing that is said depends on what was read before."""

from __future__ import annotations

import functools
import random
import statistics
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from builders import record
from diagnosis.histories import history

from gpuwatch.diagnosis import Engine, steps
from gpuwatch.diagnosis.aligned import align, median_of_others
from gpuwatch.diagnosis.engine import RULES, diagnose_run, picture_of
from gpuwatch.diagnosis.memory import rising
from gpuwatch.diagnosis.steps import Reader, Steps, read_phases, read_steps
from gpuwatch.diagnosis.types import RunPicture
from gpuwatch.schema import PHASES, StepRecord
from gpuwatch.store.clocks import deciding, deciding_step_ns
from gpuwatch.store.packed import PACK_ABOVE, Packed, Points, records_codec
from gpuwatch.store.quick import QuickStep
from gpuwatch.store.views import RankView, View

SEEDS = range(40)


@functools.cache
def views(seed: int) -> tuple[View, ...]:
    """A run, made once."""
    return tuple(history(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_findings_are_those_of_a_first_look(seed: int) -> None:
    """A reader that has followed the run says what one that has never seen it does."""
    reader = Reader()
    seen = 0
    for view in views(seed):
        (run,) = view.runs
        assert diagnose_run(picture_of(view, run, reader)) == diagnose_run(picture_of(view, run))
        seen += 1
    assert seen == 10


def test_these_histories_have_findings_of_many_kinds() -> None:
    kinds: set[str] = set()
    for seed in SEEDS:
        *_, view = views(seed)
        findings, _ = diagnose_run(picture_of(view, view.runs[0]))
        kinds |= {finding.kind for finding in findings}
    assert len(kinds) >= 12, sorted(set(RULES) - kinds)


def test_many_ranks_whose_steps_are_bytes() -> None:
    reader = Reader()
    for view in history(7, PACK_ABOVE + 2, looks=3):
        (run,) = view.runs
        assert isinstance(run.ranks[0].window, Packed)
        assert diagnose_run(picture_of(view, run, reader)) == diagnose_run(picture_of(view, run))
        assert kept(reader) == sum(len(rank.window) for rank in run.ranks)


# --- what a reader reads and keeps --------------------------------------------------------------


def kept(reader: Reader) -> int:
    """How many steps a reader holds."""
    return sum(row.steps.size for row in reader._rows.values())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps were read, a number a call."""
    counts: list[int] = []

    find = steps._find

    def counting(records: Sequence[StepRecord]) -> steps._Found:
        counts.append(len(records))
        return find(records)

    monkeypatch.setattr(steps, "_find", counting)
    return counts


def a_rank(
    view: View, window: Sequence[StepRecord], rank: int = 0, incarnation: str = "one"
) -> RankView:
    return replace(view.runs[0].ranks[0], rank=rank, window=window, incarnation=incarnation)


def as_bytes(window: Sequence[StepRecord]) -> Packed[StepRecord]:
    return Packed(map(records_codec.encode, window), records_codec)


@pytest.fixture(scope="module")
def view() -> View:
    return next(history(0, 1))


def a_step(index: int, **more: Any) -> StepRecord:
    return record(index, {"data_wait": 1.0 + index, "forward": 30.0, "comm": 2.0}, **more)


def plainly_read(window: Sequence[StepRecord]) -> Steps:
    """The numbers of such steps, each by itself."""
    times = [(r.step_ns, r.step_ns - 2_000_000, r.host.data_wait or 0, 0) for r in window]
    return Steps(array("q", chain(*times)), array("q", [1, 0, 0] * len(window)))


@pytest.mark.parametrize("kind", [tuple, as_bytes])
def test_only_new_steps_are_read(
    view: View, counted: list[int], kind: Callable[[Sequence[StepRecord]], Sequence[StepRecord]]
) -> None:
    told = [a_step(index, loader="a" if index < 69 else "b") for index in range(100)]
    reader = Reader()
    for end in (64, 69, 69, 70):
        window = told[end - 64 : end]
        row = reader.read([a_rank(view, kind(window))])[0]
        assert row.indices == range(end - 64, end)
        assert row.loader == ("a" if end < 70 else "b")
        assert row.steps == plainly_read(window)
    assert counted == [64, 5, 1]


def test_new_steps_of_all_ranks_are_read_in_one_go(view: View, counted: list[int]) -> None:
    told = tuple(map(a_step, range(100)))
    reader = Reader()
    for end in (60, 63):
        # One of them is a step behind, and one has told none since.
        windows = [told[end - 20 : end], told[end - 21 : end - 1], told[20:40]]
        rows = reader.read([a_rank(view, window, rank) for rank, window in enumerate(windows)])
        assert [rows[rank].steps for rank in range(3)] == list(map(plainly_read, windows))
    assert counted == [60, 6]


def test_a_window_that_does_not_go_on_from_the_one_before_is_read_whole(
    view: View, counted: list[int]
) -> None:
    told = tuple(a_step(index) for index in range(100) if index != 45)
    lost = (*told[40:43], *told[44:80])
    reader = Reader()
    for window, incarnation in (
        (told[:30], "one"),
        (told[30:70], "one"),  # nothing in common
        (told[30:72], "one"),  # goes on, with a gap in it
        (lost, "one"),  # another gap
        (told[44:90], "one"),  # goes on from the middle of it
        (told[44:90], "other"),  # the same indices of another process
        (told[5:40], "other"),  # back in time
    ):
        row = reader.read([a_rank(view, window, incarnation=incarnation)])[0]
        assert row.indices == [step.index for step in window] or isinstance(row.indices, range)
        assert row.steps == plainly_read(window)
    assert counted == [30, 40, 2, 39, 10, 46, 35]


def test_what_is_kept_of_a_rank_is_less_than_2_kb(view: View) -> None:
    """Of usual steps; those of more than four seconds take twice as much."""
    told = tuple(map(a_step, range(1000, 1064)))
    reader = Reader()
    row = reader.read([a_rank(view, as_bytes(told))])[0]
    parts = [*row.steps, row.steps, row, row.indices, *map(int, (1000, 1064, 64))]
    assert sum(map(sys.getsizeof, parts)) < 2000


def test_nothing_is_kept_of_ranks_that_are_gone(view: View) -> None:
    rows = tuple(map(a_step, range(64)))
    reader = Reader()
    reader.read([a_rank(view, rows, rank) for rank in range(8)])
    assert kept(reader) == 8 * 64
    reader.read([a_rank(view, rows[:10], 3)])
    assert kept(reader) == 10


def test_an_engine_keeps_nothing_of_a_run_that_has_ended() -> None:
    engine = Engine()
    *_, view = views(3)
    (run,) = view.runs
    engine.evaluate(view, run)
    assert kept(engine._runs[run.run].reader) > 0
    engine.evaluate(view, replace(run, state="ended"))
    assert kept(engine._runs[run.run].reader) == 0


def test_what_is_known_of_steps_is_of_these_ranks_alone(view: View) -> None:
    """Ranks restart, go, and come again, and a recording goes back."""
    looks = [
        *[(first, "one", range(4)) for first in (0, 5, 6, 40, 200)],
        *[(first, "two", range(4)) for first in (200, 203)],
        *[(first, "two", range(3)) for first in (203, 204)],
        *[(first, "two", range(1, 4)) for first in (204, 190, 203)],
    ]
    reader, sizes = Reader(), []
    for first, incarnation, numbers in looks:
        chance = {rank: random.Random(f"{incarnation} {rank}") for rank in numbers}
        every = {
            rank: [
                record(i, {"data_wait": r.random(), "forward": 9 * r.random(), "comm": r.random()})
                for i in range(first + 64)
            ]
            for rank, r in chance.items()
        }
        ranks = tuple(a_rank(view, tuple(every[n][first:]), n, incarnation) for n in numbers)
        run = replace(view.runs[0], ranks=ranks)
        found = align(RunPicture(run, reader=reader))
        assert found is not None
        host = [[step.host for step in every[n][first:]] for n in numbers]
        columns = list(zip(*host, strict=True))
        comm = [[p.comm or 0 for p in column] for column in columns]
        own = [[(p.forward or 0) + (p.data_wait or 0) for p in column] for column in columns]
        slowest = [max(p.forward or 0 for p in column) for column in columns]
        assert found.transfer_ns == list(map(min, comm))
        pairs = zip(slowest, found.transfer_ns, strict=True)
        assert found.without_wait_ms == [(ns + moved) / 1e6 for ns, moved in pairs]
        ordered = [sorted(column) for column in own]
        assert found.last_lags_ms == [
            (column[-1] - statistics.median(column[:-1])) / 1e6 for column in ordered
        ]
        sizes.append(len(found.seen))
    assert sizes == [64] * len(looks)


# --- the same numbers the plain way -------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS[:25])
def test_numbers_are_those_of_the_records(seed: int) -> None:
    for view in views(seed):
        aligned = align(RunPicture(view.runs[0]))
        if aligned is None:
            continue
        rows = aligned.records
        assert [[r.index for r in row] for row in rows] == [list(aligned.indices)] * len(rows)
        parts = [[deciding(r) for r in row] for row in rows]
        step = [[deciding_step_ns(r) for r in row] for row in rows]
        for name in PHASES:
            plain = [[getattr(p, name) or 0 for p in row] for row in parts]
            assert list(map(list, aligned.phase_ns(name))) == plain
            assert aligned.mean_phase_ms(name) == pytest.approx(
                [statistics.fmean(row) / 1e6 for row in plain], rel=1e-12
            )
        comm = [[p.comm or 0 for p in row] for row in parts]
        wait = [[p.data_wait or 0 for p in row] for row in parts]
        own = [[s - c for s, c in zip(*pair, strict=True)] for pair in zip(step, comm, strict=True)]
        columns = list(zip(*own, strict=True))
        assert [list(row.step) for row in aligned.rows] == step
        assert aligned.mean_comm_ms == pytest.approx(aligned.mean_phase_ms("comm"), rel=1e-12)
        assert aligned.mean_wait_ms == aligned.mean_phase_ms("data_wait")
        assert aligned.mean_other_ms == aligned.mean_phase_ms("other")
        assert aligned.own_columns_ns == columns
        assert aligned.own_sorted_ns == [sorted(column) for column in columns]
        assert aligned.transfer_ns == [min(column) for column in zip(*comm, strict=True)]
        assert aligned.without_wait_ms == [
            (max(own[r][s] - wait[r][s] for r in range(len(own))) + aligned.transfer_ns[s]) / 1e6
            for s in range(aligned.count)
        ]
        assert aligned.mean_step_ms == pytest.approx(
            statistics.fmean(ns for row in step for ns in row) / 1e6, rel=1e-12
        )
        assert aligned.comm_known == all(p.comm is not None for row in parts for p in row)
        for row, records in enumerate(rows):
            assert aligned.batches(row) == statistics.fmean(r.batches for r in records)
            assert list(aligned.rows[row].gc) == [r.gc_ns or 0 for r in records]
            held = [w >= 0.1 * s for w, s in zip(wait[row], step[row], strict=True)]
            assert aligned.wait_held(row, 0.1) == statistics.fmean(held)
            assert aligned.host_wait_ms(row) == pytest.approx(
                statistics.fmean(r.host.data_wait or 0 for r in records) / 1e6, rel=1e-12
            )


def test_bytes_are_read_as_objects_are() -> None:
    assert QuickStep.__struct_fields__ == StepRecord.__struct_fields__
    for seed in range(20):
        *_, view = views(seed)
        for rank in view.runs[0].ranks:
            packed = as_bytes(rank.window)
            assert read_steps(packed) == read_steps(rank.window)
            assert read_phases(packed) == read_phases(rank.window)


def test_long_steps_and_many_batches_take_more_bytes(view: View) -> None:
    short, long = a_step(0), record(1, {"forward": 5e6, "comm": 4.5e6}, batches=300)
    reader = Reader()
    reader.read([a_rank(view, (short,))])
    row = reader.read([a_rank(view, (short, long))])[0]
    assert list(row.steps.step) == [33_000_000, 9_500_000_000_000]
    assert list(row.steps.own) == [31_000_000, 5_000_000_000_000]
    assert list(row.steps.batches) == [1, 300]


def test_the_median_of_others() -> None:
    rng = random.Random(1)
    for _ in range(500):
        numbers = sorted(rng.choices(range(20), k=rng.randint(2, 9)))
        place = rng.randrange(len(numbers))
        others = numbers[:place] + numbers[place + 1 :]
        assert median_of_others(numbers, place) == statistics.median(others)


def plainly_rising(memory: Sequence[tuple[int, int]], floor_bytes: float) -> bool:
    """All blocks and pairs, whatever the growth."""
    if len(memory) < 24 or memory[-1][0] - memory[0][0] < 96:
        return False
    values = [value for _, value in memory[int(len(memory) * 0.2) :]]
    size = len(values) / 12
    minima = [
        min(values[int(i * size) : max(int(i * size) + 1, int((i + 1) * size))]) for i in range(12)
    ]
    pairs = [(minima[i], minima[j]) for i in range(12) for j in range(i + 1, 12)]
    rises = sum(a < b for a, b in pairs) - sum(a > b for a, b in pairs)
    z = (rises - 1) / (12 * 11 * 29 / 18) ** 0.5
    growth, late = minima[-1] - minima[0], minima[-1] - minima[-4]
    return z >= 3.5 and growth >= floor_bytes and late >= 0.12 * growth


def test_memory_rises_where_all_blocks_say_so() -> None:
    rng = random.Random(2)
    found = []
    for _ in range(600):
        slope = rng.choice([0, 5, 20, 100])
        noise = rng.choice([1, 50, 2000])
        pairs = [
            (4 * i, max(0, 10_000 + min(i, rng.choice([60, 999])) * slope + rng.randrange(noise)))
            for i in range(rng.choice([20, 30, 70, 128]))
        ]
        memory = Points.of(pairs)
        found.append(rising(memory, 300) is not None)
        assert found[-1] == plainly_rising(pairs, 300)
    assert 100 < sum(found) < 500
