"""An untuned input pipeline against a tuned one, on a real training step."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer import faults
from trainer.bench.measure import Batches, endless, train_batches
from trainer.bench.settings import changed
from trainer.bench.text import ms, percent, prose, rows_of
from trainer.config import Config
from trainer.data import build_loaders
from trainer.loop import Trainer
from trainer.report import Reporter
from trainer.run import open_trainer
from trainer.signals import Stop

__all__ = ["DEFAULTS", "SCHEMA", "LoaderBench", "Pipeline", "bench_loader", "workers_for"]

SCHEMA = 1

DEFAULTS: dict[str, object] = {
    # Items that wait, as for a remote store, and cost little CPU: workers then help beyond the
    # number of cores, and two cores suffice to see it.
    "faults.item_latency_ms": 10.0,
    "data.synthetic_px": 96,
    "loader.batch_size": 16,
    # The other cores are the workers'.
    "train.threads": 1,
}

_WARM_UP = 3
_ROUNDS = 3
_WORKERS_MAX = 64
_PREFETCH = 4
# Above what the mean needs: batches do not take equally long, and an idle worker costs little.
_HEADROOM = 1.5

CLAIM = (
    "Claimed in the article: GPU-Util under 30 % on an untuned pipeline, +40 % by tuning the "
    "loader; on which GPU, model and data it does not say."
)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One way to load, as measured: medians over the rounds."""

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    device_busy_ratio: float
    """Time in which the device computes / time of the steady steps: 1 - data wait share."""
    samples_per_s: float
    step_ms: float
    data_wait_ms: float
    """Mean per step."""
    compute_ms: float
    """Mean per step."""
    rounds: tuple[float, ...]
    """The device-busy ratio of each round."""


@dataclass(frozen=True, slots=True)
class LoaderBench:
    """Both pipelines, measured in turns."""

    naive: Pipeline
    tuned: Pipeline
    device: str
    model: str
    batch_size: int
    steps: int
    """Measured in each round, warm-up left out."""
    simulated: str | None
    """What is simulated, in words."""
    reason: str
    """How the number of workers came about."""

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "schema": SCHEMA,
            "simulated": self.simulated,
            "device": self.device,
            "model": self.model,
            "batch_size": self.batch_size,
            "steps": self.steps,
            "naive": asdict(self.naive),
            "tuned": asdict(self.tuned),
            "tuned_by": self.reason,
            "claim": CLAIM,
        }

    def lines(self) -> list[str]:
        """For a person."""
        naive, tuned = self.naive, self.tuned
        head = ("", "workers", "ahead", "device busy", "data wait", "step ms", "samples/s")
        rows = [
            (
                name,
                str(it.num_workers),
                "-" if it.prefetch_factor is None else str(it.prefetch_factor),
                percent(it.device_busy_ratio),
                f"{ms(it.data_wait_ms)} ms",
                ms(it.step_ms),
                f"{it.samples_per_s:,.0f}",
            )
            for name, it in (("naive", naive), ("tuned", tuned))
        ]
        return [
            *prose(
                self.simulated,
                f"{self.model} on {self.device}, batches of {self.batch_size}: forward, backward "
                f"and optimizer are real; at least {self.steps} steps in each of "
                f"{len(naive.rounds)} rounds in turns, medians",
            ),
            "",
            *rows_of(head, rows),
            "",
            *prose(
                f"tuned: {self.reason}",
                CLAIM,
                f"Measured here: the device computes {percent(naive.device_busy_ratio)} of the "
                f"time untuned and {percent(tuned.device_busy_ratio)} tuned, with "
                f"{tuned.samples_per_s / naive.samples_per_s:.1f} times the samples a second. "
                "(Busy is the time of the step that is not data wait; GPU-Util is the time in "
                "which any kernel runs.)",
            ),
        ]


def workers_for(load_ms: float, compute_ms: float, *, headroom: float = _HEADROOM) -> int:
    """Workers that deliver a batch each time one is computed, 1 to 64.

    One worker needs `load_ms` for a batch, so W of them deliver one every load_ms / W.
    """
    if compute_ms <= 0:
        return _WORKERS_MAX
    return max(1, min(_WORKERS_MAX, math.ceil(headroom * load_ms / compute_ms)))


def bench_loader(
    config: Config,
    *,
    steps: int,
    workers: int | None = None,
    prefetch: int | None = None,
    stop: Stop | None = None,
    advance: Callable[[str], None] = lambda _doing: None,
) -> LoaderBench:
    """Measure both, in turns, `steps` steady steps each time.

    The tuned pipeline has `workers` with `prefetch` batches ahead each; None: as many as loading
    and computing a batch take relative to each other, 4 ahead. `advance` is called before each of
    the 7 parts. Raises `trainer.errors.TrainerError` as a training does.
    """
    stop = stop or Stop()
    naive = changed(
        config,
        {
            "train.accumulate": 1,
            "loader.num_workers": 0,
            "loader.prefetch_factor": "auto",
            "loader.persistent_workers": False,
            "loader.multiprocessing_context": "auto",
            "loader.timeout_s": 0.0,
        },
    )
    with open_trainer(naive, reporter=Reporter(enabled=False), stop=stop) as trainer:
        advance("calibration")
        first = _measure(trainer, naive, steps=4)
        # Other work on the machine only adds: the least is nearest to what it takes.
        load_ms, compute_ms = min(first.data_wait_ms), min(first.compute_ms)
        reason = "as asked for"
        if workers is None:
            workers = workers_for(load_ms, compute_ms)
            reason = (
                f"{workers} workers, as one needs {ms(load_ms)} ms to load what is computed in "
                f"{ms(compute_ms)} ms, with {_HEADROOM - 1:.0%} to spare"
            )
        tuned = changed(
            config,
            {
                "train.accumulate": 1,
                "loader.num_workers": workers,
                "loader.prefetch_factor": (prefetch or _PREFETCH) if workers else "auto",
                "loader.persistent_workers": workers > 0,
            },
        )
        rounds: dict[str, list[Batches]] = {"naive": [], "tuned": []}
        configs = {"naive": naive, "tuned": tuned}
        for turn in range(_ROUNDS):
            # First one then the other: a machine that warms up or gets busy favours none.
            for name in ("naive", "tuned") if turn % 2 == 0 else ("tuned", "naive"):
                advance(f"{name} {turn + 1}/{_ROUNDS}")
                rounds[name].append(_measure(trainer, configs[name], steps=steps))
        return LoaderBench(
            naive=_pipeline(naive, rounds["naive"]),
            tuned=_pipeline(tuned, rounds["tuned"]),
            device=trainer.placement.device.type,
            model=config.model.name,
            batch_size=config.loader.batch_size,
            steps=steps,
            simulated=faults.describe(config.faults, faults.parse_faults(config.faults.inject)),
            reason=reason,
        )


def _measure(trainer: Trainer, config: Config, *, steps: int) -> Batches:
    """Fresh workers, a warm-up, then so many steps."""
    feed = build_loaders(config, trainer.placement)
    workers = feed.plan.num_workers
    # Workers start together and deliver together: a whole number of such bursts is fair.
    burst = max(1, workers)
    count = -(-steps // burst) * burst
    warm_up = max(_WARM_UP, workers)
    with endless(feed, config, trainer.stop) as batches:
        train_batches(trainer, batches, warm_up)
        return train_batches(trainer, batches, count, first=warm_up)


def _pipeline(config: Config, rounds: Sequence[Batches]) -> Pipeline:
    loader = config.loader
    workers = int(loader.num_workers)

    def median(values: list[float]) -> float:
        return statistics.median(values)

    return Pipeline(
        num_workers=workers,
        prefetch_factor=int(loader.prefetch_factor) if workers else None,
        persistent_workers=loader.persistent_workers is True,
        device_busy_ratio=median([r.device_busy_ratio for r in rounds]),
        samples_per_s=median([r.samples_per_s for r in rounds]),
        step_ms=median([r.step_ms for r in rounds]),
        data_wait_ms=median([sum(r.data_wait_ms) / len(r.data_wait_ms) for r in rounds]),
        compute_ms=median([sum(r.compute_ms) / len(r.compute_ms) for r in rounds]),
        rounds=tuple(r.device_busy_ratio for r in rounds),
    )
