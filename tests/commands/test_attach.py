"""`gpuwatch attach`: what a target means, and two ranks on two machines that share this one."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import cast

import psutil
import pytest
import support
from builders import node_frame, rank_frame
from sshd import an_sshd, free_port, needs_sshd

from gpuwatch.commands import remote
from gpuwatch.commands.remote import (
    SSH_ARGV,
    RemoteSession,
    make_room,
    parse_target,
    parse_via,
)
from gpuwatch.errors import AgentError, TargetError
from gpuwatch.frames import decode_node_frame
from gpuwatch.schema import NodeFrame
from gpuwatch.store import RankView
from gpuwatch.wire.collect import JobKey, Pipe, PipeTarget, TcpTarget, TcpWay, agent_presence

SLEEPER = str(Path(__file__).parent.parent / "probe" / "sleeper.py")
RUN = "twohosts"


# --- targets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "aim", "label", "run"),
    [
        ("ssh://node1", ["node1"], "ssh://node1", ""),
        ("ssh://node1/", ["node1"], "ssh://node1", ""),
        ("ssh://me@node1:2222", ["-p", "2222", "me@node1"], "ssh://me@node1:2222", ""),
        ("ssh://node1:llama", ["node1"], "ssh://node1", "llama"),
        ("ssh://node1/12345", ["node1"], "ssh://node1", "12345"),
        ("ssh://node1:22/llama", ["-p", "22", "node1"], "ssh://node1:22", "llama"),
        ("ssh://node1:22:llama", ["-p", "22", "node1"], "ssh://node1:22", "llama"),
        ("ssh://[fe80::1%eth0]:22", ["-p", "22", "fe80::1%eth0"], "ssh://[fe80::1%eth0]:22", ""),
    ],
)
def test_what_an_ssh_target_means(
    monkeypatch: pytest.MonkeyPatch, text: str, aim: list[str], label: str, run: str
) -> None:
    monkeypatch.delenv("GPUWATCH_SSH", raising=False)
    target = parse_target(text)
    assert target.argv == (*SSH_ARGV, *aim, "gpuwatch agent --stdio")
    assert (target.label, target.run) == (label, run)
    assert target.reach == " ".join(("ssh", *aim))


@pytest.mark.parametrize(
    "text",
    [
        "node1",
        "ssh://",
        "ssh://-oProxyCommand=reboot",
        "ssh://-v",
        "ssh://-l@node1",
        "ssh://node1;reboot",
        "ssh://node1 reboot",
        "ssh://node1:0",
        "ssh://node1:99999",
        "http://node1",
        "tcp://node1:5555",
        "tcp://node1",
        "tcp://node1:0",
        "tcp://me@node1:5555",
        "tcp://\x1b[2J:1",
        "ssh://\x1b[2J",
    ],
)
def test_what_is_no_target_is_one_sentence(text: str) -> None:
    with pytest.raises(TargetError) as caught:
        parse_target(text)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "host", "port", "run"),
    [
        ("tcp://node1:5555", "node1", 5555, ""),
        ("tcp://node1:5555/", "node1", 5555, ""),
        ("tcp://10.0.0.7:5555/12345", "10.0.0.7", 5555, "12345"),
        ("tcp://[fe80::1%eth0]:5555:llama", "fe80::1%eth0", 5555, "llama"),
    ],
)
def test_what_a_tcp_target_means(text: str, host: str, port: int, run: str) -> None:
    key = JobKey(b"p" * 40, b"s" * 40)
    target = parse_target(text, key=key)
    assert isinstance(target, TcpTarget)
    assert (target.host, target.port, target.run, target.key) == (host, port, run, key)
    assert target.label == text[: text.index("5555") + 4]
    assert "sss" not in repr(target)
    with pytest.raises(TargetError, match="--key FILE"):
        parse_target(text)


def test_commands_in_between_are_words_and_no_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWATCH_SSH", "tsh ssh --proxy 'a b'")
    assert parse_target("ssh://node1", "/opt/gw").argv == (
        *("tsh", "ssh", "--proxy", "a b", "node1"),
        "/opt/gw agent --stdio",
    )
    target = parse_via("kubectl exec -i 'a pod' -- ", "python3 -m gpuwatch")
    assert target.argv == (
        *("kubectl", "exec", "-i", "a pod", "--"),
        *("python3", "-m", "gpuwatch", "agent", "--stdio"),
    )
    assert target.label == "kubectl exec -i 'a pod'"
    for text in ("", "   ", "kubectl 'exec"):
        with pytest.raises(TargetError):
            parse_via(text)


def test_targets_that_cannot_be_reached_are_a_sentence_each(rundir: Path) -> None:
    missing = "/nowhere/to/be/found"
    targets = ["--via", "false", "--via", missing, "ssh://nowhere.invalid"]
    refuses = "sh -c 'echo Permission denied, x; exit 9'"
    done = support.gpuwatch(rundir, "attach", "--json", *targets, GPUWATCH_SSH=refuses)
    assert (done.returncode, done.stdout) == (3, "")
    lines = done.stderr.strip().splitlines()
    assert sorted(lines) == [
        f"gpuwatch: {missing}: there is no {missing!r} on this machine",
        "gpuwatch: false: it ended without a word (exit status 1); to see more, type: false",
        "gpuwatch: ssh://nowhere.invalid: Permission denied, x (exit status 9)",
    ]


def test_a_run_of_this_machine_or_a_machine_without_its_ssh(rundir: Path) -> None:
    done = support.gpuwatch(rundir, "attach", "node1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "gpuwatch: no run 'node1' on this machine; another machine is written ssh://node1\n"
    )


# --- one store for several pipes ---------------------------------------------------------------


@pytest.fixture
def session() -> Iterator[RemoteSession]:
    with attached([]) as made:
        yield made


def apply(session: RemoteSession, pipe: str, data: bytes, received_s: float = 0.0) -> None:
    """Hand a frame on as a pipe does; which one is all that counts of it."""
    session._on_frame(cast("Pipe", pipe), data, decode_node_frame(data), received_s)


def test_machines_of_one_name_are_told_apart_and_one_machine_twice_is_one(
    session: RemoteSession,
) -> None:
    for pipe, incarnation in (("a", "x"), ("b", "y"), ("c", "x"), ("a", "z")):
        apply(session, pipe, node_frame(1, node="pod", incarnation=incarnation))
    assert [n.node for n in session.view().nodes] == ["pod", "pod (2)"]


def test_a_connection_that_keeps_losing_is_asked_for_the_past_less_and_less(
    session: RemoteSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    now_s = 1000.0
    monkeypatch.setattr(session, "_send", lambda _way, _command: asked.append(now_s))
    for tick in range(1200):  # two minutes in which every other frame is lost
        now_s = 1000.0 + tick / 10
        apply(session, "a", node_frame(tick, [rank_frame(2 * tick)]), now_s)
    waits = [later - earlier for earlier, later in pairwise(asked)]
    assert len(asked) <= 8
    assert waits == sorted(waits)
    assert waits[-1] > 30


def test_after_a_pause_of_the_monitor_few_ranks_are_asked_at_a_time_and_in_the_end_all(
    session: RemoteSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, int | None]] = []
    now_s = 1000.0
    monkeypatch.setattr(session, "_send", lambda _way, command: asked.append((now_s, command.rank)))
    ranks = range(2000)
    apply(session, "a", node_frame(1, [rank_frame(1, rank=rank) for rank in ranks]), now_s)
    assert not asked
    for tick in range(400):
        now_s = 1001.0 + tick / 10
        seq = 9 + tick  # the frames between are lost, of all ranks at once
        frames = [rank_frame(seq, rank=rank) for rank in ranks] if tick < 2 else []
        apply(session, "a", node_frame(seq, frames), now_s)
    assert sorted(rank or 0 for _, rank in asked) == list(ranks)
    most = max(sum(first <= at < first + 1 for at, _ in asked) for first in range(1001, 1041))
    assert 200 < most < 400
    assert 20 < asked[-1][0] - asked[0][0] < 40


def test_a_far_side_that_names_ranks_without_end_has_few_of_them_waiting(
    session: RemoteSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_KEPT_RANKS", 100)
    monkeypatch.setattr(remote, "_ASKS", 0)  # it is nobody's turn
    for seq in (1, 9):  # the frames between are missing
        frames = [rank_frame(seq, rank=rank) for rank in range(1000)]
        apply(session, "a", node_frame(seq, frames), 1000.0 + seq)
    assert 0 < len(session._to_ask) <= 100


def test_so_many_targets_as_there_are_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (256, 1024)
    new: list[tuple[int, int]] = []
    monkeypatch.setattr(remote.resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(remote.resource, "setrlimit", lambda _, pair: new.append(pair))
    make_room(10)
    assert not new
    make_room(200)
    assert new == [(928, 1024)]
    with pytest.raises(TargetError, match=r"300 targets need 1,328 open files"):
        make_room(300)
    # 1,250 nodes over TCP; a limit of 4,096 is the hard one of some clusters.
    limits = (1024, 8192)
    make_room(0, 1250)
    assert new[-1] == (6378, 8192)
    limits = (1024, 4096)
    with pytest.raises(TargetError, match=r"1250 targets need 6,378 open files"):
        make_room(0, 1250)


# --- two machines ------------------------------------------------------------------------------


def program(directory: Path) -> str:
    """The gpuwatch of one machine: its own run directory."""
    return shlex.join(["env", f"GPUWATCH_DIR={directory}", *support.GPUWATCH])


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Path]]:
    """Two run directories, each with one of the two ranks of a run."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(support.run_directory()) for _ in range(2)]
        for rank, directory in enumerate(found):
            env = support.environment(
                directory,
                RANK=str(rank),
                WORLD_SIZE="2",
                GPUWATCH_RUN_ID=RUN,
                SECONDS="150",
                WATCH="1",
            )
            stack.enter_context(support.process([sys.executable, SLEEPER], env))
        yield found


@contextlib.contextmanager
def attached(targets: list[PipeTarget]) -> Iterator[RemoteSession]:
    session = RemoteSession(targets)
    try:
        yield session
    finally:
        session.close()


def rank_of(session: RemoteSession, rank: int) -> RankView | None:
    run = session.view().run(RUN)
    return next((r for r in run.ranks if r.rank == rank), None) if run is not None else None


def steps(session: RemoteSession, rank: int) -> int:
    found = rank_of(session, rank)
    return found.steps if found is not None else 0


def both_train(session: RemoteSession) -> bool:
    found = [rank_of(session, rank) for rank in range(2)]
    return all(r is not None and r.state == "training" and r.window for r in found)


def has_sampler(session: RemoteSession) -> bool:
    view = session.view()
    return bool(view.nodes) and all(
        r is not None and r.process is not None for r in (rank_of(session, n) for n in range(2))
    )


def no_steps_are_missing_or_double(session: RemoteSession) -> bool:
    for number in range(2):
        rank = rank_of(session, number)
        if rank is None or rank.lost:
            return False
        indices = [r.index for r in rank.window]
        assert indices == list(range(indices[0], indices[0] + len(indices)))
    return True


def listening(process: psutil.Process) -> set[str]:
    """What a process listens to: `python addr(ip='127.0.0.1', port=5700)`."""
    return {
        f"{process.name()} {c.laddr}"
        for c in process.net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    }


@pytest.fixture
def pytests_own() -> set[str]:
    """What this process listened to before: a plugin of pytest has a socket for its counts."""
    return listening(psutil.Process())


def listeners(directories: list[Path], pytests_own: set[str]) -> set[str]:
    """Sockets of the internet that our processes have: this one, its children, the far sides."""
    ours = [psutil.Process(), *psutil.Process().children(recursive=True)]
    names = {f"GPUWATCH_DIR={directory}" for directory in directories}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environ = Path(f"/proc/{process.pid}/environ").read_bytes().decode("utf-8", "replace")
            if names & set(environ.split("\0")):
                ours.append(process)
    assert len(ours) > 2 * len(directories)
    found: set[str] = set()
    for process in ours:
        with contextlib.suppress(psutil.Error):
            if process.name() != "sshd":  # the test's own: the far machine's door
                found |= listening(process)
    return found - pytests_own


def test_two_machines_are_one_job_and_a_lost_one_comes_back(
    machines: list[Path], tmp_path: Path, pytests_own: set[str]
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    through = f'test -e {gate} || {{ echo the gate is closed >&2; exit 1; }}; exec "$@"'
    targets = [
        parse_via("env --", program(machines[0])),
        parse_via(shlex.join(["sh", "-c", through, "x"]), program(machines[1])),
    ]
    with attached(targets) as session:
        support.wait_until(lambda: both_train(session), 30, "both ranks")
        support.wait_until(lambda: has_sampler(session), 10, "their samplers")
        run = session.view().run(RUN)
        assert run is not None
        assert (run.world_size, len(run.ranks), len(session.view().runs)) == (2, 2, 1)

        # A command reaches the rank it names.
        asked = session.send("stack", RUN, 1)

        def answered() -> bool:
            rank = rank_of(session, 1)
            return rank is not None and any(r.id == asked and r.data for r in rank.replies)

        support.wait_until(answered, 5, "stacks of rank 1")

        # The way to the second machine is cut, and stays so.
        gate.unlink()
        pipe = session.pipes[1]
        assert pipe.pid is not None
        os.kill(pipe.pid, signal.SIGKILL)
        support.wait_until(lambda: pipe.trouble.startswith("the gate is closed"), 10, "a word")
        # The pipe to the first one is open; the node process behind it does not answer.
        presence = agent_presence(machines[0])
        assert presence is not None
        os.kill(presence.pid, signal.SIGSTOP)
        try:
            trouble = "does not answer (is it stopped?)"
            support.wait_until(lambda: trouble in session.pipes[0].trouble, 5, trouble)
            assert session.view().link == "lost"
        finally:
            os.kill(presence.pid, signal.SIGCONT)
        support.wait_until(lambda: session.view().link == "live", 5, "an answer")
        support.wait_until(
            lambda: (r := rank_of(session, 1)) is not None and r.state == "silent", 10, "silent"
        )
        view = session.view()
        cut = rank_of(session, 1)
        assert cut is not None
        assert cut.state_reason == f"no contact with {pipe.target.label}"
        assert cut.phase_age_s < cut.age_s  # it is not said to stand where it was seen last
        assert view.link == "live"
        assert view.notices[0] == f"{pipe.target.label}: the gate is closed (exit status 1)"
        before = steps(session, 0)
        support.wait_until(lambda: steps(session, 0) > before + 5, 5, "the other goes on")

        gate.touch()
        before = steps(session, 1)
        support.wait_until(lambda: steps(session, 1) > before, 12, "back again")
        support.wait_until(lambda: both_train(session), 5, "both ranks")
        support.wait_until(lambda: no_steps_are_missing_or_double(session), 8, "no gap")
        assert pipe.attached == 2
        assert session.view().notices == ()
        told = [e.text for e in session.view().events if e.text.startswith(pipe.target.label)]
        assert told[0] == f"{pipe.target.label}: attached"
        assert told[-1] == f"{pipe.target.label}: attached again"
        assert not listeners(machines, pytests_own)
        pids = [p.pid for p in session.pipes]
        began_s = time.monotonic()
        session.close()
        assert time.monotonic() - began_s < 1.0
        assert not any(pid and psutil.pid_exists(pid) for pid in pids)


# --- many nodes --------------------------------------------------------------------------------

FAKE_RANK = str(Path(__file__).parent.parent / "wire" / "fake_rank.py")
TESTS = str(Path(__file__).parent.parent)

OLD = """
import gpuwatch.wire.collect.pipe as pipe
from gpuwatch.commands import main
pipe.Stdio._obey = lambda self, frame: self._link.send(pipe.decode_command(frame))
main()
"""
"""A far side from before there were wishes: whatever it is told it tells the node process."""


class Tapped:
    """A session, and the frames that came to it."""

    def __init__(self, target: PipeTarget) -> None:
        self.frames: list[NodeFrame] = []
        self.session = RemoteSession(
            [target], tap=lambda data: self.frames.append(decode_node_frame(data))
        )

    def rank(self, rank: int = 0, run: str = RUN) -> RankView | None:
        found = self.session.view().run(run)
        ranks = found.ranks if found is not None else ()
        return next((r for r in ranks if r.rank == rank), None)

    def state(self, rank: int = 0, run: str = RUN) -> str:
        found = self.rank(rank, run)
        return found.state if found is not None else ""

    def numbers(self) -> list[int]:
        """The numbers of node frames, those that are in others included."""
        return [seq for f in self.frames for seq in range(f.seq - f.merged, f.seq + 1)]


@contextlib.contextmanager
def tapped(
    target: PipeTarget, monkeypatch: pytest.MonkeyPatch, *, many: bool = False
) -> Iterator[Tapped]:
    with monkeypatch.context() as patch:
        patch.setattr(remote, "MANY", 0 if many else 32)
        made = Tapped(target)
    try:
        yield made
    finally:
        made.session.close()


def test_of_many_nodes_a_frame_a_second_is_asked_for_over_every_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    piped = PipeTarget("a", ("false",), "a")
    called = TcpTarget("tcp://127.0.0.1:1", "127.0.0.1", 1, JobKey(b"a" * 40, b"b" * 40))
    for many, wished_s in ((2, 0.0), (1, remote.MANY_INTERVAL_S)):
        monkeypatch.setattr(remote, "MANY", many)
        with attached([piped, called]) as session:
            pipe, way = session.pipes
            assert isinstance(pipe, Pipe)
            assert isinstance(way, TcpWay)
            assert pipe._interval_s == wished_s
            assert way._calm is bool(wished_s)


def test_a_pipe_that_is_asked_for_it_brings_all_in_a_tenth_of_the_frames(
    machines: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = parse_via("env --", program(machines[0]))
    old = shlex.join(["env", f"GPUWATCH_DIR={machines[0]}", sys.executable, "-P", "-c", OLD])
    with (
        tapped(target, monkeypatch) as often,
        tapped(target, monkeypatch, many=True) as calm,
        tapped(parse_via("env --", old), monkeypatch, many=True) as refused,
    ):
        three = (often, calm, refused)
        support.wait_until(lambda: all(one.state() == "training" for one in three), 30, "it trains")
        before = [len(one.frames) for one in three]
        began_s = time.monotonic()
        support.wait_until(lambda: len(calm.frames) >= before[1] + 6, 30, "six frames")
        assert time.monotonic() - began_s > 3.5
        came = [len(one.frames) - at for one, at in zip(three, before, strict=True)]
        assert came[0] > 4 * came[1]
        assert came[2] > 4 * came[1]
        for one in three:
            numbers = one.numbers()
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            rank = one.rank()
            assert rank is not None
            assert (rank.lost, one.session.view().lost) == (0, 0)
            indices = [record.index for record in rank.window]
            assert indices == list(range(indices[0], indices[0] + len(indices)))
        assert {frame.merged for frame in (*often.frames, *refused.frames)} == {0}
        assert sum(frame.merged for frame in calm.frames) > 4 * came[1]
        # What is asked is answered at once, by an old far side as well.
        for one in (calm, refused):
            asked = one.session.send("stack", RUN, 0)
            support.wait_until(
                lambda one=one, asked=asked: any(  # type: ignore[misc]
                    reply.id == asked and reply.data for reply in getattr(one.rank(), "replies", ())
                ),
                10,
                "stacks",
            )


def test_a_rank_that_falls_silent_or_dies_is_shown_about_as_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(support.run_directory())
        env = support.environment(directory, PYTHONPATH=TESTS, GPUWATCH_RUN_ID=RUN)
        ranks = [
            stack.enter_context(support.process([sys.executable, FAKE_RANK, str(rank), "2"], env))
            for rank in range(2)
        ]
        target = parse_via("env --", program(directory))
        often = stack.enter_context(tapped(target, monkeypatch))
        calm = stack.enter_context(tapped(target, monkeypatch, many=True))
        both = (often, calm)
        support.wait_until(
            lambda: all(one.state(n) == "training" for one in both for n in (0, 1)), 30, "training"
        )
        support.wait_until(lambda: any(f.merged > 5 for f in calm.frames), 10, "a frame of many")

        def later_s(rank: int, state: str) -> float:
            """How much later the calm one has it than the other."""
            seen_s: dict[Tapped, float] = {}

            def look() -> bool:
                for one in both:
                    if one.state(rank) == state:
                        seen_s.setdefault(one, time.monotonic())
                return len(seen_s) == 2

            support.wait_until(look, 15, state)
            return seen_s[calm] - seen_s[often]

        ranks[0].send_signal(signal.SIGSTOP)
        assert later_s(0, "silent") < 2.5
        stopped = calm.rank(0)
        assert stopped is not None
        assert "stopped by a signal" in stopped.state_reason
        # It stays so from frame to frame, and the other one trains.
        until_s = time.monotonic() + 2.5
        while time.monotonic() < until_s:
            assert (calm.state(0), calm.state(1)) == ("silent", "training")
            time.sleep(0.05)
        ranks[0].send_signal(signal.SIGCONT)
        assert later_s(0, "training") < 2.5
        ranks[1].kill()
        assert later_s(1, "gone") < 2.5
        ranks[0].terminate()
        assert later_s(0, "ended") < 2.5
        assert calm.session.view().lost == 0


def far_sides(directories: list[Path]) -> int:
    """How many far ends of pipes run."""
    found = [line for d in directories for line in support.processes_of(d)]
    return sum(line.strip().endswith("agent --stdio") for line in found)


@pytest.mark.terminal
@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux on this machine")
def test_the_screen_shows_both_and_says_what_a_third_lacks(machines: list[Path]) -> None:
    vias = [f"env GPUWATCH_DIR={directory}" for directory in machines]
    argv = [
        *support.GPUWATCH,
        "attach",
        *("--remote-command", shlex.join(support.GPUWATCH)),
        *("--via", vias[0], "--via", vias[1], "--via", "false"),
    ]
    tmux = support.Tmux(machines[0], 150, 45)
    try:
        tmux.start(shlex.join(argv), support.environment(machines[0]))
        tmux.wait_for("2 nodes x 1 ranks", 20)
        tmux.wait_for("false: it ended without a word", 10)
        assert far_sides(machines) == 2
        tmux.keys("q")
        support.wait_until(lambda: far_sides(machines) == 0, 3, "their end")
    finally:
        tmux.close()


def test_one_picture_of_two_machines_as_json(machines: list[Path]) -> None:
    vias = [f"env GPUWATCH_DIR={directory}" for directory in machines]
    ways = ["--via", vias[0], "--via", vias[1], "--via", "false"]
    done = support.gpuwatch(
        machines[0], "attach", "--json", *ways, "--remote-command", shlex.join(support.GPUWATCH)
    )
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert (run["run"], [r["rank"] for r in run["ranks"]]) == (RUN, [0, 1])
    assert done.stderr.startswith("gpuwatch: false: it ended without a word")


# --- a real sshd -------------------------------------------------------------------------------


@needs_sshd
def test_two_ranks_behind_a_real_sshd(
    machines: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pytests_own: set[str],
) -> None:
    port = free_port()
    known = tmp_path / "known_hosts"
    own = [
        *("-F", "none", "-i", str(tmp_path / "user"), "-o", "IdentitiesOnly=yes"),
        *("-o", "IdentityAgent=none", "-o", f"UserKnownHostsFile={known}"),
        *("-o", "GlobalKnownHostsFile=none", "-o", "StrictHostKeyChecking=yes"),
    ]
    monkeypatch.setenv("GPUWATCH_SSH", shlex.join([*SSH_ARGV, *own]))
    address = f"ssh://127.0.0.1:{port}"
    with an_sshd(tmp_path, port):
        # What is wrong with the login is said, with what to type.
        with attached([parse_target(address)]) as session, pytest.raises(AgentError) as caught:
            session.settled_view()
        assert "is not known yet; type once: ssh -p" in str(caught.value)
        host = " ".join((tmp_path / "host.pub").read_text().split()[:2])
        known.write_text(f"[127.0.0.1]:{port} {host}\n")
        with (
            attached([parse_target(address, "/nowhere/gpuwatch")]) as session,
            pytest.raises(AgentError) as caught,
        ):
            session.settled_view()
        assert "there is no '/nowhere/gpuwatch' on 127.0.0.1" in str(caught.value)

        targets = [parse_target(address, program(directory)) for directory in machines]
        with attached(targets) as session:
            support.wait_until(lambda: both_train(session), 30, "both ranks")
            support.wait_until(lambda: has_sampler(session), 10, "their samplers")
            children = [p.pid for p in session.pipes]
            os.kill(children[1] or 0, signal.SIGKILL)
            support.wait_until(lambda: session.pipes[1].attached == 2, 15, "back again")
            before = steps(session, 1)
            support.wait_until(lambda: steps(session, 1) > before, 5, "steps go on")
            support.wait_until(lambda: no_steps_are_missing_or_double(session), 8, "no gap")
            assert not listeners(machines, pytests_own)
        assert not any(pid and psutil.pid_exists(pid) for pid in children)
        authorized = tmp_path / "authorized"
        authorized.write_text("")
        with attached(targets[:1]) as session, pytest.raises(AgentError) as caught:
            session.settled_view()
        assert "ssh-copy-id -p" in str(caught.value)
