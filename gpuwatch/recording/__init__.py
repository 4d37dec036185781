"""Recordings: a run's telemetry on disk, the same frames as on the wire.

A file is written by `Recorder` and read by `open_recording`; `ReplaySession` plays one as a
`Session`, `Player` feeds one into a Store as fast as it can be read.
"""

from gpuwatch.recording.read import Recording, open_recording
from gpuwatch.recording.replay import Player, ReplaySession
from gpuwatch.recording.write import Recorder, RecordingFullError

__all__ = [
    "Player",
    "Recorder",
    "Recording",
    "RecordingFullError",
    "ReplaySession",
    "open_recording",
]
