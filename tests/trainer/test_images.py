import hashlib
import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from trainer.data import ImageSet, cache_folder, make_jpegs, normalise, scan
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
