"""Commands for one picture, with TARGETs on other machines: behind a stand-in for ssh."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import support
from click.testing import CliRunner, Result

from gpuwatch.commands.cli import cli

TESTS = Path(__file__).parents[1]
FAKE_RANK = str(TESTS / "wire" / "fake_rank.py")
COMMANDS = ["status", "runs", "diagnose", "record"]
PROGRAM = shlex.join(support.GPUWATCH)
REFUSED = "gpuwatch: ssh://shut: the login is refused (permission denied), and no password"


def an_ssh(machines: dict[str, Path], *, on_path: bool = True) -> str:
    """A GPUWATCH_SSH that leads to machines by their names, and to `shut`, which lets nobody in.

    What is to be run there is read by a shell, as ssh does; gpuwatch may be on its PATH.
    """
    cases = "".join(f"{name}) GPUWATCH_DIR={path};;\n" for name, path in machines.items())
    shut = "shut) echo 'x@shut: Permission denied (publickey).' >&2; exit 255;;\n"
    known = f'gpuwatch() {{ exec {PROGRAM} "$@"; }}\n' if on_path else "PATH=/nowhere\n"
    script = f'{known}case "$0" in\n{cases}{shut}*) exit 99;;\nesac\nexport GPUWATCH_DIR\neval "$1"'
    return shlex.join(["sh", "-c", script])


@pytest.fixture(scope="module")
def machines() -> Iterator[dict[str, Path]]:
    """The run directories of two machines; on each lives one of the two ranks of a run."""
    with contextlib.ExitStack() as stack:
        made = {}
        for rank, name in enumerate(("far", "farther")):
            made[name] = directory = stack.enter_context(support.run_directory())
            environ = support.environment(
                directory, PYTHONPATH=str(TESTS), GPUWATCH_RUN_ID="far-run"
            )
            argv = [support.PYTHON, FAKE_RANK, str(rank), "2"]
            stack.enter_context(support.process(argv, environ))
        support.wait_until(
            lambda: all(len(support.rank_presences(path)) == 1 for path in made.values()),
            20,
            "the ranks",
        )
        yield made


@pytest.fixture
def here(machines: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This machine, on which nothing runs, with an ssh that leads to the other ones."""
    with support.run_directory() as directory:
        for name, value in support.environment(directory).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("GPUWATCH_SSH", an_ssh(machines))
        yield directory


def test_an_output_without_room_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            cli.main(["--help"], prog_name="gpuwatch")
    assert ended.value.code == 3
    said = capsys.readouterr().err
    assert said == "gpuwatch: the output cannot be written: No space left on device\n"


def gpuwatch(*argv: str) -> Result:
    return CliRunner().invoke(cli, argv)


def test_one_picture_of_another_machine(here: Path) -> None:
    done = gpuwatch("status", "ssh://far/far-run", "--json")
    assert done.exit_code == 0, done.output
    (run,) = json.loads(done.stdout)["runs"]
    assert (run["run"], [r["rank"] for r in run["ranks"]]) == ("far-run", [0])
    assert run["ranks"][0]["step_ms"] == pytest.approx(100.0)

    listed = gpuwatch("runs", "ssh://far")
    assert listed.exit_code == 0, listed.output
    assert "far-run" in listed.stdout

    judged = gpuwatch("diagnose", "ssh://far/far-run", "--json")
    assert judged.exit_code == 0, judged.output
    assert json.loads(judged.stdout)["run"] == "far-run"

    for command in COMMANDS:
        missing = gpuwatch(command, "ssh://far/nothing")
        assert missing.exit_code == 2
        assert missing.stderr == (
            "gpuwatch: no run 'nothing' there; leave it out to see those there are\n"
        )
    assert not list(here.iterdir())


def test_a_run_of_another_machine_is_recorded(here: Path, tmp_path: Path) -> None:
    file = tmp_path / "far.gpuwatch"
    done = gpuwatch("record", "ssh://far", "-o", str(file), "--for", "1s")
    assert done.exit_code == 0, done.output
    assert "recording run far-run (1 of 2 ranks)" in done.stderr
    again = gpuwatch("status", str(file), "--json")
    (run,) = json.loads(again.stdout)["runs"]
    assert run["ranks"][0]["steps"] > 5


@pytest.mark.parametrize("command", COMMANDS)
def test_a_machine_that_cannot_be_reached_is_one_sentence(
    here: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("GPUWATCH_SSH", "sh -c 'echo Permission denied, x >&2; exit 255'")
    done = gpuwatch(command, "ssh://far")
    assert done.exit_code == 3
    assert done.stdout == ""
    assert done.stderr.startswith("gpuwatch: ssh://far: ")
    assert "Permission denied" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# --- several machines --------------------------------------------------------------------------


def ranks_in(document: str) -> dict[str, list[int]]:
    return {r["run"]: [k["rank"] for k in r["ranks"]] for r in json.loads(document)["runs"]}


def test_several_machines_are_one_job_and_who_is_missing_is_one_sentence(
    here: Path, tmp_path: Path
) -> None:
    both = ["ssh://far", "ssh://farther"]
    third = [*both, "ssh://shut"]
    for targets, sentences in ((both, 0), (third, 1)):
        done = gpuwatch("status", *targets, "--json")
        assert done.exit_code == 0, done.output
        assert ranks_in(done.stdout) == {"far-run": [0, 1]}
        said = done.stderr.splitlines()
        assert len(said) == sentences
        assert all(line.startswith(REFUSED) for line in said)

    # As text: on stderr alone.
    done = gpuwatch("status", *third)
    assert "2 of 2 ranks" in done.stdout
    assert "shut" not in done.stdout
    assert done.stderr.count(REFUSED) == 1

    done = gpuwatch("runs", *third, "--json")
    assert (done.exit_code, done.stderr.count(REFUSED)) == (0, 1)
    (listed,) = json.loads(done.stdout)["runs"]
    assert (listed["run"], listed["ranks"], listed["world_size"]) == ("far-run", 2, 2)

    done = gpuwatch("diagnose", *third, "--json", "--fail-on", "critical")
    # What the steps of these ranks are made of is one finding, of both.
    assert (done.exit_code, done.stderr.count(REFUSED)) == (1, 1)
    assert [f["ranks"] for f in json.loads(done.stdout)["findings"]] == [[0, 1]]

    file = str(tmp_path / "both.gpuwatch")
    done = gpuwatch("record", *third, "-o", file, "--for", "1s")
    assert (done.exit_code, done.stderr.count(REFUSED)) == (0, 1)
    assert "recording run far-run (2 of 2 ranks)" in done.stderr
    done = gpuwatch("status", file, "--json")
    (run,) = json.loads(done.stdout)["runs"]
    assert [(r["rank"], r["steps"] > 5) for r in run["ranks"]] == [(0, True), (1, True)]

    # attach --json is the same picture.
    done = gpuwatch("attach", *third, "--json")
    assert (done.exit_code, done.stderr.count(REFUSED)) == (0, 1)
    assert ranks_in(done.stdout) == {"far-run": [0, 1]}


def test_who_is_lost_while_a_run_is_recorded_is_named_at_the_end(
    here: Path, machines: dict[str, Path], tmp_path: Path
) -> None:
    once = tmp_path / "once"
    once.touch()
    script = f'rm {once} 2>/dev/null || {{ echo it is shut >&2; exit 1; }}; exec timeout 4 "$@"'
    way = shlex.join(["sh", "-c", script, "x", "env", f"GPUWATCH_DIR={machines['farther']}"])
    file = str(tmp_path / "both.gpuwatch")
    done = gpuwatch(
        *("record", "--via", f"env GPUWATCH_DIR={machines['far']}", "--via", way),
        *("--remote-command", PROGRAM, "-o", file, "--for", "6s"),
    )
    assert done.exit_code == 0, done.output
    first, last = done.stderr.splitlines()
    assert "recording run far-run (2 of 2 ranks)" in first
    assert last.endswith(": it is shut (exit status 1)")
    (run,) = json.loads(gpuwatch("status", file, "--json").stdout)["runs"]
    assert [r["rank"] for r in run["ranks"]] == [0, 1]
    assert run["ranks"][0]["steps"] > 20


@pytest.mark.parametrize("command", COMMANDS)
def test_nobody_that_can_be_reached_is_a_sentence_each(here: Path, command: str) -> None:
    done = gpuwatch(command, "ssh://shut", "--via", "false")
    assert (done.exit_code, done.stdout) == (3, "")
    first, second = done.stderr.splitlines()
    assert first.startswith(REFUSED)
    assert second.startswith("gpuwatch: false: it ended without a word (exit status 1)")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_may_be_where_nobody_answers(here: Path, command: str) -> None:
    done = gpuwatch(command, "ssh://far/other", "ssh://shut")
    assert (done.exit_code, done.stdout) == (3, "")
    first, second = done.stderr.splitlines()
    assert first.startswith(REFUSED)
    assert second == "gpuwatch: no run 'other' on the targets that have answered"


@pytest.mark.parametrize("command", COMMANDS)
def test_any_command_may_lead_there_and_gpuwatch_be_anywhere(
    here: Path,
    machines: dict[str, Path],
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("GPUWATCH_SSH", an_ssh(machines, on_path=False))
    monkeypatch.chdir(tmp_path)
    more = {"record": ["--for", "1s", "-o", str(tmp_path / "file")]}.get(command, ["--json"])
    lost = gpuwatch(command, "ssh://far", *more)
    assert lost.exit_code == 3
    assert "there is no 'gpuwatch' on far" in lost.stderr
    assert "--remote-command /path/to/gpuwatch" in lost.stderr

    ways = ["--via", f"env GPUWATCH_DIR={machines['farther']}", "--remote-command", PROGRAM]
    done = gpuwatch(command, "ssh://far/far-run", *ways, *more)
    assert (done.exit_code, done.stderr.count("gpuwatch: ")) == (0, 0), done.stderr
    if command == "record":
        assert "(2 of 2 ranks)" in done.stderr
    elif command == "status":
        assert ranks_in(done.stdout) == {"far-run": [0, 1]}
    else:
        assert "far-run" in done.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["a", "b"], "'a' may be a run on this machine, and that stands alone"),
        (["--remote-command", "x"], "--remote-command is for ssh:// targets and --via"),
        (["local", "--remote-command", "x"], "--remote-command is for ssh:// targets and --via"),
        (["ssh://far/a", "ssh://farther/b"], "the targets name 2 runs, 'a' and 'b'"),
        (["ssh://far", "--key", "x"], "--key is for tcp:// targets"),
        (["--via", ""], "--via needs a command"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_what_does_not_go_together_is_said(
    here: Path, command: str, argv: list[str], words: str
) -> None:
    done = gpuwatch(command, *argv)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert words in " ".join(done.stderr.split())
    assert not list(here.iterdir())


@pytest.mark.parametrize("command", ["status", "runs", "diagnose"])
def test_a_recording_stands_alone(here: Path, command: str) -> None:
    for argv in (["x.gpuwatch", "ssh://far"], ["--via", "env", "x.gpuwatch"]):
        done = gpuwatch(command, *argv)
        assert done.exit_code == 2
        assert "x.gpuwatch is a recording, and that stands alone" in done.stderr


def test_this_machine_and_its_runs_are_what_they_were(here: Path) -> None:
    for argv, state in ((["nothing"], 2), ([], 0), (["local"], 0)):
        done = gpuwatch("status", *argv)
        assert done.exit_code == state, done.output
    done = gpuwatch("runs", "nothing")
    assert done.stderr == "gpuwatch: no run 'nothing' here; gpuwatch runs lists those there are\n"


def test_the_commands_take_what_attach_takes() -> None:
    def taken(name: str) -> dict[str, tuple[Any, ...]]:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        return {
            p.name: (p.opts, p.nargs, getattr(p, "multiple", None), getattr(p, "help", None))
            for p in command.params
            if p.name in {"targets", "via", "remote_command", "key"}
        }

    assert len(taken("attach")) == 4
    for command in COMMANDS:
        assert taken(command) == taken("attach")
