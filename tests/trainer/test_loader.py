from pathlib import Path

import pytest
import torch

from trainer.config import LoaderConfig
from trainer.cpus import usable_cpus
from trainer.data import LoaderPlan, build_loaders, plan_loader
from trainer.distributed import Placement
from trainer.errors import DataError
from trainer.sources import load


def plan(*, cpus: int = 8, ranks_here: int = 1, cuda: bool = False, **config: object) -> LoaderPlan:
    return plan_loader(
        LoaderConfig(**config),  # type: ignore[arg-type]
        cpus=cpus,
        ranks_here=ranks_here,
        cuda=cuda,
    )


def placement(rank: int = 0, world_size: int = 1) -> Placement:
    return Placement(rank, world_size, rank, world_size, False, torch.device("cpu"))


@pytest.mark.parametrize(
    ("cpus", "ranks", "workers"), [(8, 1, 8), (8, 2, 4), (2, 2, 1), (2, 8, 1), (128, 2, 8)]
)
def test_auto_workers_share_the_node(cpus: int, ranks: int, workers: int) -> None:
    assert plan(cpus=cpus, ranks_here=ranks).num_workers == workers


def test_without_workers_only_what_torch_accepts() -> None:
    settled = plan(num_workers=0)
    assert settled.prefetch_factor is None
    assert not settled.persistent_workers
    # torch raises on the combinations it refuses.
    torch.utils.data.DataLoader(range(4), **settled.arguments())  # type: ignore[arg-type]


def test_with_workers() -> None:
    settled = plan(num_workers=2, prefetch_factor=5, multiprocessing_context="spawn")
    assert settled.arguments() == {
        "num_workers": 2,
        "prefetch_factor": 5,
        "persistent_workers": True,
        "pin_memory": False,
        "timeout": 0.0,
        "multiprocessing_context": "spawn",
    }
    torch.utils.data.DataLoader(range(4), **settled.arguments())  # type: ignore[arg-type]


def test_pinned_memory_with_cuda_only() -> None:
    assert plan(cuda=True).pin_memory
    assert not plan(cuda=False).pin_memory
    assert not plan(cuda=True, pin_memory=False).pin_memory
    dropped = plan(cuda=False, pin_memory=True)
    assert not dropped.pin_memory
    assert any("pin_memory" in note for note in dropped.notes)


def test_more_workers_than_cpus_are_kept_with_a_note() -> None:
    settled = plan(cpus=2, ranks_here=2, num_workers=8)
    assert settled.num_workers == 8
    assert "share 2 CPUs" in settled.notes[0]


@pytest.mark.parametrize(
    ("quota", "cpus"), [("max 100000", None), ("50000 100000", 1), ("100000 100000", 1)]
)
def test_quota_bounds_the_mask(tmp_path: Path, quota: str, cpus: int | None) -> None:
    unbounded = usable_cpus(tmp_path / "none")
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert usable_cpus(tmp_path) == (unbounded if cpus is None else cpus)


def test_every_held_out_image_once_over_all_ranks(jpegs: Path) -> None:
    config = load(
        f"--data.path={jpegs} --data.eval_fraction=0.3 --data.image_px=16 "
        "--loader.num_workers=0 --loader.batch_size=4".split(),
        environ={},
    )
    loaders = [build_loaders(config, placement(rank, 3)) for rank in range(3)]
    held_out = [
        len(labels)
        for each in loaders
        for _, labels in (each.held_out or ())  # one per batch
    ]
    assert sum(held_out) + len(loaders[0].images) == 64
    assert len({len(each.train) for each in loaders}) == 1
    assert len(loaders[0].train) == loaders[0].accumulation.batches


def test_too_few_images_for_a_batch(jpegs: Path) -> None:
    config = load(["--data.path", str(jpegs), "--loader.batch_size", "60"], environ={})
    with pytest.raises(DataError, match="fewer than one batch of 60 on each of 2 ranks"):
        build_loaders(config, placement(0, 2))
