"""What pages about a question to one rank have in common."""

from __future__ import annotations

from gpuwatch.store.views import RankView, View
from gpuwatch.tui.scene import Scene
from gpuwatch.tui.screens.reading import ReadingScreen

__all__ = ["AskingScreen"]

_UNKNOWN = "does not know the verb"


class AskingScreen(ReadingScreen):
    """A page of one rank of one run, whatever is selected elsewhere meanwhile."""

    def __init__(self, run: str, rank: int) -> None:
        super().__init__()
        self._run = run
        self._rank = rank

    def rank_meant(self, scene: Scene) -> int | None:
        """Return the rank of the page: what is asked from here is asked of it too."""
        return self._rank

    def rank_in(self, view: View) -> RankView | None:
        """Return the rank as it is in a view."""
        run = view.run(self._run)
        return next((r for r in run.ranks if r.rank == self._rank), None) if run else None

    def run_name(self) -> str:
        """Return the name of the run, as the person knows it."""
        run = self.gpuwatch.watcher.newest.run(self._run)
        return (run.name or run.run) if run is not None else self._run

    def explained(self, error: str, rank: RankView | None) -> str:
        """Return an error with what can be done about it where that is known."""
        if _UNKNOWN not in error:
            return error
        version = rank.hello.versions.gpuwatch if rank is not None and rank.hello else ""
        old = f" ({version})" if version else ""
        return f"{error}: the training runs with an older gpuwatch{old}, a newer one knows it"
