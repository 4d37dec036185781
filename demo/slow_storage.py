"""Frames out of large files on a disk, read past the page cache: each item costs a whole clip.

    torchrun --standalone --nproc-per-node 2 demo/slow_storage.py
    gpuwatch demo demo/slow_storage.py

A set that is larger than memory is read from the disk again and again; this one is small, so it
asks the kernel for that (O_DIRECT). The reads are real. The first run writes 192 MiB of clips into
the trainer's cache folder.

gpuwatch finds `storage_slow`: the workers are blocked on the disk, which is busy all the time.

The fix (--fixed) is what the hint names: the clips stay in memory. They are mapped, so that the
page cache keeps them and an item touches the pages of its frame only.
"""

import functools
import math
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.utils.data import DataLoader, Dataset

import gpuwatch
from demo._common import CLASSES, IMAGES, Job, decoded, ignore_interrupt, run
from trainer.data import cache_folder, normalise
from trainer.errors import DataError
from trainer.models import SmallCNN

CLIPS = 16
FRAMES = 2 * IMAGES
PX = 64
SHAPE = (FRAMES, 3, PX, PX)  # uint8: 12 MiB, a multiple of every block size


def make_clips(folder: Path, clips: int = CLIPS) -> None:
    """Write the clips that are not there yet: the same real images in another order each."""
    pixels = decoded(PX).tensors[0].numpy()
    folder.mkdir(parents=True, exist_ok=True)
    for clip in range(clips):
        path = folder / f"{clip}.raw"
        if not path.exists():
            unfinished = path.with_suffix(f".{os.getpid()}")
            pixels[order_of(clip)].tofile(unfinished)
            unfinished.rename(path)


def order_of(clip: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Return which image each frame of a clip shows."""
    return np.random.default_rng(clip).permutation(FRAMES) % IMAGES


@functools.cache
def room() -> mmap.mmap:
    """Return where a clip is read to, one a process: O_DIRECT wants memory that is aligned."""
    return mmap.mmap(-1, math.prod(SHAPE))


def read_direct(path: Path) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """Read a whole clip from the disk, past the page cache; valid until the next one is read.

    Raises:
        DataError: the file system has no such reads.
    """
    buffer = room()
    try:
        with open(os.open(path, os.O_RDONLY | os.O_DIRECT), "rb", buffering=0) as file:
            file.readinto(buffer)
    except OSError as error:
        raise DataError(f"cannot read {path} past the page cache: {error.strerror}") from None
    return np.frombuffer(buffer, dtype=np.uint8).reshape(SHAPE)


class Frames(Dataset[tuple[torch.Tensor, int]]):
    """Item i: (uint8 tensor (3, 64, 64), label), a frame of one of the clips."""

    def __init__(self, folder: Path, labels: torch.Tensor, *, mapped: bool) -> None:
        self.folder = folder
        self.labels = np.stack([labels.numpy()[order_of(clip)] for clip in range(CLIPS)])
        self.mapped = mapped

    def __len__(self) -> int:
        return CLIPS * FRAMES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        clip, frame = divmod(index, FRAMES)
        path = self.folder / f"{clip}.raw"
        frames = np.memmap(path, np.uint8, "r", shape=SHAPE) if self.mapped else read_direct(path)
        return torch.from_numpy(np.array(frames[frame])), int(self.labels[clip, frame])


def train(job: Job) -> None:
    """Train on frames of clips."""
    folder = cache_folder() / f"clips-n{CLIPS}-px{PX}"
    if job.rank == 0:
        make_clips(folder)
    job.meet()
    gpuwatch.watch(name="slow-storage")
    gpuwatch.annotate(dataset_path=str(folder))
    dataset = Frames(folder, decoded(PX).tensors[1], mapped=job.fixed)
    loader = DataLoader(
        dataset,
        batch_size=8,
        sampler=job.sampler(dataset),
        num_workers=1,
        prefetch_factor=1,  # what a rank reads further ahead it takes from the other on this disk
        worker_init_fn=ignore_interrupt,
    )
    model = job.replicate(SmallCNN(CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for images, labels in job.batches(loader):
        loss = F.cross_entropy(model(normalise(images)), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        job.report(loss)


if __name__ == "__main__":
    sys.exit(run(train, __doc__, fix="clips that stay in memory, mapped"))
