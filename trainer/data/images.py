"""Image files to uint8 tensors: scan a folder, decode, crop, flip, change colours.

Batches travel as uint8, a quarter of the bytes of floats, and are normalised on the device.
"""

import functools
import hashlib
import math
import os
import random
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset

from trainer.errors import DataError, MissingPackageError

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["ImageFiles", "ImageSet", "normalise", "require_pillow", "scan"]

_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})
# Mean and standard deviation of ImageNet's training set, RGB in 0..1: the usual constants.
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)
_EXIF_ORIENTATION = 0x0112
# What red, green and blue give to grey (ITU-R BT.601), as in Pillow's mode "L".
_GREY = (0.299, 0.587, 0.114)


def require_pillow() -> None:
    """Raise `MissingPackageError` with the line to type if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise MissingPackageError(
            "reading images needs Pillow: pip install pillow (or gpuwatch-trainer[vision])"
        ) from None


class _Paths(Sequence[str]):
    """Strings in one buffer: loader workers are forks, and touching the reference counts of a
    million str objects would copy the list's pages into every one of them.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        end = int(self._ends[index])
        start = int(self._ends[index - 1]) if index > 0 else 0
        return os.fsdecode(self._bytes[start:end].tobytes())


@dataclass(frozen=True)
class ImageFiles:
    """Image files with their labels: `labels[i]` indexes `classes`; `paths` are under `root`."""

    root: Path
    classes: tuple[str, ...]
    paths: Sequence[str]
    labels: np.ndarray[tuple[int], np.dtype[np.int64]]

    def __len__(self) -> int:
        return len(self.paths)

    def subset(self, indices: Sequence[int]) -> "ImageFiles":
        """The same classes, only these files."""
        return ImageFiles(
            self.root,
            self.classes,
            _Paths([self.paths[i] for i in indices]),
            self.labels[np.asarray(indices, dtype=np.int64)],
        )

    def split(self, eval_fraction: float) -> tuple["ImageFiles", "ImageFiles"]:
        """Training and held-out files. A file's side depends on its name alone, so that adding
        files moves none of the others, and no seed mixes the two.
        """
        held_out = [_unit_hash(path) < eval_fraction for path in self.paths]
        return (
            self.subset([i for i, out in enumerate(held_out) if not out]),
            self.subset([i for i, out in enumerate(held_out) if out]),
        )


def scan(root: Path, classes: Sequence[str] | None = None) -> ImageFiles:
    """Find the images of a folder with one subfolder per class, searched to any depth.

    Classes are the subfolders in alphabetical order, or `classes` where given (then others are an
    error). Raises `DataError` if the folder is missing or holds no images, or a class has none.
    """
    try:
        folders = sorted(
            entry.name
            for entry in os.scandir(root)
            if entry.is_dir() and not entry.name.startswith(".")
        )
    except OSError as error:
        raise DataError(f"cannot read the image folder {root}: {error.strerror}") from None
    if not folders:
        raise DataError(f"{root} has no subfolders: images are expected in one folder per class")
    names = tuple(classes) if classes is not None else tuple(folders)
    unknown = sorted(set(folders) - set(names))
    if unknown:
        raise DataError(f"{root} has the class {unknown[0]!r}, which the training images have not")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        found = _images_under(root / name)
        if not found and classes is None:
            raise DataError(f"the class folder {root / name} holds no images")
        paths += [os.path.join(name, path) for path in found]
        labels += [label] * len(found)
    return ImageFiles(root, names, _Paths(paths), np.array(labels, dtype=np.int64))


class ImageSet(Dataset[tuple[torch.Tensor, int]]):
    """Item i: (uint8 tensor (3, px, px), label).

    With `augment`, a random crop and flip that depend on (seed, epoch, i) alone: the same
    whatever the number of workers and ranks. With `colour_strength`, brightness, contrast and
    saturation are each multiplied by 1 plus or minus up to that share times the strength last
    set; how far and which way depends on (seed, epoch, i) too, and crop and flip are those of a
    set without it. Epoch and strength are in shared memory, because persistent workers keep the
    copy of the dataset they were started with.

    Images are turned as their EXIF orientation says. An unreadable file raises `DataError` with
    its name.
    """

    def __init__(
        self,
        files: ImageFiles,
        *,
        px: int,
        augment: bool,
        crop_scale_min: float = 0.35,
        flip_probability: float = 0.5,
        colour_strength: float = 0.0,
        seed: int = 0,
    ) -> None:
        require_pillow()
        self.files = files
        self.px = px
        self.augment = augment
        self.crop_scale_min = crop_scale_min
        self.flip_probability = flip_probability
        self.colour_strength = colour_strength
        self.seed = seed
        self._strength = torch.ones(1, dtype=torch.float64).share_memory_()  # type: ignore[no-untyped-call]
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's augmentations, in live workers too; between two iterators only."""
        self._epoch[0] = epoch

    def set_strength(self, strength: float) -> None:
        """Scale the colour changes, 0 (none) to 1 (as configured), in live workers too.

        Batches that workers have ready or have begun keep the strength they were made with: up to
        workers x prefetch_factor of them.
        """
        if not 0 <= strength <= 1:
            raise ValueError(f"a strength is from 0 to 1, not {strength}")
        self._strength[0] = strength

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = _decode(self.files.root / self.files.paths[index])
        colours: Colours | None = None
        if self.augment:
            # One integer out of three, without a hash that Python would salt per process.
            chance = random.Random((self.seed << 80) ^ (int(self._epoch[0]) << 48) ^ index)
            box = _random_box(*image.size, chance, self.crop_scale_min)
            flip = chance.random() < self.flip_probability
            # Drawn last and whatever the strength: neither it nor the share moves crop or flip.
            reach = self.colour_strength * float(self._strength[0])
            colours = _random_colours(chance, reach) if reach > 0 else None
        else:
            box, flip = _centre_box(*image.size), False
        image = image.resize((self.px, self.px), resample=_bilinear(), box=box)
        if colours is not None:
            # On the small image: decoding is dear enough.
            image = _recoloured(image, colours)
        pixels = np.array(image)
        if flip:
            pixels = pixels[:, ::-1].copy()
        return torch.from_numpy(pixels).permute(2, 0, 1), int(self.files.labels[index])


def normalise(images: torch.Tensor) -> torch.Tensor:
    """uint8 images (N, 3, H, W), on any device, to floats with about mean 0 and deviation 1."""
    mean, scale = _constants(images.device)
    return images.float().sub_(mean).mul_(scale)


# Once per device: a copy from pageable memory in every step would wait for the GPU each time.
@functools.cache
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """255 x mean, and the factor for the deviation; each (1, 3, 1, 1)."""
    mean = torch.tensor([255 * m for m in _MEAN], dtype=torch.float32, device=device)
    scale = torch.tensor([1 / (255 * s) for s in _STD], dtype=torch.float32, device=device)
    return mean.view(1, 3, 1, 1), scale.view(1, 3, 1, 1)


def _images_under(folder: Path) -> list[str]:
    """Images below `folder`, relative to it, in a stable order; hidden files are skipped."""
    found = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            os.path.relpath(os.path.join(parent, name), folder)
            for name in names
            if os.path.splitext(name)[1].lower() in _SUFFIXES and not name.startswith(".")
        ]
    return sorted(found)


def _decode(path: Path) -> "Image.Image":
    from PIL import Image

    try:
        # Pillow warns, naming no file, of damaged EXIF blocks and of transparency that is dropped:
        # the pixels are fine.
        with (
            warnings.catch_warnings(action="ignore", category=UserWarning),
            Image.open(path) as image,
        ):
            image.load()
            turn = _turns().get(_orientation(image))
            upright = image if turn is None else image.transpose(turn)
            return _rgb(upright)
    # Pillow's decoders raise any of these on damaged files.
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"cannot decode the image {path}: {reason}") from None


def _rgb(image: "Image.Image") -> "Image.Image":
    from PIL import Image

    if image.mode.startswith("I"):
        # 16-bit greys: Pillow would clip them to 8 bits, and nearly all would be white.
        high = np.asarray(image).astype(np.int64) >> 8
        return Image.fromarray(high.clip(0, 255).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def _orientation(image: "Image.Image") -> int:
    """1 to 8 as EXIF has it; 1, upright, where the block is missing or nonsense."""
    if "exif" not in image.info:
        return 1
    try:
        return int(image.getexif().get(_EXIF_ORIENTATION, 1))
    # Whatever a careless tool wrote beside the pixels must not cost the image.
    except Exception:
        return 1


@functools.cache
def _turns() -> dict[int, "Image.Transpose"]:
    """What makes an image with that EXIF orientation upright (EXIF 2.32, tag 0x0112)."""
    from PIL.Image import Transpose

    return {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }


def _bilinear() -> "Image.Resampling":
    from PIL import Image

    return Image.Resampling.BILINEAR


Box = tuple[float, float, float, float]
Colours = tuple[float, float, float]


def _random_colours(chance: random.Random, reach: float) -> Colours:
    """Factors of brightness, contrast and saturation, each within 1 - reach to 1 + reach."""
    brightness, contrast, saturation = (1 + reach * chance.uniform(-1, 1) for _ in range(3))
    return brightness, contrast, saturation


def _recoloured(image: "Image.Image", colours: Colours) -> "Image.Image":
    """Brightness times the pixels; contrast about the mean grey; saturation about each pixel's
    own grey. All three are linear, so that one matrix does them, in half the time of three passes
    and without cutting off at 0 and 255 between them.
    """
    brightness, contrast, saturation = colours
    mean_grey = float(np.asarray(image.convert("L")).mean())
    scale = brightness * contrast
    shift = (1 - contrast) * brightness * mean_grey
    matrix: list[float] = []
    for row in range(3):
        mixed = [scale * (1 - saturation) * part for part in _GREY]
        mixed[row] += scale * saturation
        matrix += [*mixed, shift]
    return image.convert("RGB", tuple(matrix))


def _random_box(width: int, height: int, chance: random.Random, scale_min: float) -> Box:
    """The Inception crop (Szegedy et al. 2015): a share of the area, aspect ratio 3/4 to 4/3."""
    for _ in range(10):
        area = width * height * chance.uniform(scale_min, 1.0)
        ratio = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        crop_width, crop_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if crop_width <= width and crop_height <= height:
            left = chance.uniform(0, width - crop_width)
            top = chance.uniform(0, height - crop_height)
            return left, top, left + crop_width, top + crop_height
    return _centre_box(width, height, share=1.0)


def _centre_box(width: int, height: int, share: float = 0.875) -> Box:
    """The central square; 0.875 = 224 / 256, the usual share at evaluation."""
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _unit_hash(text: str) -> float:
    digest = hashlib.blake2b(os.fsencode(text), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") / 2**64)
