"""`gpuwatch agent`: the node process."""

import contextlib
import ipaddress
import os
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from gpuwatch.wire.collect import JobKey
    from gpuwatch.wire.collect.listener import Address

__all__ = ["Lines", "agent", "check_door", "say_where"]

_LINE_BYTES = 2048
"""A pipe that can be written to takes 4096 at once (PIPE_BUF)."""


@click.command()
@click.option("--detach", is_flag=True, help="Go to the background and return at once.")
@click.option(
    "--idle-s",
    type=click.FloatRange(0.1),
    default=60.0,
    show_default=True,
    help="End after so many seconds without a run and without a monitor.",
)
@click.option(
    "--stdio",
    is_flag=True,
    help="Carry its frames to stdout and commands from stdin, for gpuwatch attach.",
)
@click.option(
    "--listen",
    metavar="ADDR",
    help="Open its door on a TCP port, for gpuwatch attach tcp://: host:port or :port.",
)
@click.option("--key", metavar="FILE", help="The key of the job (gpuwatch keygen FILE).")
def agent(detach: bool, idle_s: float, stdio: bool, listen: str | None, key: str | None) -> None:
    """Stand between the ranks of this node and every monitor.

    The first monitor on a node starts it by itself; it ends when it has had no run and no monitor
    for a minute. There is one a user and node: a second one says so and ends.

    With --stdio it is the far end of gpuwatch attach instead, and starts a node process if there
    is none; it ends with its stdin.

    With --listen it is the door for gpuwatch attach tcp://, until it is interrupted: it too starts
    a node process if there is none. Who has the key file may enter, nobody else.
    """
    if listen is not None or key is not None:
        if stdio or detach:
            raise click.UsageError(
                "--listen stays in the foreground: leave --stdio and --detach out"
            )
        _serve(*check_door(listen, key))
        return
    if stdio:
        if detach:
            raise click.UsageError("--stdio stays with its pipe: leave --detach out")
        _carry()
        return
    from gpuwatch.commands.room import no_room, why_unwritable
    from gpuwatch.errors import AgentError
    from gpuwatch.wire.publish import run_directory

    directory = run_directory().absolute()  # in the background it leaves the one it starts in
    if detach:
        # Here there is somebody to tell: the log is in that very directory.
        why_not = no_room(directory)
        if why_not:
            raise AgentError(why_not)
        _detach(str(directory / "agent.log"))
    import zmq

    from gpuwatch.commands.session import SAMPLER_ARGV
    from gpuwatch.wire.collect import Agent, AgentRunningError

    try:
        node_process = Agent(directory, sampler_argv=SAMPLER_ARGV, idle_s=idle_s)
    except AgentRunningError as exc:
        if detach:
            return
        raise click.ClickException(str(exc)) from None
    except (OSError, zmq.ZMQError) as exc:
        raise AgentError(why_unwritable(directory, exc.errno or 0)) from None
    if detach:
        with contextlib.suppress(OSError):
            os.ftruncate(2, 0)  # ours now: what an agent before this one said is old
    else:
        click.echo(f"gpuwatch agent {os.getpid()} serves {directory}", err=True)
    node_process.run()


def _carry() -> None:
    """Be the far end of a pipe until one of its ends is closed."""
    from gpuwatch import __version__

    if os.isatty(0) or os.isatty(1):
        raise click.UsageError(
            "--stdio speaks to gpuwatch attach through pipes, and this is a terminal: leave -t out"
        )
    # Whatever else prints in this process goes to stderr: stdout is the pipe's alone.
    sys.stdout.flush()
    sink = os.dup(1)
    os.dup2(2, 1)
    from gpuwatch.commands.session import AGENT_ARGV
    from gpuwatch.wire.collect import Stdio
    from gpuwatch.wire.publish import run_directory

    carried = Stdio(run_directory(), AGENT_ARGV, package=__version__, source=0, sink=sink)
    carried.run()
    if carried.dropped:
        with contextlib.suppress(OSError):  # with the connection stderr may be gone too
            click.echo(
                f"gpuwatch: {carried.dropped:,} frames were dropped: the connection is slower",
                err=True,
            )


def check_door(listen: str | None, key: str | None) -> "tuple[Address, JobKey]":
    """Return what --listen and --key mean.

    Raises:
        click.UsageError: one of them is missing.
        TargetError: the address is none, or the key file is not to be trusted.
    """
    from gpuwatch.wire.collect import load_key, parse_address

    if listen is None:
        raise click.UsageError("--key is for --listen: say where, --listen :5555")
    if key is None:
        raise click.UsageError(
            "--listen needs --key FILE (make one: gpuwatch keygen FILE): whoever reaches the port "
            "could watch otherwise, and 127.0.0.1 is reached by everybody on this machine"
        )
    return parse_address(listen), load_key(key)


def say_where(listener: socket.socket, host: str) -> str:
    """Return the line that says where a door is; `host` is what was asked for."""
    port = listener.getsockname()[1]
    there = socket.gethostname() if _is_every_address(host) else host
    place = f"[{there}]" if ":" in there else there
    return (
        f"listening on {host or 'every address'}, port {port}; to look at it, type: "
        f"gpuwatch attach tcp://{place}:{port} --key FILE"
    )


def _is_every_address(host: str) -> bool:
    """Whether nobody can attach to it: 0.0.0.0 and :: are for listening only."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


class Lines:
    """Says lines on a descriptor, and never waits: who reads it may have stopped reading.

    Lines that nobody takes are left out; their number is said with the next one that is taken.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._left_out = 0

    def __call__(self, text: str) -> None:
        """Say it, if that can be done now."""
        if self._descriptor is None:
            return
        before = f"gpuwatch: {self._left_out:,} lines are left out\n" if self._left_out else ""
        data = f"{before}gpuwatch: {text}".encode("utf-8", "replace")[:_LINE_BYTES] + b"\n"
        try:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLOUT)
            if not poll.poll(0):
                self._left_out += 1
                return
            os.write(self._descriptor, data)
        except OSError:
            return  # its end was closed
        self._left_out = 0


def _stderr() -> int | None:
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _serve(address: "Address", key: "JobKey") -> None:
    """Be the door until a signal."""
    from gpuwatch import __version__
    from gpuwatch.commands.session import AGENT_ARGV
    from gpuwatch.wire.collect import Door, listen
    from gpuwatch.wire.publish import run_directory

    directory = run_directory()
    with listen(address) as listener:
        say = Lines(_stderr())
        door = Door(directory, AGENT_ARGV, listener, key, package=__version__, say=say)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, door.stop)
        say(say_where(listener, address.host))
        door.run()


def _detach(log: str) -> None:
    """Fork twice with a session of its own in between: no terminal, no parent, no signals from
    either. What it says on stderr goes to the log.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.chdir("/")
    sys.stdout.flush()
    sys.stderr.flush()
    null = os.open(os.devnull, os.O_RDWR)
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError:
        out = null
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
