"""The DataLoaders: arguments that fit each other and the machine, sharded over the ranks."""

import itertools
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from trainer import faults
from trainer.accumulate import Accumulation, Windows
from trainer.config import Config, DataConfig, LoaderConfig
from trainer.cpus import usable_cpus
from trainer.data.classes import balance_weights, class_counts, histogram_lines, sentence
from trainer.data.images import ImageFiles, ImageSet, scan
from trainer.data.sampler import ShardedSampler
from trainer.data.synthetic import cache_folder, make_jpegs
from trainer.distributed.group import Placement
from trainer.errors import DataError

__all__ = [
    "Feed",
    "ImageFeed",
    "LoaderPlan",
    "build_loaders",
    "plan_loader",
    "replan",
    "start_worker",
]

# More workers than that rarely help and cost memory; whoever has measured it can ask for more.
_AUTO_WORKERS_MAX = 8
_AUTO_PREFETCH = 2


@dataclass(frozen=True, slots=True)
class LoaderPlan:
    """DataLoader arguments that torch accepts together, and what had to be left out."""

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory: bool
    timeout_s: float
    multiprocessing_context: str | None
    notes: tuple[str, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """As keyword arguments of DataLoader."""
        return {
            "num_workers": self.num_workers,
            "prefetch_factor": self.prefetch_factor,
            "persistent_workers": self.persistent_workers,
            "pin_memory": self.pin_memory,
            "timeout": self.timeout_s,
            "multiprocessing_context": self.multiprocessing_context,
        }


def plan_loader(config: LoaderConfig, *, cpus: int, ranks_here: int, cuda: bool) -> LoaderPlan:
    """Settle the ``auto`` values.

    `cpus` are those the process may use, shared by `ranks_here` ranks. Combinations that cannot
    work were refused with the configuration; one that is only useless here (pinned memory without
    CUDA, more workers than CPUs) is dropped, or kept, with a note.
    """
    share = max(1, cpus // max(1, ranks_here))
    notes = []
    wanted = config.num_workers
    workers = min(share, _AUTO_WORKERS_MAX) if wanted == "auto" else wanted
    if workers * ranks_here > cpus:
        notes.append(
            f"{workers} loader workers on each of {ranks_here} ranks share {cpus} CPUs: right if "
            "they wait for storage, too many if they compute"
        )
    if config.pin_memory is True and not cuda:
        notes.append("loader.pin_memory is left out: without CUDA it only costs a copy")
    prefetch = _AUTO_PREFETCH if config.prefetch_factor == "auto" else config.prefetch_factor
    context = config.multiprocessing_context
    return LoaderPlan(
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        persistent_workers=workers > 0 and config.persistent_workers in ("auto", True),
        pin_memory=cuda and config.pin_memory in ("auto", True),
        timeout_s=config.timeout_s,
        multiprocessing_context=context if workers and context != "auto" else None,
        notes=tuple(notes),
    )


def replan(
    plan: LoaderPlan, config: LoaderConfig, *, num_workers: int, prefetch_factor: int
) -> LoaderPlan:
    """The plan with other workers. Raises `ValueError` for what no DataLoader can have."""
    if num_workers == 0 and plan.timeout_s > 0:
        raise ValueError(
            "num_workers stays above 0: loader.timeout_s cannot interrupt the training process"
        )
    context = config.multiprocessing_context
    # Workers that are let go between epochs for another reason than the configuration stay so.
    kept = plan.persistent_workers or plan.num_workers == 0
    return replace(
        plan,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        persistent_workers=num_workers > 0 and kept and config.persistent_workers in ("auto", True),
        multiprocessing_context=context if num_workers and context != "auto" else None,
    )


class Feed(Protocol):
    """The batches of one rank, and what the loop has to know of them."""

    @property
    def train(self) -> DataLoader[Any]:
        """What is trained on."""
        ...

    @property
    def held_out(self) -> DataLoader[Any] | None:
        """This rank's share of what is held out, each sample exactly once over all ranks."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of what is told apart; empty where nothing is."""
        ...

    @property
    def path(self) -> Path:
        """Where the data comes from."""
        ...

    @property
    def plan(self) -> LoaderPlan:
        """The loaders' arguments."""
        ...

    @property
    def accumulation(self) -> Windows:
        """The windows of the epoch that was set last."""
        ...

    def set_accumulation(self, every: int, first_batch: int) -> None:
        """Make windows of `every` micro-batches, from `first_batch` of the present epoch on."""
        ...

    def set_workers(self, num_workers: int, prefetch_factor: int) -> None:
        """Put another loader in the place of `train`; what it gives is decided by `set_epoch`.

        Raises `ValueError` for what no loader can have.
        """
        ...

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Shuffle and augment anew; before each epoch's iterator.

        `first_batch` leaves out micro-batches that a run has trained on before it ended.
        """
        ...

    def steps(self, epochs: int) -> int:
        """Optimizer steps in so many epochs."""
        ...

    def set_strength(self, strength: float) -> None:
        """How strong the workers' augmentation is from now on, 0..1; reaches living workers."""
        ...

    def describe(self) -> list[str]:
        """Sentences on what there is, for the person who starts the run."""
        ...


@dataclass(eq=False)
class ImageFeed:
    """Batches are (uint8 images (N, 3, px, px), int64 labels (N,))."""

    train: DataLoader[Any]
    held_out: DataLoader[Any] | None
    classes: tuple[str, ...]
    path: Path
    accumulation: Accumulation
    plan: LoaderPlan
    images: ImageSet
    sampler: ShardedSampler
    _config: LoaderConfig
    _make: Callable[[LoaderPlan], DataLoader[Any]]
    _epoch: int = 0

    def set_accumulation(self, every: int, first_batch: int) -> None:
        """In later epochs from their beginning on."""
        self.accumulation = replace(self.accumulation, every=every, start=first_batch)

    def set_workers(self, num_workers: int, prefetch_factor: int) -> None:
        """The images and their order stay."""
        self.plan = replan(
            self.plan, self._config, num_workers=num_workers, prefetch_factor=prefetch_factor
        )
        self.train = self._make(self.plan)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Shuffle anew and augment anew; before each epoch's iterator."""
        if epoch != self._epoch:
            self._epoch = epoch
            self.accumulation = replace(self.accumulation, start=0)
        self.sampler.set_epoch(epoch, first_batch * self.accumulation.batch_size)
        self.images.set_epoch(epoch)

    def steps(self, epochs: int) -> int:
        """Every epoch has as many."""
        return epochs * self.accumulation.steps

    def set_strength(self, strength: float) -> None:
        """Of the colour changes."""
        self.images.set_strength(strength)

    def describe(self) -> list[str]:
        """How many images, and how uneven the classes are where that matters."""
        counts = class_counts(self.images.files.labels, len(self.classes))
        lines = [f"{len(self.images)} images of {len(self.classes)} classes from {self.path}"]
        uneven = sentence(counts)
        if uneven:
            lines += [uneven, *histogram_lines(self.classes, counts, 40)]
        return lines


def build_loaders(config: Config, placement: Placement) -> Feed:
    """Read (or make) the data and build the loaders of this rank.

    Raises `DataError` where there is no data, or not enough for one batch.
    """
    if config.model.reads == "text":
        from trainer.data.text.feed import build_text

        return build_text(config, placement)
    return _build_images(config, placement)


def _build_images(config: Config, placement: Placement) -> ImageFeed:
    train_files, held_out_files, path = _files(config.data)
    images = ImageSet(
        train_files,
        px=config.data.image_px,
        augment=True,
        crop_scale_min=config.data.crop_scale_min,
        flip_probability=config.data.flip_probability,
        colour_strength=config.data.colour_strength,
        seed=config.train.seed,
    )
    weights = None
    if config.data.balance > 0:
        labels = train_files.labels
        counts = class_counts(labels, len(train_files.classes))
        weights = balance_weights(labels, counts, config.data.balance)
    # Also for one process: the same order rules everywhere. It pads, so that every rank has the
    # same number of batches; a rank with fewer would leave the others waiting in a collective.
    sampler = ShardedSampler(
        len(images),
        world_size=placement.world_size,
        rank=placement.rank,
        seed=config.train.seed,
        weights=weights,
    )
    batch_size = config.loader.batch_size
    samples = sampler.samples
    if config.loader.drop_last:
        samples -= samples % batch_size
    if samples == 0:
        raise DataError(
            f"{path} has {len(train_files)} training images, fewer than one batch of {batch_size} "
            f"on each of {placement.world_size} ranks: lower loader.batch_size"
        )
    plan = plan_loader(
        config.loader,
        cpus=usable_cpus(),
        ranks_here=placement.ranks_here,
        cuda=placement.device.type == "cuda",
    )
    injected = faults.requested(config.faults)
    respawn = next((f for f in injected if f.name == "respawn_workers"), None)
    if respawn is not None:
        # An epoch of so few steps, and workers that end with it.
        batches = max(1, int(respawn.strength)) * config.train.accumulate
        sampler = _Short(sampler, batches * batch_size)
        samples = sampler.samples
        plan = replace(plan, persistent_workers=False)
    dataset = faults.dataset_with(images, injected, placement.rank, cache_folder())

    def common(plan: LoaderPlan) -> dict[str, Any]:
        return {
            **plan.arguments(),
            "batch_size": batch_size,
            "in_order": config.loader.in_order,
            "worker_init_fn": start_worker if plan.num_workers else None,
        }

    def make(plan: LoaderPlan) -> DataLoader[Any]:
        train: DataLoader[Any] = DataLoader(
            dataset,
            sampler=sampler,
            drop_last=config.loader.drop_last,
            collate_fn=faults.collate_with(injected, placement.rank),
            **common(plan),
        )
        faults.loader_with(train, injected, placement.rank)
        return train

    return ImageFeed(
        train=make(plan),
        held_out=_held_out(held_out_files, config, placement, common(plan)),
        classes=train_files.classes,
        path=path,
        accumulation=Accumulation(samples, batch_size, config.train.accumulate),
        plan=plan,
        images=images,
        sampler=sampler,
        _config=config.loader,
        _make=make,
    )


class _Short(ShardedSampler):
    """The first so many indices of another sampler."""

    def __init__(self, sampler: ShardedSampler, samples: int) -> None:
        self._sampler = sampler
        self.samples = min(samples, sampler.samples)

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(iter(self._sampler), len(self))

    def __len__(self) -> int:
        return max(0, self.samples - self._sampler.position)

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        self._sampler.set_epoch(epoch, position)


def _held_out(
    files: ImageFiles, config: Config, placement: Placement, common: dict[str, Any]
) -> DataLoader[Any] | None:
    if not len(files):
        return None
    images: Dataset[Any] = ImageSet(files, px=config.data.image_px, augment=False)
    images = faults.dataset_with(
        images, faults.from_keys(config.faults), placement.rank, cache_folder()
    )
    # Every image once: padding, as the training sampler does, would count some twice.
    own = range(placement.rank, len(files), placement.world_size)
    return DataLoader(Subset(images, own), **common)


def _files(config: DataConfig) -> tuple[ImageFiles, ImageFiles, Path]:
    """Training files, held-out files, and the folder they come from."""
    path = config.path
    if path is None:
        path = make_jpegs(
            images=config.synthetic_images,
            classes=config.synthetic_classes,
            px=config.synthetic_px,
            seed=config.synthetic_seed,
        )
    path = path.expanduser()
    if (path / "train").is_dir() and (path / "val").is_dir():
        train = scan(path / "train")
        return train, scan(path / "val", train.classes), path
    return *scan(path).split(config.eval_fraction), path


def start_worker(_worker: int) -> None:
    """What every loader worker does first."""
    # Ctrl-C reaches the whole process group; the training process ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Held back while the workers were forked (`trainer.signals.Stop.defer`).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    torch.set_num_threads(1)
