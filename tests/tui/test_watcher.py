"""When something is drawn, what is drawn, and that diagnosis never holds it up."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpuwatch.diagnosis.types import RunDiagnosis
from gpuwatch.store.views import View
from gpuwatch.tui.diagnoser import Diagnoser
from gpuwatch.tui.watcher import SNOOZE_S, Watcher
from tests.tui.fakes import (
    FakeSession,
    few_workers,
    found,
    no_diagnosis,
    node_view,
    rank_view,
    run_view,
    two_ranks,
    view,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def until(ready: object, limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while not ready():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.005)


def test_nothing_new_is_not_drawn_but_ages_advance() -> None:
    clock, session = Clock(), FakeSession(two_ranks())
    watcher = Watcher(session, no_diagnosis, clock=clock)
    assert watcher.poll() is not None
    until(lambda: watcher.diagnoses == 1)
    assert watcher.poll() is not None  # the diagnosis has come in
    clock.now += 0.25
    assert watcher.poll() is None
    clock.now += 0.9
    scene = watcher.poll()
    assert scene is not None
    assert abs(scene.since_s - 1.15) < 1e-6
    session.show(replace(two_ranks(), at_s=two_ranks().at_s + 2.0))
    scene = watcher.poll()
    assert scene is not None
    assert scene.since_s == 0.0
    watcher.close()


def test_ages_of_a_replay_stand_still() -> None:
    clock = Clock()
    watcher = Watcher(FakeSession(replace(two_ranks(), link="replay")), no_diagnosis, clock=clock)
    watcher.poll()
    clock.now += 5.0
    scene = watcher.poll()
    assert scene is not None
    assert scene.since_s == 0.0
    watcher.close()


def test_pause_freezes_the_picture() -> None:
    clock, session = Clock(), FakeSession(two_ranks())
    watcher = Watcher(session, no_diagnosis, clock=clock)
    watcher.poll()
    watcher.toggle_pause()
    session.show(view([run_view([rank_view(steps=9999)])]))
    clock.now += 10.0
    assert watcher.poll() is None
    scene = watcher.poll(force=True)
    assert scene is not None
    assert scene.paused
    assert scene.run is not None
    assert scene.run.steps == 1240
    watcher.toggle_pause()
    scene = watcher.poll()
    assert scene is not None
    assert scene.run is not None
    assert scene.run.steps == 9999
    watcher.close()


def test_diagnosis_has_a_cadence_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Diagnoser, "submit", lambda _, picture: asked.append(picture.version))
    clock, session = Clock(), FakeSession(two_ranks())
    watcher = Watcher(session, no_diagnosis, clock=clock)
    for _ in range(8):
        session.show(two_ranks())
        watcher.poll()
        clock.now += 0.25
    assert len(asked) == 2
    # Nothing is judged twice: the same picture has the same findings.
    clock.now += 5.0
    watcher.poll()
    assert len(asked) == 3
    clock.now += 5.0
    watcher.poll()
    assert len(asked) == 3


def test_a_hanging_diagnosis_holds_nothing_up() -> None:
    release = threading.Event()

    def diagnose(_: View) -> Sequence[RunDiagnosis]:
        release.wait(20)
        return ()

    clock, session = Clock(), FakeSession(two_ranks())
    watcher = Watcher(session, diagnose, clock=clock)
    start = time.monotonic()
    for _ in range(20):
        session.show(two_ranks())
        assert watcher.poll() is not None
        clock.now += 1.0
    watcher.close()
    assert time.monotonic() - start < 5.0
    release.set()


def test_a_failing_diagnosis_is_told() -> None:
    def diagnose(_: View) -> Sequence[RunDiagnosis]:
        raise ZeroDivisionError("a rule divided by zero")

    watcher = Watcher(FakeSession(two_ranks()), diagnose)
    watcher.poll()
    until(lambda: watcher.diagnoses == 1)
    scene = watcher.poll()
    assert scene is not None
    assert "a rule divided by zero" in scene.diagnosis_error
    watcher.close()


def test_the_newest_live_run_is_shown_until_one_is_chosen() -> None:
    def named(run: str, state: str = "running") -> object:
        return run_view([rank_view(run=run)], run=run, state=state)

    session = FakeSession(view([named("new", "ended"), named("live"), named("old")]))  # type: ignore[list-item]
    watcher = Watcher(session, no_diagnosis)

    def shown() -> str:
        scene = watcher.poll(force=True)
        assert scene is not None
        assert scene.run is not None
        return scene.run.run

    assert shown() == "live"
    assert watcher.switch_run(1)
    assert shown() == "old"
    assert watcher.switch_run(1)
    assert shown() == "new"
    assert watcher.switch_run(-1)
    assert shown() == "old"
    watcher.close()
    chosen = Watcher(session, no_diagnosis, run="old")
    scene = chosen.poll()
    assert scene is not None
    assert scene.run is not None
    assert scene.run.run == "old"
    chosen.close()


def test_findings_belong_to_their_run() -> None:
    session = FakeSession(two_ranks())
    watcher = Watcher(session, found(few_workers()))
    watcher.poll()
    until(lambda: watcher.diagnoses == 1)
    scene = watcher.poll()
    assert scene is not None
    assert [item.id for item in scene.findings] == ["F1"]
    assert scene.diagnosed
    watcher.close()


def test_a_closed_diagnoser_starts_nothing() -> None:
    diagnoser = Diagnoser(no_diagnosis)
    diagnoser.close()
    diagnoser.submit(two_ranks())
    assert diagnoser.rounds == 0


def test_curves_end_where_the_run_has_ended() -> None:
    clock, session = Clock(), FakeSession(two_ranks())
    watcher = Watcher(session, no_diagnosis, clock=clock)
    watcher.poll()
    ended = run_view([replace(rank, state="ended") for rank in two_ranks().runs[0].ranks])
    ended = replace(ended, state="ended")
    session.show(replace(view([ended]), at_s=two_ranks().at_s + 3600.0))
    clock.now += 2.0
    scene = watcher.poll()
    assert scene is not None
    assert scene.end_s == two_ranks().at_s
    watcher.close()


def test_the_way_back_ends_where_nothing_is_kept_before() -> None:
    clock, start = Clock(), two_ranks()
    session = FakeSession(start)
    watcher = Watcher(session, no_diagnosis, clock=clock)
    watcher.poll()
    assert not watcher.move_in_time(-1.0)  # the only moment is the one on the screen
    assert not watcher.scene.paused
    clock.now += 2.0
    session.show(replace(start, at_s=start.at_s + 2.0))
    watcher.poll()
    assert watcher.move_in_time(-1.0)
    scene = watcher.poll(force=True)
    assert scene is not None
    assert scene.paused
    assert scene.behind_s == pytest.approx(2.0, abs=0.01)
    assert watcher.move_in_time(-1.0)  # from the second between them to the oldest
    assert not watcher.move_in_time(-1.0)
    watcher.close()


def test_devices_without_a_run_have_a_past() -> None:
    clock = Clock()
    session = FakeSession(view([], [node_view(gpus=2)]))
    watcher = Watcher(session, no_diagnosis, clock=clock)
    for second in range(5):
        session.show(replace(session.view(), at_s=two_ranks().at_s + second))
        watcher.poll()
        clock.now += 1.0
    scene = watcher.scene
    assert scene.past is not None
    points = scene.past.gpu_points("", "GPU-node0-1", "gpu_util")
    assert [value for _, value in points] == [71.0] * 5
    watcher.close()


def test_a_snoozed_finding_comes_back_after_a_while_or_when_it_gets_worse() -> None:
    clock, session = Clock(), FakeSession(two_ranks())
    findings = [few_workers(severity="warning")]

    def diagnose(_: View) -> Sequence[RunDiagnosis]:
        return [RunDiagnosis("r1", tuple(findings))]

    watcher = Watcher(session, diagnose, clock=clock)

    def open_now() -> list[str]:
        before = watcher.diagnoses
        clock.now += 1.5
        session.show(two_ranks())
        watcher.poll()
        until(lambda: watcher.diagnoses > before)
        scene = watcher.poll(force=True)
        assert scene is not None
        return [item.id for item in scene.open_findings]

    assert open_now() == ["F1"]
    assert watcher.snooze(findings[0])
    assert open_now() == []
    clock.now += SNOOZE_S
    assert open_now() == ["F1"]
    assert watcher.snooze(findings[0])
    assert open_now() == []
    findings[0] = few_workers(severity="critical")
    assert open_now() == ["F1"]
    assert watcher.snooze(findings[0])
    assert open_now() == []
    assert not watcher.snooze(findings[0])
    assert open_now() == ["F1"]
    watcher.close()


def test_a_large_run_is_drawn_as_often_as_its_share_allows() -> None:
    clock, used = Clock(), Clock()
    picture = view([run_view([rank_view(i, world=300, seconds=0) for i in range(300)])])
    session = FakeSession(picture)
    watcher = Watcher(session, no_diagnosis, clock=clock, cpu=used)
    assert watcher.poll() is not None
    used.now += 0.03  # making and painting it; of a twentieth of a core that is 0.6 s
    taken = []
    for _ in range(8):
        clock.now += 0.25
        session.show(picture)
        before = session.views
        watcher.poll()
        if session.views > before:
            taken.append(clock.now)
            used.now += 0.03
    assert [at - 100.0 for at in taken] == pytest.approx([0.75, 1.5])
    views = session.views
    assert watcher.poll(force=True) is not None  # a key is answered from the view that is there
    assert session.views == views
    watcher.close()


def test_what_keys_ask_for_does_not_make_the_picture_of_a_large_run_stand() -> None:
    clock, used = Clock(), Clock()
    picture = view([run_view([rank_view(i, world=300, seconds=0) for i in range(300)])])
    session = FakeSession(picture)
    watcher = Watcher(session, no_diagnosis, clock=clock, cpu=used)

    def tick() -> bool:
        clock.now += 0.25
        session.show(picture)
        before = session.views
        watcher.poll()
        return session.views > before

    watcher.poll()
    used.now += 0.03
    assert [tick() for _ in range(3)] == [False, False, True]
    used.now += 0.02
    for _ in range(15):  # pages are opened, the first of them before the picture was painted
        watcher.poll(force=True)
        used.now += 1.0
    # What had been used by then is less than the picture before cost; that counts for it too.
    assert [tick() for _ in range(3)] == [False, False, True]
    used.now += 0.03
    watcher.close()


def test_a_small_run_is_drawn_at_every_tick_whatever_it_costs() -> None:
    clock, used = Clock(), Clock()
    session = FakeSession(two_ranks())
    watcher = Watcher(session, no_diagnosis, clock=clock, cpu=used)
    for _ in range(4):
        session.show(two_ranks())
        assert watcher.poll() is not None
        clock.now += 0.25
        used.now += 5.0
    assert session.views >= 4
    watcher.close()


def test_cycles_are_collected_every_quarter_of_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the collector's own thresholds are: where many ranks are watched it runs seldom."""
    clock, session = Clock(), FakeSession(two_ranks())
    watcher = Watcher(session, no_diagnosis, clock=clock)
    made: list[float] = []
    monkeypatch.setattr("gpuwatch.tui.watcher.gc.collect", lambda: made.append(clock.now))
    for _ in range(120):
        clock.now += 0.25
        watcher.poll(force=True)
    assert made == [115.0, 130.0]
    watcher.close()
