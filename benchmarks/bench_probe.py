"""What watching costs the training thread: CPU a step, watched against bare, in paired rounds.

    python benchmarks/bench_probe.py            # one process, then two ranks under DDP

One process alternates rounds with the marks on and off, so that both see the same machine. Every
signal of this version is on, the telemetry thread runs, and nobody else is attached. The figure is
the CPU time of the training thread (the telemetry thread's own is printed apart).
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

ROUNDS = 60
STEPS = 100
SETTLE = 50  # exchanged code runs slower until the interpreter has specialized it again
BUDGET_US = {"one process": 15.0, "two ranks, DDP": 40.0}
OTHERS = "TraceML +204..+275 us, gpuprof +280 us a step (measured elsewhere on such a machine)"


class Items(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(8)


def thread_cpu_ns(thread: threading.Thread) -> int:
    """CPU time of another thread of this process."""
    path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
    return int(path.read_text().split()[0])


def loop(distributed: bool) -> Callable[[int], float]:
    """Return a function that trains so many steps and says the thread's CPU µs a step."""
    net: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    )
    if distributed:
        net = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batches = iter(DataLoader(Items(), batch_size=4))

    def run(steps: int) -> float:
        began = time.thread_time_ns()
        for _ in range(steps):
            loss = net(next(batches)).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return (time.thread_time_ns() - began) / steps / 1e3

    return run


def measure(distributed: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    import gpuwatch
    from gpuwatch import probe

    run = loop(distributed)
    run(100)
    gpuwatch.watch(name="bench")
    watching = probe._probe
    assert watching is not None
    run(100)
    bare, watched = [], []
    telemetry = watching.telemetry._thread
    assert telemetry is not None
    other_ns = thread_cpu_ns(telemetry)
    began_s = time.monotonic()
    for _ in range(ROUNDS):
        watching.marks.remove()
        run(SETTLE)
        bare.append(run(STEPS))
        watching.marks.install()
        run(SETTLE)
        watched.append(run(STEPS))
    other_share = (thread_cpu_ns(telemetry) - other_ns) / 1e9 / (time.monotonic() - began_s)
    extra = [w - b for w, b in zip(watched, bare, strict=True)]
    quartiles = statistics.quantiles(extra, n=4)
    return {
        "bare_us": statistics.median(bare),
        "extra_us": statistics.median(extra),
        "mean_us": statistics.fmean(extra),
        "low_us": quartiles[0],
        "high_us": quartiles[2],
        "telemetry_share": other_share,
        "dropped": watching.telemetry._accountant.dropped,
    }


def child() -> None:
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    result = measure(distributed)
    if not distributed or dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    if distributed:
        dist.destroy_process_group()


def main() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    print(f"{'':16} {'bare':>9} {'watched':>9} {'quartiles':>16} {'budget':>8}  other thread")
    for name, launcher in (("one process", [sys.executable]), ("two ranks, DDP", torchrun)):
        with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as directory:
            done = subprocess.run(
                [*launcher, __file__, "--child"],
                env={**os.environ, "OMP_NUM_THREADS": "1", "GPUWATCH_DIR": directory},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        result = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("{")))
        print(
            f"{name:16} {result['bare_us']:6.0f} us {result['extra_us']:+6.1f} us "
            f"{result['low_us']:+6.1f}..{result['high_us']:+.1f} us "
            f"<={BUDGET_US[name]:.0f} us  {result['telemetry_share']:.2%} of a core, "
            f"{result['dropped']} dropped"
        )
    print(f"baselines: {OTHERS}")


if __name__ == "__main__":
    child() if sys.argv[1:] == ["--child"] else main()
