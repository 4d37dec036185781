"""The session that a TARGET asks for: on this machine, or on another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpuwatch.errors import TargetError

if TYPE_CHECKING:
    from gpuwatch.commands.remote import RemoteSession
    from gpuwatch.commands.session import LiveSession
    from gpuwatch.store import View
    from gpuwatch.store.views import RunView

__all__ = ["is_elsewhere", "named_run", "open_target"]


def is_elsewhere(target: str | None) -> bool:
    """Whether a TARGET is on another machine; else it is a run or a file of this one."""
    return target is not None and "://" in target


def open_target(
    target: str | None, *, tap: Callable[[bytes], None] | None = None
) -> tuple[LiveSession | RemoteSession, str | None]:
    """Return the session on the machine of a TARGET, and the run that the TARGET names there.

    `tap` is called with the bytes of every frame after they are in the picture.

    Raises:
        TargetError: it has `://` and is no target.
        RunDirectoryError: the run directory of this machine cannot be used.
    """
    if target is not None and is_elsewhere(target):
        from gpuwatch.commands.remote import open_session

        return open_session([target], tap=tap)
    from gpuwatch.commands.session import LiveSession

    return LiveSession(tap=tap), target


def named_run(
    view: View, run: str | None, target: str | None
) -> tuple[RunView | None, list[RunView]]:
    """Return (the run meant, the other runs) of a view: the named one, or the newest that lives.

    `target` is what the user typed, for the sentence.

    Raises:
        TargetError: a run is named and is not there.
    """
    from gpuwatch.commands.session import pick_run

    found, others = pick_run(view, run)
    if found is None and run is not None:
        if is_elsewhere(target):
            raise TargetError(f"no run {run!r} there; leave it out to see those there are")
        raise TargetError(f"no run {run!r} here; gpuwatch runs lists those there are")
    return found, others
