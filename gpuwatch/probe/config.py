"""The hello of a rank: who it is and how it is configured, as far as torch tells."""

import os
import platform
import socket
import sys
from typing import Any

import torch

from gpuwatch import __version__
from gpuwatch.probe.identity import Identity
from gpuwatch.probe.patches import Marks
from gpuwatch.probe.text import TEXT, wire_text
from gpuwatch.schema import Hello, Knob, Precision, Versions
from gpuwatch.wire.publish.rundir import boot_id, process_start_ticks

__all__ = ["build_hello"]


def _started_s(pid: int) -> float:
    """Wall time at which the process started, from its ticks since boot; 0 where unknown."""
    ticks = process_start_ticks(pid)
    try:
        with open("/proc/stat", "rb") as file:
            boot_s = next(int(line.split()[1]) for line in file if line.startswith(b"btime"))
    except (OSError, StopIteration, ValueError):
        return 0.0
    return boot_s + ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def build_hello(
    identity: Identity,
    marks: Marks,
    *,
    name: str,
    started_s: float,
    dataset_path: str,
    control: bool,
    knobs: tuple[Knob, ...] = (),
) -> Hello:
    """Read the configuration that is known by now. Called in the telemetry thread."""
    device = marks.device or ("cuda" if _cuda_in_use() else "cpu")
    device_name, device_uuid = _device(device)
    return Hello(
        host=wire_text(socket.gethostname()),
        pid=os.getpid(),
        pid_started_s=_started_s(os.getpid()),
        world_size=identity.world_size,
        local_rank=identity.local_rank,
        run_name=wire_text(name),
        run_source=identity.run_source,
        started_s=started_s,
        script=wire_text(" ".join(sys.argv), TEXT),
        device=wire_text(device),
        device_name=device_name,
        device_uuid=device_uuid,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        torch_threads=torch.get_num_threads(),
        versions=Versions(
            gpuwatch=__version__,
            python=platform.python_version(),
            torch=str(torch.__version__),
            cuda=str(torch.version.cuda or ""),
            nccl=_nccl() if _cuda_in_use() else "",
        ),
        loaders=tuple(marks.loaders.values())[:64],
        ddp=marks.ddp,
        precision=Precision(
            float32_matmul=_float32_matmul(),
            cudnn_tf32=_cudnn_tf32() if _cuda_in_use() else None,
            autocast=marks.autocast,
            grad_scaler=marks.grad_scaler,
        ),
        dataset_path=wire_text(dataset_path, TEXT),
        allow_control=control,
        boot_id=boot_id(),
        parallel=tuple(marks.parallel),
        frameworks=tuple(marks.signals.frameworks),
        knobs=knobs,
    )


def _cuda_in_use() -> bool:
    """Whether the process has touched a GPU; asking never makes it touch one."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _nccl() -> str:
    """Return the version of NCCL, empty where this torch is built without it."""
    try:
        version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except (AttributeError, ImportError, RuntimeError):
        return ""
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _float32_matmul() -> str:
    """Return torch's word for the precision; it has none where old and new flags were mixed."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return ""


def _cudnn_tf32() -> bool | None:
    """Whether cuDNN may use TF32, None where convolutions and RNNs differ: torch then raises."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return None


def _device(device: str) -> tuple[str, str]:
    if not device.startswith("cuda") or not _cuda_in_use():
        return "", ""
    try:
        properties = torch.cuda.get_device_properties(torch.device(device))
    except (RuntimeError, AssertionError):
        return "", ""
    uuid = str(getattr(properties, "uuid", "") or "")
    # NVML writes the prefix, torch does not.
    return wire_text(properties.name), f"GPU-{uuid}" if uuid and not uuid.startswith(
        "GPU-"
    ) else uuid
