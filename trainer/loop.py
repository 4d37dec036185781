"""The training loop."""

import contextlib
import math
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.accumulate import MicroBatch
from trainer.config import TrainConfig
from trainer.data.images import normalise
from trainer.data.loader import Loaders
from trainer.distributed import Placement, sync_buffers
from trainer.errors import TrainingError
from trainer.faults import LoopFaults
from trainer.report import Reporter
from trainer.signals import Stop
from trainer.telemetry import Telemetry

__all__ = ["Evaluation", "Trainer"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Means over the held-out images of all ranks."""

    loss: float
    accuracy: float


class Trainer:
    """One rank's side of a run. `fit` trains to the end; the parts can be used alone in tests.

    `model` is what is trained and `replica` what is called: the same, or the model in DDP.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        placement: Placement,
        model: nn.Module,
        replica: nn.Module,
        optimizer: Optimizer,
        schedule: LRScheduler,
        loaders: Loaders,
        telemetry: Telemetry,
        reporter: Reporter,
        stop: Stop,
        faults: LoopFaults | None = None,
    ) -> None:
        self.config = config
        self.placement = placement
        self.model = model
        self.replica = replica
        self.optimizer = optimizer
        self.schedule = schedule
        self.loaders = loaders
        self.telemetry = telemetry
        self.reporter = reporter
        self.stop = stop
        self.step = 0
        """Optimizer steps done."""
        self.loss: float | None = None
        """Mean training loss of the last log interval, of this rank's samples; None before."""
        self.faults = faults
        self._interval = _Interval(placement.device)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.steps or self.config.epochs * self.loaders.accumulation.steps

    def fit(self) -> None:
        """Train to the last step. Raises `TrainingError` if the loss stops being a number."""
        self.telemetry.annotate(
            total_steps=self.total_steps, dataset_path=str(self.loaders.path.absolute())
        )
        epoch = 0
        while self.step < self.total_steps:
            self.train_epoch(epoch)
            epoch += 1
            every = self.config.eval_interval_epochs
            if every and epoch % every == 0:
                self.evaluate(epoch)
        sync_buffers(self.model)

    def train_epoch(self, epoch: int) -> None:
        """Train over one epoch, or up to the last step of the run."""
        self.replica.train()
        self.loaders.set_epoch(epoch)
        self._interval.start()
        accumulation = self.loaders.accumulation
        loss = torch.zeros((), device=self.placement.device)
        with self.stop.defer():
            batches = iter(self.loaders.train)
        for index, batch in enumerate(batches):
            self.stop.check()
            part = accumulation.micro_batch(index)
            loss += self.micro_batch(batch, part)
            if not part.last:
                continue
            self.update()
            self.telemetry.annotate(
                samples=part.window_samples,
                loss=loss,
                epoch=epoch + (index + 1) / accumulation.batches,
            )
            self._interval.add(loss, part.window_samples)
            if self.faults is not None:
                self.faults.after_step(self.step, self.model, loss)
            loss = torch.zeros_like(loss)
            if self.step % self.config.log_interval_steps == 0 or self.step == self.total_steps:
                self._log(epoch)
            if self.step == self.total_steps:
                break
        self._interval.pause()

    def micro_batch(self, batch: Any, part: MicroBatch) -> torch.Tensor:
        """Forward and backward; gradients add up, and are reduced over the ranks in the window's
        last one only. Returns its share of the window's mean loss, on the device.
        """
        images, labels = self._to_device(batch)
        with contextlib.nullcontext() if part.last else self._no_sync():
            # `no_sync` has to hold in the forward as well: there DDP decides.
            logits = self.replica(normalise(images))
            loss = F.cross_entropy(logits, labels) * part.share
            if self.faults is None:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                self.faults.backward(loss)
        return loss.detach()

    def update(self) -> None:
        """One optimizer step with the gradients that have added up."""
        self.optimizer.step()
        self.schedule.step()
        # Freed, not filled with zeros: less memory traffic, and the next backward writes anew.
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def evaluate(self, epoch: int) -> Evaluation | None:
        """Loss and accuracy on the held-out images, printed; None if there are none."""
        loader = self.loaders.held_out
        if loader is None:
            return None
        with self.telemetry.span("eval"), torch.no_grad():
            sync_buffers(self.model)
            self.model.eval()
            totals = torch.zeros(3, dtype=torch.float64, device=self.placement.device)
            with self.stop.defer():
                batches = iter(loader)
            for batch in batches:
                self.stop.check()
                images, labels = self._to_device(batch)
                # Not through DDP: the ranks may have different numbers of batches.
                logits = self.model(normalise(images))
                totals[0] += F.cross_entropy(logits, labels, reduction="sum")
                totals[1] += (logits.argmax(dim=1) == labels).sum()
                totals[2] += len(labels)
            if dist.is_initialized():
                dist.all_reduce(totals)
            self.model.train()
            loss, correct, count = totals.tolist()
        result = Evaluation(loss / count, correct / count)
        self.reporter.row(
            epoch=epoch, step=self.step, eval_loss=result.loss, eval_accuracy=result.accuracy
        )
        return result

    def evaluate_batches(self, count: int) -> None:
        """Run so many held-out batches through the model for their time alone; no collectives."""
        loader = self.loaders.held_out
        if loader is None:
            return
        with self.telemetry.span("eval"), torch.no_grad():
            self.model.eval()
            while count > 0:
                for batch in loader:
                    self.stop.check()
                    images, _labels = self._to_device(batch)
                    self.model(normalise(images))
                    count -= 1
                    if count == 0:
                        break
            self.model.train()

    def _no_sync(self) -> AbstractContextManager[None]:
        if isinstance(self.replica, DistributedDataParallel):
            return self.replica.no_sync()
        return contextlib.nullcontext()

    def _to_device(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = batch
        if self.placement.device.type == "cpu":
            return images, labels
        with self.telemetry.phase("h2d"):
            return (
                images.to(self.placement.device, non_blocking=True),
                labels.to(self.placement.device, non_blocking=True),
            )

    def _log(self, epoch: int) -> None:
        # Reading the loss waits for the device, so only the rank that prints does it.
        if self.placement.rank != 0:
            self._interval.clear()
            return
        loss, samples_per_s = self._interval.read()
        self.loss = loss
        if math.isnan(loss):
            raise TrainingError(f"the loss is not a number at step {self.step}: lower optim.lr")
        self.reporter.row(
            epoch=epoch + 1,
            step=self.step,
            loss=loss,
            **{"img/s": samples_per_s * self.placement.world_size},
        )


class _Interval:
    """Loss and rate since the last line; evaluation and the time between epochs do not count."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), device=device)
        self._steps = 0
        self._samples = 0
        self._seconds = 0.0
        self._since = 0.0

    def start(self) -> None:
        self._since = time.perf_counter()

    def pause(self) -> None:
        self._seconds += time.perf_counter() - self._since

    def add(self, loss: torch.Tensor, samples: int) -> None:
        self._loss += loss
        self._steps += 1
        self._samples += samples

    def read(self) -> tuple[float, float]:
        """(mean loss, samples of this rank per second), and begin anew."""
        loss = float(self._loss) / self._steps
        self.pause()
        rate = self._samples / self._seconds if self._seconds > 0 else 0.0
        self.clear()
        return loss, rate

    def clear(self) -> None:
        self._loss.zero_()
        self._steps = 0
        self._samples = 0
        self._seconds = 0.0
        self.start()
