"""The commands as a shell calls them."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import support

from gpuwatch.schema import PHASES

TESTS = str(Path(__file__).parent.parent)
FAKE_RANK = str(Path(__file__).parent.parent / "wire" / "fake_rank.py")


def gpuwatch(
    rundir: Path, *argv: str, expect: int = 0, timeout_s: float = 60, **env: str
) -> subprocess.CompletedProcess[str]:
    done = support.gpuwatch(rundir, *argv, timeout_s=timeout_s, **env)
    assert done.returncode == expect, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def one_sentence(text: str) -> str:
    """The last line, which says it all: what usage errors print before it is usage."""
    assert text.strip()
    return text.strip().splitlines()[-1]


@pytest.mark.process
def test_version(rundir: Path) -> None:
    import gpuwatch as package

    assert gpuwatch(rundir, "--version").stdout == f"gpuwatch {package.__version__}\n"


@pytest.mark.process
def test_nothing_runs(rundir: Path) -> None:
    document = json.loads(gpuwatch(rundir, "status", "--json").stdout)
    assert document["schema"] == 1
    assert document["runs"] == []
    assert document["gpus"] == []
    assert document["gpus_reason"]
    assert document["host"]["cores"] == os.cpu_count()
    assert document["host"]["cpu_percent"]["state"] == "ok"
    assert json.loads(gpuwatch(rundir, "--json").stdout).keys() == document.keys()
    assert json.loads(gpuwatch(rundir, "runs", "--json").stdout) == {"schema": 1, "runs": []}
    judged = json.loads(gpuwatch(rundir, "diagnose", "--json", "--fail-on", "note").stdout)
    assert (judged["run"], judged["findings"], judged["abstained"]) == (None, [], [])
    assert "no run of yours" in gpuwatch(rundir, "status").stdout
    assert "no run of yours" in gpuwatch(rundir, "diagnose").stdout
    assert gpuwatch(rundir, "runs").stdout == ""


@pytest.mark.process
@pytest.mark.parametrize("command", ["status", "diagnose"])
def test_a_target_that_is_missing(rundir: Path, command: str) -> None:
    done = gpuwatch(rundir, command, "nowhere", expect=2)
    assert one_sentence(done.stderr) == (
        "gpuwatch: no run 'nowhere' here; gpuwatch runs lists those there are"
    )
    assert done.stdout == ""


@pytest.mark.process
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nonsense"], "No such option"),
        (["nonsense"], "No such command"),
        (["diagnose", "--for", "soon"], "is no duration"),
        (["diagnose", "--fail-on", "fear"], "'fear' is not one of"),
        (["demo", "nonsense"], "no scenario 'nonsense'"),
        (["--hz", "99"], "is not in the range"),
    ],
)
def test_wrong_usage_is_one_sentence(rundir: Path, argv: list[str], words: str) -> None:
    assert words in one_sentence(gpuwatch(rundir, *argv, expect=2).stderr)


@pytest.mark.process
def test_a_run_directory_that_cannot_be_used(rundir: Path) -> None:
    rundir.chmod(0o755)
    words = one_sentence(gpuwatch(rundir, "status", expect=3).stderr)
    assert "is open to other users; type: chmod 700" in words
    long = rundir / ("x" * 100)
    assert "too long" in one_sentence(gpuwatch(long, "status", expect=3).stderr)
    file = rundir / "file"
    file.touch()
    assert "directory" in one_sentence(gpuwatch(file, "status", expect=3).stderr)


@pytest.mark.process
def test_a_reader_that_has_had_enough_is_no_error(rundir: Path) -> None:
    done = subprocess.run(
        f"{' '.join(support.GPUWATCH)} status --json | true",
        shell=True,
        env=support.environment(rundir),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.process
def test_without_a_terminal_the_screen_is_a_text(rundir: Path) -> None:
    done = gpuwatch(rundir)
    assert "no run of yours" in done.stdout
    assert "this is no terminal" in done.stderr


@pytest.mark.process
def test_two_ranks_in_every_shape(rundir: Path) -> None:
    def rank(number: int, run: str) -> Any:
        env = support.environment(rundir, PYTHONPATH=TESTS, GPUWATCH_RUN_ID=run)
        return support.process([support.PYTHON, FAKE_RANK, str(number), "2"], env)

    with rank(0, "first"), rank(1, "first"):
        support.wait_until(lambda: len(support.rank_presences(rundir)) == 2, 30, "ranks")
        document = json.loads(gpuwatch(rundir, "status", "--json").stdout)
        (run,) = document["runs"]
        assert (run["run"], run["state"], run["world_size"]) == ("first", "running", 2)
        assert [r["rank"] for r in run["ranks"]] == [0, 1]
        for shown in run["ranks"]:
            assert list(shown["phases_ms"]) == list(PHASES)
            known = [v for v in shown["phases_ms"].values() if v is not None]
            assert sum(known) == pytest.approx(shown["step_ms"], rel=0.01)
            missing = {n for n, v in shown["phases_ms"].items() if v is None}
            assert set(shown["phases_na"]) == missing
            assert all(shown["phases_na"].values())
            assert shown["loader"] == {
                "batch_wall_ms": None,
                "batch_cpu_ms": None,
                "collate_ms": None,
                "reason": "no DataLoader fetch was seen in a steady step",
                "queue_depth": None,
                "queue_capacity": None,
            }
            assert shown["state"] == "training"
            assert shown["lost"] == 0
            assert set(shown["ledger"]) == {
                "train_s",
                "data_wait_s",
                "comm_s",
                "eval_s",
                "checkpoint_s",
                "lost_s",
                "wall_s",
                "goodput",
            }
        text = gpuwatch(rundir, "status").stdout
        assert "2 of 2 ranks" in text
        assert "n/a" in text
        with rank(0, "second"):
            support.wait_until(lambda: len(support.rank_presences(rundir)) == 3, 30, "ranks")
            listed = json.loads(gpuwatch(rundir, "runs", "--json").stdout)
            assert {r["run"] for r in listed["runs"]} == {"first", "second"}
            judged = gpuwatch(rundir, "diagnose", "--json")
            assert json.loads(judged.stdout)["run"] == "second"
            assert "there are also first" in judged.stderr
            named = gpuwatch(rundir, "diagnose", "first", "--json", "--for", "1s")
            assert json.loads(named.stdout)["run"] == "first"
            assert named.stderr == ""
