"""The node process with real sockets and real processes: discovery, relay, loss, death."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import support

from gpuwatch.commands.session import LiveSession
from gpuwatch.store import RankView, RunView
from gpuwatch.wire.collect import agent_presence

FAKE_RANK = str(Path(__file__).parent / "fake_rank.py")
TESTS = str(Path(__file__).parent.parent)


@contextlib.contextmanager
def fake_rank(
    rundir: Path, rank: int = 0, world_size: int = 1, manner: str = "", run: str = "fake"
) -> Iterator[subprocess.Popen[bytes]]:
    env = support.environment(rundir, PYTHONPATH=TESTS, GPUWATCH_RUN_ID=run)
    argv = [sys.executable, FAKE_RANK, str(rank), str(world_size), manner]
    with support.process(argv, env) as started:
        yield started


@pytest.fixture
def session(rundir: Path) -> Iterator[LiveSession]:
    made = LiveSession(rundir)
    yield made
    made.close()


def the_run(session: LiveSession, run: str = "fake") -> RunView | None:
    return session.view().run(run)


def the_rank(session: LiveSession, rank: int = 0) -> RankView | None:
    run = the_run(session)
    return next((r for r in run.ranks if r.rank == rank), None) if run is not None else None


def steps(session: LiveSession) -> int:
    rank = the_rank(session)
    return rank.steps if rank is not None else 0


def agent_pid(rundir: Path) -> int:
    presence = agent_presence(rundir)
    assert presence is not None
    return presence.pid


def test_ranks_are_found_before_and_after_the_monitor(rundir: Path, session: LiveSession) -> None:
    with fake_rank(rundir, 0, 2):
        support.wait_until(lambda: steps(session) > 3, 15, "the first rank")
        with fake_rank(rundir, 1, 2):
            support.wait_until(lambda: the_rank(session, 1) is not None, 10, "the second rank")
            run = the_run(session)
            assert run is not None
            assert (run.world_size, run.state, run.lost) == (2, "running", 0)
            # What it did before anybody watched is there too.
            support.wait_until(
                lambda: (r := the_rank(session)) is not None and r.window[0].index == 0, 5, "past"
            )
            first = run.ranks[0]
            assert first.hello is not None
            assert first.hello.run_name == "a-run"


def test_a_second_monitor_sees_the_past_and_leaves_the_first_one_alone(
    rundir: Path, session: LiveSession
) -> None:
    with fake_rank(rundir):
        support.wait_until(lambda: steps(session) > 10, 15, "steps")
        other = LiveSession(rundir)
        try:
            support.wait_until(
                lambda: (r := the_rank(other)) is not None and r.window[0].index == 0,
                5,
                "the same steps in the other monitor",
            )
            assert not other.started_agent
        finally:
            began_s = time.monotonic()
            other.close()
            assert time.monotonic() - began_s < 1.0
        before = steps(session)
        support.wait_until(lambda: steps(session) > before + 3, 5, "steps go on")
        assert session.view().link == "live"


def test_a_killed_node_process_is_replaced_and_nothing_is_lost(
    rundir: Path, session: LiveSession
) -> None:
    with fake_rank(rundir):
        support.wait_until(lambda: steps(session) > 3, 15, "steps")
        old = agent_pid(rundir)
        os.kill(old, signal.SIGKILL)
        support.wait_until(
            lambda: (p := agent_presence(rundir)) is not None and p.pid != old, 10, "a new one"
        )
        before = steps(session)
        support.wait_until(lambda: steps(session) > before + 5, 10, "steps go on")
        rank = the_rank(session)
        assert rank is not None
        support.wait_until(
            lambda: (r := the_rank(session)) is not None and r.lost == 0, 5, "the gap is healed"
        )
        rank = the_rank(session)
        assert rank is not None
        indices = [r.index for r in rank.window]
        assert indices == list(range(indices[0], indices[0] + len(indices)))
        assert any("is gone" in e.text for e in session.view().events)


def test_a_stopped_node_process_is_said_and_forgiven(rundir: Path, session: LiveSession) -> None:
    with fake_rank(rundir):
        support.wait_until(lambda: steps(session) > 3, 15, "steps")
        pid = agent_pid(rundir)
        os.kill(pid, signal.SIGSTOP)
        try:
            support.wait_until(lambda: session.view().link == "lost", 5, "a word about it")
            assert "does not answer" in session.view().message
            rank = the_rank(session)
            assert rank is not None
            assert rank.state == "training"  # nothing is known of the rank itself
        finally:
            os.kill(pid, signal.SIGCONT)
        support.wait_until(lambda: session.view().link == "live", 5, "live again")
        assert agent_pid(rundir) == pid


def test_a_killed_rank_is_gone_within_four_seconds_and_its_files_too(
    rundir: Path, session: LiveSession
) -> None:
    with fake_rank(rundir) as rank:
        support.wait_until(lambda: steps(session) > 3, 15, "steps")
        rank.send_signal(signal.SIGKILL)
        rank.wait(5)
        began_s = time.monotonic()
        support.wait_until(
            lambda: (r := the_rank(session)) is not None and r.state == "gone", 4, "gone"
        )
        assert time.monotonic() - began_s < 4
        gone = the_rank(session)
        assert gone is not None
        assert "without a goodbye" in gone.state_reason
        assert gone.steps > 3
        support.wait_until(lambda: not list(rundir.glob("rank-*")), 3, "files are cleaned up")
        late = LiveSession(rundir)
        try:
            # Who comes after its death still sees what it did.
            support.wait_until(lambda: steps(late) > 3, 5, "the past of a dead rank")
            seen = the_rank(late)
            assert seen is not None
            support.wait_until(
                lambda: (r := the_rank(late)) is not None and r.state == "gone", 3, "gone there too"
            )
        finally:
            late.close()


def test_a_stopped_rank_is_silent_and_then_back(rundir: Path, session: LiveSession) -> None:
    with fake_rank(rundir) as rank:
        support.wait_until(lambda: steps(session) > 3, 15, "steps")
        rank.send_signal(signal.SIGSTOP)
        support.wait_until(
            lambda: (r := the_rank(session)) is not None and r.state == "silent", 6, "silent"
        )
        seen = the_rank(session)
        assert seen is not None
        assert seen.state_reason == "stopped by a signal"
        late = LiveSession(rundir)
        try:
            support.wait_until(lambda: steps(late) > 3, 5, "the past of a rank that cannot answer")
        finally:
            late.close()
        rank.send_signal(signal.SIGCONT)
        support.wait_until(
            lambda: (r := the_rank(session)) is not None and r.state == "training", 5, "back"
        )


def test_a_goodbye_ends_the_run_and_a_restart_is_a_new_incarnation(
    rundir: Path, session: LiveSession
) -> None:
    with fake_rank(rundir) as rank:
        support.wait_until(lambda: steps(session) > 3, 15, "steps")
        rank.terminate()
        assert rank.wait(5) == 0
        support.wait_until(
            lambda: (r := the_rank(session)) is not None and r.state == "ended", 3, "ended"
        )
    with fake_rank(rundir):
        support.wait_until(
            lambda: (r := the_rank(session)) is not None and r.restarts == 1, 10, "a restart"
        )
        run = the_run(session)
        assert run is not None
        assert run.state == "running"


def test_garbage_and_newer_versions_cost_only_themselves(
    rundir: Path, session: LiveSession
) -> None:
    with fake_rank(rundir, 0, 2, "garbage"), fake_rank(rundir, 1, 2, "newer"):
        support.wait_until(
            lambda: (r := the_rank(session, 1)) is not None and r.steps > 5 and steps(session) > 5,
            15,
            "steps of both",
        )
        notices = " ".join(session.view().notices)
        assert "frames refused" in notices
        run = the_run(session)
        assert run is not None
        assert run.lost == 0


def test_left_over_and_broken_discovery_files(rundir: Path, session: LiveSession) -> None:
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    stale = rundir / f"rank-{dead.pid}-00000000.json"
    stale.write_text(
        f'{{"version":1,"role":"rank","pid":{dead.pid},"started_ticks":1,"boot":"",'
        f'"telemetry":"ipc://{rundir}/x.t","control":"ipc://{rundir}/x.c"}}'
    )
    (rundir / "rank-1-broken.json").write_text("{")
    (rundir / "rank-1-outside.json").write_text(
        '{"version":1,"role":"rank","pid":1,"started_ticks":0,"boot":"",'
        '"telemetry":"tcp://10.0.0.1:1","control":"ipc:///etc/x"}'
    )
    with fake_rank(rundir):
        support.wait_until(lambda: steps(session) > 3, 15, "steps")
        support.wait_until(lambda: not stale.exists(), 5, "the stale file is removed")
        notices = " ".join(session.view().notices)
        assert "2 unreadable discovery files" in notices


def test_a_rank_whose_discovery_file_was_removed_is_heard_again(
    rundir: Path, session: LiveSession
) -> None:
    with fake_rank(rundir, manner="again"):
        support.wait_until(lambda: steps(session) > 3, 15, "steps")
        (file,) = rundir.glob("rank-*.json")
        file.unlink()
        support.wait_until(lambda: bool(list(rundir.glob("rank-*.json"))), 5, "announced again")
        before = steps(session)
        # Long enough for what is left of the old announcement to be called silent.
        support.wait_until(lambda: steps(session) > before + 45, 15, "steps go on")
        rank = the_rank(session)
        assert rank is not None
        assert (rank.state, rank.restarts) == ("training", 0)
        assert rank.window[0].index == 0 or len(rank.window) == 64


def test_a_node_process_whose_file_was_removed_announces_itself_again(
    rundir: Path, session: LiveSession
) -> None:
    support.wait_until(lambda: session.view().link == "live", 15, "a node process")
    pid = agent_pid(rundir)
    (rundir / "agent.json").unlink()
    support.wait_until(lambda: agent_presence(rundir) is not None, 5, "announced again")
    assert agent_pid(rundir) == pid


def test_who_asks_once_sees_a_run_that_has_ended_every_time(
    rundir: Path, session: LiveSession
) -> None:
    with fake_rank(rundir) as rank:
        support.wait_until(lambda: steps(session) > 3, 15, "steps")
        rank.terminate()
        assert rank.wait(5) == 0
    support.wait_until(
        lambda: (r := the_rank(session)) is not None and r.state == "ended", 5, "an end"
    )
    for _ in range(8):
        once = LiveSession(rundir)
        try:
            found = once.settled_view().run("fake")
        finally:
            once.close()
        assert found is not None
        assert found.state == "ended"


def test_commands_reach_the_rank_they_name_and_only_that(
    rundir: Path, session: LiveSession
) -> None:
    with fake_rank(rundir, 0, 2), fake_rank(rundir, 1, 2):
        support.wait_until(lambda: the_rank(session, 1) is not None, 15, "both ranks")
        support.wait_until(lambda: the_rank(session, 0) is not None, 15, "both ranks")
        sent = session.send("stack", "fake", 1)

        def answer() -> list[str]:
            rank = the_rank(session, 1)
            return [r.data for r in rank.replies if r.id == sent] if rank is not None else []

        support.wait_until(lambda: bool(answer()), 5, "an answer")
        assert answer() == ["stack of rank 1"]
        other = the_rank(session, 0)
        assert other is not None
        assert not other.replies


def test_one_node_process_a_directory_and_it_ends_when_idle(rundir: Path) -> None:
    env = support.environment(rundir)
    agent = [*support.GPUWATCH, "agent"]
    with support.process([*agent, "--idle-s", "1.5"], env) as first:
        support.wait_until(lambda: agent_presence(rundir) is not None, 10, "up")
        second = subprocess.run(
            agent, env=env, capture_output=True, text=True, timeout=20, check=False
        )
        assert second.returncode == 1
        assert "already runs" in second.stderr
        assert first.wait(15) == 0
    assert not list(rundir.glob("agent-*"))
    assert agent_presence(rundir) is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["sleep", "1000"], "did not answer"),
        (["false"], "ended with status 1"),
        (["/nowhere/to/be/found"], "cannot be started"),
        (["yes"], "unreadable"),
    ],
)
def test_a_sampler_that_hangs_or_dies_costs_only_readings(
    rundir: Path, tmp_path: Path, argv: list[str], words: str
) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        "from gpuwatch.wire.collect import Agent, sampler_child\n"
        "sampler_child.SILENT_S = 1.0\n"
        "Agent(Path(sys.argv[1]), sampler_argv=sys.argv[2:]).run()\n"
    )
    command = [sys.executable, str(script), str(rundir), *argv]
    with support.process(command, support.environment(rundir)) as agent, fake_rank(rundir):
        support.wait_until(lambda: agent_presence(rundir) is not None, 10, "up")
        session = LiveSession(rundir)
        try:
            support.wait_until(
                lambda: any(words in n.sensors_reason for n in session.view().nodes), 10, words
            )
            support.wait_until(lambda: steps(session) > 3, 10, "steps all the same")
        finally:
            session.close()
        assert agent.poll() is None
