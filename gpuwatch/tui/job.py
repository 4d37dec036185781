"""The command whose output is shown and that ends with the screen, or goes on without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gpuwatch.store.views import RunView, View
from gpuwatch.tui.output import OutputRing

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import RunDiagnosis

__all__ = ["Job", "JobState", "runs_of", "state_of"]


class Job(Protocol):
    """A command that `gpuwatch run --tui` has started; nothing here blocks."""

    @property
    def run(self) -> str:
        """The id of its run, empty where its ranks find one themselves."""

    @property
    def command(self) -> str:
        """The command as it was typed."""

    @property
    def pid(self) -> int:
        """Its first process, 0 for as long as it has not been started."""

    @property
    def log(self) -> str:
        """The path of the file that holds all of its output."""

    @property
    def output(self) -> OutputRing:
        """The last lines of its output."""

    @property
    def exit_code(self) -> int | None:
        """What it ended with, 128 + the number of a signal; None while it runs."""

    @property
    def lost(self) -> str:
        """Why it is not known whether it runs, empty where it is."""

    @property
    def stopping(self) -> str:
        """What was done to stop it, and what comes next; empty where nothing was."""

    @property
    def elapsed_s(self) -> float:
        """How long it has run, or ran."""

    def stop(self) -> None:
        """Start to stop it, gently; called again, less gently."""

    def report(self, view: View, found: Mapping[str, RunDiagnosis]) -> list[str]:
        """Return the card of its run, a line for each of its rows, however long.

        Empty where no process of it was watched.
        """


@dataclass(frozen=True, slots=True)
class JobState:
    """A job as a screen draws it. `word` says how it is, in the style of that name."""

    word: str
    style: str
    command: str
    run: str
    ended: bool


def state_of(job: Job) -> JobState:
    """Return how a job is now."""
    code = job.exit_code
    if code is not None:
        word, style = f"■ exit code {code}", "ok"
        if code:
            word, style = f"✖ exit code {code}", "critical"
    elif job.lost:
        word, style = "▲ out of sight", "warning"
    elif job.stopping:
        word, style = "■ stopping", "warning"
    else:
        word, style = "▶ running", "ok"
    return JobState(word, style, job.command, job.run, code is not None or bool(job.lost))


def runs_of(view: View, run: str) -> list[RunView]:
    """Return the trainings of a command by its run id, the newest first: `RUN`, `RUN.2`, ..."""
    return [item for item in view.runs if item.run == run or item.run.startswith(f"{run}.")]
