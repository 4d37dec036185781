"""The witness: watches the run of a `gpuwatch run` and writes its card when the job ends.

It is what the lookout becomes when the first rank reports in, so it is no child of the job's and
nothing waits for it but, for a moment, the job's own first process: where that is a Python with our
hook it asks for the card on its way out, so that the card comes before the shell's prompt.
"""

import contextlib
import select
import signal
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path

from gpuwatch.commands.card import card_lines
from gpuwatch.commands.session import LiveSession
from gpuwatch.diagnosis import Engine, RunDiagnosis
from gpuwatch.diagnosis.aligned import ranks_text
from gpuwatch.errors import GpuwatchError
from gpuwatch.store.views import NodeView, RunView, View

__all__ = ["Witness"]

EVERY_S = 1.0
SELDOM_S = 2.0
EARLY_S = 60.0
"""Between two looks, in the first minute and after it: findings need two in a row to open."""

LAST_WORDS_S = 2.0
"""So long the ranks may outlive the job's first process, which ends them where it is a launcher."""

SHORT_S = 4.0
"""A run that was watched so briefly is judged by what its end shows: nothing can hold twice."""


class Witness:
    """Watches until the job `job` (a pid) ends, and says what came of it.

    Args:
        job: pid of the job's first process.
        poll: polls the end of that process (its pidfd), None where there is none to poll.
        lives: whether the job lives still.
        run: the job's run id, empty where the ranks have found one themselves.
        pids: the processes of the job now.
        directory: the run directory.
        say: writes a text to the job's stderr.
    """

    def __init__(
        self,
        job: int,
        poll: "select.poll | None",
        lives: Callable[[], bool],
        run: str,
        pids: Collection[int],
        directory: Path,
        say: Callable[[str], None],
    ) -> None:
        self._poll = poll
        self._lives = lives
        self._run = run
        self._pids = set(pids)
        self._directory = directory
        self._say = say
        self._door = directory / f"card-{job}.s"
        self._runs: dict[str, RunView] = {}
        self._nodes: tuple[NodeView, ...] = ()
        self._judged: dict[str, RunDiagnosis] = {}
        self._killed = _killed_for_memory()

    def stay(self) -> None:
        """Watch until the end, and write the card. Raises nothing."""
        # Who ends a whole job by a signal, a batch system at its time limit, wants to know why.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(GpuwatchError, OSError):
            self._stay()

    def _stay(self) -> None:
        began_s = time.monotonic()
        session = LiveSession(self._directory)
        engine = Engine(ask=session.send)
        door = self._open_door()
        asking: socket.socket | None = None
        try:
            while asking is None and self._lives():
                early = time.monotonic() - began_s < EARLY_S
                asking = self._sleep(EVERY_S if early else SELDOM_S, door)
                self._look(session.view(), engine)
            until_s = time.monotonic() + LAST_WORDS_S
            while time.monotonic() < until_s and not (self._over() and session.has_past()):
                time.sleep(0.05)
                self._take(session.view())
            view = session.view()
            if time.monotonic() - began_s < SHORT_S:
                engine = Engine(open_after=1)
            self._look(view, engine)
            self._write()
        finally:
            if asking is not None:
                asking.close()
            if door is not None:
                door.close()
                self._door.unlink(missing_ok=True)
            session.close()

    def _open_door(self) -> socket.socket | None:
        """Return a socket on which the job's first process can wait for the card."""
        self._door.unlink(missing_ok=True)
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            door.bind(str(self._door))
            door.listen(1)
        except OSError:
            door.close()
            return None
        if self._poll is not None:
            self._poll.register(door, select.POLLIN)
        return door

    def _sleep(self, seconds: float, door: socket.socket | None) -> socket.socket | None:
        """Sleep until the job ends or asks for its card; returns what it asks on."""
        if self._poll is None:
            time.sleep(min(seconds, 0.2))
        else:
            self._poll.poll(int(seconds * 1000))
        if door is None:
            return None
        door.setblocking(False)
        try:
            return door.accept()[0]
        except OSError:
            return None

    # --- looking -------------------------------------------------------------------------------

    def _mine(self, run: RunView) -> bool:
        if self._run:
            return run.run == self._run or run.run.startswith(f"{self._run}.")
        return run.run in self._runs or any(r.pid in self._pids for r in run.ranks)

    def _take(self, view: View) -> list[RunView]:
        mine = [run for run in view.runs if self._mine(run)]
        self._runs |= {run.run: run for run in mine}
        return mine

    def _look(self, view: View, engine: Engine) -> None:
        for run in self._take(view):
            # What was open when it ended stays: the end itself is judged by nobody.
            self._judged[run.run] = engine.evaluate(view, run)
        self._nodes = view.nodes or self._nodes

    def _over(self) -> bool:
        return bool(self._runs) and all(run.state == "ended" for run in self._runs.values())

    # --- the card ------------------------------------------------------------------------------

    def _write(self) -> None:
        trained = [
            run
            for run in self._runs.values()
            if run.state == "ended" and (run.steps or any(r.state == "gone" for r in run.ranks))
        ]
        for run in self._runs.values():
            if run.state != "ended" and run.steps:
                left = [r.rank for r in run.ranks if r.state not in {"ended", "gone"}]
                self._say(
                    f"gpuwatch: run {run.run} goes on without the command that started it: "
                    f"{ranks_text(left)} {'lives' if len(left) == 1 else 'live'} still\n"
                )
        if not trained:
            return
        run = max(trained, key=lambda r: r.started_s)
        killed = _killed_for_memory()
        notes = []
        if killed is not None and self._killed is not None and killed > self._killed:
            notes.append(
                f"the kernel killed {killed - self._killed} process"
                f"{'es' if killed - self._killed > 1 else ''} for want of memory meanwhile "
                "(oom_kill in /proc/vmstat)"
            )
        lines = card_lines(
            run,
            self._judged.get(run.run),
            nodes=[n for n in self._nodes if n.node in run.nodes],
            others=[r for r in trained if r is not run],
            notes=notes,
        )
        self._say("\n".join(lines) + "\n")


def _killed_for_memory() -> int | None:
    """Return how many processes the kernel has killed for want of memory since it booted."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        pass
    return None
