"""How soon the right finding is shown: seconds and steps after the loop of the demo has started.

    python benchmarks/bench_first_finding.py [--runs N]

Trains the demo's two ranks for real and evaluates once a second, as the screen does.
"""

import argparse
import os
import statistics
import tempfile
import time
import uuid

from gpuwatch.commands.demo import _SCENARIOS, _end, _training
from gpuwatch.commands.session import LiveSession
from gpuwatch.diagnosis import Engine

BUDGET = "<= 3 s or 20 steps"
OTHERS = "TraceML 0.5..4 s where it is right (measured elsewhere)"
RIGHT = "loader_few_workers"


def measure() -> tuple[float, int]:
    """Return (s, steps) from the first step to the finding, for one run."""
    run = f"bench-{uuid.uuid4().hex[:6]}"
    with (
        tempfile.TemporaryFile() as log,
        _training(_SCENARIOS["slow-loader"], run, log) as training,
    ):
        session = LiveSession()
        engine = Engine()
        first_step_s = None
        try:
            deadline_s = time.monotonic() + 90
            while time.monotonic() < deadline_s:
                view = session.view()
                found = view.run(run)
                if found is None or found.steps == 0:
                    time.sleep(0.02)
                    continue
                now_s = time.monotonic()
                first_step_s = first_step_s or now_s
                diagnosis = engine.evaluate(view, found)
                if any(f.kind == RIGHT for f in diagnosis.findings):
                    return now_s - first_step_s, found.steps
                time.sleep(1.0)
            raise SystemExit("the finding did not come within 90 s")
        finally:
            _end(training, session, run)
            session.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as directory:
        os.environ["GPUWATCH_DIR"] = directory
        results = [measure() for _ in range(runs)]
    for seconds, steps in results:
        print(f"{RIGHT} after {seconds:.1f} s, {steps} steps")
    print(
        f"median {statistics.median(s for s, _ in results):.1f} s, "
        f"{statistics.median(n for _, n in results):.0f} steps; budget {BUDGET}; {OTHERS}"
    )


if __name__ == "__main__":
    main()
