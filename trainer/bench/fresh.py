"""One measurement in a process of its own, so that its memory is its own.

``python -m trainer.bench.fresh`` reads a job as JSON from stdin and answers with one line of JSON.
Peak memory of a process never falls, and what one number format leaves in the allocator would
count for the next.
"""

import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from trainer.config import Config
from trainer.errors import TrainerError, TrainingError

__all__ = ["Job", "Measured", "NotPossible", "busy_machine", "combined", "measure_fresh"]

_LIMIT_S = 1800.0
_CACHED = 4
# Between the quartiles of the steps; on a quiet machine they are within a tenth.
_SPREAD = 1.5


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure."""

    config: Config
    steps: int
    warm_up: int
    batches: Literal["data", "random"]
    """Training batches, a few that are repeated; or one of random numbers, the largest there is."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of it; memory in bytes, None where it is not known on the device."""

    step_ms: float
    """Median."""
    step_low_ms: float
    step_high_ms: float
    """The quartiles."""
    cpu_ms: float
    """CPU time of a step over all threads; other work on the machine adds little to it."""
    samples_per_s: float
    peak_allocated_bytes: int | None
    """The most that torch's allocator had handed out at once; CUDA only."""
    saved_for_backward_bytes: int
    """What the forward keeps for the backward, parameters left out."""
    peak_rss_bytes: int | None
    """The most the process ever had in memory, libraries included."""
    peak_rss_training_bytes: int | None
    """Of that, what came after the model and its data were there."""
    first_loss: float
    final_loss: float
    skipped: int
    """Steps that were left out because their gradients overflowed."""
    mode: str
    device: str
    device_name: str
    threads: int
    parameters: int

    @property
    def cost_ms(self) -> float:
        """What to compare steps by. On one CPU thread that is its CPU time: what the step takes
        where nothing else runs.
        """
        return self.cpu_ms if self.device == "cpu" and self.threads == 1 else self.step_ms

    @property
    def samples_per_cost_s(self) -> float:
        """Samples a second by `cost_ms`."""
        return self.samples_per_s * self.step_ms / self.cost_ms


@dataclass(frozen=True, slots=True)
class NotPossible:
    """It cannot be measured here."""

    reason: str


def measure_fresh(job: Job) -> Measured | NotPossible:
    """Run the job in a fresh process.

    What the device or its memory cannot do is an answer. Raises `TrainingError` where the process
    fails in another way.
    """
    order = {
        "config": job.config.model_dump(mode="json"),
        "steps": job.steps,
        "warm_up": job.warm_up,
        "batches": job.batches,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trainer.bench.fresh"],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return NotPossible(f"it took longer than {_LIMIT_S / 60:.0f} minutes")
    if done.returncode == -9:
        return NotPossible("it was killed, most likely because the machine ran out of memory")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise TrainingError(f"the process that measures has failed: {last[0]}") from None
    if "reason" in answer:
        return NotPossible(answer["reason"])
    return Measured(**answer)


def combined(rounds: Sequence[Measured | NotPossible]) -> Measured | NotPossible:
    """Rounds of one job as one: medians of the times, the highest memory, the widest quartiles.

    What was not possible once is not possible.
    """
    measured: list[Measured] = []
    for it in rounds:
        if isinstance(it, NotPossible):
            return it
        measured.append(it)
    step_ms = statistics.median(it.step_ms for it in measured)
    first = measured[0]
    return replace(
        first,
        step_ms=step_ms,
        step_low_ms=min(it.step_low_ms for it in measured),
        step_high_ms=max(it.step_high_ms for it in measured),
        cpu_ms=statistics.median(it.cpu_ms for it in measured),
        samples_per_s=first.samples_per_s * first.step_ms / step_ms,
        peak_allocated_bytes=_highest(it.peak_allocated_bytes for it in measured),
        peak_rss_bytes=_highest(it.peak_rss_bytes for it in measured),
        peak_rss_training_bytes=_highest(it.peak_rss_training_bytes for it in measured),
    )


def busy_machine(measured: Iterable[Measured | NotPossible]) -> str | None:
    """A sentence where steps of the same job took too differently to compare; None if not."""
    spread = max(
        (it.step_high_ms / it.step_low_ms for it in measured if isinstance(it, Measured)),
        default=1.0,
    )
    if spread < _SPREAD:
        return None
    return (
        f"Other work was going on: half of the same steps differ by more than a factor of "
        f"{spread:.1f}. Repeat this on a quiet machine before believing a ratio."
    )


def _highest(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known, default=None)


def _measure(job: Job) -> Measured:
    import torch

    from trainer.bench.measure import batch_length, train_batches
    from trainer.memory.host import status_bytes
    from trainer.memory.report import saved_bytes
    from trainer.report import Reporter
    from trainer.run import open_trainer
    from trainer.tasks import to_device

    with open_trainer(job.config, reporter=Reporter(enabled=False)) as trainer:
        device, task = trainer.placement.device, trainer.task
        trainer.loaders.set_epoch(0)
        windows = trainer.loaders.accumulation
        if job.batches == "random":
            batches = [task.largest_batch(job.config.loader.batch_size)]
        else:
            # Loaded beforehand: this is about computing.
            source = iter(trainer.loaders.train)
            batches = [next(source) for _ in range(min(_CACHED, windows.batches))]
        period = len(batches)
        endless = itertools.cycle(batches)
        cuda = device.type == "cuda"
        resident = status_bytes("VmRSS")
        warm = train_batches(trainer, endless, job.warm_up, period=period)
        if cuda:
            # What the first steps try out (cuDNN's algorithms) is no part of training.
            torch.cuda.reset_peak_memory_stats(device)
        steady = train_batches(trainer, endless, job.steps, first=job.warm_up, period=period)
        peak_rss = status_bytes("VmHWM")
        allocated = int(torch.cuda.max_memory_allocated(device)) if cuda else None
        batch, part = to_device(batches[0], device), windows.micro_batch(0)

        def forward() -> torch.Tensor:
            with trainer.precision.autocast():
                return task.loss(trainer.replica, batch, part, draw=0, strength=1.0)

        samples = statistics.mean(batch_length(batch) for batch in batches)
        low, step_ms, high = statistics.quantiles(steady.compute_ms, n=4, method="inclusive")
        return Measured(
            step_ms=step_ms,
            step_low_ms=low,
            step_high_ms=high,
            cpu_ms=steady.cpu_ms,
            samples_per_s=1e3 * samples / step_ms,
            peak_allocated_bytes=allocated,
            saved_for_backward_bytes=saved_bytes(forward, without=trainer.model),
            peak_rss_bytes=peak_rss,
            peak_rss_training_bytes=(
                max(0, peak_rss - resident)
                if peak_rss is not None and resident is not None
                else None
            ),
            first_loss=statistics.mean((warm.losses + steady.losses)[:period]),
            final_loss=statistics.mean((warm.losses + steady.losses)[-period:]),
            skipped=trainer.precision.skipped,
            mode=trainer.precision.mode,
            device=device.type,
            device_name=torch.cuda.get_device_name(device) if cuda else "cpu",
            threads=torch.get_num_threads(),
            parameters=sum(p.numel() for p in trainer.model.parameters()),
        )


def main() -> int:
    """Read the job from stdin, measure, answer on stdout."""
    order = json.load(sys.stdin)
    config = Config.model_validate(order["config"])
    try:
        measured = _measure(Job(config, order["steps"], order["warm_up"], order["batches"]))
    except TrainerError as error:
        answer: dict[str, Any] = {"reason": str(error)}
    else:
        answer = asdict(measured)
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
