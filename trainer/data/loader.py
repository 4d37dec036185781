"""The DataLoaders: arguments that fit each other and the machine, sharded over the ranks."""

import itertools
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from trainer import faults
from trainer.accumulate import Accumulation
from trainer.config import Config, DataConfig, LoaderConfig
from trainer.cpus import usable_cpus
from trainer.data.images import ImageFiles, ImageSet, scan
from trainer.data.synthetic import cache_folder, make_jpegs
from trainer.distributed.group import Placement
from trainer.errors import DataError

__all__ = ["LoaderPlan", "Loaders", "build_loaders", "plan_loader"]

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


@dataclass(frozen=True)
class Loaders:
    """The batches of a rank: (uint8 images (N, 3, px, px), int64 labels (N,))."""

    train: DataLoader[Any]
    held_out: DataLoader[Any] | None
    """This rank's share of the held-out images, each exactly once over all ranks."""
    classes: tuple[str, ...]
    path: Path
    accumulation: Accumulation
    plan: LoaderPlan
    images: ImageSet
    sampler: "DistributedSampler[Any]"

    def set_epoch(self, epoch: int) -> None:
        """Shuffle anew and augment anew; before each epoch's iterator."""
        self.sampler.set_epoch(epoch)
        self.images.set_epoch(epoch)


def build_loaders(config: Config, placement: Placement) -> Loaders:
    """Scan (or make) the images and build the loaders of this rank.

    Raises `DataError` where there is no data, or not enough for one batch.
    """
    train_files, held_out_files, path = _files(config.data)
    images = ImageSet(
        train_files,
        px=config.data.image_px,
        augment=True,
        crop_scale_min=config.data.crop_scale_min,
        flip_probability=config.data.flip_probability,
        seed=config.train.seed,
    )
    # Also for one process: the same order rules everywhere. It pads, so that every rank has the
    # same number of batches; a rank with fewer would leave the others waiting in a collective.
    sampler: DistributedSampler[Any] = DistributedSampler(
        images,
        num_replicas=placement.world_size,
        rank=placement.rank,
        shuffle=True,
        seed=config.train.seed,
    )
    batch_size = config.loader.batch_size
    samples = len(sampler)
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
        samples = len(sampler)
        plan = replace(plan, persistent_workers=False)
    common: dict[str, Any] = {
        **plan.arguments(),
        "batch_size": batch_size,
        "in_order": config.loader.in_order,
        "worker_init_fn": _start_worker if plan.num_workers else None,
    }
    train: DataLoader[Any] = DataLoader(
        faults.dataset_with(images, injected, placement.rank, cache_folder()),
        sampler=sampler,
        drop_last=config.loader.drop_last,
        collate_fn=faults.collate_with(injected, placement.rank),
        **common,
    )
    faults.loader_with(train, injected, placement.rank)
    return Loaders(
        train=train,
        held_out=_held_out(held_out_files, config, placement, common),
        classes=train_files.classes,
        path=path,
        accumulation=Accumulation(samples, batch_size, config.train.accumulate),
        plan=plan,
        images=images,
        sampler=sampler,
    )


class _Short(DistributedSampler[Any]):
    """The first so many indices of another sampler."""

    def __init__(self, sampler: DistributedSampler[Any], samples: int) -> None:
        self._sampler = sampler
        self._samples = min(samples, len(sampler))

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._sampler), self._samples)

    def __len__(self) -> int:
        return self._samples

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)


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


def _start_worker(_worker: int) -> None:
    # Ctrl-C reaches the whole process group; the training process ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Held back while the workers were forked (`trainer.signals.Stop.defer`).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    torch.set_num_threads(1)
