"""One training, its node process, its pipe: what hostile and broken peers cost it.

    python -m pytest tests/hostile -s        # prints the table

Every attack is real and short. Before it and during it the training's steps a second, the CPU time
of its training thread a step, and the resident memory of the process that is attacked are measured;
the margins are wide, since the machine is shared. A good monitor watches all the time: its picture
must be whole after each of them.
"""

import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import support
from smalldisk import fill, small_run_directory

from gpuwatch.commands.remote import open_session
from gpuwatch.commands.session import LiveSession
from gpuwatch.store.views import RankView, RunView
from gpuwatch.wire.collect import agent_presence, make_key
from gpuwatch.wire.publish import Presence

pytestmark = [pytest.mark.process, pytest.mark.alone, pytest.mark.timeout(120)]

HERE = Path(__file__).parent
RUN = "victim"
LOOK_S = 0.35
ATTACK_S = 0.5
SLOWER = 0.6
"""Of its steps a second the training keeps at the least. A flood of requests that nothing held back
left it an eighth on a quiet machine, two thirds on one with ten programs for two cores."""
CPU_TIMES = 2.5
"""Of the CPU time of its training thread a step, at most."""
PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 2**20


class Figures(NamedTuple):
    steps_per_s: float
    cpu_us: float


class Speaker:
    """A process that takes a line and answers with one."""

    def __init__(self, script: str, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first = self.hear()

    def say(self, task: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Scene:
    """The training, whoever attacks it, and the monitor that looks on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = support.environment(directory)
        self._figures = Path(f"{directory}.figures")
        self._trainings: list[int] = []
        self._closing = contextlib.ExitStack()
        self._closing.callback(self._figures.unlink, missing_ok=True)
        self._trainer = Speaker("victim.py", self.environment)
        self._closing.callback(self._trainer.close)
        self.attacker = Speaker("attacks.py", self.environment)
        self._closing.callback(self.attacker.close)
        self._closing.callback(self._end_trainings)
        self.pid = self.train(self._figures)
        self.session = LiveSession(directory)
        self._closing.callback(self.session.close)
        self.rows: list[str] = []
        support.wait_until(lambda: self.steps > 100, 60, "a training")
        (self.rank,) = support.rank_presences(directory)

    def close(self) -> None:
        self._closing.close()
        print("\n" + "\n".join(self.rows))

    def _end_trainings(self) -> None:
        for pid in self._trainings:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def train(self, figures: Path, **env: str) -> int:
        """Start another training; returns its pid."""
        env = {"GPUWATCH_RUN_ID": RUN, "GPUWATCH_DIR": str(self.directory), **env}
        self._trainer.say({"figures": str(figures), "env": env})
        pid = int(self._trainer.hear())
        self._trainings.append(pid)
        return pid

    # --- what is seen --------------------------------------------------------------------------

    @property
    def run(self) -> RunView | None:
        return self.session.view().run(RUN)

    @property
    def seen(self) -> RankView | None:
        run = self.run
        return run.ranks[0] if run is not None else None

    @property
    def steps(self) -> int:
        rank = self.seen
        return rank.steps if rank is not None else 0

    @property
    def notices(self) -> str:
        view = self.session.view()
        return " | ".join((view.message, *view.notices, *(e.text for e in view.events)))

    def agent(self) -> Presence:
        found = agent_presence(self.directory)
        assert found is not None
        return found

    def is_whole(self) -> None:
        """The picture of the good monitor is that of the training as it is, and goes on."""
        before = self.taken()
        support.wait_until(lambda: self.steps > before + 20, 10, f"a picture: {self.notices}")
        view = self.session.view()
        run = view.run(RUN)
        assert run is not None
        assert view.link == "live"
        assert len(run.ranks) == 1
        (rank,) = run.ranks
        assert rank.state == "training"
        assert rank.hello is not None
        assert rank.hello.pid == self.pid
        assert rank.incarnation == self.rank.incarnation
        assert rank.restarts == 0
        indices = [r.index for r in rank.window]
        assert indices == list(range(indices[0], indices[0] + len(indices)))

    # --- what it costs -------------------------------------------------------------------------

    def taken(self) -> int:
        return int(struct.unpack("=QQ", self._figures.read_bytes())[0])

    def measure(self, seconds: float = LOOK_S) -> Figures:
        """What the training does now. The time in which its thread was ready and other programs had
        the cores is not counted; that in which it waited for anything else, the GIL say, is.
        """
        first, began_s = self._now()
        time.sleep(seconds)
        last, ended_s = self._now()
        steps = max(1, last[0] - first[0])
        return Figures(steps / max(1e-3, ended_s - began_s), (last[1] - first[1]) / steps / 1e3)

    def _now(self) -> tuple[tuple[int, int], float]:
        """Steps and CPU time so far, and a clock that stands while the thread waits for a core.

        Looked at when a step has just ended: a wait is counted when it is over.
        """
        seen, ends_s = self.taken(), time.monotonic() + 1.0
        while self.taken() == seen and time.monotonic() < ends_s:
            time.sleep(0.001)
        waited_ns = Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]
        now_s = time.monotonic() - int(waited_ns) / 1e9
        steps, cpu_ns = struct.unpack("=QQ", self._figures.read_bytes())
        return (steps, cpu_ns), now_s

    @contextlib.contextmanager
    def unharmed(self, title: str, attacked: int, *, most_mib: int) -> Iterator[None]:
        """Whatever happens inside costs the training nothing and the attacked process little.

        What is measured begins with the body: it starts something and returns.
        """
        before, resident = self.measure(), rss_mib(attacked)
        yield
        during = self.measure()
        grown = rss_mib(attacked) - resident
        self.rows.append(
            f"{title:40} steps/s {before.steps_per_s:4.0f} -> {during.steps_per_s:4.0f}   "
            f"CPU a step {before.cpu_us:5.0f} -> {during.cpu_us:5.0f} us   "
            f"RSS {resident:4.0f} -> {resident + grown:4.0f} MiB"
        )
        assert during.steps_per_s > SLOWER * before.steps_per_s, self.rows[-1]
        assert during.cpu_us < CPU_TIMES * before.cpu_us, self.rows[-1]
        assert grown < most_mib, self.rows[-1]

    def attack(self, title: str, attacked: int, path: str, *, most_mib: int, **task: Any) -> int:
        """Let the attacker do something and return how often it did it."""
        address = path.removeprefix("ipc://")
        try:
            with self.unharmed(title, attacked, most_mib=most_mib):
                self.attacker.say({"path": address, "seconds": ATTACK_S, **task})
                assert self.attacker.hear() == {"begun": True}
        finally:
            done = int(self.attacker.hear()["done"])
        assert done
        self.is_whole()
        return done


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / MIB


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with support.run_directory() as directory:
        made = Scene(directory)
        try:
            yield made
        finally:
            made.close()


Row = tuple[str, str, int, dict[str, Any]]

ON_SOCKETS: list[Row] = [
    # title, socket (t: telemetry, c: control), most MiB more, attack
    ("random bytes", "c", 150, {"attack": "garbage"}),
    ("random bytes to telemetry", "t", 150, {"attack": "garbage"}),
    ("1 TiB announced", "c", 20, {"attack": "announced", "size": 2**40}),
    ("60 MiB announced, 4 sent, 32 times", "c", 20, {"attack": "announced", "size": 60 * MIB}),
    ("an endless multipart of 20 MB", "c", 80, {"attack": "endless"}),
    ("20,000 subscriptions", "t", 120, {"attack": "subscriptions"}),
    ("300 half-open connections", "c", 40, {"attack": "half_open"}),
    ("a flood of nonsense", "c", 40, {"attack": "nonsense"}),
    ("a flood of snapshot", "c", 60, {"attack": "commands"}),
    ("a flood of stack", "c", 60, {"attack": "commands", "verb": "stack"}),
    ("a replayed command", "c", 60, {"attack": "commands", "verb": "stack", "same": True}),
]


@pytest.mark.parametrize("row", ON_SOCKETS, ids=[row[0] for row in ON_SOCKETS])
def test_a_rank_and_its_own_sockets(
    scene: Scene, row: tuple[str, str, int, dict[str, Any]]
) -> None:
    title, end, most_mib, task = row
    address = scene.rank.telemetry if end == "t" else scene.rank.control
    scene.attack(f"rank: {title}", scene.pid, address, most_mib=most_mib, **task)


# Of what libzmq alone has to do with, one socket is enough. A command for nobody is answered here.
_SAME = {"random bytes", "random bytes to telemetry", "1 TiB announced", "a replayed command"}
ON_NODES: list[Row] = [
    *(row for row in ON_SOCKETS if row[0] not in _SAME),
    ("commands for nobody", "c", 60, {"attack": "commands", "verb": "stack", "run": "nobody"}),
]


@pytest.mark.parametrize("row", ON_NODES, ids=[row[0] for row in ON_NODES])
def test_the_node_process(scene: Scene, row: Row) -> None:
    title, end, most_mib, task = row
    agent = scene.agent()
    address = agent.telemetry if end == "t" else agent.control
    scene.attack(f"node: {title}", agent.pid, address, most_mib=most_mib, **task)
    assert scene.agent().pid == agent.pid
    # What it sends itself can be read: no frame of it was refused by the monitor.
    assert scene.session.view().refused == 0
    if task["attack"] == "nonsense":
        assert "frames refused; the last: not a valid command" in scene.notices


def test_a_rank_that_is_named_like_another_one(scene: Scene) -> None:
    agent = scene.agent()
    name = {"run": RUN, "rank": 0, "incarnation": scene.rank.incarnation}
    scene.attack(
        "node: forged ranks",
        agent.pid,
        scene.rank.control,
        most_mib=20,
        attack="forged",
        victim=name,
    )
    assert f"process {scene.attacker.first['up']}" in scene.notices


def test_two_jobs_with_one_run_id(scene: Scene, tmp_path: Path) -> None:
    with scene.unharmed("rank: a second job of its run id", scene.pid, most_mib=20):
        other = scene.train(tmp_path / "figures")
    try:
        support.wait_until(
            lambda: (r := scene.session.view().run(f"{RUN}.2")) is not None and r.steps > 20,
            20,
            "the second job",
        )
        scene.is_whole()
    finally:
        os.kill(other, signal.SIGKILL)
    support.wait_until(
        lambda: (r := scene.session.view().run(f"{RUN}.2")) is not None and r.state == "ended",
        10,
        "its end",
    )


MONITOR = """
import sys, time
from pathlib import Path
from gpuwatch.commands.session import LiveSession
session = LiveSession(Path(sys.argv[1]))
session.settled_view()
print(1, flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def monitor(scene: Scene) -> Iterator["subprocess.Popen[str]"]:
    made = subprocess.Popen(
        [sys.executable, "-c", MONITOR, str(scene.directory)],
        env=scene.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert made.stdout is not None
        assert made.stdout.readline()
        yield made
    finally:
        made.kill()
        made.communicate()


def test_a_monitor_that_is_stopped_or_killed(scene: Scene) -> None:
    agent = scene.agent()
    with monitor(scene) as other:
        with scene.unharmed("node: a stopped monitor", agent.pid, most_mib=20):
            other.send_signal(signal.SIGSTOP)
        with scene.unharmed("node: a killed monitor", agent.pid, most_mib=20):
            other.kill()
    scene.is_whole()
    assert scene.agent().pid == agent.pid


def test_a_node_process_that_is_stopped_or_killed(scene: Scene) -> None:
    agent = scene.agent()
    with scene.unharmed("rank: a stopped node process", scene.pid, most_mib=20):
        os.kill(agent.pid, signal.SIGSTOP)
        try:
            support.wait_until(
                lambda: "does not answer (is it stopped?)" in scene.notices, 10, "a word about it"
            )
        finally:
            os.kill(agent.pid, signal.SIGCONT)
    scene.is_whole()
    with scene.unharmed("rank: a killed node process", scene.pid, most_mib=20):
        os.kill(agent.pid, signal.SIGKILL)
    support.wait_until(lambda: f"{agent.pid} is gone" in scene.notices, 10, "a word about it")
    support.wait_until(lambda: agent_presence(scene.directory) is not None, 10, "another one")
    scene.is_whole()
    assert scene.agent().pid != agent.pid


# --- the pipe ------------------------------------------------------------------------------------


@contextlib.contextmanager
def pipe(scene: Scene) -> Iterator["subprocess.Popen[bytes]"]:
    """The far side of a pipe that has spoken."""
    made = subprocess.Popen(
        [*support.GPUWATCH, "agent", "--stdio"],
        env=scene.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    try:
        assert made.stdout is not None
        assert made.stdout.read(1)
        yield made
    finally:
        made.kill()
        made.wait()
        for end in (made.stdin, made.stdout, made.stderr):
            if end is not None:
                end.close()


def random_bytes(send: Callable[[bytes], None]) -> None:
    # Its first length is 3.4 GB: random ones are, one time in 64, short enough to be waited for.
    send(b"\xcb" + os.urandom(100_000))


def huge_command(send: Callable[[bytes], None]) -> None:
    send(struct.pack(">I", 60 * MIB))
    for _ in range(20):
        send(bytes(65536))


@pytest.mark.parametrize("attack", [random_bytes, huge_command])
def test_a_pipe_that_is_sent_no_commands(
    scene: Scene, attack: Callable[[Callable[[bytes], None]], None]
) -> None:
    with pipe(scene) as far:
        assert far.stdin is not None
        with scene.unharmed(f"pipe: {attack.__name__}", scene.agent().pid, most_mib=20):
            with contextlib.suppress(BrokenPipeError):
                attack(far.stdin.write)
            _, said = far.communicate(timeout=20)
        assert far.returncode == 3
        (sentence,) = said.decode().splitlines()
        assert sentence.startswith("gpuwatch: ")
        assert "command" in sentence
    scene.is_whole()


def test_a_pipe_that_nobody_reads_and_that_is_flooded(scene: Scene) -> None:
    from gpuwatch.frames import encode, packed
    from gpuwatch.schema import WIRE_VERSION, Command

    flood = b"".join(
        packed(encode(Command(WIRE_VERSION, f"{at}", "stack", "nobody"))) for at in range(5000)
    )
    with pipe(scene) as far:
        assert far.stdin is not None
        with scene.unharmed("pipe: 5,000 commands, and nobody reads", far.pid, most_mib=40):
            os.set_blocking(far.stdin.fileno(), False)
            with contextlib.suppress(BlockingIOError):
                far.stdin.write(flood)
        far.stdin.close()
        assert far.wait(20) == 0
    scene.is_whole()
    assert scene.session.view().refused == 0


# --- the door ------------------------------------------------------------------------------------


class Door:
    """A door beside the node process, and who watches through it."""

    def __init__(self, scene: Scene, folder: Path, stack: contextlib.ExitStack) -> None:
        self.key, self.other_key = str(folder / "key"), str(folder / "another")
        key = make_key(self.key)
        make_key(self.other_key)
        self.words = folder / "words"
        argv = [*support.GPUWATCH, "agent", "--listen", "127.0.0.1:0", "--key", self.key]
        door = stack.enter_context(support.process(argv, scene.environment, output=self.words))
        self.pid = door.pid
        support.wait_until(lambda: self.port() is not None, 20, "a port")
        self.address = f"127.0.0.1:{self.port()}"
        self.session, _ = open_session([f"tcp://{self.address}"], key=key)
        stack.callback(self.session.close)

    def port(self) -> str | None:
        found = re.search(r"port (\d+)", support.text_of(self.words))
        return found[1] if found else None

    def is_open(self) -> None:
        """Who watches through it sees the training go on."""
        seen = self.steps
        support.wait_until(
            lambda: self.steps > seen + 20, 20, f"steps through it: {self.session.view().notices}"
        )

    @property
    def steps(self) -> int:
        run = self.session.view().run(RUN)
        return run.steps if run is not None else 0


@pytest.fixture(scope="module")
def door(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with contextlib.ExitStack() as stack:
        yield Door(scene, tmp_path_factory.mktemp("door"), stack)


AT_THE_DOOR: list[tuple[str, int, dict[str, Any]]] = [
    # title, most MiB more, attack; "key" is the right one or another
    ("random bytes", 60, {"attack": "garbage"}),
    ("1 TiB announced", 20, {"attack": "announced"}),
    ("300 half-open connections", 40, {"attack": "half_open"}),
    ("no key", 20, {"attack": "commands"}),
    ("another key", 20, {"attack": "commands", "key": "another"}),
    ("a flood of snapshot with the key", 60, {"attack": "commands", "key": "key"}),
    ("a flood of stack with the key", 60, {"attack": "commands", "key": "key", "verb": "stack"}),
    ("18 MB in parts with the key", 300, {"attack": "parts", "key": "key"}),
]


@pytest.mark.parametrize("row", AT_THE_DOOR, ids=[row[0] for row in AT_THE_DOOR])
def test_the_door(scene: Scene, door: Door, row: tuple[str, int, dict[str, Any]]) -> None:
    title, most_mib, task = row
    door.is_open()
    keys = {"key": door.key, "another": door.other_key}
    if "key" in task:
        task = {**task, "key": keys[task["key"]], "server": door.key}
    scene.attack(f"door: {title}", door.pid, door.address, most_mib=most_mib, **task)
    door.is_open()
    said = support.text_of(door.words)
    assert "Traceback" not in said
    if title.startswith("a flood"):
        assert "asks more than" in said


# --- a full disk ---------------------------------------------------------------------------------


@pytest.fixture
def full(scene: Scene) -> Iterator[Path]:
    """A run directory on a file system that is soon full."""
    with small_run_directory(64) as directory:
        yield directory


def test_a_full_run_directory(scene: Scene, full: Path, tmp_path: Path) -> None:
    """Who starts in it trains and is not seen; who was there before is seen all the same."""
    first = scene.train(tmp_path / "first", GPUWATCH_DIR=str(full), GPUWATCH_RUN_ID="first")
    session = LiveSession(full)
    try:

        def steps() -> int:
            run = session.view().run("first")
            return run.steps if run is not None else 0

        support.wait_until(lambda: steps() > 20, 30, "a training there")
        agent = agent_presence(full)
        assert agent is not None
        filler = fill(full)
        second = scene.train(tmp_path / "second", GPUWATCH_DIR=str(full), GPUWATCH_RUN_ID="second")
        before = steps()
        support.wait_until(lambda: steps() > before + 50, 10, "the first is seen")
        (full / "agent.json").unlink()  # as a cleaner of /tmp would: it cannot be written again
        before = steps()
        support.wait_until(
            lambda: taken(tmp_path / "second") > 100, 20, "the second trains in a full directory"
        )
        support.wait_until(lambda: steps() > before + 200, 10, "the first is still seen")
        assert session.view().run("second") is None
        filler.unlink()
        support.wait_until(lambda: agent_presence(full) is not None, 10, "announced again")
        found = agent_presence(full)
        assert found is not None
        assert found.pid == agent.pid
        for pid in (first, second):
            os.kill(pid, signal.SIGKILL)
    finally:
        session.close()


def taken(figures: Path) -> int:
    try:
        return int(struct.unpack("=QQ", figures.read_bytes())[0])
    except (FileNotFoundError, struct.error):
        return 0
