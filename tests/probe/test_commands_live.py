"""Commands to two ranks of the trainer, over their own sockets: one launch for all of them."""

import base64
import contextlib
import gzip
import itertools
import json
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import support
import zmq

from gpuwatch.frames import decode_rank_frame, encode
from gpuwatch.schema import WIRE_VERSION, Command, RankFrame, Reply
from gpuwatch.wire.publish import Presence
from trainer.data import make_jpegs

JOB = str(Path(__file__).parent / "command_job.py")
IMAGES = 256
BATCH = 4
TIMEOUT_S = 60.0


class Asker:
    """Asks one rank, and hears what it publishes."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", presence: Presence) -> None:
        self.rank = presence.rank
        self.frames: list[tuple[float, RankFrame]] = []
        self._requests = context.socket(zmq.DEALER)
        self._requests.connect(presence.control)
        self._published = context.socket(zmq.SUB)
        self._published.subscribe(b"")
        self._published.connect(presence.telemetry)
        self._hear(1.0)

    def _hear(self, timeout_s: float) -> None:
        """Wait for a frame that is published."""
        if not self._published.poll(timeout_s * 1000):
            raise AssertionError(f"rank {self.rank} publishes nothing")
        while self._published.poll(0):
            self.frames.append((time.time(), decode_rank_frame(self._published.recv())))

    def frame(self, command: Command) -> RankFrame:
        self._requests.send(encode(command))
        if not self._requests.poll(TIMEOUT_S * 1000):
            raise AssertionError(f"rank {self.rank} does not answer {command.verb}")
        return decode_rank_frame(self._requests.recv())

    def send(self, verb: str, ident: str = "", rank: int | None = 0, **args: Any) -> Reply:
        """Return the answer that comes at once."""
        command = Command(
            WIRE_VERSION, ident or uuid.uuid4().hex, verb, rank=rank, args=args, ttl_s=60.0
        )
        (reply,) = self.frame(command).replies
        return reply

    def wait(self, accepted: Reply) -> tuple[float, Reply]:
        """Return when the end of an accepted command was published, and that."""
        assert accepted.status == "accepted", accepted
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            for at_s, frame in self.frames:
                for reply in frame.replies:
                    if reply.id == accepted.id:
                        return at_s, reply
            self._hear(10.0)
        raise AssertionError(f"rank {self.rank} accepted a command and did not end it: {accepted}")

    def past(self) -> RankFrame:
        return self.frame(Command(WIRE_VERSION, uuid.uuid4().hex, "snapshot"))


@contextlib.contextmanager
def askers(rundir: Path) -> Iterator[list[Asker]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield [Asker(context, presence) for presence in support.rank_presences(rundir)]
    finally:
        context.destroy(linger=0)


def stepping(rundir: Path, job: "subprocess.Popen[bytes]", output: Path) -> bool:
    assert job.poll() is None, support.text_of(output)
    frames = support.snapshots(rundir)
    return len(frames) == 2 and all(frame.state.step > 3 for frame in frames)


def rows_of(output: Path) -> list[dict[str, Any]]:
    lines = [line for line in support.text_of(output).splitlines() if line.startswith('{"rank"')]
    return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.mark.distributed
def test_commands_to_a_training(rundir: Path, tmp_path: Path) -> None:
    images = make_jpegs(images=IMAGES, classes=IMAGES, px=16, cache=tmp_path / "images")
    output, signs = tmp_path / "output", tmp_path / "signs"
    signs.mkdir()
    env = support.environment(rundir, XDG_CACHE_HOME=str(tmp_path), PYTHONWARNINGS="ignore")
    command = [*support.TORCHRUN, JOB, str(images), str(signs)]
    with support.process(command, env, output=output) as job:
        support.wait_until(lambda: stepping(rundir, job, output), TIMEOUT_S, "both ranks step")
        with askers(rundir) as (zero, one):
            profiled(zero)
            turned_once(zero)
            accumulated(zero, one)
            other_workers(zero, one)
        (signs / "trained").touch()
        support.wait_until(lambda: stands(rundir, job, output), TIMEOUT_S, "rank 0 waits", 0.2)
        with askers(rundir) as (zero, one):
            answers_in_a_hang(zero)
            (signs / "done").touch()
            in_the_reducer_of_ddp(zero)
        (signs / "done again").touch()
        assert job.wait(TIMEOUT_S) == 0, support.text_of(output)
    nothing_was_lost(rows_of(output))


def profiled(zero: Asker) -> None:
    """Five steps, read and told within five seconds of the last of them, and its trace."""
    at_s, reply = zero.wait(zero.send("profile", steps=5))
    assert reply.status == "done", reply.message
    found = json.loads(reply.data)
    assert found["last_step"] - found["first_step"] == 4
    records = {r.index: r for r in zero.past().records}
    last = records[found["last_step"]]
    assert at_s - (last.started_s + last.step_ns / 1e9) < 5.0
    calls = {row["name"]: row["calls"] for row in found["operators"]}
    assert calls["Optimizer.step#SGD.step"] == 5
    assert any(name.startswith("aten::") for name in calls)
    assert found["comm_ms"] > 0
    assert 0 <= found["comm_overlap_share"] <= 1
    # The steps it names are those of the records.
    named_ms = sum(records[i].step_ns for i in range(found["first_step"], last.index + 1)) / 1e6
    assert found["wall_ms"] == pytest.approx(named_ms, rel=0.5)
    data = b""
    while len(data) < found["trace_bytes"]:
        piece = json.loads(zero.send("fetch", name=found["trace"], offset=len(data)).data)
        data += base64.b64decode(piece["base64"])
    events = json.loads(gzip.decompress(data))["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("Optimizer.step#SGD.step") == 5
    assert zero.send("fetch", name="../rank.json").status == "error"


def turned_once(zero: Asker) -> None:
    """The same id again gets the answer of the first."""
    accepted = zero.send("set", "the same", knob="turns", value=3)
    _, done = zero.wait(accepted)
    assert done.message == "turns 0 -> 3 at the next step"
    assert zero.send("set", "the same", knob="turns", value=3) == done
    past = zero.past()
    assert [c.status for c in past.commands if c.id == "the same"] == ["accepted", "done"]
    assert past.hello is not None
    assert {knob.name: knob.value for knob in past.hello.knobs}["turns"] == 3


def accumulated(zero: Asker, one: Asker) -> None:
    """Both ranks change the windows on one step; one alone may not."""
    refused = zero.send("set", knob="gradient_accumulation", value=2, rank=0)
    assert "send it to all of them" in refused.message
    accepted = [
        each.send("set", "windows", None, knob="gradient_accumulation", value=2)
        for each in (zero, one)
    ]
    messages = {
        each.wait(reply)[1].message for each, reply in zip((zero, one), accepted, strict=True)
    }
    assert len(messages) == 1, messages
    assert messages.pop().startswith("gradient_accumulation 1 -> 2 from step ")


def other_workers(zero: Asker, one: Asker) -> None:
    """The loader is another one in the middle of an epoch, and the hello says so."""
    for each in (zero, one):
        _, reply = each.wait(each.send("set", knob="num_workers", value=2, rank=None))
        assert reply.message == "num_workers 1 -> 2 after the step that begins now"

    def in_use() -> bool:
        loaders = [each.past().hello.loaders for each in (zero, one)]  # type: ignore[union-attr]
        return all(loader.num_workers == 2 for (loader,) in loaders)

    support.wait_until(in_use, TIMEOUT_S, "the loaders have two workers")
    refused = zero.send("set", knob="num_workers", value=10_000)
    assert "num_workers must be a whole number from 0 to" in refused.message


def stands(rundir: Path, job: "subprocess.Popen[bytes]", output: Path) -> bool:
    assert job.poll() is None, support.text_of(output)
    states = {frame.rank: frame for frame in support.snapshots(rundir)}
    return len(states) == 2 and all(
        frame.state.phase_age_ns > 5e8 and not frame.hello.allow_control  # type: ignore[union-attr]
        for frame in states.values()
    )


def answers_in_a_hang(zero: Asker) -> None:
    stack = zero.send("stack")
    assert stack.status == "done"
    assert "in all_reduce" in stack.data
    memory = json.loads(zero.send("memory").data)
    assert memory["rss_bytes"] > 1e7
    assert memory["cuda"] == []
    refused = zero.send("set", knob="turns", value=1)
    assert (refused.status, "does not allow control" in refused.message) == ("error", True)
    # What needs a step boundary is accepted, and never done.
    assert zero.send("profile").status == "accepted"


def in_the_reducer_of_ddp(zero: Asker) -> None:
    """There the stack ends in C++: the rank itself says what it waits for."""
    said: list[str] = []

    def is_there() -> bool:
        stack = zero.send("stack")
        said[:] = [stack.message, stack.data]
        return bool(stack.message)

    support.wait_until(is_there, TIMEOUT_S, "rank 0 waits in its backward", 0.5)
    assert said[0] == "waits in DistributedDataParallel's all-reduce of the gradients over gloo"
    assert "in _engine_run_backward" in said[1]


def nothing_was_lost(rows: list[dict[str, Any]]) -> None:
    """Every image was trained on once in each epoch, whatever was changed meanwhile."""
    by_epoch = {
        epoch: list(found)
        for epoch, found in itertools.groupby(
            sorted(rows, key=lambda row: (row["epoch"], row["rank"])), lambda row: row["epoch"]
        )
    }
    for epoch, both in by_epoch.items():
        assert [row["rank"] for row in both] == [0, 1]
        assert sorted(both[0]["seen"] + both[1]["seen"]) == list(range(IMAGES)), epoch
        assert both[0]["windows"] == both[1]["windows"]
    ends = [row for row in rows if row["epoch"] == max(by_epoch)]
    assert [row["turned"] for row in sorted(ends, key=lambda row: row["rank"])] == [[3], []]
    assert {(row["workers"], row["in_use"]) for row in ends} == {(2, 2)}
    samples = [samples for row in rows if row["rank"] == 0 for _, samples in row["windows"]]
    assert samples[0] == BATCH
    first = samples.index(2 * BATCH)
    assert set(samples[:first]) == {BATCH}
    # The epoch in which it was changed may have had an odd number of batches left.
    assert samples[first:].count(BATCH) <= 1
