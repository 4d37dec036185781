"""What the tests share: run directories, processes that end with a test, a rank's past."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import zmq

from gpuwatch.frames import decode_rank_frame, encode
from gpuwatch.schema import WIRE_VERSION, Command, RankFrame
from gpuwatch.wire.collect.discovery import RankFiles, agent_presence
from gpuwatch.wire.publish import Presence

PYTHON = sys.executable
GPUWATCH = [PYTHON, "-P", "-m", "gpuwatch"]
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def wait_until(
    condition: Callable[[], bool], timeout_s: float, what: str = "", every_s: float = 0.05
) -> None:
    """Wait for a condition, or fail with its name."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(every_s)


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """A run directory of its own, short enough for sockets; its node process ends with it."""
    # Not pytest's tmp_path: that is too long for a unix socket.
    path = Path(tempfile.mkdtemp(prefix="gw-", dir="/tmp"))
    try:
        yield path
    finally:
        agent = agent_presence(path)
        if agent is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent.pid, signal.SIGTERM)
            with contextlib.suppress(AssertionError):
                wait_until(lambda: agent_presence(path) is None, 3)
        shutil.rmtree(path, ignore_errors=True)


def environment(directory: Path, **more: str) -> dict[str, str]:
    """The environment of a process that uses that run directory; launcher variables removed."""
    launcher = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in launcher and not k.startswith(("TORCHELASTIC", "SLURM", "GPUWATCH"))
    }
    return {
        **kept,
        "GPUWATCH_DIR": str(directory),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **more,
    }


def gpuwatch(
    directory: Path, *argv: str, timeout_s: float = 60.0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with that run directory to its end; what it said and how it ended."""
    return subprocess.run(
        [*GPUWATCH, *argv],
        env=environment(directory, **env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@contextlib.contextmanager
def process(
    argv: Sequence[str], env: Mapping[str, str], *, output: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own; it and its group are killed at the end."""
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(output.open("wb")) if output else subprocess.DEVNULL
        started = subprocess.Popen(
            list(argv),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield started
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGTERM)
            try:
                started.wait(5)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)
                started.wait(5)


class Forked:
    """A script that runs in a fork of the zygote; as much of a Popen as the tests need."""

    def __init__(self) -> None:
        self.pid = 0
        self.code: int | None = None
        self.changed = threading.Condition()

    def poll(self) -> int | None:
        """The exit code, as of a Popen; None as long as it runs."""
        return self.code

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for its end and return its exit code."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.code is not None, timeout_s):
                raise AssertionError(f"process {self.pid} runs still after {timeout_s} s")
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        """End it, if it runs, and wait for that."""
        with self.changed:
            self.changed.wait_for(lambda: self.pid or self.code is not None, 60.0)
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


class Zygote:
    """Starts scripts in forks of a process that has imported torch: that takes seconds.

    What is imported has to be the same for all of them, and only `env` is theirs: no
    interpreter's start is seen in them (`gpuwatch run` brings nothing in), and /proc shows the
    environment of the zygote.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: list[Forked] = []
        self._process = subprocess.Popen(
            [PYTHON, str(Path(__file__).with_name("zygote.py")), str(os.getpid())],
            env=environment(Path("/nowhere")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._process.wait()  # it goes on as nobody's child
        self._listener = threading.Thread(target=self._listen, name="zygote", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number, pid, *code = map(int, line.split())
            forked = self._started[number]
            with forked.changed:
                forked.pid = pid
                forked.code = code[0] if code else None
                forked.changed.notify_all()
        for forked in self._started:  # the zygote is gone: nobody hears of them any more
            with forked.changed:
                forked.code = -signal.SIGKILL if forked.code is None else forked.code
                forked.changed.notify_all()

    def start(self, argv: Sequence[str], env: Mapping[str, str], out: Path, err: Path) -> Forked:
        """Start a script: `argv[0]`. What it prints is appended to the files; stdin is empty."""
        assert self._process.stdin is not None
        forked = Forked()
        with self._lock:
            number = len(self._started)
            self._started.append(forked)
            task = {"id": number, "argv": list(argv), "env": dict(env)}
            task |= {"out": str(out), "err": str(err)}
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        return forked

    def close(self) -> None:
        """End it, and what runs still."""
        for forked in self._started:
            forked.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("{}\n")
            self._process.stdin.flush()
        self._listener.join(20)
        if not self._listener.is_alive():  # else closing would wait for it
            self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


class Ranks:
    """Two ranks of a script, started as torchrun starts them but without its seconds."""

    def __init__(
        self, zygote: Zygote, argv: Sequence[str], env: Mapping[str, str], output: Path
    ) -> None:
        from torch.distributed import TCPStore

        # As torchrun's agent does: it has the store, on a port that the system chooses.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        self._ranks = [
            zygote.start(
                argv, {**env, **shared, "RANK": str(r), "LOCAL_RANK": str(r)}, output, output
            )
            for r in (0, 1)
        ]

    def poll(self) -> int | None:
        """0 when both have ended well, the code of one that has failed, else None."""
        codes = [rank.poll() for rank in self._ranks]
        return next((code for code in codes if code), None if None in codes else 0)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for the end of both; returns 0, or the code of the one that has failed."""
        return max((rank.wait(timeout_s) for rank in self._ranks), key=abs)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.kill()


def rank_presences(directory: Path) -> list[Presence]:
    """The ranks that are announced in the directory and live, in rank order."""
    return sorted(RankFiles(directory).scan()[0], key=lambda p: p.rank)


class NoAnswerError(AssertionError):
    """A rank did not answer: it may have ended between its announcement and the question."""


def ask(presence: Presence, verb: str, timeout_s: float = 20.0) -> RankFrame:
    """Ask a rank itself, over its own socket.

    Raises:
        NoAnswerError: it did not answer in time.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        request = context.socket(zmq.DEALER)
        request.linger = 0
        request.connect(presence.control)
        request.send(encode(Command(WIRE_VERSION, uuid.uuid4().hex, verb)))
        if not request.poll(int(timeout_s * 1000)):
            raise NoAnswerError(f"rank {presence.rank} did not answer {verb}")
        return decode_rank_frame(request.recv())
    finally:
        context.destroy(linger=0)


def snapshots(directory: Path) -> list[RankFrame]:
    """The pasts of the ranks that live now, in rank order; one that ends meanwhile is left out."""
    found = []
    for presence in rank_presences(directory):
        with contextlib.suppress(NoAnswerError):
            found.append(ask(presence, "snapshot", 1.0))
    return found


def text_of(path: Path) -> str:
    """What a process has written so far."""
    return path.read_text(errors="replace") if path.exists() else ""


def processes_of(directory: Path) -> list[str]:
    """Command lines of the processes whose environment names this run directory."""
    found = []
    needle = f"GPUWATCH_DIR={directory}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


class Tmux:
    """A private tmux server with one window, ended with the test."""

    def __init__(self, directory: Path, columns: int, lines: int) -> None:
        self._base = ["tmux", "-L", f"gw-{directory.name}", "-f", "/dev/null"]
        self._size = ["-x", str(columns), "-y", str(lines)]

    def _run(self, *argv: str, env: Mapping[str, str] | None = None) -> str:
        done = subprocess.run(
            [*self._base, *argv],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=None if env is None else dict(env),
        )
        return done.stdout

    def start(self, command: str, env: Mapping[str, str]) -> None:
        """Run a shell command in the window; the window stays when the command has ended."""
        kept = {**env, "TERM": "xterm-256color"}
        self._run("new-session", "-d", *self._size, "sh", env=kept)
        self._run("send-keys", command, "Enter")

    def keys(self, *names: str) -> None:
        """Type keys by their tmux names."""
        self._run("send-keys", *names)

    def screen(self) -> str:
        """What the window shows."""
        return self._run("capture-pane", "-p")

    def wait_for(self, text: str, timeout_s: float) -> str:
        """Wait until the window shows the text and return the whole of it."""
        shown = ""

        def there() -> bool:
            nonlocal shown
            shown = self.screen()
            return text in shown

        try:
            wait_until(there, timeout_s, every_s=0.2)
        except AssertionError:
            raise AssertionError(f"no {text!r} within {timeout_s} s on\n{shown}") from None
        return shown

    def close(self) -> None:
        """End the server and what runs in it."""
        with contextlib.suppress(subprocess.SubprocessError):
            self._run("kill-server")
