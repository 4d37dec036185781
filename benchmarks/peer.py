"""TraceML in an environment of its own, made once and kept in the user's cache folder.

What it says of a run is read where a person reads it: from its live view, drawn in a terminal of
our own, and from the summary that it writes at the end (`final_summary.json` in its logs).
"""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

VERSION = "0.5.0"
TIMEOUT_S = 1800
COLUMNS, LINES = 240, 60
"""Of its terminal: wide enough that it cuts off no reason."""

_END_S = 20.0
_CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"


class NoPeerError(Exception):
    """There is no TraceML to compare with; the message is one sentence that says why."""


def peer_directory() -> Path:
    """Where the environment is kept; named by what is pinned, so that new pins make a new one."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    lines = _CONSTRAINTS.read_text().splitlines()
    pins = "-".join(line.replace("==", "-") for line in lines if line and line[0] != "#")
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    return cache / "gpuwatch-bench" / f"traceml-{VERSION}-{pins}-{python}"


def peer_python() -> Path:
    """Return the interpreter of the environment, making the environment if need be.

    Raises:
        NoPeerError: it could not be made.
    """
    directory = peer_directory()
    python, done = directory / "bin" / "python", directory / ".installed"
    if done.exists():
        return python
    print(f"making an environment for TraceML {VERSION}, once: about 1 GB", file=sys.stderr)
    shutil.rmtree(directory, ignore_errors=True)
    wanted = ["torch", f"traceml-ai=={VERSION}"]
    install = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--retries=1"]
    steps = [
        [sys.executable, "-m", "venv", str(directory)],
        [str(python), *install, "--timeout=20", "-c", str(_CONSTRAINTS), *wanted],
    ]
    try:
        for step in steps:
            subprocess.run(step, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as exc:
        shutil.rmtree(directory, ignore_errors=True)
        said = (getattr(exc, "stderr", None) or str(exc)).strip().splitlines()
        errors = [line for line in said if line.startswith("ERROR")] or said[-1:] or ["no reason"]
        raise NoPeerError(
            f"no environment for TraceML {VERSION} could be made ({errors[0]})"
        ) from exc
    done.touch()
    return python


def peer_command(
    script: Path, logs: Path, *arguments: str, ranks: int = 1, live: bool = False
) -> list[str]:
    """Return the command line that runs a script under TraceML as its documentation says.

    `live`: with its view in the terminal, not with the summary at the end alone.
    """
    return [
        str(peer_python().with_name("traceml")),
        "run",
        *(["--mode=cli"] if live else []),
        str(script),
        f"--nproc-per-node={ranks}",
        f"--logs-dir={logs}",
        f"--aggregator-port={_free_port()}",  # the fixed ones may be taken
        f"--master-port={_free_port()}",
        "--args",
        *arguments,
    ]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# --- what it says --------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """TraceML's word on a run: its status, the rank that it tells to look at, and its reason.

    `at_s` is the wall clock when it first stood there; of the summary, when that was written.
    """

    status: str
    rank: int | None
    why: str
    at_s: float


def live_verdicts(
    argv: Sequence[str], environ: Mapping[str, str], folder: Path, timeout_s: float
) -> list[Verdict]:
    """Run a command in a terminal until it ends, and return what its view said, in that order.

    A verdict is there once for as long as its status and rank stay; `why` is its first wording.

    Raises:
        NoPeerError: the command failed, or did not end in time.
    """
    import pyte

    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    found: list[Verdict] = []
    with _in_terminal(argv, environ, folder) as (process, terminal):
        for data in _output(process, terminal, timeout_s):
            stream.feed(data)
            seen = read_view(screen.display, time.time())
            if seen is not None and (not found or found[-1][:2] != seen[:2]):
                found.append(seen)
        if process.poll() is None:
            raise NoPeerError(f"TraceML did not end within {timeout_s:.0f} s")
    if process.returncode:
        said = [line.strip() for line in screen.display if line.strip()]
        raise NoPeerError(f"TraceML failed: {said[-1] if said else 'it said nothing'}")
    return found


def read_view(lines: Sequence[str], at_s: float) -> Verdict | None:
    """Return the verdict in the panel of its live view, None where there is none (yet)."""
    left: list[str] = []
    for line in lines:
        # The panel is the left one of its row: "│ Issue: ...   ││ No GPU ...  │".
        _, _, inside = line.partition("│")
        text = inside.partition("│")[0].strip()
        if text.startswith("Issue:"):
            left = [text]
        elif left and text:
            left.append(text)
        elif left:
            break  # the empty line before its table
    parts = re.fullmatch(r"Issue: (.+?) Why: (.+?) Next: (.+)", " ".join(left))
    if parts is None:
        return None
    status, why, action = parts.groups()
    return Verdict(status, _rank_in(action), why, at_s)


def _rank_in(action: str) -> int | None:
    """Return the rank that an action tells to look at, as in "Inspect input wait on r1."."""
    named = re.search(r"\br(\d+)\b", action)
    return None if named is None else int(named[1])


def summary_verdict(logs: Path) -> Verdict | None:
    """Return the verdict of the summary of the one run in the logs, None where there is none."""
    for path in logs.glob("*/final_summary.json"):
        found = json.loads(path.read_text())["primary_diagnosis"]
        return Verdict(
            found["status"], _rank_in(found["action"]), found["summary"], path.stat().st_mtime
        )
    return None


@contextlib.contextmanager
def _in_terminal(
    argv: Sequence[str], environ: Mapping[str, str], folder: Path
) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """Run a command with a terminal of its own; it is ended, and its group with it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    process = subprocess.Popen(
        argv,
        env={**environ, "TERM": "xterm-256color"},
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # it ends its own processes then
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        os.close(ours)


def _output(process: "subprocess.Popen[bytes]", terminal: int, timeout_s: float) -> Iterator[bytes]:
    """Yield what a process writes to its terminal, until it has ended or time is over."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        ended = process.poll() is not None
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                data = os.read(terminal, 65536)
            except OSError:  # nobody holds the other side any more
                process.wait(_END_S)
                return
            yield data
        elif ended:
            return
