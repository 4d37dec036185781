"""The live picture: windows per rank, rollups and immutable views.

`Store` is resolved on first use: what only draws views does not pay for decoding frames.
"""

from typing import TYPE_CHECKING, Any

from gpuwatch.store.session import Session
from gpuwatch.store.views import Event, NodeView, RankView, Rollup, RunView, View

__all__ = ["Event", "NodeView", "RankView", "Rollup", "RunView", "Session", "Store", "View"]

if TYPE_CHECKING:
    from gpuwatch.store.live import Store


def __getattr__(name: str) -> Any:
    if name == "Store":
        from gpuwatch.store.live import Store

        return Store
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
