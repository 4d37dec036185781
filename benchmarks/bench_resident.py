"""What stays resident beside a training on one node, and what it costs while nothing happens.

    python benchmarks/bench_resident.py [--seconds N]

Starts the screen in a real pty, which starts the node process and the sampler; first with no run,
then beside eight ranks that send ten frames a second (made by the tests' stand-in, not counted),
with the witness of a `gpuwatch run` that will write the card at their end.
CPU is read from the kernel's accounting of each process over the whole time, memory as PSS: shared
pages count once.
"""

import argparse
import contextlib
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parent.parent
FAKE_RANK = REPO / "tests" / "wire" / "fake_rank.py"
RANKS = 8
RUN = "fake"
BUDGET_PERCENT = 3.0
BUDGET_MB = 150.0
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time of one process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def pss_mb(pid: int) -> float:
    """Memory of one process, shared pages divided among those who share them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def ours(directory: str) -> dict[str, int]:
    """The processes that use the run directory, by what they are."""
    names = {
        "agent": "node process",
        "gpuwatch.sensors": "sampler",
        "run": "witness",
        "gpuwatch": "screen",
    }
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if f"GPUWATCH_DIR={directory}".encode() not in (entry / "environ").read_bytes():
                continue
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            kind = next((kind for word, kind in names.items() if word in words), "")
            if kind:
                found[kind] = int(entry.name)
    return found


@contextlib.contextmanager
def screen(environment: dict[str, str]) -> Iterator[None]:
    """The screen in a pty of 160x45 whose output is read and thrown away."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execvpe(sys.executable, [sys.executable, "-P", "-m", "gpuwatch"], environment)
    import fcntl
    import struct
    import termios

    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 45, 160, 0, 0))

    def read() -> None:
        with contextlib.suppress(OSError):
            while os.read(fd, 65536):
                pass

    threading.Thread(target=read, daemon=True).start()
    try:
        yield
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def witnessed(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A job by the id of the stand-ins' run, so that its lookout becomes their witness."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "gpuwatch", "run", "--", "sleep", "1000"],
        env={**environment, "GPUWATCH_RUN_ID": RUN},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def measure(ranks: int, seconds: float) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as directory,
        contextlib.ExitStack() as s,
    ):
        environment = {
            **os.environ,
            "GPUWATCH_DIR": directory,
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "PYTHONPATH": str(REPO / "tests"),
        }
        started = [
            subprocess.Popen(
                [sys.executable, str(FAKE_RANK), str(rank), str(ranks)],
                env=environment,
                stdout=subprocess.DEVNULL,
            )
            for rank in range(ranks)
        ]
        s.callback(lambda: [p.kill() or p.wait() for p in started])
        s.enter_context(screen(environment))
        if ranks:
            started.append(witnessed(environment))
        deadline_s = time.monotonic() + 20
        while len(ours(directory)) < (4 if ranks else 3) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        time.sleep(3)
        processes = ours(directory)
        before = {name: cpu_s(pid) for name, pid in processes.items()}
        began_s = time.monotonic()
        time.sleep(seconds)
        elapsed_s = time.monotonic() - began_s
        shares = {n: (cpu_s(pid) - before[n]) / elapsed_s * 100 for n, pid in processes.items()}
        memory = {n: pss_mb(pid) for n, pid in processes.items()}
        print(f"{ranks} ranks")
        for name in processes:
            print(f"  {name:13} {shares[name]:5.2f} % of a core  {memory[name]:6.1f} MB")
        budget = f"(budget {BUDGET_PERCENT:.0f} % at 1 Hz, no run)" if ranks == 0 else ""
        print(
            f"  {'together':13} {sum(shares.values()):5.2f} % of a core  "
            f"{sum(memory.values()):6.1f} MB (budget {BUDGET_MB:.0f} MB) {budget}"
        )
        os.kill(processes["node process"], signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0)
    seconds = parser.parse_args().seconds
    print("baselines, measured elsewhere: nvitop 1.8 % at 8 GPUs; TraceML 690 MB resident")
    for ranks in (0, RANKS):
        measure(ranks, seconds)


if __name__ == "__main__":
    main()
