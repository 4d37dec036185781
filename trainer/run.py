"""Wiring: from a configuration to a trainer that is ready to run."""

import contextlib
from collections.abc import Iterator

import torch

from trainer import faults
from trainer.config import Config
from trainer.cpus import usable_cpus
from trainer.data import Loaders, build_loaders, cache_folder
from trainer.distributed import Placement, process_group, replicate
from trainer.loop import Trainer
from trainer.models import build_model
from trainer.optim import build_optimizer, build_schedule
from trainer.report import Reporter
from trainer.signals import Stop
from trainer.telemetry import Silent, Telemetry, Watched

__all__ = ["open_trainer"]


@contextlib.contextmanager
def open_trainer(
    config: Config, *, reporter: Reporter | None = None, stop: Stop | None = None
) -> Iterator[Trainer]:
    """Join the other ranks, build everything, hand over the trainer; clean up at the end, also on
    exceptions. `stop` is looked at before each batch. Raises `trainer.errors.TrainerError` for
    what the person who runs it can mend.
    """
    with process_group(config.dist, config.train.device) as placement:
        injected = faults.requested(config.faults)
        faults.pin_process(injected, placement.rank)
        torch.manual_seed(config.train.seed)
        threads = _threads(config, placement)
        torch.set_num_threads(threads)
        if reporter is None:
            reporter = Reporter(enabled=placement.rank == 0)
        telemetry: Telemetry = Watched(config.preset) if config.train.watch else Silent()
        loaders = build_loaders(config, placement)
        model = build_model(config.model, classes=len(loaders.classes))
        model = faults.model_with(model, injected, placement.rank, placement.world_size)
        model = model.to(placement.device)
        trainer = _trainer(config, placement, model, loaders, telemetry, reporter, stop)
        _inject(trainer, injected)
        _narrate(config, trainer, threads)
        yield trainer
        # Not where it raised: the end of the process knows the exception, and says goodbye with it.
        telemetry.close()


def _trainer(
    config: Config,
    placement: Placement,
    model: torch.nn.Module,
    loaders: Loaders,
    telemetry: Telemetry,
    reporter: Reporter,
    stop: Stop | None,
) -> Trainer:
    optimizer = build_optimizer(model, config.optim)
    total_steps = config.train.steps or config.train.epochs * loaders.accumulation.steps
    return Trainer(
        config.train,
        placement=placement,
        model=model,
        replica=replicate(model, placement, config.dist),
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config.optim, total_steps=total_steps),
        loaders=loaders,
        telemetry=telemetry,
        reporter=reporter,
        stop=stop or Stop(),
    )


def _inject(trainer: Trainer, injected: tuple[faults.Fault, ...]) -> None:
    """Give the loop its faults, if any are asked for."""
    rank = trainer.placement.rank
    faults.optimizer_with(trainer.optimizer, injected, rank)
    if injected:
        trainer.faults = faults.LoopFaults(
            injected,
            rank,
            cache_folder() / "faults",
            trainer.evaluate_batches,
            trainer.stop.check,
        )


def _threads(config: Config, placement: Placement) -> int:
    if config.train.threads != "auto":
        return config.train.threads
    return max(1, usable_cpus() // placement.ranks_here)


def _narrate(config: Config, trainer: Trainer, threads: int) -> None:
    note = trainer.reporter.note
    loaders, placement = trainer.loaders, trainer.placement
    plan = loaders.plan
    note(
        f"{len(loaders.images)} images of {len(loaders.classes)} classes from {loaders.path}; "
        f"{placement.world_size} x {placement.device.type}, {trainer.total_steps} steps of "
        f"{config.loader.batch_size} x {config.train.accumulate} images a rank"
    )
    note(
        f"{threads} torch threads, {plan.num_workers} loader workers a rank"
        + (f", {plan.prefetch_factor} batches ahead each" if plan.num_workers else "")
    )
    for sentence in plan.notes:
        note(sentence)
    simulated = faults.describe(config.faults, faults.parse_faults(config.faults.inject))
    if simulated:
        note(simulated)
    if config.train.eval_interval_epochs and loaders.held_out is None:
        note("no images are held out, so there is no evaluation")
