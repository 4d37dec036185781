"""A sampler as the node process starts it, over the stand-in, and the frames that it writes."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nvml.stub import Stub

import gpuwatch
from gpuwatch.frames import FrameStream, decode_sensor_frame
from gpuwatch.schema import GpuSample, SensorFrame

ARGV = [sys.executable, "-P", "-m", "gpuwatch.sensors", "--interval-s"]
PATIENCE_S = 30.0


class SamplerRun:
    """A sampler child; `with` ends it."""

    def __init__(self, stub: Stub, interval_s: float = 0.15, **env: str) -> None:
        root = str(Path(gpuwatch.__file__).parents[1])
        self.process = subprocess.Popen(
            [*ARGV, str(interval_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**stub.env(), "PYTHONPATH": root, **env},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin = self.process.stdin
        self._stdout = self.process.stdout
        self._stream = FrameStream()
        self._frames: list[SensorFrame] = []

    def __enter__(self) -> "SamplerRun":
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.stdin, self._stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def frame(self) -> SensorFrame:
        """Return the next frame."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not self._frames:
            ready, _, _ = select.select([self._stdout], [], [], deadline_s - time.monotonic())
            assert ready, "no frame in time"
            data = os.read(self._stdout.fileno(), 1 << 20)
            assert data, f"ended: {self.process.communicate()[1].decode()}"
            self._frames += map(decode_sensor_frame, self._stream.feed(data))
        return self._frames.pop(0)

    def until(self, condition: Callable[[SensorFrame], object], what: str = "") -> SensorFrame:
        """Return the first frame that meets the condition."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            frame = self.frame()
            if condition(frame):
                return frame
        raise AssertionError(f"no frame with {what or condition}: {frame}")

    def gpus(self) -> tuple[GpuSample, ...]:
        """Return the GPUs of the first frame that has some, values of rates included."""
        return self.until(
            lambda f: f.gpus and f.gpus[0].readings["sm_active"].reason != "first sample", "GPUs"
        ).gpus
