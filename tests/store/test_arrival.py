"""Ranks whose frames arrive together are what they would be if each came by itself."""

import random
from typing import Any

import msgspec
import pytest
from builders import T0_S, hello, node_frame, rank_frame, sensors
from store.test_lazy import (
    DAMAGED,
    EVERY,
    Clock,
    Process,
    a_step,
    lazy_store,
    told,
    with_raw,
)

from gpuwatch.frames import decode_node_frame, encode
from gpuwatch.schema import GpuSample, ProcessSample, RankAge, RankFrame, Reading, SensorFrame
from gpuwatch.store import Store, live
from gpuwatch.store.arrival import Convoy


@pytest.mark.parametrize("trouble", [0.05, 0.0])
def test_ranks_that_go_on_together_are_the_same_as_alone(
    trouble: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little happens to them, so that most frames wait beside those of the other ranks."""
    took = []
    take = Convoy.take

    def taken(self: Convoy[Any], *args: Any) -> bool:
        took.append(take(self, *args))
        return took[-1]

    monkeypatch.setattr(Convoy, "take", taken)
    for seed in range(25):
        same_as_few(seed, 1 + seed % 3, 90, trouble)
    assert took.count(True) > 25 * 90 * (0.25 if trouble else 0.8)
    assert trouble == 0.0 or took.count(False) > 25


def ticking(chance: random.Random, seq: int) -> SensorFrame:
    """A tick of a sampler: what is known of its processes changes, and who they are."""
    processes = [
        ProcessSample(
            1000 + at,
            1000,
            "worker" if at else "rank",
            chance.choice("RSD"),
            {"cpu_percent": Reading(chance.choice([None, 50.0 * chance.random()]), "%")},
        )
        for at in range(chance.choice([1, 2, 2]))
    ]
    gpus = (GpuSample(0, "GPU-1", "a\x1b card", {"gpu_util": Reading(chance.random(), "%")}),)
    tick = sensors(seq, cpu=90 * chance.random())
    return msgspec.structs.replace(tick, processes=tuple(processes), gpus=gpus)


def same_as_few(seed: int, nodes: int, count: int, trouble: float = 1.0) -> None:
    chance = random.Random(seed)
    clock, wall = Clock(100.0), Clock(T0_S)
    plain = Store(clock, wall, pack_above=EVERY)
    lazy = Store(clock, wall, pack_above=0)
    processes = [Process(chance, rank, trouble) for rank in range(2 * nodes)]
    for store in (plain, lazy):
        store.set_link("live")
    seqs = [0] * nodes

    def rarely(share: float) -> bool:
        return chance.random() < share * trouble

    for _ in range(count):
        clock.s += chance.choice([0.1, 1.0, 1.0, 4.0])
        wall.s = T0_S + clock.s - 100.0
        node = chance.randrange(nodes)
        seqs[node] += 2 if rarely(0.25) else 1
        frames = [f for p in processes[2 * node : 2 * node + 2] for f in p.frames()]
        ages: tuple[RankAge, ...] = ()
        if rarely(0.1):
            # Of a rank of any node: who tells of it has been wrong before.
            dead = chance.choice([None, False])
            ages = (RankAge("run-1", chance.randrange(2 * nodes), "i0", 5.0, dead, "S"),)
        data = node_frame(
            seqs[node],
            frames,
            # Now and then it is another node that they come from.
            node=f"node{chance.randrange(nodes) if rarely(0.05) else node}",
            sent_s=wall.s + (50.0 if rarely(0.25) else 0.0),
            ages=ages,
            sensors=ticking(chance, seqs[node]) if chance.random() < 0.5 else None,
        )
        if rarely(0.1):
            data = encode(msgspec.structs.replace(decode_node_frame(data), merged=1))
        for _ in range(2 if rarely(0.2) else 1):  # a relay may send it again
            assert lazy.apply(data, clock.s) == plain.apply(data, clock.s)
        assert lazy.version == plain.version
        if chance.random() < 0.15:
            assert told(lazy.view()) == told(plain.view())
    assert told(lazy.view()) == told(plain.view())


@pytest.mark.parametrize("place", range(len(DAMAGED)))
def test_damaged_steps_that_wait_beside_those_of_other_ranks(place: int) -> None:
    """They are refused when somebody looks, and asked for with the next frame, once."""
    store = lazy_store()
    store.apply(node_frame(2, [rank_frame(1, [a_step(0)], rank=1, hello=hello(1, 2))]), 100.0)

    def both(seq: int, first: bytes | RankFrame, other: RankFrame) -> list[tuple[str, int]]:
        return store.apply(node_frame(seq + 2, [first, other]), 100.0 + seq)

    def good(seq: int, rank: int) -> RankFrame:
        return rank_frame(seq, [a_step(seq - 1)], rank=rank)

    both(2, good(2, 0), good(2, 1))
    both(3, with_raw(good(3, 0), records=DAMAGED[place]), good(3, 1))
    both(4, good(4, 0), good(4, 1))
    (rank, other) = store._ranks.values()
    assert rank.convoy is not None
    assert rank.convoy is other.convoy
    assert rank.seq == 2  # the others wait
    view = store.view()
    ranks = view.runs[0].ranks
    assert [[step.index for step in r.window] for r in ranks] == [[0, 1, 3], [0, 1, 2, 3]]
    assert (view.refused, [r.lost for r in ranks], [r.age_s for r in ranks]) == (1, [1, 0], [0, 0])
    assert both(5, good(5, 0), good(5, 1)) == [("run-1", 0)]
    assert both(6, good(6, 0), good(6, 1)) == []
    assert [r.window[-1].index for r in store.view().runs[0].ranks] == [5, 5]


@pytest.mark.parametrize("why", ["so many runs", "a smaller restart"])
def test_a_rank_that_is_let_go_of_is_there_again_when_it_is_heard(why: str) -> None:
    """The others of its node have gone on with it until then."""
    clock = Clock(100.0)
    views = []
    for pack_above in (0, EVERY):
        clock.s = 100.0
        store = Store(clock, lambda: T0_S, pack_above=pack_above)
        world = hello(0, 2), hello(1, 2)
        for seq in (1, 2, 3):
            both = [
                rank_frame(seq, rank=at, hello=world[at] if seq == 1 else None) for at in (0, 1)
            ]
            store.apply(node_frame(seq, both), clock.s)
        clock.s += 100.0
        if why == "so many runs":
            for at in range(live._KEPT_RUNS):
                store.apply(
                    node_frame(at + 1, [rank_frame(1, run=f"other{at}")], node="b"), clock.s
                )
        else:
            again = rank_frame(1, incarnation="new", sent_s=T0_S + 9, hello=hello(0, 1))
            store.apply(node_frame(1, [again], node="b"), clock.s)
        gone = store.view().run("run-1")
        assert gone is None or [r.rank for r in gone.ranks] == [0]
        both = [rank_frame(4, [a_step(3)], rank=at, sent_s=T0_S + 10) for at in (0, 1)]
        store.apply(node_frame(4, both), clock.s)
        back = store.view().run("run-1")
        assert back is not None
        views.append([(r.rank, r.steps, r.node, r.incarnation, r.restarts) for r in back.ranks])
        assert (1, 4, "node0", "inc1", 0) in views[-1]
    assert views[0] == views[1]


def test_where_somebody_looks_what_comes_is_settled_as_it_comes() -> None:
    """Who draws does not find all of it waiting; of what nobody looks at it goes on to wait."""
    clock = Clock(100.0)
    store = Store(clock, lambda: T0_S, pack_above=0)

    def come(seq: int) -> None:
        clock.s += 1.0
        both = [
            rank_frame(seq, [a_step(seq - 1)], rank=at, hello=hello(at, 2) if seq == 1 else None)
            for at in (0, 1)
        ]
        assert store.apply(node_frame(seq, both), clock.s) == []

    def taken() -> list[int]:
        return [rank.window.last_index for rank in store._ranks.values()]

    for seq in (1, 2, 3, 4):
        come(seq)
    waited = taken()
    assert max(waited) < 3
    store.view()
    assert taken() == [3, 3]
    for seq in (5, 6):
        come(seq)
        assert taken() == [seq - 1, seq - 1]
    clock.s += live._LOOKED_S
    come(7)
    assert taken() == [5, 5]
    assert [rank.window[-1].index for rank in store.view().runs[0].ranks] == [6, 6]
