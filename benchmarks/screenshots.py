"""Real screenshots for the documents, drawn from recordings by the app itself.

    python benchmarks/screenshots.py [--out DIR]     # what `make screenshots` does
    python benchmarks/screenshots.py --record        # make the recordings anew, then draw
    python benchmarks/screenshots.py --cluster FILE  # the made-up job, for `gpuwatch replay`

Each picture is Textual's own export of the running app, fed with a recording second by second as a
monitor would have seen it, so that curves, findings and their numbers are what a person gets. The
same recordings give the same bytes: clock, time zone, theme, terminal, settings and title are
fixed, and every diagnosis is waited for. A difference in git is a difference on the screen.

`demo` is a recording of this repository's own demo, in which the change that its finding names is
set while it runs; `changed` is its end. `slow-loader` and `more-workers` are the same training
without and with that change from its start; `checked` is the one after the other, as a monitor sees
them that stays open, with the keys pressed in between that freeze the finding. `cluster` is no
recording: 32 ranks with GPUs on four nodes, made from the numbers below, and marked SIMULATED in
every picture.
"""

import argparse
import asyncio
import contextlib
import gzip
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

if TYPE_CHECKING:
    from textual.pilot import Pilot

    from gpuwatch.diagnosis import RunDiagnosis
    from gpuwatch.store import View
    from gpuwatch.tui import GpuwatchApp

__all__ = [
    "DRAWN_AT_S",
    "FOLDER",
    "LIVE",
    "SECONDS",
    "SHOTS",
    "SIZES",
    "Film",
    "Replayed",
    "Shot",
    "Still",
    "cluster",
    "draw",
    "drawn",
    "filmed",
    "fixed_environment",
    "hinted_workers",
    "opened",
    "still",
    "watch",
    "watching",
]

FOLDER = ROOT / "docs" / "images"
SIZES = ((120, 32), (160, 45))
"""Columns and lines of the terminals."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture: of which source, and the keys that open it."""

    source: str
    keys: str = ""


SHOTS: Mapping[str, Shot] = {
    "overview": Shot("demo"),
    "findings": Shot("demo", "4"),
    "finding": Shot("demo", "enter"),
    "rank": Shot("demo", "2 enter"),
    "change": Shot("demo", "4 enter a"),
    "changed": Shot("changed", "4 G enter"),
    "fixed": Shot("changed"),
    "checked": Shot("checked", "5"),
    "cluster": Shot("cluster"),
    "ranks": Shot("cluster", "2"),
    "gpus": Shot("cluster", "3 G"),
    "gpu": Shot("cluster", "3 G enter"),
    "heat": Shot("cluster", "h"),
}
"""The pictures by the beginning of their files' names."""

DRAWN_AT_S = {
    "demo": 40.0,
    "changed": 70.0,
    "slow-loader": 40.0,
    "checked": 65.0,
    "cluster": 75.0,
}
"""Where in its recording each source is drawn, in seconds."""

PRESSED = {"checked": (40.0, "4 v 1")}
"""Keys that are pressed on the way, at which second of the source."""

_RECORDINGS = {"changed": ("demo",), "checked": ("slow-loader", "more-workers")}
"""Sources that are recordings of another name, or several one after the other."""

SECONDS = {"demo": 70.0, "slow-loader": 42.0, "more-workers": 16.0}
"""How long is recorded after the first step."""

LIVE = ("demo", "changed")
"""Sources that are drawn as their monitor showed them, not as a replay does."""

CHANGED_S = 42.0
"""When the change is set in the demo, after its first step."""

ENVIRONMENT = {
    "TZ": "UTC",
    "TERM": "xterm-256color",
    "COLORTERM": "truecolor",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
}
"""What a picture would otherwise take from the person's terminal."""

FONTS = "Fira Code, DejaVu Sans Mono, Menlo, Consolas, monospace"

_DIAGNOSIS_S = 20.0
_RANKS, _NODES = 32, 4
_STEPS = 360
"""The made-up job: how many ranks, nodes and steps."""

_LATEST = 27
_BATCH_MS, _LATE_BATCH_MS = 180.0, 800.0
"""Its latest rank, and what a batch costs in a worker, elsewhere and on the late node."""


# --- drawing ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Film:
    """A recording up to the drawn moment: a picture a second, and what was found in each.

    `pictures` are (s since its first frame, picture), `found` the diagnoses by the wall clock of
    their picture.
    """

    duration_s: float
    pictures: "Sequence[tuple[float, View]]"
    found: "Mapping[float, Sequence[RunDiagnosis]]"
    pressed: tuple[float, str] = (math.inf, "")


def filmed(source: str) -> Film:
    """Play a source up to the moment that is drawn, judged once a second as a monitor does.

    Raises:
        SystemExit: there is no recording.
        TargetError: it cannot be read.
    """
    from gpuwatch.diagnosis import Engine
    from gpuwatch.recording import Player

    engine = Engine()
    with opened(source) as recording:
        player = Player(recording)
        pictures = [(player.position_s, view) for view in player.ticks(1.0, DRAWN_AT_S[source])]
        found = {view.at_s: engine(view) for _, view in pictures}
        return Film(recording.duration_s, pictures, found, PRESSED.get(source, (math.inf, "")))


class Still:
    """A `Session` of a training that runs, as it stood at the moments of a film."""

    def __init__(self, film: Film) -> None:
        self.film = film
        self.version = 1
        self.place = 0

    @property
    def position(self) -> float:
        """Seconds from the beginning to the moment that is shown."""
        return self.film.pictures[self.place][0]

    def show(self, place: int) -> None:
        """Show one of the pictures."""
        self.place = place
        self.version += 1

    def view(self) -> "View":
        """Return the picture of the moment that is shown, as a monitor had it then."""
        return replace(self.film.pictures[self.place][1], link="live")

    def send(self, verb: str, run: str, rank: int | None = None, args: Any = None) -> str:
        """Refuse: nothing behind a recording could answer."""
        from gpuwatch.errors import TargetError

        raise TargetError(f"this is a recording: nobody answers {verb}")

    def close(self) -> None:
        """Nothing to let go of."""


class Replayed(Still):
    """The same as a `Playback` that goes on only when it is told to."""

    def __init__(self, film: Film) -> None:
        super().__init__(film)
        self.paused = False
        self.speed = 1.0
        self.seeks = 0

    @property
    def duration(self) -> float:
        """Seconds from the beginning to the end."""
        return self.film.duration_s

    def seek(self, position: float) -> None:
        """Go nowhere: what is drawn is one moment."""

    def view(self) -> "View":
        """Return the picture of the moment that is shown."""
        return self.film.pictures[self.place][1]


def still(source: str) -> Still:
    """Return the session on a source, up to the moment that is drawn."""
    return (Still if source in LIVE else Replayed)(filmed(source))


@contextlib.contextmanager
def fixed_environment() -> Iterator[None]:
    """Let every person and machine draw alike, and leave the environment as it was."""
    before = dict(os.environ)
    for name in [n for n in os.environ if n.startswith("TEXTUAL")]:
        del os.environ[name]
    os.environ.pop("NO_COLOR", None)
    os.environ |= ENVIRONMENT
    time.tzset()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
        time.tzset()


def watching(session: Still) -> "GpuwatchApp":
    """Return the app on a recording, with a clock that stands; `watch` makes both go on."""
    from gpuwatch.tui import GpuwatchApp
    from gpuwatch.tui.config import Config

    def found(view: "View") -> "Sequence[RunDiagnosis]":
        return session.film.found[view.at_s]

    app = GpuwatchApp(session, found, hz=0, config=Config(theme="dark", ascii=False))
    app.watcher._clock = partial(float, 0.0)
    return app


async def watch(app: "GpuwatchApp", pilot: "Pilot[None]", session: Still) -> None:
    """Play to the end, a tick of the screen and a diagnosis a picture, each waited for.

    The keys of the film are pressed at their time.

    Raises:
        SystemExit: a diagnosis did not come.
    """
    pressed_s, keys = session.film.pressed
    for place in range(len(session.film.pictures)):
        if session.position >= pressed_s:
            pressed_s = math.inf
            app.refresh_scene(force=True)
            await pilot.press(*keys.split())
        diagnosed = app.watcher.diagnoses
        session.show(place)
        app.watcher._clock = partial(float, place + 1.0)
        app.refresh_scene()
        deadline_s = time.monotonic() + _DIAGNOSIS_S
        while app.watcher.scene.view.runs and app.watcher.diagnoses == diagnosed:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"no diagnosis within {_DIAGNOSIS_S:.0f} s")
            await pilot.pause(0.001)
    app.refresh_scene(force=True)
    await pilot.pause()


async def _draw(session: Still, shots: Mapping[str, Shot], size: tuple[int, int]) -> dict[str, str]:
    """Return the SVG of every shot of one source at one size, by its name."""
    session.show(0)
    app = watching(session)
    found = {}
    async with app.run_test(size=size) as pilot:
        await watch(app, pilot, session)
        for name, shot in shots.items():
            await pilot.press(*shot.keys.split())
            for _ in range(3):
                await pilot.pause()
            # What was told on the way stands for seconds of this machine's clock.
            app._told = None
            app.refresh_scene(force=True)
            await pilot.pause()
            found[name] = _without_fonts(app.export_screenshot(title="gpuwatch"))
            # Back to the first screen, whatever was opened.
            await pilot.press("1")
            await pilot.pause()
    return found


def _without_fonts(svg: str) -> str:
    """Return a picture that names its font and fetches none: a page loads nothing from elsewhere.

    Every text says how long it is, so that another monospaced font fits too.
    """
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code, monospace", FONTS)


def draw(sizes: Sequence[tuple[int, int]] = SIZES, sources: Sequence[str] = ()) -> dict[str, str]:
    """Return the SVG of every picture by its file name; of some sources only, if they are named.

    Raises:
        SystemExit: a recording is missing.
        TargetError: it cannot be read.
    """
    pictures = {}
    with fixed_environment():
        for source in sources or dict.fromkeys(shot.source for shot in SHOTS.values()):
            shots = {name: shot for name, shot in SHOTS.items() if shot.source == source}
            session = still(source)
            for columns, lines in sizes:
                for name, svg in asyncio.run(_draw(session, shots, (columns, lines))).items():
                    pictures[f"{name}-{columns}x{lines}.svg"] = svg
    return pictures


def drawn(svg: str) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return what a picture shows: (column, line, style, text) and (column, line, width, fill).

    Names of styles and clips, fonts and the frame around it are left out: they are the exporter's.
    """
    styles = dict(re.findall(r"\.terminal-\d+-(r\d+) \{ (.*?) \}", svg))
    texts: list[tuple[str, ...]] = [
        (x, y, styles[name], text)
        for name, x, y, text in re.findall(
            r'<text class="terminal-\d+-(r\d+)" x="([^"]*)" y="([^"]*)"[^>]*>(.*?)</text>', svg
        )
    ]
    rects = re.findall(
        r'<rect fill="([^"]*)" x="([^"]*)" y="([^"]*)" width="([^"]*)"[^>]*crispEdges"/>', svg
    )
    return texts, rects


# --- what is drawn ---------------------------------------------------------------------------


@contextlib.contextmanager
def opened(source: str) -> Iterator[Any]:
    """Open a source as a recording.

    Raises:
        SystemExit: there is none.
        TargetError: it cannot be read.
    """
    from gpuwatch.recording import open_recording

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / source
        if source == "cluster":
            path = path.with_suffix(".jsonl")
            path.write_text(cluster_text(), "utf-8")
        else:
            path = path.with_suffix(".gpuwatch")
            path.write_bytes(_unpacked(_RECORDINGS.get(source, (source,))))
        with open_recording(path) as recording:
            yield recording


def _unpacked(sources: Sequence[str]) -> bytes:
    """Return recordings, one after the other, as one."""
    from gpuwatch.recording.write import HEAD

    out = [HEAD]
    for source in sources:
        packed = FOLDER / f"{source}.gpuwatch.gz"
        if not packed.exists():
            raise SystemExit(
                f"no {packed.name}; python benchmarks/screenshots.py --record makes it"
            )
        out.append(gzip.decompress(packed.read_bytes())[len(HEAD) :])
    return b"".join(out)


def cluster() -> Iterator[dict[str, Any]]:
    """Yield the lines of a made-up job: the loaders of the last node are slow, and all wait.

    Its GPUs do what such a job's would. Those that wait in a collective are busy by GPU-Util and
    not by SM activity; those that wait for data are busy by neither.
    """
    from traces import Job

    seconds = int(DRAWN_AT_S["cluster"]) + 2
    per_node = _RANKS // _NODES
    slow = [rank // per_node == _NODES - 1 for rank in range(_RANKS)]

    def waved(mean: float, swing: float, rank: int) -> list[float]:
        return [
            round(mean + swing * math.sin(second / 3.5 + rank) * math.cos(second / 17.0), 1)
            for second in range(seconds)
        ]

    def phases(rank: int) -> dict[str, Any]:
        own = 1.0 + 0.02 * math.sin(2.4 * rank)
        # One of the late ranks is later than the others, as one always is.
        late = [
            (70.0 if rank == _LATEST else 60.0) + 9.0 * math.sin(step / 30.0)
            for step in range(_STEPS)
        ]
        return {
            "data_wait": late if slow[rank] else 3.0,
            "h2d": 3.1,
            "forward": 38.0 * own,
            "backward": 72.4 * own,
            "optimizer": 6.0,
            "other": 0.4,
        }

    def gpu(rank: int) -> dict[str, Any]:
        active = 34.0 if slow[rank] else 38.0
        return {
            "gpu_util": waved(58.0 if slow[rank] else 95.0, 4.0, rank),
            "sm_active": waved(active, 6.0, rank),
            "sm_occupancy": waved(0.6 * active, 3.0, rank),
            "tensor_active": waved(0.5 * active, 4.0, rank),
            "dram_active": waved(0.4 * active, 3.0, rank),
            "memory_used": 61.2e9 + 1e8 * (rank % 5),
            "memory_total": 80e9,
            "power": waved(400.0 if slow[rank] else 450.0, 25.0, rank),
            "power_limit": 700.0,
            "temperature": 52.0 + rank % 7,
            "sm_clock": 1755.0,
            "sm_clock_max": 1980.0,
            "pcie_rx": 3.1e9,
            "pcie_tx": 0.4e9,
        }

    job = Job(
        run="resnet50",
        ranks=_RANKS,
        nodes=_NODES,
        steps=_STEPS,
        phases_ms=[phases(rank) for rank in range(_RANKS)],
        transfer_ms=14.0,
        scatter=0.02,
        step=[
            {"queue_depth": 0.0 if late else 3.0, "queue_capacity": 8, "samples": 64}
            for late in slow
        ],
        loader={"num_workers": 4, "prefetch_factor": 2, "batch_size": 64, "pin_memory": True},
        gpu=[gpu(rank) for rank in range(_RANKS)],
        host={
            "cpu_percent": 31.0,
            "cpu_iowait_percent": 0.4,
            "load1": 20.4,
            "memory_used": 190e9,
            "memory_total": 1_000e9,
        },
        batch_ms=(_LATE_BATCH_MS, 40.0, 6.0),
        cores=64,
        process={"cpu_percent": 88.0, "rss": 4.2e9},
        worker_process={"cpu_percent": 34.0, "threads": 2.0, "rss": 1.1e9},
        simulated=True,
    )
    for line in job.lines():
        if line["type"] == "worker" and not slow[line["rank"]]:
            line["wall_ms"] = line["batches"] * _BATCH_MS
        yield _on_device(line, per_node)


def _on_device(line: dict[str, Any], per_node: int) -> dict[str, Any]:
    """Return a line of a trace as a job on GPUs sends it: device times, names, units."""
    if line["type"] == "step":
        phases = line["phases_ms"]
        own = {"device_phases_ms": phases, "clock": "device"}
        return {**line, **own, "device_stall_ms": phases["data_wait"] + phases["h2d"]}
    if "readings" in line:
        line["readings"] = {
            name: {"value": value, "unit": UNITS.get(name, "%"), "source": "simulated"}
            for name, value in line["readings"].items()
        }
    if line["type"] == "gpu":
        rank = line["index"]
        process = {"pid": rank + 1, "memory_bytes": 60_000_000_000, "kind": "compute"}
        return {
            **line,
            "index": rank % per_node,
            "name": "SIMULATED GPU 80 GB",
            "processes": [{**process, "name": "python"}],
        }
    return line


UNITS = {
    "memory_used": "B",
    "memory_total": "B",
    "rss": "B",
    "power": "W",
    "power_limit": "W",
    "temperature": "°C",
    "sm_clock": "MHz",
    "sm_clock_max": "MHz",
    "pcie_rx": "B/s",
    "pcie_tx": "B/s",
    "load1": "",
    "threads": "",
}
"""Of the readings of the made-up job; the others are percentages."""


def cluster_text() -> str:
    """Return the made-up job as the text of a trace."""
    return "".join(json.dumps(line) + "\n" for line in cluster())


# --- recording -------------------------------------------------------------------------------


def record(source: str) -> Path:
    """Record the demo, with the change that its finding names on the way, from its start or not at
    all, and keep it small.

    Paths of this machine and its boot id are taken out; everything else is as it came.
    """
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as folder:
        raw = Path(folder) / "raw.gpuwatch"
        environment = {**os.environ, "GPUWATCH_DIR": f"{folder}/run", "OMP_NUM_THREADS": "1"}
        gpuwatch = [sys.executable, "-P", "-m", "gpuwatch"]
        recorder = subprocess.Popen([*gpuwatch, "record", "-o", str(raw)], env=environment)
        try:
            if source == "more-workers":
                _train(hinted_workers("slow-loader"), environment, SECONDS[source])
            else:
                demo = [*gpuwatch, "demo", "--headless", "--seconds", str(SECONDS[source])]
                with subprocess.Popen(demo, env=environment, stdout=subprocess.DEVNULL) as shown:
                    if source == "demo":
                        _apply_hint(Path(environment["GPUWATCH_DIR"]))
                    if shown.wait(SECONDS[source] + 60):
                        raise SystemExit(f"the demo ended with status {shown.returncode}")
            recorder.wait(20)
        finally:
            if recorder.poll() is None:
                recorder.send_signal(signal.SIGTERM)
                recorder.wait(10)
        path = FOLDER / f"{source}.gpuwatch.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(_without_places(raw), 9, mtime=0))
    return path


def _apply_hint(directory: Path) -> None:
    """Do what `a` and enter do on the demo's first finding, at its time.

    Raises:
        SystemExit: there is no finding with a hint that can be set.
    """
    from gpuwatch.commands.session import LiveSession
    from gpuwatch.diagnosis import Engine
    from gpuwatch.tui.changes import proposals

    session, engine = LiveSession(directory), Engine()
    try:
        began_s = time.monotonic()
        while time.monotonic() < began_s + CHANGED_S:
            view = session.view()
            if not any(run.steps for run in view.runs):
                began_s = max(began_s, time.monotonic())
            found = engine(view)
            time.sleep(1.0)
        findings = found[0].findings if found else ()
        wanted = [p for item in findings[:1] for p in proposals(item, view.runs[0])]
        if not wanted:
            raise SystemExit("the demo has no finding with a hint that can be set")
        args = {"knob": wanted[0].row.name, "value": wanted[0].new}
        session.send("set", wanted[0].run, None, args)
        time.sleep(2.0)
    finally:
        session.close()


def hinted_workers(source: str) -> int:
    """Return the workers that the first finding of a drawn moment names.

    Raises:
        SystemExit: it names none, so the recording is no picture of a slow loader.
    """
    film = filmed(source)
    found = film.found[film.pictures[-1][1].at_s]
    hints = [hint for judged in found for item in judged.findings[:1] for hint in item.hints]
    if not hints or not isinstance(hints[0].new, int):
        raise SystemExit("the demo was recorded, but no finding names a number of workers")
    return hints[0].new


def _train(workers: int, environment: Mapping[str, str], seconds: float) -> None:
    """Train as the demo does, with so many workers a rank, for a time after the first steps."""
    training = subprocess.Popen(
        [
            sys.executable,
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "trainer", "train", "--train.steps=1000000", "--train.threads=1"),
            *("--train.device=cpu", "--train.eval_interval_epochs=0", "--loader.batch_size=8"),
            *("--faults.item_latency_ms=25", f"--loader.num_workers={workers}"),
        ],
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # torchrun tells of its end at length
        text=True,
        start_new_session=True,
    )
    try:
        assert training.stdout is not None
        if not training.stdout.readline():
            raise SystemExit(f"the training ended with status {training.wait()}")
        time.sleep(seconds)
        training.send_signal(signal.SIGTERM)
        training.communicate(timeout=20)
    finally:
        if training.poll() is None:
            os.killpg(training.pid, signal.SIGKILL)
            training.wait()


def _without_places(path: Path) -> bytes:
    """Return a recording without the paths of the machine on which it was made."""
    import msgspec

    from gpuwatch.frames import (
        decode_node_frame,
        decode_rank_frame,
        decode_sensor_frame,
        encode,
        packed,
    )
    from gpuwatch.recording import open_recording
    from gpuwatch.recording.write import HEAD

    replaced = msgspec.structs.replace
    home = str(Path.home())

    def rank(raw: bytes) -> msgspec.Raw:
        frame = decode_rank_frame(raw)
        if frame.hello is None:
            return msgspec.Raw(raw)
        script, _, arguments = frame.hello.script.partition(" ")
        hello = replaced(
            frame.hello,
            script=f"{'/'.join(Path(script).parts[-2:])} {arguments}",
            dataset_path=frame.hello.dataset_path.replace(home, "~"),
            boot_id="",
        )
        return msgspec.Raw(encode(replaced(frame, hello=hello)))

    def sensors(raw: bytes) -> msgspec.Raw:
        frame = decode_sensor_frame(raw)
        io = tuple(replaced(item, path=item.path.replace(home, "~")) for item in frame.host.io)
        return msgspec.Raw(encode(replaced(frame, host=replaced(frame.host, io=io))))

    out = [HEAD]
    with open_recording(path) as recording:
        for _, data in recording.frames():
            frame = decode_node_frame(data)
            frame = replaced(
                frame,
                frames=tuple(rank(raw) for raw in frame.frames),
                sensors=None if frame.sensors is None else sensors(frame.sensors),
            )
            out.append(packed(encode(frame)))
    return b"".join(out)


def main() -> int:
    """Write every picture that has changed, and say which; 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR")
    parser.add_argument("--record", action="store_true", help="make the recordings anew first")
    parser.add_argument(
        "--cluster", type=Path, metavar="FILE", help="only write the made-up job as a trace"
    )
    options = parser.parse_args()
    if options.cluster is not None:
        options.cluster.write_text(cluster_text(), "utf-8")
        return 0
    if options.record:
        for source in SECONDS:
            path = record(source)
            print(f"{path.name}  {path.stat().st_size / 1e3:.0f} kB", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    changed = 0
    pictures = draw()
    for name, svg in pictures.items():
        path = options.out / name
        if not path.exists() or path.read_text("utf-8") != svg:
            path.write_text(svg, "utf-8")
            changed += 1
            print(name)
    print(f"{len(pictures)} pictures, {changed} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
