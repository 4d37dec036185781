"""Recording live runs, and every command on what was recorded, as a shell calls them."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import termios
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyte
import pytest
import support
import traces
from builders import hello, node_frame, rank_frame
from click.testing import CliRunner, Result

from gpuwatch.commands.cli import cli
from gpuwatch.commands.record import _from_hello
from gpuwatch.commands.recorded import last_view
from gpuwatch.commands.session import LiveSession
from gpuwatch.commands.shapes import status_document
from gpuwatch.frames import decode_node_frame, decode_rank_frame
from gpuwatch.recording import Recorder, open_recording
from gpuwatch.store import View

TESTS = Path(__file__).parent.parent
FAKE_RANK = str(TESTS / "wire" / "fake_rank.py")
JOB = str(TESTS / "run" / "job.py")


def gpuwatch(rundir: Path, *argv: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = support.gpuwatch(rundir, *argv)
    assert done.returncode == expect, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def called(*argv: str, expect: int = 0) -> Result:
    """A command in this process: quicker than a shell."""
    done = CliRunner().invoke(cli, argv)
    assert done.exit_code == expect, (done.output, done.exception)
    return done


def fake_rank(
    rundir: Path, rank: int = 0, world: int = 2, run: str = "a-run"
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    env = support.environment(rundir, PYTHONPATH=str(TESTS), GPUWATCH_RUN_ID=run)
    return support.process([support.PYTHON, FAKE_RANK, str(rank), str(world)], env)


def without_ages(value: Any) -> Any:
    """A document without what passes with time alone."""
    if isinstance(value, dict):
        return {k: without_ages(v) for k, v in value.items() if not k.endswith("age_s")}
    if isinstance(value, list):
        return [without_ages(item) for item in value]
    return value


def quiet(view: View) -> int:
    return max((rank.steps for run in view.runs for rank in run.ranks), default=0)


# --- live --------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_real_run_is_the_same_live_and_replayed(rundir: Path, tmp_path: Path) -> None:
    path = tmp_path / "real.gpuwatch"
    stay = tmp_path / "go"
    env = support.environment(rundir, GPUWATCH_RUN_ID="real", STAY=str(stay))
    argv = [*support.GPUWATCH, "run", "--no-card", "--", support.PYTHON, JOB, "ends"]
    with Recorder(path) as recorder, support.process(argv, env):
        session = LiveSession(rundir, tap=recorder.write)
        try:
            support.wait_until(lambda: quiet(session.view()) >= 8, 60, "the steps of the job")
            support.wait_until(
                lambda: any(n.host and n.host.cores for n in session.view().nodes), 30, "sensors"
            )
        finally:
            session.close()
        live = session.view()
        stay.touch()
    replayed, recording = last_view(str(path))
    assert recording.problem == ""
    assert quiet(live) == quiet(replayed) == 8
    assert replayed.runs[0].ranks[0].window
    assert without_ages(status_document(replayed)) == without_ages(status_document(live))
    shown = json.loads(gpuwatch(rundir, "status", str(path), "--json").stdout)
    told = shown.pop("recording")
    assert without_ages(shown) == without_ages(status_document(live))
    assert (told["file"], told["frames"], told["problem"]) == (str(path), len(recording), None)


@pytest.mark.process
def test_recording_until_the_run_ends_and_by_signal(rundir: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.gpuwatch", tmp_path / "cut.jsonl"
    errors = {name: (tmp_path / f"{name}.err") for name in ("whole", "cut", "killed")}
    killed = tmp_path / "killed.gpuwatch"

    def recorder(name: str, *argv: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
        env = support.environment(rundir)
        return support.process([*support.GPUWATCH, "record", *argv], env, output=errors[name])

    with fake_rank(rundir, 0) as first, fake_rank(rundir, 1) as second:
        support.wait_until(lambda: len(support.rank_presences(rundir)) == 2, 20, "ranks")
        with (
            recorder("whole", "-o", str(whole)) as to_end,
            recorder("cut", "a-run", "--jsonl", "-o", str(cut)) as by_signal,
            recorder("killed", "a-run", "-o", str(killed)) as by_kill,
        ):
            for file in (whole, cut, killed):
                support.wait_until(
                    lambda file=file: file.exists() and file.stat().st_size > 20_000,  # type: ignore[misc]
                    30,
                    f"{file}",
                )
            by_kill.send_signal(signal.SIGKILL)
            by_signal.send_signal(signal.SIGINT)
            assert by_signal.wait(30) == 0
            first.send_signal(signal.SIGTERM)
            second.send_signal(signal.SIGTERM)
            assert to_end.wait(30) == 0
            by_kill.wait(10)
    for path, state in ((whole, "ended"), (cut, "running"), (killed, "running")):
        view, recording = last_view(str(path))
        (run,) = view.runs
        assert (run.run, run.state, len(run.ranks)) == ("a-run", state, 2)
        assert all(rank.hello is not None and rank.lost == 0 for rank in run.ranks)
        assert run.steps > 5
        assert recording.problem == ""
        with open_recording(path) as again:
            first = decode_node_frame(again.frame(0))
        assert any(decode_rank_frame(raw).hello is not None for raw in first.frames)
    assert errors["whole"].read_text() == (
        f"recording run a-run (2 of 2 ranks) to {whole}; Ctrl-C ends it\n"
    )
    assert errors["cut"].read_text().count("\n") == 1
    view, _ = last_view(str(whole))
    assert {rank.state_reason for rank in view.runs[0].ranks} == {"finished"}


def test_a_recording_begins_with_a_hello_of_its_run() -> None:
    mine = {"run": "mine"}
    held = [
        node_frame(1, [rank_frame(1, **mine)]),
        b"no frame",
        node_frame(2, [rank_frame(1, run="other", hello=hello())]),
        node_frame(3, [rank_frame(2, **mine, hello=hello())]),
        node_frame(4, [rank_frame(3, **mine)]),
    ]
    assert _from_hello(held, "mine") == held[3:]
    assert _from_hello(held[:3], "mine") == held[:3]


@pytest.mark.process
def test_recording_for_a_time_waits_for_a_run(
    rundir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nothing = called("record", "--for", "0.5s")
    assert nothing.stderr == (
        "no run of yours on this machine yet: recording the first that starts\n"
    )
    assert list(tmp_path.iterdir()) == []
    missing = called("record", "nowhere", expect=2)
    assert missing.stderr == (
        "gpuwatch: no run 'nowhere' here; gpuwatch runs lists those there are\n"
    )
    log = tmp_path / "log"
    argv = [*support.GPUWATCH, "record", "--for", "2s", "-o", str(tmp_path / "a.gpuwatch")]
    with support.process(argv, support.environment(rundir), output=log) as waiting:
        support.wait_until(lambda: "the first that starts" in support.text_of(log), 20)
        with fake_rank(rundir, 0, 1, "late"):
            assert waiting.wait(30) == 0
    view, recording = last_view(str(tmp_path / "a.gpuwatch"))
    assert view.runs[0].run == "late"
    assert view.runs[0].ranks[0].hello is not None
    assert 1.0 < recording.duration_s < 4.0


@pytest.mark.process
def test_a_disk_that_is_full_and_other_places_that_do_not_do(
    rundir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with fake_rank(rundir, 0, 1):
        support.wait_until(lambda: len(support.rank_presences(rundir)) == 1, 20, "rank")
        full = called("record", "-o", "/dev/full", expect=3)
        assert full.stderr == (
            "gpuwatch: cannot write to /dev/full: the disk is full; it holds 0 frames\n"
        )
        limit = called("record", "-o", "small.gpuwatch", "--max-size", "12K", expect=3)
        assert "has reached its limit of 12,288 bytes after" in limit.stderr.splitlines()[-1]
        with open_recording("small.gpuwatch") as recording:
            assert recording.problem == ""
        there = called("record", "-o", "small.gpuwatch", expect=2)
        assert "small.gpuwatch exists; name another file" in there.stderr
        named = called("record", "--for", "0.3s", "--jsonl")
        (made,) = tmp_path.glob("a-run-2*.jsonl")
        assert made.name in named.stderr
        piped = gpuwatch(rundir, "record", "--for", "0.3s", "--jsonl", "-o", "-")
        assert json.loads(piped.stdout.splitlines()[0]) == {
            "type": "trace",
            "version": 1,
            "framed": True,
        }


# --- recorded ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = traces.Job(
        ranks=4,
        nodes=2,
        steps=150,
        phases_ms=[
            {"data_wait": 0.5, "forward": 20.0, "backward": 70.0 if rank == 2 else 40.0}
            for rank in range(4)
        ],
        step={"queue_depth": 4, "queue_capacity": 4},
        host={"cpu_percent": 20, "cpu_iowait_percent": 0},
        process={"cpu_percent": 35},
        simulated=True,
    )
    return job.write(tmp_path_factory.mktemp("trace") / "slow rank.jsonl")


def test_every_command_on_a_file(rundir: Path, trace: Path) -> None:
    listed = json.loads(called("runs", str(trace), "--json").stdout)
    assert [(r["run"], r["ranks"], r["nodes"]) for r in listed["runs"]] == [
        ("job", 4, ["node0", "node1"])
    ]
    assert "job" in called("runs", str(trace)).stdout
    document = json.loads(called("status", str(trace), "--json").stdout)
    assert document["simulated"] is True
    assert document["runs"][0]["ranks"][2]["own_ms"] == pytest.approx(90.5, abs=3)
    text = called("status", str(trace)).stdout
    assert "4 of 4 ranks  150 steps  SIMULATED" in text
    done = called("diagnose", str(trace), "--json", "--fail-on", "warning", expect=1)
    kinds = [(f["kind"], f["ranks"]) for f in json.loads(done.stdout)["findings"]]
    assert kinds[0] == ("straggler", [2])
    assert "straggler: rank 2" in called("diagnose", str(trace)).stdout
    replayed = called("replay", str(trace), "--at", "40")
    assert "this is no terminal, so here is one picture as text" in replayed.stderr
    assert "SIMULATED" in replayed.stdout
    # None of them has needed, or started, a node process.
    assert list(rundir.iterdir()) == []


def test_files_that_do_not_do_are_one_sentence(trace: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"type": "step", "rank": 0, "step_sm": 3}\n')
    for command in ("status", "diagnose", "runs", "replay"):
        gone = called(command, "gone.gpuwatch", expect=2)
        assert gone.stderr == "gpuwatch: there is no file gone.gpuwatch\n"
        wrong = called(command, str(bad), expect=2)
        assert wrong.stderr == (
            f'gpuwatch: {bad}: line 1: a step has no "step_sm"; did you mean "step_ms"?\n'
        )
        assert wrong.stdout == ""
    late = called("replay", str(trace), "--at", "900", expect=2)
    assert late.stderr == f"gpuwatch: no rank has made step 900 in {trace}\n"
    watched = called("diagnose", str(trace), "--for", "3s", expect=2)
    assert "a recording is judged as a whole" in watched.stderr
    cut = tmp_path / "cut"
    with Recorder(cut) as recorder, open_recording(trace) as recording:
        for _, frame in recording.frames():
            recorder.write(frame)
    cut.write_bytes(cut.read_bytes()[:-5])
    done = called("status", str(cut), "--json")
    assert "ends in the middle of a frame at byte" in done.stderr
    assert json.loads(done.stdout)["recording"]["problem"] in done.stderr


def test_a_recording_without_a_run(tmp_path: Path) -> None:
    path = tmp_path / "machine.jsonl"
    path.write_text('{"type": "host", "readings": {"cpu_percent": 20}}\n')
    assert called("status", str(path)).stdout.startswith(f"no run in {path}\n")
    assert called("diagnose", str(path)).stdout == f"no run in {path}\n"
    assert json.loads(called("diagnose", str(path), "--json").stdout)["run"] is None


@pytest.mark.terminal
def test_the_screen_on_a_recording(rundir: Path, trace: Path) -> None:
    main, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    screen = pyte.Screen(120, 40)
    stream = pyte.ByteStream(screen)
    process = subprocess.Popen(
        [*support.GPUWATCH, "replay", str(trace), "--speed", "50"],
        stdin=child,
        stdout=child,
        stderr=child,
        env={**support.environment(rundir), "TERM": "xterm-256color"},
        start_new_session=True,
    )

    def text() -> str:
        while select.select([main], [], [], 0.05)[0]:
            stream.feed(os.read(main, 65536))
        return "\n".join(screen.display)

    try:
        support.wait_until(lambda: "rank 2 is late" in text(), 40, "the finding")
        shown = text()
        assert "REPLAY" in shown
        assert "SIMULATED" in shown
        os.write(main, b"q")
        support.wait_until(lambda: bool(text()) and process.poll() is not None, 30, "the end")
        assert process.returncode == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(main)
        os.close(child)
