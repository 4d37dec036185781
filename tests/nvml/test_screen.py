"""The real screen over the stand-in: a GPU that is lost and comes back, a driver that hangs."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import support
from nvml.stub import GPM, H100, Stub, compiler, library

pytestmark = [
    pytest.mark.terminal,
    pytest.mark.skipif(compiler() is None, reason="no C compiler for the stand-in"),
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]

LOST = "fault 1 * 15"
HANGS_S = 20
HANGS = f"delay 0 nvmlDeviceGetUtilizationRates {HANGS_S}000000"


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    made = Stub(library(), tmp_path)
    made.write("count 2", *H100, *GPM)
    return made


@pytest.fixture
def tmux(rundir: Path, stub: Stub) -> Iterator[support.Tmux]:
    made = support.Tmux(rundir, 120, 32)
    environment = stub.env(support.environment(rundir))
    made.start(f"{' '.join(support.GPUWATCH)}; echo ended with $?", environment)
    yield made
    made.close()


def answers(tmux: support.Tmux, key: str, shows: str) -> float:
    """Press a key and return the seconds until the screen shows the text."""
    pressed_s = time.monotonic()
    tmux.keys(key)
    while shows not in tmux.screen():
        assert time.monotonic() - pressed_s < 20.0, tmux.screen()
        time.sleep(0.01)
    return time.monotonic() - pressed_s


def test_a_lost_gpu_and_a_driver_that_hangs(stub: Stub, tmux: support.Tmux) -> None:
    tmux.wait_for("LIVE", 30)
    tmux.keys("3")
    tmux.wait_for("83", 30)

    stub.write("count 2", *H100, LOST, "gpu 0 util 47")
    shown = tmux.wait_for("GPU is lost", 30)
    assert "Traceback" not in shown
    tmux.wait_for("47", 30)  # the other one goes on
    stub.write("count 2", *H100, "gpu 1 util 61")
    tmux.wait_for("61", 45)

    stub.write("count 2", *H100, HANGS)
    tmux.wait_for("NVML not answering", 30)
    # The screen is another process than the one that waits for the driver.
    took_s = [answers(tmux, "1", "run"), answers(tmux, "3", "NVML not answering")]
    assert min(took_s) < HANGS_S / 2, took_s
    pressed_s = time.monotonic()
    tmux.keys("q")
    tmux.wait_for("ended with 0", 30)
    assert time.monotonic() - pressed_s < HANGS_S / 2
