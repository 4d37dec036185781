"""What reading 8 GPUs costs: CPU and driver calls, beside nvitop, and that both say the same.

    python benchmarks/bench_sensors.py [--seconds N] [--gpus N] [--nvitop-python PATH]

The driver's library is the tests' stand-in, so this is our cost and theirs, not the driver's: its
calls are counted by the library itself. The sampler runs as the node process starts it, at 1 s;
nvitop as a user starts it, in a pty of 160x50, from an environment of its own that is made here
(pip install nvitop) unless one is named. CPU is the kernel's accounting of each process over the
whole time, start excluded. The budgets are those of the design: 3 % of a core with the host's
readings, ten calls a GPU and second. Without a C compiler, or without nvitop, it says so.
"""

import argparse
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "tests"))

from nvml.stub import GPM, H100, Stub, compiler, library, total  # noqa: E402

from gpuwatch.frames import FrameStream, decode_sensor_frame  # noqa: E402
from gpuwatch.schema import SensorFrame  # noqa: E402

BUDGET_PERCENT = 3.0
BUDGET_CALLS = 10.0
START_S = 3.0

SAME = ("gpu_util", "memory_used", "memory_total", "power", "temperature")
NVITOP = """
import json
from nvitop import Device
print(json.dumps([
    [d.gpu_utilization(), d.memory_used(), d.memory_total(), d.power_usage() / 1000,
     d.temperature()]
    for d in Device.all()
]))
"""


class Figures(NamedTuple):
    """Share of a core (%), calls per GPU and second, resident memory (MB)."""

    percent: float
    calls: float
    rss_mb: float


def cpu_s(pid: int) -> float:
    """User and system time of one process so far, to the nanosecond.

    A tick of /proc/PID/stat is ten of our milliseconds; this is clock_getcpuclockid(3) on Linux.
    """
    return time.clock_gettime((~pid << 3) | 2)


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def watch(pid: int, stub: Stub, gpus: int, seconds: float) -> Figures:
    """Measure a process that has started, for so long."""
    time.sleep(START_S)
    cpu, calls, began_s = cpu_s(pid), total(stub.counts()), time.monotonic()
    time.sleep(seconds)
    passed_s = time.monotonic() - began_s
    return Figures(
        100.0 * (cpu_s(pid) - cpu) / passed_s,
        (total(stub.counts()) - calls) / passed_s / max(1, gpus),
        rss_mb(pid),
    )


def run_sampler(
    stub: Stub, gpus: int, seconds: float, *more: str
) -> tuple[Figures, SensorFrame | None]:
    """Run the sampler and return its figures and its last frame."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "gpuwatch.sensors", *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**stub.env(), "PYTHONPATH": str(REPO)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    frames: list[SensorFrame] = []
    out = process.stdout.fileno()

    def drain() -> None:
        stream = FrameStream()
        while data := os.read(out, 1 << 20):
            frames[:] = [*map(decode_sensor_frame, stream.feed(data))] or frames

    thread = threading.Thread(target=drain)
    thread.start()
    try:
        figures = watch(process.pid, stub, gpus, seconds)
    finally:
        process.stdin.close()
        process.wait(10)
        thread.join()
        process.stdout.close()
    return figures, frames[-1] if frames else None


def run_nvitop(python: Path, stub: Stub, gpus: int, seconds: float) -> Figures:
    """Run nvitop's screen in a pty and return its figures."""
    main, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    process = subprocess.Popen(
        [python, "-m", "nvitop", "--monitor", "full", "--interval", "1"],
        stdin=child,
        stdout=child,
        stderr=child,
        env={**stub.env(), "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(child)

    def drain() -> None:
        try:
            while os.read(main, 65536):
                pass
        except OSError:
            pass  # it ended

    threading.Thread(target=drain, daemon=True).start()
    try:
        figures = watch(process.pid, stub, gpus, seconds)
        if process.poll() is not None:
            raise SystemExit(f"nvitop ended with status {process.returncode}")
    finally:
        process.kill()
        process.wait()
        os.close(main)
    return figures


def nvitop_python(folder: Path) -> Path | None:
    """Make an environment with nvitop; None if that cannot be done here."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    done = subprocess.run([*pip, "nvitop>=1.7,<2"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return python
    print("nvitop cannot be installed here:", done.stderr.strip().splitlines()[-1:])
    return None


def state(gpus: int) -> tuple[str, ...]:
    """Return the stand-in's state: every GPU another, a process on each."""
    lines = [f"count {gpus}", *H100, *GPM]
    for i in range(gpus):
        lines += [
            f"gpu {i} util {60 + 3 * i}",
            f"gpu {i} used {(20 + 5 * i) * 1_000_000_000}",
            f"gpu {i} power {300_000 + 20_000 * i}",
            f"gpu {i} temperature {50 + i}",
            f"proc {i} compute {os.getpid()} {(19 + 5 * i) * 1_000_000_000}",
        ]
    return tuple(lines)


def differences(frame: SensorFrame, theirs: list[list[float]]) -> list[str]:
    """Return where the two disagree: by more than what they round."""
    found = []
    for gpu, values in zip(frame.gpus, theirs, strict=True):
        for name, value in zip(SAME, values, strict=True):
            mine = gpu.readings[name].value
            if mine is None or abs(mine - value) > 1e-6 * max(1.0, abs(value)):
                found.append(f"GPU {gpu.index} {name}: {mine} and {value}")
    return found


def main() -> int:
    """Print the figures; 1 if one is over its budget or the two disagree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--nvitop-python", type=Path, help="an interpreter that has nvitop")
    options = parser.parse_args()
    gpus, seconds = options.gpus, options.seconds
    if compiler() is None:
        print("no C compiler for the stand-in: nothing measured")
        return 0
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        stubs = []
        for name in ("gpuwatch", "host", "nvitop", "api"):
            (folder / name).mkdir()
            stubs.append(Stub(library(), folder / name))
            stubs[-1].write(*state(gpus))
        ours, frame = run_sampler(stubs[0], gpus, seconds)
        host, _ = run_sampler(stubs[1], gpus, seconds / 4, "--without-gpus", "for comparison")
        python = options.nvitop_python or nvitop_python(folder / "environment")
        theirs = run_nvitop(python, stubs[2], gpus, seconds) if python else None
        same = None
        if python and frame is not None:
            done = subprocess.run(
                [python, "-c", NVITOP], env=stubs[3].env(), capture_output=True, check=True
            )
            same = differences(frame, json.loads(done.stdout))
    print(f"{gpus} GPUs, every second for {seconds:.0f} s, NVML by the stand-in")
    print(f"{'':<28} {'core':>7} {'calls/GPU/s':>12} {'RSS MB':>7}")
    rows = [("sampler", ours), ("  of that the host's", host)]
    rows += [("nvitop, screen included", theirs)] if theirs else []
    for name, row in rows:
        print(f"{name:<28} {row.percent:>5.2f} % {row.calls:>12.1f} {row.rss_mb:>7.0f}")
    print(f"{'budget':<28} {BUDGET_PERCENT:>5.2f} % {BUDGET_CALLS:>12.1f}")
    if same is not None:
        print("the same in both: " + ", ".join(SAME) if not same else "\n".join(same))
    over = ours.percent > BUDGET_PERCENT or ours.calls > BUDGET_CALLS
    return 1 if over or same or frame is None or len(frame.gpus) != gpus else 0


if __name__ == "__main__":
    sys.exit(main())
