"""The loop in one process, on a fake telemetry."""

import contextlib
import io
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gpuwatch
from trainer.config import Config
from trainer.errors import TrainingError
from trainer.loop import train_step
from trainer.report import Reporter
from trainer.run import open_trainer
from trainer.sources import load


class FakeGpuwatch:
    """Stands in for gpuwatch's public functions and keeps what it was told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.facts: list[dict[str, object]] = []

    def watch(self, *, name: str | None = None, allow_control: bool = False) -> None:
        self.calls.append("watch")

    def unwatch(self) -> None:
        self.calls.append("unwatch")

    def annotate(self, **facts: object) -> None:
        self.facts.append({key: value for key, value in facts.items() if value is not None})

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        self.calls.append(f"{name} begins")
        yield
        self.calls.append(f"{name} ends")

    phase = span

    def step(self) -> None:
        self.calls.append("step")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpuwatch:
    fake = FakeGpuwatch()
    for name in ("watch", "unwatch", "annotate", "span", "phase", "step"):
        monkeypatch.setattr(gpuwatch, name, getattr(fake, name), raising=False)
    return fake


SMALL = (
    "--data.image_px=16 --model.width=8 --train.threads=1 --train.log_interval_steps=2 "
    "--loader.num_workers=0 --loader.batch_size=8 --optim.warmup_steps=3"
)


def config(jpegs: Path, *more: str) -> Config:
    return load(
        [f"--data.path={jpegs}", *SMALL.split(), *more],
        environ={},
    )


def test_loss_falls_and_rows_say_so(jpegs: Path, fake: FakeGpuwatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    with open_trainer(
        config(jpegs, "--train.steps", "40"), reporter=Reporter(out=out, err=err)
    ) as trainer:
        trainer.fit()
        assert trainer.step == 40
    rows = [line.split() for line in out.getvalue().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert all(row[0::2] == ["epoch", "step", "loss", "img/s"] for row in steps)
    assert [int(row[3]) for row in steps] == list(range(2, 41, 2))
    losses = [float(row[5]) for row in steps]
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert any("eval_accuracy" in row for row in rows)
    assert "2 x" not in err.getvalue()
    assert "SIMULATED" not in err.getvalue()


def test_what_gpuwatch_is_told(jpegs: Path, fake: FakeGpuwatch) -> None:
    with open_trainer(
        config(jpegs, "--train.epochs", "2", "--train.accumulate", "3"),
        reporter=Reporter(enabled=False),
    ) as trainer:
        trainer.fit()
        epoch = trainer.loaders.accumulation
    assert fake.calls == ["watch", *["eval begins", "eval ends"] * 2, "unwatch"]
    run, *steps = fake.facts
    assert run == {"total_steps": 2 * epoch.steps, "dataset_path": str(jpegs)}
    assert len(steps) == 2 * epoch.steps
    assert sum(step["samples"] for step in steps) == 2 * epoch.samples  # type: ignore[misc]
    assert all(isinstance(step["loss"], torch.Tensor) for step in steps)
    assert steps[-1]["epoch"] == 2.0
    # Each tensor belongs to its step: none is written to again afterwards.
    assert len({id(step["loss"]) for step in steps}) == len(steps)


def test_telemetry_can_be_off(jpegs: Path, fake: FakeGpuwatch) -> None:
    with open_trainer(
        config(jpegs, "--train.steps", "2", "--train.watch", "false"),
        reporter=Reporter(enabled=False),
    ) as trainer:
        trainer.fit()
    assert fake.calls == []
    assert fake.facts == []


def test_one_seed_one_result(jpegs: Path, fake: FakeGpuwatch) -> None:
    from trainer.distributed import checksum

    sums = []
    for seed in ("1", "1", "2"):
        with open_trainer(
            config(jpegs, "--train.steps", "5", "--train.seed", seed),
            reporter=Reporter(enabled=False),
        ) as trainer:
            trainer.fit()
            sums.append(checksum(trainer.model))
    assert sums[0] == sums[1]
    assert sums[0] != sums[2]


def test_adamw_trains(jpegs: Path, fake: FakeGpuwatch) -> None:
    with open_trainer(
        config(jpegs, "--train.steps", "3", "--optim.name", "adamw"),
        reporter=Reporter(enabled=False),
    ) as trainer:
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 3)
        assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [5e-4, 0.0]
        trainer.fit()
        assert trainer.optimizer.param_groups[0]["lr"] < 1e-3


def test_a_loss_that_is_no_number_ends_the_run(jpegs: Path, fake: FakeGpuwatch) -> None:
    def run() -> None:
        with open_trainer(config(jpegs), reporter=Reporter(enabled=False)) as trainer:
            torch.nn.init.constant_(next(trainer.model.parameters()), float("nan"))
            trainer.fit()

    with pytest.raises(TrainingError, match=r"not a number at step 2: lower optim\.lr"):
        run()
    # The goodbye is left to the end of the process: it knows the exception.
    assert "unwatch" not in fake.calls


@pytest.mark.parametrize(
    "fault", ["item_latency_ms=4", "data_ms=30", "forward_ms=30", "backward_ms=30"]
)
def test_faults_cost_what_they_say(jpegs: Path, fake: FakeGpuwatch, fault: str) -> None:
    """Five steps with one fault take about 30 ms longer each; on another rank nothing happens."""
    err = io.StringIO()

    def seconds(*more: str) -> float:
        short = config(jpegs, "--train.steps", "5", "--data.eval_fraction", "0", *more)
        with open_trainer(short, reporter=Reporter(err=err, out=io.StringIO())) as trainer:
            start = time.perf_counter()
            trainer.fit()
            return time.perf_counter() - start

    other_rank = seconds(f"--faults.{fault}", "--faults.rank", "1")
    assert err.getvalue().count("SIMULATED on rank 1") == 1
    slow = seconds(f"--faults.{fault}")
    assert err.getvalue().count("SIMULATED on all ranks") == 1
    assert slow >= 5 * 0.030
    assert slow - other_rank > 0.5 * 5 * 0.030


GPT = (
    "--preset gpt-mini --model.width 32 --model.depth 1 --model.heads 2 --text.max_tokens 64 "
    "--loader.num_workers 0 --train.threads 1 --train.log_interval_steps 1 "
    "--train.eval_interval_epochs 0"
)


def gpt(*more: str) -> Config:
    return load([*GPT.split(), *more], environ={})


@pytest.mark.parametrize("mode", ["bf16", "fp16", "fp16-manual"])
def test_every_precision_learns(jpegs: Path, fake: FakeGpuwatch, mode: str) -> None:
    out = io.StringIO()
    with open_trainer(
        config(jpegs, "--train.steps", "12", "--precision.mode", mode, "--optim.clip_norm", "5"),
        reporter=Reporter(out=out, err=io.StringIO()),
    ) as trainer:
        trainer.fit()
        assert trainer.precision.skipped < 6
        lr = trainer.schedule.get_last_lr()[0]
        done = trainer.step - trainer.precision.skipped
        assert trainer.schedule.last_epoch == done
        assert lr < 0.05
    rows = [line.split() for line in out.getvalue().splitlines() if "loss" in line.split()]
    assert float(rows[-1][rows[-1].index("loss") + 1]) < float(rows[0][rows[0].index("loss") + 1])
    assert ("skipped" in rows[-1]) is (mode != "bf16")


def test_a_skipped_step_counts_and_holds_the_schedule(jpegs: Path, fake: FakeGpuwatch) -> None:
    with open_trainer(
        config(jpegs, "--train.steps", "4", "--precision.mode", "fp16-manual"),
        reporter=Reporter(enabled=False),
    ) as trainer:
        trainer.loaders.set_epoch(0)
        batch = next(iter(trainer.loaders.train))
        part = trainer.loaders.accumulation.micro_batch(0)
        trainer.micro_batch(batch, part)
        next(trainer.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        before = [p.clone() for p in trainer.model.parameters()]
        trainer.update()
        assert (trainer.step, trainer.precision.skipped, trainer.schedule.last_epoch) == (1, 1, 0)
        for parameter, kept in zip(trainer.model.parameters(), before, strict=True):
            assert torch.equal(parameter, kept)
        trainer.micro_batch(batch, part)
        trainer.update()
        assert (trainer.step, trainer.precision.skipped, trainer.schedule.last_epoch) == (2, 1, 1)


def test_augmentation_weakens_late(jpegs: Path, fake: FakeGpuwatch) -> None:
    more = "--data.mixup_alpha 0.4 --data.cutmix_alpha 1 --data.colour_strength 0.5 "
    more += "--data.strength_schedule late_off --data.strength_late_share 0.5 --train.steps 8"
    strengths: list[float] = []
    with open_trainer(config(jpegs, *more.split()), reporter=Reporter(enabled=False)) as trainer:
        task = trainer.task
        loss = task.loss

        def recorded(*arguments: object, strength: float, **named: object) -> torch.Tensor:
            strengths.append(strength)
            return loss(*arguments, strength=strength, **named)  # type: ignore[arg-type]

        task.loss = recorded  # type: ignore[method-assign, assignment]
        told: list[float] = []
        trainer.loaders.images.set_strength = told.append  # type: ignore[attr-defined]
        trainer.fit()
    assert strengths == [1.0] * 4 + [0.0] * 4
    assert told == [0.0]


def test_a_run_goes_on_inside_an_epoch(jpegs: Path, fake: FakeGpuwatch) -> None:
    """The batches after a stop are those that the uninterrupted run would have had."""

    def batches(options: Config, first: int) -> list[torch.Tensor]:
        with open_trainer(options, reporter=Reporter(enabled=False)) as trainer:
            trainer.loaders.set_epoch(3, first)
            return [
                batch["input_ids"] if isinstance(batch, dict) else batch[0]
                for batch in trainer.loaders.train
            ]

    for options in (config(jpegs), gpt("--loader.batch_size", "64")):
        whole = batches(options, 0)
        rest = batches(options, 2)
        assert len(rest) == len(whole) - 2 > 0
        for mine, other in zip(rest, whole[2:], strict=True):
            assert torch.equal(mine, other)


def test_a_language_model_learns_bytes(fake: FakeGpuwatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    with open_trainer(
        gpt("--train.steps", "30", "--train.accumulate", "2", "--optim.lr", "0.01"),
        reporter=Reporter(out=out, err=err),
    ) as trainer:
        trainer.fit()
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert all(row[0::2] == ["epoch", "step", "loss", "tok/s"] for row in rows)
    losses = [float(row[5]) for row in rows]
    # ln 256 = 5.5 at first; English letters alone bring it below 4.
    assert losses[0] > 4.5
    assert losses[-1] < losses[0] - 1.0
    assert "of a batch is padding (pack)" in err.getvalue()
    assert fake.facts[0]["dataset_path"] != ""


def test_a_leak_is_said_and_told(jpegs: Path, fake: FakeGpuwatch) -> None:
    err = io.StringIO()
    kept = []
    more = ["--train.steps", "120", "--memory.leak_interval_steps", "10"]
    with open_trainer(
        config(jpegs, *more, "--train.eval_interval_epochs", "0"),
        reporter=Reporter(out=io.StringIO(), err=err),
    ) as trainer:
        loss = trainer.task.loss

        def leaking(*arguments: object, **named: object) -> torch.Tensor:
            value = loss(*arguments, **named)  # type: ignore[arg-type]
            kept.append(value)
            return value

        trainer.task.loss = leaking  # type: ignore[method-assign]
        trainer.fit()
    notices = [fact["notice"] for fact in fake.facts if "notice" in fact]
    assert notices
    assert all(f"trainer: {notice}" in err.getvalue() for notice in notices)


def test_running_out_of_memory_is_one_sentence(jpegs: Path, fake: FakeGpuwatch) -> None:
    err = io.StringIO()

    def run() -> None:
        more = ["--train.steps", "2", "--memory.summary", "true"]
        with open_trainer(config(jpegs, *more), reporter=Reporter(err=err)) as trainer:
            trainer.model.register_forward_pre_hook(lambda *_: torch.empty(2**46))
            trainer.fit()

    with pytest.raises(TrainingError, match=r"ran out of memory with loader\.batch_size=8"):
        run()
    assert "resident" in err.getvalue()


def test_recomputed_activations_change_no_step(jpegs: Path, fake: FakeGpuwatch) -> None:
    losses = []
    for recompute in ("false", "true"):
        with open_trainer(
            config(jpegs, "--train.steps", "6", "--memory.checkpoint_activations", recompute),
            reporter=Reporter(out=io.StringIO(), err=io.StringIO()),
        ) as trainer:
            trainer.fit()
            losses.append(trainer.loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_step_by_itself_weighs_tokens_as_training_does(fake: FakeGpuwatch) -> None:
    """Under a loss scale a sum over thousands of tokens would overflow every time."""
    for mode in ("fp32", "fp16"):
        options = gpt("--precision.mode", mode, "--train.accumulate", "2")
        with open_trainer(options, reporter=Reporter(enabled=False)) as trainer:
            batch = trainer.task.largest_batch(4)
            loss = float(train_step(trainer.parts, [batch, batch]))
            assert loss == pytest.approx(5.6, abs=0.5)
            assert trainer.precision.skipped == 0


def test_the_length_of_a_run_is_worked_out_once(
    fake: FakeGpuwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.data.text import feed

    plans: list[int] = []
    plan_epoch = feed.plan_epoch

    def counted(*arguments: object, epoch: int, **named: object) -> object:
        plans.append(epoch)
        return plan_epoch(*arguments, epoch=epoch, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(feed, "plan_epoch", counted)
    options = gpt("--text.padding", "bucket", "--train.epochs", "6", "--loader.batch_size", "64")
    with open_trainer(options, reporter=Reporter(enabled=False)) as trainer:
        trainer.train_epoch(0)
        steps = trainer.step
        assert trainer.total_steps == 6 * steps > 60
    # Two for the epoch and the held-out texts, whatever the number of steps and epochs.
    assert len(plans) < 6


def test_one_value_per_channel_is_one_sentence(jpegs: Path, fake: FakeGpuwatch) -> None:
    more = ["--loader.batch_size", "1", "--data.image_px", "8", "--train.steps", "1"]
    with (
        pytest.raises(TrainingError, match=r"BatchNorm needs more than one value of a channel"),
        open_trainer(config(jpegs, *more), reporter=Reporter(enabled=False)) as trainer,
    ):
        trainer.fit()


def test_held_out_by_other_ranks_alone_is_no_evaluation(jpegs: Path, fake: FakeGpuwatch) -> None:
    with open_trainer(config(jpegs), reporter=Reporter(enabled=False)) as trainer:
        assert trainer.loaders.held_out is not None
        empty = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(0, 1)))
        trainer.loaders = replace(trainer.loaders, held_out=empty)  # type: ignore[type-var]
        trainer.evaluate_batches(3)
        assert trainer.evaluate(1) is None
