import hashlib
import io
import multiprocessing
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from torch.utils.data import DataLoader

from trainer.data import ImageSet, cache_folder, make_jpegs, normalise, scan
from trainer.data.images import _random_box, _recoloured
from trainer.errors import DataError


def digest(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_made_set_is_deterministic(tmp_path: Path, jpegs: Path) -> None:
    again = make_jpegs(images=64, classes=4, px=48, cache=tmp_path)
    assert again != jpegs
    assert digest(again) == digest(jpegs)
    other = make_jpegs(images=64, classes=4, px=48, seed=1, cache=tmp_path)
    assert digest(other)["class0/000000.jpg"] != digest(jpegs)["class0/000000.jpg"]
    with Image.open(jpegs / "class0/000000.jpg") as image:
        assert (image.format, image.size) == ("JPEG", (48, 48))


def _make(cache: Path, barrier: "multiprocessing.synchronize.Barrier", made: Path) -> None:
    from trainer.data import synthetic

    write = synthetic._write

    def counted(*args: object, **kwargs: object) -> None:
        made.open("a").write("x")
        write(*args, **kwargs)  # type: ignore[arg-type]

    synthetic._write = counted
    barrier.wait(20)
    make_jpegs(images=200, classes=4, px=48, cache=cache)


def test_two_processes_at_once_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    made = tmp_path / "made"
    processes = [
        context.Process(target=_make, args=(tmp_path / "cache", barrier, made)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert made.read_text() == "x"
    folders = [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]
    assert len(folders) == 1  # and nothing half made beside it
    assert len(scan(folders[0])) == 200


def test_an_interrupted_making_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.data import synthetic

    def fail(folder: Path, **_: object) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(synthetic, "_write", fail)
        with pytest.raises(KeyboardInterrupt):
            make_jpegs(images=4, classes=2, px=48, cache=tmp_path)
    assert not [entry for entry in tmp_path.iterdir() if entry.is_dir()]
    assert len(scan(make_jpegs(images=4, classes=2, px=48, cache=tmp_path))) == 4


def test_an_unwritable_cache_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"name a folder of images with --data\.path"):
        make_jpegs(images=4, classes=2, px=48, cache=tmp_path / "file")


def test_cache_folder_honours_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "gpuwatch-trainer"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/gpuwatch-trainer"


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    for name in ("cat/one.JPG", "cat/deep/two.png", "dog/three.jpeg", "dog/notes.txt"):
        file = tmp_path / "pets" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".txt":
            file.write_text("not an image")
        else:
            Image.new("RGB", (40, 30), "red").save(file)
    (tmp_path / "pets/cat/.hidden.jpg").write_text("")
    (tmp_path / "pets/.thumbnails").mkdir()
    return tmp_path / "pets"


def test_scan(pets: Path) -> None:
    files = scan(pets)
    assert files.classes == ("cat", "dog")
    assert list(files.paths) == ["cat/deep/two.png", "cat/one.JPG", "dog/three.jpeg"]
    assert files.labels.tolist() == [0, 0, 1]


def test_scan_refusals(pets: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file or directory"):
        scan(tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no subfolders"):
        scan(pets / "dog")
    with pytest.raises(DataError, match="has the class 'dog'"):
        scan(pets, classes=("cat",))
    (pets / "bird").mkdir()
    with pytest.raises(DataError, match=r"bird holds no images"):
        scan(pets)


def test_split_depends_on_names_alone(jpegs: Path) -> None:
    files = scan(jpegs)
    train, held_out = files.split(0.25)
    assert set(train.paths) | set(held_out.paths) == set(files.paths)
    assert not set(train.paths) & set(held_out.paths)
    assert 4 <= len(held_out) <= 28
    half = files.subset(range(0, 64, 2))
    assert set(half.split(0.25)[1].paths) == set(half.paths) & set(held_out.paths)
    label = files.classes.index(held_out.paths[0].split("/")[0])
    assert held_out.labels[0] == label


def test_items(jpegs: Path) -> None:
    images = ImageSet(scan(jpegs), px=24, augment=True, seed=3)
    pixels, label = images[10]
    assert (pixels.dtype, pixels.shape, label) == (torch.uint8, (3, 24, 24), 0)
    assert torch.equal(pixels, images[10][0])
    images.set_epoch(1)
    assert not torch.equal(pixels, images[10][0])
    plain = ImageSet(scan(jpegs), px=24, augment=False)
    before = plain[10][0]
    plain.set_epoch(1)
    assert torch.equal(before, plain[10][0])


def test_augmentation_does_not_depend_on_workers_and_follows_the_epoch(jpegs: Path) -> None:
    def two_epochs(workers: int) -> list[torch.Tensor]:
        images = ImageSet(scan(jpegs), px=16, augment=True)
        loader: DataLoader[tuple[torch.Tensor, int]] = DataLoader(
            images, batch_size=32, num_workers=workers, persistent_workers=workers > 0
        )
        epochs = []
        for epoch in range(2):
            images.set_epoch(epoch)
            epochs.append(torch.cat([batch for batch, _ in loader]))
        return epochs

    alone, with_workers = two_epochs(0), two_epochs(1)
    assert torch.equal(alone[0], with_workers[0])
    assert torch.equal(alone[1], with_workers[1])
    assert not torch.equal(alone[0], alone[1])


@pytest.mark.parametrize("damage", ["truncated", "nonsense"])
def test_a_damaged_image_is_one_sentence_with_its_name(
    jpegs: Path, tmp_path: Path, damage: str
) -> None:
    shutil.copytree(jpegs, tmp_path / "set")
    bad = tmp_path / "set/class1/000001.jpg"
    whole = bad.read_bytes()
    bad.write_bytes(whole[: len(whole) // 2] if damage == "truncated" else b"nonsense")
    loader: DataLoader[tuple[torch.Tensor, int]] = DataLoader(
        ImageSet(scan(tmp_path / "set"), px=16, augment=False),
        batch_size=64,
    )
    with pytest.raises(DataError) as caught:
        list(loader)
    assert str(caught.value).startswith(f"cannot decode the image {bad}: ")
    assert "\n" not in str(caught.value)


def test_crop_and_flip_have_not_changed(jpegs: Path) -> None:
    # The boxes and flips of a seed are part of what a seed promises.
    images = ImageSet(scan(jpegs), px=24, augment=True, seed=3)
    images.set_epoch(2)
    for index in (0, 7, 63):
        chance = random.Random((3 << 80) ^ (2 << 48) ^ index)
        with Image.open(jpegs / images.files.paths[index]) as file:
            whole = file.convert("RGB")
        box = _random_box(48, 48, chance, 0.35)
        flip = chance.random() < 0.5
        expected = np.asarray(whole.resize((24, 24), Image.Resampling.BILINEAR, box=box))
        if flip:
            expected = expected[:, ::-1]
        assert np.array_equal(images[index][0].permute(1, 2, 0).numpy(), expected)


def test_colours_move_neither_crop_nor_flip(jpegs: Path) -> None:
    def mean_distance(colour_strength: float, strength: float = 1.0, epoch: int = 0) -> float:
        files = scan(jpegs)
        plain = ImageSet(files, px=16, augment=True)
        other = ImageSet(files, px=16, augment=True, colour_strength=colour_strength)
        other.set_strength(strength)
        other.set_epoch(epoch)
        distances = [(plain[i][0].float() - other[i][0].float()).abs().mean() for i in range(32)]
        return float(torch.stack(distances).max())

    assert mean_distance(0.0) == 0
    assert mean_distance(0.8, strength=0.0) == 0
    # At most 2 % of 255 three times over, which another crop or flip exceeds by far.
    assert 0 < mean_distance(0.02) < 12
    assert mean_distance(0.02, epoch=1) > 30
    assert mean_distance(0.8) > 30
    assert 0 < mean_distance(0.8, strength=0.02 / 0.8) < 12


def test_each_colour_is_drawn_from_its_range(tmp_path: Path) -> None:
    (tmp_path / "set/grey").mkdir(parents=True)
    for index in range(200):
        Image.new("RGB", (4, 4), (100, 100, 100)).save(tmp_path / f"set/grey/{index:03d}.png")
    images = ImageSet(scan(tmp_path / "set"), px=4, augment=True, colour_strength=0.5)
    # On one grey only brightness shows.
    seen = [int(images[i][0].unique().item()) for i in range(200)]
    assert 50 <= min(seen) < 60
    assert 140 < max(seen) <= 150
    assert len({images[i][0].numpy().tobytes() for i in range(200)}) > 60


def test_colours_are_those_of_three_passes() -> None:
    # Greys of 60 to 190 stay within 0 and 255, so that nothing is cut off in between.
    pixels = np.random.default_rng(0).integers(60, 190, (32, 32, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    for colours in [(1.2, 1, 1), (1, 0.4, 1), (1, 1, 0), (1, 1, 1.4), (0.6, 0.5, 0.7), (1, 1, 1)]:
        expected = ImageEnhance.Brightness(image).enhance(colours[0])
        expected = ImageEnhance.Contrast(expected).enhance(colours[1])
        expected = ImageEnhance.Color(expected).enhance(colours[2])
        mine = np.asarray(_recoloured(image, colours)).astype(int)
        assert abs(mine - np.asarray(expected)).max() <= 3  # rounded three times


def test_only_training_images_change_colour(jpegs: Path) -> None:
    files = scan(jpegs)
    with_colour = ImageSet(files, px=16, augment=False, colour_strength=1.0)
    assert torch.equal(with_colour[5][0], ImageSet(files, px=16, augment=False)[5][0])


@pytest.mark.parametrize("strength", [-0.1, 1.1, float("nan")])
def test_an_impossible_strength(jpegs: Path, strength: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        ImageSet(scan(jpegs), px=16, augment=True).set_strength(strength)


def test_strength_reaches_live_workers(jpegs: Path) -> None:
    files = scan(jpegs)
    images = ImageSet(files, px=16, augment=True, colour_strength=0.8)
    plain = ImageSet(files, px=16, augment=True)
    loader: DataLoader[tuple[torch.Tensor, int]] = DataLoader(
        images, batch_size=8, num_workers=1, prefetch_factor=1, persistent_workers=True
    )
    expected = torch.stack([plain[i][0] for i in range(64)]).split(8)
    images.set_strength(0)
    batches = iter(loader)
    assert torch.equal(next(batches)[0], expected[0])
    images.set_strength(1)
    rest = [batch for batch, _ in batches]
    # One batch may have been ready and one begun.
    alike = [torch.equal(*pair) for pair in zip(rest, expected[1:], strict=True)]
    assert not any(alike[2:])
    alone = torch.stack([images[i][0] for i in range(32, 64)])
    assert torch.equal(torch.cat(rest[3:]), alone)
    images.set_strength(0)
    again = [batch for batch, _ in loader]
    assert all(map(torch.equal, again, expected))


def _jpeg(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95, **options)
    return file.getvalue()


def _half_red(mode: str = "RGB") -> Image.Image:
    """Left red, right blue."""
    image = Image.new("RGB", (64, 64), (250, 10, 10))
    image.paste((10, 10, 250), (32, 0, 64, 64))
    return image.convert(mode)


def _palette(transparency: bytes | int) -> bytes:
    file = io.BytesIO()
    _half_red("P").save(file, "PNG", transparency=transparency)
    return file.getvalue()


def _oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return _jpeg(_half_red(), exif=exif)


def _one(tmp_path: Path, name: str, data: bytes) -> torch.Tensor:
    (tmp_path / "set/all").mkdir(parents=True)
    (tmp_path / "set/all" / name).write_bytes(data)
    pixels: torch.Tensor = ImageSet(scan(tmp_path / "set"), px=16, augment=False)[0][0]
    return pixels.float()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("cmyk.jpg", lambda: _jpeg(_half_red("CMYK"))),
        ("palette.png", lambda: _palette(0)),
        ("palette.png", lambda: _palette(bytes([0, 255]))),
        ("nonsense-exif.jpg", lambda: _jpeg(_half_red(), exif=b"Exif\0\0II*\0\xff\xff\xff\xff")),
        ("orientation-9.jpg", lambda: _oriented(9)),
    ],
)
def test_unusual_images(tmp_path: Path, name: str, make: Callable[[], bytes]) -> None:
    pixels = _one(tmp_path, name, make())
    assert pixels[0, :, :6].min() > 200
    assert pixels[2, :, :6].max() < 60
    assert pixels[2, :, 10:].min() > 200


def test_sixteen_bits_keep_their_greys(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    file = io.BytesIO()
    Image.fromarray(ramp).save(file, "PNG")
    pixels = _one(tmp_path, "grey16.png", file.getvalue())
    assert torch.equal(pixels[0], pixels[1])
    expected = torch.linspace(16, 239, 16)  # the central 7/8
    assert (pixels.mean(dim=(0, 2)) - expected).abs().max() < 10


@pytest.mark.parametrize(
    ("orientation", "red"),
    list(enumerate(["left", "right", "right", "left", "top", "top", "bottom", "bottom"], 1)),
)
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int, red: str) -> None:
    reds = _one(tmp_path, "turned.jpg", _oriented(orientation))[0]
    ends = {"left": reds[:, :6], "right": reds[:, 10:], "top": reds[:6], "bottom": reds[10:]}
    assert ends[red].min() > 200


def test_an_empty_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^cannot decode the image .*empty\.jpg: .*\S$"):
        _one(tmp_path, "empty.jpg", b"")


def test_normalise() -> None:
    images = torch.tensor([0, 128, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    expected = [(0 / 255 - 0.485) / 0.229, (128 / 255 - 0.456) / 0.224, (1 - 0.406) / 0.225]
    torch.testing.assert_close(normalise(images).flatten(), torch.tensor(expected))


def test_missing_pillow_names_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from trainer.data.images import require_pillow
    from trainer.errors import MissingPackageError

    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "PIL.Image", raising=False)
    with pytest.raises(MissingPackageError, match="pip install pillow"):
        require_pillow()
