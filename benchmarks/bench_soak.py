"""What stays when the screen runs on: growth of its memory, ticks it missed, CPU it used.

    python benchmarks/bench_soak.py [--minutes N] [--ranks N]     # `make soak`: ten minutes

The real app draws 1,024 made-up ranks at 4 Hz with Textual's real driver under a pty, in a process
of its own. Every picture is another one, findings change their cost, and a key every two seconds
goes through views, pages and sorts, as a person would. From outside the process is read its memory
and its CPU, once a second; from inside comes when each tick was.

The source makes no garbage of its own to speak of: four pictures are built before the app starts
and handed out in turn, each as a shallow copy with another time. The past is full from the start
(ten minutes of moments, the most that is kept), so that what grows is not the past. Every view has
been opened before the first minute is over.

Growth is the median of the last ten seconds less that around the end of the first minute. A tick
is missed where the screen was due and was not drawn. Budgets: 5 MB, 1 % of the ticks, and 6 % of a
core, the design's for drawing; here it pays for the keys too.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from bench_tui import COLUMNS, HZ, ROOT, ROWS, Pty

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import RunDiagnosis
    from gpuwatch.store import View

BUDGET_GROWTH_MB = 5.0
BUDGET_MISSED_PERCENT = 1.0
BUDGET_CORE_PERCENT = 6.0

WARM_S = 60.0
"""Until then views are opened for the first time, caches fill and the past is made."""

_AROUND_S = 10.0
_KEY_S = 2.0
_START_S = 60.0
_END_S = 10.0

KEYS = (
    *(b"j", b"m", b"2", b"j", b"s", b"\r", b"]", b"\x1b", b"3", b"j", b"s", b"\r", b"\x1b"),
    *(b"4", b"s", b"\r", b"\x1b", b"h", b"j", b"\x1b", b"e", b"\x1b", b"?", b"\x1b", b"1"),
)
"""One round through what there is; it takes less than `WARM_S`."""


# --- the process that is measured --------------------------------------------------------------


def watch(ranks: int, out: Path) -> None:
    """Run the app until `q`, and write when its ticks were (s, monotonic) to a file."""
    sys.path.insert(0, str(ROOT))
    from gpuwatch.diagnosis.types import Abstain, RunDiagnosis
    from gpuwatch.tui import GpuwatchApp
    from gpuwatch.tui.config import Config
    from tests.tui import fakes

    pictures = [
        fakes.cluster(max(1, ranks // 8), min(8, ranks), slow_node=0, seed=seed)
        for seed in range(4)
    ]
    session = fakes.MovingSession(pictures, 1.0 / HZ)
    ticks = array("d")

    def diagnose(view: "View") -> "Sequence[RunDiagnosis]":
        # A cost that swings by half is told in the event log, as often as it tells anything.
        cost_ms = 60.0 if int(view.at_s / 15.0) % 2 else 90.0
        found = (fakes.few_workers(cost_ms=cost_ms), fakes.peer_wait())
        abstained = (Abstain("numa", "sysfs"),)
        return [RunDiagnosis(run.run, found, abstained) for run in view.runs]

    class Soaked(GpuwatchApp):
        def refresh_scene(self, *, force: bool = False) -> None:
            # Only the timer draws unforced.
            if not force:
                ticks.append(time.monotonic())
            super().refresh_scene(force=force)

    config = Config(theme="dark", ascii=False)
    app = Soaked(session, diagnose, hz=HZ, config=config)
    # In one go and before the first tick: moments must not be out of order.
    for second in range(600, 0, -1):
        past = replace(pictures[second % 4], at_s=pictures[0].at_s - second)
        app.watcher._keep(past, -1.0)
    app.run()
    out.write_text(json.dumps(list(ticks)))


# --- measuring ---------------------------------------------------------------------------------


class Soak(Pty):
    """A terminal with that process in it."""

    def __init__(self, ranks: int, out: Path) -> None:
        super().__init__([sys.executable, __file__, "--ranks", str(ranks), "--child", str(out)])

    def drain(self, until_s: float) -> None:
        """Take in what comes until then (monotonic), and keep none of it."""
        while (left_s := until_s - time.monotonic()) > 0:
            if not self.read(left_s) and self.process.poll() is not None:
                return
            self.arrived.clear()

    def close(self, patience_s: float = _END_S) -> None:
        """Wait for the process to end, `patience_s` at most; it is killed if it does not."""
        deadline_s = time.monotonic() + patience_s
        while self.process.poll() is None and time.monotonic() < deadline_s:
            self.drain(time.monotonic() + 0.1)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.main)


@dataclass(frozen=True, slots=True)
class Sample:
    """The process at one time: s (monotonic), MB, s of CPU since its start."""

    at_s: float
    rss_mb: float
    cpu_s: float


def soak(ranks: int, seconds: float) -> tuple[list[Sample], list[float]]:
    """Let the app run for so long and return its samples and its ticks.

    Raises:
        SystemExit: the app did not start, or ended before it was told to.
    """
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ticks.json"
        terminal = Soak(ranks, out)
        try:
            begin_s = time.monotonic()
            while not terminal.arrived and time.monotonic() < begin_s + _START_S:
                terminal.read(0.5)
            process = psutil.Process(terminal.process.pid)
            begin_s = time.monotonic()
            for second in range(1, round(seconds) + 1):
                if second % _KEY_S == 0:
                    terminal.type(KEYS[int(second / _KEY_S) % len(KEYS)])
                terminal.drain(begin_s + second)
                if terminal.process.poll() is not None:
                    break
                cpu = process.cpu_times()
                rss_mb = process.memory_info().rss / 1e6
                samples.append(Sample(time.monotonic(), rss_mb, cpu.user + cpu.system))
                if second % 60 == 0:
                    print(f"  {second // 60:>3} min  {rss_mb:6.1f} MB", flush=True)
            terminal.type(b"q")
        finally:
            terminal.close()
        if not out.exists():
            tail = terminal.tail.decode(errors="replace")
            raise SystemExit(f"the app did not end well:\n{tail}")
        return samples, json.loads(out.read_text())


@dataclass(frozen=True, slots=True)
class Figures:
    """What came of it, after the first minute."""

    growth_mb: float
    missed_percent: float
    core_percent: float
    longest_s: float
    """Between two ticks."""

    @property
    def over(self) -> bool:
        """Whether a budget is exceeded."""
        return (
            self.growth_mb >= BUDGET_GROWTH_MB
            or self.missed_percent > BUDGET_MISSED_PERCENT
            or self.core_percent > BUDGET_CORE_PERCENT
        )


def figures(samples: Sequence[Sample], ticks: Sequence[float], begin_s: float) -> Figures:
    """Return what the samples and ticks say of the time from `begin_s` (monotonic) on.

    A tick is due every 1 / HZ s from one to the next; how many fewer there were is what was missed.
    """
    end_s = samples[-1].at_s
    before = [s.rss_mb for s in samples if abs(s.at_s - begin_s) <= _AROUND_S / 2]
    after = [s.rss_mb for s in samples if s.at_s > end_s - _AROUND_S]
    first = min(samples, key=lambda s: abs(s.at_s - begin_s))
    seen = [at_s for at_s in ticks if begin_s <= at_s <= end_s]
    due = (end_s - begin_s) * HZ
    edges = [begin_s, *seen, end_s]
    return Figures(
        growth_mb=statistics.median(after) - statistics.median(before),
        missed_percent=100.0 * max(0.0, due - len(seen)) / due,
        core_percent=100.0 * (samples[-1].cpu_s - first.cpu_s) / (end_s - first.at_s),
        longest_s=max(later - at_s for at_s, later in itertools.pairwise(edges)),
    )


def main() -> int:
    """Print the figures beside their budgets; 1 if one is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        watch(options.ranks, options.child)
        return 0
    seconds = options.minutes * 60.0
    if seconds < WARM_S + 2 * _AROUND_S:
        parser.error("growth counts from the end of the first minute on: at least 1.5 minutes")
    print(f"{options.ranks:,} ranks, {COLUMNS}x{ROWS}, {HZ:g} Hz, {options.minutes:g} minutes")
    samples, ticks = soak(options.ranks, seconds)
    if samples[-1].at_s < samples[0].at_s + seconds - 2.0:
        raise SystemExit("the app ended before it was told to")
    found = figures(samples, ticks, samples[0].at_s - 1.0 + WARM_S)
    print(
        f"memory grew by {found.growth_mb:+.1f} MB after the first minute "
        f"(budget < {BUDGET_GROWTH_MB:g})\n"
        f"ticks missed   {found.missed_percent:.2f} % (budget <= {BUDGET_MISSED_PERCENT:g}), "
        f"longest pause {found.longest_s:.2f} s\n"
        f"CPU            {found.core_percent:.1f} % of a core (budget <= {BUDGET_CORE_PERCENT:g})"
    )
    return 1 if found.over else 0


if __name__ == "__main__":
    sys.exit(main())
