"""The seam between the picture and where it comes from."""

from typing import Protocol

from gpuwatch.store.views import View

__all__ = ["Session"]


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
