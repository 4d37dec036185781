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
from gpuwatch.schema import Ddp, Hello, Precision, Versions
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
    identity: Identity, marks: Marks, *, name: str, started_s: float, dataset_path: str, control: bool
) -> Hello:
    """Read the configuration that is known by now. Called in the telemetry thread."""
    device = marks.device or ("cuda" if torch.cuda.is_initialized() else "cpu")
    device_name, device_uuid = _device(device)
    return Hello(
        host=socket.gethostname()[:256],
        pid=os.getpid(),
        pid_started_s=_started_s(os.getpid()),
        world_size=identity.world_size,
        local_rank=identity.local_rank,
        run_name=name[:256],
        run_source=identity.run_source,
        started_s=started_s,
        script=" ".join(sys.argv)[:4096],
        device=device[:256],
        device_name=device_name,
        device_uuid=device_uuid,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        torch_threads=torch.get_num_threads(),
        versions=Versions(
            gpuwatch=__version__,
            python=platform.python_version(),
            torch=str(torch.__version__),
            cuda=str(torch.version.cuda or ""),
        ),
        loaders=tuple(marks.loaders.values())[:64],
        ddp=_ddp(marks),
        precision=Precision(
            float32_matmul=torch.get_float32_matmul_precision(),
            autocast=marks.autocast,
            grad_scaler=marks.grad_scaler,
        ),
        dataset_path=dataset_path[:4096],
        allow_control=control,
        boot_id=boot_id(),
    )


def _device(device: str) -> tuple[str, str]:
    if not device.startswith("cuda") or not torch.cuda.is_initialized():
        return "", ""
    try:
        properties = torch.cuda.get_device_properties(torch.device(device))
    except (RuntimeError, AssertionError):
        return "", ""
    uuid = str(getattr(properties, "uuid", "") or "")
    # NVML writes the prefix, torch does not.
    return properties.name[:256], f"GPU-{uuid}" if uuid and not uuid.startswith("GPU-") else uuid


def _ddp(marks: Marks) -> Ddp | None:
    module = marks.ddp() if marks.ddp is not None else None
    if module is None:
        return None
    parameters = [p for p in module.parameters() if p.requires_grad]
    group = getattr(module, "process_group", None)
    return Ddp(
        bucket_cap_mb=getattr(module, "bucket_bytes_cap", 0) / 2**20 or None,
        find_unused_parameters=bool(getattr(module, "find_unused_parameters", False)),
        static_graph=bool(getattr(module, "static_graph", False)),
        broadcast_buffers=bool(
            getattr(module, "forward_sync_buffers", getattr(module, "broadcast_buffers", True))
        ),
        gradient_as_bucket_view=bool(getattr(module, "gradient_as_bucket_view", False)),
        comm_hook=_comm_hook(module),
        parameters=sum(p.numel() for p in parameters),
        gradient_bytes=sum(p.numel() * p.element_size() for p in parameters),
        buffers=sum(1 for _ in module.buffers()),
        backend=str(group.name())[:256] if group is not None else "",
    )


def _comm_hook(module: Any) -> str:
    hooks = getattr(module, "_comm_hooks", None) or []
    names = [getattr(hook[0], "__name__", type(hook[0]).__name__) for hook in hooks]
    return ",".join(names)[:256]
