"""The demo, whole: two real ranks, a real fault, the finding that names it."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import support

pytestmark = pytest.mark.distributed


def nothing_is_left(rundir: Path) -> None:
    support.wait_until(
        lambda: not support.processes_of(rundir),
        20,
        f"nothing left running, but {support.processes_of(rundir)}",
    )


def test_headless(rundir: Path) -> None:
    done = subprocess.run(
        [*support.GPUWATCH, "demo", "--headless", "--seconds", "12"],
        env=support.environment(rundir),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == 1
    (run,) = document["runs"]
    assert run["state"] == "running"
    assert [r["rank"] for r in run["ranks"]] == [0, 1]
    for rank in run["ranks"]:
        assert rank["steps"] > 10
        assert rank["window"] > 5
        assert (rank["lost"], rank["dropped"]) == (0, 0)
        known = [v for v in rank["phases_ms"].values() if v is not None]
        assert sum(known) == pytest.approx(rank["step_ms"], rel=0.01)
        assert rank["own_ms"] <= rank["step_ms"]
        assert 0 < rank["data_wait_ratio"] < 1
        assert len(rank["workers"]) >= 1
    found = [f for f in document["findings"] if f["kind"] == "loader_few_workers"]
    assert found, document["findings"]
    hint = found[0]["hints"][0]
    assert hint["knob"] == "num_workers"
    assert hint["from"] == 1
    assert hint["to"] > 1
    assert f"num_workers 1 -> {hint['to']}" in hint["change"]
    low_ms, high_ms = hint["predicted_ms"]
    assert 0 < low_ms < high_ms < run["ranks"][0]["step_ms"]
    assert "SIMULATED" in done.stderr
    nothing_is_left(rundir)


@pytest.fixture
def tmux(rundir: Path) -> Iterator[support.Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    made = support.Tmux(rundir, 160, 45)
    yield made
    made.close()


@pytest.mark.terminal
def test_on_the_screen_until_q(rundir: Path, tmux: support.Tmux) -> None:
    command = f"{' '.join(support.GPUWATCH)} demo; echo ended with $?"
    tmux.start(command, support.environment(rundir))
    shown = tmux.wait_for("num_workers 1 ->", 90)
    assert "rank" in shown
    assert "starves" in shown
    tmux.keys("2")
    tmux.wait_for("slowest own time", 30)
    tmux.keys("4")
    tmux.wait_for("WHY", 30)
    tmux.keys("q")
    tmux.wait_for("ended with 0", 30)
    nothing_is_left_but_the_window(rundir)


def nothing_is_left_but_the_window(rundir: Path) -> None:
    def left() -> list[str]:
        return [c for c in support.processes_of(rundir) if "python" in c]

    support.wait_until(lambda: not left(), 20, f"nothing left running, but {left()}")


def test_ctrl_c_leaves_nothing(rundir: Path) -> None:
    demo = subprocess.Popen(
        [*support.GPUWATCH, "demo", "--headless", "--seconds", "60"],
        env=support.environment(rundir),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        support.wait_until(lambda: len(support.rank_presences(rundir)) == 2, 60, "two ranks")
        time.sleep(1.0)
        demo.send_signal(signal.SIGINT)
        _, err = demo.communicate(timeout=30)
    finally:
        demo.kill()
    assert demo.returncode == 130
    assert "Traceback" not in err
    nothing_is_left(rundir)
