"""Frames made of frames: what a store knows of them is what it knows of those they are made of."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from builders import T0_S, hello, node_frame, rank_frame, record, sensors
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.frames import decode_node_frame, decode_rank_frame, encode
from gpuwatch.schema import (
    Bye,
    Ledger,
    Logged,
    NodeFrame,
    RankAge,
    RankFrame,
    RankState,
    Reply,
    Span,
    WorkerCost,
)
from gpuwatch.store import Store, View
from gpuwatch.wire.collect.gather import CALM_S, Gather, is_calm, wish
from gpuwatch.wire.collect.way import AT_ONCE, PATIENCE_S, Turns

# --- what nodes send ---------------------------------------------------------------------------


class Rank:
    """A rank that trains, restarts, loses frames, answers and ends."""

    def __init__(self, rank: int, rng: random.Random) -> None:
        self.rank = rank
        self.rng = rng
        self.lives = 0
        self.begin()

    def begin(self) -> None:
        self.lives += 1
        self.seq = self.step = self.beats = 0
        self.over = False

    def frame(self, now_s: float, **more: Any) -> RankFrame:
        return rank_frame(
            self.seq,
            more.pop("records", ()),
            rank=self.rank,
            incarnation=f"life{self.lives}-{self.rank}",
            sent_s=now_s,
            ledger=Ledger(steps=self.step, wall_ns=int((now_s - T0_S) * 1e9)),
            state=RankState("training", self.rng.choice(("forward", "comm")), self.seq, self.step),
            **more,
        )

    def next(self, now_s: float) -> Iterator[RankFrame]:
        """What it sends in one interval."""
        chance = self.rng.random
        if self.over:
            if chance() < 0.1:
                self.begin()
            return
        self.seq += 1
        if chance() < 0.03:
            self.seq += self.rng.randrange(1, 4)  # lost on the way to the node process
        more: dict[str, Any] = {"dropped": self.seq // 50}
        if self.seq == 1 or chance() < 0.02:
            more["hello"] = hello(self.rank, 64, cores=self.rng.randrange(1, 99))
        if chance() < 0.4:
            count = self.rng.randrange(1, 4)
            more["records"] = [
                record(
                    self.step + i,
                    {"forward": 50 + 9 * chance(), "data_wait": 9 * chance()},
                    started_s=now_s - 0.1 + i / 100,
                    loader="loader0",
                )
                for i in range(count)
            ]
            self.step += count
        if chance() < 0.1:
            more["spans"] = (Span(self.rng.choice(("eval", "own")), now_s, 10**7, self.step),)
        if chance() < 0.2:
            self.beats += 1
            costs = [
                WorkerCost("loader0", 7000 + w, 3 * self.beats, *([self.beats * 10**7] * 3))
                for w in range(2)
            ]
            age_s = chance() / 20
            more["workers"] = tuple(msgspec.structs.replace(c, age_s=age_s) for c in costs)
        if chance() < 0.05:
            more["commands"] = (Logged(now_s, f"c{self.seq}", "set", "a=1", "done", "ok"),)
        if chance() < 0.03:
            more["replies"] = (Reply(f"r{self.seq}", "done", data="x"),)
        if chance() < 0.02:
            more["bye"] = Bye("finished")
            self.over = True
        yield self.frame(now_s, **more)
        if chance() < 0.03:
            # An answer from its other socket has the number of the last frame.
            yield self.frame(now_s, replies=(Reply("s", "done"),))
        if chance() < 0.03:
            known = [record(i, {"forward": 50.0}) for i in range(max(0, self.step - 20), self.step)]
            yield self.frame(now_s, records=known, hello=hello(self.rank, 64), snapshot=True)


def node_frames(seed: int, count: int) -> Iterator[tuple[float, bytes]]:
    """(when it is sent, the frame) of one node process, which may lose some and start anew."""
    rng = random.Random(seed)
    ranks = [Rank(rank, rng) for rank in range(rng.randrange(1, 4))]
    seq, life, quiet_s = 0, 0, dict.fromkeys(range(len(ranks)), 0.0)
    for tick in range(1, count + 1):
        now_s = T0_S + tick * 0.1 + rng.random() / 100
        seq += 1 if rng.random() > 0.02 else 3
        if rng.random() < 0.01:
            seq, life = 1, life + 1
        frames: list[RankFrame | bytes] = []
        ages = []
        for rank in ranks:
            new = list(rank.next(now_s)) if rng.random() < 0.8 else []
            quiet_s[rank.rank] = 0.0 if new else quiet_s[rank.rank] + 0.1
            frames += new
            if quiet_s[rank.rank] > 0.15 and not rank.over:
                dead = rng.random() < 0.1
                inc = f"life{rank.lives}-{rank.rank}"
                ages.append(RankAge("run-1", rank.rank, inc, quiet_s[rank.rank], not dead, "S"))
        if rng.random() < 0.02:
            frames.insert(rng.randrange(len(frames) + 1), b"damaged")
        told = rng.random()
        yield (
            now_s,
            node_frame(
                seq,
                frames,
                ages=ages,
                sensors=sensors(tick, cpu=rng.random() * 50) if rng.random() < 0.15 else None,
                incarnation=f"agent{life}",
                sent_s=now_s,
                notices=(f"notice {tick // 30}",),
                replies=(Reply(f"n{seq}", "done"),) if told < 0.03 else (),
            )
            if told < 0.98
            else b"nothing that can be read",
        )


class Watched:
    """A store with clocks of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.store = Store(lambda: self.now_s, lambda: T0_S + self.now_s)

    def apply(self, data: bytes, now_s: float) -> None:
        self.now_s = now_s
        self.store.apply(data, now_s)

    def known(self) -> View:
        """The picture, without what tells how many frames it is of, and when events were noted."""
        view = self.store.view()
        return replace(view, version=0, at_s=0.0, events=())

    def events(self) -> set[str]:
        # Which rank has told a span first is by chance: all of them tell it.
        return {event.text.split(" (rank ")[0] for event in self.store.view().events}


def gathered(frames: list[tuple[float, bytes]]) -> Iterator[tuple[float, list[bytes], list[bytes]]]:
    """(when, what is sent, what it is made of) each time that something is sent."""
    gather = Gather()
    behind: list[bytes] = []
    for sent_s, data in frames:
        before = len(gather)
        out = gather.add(data, sent_s)
        behind.append(data)
        if out:
            # The last one may wait for more, or be among those that are sent.
            cut = len(behind) - len(gather)
            assert not before or cut
            yield sent_s, out, behind[:cut]
            behind = behind[cut:]
    yield frames[-1][0], gather.take(frames[-1][0]), behind


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 120))
def test_a_store_knows_of_few_frames_all_that_it_knows_of_many(seed: int, count: int) -> None:
    frames = list(node_frames(seed, count))
    few, many = Watched(), Watched()
    sent = 0
    for sent_s, out, behind in gathered(frames):
        now_s = sent_s - T0_S
        for data in behind:
            many.apply(data, now_s)
        for data in out:
            few.apply(data, now_s)
        sent += len(out)
        assert few.known() == many.known()
        assert few.store.replies() == many.store.replies()
    assert few.events() == many.events()
    assert sent <= count


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), st.integers(20, 150))
def test_what_is_lost_on_the_way_is_counted_one_by_one(seed: int, count: int) -> None:
    rng = random.Random(seed)
    ranks = 3
    gather, watched = Gather(), Watched()
    sent: list[bytes] = []
    for seq in range(1, count + 1):
        steps = [record(seq, {"forward": 50.0})] if rng.random() < 0.2 else []
        beats = [rank_frame(seq, steps, rank=rank, sent_s=T0_S + seq / 10) for rank in range(ranks)]
        sent += gather.add(node_frame(seq, beats, sent_s=T0_S + seq / 10), seq / 10)
    sent += gather.take(count / 10)
    first, *middle, last = sent
    lost = 0
    watched.apply(first, 0.1)
    for data in middle:
        if rng.random() < 0.3:
            lost += decode_node_frame(data).merged + 1
        else:
            watched.apply(data, 0.2)
    watched.apply(last, 0.3)
    view = watched.store.view()
    assert [node.lost for node in view.nodes] == [lost]
    assert [rank.lost for rank in view.runs[0].ranks] == [lost] * ranks


@pytest.mark.parametrize(("merged", "quiet_s"), [(0, 1.5), (9, 2.4)])
def test_a_rank_stays_silent_between_frames_and_no_longer(merged: int, quiet_s: float) -> None:
    watched = Watched()
    watched.apply(node_frame(1, [rank_frame(1)]), 0.0)
    ages = [RankAge("run-1", 0, "inc0", 5.0, True, "T")]
    watched.apply(node_frame(2 + merged, ages=ages, merged=merged), 5.0)
    states = []
    for later_s in (0.0, quiet_s - 0.1, quiet_s + 0.1):
        watched.now_s = 5.0 + later_s
        states.append(watched.known().runs[0].ranks[0].state)
    # When its node has fallen silent too, nobody knows.
    assert states == ["silent", "silent", "training"]


# --- when --------------------------------------------------------------------------------------


def beat(seq: int, **more: Any) -> bytes:
    return node_frame(seq, [rank_frame(seq, **more)], sent_s=T0_S + seq / 10)


def test_ten_frames_a_second_become_one_and_none_waits_longer() -> None:
    gather = Gather()
    sent: list[tuple[float, NodeFrame]] = []
    for seq in range(1, 301):
        now_s = 50.0 + seq * 0.1
        sent += [(now_s, decode_node_frame(data)) for data in gather.add(beat(seq), now_s)]
    assert 29 <= len(sent) <= 31
    waits = [now_s - before_s for (before_s, _), (now_s, _) in itertools.pairwise(sent)]
    assert max(waits) < CALM_S + 0.11
    seqs = [seq for _, f in sent for seq in range(f.seq - f.merged, f.seq + 1)]
    assert seqs == list(range(1, seqs[-1] + 1))
    assert all(len(frame.frames) == 1 for _, frame in sent)


def test_what_nobody_follows_is_overdue_and_nothing_is_so_before() -> None:
    gather = Gather()
    assert gather.overdue_s is None
    assert gather.add(beat(1), 100.0) == []
    assert gather.overdue_s is not None
    assert 100.5 < gather.overdue_s <= 100.0 + CALM_S + 0.1
    # The only one is what it was.
    assert gather.take(101.0) == [beat(1)]
    assert (len(gather), gather.overdue_s, gather.take(101.1)) == (0, None, [])


@pytest.mark.parametrize(
    "more",
    [
        {"replies": (Reply("a", "done"),)},
        {"snapshot": True},
        {"bye": Bye("finished")},
    ],
)
def test_what_somebody_waits_for_takes_with_it_what_came_before(more: dict[str, Any]) -> None:
    gather = Gather()
    assert gather.add(beat(1), 100.0) == []
    assert gather.add(beat(2), 100.1) == []
    (data,) = gather.add(beat(3, **more), 100.2)
    frame = decode_node_frame(data)
    assert (frame.seq, frame.merged) == (3, 2)
    told = [decode_rank_frame(raw) for raw in frame.frames]
    assert [(f.seq, f.merged) for f in told] == [(2, 1), (3, 0)]
    assert encode(told[1]) == bytes(decode_node_frame(beat(3, **more)).frames[0])
    assert len(gather) == 0


def test_an_answer_of_the_node_itself_waits_for_nothing() -> None:
    gather = Gather()
    assert gather.add(beat(1), 100.0) == []
    (data,) = gather.add(node_frame(2, replies=(Reply("a", "done"),)), 100.1)
    assert [reply.id for reply in decode_node_frame(data).replies] == ["a"]


def test_every_tick_of_the_sensors_goes_in_a_frame_of_its_own() -> None:
    gather = Gather()
    sent: list[bytes] = []
    for seq in range(1, 11):
        tick = sensors(seq) if seq in (2, 6, 7) else None
        sent += gather.add(node_frame(seq, sensors=tick), 100 + seq / 50)
    sent += gather.take(101.0)
    frames = [decode_node_frame(data) for data in sent]
    assert [(f.seq, f.merged, f.sensors is not None) for f in frames] == [
        (5, 4, True),
        (6, 0, True),
        (10, 3, True),
    ]


# --- what does not fit together ----------------------------------------------------------------


def with_more_fields(data: bytes, fields: int) -> bytes:
    """The frame as a later version writes it."""
    values = msgspec.msgpack.decode(data)
    assert isinstance(values, list)
    return msgspec.msgpack.encode([*values, *["new"] * fields])


def test_what_a_later_version_says_passes_as_it_came_and_in_its_place() -> None:
    gather = Gather()
    new = with_more_fields(encode(rank_frame(3)), 1)
    sent: list[bytes] = []
    for seq in range(1, 6):
        data = node_frame(seq, [new if seq == 3 else rank_frame(seq)], sent_s=T0_S + seq / 10)
        sent += gather.add(data, 100 + seq / 10)
    (whole,) = gather.take(101.0)
    assert sent == []
    parts = [bytes(raw) for raw in decode_node_frame(whole).frames]
    assert parts[1] == new
    assert [(decode_rank_frame(p).seq, decode_rank_frame(p).merged) for p in parts] == [
        (2, 1),
        (3, 0),
        (5, 1),
    ]
    # Nothing passes it: who knows what it says.
    for seq, raw in ((6, encode(rank_frame(6))), (7, new), (8, encode(rank_frame(7)))):
        assert gather.add(node_frame(seq, [raw], sent_s=T0_S + seq / 10), 101.5) == []
    (whole,) = gather.take(101.6)
    assert [bytes(raw) for raw in decode_node_frame(whole).frames][1] == new
    later = with_more_fields(beat(7), 2)
    assert gather.add(beat(6), 102.0) == []
    assert gather.add(later, 102.1) == [beat(6), later]


def other_life(seq: int) -> bytes:
    return node_frame(seq, [rank_frame(seq)], incarnation="another", sent_s=T0_S + seq / 10)


@pytest.mark.parametrize(
    "next_one",
    [
        lambda: beat(9),
        lambda: other_life(3),
        lambda: node_frame(3, node="node1"),
        lambda: b"damaged",
        lambda: encode(decode_node_frame(beat(3)))[:-1],
    ],
    ids=["a gap", "another process", "another node", "damaged", "cut off"],
)
def test_what_does_not_follow_is_not_joined(next_one: Callable[[], bytes]) -> None:
    gather = Gather()
    assert gather.add(beat(1), 100.0) == []
    assert gather.add(beat(2), 100.1) == []
    out = [*gather.add(next_one(), 100.2), *gather.take(100.3)]
    assert len(out) == 2
    assert (decode_node_frame(out[0]).seq, decode_node_frame(out[0]).merged) == (2, 1)
    assert out[1] == next_one()


@pytest.mark.parametrize(
    "frames",
    [
        [rank_frame(1), rank_frame(3, sent_s=T0_S)],
        [rank_frame(1, sent_s=T0_S + 1), rank_frame(2, sent_s=T0_S)],
        [rank_frame(1, simulated=True), rank_frame(2)],
        [rank_frame(1), rank_frame(2, incarnation="another")],
        [
            rank_frame(s, commands=tuple(Logged(T0_S, f"{s}{i}", "a", "", "done", "") for i in n))
            for s, n in ((1, range(40)), (2, range(30)))
        ],
        [
            rank_frame(s, [record(i, {"forward": 1.0}) for i in range(s * 3000, (s + 1) * 3000)])
            for s in (1, 2)
        ],
    ],
    ids=["a gap", "a clock set back", "simulated", "restarted", "too many words", "too many steps"],
)
def test_frames_of_a_rank_that_cannot_be_one_stay_two(frames: list[RankFrame]) -> None:
    gather = Gather()
    for seq, frame in enumerate(frames, 1):
        assert gather.add(node_frame(seq, [frame]), 100.0) == []
    (whole,) = gather.take(100.1)
    parts = [bytes(raw) for raw in decode_node_frame(whole).frames]
    assert parts == [encode(frame) for frame in frames]


def test_more_than_a_frame_holds_goes_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwatch.wire.collect.gather._MOST_BYTES", 2000)
    gather = Gather()
    sent = [data for seq in range(1, 101) for data in gather.add(beat(seq), 100.0)]
    assert len(sent) >= 4
    assert sum(decode_node_frame(data).merged + 1 for data in sent) + len(gather) == 100


def test_a_wish_is_for_a_second_or_for_every_frame() -> None:
    assert is_calm(wish(CALM_S))
    assert is_calm(wish(5.0))
    assert not is_calm(wish(0.1))
    assert not is_calm(msgspec.structs.replace(wish(1.0), args={}))
    assert not is_calm(msgspec.structs.replace(wish(1.0), args={"interval_s": "often"}))
    # Whoever does not know it takes it for the word of a monitor that it is there.
    assert wish(1.0).verb == "attach"


# --- whose turn it is --------------------------------------------------------------------------


def test_few_ask_at_a_time_and_all_of_them_soon() -> None:
    turns: Turns[int] = Turns(random.Random(1))
    for who in range(1250):
        turns.want(who, 0.0)
    asked: list[int] = []
    open_: list[int] = []
    rounds = 0
    while len(turns):
        new = turns.due(rounds * 0.1)
        open_ += new
        asked += new
        assert len(open_) <= AT_ONCE
        while open_:  # all of them answer
            turns.done(open_.pop())
        rounds += 1
    assert asked == list(range(1250))
    assert rounds <= 1250 // AT_ONCE + 2


def test_who_gets_no_answer_asks_ever_less_and_holds_up_nobody() -> None:
    turns: Turns[str] = Turns(random.Random(1))
    for at in range(AT_ONCE):
        turns.want(f"mute{at}", 0.0)
    turns.want("good", 0.0)
    times: dict[str, list[float]] = {}
    for tick in range(6000):
        for who in turns.due(tick * 0.1):
            times.setdefault(who, []).append(tick * 0.1)
            if who == "good":
                turns.done(who)
    assert times["good"] == [pytest.approx(PATIENCE_S, abs=0.2)]
    for at in range(AT_ONCE):
        asked = times[f"mute{at}"]
        pauses = [b - a for a, b in itertools.pairwise(asked)]
        # In ten minutes; one a five seconds would be 120.
        assert 6 <= len(asked) <= 16
        assert pauses[0] < 16
        assert 60 <= pauses[-1] < 110
    # They do not come back together.
    assert len({times[f"mute{at}"][3] for at in range(AT_ONCE)}) > AT_ONCE / 3
    # In no five seconds more than have their turn at once.
    every = sorted(at_s for asked in times.values() for at_s in asked)
    assert all(
        later - first >= PATIENCE_S - 0.11
        for first, later in zip(every, every[AT_ONCE + 1 :], strict=False)
    )


def test_who_has_gone_is_not_asked() -> None:
    turns: Turns[str] = Turns()
    turns.want("a", 0.0)
    turns.done("a")
    turns.done("never seen")
    assert turns.due(0.0) == []
    turns.want("a", 1.0)
    assert turns.due(0.5) == []
    assert turns.due(1.0) == ["a"]
    assert turns.due(1.1) == []
