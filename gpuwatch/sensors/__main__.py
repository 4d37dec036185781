"""The sampler, started by the node process.

python -P -m gpuwatch.sensors [--interval-s 1.0] [--without-gpus REASON | --replay-gpus FILE]

GPUWATCH_DCGM_URL in the environment names a dcgm-exporter, whose readings fill in what NVML lacks.
"""

import argparse
import math
import os
import signal
import sys

from gpuwatch.sensors.gpus import GpuBackend, NoGpus
from gpuwatch.sensors.host import HostBackend
from gpuwatch.sensors.processes import ProcessBackend
from gpuwatch.sensors.sampler import GpuSource, Sampler, die_with_parent, run


def _interval_s(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or not 0.05 <= value <= 3600.0:
        raise ValueError
    return value


def _gpus(interval_s: float, without_gpus: str, replayed: str = "") -> GpuSource:
    """Return the source of GPU readings: the drivers or a file, and an exporter if one is named."""
    gpus: GpuSource
    if without_gpus:
        gpus = NoGpus(without_gpus[:4096])
    elif replayed:
        from gpuwatch.sensors.replay import ReplayBackend

        gpus = GpuBackend(ReplayBackend(replayed), interval_s=interval_s)
    else:
        gpus = GpuBackend(interval_s=interval_s)
    url = os.environ.get("GPUWATCH_DCGM_URL", "")
    if url:
        from gpuwatch.sensors.dcgm import DcgmBackend, Overlaid

        gpus = Overlaid(gpus, DcgmBackend(url))
    return gpus


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
    parser.add_argument(
        "--without-gpus",
        metavar="REASON",
        default="",
        help="leave the GPU drivers alone and say this instead: after they crashed it",
    )
    parser.add_argument(
        "--replay-gpus",
        metavar="FILE",
        default="",
        help="instead of this machine's GPUs those that a sampler wrote into a file",
    )
    arguments = parser.parse_args()
    interval_s: float = arguments.interval_s
    without_gpus: str = arguments.without_gpus
    if os.isatty(sys.stdout.fileno()):
        parser.error("stdout is a terminal: this process speaks frames to the node process")
    die_with_parent()
    if os.getppid() != parent:  # it ended before the kernel was asked
        return 0
    gpus = _gpus(interval_s, without_gpus, arguments.replay_gpus)
    sampler = Sampler(HostBackend(), gpus, ProcessBackend())
    try:
        run(sampler, interval_s, sys.stdin.fileno(), sys.stdout.fileno(), parent)
    finally:
        closed = sampler.close()
    if not closed:
        # The library's own exit handlers must not run beneath a call in flight.
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
