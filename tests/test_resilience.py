"""Whatever happens to monitors and node processes, the training does not notice."""

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest
import support

from gpuwatch.wire.collect import agent_presence

SCRIPT = str(Path(__file__).parent / "probe" / "sleeper.py")
PAIRS = 2
AFTER_S = 3.0
"""So long do both train on when all that watched is gone."""


def start(rundir: Path, marks: dict[str, Path], **env: str) -> subprocess.Popen[str]:
    files = {name: str(path) for name, path in marks.items()}
    return subprocess.Popen(
        [support.PYTHON, SCRIPT],
        env=support.environment(rundir, **files, **env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_up(training: subprocess.Popen[str]) -> None:
    assert training.stdout is not None
    assert training.stdout.readline() == "up\n"


def steps_of(training: subprocess.Popen[str]) -> int:
    out, _ = training.communicate(timeout=60)
    assert training.returncode == 0
    return int(out.split()[1])


def monitor_pids(rundir: Path) -> list[int]:
    """The monitors' own processes: not the node process, its sampler, or the shells around."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                ours = f"GPUWATCH_DIR={rundir}".encode() in (entry / "environ").read_bytes()
                if ours and b"gpuwatch" in words and b"agent" not in words:
                    found.append(int(entry.name))
    return found


@pytest.mark.terminal
@pytest.mark.alone
@pytest.mark.timeout(240)
def test_stopped_and_killed_monitors_and_a_killed_node_process(
    rundir: Path, tmp_path: Path
) -> None:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    ratios = []
    for pair in range(PAIRS):
        # Both at once, so that the machine is the same for both.
        marks = {name: tmp_path / f"{name}.{pair}" for name in ("GO", "DONE")}
        bare, watched = start(rundir, marks), start(rundir, marks, WATCH="1")
        windows = [support.Tmux(Path(f"{rundir}-{i}"), 100, 30) for i in range(2)]
        stopped: list[int] = []
        try:
            wait_up(bare)
            wait_up(watched)
            marks["GO"].touch()
            for window in windows:
                window.start(" ".join(support.GPUWATCH), support.environment(rundir))
            for window in windows:
                window.wait_for("sleeper", 30)
            first, second = monitor_pids(rundir)
            os.kill(first, signal.SIGSTOP)
            stopped.append(first)
            os.kill(second, signal.SIGKILL)
            agent = agent_presence(rundir)
            assert agent is not None
            time.sleep(1.5)
            os.kill(agent.pid, signal.SIGKILL)
            time.sleep(AFTER_S)
            marks["DONE"].touch()
            ratios.append(steps_of(watched) / steps_of(bare))
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            for window in windows:
                window.close()
            for training in (bare, watched):
                training.kill()
                training.communicate()
    assert statistics.median(ratios) >= 0.7, ratios
