"""A recording as a session: any moment of it, at any speed, with the picture that was live then."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import support
import traces
from builders import T0_S, hello, node_frame, rank_frame, record, sensors

from gpuwatch.errors import TargetError
from gpuwatch.frames import decode_node_frame
from gpuwatch.recording import Player, Recorder, Recording, ReplaySession, open_recording, replay
from gpuwatch.recording.replay import step_s
from gpuwatch.schema import Bye
from gpuwatch.store import Store, View
from gpuwatch.store.session import Playback


class Clock:
    """A monotonic clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def sent(seconds: int = 20) -> list[bytes]:
    """Two ranks on two nodes, ten frames and steps a second; rank 1 ends after the half."""
    found = []
    for i in range(1, 10 * seconds + 1):
        for rank in range(2):
            over = rank == 1 and i >= 5 * seconds
            if over and i > 5 * seconds:
                found.append(node_frame(i, node="n1", sent_s=T0_S + i / 10))
                continue
            frame = rank_frame(
                i,
                [record(i - 1, {"forward": 60.0, "other": 40.0 + rank})],
                rank=rank,
                hello=hello(rank, 2) if i == 1 else None,
                bye=Bye("finished") if over else None,
                sent_s=T0_S + i / 10,
            )
            tick = sensors(i) if i % 10 == 0 else None
            found.append(node_frame(i, [frame], node=f"n{rank}", sensors=tick, sent_s=frame.sent_s))
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "a.gpuwatch"
    with Recorder(path) as recorder:
        for frame in sent():
            recorder.write(frame)
    return path


def pictured(view: View) -> View:
    """The picture without what counts changes, and events without their moments."""
    return replace(
        view,
        version=0,
        at_s=0.0,
        link="",
        message="",
        events=tuple(replace(e, at_s=0.0) for e in view.events),
    )


def live_view(until_s: float) -> View:
    """The picture of a live store that has been fed until then."""
    now_s = 0.0
    store = Store(lambda: now_s, wall=lambda: T0_S + now_s)
    for data in sent():
        at_s = decode_node_frame(data).sent_s - (T0_S + 0.1)
        if at_s > until_s + 1e-6:
            break
        now_s = at_s
        store.apply(data, at_s)
    return store.view()


def steps_of(view: View, rank: int = 0) -> int:
    return next(r.steps for run in view.runs for r in run.ranks if r.rank == rank)


def opened(path: Path, clock: Clock, **how: float) -> ReplaySession:
    return ReplaySession(open_recording(path), clock=clock, **how)


def wait_for_step(session: ReplaySession, steps: int) -> None:
    support.wait_until(lambda: steps_of(session.view()) == steps, 20, f"{steps} steps", 0.01)


# --- the player --------------------------------------------------------------------------------


def test_the_picture_is_the_one_that_was_live(path: Path) -> None:
    with open_recording(path) as recording:
        player = Player(recording)
        for until_s in (0.0, 3.0, 12.0, recording.duration_s):
            player.advance(until_s)
            assert pictured(player.view()).runs == pictured(live_view(until_s)).runs
        last = player.view()
        assert pictured(last).nodes == pictured(live_view(99.0)).nodes
        again = Player(recording)
        again.advance(99.0)
        assert pictured(again.view()) == pictured(live_view(99.0))
    assert last.at_s == pytest.approx(T0_S + 20)
    assert (last.link, last.message, last.lost) == ("replay", "", 0)


def test_events_have_the_time_of_the_recording(path: Path) -> None:
    with open_recording(path) as recording:
        *_, last = Player(recording).ticks(1.0)
    ended = next(e for e in last.events if "rank 1 ended" in e.text)
    assert T0_S + 10 <= ended.at_s <= T0_S + 11.2


def test_when_a_step_was_made(path: Path) -> None:
    with open_recording(path) as recording:
        assert step_s(recording, 0) == 0.0
        at_s = step_s(recording, 120)
        assert at_s == pytest.approx(12.0)
        assert step_s(recording, 200) is None


def test_damage_is_said_in_the_picture(path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "b.gpuwatch"
    broken.write_bytes(path.read_bytes()[:-10])
    with open_recording(broken) as recording:
        player = Player(recording)
        assert "ends in the middle of a frame" in player.view().message


# --- the session -------------------------------------------------------------------------------


def test_time_passes_and_can_be_sped_up_and_stopped(path: Path) -> None:
    clock = Clock()
    session = opened(path, clock)
    playback: Playback = session
    try:
        assert playback.duration == pytest.approx(19.9)
        assert (playback.position, playback.paused, playback.speed) == (0.0, False, 1.0)
        assert steps_of(session.view()) == 1
        before = session.version
        clock.now_s += 2.0
        wait_for_step(session, 21)
        assert session.version > before
        assert session.view().at_s == pytest.approx(T0_S + 2.1)
        playback.speed = 4.0
        clock.now_s += 1.0
        assert playback.position == pytest.approx(6.0)
        wait_for_step(session, 61)
        playback.paused = True
        clock.now_s += 50.0
        assert playback.position == pytest.approx(6.0)
        playback.paused = False
        clock.now_s += 1.0
        assert playback.position == pytest.approx(10.0)
        clock.now_s += 1000.0
        assert playback.position == playback.duration
        wait_for_step(session, 200)
    finally:
        session.close()


def test_any_moment_can_be_gone_to(path: Path) -> None:
    clock = Clock()
    session = opened(path, clock, position_s=5.0)
    try:
        assert steps_of(session.view()) == 51
        for position_s, steps in ((15.0, 151), (3.0, 31), (-7.0, 1), (1e9, 200), (0.05, 1)):
            seeks = session.seeks
            session.seek(position_s)
            assert session.seeks == seeks + 1
            assert session.position == min(max(position_s, 0.0), session.duration)
            wait_for_step(session, steps)
        session.paused = True
        session.seek(4.0)
        wait_for_step(session, 41)
        assert session.paused
        assert pictured(session.view()).runs == pictured(live_view(4.0)).runs
        assert session.view().lost == 0
    finally:
        session.close()


def test_going_back_begins_near(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_KEYFRAME_S", 1.0)
    fed: list[int] = []
    recording = open_recording(path)
    read = recording.frame

    def noted(at: int) -> bytes:
        fed.append(at)
        return read(at)

    monkeypatch.setattr(recording, "frame", noted)
    session = ReplaySession(recording, clock=Clock())
    try:
        session.seek(20.0)
        wait_for_step(session, 200)
        assert len(fed) == 400
        for position_s, steps in ((7.05, 71), (18.55, 186), (2.35, 24), (20.0, 200)):
            fed.clear()
            session.seek(position_s)
            wait_for_step(session, steps)
            assert len(fed) <= 42  # two nodes, two seconds
            straight = Player(recording)
            straight.advance(position_s)
            assert pictured(session.view()).runs == pictured(straight.view()).runs
            assert pictured(session.view()).nodes == pictured(straight.view()).nodes
    finally:
        session.close()


def test_keyframes_have_their_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_KEPT_BYTES", 20_000)
    monkeypatch.setattr(replay, "_KEYFRAME_S", 0.5)
    session = opened(path, Clock(), position_s=20.0)
    try:
        kept = session._keyframes
        assert 1 <= len(kept._saved) < 20
        assert sum(len(data) for _, data in kept._saved) <= 20_000
        session.seek(10.0)
        wait_for_step(session, 101)
    finally:
        session.close()


def test_many_seeks_end_at_the_last(path: Path) -> None:
    session = opened(path, Clock())
    try:
        for i in range(200):
            session.seek(20.0 if i % 2 else 1.0)
        session.seek(7.05)
        wait_for_step(session, 71)
    finally:
        session.close()


def test_the_version_never_falls(path: Path) -> None:
    clock = Clock()
    session = opened(path, clock)
    try:
        seen = [session.version]
        for position_s in (10.0, 2.0, 18.0, 0.0):
            session.seek(position_s)
            wait_for_step(session, int(position_s * 10) + 1)
            seen += [session.version, session.view().version]
        assert seen == sorted(seen)
        assert len(set(seen)) > 4
    finally:
        session.close()


def test_nobody_answers_in_a_recording(path: Path) -> None:
    session = opened(path, Clock())
    try:
        with pytest.raises(TargetError, match="this is a recording: nobody answers stack"):
            session.send("stack", "run-1")
    finally:
        session.close()


def test_closing_ends_the_thread_at_once(path: Path) -> None:
    recording = open_recording(path)
    session = ReplaySession(recording)
    started_s = time.monotonic()
    session.close()
    assert time.monotonic() - started_s < 10  # it is paced, and 20 s long
    assert not [t for t in threading.enumerate() if t.name == "gpuwatch-replay"]
    with pytest.raises(ValueError, match="closed"):
        recording.frame(0)


def test_a_file_that_is_cut_under_it_says_so(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gpuwatch"
    copy.write_bytes(path.read_bytes())
    session = opened(copy, Clock())
    try:
        with copy.open("r+b") as file:
            file.truncate(2000)
        session.seek(15.0)
        support.wait_until(lambda: bool(session.view().message), 20)
        assert session.view().message == f"{copy} has been cut while it was read"
    finally:
        session.close()


# --- traces from numbers -----------------------------------------------------------------------


def played(job: traces.Job, path: Path) -> tuple[View, Recording]:
    with open_recording(job.write(path)) as recording:
        player = Player(recording)
        player.advance(recording.duration_s)
        return player.view(), recording


def test_a_job_from_numbers(tmp_path: Path) -> None:
    job = traces.Job(
        ranks=4,
        nodes=2,
        steps=200,
        phases_ms=[{"data_wait": [50.0] * 150 + [5.0], "forward": 20.0 + 10 * r} for r in range(4)],
        transfer_ms=2.0,
        step={"queue_depth": [0] * 150 + [3], "loss": [4.0, 3.0, 2.0]},
        loader={"num_workers": 2, "batch_size": 16},
        batch_ms=(90.0, 60.0, 10.0),
        host={"cpu_percent": [10.0, 20.0, 30.0]},
        gpu=[{"gpu_util": 50.0 + r} for r in range(4)],
        process={"cpu_percent": 40.0},
        worker_process={"cpu_percent": 70.0},
        worker_state="D",
        spans=[(100, "eval", 500.0)],
        scatter=0.0,
        simulated=True,
        ends=True,
        more=[{"type": "state", "rank": 2, "at_s": 1.0, "notices": ["a word"]}],
    )
    view, recording = played(job, tmp_path / "t.jsonl")
    (run,) = view.runs
    assert (run.state, run.steps, run.simulated, run.nodes) == (
        "ended",
        200,
        True,
        ("node0", "node1"),
    )
    # 150 steps of 50 + 50 + 2 ms, 50 of 5 + 50 + 2, and the evaluation.
    assert recording.duration_s == pytest.approx(150 * 0.102 + 50 * 0.057 + 0.5, abs=0.01)
    last = run.ranks[0]
    assert last.last is not None
    assert last.last.step_ns == pytest.approx(57e6)
    assert last.last.host.comm == pytest.approx(32e6)
    assert run.ranks[3].last is not None
    assert run.ranks[3].last.host.comm == pytest.approx(2e6)
    assert (last.loss, last.last.queue_depth) == (2.0, 3.0)
    assert last.batch_wall_ms == pytest.approx(90.0)
    assert last.batch_cpu_ms == pytest.approx(60.0)
    assert last.collate_ms == pytest.approx(10.0)
    assert last.process is not None
    assert last.process.readings["cpu_percent"].value == 40.0
    assert [w.status for w in last.workers] == ["D", "D"]
    assert last.ledger.eval_ns == 500_000_000
    assert run.ranks[2].notices == ("a word",)
    gpus = {gpu.uuid: gpu.readings["gpu_util"].value for n in view.nodes for gpu in n.gpus}
    assert gpus == {"GPU-0": 50.0, "GPU-1": 51.0, "GPU-2": 52.0, "GPU-3": 53.0}
    assert [n.host.readings["cpu_percent"].value for n in view.nodes if n.host] == [30.0, 30.0]


def test_scatter_is_as_asked_and_repeatable(tmp_path: Path) -> None:
    def steps_ms(**more: float) -> list[float]:
        job = traces.Job(steps=64, warmup=0, **more)  # type: ignore[arg-type]
        view, _ = played(job, tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl")
        return [r.step_ns / 1e6 for r in view.runs[0].ranks[0].window]

    quiet, noisy = steps_ms(scatter=0.0), steps_ms(scatter=0.1)
    assert set(quiet) == {60.0}
    assert noisy == steps_ms(scatter=0.1)
    assert noisy != steps_ms(scatter=0.1, seed=1)
    mean_ms = sum(noisy) / 64
    spread_ms = (sum((v - mean_ms) ** 2 for v in noisy) / 64) ** 0.5
    # Forward 20 and backward 40, each with a tenth: a step of 60 with 4.5.
    assert mean_ms == pytest.approx(60, abs=2)
    assert 3 < spread_ms < 6
