"""`gpuwatch run --tui`: the command in a pane of the monitor, which may be left before it ends."""

import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuwatch.commands.deferred import DeferredSession
from gpuwatch.commands.keeper import descendants, start_keeper
from gpuwatch.commands.monitor import can_draw, watch_screen
from gpuwatch.errors import GpuwatchError
from gpuwatch.wire.publish.rundir import run_directory

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import RunDiagnosis
    from gpuwatch.store.views import View
    from gpuwatch.tui import GpuwatchApp
    from gpuwatch.tui.output import OutputRing

__all__ = ["STEPS", "PaneJob", "run_in_pane"]

STEPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
"""How a command is stopped, one after the other."""

PATIENCE_S = 10.0
"""So long is waited between two of them."""

_LOOK_S = 0.1
_READ_BYTES = 1 << 18
_BEHIND_BYTES = 8_000_000
"""Output that is so far ahead of the screen is looked at from its end: lines that nobody could have
read are in the file only."""
_KEPT_BYTES = 500_000
_UNFOLDED = 10_000
_MOST_CELLS = 100
"""Rows of a card are not folded but by who shows them: at most so wide where the screen was."""
_USAGE = 2


def run_in_pane(
    command: Sequence[str], run: str, become: Callable[[], int], *, card: bool, hz: float = 4.0
) -> int:
    """Start the command, show it, and return its exit code; 0 where it was left running.

    Args:
        command: as it was typed.
        run: the id of its run, empty where its ranks find one themselves.
        become: turns the process that it is called in into the command.
        card: whether the card of the run is to be written on stderr when the screen is left.
        hz: the drawing rate.
    """
    why_not = can_draw()
    if why_not:
        click.echo(f"gpuwatch: --tui needs a terminal, and {why_not}; leave it out", err=True)
        return _USAGE
    try:
        log = run_directory() / f"output-{run or os.getpid()}.log"
        # A run id may have been used before: what is there already is not this command's.
        start = log.stat().st_size if log.exists() else 0
        size = shutil.get_terminal_size()
        # Before anything starts a thread: the keeper is forked.
        told = start_keeper(become, log, max(40, size.columns - 2), size.lines)
    except (GpuwatchError, OSError) as exc:
        click.echo(f"gpuwatch: cannot start {command[0]}: {exc}", err=True)
        return 1
    job = PaneJob(shlex.join(command), run, log, told, start=start)
    lines: list[str] = []

    def left(app: "GpuwatchApp") -> None:
        # Taken while there is still a session to look at.
        lines.extend(app.watcher.report())

    session = DeferredSession()
    # Not after the first picture: a short training would be over before it is heard of.
    session.start(lambda: None)
    try:
        code = watch_screen(hz=hz, session=session, job=job, on_left=left)
    finally:
        job.close()
        session.close()
    if session.error is not None:
        _say(f"gpuwatch: nothing was watched: {session.error}")
    return _take_leave(job, lines if card else [], code)


def _take_leave(job: "PaneJob", card: Sequence[str], code: int) -> int:
    """Say on stderr what has become of the command, and return the exit code for it.

    `code` is that of the screen, 0 unless something ended it.
    """
    if job.exit_code is not None:
        _say(
            f"gpuwatch: {job.command} ended with exit code {job.exit_code} after "
            f"{job.elapsed_s:.0f} s; its output: {job.log}"
        )
        if card:
            from gpuwatch.tui.render.output import card_rows

            width = min(_MOST_CELLS, shutil.get_terminal_size().columns)
            _say("\n".join([row for text in card for row in card_rows(text, width)]))
        return code or job.exit_code
    if job.lost:
        _say(f"gpuwatch: {job.command}: {job.lost}; its output: {job.log}")
        return code or 1
    how = "is being stopped" if job.stopping else "goes on"
    _say(
        f"gpuwatch: {job.command} {how} as process {job.pid}; its output: {job.log}; "
        f"to stop it, type: kill -INT -- -{job.pid}"
    )
    return code


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be what is gone
        click.echo(text, err=True)


class PaneJob:
    """A kept command (`gpuwatch.tui.job.Job`): its output is read in a thread of its own.

    Args:
        command: as it was typed.
        run: the id of its run.
        log: the file that its keeper writes.
        told: the descriptor on which the keeper speaks; closed by `close`.
        start: where in the file its output begins, in bytes.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        command: str,
        run: str,
        log: Path,
        told: int,
        *,
        start: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from gpuwatch.tui.output import OutputRing

        self._command = command
        self._run = run
        self._log = log
        self._told = told
        self._clock = clock
        self._began_s = clock()
        self._ended_s: float | None = None
        self._ring = OutputRing()
        self._pid = 0
        self._exit_code: int | None = None
        self._lost = ""
        self._said = b""
        self._hung_up = False
        self._step: int | None = None
        self._next_s = 0.0
        self._wants_stop = 0
        self._closed = threading.Event()
        self._file = os.open(log, os.O_RDONLY)
        self._place = os.lseek(self._file, start, os.SEEK_SET)
        self._thread = threading.Thread(target=self._work, name="gpuwatch-output", daemon=True)
        self._thread.start()

    # --- what the screen asks ------------------------------------------------------------------

    @property
    def run(self) -> str:
        """The id of its run, empty where its ranks find one themselves."""
        return self._run

    @property
    def command(self) -> str:
        """The command as it was typed."""
        return self._command

    @property
    def pid(self) -> int:
        """Its first process, 0 for as long as it has not been started."""
        return self._pid

    @property
    def log(self) -> str:
        """The path of the file that holds all of its output."""
        return str(self._log)

    @property
    def output(self) -> "OutputRing":
        """The last lines of its output."""
        return self._ring

    @property
    def exit_code(self) -> int | None:
        """What it ended with, 128 + the number of a signal; None while it runs."""
        return self._exit_code

    @property
    def lost(self) -> str:
        """Why it is not known whether it runs, empty where it is."""
        return self._lost

    @property
    def stopping(self) -> str:
        """What was done to stop it, and what comes next; empty where nothing was."""
        step = self._step
        if step is None or self._exit_code is not None:
            return ""
        text = f"{STEPS[step].name} sent"
        if step + 1 < len(STEPS):
            left_s = max(0.0, self._next_s - self._clock())
            text += f", {STEPS[step + 1].name} in {left_s:.0f} s"
        return text

    @property
    def elapsed_s(self) -> float:
        """How long it has run, or ran."""
        return (self._clock() if self._ended_s is None else self._ended_s) - self._began_s

    def stop(self) -> None:
        """Send SIGINT to its process group, and SIGTERM and SIGKILL if that does not help.

        Each has ten seconds; called again it goes on to the next one at once.
        """
        self._wants_stop += 1

    def report(self, view: "View", found: "Mapping[str, RunDiagnosis]") -> list[str]:
        """Return the card of its run, empty where no process of it was watched."""
        from gpuwatch.commands.card import card_lines
        from gpuwatch.tui.job import runs_of

        if not self._run:
            return []
        mine = runs_of(view, self._run)
        trained = [run for run in mine if run.steps] or mine
        if not trained:
            return []
        run = max(trained, key=lambda item: item.started_s)
        nodes = [node for node in view.nodes if node.node in run.nodes]
        others = [item for item in trained if item is not run]
        return card_lines(run, found.get(run.run), nodes=nodes, others=others, width=_UNFOLDED)

    def close(self) -> None:
        """Look no more; the command is not touched."""
        self._closed.set()
        self._thread.join(1.0)

    # --- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        poll = select.poll()
        poll.register(self._told, select.POLLIN)
        try:
            while not self._closed.is_set():
                if self._take():
                    continue
                if self._hung_up:
                    # It has ended, or its keeper has; others may print still.
                    self._closed.wait(_LOOK_S)
                else:
                    if poll.poll(int(_LOOK_S * 1000)):
                        self._listen()
                    self._stop_further()
        finally:
            os.close(self._told)
            os.close(self._file)

    def _take(self) -> bool:
        """Take what has been written meanwhile; False if that is nothing."""
        behind = os.fstat(self._file).st_size - self._place
        if behind > _BEHIND_BYTES:
            skipped = behind - _KEPT_BYTES
            self._place = os.lseek(self._file, skipped, os.SEEK_CUR)
            self._ring.feed(f"\n[{skipped:,} bytes came too fast: see the file]\n".encode())
        data = os.read(self._file, _READ_BYTES)
        if data:
            self._place += len(data)
            self._ring.feed(data)
        return bool(data)

    def _listen(self) -> None:
        """Hear what the keeper says."""
        data = os.read(self._told, 4096)
        self._said += data
        *whole, self._said = self._said.split(b"\n")
        for line in whole:
            words = json.loads(line)
            self._pid = words.get("pid", self._pid)
            if "exit" in words:
                while self._take():
                    pass  # its last words are on the screen before its end
                self._ended_s = self._clock()
                self._exit_code = words["exit"]
                self._hung_up = True
        if not data and self._exit_code is None:
            self._ended_s = self._clock()
            self._lost = "the process that kept its output was killed; what it does is not known"
            self._hung_up = True

    def _stop_further(self) -> None:
        """Send the next signal if it is wanted or due."""
        if not self._pid or self._hung_up:
            return
        now_s = self._clock()
        due = self._step is not None and now_s >= self._next_s
        if not self._wants_stop and not due:
            return
        self._wants_stop = 0
        step = 0 if self._step is None else self._step + 1
        if step >= len(STEPS):
            return
        self._step, self._next_s = step, now_s + PATIENCE_S
        # What has left the group (ranks of a launcher, say) is ended with the last one.
        others = descendants(self._pid) if STEPS[step] == signal.SIGKILL else []
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, STEPS[step])
        for pid in others:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, STEPS[step])
