"""A training run whose loader cannot keep up, for gpuwatch to find out why.

    torchrun --standalone --nproc-per-node 2 demo/slow_loader.py

Each item is a real JPEG, decoded for real, behind a simulated remote read of 25 ms; one worker per
rank therefore delivers a batch of 8 about every 230 ms, while the model needs a few. Workers that
wait cost no CPU: with --num-workers 8 the same two cores train several times faster. With
--allow-control the number can be changed from gpuwatch while it trains (set num_workers 7).
"""

import argparse
import os
import signal
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import gpuwatch
from trainer.cpus import usable_cpus
from trainer.data import ImageSet, make_jpegs, normalise, scan
from trainer.data.sampler import ShardedSampler
from trainer.models import SmallCNN
from trainer.signals import Stop, Stopped, stop_signals


class RemoteImages(Dataset[tuple[torch.Tensor, int]]):
    """Images that arrive `latency_ms` late, as from a remote store; the reader sleeps meanwhile.

    One epoch reads each of them `REPEATS` times, to stand for a larger set.
    """

    REPEATS = 16

    def __init__(self, images: ImageSet, latency_ms: float) -> None:
        self.images = images
        self.latency_ms = latency_ms

    def __len__(self) -> int:
        return self.REPEATS * len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        item = self.images[index % len(self.images)]
        time.sleep(self.latency_ms / 1e3)
        return item


def arguments() -> argparse.Namespace:
    """What can be changed about the scenario."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=0, help="0: until interrupted")
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--latency-ms", type=float, default=25.0)
    parser.add_argument(
        "--allow-control", action="store_true", help="let gpuwatch change the number of workers"
    )
    return parser.parse_args()


def ignore_interrupt(_worker: int) -> None:
    """Ctrl-C is for the training process, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def make_loader(
    dataset: RemoteImages, sampler: ShardedSampler, batch_size: int, workers: int
) -> "DataLoader[Any]":
    """The loader with so many workers."""
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=ignore_interrupt if workers else None,
        drop_last=True,
    )


def train(args: argparse.Namespace, rank: int, ranks: int, stop: Stop) -> None:
    """Train until `args.steps` or for ever, one line per 10 steps from rank 0."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gpuwatch.watch(name="slow-loader", allow_control=args.allow_control)
    if rank == 0 and args.latency_ms:
        print(f"SIMULATED: {args.latency_ms:g} ms of read latency per item", file=sys.stderr)

    folder = make_jpegs(images=512, classes=8, px=384)
    images = ImageSet(scan(folder), px=64, augment=True)
    dataset = RemoteImages(images, args.latency_ms)
    sampler = ShardedSampler(len(dataset), world_size=ranks, rank=rank)
    wanted = args.num_workers

    def set_workers(number: int) -> None:
        nonlocal wanted
        wanted = number

    gpuwatch.knob(
        "num_workers",
        wanted,
        set_workers,
        low=0,
        high=max(wanted, 4 * usable_cpus()),
        effective="after the step that begins now",
    )
    model: torch.nn.Module = SmallCNN(classes=8)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    gpuwatch.annotate(total_steps=args.steps or None, dataset_path=str(folder))

    step, epoch, done, since = 0, 0, 0, time.perf_counter()
    loader, workers = None, -1
    while True:
        # A pass ends with the epoch, or where other workers are wanted: then the next one goes on
        # in the order where this one has stopped.
        sampler.set_epoch(epoch, done * args.batch_size)
        images.set_epoch(epoch)
        with stop.defer():
            if loader is None or workers != wanted:
                workers = wanted
                loader = make_loader(dataset, sampler, args.batch_size, workers)
            batches = iter(loader)
        for batch, labels in batches:
            stop.check()
            loss = F.cross_entropy(model(normalise(batch)), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            gpuwatch.annotate(samples=len(labels), loss=loss.detach(), epoch=float(epoch))
            step += 1
            if step % 10 == 0 and rank == 0:
                now = time.perf_counter()
                step_ms, since = (now - since) / 10 * 1e3, now
                print(f"step {step}  loss {loss.item():.4f}  step_ms {step_ms:.1f}", flush=True)
            if step == args.steps:
                return
            done += 1
            if workers != wanted:
                break
        else:
            epoch, done = epoch + 1, 0
        del batches


def main() -> int:
    """Join the other rank, if there is one, train, and leave without noise."""
    args = arguments()
    # torch advises against more workers than cores; these wait, so more of them help.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    launched = "RANK" in os.environ
    try:
        with stop_signals() as stop:
            if launched:
                dist.init_process_group("gloo")
            rank = int(os.environ.get("RANK", "0"))
            train(args, rank, int(os.environ.get("WORLD_SIZE", "1")), stop)
    except Stopped as stopped:
        return stopped.exit_code
    finally:
        if launched and dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
