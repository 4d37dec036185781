"""Profiles of a training in this process, and what is made of their events."""

import base64
import gzip
import json
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from torch.profiler import ProfilerActivity, profile

from gpuwatch.probe import profile as module
from gpuwatch.probe.boundary import Desk, Outcome
from gpuwatch.probe.events import Recorder
from gpuwatch.probe.pace import CommandError, Pace
from gpuwatch.probe.pieces import Piece, covered_ns, operators, overlap_ns, pieces_of, summarise
from gpuwatch.probe.profile import KEPT_TRACES, Profiles
from gpuwatch.schema import WIRE_VERSION, Command

MS = 1_000_000


class Training:
    """A small training whose steps the test takes, and the profiles of it."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.desk = Desk(self.recorder)
        self.profiles = Profiles(self.desk, lambda: ("a run/of ours", 3, 1))
        self.model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.asked = 0

    def ask(self, **args: Any) -> str:
        self.asked += 1
        command = Command(WIRE_VERSION, f"id{self.asked}", "profile", args=args)
        pace = Pace(self.recorder.attempts, self.recorder.attempts)
        words, job = self.profiles.begin(command, pace, 0.0)
        self.desk.put(job, 10.0)
        return words

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if self.desk.due:
                self.desk.fetching()
            self.model(torch.ones(4, 16)).sum().backward()
            self.optimizer.step()
            self.recorder.optimizer_end(1)

    def outcome(self) -> Outcome:
        support.wait_until(lambda: bool(self.desk.outcomes), 30, "the profile")
        return self.desk.outcomes.popleft()[1]

    def document(self) -> dict[str, Any]:
        outcome = self.outcome()
        assert outcome.status == "done", outcome.message
        found: dict[str, Any] = json.loads(outcome.data)
        return found

    def fetch(self, **args: Any) -> dict[str, Any]:
        command = Command(WIRE_VERSION, "fetch", "fetch", args=args)
        found: dict[str, Any] = json.loads(self.profiles.fetch(command)[1])
        return found


@pytest.fixture
def training(rundir: Path) -> Iterator[Training]:
    made = Training()
    made.step(2)
    yield made
    made.desk.close()
    made.profiles.close()
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_profile_covers_the_steps_it_names(training: Training, rundir: Path) -> None:
    assert training.ask(steps=2) == "steps 4-5"
    training.step(6)
    found = training.document()
    assert (found["first_step"], found["last_step"], found["clock"]) == (4, 5, "host")
    calls = {row["name"]: row["calls"] for row in found["operators"]}
    assert calls["aten::addmm"] == 3 * 2
    assert calls["Optimizer.step#SGD.step"] == 2
    assert len(found["operators"]) <= 20
    assert found["kernel_share"] is found["comm_ms"] is found["comm_overlap_share"] is None
    assert found["na"]["comm_ms"] == "one process"
    assert sum(row["self_ms"] for row in found["operators"]) <= found["wall_ms"]
    assert found["trace"] == "a_run_of_ours.r3.s4-5.json.gz"
    path = Path(found["trace_path"])
    assert path == rundir / "traces" / found["trace"]
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert path.stat().st_size == found["trace_bytes"]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::addmm" for event in events) == 3 * 2
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_trace_is_fetched_in_pieces(
    training: Training, monkeypatch: pytest.MonkeyPatch, rundir: Path
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    training.ask(steps=1)
    training.step(4)
    found = training.document()
    name, data = found["trace"], b""
    while True:
        piece = training.fetch(name=name, offset=len(data))
        assert piece["total_bytes"] == found["trace_bytes"]
        if not piece["bytes"]:
            break
        data += base64.b64decode(piece["base64"])
    assert data == Path(found["trace_path"]).read_bytes()
    (rundir / "traces" / "other.json.gz").write_bytes(b"of another rank")
    for bad in ("other.json.gz", f"../traces/{name}", f"./{name}", str(found["trace_path"])):
        with pytest.raises(CommandError, match=f"of this rank; there is {name}"):
            training.fetch(name=bad)
    for args, words in [
        ({}, "name must be the name of a trace"),
        ({"name": name, "offset": -1}, "offset must be a whole number from 0 to"),
        ({"name": name, "offset": 10**9}, "offset must be a whole number from 0 to"),
        ({"name": name, "to": 3}, "fetch takes name, offset, not 'to'"),
    ]:
        with pytest.raises(CommandError, match=words):
            training.fetch(**args)


def test_old_traces_go(training: Training, rundir: Path) -> None:
    names = []
    for _ in range(KEPT_TRACES + 2):
        training.ask(steps=1)
        training.step(4)
        names.append(training.document()["trace"])
    left = {path.name for path in (rundir / "traces").iterdir()}
    assert left == set(names[2:])
    with pytest.raises(CommandError, match="no trace"):
        training.fetch(name=names[0])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"steps": 0}, "steps must be a whole number from 1 to 50, not '0'"),
        ({"steps": 51}, "steps must be"),
        ({"steps": 2.0}, "steps must be"),
        ({"steps": True}, "steps must be"),
        ({"at": 1}, "step 1 has begun already: this rank is at step 2"),
        ({"at": 10**6}, "over 10,000 steps ahead"),
        ({"ranks": 3}, "profile takes steps, at, not 'ranks'"),
    ],
)
def test_what_is_refused(training: Training, args: dict[str, Any], words: str) -> None:
    with pytest.raises(CommandError) as refused:
        training.ask(**args)
    assert words in str(refused.value)


def test_there_is_one_at_a_time(training: Training) -> None:
    assert training.ask(steps=1, at=5) == "step 5"
    with pytest.raises(CommandError, match="busy: a profile of step 5 is under way"):
        training.ask()
    training.step(3)
    with pytest.raises(CommandError, match="busy"):
        training.ask()
    training.step(3)
    assert training.document()["first_step"] == 5
    training.ask()


def test_the_end_of_the_training_ends_it(training: Training) -> None:
    training.ask(steps=50)
    training.step(4)
    assert torch.autograd.profiler._is_profiler_enabled
    training.desk.close()
    assert not torch.autograd.profiler._is_profiler_enabled
    outcome = training.outcome()
    assert (outcome.status, outcome.message.split()[:4]) == (
        "error", ["the", "training", "has", "ended"],
    )  # fmt: skip
    with profile(activities=[ProfilerActivity.CPU]):
        training.step()


def test_a_script_that_profiles_itself_goes_first(training: Training) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as own:
        with pytest.raises(CommandError, match="the training profiles itself now"):
            training.ask()
        training.step()
    assert len(own.key_averages()) > 3
    for steps_before in (2, 4):  # ours is prepared, or runs
        training.ask(steps=3)
        training.step(steps_before)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with profile(activities=[ProfilerActivity.CPU]) as own:
                training.step(2)
        calls = {row.key: row.count for row in own.key_averages()}
        assert calls["aten::addmm"] == 6
        training.step()
        outcome = training.outcome()
        assert outcome.status == "error"
        assert "this profile gave way" in outcome.message
    training.ask(steps=1)
    training.step(4)
    assert training.document()["na"]["comm_ms"] == "one process"


def test_what_fails_in_it_never_reaches_the_loop(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object) -> None:
        raise RuntimeError("no kineto")

    for name in ("prepare_trace", "start_trace", "stop_trace"):
        with monkeypatch.context() as patch:
            patch.setattr(profile, name, broken)
            training.ask(steps=1)
            training.step(5)
            outcome = training.outcome()
        assert outcome.status == "error"
        assert "no kineto" in outcome.message
        if name == "stop_trace":  # torch's own runs on: nobody can stop it but us, here
            torch.autograd.profiler._disable_profiler()
            torch.autograd.profiler._run_on_profiler_stop()


# --- pieces ------------------------------------------------------------------------------------


def test_sums_are_those_of_torch(training: Training) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        training.step(3)
    rows = operators(pieces_of(profiler.profiler.kineto_results.events()))  # type: ignore[union-attr]
    theirs = {row.key: row for row in profiler.key_averages()}
    assert {row["name"] for row in rows} == set(theirs)
    for row in rows:
        other = theirs[row["name"]]
        assert row["calls"] == other.count
        assert row["self_ms"] == pytest.approx(other.self_cpu_time_total / 1e3, abs=1e-3)
        assert row["total_ms"] == pytest.approx(other.cpu_time_total / 1e3, abs=1e-3)
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
    assert [row["self_ms"] for row in rows] == sorted((r["self_ms"] for r in rows), reverse=True)


def test_intervals() -> None:
    assert covered_ns([(5, 9), (0, 3), (2, 4), (6, 7)]) == 8
    assert covered_ns([]) == 0
    assert overlap_ns([(0, 10), (20, 30)], [(5, 22), (8, 12), (29, 50)]) == 5 + 2 + 1
    assert overlap_ns([(0, 10)], []) == 0


def test_on_a_device_kernels_decide() -> None:
    pieces = [
        Piece("aten::mm", 0, 2 * MS, thread=1, id=7),
        Piece("cudaLaunchKernel", 1 * MS, 2 * MS, thread=1, id=8),
        Piece("gemm", 3 * MS, 8 * MS, on_device=True, is_kernel=True, parent=7),
        Piece("ncclDevKernel_AllReduce", 6 * MS, 10 * MS, on_device=True, is_kernel=True),
        Piece("Memcpy HtoD", 12 * MS, 13 * MS, on_device=True, parent=8),
    ]
    found = summarise(pieces, 20 * MS, world_size=8)
    assert found.clock == "device"
    assert found.kernel_share == pytest.approx(7 / 20)
    assert found.comm_ms == pytest.approx(4.0)
    assert found.comm_overlap_share == pytest.approx(0.5)
    assert found.na == {}
    first = found.operators[0]
    assert (first["name"], first["device_self_ms"], first["self_ms"]) == ("aten::mm", 5.0, 1.0)
    assert first["share"] == pytest.approx(5 / 6)


def test_on_the_host_communication_overlaps_with_operators() -> None:
    pieces = [
        Piece("gloo:all_reduce", 0, 10 * MS, thread=9, is_async=True),
        Piece("c10d::allreduce_", 0, 1 * MS, thread=1),
        Piece("aten::mm", 2 * MS, 5 * MS, thread=1),
        Piece("aten::add_", 12 * MS, 13 * MS, thread=1),
    ]
    found = summarise(pieces, 20 * MS, world_size=2)
    assert (found.comm_ms, found.comm_overlap_share) == (10.0, pytest.approx(0.3))
    assert found.kernel_share is None
    assert found.na == {"kernel_share": "no kernel ran on a device in these steps"}
    alone = summarise(pieces[:2], 20 * MS, world_size=2)
    assert alone.comm_overlap_share is None
    assert "comm_overlap_share" in alone.na
    none = summarise(pieces[2:], 20 * MS, world_size=2)
    assert none.comm_ms is None
    assert none.na["comm_ms"] == "no gloo or NCCL operation ran in these steps"


def test_the_thread_that_reads_does_not_keep_the_process(training: Training) -> None:
    training.ask(steps=1)
    training.step(4)
    running = training.profiles._running
    assert running is not None
    assert running.over.wait(30)
    assert running.reader is not None
    assert running.reader.daemon


# --- where it ends early -----------------------------------------------------------------------


def forked_child_profiles() -> bool:
    pid = os.fork()
    if not pid:
        os._exit(int(torch._C._autograd._profiler_enabled()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


@pytest.mark.parametrize("whole", [0, 2])
def test_a_process_that_is_forked_does_not_profile_on(training: Training, whole: int) -> None:
    training.ask(steps=10, at=4)
    training.step(3)
    assert torch.autograd.profiler._is_profiler_enabled
    training.step(whole - 1 if whole else 0)
    if not whole:  # the step that has begun has not ended
        training.recorder.attempts -= 1
    assert not forked_child_profiles()
    assert not torch.autograd.profiler._is_profiler_enabled
    if not whole:
        training.recorder.attempts += 1
        outcome = training.outcome()
        assert outcome.status == "error"
        assert outcome.message == (
            "the training started processes (loader workers, say) before one step of the profile "
            "was whole"
        )
        return
    assert not training.desk.outcomes  # it is read at the next mark, after the fork
    training.step()
    found = training.document()
    assert (found["first_step"], found["last_step"]) == (4, 5)
    assert found["note"].startswith("ended after 2 of 10 steps: the training started processes")
    assert {row["name"]: row["calls"] for row in found["operators"]}["aten::addmm"] == 3 * 2


def test_training_in_another_thread_is_not_profiled(training: Training) -> None:
    training.ask(steps=1)
    thread = threading.Thread(target=training.step, args=(4,))
    thread.start()
    thread.join()
    outcome = training.outcome()
    assert outcome.status == "error"
    assert outcome.message.startswith("the training runs in a thread other than the main one")


def test_another_thread_has_it_ended_where_it_runs(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.ask(steps=50)
    training.step(3)
    other = threading.Thread(target=training.profiles.recall)
    other.start()
    running = training.profiles._running
    support.wait_until(lambda: running._recalled, 30)  # type: ignore[union-attr]
    training.step()
    other.join()
    assert not torch.autograd.profiler._is_profiler_enabled
    assert training.outcome().message == "the training is no longer watched"
    # And where no mark comes any more, at the exit.
    at_exit: list[Any] = []
    monkeypatch.setattr(module, "_RECALL_S", 0.01)
    monkeypatch.setattr(module.atexit, "register", at_exit.append)
    training.ask(steps=50)
    training.step(3)
    other = threading.Thread(target=training.profiles.recall)
    other.start()
    other.join()
    assert torch.autograd.profiler._is_profiler_enabled
    at_exit.pop()()
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_profile_of_many_events_ends_with_the_steps_so_far(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = [0]
    monkeypatch.setattr(module, "_resident_bytes", lambda: resident[0])
    training.ask(steps=5, at=4)
    training.step(1)
    resident[0] = 2**30  # what the training takes before it begins is its own
    training.step(1)
    training.step(2)
    resident[0] += module._MOST_GROWTH + 2**20
    training.step(1)
    found = training.document()
    assert (found["first_step"], found["last_step"]) == (4, 5)
    assert found["note"] == "ended after 2 of 5 steps: the process had grown by 65 MiB"
    # Within the first step already, at a fetch that is no boundary.
    training.ask(steps=5)
    training.step(3)
    training.desk.fetching()
    resident[0] += module._MOST_GROWTH + 2**20
    training.recorder.attempts -= 1
    training.desk._seen -= 1
    training.desk.fetching()
    training.recorder.attempts += 1
    outcome = training.outcome()
    assert outcome.status == "error"
    assert outcome.message.startswith("the process had grown by 65 MiB before one step")


def test_a_profile_of_long_steps_ends_with_the_steps_so_far(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.ask(steps=5, at=4)
    training.step(4)
    monkeypatch.setattr(module, "_LONGEST_S", 0.0)
    training.step(1)
    found = training.document()
    assert (found["first_step"], found["last_step"]) == (4, 5)
    assert found["note"] == "ended after 2 of 5 steps: it took over 0 s"


def test_traces_are_kept_by_their_bytes_and_leftovers_go(tmp_path: Path) -> None:
    for age_s, name in enumerate(["c", "b", "a"]):
        path = tmp_path / f"{name}.json.gz"
        path.write_bytes(b"x" * 100)
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
    module._tidy(tmp_path, "*.json.gz", 9, 200)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json.gz", "c.json.gz"]
    module._tidy(tmp_path, "*.json.gz", 9, 50)
    assert [path.name for path in tmp_path.iterdir()] == ["c.json.gz"]
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    for name in (f".{child}.json", f".{os.getpid()}.gz"):
        (tmp_path / name).touch()
        module._sweep(tmp_path)  # too young: its writer may live in another container
        assert (tmp_path / name).exists()
        os.utime(tmp_path / name, (1e9, 1e9))
    module._sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".{os.getpid()}.gz", "c.json.gz"]
