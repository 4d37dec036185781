"""A Trainer of Lightning: its closure runs inside the optimizer; sanity check and validation.

Once as any script would, and once with the callback. Run by the tests.
"""

import faulthandler
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

faulthandler.dump_traceback_later(100, exit=True)
warnings.simplefilter("ignore")

import lightning  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import gpuwatch  # noqa: E402

gpuwatch.watch()


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", self.net(batch[0]).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(samples: int, batch_size: int) -> Any:
    return DataLoader(TensorDataset(torch.randn(samples, 64)), batch_size=batch_size)


def train(folder: str, *callbacks: Any) -> int:
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
    )
    # 7 batches: 3 windows and a half, 4 steps an epoch; a checkpoint after each.
    trainer.fit(Model(), loader(28, 4), loader(24, 8))
    return int(trainer.global_step)


def main() -> None:
    steps = []
    with tempfile.TemporaryDirectory() as folder:
        steps.append(train(folder))
    with tempfile.TemporaryDirectory() as folder:
        from gpuwatch.integrations.lightning import GpuwatchCallback

        steps.append(train(folder, GpuwatchCallback()))
    print(json.dumps({"steps": steps}), flush=True)
    done = Path(os.environ["DONE"])
    while not done.exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
    sys.exit(0)
