"""What the one-shot commands say of a recording: its last picture, and what was found in it."""

import itertools
from typing import Any

import click

from gpuwatch.diagnosis import Engine, RunDiagnosis
from gpuwatch.recording import Player, Recording, open_recording
from gpuwatch.store import View

__all__ = ["judged", "last_view", "narrate", "recording_document"]

_TICK_S = 1.0
"""As often as a live monitor evaluates."""

_CLOSE_S = 1200.0
_EARLY_TICKS = 1200
"""The last 20 minutes of a long recording are evaluated every second; what lies before them so
many times, as findings that opened there are open since, or were resolved."""

_SHORT_S = 3.0
"""A recording so short is the only evidence there is, as the window is to a live `diagnose`."""


def last_view(path: str) -> tuple[View, Recording]:
    """Return the picture at the end of a recording, and the recording (closed).

    Raises:
        TargetError: it cannot be read.
    """
    with open_recording(path) as recording:
        player = Player(recording)
        player.advance(recording.duration_s)
        return player.view(), recording


def judged(path: str) -> tuple[View, dict[str, RunDiagnosis], Recording]:
    """Return the picture at the end, and what a monitor that watched it all would have found.

    The rules see the recording once a second of its own time (its beginning less often where it
    is long), so that findings open, close and keep their numbers as they do live.

    Raises:
        TargetError: it cannot be read.
    """
    with open_recording(path) as recording:
        engine = Engine(open_after=1) if recording.duration_s < _SHORT_S else Engine()
        player = Player(recording)
        early_s = recording.duration_s - _CLOSE_S
        early = player.ticks(max(_TICK_S, early_s / _EARLY_TICKS), early_s) if early_s > 0 else ()
        found: dict[str, RunDiagnosis] = {}
        view = View(version=0, at_s=0.0)
        for view in itertools.chain(early, player.ticks(_TICK_S)):
            found.update((diagnosis.run, diagnosis) for diagnosis in engine(view))
        return view, found, recording


def recording_document(recording: Recording) -> dict[str, Any]:
    """Return what a document says of the recording that it was made from."""
    return {
        "file": recording.path,
        "started_s": recording.started_s,
        "duration_s": round(recording.duration_s, 3),
        "frames": len(recording),
        "problem": recording.problem or None,
    }


def narrate(recording: Recording) -> None:
    """Say on stderr what could not be read."""
    if recording.problem:
        click.echo(f"gpuwatch: {recording.problem}", err=True)
