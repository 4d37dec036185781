"""`gpuwatch run --tui`: the command in its pane, left, stopped, ended; what no screen changes."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import support

from gpuwatch.commands.keeper import descendants, start_keeper
from gpuwatch.commands.pane import PaneJob

RUN = [*support.GPUWATCH, "run", "--tui"]
PAINT_S = 30.0


def becoming(*argv: str) -> Callable[[], int]:
    def become() -> int:
        os.execvp(argv[0], argv)

    return become


def python(code: str) -> Callable[[], int]:
    return becoming(sys.executable, "-c", code)


class Told:
    """What a keeper says."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._data = b""

    def wait(self, name: str, timeout_s: float = 20.0) -> int:
        end_s = time.monotonic() + timeout_s
        while True:
            for line in self._data.split(b"\n")[:-1]:
                words = json.loads(line)
                if name in words:
                    return int(words[name])
            assert select.select([self.descriptor], [], [], end_s - time.monotonic())[0], name
            data = os.read(self.descriptor, 4096)
            assert data, f"the keeper has gone without a word of {name}"
            self._data += data


@pytest.fixture
def keeping(tmp_path: Path) -> Iterator[Callable[[Callable[[], int]], Told]]:
    """Starts keepers; what they keep is killed with the test."""
    opened: list[Told] = []

    def keep(become: Callable[[], int]) -> Told:
        opened.append(Told(start_keeper(become, tmp_path / "out.log", 100, 30)))
        return opened[-1]

    yield keep
    for told in opened:
        with contextlib.suppress(AssertionError, ProcessLookupError, PermissionError):
            os.killpg(told.wait("pid", 1.0), signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.close(told.descriptor)


Keep = Callable[[Callable[[], int]], Told]


def lives(pid: int) -> bool:
    """Whether a process runs still; one that is dead and not yet collected does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


# --- the keeper --------------------------------------------------------------------------------


@pytest.mark.process
def test_output_comes_as_it_was_printed_by_a_command_on_a_terminal_of_its_own(
    keeping: Keep, tmp_path: Path
) -> None:
    told = keeping(
        python(
            "import os, sys; print(sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty(), "
            "os.get_terminal_size(), os.getpgrp() == os.getpid() == os.getsid(0)); "
            "os.write(2, b'a\\r\\x00b\\n'); sys.exit(5)"
        )
    )
    assert told.wait("pid") > 0
    assert told.wait("exit") == 5
    assert (tmp_path / "out.log").read_bytes() == (
        b"False True True os.terminal_size(columns=100, lines=30) True\na\r\x00b\n"
    )
    assert (tmp_path / "out.log").stat().st_mode & 0o777 == 0o600
    assert os.read(told.descriptor, 10) == b""  # with the last one that prints the keeper ends


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_an_exit_code_as_a_shell_counts(keeping: Keep, number: int) -> None:
    told = keeping(becoming("sleep", "60"))
    os.kill(told.wait("pid"), number)
    assert told.wait("exit") == 128 + number


@pytest.mark.process
def test_what_cannot_be_run_has_the_exit_code_that_it_gives(keeping: Keep) -> None:
    assert keeping(lambda: 126).wait("exit") == 126


@pytest.mark.process
def test_nothing_is_lost_of_much_output_and_of_the_last_words(
    keeping: Keep, tmp_path: Path
) -> None:
    told = keeping(
        python(
            "import os, sys\n"
            "for i in range(200_000): print('line', i)\n"
            "print('last words', end=''); sys.stdout.flush(); os._exit(0)"
        )
    )
    assert told.wait("exit", 60.0) == 0
    # Said once it has been written: who waits for the end reads all of it.
    lines = (tmp_path / "out.log").read_text().splitlines()
    assert lines == [*(f"line {i}" for i in range(200_000)), "last words"]


@pytest.mark.process
def test_output_goes_on_without_the_monitor_and_after_the_command(
    keeping: Keep, tmp_path: Path
) -> None:
    wait = "while [ ! -e {} ]; do sleep 0.05; done"
    behind = f"({wait.format('last')}; echo behind) &"
    with contextlib.chdir(tmp_path):
        told = keeping(becoming("sh", "-c", f"{behind} {wait.format('go')}; echo alone"))
    pid = told.wait("pid")
    os.close(told.descriptor)  # the monitor is gone: nobody hears the end
    log = tmp_path / "out.log"
    try:
        (tmp_path / "go").touch()
        support.wait_until(lambda: support.text_of(log) == "alone\n", 20, "its output")
        support.wait_until(lambda: not lives(pid), 20, "its end")
        time.sleep(0.3)  # the end has been told, to nobody
    finally:
        (tmp_path / "last").touch()
    support.wait_until(lambda: support.text_of(log) == "alone\nbehind\n", 20, "what it left")


@pytest.mark.process
def test_nobody_who_waits_for_the_callers_pipes_waits_for_the_keeper(keeping: Keep) -> None:
    reading, writing = os.pipe()
    keeping(becoming("sleep", "60")).wait("pid")
    os.close(writing)
    assert select.select([reading], [], [], 10)[0]
    assert os.read(reading, 10) == b""
    os.close(reading)


@pytest.mark.process
def test_a_full_disk_holds_up_nobody(tmp_path: Path) -> None:
    told = Told(start_keeper(python("print('x' * 500_000)"), Path("/dev/full"), 80, 24))
    assert told.wait("exit") == 0
    os.close(told.descriptor)


@pytest.mark.process
def test_signals_that_were_ignored_are_so_in_the_command_and_no_others(
    keeping: Keep, tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        told = keeping(
            python(
                "import signal; print(*[signal.getsignal(n).name if n != 2 else "
                "signal.getsignal(n).__name__ for n in (1, 2, 15, 20)])"
            )
        )
        assert told.wait("exit") == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    said = (tmp_path / "out.log").read_text()
    assert said == "SIG_IGN default_int_handler SIG_DFL SIG_DFL\n"


# --- the job -----------------------------------------------------------------------------------


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, lambda *_: print("not on SIGINT", flush=True))
signal.signal(signal.SIGTERM, lambda *_: print("not on SIGTERM", flush=True))
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"],
                         start_new_session=True)
print("ready", other.pid, flush=True)
while True:
    time.sleep(0.05)
"""


class Clock:
    """A clock that goes as it does, and on when a test says so."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def shown(job: PaneJob) -> str:
    ring = job.output
    return "\n".join(ring.lines(ring.first, 10_000))


@pytest.mark.process
def test_a_stubborn_command_is_stopped_step_by_step_and_all_of_it(
    keeping: Keep, tmp_path: Path
) -> None:
    told = keeping(python(STUBBORN))
    clock = Clock()
    job = PaneJob("stubborn", "", tmp_path / "out.log", os.dup(told.descriptor), clock=clock)
    try:
        support.wait_until(lambda: "ready" in shown(job), 20, "ready")
        other = int(shown(job).split()[1])
        assert other in descendants(job.pid)
        assert job.stopping == ""
        job.stop()
        support.wait_until(lambda: "not on SIGINT" in shown(job), 20, "SIGINT")
        assert re.fullmatch(r"SIGINT sent, SIGTERM in ([1-9]|10) s", job.stopping)
        time.sleep(0.5)
        assert "SIGTERM" not in shown(job)  # not before its time
        clock.ahead_s += 10.5
        support.wait_until(lambda: "not on SIGTERM" in shown(job), 20, "SIGTERM")
        assert job.exit_code is None
        job.stop()  # once more: at once
        support.wait_until(lambda: job.exit_code is not None, 20, "the end")
        assert job.exit_code == 137
        assert job.stopping == ""
        support.wait_until(lambda: not lives(other), 20, "the one in another session")
        job.stop()  # nothing is left to be stopped
        time.sleep(0.3)
        assert job.exit_code == 137
    finally:
        job.close()
        if job.pid and job.exit_code is None:
            for pid in descendants(job.pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.process
def test_a_job_knows_its_own_output_only_and_all_of_it_when_it_ends(
    keeping: Keep, tmp_path: Path
) -> None:
    log = tmp_path / "out.log"
    log.write_text("of another run of that name\n")
    told = keeping(python("print('\\n'.join(map(str, range(30_000)))); raise SystemExit(7)"))
    job = PaneJob("x", "", log, os.dup(told.descriptor), start=log.stat().st_size and 28)
    try:
        support.wait_until(lambda: job.exit_code is not None, 30, "the end")
        assert job.exit_code == 7
        assert job.output.end == 30_000
        assert job.output.lines(29_999, 5) == ["29999"]
        assert "another" not in shown(job)
        took_s = job.elapsed_s
        time.sleep(0.2)
        assert job.elapsed_s == took_s
    finally:
        job.close()


def test_its_last_words_are_there_when_its_end_is(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.touch()
    told, telling = os.pipe()
    job = PaneJob("x", "", log, told)
    try:
        time.sleep(0.3)  # it waits for the keeper now
        with log.open("ab") as file:
            file.write(b"".join(b"line %d\n" % i for i in range(100_000)))
        os.write(telling, b'{"pid": 1}\n{"exit": 0}\n')
        support.wait_until(lambda: job.exit_code is not None, 20, "the end", every_s=0.001)
        assert job.output.end == 100_000
    finally:
        job.close()
        os.close(telling)


@pytest.mark.process
def test_what_comes_too_fast_is_in_the_file(keeping: Keep, tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_bytes(b"y" * 70 + b"\n")
    much = "head -c 30000000 /dev/zero | tr '\\0' z | fold -w 99; echo end"
    told = keeping(becoming("sh", "-c", much))
    assert told.wait("exit", 60.0) == 0
    job = PaneJob("x", "", log, told.descriptor)
    try:
        support.wait_until(lambda: "end" in shown(job)[-4:], 30, "the end")
        assert re.search(r"\[[\d,]+ bytes came too fast: see the file\]", shown(job))
        assert job.output.end < 40_000
    finally:
        job.close()
    assert log.stat().st_size > 30_000_000


@pytest.mark.process
def test_a_keeper_that_is_killed_is_said_to_be_gone(keeping: Keep, tmp_path: Path) -> None:
    told = keeping(becoming("sleep", "60"))
    pid = told.wait("pid")
    keeper = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    job = PaneJob("x", "", tmp_path / "out.log", os.dup(told.descriptor))
    try:
        os.kill(keeper, signal.SIGKILL)
        support.wait_until(lambda: bool(job.lost), 20, "noticed")
        assert job.exit_code is None
    finally:
        job.close()
        with contextlib.suppress(ProcessLookupError):  # its terminal went with the keeper
            os.kill(pid, signal.SIGKILL)


# --- the whole of it ---------------------------------------------------------------------------


@pytest.mark.process
def test_without_a_terminal_it_is_one_sentence(tmp_path: Path) -> None:
    with support.run_directory() as directory:
        done = subprocess.run(
            [*RUN, "--", "touch", str(tmp_path / "ran")],
            env=support.environment(directory),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr == (
            "gpuwatch: --tui needs a terminal, and this is no terminal; leave it out\n"
        )
        assert not (tmp_path / "ran").exists()
        assert list(directory.iterdir()) == []


JOB = """
import pathlib, signal, sys, time
here = pathlib.Path(sys.argv[0]).parent
signal.signal(signal.SIGINT, lambda *_: sys.exit(9))
print("the first line", flush=True)
for step in range(20_000):
    print(f"\\rstep {step} of 20000", end="", file=sys.stderr, flush=True)
    if step % 10 == 0:
        print(f"\\n\\x1b[32mloss {1 / (1 + step):.4f}\\x1b[0m", flush=True)
    time.sleep(0.02)
    if (here / "end").exists():
        break
print("\\nthe last line", flush=True)
sys.exit(3)
"""

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


@contextlib.contextmanager
def in_a_window(tmp_path: Path, *argv: str) -> Iterator[tuple[support.Tmux, Path]]:
    with support.run_directory() as directory:
        window = support.Tmux(directory, 120, 32)
        try:
            command = " ".join([*RUN, "--", *argv])
            window.start(
                f"cd {tmp_path} && {command}; echo left $?", support.environment(directory)
            )
            yield window, directory
        finally:
            (tmp_path / "end").touch()  # what outlives its window
            window.close()


def screens(directory: Path) -> list[int]:
    """The processes of `gpuwatch run --tui` in that run directory that have a terminal."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            ours = f"GPUWATCH_DIR={directory}".encode() in (entry / "environ").read_bytes()
            pane = b"run\0--tui" in (entry / "cmdline").read_bytes()
            terminal = os.readlink(entry / "fd" / "0").startswith("/dev/pts/")
            if ours and pane and terminal and lives(pid):
                found.append(pid)
    return found


def pid_on(screen: str) -> int:
    found = re.search(r"process (\d+)", screen)
    assert found is not None, screen
    return int(found[1])


@pytest.mark.terminal
@needs_tmux
def test_a_command_is_watched_searched_and_reported_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    with in_a_window(tmp_path, support.PYTHON, "job.py") as (window, directory):
        window.wait_for("▶ running", PAINT_S)
        window.keys("l")
        window.wait_for("the first line", PAINT_S)
        window.wait_for("follows", PAINT_S)
        window.wait_for("loss 0.0476", PAINT_S)
        # Without waiting in between: what follows / is text, however late the screen is.
        window.keys("/")
        window.keys("0.0909")
        window.keys("Enter")
        window.wait_for("▌loss 0.0909", PAINT_S)
        window.keys("C-c")
        window.wait_for("The command still runs", PAINT_S)
        window.keys("Escape")
        window.wait_for("▌loss 0.0909", PAINT_S)
        (tmp_path / "end").touch()
        shown_ = window.wait_for("ended with exit code 3", PAINT_S)
        assert "the last line" in shown_
        assert "✖ exit code 3" in shown_.splitlines()[0]
        time.sleep(1.0)
        assert "ended with exit code 3" in window.screen()  # it stays
        window.keys("q")
        left = window.wait_for("left 3", PAINT_S)
        assert "ended with exit code 3 after" in left
        (log,) = directory.glob("output-job-*.log")
        text = log.read_bytes()
        assert text.startswith(b"the first line\n\rstep 0 of 20000\n\x1b[32mloss 1.0000\x1b[0m\n")
        assert text.endswith(b"\nthe last line\n")


@pytest.mark.terminal
@needs_tmux
def test_a_command_is_left_running_and_its_output_goes_on(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    with in_a_window(tmp_path, support.PYTHON, "job.py") as (window, directory):
        window.wait_for("▶ running", PAINT_S)
        window.keys("q")
        pid = pid_on(window.wait_for("leave it running", PAINT_S))
        try:
            window.keys("d")
            left = window.wait_for("left 0", PAINT_S)
            assert f"kill -INT -- -{pid}" in left
            assert lives(pid)
            (log,) = directory.glob("output-job-*.log")
            size = log.stat().st_size
            support.wait_until(lambda: log.stat().st_size > size + 100, 20, "the output goes on")
            (tmp_path / "end").touch()
            support.wait_until(lambda: not lives(pid), 20, "it ends by itself")
            support.wait_until(
                lambda: log.read_bytes().endswith(b"\nthe last line\n"), 20, "its last words"
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


@pytest.mark.terminal
@needs_tmux
def test_a_command_is_stopped_and_its_report_stays(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    with in_a_window(tmp_path, support.PYTHON, "job.py") as (window, _):
        window.wait_for("▶ running", PAINT_S)
        window.keys("l")
        window.wait_for("loss", PAINT_S)
        window.keys("q")
        pid = pid_on(window.wait_for("stop it", PAINT_S))
        window.keys("s")
        window.wait_for("ended with exit code 9", PAINT_S)
        assert not lives(pid)
        window.keys("q")
        window.wait_for("left 9", PAINT_S)


@pytest.mark.terminal
@needs_tmux
def test_a_command_outlives_a_terminal_that_is_closed(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    with in_a_window(tmp_path, support.PYTHON, "job.py") as (window, directory):
        window.wait_for("▶ running", PAINT_S)
        window.keys("q")
        pid = pid_on(window.wait_for("leave it running", PAINT_S))
        try:
            assert len(screens(directory)) == 1
            window.close()
            support.wait_until(lambda: not screens(directory), 20, "the screen is gone")
            assert lives(pid)
            (log,) = directory.glob("output-job-*.log")
            size = log.stat().st_size
            support.wait_until(lambda: log.stat().st_size > size + 100, 20, "the output goes on")
        finally:
            os.killpg(pid, signal.SIGKILL)
        support.wait_until(
            lambda: not any("run --tui" in line for line in support.processes_of(directory)),
            20,
            "the keeper ends with the command",
        )


TRAINING = """
import time
import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(64, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = [(torch.randn(64), 0) for _ in range(2400)]
for step, (x, y) in enumerate(DataLoader(data, batch_size=16)):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)
print("trained", flush=True)
"""


@pytest.mark.terminal
@needs_tmux
def test_a_training_is_watched_and_its_card_is_the_report(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    with in_a_window(tmp_path, support.PYTHON, "train.py") as (window, _):
        shown_ = window.wait_for("ended with exit code 0", 90)
        shown_ = window.wait_for("150 steps", PAINT_S)
        assert "gpuwatch: run train-" in shown_
        assert re.search(r"^ +verdict ", shown_, re.M), shown_
        assert "trained" in shown_
        assert "■ exit code 0" in shown_.splitlines()[0]
        window.keys("Escape")
        window.wait_for("Where a step goes", PAINT_S)
        window.keys("q")
        left = window.wait_for("left 0", PAINT_S)
        assert "verdict" in left
