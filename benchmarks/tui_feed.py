"""The frames of a made-up job, as node processes send them: what `bench_tui.py` feeds a store with.

A first frame a node carries a snapshot of every rank: two minutes of steps on a device's clock, its
hello, checkpoints and its workers' totals. Then a frame a node and second has a step of every rank
and what the sampler says of devices, ranks and two loader workers a rank.
"""

import random
from collections.abc import Iterator
from typing import Any

import msgspec

from gpuwatch.schema import (
    WIRE_VERSION,
    Ddp,
    GpuSample,
    Hello,
    HostSample,
    Ledger,
    Loader,
    NodeFrame,
    PhasesNs,
    ProcessSample,
    RankFrame,
    RankState,
    Reading,
    SensorFrame,
    Span,
    StepRecord,
    Versions,
    WorkerCost,
)

__all__ = ["Job"]

BEFORE_S = 120
LARGE_BEFORE_S = 64
"""Steps that a snapshot carries, one a second; fewer of a large job, enough for a full window."""

_LARGE = 4096

WORKERS = 2
_PROCESS = ("cpu_percent", "rss", "threads", "major_faults_per_s", "read_bytes_per_s", "fds")
_HOST = ("cpu_percent", "memory_used", "memory_total", "load1", "psi_cpu_some", "psi_io_some")
_GPU = (
    *("gpu_util", "sm_active", "sm_occupancy", "tensor_active", "dram_active", "memory_used"),
    *("memory_total", "power", "power_limit", "temperature", "sm_clock", "sm_clock_max"),
    *("pcie_rx", "pcie_tx", "nvlink_rx", "nvlink_tx"),
)


def _readings(names: tuple[str, ...], seed: int) -> dict[str, Reading]:
    return {
        name: Reading(float((seed * 31 + i * 7) % 97), "%", "NVML", 0.2)
        for i, name in enumerate(names)
    }


class Job:
    """One job of `nodes` x `per_node` ranks that began at `begin_s`, a wall-clock time.

    `offset_s` is how far the clock of a node is off: it grows by so much from node to node.
    """

    def __init__(self, nodes: int, per_node: int, begin_s: float, offset_s: float = 0.0) -> None:
        self.nodes = nodes
        self.per_node = per_node
        self.begin_s = begin_s
        self.offset_s = offset_s
        self.before_s = LARGE_BEFORE_S if nodes * per_node > _LARGE else BEFORE_S
        self._encoder = msgspec.msgpack.Encoder()
        self._chance = random.Random(0)

    def frames(self, second: int) -> Iterator[bytes]:
        """Return a frame of every node; that of second 0 carries the past."""
        for node in range(self.nodes):
            at_s = self.begin_s + second + node * self.offset_s
            seq = second + 1
            ranks = range(node * self.per_node, (node + 1) * self.per_node)
            raw = tuple([self._rank(rank, node, second, at_s) for rank in ranks])
            yield self._encoder.encode(
                NodeFrame(
                    WIRE_VERSION, f"node{node}", "a", seq, at_s, raw, sensors=self._sensors(
                        node, second, at_s
                    ), agent_pid=77,
                )
            )  # fmt: skip

    def _raw(self, thing: Any) -> msgspec.Raw:
        return msgspec.Raw(self._encoder.encode(thing))

    def _records(self, rank: int, second: int, at_s: float) -> msgspec.Raw:
        """Return the steps of a rank. No two are alike: what is kept of them is not squeezed more
        than that of a real job would be.
        """
        first = second if second == 0 else self.before_s + second - 1
        number = self.before_s if second == 0 else 1
        found = []
        for i in range(number):
            host = self._phases(620, 0.4, 28, 44 + rank % 16, 8, 3.1, 1.4)
            device = self._phases(400, 0.4, 128, 144 + rank % 16, 28, 3.1, 1.4)
            noise = self._chance.random()
            took_ns = sum(msgspec.structs.astuple(host))
            found.append(
                StepRecord(
                    *(first + i, at_s - number + i, took_ns, host, device, "device", 1, 64, 8192),
                    *(1.28 + noise / 10, 61_200_000_000 + int(1e6 * noise), 0.0, 2, (), "train"),
                    2_000_000 + int(1e6 * noise),
                )
            )
        return self._raw(found)

    def _phases(self, *around_ms: float) -> PhasesNs:
        """Return phases of about so many ms, each by up to 2 % more or less."""
        chance = self._chance.random
        return PhasesNs(*[int(ms * (0.98e6 + 0.04e6 * chance())) for ms in around_ms])

    def _rank(self, rank: int, node: int, second: int, at_s: float) -> msgspec.Raw:
        steps = self.before_s + second
        frame = RankFrame(
            *(WIRE_VERSION, "job", rank, "a", second + 1, at_s, 0),
            state=RankState("training", "backward", 20_000_000, steps, {}, 1.28, 3.0, 90_000),
            ledger=Ledger(steps, steps * 64, 0, steps * 10**8, steps * 10**8, wall_ns=10**12),
            workers=tuple(
                WorkerCost("train", 10**5 + rank * 8 + w, 2 * steps, steps * 10**9, steps * 10**8)
                for w in range(WORKERS)
            ),
            snapshot=second == 0,
            spans=tuple(Span("checkpoint", at_s - 110 + 20 * n, 10**9, 20 * n) for n in range(6))
            if second == 0
            else (),
            hello=self._hello(rank, node) if second == 0 else None,
        )
        values = list(msgspec.structs.astuple(frame))
        values[RankFrame.__struct_fields__.index("records")] = self._records(rank, second, at_s)
        return self._raw(values)

    def _hello(self, rank: int, node: int) -> Hello:
        loader = Loader("train", WORKERS, 2, True, True, 64, worker_pids=(10**5 + rank * 8,))
        return Hello(
            *(f"node{node}", 4000 + rank, self.begin_s - 900, self.nodes * self.per_node),
            local_rank=rank % self.per_node,
            run_name="resnet50-ddp",
            started_s=self.begin_s - 890,
            script="train.py --workers 2",
            device="cuda:0",
            device_name="NVIDIA H100 80GB HBM3",
            device_uuid=f"GPU-{node}-{rank % self.per_node}",
            cores=64,
            versions=Versions("0.1.0", "3.11.7", "2.13.0", "12.6", "2.21.5"),
            loaders=(loader,),
            ddp=Ddp(25.0, parameters=25_000_000, gradient_bytes=10**8, backend="nccl"),
        )

    def _sensors(self, node: int, second: int, at_s: float) -> msgspec.Raw:
        processes = []
        for rank in range(node * self.per_node, (node + 1) * self.per_node):
            pid = 4000 + rank
            readings = _readings(_PROCESS, rank + second)
            processes.append(ProcessSample(pid, pid, "rank", "R", readings))
            processes += [
                ProcessSample(10**5 + rank * 8 + w, pid, "worker", "R", readings)
                for w in range(WORKERS)
            ]
        gpus = tuple(
            GpuSample(
                *(i, f"GPU-{node}-{i}", "NVIDIA H100 80GB HBM3"),
                _readings(_GPU, node + i + second),
                driver="570.86.15",
            )
            for i in range(self.per_node)
        )
        host = HostSample(64, _readings(_HOST, node + second))
        return self._raw(
            SensorFrame(WIRE_VERSION, second + 1, at_s, host, gpus, "", tuple(processes))
        )
