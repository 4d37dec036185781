"""The three rules on traces that show every look-alike's signal at its innocent value."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from builders import Trace
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwatch.diagnosis import RULES, Abstain, Engine, Finding, RunPicture
from gpuwatch.diagnosis.aligned import ranks_text
from gpuwatch.diagnosis.engine import diagnose_run, picture_of
from gpuwatch.diagnosis.types import Evidence
from gpuwatch.schema import RankState
from gpuwatch.store import Store, View

HEALTHY = {"data_wait": 1.0, "forward": 30.0, "backward": 60.0, "optimizer": 5.0, "other": 2.0}
STARVED = {**HEALTHY, "data_wait": 102.0}


def view_of(trace: Trace) -> View:
    store = Store(lambda: 100.0)
    store.apply(trace.node_frame, 100.0)
    return store.view()


def picture(trace: Trace) -> RunPicture:
    view = view_of(trace)
    return picture_of(view, view.runs[0])


def starving(ranks: int = 2, **more: Any) -> Trace:
    """Two busy workers of a loader whose items wait: an empty queue, idle cores."""
    options: dict[str, Any] = {
        "num_workers": 2,
        "queue_depth": 0.0,
        "worker_cpu": 10.0,
        **more,
    }
    return Trace([STARVED] * ranks, **options)


def findings(trace: Trace) -> list[Finding]:
    return diagnose_run(picture(trace))[0]


def kinds(trace: Trace) -> list[tuple[str, str]]:
    return [(f.kind, f.severity) for f in findings(trace)]


# --- loader_few_workers ------------------------------------------------------------------------


def test_a_starved_loader_with_its_cost_and_a_number_of_workers() -> None:
    (finding, *_) = findings(starving())
    assert finding.kind == "loader_few_workers"
    assert finding.severity == "critical"
    assert finding.ranks == (0, 1)
    assert finding.nodes == ("node0",)
    # 200 ms of step, 98 ms of them the rest of the step and 1 ms transfer: that is the next limit.
    assert finding.cost_ms == pytest.approx(101, abs=6)
    assert finding.share == pytest.approx(0.5, abs=0.04)
    assert finding.confidence == "high"
    (hint,) = finding.hints
    # Batch cost 2 x 201 ms over a limit of 100 ms, with a fifth to spare.
    assert (hint.knob, hint.old, hint.new) == ("num_workers", 2, 5)
    assert hint.predicted_ms is not None
    low_ms, high_ms = hint.predicted_ms
    assert 90 < low_ms < 100 < high_ms < 130
    assert "num_workers 2 -> 5" in hint.change
    assert "16 cores, 4.0 busy" in hint.change
    assert {e.metric for e in finding.evidence} >= {"data_wait", "queue_depth", "batch_cost"}
    assert any("storage" in text for text in finding.ruled_out)
    assert any("decode" in text for text in finding.ruled_out)


def test_no_workers_at_all_means_that_the_wait_is_the_batch_cost() -> None:
    (finding, *_) = findings(Trace([STARVED], num_workers=0, worker_cpu=None))
    (hint,) = finding.hints
    assert finding.kind == "loader_few_workers"
    assert (hint.old, hint.new) == (0, 2)
    assert not any("prefetch" in h.knob for h in finding.hints)


def test_one_starved_rank_is_named_by_the_loader_and_not_as_a_straggler_too() -> None:
    trace = Trace([HEALTHY, STARVED], num_workers=2, queue_depth=0.0, worker_cpu=10.0)
    found = findings(trace)
    assert (found[0].kind, found[0].ranks) == ("loader_few_workers", (1,))
    assert [f.kind for f in found if f.severity != "note"] == ["loader_few_workers"]
    notes = [f for f in found if f.severity == "note"]
    assert [(n.kind, n.follows, n.cost_ms) for n in notes] == [
        ("comm_bound", "loader_few_workers", None)
    ]


def test_a_queue_that_is_full_is_no_starved_loader() -> None:
    # Data wait with batches ready: something else blocks the fetch (collating, transfer).
    assert "loader_few_workers" not in dict(kinds(starving(queue_depth=3.0)))


def test_the_cores_bound_what_workers_can_bring() -> None:
    # Two cores, 1.8 of them busy with our own workers: the step is CPU work, not waiting.
    trace = starving(cores=2, cpu=90.0, worker_cpu=40.0, main_cpu=10.0)
    found = [f for f in findings(trace) if f.kind == "loader_few_workers"]
    free = [f for f in findings(starving()) if f.kind == "loader_few_workers"]
    assert free[0].cost_ms is not None
    if found:
        assert found[0].cost_ms is not None
        assert found[0].cost_ms < free[0].cost_ms / 2


def test_busy_workers_on_full_cores_get_no_advice_to_add_more() -> None:
    trace = starving(cores=2, cpu=100.0, worker_cpu=49.0, main_cpu=1.0, num_workers=2)
    assert "loader_few_workers" not in dict(kinds(trace))


@pytest.mark.parametrize(
    ("signal", "words"),
    [
        ({"iowait": None}, "storage: not ruled out"),
        ({"worker_cpu": None}, "decode and augmentation: not ruled out"),
        ({"main_cpu": 99.0, "worker_cpu": 60.0}, "collate and transfer: not ruled out"),
    ],
)
def test_a_look_alike_that_no_number_excludes_lowers_the_confidence(
    signal: dict[str, Any], words: str
) -> None:
    (finding, *_) = findings(starving(**signal))
    assert finding.kind == "loader_few_workers"
    assert finding.confidence == "low"
    assert any(text.startswith(words) for text in finding.ruled_out), finding.ruled_out


def evidence(finding: Finding) -> dict[str, Evidence]:
    return {e.metric: e for e in finding.evidence}


def test_workers_that_time_themselves_are_believed() -> None:
    (finding, *_) = findings(starving(batch_ms=(398.0, 40.0, 20.0), worker_cpu=None))
    # Not high: without the sampler's word the cores that are in use are not known.
    assert (finding.kind, finding.confidence) == ("loader_few_workers", "medium")
    cost = evidence(finding)["batch_cost"]
    assert (cost.value, cost.source) == (398.0, "the workers' own timing")
    assert cost.compared_with == "40 ms of it CPU, 20 ms collating"
    assert evidence(finding)["workers_busy"].value == pytest.approx(99, abs=1)
    # The sampler has no word about the workers; their own is enough to exclude decoding.
    assert "decode and augmentation: 10% of a batch's time in a worker is CPU" in finding.ruled_out
    assert "collating: 20.0 of 398.0 ms of a batch" in finding.ruled_out
    (hint,) = finding.hints
    assert (hint.old, hint.new) == (2, 5)


def test_without_their_own_timing_the_interval_says_what_a_batch_costs() -> None:
    (finding, *_) = findings(starving())
    cost = evidence(finding)["batch_cost"]
    assert "interval" in cost.source
    assert cost.value == pytest.approx(402, abs=6)
    assert "workers_busy" not in evidence(finding)


def test_batches_that_compute_need_cores_and_those_that_wait_do_not() -> None:
    computing = {"batch_ms": (398.0, 390.0, 5.0), "worker_cpu": 98.0}
    (finding, *_) = findings(starving(**computing, cpu=30.0))
    assert any(
        text.startswith("oversubscription: 98% of a batch's time in a worker is CPU")
        for text in finding.ruled_out
    )
    assert finding.confidence == "high"
    # Two cores that are full of them: the step is CPU work.
    full = starving(**computing, cpu=100.0, cores=2)
    assert "loader_few_workers" not in dict(kinds(full))


def test_idle_workers_are_not_the_limit_though_nothing_is_ready() -> None:
    trace = starving(batch_ms=(60.0, 50.0, 10.0))
    found, abstained = diagnose_run(picture(trace))
    assert "loader_few_workers" not in {f.kind for f in found}
    (said,) = (a for a in abstained if a.kind == "loader_few_workers")
    assert "they make batches 15% of the time" in said.needs


def test_a_full_queue_has_a_batch_cost_and_no_finding() -> None:
    trace = Trace([HEALTHY] * 2, batch_ms=(150.0, 20.0, 5.0))
    rank = view_of(trace).runs[0].ranks[0]
    assert rank.batch_wall_ms == pytest.approx(150)
    assert diagnose_run(picture(trace)) == ([], [])


@pytest.mark.parametrize(
    ("signal", "words"),
    [
        (
            {"batch_ms": (398.0, 40.0, 20.0), "cpu": 95.0, "main_cpu": 1.0, "ranks": 1},
            "decode and augmentation: not ruled out, 10% of a batch's time in a worker is CPU, but",
        ),
    ],
)
def test_what_the_workers_say_can_leave_a_question_open(signal: dict[str, Any], words: str) -> None:
    (finding, *_) = findings(starving(**signal))
    assert (finding.kind, finding.confidence) == ("loader_few_workers", "low")
    assert any(text.startswith(words) for text in finding.ruled_out), finding.ruled_out


# --- straggler ---------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["data_wait", "forward", "backward", "other"])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_late_rank_is_named_with_its_phase(phase: str, world_size: int) -> None:
    late = {**HEALTHY, phase: HEALTHY[phase] + 30.0}
    ranks = [HEALTHY] * world_size
    ranks[1] = late
    (finding, *rest) = findings(Trace(ranks))
    assert finding.kind == "straggler"
    assert finding.ranks == (1,)
    assert f"in {phase}" in finding.summary
    assert finding.cost_ms == pytest.approx(30, abs=4)
    # That the others wait is its consequence: a note behind it, without a cost of its own.
    for note in rest:
        assert (note.kind, note.severity, note.cost_ms) == ("comm_bound", "note", None)
        assert note.follows == "straggler"


def test_lateness_that_rotates_is_no_straggler() -> None:
    trace = Trace([HEALTHY] * 3, scatter=0.25, seed=3)
    assert "straggler" not in dict(kinds(trace))


# --- comm_bound --------------------------------------------------------------------------------


def test_a_slow_network_is_told_from_a_late_rank() -> None:
    (finding, *rest) = findings(Trace([HEALTHY] * 3, transfer_ms=60.0))
    assert (finding.kind, finding.ranks) == ("comm_bound", (0, 1, 2))
    assert finding.cost_ms == pytest.approx(60, abs=4)
    assert not rest
    assert finding.confidence == "high"
    # On the CPUs of one machine converting gradients takes what it saves.
    assert {h.knob for h in finding.hints} == {"gradient_accumulation"}


def test_small_gradients_get_no_advice_to_compress_them() -> None:
    (finding, *_) = findings(Trace([HEALTHY] * 2, transfer_ms=60.0, gradient_bytes=1000))
    assert {h.knob for h in finding.hints} == {"gradient_accumulation"}


# --- silence -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    world_size=st.integers(1, 4),
    scatter=st.floats(0.0, 0.12),
    num_workers=st.integers(0, 4),
)
def test_a_healthy_run_has_no_finding(
    seed: int, world_size: int, scatter: float, num_workers: int
) -> None:
    trace = Trace([HEALTHY] * world_size, seed=seed, scatter=scatter, num_workers=num_workers)
    assert kinds(trace) == []


def test_a_few_steps_are_no_evidence() -> None:
    assert kinds(starving(steps=6)) == []


def test_missing_signals_make_a_rule_abstain_and_say_what_it_needs() -> None:
    unseen: Mapping[str, float] = {"forward": 30.0, "backward": 60.0, "other": 5.0}
    found, abstained = diagnose_run(picture(Trace([unseen])))
    assert not found
    needs = "a DataLoader: no batch fetch was seen"
    assert {(a.kind, a.needs) for a in abstained} == {
        (kind, needs)
        for kind in (
            "loader_few_workers",
            "cpu_decode_aug",
            "storage_slow",
            "loader_oversub",
            "collate_ipc",
        )
    }


def test_every_rule_is_registered_under_the_kind_that_it_finds() -> None:
    for trace in (starving(), Trace([HEALTHY] * 2, transfer_ms=60.0)):
        for kind, rule in RULES.items():
            outcome = rule(picture(trace))
            if isinstance(outcome, Finding | Abstain):
                assert outcome.kind == kind


# --- the life of a finding ---------------------------------------------------------------------


def test_a_finding_opens_late_closes_late_and_keeps_its_number() -> None:
    engine = Engine()
    bad, good = view_of(starving()), view_of(Trace([HEALTHY] * 2))

    def shown(view: View) -> list[tuple[str, str, str]]:
        (diagnosis,) = engine(view)
        return [(f.id, f.kind, f.state) for f in diagnosis.findings if f.severity != "note"]

    assert shown(bad) == []
    assert shown(bad) == [("F1", "loader_few_workers", "open")]
    for _ in range(4):
        assert shown(good) == [("F1", "loader_few_workers", "open")]
    assert shown(good) == [("F1", "loader_few_workers", "resolved")]
    shown(bad)
    assert shown(bad) == [("F1", "loader_few_workers", "open")]


def test_a_run_that_stands_is_not_judged_by_a_machine_that_has_become_idle() -> None:
    def trace(cpu: float, phase_age_s: float) -> Trace:
        made = Trace([HEALTHY] * 2, transfer_ms=60.0, cpu=cpu)
        state = RankState("training", "comm", int(phase_age_s * 1e9), 70)
        made.frames = [replace(frame, state=state) for frame in made.frames]
        return made

    engine = Engine()
    busy = view_of(trace(98.0, 0.01))
    for _ in range(3):
        (before,) = engine(busy)
    assert [(f.kind, f.severity) for f in before.findings] == [("comm_bound", "note")]
    # The same window, and cores that are free because nobody works.
    for _ in range(3):
        (after,) = engine(view_of(trace(3.0, 8.0)))
        assert after.findings == before.findings
    for _ in range(3):
        (after,) = engine(view_of(trace(3.0, 30.0)))
    assert [(f.kind, f.severity) for f in after.findings] == [
        ("hang", "critical"),
        ("comm_bound", "note"),
    ]
    # Where nothing was seen before, the window is all there is.
    (alone,) = Engine(open_after=1)(view_of(trace(3.0, 8.0)))
    assert [f.kind for f in alone.findings] == ["comm_bound"]


@pytest.mark.parametrize(("ranks", "passes"), [(2, 40), (64, 40), (300, 5 + 12), (1024, 5 + 4)])
def test_a_large_run_is_judged_more_seldom_after_its_first_seconds(
    ranks: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, ...]] = []

    def judge(picture: RunPicture, kinds: Any) -> tuple[list[Finding], list[Abstain]]:
        made.append(tuple(kinds))
        return [], []

    monkeypatch.setattr("gpuwatch.diagnosis.engine.diagnose_run", judge)
    view = view_of(Trace([HEALTHY] * ranks, steps=2))
    engine = Engine()
    for second in range(40):
        engine(dataclasses.replace(view, at_s=1000.0 + second))
    assert len(made) == 40
    assert sum(len(kinds) == len(RULES) for kinds in made) == pytest.approx(passes, abs=1)
    assert {kinds for kinds in made if len(kinds) < len(RULES)} <= {("hang",)}


def test_the_life_of_a_finding_is_told_with_its_steps() -> None:
    engine = Engine()
    mild = view_of(Trace([{**HEALTHY, "data_wait": 40.0}] * 2, queue_depth=0.0, steps=30))
    bad = view_of(starving(steps=70))
    good = view_of(Trace([HEALTHY] * 2, steps=90))
    for view in [mild, mild, bad, bad, *[good] * 5, bad, bad]:
        (diagnosis,) = engine(view)
    finding = next(f for f in diagnosis.findings if f.kind == "loader_few_workers")
    assert [(e.what, e.step) for e in finding.life] == [
        ("opened", 30),
        ("updated", 70),
        ("resolved", 90),
        ("reopened", 70),
    ]
    assert "cost" in finding.life[1].text
    assert finding.opened_step == 70  # it opened last there
    for _ in range(3):
        (diagnosis,) = engine(bad)
    again = next(f for f in diagnosis.findings if f.kind == "loader_few_workers")
    assert again.life == finding.life  # nothing new is no news


def test_a_life_full_of_events_keeps_the_first_and_the_latest() -> None:
    engine = Engine(open_after=1, close_after=1)
    bad, good = view_of(starving()), view_of(Trace([HEALTHY] * 2))
    for _ in range(40):
        engine(bad)
        (diagnosis,) = engine(good)
    life = next(f for f in diagnosis.findings if f.kind == "loader_few_workers").life
    assert len(life) <= 17
    assert [e.what for e in (life[0], *life[-2:])] == ["opened", "reopened", "resolved"]


def test_a_severity_that_comes_and_goes_stays_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now: dict[str, Finding] = {}
    monkeypatch.setattr(
        "gpuwatch.diagnosis.engine.diagnose_run", lambda *_: (list(now.values()), [])
    )
    engine, view = Engine(), view_of(starving())
    (one, *_) = findings(starving())

    def shown(severity: str, **more: Any) -> str:
        now["one"] = dataclasses.replace(one, severity=severity, **more)
        (diagnosis,) = engine(view)
        return diagnosis.findings[0].severity if diagnosis.findings else ""

    assert [shown(s) for s in ("warning", "warning")] == ["", "warning"]
    # Up when it has held twice, down after five.
    assert [shown(s) for s in ("critical", "warning", "critical")] == ["warning"] * 3
    assert shown("critical") == "critical"
    flapping = ["note", "critical", "warning", "note", "note", "note", "critical"]
    assert [shown(s) for s in flapping] == ["critical"] * 7
    assert [shown("note") for _ in range(5)] == [*["critical"] * 4, "note"]
    (diagnosis,) = engine(view)
    updates = [event.text for event in diagnosis.findings[0].life if event.what == "updated"]
    assert updates == ["severity warning -> critical", "severity critical -> note"]
    # What follows another is a note at once.
    assert [shown("critical"), shown("critical")] == ["note", "critical"]
    assert shown("note", follows="straggler", cost_ms=None) == "note"


def over(view: View) -> View:
    """The same picture, its run at an end."""
    return dataclasses.replace(
        view, runs=tuple(dataclasses.replace(run, state="ended") for run in view.runs)
    )


def test_a_run_that_was_over_before_it_was_seen_is_judged_by_what_it_left() -> None:
    (diagnosis,) = Engine()(over(view_of(starving())))
    assert [f.id for f in diagnosis.findings if f.severity != "note"] == ["F1"]
    engine = Engine()
    engine(over(view_of(starving(steps=12))))
    # Its ranks tell their past one after the other: more of it is judged anew.
    (diagnosis,) = engine(over(view_of(starving())))
    found = [(f.id, f.kind, f.state) for f in diagnosis.findings if f.severity != "note"]
    assert found == [("F1", "loader_few_workers", "open")]
    for _ in range(3):
        assert engine(over(view_of(starving()))) == (diagnosis,)


def test_a_run_that_ends_soon_is_judged_at_its_end() -> None:
    engine = Engine()
    engine(view_of(Trace([HEALTHY] * 2, steps=3)))
    (diagnosis,) = engine(over(view_of(starving())))
    assert [f.kind for f in diagnosis.findings if f.severity != "note"] == ["loader_few_workers"]


def test_a_run_that_was_long_healthy_is_not_judged_by_its_last_second() -> None:
    engine = Engine()
    good = view_of(Trace([HEALTHY] * 2))
    for second in range(10):
        engine(dataclasses.replace(good, at_s=good.at_s + second))
    (diagnosis,) = engine(over(view_of(starving(steps=150))))
    assert diagnosis.findings == ()
    # Nor does it lose what was found while it ran.
    engine = Engine()
    bad = view_of(starving())
    for second in range(10):
        (before,) = engine(dataclasses.replace(bad, at_s=bad.at_s + second))
    (diagnosis,) = engine(over(good))
    assert diagnosis == before


def test_a_resolved_finding_that_shows_once_more_stays_resolved() -> None:
    engine = Engine()
    bad, good = view_of(starving()), view_of(Trace([HEALTHY] * 2))
    for view in [bad, bad, *[good] * 5, bad]:
        (diagnosis,) = engine(view)
    states = {f.kind: f.state for f in diagnosis.findings}
    assert states["loader_few_workers"] == "resolved"
    for _ in range(3):
        (diagnosis,) = engine(good)
    states = {f.kind: f.state for f in diagnosis.findings}
    assert states["loader_few_workers"] == "resolved"


def test_a_finding_whose_rule_cannot_judge_any_more_closes_in_the_end() -> None:
    engine = Engine()
    bad = view_of(starving(1))
    unseen = view_of(Trace([{"forward": 30.0, "backward": 60.0, "other": 5.0}]))
    for view in [bad, bad]:
        (diagnosis,) = engine(view)
    assert [f.state for f in diagnosis.findings] == ["open"]
    (diagnosis,) = engine(unseen)
    assert [f.state for f in diagnosis.findings] == ["open"]
    for _ in range(40):
        (diagnosis,) = engine(unseen)
    assert [f.state for f in diagnosis.findings] == ["resolved"]


def test_waiting_on_a_machine_without_a_free_core_is_a_note() -> None:
    busy = Trace([HEALTHY] * 2, transfer_ms=60.0, cpu=98.0)
    (finding, *_) = findings(busy)
    assert (finding.kind, finding.severity, finding.confidence) == ("comm_bound", "note", "low")
    assert any("contention" in text for text in finding.ruled_out)


@pytest.mark.parametrize(
    ("gradient_bytes", "transfer_ms", "severity"),
    [(80_000, 7.0, "note"), (80_000, 12.0, "critical"), (8 * 2**20, 7.0, "warning")],
)
def test_processes_that_have_to_be_woken_up(
    gradient_bytes: int, transfer_ms: float, severity: str
) -> None:
    calm = {"forward": 30.0, "backward": 4.0, "optimizer": 1.0}
    trace = Trace([calm] * 2, transfer_ms=transfer_ms, gradient_bytes=gradient_bytes, psi=2.0)
    (finding, *_) = findings(trace)
    assert (finding.kind, finding.severity) == ("comm_bound", severity)


@pytest.mark.parametrize(
    ("gradient_bytes", "transfer_ms", "psi", "severity"),
    [
        (100_000, 20.0, 45.0, "note"),  # threads that wait for a core, not for the network
        (100_000, 20.0, 2.0, "warning"),
        (100_000, 20.0, None, "warning"),
        (100_000, 300.0, 45.0, "critical"),  # most of the step is more than that
        (100 * 2**20, 20.0, 45.0, "warning"),  # bytes that have to be moved
    ],
)
def test_small_collectives_that_wait_for_a_core(
    gradient_bytes: int, transfer_ms: float, psi: float | None, severity: str
) -> None:
    trace = Trace([HEALTHY] * 2, transfer_ms=transfer_ms, gradient_bytes=gradient_bytes, psi=psi)
    (finding, *_) = findings(trace)
    assert (finding.kind, finding.severity) == ("comm_bound", severity)


def test_a_consequence_points_at_the_id_of_its_cause() -> None:
    late = {**HEALTHY, "forward": 90.0}
    engine = Engine(open_after=1)
    (diagnosis,) = engine(view_of(Trace([HEALTHY, HEALTHY, late])))
    cause, note = diagnosis.findings
    assert (cause.kind, note.follows) == ("straggler", cause.id)
    assert cause.id == "F1"


def test_ranks_are_named_as_a_person_would() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
