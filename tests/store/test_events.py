"""What the event log says: once for many ranks, and what was kept out of the steps."""

from builders import T0_S, hello, node_frame, rank_frame, record

from gpuwatch.schema import RankAge, Reply, Span
from gpuwatch.store import Store

PHASES_MS = {"data_wait": 3.0, "forward": 10.0, "backward": 20.0, "comm": 5.0, "other": 2.0}


def texts(store: Store) -> list[str]:
    return [event.text for event in store.view().events]


def feed_ranks(store: Store, ranks: range) -> None:
    frames = [
        rank_frame(1, [record(0, PHASES_MS)], rank=r, hello=hello(world_size=64)) for r in ranks
    ]
    store.apply(node_frame(1, frames), 100.0)


def test_what_happens_to_many_ranks_at_once_is_one_event() -> None:
    store = Store(lambda: 100.0)
    feed_ranks(store, range(8, 16))
    assert texts(store) == ["ranks 8-15 on node0: training"]
    few = Store(lambda: 100.0)
    feed_ranks(few, range(2))
    assert texts(few) == ["rank 0 on node0: training", "rank 1 on node0: training"]


def test_ranks_that_go_with_gaps_are_counted() -> None:
    store = Store(lambda: 100.0)
    feed_ranks(store, range(8))
    texts(store)
    ages = [
        RankAge("run-1", r, f"inc{r}", 9.0, pid_alive=False, gone_reason="killed")
        for r in (0, 1, 3, 4, 6)
    ]
    store.apply(node_frame(2, ages=ages), 100.0)
    assert texts(store)[-1] == "5 ranks gone (killed)"
    assert store.view().events[-1].severity == "critical"


def test_a_checkpoint_of_all_ranks_is_one_event() -> None:
    store = Store(lambda: 100.0)
    feed_ranks(store, range(4))
    texts(store)
    span = Span("checkpoint", T0_S, 4_100_000_000, 1)
    frames = [rank_frame(2, [], rank=r, spans=(span,)) for r in range(4)]
    store.apply(node_frame(2, frames), 101.0)
    said = "checkpoint 4.1 s (rank 0), kept out of step statistics"
    assert texts(store)[1:] == [said]
    # The next one, and one that a snapshot repeats.
    again = rank_frame(3, [], rank=0, spans=(Span("checkpoint", T0_S, 2_000_000_000, 500),))
    store.apply(node_frame(3, [again]), 110.0)
    repeated = rank_frame(3, [], rank=0, spans=(span,), snapshot=True)
    store.apply(node_frame(4, [repeated]), 111.0)
    # And one rank that tells of the first checkpoint late.
    late = rank_frame(3, [], rank=2, spans=(Span("checkpoint", T0_S, 2_000_000_000, 500),))
    store.apply(node_frame(5, [late]), 120.0)
    assert len(texts(store)) == 3


def test_an_answer_keeps_its_lines_and_nothing_that_moves_the_cursor() -> None:
    store = Store(lambda: 100.0)
    data = 'Thread MainThread:\n  File "a.py", line 1\n\tx()\x1b[2J\n'
    frame = rank_frame(1, [], replies=(Reply("id1", "done", "fi\nne", data),))
    store.apply(node_frame(1, [frame]), 100.0)
    (reply,) = store.view().runs[0].ranks[0].replies
    assert reply.data.splitlines()[:2] == ["Thread MainThread:", '  File "a.py", line 1']
    assert "\x1b" not in reply.data
    assert "\n" not in reply.message


def test_a_span_in_every_step_does_not_fill_the_log() -> None:
    store = Store(lambda: 100.0)
    feed_ranks(store, range(1))
    for i in range(100):
        frame = rank_frame(2 + i, [], spans=(Span("logging", T0_S, 10_000_000, i + 1),))
        store.apply(node_frame(2 + i, [frame]), 100.0 + i * 0.1)
    assert 2 < len(texts(store)) <= 8
