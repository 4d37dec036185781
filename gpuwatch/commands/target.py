"""The session that a TARGET asks for: on this machine, or on another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpuwatch.errors import TargetError

if TYPE_CHECKING:
    from gpuwatch.commands.remote import RemoteSession
    from gpuwatch.commands.session import LiveSession
    from gpuwatch.store import View
    from gpuwatch.store.views import RunView
    from gpuwatch.wire.collect import JobKey

__all__ = ["is_elsewhere", "job_key", "key_option", "named_run", "open_target"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def key_option(command: _Command) -> _Command:
    """Give a command the option --key, for a TARGET that is tcp://."""
    option = click.option(
        "--key",
        metavar="FILE",
        help="The key of the job, for a tcp:// target (a copy of its key file; or GPUWATCH_KEY).",
    )
    return option(command)


def job_key(targets: Sequence[str | None], file: str | None) -> JobKey | None:
    """Return the job key that --key names, None without it.

    Raises:
        click.UsageError: none of the targets takes a key.
        TargetError: the key file is not to be trusted.
    """
    if file is None:
        return None
    if not any(target is not None and target.startswith("tcp://") for target in targets):
        raise click.UsageError("--key is for tcp:// targets, and there is none")
    from gpuwatch.wire.collect import load_key

    return load_key(file)


def is_elsewhere(target: str | None) -> bool:
    """Whether a TARGET is on another machine; else it is a run or a file of this one."""
    return target is not None and "://" in target


def open_target(
    target: str | None,
    *,
    key: JobKey | None = None,
    tap: Callable[[bytes], None] | None = None,
) -> tuple[LiveSession | RemoteSession, str | None]:
    """Return the session on the machine of a TARGET, and the run that the TARGET names there.

    `key` is the job key for tcp://; without it that in the file `GPUWATCH_KEY` is taken. `tap` is
    called with the bytes of every frame after they are in the picture.

    Raises:
        TargetError: it has `://` and is no target.
        RunDirectoryError: the run directory of this machine cannot be used.
    """
    if target is not None and is_elsewhere(target):
        from gpuwatch.commands.remote import open_session

        return open_session([target], key=key, tap=tap)
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
