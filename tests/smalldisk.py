"""A run directory on a file system of its own that is soon full."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import support


@contextlib.contextmanager
def small_run_directory(size_kb: int) -> Iterator[Path]:
    """A run directory with room for so much; the test is skipped where none can be made."""
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("mounting a small file system takes root")
    with support.run_directory() as directory:
        options = ["-t", "tmpfs", "-o", f"size={size_kb}k,mode=700", "gpuwatch", str(directory)]
        done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
        try:
            yield directory
        finally:
            subprocess.run(["umount", "--lazy", str(directory)], check=False)


def fill(directory: Path) -> Path:
    """Leave no byte there; returns the file whose removal makes room again."""
    path = directory / "full"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(512)):
            pass
    return path
