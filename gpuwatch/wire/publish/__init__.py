"""What a training process may import: the run directory and the sockets of one rank."""

from gpuwatch.wire.publish.rundir import (
    Presence,
    boot_id,
    process_start_ticks,
    read_presence,
    run_directory,
    socket_path,
    trace_folder,
    write_atomic,
)
from gpuwatch.wire.publish.sockets import RankSockets

__all__ = [
    "Presence",
    "RankSockets",
    "boot_id",
    "process_start_ticks",
    "read_presence",
    "run_directory",
    "socket_path",
    "trace_folder",
    "write_atomic",
]
