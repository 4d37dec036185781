"""Who belongs to a run: smaller restarts, jobs that share a run id, and clocks of other nodes."""

from __future__ import annotations

from typing import Any

import pytest
from builders import T0_S, hello, node_frame, rank_frame, record

from gpuwatch.schema import Bye, Logged, RankAge, RankFrame
from gpuwatch.store import RunView, Store
from gpuwatch.store.members import DOUBLE_FRAMES, DOUBT_S, LEFT_S

PHASES_MS = {"data_wait": 3.0, "forward": 10.0, "backward": 20.0, "comm": 5.0, "other": 2.0}


class Job:
    """A store and the frames that come to it, from any node."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.store = Store(lambda: self.now_s, wall=lambda: T0_S + self.now_s - 100.0)
        self._seqs: dict[str, int] = {}

    def say(
        self, *frames: RankFrame, node: str = "node0", ages: tuple[RankAge, ...] = (), **more: Any
    ) -> None:
        seq = self._seqs[node] = self._seqs.get(node, 0) + 1
        told = {"sent_s": T0_S + self.now_s - 100.0, **more}
        self.store.apply(node_frame(seq, frames, node=node, ages=ages, **told), self.now_s)

    def run(self) -> RunView:
        (run,) = self.store.view().runs
        return run


def frame(
    rank: int, world_size: int, incarnation: str = "a", seq: int = 1, **more: Any
) -> RankFrame:
    records = [record(i, PHASES_MS) for i in range(seq * 4)]
    known = {"incarnation": f"{incarnation}{rank}", "sent_s": T0_S + seq, **more}
    return rank_frame(seq, records, rank=rank, hello=hello(rank, world_size), **known)


def dead(rank: int, incarnation: str = "a") -> RankAge:
    return RankAge("run-1", rank, f"{incarnation}{rank}", 0.1, pid_alive=False)


def test_ranks_without_a_place_in_a_smaller_restart_leave() -> None:
    job = Job()
    job.say(*(frame(rank, 4) for rank in range(4)))
    job.say(ages=tuple(dead(rank) for rank in range(4)))
    assert [rank.state for rank in job.run().ranks] == ["gone"] * 4
    job.say(*(frame(rank, 2, "b", sent_s=T0_S + 9) for rank in range(2)))
    run = job.run()
    assert [(rank.rank, rank.state) for rank in run.ranks] == [(0, "training"), (1, "training")]
    assert (run.world_size, run.window) == (2, 4)
    events = [event.text for event in job.store.view().events]
    assert "2 ranks left out: 2 of them go on" in events
    # What a node process still remembers of them does not bring them back.
    job.say(frame(3, 4, snapshot=True), ages=(dead(3),))
    assert [rank.rank for rank in job.run().ranks] == [0, 1]


def test_one_that_is_only_silent_leaves_when_it_has_been_so_for_long() -> None:
    job = Job()
    job.say(frame(0, 2), frame(1, 2), node="node0")
    job.say(frame(0, 1, "b", sent_s=T0_S + 9))
    assert [rank.rank for rank in job.run().ranks] == [0, 1]
    job.now_s += LEFT_S + 1
    job.say(frame(0, 1, "b", seq=2, sent_s=T0_S + 20))
    assert [rank.rank for rank in job.run().ranks] == [0]


def test_ranks_that_died_stay_as_long_as_nothing_says_that_it_goes_on_without_them() -> None:
    job = Job()
    job.say(*(frame(rank, 4) for rank in range(4)))
    job.say(ages=(dead(3),))
    job.now_s += 60.0
    job.say(*(frame(rank, 4, seq=2) for rank in range(3)))
    assert [rank.state for rank in job.run().ranks][-1] == "gone"
    # A restart with more ranks loses nobody either.
    job.say(*(frame(rank, 6, "b", sent_s=T0_S + 90) for rank in range(6)))
    assert [rank.rank for rank in job.run().ranks] == list(range(6))
    ended = frame(5, 6, "b", seq=2, sent_s=T0_S + 91, bye=Bye("exit"))
    job.say(ended)
    assert [rank.rank for rank in job.run().ranks] == list(range(6))


def test_two_jobs_of_one_run_id_on_two_nodes_are_said() -> None:
    job = Job()
    job.say(frame(0, 1, "a"), node="node0")
    job.say(frame(0, 1, "b", sent_s=T0_S + 2), node="node1")
    assert job.store.view().notices == ()
    for seq in range(2, 2 + DOUBLE_FRAMES):
        job.now_s += 0.1
        job.say(frame(0, 1, "a", seq=seq, sent_s=T0_S + 2 + seq), node="node0")
        job.say(frame(0, 1, "b", seq=seq, sent_s=T0_S + 2 + seq), node="node1")
    (notice,) = job.store.view().notices
    assert "rank 0 of run run-1 is sent by two processes, on node0 and node1" in notice
    assert "GPUWATCH_RUN_ID" in notice
    # It is said as long as it lasts.
    job.now_s += LEFT_S + 1
    job.say(frame(0, 1, "b", seq=9, sent_s=T0_S + 30), node="node1")
    assert job.store.view().notices == ()


def test_a_late_frame_or_a_remembered_past_is_no_second_job() -> None:
    job = Job()
    job.say(frame(0, 1, "a"), node="node0")
    job.say(frame(0, 1, "b", sent_s=T0_S + 5), node="node1")
    job.say(frame(0, 1, "a", seq=2), node="node0")
    for seq in range(3, 9):
        job.say(frame(0, 1, "a", seq=seq, snapshot=True), node="node0")
        # On one node the former is dead when its successor starts.
        job.say(frame(0, 1, "a", seq=seq), node="node1")
    assert job.store.view().notices == ()


def test_ranks_that_do_not_agree_on_their_number_are_said_when_it_lasts() -> None:
    job = Job()
    job.say(frame(0, 1), node="node0")
    job.say(frame(1, 2), node="node1")
    assert job.store.view().notices == ()
    for second in range(int(DOUBT_S) + 1):
        job.now_s += 1.0
        job.say(frame(0, 1, seq=second + 2), node="node0")
        job.say(frame(1, 2, seq=second + 2), node="node1")
        notices = job.store.view().notices
    (notice,) = notices
    assert "the ranks of run run-1 say that they are 1 and 2" in notice
    job.say(frame(0, 2, "b", sent_s=T0_S + 60), node="node0")
    assert job.store.view().notices == ()


@pytest.mark.parametrize("link", ["", "live", "lost"])
def test_times_of_a_node_whose_clock_is_hours_off_are_the_observers(link: str) -> None:
    """Whatever is said of the way to it; a session over a pipe says nothing at first."""
    job = Job()
    if link:
        job.store.set_link(link)
    off_s = 4 * 3600.0
    said = Logged(T0_S + off_s + 3.0, "c1", "set", "lr 0.1", "done", "lr 0.2 -> 0.1")
    started = hello(0, 1, started_s=T0_S + off_s - 5.0)
    at_s = T0_S + off_s
    told = rank_frame(
        1,
        [record(i, PHASES_MS, started_s=at_s + i) for i in range(3)],
        hello=started,
        sent_s=at_s + 3.0,
        commands=(said,),
    )
    job.say(told, sent_s=at_s)
    run = job.run()
    (rank,) = run.ranks
    assert rank.ahead_s == off_s
    assert [second.second_s - int(T0_S) for second in rank.timeline] == [0, 1, 2]
    assert run.started_s == T0_S - 5.0
    (entry,) = rank.commands
    assert entry.at_s - rank.ahead_s == T0_S + 3.0
    job.say(rank_frame(2, [], sent_s=at_s + 7.0, bye=Bye("exit")), sent_s=at_s)
    assert job.run().ranks[0].ended_s == T0_S + 7.0


def test_a_recording_is_by_its_own_clocks() -> None:
    job = Job()
    job.store.set_link("replay")
    job.say(frame(0, 1), sent_s=T0_S + 4 * 3600.0)
    assert job.run().ranks[0].ahead_s == 0
