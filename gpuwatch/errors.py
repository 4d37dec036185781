"""The one exception tree of gpuwatch.

    GpuwatchError
    ├── FrameError              bytes that are no valid frame
    │   └── WireVersionError    a valid frame of another major version
    ├── RunDirectoryError       the run directory cannot be used
    ├── AgentError              the node process cannot be started or reached
    └── TargetError             a run or a host that was named does not exist

Every message is one sentence for the person at the terminal: what is wrong and, where it can
be known, what to do.
"""

__all__ = [
    "AgentError",
    "FrameError",
    "GpuwatchError",
    "RunDirectoryError",
    "TargetError",
    "WireVersionError",
]


class GpuwatchError(Exception):
    """Root of everything that gpuwatch raises on purpose."""


class FrameError(GpuwatchError):
    """Bytes that cannot be decoded, or that decode to values out of range."""


class WireVersionError(FrameError):
    """A frame of a major version that this gpuwatch does not speak."""


class RunDirectoryError(GpuwatchError):
    """The run directory is missing, not ours, or its path is too long for a socket."""


class AgentError(GpuwatchError):
    """The node process cannot be started or does not answer."""


class TargetError(GpuwatchError):
    """A named run or host does not exist."""
