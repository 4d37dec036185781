"""The process that `bench_tui.py` measures: the real app over made-up pictures, in a terminal.

    python benchmarks/tui_child.py RANKS OUT PLAN

PLAN is JSON: `mode` measure, live, wait (for keys) or hang (the diagnosis never returns), and for
measuring `views` {name: keys}, `ticks` of each kind and `rates` (Hz).
The figures are written to OUT. CPU is that of this process; bytes are counted by whoever reads the
terminal, between the monotonic times that are written here.

In mode live nothing is made up in this process: a real store takes the frames that come through the
file descriptor `feed`, each behind its length in four bytes, and the real rules judge it. So its
memory is the monitor's, and CPU is told by thread: drawing, taking frames, diagnosis.
"""

import asyncio
import gc
import itertools
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpuwatch.tui import GpuwatchApp
from gpuwatch.tui.config import Config

_APP = GpuwatchApp  # Textual is loaded when the name is looked up.
IMPORTED_S = time.process_time()

from gpuwatch.diagnosis import Engine  # noqa: E402
from gpuwatch.diagnosis.types import Abstain, RunDiagnosis  # noqa: E402
from gpuwatch.store import Store  # noqa: E402
from gpuwatch.store.views import View  # noqa: E402

if TYPE_CHECKING:
    from tests.tui import fakes

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
    from tests.tui import fakes

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

    def __init__(
        self, app: GpuwatchApp, session: "fakes.FakeSession", all_of_it: list[View]
    ) -> None:
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
        await press(self.app, keys)

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


async def press(app: GpuwatchApp, keys: Sequence[str]) -> None:
    """Press keys, each once what was before it is drawn."""
    from textual.events import Key

    for name in keys:
        app.post_message(Key(name, name if len(name) == 1 else None))
        await asyncio.sleep(0.3)


def hang(_: View) -> Sequence[RunDiagnosis]:
    """Never return."""
    while True:
        time.sleep(3600)


# --- a real store --------------------------------------------------------------------------------


class FedSession:
    """A session whose store takes frames from a file descriptor, in a thread of its own.

    The first round of frames carries the past; `filled` is set when it is in the store.
    """

    def __init__(self, descriptor: int, nodes: int) -> None:
        self.store = Store()
        self.begin = threading.Event()
        self.filled = threading.Event()
        self.cpu_s = 0.0
        self._nodes = nodes
        self._file = os.fdopen(descriptor, "rb")
        threading.Thread(target=self._work, name="feed", daemon=True).start()

    def _work(self) -> None:
        taken = 0
        self.begin.wait()
        while head := self._file.read(4):
            data = self._file.read(int.from_bytes(head))
            self.store.apply(data, time.monotonic())
            taken += 1
            if taken == 1:
                self.store.set_link("live")
            if taken == self._nodes:
                self.filled.set()
            self.cpu_s = time.thread_time()

    @property
    def version(self) -> int:
        """Rises with every change."""
        return self.store.version

    def view(self) -> View:
        """Return the present picture."""
        return self.store.view()

    def send(self, *_: Any) -> str:
        """Nobody is there to answer."""
        return "none"

    def close(self) -> None:
        """Nothing to let go of."""


class Judge:
    """The real rules, and the CPU that their thread has used."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.cpu_s = 0.0

    def __call__(self, view: View) -> Sequence[RunDiagnosis]:
        """Judge every run of the view."""
        found = self.engine(view)
        self.cpu_s = time.thread_time()
        return found


async def live(app: GpuwatchApp, session: FedSession, judge: Judge, plan: dict[str, Any]) -> Any:
    """Let ten minutes have passed, open every view, and watch the first one for a while."""
    before_mb = rss_mb()
    session.begin.set()
    await asyncio.get_running_loop().run_in_executor(None, session.filled.wait)
    gc.collect()
    store_mb = rss_mb() - before_mb
    view = session.view()
    for second in range(600, 0, -1):
        app.watcher._keep(replace(view, at_s=view.at_s - second), -1.0)
    del view
    found: dict[str, Any] = {"views": {}, "store_mb": store_mb}
    for name, keys in plan["views"].items():
        await press(app, keys.split())
        await asyncio.sleep(plan["look_s"])
        found["views"][name] = {"rss_mb": rss_mb()}
    await press(app, ["1"])
    begin_s = time.monotonic()
    before = (time.thread_time(), session.cpu_s, judge.cpu_s, app.drawn)
    await asyncio.sleep(plan["watch_s"])
    after = (time.thread_time(), session.cpu_s, judge.cpu_s, app.drawn)
    took_s = time.monotonic() - begin_s
    names = ("drawing", "frames", "diagnosis", "pictures")
    found |= {
        name: (late - early) / took_s
        for name, early, late in zip(names, before, after, strict=True)
    }
    found["rss_mb"] = rss_mb()
    found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return found


class Counted(GpuwatchApp):
    """Counts the pictures that it has drawn."""

    drawn = 0

    def refresh_scene(self, *, force: bool = False) -> None:
        """Draw what is new."""
        before = self.watcher.scene
        super().refresh_scene(force=force)
        self.drawn += self.watcher.scene is not before


def run_live(ranks: int, out: Path, plan: dict[str, Any]) -> int:
    """Run the app over a real store; its exit code."""
    session = FedSession(plan["feed"], plan["nodes"])
    judge = Judge()
    figures: dict[str, Any] = {"ranks": ranks}
    tasks = []

    async def measure() -> None:
        figures.update(await live(app, session, judge, plan))
        app.exit()

    def painted() -> None:
        tasks.append(asyncio.get_running_loop().create_task(measure()))

    config = Config(theme="dark", ascii=False)
    app = Counted(session, judge, on_first_paint=painted, config=config)
    app.run()
    out.write_text(json.dumps(figures))
    return app.return_code or 0


def main() -> int:
    """Run the app as the plan says; its exit code."""
    ranks, out, plan = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    if plan["mode"] == "live":
        return run_live(ranks, out, plan)
    from tests.tui import fakes
    from tests.tui.sides import FakeShelf

    all_of_it = pictures(ranks)
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
    out.write_text(json.dumps(figures))
    return app.return_code or 0


if __name__ == "__main__":
    sys.exit(main())
