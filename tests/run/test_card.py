"""The card at the end of real runs: written in time, on stderr alone, and never in the way."""

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import support

from gpuwatch.commands.card import MOST_LINES

HERE = Path(__file__).parent
RUN = [*support.GPUWATCH, "run"]
CARDED = str(HERE / "carded.py")


def card_of(text: str) -> list[str]:
    """The lines of the card, which is the last thing that was written."""
    lines = text.splitlines()
    heads = [
        i for i, line in enumerate(lines) if line.startswith("gpuwatch: run") and "steps" in line
    ]
    assert len(heads) == 1, text
    card = lines[heads[0] :]
    assert len(card) <= MOST_LINES
    return card


def row(card: list[str], name: str) -> str:
    found = [line for line in card if line.startswith(f"  {name}")]
    assert found, (name, card)
    return found[0].removeprefix(f"  {name}").strip()


def witnesses(rundir: Path) -> list[int]:
    """Lookouts and what they have become: they let go of the job's directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"GPUWATCH_DIR={rundir}".encode() in (
                entry / "environ"
            ).read_bytes().split(b"\0"):
                words = (entry / "cmdline").read_bytes()
                node = b"agent" in words or b"gpuwatch.sensors" in words
                if os.readlink(entry / "cwd") == "/" and not node:
                    found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.process
def test_how_a_run_ended_is_on_its_card(rundir: Path, tmp_path: Path) -> None:
    def job(manner: str) -> tuple[int, str, str]:
        """Run it with files for its output, and read them the moment it has ended."""
        out, err = tmp_path / f"{manner}.out", tmp_path / f"{manner}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            started = subprocess.Popen(
                [*RUN, "--", support.PYTHON, CARDED, manner],
                env=support.environment(rundir),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )
            code = started.wait(90)
        if manner == "kills":  # nobody is left to wait for it
            support.wait_until(lambda: "verdict" in support.text_of(err), 30, "the card")
            time.sleep(0.2)
        return code, support.text_of(out), support.text_of(err)

    with ThreadPoolExecutor(3) as pool:
        plainly, raises, kills = pool.map(job, ["plainly", "raises", "kills"])

    assert plainly[:2] == (0, "done\n")
    card = card_of(plainly[2])
    assert "1 rank  61 steps" in card[0]
    assert "starves rank 0" in row(card, "verdict")
    assert "data wait" in row(card, "time")
    assert "goodput" in row(card, "time")
    assert "loader_few_workers" in "\n".join(card)
    assert "try  num_workers 1 ->" in "\n".join(card)
    assert "DataLoader(..., num_workers=" in "\n".join(card)
    assert "MB resident" in row(card, "memory")
    assert "one process" in row(card, "n/a")

    assert raises[:2] == (1, "")
    card = card_of(raises[2])
    assert raises[2].index("RuntimeError: on purpose") < raises[2].index("verdict")
    assert row(card, "verdict") == "rank 0 failed first: RuntimeError: on purpose"
    assert "at step 55, in forward" in row(card, "failed")
    assert "MB resident" in row(card, "failed")
    assert row(card, "stack").startswith(f"{CARDED}:")
    assert row(card, "stack").endswith("in end")

    assert kills[:2] == (-signal.SIGKILL, "")
    card = card_of(kills[2])
    assert row(card, "verdict") == "rank 0 failed first: ended without a word"
    assert "last seen at step 5" in row(card, "failed")
    support.wait_until(lambda: not witnesses(rundir), 20, "the end of the witnesses")
    assert not list(rundir.glob("card-*"))


@pytest.mark.distributed
def test_the_rank_that_failed_first_is_named(rundir: Path) -> None:
    done = subprocess.run(
        [*RUN, "--", *support.TORCHRUN, CARDED, "kills"],
        env=support.environment(rundir),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    card = card_of(done.stderr)
    assert "2 ranks" in card[0]
    assert row(card, "verdict") == "rank 1 failed first: ended without a word"
    assert "rank 0 failed in consequence" in row(card, "then")


@pytest.mark.process
def test_a_witness_that_hangs_and_a_reader_that_sleeps_hold_nobody_up(rundir: Path) -> None:
    """Stopped by a signal it answers nothing; a full pipe takes nothing."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        pass
    os.set_blocking(writer, True)
    env = support.environment(rundir)
    began = [
        subprocess.Popen(
            [*RUN, "--", support.PYTHON, CARDED, "plainly"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    ]
    stopped: list[int] = []
    try:
        support.wait_until(lambda: len(list(rundir.glob("card-*.s"))) == 1, 60, "the witness")
        stopped = witnesses(rundir)
        assert len(stopped) == 1
        os.kill(stopped[0], signal.SIGSTOP)
        # Nothing of its own goes to the pipe, so that only our card could be stuck in it.
        began.append(
            subprocess.Popen(
                [support.PYTHON, "-P", "-c", QUIET],
                env={**env, "CARDED": CARDED},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=writer,
            )
        )
        for job in began:
            assert job.wait(60) == 0
        support.wait_until(
            lambda: set(witnesses(rundir)) <= set(stopped), 20, "the witness of the full pipe"
        )
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)
        for job in began:
            job.kill()
            job.wait()
        os.close(reader)
        os.close(writer)


# `gpuwatch run` says a line first, which would wait for the reader as any program's would.
QUIET = """
import os, sys
sys.argv = ["gpuwatch", "run", "--", sys.executable, os.environ["CARDED"], "plainly"]
saved = os.dup(2)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
from gpuwatch.commands import run
before = run._restore_signals
def restore():
    before()
    os.dup2(saved, 2)
run._restore_signals = restore
from gpuwatch.commands.cli import cli
cli()
"""
