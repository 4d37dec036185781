"""The command group. Each command is imported when it is called, so that none pays for another."""

import contextlib
import errno
import importlib
import os
import sys
from typing import Any

import click

from gpuwatch import __version__
from gpuwatch.errors import GpuwatchError, TargetError

__all__ = ["cli"]

_COMMANDS = {
    "agent": "the node process: between the ranks of this node and every monitor",
    "attach": "watch runs on other machines, through ssh, any command that gets there, or TCP",
    "compare": "what a change has brought: two runs or recordings",
    "demo": "train two ranks with a loader that is too slow, and watch them",
    "diagnose": "say why the step is not faster, and what to change",
    "doctor": "say what this machine can measure, and what would help where it cannot",
    "keygen": "make the key of a job, for those who attach over TCP",
    "record": "record a live run into a file",
    "replay": "open the screen on a recording",
    "run": "start any training command, watched without a change to it",
    "runs": "list the runs of this user on this machine",
    "status": "one picture of runs, ranks and host, as text or JSON",
}


_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class _Group(click.Group):
    """Knows its commands by name and loads them on use."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run, and say in one sentence that there is no room for what was to be printed."""
        try:
            return super().main(*args, **kwargs)
        except OSError as exc:
            # What is wrong with a file has its name in it; with one that is open there is none.
            if exc.errno not in _UNWRITABLE or exc.filename is not None:
                raise
            what = "the output" if _is_output(exc) else "a file"
            _lose_output()
            with contextlib.suppress(OSError):
                click.echo(f"gpuwatch: {what} cannot be written: {exc.strerror}", err=True)
            sys.exit(3)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"gpuwatch.commands.{cmd_name}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TargetError as exc:
            click.echo(f"gpuwatch: {exc}", err=True)
            ctx.exit(2)
        except GpuwatchError as exc:
            click.echo(f"gpuwatch: {exc}", err=True)
            ctx.exit(3)
        except (KeyboardInterrupt, click.Abort):
            ctx.exit(130)
        except BrokenPipeError:
            # The reader (head, less) has had enough: that is no error of ours.
            sys.stderr.close()
            ctx.exit(0)


def _is_output(exc: OSError) -> bool:
    """Whether it was raised by what prints, and not by what writes a file."""
    where = exc.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    name = where.tb_frame.f_globals.get("__name__", "") if where is not None else ""
    return str(name).startswith("click.")


def _lose_output() -> None:
    """Let what waits in stdout go nowhere: Python would try once more at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@click.group(
    cls=_Group,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="gpuwatch %(version)s")
@click.option("--json", "as_json", is_flag=True, help="Print one picture as JSON and exit.")
@click.option(
    "--hz",
    type=click.FloatRange(1, 10),
    default=4.0,
    show_default=True,
    help="How often the screen is drawn.",
)
@click.pass_context
def cli(ctx: click.Context, as_json: bool, hz: float) -> None:
    """Why is this training step not faster, and what do I change?

    Without a command: this machine, and every run of this user, on one screen.
    """
    if ctx.invoked_subcommand is not None:
        return
    if as_json:
        from gpuwatch.commands.status import show_status
        from gpuwatch.commands.target import Targets

        show_status(Targets(), as_json=True)
        return
    from gpuwatch.commands.monitor import watch_screen

    ctx.exit(watch_screen(hz=hz))
