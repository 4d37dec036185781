"""A seeded set of real JPEG files, for runs that name no data."""

import colorsys
import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from trainer.data.images import require_pillow
from trainer.errors import DataError

__all__ = ["cache_folder", "locked", "make_jpegs"]

# Part of the folder's name: a set made by other rules is another set.
_RULES = 1
_TILES = 12
_QUALITY = 90


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/gpuwatch-trainer``, by default below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is to be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "gpuwatch-trainer"


def make_jpegs(
    *, images: int, classes: int, px: int, seed: int = 0, cache: Path | None = None
) -> Path:
    """The folder of the set, one subfolder per class; made now if it is not there yet.

    Each image is coarse noise around its class's colour with a fine grain on it, `px` square, so
    that a model can learn it and decoding costs what a photograph's does. The folder appears
    complete or not at all; processes that start at once wait for the one that makes it. The same
    arguments give the same pixels. Raises `DataError` where the cache cannot be written.
    """
    require_pillow()
    cache = cache_folder() if cache is None else cache
    target = cache / f"jpegs-r{_RULES}-n{images}-c{classes}-px{px}-s{seed}"
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f"{target.name}.lock"):
            if not target.is_dir():
                _make(target, images=images, classes=classes, px=px, seed=seed)
    except OSError as error:
        raise DataError(
            f"cannot make the image set in {cache}: {error.strerror}; name a folder of images "
            "with --data.path, or another cache with XDG_CACHE_HOME"
        ) from None
    return target


def _make(target: Path, *, images: int, classes: int, px: int, seed: int) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=target.parent))
    try:
        _write(unfinished, images=images, classes=classes, px=px, seed=seed)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(target)
        except OSError:
            # On a file system without locks another process may have been faster.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(folder: Path, *, images: int, classes: int, px: int, seed: int) -> None:
    from PIL import Image

    chance = np.random.default_rng(seed)
    # One large sheet of grain, cut at random places: drawing fresh noise costs more than the JPEG.
    grain = chance.normal(0.0, 10.0, (2 * px, 2 * px, 1)).astype(np.float32)
    names = [f"class{label:0{len(str(classes - 1))}d}" for label in range(classes)]
    for name in names:
        (folder / name).mkdir()
    for index in range(images):
        label = index % classes
        colour = 255.0 * np.array(colorsys.hsv_to_rgb(label / classes, 0.6, 0.7))
        # Noise and a common change of brightness keep single pixels ambiguous, not the image.
        tiles = chance.normal(colour + chance.normal(0.0, 25.0), 55.0, (_TILES, _TILES, 3))
        coarse = Image.fromarray(tiles.clip(0, 255).astype(np.uint8))
        smooth = np.asarray(coarse.resize((px, px), Image.Resampling.BICUBIC), dtype=np.float32)
        top, left = chance.integers(0, px, 2)
        pixels = (smooth + grain[top : top + px, left : left + px]).clip(0, 255).astype(np.uint8)
        file = folder / names[label] / f"{index:06d}.jpg"
        Image.fromarray(pixels).save(file, quality=_QUALITY)
    facts = {"rules": _RULES, "images": images, "classes": classes, "px": px, "seed": seed}
    (folder / "made.json").write_text(json.dumps(facts) + "\n")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Exclusive between processes; the kernel drops it if its holder dies."""
    with path.open("a") as file:
        _flock(file)
        yield


def _flock(file: IO[str]) -> None:
    # Some network file systems have no locks: the atomic rename alone then keeps the set whole,
    # and at worst it is made twice.
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
