"""Commands without a training: what is accepted, done once, refused, and told."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from builders import node_frame, rank_frame

from gpuwatch.frames import decode_rank_frame
from gpuwatch.probe.boundary import Desk, Outcome
from gpuwatch.probe.commands import WAITING, Commands
from gpuwatch.probe.events import (
    BACKWARD_BEGIN,
    BACKWARD_END,
    FETCH_BEGIN,
    FETCH_END,
    Recorder,
    Replay,
)
from gpuwatch.probe.pace import CommandError, Pace, ahead_of
from gpuwatch.probe.patches import Marks
from gpuwatch.probe.telemetry import Telemetry
from gpuwatch.schema import WIRE_VERSION, Bye, Command, Logged
from gpuwatch.store import Store
from gpuwatch.wire.collect.agent import Agent


class Work:
    """A job that ends at a tick, and says how often it was looked at."""

    def __init__(self, ident: str, until: int = 0) -> None:
        self.id = ident
        self.until = until
        self.ticks: list[int] = []
        self.closed = 0

    def work(self, tick: int) -> Outcome | None:
        self.ticks.append(tick)
        if self.until < 0:
            raise RuntimeError("no")
        return Outcome("done", f"at {tick}") if tick >= self.until else None

    def glance(self) -> None:
        return None

    def close(self) -> None:
        self.closed += 1


class Rank:
    """The commands of a rank whose training is played by the test."""

    def __init__(self, *, control: bool = True, step_s: float = 0.0, until: int = 0) -> None:
        self.now_s = 0.0
        self.recorder = Recorder()
        self.desk = Desk(self.recorder, lambda: self.now_s)
        self.jobs: list[Work] = []
        self.asked = 0
        self.until = until
        self.commands = Commands(
            self.desk,
            at_once={"look": self.look, "fetch": self.look},
            later={"set": self.begin, "profile": self.begin},
            control=control,
            step_s=lambda: step_s,
        )

    def look(self, command: Command) -> tuple[str, str]:
        self.asked += 1
        if command.args:
            raise CommandError("look takes no arguments")
        return "", f"seen {self.asked}"

    def begin(self, command: Command) -> tuple[str, Work]:
        self.jobs.append(Work(command.id, self.until))
        return "soon", self.jobs[-1]

    def send(self, ident: str, verb: str = "set", ttl_s: float = 10.0, **args: Any) -> Any:
        return self.commands.answer(Command(WIRE_VERSION, ident, verb, args=args, ttl_s=ttl_s))

    def step(self, fetches: bool = True) -> None:
        """One step of the training: an optimizer step, and the fetch that begins the next."""
        self.recorder.optimizer_end(1)
        if self.desk.due:
            self.desk.stepped(1)
        if fetches and self.desk.due:
            self.desk.fetching()

    def fresh(self) -> list[tuple[str, str, str]]:
        self.commands.collect()
        return [(r.id, r.status, r.message) for r in self.commands.fresh()[0]]


def test_a_command_waits_for_the_next_boundary_and_is_done_there() -> None:
    rank = Rank()
    rank.step()
    assert not rank.desk.due
    reply = rank.send("a")
    assert (reply.status, reply.message) == ("accepted", "soon")
    rank.desk.fetching()
    assert rank.jobs[0].ticks == []  # in the middle of a step
    rank.step()
    assert rank.jobs[0].ticks == [2]
    assert not rank.desk.due
    assert rank.fresh() == [("a", "done", "at 2")]
    assert rank.fresh() == []


def test_a_loop_that_does_not_fetch_has_its_boundary_at_the_optimizer() -> None:
    rank = Rank()
    rank.send("a")
    for _ in range(3):
        rank.step(fetches=False)
    assert rank.jobs[0].ticks == [2]  # the first end may be one of several optimizers


def test_where_the_loop_says_its_steps_nothing_else_is_a_boundary() -> None:
    rank = Rank()
    rank.recorder.step()
    rank.send("a")
    rank.step()
    assert rank.jobs[0].ticks == []
    rank.recorder.step()
    rank.desk.said()
    assert rank.jobs[0].ticks == [2]


def test_the_same_id_again_is_answered_and_not_done_again() -> None:
    rank = Rank()
    rank.send("a")
    assert rank.send("a").status == "accepted"
    rank.step()
    rank.commands.collect()
    assert (rank.send("a").status, rank.send("a").message) == ("done", "at 1")
    assert len(rank.jobs) == 1
    assert rank.send("b", "look") == rank.send("b", "look")
    assert rank.asked == 1


def test_what_waits_is_never_forgotten_and_the_rest_is_bounded() -> None:
    rank = Rank()
    rank.send("first")
    for n in range(600):
        rank.send(f"bad {n}", "nonsense")
        rank.send(f"look {n}", "look")
    assert rank.send("first").status == "accepted"
    assert len(rank.jobs) == 1
    kept = len(rank.commands._answers) + len(rank.commands._large)
    assert kept <= 256 + 8
    asked = rank.asked
    rank.send("piece", "fetch")
    rank.send("piece", "fetch")
    assert rank.asked == asked + 2  # 256 pieces would be 50 MB


def test_so_many_wait_and_no_more() -> None:
    rank = Rank()
    assert {rank.send(str(n)).status for n in range(WAITING)} == {"accepted"}
    refused = rank.send("one too many")
    assert (refused.status, refused.message) == ("error", f"busy: {WAITING} commands wait already")
    rank.step()
    rank.commands.collect()
    assert rank.send("later").status == "accepted"


@pytest.mark.parametrize(("step_s", "lives"), [(0.1, False), (5.0, True)])
def test_a_command_has_a_time_to_live_from_its_receipt(step_s: float, lives: bool) -> None:
    rank = Rank(step_s=step_s)
    rank.send("a", ttl_s=10.0)
    rank.now_s = 12.0
    rank.step()
    ((ident, status, message),) = rank.fresh()
    assert (ident, status) == ("a", "done" if lives else "error")
    assert lives or message.startswith("expired: ")
    assert rank.jobs[0].closed == (0 if lives else 1)


def test_in_a_hang_a_command_is_answered_when_its_time_is_over() -> None:
    rank = Rank()
    for n in range(WAITING):
        rank.send(str(n), ttl_s=10.0)
    rank.now_s = 9.0
    assert rank.fresh() == []
    rank.now_s = 11.0
    rank.commands.collect()
    assert rank.send("0").message.startswith("expired: no step boundary came")
    assert [job.closed for job in rank.jobs] == [1] * WAITING
    assert rank.send("later").status == "accepted"  # their places are free
    rank.step()
    assert [job.ticks for job in rank.jobs] == [[]] * WAITING + [[1]]
    assert [job.closed for job in rank.jobs] == [1] * WAITING + [0]
    rank.desk.close()
    assert [status for _, status, _ in rank.fresh() + rank.fresh()] == ["error"] * 16 + ["done"]


def test_the_goodbye_does_not_wait_for_a_profile_that_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marks = Marks(Recorder(), pytest.fail)
    telemetry = Telemetry(
        marks._recorder, marks, name="", control=False, notices=[], warn=pytest.fail
    )
    said: list[str] = []

    class Sockets:
        def publish(self, frame: bytes) -> None:
            said.append("bye" if decode_rank_frame(frame).bye else "frame")

        def close(self) -> None:
            said.append("closed")

    monkeypatch.setattr(telemetry, "_open", Sockets)
    monkeypatch.setattr(telemetry._profiles, "close", lambda: said.append("waited"))
    telemetry._bye = Bye("finished")
    telemetry._stop = True
    telemetry._serve()
    assert said == ["bye", "waited", "closed"]


def test_what_fails_is_an_answer_and_the_desk_goes_on() -> None:
    rank = Rank(until=-1)
    rank.send("a")
    rank.step()
    rank.until = 0
    rank.send("b")
    rank.step()
    (_, status, message), (_, other, _) = rank.fresh()
    assert (status, message, other) == ("error", "it failed: RuntimeError: no", "done")


def test_the_end_of_the_training_answers_what_waits() -> None:
    rank = Rank(until=100)
    rank.send("held")
    rank.step()
    rank.send("not taken up")
    rank.desk.close()
    ended = "the training has ended before it was done"
    assert rank.fresh() == [("held", "error", ended), ("not taken up", "error", ended)]
    assert not rank.desk.due


@pytest.mark.parametrize(
    ("verb", "control", "args", "words"),
    [
        ("set", False, {}, "does not allow control"),
        ("dance", True, {}, "does not know the verb 'dance'; it knows fetch, look, profile, set"),
        ("look", True, {"x": 1}, "look takes no arguments"),
    ],
)
def test_what_is_refused_says_why(
    verb: str, control: bool, args: dict[str, Any], words: str
) -> None:
    rank = Rank(control=control)
    reply = rank.send("a", verb, **args)
    assert reply.status == "error"
    assert words in reply.message
    assert not rank.jobs
    assert rank.send("b", "profile").status == "accepted"  # reading is always allowed


def test_each_status_is_logged_once_but_for_pieces_and_pasts() -> None:
    rank = Rank()
    rank.send("a", knob="speed", value=3)
    rank.send("b", "fetch")
    rank.send("c", "look", x=1)
    rank.step()
    rank.send("a", knob="speed", value=3)
    rank.commands.collect()
    logged = rank.commands.fresh()[1]
    assert [(c.id, c.verb, c.args, c.status) for c in logged] == [
        ("a", "set", "speed 3", "accepted"),
        ("c", "look", "x=1", "error"),
        ("a", "set", "speed 3", "done"),
    ]
    assert rank.commands.past() == logged
    assert rank.commands.fresh() == ((), ())


def test_an_idle_desk_costs_a_test_of_a_flag() -> None:
    rank = Rank()
    desk = rank.desk

    def tested(count: int) -> None:
        for _ in range(count):
            if desk.due:
                desk.fetching()

    def bare(count: int) -> None:
        for _ in range(count):
            pass

    def quickest_s(call: Callable[[int], None]) -> float:
        best = 1.0
        for _ in range(20):
            began = time.thread_time()
            call(10_000)
            best = min(best, time.thread_time() - began)
        return best / 10_000

    # Two of them a step; ten times as much as on a machine that is not busy.
    assert quickest_s(tested) - quickest_s(bare) < 0.3e-6 / 2
    assert desk.fetches == 0


# --- steps and ticks ---------------------------------------------------------------------------


def test_ticks_become_steps() -> None:
    pace = Pace(step=10, tick=42, per_step=2)
    assert [pace.step_at(tick) for tick in (42, 43, 44)] == [10, 10, 11]
    assert pace.tick_of(13) == 48
    with pytest.raises(CommandError, match="step 10 has begun already: this rank is at step 10"):
        ahead_of(10, pace)
    with pytest.raises(CommandError, match="over 10,000 steps ahead"):
        ahead_of(20_000, pace)
    ahead_of(11, pace)


def play(recorder: Recorder, steps: int, optimizers: int = 1, said: bool = False) -> None:
    for _ in range(steps):
        now = recorder.clock
        recorder.push((FETCH_BEGIN, now(), "loader", False))
        recorder.push((FETCH_END, now(), 1, None))
        for key in range(optimizers):
            recorder.push((BACKWARD_BEGIN, now()))
            recorder.push((BACKWARD_END, now(), False))
            recorder.push((7, now(), key))
            recorder.optimizer_end(key)
        if said:
            recorder.step()


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("said", [False, True])
def test_the_pace_is_that_of_the_records(optimizers: int, said: bool) -> None:
    recorder = Recorder()
    replay = Replay(recorder)
    play(recorder, 5, optimizers, said)
    replay.catch_up()
    pace = replay.pace(0)
    tick = recorder.said if said else recorder.attempts
    play(recorder, 3, optimizers, said)
    later = recorder.said if said else recorder.attempts
    # The next fetch is the boundary that closes the step which is open now.
    recorder.push((FETCH_BEGIN, recorder.clock(), "loader", False))
    replay.catch_up()
    assert pace.step_at(later) == replay.accountant.index
    assert pace.step_at(tick) == replay.accountant.index - 3


# --- the store ---------------------------------------------------------------------------------


def test_the_store_shows_what_became_of_commands() -> None:
    store = Store()
    accepted = Logged(1.0, "a", "set", "num_workers 7", "accepted", "num_workers 1 -> 7")
    done = Logged(2.0, "a", "set", "num_workers 7", "done", "num_workers 1 -> 7 from now on")
    refused = Logged(3.0, "b", "set", "num_workers -1", "error", "not from 0")
    for seq, logged in enumerate([(accepted,), (done, refused)], 1):
        frames = [rank_frame(seq, rank=rank, commands=logged) for rank in range(5)]
        store.apply(node_frame(seq, frames), time.monotonic())
    snapshot = rank_frame(2, rank=3, snapshot=True, commands=(accepted, done, refused))
    store.apply(node_frame(3, [snapshot]), time.monotonic())
    view = store.view()
    texts = [(event.text, event.severity) for event in view.events]
    assert ("ranks 0-4: set num_workers 1 -> 7 from now on: done", "note") in texts
    assert ("ranks 0-4: set num_workers -1: error: not from 0", "warning") in texts
    assert sum("accepted" in text for text, _ in texts) == 1
    assert [c.status for c in view.runs[0].ranks[3].commands] == ["accepted", "done", "error"]


# --- the node process --------------------------------------------------------------------------


def test_a_command_for_all_ranks_reaches_each_of_them() -> None:
    agent = object.__new__(Agent)
    agent._replies = []
    sent: list[Any] = []
    there = ["rank 0", "rank 1", "rank 2"]

    def send(rank: Any, command: Command) -> bool:
        sent.append(rank)
        return rank in there

    agent._targets = lambda command: ["rank 0", "rank 1", "rank 2"]  # type: ignore[assignment,method-assign,return-value]
    agent._send = send  # type: ignore[method-assign]
    agent._obey(b"", Command(WIRE_VERSION, "a", "set"))
    assert sent == there
    assert agent._replies == []
    there.clear()
    agent._obey(b"", Command(WIRE_VERSION, "b", "set"))
    (reply,) = agent._replies
    assert (reply.id, reply.status) == ("b", "error")
