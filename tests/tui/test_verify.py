"""`v`: the window of a finding is frozen, and what comes after it is compared with it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from textual.pilot import Pilot

from gpuwatch.diagnosis.types import Finding, Hint
from gpuwatch.diagnosis.verify import (
    WANTED_STEPS,
    Check,
    comparable_ms,
    followed,
    freeze,
    promise_verdict,
    successor,
    verify,
)
from gpuwatch.schema import Hello, Loader
from gpuwatch.store.compare import Setting
from gpuwatch.store.track import Side, Track, side_of
from gpuwatch.store.views import RunView, View
from gpuwatch.tui import GpuwatchApp
from gpuwatch.tui.checks import Checks
from gpuwatch.tui.render.checks import check_lines
from gpuwatch.tui.render.findings import finding_detail
from gpuwatch.tui.render.text import Line
from gpuwatch.tui.tracks import Tracks
from gpuwatch.tui.watcher import Watcher
from tests.tui.fakes import (
    NOW_S,
    FakeSession,
    few_workers,
    found,
    no_diagnosis,
    rank_view,
    run_view,
    view,
)
from tests.tui.sides import stepping
from tests.tui.snapshots import check_lines as check_picture
from tests.tui.snapshots import text_of
from tests.tui.test_app import drive
from tests.tui.test_keys import footer, press
from tests.tui.test_pictures import scene_of


def finding(**more: object) -> Finding:
    hint = Hint("raise num_workers", "num_workers", 4, 12, (126.0, 136.0))
    return few_workers(**{"hints": (hint,), "cost_ms": 61.0, **more})


def frozen(run: RunView, item: Finding | None = None) -> Check:
    check = freeze(item or finding(), side_of(run), 0, NOW_S, [run, stepping(run="there")])
    assert check is not None
    return check


def hello_of(run: RunView) -> Hello:
    hello = run.ranks[0].hello
    assert hello is not None
    return hello


def texts(lines: list[Line]) -> str:
    return "\n".join(text_of(line).strip() for line in lines)


def going_on(run: RunView, track: Track, wait_ms: float, first: int, number: int) -> Side:
    """The run `number` steps later, with another data wait, its windows taken on the way."""
    for start in range(first, first + number, 64):
        count = min(64, first + number - start)
        run = stepping(wait_ms, first=start, number=count, run=run.run)
        track.take(run)
    return side_of(run, track=track)


def test_the_next_steps_of_the_run_are_counted_and_held_to_the_prediction() -> None:
    run, track = stepping(91.2), Track()
    track.take(run)
    check = frozen(run)
    assert check.at_step == 1063
    waiting = verify(check, side_of(run, track=track), 0)
    assert (waiting.steps, waiting.promise, waiting.after_ms) == (0, None, None)
    assert "0 of 256 steps yet" in texts(check_lines(waiting, 120))

    some = verify(check, going_on(run, track, 34.0, 1064, 40), 0)
    assert (some.steps, some.is_done, some.is_new_run) == (40, False, False)
    assert "mean of 40 of 256 steps so far" in texts(check_lines(some, 120))
    assert "✓" not in texts(check_lines(some, 120))

    done = verify(check, going_on(run, track, 34.0, 1104, 400), 0)
    assert (done.steps, done.is_done) == (WANTED_STEPS, True)
    assert done.promise is not None
    assert done.promise.verdict == "as predicted"
    assert done.promise.setting is None
    assert done.clear is True
    assert done.before_ms is not None
    assert done.after_ms is not None
    assert done.interval is not None
    assert done.interval[0] < done.after_ms / done.before_ms - 1.0 < done.interval[1] < 0.0
    shown = texts(check_lines(done, 160))
    assert "✓ num_workers 4 -> 12: predicted 126..136 ms, got" in shown
    assert "as predicted" in shown
    assert "no change of that setting was seen" in shown


@pytest.mark.parametrize(
    ("wait_ms", "verdict"), [(91.2, "slower"), (34.0, "as predicted"), (5.0, "faster")]
)
def test_what_came_is_held_to_the_range(wait_ms: float, verdict: str) -> None:
    run, track = stepping(91.2), Track()
    track.take(run)
    result = verify(frozen(run), going_on(run, track, wait_ms, 1064, 256), 0)
    assert result.promise is not None
    assert result.promise.verdict == verdict
    if wait_ms == 91.2:
        assert result.clear is False
        assert "the same" in texts(check_lines(result, 160))


def test_a_new_run_of_the_same_job_is_what_comes_after() -> None:
    before = stepping(91.2, name="r1")
    check = frozen(before)
    new = stepping(
        34.0,
        run="r2",
        name="r2",
        first=1,
        workers=12,
        started_s=NOW_S + 40,
        hello={"script": "train.py --workers 12"},
    )
    other = stepping(34.0, run="r3", name="r3", started_s=NOW_S + 60, hello={"script": "eval.py"})
    old = stepping(34.0, run="r0", name="r0", started_s=NOW_S - 9000)
    there = stepping(34.0, run="there", name="there", started_s=NOW_S + 90)
    assert successor(check, [other, old, there, before]) is None
    assert successor(check, [other, new, old, before]) is new
    # Its arguments are what was changed.
    assert hello_of(new).script != hello_of(before).script
    newer = replace(new, run="r4", name="r4", started_s=NOW_S + 80)
    assert successor(check, [new, newer, before]) is newer
    result = verify(check, side_of(new), 0)
    assert (result.run, result.is_new_run, result.steps) == ("r2", True, 64)
    assert result.promise is not None
    assert result.promise.setting == Setting("num_workers", 4, 12)
    shown = texts(check_lines(result, 160))
    assert "of the new run r2 so far" in shown
    assert "no change of that setting" not in shown


def test_a_name_of_its_own_goes_before_the_script() -> None:
    check = frozen(stepping(91.2, name="resnet"))
    same_script = stepping(run="r2", name="bert", started_s=NOW_S + 40)
    same_name = stepping(
        run="r3", name="resnet", started_s=NOW_S + 30, hello={"script": "other.py"}
    )
    assert successor(check, [same_script]) is None
    assert successor(check, [same_script, same_name]) is same_name


def test_another_value_than_the_hint_is_not_held_to_its_prediction() -> None:
    check = frozen(stepping(91.2, name="r1"))
    new = stepping(60.0, run="r2", name="r2", workers=6, started_s=NOW_S + 40)
    result = verify(check, side_of(new), 0)
    assert result.promise is None
    assert result.reason == "num_workers is 6 now, the prediction was for 12"
    assert result.reason in texts(check_lines(result, 160))


def test_a_restart_under_the_same_id_begins_anew() -> None:
    run = stepping(91.2)
    check = frozen(run)
    again = stepping(34.0, first=5)
    # Without the restart these are steps from before the freeze.
    assert verify(check, side_of(again), 0).steps == 0
    result = verify(check, side_of(again), 1)
    assert (result.steps, result.is_new_run) == (64, True)
    assert "since the restart" in texts(check_lines(result, 160))


def test_a_change_in_the_running_training_counts_from_its_step() -> None:
    run, track = stepping(91.2), Track()
    track.take(run)
    lr = Hint("raise lr", "lr", 0.1, 0.2, (126.0, 136.0))
    check = frozen(run, finding(hints=(lr,)))
    # Steps between the freeze and the change are as slow as before: they do not count.
    going_on(run, track, 91.2, 1064, 30)
    live = replace(check, changed=Setting("train.lr", 0.1, 0.2), changed_step=1093)
    waiting = verify(live, side_of(stepping(first=1030, run=run.run), track=track), 0)
    assert waiting.steps == 0
    shown = texts(check_lines(waiting, 120))
    assert "0 of 256 steps yet: train.lr was set at step 1,093" in shown
    after = going_on(run, track, 34.0, 1094, 40)
    assert verify(check, after, 0).steps == 70
    result = verify(live, after, 0)
    assert result.steps == 40
    # No configuration tells it: that it was set is what the rank has answered.
    assert result.promise is not None
    assert result.promise.setting == Setting("train.lr", 0.1, 0.2)
    assert "no change of that setting" not in texts(check_lines(result, 120))
    # What was begun anew under the same id does not have it.
    again = verify(live, side_of(stepping(34.0, first=5)), 1)
    assert again.changed == ()
    assert again.steps == 64


def test_a_change_that_is_told_later_counts_from_then() -> None:
    run, tracks, checks = stepping(91.2), Tracks(), Checks()
    tracks.take([run], {run.run})
    assert checks.toggle(finding(), run, [run], tracks, NOW_S)
    # The rank has answered, its loader keeps four workers until the next epoch.
    checks.changed(finding(), Setting("num_workers", 4, 12), 1064)
    run = stepping(91.2, first=1064, run=run.run)
    tracks.take([run], {run.run})
    checks.refresh([run], tracks)
    assert checks.results[0].steps == 63
    run = stepping(34.0, first=1128, run=run.run, workers=12)
    tracks.take([run], {run.run})
    checks.refresh([run], tracks)
    assert checks.results[0].steps == 0
    assert checks.results[0].check.changed_step == run.steps
    run = stepping(34.0, first=1192, run=run.run, workers=12)
    tracks.take([run], {run.run})
    checks.refresh([run], tracks)
    assert checks.results[0].check.changed_step < run.steps
    assert checks.results[0].steps > 0
    assert checks.holds(finding())
    checks.drop(finding())
    assert (len(checks), checks.results) == (0, ())


def test_a_change_that_is_felt_with_the_next_epoch_waits_for_it() -> None:
    """The loader tells the new value at once, and goes on with the workers that it has."""
    pids = {"loaders": (Loader("train", num_workers=12, worker_pids=(1, 2)),)}
    run, tracks, checks = stepping(91.2), Tracks(), Checks()
    tracks.take([run], {run.run})
    checks.toggle(finding(), run, [run], tracks, NOW_S)
    run = stepping(91.2, first=1064, run=run.run, hello=pids)
    checks.changed(finding(), Setting("num_workers", 4, 12), 1064, run)
    tracks.take([run], {run.run})
    checks.refresh([run], tracks)
    assert checks.results[0].steps == 0
    shown = texts(check_lines(checks.results[0], 120))
    assert "num_workers was set at step 1,064, and is felt with the next epoch" in shown
    anew = {"loaders": (Loader("train", num_workers=12, worker_pids=(7, 8)),)}
    run = stepping(34.0, first=1128, run=run.run, hello=anew)
    tracks.take([run], {run.run})
    checks.refresh([run], tracks)
    assert checks.results[0].check.changed_step == run.steps
    run = stepping(34.0, first=1192, run=run.run, hello=anew)
    tracks.take([run], {run.run})
    checks.refresh([run], tracks)
    assert checks.results[0].steps == 63


def test_a_window_of_few_steps_is_not_frozen() -> None:
    assert freeze(finding(), side_of(stepping(number=15)), 0, NOW_S, []) is None
    assert freeze(finding(), side_of(stepping(number=16)), 0, NOW_S, []) is not None


def test_a_finding_that_predicts_nothing_says_so() -> None:
    run, track = stepping(91.2), Track()
    track.take(run)
    check = frozen(run, finding(hints=(Hint("pin memory", "pin_memory", False, True),)))
    result = verify(check, going_on(run, track, 34.0, 1064, 64), 0)
    assert (result.promise, result.reason) == (None, "no hint of this finding predicts a step")


def test_a_run_that_has_ended_says_that_a_new_one_is_compared() -> None:
    run, track = stepping(91.2, state="ended"), Track()
    track.take(run)
    check = frozen(run)
    shown = texts(check_lines(verify(check, side_of(run, track=track), 0), 120))
    assert "its run has ended: start the job anew, that run is compared" in shown
    after = going_on(run, track, 34.0, 1064, 20)
    ended = replace(after, run=replace(after.run, state="ended"))
    shown = texts(check_lines(verify(check, ended, 0), 120))
    assert "its run has ended after 20 of 256 steps" in shown


def test_which_hint_was_followed() -> None:
    hint = Hint("more", "num_workers", 4, 12, (1.0, 2.0))
    assert followed(hint, [Setting("num_workers", 4, 12)]) is not None
    assert followed(hint, [Setting("loader.num_workers", 4, 12)]) is not None
    assert followed(hint, [Setting("num_workers", 4, 8)]) is None
    assert followed(hint, [Setting("batch_size", 4, 12)]) is None
    assert followed(Hint("more", "num_workers"), [Setting("num_workers", None, 12)]) is None
    verdicts = [promise_verdict((10.0, 12.0), ms) for ms in (9.9, 10.0, 12.0, 12.1)]
    assert verdicts == ["faster", "as predicted", "as predicted", "slower"]


def test_more_accumulated_batches_are_compared_sample_for_sample() -> None:
    """A step of twice the batches takes longer, and is the gain that was predicted."""
    twice = Setting("gradient_accumulation", 1, 2)
    assert comparable_ms(250.0, twice) == 125.0
    assert comparable_ms(250.0, Setting("gradient_accumulation", None, 2)) == 250.0
    assert comparable_ms(250.0, Setting("num_workers", 1, 2)) == 250.0
    assert comparable_ms(250.0, None) == 250.0
    before = stepping(91.2, name="r1")
    hint = Hint("accumulate", "gradient_accumulation", 1, 2, (80.0, 90.0))
    check = frozen(before, finding(hints=(hint,)))
    new = stepping(34.0, run="r2", name="r2", started_s=NOW_S + 40, hello={"script": "train.py"})
    assert hello_of(new).script == "train.py"
    ranks = tuple(
        replace(
            rank,
            last=None if rank.last is None else msgspec.structs.replace(rank.last, batches=2),
        )
        for rank in new.ranks
    )
    result = verify(check, side_of(replace(new, ranks=ranks)), 0)
    assert result.promise is not None
    assert result.promise.setting == twice
    assert result.after_ms is not None
    assert result.promise.actual_ms == pytest.approx(result.after_ms / 2)


# On the screen


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_watcher_checks_once_a_second_and_tells_the_end_once() -> None:
    clock, session = Clock(), FakeSession(view([stepping(91.2)]))
    watcher = Watcher(session, no_diagnosis, clock=clock)
    watcher.poll()
    assert watcher.verify(finding(run="r1")) == (True, "")
    told: list[int] = []
    for start in range(1064, 1064 + 640, 64):
        clock.now += 1.0
        session.show(view([stepping(34.0, first=start)]))
        scene = watcher.poll()
        assert scene is not None
        (result,) = scene.checks
        assert result.steps == min(256, start + 64 - 1064)
        told += [r.steps for r in watcher.take_completed()]
    assert told == [256]
    assert scene.check(finding(run="r1")) is result
    assert scene.check(finding(run="r2")) is None
    # The job is started anew, on a machine whose clock is late: that is what counts from then on.
    new = stepping(20.0, run="r2", workers=12, first=1, started_s=NOW_S - 60)
    clock.now += 1.0
    session.show(view([new, stepping(34.0, first=1704)]))
    scene = watcher.poll()
    assert scene is not None
    (result,) = scene.checks
    assert (result.run, result.steps) == ("r2", 64)
    assert watcher.take_completed() == []
    assert watcher.verify(finding(run="r1")) == (False, "")
    watcher.poll(force=True)
    assert watcher.scene.checks == ()
    watcher.close()


def test_what_cannot_be_frozen_says_why() -> None:
    watcher = Watcher(FakeSession(view([run_view([rank_view()])])), no_diagnosis)
    watcher.poll()
    assert watcher.verify(finding()) == (None, "there is no window of steady steps to freeze yet")
    watcher.close()
    watcher = Watcher(FakeSession(view([stepping(number=10)])), no_diagnosis)
    watcher.poll()
    frozen_now, why = watcher.verify(finding())
    assert (frozen_now, "too few steady steps" in why) == (None, True)
    watcher.close()
    session = FakeSession(view([stepping()]))
    watcher = Watcher(session, no_diagnosis)
    watcher.poll()
    session.show(replace(view([stepping(first=1064)]), at_s=NOW_S + 20))
    watcher._kept_at = -1e9
    watcher.poll()
    assert watcher.move_in_time(-10)
    watcher.poll(force=True)
    frozen_now, why = watcher.verify(finding())
    assert (frozen_now, "this is the past" in why) == (None, True)
    watcher.toggle_pause()
    assert watcher.verify(finding()) == (True, "")
    watcher.close()


def two_jobs() -> View:
    new = stepping(34.0, run="r2", workers=12, first=1, started_s=NOW_S + 60)
    return view([new, stepping(91.2, state="ended")])


def test_v_freezes_and_the_page_follows_the_change() -> None:
    session = FakeSession(view([stepping(91.2)]))

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "4")
        assert "v freezes this window" in text
        assert "v verify" in footer(text)
        text = await press(pilot, "v")
        assert "F1 is frozen" in footer(text)
        assert "before  191 ms, mean of 64 steps up to step 1,063 (frozen)" in text
        assert "0 of 256 steps yet" in text
        await press(pilot, "enter")
        session.show(two_jobs())
        app.watcher._checked_at = app.watcher._diagnosed_at = -1e9
        before = app.watcher.diagnoses
        app.refresh_scene(force=True)
        while app.watcher.diagnoses == before:
            await pilot.pause(0.01)
        app.refresh_scene(force=True)
        await pilot.pause()
        # The run on the screen is the new one, the page is still of the finding that was checked.
        text = await press(pilot, "j")
        assert "of the new run r2 so far" in text
        assert "predicted 126..136 ms, got" in text
        text = await press(pilot, "5")
        # Without a choice the run before the change is A: nothing has to be chosen.
        assert "A resnet50-ddp (ended)   B resnet50-ddp (live)" in text
        assert "faster, 95 % CI -" in text
        assert "num_workers 4 -> 12" in text
        assert "Checked changes" in text
        assert "predicted 126..136 ms, got" in text
        # The same finding of the new run is another one.
        text = await press(pilot, "4")
        assert "v freezes this window" in text
        text = await press(pilot, "v")
        assert "before  131 ms, mean of 64 steps up to step 64" in text
        text = await press(pilot, "v")
        assert "is not checked any more" in footer(text)

    def diagnose(picture: View) -> object:
        return [
            diagnosis
            for run in picture.runs
            for diagnosis in found(finding(run=run.run))(replace(picture, runs=(run,)))
        ]

    drive(session, script, size=(120, 45), diagnose=diagnose)  # type: ignore[arg-type]


def test_v_in_the_past_and_without_steps_says_why() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "4", "v")
        assert "F1 is not checked: there is no window" in footer(text)

    drive(view([run_view([rank_view()])]), script, diagnose=found(finding()))


@pytest.mark.parametrize("width", [80, 120, 160])
def test_a_checked_finding(width: int) -> None:
    run, track = stepping(91.2), Track()
    track.take(run)
    item = finding(run="r1")
    check = frozen(run, item)
    lines: list[Line] = []
    for count, simulated in ((0, False), (40, False), (400, False), (400, True)):
        after = going_on(run, track, 34.0, 1064, count) if count else side_of(run, track=track)
        shown = check
        if simulated:
            before = replace(check.before, run=replace(check.before.run, simulated=True))
            shown = replace(check, before=before)
        result = verify(shown, after, 0)
        scene = scene_of(view([run]), checks=(replace(result, check=shown),))
        detail = finding_detail(item, scene, width)
        at = next(i for i, line in enumerate(detail) if "CHECK" in text_of(line))
        end = next(i for i, line in enumerate(detail) if "WHY" in text_of(line))
        # What a person waits for stands above the evidence.
        lines += detail[at - 1 : end - 1]
    check_picture(f"check-{width}", lines, width)
