"""Steps as rows of numbers: whatever they are like, they are read as they were written."""

import random
import statistics
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import pytest
from builders import T0_S, record
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.errors import FrameError
from gpuwatch.frames import decode_all_steps
from gpuwatch.schema import PHASES, PhasesNs, StepRecord
from gpuwatch.store import rows
from gpuwatch.store.clocks import deciding, deciding_step_ns, is_on_device
from gpuwatch.store.packed import Packed, records_codec, step_indices
from gpuwatch.store.rows import decode_flats, flat_of, record_of, row_chunks
from gpuwatch.store.windows import TIMELINE_S, WINDOW_STEPS, Timeline, Window

ODD_NS = [0, 1, 5 * 10**6, 2**32 - 1, 2**32, 10**13]


def parts(chance: random.Random, *, odd: bool) -> PhasesNs:
    known = chance.random() < 0.7
    found = [
        chance.choice(ODD_NS)
        if odd
        else chance.randint(0, 10**9)
        if known or chance.random() < 0.6
        else None
        for _ in PHASES
    ]
    return PhasesNs(*found)


def a_step(chance: random.Random) -> StepRecord:
    """A record that the wire lets through, but for its index and the sum of its phases."""
    odd = chance.random() < 0.2
    choice = chance.choice

    def number() -> float | None:
        return choice([None, chance.random(), -1e300])

    return StepRecord(
        index=0,
        started_s=T0_S + 50 * chance.random(),
        step_ns=choice(ODD_NS) if odd else chance.randint(0, 10**9),
        host=parts(chance, odd=odd),
        device=choice([None, parts(chance, odd=odd)]),
        clock=choice(["host", "device", "device"]),
        batches=choice([1, 1, 2, 2**53]),
        samples=choice([8, 8, 8, 8, None, 2**40]),
        tokens=choice([None, 0, 2**53]),
        loss=number(),
        memory_bytes=choice([None, 0, 2**60, 10**9]),
        queue_depth=choice([None, 0.0, 3.0, 255.0, 256.0, 1.5]),
        queue_capacity=choice([None, 0, 4]),
        tags=choice([(), (), ("skipped",), ("skipped", "odd" * 80)]),
        loader=choice(["train", "train", "", "l" * 250]),
        device_stall_ns=choice([None, 10**6, choice(ODD_NS)]),
        grad_norm=number(),
        learning_rate=number(),
        loss_scale=number(),
        padding_share=choice([None, 0.0, 0.3]),
        gc_ns=choice([None, 5, choice(ODD_NS)]),
    )


def usual(chance: random.Random, one: StepRecord) -> StepRecord:
    """Return a step as most are, which rows are added up of."""
    device = None if one.device is None else parts(chance, odd=False)
    changed: StepRecord = msgspec.structs.replace(
        one,
        host=parts(chance, odd=False),
        device=device,
        samples=8,
        tokens=None,
        tags=(),
        step_ns=chance.randint(0, 10**9),
        loader="train",
        gc_ns=None,
        device_stall_ns=chance.choice([None, 10**6]),
        queue_depth=chance.choice([None, 0.0, 3.0]),
    )
    return changed


def run_of(chance: random.Random) -> list[StepRecord]:
    """Steps of one rank: runs of alike ones, and whatever else."""
    found: list[StepRecord] = []
    index = chance.choice([0, 7, 2**53 - 2000])
    for _ in range(chance.randint(1, 6)):
        one, most = a_step(chance), 25
        if chance.random() < 0.6:
            one, most = usual(chance, one), 60
        for _ in range(chance.randint(1, most)):
            index += 1 + (chance.random() < 0.02)
            host = one.host
            if host.forward is not None:
                host = msgspec.structs.replace(host, forward=chance.randint(0, 10**9))
            found.append(msgspec.structs.replace(one, index=index, host=host))
    return found


SEEDS = st.integers(0, 2**32)


@settings(deadline=None)
@given(SEEDS)
def test_steps_are_read_as_they_were_written(seed: int) -> None:
    chance = random.Random(seed)
    told = run_of(chance)
    assert [record_of(flat_of(one)) for one in told] == told
    kept: Packed[StepRecord] = Packed((), records_codec)
    taken = 0
    while taken < len(told):
        some = chance.randint(1, 20)
        before, kept = kept, kept.followed_by(told[taken : taken + some], WINDOW_STEPS)
        assert tuple(before) == tuple(told[:taken])[-WINDOW_STEPS:]
        taken += some
    held = told[-WINDOW_STEPS:]
    assert list(kept) == held
    assert list(reversed(kept)) == held[::-1]
    assert repr(list(kept)) == repr(held)
    assert [kept[place] for place in range(len(held))] == held
    assert list(step_indices(kept)) == [one.index for one in held]
    first = chance.randint(0, len(held))
    end = chance.randint(first, len(held))
    part = kept[first:end]
    assert list(part) == held[first:end]
    assert list(part.followed_by(told[:3], 99)) == [*held[first:end], *told[:3]]
    assert [record_of(flat) for flat in kept.first_flats(first)] == held[:first]


def test_steps_that_are_alike_are_small() -> None:
    """And what is not is kept all the same, without more and more molds."""
    phases = {"data_wait": 3.0, "h2d": 1.0, "forward": 10.0, "backward": 20.0, "comm": 4.0}
    alike = [record(i, phases, samples=8, loss=1.0 / (i + 1)) for i in range(60)]
    assert sum(map(len, row_chunks(map(flat_of, alike)))) < 60 * 80
    known = len(rows._molds)
    assert row_chunks(map(flat_of, alike[:9]))
    assert len(rows._molds) == known
    odd = [record(i, phases, loader="l" * 250 + str(i), samples=8) for i in range(60)]
    chunks = row_chunks(map(flat_of, odd))
    assert len(rows._molds) == known
    assert [one.loader[-2:] for chunk in chunks for one in records_codec.read(chunk)][-1] == "59"


def test_molds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_molds", rows._molds[:])
    monkeypatch.setattr(rows, "_known_molds", dict(rows._known_molds))
    monkeypatch.setattr(rows, "_MOST_MOLDS", len(rows._molds) + 5)
    told = [record(i, {"forward": 3.0}, samples=8, batches=100 + i) for i in range(20)]
    kept = Packed((), records_codec).followed_by(told, WINDOW_STEPS)
    assert list(kept) == told
    assert len(rows._molds) == rows._MOST_MOLDS


def sums(window: Window) -> tuple[object, ...]:
    """All that a window says of its steps."""
    return (
        *(tuple(window.records), window.first_index, window.last_index, len(window)),
        *(window.step_ms, window.own_ms, window.phases_ms, window.data_wait_ratio, window.clock),
        *(window.samples_per_s, window.queue_depth, window.queue_capacity, window.loader),
        *(window.device_stall_ms, window.percentiles_ms()),
        *(window.count_between(window.first_index + 3, window.last_index - 2),),
    )


@settings(deadline=None)
@given(SEEDS)
def test_a_window_of_rows_says_what_one_of_objects_does(seed: int) -> None:
    """However the steps come: by themselves, some at a time, of one clock or of both."""
    chance = random.Random(seed)
    told = run_of(chance)
    if chance.random() < 0.5:
        told = [msgspec.structs.replace(one, clock="host") for one in told]
    again = told[-1].index + 1 - told[0].index  # long enough that steps leave
    told += [msgspec.structs.replace(one, index=one.index + again) for one in told]
    plain, packed, late = Window(), Window(packed=True), Window()
    seconds, flat_seconds = Timeline(), Timeline()
    turn = chance.randint(0, len(told))
    taken = 0
    while taken < len(told):
        some = chance.choice([1, 1, 2, 3, 20])
        now = told[taken : taken + some]
        taken += some
        for one in now:
            plain.append(one)
            seconds.add(one)
            if not late.packed:
                late.append(one)
        flats = [flat_of(one) for one in now]
        steps_ns = [deciding_step_ns(one) for one in now]
        assert [rows.step_ns_of(flat) for flat in flats] == steps_ns
        waits_ns = [rows.phases_of(flat)[0] for flat in flats]
        assert rows.times_of_flats(flats) == (steps_ns, waits_ns)
        flat_seconds.extend_flats(flats, steps_ns, waits_ns)
        for window in (packed, late):
            if window.packed and not window.extend_next(flats, steps_ns):
                window.extend_flats(flats)
        if taken >= turn:
            late.pack()
        assert sums(packed) == sums(plain)
        assert sums(late) == sums(plain)
    assert tuple(flat_seconds.rollups()) == tuple(seconds.rollups())


def test_the_usual_step_is_added_as_it_is() -> None:
    """One by one and some at a time; not after a gap, and not with another loader."""
    window = Window(packed=True)
    phases = {"data_wait": 3.0, "h2d": 1.0, "forward": 10.0, "backward": 20.0, "comm": 4.0}

    def taken(told: Sequence[StepRecord]) -> bool:
        return window.extend_next([flat_of(r) for r in told], [r.step_ns for r in told])

    usual: dict[str, Any] = {"samples": 8, "loader": "train"}
    assert not taken([record(0, phases, **usual)])
    window.append(record(0, phases, **usual))
    assert taken([record(1, phases, **usual)])
    assert taken([record(i, phases, **usual) for i in range(2, 60)])
    assert taken([record(i, phases, **usual) for i in range(60, 90)])
    for other in (
        record(91, phases, **usual),
        record(90, phases, samples=8),
        record(90, phases, tags=("skipped",), **usual),
        record(90, {**phases, "h2d": 5000.0}, **usual),
        record(90, {"forward": 3.0}, **usual),
    ):
        before = sums(window)
        assert not taken([other])
        assert sums(window) == before
    assert taken([record(90, phases, **usual)])
    assert (window.first_index, len(window), window.step_ms) == (27, 64, 38.0)


def whole(one: StepRecord) -> StepRecord:
    """Return a step that is as long as its phases."""
    took_ns = sum([ns or 0 for ns in msgspec.structs.astuple(one.host)])
    longest: StepRecord = msgspec.structs.replace(one, step_ns=min(10**15, took_ns))
    return longest


@settings(deadline=None)
@given(SEEDS)
def test_what_comes_is_decoded_as_ever(seed: int) -> None:
    chance = random.Random(seed)
    told = [run_of(chance)[:9] for _ in range(chance.randint(1, 3))]
    if chance.random() < 0.8:
        told = [[whole(one) for one in some] for some in told]
    parts = [msgspec.msgpack.encode(some) for some in told]
    try:
        known = decode_all_steps(parts)
    except FrameError:
        with pytest.raises(FrameError):
            decode_flats(parts)
        return
    try:
        flats = decode_flats(parts)
    except FrameError:
        assert len(parts) > 1
        assert any(part[0] >> 4 != 9 for part in parts)
        return
    assert tuple(map(record_of, flats)) == known
    assert [rows.is_timed(flat) for flat in flats] == [is_on_device(one) for one in known]
    assert [PhasesNs(*rows.phases_of(flat)) for flat in flats] == [deciding(one) for one in known]


def test_only_what_is_right_is_decoded_quickly() -> None:
    usual = list(flat_of(record(3, {"forward": 3.0, "comm": 1.0}, samples=8)))
    assert decode_flats([msgspec.msgpack.encode([usual])])[0][0] == 3
    for place, value in ((0, -1), (2, 5), (3, [1, 2, 3]), (5, "sun"), (10, -1), (14, 7)):
        damaged = [*usual[:place], value, *usual[place + 1 :]]
        with pytest.raises(FrameError):
            decode_flats([msgspec.msgpack.encode([damaged])])
    for data in (b"\xc0", b"\x91", b"\x91\x05"):
        with pytest.raises(FrameError):
            decode_flats([data])
    # Of another version: fields that are missing at the end, and some more.
    assert record_of(decode_flats([msgspec.msgpack.encode([usual[:8]])])[0]).samples == 8
    assert record_of(decode_flats([msgspec.msgpack.encode([[*usual, 1]])])[0]).samples == 8


def test_the_quick_step_is_held_to_the_schema() -> None:
    quick = {field.name: field for field in msgspec.structs.fields(rows._Step)}
    for field in msgspec.structs.fields(StepRecord):
        own = quick.pop(field.name)
        assert own.default == field.default
        assert own.type == field.type or field.name in ("host", "device")
    assert not quick
    phases = [field.type for field in msgspec.structs.fields(PhasesNs)]
    assert list(get_args(rows._Parts)) == phases


@pytest.mark.parametrize("seed", range(20))
def test_lanes_are_what_steps_tell(seed: int) -> None:
    chance = random.Random(seed)
    steps = run_of(chance)
    packed = Packed[StepRecord]((), records_codec).followed_by(steps, WINDOW_STEPS)
    for count in (0, 1, chance.randint(1, len(steps)), len(steps)):
        left = steps[len(steps) - min(count, len(packed)) :]
        for chunk, start, end in packed.latest(count):
            told = [left.pop() for _ in range(end - start)][::-1]
            mold = rows.mold_of(chunk)
            if mold is None:
                continue
            assert [mold.batches] * len(told) == [step.batches for step in told]
            assert {mold.loader} == {step.loader for step in told}
            assert mold.gc_ns(chunk, start, end) == [step.gc_ns or 0 for step in told]
            assert list(mold.lanes(chunk, start, end)) == [
                (
                    *(step.step_ns, step.samples or 0, step.device_stall_ns or 0),
                    *[ns or 0 for ns in msgspec.structs.astuple(deciding(step))],
                    step.started_s,
                )
                for step in told
            ]
        assert not left


@settings(deadline=None)
@given(SEEDS)
def test_seconds_of_one_step_and_of_many(seed: int) -> None:
    """Rows of either length, moved by a clock that is set, and never more than two minutes."""
    chance = random.Random(seed)
    timeline = Timeline()
    told: list[tuple[int, list[float], list[float]]] = []
    second_s, index = int(T0_S), 0
    for _ in range(chance.choice([3, 60, 300])):
        second_s += chance.choice([1, 1, 1, 3])
        several = chance.random() < 0.3
        one: tuple[int, list[float], list[float]] = (second_s, [], [])
        for _ in range(chance.choice([2, 5]) if several else 1):
            step_ms, wait_ms = chance.randint(1, 90), chance.choice([None, 1.0])
            step = record(
                index, {"forward": step_ms, "data_wait": wait_ms}, started_s=second_s + 0.2
            )
            timeline.add(step)
            one[1].append(step.step_ns / 1e6)
            one[2].extend([] if wait_ms is None else [wait_ms])
            index += 1
        told.append(one)
        if chance.random() < 0.02:
            by_s = chance.choice([-500, -2, 7])
            timeline.move(by_s)
            second_s += by_s
            told = [(at_s + by_s, steps_ms, waits_ms) for at_s, steps_ms, waits_ms in told]
    told = told[-TIMELINE_S - 1 :]
    found = timeline.rollups(5)
    assert [second.second_s for second in found] == [at_s - 5 for at_s, _, _ in told]
    assert [second.count for second in found] == [len(steps_ms) for _, steps_ms, _ in told]
    for second, (_, steps_ms, waits_ms) in zip(found, told, strict=True):
        wait_ms = statistics.mean(waits_ms) if waits_ms else None
        numbers = (second.min_ms, second.median_ms, second.max_ms)
        assert numbers == pytest.approx((min(steps_ms), statistics.median(steps_ms), max(steps_ms)))
        assert second.data_wait_ms == (None if wait_ms is None else pytest.approx(wait_ms))
    assert [found[place] for place in range(len(found))] == list(found)
    assert found[-7:-2] == tuple(found)[-7:-2]
