"""What a run consisted of, as one JSON file: enough to explain it, or to do it again."""

import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trainer.config import Config
from trainer.distributed import Placement

__all__ = [
    "KEPT",
    "SCHEMA",
    "environment",
    "git_state",
    "manifest",
    "state_folder",
    "write_manifest",
]

SCHEMA = 1
KEPT = 200
"""Newest manifests; older ones are dropped when another is written."""

_PACKAGES = (
    "torch",
    "gpuwatch-trainer",
    "gpuwatch-monitor",
    "numpy",
    "pillow",
    "transformers",
    "datasets",
    "tokenizers",
    "safetensors",
)
# Only names that are known to hold settings: an environment is full of other people's secrets.
_PREFIXES = ("CUDA_", "NCCL_", "TORCH_", "GLOO_", "OMP_", "MKL_", "KMP_", "TRAINER_", "SLURM_JOB")
_NAMES = ("PYTHONHASHSEED", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SECRETS = ("TOKEN", "SECRET", "PASSWORD", "PASSPHRASE", "KEY", "CREDENTIAL")
_GIT_LIMIT_S = 5.0


def state_folder() -> Path:
    """``$XDG_STATE_HOME/gpuwatch-trainer``, by default below ``~/.local/state``."""
    base = os.environ.get("XDG_STATE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".local/state"
    return root / "gpuwatch-trainer"


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how a training runs; what may be a secret is left out."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name.startswith(_PREFIXES) or name in _NAMES)
        and not any(word in name for word in _SECRETS)
    }


def git_state(folder: Path) -> dict[str, Any]:
    """Commit and whether there are changes, or why that is not known."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(folder), *words],
                capture_output=True,
                text=True,
                timeout=_GIT_LIMIT_S,
                check=True,
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except FileNotFoundError:
        return {"commit": None, "reason": "git is not installed"}
    except subprocess.TimeoutExpired:
        return {"commit": None, "reason": f"git took longer than {_GIT_LIMIT_S:.0f} s"}
    except subprocess.CalledProcessError:
        return {"commit": None, "reason": "not in a git repository"}
    return {"commit": commit, "changed": bool(changes)}


def manifest(config: Config, placement: Placement, precision: str) -> dict[str, Any]:
    """Configuration, versions, git, environment, machine. `precision` is the mode ``auto`` gave."""
    cuda = placement.device.type == "cuda"
    return {
        "schema": SCHEMA,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "configuration": config.model_dump(mode="json"),
        "settled": {"precision": precision, "device": str(placement.device)},
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if cuda else None,  # type: ignore[no-untyped-call]
            "nccl": _nccl_version() if cuda else None,
        },
        "git": git_state(Path.cwd()),
        "machine": {
            "host": socket.gethostname(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "device": torch.cuda.get_device_name(placement.device) if cuda else "cpu",
        },
        "ranks": {"world_size": placement.world_size, "on_this_node": placement.ranks_here},
        "environment": environment(os.environ),
    }


def write_manifest(config: Config, placement: Placement, precision: str) -> Path | None:
    """Write it into a new folder of the state folder; its path, or None where that cannot be.

    A training does not fail for want of a manifest.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = state_folder() / "runs" / f"{stamp}-{config.preset}-{os.getpid()}"
    path = folder / "manifest.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        temporary.write_text(
            json.dumps(manifest(config, placement, precision), indent=2) + "\n", encoding="utf-8"
        )
        os.replace(temporary, path)
    except OSError:
        return None
    # Another run may be dropping the same ones.
    with contextlib.suppress(OSError):
        _drop_oldest(folder.parent)
    return path


def _drop_oldest(runs: Path) -> None:
    """Folders that hold a manifest and nothing else, whose names begin with the time."""
    made = sorted(folder for folder in runs.iterdir() if folder.name[:8].isdecimal())
    for folder in made[:-KEPT]:
        if [entry.name for entry in folder.iterdir()] == ["manifest.json"]:
            (folder / "manifest.json").unlink(missing_ok=True)
            folder.rmdir()


def _nccl_version() -> str:
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
