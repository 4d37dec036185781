"""The benchmarks: what they compute from what was measured, and one of them for real."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.bench import fresh
from trainer.bench import precision as precision_bench
from trainer.bench.commands import bench
from trainer.bench.fresh import (
    Job,
    Measured,
    NotPossible,
    busy_machine,
    combined,
    measure_fresh,
)
from trainer.bench.loader import workers_for
from trainer.bench.measure import Batches, Clock, endless, fetch_batches, train_batches
from trainer.bench.precision import PrecisionBench, bench_precision, parse_modes
from trainer.bench.settings import changed, read
from trainer.bench.table import ARTICLE, Row, TableBench, parse_batch_sizes, sizes_for
from trainer.bench.text import mebibytes, ms, percent, prose, rows_of
from trainer.config import Config
from trainer.data import build_loaders
from trainer.errors import ConfigError, TrainingError
from trainer.progress import progress
from trainer.report import Reporter
from trainer.run import open_trainer
from trainer.signals import Stop
from trainer.sources import load

ONE = Measured(
    step_ms=100.0,
    step_low_ms=95.0,
    step_high_ms=110.0,
    cpu_ms=150.0,
    samples_per_s=320.0,
    peak_allocated_bytes=None,
    saved_for_backward_bytes=40 * 2**20,
    peak_rss_bytes=400 * 2**20,
    peak_rss_training_bytes=60 * 2**20,
    first_loss=2.0,
    final_loss=1.0,
    skipped=0,
    mode="fp32",
    device="cpu",
    device_name="cpu",
    threads=2,
    parameters=1000,
)
HALF = replace(ONE, step_ms=50.0, samples_per_s=640.0, saved_for_backward_bytes=20 * 2**20)


def small(jpegs: Path, *more: str) -> Config:
    words = (
        f"--data.path={jpegs} --data.image_px=16 --model.width=8 --train.threads=1 "
        "--loader.batch_size=8 --loader.num_workers=0 --train.watch=false --train.manifest=false"
    )
    return load([*words.split(), *more], environ={})


# Pure parts.


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    lines = rows_of(["name", "n"], [["a", "1,000"], ["longer", "2"]])
    assert lines == ["name        n", "a       1,000", "longer      2"]


def test_what_is_unknown_is_said_to_be() -> None:
    assert (ms(None), percent(None), mebibytes(None)) == ("n/a", "n/a", "n/a")
    assert (ms(3.14159), ms(31.4159), ms(314.159)) == ("3.14", "31.4", "314")
    assert (percent(0.123), mebibytes(3 * 2**19), mebibytes(2**31)) == (
        "12%",
        "1.5 MiB",
        "2,048 MiB",
    )


@given(st.lists(st.one_of(st.none(), st.text("ab ", max_size=300)), max_size=4))
def test_prose_keeps_every_word_in_order(sentences: list[str | None]) -> None:
    words = [word for sentence in sentences if sentence for word in sentence.split()]
    lines = prose(*sentences)
    assert [word for line in lines for word in line.split()] == words
    assert all(len(line) <= 100 or " " not in line for line in lines)


positive = st.floats(1e-3, 1e5)


@given(positive, positive, positive)
def test_workers_keep_up_with_the_device(load_ms: float, more_ms: float, compute_ms: float) -> None:
    workers = workers_for(load_ms, compute_ms)
    assert 1 <= workers <= 64
    # W workers deliver a batch every load / W.
    assert workers == 64 or load_ms / workers <= compute_ms
    assert workers_for(load_ms + more_ms, compute_ms) >= workers


def test_workers_for_known_times() -> None:
    assert workers_for(160.0, 20.0, headroom=1.0) == 8
    assert workers_for(160.0, 20.0) == 12
    assert workers_for(5.0, 0.0) == 64


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0.01, 1e3)), min_size=1, max_size=20))
def test_busy_is_what_is_not_wait(pairs: list[tuple[float, float]]) -> None:
    waits, computes = zip(*pairs, strict=True)
    it = Batches(waits, computes, tuple(1.0 for _ in pairs), samples=8 * len(pairs), cpu_ms=1.0)
    assert 0 < it.device_busy_ratio <= 1
    assert it.device_busy_ratio == pytest.approx(1 - sum(waits) / it.total_ms)
    assert it.step_ms == pytest.approx(it.total_ms / len(pairs))
    assert it.samples_per_s == pytest.approx(8e3 / it.step_ms)


def test_clock_has_one_gap_between_two_marks() -> None:
    clock = Clock(torch.device("cpu"))
    for _ in range(4):
        clock.mark()
    gaps = clock.gaps_ms()
    assert len(gaps) == 3
    assert min(gaps) >= 0


def test_rounds_are_combined_and_one_that_is_impossible_decides() -> None:
    slow = replace(
        ONE, step_ms=200.0, step_low_ms=190.0, step_high_ms=300.0, peak_rss_bytes=500 * 2**20
    )
    both = combined([ONE, slow])
    assert isinstance(both, Measured)
    assert both.step_ms == 150.0
    assert both.samples_per_s == pytest.approx(320.0 * 100 / 150)
    assert (both.step_low_ms, both.step_high_ms) == (95.0, 300.0)
    assert both.peak_rss_bytes == 500 * 2**20
    assert both.peak_allocated_bytes is None
    assert combined([ONE, NotPossible("no")]) == NotPossible("no")


def test_a_busy_machine_is_noticed() -> None:
    assert busy_machine([ONE, NotPossible("no")]) is None
    assert busy_machine([]) is None
    words = busy_machine([ONE, replace(ONE, step_high_ms=950.0)])
    assert words is not None
    assert "factor of 10.0" in words


def test_on_one_cpu_thread_steps_are_compared_by_cpu_time() -> None:
    assert ONE.cost_ms == ONE.step_ms
    alone = replace(ONE, threads=1)
    assert alone.cost_ms == 150.0
    assert alone.samples_per_cost_s == pytest.approx(320.0 * 100 / 150)
    assert replace(alone, device="cuda").cost_ms == ONE.step_ms
    half = replace(alone, step_ms=300.0, cpu_ms=75.0)
    found = PrecisionBench("cnn", 32, 12, {"fp32": alone, "bf16": half}).as_json()
    assert found["speedup_by"] == "cpu_ms"
    assert found["modes"]["bf16"]["speedup"] == 2.0


# Configurations.


def test_own_defaults_give_way_to_all_that_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults: dict[str, object] = {"loader.batch_size": 16, "faults.item_latency_ms": 10.0}
    config, asked = read(None, [], defaults)
    assert (config.loader.batch_size, config.faults.item_latency_ms) == (16, 10.0)
    assert not config.train.watch
    assert not config.train.manifest
    assert asked == frozenset()

    file = tmp_path / "a.toml"
    file.write_text("[loader]\nbatch_size = 5\n")
    config, asked = read(file, ["--faults.item_latency_ms", "0"], defaults)
    assert (config.loader.batch_size, config.faults.item_latency_ms) == (5, 0.0)
    assert asked == {"loader.batch_size", "faults.item_latency_ms"}

    # A preset that was asked for keeps its values; what it leaves open is the benchmark's.
    config, _ = read(None, ["--preset", "mlp"], defaults)
    assert (config.loader.batch_size, config.faults.item_latency_ms) == (64, 10.0)

    monkeypatch.setenv("TRAINER_LOADER__BATCH_SIZE", "7")
    assert read(None, [], defaults)[0].loader.batch_size == 7


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without torchrun"):
        read(None, [], {})


def test_changed_changes_what_it_is_told() -> None:
    before = Config()
    after = changed(before, {"loader.num_workers": 3, "train.threads": 1})
    assert after.loader.num_workers == 3
    assert after.model_dump(exclude={"loader", "train"}) == before.model_dump(
        exclude={"loader", "train"}
    )
    assert before.loader.num_workers == "auto"


def test_lists_on_the_command_line() -> None:
    assert parse_modes("bf16, fp32,bf16") == ("bf16", "fp32")
    for wrong in ("", "fp8", "fp32,int4"):
        with pytest.raises(ConfigError, match="fp16-manual"):
            parse_modes(wrong)
    assert parse_batch_sizes("4,8,16") == (4, 8, 16)
    for wrong in ("", "4,8", "4,8,x", "0,1,2", "1,2,3,4"):
        with pytest.raises(ConfigError, match="three numbers"):
            parse_batch_sizes(wrong)


# Reports.


def test_precision_is_told_beside_the_claim() -> None:
    result = PrecisionBench(
        "cnn", 32, 12, {"fp32": ONE, "tf32": NotPossible("no GPU"), "bf16": HALF}
    )
    found = json.loads(json.dumps(result.as_json()))
    assert found["schema"] == 1
    assert found["memory_saved_of"] == "saved_for_backward_bytes"
    assert found["modes"]["tf32"] == {"not_possible": "no GPU"}
    assert found["modes"]["bf16"]["speedup"] == 2.0
    assert found["modes"]["bf16"]["memory_saved"] == 0.5
    text = "\n".join(result.lines())
    assert "tf32: n/a, no GPU" in text
    assert "2.1 times" in text
    assert "bf16 2.00 times as fast with 50% less" in " ".join(text.split())


def test_on_a_gpu_memory_is_the_allocators() -> None:
    gpu = replace(ONE, peak_allocated_bytes=1000, device="cuda", device_name="H100")
    less = replace(gpu, peak_allocated_bytes=600)
    result = PrecisionBench("cnn", 32, 12, {"fp32": gpu, "bf16": less})
    assert result.as_json()["memory_saved_of"] == "peak_allocated_bytes"
    assert result.as_json()["modes"]["bf16"]["memory_saved"] == pytest.approx(0.4)
    assert any("peak memory" in line for line in result.lines())
    assert any("H100" in line for line in result.lines())


def test_without_fp32_there_is_no_ratio() -> None:
    result = PrecisionBench("cnn", 32, 12, {"fp32": NotPossible("broken"), "bf16": HALF})
    found = result.as_json()["modes"]["bf16"]
    assert (found["speedup"], found["memory_saved"]) == (None, None)
    assert "nothing to compare" in " ".join(" ".join(result.lines()).split())


def test_what_fails_for_every_mode_alike_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_bench, "measure_fresh", lambda _job: NotPossible("no images"))
    with pytest.raises(TrainingError, match="no images"):
        bench_precision(Config(), modes=("fp32", "bf16"), steps=2)


def test_rounds_go_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def measure(job: Job) -> Measured | NotPossible:
        order.append(job.config.precision.mode)
        return NotPossible("no") if job.config.precision.mode == "tf32" else ONE

    monkeypatch.setattr(precision_bench, "measure_fresh", measure)
    bench_precision(Config(), modes=("fp32", "tf32", "bf16"), steps=2)
    assert order == ["fp32", "tf32", "bf16", "bf16", "fp32"]


def table(amp: Measured | NotPossible, amp_gc: Measured | NotPossible) -> TableBench:
    return TableBench(
        "resnet",
        64,
        4,
        (
            Row(4, False, "fp32", ARTICLE[0], ONE),
            Row(8, False, "bf16", ARTICLE[1], amp),
            Row(8, True, "bf16", None, amp_gc),
            Row(16, True, "bf16", ARTICLE[2], NotPossible("no memory")),
        ),
    )


def test_the_table_has_both_sides() -> None:
    result = table(HALF, replace(HALF, step_ms=65.0, saved_for_backward_bytes=2 * 2**20))
    found = json.loads(json.dumps(result.as_json()))
    claims = [row["claimed"] and row["claimed"]["images_per_s"] for row in found["rows"]]
    assert claims == [1240, 2850, None, 3120]
    assert [row["batch_size"] for row in found["rows"]] == [4, 8, 8, 16]
    assert found["rows"][3]["here"] == {"not_possible": "no memory"}
    text = " ".join(" ".join(result.lines()).split())
    assert "GC a step takes 1.30 times as long, and keeps 10% of the bytes" in text
    assert "batch 16, bf16 + GC: n/a, no memory" in text
    assert "another device" in text
    assert max(len(line) for line in result.lines()) <= 100


def test_the_table_says_nothing_of_what_it_could_not_measure() -> None:
    assert "times as long" not in " ".join(table(HALF, NotPossible("x")).lines())


def test_sizes_follow_the_device() -> None:
    sizes, px = sizes_for("cuda")
    assert tuple(8 * size for size in sizes) == tuple(row.batch_size for row in ARTICLE)
    assert px == 224
    assert max(sizes_for("cpu")[0]) < min(sizes)


# Progress.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals_only() -> None:
    pipe, terminal = io.StringIO(), Terminal()
    for stream in (pipe, terminal):
        with progress("working", 2, err=stream) as advance:
            advance("first")
            advance("second")
    assert pipe.getvalue() == ""
    assert "working" in terminal.getvalue()
    assert "second" in terminal.getvalue()


# Measuring.


def test_batches_go_on_after_an_epoch(jpegs: Path) -> None:
    config = small(jpegs)
    with open_trainer(config, reporter=Reporter(enabled=False)) as trainer:
        feed = build_loaders(config, trainer.placement)
        epoch = feed.accumulation.batches
        with endless(feed, config, trainer.stop) as batches:
            labels = [next(batches)[1].tolist() for _ in range(2 * epoch)]
            assert labels[:epoch] == labels[epoch:]
            it = train_batches(trainer, batches, epoch + 2, first=2 * epoch)
        assert trainer.step == epoch + 2
        assert len(it.data_wait_ms) == len(it.compute_ms) == len(it.losses) == epoch + 2
        assert it.samples == 8 * (epoch + 2)


def test_faults_act_on_what_is_measured(jpegs: Path) -> None:
    config = small(jpegs, "--faults.data_ms", "20")
    with open_trainer(config, reporter=Reporter(enabled=False)) as trainer:
        feed = build_loaders(config, trainer.placement)
        with endless(feed, config, Stop()) as batches:
            assert fetch_batches(batches, 3, Stop()) >= 20.0


def test_text_is_measured_with_its_own_weights(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("\n\n".join(f"text {n} {'word ' * (n % 40)}" for n in range(120)))
    words = (
        f"--preset=gpt-mini --text.path={file} --text.max_tokens=64 --model.width=16 "
        "--model.depth=1 --train.threads=1 --loader.num_workers=0 --train.watch=false "
        "--train.manifest=false --loader.batch_size=4 --train.accumulate=2"
    )
    config = load(words.split(), environ={})
    with open_trainer(config, reporter=Reporter(enabled=False)) as trainer:
        feed = build_loaders(config, trainer.placement)
        batches = feed.accumulation.batches
        with endless(feed, config, trainer.stop) as source:
            it = train_batches(trainer, source, batches + 1)
    # A mean over tokens, whatever the window and their number: near ln(vocabulary) at first.
    assert 4.0 < it.losses[0] < 8.0
    assert it.losses[-1] < it.losses[0]


def measured_here(job: Job, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the fresh process would answer."""
    order = {
        "config": job.config.model_dump(mode="json"),
        "steps": job.steps,
        "warm_up": job.warm_up,
        "batches": job.batches,
    }
    out = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO(json.dumps(order)))
        patch.setattr("sys.stdout", out)
        assert fresh.main() == 0
    answer: dict[str, object] = json.loads(out.getvalue())
    return answer


def test_bf16_and_recomputing_keep_less_for_the_backward(
    jpegs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {}
    for name, more in (
        ("fp32", []),
        ("bf16", ["--precision.mode=bf16"]),
        ("bf16 + GC", ["--precision.mode=bf16", "--memory.checkpoint_activations=true"]),
    ):
        words = ("--data.image_px=64", "--model.width=32", "--train.steps=6")
        config = small(jpegs, *words, *more)
        it = Measured(**measured_here(Job(config, 4, 2, "data"), monkeypatch))  # type: ignore[arg-type]
        kept[name] = it.saved_for_backward_bytes
        assert it.final_loss < it.first_loss
        assert it.peak_allocated_bytes is None
        assert it.step_low_ms <= it.step_ms <= it.step_high_ms
    assert kept["bf16"] < 0.7 * kept["fp32"]
    assert kept["bf16 + GC"] < 0.7 * kept["bf16"]


def test_a_batch_of_random_numbers_needs_no_more_data(
    jpegs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Measured(
        **measured_here(Job(small(jpegs), 2, 1, "random"), monkeypatch)  # type: ignore[arg-type]
    )
    assert it.samples_per_s == pytest.approx(8e3 / it.step_ms)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may do TF32")
def test_a_fresh_process_says_what_the_device_cannot(jpegs: Path) -> None:
    answer = measure_fresh(Job(small(jpegs, "--precision.mode=tf32"), 2, 1, "data"))
    assert isinstance(answer, NotPossible)
    assert answer.reason.startswith("precision.mode=tf32 needs")


def test_a_process_that_breaks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_args: object, **_kwargs: object) -> object:
        return next(answers)

    class Done:
        def __init__(self, returncode: int, stderr: str) -> None:
            self.returncode, self.stdout, self.stderr = returncode, "", stderr

    answers = iter([Done(-9, ""), Done(1, "Traceback\nKeyError: 'x'\n")])
    monkeypatch.setattr("subprocess.run", run)
    job = Job(Config(), 2, 1, "data")
    killed = measure_fresh(job)
    assert isinstance(killed, NotPossible)
    assert "memory" in killed.reason
    with pytest.raises(TrainingError, match="KeyError: 'x'"):
        measure_fresh(job)


def test_workers_make_the_device_busy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # put back afterwards
    words = ["loader", "--json", "--steps", "4", "--data.synthetic_images", "64"]
    bench.main(words, prog_name="bench", standalone_mode=False)
    captured = capsys.readouterr()
    assert captured.err == ""
    found = json.loads(captured.out)
    assert found["schema"] == 1
    assert found["simulated"].startswith("SIMULATED")
    naive, tuned = found["naive"], found["tuned"]
    assert naive["num_workers"] == 0
    assert naive["prefetch_factor"] is None
    assert tuned["num_workers"] > 1
    assert (tuned["prefetch_factor"], tuned["persistent_workers"]) == (4, True)
    assert naive["device_busy_ratio"] < 0.5 < 0.7 < tuned["device_busy_ratio"]
    assert tuned["samples_per_s"] > naive["samples_per_s"]
    for it in (naive, tuned):
        assert len(it["rounds"]) == 3
        assert it["step_ms"] == pytest.approx(it["data_wait_ms"] + it["compute_ms"], rel=0.25)


def test_help_needs_no_torch() -> None:
    # The groups are imported to be listed; what they run is imported when it runs.
    import subprocess
    import sys

    code = (
        "import sys, trainer.bench.commands, trainer.tune.commands;"
        "sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_batches_are_counted_whatever_they_are() -> None:
    from trainer.bench.measure import batch_length

    images = torch.zeros(5, 3, 8, 8)
    assert batch_length((images, torch.zeros(5))) == 5
    assert batch_length({"input_ids": torch.zeros(7, 4), "labels": torch.zeros(7)}) == 7
