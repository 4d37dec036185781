"""The live screens. Importing this package loads Textual only when the app is asked for."""

from typing import TYPE_CHECKING, Any

__all__ = ["GpuwatchApp"]

if TYPE_CHECKING:
    from gpuwatch.tui.app import GpuwatchApp


def __getattr__(name: str) -> Any:
    if name == "GpuwatchApp":
        from gpuwatch.tui.app import GpuwatchApp

        return GpuwatchApp
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
