"""The lookout: says why no process of a `gpuwatch run` reports in, where that is so.

`gpuwatch run` becomes the command itself, so somebody else must look: a process forked off before,
twice, so that it is no child of the job's. It holds nothing of the job's (no terminal, no pipe, no
directory), sleeps on the job's end, says at most one sentence, and ends with its sentence or with
the job. When the first rank reports in it ends too, or becomes the witness that writes the card.
"""

import contextlib
import errno
import json
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["flush_output", "start_apart", "start_lookout"]

LOOK_S = 0.5
"""Between two looks, and then as long as a tenth of the job's age, at most `_SELDOM_S`."""
UNWATCHED_S = 5.0
"""So long may a process have torch and not our hook before it is called unwatched; a tool that only
looks something up in torch is gone by then."""
_SELDOM_S = 5.0
_HOOK_DIRECTORY = "/gpuwatch/probe/hook"
_FILE_BYTES = 65536


def flush_output() -> None:
    """Flush what was printed; a stream that is closed or takes nothing is none of our business."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def start_apart(work: Callable[[], None]) -> None:
    """Do `work` in a process that is no child of this one; returns when that has begun.

    Raises:
        OSError: there can be no more processes.
    """
    flush_output()
    first = os.fork()
    if first:
        status = 0
        # Whoever ignores SIGCHLD, or was started by who does, has no child to wait for.
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(first, 0)
        if status:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return
    # From here on nothing may return into the command line or print.
    code = 1
    try:
        os.setsid()
        second = os.fork()
        code = 0
        if second == 0:
            work()
    finally:
        os._exit(code)


def start_lookout(run: str, *, card: bool) -> None:
    """Fork the lookout for the job that this process is about to become; returns at once.

    `run` is the job's run id, empty where the ranks find one themselves; `card` whether a card is
    to be written at the end.
    """
    job = os.getpid()
    directory = os.path.abspath(os.environ.get("GPUWATCH_DIR") or f"/tmp/gpuwatch-{os.getuid()}")
    # Asked here: a short job may be over before the lookout looks for the first time.
    started_ticks = _started_ticks(job)
    if job == 1 or started_ticks is None:
        return  # in a container whose first process adopts every orphan, it would be a child

    def look_out() -> None:
        errors = _let_go()
        _Lookout(job, started_ticks, run, Path(directory), errors, card).run()

    # Without room for a process the job goes on, and nobody says why nothing reports in.
    with contextlib.suppress(OSError):
        start_apart(look_out)


def _let_go() -> int | None:
    """Give up everything that others wait for; return the job's stderr if keeping it is harmless.

    Readers of a pipe and of a terminal wait until the last writer has closed it. A file has no such
    readers, and only who shares its position can write to it without overwriting.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    errors: int | None = None
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.fstat(2).st_mode):
            errors = os.dup2(2, 3, inheritable=False)
    os.closerange(3 if errors is None else 4, _open_limit())
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if null > 3 or (null == 3 and errors is None):
        os.close(null)
    os.chdir("/")
    return errors


def _open_limit() -> int:
    """Return one more than the highest open descriptor."""
    try:
        return max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    except (OSError, ValueError):
        return 4096


class _Lookout:
    """Looks at the job `job` (a pid) until there is nothing left to say."""

    def __init__(
        self,
        job: int,
        started_ticks: int,
        run: str,
        directory: Path,
        errors: int | None,
        card: bool,
    ) -> None:
        self._card = card
        self._job = job
        self._run = run
        self._errors = errors
        self._started_ticks = started_ticks
        self._unwatched_since_s: dict[int, float] = {}
        self._directory = directory

    def run(self) -> None:
        poll = self._end_of_job()
        began_s = time.monotonic()
        while True:
            age_s = time.monotonic() - began_s
            pause_s = min(max(LOOK_S, age_s / 10), _SELDOM_S)
            if poll is not None:
                poll.poll(int(pause_s * 1000))
            else:
                # Without a descriptor to sleep on: the lookout must not outlive the job by long.
                time.sleep(LOOK_S)
            if not self._lives():
                self._notes(set())  # nobody reads them any more
                return
            tree = self._processes()
            if self._reports_in(tree):
                if self._card:
                    self._witness(poll, tree)
                return
            sentence = self._notes(tree) or self._unwatched(tree)
            if sentence:
                self._say(f"gpuwatch: {sentence}\n")
                return

    def _lives(self) -> bool:
        return _started_ticks(self._job) == self._started_ticks

    def _witness(self, poll: "select.poll | None", tree: set[int]) -> None:
        from gpuwatch.commands.witness import Witness

        if self._errors is None:
            # What is written after the end needs a way that is still there then. A reader waits
            # for the card; it comes within a second of the end.
            self._errors = self._open_errors()
        say = self._write_card
        Witness(self._job, poll, self._lives, self._run, tree, self._directory, say).stay()

    def _write_card(self, text: str) -> None:
        if self._errors is None:
            return
        with contextlib.suppress(OSError):
            if os.isatty(self._errors):
                text = f"\n{text}"  # a progress bar may have left the line unfinished
            data = text.encode("utf-8", "replace")
            while data:
                data = data[os.write(self._errors, data) :]

    def _open_errors(self) -> int | None:
        """Open the job's stderr anew; None where that cannot be: a socket, say.

        A full pipe makes nobody wait, and no descriptor is shared with the job.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            return os.open(f"/proc/{self._job}/fd/2", flags)
        except OSError:
            return None

    def _end_of_job(self) -> "select.poll | None":
        try:
            descriptor = os.pidfd_open(self._job)
        except (OSError, AttributeError):
            return None
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return poll

    def _processes(self) -> set[int]:
        """Return the pids of the job and of all its descendants."""
        found: set[int] = set()
        parents = [self._job]
        while parents:
            parent = parents.pop()
            if parent not in found:
                found.add(parent)
                parents += _children(parent)
        return found

    def _reports_in(self, tree: set[int]) -> bool:
        """Whether a rank of this run is announced and lives."""
        for path in self._files("rank-*.json"):
            told = _told(path)
            pid = told.get("pid")
            if isinstance(pid, int) and (
                pid in tree or (self._run and told.get("run") == self._run)
            ):
                ticks = _started_ticks(pid)
                if ticks is not None and told.get("started_ticks") in (0, ticks):
                    return True
        return False

    def _notes(self, tree: set[int]) -> str:
        """Return what the hook has noted about an interpreter of the job; removes read notes."""
        sentence = ""
        for path in self._files("note-*.json"):
            told = _told(path)
            pid = told.get("pid")
            dead = not isinstance(pid, int) or _started_ticks(pid) is None
            if pid in tree:
                sentence = _missing(told)
            if dead or pid in tree:
                with contextlib.suppress(OSError):
                    path.unlink()
        return sentence

    def _files(self, pattern: str) -> list[Path]:
        try:
            return list(self._directory.glob(pattern))
        except OSError:
            return []

    def _unwatched(self, tree: set[int]) -> str:
        """Return a sentence if a process of the job has torch, and no hook, for some seconds."""
        now_s = time.monotonic()
        since_s = {pid: now_s for pid in tree if _has_torch_alone(pid)}
        since_s.update({p: s for p, s in self._unwatched_since_s.items() if p in since_s})
        self._unwatched_since_s = since_s
        late = [pid for pid, s in since_s.items() if now_s - s >= UNWATCHED_S]
        return _why_unwatched(min(late)) if late else ""

    def _say(self, sentence: str) -> None:
        """Write to the job's stderr, as long as there is a job."""
        data = sentence.encode("utf-8", "replace")
        with contextlib.suppress(OSError):
            if self._errors is not None:
                os.write(self._errors, data)
                return
            # For a moment only: no descriptor of ours keeps a reader waiting for the end.
            descriptor = self._open_errors()
            if descriptor is None:
                return
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)


# --- what to say -------------------------------------------------------------------------------


def _missing(told: dict[str, object]) -> str:
    python = str(told.get("python") or "python")
    missing = str(told.get("missing") or "")
    if missing.partition(".")[0] == "torch":
        return (
            "the job is not watched: the torch of that environment lacks something that gpuwatch "
            f"needs ({told.get('words')}); type: {python} -m pip install --upgrade torch"
        )
    if missing == "gpuwatch":
        why = "that environment has no gpuwatch"
    elif missing and not missing.startswith("gpuwatch"):
        why = f"that environment has no {missing}, which gpuwatch needs"
    else:
        why = f"gpuwatch cannot be loaded in that environment ({told.get('words')})"
    return f"the job is not watched: {why}; type: {python} -m pip install {_requirement()}"


def _requirement() -> str:
    """Return what pip is to install to get this very gpuwatch."""
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        found = distribution("gpuwatch-monitor")
        origin = json.loads(found.read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError, OSError):
        return "gpuwatch-monitor"
    url = urlsplit(str(origin.get("url", "")))
    return unquote(url.path) if url.scheme == "file" else f"gpuwatch-monitor=={found.version}"


def _why_unwatched(pid: int) -> str:
    python, switch = _switches(_strings(pid, "cmdline"))
    path = next((v[11:] for v in _strings(pid, "environ") if v.startswith("PYTHONPATH=")), None)
    if switch:
        why = f"{python} -{switch} looks at no PYTHONPATH" if switch != "S" else f"{python} -S"
        why += f", through which gpuwatch comes; leave -{switch} out, or "
    elif path is None:
        why = (
            "its environment has lost PYTHONPATH (env -i, sudo, ssh, srun --export=NONE); pass "
            "PYTHONPATH and GPUWATCH_RUN_ID on, or "
        )
    elif _HOOK_DIRECTORY not in path:
        why = (
            "something sets PYTHONPATH anew, through which gpuwatch comes; append the old value "
            "(:$PYTHONPATH), or "
        )
    else:
        why = "its Python runs no sitecustomize at its start; "
    return f"process {pid} is not watched: {why}call gpuwatch.watch() in the script"


def _switches(argv: list[str]) -> tuple[str, str]:
    """Return (the interpreter's name, the switch among its own that shuts the hook out or "")."""
    takes_next = False
    for word in argv[1:]:
        if takes_next:
            takes_next = False
        elif not word.startswith("-") or word.startswith("--") or word == "-":
            break
        else:
            for letter in word[1:]:
                if letter in "IES":
                    return Path(argv[0]).name, letter
                if letter in "cmWX":
                    break
            if word[-1] in "cm" and letter in "cm":
                break
            takes_next = letter in "WX" and word.endswith(letter)
    return Path(argv[0]).name if argv else "python", ""


# --- what proc tells ---------------------------------------------------------------------------


def _read(path: str) -> bytes:
    """Return a file of proc, empty where the process is gone or somebody else's."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _strings(pid: int, name: str) -> list[str]:
    return [os.fsdecode(entry) for entry in _read(f"/proc/{pid}/{name}").split(b"\0") if entry]


def _started_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it is none or a zombie."""
    line = _read(f"/proc/{pid}/stat")
    # The name may hold spaces and parentheses: fields count from the last one.
    fields = line[line.rfind(b")") + 2 :].split()
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def _has_torch_alone(pid: int) -> bool:
    """Whether torch is loaded in the process and our hook, which maps its own file, is not."""
    maps = _read(f"/proc/{pid}/maps")
    return b"/libtorch" in maps and os.fsencode(_HOOK_DIRECTORY) not in maps


def _told(path: Path) -> dict[str, object]:
    """Return the content of one of our small JSON files, nothing if it makes no sense."""
    try:
        with path.open("rb") as file:
            told = json.loads(file.read(_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}
