"""What the scenarios share: the place of a rank, images in memory, progress, leaving quietly."""

import argparse
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

import gpuwatch
from trainer.data import ImageSet, make_jpegs, scan
from trainer.errors import TrainerError
from trainer.signals import Stop, Stopped, stop_signals

__all__ = ["CLASSES", "IMAGES", "Job", "decoded", "ignore_interrupt", "run"]

Item = TypeVar("Item")

IMAGES = 512
CLASSES = 8
_ENDLESS = 10**9
_REPORT_STEPS = 10


class Job:
    """One rank of a scenario: where it is, what was asked for, and how far it is.

    Args:
        rank: of this process; 0 without a launcher.
        ranks: how many there are.
        steps: end after so many; 0: never.
        fixed: the cause of slowness is to be mended.
        stop: tells of ctrl-C.
    """

    def __init__(self, rank: int, ranks: int, *, steps: int, fixed: bool, stop: Stop) -> None:
        self.rank = rank
        self.ranks = ranks
        self.steps = steps
        self.fixed = fixed
        self.step = 0
        self._stop = stop
        self._since_s = 0.0

    @property
    def done(self) -> bool:
        """Whether all steps that were asked for are done."""
        return 0 < self.steps <= self.step

    def meet(self) -> None:
        """Wait for the other ranks, if there are any."""
        if dist.is_initialized():
            dist.barrier()

    def simulated(self, what: str) -> None:
        """Say once, on stderr, what is made up."""
        if self.rank == 0:
            print(f"SIMULATED: {what}", file=sys.stderr)

    def sampler(self, dataset: Dataset[Any]) -> RandomSampler:
        """Random items without an end, other ones on each rank: a training counts steps here."""
        chance = torch.Generator().manual_seed(self.rank)
        return RandomSampler(
            dataset,  # type: ignore[arg-type]
            replacement=True,
            num_samples=_ENDLESS,
            generator=chance,
        )

    def replicate(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model, in DDP where there are other ranks."""
        return DistributedDataParallel(model) if dist.is_initialized() else model

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the loader's batches until `steps` steps are reported or the loader ends."""
        gpuwatch.annotate(total_steps=self.steps or None)
        if not self.step:
            self._since_s = time.perf_counter()
        with self._stop.defer():
            batches = iter(loader)
        for batch in batches:
            self._stop.check()
            yield batch
            if self.done:
                return

    def report(self, loss: torch.Tensor, *, batches: int = 1) -> None:
        """Count a step of so many batches; rank 0 prints one line for ten steps."""
        gpuwatch.annotate(loss=loss.detach())
        self.step += 1
        if self.step % _REPORT_STEPS == 0 and self.rank == 0:
            now_s = time.perf_counter()
            step_ms, self._since_s = (now_s - self._since_s) / _REPORT_STEPS * 1e3, now_s
            a_batch = f"  batch_ms {step_ms / batches:.1f}" if batches > 1 else ""
            print(
                f"step {self.step}  loss {loss.item():.4f}  step_ms {step_ms:.1f}{a_batch}",
                flush=True,
            )


def decoded(px: int) -> TensorDataset:
    """Return real images that are decoded once and stay in memory, where loading costs nothing.

    Items are a uint8 tensor (3, px, px) and a label.
    """
    files = scan(make_jpegs(images=IMAGES, classes=CLASSES, px=96))
    images = ImageSet(files, px=px, augment=False)
    pixels = torch.stack([images[index][0] for index in range(len(images))])
    return TensorDataset(pixels, torch.from_numpy(files.labels))


def ignore_interrupt(_worker: int) -> None:
    """Ctrl-C is for the training process, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Parser(argparse.ArgumentParser):
    """Answers a bad argument with one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists what there is\n")


def _steps(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps")
    return int(text)


def _arguments(doc: str, fix: str) -> argparse.Namespace:
    parser = _Parser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=_steps, default=0, help="0, the default: until interrupted")
    parser.add_argument("--fixed", action="store_true", help=fix)
    return parser.parse_args()


def run(train: Callable[[Job], None], doc: str | None, *, fix: str, ranks: int = 1) -> int:
    """Join the other ranks, if there are any, train, and leave without noise.

    Args:
        train: the scenario.
        doc: what `--help` says.
        fix: what `--fixed` changes.
        ranks: as many are needed to see the fault.

    Returns:
        The exit code: 0, 1 for what a person can mend, 130 or 143 for ctrl-C and SIGTERM.
    """
    args = _arguments(doc or "", fix)
    # torch advises against more workers than cores; those that wait cost none.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    launched = "RANK" in os.environ
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    name = Path(sys.argv[0]).name
    if world < ranks:
        print(
            f"{name}: one process alone does not show the fault: torchrun --standalone "
            f"--nproc-per-node {ranks} {sys.argv[0]}",
            file=sys.stderr,
        )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        with stop_signals() as stop:
            if launched:
                dist.init_process_group("gloo")
            train(Job(rank, world, steps=args.steps, fixed=args.fixed, stop=stop))
    except Stopped as stopped:
        return stopped.exit_code
    except TrainerError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        if launched and dist.is_initialized():
            dist.destroy_process_group()
    return 0
