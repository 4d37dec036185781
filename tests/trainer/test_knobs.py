"""Settings that are changed while it trains: nothing is lost, and the windows are right."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import gpuwatch
from trainer import run
from trainer.accumulate import Accumulation, PlannedAccumulation
from trainer.config import LoaderConfig
from trainer.data import build_loaders
from trainer.data.loader import plan_loader, replan
from trainer.distributed import CommHook, Placement
from trainer.report import Reporter
from trainer.run import open_trainer
from trainer.sources import load
from trainer.telemetry import Silent, Watched


class Panel(Silent):
    """Telemetry that keeps the knobs, for the test to turn them."""

    def __init__(self, *_: object, allow_control: bool = False) -> None:
        self.allow_control = self.controlled = allow_control
        self.knobs: dict[str, dict[str, Any]] = {}

    def knob(self, name: str, *args: object, **limits: object) -> None:
        self.knobs[name] = {"value": args[0], "apply": args[1], **limits}

    def turn(self, name: str, value: float | str) -> None:
        self.knobs[name]["apply"](value)

    def span(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()


SMALL = (
    "--data.image_px=16 --model.width=4 --train.threads=1 --loader.num_workers=0 "
    "--loader.batch_size=4 --data.eval_fraction=0 --train.eval_interval_epochs=0 --train.epochs=2"
)


def trained(
    jpegs: Path,
    monkeypatch: pytest.MonkeyPatch,
    turn: Callable[[Panel, int, int], None],
    *more: str,
) -> tuple[list[list[int]], list[list[int]], Any]:
    """Train two epochs; returns the indices of the samples and the windows of each, and the end.

    `turn` is called with the epoch and the number of each fetch, as a step boundary would be.
    """
    monkeypatch.setattr(run, "Watched", Panel)
    samples: list[list[int]] = []
    windows: list[list[int]] = []
    with open_trainer(
        load([f"--data.path={jpegs}", *SMALL.split(), *more], environ={}),
        reporter=Reporter(enabled=False),
    ) as trainer:
        images, panel = trainer.loaders.images, trainer.telemetry  # type: ignore[attr-defined]
        read = type(images).__getitem__
        asked: list[int] = []

        def recorded(self: Any, index: int) -> Any:
            asked.append(index)
            return read(self, index)

        monkeypatch.setattr(type(images), "__getitem__", recorded)
        micro_batch = trainer.micro_batch

        def watched(batch: Any, part: Any) -> Any:
            # Without workers the batch was read just now: what was asked for last is in it.
            samples[-1] += asked[-len(batch[1]) :]
            if part.last:
                windows[-1].append(part.window_samples)
            loss = micro_batch(batch, part)
            turn(panel, len(samples) - 1, len(samples[-1]) // 4)
            return loss

        trainer.micro_batch = watched  # type: ignore[method-assign]
        for epoch in range(2):
            samples.append([])
            windows.append([])
            trainer.train_epoch(epoch)
        return samples, windows, trainer


def order(jpegs: Path) -> list[list[int]]:
    """The samples of two epochs where nothing is changed."""
    feed = build_loaders(
        load([f"--data.path={jpegs}", *SMALL.split()], environ={}),
        Placement.from_environment("cpu", {}),
    )
    found = []
    for epoch in range(2):
        feed.set_epoch(epoch)
        found.append(list(feed.sampler))  # type: ignore[attr-defined]
    return found


def test_another_loader_goes_on_where_the_last_one_was(
    jpegs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def turn(panel: Panel, epoch: int, fetched: int) -> None:
        # In the middle of a window, at the end of one, and at the end of the epoch.
        if (epoch, fetched) in {(0, 3), (0, 8), (0, 16)}:
            panel.turn("num_workers", 0)

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["num_workers"])
        return replan(*args, **kwargs)

    monkeypatch.setattr("trainer.data.loader.replan", counted)
    samples, windows, trainer = trained(jpegs, monkeypatch, turn, "--train.accumulate=2")
    assert samples == order(jpegs)
    assert seen == [0, 0, 0]
    assert windows == [[8] * 8, [8] * 8]
    assert trainer.step == 16


def test_windows_change_where_one_begins(jpegs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(panel: Panel, epoch: int, fetched: int) -> None:
        if (epoch, fetched) == (0, 5):  # in the middle of a window of two
            panel.turn("gradient_accumulation", 3)

    samples, windows, trainer = trained(jpegs, monkeypatch, turn, "--train.accumulate=2")
    assert samples == order(jpegs)
    # Three windows of two, then of three: 16 micro-batches are 6 + 3 + 3 + 3 + 1.
    assert windows[0] == [8, 8, 8, 12, 12, 12, 4]
    assert windows[1] == [12, 12, 12, 12, 12, 4]
    assert trainer.step == 13
    assert trainer.total_steps == 16


def test_the_knobs_that_there_are(jpegs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Watched", Panel)
    monkeypatch.setattr("trainer.knobs.usable_cpus", lambda: 2)
    arguments = [f"--data.path={jpegs}", *SMALL.split(), "--train.allow_control=true"]
    with open_trainer(load(arguments, environ={}), reporter=Reporter(enabled=False)) as trainer:
        panel: Any = trainer.telemetry
        assert panel.allow_control
        limits = {name: (knob["low"], knob["high"]) for name, knob in panel.knobs.items()}
        assert limits == {
            "num_workers": (0, 32),
            "prefetch_factor": (1, 64),
            "gradient_accumulation": (1, 16),
            "log_interval_steps": (1, 1_000_000),
        }
        assert [n for n, knob in panel.knobs.items() if knob.get("together")] == [
            "gradient_accumulation"
        ]
        with pytest.raises(ValueError, match="no meaning with num_workers=0"):
            panel.turn("prefetch_factor", 4)
        panel.turn("num_workers", 5)
        panel.turn("prefetch_factor", 4)
        assert trainer.wanted.take_workers() == (5, 4)
        panel.turn("log_interval_steps", 3)
        assert trainer.log_interval_steps == 3


def test_how_gradients_travel_is_a_knob_where_there_is_a_hook(
    jpegs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def hooked(*_: object, live: bool) -> CommHook | None:
        asked.append(live)
        return CommHook(dist.ProcessGroup(0, 2), ("none", "bf16_compress_hook"))

    monkeypatch.setattr(run, "Watched", Panel)
    monkeypatch.setattr(run, "comm_hook", hooked)
    arguments = [f"--data.path={jpegs}", *SMALL.split()]
    for control in (False, True):
        more = [f"--train.allow_control={control}"]
        with open_trainer(
            load([*arguments, *more], environ={}), reporter=Reporter(enabled=False)
        ) as trainer:
            panel: Any = trainer.telemetry
            knob = panel.knobs["comm_hook"]
            assert (knob["value"], knob["together"]) == ("none", True)
            assert knob["choices"] == ("none", "bf16_compress_hook")
            panel.turn("comm_hook", "bf16_compress_hook")
            assert trainer.parts.comm_hook is not None
            assert trainer.parts.comm_hook.kind == "bf16_compress_hook"
    assert asked == [False, True]


def test_control_is_allowed_by_the_launcher_too(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    monkeypatch.setattr(
        gpuwatch, "watch", lambda *, name, allow_control: said.append(allow_control)
    )
    monkeypatch.delenv("GPUWATCH_ALLOW_CONTROL", raising=False)
    assert not Watched("x").controlled
    assert Watched("x", allow_control=True).controlled
    monkeypatch.setenv("GPUWATCH_ALLOW_CONTROL", "1")
    assert Watched("x").controlled
    assert said == [False, True, False]


def test_the_strength_of_augmentation_follows_the_schedule(
    jpegs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "Watched", Panel)
    arguments = [
        f"--data.path={jpegs}", *SMALL.split(), "--data.colour_strength=0.5",
        "--data.strength_schedule=linear",
    ]  # fmt: skip
    with open_trainer(load(arguments, environ={}), reporter=Reporter(enabled=False)) as trainer:
        panel: Any = trainer.telemetry
        set_to: list[float] = []
        monkeypatch.setattr(type(trainer.loaders), "set_strength", lambda _, s: set_to.append(s))
        panel.turn("augmentation_strength", 0.5)
        trainer.step = trainer.total_steps // 2
        trainer._set_strength()
        assert set_to == [0.5, 0.25]


def test_windows_that_begin_within_an_epoch() -> None:
    windows = Accumulation(samples=30, batch_size=3, every=4, start=3)
    assert [windows.micro_batch(i).last for i in range(3, 10)] == [
        False, False, False, True, False, False, True,
    ]  # fmt: skip
    assert windows.micro_batch(3).window_samples == 12
    assert windows.micro_batch(9).window_samples == 9
    planned = PlannedAccumulation([2] * 10, [1] * 10, [1] * 10, [5] * 10, ranks=2, every=4, start=3)
    assert [planned.micro_batch(i).window_tokens for i in (3, 6, 7, 9)] == [20, 20, 15, 15]


def test_a_plan_with_other_workers() -> None:
    config = LoaderConfig(num_workers=0)
    plan = plan_loader(config, cpus=4, ranks_here=1, cuda=False)
    more = replan(plan, config, num_workers=3, prefetch_factor=5)
    assert (more.num_workers, more.prefetch_factor, more.persistent_workers) == (3, 5, True)
    assert replan(more, config, num_workers=0, prefetch_factor=5) == plan
    patient = LoaderConfig(num_workers=2, timeout_s=9)
    plan = plan_loader(patient, cpus=4, ranks_here=1, cuda=False)
    with pytest.raises(ValueError, match=r"loader\.timeout_s cannot interrupt"):
        replan(plan, patient, num_workers=0, prefetch_factor=2)


def test_texts_change_their_windows_and_loader_too() -> None:
    config = load(
        ["--preset=gpt-mini", "--loader.num_workers=0", "--text.max_tokens=64"], environ={}
    )
    feed = build_loaders(config, Placement.from_environment("cpu", {}))
    feed.set_epoch(1)
    before = feed.accumulation.micro_batch(5)
    feed.set_accumulation(3, 2)
    assert before.last
    assert [feed.accumulation.micro_batch(i).last for i in (2, 3, 4, 5)] == [
        False, False, True, False,
    ]  # fmt: skip
    feed.set_workers(0, 2)
    feed.set_epoch(1, 5)
    assert [feed.accumulation.micro_batch(i).last for i in (2, 3, 4)] == [False, False, True]
    assert len(feed.train) == feed.accumulation.batches - 5
    feed.set_epoch(2)
    assert [feed.accumulation.micro_batch(i).last for i in (0, 1, 2)] == [False, False, True]
