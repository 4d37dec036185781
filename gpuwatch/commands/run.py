"""`gpuwatch run`: any training command, watched without a change to it."""

import contextlib
import errno
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path

import click

from gpuwatch.commands.lookout import flush_output, start_lookout

__all__ = ["run"]

HOOK = str(Path(__file__).resolve().parent.parent / "probe" / "hook")
"""A directory with nothing but our `sitecustomize.py`, for PYTHONPATH."""

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # what shells and env(1) exit with
_NAME_CHARACTERS = 40
_LAUNCHERS = ("torch.", "accelerate.")
"""Packages of modules that are run (`-m`) to run a script."""


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--tui", is_flag=True, help="Open the monitor on it, with its output in a pane.")
@click.option("--name", metavar="NAME", help="What the monitor calls this run.")
@click.option(
    "--allow-control", is_flag=True, help="Let a monitor change what the training has allowed."
)
@click.option(
    "--count-flops",
    is_flag=True,
    help="Count the FLOPs of one step, once; that step is much slower.",
)
@click.option(
    "--card/--no-card",
    default=True,
    help="Say on stderr what came of it when the run ends (on).",
)
@click.option(
    "--listen",
    metavar="ADDR",
    help="Open a door on a TCP port beside it, for gpuwatch attach tcp://: host:port or :port.",
)
@click.option("--key", metavar="FILE", help="The key of the job, for --listen (gpuwatch keygen).")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- CMD...")
@click.pass_context
def run(
    ctx: click.Context,
    tui: bool,
    name: str | None,
    allow_control: bool,
    count_flops: bool,
    card: bool,
    listen: str | None,
    key: str | None,
    command: tuple[str, ...],
) -> None:
    """Run a training command and watch it, without a change to its script.

    CMD is what you would type without us: python, torchrun, accelerate, a shell script. It takes
    the place of this process, so that its pid, signals, output and exit code are its own. When it
    has ended, a card of at most 25 lines on stderr says where the time went and what to change.

    With --tui it is a process of its own, behind the monitor: q asks whether it goes on.

    With --listen whoever has the key file may attach over TCP for as long as the command runs. A
    port that is taken is said, and the command runs all the same.
    """
    if not command:
        raise click.UsageError("say what to run: gpuwatch run -- python train.py")
    open_door = _door(listen, key)
    environ = _own_environment()
    if count_flops:
        environ["GPUWATCH_COUNT_FLOPS"] = "1"
    if not _is_executable(command[0], environ):
        ctx.exit(_refuse(command[0], environ))
    if tui:
        ctx.exit(_in_pane(command, environ, name, allow_control, card, open_door))
    _watch(command, environ, name, allow_control, card)
    open_door(environ)
    ctx.exit(_become(command, environ))


def _door(listen: str | None, key: str | None) -> Callable[[Mapping[str, str]], None]:
    """Return what opens the door in the process that is about to become the command.

    Raises:
        click.UsageError, TargetError: the address or the key is none; nothing has been started.
    """
    if listen is None and key is None:
        return lambda _: None
    from gpuwatch.commands.agent import check_door

    address, job_key = check_door(listen, key)

    def open_door(environ: Mapping[str, str]) -> None:
        from gpuwatch.commands.beside import is_first_on_node, start_door

        if is_first_on_node(environ):
            _narrate(start_door(address, job_key))

    return open_door


def _become(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Become the command; returns the exit code for it if that cannot be, having said why."""
    _restore_signals()
    flush_output()
    try:
        os.execvpe(command[0], list(command), environ)
    except OSError as exc:
        click.echo(f"gpuwatch: cannot run {command[0]}: {exc.strerror}", err=True)
        return _NOT_FOUND if exc.errno == errno.ENOENT else _NOT_EXECUTABLE


def _in_pane(
    command: Sequence[str],
    environ: MutableMapping[str, str],
    name: str | None,
    control: bool,
    card: bool,
    open_door: Callable[[Mapping[str, str]], None],
) -> int:
    """Run the command behind the monitor and return the exit code."""
    from gpuwatch.commands.pane import run_in_pane

    named = _run_id(command, environ)
    if named:
        environ["GPUWATCH_RUN_ID"] = named

    def become() -> int:
        # The card is on the screen, and the screen is open already.
        _watch(command, environ, name, control, card=False, quiet=True)
        open_door(environ)
        return _become(command, environ)

    return run_in_pane(command, named, become, card=card)


def _watch(
    command: Sequence[str],
    environ: MutableMapping[str, str],
    name: str | None,
    control: bool,
    card: bool,
    quiet: bool = False,
) -> None:
    """Put into the environment what makes a Python watched, and say so unless it is `quiet`."""
    if name is not None:
        environ["GPUWATCH_RUN_NAME"] = name
    if control:
        environ["GPUWATCH_ALLOW_CONTROL"] = "1"
    if os.pathsep in HOOK:
        _narrate(
            f"not watching: PYTHONPATH cannot hold {HOOK}, for there is a {os.pathsep!r} in it"
        )
        return
    before = environ.get("PYTHONPATH", "")
    if HOOK in before.split(os.pathsep):
        return  # inside another gpuwatch run, which has said and done it all
    # A trailing separator would add the current directory.
    environ["PYTHONPATH"] = f"{HOOK}{os.pathsep}{before}" if before else HOOK
    named = _run_id(command, environ)
    if named:
        environ["GPUWATCH_RUN_ID"] = named
    if not _is_first_rank(environ):
        return
    if not quiet:
        words = f"run {named}" if named else "this run"
        _narrate(f"{words}; to look at it, type gpuwatch in another terminal")
    if card:
        # The process that we become waits for the card on its way out, if it is a Python.
        environ["GPUWATCH_CARD"] = str(os.getpid())
    start_lookout(named, card=card)


def _narrate(text: str) -> None:
    """Say a line on stderr, where there is one that takes it: the command runs in any case."""
    with contextlib.suppress(OSError, ValueError):
        click.echo(f"gpuwatch: {text}", err=True)


# --- the run id --------------------------------------------------------------------------------


def _run_id(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the run id, empty where every rank has a `gpuwatch run` of its own and the launcher's
    words in its environment: then the ranks agree on one by themselves.
    """
    if given := environ.get("GPUWATCH_RUN_ID"):
        return given
    if _count(environ, "SLURM_NTASKS") > 1 and "SLURM_STEP_ID" in environ:
        job = environ.get("SLURM_JOB_ID")
        if job:
            return f"slurm-{job}.{environ['SLURM_STEP_ID']}"
    if _count(environ, "WORLD_SIZE") > 1 and "RANK" in environ:
        return ""
    return f"{_readable(command)}-{os.urandom(3).hex()}"


def _is_first_rank(environ: Mapping[str, str]) -> bool:
    """Whether this `gpuwatch run` is the only one of its run, or the one of the first rank."""
    if _count(environ, "WORLD_SIZE") > 1:
        return _count(environ, "RANK") == 0
    return _count(environ, "SLURM_NTASKS") <= 1 or _count(environ, "SLURM_PROCID") == 0


def _count(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ.get(name, "0"))
    except ValueError:
        return 0


def _readable(command: Sequence[str]) -> str:
    """Return what a person would call the command: its script, its module, or its program."""
    word = Path(command[0]).name.removesuffix(".py").removesuffix(".sh")
    for at, argument in enumerate(command[1:], start=1):
        if argument.endswith((".py", ".sh")):
            word = Path(argument).stem
            break
        if command[at - 1] in {"-m", "--module"} and not argument.startswith(_LAUNCHERS):
            word = argument.removesuffix(".__main__")
            break
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", word).strip("-.")
    return word[:_NAME_CHARACTERS] or "run"


# --- as if we had not been there ---------------------------------------------------------------


def _own_environment() -> dict[str, str]:
    """Return the environment that we were given.

    Under the C locale Python adds LC_CTYPE to its own (PEP 538), which is not the command's.
    """
    environ = dict(os.environ)
    with contextlib.suppress(OSError):
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
        if not any(entry.startswith(b"LC_CTYPE=") for entry in given):
            environ.pop("LC_CTYPE", None)
    return environ


def _restore_signals() -> None:
    """Python ignores these two from its start, and what is ignored stays so in the command."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


# --- commands that cannot be run ---------------------------------------------------------------


def _places(program: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield where the program may lie, as execvp looks for it."""
    if os.path.dirname(program):
        yield program
        return
    for directory in os.get_exec_path(environ):
        yield os.path.join(directory, program)


def _is_executable(program: str, environ: Mapping[str, str]) -> bool:
    return any(os.path.isfile(p) and os.access(p, os.X_OK) for p in _places(program, environ))


def _refuse(program: str, environ: Mapping[str, str]) -> int:
    """Say why the program cannot be run, and return the exit code for that."""
    found = next((p for p in _places(program, environ) if os.path.isfile(p)), None)
    if found is None and os.path.dirname(program) and os.path.isdir(program):
        click.echo(f"gpuwatch: cannot run {program}: it is a directory", err=True)
        return _NOT_EXECUTABLE
    if found is None:
        click.echo(f"gpuwatch: cannot run {program}: no such command", err=True)
        return _NOT_FOUND
    if found.endswith(".py"):
        advice = f"; type: gpuwatch run -- python {program}"
    else:
        advice = f"; type: chmod +x {found}"
    click.echo(f"gpuwatch: cannot run {found}: it is not executable{advice}", err=True)
    return _NOT_EXECUTABLE
