"""The benchmarks run, and their figures are what the samples say. Nothing here is timed."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support import PYTHON

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
@pytest.mark.timeout(200)
def test_bench_probe_runs_every_case(bench_probe: ModuleType) -> None:
    """Few steps of each case, all at once."""
    done = subprocess.run(
        [PYTHON, str(BENCHMARKS / "bench_probe.py"), "--quick", "--no-traceml", "--json"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert set(found["gpuwatch"]) == {"one", "modules", "compile", "ddp"}
    assert found["gpuwatch"]["compile"]["compilations"] == 0
    assert found["gpuwatch"]["one"]["dropped"] == 0
    for result in found["gpuwatch"].values():
        assert result["figures"]["cpu"]["bare_us"] > 0
    bench_probe.print_table(found["gpuwatch"], found["gpuwatch"])
    bench_probe.print_rest(found["gpuwatch"], found["gpuwatch"])
