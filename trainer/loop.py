"""The training loop."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.accumulate import Accumulation, MicroBatch
from trainer.config import Config
from trainer.data.augment import strength_at
from trainer.data.loader import Feed
from trainer.distributed import CommHook, Placement, sync_buffers
from trainer.errors import TrainingError
from trainer.faults import LoopFaults
from trainer.knobs import Wanted
from trainer.memory.leaks import LeakChecks
from trainer.precision import Precision
from trainer.report import Reporter
from trainer.signals import Stop
from trainer.tasks import Task, to_device
from trainer.telemetry import Telemetry

__all__ = ["Evaluation", "Parts", "Trainer", "train_step"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Means over what is held out on all ranks."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Parts:
    """What a step is made of. `model` is what is trained and `replica` what is called: the same,
    or the model in DDP.
    """

    placement: Placement
    model: nn.Module
    replica: nn.Module
    optimizer: Optimizer
    precision: Precision
    task: Task
    clip_norm: float | None = None
    comm_hook: CommHook | None = None


def train_step(parts: Parts, batches: list[Any]) -> torch.Tensor:
    """One whole optimizer step on batches from the CPU, its gradients added up; the mean loss."""
    window = Accumulation(len(batches), 1, len(batches))
    # Of texts the tokens or classes that are predicted count; training has them from its plan.
    labels = [batch["labels"] for batch in batches if isinstance(batch, dict)]
    units = sum(int((own != -100).sum()) for own in labels)
    total = torch.zeros((), device=parts.placement.device)
    for index, batch in enumerate(batches):
        part = window.micro_batch(index)
        if units:
            part = dataclasses.replace(part, per_unit=1.0 / units)
        total += _micro_batch(parts, to_device(batch, parts.placement.device), part)
    parts.precision.step(parts.optimizer, parts.clip_norm)
    return total


def _micro_batch(
    parts: Parts,
    batch: Any,
    part: MicroBatch,
    *,
    draw: int = 0,
    strength: float = 1.0,
    faults: LoopFaults | None = None,
) -> torch.Tensor:
    """Forward and backward of a batch on the device."""
    with contextlib.nullcontext() if part.last else _no_sync(parts.replica):
        # `no_sync` has to hold in the forward as well: there DDP decides.
        with parts.precision.autocast():
            loss = parts.task.loss(parts.replica, batch, part, draw=draw, strength=strength)
        scaled = parts.precision.scaled(loss)
        if faults is None:
            scaled.backward()  # type: ignore[no-untyped-call]
        else:
            faults.backward(scaled)
    return loss.detach()


def _no_sync(replica: nn.Module) -> AbstractContextManager[None]:
    if isinstance(replica, DistributedDataParallel):
        return replica.no_sync()
    return contextlib.nullcontext()


class Trainer:
    """One rank's side of a run. `fit` trains to the end; the parts can be used alone in tests."""

    def __init__(
        self,
        config: Config,
        parts: Parts,
        *,
        schedule: LRScheduler,
        loaders: Feed,
        telemetry: Telemetry,
        reporter: Reporter,
        stop: Stop,
        faults: LoopFaults | None = None,
        leaks: LeakChecks | None = None,
    ) -> None:
        self.config = config.train
        self.parts = parts
        self.placement = parts.placement
        self.model = parts.model
        self.replica = parts.replica
        self.optimizer = parts.optimizer
        self.precision = parts.precision
        self.task = parts.task
        self.schedule = schedule
        self.loaders = loaders
        self.telemetry = telemetry
        self.reporter = reporter
        self.stop = stop
        self.step = 0
        """Optimizer steps done, those that were skipped included."""
        self.loss: float | None = None
        """Mean training loss of the last log interval, of this rank's samples; None before."""
        self.faults = faults
        self.leaks = leaks
        self.wanted = Wanted()
        """What a monitor wants to be changed, and the loop has to take up."""
        self.log_interval_steps = config.train.log_interval_steps
        self._data = config.data
        self._strength = self._strength_scale = 1.0
        self._micro_batches = 0
        self._interval = _Interval(parts.placement.device)

    @functools.cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.steps or self.loaders.steps(self.config.epochs)

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

    def train_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Train over one epoch, from a micro-batch on, or up to the last step of the run."""
        self.replica.train()
        self.loaders.set_epoch(epoch, first_batch)
        self._set_strength()
        self._interval.start()
        accumulation = self.loaders.accumulation
        loss = torch.zeros((), device=self.placement.device)
        begins = True
        for index, batch in self._batches(epoch, first_batch):
            self.stop.check()
            if begins and (every := self.wanted.take_accumulate()) is not None:
                self.loaders.set_accumulation(every, index)
                accumulation = self.loaders.accumulation
            part = accumulation.micro_batch(index)
            begins = part.last
            loss += self.micro_batch(batch, part)
            if not part.last:
                continue
            loss /= part.window_share
            self.update()
            self.telemetry.annotate(
                samples=part.window_samples,
                loss=loss,
                epoch=epoch + (index + 1) / accumulation.batches,
            )
            self._interval.add(loss, part)
            if self.faults is not None:
                self.faults.after_step(self.step, self.model, loss)
            self._look_for_leaks(loss)
            loss = torch.zeros_like(loss)
            if self.step % self.log_interval_steps == 0 or self.step == self.total_steps:
                self._log(epoch)
            if self.step == self.total_steps:
                break
        self._interval.pause()

    def _batches(self, epoch: int, first_batch: int) -> Iterator[tuple[int, Any]]:
        """The micro-batches of an epoch with their indices, none twice and none left out, also
        where another loader takes over after a step: its order goes on behind the last one.
        """
        loaders = self.loaders
        total = loaders.accumulation.batches
        while True:
            with self.stop.defer():
                batches = iter(loaders.train)
            for index, batch in enumerate(batches, first_batch):
                yield index, batch
                if self.wanted.workers is None or not loaders.accumulation.micro_batch(index).last:
                    continue
                first_batch = index + 1
                if first_batch < total:
                    break
            else:
                self._replace_loader()
                return
            # What was fetched ahead goes with the old loader: nobody has trained on it.
            del batches
            self._replace_loader()
            loaders.set_epoch(epoch, first_batch)

    def _replace_loader(self) -> None:
        wanted = self.wanted.take_workers()
        if wanted is not None:
            with self.stop.defer():
                self.loaders.set_workers(*wanted)

    def micro_batch(self, batch: Any, part: MicroBatch) -> torch.Tensor:
        """Forward and backward; gradients add up, and are reduced over the ranks in the window's
        last one only. Returns its share of the window's mean loss, on the device.
        """
        self._micro_batches += 1
        return _micro_batch(
            self.parts,
            self._to_device(batch),
            part,
            draw=self._micro_batches - 1,
            strength=self._strength,
            faults=self.faults,
        )

    def update(self) -> None:
        """One optimizer step attempt with the gradients that have added up."""
        result = self.precision.step(self.optimizer, self.parts.clip_norm)
        if result.stepped:
            # The schedule counts what was learned: it waits for a step that was skipped.
            self.schedule.step()
        self.step += 1
        self._set_strength()

    def _set_strength(self) -> None:
        data = self._data
        strength = strength_at(
            self.step / max(1, self.total_steps), data.strength_schedule, data.strength_late_share
        )
        strength *= self._strength_scale
        if strength != self._strength:
            self._strength = strength
            self.loaders.set_strength(strength)

    def scale_strength(self, scale: float) -> None:
        """Augment with that share, 0..1, of what the schedule says."""
        self._strength_scale = scale
        self._set_strength()

    def _look_for_leaks(self, loss: torch.Tensor) -> None:
        if self.leaks is None:
            return
        for leak in self.leaks.after_step(self.step, loss):
            self.reporter.note(f"{leak.sentence} (seen at step {self.step})")
            self.telemetry.annotate(notice=leak.sentence)

    def evaluate(self, epoch: int) -> Evaluation | None:
        """Loss and accuracy on what is held out, printed; None if there is nothing."""
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
                # Not through DDP: the ranks may have different numbers of batches.
                with self.precision.autocast():
                    totals += self.task.judge(self.model, self._to_device(batch))
            if dist.is_initialized():
                dist.all_reduce(totals)
            self.model.train()
            loss, correct, count = totals.tolist()
        if not count:
            return None
        result = Evaluation(loss / count, correct / count)
        self.reporter.row(
            epoch=epoch, step=self.step, eval_loss=result.loss, eval_accuracy=result.accuracy
        )
        return result

    def evaluate_batches(self, count: int) -> None:
        """Run so many held-out batches through the model for their time alone; no collectives."""
        loader = self.loaders.held_out
        if loader is None or not len(loader):
            return
        with self.telemetry.span("eval"), torch.no_grad():
            self.model.eval()
            while count > 0:
                for batch in loader:
                    self.stop.check()
                    with self.precision.autocast():
                        self.task.judge(self.model, self._to_device(batch))
                    count -= 1
                    if count == 0:
                        break
            self.model.train()

    def _to_device(self, batch: Any) -> Any:
        if self.placement.device.type == "cpu":
            return batch
        with self.telemetry.phase("h2d"):
            return to_device(batch, self.placement.device)

    def _log(self, epoch: int) -> None:
        # Reading the loss waits for the device, so only the rank that prints does it.
        if self.placement.rank != 0:
            self._interval.clear()
            return
        loss, units_per_s = self._interval.read()
        self.loss = loss
        if math.isnan(loss):
            raise TrainingError(
                f"the loss is not a number at step {self.step}: lower optim.lr, or set "
                "optim.clip_norm"
            )
        row: dict[str, int | float] = {"epoch": epoch + 1, "step": self.step, "loss": loss}
        row[self.task.rate_unit] = units_per_s * self.placement.world_size
        if self.precision.loss_scale is not None:
            row["scale"] = self.precision.loss_scale
            row["skipped"] = self.precision.skipped
        self.reporter.row(**row)


class _Interval:
    """Loss and rate since the last line; evaluation and the time between epochs do not count."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), device=device)
        self._steps = 0
        self._units = 0
        self._seconds = 0.0
        self._since = 0.0

    def start(self) -> None:
        self._since = time.perf_counter()

    def pause(self) -> None:
        self._seconds += time.perf_counter() - self._since

    def add(self, loss: torch.Tensor, window: MicroBatch) -> None:
        self._loss += loss
        self._steps += 1
        tokens = window.window_tokens
        self._units += window.window_samples if tokens is None else tokens

    def read(self) -> tuple[float, float]:
        """(mean loss, samples or tokens of this rank per second), and begin anew."""
        loss = float(self._loss) / self._steps
        self.pause()
        rate = self._units / self._seconds if self._seconds > 0 else 0.0
        self.clear()
        return loss, rate

    def clear(self) -> None:
        self._loss.zero_()
        self._steps = 0
        self._units = 0
        self._seconds = 0.0
        self.start()
