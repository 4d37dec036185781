"""The search for the largest batch: pure, with processes that only pretend, and once for real."""

import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import click
import psutil
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import Config
from trainer.errors import ConfigError, TrainingError
from trainer.memory import command, finder
from trainer.memory.finder import Search, Trial, Trials, search
from trainer.sources import load

MIB = 2**20


def machine(
    threshold: int,
    *,
    limit_bytes: int | None = None,
    peak: Callable[[int], int | None] | None = None,
) -> Callable[[int], Trial]:
    """Trials on a machine where batches up to the threshold fit."""

    def trial(batch_size: int) -> Trial:
        ok = batch_size <= threshold
        peak_bytes = peak(batch_size) if ok and peak is not None else None
        return Trial(batch_size, ok, peak_bytes, 1.0, limit_bytes)

    return trial


def close(found: Search, tolerance: float) -> bool:
    assert found.too_large is not None
    return found.too_large - found.largest <= max(1, tolerance * found.too_large)


def bound(threshold: int, start: int, tolerance: float) -> float:
    return abs(math.log2(max(threshold, 1) / start)) + math.log2(8 / tolerance) + 6


@settings(max_examples=25)
@given(
    threshold=st.integers(0, 50_000),
    start=st.integers(1, 512),
    tolerance=st.sampled_from([0.01, 0.05, 0.2]),
)
def test_without_peaks_the_bracket_closes_on_the_threshold(
    threshold: int, start: int, tolerance: float
) -> None:
    found = search(machine(threshold), start=start, limit=10**6, tolerance=tolerance)
    assert found.largest <= threshold < found.too_large  # type: ignore[operator]
    assert close(found, tolerance)
    assert len(found.trials) <= bound(threshold, start, tolerance)
    assert len({trial.batch_size for trial in found.trials}) == len(found.trials)
    assert found.fit is None
    assert found.edge is None


@settings(max_examples=40)
@given(
    threshold=st.integers(0, 50_000),
    start=st.integers(1, 512),
    peaks=st.randoms(use_true_random=False),
)
def test_peaks_that_mislead_cost_some_trials_and_no_more(
    threshold: int, start: int, peaks: object
) -> None:
    draw = peaks.randrange  # type: ignore[attr-defined]
    trial = machine(threshold, limit_bytes=2**30, peak=lambda _: draw(2**31))
    found = search(trial, start=start, limit=10**6, tolerance=0.05)
    assert found.largest <= threshold < found.too_large  # type: ignore[operator]
    assert close(found, 0.05)
    assert len(found.trials) <= bound(threshold, start, 0.05)


@given(
    base=st.integers(0, 2**27),
    slope=st.integers(2**10, 2**24),
    limit_bytes=st.integers(2**28, 2**36),
    noise=st.integers(0, 2**10),
)
def test_peaks_on_a_line_lead_to_the_edge(
    base: int, slope: int, limit_bytes: int, noise: int
) -> None:
    threshold = (limit_bytes - base) // slope
    trial = machine(
        threshold, limit_bytes=limit_bytes, peak=lambda size: base + slope * size + size % 3 * noise
    )
    found = search(trial, start=1, limit=2**40, tolerance=0.05)
    assert found.largest <= threshold < found.too_large  # type: ignore[operator]
    assert close(found, 0.05)
    # Three to draw the line, jumps of at most 8 times to the edge, and a few to close in.
    assert len(found.trials) <= 3 + math.log(max(8, threshold), 8) + 6


def test_the_line_saves_trials() -> None:
    peak = {"peak": lambda size: 20 * MIB + MIB * size, "limit_bytes": 1000 * MIB}
    guided = search(machine(980, **peak), start=8, limit=10**6)  # type: ignore[arg-type]
    blind = search(machine(980), start=8, limit=10**6)
    assert guided.edge == 980
    assert len(guided.trials) <= len(blind.trials) - 4
    assert [trial.batch_size for trial in guided.trials][:4] == [8, 16, 32, 256]


def test_the_highest_allowed_is_tried_itself() -> None:
    found = search(machine(10**9), start=8, limit=530)
    assert [trial.batch_size for trial in found.trials][-2:] == [512, 530]
    assert found.largest == 530
    assert found.too_large is None
    assert search(machine(10**9), start=64, limit=10).largest == 10


@given(start=st.integers(1, 64), base=st.integers(0, 100), limit=st.integers(101, 5000))
def test_where_the_machine_would_swap_nothing_is_tried_that_the_line_puts_beyond(
    start: int, base: int, limit: int
) -> None:
    tried: list[int] = []

    def trial(batch_size: int) -> Trial:
        tried.append(batch_size)
        peak = base + batch_size
        return Trial(batch_size, True, peak, 1.0, limit, guarded=True)

    found = search(trial, start=start, limit=10**6)
    assert all(base + size <= limit for size in tried[2:])
    assert found.too_large is not None
    assert found.largest == max(tried)
    assert close(found, 0.05) or found.edge <= found.largest  # type: ignore[operator]


def test_another_failure_ends_the_search() -> None:
    def trial(batch_size: int) -> Trial:
        raise TrainingError("no data")

    with pytest.raises(TrainingError, match="no data"):
        search(trial, start=8, limit=64)


@pytest.mark.parametrize(
    ("largest", "recommended"), [(0, 0), (1, 1), (2, 1), (10, 9), (17, 15), (18, 16), (100, 88)]
)
def test_what_is_recommended(largest: int, recommended: int) -> None:
    assert Search(largest, None, (), None, None).recommended == recommended


# --- trials in processes ---

REPORT = {
    "outcome": "ok",
    "peak_bytes": 5 * MIB,
    "limit_bytes": 9 * MIB,
    "guarded": False,
    "reason": None,
}


class Scripted(Trials):
    """Trials that run a line of Python instead of a training; `folder` is where to report."""

    def __init__(self, code: str, *, nproc: int = 1, timeout_s: float = 30.0) -> None:
        super().__init__(Config(), nproc=nproc, timeout_s=timeout_s)
        self.code = code

    def _command(self, folder: Path, batch_size: int) -> list[str]:
        head = f"import json,os,signal,sys,time;folder={str(folder)!r};"
        head += "put=lambda rank,**r: open(f'{folder}/rank-{rank}.json','w').write(json.dumps(r));"
        return [sys.executable, "-S", "-c", head + self.code]


@pytest.mark.process
def test_the_ranks_reports_become_one_trial() -> None:
    more = {**REPORT, "peak_bytes": 7 * MIB, "limit_bytes": 8 * MIB}
    trial = Scripted(f"put(0, **{REPORT}); put(1, **{more})", nproc=2)(16)
    assert trial == Trial(16, True, 7 * MIB, trial.seconds, 8 * MIB)


@pytest.mark.process
@pytest.mark.parametrize(
    "code",
    [
        "put(0, **{**REPORT, 'outcome': 'out of memory'}); sys.exit(77)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "sys.exit(137)",
        "sys.stderr.write('terminate called: std::bad_alloc'); sys.exit(134)",
        # The first rank is killed; the second fails for the lost connection; torchrun says so.
        "put(1, **{**REPORT, 'outcome': 'failed', 'reason': 'Connection closed by peer'});"
        "sys.stderr.write('  exitcode  : -9 (pid: 7)'); sys.exit(1)",
    ],
)
def test_what_counts_as_out_of_memory(code: str) -> None:
    nproc = 2 if "put(1" in code else 1
    trial = Scripted(code.replace("REPORT", repr(REPORT)), nproc=nproc)(16)
    assert not trial.ok
    assert trial.peak_bytes is None


@pytest.mark.process
def test_out_of_memory_on_one_rank_counts_though_the_other_failed_for_it() -> None:
    gone = {**REPORT, "outcome": "failed", "reason": "Connection closed by peer"}
    full = {**REPORT, "outcome": "out of memory"}
    assert not Scripted(f"put(0, **{gone}); put(1, **{full}); sys.exit(1)", nproc=2)(16).ok


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (
            "put(0, **{**REPORT, 'outcome': 'failed', 'reason': 'no images'}); sys.exit(1)",
            "no images",
        ),
        ("sys.exit('it is broken')", "ended with 1: it is broken"),
        ("pass", "ended with 0: it wrote nothing"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended with -11"),
    ],
)
def test_another_failure_is_one_sentence(code: str, sentence: str) -> None:
    with pytest.raises(TrainingError, match=f"batch size 16 .*{sentence}"):
        Scripted(code.replace("REPORT", repr(REPORT)))(16)


@pytest.mark.process
def test_a_trial_that_takes_too_long_is_ended() -> None:
    trial = Scripted("os.system('sleep 60')", timeout_s=0.3)
    with pytest.raises(TrainingError, match=r"more than 0\.3 s: raise --timeout-s"):
        trial(16)
    assert not any(p.is_running() for p in psutil.Process().children(recursive=True))


@pytest.mark.process
def test_ctrl_c_ends_the_trial() -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.4, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        Scripted("time.sleep(60)")(16)
    assert psutil.Process().children(recursive=True) == []


def test_what_a_trial_is_started_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("GPUWATCH_RUN_ID", "x")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(finder, "available_bytes", lambda: 10 * 2**30)
    trials = Trials(Config(), nproc=2)
    kept = trials._environment()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"} & set(kept)
    assert not any(name.startswith(("TORCHELASTIC", "GPUWATCH")) for name in kept)
    assert kept["CUDA_VISIBLE_DEVICES"] == "3"
    words = trials._command(tmp_path, 24)
    assert words[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert words[words.index("--batch-size") + 1] == "24"
    # Half of what there is for each rank, without what is left to the machine.
    share = int(words[words.index("--available-bytes") + 1])
    assert share == pytest.approx(0.95 * 5 * 2**30, rel=1e-6)
    limited = Trials(Config(), limit_mb=64)
    assert limited._command(tmp_path, 24)[-2:] == ["--limit-mb", "64"]
    assert limited._environment()["OMP_NUM_THREADS"] == "1"


# --- the command ---


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A machine with 100 MiB, of which a sample takes one and the model 20."""
    seen: dict[str, object] = {"threshold": 80}

    def made(config: Config, **options: object) -> Callable[[int], Trial]:
        seen.update(options)
        seen["config"] = config
        return machine(
            int(str(seen["threshold"])),
            limit_bytes=100 * MIB,
            peak=lambda size: 20 * MIB + MIB * size,
        )

    monkeypatch.setattr(finder, "Trials", made)
    return seen


def run(*arguments: str) -> tuple[str, str]:
    options = ["--train.watch", "false", *arguments]
    result = CliRunner().invoke(command.find_batch_size, options, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout, result.stderr


def test_the_json(faked: dict[str, object]) -> None:
    out, err = run("--json", "--nproc", "2", "--limit-mb", "100", "--model.width", "8")
    answer = json.loads(out)
    assert {k: v for k, v in answer.items() if k not in ("trials", "fit")} == {
        "schema": 1,
        "largest": 80,
        "too_large": 84,
        "recommended": 72,
        "limit_bytes": 100 * MIB,
        "edge": 80,
    }
    assert answer["fit"] == {
        "base_bytes": 20 * MIB,
        "bytes_per_sample": MIB,
        "residual_bytes": 0,
    }
    assert answer["trials"][0] == {
        "batch_size": 8,
        "ok": True,
        "peak_bytes": 28 * MIB,
        "seconds": 1.0,
    }
    assert err.splitlines()[0] == "trainer: batch 8: fits, peak 28.0 MiB, 1.0 s"
    assert err.splitlines()[-1] == "trainer: batch 84: out of memory, 1.0 s"
    assert len(err.splitlines()) == len(answer["trials"])
    assert faked["nproc"] == 2
    assert faked["limit_mb"] == 100.0
    assert faked["config"].model.width == 8  # type: ignore[attr-defined]


def test_the_curve_and_the_recommendation_are_printed(faked: dict[str, object]) -> None:
    out, _ = run()
    assert "predicted edge 80" in out
    assert "largest that fits        80   (84 does not)" in out
    assert "loader.batch_size        72" in out
    assert faked["nproc"] == 1


def test_at_the_highest_allowed_the_option_is_named(faked: dict[str, object]) -> None:
    out, _ = run("--most", "32")
    assert "--most raises it" in out


def test_what_was_not_tried_is_said_to_be_so(faked: dict[str, object]) -> None:
    found = Search(64, 81, (Trial(64, True, MIB, 1.0),), None, None)
    assert any("was not tried" in line for line in command._picture(found))


def test_where_nothing_fits_the_command_fails(faked: dict[str, object]) -> None:
    faked["threshold"] = 0
    with pytest.raises(TrainingError, match="not even a batch of 1 fits"):
        run()


def test_bad_options(faked: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--most=4 is below --start=8"):
        run("--most", "4")
    with pytest.raises(ConfigError, match="no such option"):
        run("--loader.batchsize", "4")
    with pytest.raises(click.BadParameter):
        run("--nproc", "0")


def test_under_torchrun_one_rank_searches(
    faked: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    assert run() == ("", "")
    assert "nproc" not in faked
    monkeypatch.setenv("RANK", "0")
    run()
    assert faked["nproc"] == 4


def test_the_monitor_is_told_of_each_trial(
    faked: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpuwatch

    told: list[str] = []
    monkeypatch.setattr(gpuwatch, "watch", lambda *, name: told.append(name), raising=False)
    monkeypatch.setattr(gpuwatch, "annotate", lambda *, notice: told.append(notice), raising=False)
    _, err = run("--train.watch", "true")
    assert told[0] == "find-batch-size"
    assert [f"trainer: {notice}" for notice in told[1:-1]] == err.splitlines()
    assert told[-1] == "recommended: loader.batch_size=72"


# --- a real one ---


@pytest.mark.process
@pytest.mark.timeout(115)
def test_a_real_search_under_a_known_limit(jpegs: Path) -> None:
    config = load([f"--data.path={jpegs}", "--model.width=16", "--data.image_px=64"], environ={})
    trials = Trials(config, limit_mb=64, timeout_s=60)
    found = search(trials, start=64, limit=1024, tolerance=0.5)
    assert found.largest > 0
    assert close(found, 0.5)
    peaks = [trial.peak_bytes for trial in found.trials if trial.ok]
    assert all(peak is not None and MIB < peak <= 64 * MIB for peak in peaks)
    assert any(not trial.ok for trial in found.trials)
    assert all(trial.limit_bytes == 64 * MIB for trial in found.trials)
    # What the largest needs fills most of the limit.
    assert max(peak for peak in peaks if peak is not None) > 32 * MIB
