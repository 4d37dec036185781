"""Find the loader's workers and prefetch by training with each setting for a moment."""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from trainer import faults
from trainer.bench.measure import Batches, endless, fetch_batches, train_batches
from trainer.bench.settings import changed
from trainer.bench.text import counted, ms, prose, rows_of
from trainer.config import Config
from trainer.cpus import usable_cpus
from trainer.data import LoaderPlan, build_loaders
from trainer.errors import ConfigError
from trainer.loop import Trainer
from trainer.report import Reporter
from trainer.run import open_trainer
from trainer.signals import Stop
from trainer.tune.choice import (
    WORKERS_MAX,
    Measurement,
    Verdict,
    busy_machine,
    choose,
    faster,
    next_workers,
    verdict,
)
from trainer.tune.toml_edit import Scalar

__all__ = ["SCHEMA", "LoaderTuning", "share_of_cpus", "tune_loader"]

SCHEMA = 1

_PREFETCH = (2, 4)
_WARM_UP = 3
_WINDOWS = 2
# Where a batch takes seconds, one window has to do.
_LIMIT_S = 15.0


@dataclass(frozen=True, slots=True)
class LoaderTuning:
    """All that was measured, and what follows from it."""

    measurements: tuple[Measurement, ...]
    chosen: Measurement
    configured: Measurement
    """The setting that the configuration has now."""
    loader_ms: float
    """A batch of the chosen setting, fetched while nothing is computed."""
    compute_ms: float
    """A batch that is in memory."""
    verdict: Verdict
    settings: dict[str, Scalar]
    """For the section ``loader``."""
    device: str
    model: str
    batch_size: int
    cpus: int
    """For this rank and its workers."""
    ranks_here: int
    simulated: str | None
    busy: str | None
    """A warning where other work on the machine was in the way."""

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "schema": SCHEMA,
            "simulated": self.simulated,
            "device": self.device,
            "model": self.model,
            "batch_size": self.batch_size,
            "cpus": self.cpus,
            "ranks_here": self.ranks_here,
            "measurements": [asdict(it) for it in self.measurements],
            "configured": asdict(self.configured),
            "chosen": asdict(self.chosen),
            "loader_ms": self.loader_ms,
            "compute_ms": self.compute_ms,
            "both_ms": self.chosen.step_ms,
            "verdict": asdict(self.verdict),
            "settings": self.settings,
            "busy": self.busy,
        }

    def lines(self) -> list[str]:
        """For a person."""
        chosen, configured = self.chosen, self.configured
        rows = [
            [
                str(it.num_workers),
                "-" if it.prefetch_factor is None else str(it.prefetch_factor),
                f"{it.samples_per_s:,.0f}",
                ms(it.data_wait_ms),
                ms(it.step_ms),
                "chosen" if it == chosen else "set now" if it == configured else "",
            ]
            for it in self.measurements
        ]
        table = rows_of(["workers", "ahead", "samples/s", "data wait ms", "step ms"],
                        [row[:-1] for row in rows], left=0)  # fmt: skip
        marks = ["", *(f"  {row[-1]}" if row[-1] else "" for row in rows)]
        gain = chosen.samples_per_s / configured.samples_per_s - 1
        share = "" if self.ranks_here == 1 else f", the share of one of {self.ranks_here} ranks"
        total = chosen.num_workers * self.ranks_here
        ahead = chosen.prefetch_factor
        return [
            *prose(
                self.simulated,
                f"{self.model} on {self.device}, batches of {self.batch_size}, "
                f"{counted(self.cpus, 'CPU')}{share}; each setting's fastest window of two rounds",
            ),
            "",
            *(line + mark for line, mark in zip(table, marks, strict=True)),
            "",
            *prose(
                self.busy,
                self.verdict.sentence,
                f"chosen: {counted(chosen.num_workers, 'worker')}"
                + ("" if self.ranks_here == 1 else f" for each rank, {total} on this node")
                + ("" if ahead is None else f", {ahead} batches ahead each")
                + ", the smallest setting within 5 % of the fastest"
                + (
                    ""
                    if chosen == configured
                    else f"; {gain:+.0%} samples/s beside what is set now"
                ),
            ),
        ]


def tune_loader(
    config: Config,
    *,
    steps: int,
    ranks_here: int = 1,
    stop: Stop | None = None,
    advance: Callable[[str], None] = lambda _doing: None,
) -> LoaderTuning:
    """Sweep over the workers (0, 1, 2, 4, ...) with 2 and 4 batches ahead of each.

    Each setting trains for twice 2 x `steps` batches after a warm-up, the optimizer included.
    `ranks_here` is how many ranks will train on this node at once: this process then keeps to one
    rank's share of the CPUs. Storage and memory bandwidth, which they share too, it has for
    itself. Raises `trainer.errors.TrainerError` as a training does.
    """
    stop = stop or Stop()
    with (
        share_of_cpus(ranks_here) as cpus,
        open_trainer(config, reporter=Reporter(enabled=False), stop=stop) as trainer,
    ):
        plan = trainer.loaders.plan
        advance("computing alone")
        compute_ms = _compute_alone(trainer, config, steps)
        measured: dict[tuple[int, int | None], Measurement] = {}

        def measure(workers: int, prefetch: int | None) -> Measurement:
            if (workers, prefetch) not in measured:
                ahead = "" if prefetch is None else f", {prefetch} ahead"
                advance(f"{workers} workers{ahead}")
                measured[workers, prefetch] = _training(
                    trainer, _setting(config, workers, prefetch), steps
                )
            return measured[workers, prefetch]

        best: dict[int, float] = {}
        while (workers := next_workers(best, cpus=cpus, cap=WORKERS_MAX)) is not None:
            tried = [measure(workers, ahead) for ahead in (_PREFETCH if workers else (None,))]
            best[workers] = max(it.batches_per_s for it in tried)
        measure(plan.num_workers, plan.prefetch_factor)
        ratios = []
        # Back again: what got slow or fast meanwhile is no virtue of a setting.
        for (workers, prefetch), first in reversed(list(measured.items())):
            del measured[workers, prefetch]
            second = measure(workers, prefetch)
            ratios.append(second.batches_per_s / first.batches_per_s)
            measured[workers, prefetch] = faster(first, second)
        configured = measured[plan.num_workers, plan.prefetch_factor]
        chosen = choose(list(measured.values()))
        advance("loading alone")
        chosen_config = _setting(config, chosen.num_workers, chosen.prefetch_factor)
        loader_ms = min(_loader_alone(trainer, chosen_config, steps) for _ in range(2))
        compute_ms = min(compute_ms, _compute_alone(trainer, config, steps))
        cpu = trainer.placement.device.type == "cpu"
        return LoaderTuning(
            measurements=tuple(
                sorted(measured.values(), key=lambda it: (it.num_workers, it.prefetch_factor or 0))
            ),
            chosen=chosen,
            configured=configured,
            loader_ms=loader_ms,
            compute_ms=compute_ms,
            verdict=verdict(
                loader_ms=loader_ms,
                compute_ms=compute_ms,
                both_ms=chosen.step_ms,
                wait_ms=chosen.data_wait_ms,
                num_workers=chosen.num_workers,
                cpu=cpu,
            ),
            settings=_settings(config, chosen),
            device=trainer.placement.device.type,
            model=config.model.name,
            batch_size=config.loader.batch_size,
            cpus=cpus,
            ranks_here=ranks_here,
            simulated=faults.describe(config.faults, faults.parse_faults(config.faults.inject)),
            busy=busy_machine(ratios),
        )


@contextlib.contextmanager
def share_of_cpus(ranks: int) -> Iterator[int]:
    """Keep this thread, and what it starts, to one rank's CPUs of `ranks`; how many these are.

    Raises `ConfigError` for more ranks than can be told apart on a system without CPU affinity.
    """
    if ranks < 1:
        raise ConfigError("--ranks-here must be at least 1")
    share = max(1, usable_cpus() // ranks)
    if ranks == 1:
        yield share
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--ranks-here needs a system with CPU affinity, such as Linux")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:share]))
    try:
        yield share
    finally:
        os.sched_setaffinity(0, before)


def _setting(config: Config, workers: int, prefetch: int | None) -> Config:
    values: dict[str, object] = {
        "loader.num_workers": workers,
        "loader.prefetch_factor": "auto" if prefetch is None else prefetch,
        "loader.persistent_workers": "auto",
    }
    if workers == 0:
        values |= {"loader.multiprocessing_context": "auto", "loader.timeout_s": 0.0}
    return changed(config, values)


def _settings(config: Config, chosen: Measurement) -> dict[str, Scalar]:
    """What the section has to hold, where it may hold anything that is possible."""
    if chosen.num_workers:
        return {
            "num_workers": chosen.num_workers,
            "prefetch_factor": chosen.prefetch_factor or 2,
            "persistent_workers": True,
        }
    found: dict[str, Scalar] = {
        "num_workers": 0,
        "prefetch_factor": "auto",
        "persistent_workers": "auto",
    }
    if config.loader.multiprocessing_context != "auto":
        found["multiprocessing_context"] = "auto"
    if config.loader.timeout_s > 0:
        found["timeout_s"] = 0.0
    return found


def _bursts(plan: LoaderPlan, steps: int) -> tuple[int, int]:
    """(warm-up batches, batches of a window): workers start and deliver together, so that only
    whole rounds of them are fair.
    """
    burst = max(1, plan.num_workers)
    return max(_WARM_UP, burst), -(-steps // burst) * burst


def _training(trainer: Trainer, config: Config, steps: int) -> Measurement:
    feed = build_loaders(config, trainer.placement)
    first, count = _bursts(feed.plan, steps)
    windows: list[Batches] = []
    with endless(feed, config, trainer.stop) as batches:
        train_batches(trainer, batches, first)
        until = time.monotonic() + _LIMIT_S
        while len(windows) < _WINDOWS and (not windows or time.monotonic() < until):
            windows.append(train_batches(trainer, batches, count, first=first))
            first += count
    # Other work on the machine only slows.
    best = min(windows, key=lambda it: it.step_ms)
    return Measurement(
        num_workers=feed.plan.num_workers,
        prefetch_factor=feed.plan.prefetch_factor,
        batches_per_s=1e3 / best.step_ms,
        samples_per_s=best.samples_per_s,
        data_wait_ms=sum(best.data_wait_ms) / count,
        step_ms=best.step_ms,
    )


def _compute_alone(trainer: Trainer, config: Config, steps: int) -> float:
    feed = build_loaders(_setting(config, 0, None), trainer.placement)
    with endless(feed, config, trainer.stop) as batches:
        repeated = itertools.repeat(next(batches))
    # Whole windows of accumulation, so that the optimizer has its share.
    period = min(config.train.accumulate, trainer.loaders.accumulation.batches)
    train_batches(trainer, repeated, max(_WARM_UP, period), period=period)
    count = -(-steps // period) * period
    windows = [train_batches(trainer, repeated, count, period=period) for _ in range(_WINDOWS)]
    return min(it.step_ms for it in windows)


def _loader_alone(trainer: Trainer, config: Config, steps: int) -> float:
    feed = build_loaders(config, trainer.placement)
    warm_up, count = _bursts(feed.plan, steps)
    windows: list[float] = []
    with endless(feed, config, trainer.stop) as batches:
        fetch_batches(batches, warm_up, trainer.stop)
        until = time.monotonic() + _LIMIT_S
        while len(windows) < _WINDOWS and (not windows or time.monotonic() < until):
            windows.append(fetch_batches(batches, count, trainer.stop))
    return min(windows)
