"""What drawing costs: CPU and bytes a tick of every view, CPU to the first picture, time to a key.

    python benchmarks/bench_tui.py [--ticks N] [--view NAME] [--ranks N]

Each case runs the real app with Textual's real driver under a pty, in a process of its own, over
a session that shows another picture at every tick (all values changed). The figures are CPU of
that process, so that a busy machine does not spoil them; bytes are what arrives at the terminal;
RSS is that of the process without the made-up pictures. The past is full: ten minutes of moments,
from which the curves are drawn.

Keys are timed by the wall from writing one to the pty to the first byte of the answer, the median
and the worst of all, and quitting from `q` to the end of the process.

The budgets are those of the design: 6 % of a core at 4 Hz, 0.4 s of CPU to the first picture,
interpreter and imports included, 50 ms from a key to its picture, 0.5 s to quit, 70 MB.
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
BUDGET_KEY_MS = 50.0
BUDGET_QUIT_S = 0.5
BUDGET_RSS_MB = 70.0

VIEWS = {
    "overview": "",
    "ranks": "2",
    "rank": "2 enter",
    "heat": "h",
    "gpus": "3",
    "gpu": "3 enter",
    "findings": "4",
}
"""View -> the keys that open it."""

KEYS = (b"j", b"2", b"j", b"s", b"\r", b"]", b"\x1b[D", b" ", b"3", b"\r", b"4", b"j", b"m", b"1")

CHILD = """
import gc, json, os, resource, sys, time
begun = time.process_time()
sys.path.insert(0, {root!r})
from gpuwatch.tui import GpuwatchApp
from gpuwatch.tui.config import Config
GpuwatchApp  # loads Textual
imported = time.process_time()
from dataclasses import replace
from tests.tui import fakes
from gpuwatch.diagnosis.types import Abstain
ranks, ticks, out, keys = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4].split()

def rss_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

before_mb = rss_mb()
pictures = [
    fakes.cluster(max(1, ranks // 8), min(8, ranks), slow_node=0, seed=seed) for seed in range(4)
]
gc.collect()
fakes_mb = rss_mb() - before_mb
session = fakes.FakeSession(pictures[0])
findings = [fakes.few_workers(), fakes.peer_wait()]
diagnose = fakes.found(*findings, abstained=[Abstain("numa", "sysfs")])
figures = {{}}

def painted():
    figures["first_paint_s"] = time.process_time() - built + imported
    if ticks:
        # A task of its own: the app's queue must go on taking keys.
        import asyncio
        figures["task"] = asyncio.get_running_loop().create_task(measure())

async def measure():
    import asyncio
    await asyncio.sleep(0.3)
    # Ten minutes that have passed.
    watcher = app.watcher
    now_s = pictures[0].at_s
    for second in range(600, 0, -1):
        watcher._keep(replace(pictures[0], at_s=now_s - second), -1.0)
    from textual.events import Key
    for name in keys:
        app.post_message(Key(name, name if len(name) == 1 else None))
        await asyncio.sleep(0.4)
    app.refresh_scene()
    await asyncio.sleep(0.3)
    costs = []
    figures["from_bytes"] = time.monotonic()
    for tick in range(ticks):
        session.show(replace(pictures[tick % len(pictures)], at_s=now_s + tick * {pause}))
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

config = Config(theme="dark", ascii=False)
app = GpuwatchApp(session, diagnose, hz=0, on_first_paint=painted, config=config)
built = time.process_time()
app.run()
figures["rss_mb"] = rss_mb() - fakes_mb
figures.pop("task", None)
with open(out, "w") as file:
    json.dump(figures, file)
"""


class Pty:
    """A terminal with the app in it."""

    def __init__(self, ranks: int, ticks: int, keys: str, out: Path) -> None:
        here = Path(__file__).resolve().parent.parent
        code = CHILD.format(root=str(here), pause=1.0 / HZ)
        self.main, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        env = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        env.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(ranks), str(ticks), str(out), keys],
            stdin=child,
            stdout=child,
            stderr=child,
            env=env,
            cwd=here,
            start_new_session=True,
        )
        os.close(child)
        self.arrived: list[tuple[float, int]] = []
        self.tail = b""

    def read(self, timeout_s: float) -> bool:
        """Take in what comes within that time; False where nothing came."""
        ready, _, _ = select.select([self.main], [], [], timeout_s)
        if not ready:
            return False
        try:
            data = os.read(self.main, 65536)
        except OSError:
            return False
        self.arrived.append((time.monotonic(), len(data)))
        self.tail = (self.tail + data)[-2000:]
        return bool(data)

    def close(self) -> None:
        """Wait for the process to end; it is killed if it does not."""
        while self.read(60.0 if self.process.poll() is None else 0.0):
            pass
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.main)


def time_keys(ranks: int) -> tuple[float, float, float]:
    """Return the median and the worst time to a key in ms, and the time to quit in s."""
    with tempfile.TemporaryDirectory() as folder:
        terminal = Pty(ranks, 0, "", Path(folder) / "figures.json")
        while terminal.read(2.0) or not terminal.arrived:
            pass
        took = []
        for key in KEYS:
            start = time.monotonic()
            os.write(terminal.main, key)
            if terminal.read(2.0):
                took.append((time.monotonic() - start) * 1e3)
            while terminal.read(0.4):
                pass
        start = time.monotonic()
        os.write(terminal.main, b"q")
        terminal.close()
        return statistics.median(took), max(took), time.monotonic() - start


def run_case(ranks: int, ticks: int, view: str) -> dict[str, float]:
    """Run the app once under a pty and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        terminal = Pty(ranks, ticks, VIEWS[view], out)
        terminal.close()
        arrived = terminal.arrived
        if not out.exists():
            tail = terminal.tail.decode(errors="replace")
            raise SystemExit(f"the app did not end well:\n{tail}")
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
    parser.add_argument("--view", choices=list(VIEWS), action="append")
    parser.add_argument("--ranks", type=int, action="append")
    options = parser.parse_args()
    print(f"{COLUMNS}x{ROWS}, every value changed at every tick, {options.ticks} ticks")
    print(
        f"{'view':<9} {'ranks':>6} {'CPU ms/tick':>12} {'kB/tick':>8} {'core at 4 Hz':>13}", end=""
    )
    print(f" {'first paint CPU':>16} {'RSS MB':>7}")
    over = False
    for view in options.view or VIEWS:
        for ranks in options.ranks or ((1, 64, 1024) if view == "overview" else (64, 1024)):
            figures = run_case(ranks, options.ticks, view)
            over |= figures["core_percent"] > 3 * BUDGET_CORE_PERCENT
            over |= figures["first_paint_s"] > 3 * BUDGET_FIRST_PAINT_S
            print(
                f"{view:<9} {ranks:>6} {figures['tick_ms']:>12.1f} {figures['kb']:>8.1f} "
                f"{figures['core_percent']:>11.1f} % {figures['first_paint_s']:>14.2f} s "
                f"{figures['rss_mb']:>7.0f}",
                flush=True,
            )
    print(
        f"budget {'':>31} {BUDGET_CORE_PERCENT:>11.1f} % {BUDGET_FIRST_PAINT_S:>14.2f} s "
        f"{BUDGET_RSS_MB:>7.0f}"
    )
    for ranks in options.ranks or (64, 1024):
        median_ms, worst_ms, quit_s = time_keys(ranks)
        over |= median_ms > 3 * BUDGET_KEY_MS or quit_s > 3 * BUDGET_QUIT_S
        print(
            f"keys at {ranks:,} ranks: {median_ms:.0f} ms, worst {worst_ms:.0f} ms "
            f"(budget {BUDGET_KEY_MS:.0f}); quit {quit_s:.2f} s (budget {BUDGET_QUIT_S})"
        )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
