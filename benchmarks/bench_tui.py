"""What drawing costs: CPU and bytes a tick, and CPU to the first picture.

    python benchmarks/bench_tui.py [--ticks N]

Each case runs the real app with Textual's real driver under a pty, in a process of its own, over
a session that shows another picture at every tick (all values changed). The figures are CPU of
that process, so that a busy machine does not spoil them; bytes are what arrives at the terminal.
The budgets are those of the design: 6 % of a core at 4 Hz, 0.4 s of CPU to the first picture,
interpreter and imports included.
"""

import argparse
import fcntl
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

COLUMNS, ROWS = 160, 48
HZ = 4.0
BUDGET_CORE_PERCENT = 6.0
BUDGET_FIRST_PAINT_S = 0.4

CHILD = """
import gc, json, sys, time
begun = time.process_time()
sys.path.insert(0, {root!r})
from gpuwatch.tui import GpuwatchApp
GpuwatchApp  # loads Textual
imported = time.process_time()
from tests.tui import fakes
from gpuwatch.diagnosis.types import Abstain
ranks, ticks, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
pictures = [
    fakes.cluster(max(1, ranks // 8), min(8, ranks), slow_node=0, seed=seed) for seed in range(6)
]
session = fakes.FakeSession(pictures[0])
findings = [fakes.few_workers(), fakes.peer_wait()]
diagnose = fakes.found(*findings, abstained=[Abstain("numa", "sysfs")])
figures = {{}}

def painted():
    figures["first_paint_s"] = time.process_time() - built + imported
    app.call_later(measure)

async def measure():
    import asyncio
    await asyncio.sleep(0.3)
    app.refresh_scene()
    await asyncio.sleep(0.3)
    costs = []
    figures["from_bytes"] = time.monotonic()
    for tick in range(ticks):
        session.show(pictures[tick % len(pictures)])
        start = time.process_time()
        app.refresh_scene()
        await asyncio.sleep({pause})
        costs.append(time.process_time() - start)
    figures["to_bytes"] = time.monotonic()
    figures["tick_s"] = costs
    # The cost of doing nothing for as long, to be taken off.
    idle = []
    for _ in range(10):
        start = time.process_time()
        await asyncio.sleep({pause})
        idle.append(time.process_time() - start)
    figures["idle_s"] = idle
    app.exit()

app = GpuwatchApp(session, diagnose, hz=0, on_first_paint=painted)
built = time.process_time()
app.run()
import resource
figures["rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
with open(out, "w") as file:
    json.dump(figures, file)
"""


def run_case(ranks: int, ticks: int) -> dict[str, float]:
    """Run the app once under a pty and return its figures."""
    here = Path(__file__).resolve().parent.parent
    code = CHILD.format(root=str(here), pause=1.0 / HZ)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        main, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        env = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        env.pop("NO_COLOR", None)
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(ranks), str(ticks), str(out)],
            stdin=child,
            stdout=child,
            stderr=child,
            env=env,
            cwd=here,
            start_new_session=True,
        )
        os.close(child)
        arrived: list[tuple[float, int]] = []
        tail = b""
        while True:
            ready, _, _ = select.select([main], [], [], 60.0)
            if not ready:
                process.kill()
                break
            try:
                data = os.read(main, 65536)
            except OSError:
                break
            if not data:
                break
            arrived.append((time.monotonic(), len(data)))
            tail = (tail + data)[-2000:]
        os.close(main)
        process.wait()
        if not out.exists():
            raise SystemExit(f"the app did not end well:\n{tail.decode(errors='replace')}")
        figures = json.loads(out.read_text())
    size = sum(n for at, n in arrived if figures["from_bytes"] <= at <= figures["to_bytes"])
    tick = statistics.mean(figures["tick_s"]) - statistics.mean(figures["idle_s"])
    return {
        "tick_ms": tick * 1e3,
        "median_ms": statistics.median(figures["tick_s"]) * 1e3,
        "kb": size / 1e3 / len(figures["tick_s"]),
        "core_percent": tick * HZ * 100.0,
        "first_paint_s": figures["first_paint_s"],
        "rss_mb": figures["rss_mb"],
    }


def main() -> int:
    """Print the figures; 1 if one is over its budget by more than a factor of three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ticks", type=int, default=40)
    options = parser.parse_args()
    print(f"{COLUMNS}x{ROWS}, every value changed at every tick, {options.ticks} ticks")
    print(f"{'ranks':>6} {'CPU ms/tick':>12} {'kB/tick':>8} {'core at 4 Hz':>13} ", end="")
    print(f"{'first paint CPU':>16} {'RSS MB':>7}")
    over = False
    for ranks in (1, 64, 1024):
        figures = run_case(ranks, options.ticks)
        over |= figures["core_percent"] > 3 * BUDGET_CORE_PERCENT
        over |= figures["first_paint_s"] > 3 * BUDGET_FIRST_PAINT_S
        print(
            f"{ranks:>6} {figures['tick_ms']:>12.1f} {figures['kb']:>8.1f} "
            f"{figures['core_percent']:>11.1f} % {figures['first_paint_s']:>14.2f} s "
            f"{figures['rss_mb']:>7.0f}"
        )
    print(f"budget {'':>20} {BUDGET_CORE_PERCENT:>13.1f} % {BUDGET_FIRST_PAINT_S:>14.2f} s")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
