"""What is read when somebody looks is what would have been read as it came."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from builders import T0_S, hello, node_frame, rank_frame, record
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.errors import FrameError
from gpuwatch.frames import decode_all_steps, decode_ordinary, encode
from gpuwatch.schema import (
    Bye,
    Ledger,
    Logged,
    RankAge,
    RankFrame,
    RankState,
    Reply,
    Span,
    StepRecord,
    WorkerCost,
)
from gpuwatch.store import RankView, Store, View, live, packed

STEP = {"data_wait": 3.0, "h2d": 1.0, "forward": 10.0, "backward": 20.0, "comm": 4.0}
EVERY = 10**9


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self, s: float) -> None:
        self.s = s

    def __call__(self) -> float:
        return self.s


class Process:
    """A made-up rank that does what ranks do, and what happens to their frames."""

    def __init__(self, chance: random.Random, rank: int, trouble: float = 1.0) -> None:
        self.chance = chance
        self.trouble = trouble  # how often, beside 1
        self.rank = rank
        self.incarnation = 0
        self.wall_s = T0_S
        self._start()

    def _start(self) -> None:
        self.seq = self.index = 0
        self.device = self.chance.random() < 0.5
        self.past: list[StepRecord] = []
        self.batches = 0

    def _record(self) -> StepRecord:
        chance = self.chance
        phases = {**STEP, "forward": chance.randint(5, 40), "data_wait": chance.randint(0, 9)}
        if chance.random() < 0.1:
            phases[chance.choice(["comm", "h2d", "data_wait"])] = None  # type: ignore[assignment]
        step_ms = sum(value for value in phases.values() if value is not None)
        more: dict[str, Any] = {
            "started_s": self.wall_s,
            "samples": chance.choice([8, 8, 16, None]),
            "memory_bytes": chance.choice([None, 10**9 + self.index]),
            "queue_depth": chance.choice([None, 0.0, 1.5]),
            "queue_capacity": chance.choice([None, 4]),
            "device_stall_ns": chance.choice([None, 10**6]),
            "tags": chance.choice([(), (), (), ("skipped",), ("first_batch",), ("warmup",)]),
            "loader": chance.choice(["train", "train", "other"]),
        }
        found = record(self.index, phases, **more)
        if self.device:
            timed = replace_phases(found, chance.randint(1, 9))
            found = found if chance.random() < 0.1 else timed
        self.wall_s += step_ms / 1e3 * chance.choice([1, 1, 1, 30])
        self.index += chance.choice([1, 1, 1, 2])
        return found

    def frame(self) -> RankFrame:
        """The next frame."""
        chance = self.chance
        records = [self._record() for _ in range(chance.choice([0, 1, 1, 1, 2, 5, 40]))]
        self.past = [*self.past, *records][-70:]
        merged = chance.choice([0, 0, 0, 9])
        self.seq += 1 + merged
        more: dict[str, Any] = {}
        if chance.random() < 0.2:
            self.batches += chance.randint(0, 4)
            n = self.batches
            more["workers"] = tuple(
                WorkerCost("train", pid, n, 5 * n * 10**6, n * 10**6, 9, age_s=chance.random())
                for pid in (50, 51)
            )
        if self._is(0.05):
            more["spans"] = (Span("eval", self.wall_s, 10**9, self.index),)
        if self._is(0.03):
            more["replies"] = (Reply(f"c{self.seq}", "done"),)
        if self._is(0.03):
            more["commands"] = (Logged(self.wall_s, f"c{self.seq}", "set", "a", "done", ""),)
        if self._is(0.03):
            more["hello"] = hello(self.rank, 4)
        if self._is(0.01):
            more["bye"] = Bye("finished")
        if self._is(0.08):
            records = list(self.past)
            more["snapshot"] = True
        return rank_frame(
            self.seq,
            records,
            rank=self.rank,
            incarnation=f"i{self.incarnation}",
            sent_s=self.wall_s,
            dropped=self.seq // 50,
            state=RankState(
                chance.choice(["training", "eval", "hung"]),
                chance.choice(["backward", "user\x1b"]),
                phase_age_ns=chance.randint(0, 9),
                step=self.index,
                phases_na=chance.choice([{}, {"comm": "one\x07 process"}]),
                loss=chance.random(),
                notices=chance.choice([(), ("a notice",)]),
            ),
            ledger=Ledger(self.index, training_ns=self.index * 10),
            merged=merged,
            **more,
        )

    def _is(self, share: float) -> bool:
        return self.chance.random() < share * self.trouble

    def frames(self) -> Iterator[RankFrame]:
        """What arrives of it now: nothing, a frame, some, or one that came before again."""
        chance = self.chance
        if self._is(0.02):
            self.incarnation += 1
            self._start()
        elif self._is(0.02):
            self.wall_s += chance.choice([-30.0, -1.5, 40.0])
        for _ in range(chance.choice([0, 1, 1, 1, 3]) if self._is(1.0) else 1):
            frame = self.frame()
            if not self._is(0.05):
                yield frame
            if self._is(0.03):
                yield frame


def replace_phases(found: StepRecord, more_ms: int) -> StepRecord:
    """Return the step timed on a device, where the forward takes so much longer."""
    forward = (found.host.forward or 0) + more_ms * 10**6
    device = msgspec.structs.replace(found.host, forward=forward)
    timed: StepRecord = msgspec.structs.replace(found, device=device, clock="device")
    return timed


def told(view: View) -> tuple[object, ...]:
    """Everything that a view says, but for the time by the observer's own clock."""
    events = [(event.text, event.severity, event.run) for event in view.events]
    nodes, runs, same = view.nodes, view.runs, (view.refused, view.lost, view.notices)
    # Windows of one kind, so that what differs is shown.
    ranks = [replace(r, window=tuple(r.window), past=None) for run in runs for r in run.ranks]  # type: ignore[arg-type]
    pasts = [
        (tuple(r.past.firsts), tuple(r.past.spans), tuple(r.past.memory))
        for run in runs
        for r in run.ranks
    ]
    return events, nodes, [replace(run, ranks=()) for run in runs], ranks, pasts, same


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_many_ranks_are_the_same_as_few(seed: int, nodes: int) -> None:
    """Gaps, snapshots, restarts, device clocks, untimed steps, clock jumps: views are equal."""
    chance = random.Random(seed)
    clock, wall = Clock(100.0), Clock(T0_S)
    plain = Store(clock, wall, pack_above=EVERY)
    lazy = Store(clock, wall, pack_above=0)
    processes = [Process(chance, rank) for rank in range(2 * nodes)]
    for store in (plain, lazy):
        store.set_link("live")
    seqs = [0] * nodes
    held: list[tuple[View, tuple[object, ...]]] = []
    for _ in range(60):
        clock.s += chance.choice([0.1, 1.0, 1.0, 4.0])
        wall.s = T0_S + clock.s - 100.0
        node = chance.randrange(nodes)
        seqs[node] += chance.choice([1, 1, 1, 2])
        frames = [f for p in processes[2 * node : 2 * node + 2] for f in p.frames()]
        ages: tuple[RankAge, ...] = ()
        if chance.random() < 0.1:
            dead = chance.choice([None, False])
            ages = (RankAge("run-1", 2 * node, "i0", 5.0, dead, "S"),)
        data = node_frame(
            seqs[node],
            frames,
            node=f"node{node}",
            sent_s=wall.s + chance.choice([0.0, 0.0, 0.0, 50.0]),
            ages=ages,
        )
        assert lazy.apply(data, clock.s) == plain.apply(data, clock.s)
        assert lazy.version == plain.version
        if chance.random() < 0.15:
            assert told(lazy.view()) == told(plain.view())
        elif chance.random() < 0.15:
            held.append((lazy.view(), told(plain.view())))
    assert told(lazy.view()) == told(plain.view())
    # What is asked for later is what was known then.
    for view, known in held:
        assert told(view) == known


# --- damage ------------------------------------------------------------------------------------


def a_step(index: int) -> StepRecord:
    return record(index, STEP, samples=8)


def lazy_store() -> Store:
    """A store that has a rank with its hello and one step."""
    store = Store(Clock(100.0), pack_above=0)
    store.apply(node_frame(1, [rank_frame(1, [a_step(0)], hello=hello())]), 100.0)
    return store


def only_rank(store: Store) -> RankView:
    (run,) = store.view().runs
    (rank,) = run.ranks
    return rank


def with_raw(frame: RankFrame, **parts: bytes) -> bytes:
    """A frame with some fields in other bytes."""
    values = list(msgspec.structs.astuple(frame))
    for name, data in parts.items():
        values[RankFrame.__struct_fields__.index(name)] = msgspec.Raw(data)
    return msgspec.msgpack.encode(values)


LONG = msgspec.structs.replace(a_step(1), step_ns=5)
"""Its phases are longer than the step."""

DAMAGED = [
    b"\x91\x05",
    b"\x91" + encode(a_step(1)).replace(b"host", b"hosx"),
    msgspec.msgpack.encode([a_step(1), LONG]),
    msgspec.msgpack.encode([msgspec.structs.replace(a_step(1), step_ns=-1)]),
    b"\xc0",
    b"\x80",
]


@pytest.mark.parametrize("place", range(len(DAMAGED)))
@pytest.mark.parametrize("looked", [False, True])
def test_damaged_steps_are_refused_and_brought_back(place: int, looked: bool) -> None:
    damage = DAMAGED[place]
    store = lazy_store()
    data = with_raw(rank_frame(2, [a_step(1)]), records=damage)
    assert decode_ordinary(data) is not None
    assert store.apply(node_frame(2, [data]), 100.0) == []
    if looked:
        assert [r.index for r in only_rank(store).window] == [0]
        assert store.view().refused == 1
        # The rank is asked for them with its next frame, and only once.
        assert store.apply(node_frame(3, [rank_frame(3, [a_step(2)])]), 100.0) == [("run-1", 0)]
        assert store.apply(node_frame(4, [rank_frame(4)]), 100.0) == []
    else:
        store.apply(node_frame(3, [rank_frame(3, [a_step(2)])]), 100.0)
        store.apply(node_frame(4, [rank_frame(4)]), 100.0)
    rank = only_rank(store)
    assert [r.index for r in rank.window] == [0, 2]
    assert (store.view().refused, rank.lost) == (1, 1)
    if not looked:
        assert store.apply(node_frame(5, [rank_frame(5)]), 100.0) == [("run-1", 0)]
    past = rank_frame(5, [a_step(i) for i in range(3)], snapshot=True)
    store.apply(node_frame(6, [past]), 100.0)
    rank = only_rank(store)
    assert ([r.index for r in rank.window], rank.lost) == ([0, 1, 2], 0)


def test_what_has_come_back_is_not_asked_for() -> None:
    store = lazy_store()
    damaged = with_raw(rank_frame(2, [a_step(1)]), records=DAMAGED[0])
    store.apply(node_frame(2, [damaged]), 100.0)
    assert only_rank(store).lost == 1
    past = rank_frame(2, [a_step(i) for i in range(2)], snapshot=True)
    store.apply(node_frame(3, [past]), 100.0)
    assert store.apply(node_frame(4, [rank_frame(3)]), 100.0) == []
    assert only_rank(store).lost == 0


def test_too_many_steps_are_refused_at_once() -> None:
    store = lazy_store()
    many = msgspec.msgpack.encode([a_step(1)] * 4097)
    frame = with_raw(rank_frame(2, [a_step(1)]), records=many)
    assert store.apply(node_frame(2, [frame]), 100.0) == [("run-1", 0)]
    assert (store.view().refused, only_rank(store).lost) == (1, 1)


def test_damaged_totals_and_states_change_nothing_else() -> None:
    store = lazy_store()
    state = encode(RankState("eval", "forward"))
    for seq, parts in enumerate(
        [
            {"workers": b"\x91\x05", "state": state},
            {"ledger": b"\x91\xff"},
            {"state": b"\x91\x05"},
        ],
        2,
    ):
        data = with_raw(rank_frame(seq, [a_step(seq)]), **parts)
        assert decode_ordinary(data) is not None
        assert store.apply(node_frame(seq, [data]), 100.0) == []
        rank = only_rank(store)
        assert [r.index for r in rank.window] == [0, *range(2, seq + 1)]
        assert (rank.state, store.view().refused) == ("eval", seq - 1)
    assert store.apply(node_frame(9, [rank_frame(5)]), 100.0) == []


def test_what_waits_is_bounded() -> None:
    """Nobody looks for an hour: frames are read now and then all the same."""
    store = lazy_store()
    (rank,) = store._ranks.values()
    most = 0
    for seq in range(2, 3602):
        store.apply(node_frame(seq, [rank_frame(seq, [a_step(seq)])]), 100.0)
        beside = rank.convoy._steps if rank.convoy is not None else []
        most = max(most, len(rank._waiting_steps) + len(beside))
        waiting_bytes = rank._waiting_bytes + sum(len(part) for parts in beside for part in parts)
        assert waiting_bytes <= live._MOST_WAITING_BYTES
    assert 8 <= most <= live._MOST_WAITING
    big = rank_frame(3602, [a_step(3602 + i) for i in range(500)])
    store.apply(node_frame(3602, [big]), 100.0)
    assert not rank._waiting_steps
    assert rank.convoy is not None
    assert not rank.convoy._steps
    assert only_rank(store).window[-1].index == 4101


def test_many_parts_are_decoded_as_one() -> None:
    parts = [
        msgspec.msgpack.encode([a_step(at + i) for i in range(number)])
        for at, number in ((0, 1), (1, 15), (16, 1), (17, 3))
    ]
    assert decode_all_steps(parts) == tuple(a_step(i) for i in range(20))
    large = msgspec.msgpack.encode([a_step(20 + i) for i in range(16)])
    assert decode_all_steps([*parts, large]) == tuple(a_step(i) for i in range(36))
    for damage in DAMAGED:
        with pytest.raises(FrameError):
            decode_all_steps([parts[0], damage, parts[1]])


def test_who_watches_many_collects_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[int, ...]] = []
    monkeypatch.setattr(packed.gc, "set_threshold", lambda *numbers: called.append(numbers))
    store = Store(Clock(100.0), pack_above=2)
    for rank in range(4):
        store.apply(node_frame(rank + 1, [rank_frame(1, rank=rank)]), 100.0)
        assert len(called) == (rank >= 2)
    assert called[0] > (700, 10, 10)


def test_only_ordinary_frames_wait() -> None:
    ordinary = rank_frame(3, [a_step(1)], workers=(WorkerCost("train", 5, 3),), merged=2)
    found = decode_ordinary(encode(ordinary))
    assert found is not None
    assert (found.seq, found.merged, found.sent_s) == (3, 2, ordinary.sent_s)
    for part in (
        {"hello": hello()},
        {"bye": Bye("finished")},
        {"snapshot": True},
        {"spans": (Span("eval", T0_S, 5),)},
        {"replies": (Reply("c1", "done"),)},
        {"commands": (Logged(T0_S, "c1", "set", "", "done", ""),)},
        {"version": 2},
        {"seq": -1},
        {"rank": 2**20},
        {"sent_s": -1.0},
    ):
        other = msgspec.structs.replace(ordinary, **part)
        assert decode_ordinary(encode(other)) is None, part
    assert decode_ordinary(b"\x93\x01\x02") is None
