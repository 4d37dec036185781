"""What a tick of the diagnosis costs: CPU of one evaluation at 1, 64 and 1,024 ranks.

    python benchmarks/bench_diagnosis.py

A tick is a full pass over all rules; of a run of a thousand ranks one is made every ten seconds.
The picture is a run in which every rank's loader starves, so that every rule has work to do. Beside
it stands what taking the frames and building the picture costs, in the same run.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from builders import Trace

from gpuwatch.diagnosis import Engine
from gpuwatch.store import Store

BUDGET_MS = {1: 5.0, 64: 5.0, 1024: 150.0}
STARVED = {"data_wait": 100.0, "forward": 30.0, "backward": 60.0, "optimizer": 5.0, "other": 2.0}
REPEATS = 9


def cpu_ms(work: Callable[[], object]) -> float:
    """Median CPU of one call, in ms."""
    taken = []
    for _ in range(REPEATS):
        began = time.process_time_ns()
        work()
        taken.append((time.process_time_ns() - began) / 1e6)
    return statistics.median(taken)


def main() -> None:
    print(f"{'ranks':>6} {'diagnosis':>12} {'budget':>10} {'take frames':>12} {'view':>9}")
    for ranks, budget_ms in BUDGET_MS.items():
        trace = Trace(
            [STARVED] * ranks, queue_depth=0.0, worker_cpu=10.0, num_workers=2, cores=8 * ranks
        )
        data = trace.node_frame
        store = Store()
        take_ms = cpu_ms(lambda data=data: Store().apply(data, 0.0))  # type: ignore[misc]
        store.apply(data, time.monotonic())
        view = store.view()
        engine = Engine()
        (diagnosis,) = engine(view)
        tick_ms = cpu_ms(lambda view=view: Engine()(view))  # type: ignore[misc]
        (diagnosis,) = engine(view)
        assert diagnosis.findings, "the benchmark found nothing to find"
        view_ms = cpu_ms(store.view)
        print(
            f"{ranks:6} {tick_ms:9.2f} ms {budget_ms:7.0f} ms {take_ms:9.2f} ms {view_ms:6.2f} ms"
        )


if __name__ == "__main__":
    main()
