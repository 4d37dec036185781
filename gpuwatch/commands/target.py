"""What a command is told to look at: this machine, others, or a recording."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from gpuwatch.errors import AgentError, TargetError

if TYPE_CHECKING:
    from gpuwatch.commands.remote import RemoteSession
    from gpuwatch.commands.session import LiveSession
    from gpuwatch.recording import Recording
    from gpuwatch.store import View
    from gpuwatch.store.views import RunView
    from gpuwatch.wire.collect import JobKey

__all__ = [
    "PROGRAM",
    "Picture",
    "Targets",
    "named_run",
    "one_picture",
    "open_targets",
    "say_troubles",
    "target_options",
    "troubles_of",
]

PROGRAM = "gpuwatch"
"""What is called on the other side, unless --remote-command says another."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What a command is to look at; nothing at all is this machine.

    `words` are the TARGETs as they were typed, `via` the commands of --via; `program` is what
    --remote-command names and `key` what --key does, None without them.
    """

    words: tuple[str, ...] = ()
    via: tuple[str, ...] = ()
    program: str | None = None
    key: str | None = None

    @classmethod
    def run(cls, run: str | None) -> Targets:
        """Return a run of this machine, by its id, its beginning or its name; or all of them."""
        return cls() if run is None else cls((run,))

    @property
    def elsewhere(self) -> bool:
        """Whether they are reached over ways; else it is a run of this machine, or all of it."""
        if len(self.words) != 1:
            return bool(self.words or self.via)
        return bool(self.via) or "://" in self.words[0] or self.words[0] == "local"

    @property
    def recording(self) -> str | None:
        """The path of a recording or a trace, None if they are live.

        Raises:
            click.UsageError: there is one beside other targets.
        """
        from gpuwatch.recording.read import is_recording

        found = [word for word in self.words if "://" not in word and is_recording(word)]
        if not found:
            return None
        if len(self.words) > 1 or self.via:
            raise click.UsageError(
                f"{found[0]} is a recording, and that stands alone: name one, or live targets"
            )
        return found[0]

    def check(self) -> None:
        """See whether the options are for one of the targets.

        Raises:
            click.UsageError: one of them is for none.
        """
        if self.key is not None and not any(w.startswith("tcp://") for w in self.words):
            raise click.UsageError("--key is for tcp:// targets, and there is none")
        ways = self.via or any(w.startswith("ssh://") for w in self.words)
        if self.program is not None and not ways:
            raise click.UsageError(
                "--remote-command is for ssh:// targets and --via, and there is none"
            )

    def unlocking(self) -> JobKey | None:
        """Return the job key that --key names, None without it.

        Raises:
            TargetError: the key file is not to be trusted.
        """
        if self.key is None:
            return None
        from gpuwatch.wire.collect import load_key

        return load_key(self.key)


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command TARGETs, --via, --remote-command and --key: as its `targets`, a `Targets`."""

    @click.argument("targets", nargs=-1)
    @click.option(
        "--via",
        "via",
        multiple=True,
        metavar="CMD",
        help=(
            "A command that runs another over there, such as 'kubectl exec -i POD --'. Repeatable."
        ),
    )
    @click.option(
        "--remote-command",
        metavar="CMD",
        help=f"gpuwatch over there, where it is not on the PATH.  [default: {PROGRAM}]",
    )
    @click.option(
        "--key",
        metavar="FILE",
        help="The key of the job, for a tcp:// target (a copy of its key file; or GPUWATCH_KEY).",
    )
    @functools.wraps(command)
    def targeted(
        *args: Any,
        targets: tuple[str, ...],
        via: tuple[str, ...],
        remote_command: str | None,
        key: str | None,
        **kwargs: Any,
    ) -> Any:
        made = Targets(targets, via, remote_command, key)
        made.check()
        return command(*args, targets=made, **kwargs)

    return targeted


def open_targets(
    targets: Targets,
    *,
    tap: Callable[[bytes], None] | None = None,
    many_runs: bool = False,
) -> tuple[LiveSession | RemoteSession, str | None]:
    """Return the session on the machines of live targets, and the run that they name there.

    The job key for tcp:// is that of --key, or that in the file `GPUWATCH_KEY`. `tap` is called
    with the bytes of every frame after they are in the picture. With `many_runs` they may name
    several, and the first is returned.

    Raises:
        TargetError: one of them is no target, or takes a key that there is not; they name several
            runs.
        RunDirectoryError: the run directory of this machine cannot be used.
    """
    key = targets.unlocking()
    if targets.elsewhere:
        from gpuwatch.commands.remote import open_session

        return open_session(
            list(targets.words),
            via=targets.via,
            program=targets.program or PROGRAM,
            key=key,
            tap=tap,
            many_runs=many_runs,
        )
    from gpuwatch.commands.session import LiveSession

    return LiveSession(tap=tap), next(iter(targets.words), None)


def troubles_of(session: LiveSession | RemoteSession, view: View) -> tuple[str, ...]:
    """Return a sentence for each target that is not reached now."""
    from gpuwatch.commands.session import LiveSession

    if not isinstance(session, LiveSession):
        return session.troubles()
    return (view.message,) if view.link == "lost" and view.message else ()


def say_troubles(troubles: Sequence[str]) -> None:
    """Say on stderr which targets are not reached."""
    for trouble in troubles:
        click.echo(f"gpuwatch: {trouble}", err=True)


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of the targets, narrowed to the run that one of them names.

    `recorded` is the recording that it is the end of, None of what is live; `troubles` holds a
    sentence for each target that could not be reached.
    """

    view: View
    recorded: Recording | None = None
    troubles: tuple[str, ...] = ()

    def without_troubles(self) -> View:
        """Return the view without the notices that say the troubles once more."""
        notices = tuple(n for n in self.view.notices if n not in self.troubles)
        return replace(self.view, notices=notices)


def one_picture(targets: Targets) -> Picture:
    """Return the present picture of live targets, or the last one of a recording.

    Raises:
        TargetError: no run of that name, or a recording that cannot be read.
        AgentError: none of the targets can be reached; or no run of that name, and some cannot.
    """
    path = targets.recording
    if path is not None:
        from gpuwatch.commands.recorded import last_view, narrate

        view, recorded = last_view(path)
        narrate(recorded)
        return Picture(view, recorded)
    session, name = open_targets(targets)
    try:
        view = session.settled_view()
        troubles = troubles_of(session, view)
    finally:
        session.close()
    if name is not None:
        run, _ = named_run(view, name, targets, troubles)
        view = replace(view, runs=(run,) if run is not None else ())
    return Picture(view, troubles=troubles)


def named_run(
    view: View, run: str | None, targets: Targets, troubles: Sequence[str] = ()
) -> tuple[RunView | None, list[RunView]]:
    """Return (the run meant, the other runs) of a view: the named one, or the newest that lives.

    Raises:
        TargetError: a run is named and is not there.
        AgentError: a run is named and may be where the troubles are, which are said.
    """
    from gpuwatch.commands.session import pick_run

    found, others = pick_run(view, run)
    if found is None and run is not None:
        if troubles:
            say_troubles(troubles)
            raise AgentError(f"no run {run!r} on the targets that have answered")
        if targets.elsewhere:
            raise TargetError(f"no run {run!r} there; leave it out to see those there are")
        raise TargetError(f"no run {run!r} here; gpuwatch runs lists those there are")
    return found, others
