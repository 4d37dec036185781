"""Pipes to other machines: what they carry, what they say when they end, what they withstand."""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import support
from builders import node_frame
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.errors import FrameError
from gpuwatch.frames import FrameStream, decode_node_frame, encode, packed
from gpuwatch.schema import WIRE_VERSION, Command, NodeFrame
from gpuwatch.wire.collect import Pipe, PipeLink, PipeTarget, agent_presence, pipelink
from gpuwatch.wire.collect.complaints import why_ended, why_other_version
from gpuwatch.wire.collect.pipe import (
    _QUEUE_BYTES,
    MAGIC,
    NOISE_BYTES,
    PIPE_VERSION,
    Preamble,
    PreambleReader,
    Stdio,
    _Outbox,
    preamble,
)
from gpuwatch.wire.collect.way import Backoff

FAKE_RANK = str(Path(__file__).parent / "fake_rank.py")
TESTS = str(Path(__file__).parent.parent)
SSH = PipeTarget("ssh://me@node1", ("ssh", "me@node1", "x"), "ssh me@node1", "node1")
VIA = PipeTarget("kubectl exec -i pod", ("kubectl",), "kubectl exec -i pod")


# --- the preamble ------------------------------------------------------------------------------


@given(
    st.binary(max_size=300).filter(lambda b: MAGIC not in b and not b.endswith(MAGIC[:1])),
    st.binary(max_size=100),
    st.integers(1, 40),
)
@settings(max_examples=60)
def test_a_preamble_is_found_behind_any_noise_in_any_pieces(
    noise: bytes, rest: bytes, size: int
) -> None:
    data = noise + preamble("1.2.3") + rest
    reader = PreambleReader()
    for at in range(0, len(data), size):
        found = reader.feed(data[at : at + size])
        if found is not None:
            there, after = found
            break
    else:
        pytest.fail("no preamble")
    assert there == Preamble(PIPE_VERSION, WIRE_VERSION, "1.2.3")
    assert after + data[at + size :] == rest
    assert reader.noise == noise


def test_noise_without_an_end_is_refused() -> None:
    reader = PreambleReader()
    for _ in range(NOISE_BYTES // 1024):
        assert reader.feed(b"x" * 1024) is None
    with pytest.raises(FrameError, match="first 65,536 bytes"):
        reader.feed(b"x")
    assert len(reader.noise) <= NOISE_BYTES


def test_a_terminal_in_the_way_is_named() -> None:
    with pytest.raises(FrameError, match="leave out -t"):
        PreambleReader().feed(preamble("1").replace(b"\n", b"\r\n"))


# --- what does not fit in the pipe -------------------------------------------------------------


@given(st.lists(st.integers(1, 500), max_size=60))
def test_a_slow_pipe_drops_the_oldest_and_counts(sizes: list[int]) -> None:
    box = _Outbox(1000)
    frames = [bytes([i % 256]) * size for i, size in enumerate(sizes)]
    for frame in frames:
        box.put(frame)
    kept = [box.take() for _ in range(len(box))]
    assert box.take() == b""
    assert kept == frames[box.dropped :]
    assert sum(map(len, kept)) <= 1000
    assert box.dropped == 0 or sum(map(len, kept)) + sizes[box.dropped - 1] > 1000


def test_a_frame_larger_than_the_queue_still_goes() -> None:
    box = _Outbox(10)
    box.put(b"x" * 50)
    assert (box.take(), box.dropped) == (b"x" * 50, 0)


def test_a_far_side_keeps_nothing_back_for_longer_than_a_second(rundir: Path) -> None:
    source, sink = os.pipe()
    try:
        far = Stdio(rundir, ["false"], package="1", source=source, sink=sink)
        first, second, third = (node_frame(seq) for seq in (1, 2, 3))
        far._heed(True)
        now_s = time.monotonic()
        far._on_frame(first, now_s)
        far._on_frame(second, now_s)
        far._gathered()
        assert len(far._outbox) == 0
        # Nothing more comes: it waits until it would have been sent, and no longer.
        assert 0 < far._patience_ms() <= 500
        support.wait_until(
            lambda: (far._gathered() or len(far._outbox)) == 1,  # type: ignore[func-returns-value]
            5,
            "both as one",
        )
        assert time.monotonic() - now_s > 0.5
        assert decode_node_frame(far._outbox.take()[4:]).merged == 1
        # A word about trouble comes after what was before it.
        far._on_frame(third, time.monotonic())
        far._on_state("lost", "it is gone")
        far._unsent = memoryview(b"")
        far._speak()
        assert far._outbox.take()[4:] == third
        assert decode_node_frame(far._outbox.take()[4:]).notices == ("it is gone",)
        # From now on as they come, what waits first.
        far._on_frame(first, time.monotonic())
        far._heed(False)
        far._on_frame(second, time.monotonic())
        assert [far._outbox.take()[4:] for _ in range(2)] == [first, second]
    finally:
        os.close(source)
        os.close(sink)


def test_a_reader_that_stands_still_costs_a_bounded_queue(rundir: Path) -> None:
    theirs, sink = os.pipe()
    source, ours = os.pipe()
    os.set_blocking(sink, False)
    try:
        far = Stdio(rundir, ["false"], package="1", source=source, sink=sink)
        for _ in range(200):
            far._on_frame(bytes(65536), 0.0)
            far._write()  # must not wait for anybody
        assert far.dropped == 200 - (_QUEUE_BYTES // 65540) - 1
        # What was begun is whole, whatever was dropped behind it.
        os.set_blocking(theirs, False)
        reader, stream, frames = PreambleReader(), FrameStream(), []
        rest = b""
        while len(frames) < 4:
            data = os.read(theirs, 65536)
            found = reader.feed(data) if not rest and not frames else None
            rest = found[1] if found else data
            frames += stream.feed(rest)
            far._write()
        assert frames == [bytes(65536)] * 4
    finally:
        for fd in (theirs, sink, source, ours):
            os.close(fd)


# --- waits and sentences -----------------------------------------------------------------------


@given(st.integers())
def test_waits_grow_from_half_a_second_to_half_a_minute(seed: int) -> None:
    backoff = Backoff(random.Random(seed))
    waits = [backoff.delay_s() for _ in range(10)]
    assert 0.5 <= waits[0] <= 1.0
    assert all(0.5 <= wait <= 30.0 for wait in waits)
    assert all(later > earlier for earlier, later in zip(waits[:4], waits[2:6], strict=True))
    assert all(wait >= 15.0 for wait in waits[6:])
    backoff.reset()
    assert backoff.delay_s() <= 1.0
    assert backoff.delay_s(soon=False) >= 15.0


@pytest.mark.parametrize(
    ("target", "status", "stderr", "words", "soon"),
    [
        (SSH, 255, "Host key verification failed.", "type once: ssh me@node1", False),
        (
            SSH,
            255,
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "ssh-keygen -R node1",
            False,
        ),
        (
            SSH,
            255,
            "Welcome\nme@node1: Permission denied (publickey,password).",
            "ssh-copy-id me@node1",
            False,
        ),
        (
            SSH,
            255,
            "ssh: Could not resolve hostname node1: Name or service not known",
            "no machine is called node1",
            False,
        ),
        (
            SSH,
            255,
            "ssh: connect to host node1 port 22: Connection refused",
            "node1 refuses the connection; to see more, type: ssh me@node1",
            True,
        ),
        (SSH, 255, "ssh: connect to host node1 port 22: No route to host", "is it up?", True),
        (SSH, 127, "bash: line 1: gpuwatch: command not found", "--remote-command", False),
        (SSH, 127, "", "pip install gpuwatch-monitor", False),
        (SSH, 126, "bash: /x/gpuwatch: Permission denied", "cannot be run there", False),
        (SSH, 1, "/usr/bin/python: No module named gpuwatch", "Python on node1 has no", False),
        (SSH, 2, "Error: No such option: --stdio", "too old", False),
        (
            SSH,
            3,
            "gpuwatch: the run directory /tmp/x is open to other users; type: chmod 700 /tmp/x",
            "chmod 700 /tmp/x (exit status 3)",
            True,
        ),
        (VIA, 1, 'Error from server (NotFound): pods "pod" not found', 'pods "pod" not', True),
        (VIA, 127, "OCI runtime exec failed: executable file not found in $PATH", "no 'gpu", False),
        (VIA, 1, "", "type: kubectl exec -i pod", True),
        (VIA, -9, "\x1b[2Jred\u202e", "\ufffd[2Jred\ufffd (signal 9)", True),
    ],
)
def test_why_a_command_has_ended(
    target: PipeTarget, status: int, stderr: str, words: str, soon: bool
) -> None:
    said = why_ended(target, status, stderr.encode(), b"", greeted=False)
    assert words in said.text
    assert said.soon is soon
    assert "\n" not in said.text
    assert "\x1b" not in said.text


def test_an_end_in_the_middle_and_the_noise_of_a_login() -> None:
    ended = why_ended(SSH, 255, b"Timeout, server node1 not responding.", b"", greeted=True)
    assert ended.text.startswith("the connection was lost")
    assert why_ended(SSH, 0, b"", b"", greeted=True).text == (
        "the far side has ended (exit status 0)"
    )
    noise = b"motd\nThis account is currently not available.\n"
    assert "not available. (exit" in why_ended(SSH, 1, b"", noise, greeted=False).text
    assert len(why_ended(SSH, 1, b"x" * 9000, b"", greeted=False).text) < 300


def test_versions_that_do_not_fit_are_one_sentence() -> None:
    fits = Preamble(PIPE_VERSION, WIRE_VERSION, "9")
    assert why_other_version(SSH, fits, "1.0") is None
    newer = why_other_version(SSH, Preamble(PIPE_VERSION + 1, WIRE_VERSION, "2.0"), "1.0")
    assert newer is not None
    assert "type here: pip install gpuwatch-monitor==2.0" in newer.text
    older = why_other_version(SSH, Preamble(PIPE_VERSION, WIRE_VERSION - 1, "0.9;rm"), "1.0")
    assert older is not None
    assert "type on node1: pip install gpuwatch-monitor==1.0" in older.text


# --- the far side as a process -----------------------------------------------------------------


def test_the_far_side_carries_frames_and_commands_and_ends_with_its_stdin(rundir: Path) -> None:
    env = support.environment(rundir, PYTHONPATH=TESTS, GPUWATCH_RUN_ID="fake")
    argv = [*support.GPUWATCH, "agent", "--stdio"]
    with (
        support.process([sys.executable, FAKE_RANK, "0", "1"], env),
        subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        ) as far,
    ):
        try:
            assert far.stdin is not None
            assert far.stdout is not None
            assert far.stderr is not None
            reader, stream = PreambleReader(), FrameStream()
            found = None
            while found is None:
                found = reader.feed(os.read(far.stdout.fileno(), 65536))
            assert reader.noise == b""
            frames = list(stream.feed(found[1]))
            far.stdin.write(packed(b"nonsense"))
            deadline_s = time.monotonic() + 20
            for awaited in (b"a-run", b"stack of rank 0"):
                while awaited not in b"".join(frames):
                    assert time.monotonic() < deadline_s
                    frames += stream.feed(os.read(far.stdout.fileno(), 65536))
                command = Command(WIRE_VERSION, "c1", "stack", run="fake")
                far.stdin.write(packed(encode(command)))
            far.stdin.close()
            assert far.wait(5) == 0
            assert b"a command was refused" in far.stderr.read()
            assert agent_presence(rundir) is not None  # other monitors may watch
        finally:
            far.kill()


@pytest.mark.parametrize("ending", ["stdout", "SIGTERM", "parent", "garbage"])
def test_the_far_side_ends_when_its_pipe_or_its_parent_does(rundir: Path, ending: str) -> None:
    env = support.environment(rundir)
    script = "import subprocess,sys,time\np=subprocess.Popen(sys.argv[1:]);time.sleep(60)"
    argv = [*support.GPUWATCH, "agent", "--stdio"]
    wrapper = [sys.executable, "-c", script] if ending == "parent" else []
    with subprocess.Popen(
        [*wrapper, *argv],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    ) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        assert started.stderr is not None
        try:
            assert os.read(started.stdout.fileno(), len(MAGIC)) == MAGIC
            far = psutil.Process(started.pid)
            if wrapper:
                (far,) = far.children()
                started.kill()
            elif ending == "stdout":
                started.stdout.close()
            elif ending == "SIGTERM":
                started.terminate()
            else:
                started.stdin.write(b"\xff" * 64)

            def ended() -> bool:
                return started.poll() is not None and not (wrapper and far.is_running())

            support.wait_until(ended, 8, "an end")
            if ending == "garbage":
                said = started.stderr.read().decode()
                assert started.returncode == 3
                assert "stdin carries no commands" in said
                assert "Traceback" not in said
        finally:
            started.kill()


def test_a_terminal_is_refused(rundir: Path) -> None:
    ours, theirs = os.openpty()
    try:
        done = subprocess.run(
            [*support.GPUWATCH, "agent", "--stdio"],
            env=support.environment(rundir),
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
            timeout=20,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("leave -t out")
    assert agent_presence(rundir) is None


# --- a far side that means ill -----------------------------------------------------------------

FAR = """
import os, random, struct, sys, time
def out(data):
    data = memoryview(data)
    while data:
        data = data[os.write(1, data):]
hello, frame, word = (bytes.fromhex(a) for a in sys.argv[2:])
kind = sys.argv[1]
if kind == "noise":
    while True: out(b"spam " * 1000)
if kind == "mute":
    time.sleep(60)
out(b"motd\\n" + hello)
if kind == "random":
    out(random.Random(1).randbytes(1 << 20))
if kind == "huge":
    out(b"\\xff" * 4); out(bytes(100))
if kind == "half":
    out(frame); out(struct.pack(">I", 1 << 25) + b"x" * 1000); time.sleep(60)
if kind == "junk":
    while True: out(struct.pack(">I", 3) + b"abc")
while kind == "flood":
    out((frame + word) * 100)
if kind == "names":
    while True:
        out(frame.replace(b"node0", b"x" + random.randbytes(2).hex().encode()))
while kind == "good":
    out(frame); time.sleep(0.05)
"""

ILL = ("noise", "mute", "random", "huge", "half", "junk", "flood", "names", "newer")


def far_target(kind: str) -> PipeTarget:
    frame = packed(node_frame(1))
    word = packed(encode(NodeFrame(WIRE_VERSION, "node0", "pipe", 1, 0.0)))
    hello = preamble("1")
    if kind == "newer":
        at = len(MAGIC)
        hello = hello[:at] + (PIPE_VERSION + 1).to_bytes(2, "big") + hello[at + 2 :]
    hexes = [data.hex() for data in (hello, frame, word)]
    argv = (sys.executable, "-I", "-S", "-u", "-c", FAR, kind, *hexes)
    return PipeTarget(kind, argv, kind)


def test_ill_far_sides_cost_bounded_memory_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipelink, "QUIET_S", 1.0)
    monkeypatch.setattr(pipelink, "ANSWER_S", 2.5)
    monkeypatch.setattr(pipelink, "BURST_BYTES", 2**21)
    monkeypatch.setattr(pipelink, "RATE_BYTES", 2**18)
    count: dict[str, int] = {}
    said: dict[str, str] = {}

    def take(pipe: Pipe, _data: bytes, _frame: NodeFrame, _received_s: float) -> None:
        count[pipe.target.label] = count.get(pipe.target.label, 0) + 1

    def hear(pipe: Pipe) -> None:
        if pipe.state == "lost":
            said.setdefault(pipe.target.label, pipe.trouble)

    before_bytes = psutil.Process().memory_info().rss
    link = PipeLink([far_target(kind) for kind in ("good", *ILL)], "1", take, hear)
    link.start()
    try:
        expected = set(ILL) - {"flood"}
        support.wait_until(lambda: expected <= said.keys(), 20, f"{expected}, but {said}")
        good = count["good"]
        support.wait_until(lambda: count["good"] > good + 10, 5, "the good one goes on")
        grown_bytes = psutil.Process().memory_info().rss - before_bytes
    finally:
        link.close()
    assert grown_bytes < 100e6
    assert "good" not in said
    # Of a flood as much is read as the rate allows, however fast it is.
    assert 100 < count["flood"] < 3000
    assert "first 65,536 bytes" in said["noise"]
    assert "no answer within" in said["mute"]
    assert "let go" in said["random"]
    assert "announces 4294967295 bytes" in said["huge"]
    assert "in the middle of a frame" in said["half"]
    assert "no telemetry" in said["junk"]
    assert "no telemetry" in said["names"]
    assert "newer than this 1 and they do not fit" in said["newer"]
    assert all("\n" not in text for text in said.values())


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


STUBBORN = "import signal,time\nfor n in (1,2,15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)"


def test_a_command_that_hangs_does_not_hold_up_the_end() -> None:
    target = PipeTarget("hung", (sys.executable, "-I", "-S", "-c", STUBBORN), "hung")
    link = PipeLink([target] * 3, "1", lambda *_: None, lambda _: None)
    link.start()
    support.wait_until(lambda: all(p.pid is not None for p in link.pipes), 5, "commands")
    time.sleep(0.3)  # until they ignore signals
    pids = [p.pid for p in link.pipes]
    os.kill(pids[0] or 0, signal.SIGSTOP)
    began_s = time.monotonic()
    link.close()
    assert time.monotonic() - began_s < 1.0
    support.wait_until(lambda: not any(alive(pid or 0) for pid in pids), 1, "their end")


def test_a_monitor_that_is_killed_takes_its_commands_with_it() -> None:
    argv = shlex.join([sys.executable, "-I", "-S", "-c", STUBBORN])
    script = (
        "import sys, time\n"
        "from gpuwatch.commands.remote import RemoteSession, parse_via\n"
        "session = RemoteSession([parse_via(sys.argv[1])])\n"
        "while session.pipes[0].pid is None: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "print(session.pipes[0].pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script, argv], stdout=subprocess.PIPE, text=True
    ) as monitor:
        assert monitor.stdout is not None
        try:
            pid = int(monitor.stdout.readline())
            assert alive(pid)
        finally:
            monitor.kill()
    support.wait_until(lambda: not alive(pid), 2, "the end of its command")
