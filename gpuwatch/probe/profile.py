"""The `profile` command: torch's profiler over a few steps of this rank, and its trace files.

It is started and stopped at step boundaries in the training thread, which has to be the main
thread: torch's profiler belongs to the thread that started it, and one that is left on in another
takes the process down at its exit. On CUDA the stop waits for the device, as torch's profiler does,
asked for by a person. A script that profiles itself goes first: ours is refused, or gives way.

What it costs is in proportion to the events. Each takes a little over 200 bytes, and in the stop
about 7 us, and six times those bytes for a moment. The rest is read in a thread of its own, but
torch holds the GIL in parts of that, so that the training stands for about as long again. So a
profile ends at the step in which the process has grown by 64 MiB, some 300,000 events. It also ends
where the training forks: a loader worker would go on profiling for its whole life.
"""

import atexit
import base64
import contextlib
import gzip
import json
import os
import re
import shutil
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpuwatch.probe.boundary import Desk, Job, Outcome
from gpuwatch.probe.commands import only, text_arg, whole_arg
from gpuwatch.probe.pace import CommandError, Pace, ahead_of
from gpuwatch.probe.pieces import pieces_of, summarise
from gpuwatch.schema import Command
from gpuwatch.wire.publish import trace_folder

__all__ = ["PIECE_BYTES", "Profiles"]

MOST_STEPS = 50
DEFAULT_STEPS = 5
KEPT_TRACES = 8
PIECE_BYTES = 150_000
_KEPT_ON_NODE = 256
_KEPT_BYTES = 512 * 2**20
_ABANDONED_S = 600.0
"""So old is what a dead process has left of a trace it was writing, before it is removed."""

_LONGEST_S = 120.0
_MOST_GROWTH = 64 * 2**20
"""Steps that take longer, or more memory, are too much: the profile ends with those so far."""

_LEAD_S = 0.05
"""The training thread may be so far on when it looks: fast steps are announced further ahead."""

_JOIN_S = 0.2
_RECALL_S = 1.0
_NOT_MAIN = (
    "the training runs in a thread other than the main one, where torch's profiler may take the "
    "process down at its exit"
)
_BUSY_OF_USER = "the training profiles itself now: only one profiler can run in a process"
_FAST_GZIP = 5
_KINETO_LEVEL = "KINETO_LOG_LEVEL"


class _Who(NamedTuple):
    """Whose profile it is."""

    run: str
    rank: int
    world_size: int


class Profiles:
    """The profiles of this rank.

    Args:
        desk: where outcomes are left.
        who: returns (run, rank, world size).
    """

    def __init__(self, desk: Desk, who: Callable[[], tuple[str, int, int]]) -> None:
        self._desk = desk
        self._who = who
        self._running: _Profile | None = None
        self._traces: OrderedDict[str, Path] = OrderedDict()

    # --- the telemetry thread ------------------------------------------------------------------

    def begin(self, command: Command, pace: Pace, step_s: float) -> tuple[str, Job]:
        """Check a `profile` command; returns the words of acceptance and the job.

        Raises:
            CommandError: it cannot be obeyed.
        """
        args = only(command, "steps", "at")
        steps = whole_arg(args, "steps", 1, MOST_STEPS, DEFAULT_STEPS)
        at = whole_arg(args, "at", 0, 2**53)
        assert steps is not None
        if self._running is not None and not self._running.over.is_set():
            raise CommandError(f"busy: a profile of {self._running.words} is under way")
        if _user_profiles():
            raise CommandError(_BUSY_OF_USER)
        if at is None:
            lead = int(_LEAD_S / step_s) if step_s > 0 else 0
            at = pace.step + max(2, lead)
        else:
            ahead_of(at, pace)
        self._running = _Profile(command.id, self, pace, at, steps, self._desk)
        return self._running.words, self._running

    def fetch(self, command: Command) -> tuple[str, str]:
        """Return a piece of a trace of this rank: ("", JSON text).

        Raises:
            CommandError: there is no such trace, or no such piece.
        """
        args = only(command, "name", "offset")
        name = text_arg(args, "name", "the name of a trace")
        path = self._traces.get(name)
        if path is None:
            known = ", ".join(self._traces) or "none"
            raise CommandError(f"no trace {name[:128]!r} of this rank; there is {known}")
        try:
            with path.open("rb") as file:
                total = file.seek(0, os.SEEK_END)
                offset = whole_arg(args, "offset", 0, total, 0)
                assert offset is not None
                file.seek(offset)
                piece = file.read(PIECE_BYTES)
        except OSError as exc:
            raise CommandError(f"the trace {name} cannot be read: {exc.strerror}") from None
        return "", json.dumps(
            {
                "schema": 1,
                "name": name,
                "offset": offset,
                "bytes": len(piece),
                "total_bytes": total,
                "base64": base64.b64encode(piece).decode(),
            }
        )

    def recall(self) -> None:
        """Nobody watches any more: end a profile that runs in another thread than this one.

        It can only be stopped there, at the next mark. If none comes it runs on, until the exit.
        """
        running = self._running
        if running is None or not running.recall():
            return
        if not running.over.wait(_RECALL_S):
            atexit.register(running.stop_at_exit)

    def close(self) -> None:
        """The process ends: wait a moment for a trace that is being written."""
        running = self._running
        if running is not None and running.reader is not None:
            running.reader.join(_JOIN_S)

    # --- afterwards, in a thread of its own ----------------------------------------------------

    def finish(self, profile: "_Profile", profiler: Any, wall_ns: int) -> None:
        """Read the profile, write the trace, and leave the outcome on the desk."""
        try:
            outcome = self._read(profile, profiler, wall_ns)
        except Exception as exc:
            words = f"the profile cannot be read: {type(exc).__name__}: {exc}".splitlines()[0]
            outcome = Outcome("error", words)
        profile.over.set()
        self._desk.outcomes.append((profile.id, outcome))

    def _read(self, profile: "_Profile", profiler: Any, wall_ns: int) -> Outcome:
        who = _Who(*self._who())
        events = profiler.profiler.kineto_results.events()
        found = summarise(pieces_of(events), wall_ns, world_size=who.world_size)
        na = dict(found.na)
        path: Path | None = None
        try:
            path = self._write(who, profile, profiler)
        except (OSError, RuntimeError) as exc:
            na["trace"] = f"the trace could not be written: {exc}"[:500]
        steps = profile.steps
        return Outcome(
            "done",
            f"{profile.words}: {wall_ns / steps / 1e6:.1f} ms a step{profile.note}",
            json.dumps(
                {
                    "schema": 1,
                    "first_step": profile.first,
                    "last_step": profile.first + steps - 1,
                    "wall_ms": wall_ns / 1e6,
                    "clock": found.clock,
                    "operators": found.operators,
                    "kernel_share": found.kernel_share,
                    "comm_ms": found.comm_ms,
                    "comm_overlap_share": found.comm_overlap_share,
                    "na": na,
                    "note": profile.note.lstrip("; "),
                    "trace": "" if path is None else path.name,
                    "trace_path": "" if path is None else str(path),
                    "trace_bytes": 0 if path is None else path.stat().st_size,
                }
            ),
        )

    def _write(self, who: _Who, profile: "_Profile", profiler: Any) -> Path:
        folder = trace_folder()
        run = re.sub(r"[^A-Za-z0-9_-]+", "_", who.run)[:64] or "run"
        last = profile.first + profile.steps - 1
        path = folder / f"{run}.r{who.rank}.s{profile.first}-{last}.json.gz"
        plain = folder / f".{os.getpid()}.json"
        packed = folder / f".{os.getpid()}.gz"
        try:
            # torch writes with the mode of the umask; the folder is closed to others anyway.
            profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(packed, "wb", _FAST_GZIP) as target:
                shutil.copyfileobj(source, target, 2**20)
            packed.chmod(0o600)
            packed.replace(path)
        finally:
            for left in (plain, packed):
                left.unlink(missing_ok=True)
        self._traces.pop(path.name, None)
        self._traces[path.name] = path
        while len(self._traces) > KEPT_TRACES:
            self._traces.popitem(last=False)
        _tidy(folder, f"{run}.r{who.rank}.s*.json.gz", KEPT_TRACES)
        _tidy(folder, "*.json.gz", _KEPT_ON_NODE, _KEPT_BYTES)
        _sweep(folder)
        return path


def _tidy(folder: Path, pattern: str, kept: int, kept_bytes: int | None = None) -> None:
    """Remove all but the newest traces of that pattern; the newest one stays whatever its size."""
    found = []
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            info = path.stat()
            found.append((info.st_mtime_ns, path, info.st_size))
    total = 0
    for place, (_, path, size) in enumerate(sorted(found, reverse=True)):
        total += size
        if place >= kept or (place and kept_bytes is not None and total > kept_bytes):
            path.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove what processes that are dead have left of traces they were writing."""
    for path in folder.glob(".*.*"):
        pid = path.name.split(".")[1]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and time.time() - path.stat().st_mtime > _ABANDONED_S:
                try:
                    os.kill(int(pid), 0)
                except (ProcessLookupError, OverflowError):
                    path.unlink(missing_ok=True)


class _Profile:
    """One profile; all but the reading happens in the training thread.

    `over` is set when it has ended, `note` says why it has fewer steps than were asked for.
    """

    def __init__(
        self, ident: str, profiles: Profiles, pace: Pace, at: int, steps: int, desk: Desk
    ) -> None:
        self.id = ident
        self.first = at
        self.steps = steps
        self.note = ""
        self.over = threading.Event()
        self.reader: threading.Thread | None = None
        self._profiles = profiles
        self._pace = pace
        self._desk = desk
        self._profiler: Any = None
        self._begun_ns = 0
        self._stopped: tuple[Any, int] | None = None  # what there is to read, and its wall time
        self._floor_bytes = 0
        self._thread = 0
        self._recalled = False
        self._gave_way: deque[bool] = deque(maxlen=1)
        self._restore: Callable[[], None] | None = None

    @property
    def words(self) -> str:
        """Which steps, in words."""
        last = self.first + self.steps - 1
        return f"step {last}" if self.steps == 1 else f"steps {self.first}-{last}"

    def work(self, tick: int) -> Outcome | None:
        pace = self._pace
        if self._begun_ns or self._gave_way or self._recalled:
            is_on = self._begun_ns and self._profiler is not None
            if is_on and tick >= pace.tick_of(self.first + self.steps):
                self._stop()
                return None
            return self.glance()
        begin = pace.tick_of(self.first)
        if threading.current_thread() is not threading.main_thread():
            return self._over(_NOT_MAIN)
        try:
            if tick >= begin - pace.per_step and self._profiler is None:
                if _user_profiles():
                    return self._over(_BUSY_OF_USER)
                self._prepare()
            self._floor_bytes = max(self._floor_bytes, _resident_bytes())
            if tick >= begin:
                self.first = pace.step_at(tick)
                self._start()
        except Exception as exc:
            self._abandon()
            return self._over(f"torch's profiler does not start: {_sentence(exc)}")
        return None

    def glance(self) -> Outcome | None:
        if self._gave_way:
            return self._over("the training began to profile itself, and this profile gave way")
        if self._recalled:
            self._abandon()
            return self._over("the training is no longer watched")
        if self._stopped is not None:
            self._read()
            return None
        if not self._begun_ns:
            if self._profiler is not None:
                # What a step takes in between, gradients say, is none of the profile's.
                self._floor_bytes = max(self._floor_bytes, _resident_bytes())
            return None
        if time.perf_counter_ns() - self._begun_ns > _LONGEST_S * 1e9:
            return self._cut(f"it took over {_LONGEST_S:.0f} s")
        grown_mib = (_resident_bytes() - self._floor_bytes) / 2**20
        if grown_mib * 2**20 > _MOST_GROWTH:
            return self._cut(f"the process had grown by {grown_mib:.0f} MiB")
        return None

    def close(self) -> Outcome | None:
        if self._thread == threading.get_ident():
            self._abandon()
        self._stopped = None
        return self._over("the training has ended before the last step of this profile")

    def fork(self) -> None:
        """This process is about to fork: a child of the profiled thread would profile on."""
        if self._thread != threading.get_ident() or self._profiler is None or not self._begun_ns:
            return
        # What there is is read after the fork, at the next mark: with no thread more than before.
        outcome = self._cut("the training started processes (loader workers, say)", read=False)
        if outcome is not None:
            self._desk.drop(self)
            self._desk.outcomes.append((self.id, outcome))

    def recall(self) -> bool:
        """Have it ended at the next mark; whether it runs, in another thread than this one."""
        if self._profiler is None or self._thread == threading.get_ident():
            return False
        self._recalled = True
        return True

    def stop_at_exit(self) -> None:
        """In the main thread, as the interpreter ends."""
        if self._thread == threading.get_ident():
            self._abandon()

    def _cut(self, why: str, *, read: bool = True) -> Outcome | None:
        """End it with the steps so far, or with an error where not one is whole."""
        whole = min(self.steps, self._pace.step_at(self._desk.tick) - self.first)
        if whole < 1:
            self._abandon()
            return self._over(f"{why} before one step of the profile was whole")
        if whole < self.steps:
            self.note = f"; ended after {whole} of {self.steps} steps: {why}"
            self.steps = whole
        self._stop(read=read)
        return None

    def _over(self, why: str) -> Outcome:
        self.over.set()
        return Outcome("error", why)

    # --- torch's profiler ----------------------------------------------------------------------

    def _prepare(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile, supported_activities

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized() and ProfilerActivity.CUDA in supported_activities():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
        self._thread = threading.get_ident()
        self._profiler = profile(activities=activities)
        with _quiet_kineto():
            self._profiler.prepare_trace()
        self._restore = _give_way_to_user(self._give_way)

    def _start(self) -> None:
        global _recording, _fork_hooked
        if not _fork_hooked:
            _fork_hooked = True
            os.register_at_fork(before=_before_fork)
        with _ours:
            self._profiler.start_trace()
        self._begun_ns = time.perf_counter_ns()
        _recording = self

    def _stop(self, *, read: bool = True) -> None:
        global _recording
        wall_ns = time.perf_counter_ns() - self._begun_ns
        profiler, self._profiler, _recording = self._profiler, None, None
        self._unpatch()
        try:
            profiler.stop_trace()
        except Exception as exc:
            self._desk.drop(self)
            outcome = self._over(f"torch's profiler does not stop: {_sentence(exc)}")
            self._desk.outcomes.append((self.id, outcome))
            return
        self._stopped = profiler, wall_ns
        if read:
            self._read()

    def _read(self) -> None:
        stopped, self._stopped = self._stopped, None
        self._desk.drop(self)
        self.reader = threading.Thread(
            target=self._profiles.finish,
            args=(self, *(stopped or ())),
            name="gpuwatch-profile",
            daemon=True,
        )
        self.reader.start()

    def _give_way(self) -> None:
        """The script starts a profiler of its own: only one can run."""
        self._gave_way.append(True)
        self._abandon()

    def _abandon(self) -> None:
        """Stop without reading what there is."""
        global _recording
        _recording = None
        self._unpatch()
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        with contextlib.suppress(Exception), _ours:
            if not self._begun_ns:
                # One that is only prepared is started first: torch has no other way to end it.
                profiler.start_trace()
            profiler.stop_trace()

    def _unpatch(self) -> None:
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()


_recording: _Profile | None = None
_fork_hooked = False


def _before_fork() -> None:
    recording = _recording
    if recording is not None:
        with contextlib.suppress(Exception):
            recording.fork()


def _resident_bytes() -> int:
    """Return the resident set of this process, 0 where it cannot be told."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _sentence(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}".splitlines()[0][:300]


class _Ours(threading.local):
    """Whether it is the probe that starts or stops a profiler in this thread."""

    now = False

    def __enter__(self) -> None:
        self.now = True

    def __exit__(self, *_: object) -> None:
        self.now = False


_ours = _Ours()


@contextlib.contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep two lines a profile out of the training's output; read when Kineto is first used."""
    if _KINETO_LEVEL in os.environ:
        yield
        return
    os.environ[_KINETO_LEVEL] = "99"
    try:
        yield
    finally:
        os.environ.pop(_KINETO_LEVEL, None)


def _user_profiles() -> bool:
    """Whether a profiler of torch's runs in this process."""
    module = sys.modules.get("torch.autograd.profiler")
    return bool(getattr(module, "_is_profiler_enabled", False))


def _give_way_to_user(give_way: Callable[[], None]) -> Callable[[], None]:
    """Call `give_way` before a profiler of the script's starts; returns what undoes this.

    Two of them would raise in the script. Only while ours runs is anything exchanged.
    """
    from torch.autograd import profiler as module

    kind = module.profile
    undo: list[Callable[[], None]] = []
    for name in ("_prepare_trace", "_start_trace", "__enter__"):
        original = vars(kind).get(name)
        if original is None:
            continue

        def first(self: Any, _original: Any = original) -> Any:
            if not _ours.now:
                give_way()
            return _original(self)

        setattr(kind, name, first)

        def restore(name: str = name, original: Any = original, first: Any = first) -> None:
            if vars(kind).get(name) is first:
                setattr(kind, name, original)

        undo.append(restore)

    def undo_all() -> None:
        while undo:
            undo.pop()()

    return undo_all
