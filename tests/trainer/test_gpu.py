"""What only a CUDA device can show."""

import io
from pathlib import Path

import pytest
import torch

from trainer.data.augment import Mixing
from trainer.report import Reporter
from trainer.run import open_trainer
from trainer.sources import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

SMALL = (
    "--data.image_px 32 --model.width 16 --train.steps 20 --train.watch false "
    "--train.eval_interval_epochs 0 --loader.num_workers 1 --loader.batch_size 8 "
    "--optim.clip_norm 5"
)


@pytest.mark.parametrize("mode", ["fp32", "tf32", "bf16", "fp16", "fp16-manual"])
def test_every_precision_learns_on_the_device(jpegs: Path, mode: str) -> None:
    config = load([*SMALL.split(), "--data.path", str(jpegs), "--precision.mode", mode], environ={})
    with open_trainer(config, reporter=Reporter(out=io.StringIO(), err=io.StringIO())) as trainer:
        assert trainer.placement.device.type == "cuda"
        assert trainer.loaders.plan.pin_memory
        trainer.fit()
        assert trainer.loss is not None
        assert trainer.loss < 2.0
        assert trainer.schedule.last_epoch == trainer.step - trainer.precision.skipped


def test_mixing_never_waits_for_the_device() -> None:
    device = torch.device("cuda", 0)
    mixing = Mixing(10, mixup_alpha=0.4, cutmix_alpha=1.0, seed=1)
    images = torch.rand(8, 3, 32, 32, device=device)
    labels = torch.arange(8, device=device)
    mixing.mix(images, labels, 0, 1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for draw in range(1, 20):
            mixing.mix(images, labels, draw, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_of_bf16_never_waits_for_the_device(jpegs: Path) -> None:
    more = ["--data.path", str(jpegs), "--precision.mode", "bf16", "--memory.leak_checks", "false"]
    config = load([*SMALL.split(), *more], environ={})
    with open_trainer(config, reporter=Reporter(enabled=False)) as trainer:
        trainer.loaders.set_epoch(0)
        batch = next(iter(trainer.loaders.train))
        part = trainer.loaders.accumulation.micro_batch(0)
        trainer.micro_batch(batch, part)
        trainer.update()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                trainer.micro_batch(batch, part)
                trainer.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
