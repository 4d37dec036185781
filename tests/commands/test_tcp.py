"""`gpuwatch keygen`, `agent --listen`, `run --listen` and `attach tcp://` as people use them."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import support
from click.testing import CliRunner

from gpuwatch.commands import agent, beside, remote
from gpuwatch.commands.agent import Lines, say_where
from gpuwatch.commands.beside import is_first_on_node, start_door
from gpuwatch.commands.cli import cli
from gpuwatch.commands.lookout import start_apart
from gpuwatch.commands.remote import RemoteSession, open_session, parse_target
from gpuwatch.errors import TargetError
from gpuwatch.wire import collect
from gpuwatch.wire.collect import JobKey, TcpTarget, listen, load_key, make_key
from gpuwatch.wire.collect import way as way_of
from gpuwatch.wire.collect.listener import Address

pytestmark = pytest.mark.process

FAKE_RANK = str(Path(__file__).parent.parent / "wire" / "fake_rank.py")
TESTS = str(Path(__file__).parent.parent)
WHERE = re.compile(r"gpuwatch: listening on 127\.0\.0\.1, port (\d+); to look at it, type: ")


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("key") / "key")
    make_key(path)
    return path


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["agent", "--listen", ":0"], "--listen needs --key FILE"),
        (["agent", "--listen", "127.0.0.1:0"], "127.0.0.1 is reached by everybody"),
        (["agent", "--key", "KEY"], "--key is for --listen"),
        (["agent", "--listen", ":0", "--key", "KEY", "--stdio"], "leave --stdio"),
        (["agent", "--listen", "nonsense", "--key", "KEY"], "is no address to listen on"),
        (["agent", "--listen", ":0", "--key", "/nowhere/key"], "there is no key file"),
        (["agent", "--listen", "192.0.2.1:0", "--key", "KEY"], "no address of this machine"),
        (["run", "--listen", ":0", "--", "touch", "MARK"], "--listen needs --key FILE"),
        (["run", "--listen", "x", "--key", "KEY", "--", "touch", "MARK"], "is no address"),
        (["run", "--listen", ":0", "--key", "BAD", "--", "touch", "MARK"], "no key file of gpu"),
        (["attach", "tcp://127.0.0.1:1"], "needs the key of the job"),
        (["attach", "ssh://node1", "--key", "KEY"], "--key is for tcp:// targets"),
        (["attach", "tcp://127.0.0.1", "--key", "KEY"], "write tcp://host:port"),
        (["status", "tcp://127.0.0.1:1"], "--key FILE"),
        (["status", "ssh://node1", "--key", "KEY"], "--key is for tcp:// targets"),
        (["record", "--key", "KEY"], "--key is for tcp:// targets"),
        (["runs", "tcp://127.0.0.1:1", "--key", "BAD"], "no key file of gpu"),
        (["keygen", "KEY"], "is there already"),
        (["keygen"], "Missing argument 'FILE'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    argv: list[str], words: str, key: str, rundir: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    bad.write_text("no key")
    bad.chmod(0o600)
    places = {"KEY": key, "BAD": str(bad), "MARK": str(tmp_path / "mark")}
    done = CliRunner().invoke(cli, [places.get(word, word) for word in argv])
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "mark").exists()
    assert not list(rundir.iterdir())


def test_a_key_is_made_once(tmp_path: Path) -> None:
    path = str(tmp_path / "key")
    done = CliRunner().invoke(cli, ["keygen", path])
    assert (done.exit_code, done.stdout) == (0, "")
    assert path in done.stderr
    assert load_key(path).secret.decode() not in done.stderr


@pytest.mark.parametrize(
    ("environ", "first"),
    [
        ({}, True),
        ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}, False),
        ({"RANK": "8", "WORLD_SIZE": "16", "LOCAL_RANK": "0"}, True),
        ({"SLURM_NTASKS": "16", "SLURM_PROCID": "8", "SLURM_LOCALID": "0"}, True),
        ({"SLURM_NTASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}, False),
        ({"SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}, True),
        ({"SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "WORLD_SIZE": "16"}, False),
        ({"SLURM_NTASKS": "16", "SLURM_LOCALID": "0", "WORLD_SIZE": "16"}, True),
        ({"SLURM_NTASKS": "1", "SLURM_LOCALID": "3"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, False),
        ({"MPI_LOCALRANKID": "1"}, False),
        ({"MPI_LOCALRANKID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"LOCAL_RANK": "1"}, False),
    ],
)
def test_there_is_one_door_on_a_node(environ: dict[str, str], first: bool) -> None:
    assert is_first_on_node(environ) is first


@pytest.mark.parametrize("command", ["status", "runs", "diagnose", "record"])
def test_one_picture_over_tcp_takes_a_key(
    command: str, key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[object] = []

    def refuse(targets: list[str], **given: object) -> None:
        asked.extend((targets, given["key"]))
        raise TargetError("enough")

    monkeypatch.setattr(remote, "open_session", refuse)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, [command, "tcp://node1:5577/llama", "--key", key])
    assert (done.exit_code, done.stderr) == (2, "gpuwatch: enough\n")
    assert asked == [["tcp://node1:5577/llama"], load_key(key)]


def test_where_a_door_is_can_be_typed() -> None:
    here = re.escape(f"attach tcp://{socket.gethostname()}:")
    for host in ("", "0.0.0.0"):
        with listen(Address(host, 0)) as listener:
            assert re.search(rf"{here}\d+ --key", say_where(listener, host))
            assert re.search(rf"{here}\d+ --key", say_where(listener, "::"))
            assert "attach tcp://[::1]:" in say_where(listener, "::1")


def test_who_keeps_a_door_may_stop_reading() -> None:
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        filled = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                filled += os.write(writing, bytes(4096))
        os.set_blocking(writing, True)
        say = Lines(writing)
        say("one")
        say("two")
        while filled:
            filled -= len(os.read(reading, filled))
        say("three")
        say("f" * 10_000)
        lines = os.read(reading, 65536).decode().splitlines()
        assert lines[:2] == ["gpuwatch: 2 lines are left out", "gpuwatch: three"]
        assert lines[2].startswith("gpuwatch: fff")
        assert len(lines[2]) < 4096
        assert len(lines) == 3
        Lines(None)("nobody")
    finally:
        os.close(reading)
        os.close(writing)


# --- a door of its own -------------------------------------------------------------------------


def port_in(log: Path) -> int:
    """The port that a door says it listens on."""
    support.wait_until(lambda: WHERE.search(support.text_of(log)) is not None, 20, "a port")
    found = WHERE.search(support.text_of(log))
    assert found is not None
    return int(found[1])


@contextlib.contextmanager
def fake_ranks(rundir: Path) -> Iterator[None]:
    env = support.environment(rundir, PYTHONPATH=TESTS, GPUWATCH_RUN_ID="fake")
    with contextlib.ExitStack() as stack:
        for rank in range(2):
            argv = [sys.executable, FAKE_RANK, str(rank), "2"]
            stack.enter_context(support.process(argv, env))
        yield


@contextlib.contextmanager
def attached(targets: Sequence[str], key: str) -> Iterator[RemoteSession]:
    session, _ = open_session(targets, key=load_key(key))
    try:
        yield session
    finally:
        session.close()


def ranks_of(session: RemoteSession, state: str = "training") -> list[int]:
    return [r.rank for run in session.view().runs for r in run.ranks if r.state == state]


def answered(session: RemoteSession) -> set[str]:
    return {reply.id for run in session.view().runs for r in run.ranks for reply in r.replies}


def test_a_door_that_is_killed_and_opened_again_on_its_port(
    rundir: Path, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way_of, "LONGEST_S", 0.5)
    log = tmp_path / "log"
    env = support.environment(rundir)

    def door(port: int) -> "contextlib.AbstractContextManager[subprocess.Popen[bytes]]":
        log.unlink(missing_ok=True)
        argv = [*support.GPUWATCH, "agent", "--listen", f"127.0.0.1:{port}", "--key", key]
        return support.process(argv, env, output=log)

    with fake_ranks(rundir):
        with door(0) as first:
            port = port_in(log)
            target = f"tcp://127.0.0.1:{port}"
            done = support.gpuwatch(rundir, "attach", "--json", target, "--key", key)
            assert (done.returncode, done.stderr) == (0, "")
            (run,) = json.loads(done.stdout)["runs"]
            assert (run["run"], [r["rank"] for r in run["ranks"]]) == ("fake", [0, 1])

            second = CliRunner().invoke(
                cli, ["agent", "--listen", f"127.0.0.1:{port}", "--key", key]
            )
            assert second.exit_code == 2
            assert second.stderr.startswith(f"gpuwatch: cannot listen on 127.0.0.1:{port}: the")
            assert second.stderr.count("\n") == 1

            session = open_session([target], key=load_key(key))[0]
            way = session.pipes[0]
            support.wait_until(lambda: ranks_of(session) == [0, 1], 20, "both ranks")
            asked = session.send("stack", "fake", 1)
            support.wait_until(lambda: asked in answered(session), 10, "an answer")
            first.kill()
            first.wait(10)
        try:
            support.wait_until(lambda: way.trouble.startswith("nobody listens"), 15, "a word")
            support.wait_until(lambda: ranks_of(session, "silent") == [0, 1], 15, "silence")
            assert session.view().notices[0].startswith(f"{target}: nobody listens on port {port}")
            with door(port):
                support.wait_until(lambda: way.attached == 2, 30, "back again")
                support.wait_until(lambda: ranks_of(session) == [0, 1], 15, "both ranks")
                support.wait_until(lambda: way.had_past, 15, "their past")
                for run_view in session.view().runs:
                    for rank in run_view.ranks:
                        steps = [record.index for record in rank.window]
                        assert steps == list(range(steps[0], steps[0] + len(steps)))
                events = [e.text for e in session.view().events if e.text.startswith(target)]
                assert events[-1] == f"{target}: attached again"
        finally:
            session.close()


def test_pipes_and_ports_on_one_screen(rundir: Path, key: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = support.environment(rundir)
    argv = [*support.GPUWATCH, "agent", "--listen", "127.0.0.1:0", "--key", key]
    with fake_ranks(rundir), support.process(argv, env, output=log):
        target = f"tcp://127.0.0.1:{port_in(log)}/fake"
        with attached([target, "local", "tcp://127.0.0.1:1"], key) as session:
            labels = [way.target.label for way in session.pipes]
            assert labels == [target.removesuffix("/fake"), "local", "tcp://127.0.0.1:1"]
            support.wait_until(
                lambda: all(way.had_past for way in session.pipes[:2]), 20, "both pasts"
            )
            # The same node process twice is one node, and nothing counts double.
            support.wait_until(lambda: ranks_of(session) == [0, 1], 10, "both ranks")
            assert len(session.view().nodes) == 1
            assert session.view().link == "live"
            assert session.view().notices[0].startswith("tcp://127.0.0.1:1: nobody listens")
    assert parse_target(target, key=JobKey(b"", b"")).run == "fake"


def test_a_key_may_be_named_by_the_environment(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWATCH_KEY", key)
    target = parse_target("tcp://node1:5555")
    assert isinstance(target, TcpTarget)
    assert target.key == load_key(key)
    monkeypatch.setenv("GPUWATCH_KEY", f"{key}.not")
    with pytest.raises(TargetError, match="there is no key file"):
        parse_target("tcp://node1:5555")


# --- a door beside a command -------------------------------------------------------------------


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def doors_of(rundir: Path) -> list[str]:
    return [line for line in support.processes_of(rundir) if " run --listen" in line]


def test_a_door_beside_a_command_is_there_as_long_as_that_runs(
    rundir: Path, key: str, tmp_path: Path
) -> None:
    env = support.environment(rundir, PYTHONPATH=TESTS)
    run = [*support.GPUWATCH, "run", "--listen"]
    errors = tmp_path / "errors"
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            [*run, "127.0.0.1:0", "--key", key, "--no-card", sys.executable, FAKE_RANK, "0", "1"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as command,
    ):
        try:
            port = port_in(errors)
            with attached([f"tcp://127.0.0.1:{port}"], key) as session:
                support.wait_until(lambda: ranks_of(session) == [0], 20, "the rank")
                # The lookout, which is called the same, ends when it has seen the rank.
                support.wait_until(lambda: len(doors_of(rundir)) == 1, 10, "one door")
                # A port that is taken keeps nothing from running.
                taken = subprocess.run(
                    [*run, f"127.0.0.1:{port}", "--key", key, "sh", "-c", "echo out; exit 7"],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                assert (taken.returncode, taken.stdout) == (7, "out\n")
                assert taken.stderr.splitlines()[-1] == (
                    f"gpuwatch: nobody can attach over TCP: cannot listen on 127.0.0.1:{port}: "
                    "the port is taken; name another one, or port 0 for any that is free"
                )
                os.kill(command.pid, signal.SIGTERM)  # it is the rank itself
                out, _ = command.communicate(timeout=20)
                assert (command.returncode, out) == (0, f"up {command.pid}\n")
                support.wait_until(lambda: ranks_of(session, "ended") == [0], 10, "its last words")
            support.wait_until(lambda: not doors_of(rundir), 10, "the end of the door")
            support.wait_until(lambda: not listens(port), 10, "a free port")
        finally:
            command.kill()
    said = errors.read_text()
    assert said.count("\n") == 2, said
    assert "to look at it, type gpuwatch in another terminal" in said


class StandIn:
    """In place of a door: notes what it was given, says a word, and fails."""

    def __init__(
        self, directory: Path, _argv: object, listener: socket.socket, *_: object, **given: Any
    ) -> None:
        given["say"]("a word")
        seen = {
            "directory": str(directory),
            "listens": listener.getsockname()[1] > 0,
            "kept": min(listener.fileno(), given["until"]) > 2,
            "cwd": os.getcwd(),
        }
        (directory / "seen").write_text(json.dumps(seen))

    def stop(self, *_: object) -> None:
        """Never called."""

    def run(self) -> None:
        raise OSError(24, "Too many open files")


@pytest.mark.parametrize("closed", [(), (0,), (0, 1, 2)])
def test_a_door_needs_no_streams_and_says_in_its_log_why_it_ends(
    closed: tuple[int, ...], key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(collect, "Door", StandIn)
    monkeypatch.setenv("GPUWATCH_DIR", "near")  # from where the command is started
    monkeypatch.chdir(tmp_path)

    def command() -> None:
        for number in closed:
            os.close(number)
        (tmp_path / "said").write_text(start_door(Address("127.0.0.1", 0), load_key(key)))

    start_apart(command)
    log = tmp_path / "near" / "door.log"
    support.wait_until(lambda: support.text_of(log).count("\n") == 2, 20, "two lines")
    assert support.text_of(log) == (
        "gpuwatch: a word\ngpuwatch: the door has ended: OSError: [Errno 24] Too many open files\n"
    )
    assert json.loads((tmp_path / "near" / "seen").read_text()) == {
        "directory": str(tmp_path / "near"),
        "listens": True,
        "kept": True,
        "cwd": "/",
    }
    support.wait_until(lambda: support.text_of(tmp_path / "said") != "", 20, "where it is")
    assert "listening on 127.0.0.1, port " in support.text_of(tmp_path / "said")


def test_a_node_process_in_the_background_keeps_its_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[object] = []

    def refuse(directory: Path, **_: object) -> None:
        seen.append(directory)
        raise collect.AgentRunningError("one is there")

    monkeypatch.setattr(agent, "_detach", seen.append)
    monkeypatch.setattr(collect, "Agent", refuse)
    monkeypatch.setenv("GPUWATCH_DIR", "near")
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli, ["agent", "--detach"]).exit_code == 0
    assert seen == [str(tmp_path / "near" / "agent.log"), tmp_path / "near"]


def test_a_log_begins_anew_when_it_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(beside, "_LOG_BYTES", 1000)
    stderr = os.dup(2)
    try:
        with (tmp_path / "log").open("ab") as log:
            os.dup2(log.fileno(), 2)
        for at in range(200):
            beside._log(f"line {at}")
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    lines = (tmp_path / "log").read_text().splitlines()
    assert 1 < len(lines) < 70
    assert lines[-1] == "gpuwatch: line 199"


def test_why_there_is_no_door_beside_a_command_is_one_sentence(
    rundir: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    late = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))]

    def no_room() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    def said(host: str = "127.0.0.1") -> str:
        sentence = start_door(Address(host, 0), load_key(key))
        assert sentence.startswith("nobody can attach over TCP: ")
        return sentence

    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", no_room)
        assert said().endswith("a process of its own (Resource temporarily unavailable)")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        assert "the first process of a container" in said()
    with monkeypatch.context() as patch:
        patch.setattr(beside, "_PATIENCE_S", 0.05)
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: held.wait(10) and late)
        try:
            assert "slow is looked up in vain; is the name server up?" in said("slow")
        finally:
            held.set()


@pytest.mark.terminal
@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux on this machine")
def test_a_door_beside_a_command_in_a_pane(rundir: Path, key: str) -> None:
    with listen(Address("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [*support.GPUWATCH, "run", "--tui", "--listen", f"127.0.0.1:{port}", "--key", key]
    tmux = support.Tmux(rundir, 120, 40)
    try:
        env = support.environment(rundir, PYTHONPATH=TESTS)
        tmux.start(shlex.join([*argv, sys.executable, FAKE_RANK, "0", "1"]), env)
        with attached([f"tcp://127.0.0.1:{port}"], key) as session:
            support.wait_until(lambda: ranks_of(session) == [0], 40, "the rank")
            for presence in support.rank_presences(rundir):
                os.kill(presence.pid, signal.SIGTERM)
            support.wait_until(lambda: not listens(port), 20, "the end of the door")
        tmux.wait_for("exit code 0", 20)
        tmux.keys("q")
        tmux.wait_for(f"gpuwatch: {sys.executable[:12]}", 20)
    finally:
        for presence in support.rank_presences(rundir):
            os.kill(presence.pid, signal.SIGTERM)
        tmux.close()
