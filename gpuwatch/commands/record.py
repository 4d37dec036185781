"""`gpuwatch record`: a live run into a file."""

import contextlib
import queue
import re
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import click

from gpuwatch.commands.diagnose import Duration
from gpuwatch.commands.target import Targets, target_options

if TYPE_CHECKING:
    from gpuwatch.commands.remote import RemoteSession
    from gpuwatch.commands.session import LiveSession
    from gpuwatch.recording.write import Recorder
    from gpuwatch.store.views import RunView

__all__ = ["record"]

_LAST_WORDS_S = 0.5
"""After a run has ended its node process still has a frame or two to send."""

_POLL_S = 0.1
_UNITS_BYTES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class _Size(click.ParamType[int]):
    """Bytes, or a number with K, M, G or T."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)i?b?", str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r} is no size; write 500M or 4G", param, ctx)
        return int(float(match[1]) * _UNITS_BYTES[match[2]])


@click.command()
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="The file, which must not exist; - is stdout. Default: the run's name and the time.",
)
@click.option("--jsonl", "as_jsonl", is_flag=True, help="As JSON lines, for people and scripts.")
@click.option("--for", "for_s", type=Duration(), help="Record so long: 30s, 5m, 1h.")
@click.option(
    "--max-size",
    "limit_bytes",
    type=_Size(),
    default="4G",
    show_default=True,
    help="End when the file is so large.",
)
@target_options
def record(
    targets: Targets,
    output: str | None,
    as_jsonl: bool,
    for_s: float | None,
    limit_bytes: int,
) -> None:
    """Record a live run until it ends, until Ctrl-C, or for a time.

    A TARGET is a run id, its beginning, or a run's name; without any the newest run is recorded, or
    the first one that starts. Or the machines of one job, as for gpuwatch attach:
    ssh://[user@]host[:port][/run], tcp://host:port[/run] with --key, or --via; all of its ranks are
    in one recording. The last 600 steps before now are in it as well. Read it with gpuwatch replay,
    status, diagnose or runs.
    """
    from gpuwatch.commands.target import open_targets, say_troubles, troubles_of
    from gpuwatch.errors import AgentError

    if output == "-" and not as_jsonl and sys.stdout.isatty():
        raise click.UsageError("a recording is no text: name a file, or add --jsonl")
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with _stop_signals() as stopped:
        session, name = open_targets(targets, tap=frames.put)
        try:
            held, run, troubles = _find(session, frames, name, targets, stopped, for_s)
            if run is None:
                return
            with _recorder(session, run, output, as_jsonl, limit_bytes) as recorder:
                for frame in _from_hello(held, session.raw_run(run.run)):
                    recorder.write(frame)
                click.echo(
                    f"recording run {run.run} ({len(run.ranks)} of {run.world_size} ranks) to "
                    f"{recorder.path}{'' if for_s else '; Ctrl-C ends it'}",
                    err=True,
                )
                _record(session, frames, recorder, run.run, stopped, for_s)
                if recorder.refused:
                    click.echo(
                        f"gpuwatch: {recorder.refused:,} frames could not be read and are missing",
                        err=True,
                    )
            view = session.view()
            later = [t for t in troubles_of(session, view) if t not in troubles]
        finally:
            session.close()
    if view.link == "live":
        say_troubles(later)
    if view.link == "lost" and not stopped:
        raise AgentError(view.message or "the node process does not answer")


def _recorder(
    session: "LiveSession | RemoteSession",
    run: "RunView",
    output: str | None,
    as_jsonl: bool,
    limit_bytes: int,
) -> "Recorder":
    from gpuwatch.recording import Recorder
    from gpuwatch.recording.jsonl import JsonLines

    return Recorder(
        output or _default_name(run.name, as_jsonl=as_jsonl),
        encoder=JsonLines() if as_jsonl else None,
        run=session.raw_run(run.run),
        limit_bytes=limit_bytes,
    )


def _default_name(run_name: str, *, as_jsonl: bool) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run_name).strip("-.")[:60] or "run"
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}{'.jsonl' if as_jsonl else '.gpuwatch'}"


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Give a list that is empty until a signal asks us to end; the file is closed in peace then."""
    stopped: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _find(
    session: "LiveSession | RemoteSession",
    frames: "queue.SimpleQueue[bytes]",
    name: str | None,
    targets: Targets,
    stopped: list[int],
    for_s: float | None,
) -> "tuple[list[bytes], RunView | None, tuple[str, ...]]":
    """Return (the frames that came meanwhile, the run to record, what is said of targets that are
    not reached), waiting for a run if none lives.

    Raises:
        TargetError: the named run does not exist.
        AgentError: there is no contact with the node process.
    """
    from gpuwatch.commands.target import named_run, say_troubles, troubles_of

    view = session.settled_view()
    troubles = troubles_of(session, view)
    run, others = named_run(view, name, targets, troubles)
    say_troubles(troubles)
    live = [r for r in others if r.state != "ended"]
    if run is not None and name is None and live:
        names = ", ".join(r.run for r in live)
        click.echo(f"recording the newest run, {run.run}; there are also {names}", err=True)
    held = _drained(frames)
    if run is not None and (name is not None or run.state != "ended"):
        return held, run, troubles
    where = "there" if targets.elsewhere else "on this machine"
    click.echo(f"no run of yours {where} yet: recording the first that starts", err=True)
    until_s = None if for_s is None else time.monotonic() + for_s
    known = {r.run for r in view.runs}
    while not stopped and (until_s is None or time.monotonic() < until_s):
        # In this order: what has been taken out is in the picture, with the run it may have begun.
        held = _drained(frames)
        run = next((r for r in session.view().runs if r.run not in known), None)
        if run is not None:
            return held, run, troubles
        time.sleep(_POLL_S)
    return [], None, troubles


def _from_hello(held: list[bytes], run: str) -> list[bytes]:
    """Return the frames from the first one on that says who a rank of the run is.

    A recording begins with it. Nothing is lost: the past comes with the hello.
    """
    from gpuwatch.errors import FrameError
    from gpuwatch.frames import decode_node_frame, decode_rank_frame

    for at, data in enumerate(held):
        with contextlib.suppress(FrameError):
            found = [decode_rank_frame(raw) for raw in decode_node_frame(data).frames]
            if any(frame.run == run and frame.hello is not None for frame in found):
                return held[at:]
    return held


def _drained(frames: "queue.SimpleQueue[bytes]") -> list[bytes]:
    found = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(frames.get_nowait())
    return found


def _record(
    session: "LiveSession | RemoteSession",
    frames: "queue.SimpleQueue[bytes]",
    recorder: "Recorder",
    run: str,
    stopped: list[int],
    for_s: float | None,
) -> None:
    """Write what comes until the run has ended, the time is over, or we are told to stop."""
    until_s = None if for_s is None else time.monotonic() + for_s
    looked_s = 0.0
    while not stopped:
        with contextlib.suppress(queue.Empty):
            recorder.write(frames.get(timeout=_POLL_S))
        now_s = time.monotonic()
        if until_s is not None and now_s >= until_s:
            break
        if now_s - looked_s >= _LAST_WORDS_S:
            looked_s = now_s
            shown = session.view().run(run)
            if shown is not None and shown.state == "ended":
                until_s = min(until_s or now_s + _LAST_WORDS_S, now_s + _LAST_WORDS_S)
    for frame in _drained(frames):
        recorder.write(frame)
