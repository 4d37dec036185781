"""Which trainings that share a run id are one run: they claim places in a small file.

A shell script under one `gpuwatch run` may train twice, one after the other or side by side, and
every training finds the same run id in its environment. The first one takes it as it is; another
one takes `<run id>.2`, and so on. What starts again because it had failed is the same run: the same
command, after a process that has gone without ending well.

The file is `runs-<hash of the run id>.json` in the run directory, under a lock on the directory.
The telemetry thread reads and writes it, once at the start and once at the end. Where it cannot,
the run keeps its id.
"""

import contextlib
import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from gpuwatch.probe.identity import Identity
from gpuwatch.probe.text import wire_text
from gpuwatch.wire.publish import boot_id, process_start_ticks, write_atomic

__all__ = ["Claim", "Member", "Slot", "claim", "place"]

_LOCK_S = 0.2
_LOCK_EVERY_S = 0.005
_KEPT_S = 86400.0
_FILE_BYTES = 1 << 20
_RUN_CHARACTERS = 120  # a run id has 128 on the wire: the rest is for ".<number>"
_MOST_SLOTS = 1000


class Member(msgspec.Struct):
    """A process that trains: `ticks` is its start time, `ended` whether it has ended well."""

    pid: int
    ticks: int
    rank: int
    ended: bool = False


class Slot(msgspec.Struct):
    """One run: the words that its ranks have in common, its command, its processes."""

    group: str
    command: str
    members: list[Member]


class _Book(msgspec.Struct):
    boot: str
    slots: list[Slot]


def place(
    slots: list[Slot],
    me: Member,
    group: str,
    command: str,
    *,
    relaunched: bool,
    alive: Callable[[Member], bool],
) -> int:
    """Return the index of the slot that `me` belongs to, `len(slots)` for a new one.

    Args:
        slots: the runs that have claimed this run id so far, oldest first.
        me: this process.
        group: what ranks of one launch have in common, empty for a process alone.
        command: what was typed to start it.
        relaunched: whether the launcher says that it starts its ranks again.
        alive: whether the process of a member still runs.
    """
    for index, slot in enumerate(slots):
        if any((m.pid, m.ticks) == (me.pid, me.ticks) for m in slot.members):
            return index  # announced anew, or watched once more
    for index in range(len(slots) - 1, -1, -1):
        slot = slots[index]
        living = [m for m in slot.members if alive(m)]
        if living:
            if group and slot.group == group and all(m.rank != me.rank for m in living):
                return index
            continue
        same = slot.command == command or (bool(group) and slot.group == group)
        # All of them have died. If none of them well, this is the same once more.
        if same and (relaunched or not any(m.ended for m in slot.members)):
            return index
    return len(slots)


class Claim:
    """A place that this process holds; `run` is the id that goes with it."""

    def __init__(self, directory: Path, named: str, run: str, me: Member) -> None:
        self.run = run
        self._directory = directory
        self._named = named
        self._me = me

    def end(self, *, well: bool) -> None:
        """The training has ended; if not `well`, the same command may take its place."""
        if well:
            self._change(lambda member, _: setattr(member, "ended", True))

    def withdraw(self) -> None:
        """This process belongs to another run: as if it had never been here."""
        self._change(lambda member, slot: slot.members.remove(member))

    def _change(self, change: Callable[[Member, Slot], None]) -> None:
        with contextlib.suppress(OSError), _locked(self._directory):
            path = _path(self._directory, self._named)
            book = _read(path)
            for slot in book.slots:
                for member in list(slot.members):
                    if (member.pid, member.ticks) == (self._me.pid, self._me.ticks):
                        change(member, slot)
            while book.slots and not book.slots[-1].members:
                book.slots.pop()
            _write(path, book)


def claim(
    directory: Path, identity: Identity, environ: Mapping[str, str] = os.environ
) -> tuple[Identity, Claim | None]:
    """Claim a place for this process; returns its identity with the run id that goes with it.

    The claim is None, and the identity as it was, where there is nothing to tell apart (a run id
    that nobody shares), where other nodes would have to agree, or where the file cannot be used.
    """
    group = _group(identity, environ)
    if group is None:
        return identity, None
    command = hashlib.sha256("\0".join(sys.argv).encode("utf-8", "replace")).hexdigest()[:16]
    me = Member(os.getpid(), process_start_ticks(os.getpid()) or 0, identity.rank)
    relaunched = environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")
    try:
        with _locked(directory):
            path = _path(directory, identity.run)
            book = _read(path)
            index = place(book.slots, me, group, command, relaunched=relaunched, alive=_is_alive)
            if index >= _MOST_SLOTS:
                return identity, None
            if index == len(book.slots):
                book.slots.append(Slot(group, command, []))
                _clean(directory)
            slot = book.slots[index]
            if not any(_is_alive(m) for m in slot.members):
                slot.members.clear()
            slot.group, slot.command = group, command
            slot.members = [m for m in slot.members if m.pid != me.pid] + [me]
            _write(path, book)
    except OSError:
        return identity, None
    named = identity.run
    if index:
        run = f"{named[:_RUN_CHARACTERS]}.{index + 1}"
        identity = replace(identity, run=wire_text(run, 128))
    return identity, Claim(directory, named, identity.run, me)


def _group(identity: Identity, environ: Mapping[str, str]) -> str | None:
    """Return what the ranks of this launch have in common, None where no place is needed."""
    if identity.run_source in {"random", "MASTER_ADDR"}:
        return None  # drawn, or made of what no other launch has
    if identity.world_size == 1:
        return ""
    local = environ.get("LOCAL_WORLD_SIZE", str(identity.world_size))
    if local != str(identity.world_size) or environ.get("SLURM_NNODES", "1") != "1":
        return None  # the other nodes may have seen more or fewer of them
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    if elastic not in ("", "none"):
        return elastic
    return f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"


def _is_alive(member: Member) -> bool:
    return process_start_ticks(member.pid) == member.ticks


# --- the file ----------------------------------------------------------------------------------


def _path(directory: Path, run: str) -> Path:
    return directory / f"runs-{hashlib.sha256(run.encode()).hexdigest()[:12]}.json"


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock on the directory; an OSError if others hold it all the while."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline_s = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_LOCK_EVERY_S)
        try:
            yield
        finally:
            # Not left to close(): a child that was forked meanwhile holds the lock as well.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _read(path: Path) -> _Book:
    """Return what is in the file; nothing if it makes no sense or is of another boot."""
    empty = _Book(boot_id(), [])
    try:
        with path.open("rb") as file:
            book = msgspec.json.decode(file.read(_FILE_BYTES), type=_Book)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return empty
    return book if book.boot == empty.boot else empty


def _write(path: Path, book: _Book) -> None:
    if book.slots:
        write_atomic(path, msgspec.json.encode(book))
    else:
        path.unlink(missing_ok=True)


def _clean(directory: Path) -> None:
    """Remove the files of runs that nobody trains any more, a day after their last change."""
    for path in directory.glob("runs-*.json"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _KEPT_S and not any(
                _is_alive(member) for slot in _read(path).slots for member in slot.members
            ):
                path.unlink()
