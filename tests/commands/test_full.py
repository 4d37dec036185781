"""A run directory without room: each command names the cause and the place, and what to do."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import support
from smalldisk import fill, small_run_directory

from gpuwatch.commands import room
from gpuwatch.commands.doctor import environment_checks
from gpuwatch.commands.room import no_room, why_unwritable
from gpuwatch.errors import AgentError
from gpuwatch.wire.collect import link, make_key
from gpuwatch.wire.publish import write_atomic


def said_of(directory: Path) -> str:
    return f"no space left in {directory}: remove something there (df {directory} says"


@pytest.fixture
def full() -> Iterator[Path]:
    """A run directory on a file system of 32 kB that is full; nobody was there before."""
    with small_run_directory(32) as directory:
        fill(directory)
        yield directory


def test_every_command_says_that_there_is_no_space_and_where(full: Path, tmp_path: Path) -> None:
    for argv in (
        ["status"],
        ["diagnose"],
        ["agent"],
        ["agent", "--detach"],
        ["attach", "--json", "local"],
    ):
        done = support.gpuwatch(full, *argv)
        assert (done.returncode, done.stdout) == (3, ""), argv
        assert said_of(full) in done.stderr, argv
        assert "set GPUWATCH_DIR to another directory" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert "gpuwatch: gpuwatch" not in done.stderr
    # What it tried leaves nothing behind.
    assert not [path.name for path in full.iterdir() if path.name.startswith(".")]

    key, log = str(tmp_path / "key"), tmp_path / "log"
    make_key(key)
    argv = [*support.GPUWATCH, "agent", "--listen", "127.0.0.1:0", "--key", key]
    with support.process(argv, support.environment(full), output=log):
        support.wait_until(lambda: said_of(full) in support.text_of(log), 20, "a line")
        assert support.text_of(log).count(said_of(full)) == 1
        # There is room again: all is well without a word of ours.
        (full / "full").unlink()
        support.wait_until(lambda: support.agent_presence(full) is not None, 20, "a node process")
    assert support.gpuwatch(full, "status").returncode == 0


def test_it_is_seen_before_anything_is_written(
    rundir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert no_room(rundir) == ""
    assert not list(rundir.iterdir())

    outcome = [0]

    def write(_number: int, _data: bytes) -> int:
        if outcome[0] < 0:
            raise OSError(-outcome[0], os.strerror(-outcome[0]))
        return outcome[0]

    monkeypatch.setattr(room.os, "write", write)
    for outcome[0], begin in (
        (-errno.ENOSPC, said_of(rundir)),
        (100, said_of(rundir)),  # the last page of a file system
        (-errno.EDQUOT, f"your quota is used up in {rundir}: remove something"),
        (-errno.EROFS, f"nothing can be written in {rundir} (Read-only file system): set "),
    ):
        assert no_room(rundir).startswith(begin)
        assert "set GPUWATCH_DIR to another directory, for the training as well" in no_room(rundir)
        (check,) = [c for c in environment_checks() if c.metric == "run directory"]
        assert check.state == "error"
        assert f"{check.reason}: {check.remedy}" == no_room(rundir)
        assert not list(rundir.iterdir())


def test_a_file_system_without_inodes_is_told_apart(
    rundir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found:
        f_files = 100
        f_favail = 0

    monkeypatch.setattr(room.os, "statvfs", lambda _: Found)
    assert why_unwritable(rundir, errno.ENOSPC).startswith(
        f"no inodes left in {rundir}: remove something there (df -i {rundir} says"
    )


def test_a_node_process_that_does_not_come_up_is_quoted(
    rundir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_START_S", 2.0)

    def why(script: str) -> str:
        with pytest.raises(AgentError) as caught:
            link.ensure_agent(rundir, ["sh", "-c", script])
        return str(caught.value)

    log = f"{rundir}/agent.log"
    assert why("true") == f"the node process did not come up, and has said nothing in {log}"
    said = 'printf "a\n\ngpuwatch: b\033[2J\n" >$GPUWATCH_DIR/agent.log'
    assert why(said) == (f"the node process did not come up: b\ufffd[2J (more in {log})")
    refused = why("echo gpuwatch: no space left in /x >&2; exit 3")
    assert refused == "the node process cannot be started: no space left in /x"


def test_a_file_that_cannot_be_written_leaves_no_half_of_it(
    rundir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_number: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(OSError, match="No space left"):
            write_atomic(rundir / "agent.json", b"x")
    assert not list(rundir.iterdir())


def test_a_file_that_is_full_is_not_called_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpuwatch.commands import doctor
    from gpuwatch.commands.cli import cli

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(doctor, "ask_sampler", fails)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"], prog_name="gpuwatch")
    assert ended.value.code == 3
    assert (
        capsys.readouterr().err == "gpuwatch: a file cannot be written: No space left on device\n"
    )
