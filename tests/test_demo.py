"""The demo, whole: two real ranks, a real fault, the finding that names it."""

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import support

pytestmark = [pytest.mark.distributed, pytest.mark.alone]


def nothing_is_left(rundir: Path) -> None:
    support.wait_until(
        lambda: not support.processes_of(rundir),
        20,
        f"nothing left running, but {support.processes_of(rundir)}",
    )


def test_headless(rundir: Path) -> None:
    done = support.gpuwatch(rundir, "demo", "--headless", "--seconds", "12", timeout_s=110)
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
@pytest.mark.timeout(360)
def test_on_the_screen_until_q(rundir: Path, tmux: support.Tmux) -> None:
    """The finding, its hint applied to the running training, what came of it, and the end."""
    command = f"{' '.join(support.GPUWATCH)} demo; echo ended with $?"
    tmux.start(command, support.environment(rundir))
    shown = tmux.wait_for("num_workers 1 ->", 90)
    assert "rank" in shown
    assert "starves" in shown
    tmux.keys("2")
    tmux.wait_for("slowest own time", 30)
    tmux.keys("4")
    tmux.wait_for("WHY", 30)
    on_the_page_of_the_loader(tmux)
    before_ms = applied(tmux)
    tmux.keys("Escape")
    tmux.wait_for("resolved at step", 60)
    tmux.keys("1")
    until(
        tmux,
        r"\n step ([\d.,]+) ms │",
        60,
        lambda found: number(found[1]) <= before_ms / 2,
        f"a step of at most half of {before_ms} ms",
    )
    tmux.keys("q")
    tmux.wait_for("ended with 0", 30)
    nothing_is_left_but_the_window(rundir)


def until(
    tmux: support.Tmux,
    pattern: str,
    timeout_s: float,
    holds: Callable[[re.Match[str]], bool] = bool,
    what: str = "",
) -> re.Match[str]:
    """Wait until the window shows the pattern in such a way, and return it."""
    found: re.Match[str] | None = None
    shown = ""

    def there() -> bool:
        nonlocal found, shown
        shown = tmux.screen()
        found = re.search(pattern, shown)
        return found is not None and holds(found)

    try:
        support.wait_until(there, timeout_s, every_s=0.2)
    except AssertionError:
        raise AssertionError(f"no {what or pattern!r} in {timeout_s} s on\n{shown}") from None
    assert found is not None
    return found


def number(text: str) -> float:
    return float(text.replace(",", ""))


def on_the_page_of_the_loader(tmux: support.Tmux) -> None:
    """Open the finding of the loader, whichever is selected: on a busy machine there are others."""
    tmux.keys("Enter")
    for _ in range(6):
        if until(tmux, r"▌F\d+  (\w+) ─", 30)[1] == "loader_few_workers":
            break
        tmux.keys("]")
        time.sleep(1.0)
    # The first steps may say that a few workers more will do: a whole window knows better.
    until(tmux, r"of 64 in the window", 90)
    until(
        tmux,
        r"num_workers 1 -> (\d+): predicted step",
        60,
        lambda found: int(found[1]) >= 3,
        "hint of three workers or more",
    )


def applied(tmux: support.Tmux) -> float:
    """Set what the hint says in the running training, and see what came; returns ms before."""
    tmux.keys("a")
    asked = until(tmux, r"set num_workers 1 -> (\d+) on all ranks of cnn", 30)
    tmux.wait_for("enter sets it", 30)
    tmux.keys("Enter")
    until(tmux, rf"ranks 0, 1 +done +num_workers 1 -> {asked[1]} ", 60)
    # 256 steps are under 20 s on two cores that are idle.
    until(tmux, r"after .* mean of 256 of 256 steps", 150)
    promise = until(
        tmux,
        rf"num_workers 1 -> {asked[1]}: predicted ([\d.,]+?)\.\.([\d.,]+) ms, got ([\d.,]+) ms: "
        r"(as predicted|faster than that|slower than that)",
        10,
    )
    before = until(tmux, r"before +([\d.,]+) (m?s), mean of \d+ steps", 10)
    before_ms = number(before[1]) * (1000 if before[2] == "s" else 1)
    low_ms, high_ms, got_ms = (number(promise[i]) for i in (1, 2, 3))
    assert 0 < low_ms <= high_ms < before_ms
    assert got_ms < before_ms
    # The word is that of the figures, which are rounded to whole milliseconds.
    if promise[4] == "as predicted":
        assert low_ms - 1 <= got_ms <= high_ms + 1
    elif promise[4] == "faster than that":
        assert got_ms <= low_ms + 1
    else:
        assert got_ms >= high_ms - 1
    return before_ms


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
