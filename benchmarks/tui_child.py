"""The process that `bench_tui.py` measures: the real app over made-up pictures, in a terminal.

    python benchmarks/tui_child.py RANKS OUT PLAN

PLAN is JSON: `mode` measure, wait (for keys) or hang (the diagnosis never returns), and for
measuring `views` {name: keys}, `ticks` of each kind and `rates` (Hz).
The figures are written to OUT. CPU is that of this process; bytes are counted by whoever reads the
terminal, between the monotonic times that are written here.
"""

import asyncio
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpuwatch.tui import GpuwatchApp
from gpuwatch.tui.config import Config

_APP = GpuwatchApp  # Textual is loaded when the name is looked up.
IMPORTED_S = time.process_time()

from gpuwatch.diagnosis.types import Abstain, RunDiagnosis  # noqa: E402
from gpuwatch.store.views import View  # noqa: E402
from tests.tui import fakes  # noqa: E402
from tests.tui.sides import FakeShelf  # noqa: E402

PAUSE_S = 0.15
"""Between two ticks: long enough for a picture to be painted."""

PICTURES = 4
FEW = 4
"""Ranks that have new numbers in a tick in which little changes."""

WINDOW = 64


def rss_mb() -> float:
    """Return what this process keeps resident, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def pictures(ranks: int) -> list[View]:
    """Return pictures of one job a step apart, every number different, steps in the windows."""
    found = []
    for seed in range(PICTURES):
        picture = fakes.cluster(max(1, ranks // 8), min(8, ranks), slow_node=0, seed=seed)
        run = picture.runs[0]
        # One window for all ranks: a thousand of them would be another program's memory.
        window = fakes.records(run.ranks[0].phases_ms, first=12_416 + seed, number=WINDOW)
        members = tuple(replace(r, window=window, last=window[-1]) for r in run.ranks)
        found.append(replace(picture, runs=(replace(run, ranks=members),)))
    return found


def with_few(picture: View, other: View) -> View:
    """Return a picture in which a few ranks have the numbers of another one."""
    run, changed = picture.runs[0], other.runs[0]
    members = (*changed.ranks[:FEW], *run.ranks[FEW:])
    return replace(picture, runs=(replace(run, ranks=members),))


class Measure:
    """Draws by its own beat, and keeps what that costs."""

    def __init__(self, app: GpuwatchApp, session: fakes.FakeSession, all_of_it: list[View]) -> None:
        self.app = app
        self.session = session
        self.all = all_of_it
        self.few = [all_of_it[0], with_few(all_of_it[0], all_of_it[1])]
        self.begin_s = time.monotonic()

    def fill_past(self) -> None:
        """Let ten minutes have passed: the most that is kept."""
        base = self.all[0].at_s
        for second in range(600, 0, -1):
            past = replace(self.all[second % PICTURES], at_s=base - second)
            self.app.watcher._keep(past, -1.0)

    async def press(self, keys: Sequence[str]) -> None:
        """Press keys, each once what was before it is drawn."""
        from textual.events import Key

        for name in keys:
            self.app.post_message(Key(name, name if len(name) == 1 else None))
            await asyncio.sleep(0.3)

    async def draw(self, shown: Sequence[View], ticks: int, pause_s: float) -> dict[str, Any]:
        """Draw so many pictures in turn; returns CPU (s) by tick, and the time that it took."""
        costs: list[float] = []
        turn = itertools.cycle(shown)
        from_s = time.monotonic()
        for _ in range(ticks):
            picture = next(turn)
            at_s = picture.at_s + time.monotonic() - self.begin_s
            self.session.show(replace(picture, at_s=at_s))
            start_s = time.process_time()
            self.app.refresh_scene()
            await asyncio.sleep(pause_s)
            costs.append(time.process_time() - start_s)
        return {"cpu_s": costs, "from_s": from_s, "to_s": time.monotonic()}

    async def views(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Measure every view of the plan."""
        found = {}
        for name, keys in plan["views"].items():
            await self.press(keys.split())
            found[name] = {}
            for part, shown in (("all", self.all), ("few", self.few)):
                # The first picture of a view fills its caches; that of another kind is all new.
                await self.draw(shown, 2, PAUSE_S)
                found[name][part] = await self.draw(shown, plan["ticks"], PAUSE_S)
            found[name]["rss_mb"] = rss_mb()
        return found

    async def rates(self, plan: dict[str, Any]) -> dict[str, float]:
        """Return the share of a core at every rate of the plan, on the first view."""
        await self.press(["1"])
        found = {}
        for hz in plan["rates"]:
            begin_s, cpu_s = time.monotonic(), time.process_time()
            await self.draw(self.all, max(4, round(3 * hz)), 1.0 / hz)
            took_s = time.monotonic() - begin_s
            found[str(hz)] = (time.process_time() - cpu_s) / took_s
        return found


def hang(_: View) -> Sequence[RunDiagnosis]:
    """Never return."""
    while True:
        time.sleep(3600)


def main() -> int:
    """Run the app as the plan says; its exit code."""
    ranks, out, plan = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    before_mb = rss_mb()
    all_of_it = pictures(ranks)
    gc.collect()
    fakes_mb = rss_mb() - before_mb
    session = fakes.FakeSession(all_of_it[0])
    diagnose: Callable[[View], Sequence[RunDiagnosis]] = fakes.found(
        fakes.few_workers(), fakes.peer_wait(), abstained=[Abstain("numa", "sysfs")]
    )
    if plan["mode"] == "hang":
        diagnose = hang
    shelf = FakeShelf({"before.gpuwatch": all_of_it[0].runs[0]})
    figures: dict[str, Any] = {}
    tasks = []
    made_up_s = time.process_time() - IMPORTED_S

    async def measure() -> None:
        watched = Measure(app, session, all_of_it)
        await asyncio.sleep(0.3)
        watched.fill_past()
        figures["views"] = await watched.views(plan)
        figures["rates"] = await watched.rates(plan)
        app.exit()

    def painted() -> None:
        figures["first_paint_s"] = time.process_time() - made_up_s
        figures["painted_mb"] = rss_mb() - fakes_mb
        if plan["mode"] == "measure":
            # A task of its own: the app's queue must go on taking keys.
            tasks.append(asyncio.get_running_loop().create_task(measure()))

    app = GpuwatchApp(
        session,
        diagnose,
        hz=0,
        on_first_paint=painted,
        config=Config(theme="dark", ascii=False),
        recordings=shelf,
    )
    app.run()
    figures["fakes_mb"] = fakes_mb
    out.write_text(json.dumps(figures))
    return app.return_code or 0


if __name__ == "__main__":
    sys.exit(main())
