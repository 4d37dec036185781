"""The scoreboard's cases: the right cause is named first, with the right ranks, and no other."""

from pathlib import Path

import pytest
from scoreboard.cases import CASES, NOT_TESTABLE

from gpuwatch.commands.recorded import judged
from gpuwatch.diagnosis import Finding

LEAST_SCORED = 38


def findings(name: str, folder: Path) -> list[Finding]:
    """What is open at the end of a case's trace, dearest first."""
    _, found, recorded = judged(str(CASES[name].job.write(folder / "case.jsonl")))
    assert not recorded.problem
    (diagnosis,) = found.values()
    return [f for f in diagnosis.findings if f.state == "open"]


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    found = findings(name, tmp_path)
    serious = [f for f in found if f.severity != "note"]
    if not case.expect:
        assert serious == []
        return
    assert serious, [(f.kind, f.severity, f.summary) for f in found]
    assert serious[0].kind in case.expect
    if case.ranks is not None:
        assert serious[0].ranks == case.ranks
    for finding in serious:
        for hint in finding.hints:
            if "num_workers" in case.never:
                assert hint.knob != "num_workers", hint.change
            if "num_workers up" in case.never and hint.knob == "num_workers":
                assert hint.new is None or hint.old is None or hint.new < hint.old  # type: ignore[operator]
        if "network" in case.never:
            assert finding.kind != "comm_bound"


def test_enough_cases_are_scored() -> None:
    assert len(CASES) >= LEAST_SCORED
    assert not set(CASES) & set(NOT_TESTABLE)
