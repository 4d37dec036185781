"""The sampler, started by the node process: `python -P -m gpuwatch.sensors [--interval-s 1.0]`."""

import argparse
import math
import os
import signal
import sys

from gpuwatch.sensors.gpus import GpuBackend
from gpuwatch.sensors.host import HostBackend
from gpuwatch.sensors.processes import ProcessBackend
from gpuwatch.sensors.sampler import Sampler, die_with_parent, run


def _interval_s(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or not 0.05 <= value <= 3600.0:
        raise ValueError
    return value


def main() -> int:
    """Run the sampler on stdin and stdout and return the exit status: 0, or 2 for bad usage."""
    parent = os.getppid()
    # The terminal's Ctrl-C is for the monitor. SIGTERM keeps its default action, not a Python
    # handler: that one would wait for a driver call that hangs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    parser = argparse.ArgumentParser(
        prog="gpuwatch.sensors",
        description="Reads this machine's sensors for the node process, which starts it.",
    )
    parser.add_argument(
        "--interval-s",
        type=_interval_s,
        default=1.0,
        metavar="S",
        help="seconds between two ticks, 0.05 to 3600 (default 1.0)",
    )
    interval_s: float = parser.parse_args().interval_s
    if os.isatty(sys.stdout.fileno()):
        parser.error("stdout is a terminal: this process speaks frames to the node process")
    die_with_parent()
    if os.getppid() != parent:  # it ended before the kernel was asked
        return 0
    sampler = Sampler(HostBackend(), GpuBackend(), ProcessBackend())
    try:
        run(sampler, interval_s, sys.stdin.fileno(), sys.stdout.fileno(), parent)
    finally:
        sampler.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
