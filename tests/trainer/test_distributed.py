"""Two real ranks under torchrun, and what a process does when it is told to stop."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import support

from trainer.config import DistConfig
from trainer.distributed import process_group
from trainer.errors import TrainingError

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SMALL = ["--data.image_px", "16", "--model.width", "8", "--train.watch", "false"]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes to be ended with all their children: torchrun puts ranks into their own groups."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        try:
            family = psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        for member in family:
            member.kill()
        process.communicate()


def start(
    command: list[str], started: list[subprocess.Popen[str]], **more: str
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started.append(process)
    return process


@pytest.mark.distributed
def test_two_ranks(jpegs: Path, zygote: support.Zygote, rundir: Path, tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("rank_run.py"))
    options = ["--train.accumulate", "3", "--loader.batch_size", "4", "--loader.num_workers", "1"]
    out = tmp_path / "out"
    argv = [script, str(jpegs), *SMALL, *options, "--optim.warmup_steps", "2"]
    with support.Ranks(zygote, argv, support.environment(rundir), out) as ranks:
        assert ranks.wait(100) == 0, support.text_of(out)
    (report,) = [json.loads(s) for s in support.text_of(out).splitlines() if s[:1] == "{"]
    assert report["world"] == 2
    assert report["losses"][-1] < report["losses"][0]
    # The images are spread over both ranks; an odd one out is read by both, so that none waits.
    assert report["shards_overlap"] == report["images"] % 2
    # 3 epochs of windows of 3, the tail of each epoch a step of its own.
    assert report["batches"] % 3 != 0
    assert report["steps"] == 3 * -(-report["batches"] // 3)
    assert len(report["equal_after_each_step"]) == report["steps"]
    assert all(report["equal_after_each_step"])
    assert report["equal_at_the_end"]
    # This model's gradients are one bucket: one reduction a step, none for other micro-batches.
    assert report["reduced"] == report["steps"]


@pytest.mark.distributed
def test_stops_at_once_without_noise_or_leftovers(
    jpegs: Path, started: list[subprocess.Popen[str]]
) -> None:
    options = ["--data.path", str(jpegs), *SMALL, "--loader.num_workers", "2"]
    options += ["--train.steps", "1000000", "--train.log_interval_steps", "1"]
    command = [sys.executable, "-m", "trainer", "train", *options]
    signals = {signal.SIGINT: 130, signal.SIGTERM: 143}
    trainings = {sent: start(command, started) for sent in signals}
    for sent, process in trainings.items():
        assert process.stdout is not None
        assert "loss" in process.stdout.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        since = time.monotonic()
        # To the whole group, as a terminal does: the workers get the signal too.
        os.killpg(process.pid, sent)
        _, err = process.communicate(timeout=20)
        assert time.monotonic() - since < 4.5  # less than the limit after which it would be forced
        assert process.returncode == signals[sent]
        assert all(line.startswith("trainer: ") for line in err.splitlines()), err
        assert not psutil.wait_procs(children, timeout=20)[1]


@pytest.mark.distributed
def test_a_stuck_main_thread_is_ended_after_the_grace_time(
    started: list[subprocess.Popen[str]],
) -> None:
    code = (
        "import ctypes\n"
        "from trainer.signals import stop_signals\n"
        "lock = ctypes.CDLL(None).pthread_mutex_lock\n"
        "mutex = ctypes.create_string_buffer(64)\n"
        "with stop_signals(grace_s=0.3):\n"
        "    print('ready', flush=True)\n"
        # Like a collective whose peer hangs: in C, where no Python handler runs.
        "    lock(mutex), lock(mutex)\n"
    )
    process = start([sys.executable, "-c", code], started)
    assert process.stdout is not None
    process.stdout.readline()
    # It says so just before: then its main thread sleeps, and does nothing any more.
    stat = Path(f"/proc/{process.pid}/task/{process.pid}/stat")
    support.wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", 20, "stuck")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143, err


@pytest.mark.distributed
def test_a_damaged_image_on_one_rank_ends_both_with_a_sentence(
    tmp_path: Path, jpegs: Path, started: list[subprocess.Popen[str]]
) -> None:
    shutil.copytree(jpegs, tmp_path / "set")
    bad = tmp_path / "set/class1/000001.jpg"
    bad.write_bytes(b"nonsense")
    options = ["--data.path", str(tmp_path / "set"), *SMALL, "--data.eval_fraction", "0"]
    options += ["--loader.batch_size", "4", "--train.manifest", "false"]
    process = start([*TORCHRUN, "-m", "trainer", "train", *options], started)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    said = [line for line in err.splitlines() if line.startswith("trainer: rank ")]
    assert any(f"cannot decode the image {bad}: " in line for line in said), err
    # The other rank says that, or nothing where torchrun has ended it first.
    assert len(said) <= 2
    assert all("cannot decode" in line or "another rank has left" in line for line in said), err
    # torchrun's own report has a traceback of torchrun; none is of ours.
    assert "[rank0]: Traceback" not in err
    assert "[rank1]: Traceback" not in err


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A launcher's variables, for a place that the socket has taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in (
            ("RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", str(port)),
        ):
            monkeypatch.setenv(name, value)
        yield taken


def join(timeout_s: float) -> None:
    with process_group(DistConfig(timeout_s=timeout_s), "cpu"):
        raise AssertionError("nobody else was there")


def test_a_port_in_use_is_one_sentence(meeting: socket.socket) -> None:
    with pytest.raises(TrainingError, match=r"the port is in use; choose another with torchrun"):
        join(5.0)


def test_ranks_that_do_not_come_are_one_sentence(meeting: socket.socket) -> None:
    meeting.close()
    with pytest.raises(TrainingError, match=r"not every rank came to 127\.0\.0\.1:\d+ within 1 s"):
        join(1.0)


def test_a_variable_that_is_missing_is_one_sentence(
    meeting: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(TrainingError, match=r"cannot join the other ranks: .*MASTER_PORT"):
        join(2.0)
