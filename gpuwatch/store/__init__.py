"""The live picture: windows per rank, rollups and immutable views."""

from gpuwatch.store.live import Store
from gpuwatch.store.session import Session
from gpuwatch.store.views import Event, NodeView, RankView, Rollup, RunView, View

__all__ = ["Event", "NodeView", "RankView", "Rollup", "RunView", "Session", "Store", "View"]
