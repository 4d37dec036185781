"""`gpuwatch doctor`: what this machine can measure, and what would help where it cannot."""

import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import click

from gpuwatch.schema import Reading, SensorFrame

__all__ = ["Check", "Remedy", "checks_of", "doctor", "remedy_for", "table"]

TICKS = 3
"""Rates need two, and a GPU's own counters are sampled in pairs from the first one on."""
INTERVAL_S = 0.4
PATIENCE_S = 8.0

_GPU = {
    "gpu_util": "share of time with a kernel",
    "sm_active": "share of cycles with work on the SMs",
    "sm_occupancy": "warps against the maximum",
    "tensor_active": "tensor cores",
    "dram_active": "memory bandwidth",
    "memory_used": "memory in use",
    "power": "power drawn",
    "power_limit": "power limit",
    "sm_clock": "SM clock",
    "sm_clock_max": "SM clock at most",
    "memory_clock": "memory clock",
    "temperature": "temperature",
    "memory_temperature": "memory temperature",
    "fan": "fan",
    "pcie_rx": "PCIe to the device",
    "pcie_tx": "PCIe from the device",
    "nvlink_rx": "NVLink received",
    "nvlink_tx": "NVLink sent",
    "link_gen": "PCIe generation",
    "link_width": "PCIe lanes",
    "ecc_uncorrected": "uncorrected memory errors",
    "numa_node": "NUMA node of the device",
}
_HOST = {
    "cpu_percent": "CPU, all cores",
    "cpu_iowait_percent": "waiting for disks",
    "memory_used": "memory in use",
    "swap_used": "swap in use",
    "shm_total": "/dev/shm, where loader workers hand over batches",
    "psi_cpu_some": "tasks that stand for want of CPU",
    "psi_memory_some": "... of memory",
    "psi_io_some": "... of disks",
    "major_faults_per_s": "pages fetched from disk",
}
_PROCESS = {
    "cpu_percent": "CPU of a rank or worker",
    "rss": "resident memory",
    "uss": "private memory",
    "read_bytes_per_s": "bytes read from storage",
    "affinity_cores": "cores a rank may use",
    "numa_node": "NUMA node of a rank",
    "cpu_quota_cores": "CPU quota",
    "memory_limit": "memory limit",
}
# n/a that is good news: there is nothing to hold anything back.
_FINE = frozenset({"no CPU quota", "no memory limit", "looked at rarely, not yet"})


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `state` is ok, na or error; `value` is text for people."""

    scope: str
    device: str
    metric: str
    about: str
    state: str
    value: str = ""
    source: str = ""
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Remedy:
    """What helps where a reason matches."""

    pattern: re.Pattern[str]
    text: str


def _remedy(pattern: str, text: str) -> Remedy:
    return Remedy(re.compile(pattern, re.IGNORECASE), text)


_DCGM = "start dcgm-exporter and set GPUWATCH_DCGM_URL=http://localhost:9400/metrics"
# The first that matches counts.
_REMEDIES = (
    _remedy(r"no dcgm-exporter at|is it a dcgm-exporter", "check GPUWATCH_DCGM_URL"),
    _remedy(r"does not export it", "add the field to the exporter's counters file and restart it"),
    _remedy(r"no GPM", _DCGM + " (data-centre cards from Volta on)"),
    _remedy(
        r"no NVIDIA driver|libnvidia-ml",
        "install NVIDIA's driver; in a container, start it with --gpus all",
    ),
    _remedy(r"first (tick|sample)|not yet", "ask again: it needs a moment"),
    _remedy(r"does not tell pressure", "boot the kernel with psi=1"),
    _remedy(r"belongs to someone else", "run gpuwatch as the user of the training"),
    _remedy(r"in use by another program", "end the profiler that holds the counters"),
    _remedy(r"not answering|does not answer", "look into dmesg for Xid or a hung driver"),
    _remedy(r"outside what is mounted|no control groups", "run gpuwatch inside the container"),
)


def remedy_for(reason: str) -> str:
    """Return what would help, empty where nothing is known to."""
    return next((r.text for r in _REMEDIES if r.pattern.search(reason)), "")


def _value(reading: Reading) -> str:
    value, unit = reading.value, reading.unit
    if value is None:
        return ""
    for suffix, size in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20)):
        if unit == "B" and value >= size:
            return f"{value / size:,.1f} {suffix}"
    if unit == "B/s":
        return f"{value / 1e6:,.1f} MB/s"
    if unit == "%":
        return f"{value:.0f} %"
    return f"{value:,.4g} {unit}".strip()


def _check(scope: str, device: str, metric: str, about: str, reading: Reading | None) -> Check:
    if reading is None:
        return Check(scope, device, metric, about, "na", reason="not reported here")
    if reading.value is not None:
        return Check(scope, device, metric, about, "ok", _value(reading), reading.source)
    fine = reading.reason in _FINE
    return Check(
        scope,
        device,
        metric,
        about,
        "ok" if fine else ("error" if reading.state == "error" else "na"),
        reading.reason if fine else "",
        reading.source,
        "" if fine else reading.reason,
        "" if fine else remedy_for(reading.reason),
    )


def _group(
    scope: str, device: str, wanted: Mapping[str, str], readings: Mapping[str, Reading]
) -> list[Check]:
    return [
        _check(scope, device, name, about, readings.get(name)) for name, about in wanted.items()
    ]


def checks_of(frame: SensorFrame | None, why_not: str = "") -> list[Check]:
    """Return the checks of sensors; `frame` None: the sampler gave nothing, and `why_not`."""
    if frame is None:
        reason = why_not or "the sampler gave no reading"
        return [
            Check(scope, "", "*", "all readings", "error", "", "", reason, remedy_for(reason))
            for scope in ("gpu", "host", "process")
        ]
    checks: list[Check] = []
    for gpu in frame.gpus:
        device = f"{gpu.index} {gpu.name}".strip()
        if gpu.lost:
            checks.append(Check("gpu", device, "*", "the device", "error", reason=gpu.lost))
        state = "ok" if gpu.driver else "na"
        reason = "" if gpu.driver else gpu.driver_reason or "not told"
        about = "version of the driver"
        checks.append(Check("gpu", device, "driver", about, state, gpu.driver, reason=reason))
        checks += _group("gpu", device, _GPU, gpu.readings)
    if not frame.gpus:
        reason = frame.gpus_reason or "no device was found"
        remedy = remedy_for(reason)
        checks += [
            Check("gpu", "", name, about, "na", reason=reason, remedy=remedy)
            for name, about in _GPU.items()
        ]
    checks += _group("host", "", _HOST, frame.host.readings)
    for item in frame.host.io:
        if item.kind == "disk":
            checks += _group(
                "host", item.name, {"read_bytes_per_s": "read from this disk"}, item.readings
            )
    ranks = [p for p in frame.processes if p.role == "rank"]
    checks += _group("process", "", _PROCESS, ranks[0].readings if ranks else {})
    return checks


# --- the training's side ------------------------------------------------------------------------


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def training_checks() -> list[Check]:
    """Return what a training in this environment could tell; torch is not imported."""
    torch = _version("torch")
    checks = []
    if not torch:
        checks.append(
            Check(
                "training", "", "torch", "PyTorch beside this gpuwatch", "na",
                reason="torch is not installed in this environment",
                remedy=f"trainings elsewhere need gpuwatch-monitor in theirs ({sys.executable})",
            )
        )  # fmt: skip
    else:
        checks.append(Check("training", "", "torch", "PyTorch beside this gpuwatch", "ok", torch))
        if "+cpu" in torch:
            checks.append(
                Check(
                    "training", "", "device phases", "where the device's time goes", "na",
                    reason=f"torch {torch} is a CPU build",
                    remedy="install a CUDA build of torch on a GPU machine",
                )
            )  # fmt: skip
    workers = hasattr(os, "memfd_create")
    checks.append(
        Check(
            "training", "", "worker costs", "what a batch costs in its loader worker",
            "ok" if workers else "na",
            "by the workers' own clocks" if workers else "",
            reason="" if workers else f"no shared memory without a name on {sys.platform}",
        )
    )  # fmt: skip
    return checks


def environment_checks() -> list[Check]:
    """Return what gpuwatch itself needs of this machine."""
    from gpuwatch.commands.room import no_room
    from gpuwatch.errors import GpuwatchError
    from gpuwatch.wire.publish import run_directory

    name, about = "run directory", "where ranks announce themselves"
    try:
        directory = run_directory()
        reason, _, remedy = no_room(directory).partition(": ")
    except (GpuwatchError, OSError) as exc:
        reason, remedy = str(exc), "set GPUWATCH_DIR to a directory of your own"
    if reason:
        checks = [Check("gpuwatch", "", name, about, "error", reason=reason, remedy=remedy)]
    else:
        checks = [Check("gpuwatch", "", name, about, "ok", str(directory))]
    url = os.environ.get("GPUWATCH_DCGM_URL", "")
    if url:
        checks.append(Check("gpuwatch", "", "dcgm-exporter", "GPUWATCH_DCGM_URL", "ok", url))
    container = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
    if container:
        checks.append(
            Check(
                "gpuwatch", "", "container", "process table", "na",
                reason="inside a container: GPU processes of others show the host's pids",
                remedy="start the container with --pid=host to see their names",
            )
        )  # fmt: skip
    return checks


# --- the sampler ---------------------------------------------------------------------------------


def ask_sampler(
    argv: Sequence[str], *, ticks: int = TICKS, patience_s: float = PATIENCE_S
) -> tuple[SensorFrame | None, str]:
    """Run the sampler for some ticks; returns its last frame, or None and why.

    It is a process of its own: a driver that hangs costs patience, a crash a sentence.
    """
    import msgspec

    from gpuwatch.errors import FrameError
    from gpuwatch.frames import FrameStream, decode_sensor_frame, packed

    process = subprocess.Popen(
        [*argv, "--interval-s", str(INTERVAL_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    frames: list[SensorFrame] = []
    done = threading.Event()

    def read() -> None:
        stream = FrameStream()
        assert process.stdout is not None
        try:
            while len(frames) < ticks:
                data = os.read(process.stdout.fileno(), 65536)
                if not data:
                    break
                frames.extend(decode_sensor_frame(message) for message in stream.feed(data))
        except (OSError, FrameError):
            pass
        done.set()

    reader = threading.Thread(target=read, name="gpuwatch-doctor", daemon=True)
    try:
        with contextlib.suppress(OSError):
            # This very process stands for a rank.
            process.stdin.write(packed(msgspec.msgpack.encode([[os.getpid()], [os.getcwd()]])))
            process.stdin.flush()
        reader.start()
        over = done.wait(patience_s)
        if over:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        ended = process.poll()
    finally:
        process.kill()
        process.wait()
        reader.join(1.0)
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
    if frames:
        return frames[-1], ""
    if ended is not None:
        return None, f"the sampler ended with status {ended} before its first reading"
    if over:
        return None, "the sampler said what is no reading"
    return None, f"the sampler gave no reading in {patience_s:.0f} s: a driver hangs"


# --- the report ----------------------------------------------------------------------------------

_GLYPH = {"ok": "✔", "na": "·", "error": "✖"}


def table(checks: Iterable[Check], width: int = 100) -> list[str]:
    """Return the report as lines; metrics of a device with the same reason share one line."""
    lines: list[str] = []
    scope = device = None
    for check, names in _merged(list(checks)):
        if (check.scope, check.device) != (scope, device):
            scope, device = check.scope, check.device
            lines += ["", f"{scope} {device}".rstrip()]
        name = ", ".join(names)
        if check.state == "ok":
            source = f"  {check.source}" if check.source else ""
            lines.append(f"  {_GLYPH['ok']} {name:<22} {check.value:<26} {check.about}{source}")
            continue
        lines += _wrapped(f"  {_GLYPH[check.state]} {name}: n/a, {check.reason}", width)
        if check.remedy:
            lines += _wrapped(f"      try: {check.remedy}", width)
    return lines[1:]


def _merged(checks: list[Check]) -> list[tuple[Check, list[str]]]:
    found: list[tuple[Check, list[str]]] = []
    for check in checks:
        if found and check.state != "ok":
            last, names = found[-1]
            same = (last.scope, last.device, last.state, last.reason)
            if same == (check.scope, check.device, check.state, check.reason):
                names.append(check.metric)
                continue
        found.append((check, [check.metric]))
    return found


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(text, max(40, width), subsequent_indent=indent)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def doctor(as_json: bool) -> None:
    """Say what this machine can measure; for each thing it cannot, why and the remedy."""
    from gpuwatch import __version__
    from gpuwatch.commands.session import SAMPLER_ARGV
    from gpuwatch.commands.shapes import SCHEMA

    began_s = time.monotonic()
    frame, why_not = ask_sampler(SAMPLER_ARGV)
    checks = [*environment_checks(), *checks_of(frame, why_not), *training_checks()]
    if as_json:
        document = {
            "schema": SCHEMA,
            "node": socket.gethostname(),
            "gpuwatch": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
            "took_s": round(time.monotonic() - began_s, 3),
            "metrics": [
                {
                    "scope": c.scope,
                    "device": c.device or None,
                    "metric": c.metric,
                    "about": c.about,
                    "available": c.state == "ok",
                    "state": c.state,
                    "value": c.value or None,
                    "source": c.source or None,
                    "reason": c.reason or None,
                    "remedy": c.remedy or None,
                }
                for c in checks
            ],
        }
        click.echo(json.dumps(document))
        return
    ok = sum(check.state == "ok" for check in checks)
    click.echo(
        f"gpuwatch {__version__} on {socket.gethostname()}: {ok} of {len(checks)} available\n"
    )
    click.echo("\n".join(table(checks)))
