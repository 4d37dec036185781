"""A knob that somebody else has set: its finding is checked in every monitor that saw it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from gpuwatch.diagnosis.types import Finding
from gpuwatch.schema import Knob, Logged
from gpuwatch.store.compare import Setting
from gpuwatch.store.views import RunView
from gpuwatch.tui.watcher import Watcher
from gpuwatch.tui.witness import Witness
from tests.tui.fakes import NOW_S, FakeSession, few_workers, found, view
from tests.tui.sides import stepping
from tests.tui.test_verify import finding

KNOB = Knob("loader.num_workers", 12, 0.0, 16.0, (), "after the step that begins now")


def logged(status: str, at_s: float, message: str = "", **more: str) -> Logged:
    words = {"id": "c1", "verb": "set", "args": "loader.num_workers 12", **more}
    return Logged(at_s, words["id"], words["verb"], words["args"], status, message)  # type: ignore[arg-type]


DONE = "loader.num_workers 4 -> 12 after the step that begins now"


def with_log(run: RunView, *log: Logged) -> RunView:
    """The run with a step a second, that log on rank 1, and a live knob on every rank."""
    ranks = []
    for rank in run.ranks:
        assert rank.hello is not None
        hello = msgspec.structs.replace(rank.hello, knobs=(KNOB,), allow_control=True)
        window = tuple(
            msgspec.structs.replace(record, started_s=began_s(record.index))
            for record in rank.window
        )
        told = log if rank.rank == 1 else ()
        ranks.append(replace(rank, hello=hello, commands=told, window=window, last=window[-1]))
    return replace(run, ranks=tuple(ranks))


def began_s(index: int) -> float:
    """When a step begins; it ends within the second."""
    return NOW_S + index


def test_what_was_set_is_told_once_with_the_steps_before_and_after_it() -> None:
    witness, run = Witness(), with_log(stepping())
    assert witness.take(run, [finding()]) == []
    at_s = began_s(1051)
    run = with_log(run, logged("accepted", at_s))
    assert witness.take(run, [finding()]) == []
    run = with_log(run, logged("accepted", at_s), logged("done", at_s + 1.5, DONE))
    (seen,) = witness.take(run, [finding()])
    assert seen.finding == finding()
    assert seen.setting == Setting("loader.num_workers", 4, 12)
    assert (seen.until, seen.step, seen.late) == (1050, 1064, False)
    assert witness.take(run, [finding()]) == []


def test_history_is_not_checked() -> None:
    run = stepping()
    past = logged("done", began_s(1051), DONE)
    witness = Witness()
    assert witness.take(with_log(run, past), [finding()]) == []
    assert witness.take(with_log(run, past), [finding()]) == []
    # A run that was there before with an empty log has no history.
    assert len(Witness([run.run]).take(with_log(run, past), [finding()])) == 1


@pytest.mark.parametrize(
    ("log", "findings"),
    [
        (logged("done", 1.0, "loader.num_workers is 12 already"), [finding()]),
        (logged("error", 1.0, "loader.num_workers takes 0..16"), [finding()]),
        (logged("done", 1.0, DONE, verb="profile", args="steps=5"), [finding()]),
        (logged("done", 1.0, "lr 0.1 -> 0.2", args="lr 0.2"), [finding()]),
        (logged("done", 1.0, DONE, args="loader.num_workers a lot"), [finding()]),
        (logged("done", 1.0, "loader.num_workers many -> 12"), [finding()]),
        (logged("done", 1.0, DONE), []),
        (logged("done", 1.0, DONE), [finding(state="resolved")]),
        (logged("done", 1.0, DONE), [finding(hints=())]),
        (logged("done", 1.0, DONE), [finding(ranks=(0,))]),
    ],
    ids=(
        "no change",
        "refused",
        "no set",
        "no such knob",
        "no such value",
        "no such value before",
        "no finding",
        "no open finding",
        "no hint",
        "other ranks",
    ),
)
def test_what_is_nobodys_change(log: Logged, findings: Sequence[Finding]) -> None:
    run = stepping()
    assert Witness([run.run]).take(with_log(run, log), findings) == []


def test_a_change_of_the_next_epoch_and_an_agreed_step_are_told() -> None:
    run = stepping()
    words = "loader.num_workers 4 -> 12 with the next epoch"
    log = logged("done", began_s(1051), words, args="loader.num_workers 12 at=1060")
    (seen,) = Witness([run.run]).take(with_log(run, log), [finding()])
    assert seen.late
    assert seen.setting.after == 12


def test_a_change_before_everything_that_is_known_leaves_no_window() -> None:
    run = stepping()
    log = logged("done", began_s(1000), DONE)
    (seen,) = Witness([run.run]).take(with_log(run, log), [finding()])
    assert seen.until == -1


@pytest.mark.parametrize("ahead_s", [(3600, 0), (0, -3600)], ids=str)
def test_steps_and_log_are_by_the_clocks_of_their_ranks(ahead_s: tuple[int, int]) -> None:
    run = with_log(stepping(), logged("done", began_s(1051) + ahead_s[1], DONE))
    ranks = []
    for rank, ahead in zip(run.ranks, ahead_s, strict=True):
        window = tuple(
            msgspec.structs.replace(record, started_s=record.started_s + ahead)
            for record in rank.window
        )
        ranks.append(replace(rank, window=window, last=window[-1], ahead_s=ahead))
    (seen,) = Witness([run.run]).take(replace(run, ranks=tuple(ranks)), [finding()])
    assert seen.until == 1050


def test_what_logs_still_hold_is_never_new_again() -> None:
    """Hundreds of commands, each to a rank of its own, are more than are remembered beyond it."""
    run = stepping()
    log = [logged("done", began_s(1051), DONE, id=f"c{number}") for number in range(600)]
    witness = Witness([run.run])
    assert len(witness.take(with_log(run, *log), [finding()])) == 600
    assert witness.take(with_log(run, *log), [finding()]) == []


def test_only_commands_that_stand_in_a_log_are_known() -> None:
    run = stepping()
    witness = Witness([run.run])
    for number in range(600):
        log = logged("done", began_s(1051), DONE, id=f"c{number}")
        assert len(witness.take(with_log(run, log), [finding()])) == 1
    assert len(witness._known[run.run]) == 1
    for number in range(40):
        witness.take(stepping(run=f"other{number}"), [])
    assert len(witness._known) == 32


def test_as_many_commands_as_ranks_are_each_told_once() -> None:
    """A hint for some ranks of many is a command for each of them."""
    run = stepping(world=400)
    ranks = [
        replace(rank, commands=(logged("done", began_s(1051), DONE, id=f"c{rank.rank}"),))
        for rank in with_log(run).ranks
    ]
    run = replace(run, ranks=tuple(ranks))
    witness, everywhere = Witness([run.run]), finding(ranks=tuple(range(400)))
    assert len(witness.take(run, [everywhere])) == 400
    assert witness.take(run, [everywhere]) == []


def test_ranks_of_machines_with_other_clocks_agree_on_the_last_step_before() -> None:
    run = with_log(stepping())
    first, second = run.ranks
    off_s = 7200.0
    window = tuple(
        msgspec.structs.replace(record, started_s=record.started_s + off_s)
        for record in second.window
    )
    log = (
        logged("accepted", began_s(1051) + off_s),
        logged("done", began_s(1052) + off_s, DONE),
    )
    second = replace(second, window=window, commands=log, ahead_s=int(off_s))
    (seen,) = Witness([run.run]).take(replace(run, ranks=(first, second)), [finding()])
    assert seen.until == 1050


def watched(session: FakeSession, one: Finding) -> Watcher:
    """A watcher that has diagnosed its first picture."""
    watcher = Watcher(session, found(one))
    watcher.poll()
    deadline_s = time.monotonic() + 5
    while watcher.diagnoses == 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    watcher.poll(force=True)
    return watcher


def test_every_monitor_checks_what_one_of_them_has_set() -> None:
    run = with_log(stepping())
    session = FakeSession(view([run]))
    watcher = watched(session, finding(run="r1", id="F1"))
    assert watcher.scene.checks == ()
    # When it is seen, twenty steps of after are in the window.
    after = with_log(stepping(first=1020, run="r1"), logged("done", began_s(1064), DONE))
    session.show(view([after]))
    watcher.poll()
    (result,) = watcher.scene.checks
    assert result.check.finding.id == "F1"
    assert result.check.changed == Setting("loader.num_workers", 4, 12)
    assert result.check.before.steps.indices[-1] == 1063
    assert result.steps == 0
    watcher.close()


def test_a_window_that_was_frozen_by_hand_stays_the_before() -> None:
    run = with_log(stepping())
    session = FakeSession(view([run]))
    one = finding(run="r1", id="F1")
    watcher = watched(session, one)
    session.show(view([run]))
    watcher.poll()
    assert watcher.verify(one) == (True, "")
    after = with_log(stepping(first=1040, run="r1"), logged("done", began_s(1064), DONE))
    session.show(view([after]))
    watcher.poll()
    (result,) = watcher.scene.checks
    assert result.check.at_step == 1063
    assert result.check.changed == Setting("loader.num_workers", 4, 12)
    watcher.close()


def test_what_changes_in_a_pause_is_checked() -> None:
    run = with_log(stepping())
    session = FakeSession(view([run]))
    watcher = watched(session, few_workers(run="r1", id="F1", hints=finding().hints))
    watcher.toggle_pause()
    watcher._kept_at -= 10
    log = logged("done", began_s(1064), DONE)
    session.show(view([with_log(run, log)]))
    watcher.poll()
    # When the pause ends, the steps before the change are long gone.
    session.show(view([with_log(stepping(first=1200, run="r1"), log)]))
    watcher.toggle_pause()
    watcher._checked_at -= 10
    watcher.poll(force=True)
    assert [result.check.finding.id for result in watcher.scene.checks] == ["F1"]
    watcher.close()
