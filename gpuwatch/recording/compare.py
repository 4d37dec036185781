"""Recordings as sides of a comparison; what is compared is in `gpuwatch.store.compare`."""

import contextlib

from gpuwatch.errors import FrameError
from gpuwatch.frames import decode_node_frame, decode_rank_frame, printable
from gpuwatch.recording.read import Recording
from gpuwatch.store.compare import Change, Comparison, Setting, compare_runs, compare_sides
from gpuwatch.store.track import PAUSES, Steps, Track

__all__ = ["Change", "Comparison", "Setting", "compare_runs", "compare_sides", "read_steps"]


def read_steps(recording: Recording, run: str) -> Steps:
    """Return the steady steps of a run (by its id as views have it), not only the last window's.

    The newest 8,192 at most, fewer for very many ranks. The recording is read through once more.

    Raises:
        TargetError: the file is not what it was when it was opened.
    """
    track = Track()
    for _, data in recording.frames():
        for raw in decode_node_frame(data).frames:
            # What cannot be read is named when the recording is opened, and is left out here.
            with contextlib.suppress(FrameError):
                frame = decode_rank_frame(bytes(raw))
                if printable(frame.run) != run:
                    continue
                pauses = [span.step for span in frame.spans if span.name in PAUSES]
                track.add(frame.rank, frame.incarnation, frame.records, pauses)
    track.settle()
    return track.steps()
