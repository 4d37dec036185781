"""GPU readings out of a file: what a sampler wrote once, played again at its own pace.

The file is what the sampler writes on stdout: `SensorFrame`s behind their length. So a machine
without a GPU can be shown what another one saw (`python -m gpuwatch.sensors --replay-gpus FILE`),
with the source of every reading marked as replayed.
"""

import bisect
import time
from collections.abc import Callable

from msgspec.structs import replace

from gpuwatch.errors import FrameError
from gpuwatch.frames import FrameStream, decode_sensor_frame
from gpuwatch.schema import GpuSample, Reading, SensorFrame
from gpuwatch.sensors.backend import Devices

__all__ = ["ReplayBackend"]

MOST_BYTES = 256 * 2**20


class ReplayBackend:
    """Plays the GPUs of a file, from its first frame on, and begins again at its end.

    Args:
        path: the file.
        clock: seconds that only grow.
    """

    name = "replay"

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._frames: list[SensorFrame] = []
        self._times_s: list[float] = []
        self._length_s = 0.0
        self._began_s = 0.0
        self._reason = "not read yet"

    def probe(self) -> str:
        """Read the file. Returns why it cannot be played, empty if it can."""
        self._reason = self._read()
        self._began_s = self._clock()
        return self._reason

    def busy(self) -> str:
        """Nothing is waited for."""
        return ""

    def sample(self) -> Devices:
        """Return the devices as they were at this moment of the file."""
        if self._reason:
            return Devices((), self._reason)
        at_s = (self._clock() - self._began_s) % self._length_s
        frame = self._frames[bisect.bisect_right(self._times_s, at_s) - 1]
        return Devices(tuple(_replayed(gpu) for gpu in frame.gpus), frame.gpus_reason)

    def close(self) -> None:
        """Forget the file."""
        self._frames = []

    def _read(self) -> str:
        try:
            with open(self._path, "rb") as file:
                data = file.read(MOST_BYTES + 1)
        except OSError as exc:
            return f"cannot replay {self._path}: {exc.strerror}"
        if len(data) > MOST_BYTES:
            return f"cannot replay {self._path}: more than {MOST_BYTES // 2**20} MiB"
        frames: list[SensorFrame] = []
        damage = ""
        try:
            frames.extend(decode_sensor_frame(message) for message in FrameStream().feed(data))
        except FrameError as exc:
            damage = str(exc)
        if not frames:
            return f"cannot replay {self._path}: {damage or 'there is no sensor frame in it'}"
        frames.sort(key=lambda frame: frame.sent_s)
        start_s = frames[0].sent_s
        self._frames = frames
        self._times_s = [frame.sent_s - start_s for frame in frames]
        # The last one lasts as long as the others on average.
        gaps = max(1, len(frames) - 1)
        self._length_s = self._times_s[-1] + max(0.1, self._times_s[-1] / gaps)
        return ""


def _replayed(gpu: GpuSample) -> GpuSample:
    readings = {name: _marked(reading) for name, reading in gpu.readings.items()}
    return replace(gpu, readings=readings)


def _marked(reading: Reading) -> Reading:
    return Reading(
        reading.value,
        reading.unit,
        f"replay of {reading.source}"[:256],
        reading.age_s,
        reading.state,
        reading.reason,
    )
