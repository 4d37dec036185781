"""Wiring: from a configuration to a trainer that is ready to run."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from trainer import faults
from trainer.config import Config
from trainer.cpus import usable_cpus
from trainer.data import Feed, build_loaders, cache_folder
from trainer.data.augment import Mixing
from trainer.distributed import Placement, comm_hook, process_group, replicate
from trainer.errors import TrainerError, TrainingError
from trainer.knobs import register_knobs
from trainer.loop import Parts, Trainer
from trainer.manifest import write_manifest
from trainer.memory.leaks import LeakChecks
from trainer.memory.report import (
    dump_snapshot,
    is_out_of_memory,
    memory_summary,
    oom_sentence,
    record_snapshot,
)
from trainer.models import build_model
from trainer.optim import build_optimizer, build_schedule
from trainer.precision import Precision
from trainer.report import Reporter
from trainer.signals import Stop
from trainer.tasks import ClassifyTextTask, ImageTask, LanguageTask, Task
from trainer.telemetry import Silent, Telemetry, Watched

__all__ = ["build_parts", "open_trainer"]


@contextlib.contextmanager
def open_trainer(
    config: Config, *, reporter: Reporter | None = None, stop: Stop | None = None
) -> Iterator[Trainer]:
    """Join the other ranks, build everything, hand over the trainer; clean up at the end, also on
    exceptions. `stop` is looked at before each batch. Raises `trainer.errors.TrainerError` for
    what the person who runs it can mend, running out of memory and losing a rank included.
    """
    with process_group(config.dist, config.train.device) as placement:
        injected = faults.requested(config.faults)
        faults.pin_process(injected, placement.rank)
        torch.manual_seed(config.train.seed)
        threads = _threads(config, placement)
        torch.set_num_threads(threads)
        if reporter is None:
            reporter = Reporter(enabled=placement.rank == 0)
        telemetry: Telemetry = (
            Watched(config.preset, allow_control=config.train.allow_control)
            if config.train.watch
            else Silent()
        )
        if config.memory.snapshot is not None and placement.rank == 0:
            record_snapshot()
        with _said_plainly(config, placement, reporter):
            loaders = build_loaders(config, placement)
            parts = build_parts(config, placement, loaders, live=telemetry.controlled)
            # The weights are alike on all ranks; their dropout must not be.
            torch.manual_seed(config.train.seed * 1_000_003 + placement.rank)
            with parts.precision:
                total_steps = config.train.steps or loaders.steps(config.train.epochs)
                trainer = Trainer(
                    config,
                    parts,
                    schedule=build_schedule(parts.optimizer, config.optim, total_steps=total_steps),
                    loaders=loaders,
                    telemetry=telemetry,
                    reporter=reporter,
                    stop=stop or Stop(),
                    leaks=(
                        LeakChecks(parts.model, interval_steps=config.memory.leak_interval_steps)
                        if config.memory.leak_checks
                        else None
                    ),
                )
                _inject(trainer, injected)
                register_knobs(trainer, config)
                _narrate(config, trainer, threads)
                yield trainer
                _show_memory(config, placement, reporter)
        # Not where it raised: the end of the process knows the exception, and says goodbye with it.
        telemetry.close()


def build_parts(
    config: Config, placement: Placement, loaders: Feed | None = None, *, live: bool = False
) -> Parts:
    """Model, optimizer and what is computed, on the rank's device; from `loaders` what they know
    of the data, which is read for it where they are not given. `live`: a monitor may change it.
    """
    if loaders is None:
        loaders = build_loaders(config, placement)
    vocabulary = getattr(loaders, "vocabulary", 0)
    injected = faults.requested(config.faults)
    model: nn.Module = build_model(
        config.model,
        classes=len(loaders.classes),
        px=config.data.image_px,
        vocabulary=vocabulary,
        max_tokens=config.text.max_tokens,
    )
    if config.memory.checkpoint_activations:
        model.enable_checkpointing()  # type: ignore[operator]
    model = faults.model_with(model, injected, placement.rank, placement.world_size)
    model = model.to(placement.device)
    precision = Precision(config.precision, placement.device, model)
    samples = config.loader.batch_size * config.train.accumulate * placement.world_size
    replica = replicate(model, placement, config.dist)
    return Parts(
        placement,
        model,
        replica,
        build_optimizer(model, config.optim, precision, samples=samples),
        precision,
        _task(config, len(loaders.classes), vocabulary, precision, placement.rank),
        config.optim.clip_norm,
        comm_hook(replica, config.dist, live=live),
    )


def _task(config: Config, classes: int, vocabulary: int, precision: Precision, rank: int) -> Task:
    text = config.text
    match config.model.name:
        case "gpt":
            return LanguageTask(
                vocabulary=vocabulary, max_tokens=text.max_tokens, padding=text.padding
            )
        case "bert":
            return ClassifyTextTask(
                vocabulary=vocabulary, max_tokens=text.max_tokens, padding=text.padding
            )
    data = config.data
    mixing = None
    if data.mixup_alpha > 0 or data.cutmix_alpha > 0:
        mixing = Mixing(
            classes,
            mixup_alpha=data.mixup_alpha,
            cutmix_alpha=data.cutmix_alpha,
            # Each rank its own mixtures: alike on all, a batch of many ranks would have few kinds.
            seed=config.train.seed * 1_000_003 + rank,
        )
    return ImageTask(px=data.image_px, classes=classes, mixing=mixing, dtype=precision.input_dtype)


def _show_memory(config: Config, placement: Placement, reporter: Reporter) -> None:
    """What was asked for of it: a summary on stderr, the allocator's history in a file."""
    if config.memory.summary:
        for line in memory_summary(placement.device):
            reporter.note(line)
    if config.memory.snapshot is not None and placement.rank == 0:
        dump_snapshot(config.memory.snapshot)
        reporter.note(f"the allocator's history is in {config.memory.snapshot}")


@contextlib.contextmanager
def _said_plainly(config: Config, placement: Placement, reporter: Reporter) -> Iterator[None]:
    """Turn what the person can mend into one sentence."""
    try:
        yield
    except TrainerError:
        raise
    except (RuntimeError, ValueError, MemoryError) as error:
        if "more than 1 value per channel" in str(error):
            raise TrainingError(
                "BatchNorm needs more than one value of a channel: raise loader.batch_size or "
                "data.image_px, or keep loader.drop_last=true"
            ) from None
        if is_out_of_memory(error):
            with contextlib.suppress(TrainerError):
                reporter.enabled = True  # whichever rank it is
                _show_memory(config, placement, reporter)
            sentence = oom_sentence(error, config.loader.batch_size, placement)
            raise TrainingError(sentence) from None
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        if "DataLoader timed out" in first:
            raise TrainingError(
                f"no batch came within loader.timeout_s={config.loader.timeout_s:g}: raise it, or "
                "see what the workers wait for"
            ) from None
        if "Too many open files" in first:
            raise TrainingError(
                "too many open files: raise ulimit -n, or lower loader.num_workers"
            ) from None
        if "DataLoader worker" in first or "Pin memory thread" in first:
            raise TrainingError(f"a loader worker has died: {first}") from None
        # A rank that failed closes its connections; what the others see of it is this.
        lost = (
            "Connection closed by peer",
            "Connection reset by peer",
            "Broken pipe",
            "ncclRemoteError",
            "remote process exit",
        )
        late = ("Timed out waiting", "Application timeout")
        if placement.world_size > 1 and any(words in str(error) for words in late):
            raise TrainingError(
                "another rank did not come to a collective within "
                f"dist.timeout_s={config.dist.timeout_s:g}"
            ) from None
        if placement.world_size > 1 and any(words in str(error) for words in lost):
            raise TrainingError("another rank has left; what it said is the cause") from None
        raise


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
    for sentence in loaders.describe():
        note(sentence)
    lr = float(trainer.optimizer.defaults["lr"])
    note(
        f"{placement.world_size} x {placement.device.type} in {trainer.precision.mode}, "
        f"{trainer.total_steps} steps of {config.loader.batch_size} x {config.train.accumulate} "
        f"samples a rank, learning rate up to {lr:.3g}"
    )
    note(
        f"{threads} torch threads, {plan.num_workers} loader workers a rank"
        + (f", {plan.prefetch_factor} batches ahead each" if plan.num_workers else "")
    )
    if config.dist.comm_hook and trainer.parts.comm_hook is not None:
        note(f"gradients travel in 16 bits: {config.dist.comm_hook}")
    for sentence in plan.notes:
        note(sentence)
    simulated = faults.describe(config.faults, faults.parse_faults(config.faults.inject))
    if simulated:
        note(simulated)
    if config.train.eval_interval_epochs and loaders.held_out is None:
        note("nothing is held out, so there is no evaluation")
    if config.train.manifest and placement.rank == 0:
        path = write_manifest(config, placement, trainer.precision.mode)
        note(f"what this run consists of: {path}" if path else "the manifest could not be written")
