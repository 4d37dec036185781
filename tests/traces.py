"""Traces from compact numbers: a job of any size as the lines that a person would write.

    job = Job(ranks=4, steps=60, phases_ms={"data_wait": 80, "forward": 20, "backward": 35})
    job.write(path)           # a trace for `gpuwatch diagnose FILE`
    list(job.frames())        # or the frames that it stands for

A *series* is one number, or a list with a value a step (readings: a value a second) whose last
value holds on. What may differ between ranks is given once for all of them or in a list, one a
rank.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuwatch.recording.plain import PlainTrace
from gpuwatch.recording.shape import parse

Series = float | Sequence[Any] | None
PerRank = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def at(series: Any, place: int) -> Any:
    """The value of a series at a place."""
    if isinstance(series, list | tuple):
        return series[min(place, len(series) - 1)] if series else None
    return series


def of_rank(values: PerRank, rank: int) -> Mapping[str, Any]:
    """What holds for one rank."""
    return values if isinstance(values, Mapping) else values[rank]


@dataclass
class Job:
    """A training job. Every duration is in ms, every scatter a standard deviation as a share.

    `phases_ms` are series over steps. In a job of several ranks `comm` follows from them, as in
    synchronous training: the transfer, and the wait for the slowest rank; unless it is given.
    `step` are series of further fields of a step line; `loader` the loader's fields (None: the job
    has none); `batch_ms` what a batch costs in its worker, as series of (wall, CPU, collating);
    `host`, `gpu` (a rank has one device), `process`, `worker_process` readings as series over
    seconds, `host_fields` further fields of each host line; `spans` (step before which it happens,
    name, ms); `hello` further fields of a hello; `more` further lines, whose `at_s` count from the
    start.
    """

    ranks: int = 1
    steps: int = 60
    phases_ms: PerRank = field(default_factory=lambda: {"forward": 20.0, "backward": 40.0})
    transfer_ms: Series = 1.0
    step: PerRank = field(default_factory=dict)
    loader: PerRank | None = field(default_factory=lambda: {"num_workers": 2})
    batch_ms: Sequence[Series] | None = None
    host: Mapping[str, Series] = field(default_factory=dict)
    host_fields: Mapping[str, Any] = field(default_factory=dict)
    cores: int = 16
    gpu: PerRank | None = None
    process: PerRank | None = None
    worker_process: PerRank | None = None
    worker_state: str = ""
    spans: Sequence[tuple[int, str, float]] = ()
    hello: PerRank = field(default_factory=dict)
    nodes: int = 1
    scatter: float = 0.03
    seed: int = 0
    warmup: int = 1
    simulated: bool = False
    run: str = "job"
    ends: bool = False
    more: Iterable[Mapping[str, Any]] = ()

    def node(self, rank: int) -> str:
        """The node of a rank: the ranks are dealt out in blocks."""
        return f"node{rank * self.nodes // self.ranks}"

    def worker_pids(self, rank: int) -> list[int]:
        """The pids of a rank's workers."""
        count = 0 if self.loader is None else of_rank(self.loader, rank).get("num_workers", 0)
        return [10_000 + 100 * rank + i for i in range(count)]

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines of the trace."""
        yield {
            "type": "trace",
            "run": self.run,
            "world_size": self.ranks,
            "start_s": 1000.0,
            "simulated": self.simulated,
        }
        for rank in range(self.ranks):
            yield self._hello(rank)
        step_lines, ends_s = self._steps()
        yield from step_lines
        seconds = max(1, int(ends_s - 1000.0) + 1)
        for second in range(seconds):
            yield from self._readings(second, 1000.0 + second)
        if self.batch_ms is not None:
            yield from self._worker_lines(step_lines, seconds)
        for line in self.more:
            about = {"at_s": 1000.0 + line["at_s"]} if "at_s" in line else {}
            yield {**line, **about}
        if self.ends:
            for rank in range(self.ranks):
                yield {"type": "bye", "rank": rank, "at_s": ends_s}

    def _hello(self, rank: int) -> dict[str, Any]:
        line: dict[str, Any] = {
            "type": "hello",
            "rank": rank,
            "node": self.node(rank),
            "cores": self.cores,
        }
        if self.loader is not None:
            loader = {"key": "train", "batch_size": 8, **of_rank(self.loader, rank)}
            line["loaders"] = [{**loader, "worker_pids": self.worker_pids(rank)}]
        if self.gpu is not None:
            line |= {"device": "cuda", "device_uuid": f"GPU-{rank}"}
        if self.ranks > 1:
            line["ddp"] = {"gradient_bytes": 100 * 2**20, "backend": "nccl"}
        return {**line, **of_rank(self.hello, rank)}

    def _steps(self) -> tuple[list[dict[str, Any]], float]:
        rng = random.Random(self.seed)
        lines: list[dict[str, Any]] = []
        now_s = 1000.0
        for index in range(self.steps):
            for at_step, name, duration_ms in self.spans:
                if at_step == index:
                    about = {"type": "span", "name": name, "started_s": round(now_s, 6)}
                    lines += (
                        {**about, "rank": rank, "duration_ms": duration_ms}
                        for rank in range(self.ranks)
                    )
                    now_s += duration_ms / 1e3
            rows = [self._phases(rank, index, rng) for rank in range(self.ranks)]
            if self.ranks > 1:
                slowest_ms = max(sum(row.values()) for row in rows)
                moved_ms = self._scattered(at(self.transfer_ms, index), rng)
                for row in rows:
                    if "comm" not in row:
                        row["comm"] = slowest_ms - sum(row.values()) + moved_ms
            for rank, row in enumerate(rows):
                lines.append(self._step(rank, index, row, now_s))
            now_s += max(sum(row.values()) for row in rows) / 1e3
        return lines, now_s

    def _phases(self, rank: int, index: int, rng: random.Random) -> dict[str, float]:
        found = {name: at(v, index) for name, v in of_rank(self.phases_ms, rank).items()}
        return {name: self._scattered(v, rng) for name, v in found.items() if v is not None}

    def _scattered(self, value: Any, rng: random.Random) -> float:
        return float(value or 0.0) * max(0.2, rng.gauss(1.0, self.scatter))

    def _step(
        self, rank: int, index: int, row: Mapping[str, float], started_s: float
    ) -> dict[str, Any]:
        line: dict[str, Any] = {
            "type": "step",
            "rank": rank,
            "started_s": round(started_s, 6),
            "phases_ms": {name: round(value, 4) for name, value in row.items()},
            "samples": 8,
        }
        if index < self.warmup:
            line["tags"] = ["first_batch", "warmup"] if index == 0 else ["warmup"]
        for name, series in of_rank(self.step, rank).items():
            value = at(series, index)
            if value is not None:
                line[name] = value
        return line

    def _readings(self, second: int, at_s: float) -> Iterator[dict[str, Any]]:
        for node in range(self.nodes):
            if self.host or second == 0:
                yield {
                    "type": "host",
                    "node": f"node{node}",
                    "at_s": at_s,
                    "cores": self.cores,
                    "readings": _now(self.host, second),
                    **self.host_fields,
                }
        for rank in range(self.ranks):
            about = {"node": self.node(rank), "at_s": at_s}
            if self.gpu is not None:
                yield {
                    "type": "gpu",
                    **about,
                    "index": rank,
                    "uuid": f"GPU-{rank}",
                    "readings": _now(of_rank(self.gpu, rank), second),
                }
            if self.process is not None:
                yield {
                    "type": "process",
                    **about,
                    "rank": rank,
                    "readings": _now(of_rank(self.process, rank), second),
                }
            if self.worker_process is not None:
                readings = _now(of_rank(self.worker_process, rank), second)
                for pid in self.worker_pids(rank):
                    yield {
                        "type": "process",
                        **about,
                        "rank": rank,
                        "pid": pid,
                        "status": self.worker_state,
                        "readings": readings,
                    }

    def _worker_lines(
        self, steps: Sequence[Mapping[str, Any]], seconds: int
    ) -> Iterator[dict[str, Any]]:
        """Totals once a second, of the batches that the rank's steps have consumed until then."""
        assert self.batch_ms is not None
        for rank in range(self.ranks):
            pids = self.worker_pids(rank)
            ends = [
                line["started_s"] + sum(line["phases_ms"].values()) / 1e3
                for line in steps
                if line["type"] == "step" and line["rank"] == rank
            ]
            totals = [[0.0, 0.0, 0.0, 0.0] for _ in pids]
            made = 0
            for second in range(seconds + 1):
                while made < len(ends) and ends[made] <= 1000.0 + second:
                    total = totals[made % len(pids)]
                    total[0] += 1
                    for i, series in enumerate(self.batch_ms, start=1):
                        total[i] += at(series, made) or 0.0
                    made += 1
                for pid, (batches, wall_ms, cpu_ms, collate_ms) in zip(pids, totals, strict=True):
                    yield {
                        "type": "worker",
                        "rank": rank,
                        "at_s": min(1000.0 + second, max(ends)),
                        "pid": pid,
                        "batches": int(batches),
                        "wall_ms": round(wall_ms, 4),
                        "cpu_ms": round(cpu_ms, 4),
                        "collate_ms": round(collate_ms, 4),
                    }

    def text(self) -> str:
        """The trace as the text of a file."""
        return "".join(json.dumps(line) + "\n" for line in self.lines())

    def write(self, path: Path) -> Path:
        """Write the trace to a file."""
        path.write_text(self.text())
        return path

    def frames(self) -> Iterator[bytes]:
        """The frames that the trace stands for."""
        trace = PlainTrace()
        for number, line in enumerate(self.lines(), start=1):
            trace.add(number, parse(json.dumps(line)))
        return trace.frames()


def _now(series: Mapping[str, Series], second: int) -> dict[str, Any]:
    return {name: at(values, second) for name, values in series.items()}
