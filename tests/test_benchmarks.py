"""The benchmarks run, and their figures are what the samples say. Nothing here is timed."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import GPUWATCH, PYTHON, TORCHRUN, Ranks, Zygote, environment, run_directory

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def paired() -> ModuleType:
    pytest.importorskip("torch")
    return load("paired")


@pytest.fixture(scope="module")
def bench_probe(paired: ModuleType) -> ModuleType:
    return load("bench_probe")


def load(name: str) -> ModuleType:
    """Import a benchmark as its own script would, and leave the path as it was."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return __import__(name)
    finally:
        sys.path[:] = before


def rounds(paired: ModuleType, *means_us: float) -> list[object]:
    """Rounds whose steps take these µs: nine quiet steps in ten, and one of nine times as much."""
    return [
        paired.Round([us / 1.8] * 9 + [us * 5] * 1, [2 * us] * 10, others_s=us * 1e-6)
        for us in means_us
    ]


def test_figures_are_of_on_against_both_off_and_of_off_against_off(paired: ModuleType) -> None:
    sampled = {
        "off": rounds(paired, 100, 110, 120),
        "on": rounds(paired, 116, 126, 196),
        "again": rounds(paired, 104, 114, 124),
    }
    found = paired.figures([sampled])
    assert found["cpu"]["extra_us"]["median"] == pytest.approx(14)
    assert found["cpu"]["null_us"]["median"] == pytest.approx(4)
    assert found["cpu"]["bare_us"] == pytest.approx(112)
    assert found["wall"]["extra_us"]["median"] == pytest.approx(28)
    assert found["quiet"]["extra_us"]["median"] == pytest.approx(14 / 1.8)


def test_figures_of_ranks_are_of_the_mean_of_each_round(paired: ModuleType) -> None:
    def rank(extra_us: float) -> dict[str, list[object]]:
        return {
            "off": rounds(paired, 100, 100),
            "on": rounds(paired, 100 + extra_us, 100 + extra_us),
            "again": rounds(paired, 100, 100),
        }

    found = paired.figures([rank(10), rank(30)])
    assert found["cpu"]["extra_us"]["median"] == pytest.approx(20)


def test_the_interval_of_a_median_narrows_with_the_count(paired: ModuleType) -> None:
    few, many = paired.spread(range(10)), paired.spread([x / 10 for x in range(100)])
    assert few["from"] < many["from"] < many["median"] < many["to"] < few["to"]
    assert (few["low"], few["high"]) == pytest.approx((1.75, 7.25))


def test_others_share_is_cpu_of_other_threads_by_wall(paired: ModuleType) -> None:
    # Ten steps of 200 µs a round; others take 100 µs of CPU in it.
    assert paired.others_share(rounds(paired, 100, 100)) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("median", "low", "high", "said"),
    [(10, 8, 12, "pass"), (10, 8, 16, "pass?"), (20, 14, 22, "over?"), (20, 16, 22, "over")],
)
def test_verdict_says_whether_the_budget_is_resolved(
    bench_probe: ModuleType, median: float, low: float, high: float, said: str
) -> None:
    assert bench_probe.verdict({"median": median, "from": low, "to": high}, 15.0) == said


def test_a_module_call_is_the_difference_by_the_modules_more(bench_probe: ModuleType) -> None:
    def result(median: float, half: float) -> dict[str, object]:
        extra = {"median": median, "from": median - half, "to": median + half}
        return {"figures": {"cpu": {"extra_us": extra}}}

    found = bench_probe.per_module({"one": result(90, 3), "modules": result(486, 4)})
    assert found["median"] == pytest.approx(1.0)
    assert found["to"] - found["from"] == pytest.approx(10 / 396)


@pytest.mark.distributed
@pytest.mark.alone
@pytest.mark.timeout(200)
def test_bench_probe_runs_every_case(
    bench_probe: ModuleType,
    zygote: Zygote,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Few steps of each case, all at once: one as from a shell, the others without its seconds."""
    as_from_a_shell = bench_probe.run_and_read

    def run_and_read(argv: list[str], out: Path, environ: dict[str, str]) -> tuple[Any, str]:
        script = argv.index(bench_probe.__file__)
        case = argv[script + 2]
        if case == "one":
            found: tuple[Any, str] = as_from_a_shell(argv, out, environ)
            return found
        env, said = environment(Path(environ["GPUWATCH_DIR"])), tmp_path / case
        if case == "ddp":
            with Ranks(zygote, argv[script:], env, said) as ranks:
                assert ranks.wait(150) == 0, said.read_text()
        else:
            assert zygote.start(argv[script:], env, said, said).wait(150) == 0, said.read_text()
        return json.loads(out.read_text()), said.read_text()

    monkeypatch.setattr(bench_probe, "run_and_read", run_and_read)
    monkeypatch.setattr(sys, "argv", ["bench_probe.py", "--quick", "--no-traceml", "--json"])
    bench_probe.main()
    found = json.loads(capsys.readouterr().out)
    assert set(found["gpuwatch"]) == {"one", "modules", "compile", "ddp"}
    assert found["gpuwatch"]["compile"]["compilations"] == 0
    assert found["gpuwatch"]["one"]["dropped"] == 0
    for result in found["gpuwatch"].values():
        assert result["figures"]["cpu"]["bare_us"] > 0
    bench_probe.print_table(found["gpuwatch"], found["gpuwatch"])
    bench_probe.print_rest(found["gpuwatch"], found["gpuwatch"])


# --- the scoreboard ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def score() -> ModuleType:
    return load("score")


@pytest.fixture(scope="module")
def peer() -> ModuleType:
    return load("peer")


def ticks(score: ModuleType, *said: tuple[str, tuple[int, ...]] | None) -> list[Any]:
    """An evaluation a second of a run of ten steps a second, each with what is dearest in it."""
    return [
        score.Tick(float(at), 10 * at, () if one is None else (score.Said(one[0], "", one[1]),))
        for at, one in enumerate(said)
    ]


def test_a_fault_is_found_when_the_first_finding_is_right(score: ModuleType) -> None:
    seen = ticks(score, None, None, ("straggler", (1,)), ("straggler", (1,)))
    judged = score.outcome(seen, ("straggler",), (1,))
    assert judged.verdict == "found"
    assert (judged.right.seconds, judged.right.steps) == (2.0, 20)
    assert judged.false_alarms == ()


def test_a_wrong_finding_before_the_right_one_is_wrong(score: ModuleType) -> None:
    seen = ticks(score, None, ("comm_bound", (0, 1)), ("straggler", (1,)))
    judged = score.outcome(seen, ("straggler",), (1,))
    assert judged.verdict == "wrong"
    assert judged.first.seconds == 1.0
    assert judged.right.seconds == 2.0
    assert judged.false_alarms == ("comm_bound",)


def test_the_right_kind_on_another_rank_is_wrong_and_no_false_alarm(score: ModuleType) -> None:
    judged = score.outcome(ticks(score, ("straggler", (0,))), ("straggler",), (1,))
    assert (judged.verdict, judged.right, judged.false_alarms) == ("wrong", None, ())


def test_silence_is_missed_but_in_a_healthy_run_right(score: ModuleType) -> None:
    silent = ticks(score, None, None)
    assert score.outcome(silent, ("straggler",), None).verdict == "missed"
    assert score.outcome(silent, (), None).verdict == "found"
    assert score.outcome(ticks(score, ("straggler", (1,))), (), None).false_alarms == ("straggler",)


def test_a_second_cause_that_is_not_expected_is_a_false_alarm(score: ModuleType) -> None:
    said = tuple(score.Said(kind, "", (0, 1)) for kind in ("comm_bound", "worker_restart"))
    judged = score.outcome([score.Tick(1.0, 9, said)], ("comm_bound",), (0, 1))
    assert judged.verdict == "found"
    assert judged.false_alarms == ("worker_restart",)


def test_a_board_sums_up(score: ModuleType) -> None:
    board = score.Board()
    for verdict, alarms in [("found", ()), ("missed", ()), ("wrong", ("a", "b")), ("found", ())]:
        board.add(verdict, alarms)
    assert str(board) == "2 of 4 found, 1 missed, 1 wrong, 2 false alarms"


def test_a_trace_is_timed_from_the_slowest_first_step(score: ModuleType) -> None:
    def step(rank: int, started_s: float, ms: float) -> dict[str, Any]:
        return {"type": "step", "rank": rank, "started_s": started_s, "phases_ms": {"forward": ms}}

    lines = [
        {"type": "hello", "rank": 0}, step(0, 1000.0, 100), step(1, 1000.0, 300),
        step(0, 1000.3, 100), step(1, 1000.3, 100),
    ]  # fmt: skip
    assert score.first_step_s(iter(lines)) == pytest.approx(1000.3)


@pytest.mark.parametrize(
    ("cause", "ranks", "on", "word"),
    [
        ("forward", (1,), (1,), "right"),
        ("forward", (), (1,), "half"),
        ("forward", (0,), (1,), "half"),
        ("backward", (1,), (1,), "half"),
        ("backward", (), (1,), "wrong"),
        ("compute", (), (1,), "wrong"),
        ("", (), (1,), "wrong"),
        ("forward", (), (0, 1), "right"),
        ("forward", (0, 1), (0, 1), "right"),
        ("forward", (1,), (0, 1), "half"),
        ("backward", (0, 1), (0, 1), "wrong"),
    ],
)
def test_grades_follow_the_stated_rules(
    score: ModuleType, cause: str, ranks: tuple[int, ...], on: tuple[int, ...], word: str
) -> None:
    assert score.grade(cause, ranks, score.Planted("slow_forward", "forward", on)) == word


def test_of_a_healthy_run_only_that_it_computes_may_be_said(score: ModuleType) -> None:
    healthy = score.Planted("healthy", "")
    assert [score.grade(c, (), healthy) for c in ("", "compute", "RESIDUAL-HEAVY")] == [
        "right", "right", "wrong",
    ]  # fmt: skip


def test_our_first_finding_is_judged_by_its_phase(score: ModuleType) -> None:
    seen = [
        score.Tick(1.0, 12, ()),
        score.Tick(2.0, 25, (score.Said("straggler", "backward", (1,)),)),
        score.Tick(3.0, 40, (score.Said("comm_bound", "", (0, 1)),)),
    ]
    right = score.our_row(seen, score.Planted("slow_backward@1", "backward", (1,)))
    assert right == ("straggler in backward, ranks 1; then comm_bound", "25 steps, 2.0 s", "right")
    assert score.our_row(seen, score.Planted("slow_forward@1", "forward", (1,))).grade == "half"


def test_a_run_that_made_no_step_is_no_healthy_one(score: ModuleType) -> None:
    assert score.our_row([], score.Planted("healthy", "")).grade == "wrong"


def test_what_was_a_note_is_said_where_nothing_was_found(score: ModuleType) -> None:
    seen = [score.Tick(1.0, 12, (), ("comm_bound",))]
    row = score.our_row(seen, score.Planted("ddp", "communication"))
    assert row == ("as a note: comm_bound", "-", "wrong")


def test_the_peer_is_judged_by_the_better_of_its_last_words(
    score: ModuleType, peer: ModuleType
) -> None:
    planted = score.Planted("slow_forward@1", "forward", (1,))
    live = [
        peer.Verdict("WARMUP", None, "", 99.0),
        peer.Verdict("COMPUTE-BOUND", None, "", 100.3),
        peer.Verdict("COMPUTE STRAGGLER", 1, "", 102.3),
    ]
    row = score.their_row(live, live[2], 100.0, planted)
    assert row == ("COMPUTE-BOUND, then COMPUTE STRAGGLER rank 1", "2.3 s", "right")
    changed = [*live, peer.Verdict("RESIDUAL-HEAVY", None, "", 104.0)]
    assert score.their_row(changed, None, 100.0, planted).grade == "wrong"
    assert score.their_row(changed, live[2], 100.0, planted).grade == "right"
    only_at_the_end = score.their_row(live[:2], live[2], 100.0, planted)
    assert (only_at_the_end.after, only_at_the_end.grade) == ("at the end", "right")


def test_the_peer_that_loses_the_rank_is_half_right(score: ModuleType, peer: ModuleType) -> None:
    bound = [peer.Verdict("INPUT-BOUND", None, "", 100.5)]
    late = score.their_row(bound, bound[0], 100.0, score.Planted("slow_data@1", "input", (1,)))
    every = score.their_row(bound, bound[0], 100.0, score.Planted("slow_dataset", "input"))
    assert (late.grade, every.grade, every.after) == ("half", "right", "0.5 s")


PANEL = """\
╭──────────────────────── Model Step Summary ────────────────────────╮╭─── Step Memory ────╮
│ Issue: INPUT STRAGGLER                                             ││ Issue: NO GPU      │
│ Why: r1 waited 27.8 ms for input, compared with 1.7 ms             ││ No GPU detected.   │
│ on r0.                                                             ││                    │
│ Next: Inspect input wait on r1.                                    ││                    │
│                                                                    ││                    │
│  Metric                  Step Time       IW     FWD      BWD       ││                    │
│  Worst Rank                     r0       r1      r0       r0       ││                    │
╰────────────────────────────────────────────────────────────────────╯╰────────────────────╯
"""


def test_the_peers_verdict_is_read_from_its_panel(peer: ModuleType) -> None:
    found = peer.read_view(PANEL.splitlines(), 5.0)
    why = "r1 waited 27.8 ms for input, compared with 1.7 ms on r0."
    assert found == ("INPUT STRAGGLER", 1, why, 5.0)


def test_half_a_panel_is_no_verdict(peer: ModuleType) -> None:
    lines = PANEL.splitlines()
    assert peer.read_view(lines[:3], 5.0) is None
    assert peer.read_view(["│ Waiting for Step Timing...     │"], 5.0) is None


def test_the_peers_summary_is_read_from_its_logs(peer: ModuleType, tmp_path: Path) -> None:
    assert peer.summary_verdict(tmp_path) is None
    (tmp_path / "session").mkdir()
    told = {
        "status": "RESIDUAL-HEAVY",
        "action": "Inspect work outside traced phases.",
        "summary": "Residual time is 33 %.",
    }
    (tmp_path / "session" / "final_summary.json").write_text(
        json.dumps({"primary_diagnosis": told})
    )
    found = peer.summary_verdict(tmp_path)
    assert found[:3] == ("RESIDUAL-HEAVY", None, "Residual time is 33 %.")


DRAWS = """\
import pathlib, shutil, sys, time
panel = pathlib.Path(sys.argv[1]).read_text()
print(shutil.get_terminal_size().columns, flush=True)
for status in ("COMPUTE-BOUND  ", "COMPUTE-BOUND  ", "INPUT STRAGGLER"):
    print("\\x1b[H\\x1b[2J" + panel.replace("INPUT STRAGGLER", status), end="", flush=True)
    time.sleep(0.3)
sys.exit(int(sys.argv[2]))
"""


def test_verdicts_are_read_from_a_terminal(peer: ModuleType, tmp_path: Path) -> None:
    """A stand-in draws its panel three times: two verdicts, in their order."""
    (tmp_path / "panel").write_text(PANEL)
    (tmp_path / "draws.py").write_text(DRAWS)
    argv = [PYTHON, str(tmp_path / "draws.py"), str(tmp_path / "panel")]
    env = environment(tmp_path)
    found = peer.live_verdicts([*argv, "0"], env, tmp_path, 20.0)
    assert [v.status for v in found] == ["COMPUTE-BOUND", "INPUT STRAGGLER"]
    assert 0.4 < found[1].at_s - found[0].at_s < 10
    with pytest.raises(peer.NoPeerError, match="failed"):
        peer.live_verdicts([*argv, "3"], env, tmp_path, 20.0)


def test_a_peer_that_does_not_end_is_ended(peer: ModuleType, tmp_path: Path) -> None:
    argv = [PYTHON, "-c", "import time; time.sleep(60)"]
    with pytest.raises(peer.NoPeerError, match="did not end"):
        peer.live_verdicts(argv, environment(tmp_path), tmp_path, 0.5)


@pytest.mark.distributed
@pytest.mark.alone
@pytest.mark.timeout(150)
def test_the_script_of_both_tools_runs_and_is_watched(
    score: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks under `gpuwatch run`: seen from their first step on, and ended on the same one."""
    pytest.importorskip("torch")
    planted = score.Planted("slow_backward@1", "backward", (1,), batchnorm=True)
    arguments = score._script_arguments(planted, tmp_path, 3.0)
    command = [*GPUWATCH, "run", "--", *TORCHRUN, str(score.SCRIPT), *arguments]
    with run_directory() as directory:
        monkeypatch.setenv("GPUWATCH_DIR", str(directory))
        seen = list(score.pictures(command, 2, 60.0, tmp_path))
    assert seen
    assert all(len(run.ranks) == 2 for _, _, run in seen)
    seconds = [at_s for at_s, _, _ in seen]
    # Timed by the script's own clock: a picture lies after its first step, by one poll and more.
    assert 0 < seconds[0] < 10
    assert seconds == sorted(seconds)
    # The script stopped by itself, long before the 60 s, on a step that both ranks made.
    lasts = [int((tmp_path / f"last.{rank}").read_text()) for rank in (0, 1)]
    assert lasts[0] == lasts[1] >= seen[-1][2].steps
    late_ms, other_ms = (seen[-1][2].ranks[r].phases_ms["backward"] for r in (1, 0))
    assert late_ms > other_ms + 20


# --- predictions ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench_predictions() -> ModuleType:
    return load("bench_predictions")


def test_every_other_number_of_workers_is_a_cell(bench_predictions: ModuleType) -> None:
    measured = bench_predictions.Measured
    runs = {
        1: measured(160.0, 60, "", {2: (75.0, 95.0), 4: (40.0, 60.0)}),
        2: measured(82.0, 90, "", {1: (170.0, 190.0), 4: None}),
        4: measured(None, 0, "", {1: (150.0, 170.0), 2: (70.0, 90.0)}),
    }
    found = {(c.start, c.to): c.inside for c in bench_predictions.cells(runs)}
    assert found == {
        (1, 2): True, (1, 4): None,  # nothing was measured there
        (2, 1): False, (2, 4): None,  # nothing was predicted
        (4, 1): True, (4, 2): True,
    }  # fmt: skip
    said = bench_predictions.summary(bench_predictions.cells(runs))
    assert said.startswith("3 of 4 predictions hold the measured step: 75% (target 90%: below)")
    assert "2 more without" in said


def test_a_prediction_is_the_median_of_the_last_ones(bench_predictions: ModuleType) -> None:
    middle = bench_predictions.middle
    said = [(1.0, 2.0), (50.0, 60.0), (51.0, 61.0), (53.0, 66.0), (52.0, 99.0)]
    assert middle(said) == (51.5, 63.5)
    assert middle([None, None, *said[:2]]) == (25.5, 31.0)
    assert middle([*said, None, None, None]) is None
    assert middle([]) is None


def test_no_cell_is_no_share(bench_predictions: ModuleType) -> None:
    cell = bench_predictions.Cell(1, 2, None, 80.0)
    assert bench_predictions.summary([cell]) == "no cell of 1 can be compared"
