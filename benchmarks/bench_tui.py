"""What drawing costs: CPU and bytes a tick of every view, CPU to the first picture, time to a key.

    python benchmarks/bench_tui.py [--ticks N] [--view NAME]... [--ranks N]... [--large]

Each case runs the real app with Textual's real driver under a pty, in a process of its own
(`tui_child.py`), over a session that shows another picture at every tick. First all numbers change
at every tick, then those of four ranks only. The figures are CPU of that process, so that a busy
machine does not spoil them much; bytes are what arrives at the terminal.

Then the monitor as it is: frames of jobs of several sizes are made here (`tui_feed.py`) and taken
by a real store in the other process, a step a rank and second with what the sampler says, at 4 Hz
and with the real rules. Its memory has nothing made up in it; it is read when every view has been
opened and the past is full (ten minutes of moments, from which the curves are drawn). CPU is told
by thread. A large run is drawn less often where that would take more than its share.

Keys are timed by the wall from writing one to the pty to the first byte of the answer, and quitting
from `q` to the end of the process: as it is, with a diagnosis that never returns, and the real
command while a GPU driver hangs (a stand-in for NVML; it needs a C compiler). The first picture is
timed for the real command too: interpreter, imports and connecting included.

All of them run as an installed program does, from byte code: it is made beforehand, in a folder of
its own.

Each line has its budget beside it, the design's, and whether it holds. The exit code is 1 where
something is over by a factor of three.
"""

import argparse
import contextlib
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
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

COLUMNS, ROWS = 160, 48
HZ = 4.0
RATES = (1, 2, 4, 10)
BUDGET_TICK_MS = 15.0
BUDGET_TICK_KB = 60.0
BUDGET_FEW_KB = 5.0
BUDGET_CORE_PERCENT = 6.0
"""At 4 Hz; at another rate as much more or less."""
BUDGET_FIRST_PAINT_S = 0.4
BUDGET_YARDSTICK_S = 0.25
"""What `yardstick` gave there, a quiet machine with two cores."""

BUDGET_LARGE_PERCENT = 10.0
"""Of a core for drawing more ranks than the design has a budget for."""

BUDGET_KEY_MS = 50.0
BUDGET_QUIT_S = 0.5
BUDGET_RSS_MB = 70.0

VIEWS = {
    "overview": "1",
    "heat": "h",
    "ranks": "2",
    "rank": "2 enter",
    "gpus": "3",
    "gpu": "3 enter",
    "findings": "4",
    "finding": "4 enter",
    "compare": "5 o j enter escape",
}
"""View -> the keys that open it."""

KEYS = (b"j", b"2", b"j", b"s", b"\r", b"]", b"\x1b[D", b" ", b"3", b"\r", b"4", b"j", b"m", b"1")

LIVE = ((4, 8), (8, 8), (128, 8))
LARGE = (1250, 8)
"""Nodes and ranks a node of the jobs that a real store is fed with; the large one, which alone
takes minutes, where it is asked for."""

BUDGETED_RANKS = 1024
RANKS_A_SECOND = 1250
"""A larger job than this has steps less often than once a second."""

LOOK_S = 0.3
WATCH_S = 8.0
FIRST_PAINTS = 3
_START_S = 60.0


class Pty:
    """A terminal with a process in it."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        self.main, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        told = {**(os.environ if env is None else env)}
        told |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        told.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            list(argv),
            stdin=child,
            stdout=child,
            stderr=child,
            env=told,
            cwd=ROOT,
            start_new_session=True,
            pass_fds=keep,
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
        self.tail = (self.tail + data)[-65536:]
        return bool(data)

    def type(self, key: bytes) -> None:
        """Type a key."""
        os.write(self.main, key)

    def wait_for(self, words: str) -> None:
        """Read until the words have come.

        Raises:
            SystemExit: they did not, within `_START_S`.
        """
        end_s = time.monotonic() + _START_S
        while words.encode() not in self.tail:
            if self.process.poll() is not None or time.monotonic() > end_s:
                tail = self.tail[-2000:].decode(errors="replace")
                raise SystemExit(f"{words!r} did not come:\n{tail}")
            self.read(0.2)

    def settle(self) -> None:
        """Read until nothing comes for a moment."""
        while self.read(0.3):
            pass

    def close(self, patience_s: float = 60.0) -> None:
        """Wait for the process to end; it is killed if it does not."""
        while self.read(patience_s if self.process.poll() is None else 0.0):
            pass
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.main)

    def quit(self) -> float:
        """Press `q`, and return the seconds until the process has ended."""
        start_s = time.monotonic()
        self.type(b"q")
        while self.process.poll() is None and time.monotonic() < start_s + 10.0:
            self.read(0.005)
        took_s = time.monotonic() - start_s
        self.close()
        return took_s


def child(ranks: int, out: Path, **plan: Any) -> Pty:
    """Open the app over so many made-up ranks."""
    script = str(Path(__file__).with_name("tui_child.py"))
    return Pty([sys.executable, script, str(ranks), str(out), json.dumps(plan)])


def measure(ranks: int, ticks: int, views: Sequence[str], rates: Sequence[int]) -> dict[str, Any]:
    """Run the app once through these views, and return its figures with the bytes that came.

    Raises:
        SystemExit: it did not end well.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        plan = {"views": {name: VIEWS[name] for name in views}, "ticks": ticks}
        terminal = child(ranks, out, mode="measure", rates=rates, **plan)
        terminal.close()
        if not out.exists():
            tail = terminal.tail[-2000:].decode(errors="replace")
            raise SystemExit(f"the app did not end well:\n{tail}")
        figures: dict[str, Any] = json.loads(out.read_text())
    for found in figures["views"].values():
        for part in ("all", "few"):
            drawn = found[part]
            size = sum(n for at, n in terminal.arrived if drawn["from_s"] <= at <= drawn["to_s"])
            drawn["kb"] = size / 1e3 / len(drawn["cpu_s"])
            drawn["ms"] = 1e3 * statistics.mean(drawn["cpu_s"])
    return figures


def beat_of(ranks: int) -> float:
    """Return how often a rank has a step, in s: taking frames must leave room for the rest."""
    return max(1.0, ranks / RANKS_A_SECOND)


def feed(descriptor: int, nodes: int, per_node: int) -> None:
    """Write the frames of a job, a round a beat, until nobody reads them."""
    sys.path.insert(0, str(ROOT))
    from tui_feed import Job

    job = Job(nodes, per_node, time.time())
    beat_s = beat_of(nodes * per_node)
    begin_s, second = time.monotonic(), 0
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, "wb") as pipe:
        while True:
            for data in job.frames(second):
                pipe.write(len(data).to_bytes(4) + data)
            pipe.flush()
            second += 1
            time.sleep(max(0.0, begin_s + second * beat_s - time.monotonic()))


def measure_live(nodes: int, per_node: int) -> dict[str, Any]:
    """Run the app over a real store that is fed with a job of that size; its figures.

    Raises:
        SystemExit: it did not end well.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        mine, theirs = os.pipe()
        plan = {"nodes": nodes, "views": VIEWS, "look_s": LOOK_S, "watch_s": WATCH_S}
        script = str(Path(__file__).with_name("tui_child.py"))
        told = json.dumps({"mode": "live", "feed": mine, **plan})
        argv = [sys.executable, script, str(nodes * per_node), str(out), told]
        terminal = Pty(argv, keep=(mine,))
        os.close(mine)
        threading.Thread(target=feed, args=(theirs, nodes, per_node), daemon=True).start()
        terminal.close(200.0)
        if not out.exists():
            tail = terminal.tail[-2000:].decode(errors="replace")
            raise SystemExit(f"the app did not end well:\n{tail}")
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures


def print_live(report: "Report", nodes: int, per_node: int) -> None:
    """Measure a job of that size and print a line for what it takes and one for its memory."""
    figures = measure_live(nodes, per_node)
    ranks = nodes * per_node
    budgeted = ranks <= BUDGETED_RANKS
    share = 100.0 * figures["drawing"]
    most = BUDGET_CORE_PERCENT if budgeted else BUDGET_LARGE_PERCENT
    report.line(
        f"live, {nodes:,} x {per_node} ranks, a step in {beat_of(ranks):g} s: drawing "
        f"{share:.1f} % of a core at {figures['pictures']:.1f} pictures a second (<= {most:g} %), "
        "taking frames "
        f"{100.0 * figures['frames']:.1f} %, diagnosis {100.0 * figures['diagnosis']:.1f} %",
        (share, most),
    )
    words = (
        f"RSS at {ranks:,} ranks, store and rules included: {figures['rss_mb']:.0f} MB, at most "
        f"{figures['peak_mb']:.0f}; of them the store {figures['store_mb']:.0f}, "
        f"{1e3 * figures['store_mb'] / ranks:.0f} kB a rank"
    )
    if budgeted:
        report.line(f"{words} (<= {BUDGET_RSS_MB:g})", (figures["rss_mb"], BUDGET_RSS_MB))
    else:
        report.line(f"{words} (no budget)")


def warm(folder: str) -> None:
    """Have byte code made in that folder for what runs here."""
    os.environ["PYTHONPYCACHEPREFIX"] = folder
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    code = "import tui_child, gpuwatch.commands.cli, gpuwatch.commands.monitor, tests.tui.sides"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"},
    )
    with own_directory() as environment:
        terminal = Pty(gpuwatch(), environment)
        terminal.wait_for("◉")
        terminal.settle()
        terminal.quit()


def time_keys(ranks: int) -> tuple[list[float], float]:
    """Return the times to a key in ms, and the time to quit in s."""
    with tempfile.TemporaryDirectory() as folder:
        terminal = child(ranks, Path(folder) / "figures.json", mode="wait")
        terminal.wait_for("◉")
        terminal.settle()
        took = []
        for key in KEYS:
            start_s = time.monotonic()
            terminal.type(key)
            if terminal.read(2.0):
                took.append((time.monotonic() - start_s) * 1e3)
            while terminal.read(0.2):
                pass
        return took, terminal.quit()


def first_paints(ranks: int) -> list[float]:
    """Return the CPU to the first picture over so many ranks, in s, of several starts."""
    found = []
    for _ in range(FIRST_PAINTS):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "figures.json"
            terminal = child(ranks, out, mode="wait")
            terminal.wait_for("◉")
            terminal.settle()
            terminal.quit()
            found.append(float(json.loads(out.read_text())["first_paint_s"]))
    return found


def quit_with_a_hanging_diagnosis() -> float:
    """Return the seconds from `q` to the end while the diagnosis never returns."""
    with tempfile.TemporaryDirectory() as folder:
        terminal = child(64, Path(folder) / "figures.json", mode="hang")
        terminal.wait_for("◉")
        terminal.settle()
        return terminal.quit()


# --- the real command ----------------------------------------------------------------------------


@contextlib.contextmanager
def own_directory() -> Iterator[dict[str, str]]:
    """Give an environment with a run directory of its own; its node process ends with it."""
    sys.path.insert(0, str(ROOT / "tests"))
    import support

    with support.run_directory() as directory:
        yield support.environment(directory)


def gpuwatch() -> list[str]:
    """Return how the command is called."""
    return [sys.executable, "-P", "-m", "gpuwatch"]


def cpu_s(pid: int) -> float:
    """Return the CPU that a process has used so far, in s (by ticks of 10 ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def first_paints_of_the_command() -> list[float]:
    """Return the CPU of `gpuwatch` up to its first picture, in s, of several starts."""
    found = []
    with own_directory() as environment:
        for _ in range(FIRST_PAINTS + 1):
            terminal = Pty(gpuwatch(), environment)
            while "◉".encode() not in terminal.tail:
                terminal.read(0.002)
            found.append(cpu_s(terminal.process.pid))
            terminal.settle()
            terminal.quit()
    return found[1:]  # the first one has started the node process


def quit_with_a_hanging_driver() -> float | None:
    """Return the seconds from `q` to the end of `gpuwatch` while a GPU driver hangs.

    None where there is no C compiler for the stand-in.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from nvml.stub import GPM, H100, Stub, compiler, library

    if compiler() is None:
        return None
    with tempfile.TemporaryDirectory() as folder, own_directory() as environment:
        stub = Stub(library(), Path(folder))
        stub.write("count 2", *H100, *GPM, "delay * nvmlDeviceGetUtilizationRates 60000000")
        terminal = Pty(gpuwatch(), stub.env(environment))
        terminal.wait_for("◉")
        terminal.type(b"3")
        terminal.wait_for("not answering")
        return terminal.quit()


def yardstick() -> float:
    """Return the CPU that loading Textual takes, in s: what the machine is worth just now."""
    code = "import time, textual.app; print(time.process_time())"
    done = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    return statistics.median(float(one.stdout) for one in done)


# --- printing ------------------------------------------------------------------------------------


class Report:
    """Prints figures beside their budgets and remembers how far over they are."""

    def __init__(self) -> None:
        self.worst = 0.0

    def mark(self, *pairs: tuple[float, float]) -> str:
        """Return what to print behind figures (figure, budget): whether all of them hold."""
        if not pairs:
            return ""
        most = max(figure / budget for figure, budget in pairs)
        self.worst = max(self.worst, most)
        return "  over" if most > 1.0 else "  holds"

    def line(self, words: str, *pairs: tuple[float, float]) -> None:
        """Print a line."""
        print(f"{words}{self.mark(*pairs)}", flush=True)


def print_views(report: Report, ranks: int, figures: dict[str, Any]) -> None:
    """Print a line a view."""
    for name, found in figures["views"].items():
        every, few = found["all"], found["few"]
        core = every["ms"] * HZ / 10.0
        report.line(
            f"{name:<9} {ranks:>6,} {every['ms']:>9.1f} {every['kb']:>9.1f} {core:>8.1f} % "
            f"{few['ms']:>12.1f} {few['kb']:>9.1f}",
            (every["ms"], BUDGET_TICK_MS),
            (every["kb"], BUDGET_TICK_KB),
            (core, BUDGET_CORE_PERCENT),
            (few["kb"], BUDGET_FEW_KB),
        )


def main() -> int:
    """Print the figures; 1 if one is over its budget by more than a factor of three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ticks", type=int, default=6)
    parser.add_argument("--view", choices=list(VIEWS), action="append")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--large", action="store_true", help="10,000 ranks too, some minutes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        warm(folder)
        return run(options)


def run(options: argparse.Namespace) -> int:
    """Print all figures; 1 if one is over its budget by more than a factor of three."""
    report = Report()
    sizes = options.ranks or [64, 1024]
    print(f"{COLUMNS}x{ROWS}; all numbers change, {options.ticks} ticks; then those of four ranks")
    print(
        f"Python and Textual alone: {yardstick():.2f} s of CPU to load, {BUDGET_YARDSTICK_S:g} on "
        "the machine that the budgets were set on; all CPU below is so much more or less"
    )
    print(f"{'':<9} {'':>6} {'--- all numbers change ----------':>30}  --- few change ------")
    print(f"{'view':<9} {'ranks':>6} {'CPU ms':>9} {'kB':>9} {'at 4 Hz':>10}", end=" ")
    print(f"{'CPU ms':>12} {'kB':>9}")
    print(
        f"{'budget':<9} {'':>6} {BUDGET_TICK_MS:>9g} {BUDGET_TICK_KB:>9g} "
        f"{BUDGET_CORE_PERCENT:>8g} % {'':>12} {BUDGET_FEW_KB:>9g}"
    )
    measured = {}
    for ranks in sizes:
        views = options.view or list(VIEWS)
        measured[ranks] = measure(ranks, options.ticks, views, RATES)
        print_views(report, ranks, measured[ranks])
    for ranks, figures in measured.items():
        shares = {int(hz): 100.0 * share for hz, share in figures["rates"].items()}
        words = "   ".join(
            f"{hz} Hz {share:.1f} % (<= {BUDGET_CORE_PERCENT * hz / HZ:g})"
            for hz, share in shares.items()
        )
        pairs = [(share, BUDGET_CORE_PERCENT * hz / HZ) for hz, share in shares.items()]
        report.line(f"of a core at {ranks:,} ranks, overview: {words}", *pairs)
    for nodes, per_node in (*LIVE, *([LARGE] if options.large else ())):
        print_live(report, nodes, per_node)
    for ranks in sizes:
        found = first_paints(ranks)
        report.line(
            f"first picture at {ranks:,} ranks: {statistics.median(found):.2f} s of CPU, worst "
            f"{max(found):.2f} (<= {BUDGET_FIRST_PAINT_S:g})",
            (statistics.median(found), BUDGET_FIRST_PAINT_S),
        )
    found = first_paints_of_the_command()
    report.line(
        f"first picture of `gpuwatch`: {statistics.median(found):.2f} s of CPU, worst "
        f"{max(found):.2f} (<= {BUDGET_FIRST_PAINT_S:g})",
        (statistics.median(found), BUDGET_FIRST_PAINT_S),
    )
    for ranks in sizes:
        took_ms, quit_s = time_keys(ranks)
        median_ms = statistics.median(took_ms)
        report.line(
            f"key to redraw at {ranks:,} ranks: {median_ms:.0f} ms, worst {max(took_ms):.0f} "
            f"(<= {BUDGET_KEY_MS:g}); quit {quit_s:.2f} s (<= {BUDGET_QUIT_S:g})",
            (median_ms, BUDGET_KEY_MS),
            (quit_s, BUDGET_QUIT_S),
        )
    quits = {"diagnosis": quit_with_a_hanging_diagnosis(), "driver": quit_with_a_hanging_driver()}
    for what, took_s in quits.items():
        if took_s is None:
            print(f"quit while a {what} hangs: n/a, no C compiler for the stand-in")
        else:
            report.line(
                f"quit while a {what} hangs: {took_s:.2f} s (<= {BUDGET_QUIT_S:g})",
                (took_s, BUDGET_QUIT_S),
            )
    return 1 if report.worst > 3.0 else 0


if __name__ == "__main__":
    sys.exit(main())
