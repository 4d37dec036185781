"""The stand-in for libnvidia-ml: built once a session, told what to say by a text file.

    stub = Stub(library(), folder)
    stub.write("count 2", "gpu * util 83")
    subprocess.run(..., env=stub.env())
    stub.counts()["nvmlDeviceGetUtilizationRates"]

`nvmlstub.c` says what the lines mean. Nothing here imports gpuwatch: the benchmark uses it too.
"""

import atexit
import functools
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("nvmlstub.c")
_RECORD = struct.Struct("56s17Q")

H100 = (
    "gpu * name NVIDIA H100 80GB HBM3",
    "gpu * util 83",
    "gpu * memory_util 41",
    "gpu * total 85520809984",
    "gpu * used 61000000000",
    "gpu * reserved 500000000",
    "gpu * power 412000",
    "gpu * power_limit 700000",
    "gpu * sm 1755",
    "gpu * sm_max 1980",
    "gpu * memory_clock 2619",
    "gpu * memory_clock_max 2619",
    "gpu * temperature 56",
    "gpu * fan -1",
    "gpu * gen 5",
    "gpu * gen_max 5",
    "gpu * width 16",
    "gpu * width_max 16",
    "gpu * persistence 1",
    "gpu * mig_mode 0",
    "field * 82 71 0 1",
    "field * 3 2 0 3",
    "field * 4 0 0 3",
)
"""A Hopper card without its GPM."""

GPM = (
    "gpm * 2 74.5",
    "gpm * 3 33.25",
    "gpm * 5 22",
    "gpm * 10 48",
    "gpm * 20 400",
    "gpm * 21 3100",
    "gpm * 60 20000",
    "gpm * 61 21000",
)

COUNTERS = (
    "field * 198 1000 3000000000 3",
    "field * 197 5 400000000 3",
    "field * 139 7 2000000 3",
    "field * 138 7 1000000 3",
)
"""PCIe in bytes, NVLink in KiB, per second."""


def compiler() -> str | None:
    """Return a C compiler, None where there is none."""
    return shutil.which("cc")


@functools.cache
def library() -> Path:
    """Build the stand-in, once, and return the folder that holds it.

    Raises:
        RuntimeError: it does not compile.
    """
    folder = Path(tempfile.mkdtemp(prefix="nvmlstub-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    done = subprocess.run(
        [
            *(compiler() or "cc", "-shared", "-fPIC", "-O1", "-pthread"),
            *("-Wl,-soname,libnvidia-ml.so.1", "-o", str(folder / "libnvidia-ml.so.1")),
            str(SOURCE),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return folder


class Count(NamedTuple):
    """Calls of one function: all, and by GPU."""

    total: int
    gpus: tuple[int, ...]


class Stub:
    """One stand-in's state and counts, in `folder`."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._library = library
        self.state = folder / "state"
        self._counts = folder / "counts"

    def write(self, *lines: str) -> None:
        """Replace the whole state; the library sees it within 10 ms."""
        new = self.state.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self.state)

    def env(self, base: dict[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a process that shall find the stand-in."""
        return {
            **(dict(os.environ) if base is None else base),
            "LD_LIBRARY_PATH": str(self._library),
            "NVMLSTUB_STATE": str(self.state),
            "NVMLSTUB_COUNTS": str(self._counts),
        }

    def counts(self) -> dict[str, Count]:
        """Return the calls since the counts file was made, by function."""
        found: dict[str, Count] = {}
        if not self._counts.exists():
            return found
        for name, total, *gpus in _RECORD.iter_unpack(self._counts.read_bytes()):
            if text := name.rstrip(b"\0").decode():
                found[text] = Count(total, tuple(gpus))
        return found


def total(counts: dict[str, Count], *, without: Sequence[str] = ()) -> int:
    """Return all calls but those of `without`."""
    return sum(count.total for name, count in counts.items() if name not in without)
