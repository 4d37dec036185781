"""The live session: the store, fed by the link to this machine's node process."""

import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from gpuwatch.errors import AgentError
from gpuwatch.schema import WIRE_VERSION, Command
from gpuwatch.store import Store, View
from gpuwatch.store.views import RunView
from gpuwatch.wire.collect import NodeLink, agent_presence
from gpuwatch.wire.collect.discovery import RankFiles
from gpuwatch.wire.publish import run_directory

__all__ = ["AGENT_ARGV", "SAMPLER_ARGV", "LiveSession", "pick_run"]

# -P: a file of the user's in the current directory must not shadow a module of ours.
AGENT_ARGV = [sys.executable, "-P", "-m", "gpuwatch", "agent", "--detach"]
SAMPLER_ARGV = [sys.executable, "-P", "-m", "gpuwatch.sensors"]

_ASK_AGAIN_S = 1.0
ANSWER_S = 3.0
"""One-shot commands wait this long at most."""


class LiveSession:
    """A `Session` on the runs of this user on this machine.

    `tap` is called with the bytes of every frame after they are in the picture, in the thread of
    the link.

    Raises:
        RunDirectoryError: the run directory cannot be used.
    """

    def __init__(
        self, directory: Path | None = None, *, tap: Callable[[bytes], None] | None = None
    ) -> None:
        self._tap = tap
        self._directory = directory or run_directory()
        self._store = Store()
        self._asked_s: dict[tuple[str, int], float] = {}
        self._link = NodeLink(self._directory, AGENT_ARGV, self._on_frame, self._store.set_link)
        self._link.start()

    @property
    def version(self) -> int:
        """Rises with every change."""
        return self._store.version

    @property
    def started_agent(self) -> bool:
        """Whether the node process was started for this session."""
        return self._link.started_agent

    def view(self) -> View:
        """Return the present picture."""
        return self._store.view()

    def send(
        self,
        verb: str,
        run: str,
        rank: int | None = None,
        args: dict[str, str | int | float | bool] | None = None,
    ) -> str:
        """Queue a command and return its id."""
        command = Command(
            WIRE_VERSION,
            uuid.uuid4().hex,
            verb,
            run=self._store.raw_run(run),
            rank=rank,
            args=args or {},
        )
        self._link.send(command)
        return command.id

    def retire_agent(self) -> None:
        """Let the node process end now if nothing runs and nobody else watches."""
        self._link.send(Command(WIRE_VERSION, uuid.uuid4().hex, "retire"))

    def close(self) -> None:
        """End the link; returns within 0.5 s."""
        self._link.close()

    def _on_frame(self, data: bytes, received_s: float) -> None:
        for run, rank in self._store.apply(data, received_s):
            key = (run, rank)
            if received_s - self._asked_s.get(key, 0.0) > _ASK_AGAIN_S:
                self._asked_s[key] = received_s
                self._link.send(
                    Command(WIRE_VERSION, uuid.uuid4().hex, "snapshot", run=run, rank=rank)
                )
        if self._tap is not None:
            self._tap(data)

    def raw_run(self, run: str) -> str:
        """Return a run id as its owner spells it, which is how frames name it."""
        return self._store.raw_run(run)

    # --- one-shot commands ---------------------------------------------------------------------

    def settled_view(self, timeout_s: float = ANSWER_S) -> View:
        """Wait until every rank that is there has answered and the sampler has ticked twice.

        Returns the picture after that, or after `timeout_s`.

        Raises:
            AgentError: there is no contact with the node process.
        """
        files = RankFiles(self._directory)
        expected: set[tuple[str, int]] = set()
        deadline_s = time.monotonic() + timeout_s
        while True:
            new, gone = files.scan()
            expected |= {(p.run, p.rank) for p in new}
            expected -= {(p.run, p.rank) for p in gone}
            view = self.view()
            if self.has_past() and _has_answered(view, expected) and _has_sensors(view):
                return view
            if time.monotonic() >= deadline_s:
                if view.link != "live":
                    raise AgentError(view.message or "the node process does not answer")
                return view
            time.sleep(0.05)

    def has_past(self) -> bool:
        """Whether the node process has sent what it knew before this session came."""
        asked = self._link.asked_id
        return bool(asked) and any(r.id == asked for r in self._store.replies())

    def agent_lives(self) -> bool:
        """Whether a node process runs for this directory."""
        return agent_presence(self._directory) is not None


def _has_answered(view: View, expected: set[tuple[str, int]]) -> bool:
    answered = {(r.run, r.rank) for run in view.runs for r in run.ranks if r.hello is not None}
    return expected <= answered


def _has_sensors(view: View) -> bool:
    """Rates need two ticks: the CPU reading of the first one is n/a."""
    for node in view.nodes:
        if node.host is not None:
            reading = node.host.readings.get("cpu_percent")
            if reading is not None and reading.value is not None:
                return True
    return False


def pick_run(view: View, target: str | None) -> tuple[RunView | None, list[RunView]]:
    """Return (the run meant, the other runs): the named one, or the newest that lives.

    A target is a run id, its beginning, or the run's name; None where nothing matches.
    """
    runs = list(view.runs)
    if target is None:
        live = [r for r in runs if r.state != "ended"]
        chosen = next(iter(live or runs), None)
    else:
        matches = [r for r in runs if target in (r.run, r.name)]
        matches += [r for r in runs if r.run.startswith(target) and r not in matches]
        chosen = matches[0] if matches else None
    return chosen, [r for r in runs if r is not chosen]
