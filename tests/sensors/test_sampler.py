"""The sampler as a process, and its loop and cadence."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpuwatch
from gpuwatch.frames import FrameStream, decode_sensor_frame, packed
from gpuwatch.schema import HostSample, ProcessSample, SensorFrame
from gpuwatch.sensors.gpus import GpuBackend
from gpuwatch.sensors.sampler import Cadence, Sampler, Watched, decode_watched, run

ENV = {**os.environ, "PYTHONPATH": str(Path(gpuwatch.__file__).parents[1])}
ARGV = [sys.executable, "-P", "-m", "gpuwatch.sensors", "--interval-s"]
PATIENCE_S = 30.0


def watch(*pids: int) -> bytes:
    return packed(msgspec.msgpack.encode([pids, []]))


class Child:
    """A sampler and the frames that it writes."""

    def __init__(self, interval_s: float) -> None:
        self.process = subprocess.Popen(
            [*ARGV, str(interval_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENV,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin = self.process.stdin
        self.stdout = self.process.stdout
        self._stream = FrameStream()
        self._frames: list[SensorFrame] = []

    def send(self, data: bytes) -> None:
        self.stdin.write(data)
        self.stdin.flush()

    def frame(self) -> SensorFrame:
        """Return the next frame."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._frames:
            ready, _, _ = select.select([self.stdout], [], [], deadline - time.monotonic())
            assert ready, "no frame in time"
            data = os.read(self.stdout.fileno(), 65536)
            assert data, f"ended: {self.process.communicate()[1].decode()}"
            self._frames += map(decode_sensor_frame, self._stream.feed(data))
        return self._frames.pop(0)

    def frame_with(self, *pids: int) -> SensorFrame:
        """Return the next frame whose processes are exactly these."""
        for _ in range(100):
            frame = self.frame()
            if {process.pid for process in frame.processes} == set(pids):
                return frame
        raise AssertionError(f"no frame with {pids}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        for pipe in (self.stdin, self.stdout, self.process.stderr):
            pipe.close()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child(0.3)
    yield child
    child.end()


PARENT = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"])
print(worker.pid, flush=True)
while True:
    pass
"""


@pytest.fixture
def busy() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that computes, and the pid of its child, which sleeps."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()  # closes the pipe: the child ends


@pytest.mark.process
def test_two_frames_and_the_processes(
    child: Child, busy: tuple[subprocess.Popen[bytes], int]
) -> None:
    process, worker_pid = busy
    first, second = child.frame(), child.frame()
    assert (first.seq, second.seq) == (0, 1)
    assert first.processes == ()
    assert first.gpus == ()
    assert first.gpus_reason
    assert first.host.readings["cpu_percent"].value is None
    assert first.host.readings["cpu_percent"].reason == "first tick"
    cpu = second.host.readings["cpu_percent"].value
    assert cpu is not None
    assert 0.0 < cpu <= 100.0
    assert abs(second.sent_s - time.time()) < PATIENCE_S

    child.send(watch(process.pid))
    frame = child.frame_with(process.pid, worker_pid)
    assert [sample.role for sample in frame.processes] == ["rank", "worker"]
    assert all(sample.rank_pid == process.pid for sample in frame.processes)
    seen = []
    for _ in range(10):  # its share of this machine may be small for a while
        rank, worker = child.frame_with(process.pid, worker_pid).processes
        assert rank.status in {"R", "S"}
        assert worker.status in {"R", "S", "D"}
        assert worker.readings["rss"].value
        seen.append(rank.readings["cpu_percent"].value or 0.0)
        if seen[-1] > 20.0:
            break
    assert max(seen) > 20.0

    os.kill(process.pid, signal.SIGSTOP)
    assert any(child.frame().processes[0].status == "T" for _ in range(5))
    process.kill()
    process.wait()
    child.frame_with()


def test_the_newest_list_counts_and_nonsense_does_not(child: Child) -> None:
    me, parent = os.getpid(), os.getppid()
    child.send(watch(me, parent) + packed(b"\xc1") + packed(b"") + watch(parent))
    child.send(packed(msgspec.msgpack.encode({"pid": 1})) + packed(b"\x91" * 100_000))
    for _ in range(20):
        frame = child.frame()
        if frame.processes:
            break
    ranks = [sample.pid for sample in frame.processes if sample.role == "rank"]
    assert ranks == [parent]
    # A length that cannot be is the end of all that can be understood, not of the sampler.
    child.send(b"\xff\xff\xff\xff" + watch(me))
    for _ in range(3):
        frame = child.frame()
        assert [sample.pid for sample in frame.processes if sample.role == "rank"] == [parent]
    child.stdin.close()
    assert child.process.wait(PATIENCE_S) == 0


def test_a_closed_stdin_ends_it(child: Child) -> None:
    child.frame()
    child.stdin.close()
    assert child.process.wait(PATIENCE_S) == 0
    assert child.process.stderr is not None
    assert child.process.stderr.read() == b""


def test_a_closed_stdout_ends_it_between_ticks() -> None:
    child = Child(3600.0)
    try:
        child.frame()
        child.stdout.close()
        assert child.process.wait(PATIENCE_S) == 0
    finally:
        child.end()


def test_interrupt_does_not_end_it_and_terminate_does(child: Child) -> None:
    child.frame()
    child.process.send_signal(signal.SIGINT)
    child.frame()
    child.frame()
    child.process.terminate()
    assert child.process.wait(PATIENCE_S) == -signal.SIGTERM


@pytest.mark.process
def test_it_dies_with_its_parent() -> None:
    """By the kernel's hand: its interval is too long for it to look itself, its stdin open."""
    stdin, feed = os.pipe()
    out, stdout = os.pipe()
    code = "import subprocess, sys\nsubprocess.Popen(sys.argv[1:]).wait()\n"
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, feed)
        stack.callback(os.close, out)
        parent = subprocess.Popen(
            [sys.executable, "-c", code, *ARGV, "3600"], stdin=stdin, stdout=stdout, env=ENV
        )
        stack.callback(parent.wait)
        stack.callback(parent.kill)
        os.close(stdin)
        os.close(stdout)
        assert select.select([out], [], [], PATIENCE_S)[0], "no frame"
        assert os.read(out, 65536)
        parent.kill()
        # The pipe closes when the last holder of its other end is gone: the sampler.
        assert select.select([out], [], [], PATIENCE_S)[0], "the sampler lives on"
        assert os.read(out, 65536) == b""


@pytest.mark.process
@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "soon", "1e9"])
def test_an_interval_that_makes_no_sense_is_bad_usage(interval: str) -> None:
    done = subprocess.run(
        [*ARGV[:-1], f"--interval-s={interval}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=ENV,
        check=False,
    )
    assert done.returncode == 2
    assert b"--interval-s" in done.stderr
    assert done.stdout == b""


@pytest.mark.process
def test_it_loads_nothing_heavy() -> None:
    code = (
        "import sys, gpuwatch.sensors.__main__\n"
        "print(sorted({'torch', 'zmq', 'textual', 'rich', 'pynvml', 'numpy', 'asyncio'}"
        " & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, env=ENV, check=True
    )
    assert done.stdout == b"[]\n"


class Host:
    """A host of which every sample is the same."""

    closed = False

    def probe(self) -> str:
        return ""

    def sample(self) -> HostSample:
        return HostSample(7)

    def close(self) -> None:
        self.closed = True


class Processes:
    """Processes that fill a frame of about `padding` bytes."""

    def __init__(self, padding: int = 0) -> None:
        self.padding = padding
        self.watched: tuple[int, ...] = ()

    def probe(self) -> str:
        return ""

    def watch(self, pids: Iterable[int]) -> None:
        self.watched = tuple(pids)

    def sample(self) -> tuple[ProcessSample, ...]:
        return tuple(ProcessSample(1, 1, "rank", "x" * 250) for _ in range(self.padding // 250))

    def close(self) -> None:
        pass


def test_a_reader_that_does_not_read_costs_ticks_and_does_not_hold_it() -> None:
    stdin, feed = os.pipe()
    out, stdout = os.pipe()
    host = Host()
    sampler = Sampler(host, GpuBackend(), Processes(padding=300_000), wall=lambda: 5.0)
    thread = threading.Thread(
        target=run, args=(sampler, 0.05, stdin, stdout, os.getppid()), daemon=True
    )
    thread.start()
    time.sleep(0.5)
    # Nothing was read and a pipe holds 64 KiB: the first frame is not through yet.
    stream = FrameStream()
    frames: list[SensorFrame] = []
    while len(frames) < 3:
        frames += map(decode_sensor_frame, stream.feed(os.read(out, 65536)))
    assert [frame.seq for frame in frames] == [0, 1, 2]
    assert frames[0].host.cores == 7
    assert frames[0].sent_s == 5.0
    time.sleep(0.2)  # it waits for the reader again
    os.close(feed)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert os.get_blocking(stdout)
    for fd in (stdin, out, stdout):
        os.close(fd)
    sampler.close()
    assert host.closed


def test_it_ends_when_its_parent_is_another_one() -> None:
    stdin, feed = os.pipe()
    out, stdout = os.pipe()
    run(Sampler(Host(), GpuBackend(), Processes()), 3600.0, stdin, stdout, parent=-1)
    for fd in (stdin, feed, out, stdout):
        os.close(fd)


def test_cadence_does_not_drift_and_skips_what_it_missed() -> None:
    cadence = Cadence(1.0, 100.0)
    assert cadence.due_s == 100.0
    cadence.advance(100.3)
    assert cadence.due_s == 101.0
    cadence.advance(101.0)
    assert cadence.due_s == 102.0
    cadence.advance(104.9)
    assert cadence.due_s == 105.0


@given(st.floats(0.05, 3600.0), st.floats(0.0, 1e7), st.floats(0.0, 1e6))
def test_the_next_due_time_is_ahead_and_within_one_interval(
    interval_s: float, start_s: float, later_s: float
) -> None:
    cadence = Cadence(interval_s, start_s)
    now_s = start_s + later_s
    cadence.advance(now_s)
    assert now_s < cadence.due_s <= now_s + interval_s + 1e-6


@given(st.binary(max_size=64))
def test_any_message_is_pids_and_paths_or_nothing(message: bytes) -> None:
    found = decode_watched(message)
    assert found is None or all(1 <= pid <= 2**31 for pid in found.pids)


def test_pids_and_paths() -> None:
    encode = msgspec.msgpack.encode
    assert decode_watched(encode([[3, 4]])) == Watched((3, 4))
    assert decode_watched(encode([[3], ["/data"]])) == Watched((3,), ("/data",))
    for bad in ([0], [-1], ["3"], [2**40], [1.5], {"a": 1}, None, [1] * 5000):
        assert decode_watched(encode([bad])) is None
    for bad_paths in ([1], ["x" * 5000], ["/"] * 300, None):
        assert decode_watched(encode([[3], bad_paths])) is None
    assert decode_watched(b"\xdd\xff\xff\xff\xff") is None
