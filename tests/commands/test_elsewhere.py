"""Commands for one picture, with a TARGET on another machine: behind a stand-in for ssh."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import support
from click.testing import CliRunner, Result

from gpuwatch.commands.cli import cli

TESTS = Path(__file__).parents[1]
FAKE_RANK = str(TESTS / "wire" / "fake_rank.py")


@pytest.fixture(scope="module")
def far() -> Iterator[Path]:
    """The run directory of the other machine, where one of the two ranks of a run lives."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(support.run_directory())
        environ = support.environment(directory, PYTHONPATH=str(TESTS), GPUWATCH_RUN_ID="far-run")
        stack.enter_context(support.process([support.PYTHON, FAKE_RANK, "0", "2"], environ))
        support.wait_until(lambda: len(support.rank_presences(directory)) == 1, 20, "the rank")
        yield directory


@pytest.fixture
def here(far: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This machine, on which nothing runs, with an ssh that leads to the other one."""
    with support.run_directory() as directory:
        for name, value in support.environment(directory).items():
            monkeypatch.setenv(name, value)
        program = shlex.join([support.PYTHON, "-P", "-m"])
        script = f"exec env GPUWATCH_DIR={far} {program} $1"
        monkeypatch.setenv("GPUWATCH_SSH", shlex.join(["sh", "-c", script]))
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

    for command in ("status", "runs", "diagnose", "record"):
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


@pytest.mark.parametrize("command", ["status", "runs", "diagnose", "record"])
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
