"""TraceML in an environment of its own, made once and kept in the user's cache folder."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

VERSION = "0.5.0"
TIMEOUT_S = 1800
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


def peer_command(script: Path, logs: Path, *arguments: str, ranks: int = 1) -> list[str]:
    """Return the command line that runs a script under TraceML as its documentation says."""
    return [
        str(peer_python().with_name("traceml")),
        "run",
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
