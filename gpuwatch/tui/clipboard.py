"""Copying: into a buffer of tmux where there is one, else through the terminal and on trust."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

__all__ = ["runs_in_tmux", "to_tmux"]

_ANSWER_S = 2.0


def runs_in_tmux(environ: Mapping[str, str]) -> bool:
    """Tell whether the screen is a window of a tmux that can be told of a buffer.

    tmux ignores the terminal's own way (OSC 52) unless `set-clipboard` is `on`; its default is
    `external`, which lets only tmux itself set a clipboard.
    """
    return bool(environ.get("TMUX")) and shutil.which("tmux") is not None


def to_tmux(text: str) -> bool:
    """Put text into a new buffer of tmux, and on the clipboard of its terminal where it may.

    Returns whether there is such a buffer now; waits 2 s at most, so it is called in a thread.
    """
    # -w, for the terminal's clipboard too, is known from tmux 3.2 on.
    for options in (["-w"], []):
        try:
            done = subprocess.run(
                ["tmux", "load-buffer", *options, "-"],
                input=text.encode("utf-8", "replace"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_ANSWER_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        if done.returncode == 0:
            return True
    return False
