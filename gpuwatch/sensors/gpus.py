"""GPUs: this version says why it reads none."""

import ctypes

from gpuwatch.schema import GpuSample

__all__ = ["GpuBackend"]

_LIBRARY = "libnvidia-ml.so.1"


class GpuBackend:
    """Looks for the NVIDIA management library and reads nothing from it."""

    def __init__(self, library: str = _LIBRARY) -> None:
        self._library = library

    def probe(self) -> str:
        """Say why there are no GPU readings.

        The library is mapped and never initialised: the driver is asked nothing, so nothing can
        hang.
        """
        try:
            ctypes.CDLL(self._library)
        except OSError:
            return f"no NVIDIA driver on this machine ({self._library} not found)"
        return "GPU readings are not read by this version"

    def sample(self) -> tuple[GpuSample, ...]:
        """Return no GPUs."""
        return ()

    def close(self) -> None:
        """Nothing to let go of."""
