"""Two ranks under torchrun, one of them late by a varying time; prints what DDP's own logger says.

One JSON line a rank: for each iteration the exposed communication in ms by the logger, the bytes
of its buckets, and the communication in ns of the iteration that it had at the 12th forward. Then
waits for the file named in DONE.
"""

import faulthandler
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gpuwatch

faulthandler.dump_traceback_later(100, exit=True)

STEPS = 60


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gpuwatch.watch()
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = DistributedDataParallel(torch.nn.Linear(256, 256))
    net._set_ddp_runtime_logging_sample_rate(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.randn(4 * STEPS, 256), batch_size=4)
    exposed_ms: list[float] = []
    spans_ns: list[int] = []
    buckets = ""
    for n, batch in enumerate(loader):
        if rank == n % 2:
            time.sleep(0.002 + 0.002 * (n % 5))
        loss = net(batch).mean()
        if n:
            # The logger has now the times of the iteration before.
            said = net._get_ddp_logging_data()
            ended_ns = int(said["backward_comm_time_end"])
            computed_ns = int(said["backward_compute_time_end"])
            exposed_ms.append((ended_ns - computed_ns) / 1e6)
            spans_ns.append(int(said["backward_comm_time"]))
            buckets = said.get("rebuilt_bucket_sizes", "")
        loss.backward()
        optimizer.step()
    # One write a line: two ranks share the pipe.
    row = {
        "rank": rank,
        "exposed_ms": exposed_ms,
        "buckets": [int(size) for size in buckets.split(",")],
        "span_ns": spans_ns[9],  # as the 11th forward, the one before, has found it
    }
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    done = Path(os.environ["DONE"])
    while not done.exists():
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.exit(0)
