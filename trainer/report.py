"""What a run prints: stdout is data, stderr is narration, both from rank 0 alone."""

import sys
from typing import TextIO

__all__ = ["Reporter"]


class Reporter:
    """Prints rows and notes, or swallows them (`enabled` false, on every other rank)."""

    def __init__(
        self, *, enabled: bool = True, out: TextIO | None = None, err: TextIO | None = None
    ) -> None:
        self.enabled = enabled
        self._out = out if out is not None else sys.stdout
        self._err = err if err is not None else sys.stderr

    def row(self, **values: int | float) -> None:
        """One line of ``name value`` pairs, flushed at once: a pipe's reader follows the run."""
        if self.enabled:
            self._out.write("  ".join(f"{k} {_text(v)}" for k, v in values.items()) + "\n")
            self._out.flush()

    def note(self, sentence: str) -> None:
        """One line for the person at the terminal."""
        if self.enabled:
            self._err.write(f"trainer: {sentence}\n")
            self._err.flush()


def _text(value: int | float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
