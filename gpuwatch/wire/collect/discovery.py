"""Who is in the run directory, and whose files are left over."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from gpuwatch.errors import FrameError
from gpuwatch.wire.publish import Presence, process_start_ticks, read_presence
from gpuwatch.wire.publish.rundir import boot_id

__all__ = ["AGENT_FILE", "RankFiles", "agent_presence", "is_alive"]

AGENT_FILE = "agent.json"


def is_alive(presence: Presence) -> bool:
    """Whether the process still runs: same pid, same start time, same boot."""
    if presence.boot and presence.boot != boot_id():
        return False
    ticks = process_start_ticks(presence.pid)
    return ticks is not None and (not presence.started_ticks or ticks == presence.started_ticks)


def agent_presence(directory: Path) -> Presence | None:
    """Return the node process of this directory, None if there is none that lives."""
    try:
        presence = read_presence(directory / AGENT_FILE)
    except (OSError, FrameError):
        return None
    return presence if presence.role == "agent" and is_alive(presence) else None


@dataclass(slots=True)
class RankFiles:
    """Scans the directory for ranks; removes the files of dead ones.

    `unreadable` counts discovery files that are there but make no sense.
    """

    directory: Path
    unreadable: int = 0
    _changed_ns: int = -1
    _known: dict[str, Presence] = field(default_factory=dict)

    def changed(self) -> bool:
        """Whether files came or went since the last call; costs one stat."""
        try:
            changed_ns = self.directory.stat().st_mtime_ns
        except OSError:
            return False
        if changed_ns == self._changed_ns:
            return False
        self._changed_ns = changed_ns
        return True

    def scan(self) -> tuple[list[Presence], list[Presence]]:
        """Return (ranks that are new, ranks that have gone) since the last scan."""
        try:
            names = {p.name for p in self.directory.glob("rank-*.json")}
        except OSError:
            return [], []
        gone = [self._known.pop(name) for name in list(self._known) if name not in names]
        new = []
        unreadable = 0
        for name in sorted(names - self._known.keys()):
            path = self.directory / name
            try:
                presence = read_presence(path)
            except FileNotFoundError:
                continue
            except (OSError, FrameError):
                unreadable += 1
                continue
            if presence.role != "rank":
                unreadable += 1
            elif is_alive(presence):
                self._known[name] = presence
                new.append(presence)
            else:
                self._remove(path)
        self.unreadable = unreadable
        return new, gone

    def put_back(self, presence: Presence) -> None:
        """Leave a new rank for the next scan, which finds it again."""
        for name, known in list(self._known.items()):
            if known == presence:
                del self._known[name]

    def forget(self, presence: Presence) -> None:
        """The process is dead: remove what it left behind."""
        for name, known in list(self._known.items()):
            if known == presence:
                del self._known[name]
                self._remove(self.directory / name)

    def _remove(self, path: Path) -> None:
        for file in (path, path.with_suffix(".t"), path.with_suffix(".c")):
            with contextlib.suppress(OSError):
                file.unlink()
