"""What the diagnosis costs while a job runs: CPU of each look at 1, 64 and 1,024 ranks.

    python benchmarks/bench_diagnosis.py                       # everything, about two minutes
    python benchmarks/bench_diagnosis.py --ranks 64 --run starved

Between two looks new steps and sensor readings arrive, in nodes of eight ranks, and the picture is
made anew, as in a monitor. A look is a full pass over all rules, once a second; of a thousand ranks
one is made every ten seconds, and in between only whether the job stands is looked at. Runs are
healthy or slow in one way, by the host's clock or by that of a device. `new steps` are those of
each rank between two looks: with 64 of them the whole window is another one.

Figures are of one thread, of the run's looks after the first ones: the median, and the least, which
other work on the machine moves less. Beside them stands what taking the frames and making the
picture costs. At the end, by tracemalloc: what the engine keeps between two looks, and the most
that it takes during one.
"""

import argparse
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from builders import T0_S, Trace, node_frame, rank_frame

from gpuwatch.diagnosis import Engine
from gpuwatch.diagnosis.engine import EAGER, LONGEST_S, RANKS_A_SECOND
from gpuwatch.schema import RankFrame, SensorFrame, Span
from gpuwatch.store import Store, View

BUDGET_MS = {1: 5.0, 64: 5.0, 1024: 150.0}
BUDGET_KEPT_MB = 2.0
RANKS_A_NODE = 8
FIRST_STEPS = 70
SETTLING = 3
"""Looks before the figures: findings open at the second one."""

HEALTHY = {"data_wait": 0.5, "h2d": 1.0, "forward": 30.0, "backward": 60.0, "optimizer": 5.0}
STARVED = {**HEALTHY, "data_wait": 100.0}
LATE = {**HEALTHY, "forward": 80.0}
LOGS = {**HEALTHY, "other": 40.0}


@dataclass(frozen=True)
class Run:
    """One run: the phases of a rank and of the last one, and what else is about it."""

    phases: Mapping[str, float]
    last: Mapping[str, float] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    on_device: bool = False
    spans: bool = False

    def trace(self, ranks: int, steps: int) -> Trace:
        phases = [self.phases] * (ranks - 1) + [self.last or self.phases]
        return Trace(phases, cores=8 * RANKS_A_NODE, steps=steps, **self.more)


RUNS = {
    "healthy": Run(HEALTHY),
    "healthy, GPU": Run(HEALTHY, on_device=True),
    "uneven": Run(HEALTHY, more={"scatter": 0.3}),
    "starved": Run(STARVED, more={"queue_depth": 0.0, "worker_cpu": 10.0}),
    "straggler": Run(HEALTHY, LATE),
    "network": Run(HEALTHY, more={"transfer_ms": 60.0}),
    "logging": Run(LOGS),
    "evaluating": Run(HEALTHY, spans=True),
}
SMALL = ("healthy", "starved")
LARGE = ("healthy", "healthy, GPU", "uneven", "starved", "straggler", "logging")


def told(frame: RankFrame, run: Run) -> RankFrame:
    """A rank's whole frame as it would be of this run."""
    if run.on_device:
        records = tuple(
            msgspec.structs.replace(r, device=r.host, clock="device", device_stall_ns=10**6)
            for r in frame.records
        )
        assert frame.hello is not None
        hello = msgspec.structs.replace(frame.hello, device="cuda:0")
        frame = msgspec.structs.replace(frame, records=records, hello=hello)
    if run.spans:
        spans = tuple(Span("eval", T0_S + at, 500_000_000, step=at) for at in range(5, 70, 10))
        frame = msgspec.structs.replace(frame, spans=spans)
    return frame


@dataclass
class Cost:
    """CPU of the looks of one run in ms, and of taking frames and making pictures before each."""

    looks: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    frames: list[float] = field(default_factory=list)
    views: list[float] = field(default_factory=list)
    kinds: tuple[str, ...] = ()


def cpu_ms(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU of this thread for one call in ms, and what it returns."""
    began = time.thread_time_ns()
    found = work()
    return (time.thread_time_ns() - began) / 1e6, found


def pause_s(ranks: int) -> int:
    """Seconds from one full pass to the next."""
    return round(max(1.0, min(LONGEST_S, ranks / RANKS_A_SECOND)))


def pictures(run: Run, ranks: int, new_steps: int, looks: int, cost: Cost) -> Iterator[View]:
    """Yield what a monitor sees at each full pass, after so many new steps of each rank.

    Steps and readings come once a second, by a clock that goes as fast as they are taken.
    """
    seconds = pause_s(ranks)
    trace = run.trace(ranks, FIRST_STEPS + new_steps * looks)
    frames = [told(frame, run) for frame in trace.frames]
    nodes = [range(first, min(first + RANKS_A_NODE, ranks)) for first in range(0, ranks, 8)]
    now_s = 0.0
    store = Store(clock=lambda: now_s)

    def sensors(node: range) -> SensorFrame:
        pids = {1000 + rank for rank in node}
        processes = tuple(p for p in trace.sensors.processes if p.rank_pid in pids)
        return msgspec.structs.replace(trace.sensors, processes=processes)

    readings = [sensors(node) for node in nodes]

    def apply(seq: int, of_rank: Callable[[int], RankFrame]) -> float:
        data = [
            node_frame(
                seq,
                [of_rank(rank) for rank in node],
                sensors=msgspec.structs.replace(tick, seq=seq),
                node=f"node{number:03}",
            )
            for number, (node, tick) in enumerate(zip(nodes, readings, strict=True))
        ]
        return cpu_ms(lambda: [store.apply(frame, now_s) for frame in data])[0]

    def first(rank: int) -> RankFrame:
        return msgspec.structs.replace(frames[rank], records=frames[rank].records[:FIRST_STEPS])

    apply(1, first)
    at = FIRST_STEPS
    for look in range(looks):
        took_ms = 0.0
        for second in range(seconds):
            end = FIRST_STEPS + new_steps * look + new_steps * (second + 1) // seconds
            seq = 2 + look * seconds + second
            now_s += 1.0

            def new(rank: int, seq: int = seq, start: int = at, end: int = end) -> RankFrame:
                return rank_frame(seq, frames[rank].records[start:end], rank=rank)

            took_ms += apply(seq, new)
            at = end
        cost.frames.append(took_ms)
        took_ms, view = cpu_ms(store.view)
        cost.views.append(took_ms)
        made = [replace(view, at_s=T0_S + now_s)]
        del view
        yield made.pop()  # nobody but who asked for it keeps it


def measure(run: Run, ranks: int, new_steps: int, looks: int) -> Cost:
    """Follow a run with one engine."""
    cost, engine = Cost(), Engine()
    for view in pictures(run, ranks, new_steps, looks, cost):
        took_ms, (diagnosis,) = cpu_ms(lambda view=view: engine(view))  # type: ignore[misc]
        cost.looks.append(took_ms)
        if pause_s(ranks) > 1 and len(cost.looks) > EAGER:
            later = replace(view, at_s=view.at_s + 1.0)
            cost.between.append(cpu_ms(lambda view=later: engine(view))[0])  # type: ignore[misc]
    cost.kinds = tuple(f.kind for f in diagnosis.findings if f.severity != "note")
    return cost


def memory_mb(run: Run, ranks: int, new_steps: int) -> tuple[float, float]:
    """What an engine keeps after a look, and the most that one takes, in MB.

    What the picture makes only when it is asked for, as means of readings, is in the second alone.
    """
    engine = Engine()
    kept = peak = 0
    for view in pictures(run, ranks, new_steps, 4, Cost()):
        tracemalloc.start()
        engine(view)
        del view
        peak = max(peak, tracemalloc.get_traced_memory()[1])
        mine = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.Filter(True, "*/gpuwatch/diagnosis/*")]
        )
        tracemalloc.stop()
        kept = max(kept, sum(statistic.size for statistic in mine.statistics("filename")))
    return kept / 1e6, peak / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="What the diagnosis costs while a job runs.")
    parser.add_argument("--ranks", type=int, choices=sorted(BUDGET_MS))
    parser.add_argument("--run", choices=sorted(RUNS))
    options = parser.parse_args()
    print(
        f"{'ranks':>5}  {'run':12} {'new steps':>9} {'median':>9} {'least':>9} {'budget':>9}   "
        f"{'frames':>9} {'picture':>9}   said"
    )
    sizes = [options.ranks] if options.ranks else sorted(BUDGET_MS)
    for ranks in sizes:
        names = SMALL if ranks == 1 else LARGE if ranks > 64 else tuple(RUNS)
        for name in [options.run] if options.run else names:
            for new_steps in (10,) if ranks > 64 else (5, 64):
                cost = measure(RUNS[name], ranks, new_steps, looks=8 if ranks > 64 else 16)
                looks = cost.looks[SETTLING:]
                print(
                    f"{ranks:5}  {name:12} {new_steps:9} {statistics.median(looks):6.2f} ms "
                    f"{min(looks):6.2f} ms {BUDGET_MS[ranks]:6.0f} ms   "
                    f"{statistics.median(cost.frames[1:]):6.2f} ms "
                    f"{statistics.median(cost.views[1:]):6.2f} ms   "
                    f"{', '.join(cost.kinds) or 'nothing'}",
                    flush=True,
                )
                if cost.between:
                    least = min(cost.between)
                    print(f"{'':5}  ... in the seconds between two passes {least:.2f} ms")
    for ranks in sizes:
        kept, peak = memory_mb(RUNS["starved"], ranks, 10)
        print(
            f"{ranks:5} ranks: {kept:.2f} MB kept between looks (budget {BUDGET_KEPT_MB:.0f}), "
            f"{peak:.2f} MB during one"
        )


if __name__ == "__main__":
    main()
