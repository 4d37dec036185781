"""Findings of a replay whose time is moved: as they were then, or of unknown age."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from builders import Trace

from gpuwatch.commands.judge import MOST, REACH_S, Judge
from gpuwatch.diagnosis import Finding
from gpuwatch.store import View
from tests.diagnosis.test_rules import HEALTHY, starving, view_of

BEGAN_S = 1_790_000_000.0
BAD_S = 30
"""The loader is slow from there on."""

STEPS = 140


class Playback:
    """What a judge needs of one."""

    def __init__(self, position: float = 0.0) -> None:
        self.position = position
        self.seeks = 0


def at(second: float) -> View:
    """The picture at a second: healthy at first, then starved, by other steps."""
    trace = starving(steps=STEPS) if second >= BAD_S else Trace([HEALTHY] * 2, steps=70)
    return replace(view_of(trace), at_s=BEGAN_S + second)


def opened(judge: Judge, second: float) -> list[tuple[str, int, float, str]]:
    (diagnosis,) = judge(at(second))
    return [
        (f.id, f.opened_step, f.opened_s - BEGAN_S if f.opened_s else 0.0, f.state)
        for f in diagnosis.findings
        if f.severity != "note"
    ]


def judged(session: Any) -> Judge:
    return Judge(session)


def test_a_replay_from_the_start_tells_when_a_finding_opened() -> None:
    judge = judged(Playback())
    for second in range(BAD_S + 10):
        told = opened(judge, second)
    assert told == [("F1", STEPS, BAD_S + 1.0, "open")]


def test_going_back_and_forth_in_what_was_played_keeps_the_life_of_a_finding() -> None:
    session = Playback()
    judge = judged(session)
    seen = {second: opened(judge, second) for second in range(BAD_S + 20)}
    for target in (BAD_S + 10, 5, BAD_S + 19, BAD_S + 4, BAD_S + 1):
        session.seeks += 1
        for second in range(target, min(target + 3, BAD_S + 20)):
            assert opened(judge, second) == seen[second], second


def test_a_jump_to_what_was_not_played_does_not_know_since_when() -> None:
    session = Playback()
    judge = judged(session)
    for second in range(5):
        opened(judge, second)
    session.seeks += 1
    assert opened(judge, BAD_S + 20) == [("F1", 0, 0.0, "open")]
    assert opened(judge, BAD_S + 21) == [("F1", 0, 0.0, "open")]
    # In between nothing was looked at, before it everything.
    session.seeks += 1
    assert opened(judge, BAD_S + 10) == [("F1", 0, 0.0, "open")]
    session.seeks += 1
    assert opened(judge, 4 + REACH_S / 2) == []
    session.seeks += 1
    assert opened(judge, BAD_S + 21) == [("F1", 0, 0.0, "open")]


def test_a_replay_that_begins_in_the_middle_does_not_know_either() -> None:
    judge = judged(Playback(position=BAD_S + 20.0))
    assert opened(judge, BAD_S + 20) == [("F1", 0, 0.0, "open")]


def test_what_opens_after_a_jump_is_told() -> None:
    session = Playback()
    judge = judged(session)
    opened(judge, 0)
    session.seeks += 1
    for second in range(20, BAD_S + 5):
        told = opened(judge, second)
    assert told == [("F1", STEPS, float(BAD_S), "open")]


def test_what_is_remembered_is_bounded_and_still_right() -> None:
    session = Playback()
    judge = judged(session)
    healthy, bad = at(0), at(BAD_S)
    for tenth in range(3 * MOST):
        judge(replace(bad if tenth > MOST else healthy, at_s=BEGAN_S + tenth / 10))
    assert MOST / 2 <= len(judge._times_s) <= MOST
    assert len(judge._times_s) == len(judge._until_s) == len(judge._memories)
    assert judge._times_s == sorted(judge._times_s)
    session.seeks += 1
    (diagnosis,) = judge(replace(bad, at_s=BEGAN_S + 2 * MOST / 10))
    (finding,) = (f for f in diagnosis.findings if f.severity != "note")
    assert isinstance(finding, Finding)
    assert finding.opened_s == BEGAN_S + (MOST + 2) / 10


def test_what_was_played_fast_is_known_between_two_looks() -> None:
    session = Playback()
    judge = judged(session)
    healthy, bad = at(0), at(BAD_S)
    for look in range(2 * MOST):
        judge(replace(bad if look > 2 else healthy, at_s=BEGAN_S + 10.0 * look))
    for second in (10.0 * MOST + 5.0, 10.0 * MOST + 17.0, 71.0, 15.0):
        session.seeks += 1
        (diagnosis,) = judge(replace(bad, at_s=BEGAN_S + second))
        told = [f.opened_s - BEGAN_S for f in diagnosis.findings if f.severity != "note"]
        assert told == ([] if second < 30 else [40.0]), second
