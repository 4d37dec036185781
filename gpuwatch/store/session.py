"""The seam between the picture and where it comes from."""

from typing import Protocol

from gpuwatch.store.views import View

__all__ = ["Playback", "Session"]


class Session(Protocol):
    """A source of views: live, replayed or made up. Calls never block on the network."""

    @property
    def version(self) -> int:
        """Rises with every change; a screen that has drawn it has nothing to do."""

    def view(self) -> View:
        """Return the present picture."""

    def send(
        self,
        verb: str,
        run: str,
        rank: int | None = None,
        args: dict[str, str | int | float | bool] | None = None,
    ) -> str:
        """Queue a command for one rank, or all of a run, and return its id.

        The answers arrive in `RankView.replies`. A source without a training behind it raises
        TargetError.
        """

    def close(self) -> None:
        """Let go of everything; returns within 0.5 s whatever hangs."""


class Playback(Session, Protocol):
    """A Session over the past, which can be moved in time: a recording.

    `paused` and `speed` (seconds of the recording a second) may be set. After a `seek` the view is
    that of the new position as soon as it is made; `seeks` counts them, for what keeps conclusions.
    """

    paused: bool
    speed: float

    @property
    def position(self) -> float:
        """Seconds from the beginning to the moment that is played."""

    @property
    def duration(self) -> float:
        """Seconds from the beginning to the end."""

    @property
    def seeks(self) -> int:
        """How often the position was set."""

    def seek(self, position: float) -> None:
        """Go to a position in seconds; one outside means the beginning or the end."""
