"""`gpuwatch run`: the command is as it would be without us, and its ranks are watched."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import support

from gpuwatch.commands.card import MOST_LINES
from gpuwatch.commands.lookout import _switches, start_apart, start_lookout
from gpuwatch.commands.run import _is_first_rank, _run_id
from gpuwatch.schema import RankFrame

HERE = Path(__file__).parent
RUN = [*support.GPUWATCH, "run"]
JOB = [support.PYTHON, str(HERE / "job.py")]
PICTURE = [support.PYTHON, str(HERE / "picture.py")]
OURS = {"GPUWATCH_RUN_ID", "PYTHONPATH"}
SOON_S = 20.0
"""On a machine that does more than this; alone it is a moment."""
NARRATION = re.compile(rb"gpuwatch: run (\S+); to look at it, type gpuwatch in another terminal\n")


def start(
    argv: Sequence[str], rundir: Path, expect: int | None = 0, **env: str
) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        list(argv),
        env=support.environment(rundir, **env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert expect is None or done.returncode == expect, done
    return done


def spoken(stderr: bytes) -> tuple[str, bytes]:
    """The run id in our one line, and everything else that was said."""
    (run,) = NARRATION.findall(stderr)
    return run.decode(), NARRATION.sub(b"", stderr)


def lookout_gone(rundir: Path) -> bool:
    return not support.processes_of(rundir)


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --out x.py", "train"),
        ("/usr/bin/python3 -u -m my.pkg.__main__ --lr 1", "my.pkg"),
        ("torchrun --nproc-per-node 2 jobs/fine_tune.py", "fine_tune"),
        ("python -m torch.distributed.run -m pkg.train", "pkg.train"),
        ("accelerate launch train.py", "train"),
        ("python -m accelerate.commands.launch --num_processes 2 tune.py", "tune"),
        ("./go.sh", "go"),
        ("/opt/bin/my trainer!", "my"),
        ("...", "run"),
    ],
)
def test_a_run_id_can_be_read(command: str, name: str) -> None:
    assert re.fullmatch(re.escape(name) + "-[0-9a-f]{6}", _run_id(command.split(), {}))


def test_ranks_with_a_gpuwatch_run_each_are_one_run() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_NTASKS": "8", "SLURM_PROCID": "3"}
    assert _run_id(["python"], slurm) == "slurm-7.2"
    assert not _is_first_rank(slurm)
    assert _is_first_rank({**slurm, "SLURM_PROCID": "0"})
    # One task has no others to agree with; in an interactive step it shares the step's id.
    assert _run_id(["python"], {**slurm, "SLURM_NTASKS": "1"}).startswith("python-")
    assert _is_first_rank({**slurm, "SLURM_NTASKS": "1"})
    torchrun = {"RANK": "1", "WORLD_SIZE": "2"}
    assert _run_id(["python"], torchrun) == ""
    assert not _is_first_rank(torchrun)
    assert _run_id(["python"], {**slurm, **torchrun, "GPUWATCH_RUN_ID": "mine"}) == "mine"


@pytest.mark.parametrize(
    ("line", "switch"),
    [
        ("python train.py -I", ""),
        ("python -I train.py", "I"),
        ("python -uBE -W error train.py", "E"),
        ("python -W ignore::ImportWarning -S train.py", "S"),
        ("python -WIgnore -X Importtime -u train.py -S", ""),
        ("python -c import -I", ""),
        ("python -um pkg -S", ""),
        ("python -", ""),
        ("python", ""),
    ],
)
def test_switches_that_keep_the_hook_out(line: str, switch: str) -> None:
    assert _switches(line.split()) == ("python", switch)


# --- the command is its own --------------------------------------------------------------------


@pytest.mark.process
def test_the_command_sees_nothing_of_us_but_three_variables(rundir: Path, tmp_path: Path) -> None:
    def picture(argv: Sequence[str], **env: str) -> tuple[dict[str, Any], bytes]:
        with (tmp_path / "err").open("wb") as err:
            started = subprocess.Popen(
                argv,
                env={**support.environment(rundir), "LC_ALL": "", "LANG": "C", **env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
            )
            out = started.communicate(timeout=60)[0]
        seen = json.loads(out)
        assert seen.pop("pid") == started.pid
        assert seen["environ"].pop("GPUWATCH_CARD", str(started.pid)) == str(started.pid)
        seen["fds"] = [fd for fd in seen["fds"] if "pipe:" not in fd[1] and "/proc/" not in fd[1]]
        return seen, (tmp_path / "err").read_bytes()

    bare, _ = picture(PICTURE)
    watched, err = picture([*RUN, "--name", "a name", "--", *PICTURE])
    assert spoken(err)[0] == watched["environ"].pop("GPUWATCH_RUN_ID")
    assert spoken(err)[0].startswith("picture-")
    assert spoken(err)[1] == b""
    hook = Path(watched["environ"].pop("PYTHONPATH"))
    assert [p.name for p in hook.iterdir() if p.name != "__pycache__"] == ["sitecustomize.py"]
    assert watched["environ"].pop("GPUWATCH_RUN_NAME") == "a name"
    assert watched["finders"].pop(0) == "_TorchFinder"
    assert watched == bare
    assert bare["modules"] == []

    before = {"PYTHONPATH": str(tmp_path), "GPUWATCH_RUN_ID": "mine"}
    bare, _ = picture(PICTURE, **before)
    nested, err = picture([*RUN, "--allow-control", "--", *RUN, "--", *PICTURE], **before)
    assert spoken(err) == ("mine", b"")
    assert nested["environ"]["PYTHONPATH"] == f"{hook}:{tmp_path}"
    assert nested["environ"]["GPUWATCH_ALLOW_CONTROL"] == "1"
    assert nested["finders"].count("_TorchFinder") == 1
    assert nested["path"] == bare["path"]
    support.wait_until(lambda: lookout_gone(rundir), SOON_S, "the end of the lookout")


def without_card(stderr: bytes) -> tuple[bytes, list[str]]:
    """Return what was said before the card, and the lines of the card."""
    head = re.search(rb"^gpuwatch: run \S+  .*\d+ ranks?  ", stderr, re.MULTILINE)
    if head is None:
        return stderr, []
    return stderr[: head.start()], stderr[head.start() :].decode().splitlines()


ENDS = ["plainly", "raises", "exit 3", "SIGTERM", "SIGKILL", "SIGINT", "backward raises"]
ENDS += ["backward twice", "worker raises", "item raises", "interrupted in a fetch"]
ENDS += ["forward raises", "hook raises", "thread raises", "atexit raises", "exit words"]
ENDS += ["_exit 5", "SIGSEGV"]


def masked(text: bytes) -> bytes:
    return re.sub(rb"0x[0-9a-f]+|\d{4,}", b"#", text)


@pytest.mark.process
def test_ends_are_those_of_the_command(rundir: Path, tmp_path: Path) -> None:
    def outcome(prefix: Sequence[str], directory: Path) -> tuple[bytes, dict[str, bytes]]:
        directory.mkdir()
        done = subprocess.run(
            [*prefix, *JOB, "raises", *ENDS],
            cwd=directory,
            env=support.environment(rundir, STAY=""),
            capture_output=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 1
        files = {p.name: masked(p.read_bytes()) for p in directory.iterdir()}
        assert len(files) == 2 * len(ENDS)
        # What trains for a moment is over before anybody has looked: there may be no card.
        errors, card = without_card(done.stderr)
        assert len(card) <= (MOST_LINES if prefix else 0)
        files["of the first"] = masked(NARRATION.sub(b"", errors))
        return done.stdout, files

    with ThreadPoolExecutor(2) as pool:
        bare = pool.submit(outcome, [], tmp_path / "bare")
        watched = pool.submit(outcome, [*RUN, "--"], tmp_path / "watched")
    assert watched.result()[0] == bare.result()[0]
    for name, text in bare.result()[1].items():
        assert watched.result()[1][name].decode() == text.decode(), name
    said = bare.result()[0].decode()
    assert "SIGKILL -9\n" in said
    assert "exit 3 3\n" in said
    assert "worker raises 1\n" in said
    assert "interrupted in a fetch 130\n" in said or "interrupted in a fetch -2\n" in said
    assert "_exit 5 5\n" in said
    assert "SIGSEGV -11\n" in said
    for name in ("item", "forward", "hook", "thread", "atexit"):
        assert b"Error" in bare.result()[1][f"{name} raises.2"], name


@pytest.mark.process
@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ([], 2, "say what to run: gpuwatch run -- python train.py"),
        (["--"], 2, "say what to run"),
        (["--nonsense", "--", "true"], 2, "No such option"),
        (["--", "gw-no-such-command"], 127, "cannot run gw-no-such-command: no such command"),
        (["--", "/nowhere/command"], 127, "cannot run /nowhere/command: no such command"),
        (["--", "/"], 126, "it is a directory"),
        (["--", "./job.py"], 126, "it is not executable; type: gpuwatch run -- python ./job.py"),
        (["--", "./garbage"], 126, "cannot run ./garbage: Exec format error"),
    ],
)
def test_what_cannot_be_run(
    rundir: Path, tmp_path: Path, argv: list[str], code: int, words: str
) -> None:
    (tmp_path / "job.py").write_text("")
    (tmp_path / "garbage").write_bytes(b"\0\1\2")
    (tmp_path / "garbage").chmod(0o700)
    done = subprocess.run(
        [*RUN, *argv],
        cwd=tmp_path,
        env=support.environment(rundir),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full", ">&- 2>&-", ">/dev/full"])
def test_the_command_runs_where_nothing_can_be_said(
    rundir: Path, tmp_path: Path, where: str
) -> None:
    command = " ".join([*RUN, "--", "touch", str(tmp_path / "ran")])
    done = subprocess.run(
        ["bash", "-c", f"{command} {where}"],
        env=support.environment(rundir),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert (tmp_path / "ran").exists()


@pytest.mark.process
@pytest.mark.parametrize("name", ["KILL", "TERM", "INT", "PIPE"])
def test_signals_are_the_commands_own(rundir: Path, name: str) -> None:
    number = getattr(signal, f"SIG{name}")
    start([*RUN, "--", "sh", "-c", f"kill -{name} $$; exit 9"], rundir, -number)


def until_closed(descriptor: int) -> bytes:
    """Read a pipe or a terminal to its end: until nobody has it open any more."""
    data = b""
    with contextlib.suppress(OSError):  # EIO: the end of a terminal
        while select.select([descriptor], [], [], SOON_S)[0]:
            piece = os.read(descriptor, 4096)
            if not piece:
                return data
            data += piece
        raise AssertionError(f"somebody has it open still, after {data!r}")
    return data


@pytest.mark.process
def test_the_lookout_holds_nothing_and_ends_with_the_job(rundir: Path) -> None:
    master, slave = pty.openpty()
    job = subprocess.Popen(
        [*RUN, "--", "sh", "-c", "read word; echo $word"],
        env=support.environment(rundir),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    assert job.stdin is not None
    assert job.stdout is not None

    def lookouts() -> list[Path]:
        found = []
        for entry in Path("/proc").iterdir():
            # Gone again, or somebody else's.
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and int(entry.name) != job.pid:
                    given = (entry / "environ").read_bytes().split(b"\0")
                    if f"GPUWATCH_DIR={rundir}".encode() in given:
                        found.append(entry)
        return found

    def settled() -> bool:
        return [os.readlink(lookout / "cwd") for lookout in lookouts()] == ["/"]

    stopped = 0
    try:
        time.sleep(0.5)
        support.wait_until(settled, SOON_S, "one lookout")
        (lookout,) = lookouts()
        held = {os.readlink(fd) for fd in (lookout / "fd").iterdir()}
        assert held == {"/dev/null", "anon_inode:[pidfd]"}
        assert os.getsid(int(lookout.name)) not in (os.getsid(0), job.pid)
        assert Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text() == ""
        # Nobody who reads what the job says waits for it: not even while it can do nothing.
        os.kill(int(lookout.name), signal.SIGSTOP)
        stopped = int(lookout.name)
        job.stdin.write(b"last\n")
        job.stdin.flush()
        assert until_closed(job.stdout.fileno()) == b"last\n"
        assert b"gpuwatch: run sh-" in until_closed(master)
        assert job.wait(SOON_S) == 0
        os.kill(stopped, signal.SIGCONT)
        support.wait_until(lambda: not lookouts(), SOON_S, "the end of the lookout")
    finally:
        if stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
        job.kill()
        job.communicate()
        os.close(master)


def test_a_lookout_that_cannot_be_keeps_nothing_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who ignores SIGCHLD has no child to wait for.
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        start_apart((tmp_path / "done").touch)
    finally:
        signal.signal(signal.SIGCHLD, before)
    support.wait_until((tmp_path / "done").exists, SOON_S, "the work")
    true = os.fork
    forks = 0

    def once() -> int:
        nonlocal forks
        forks += 1
        if forks > 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return true()

    monkeypatch.setattr(os, "fork", once)
    with pytest.raises(OSError, match="temporarily unavailable"):
        start_apart((tmp_path / "undone").touch)
    start_lookout("a run", card=False)
    assert not (tmp_path / "undone").exists()


@pytest.mark.process
def test_no_lookout_stays_behind_short_jobs(rundir: Path) -> None:
    # Some of them are over before the lookout has looked for the first time.
    for _ in range(6):
        start([*RUN, "--", "true"], rundir)
    support.wait_until(lambda: lookout_gone(rundir), SOON_S, "the end of the lookouts")


# --- what it brings into Python ----------------------------------------------------------------


@pytest.mark.process
def test_an_existing_sitecustomize_runs_as_before(rundir: Path, tmp_path: Path) -> None:
    def compare(content: str) -> bytes:
        # Not in gpuwatch itself, which is Python too.
        guarded = f"import sys\nif 'gpuwatch' not in sys.orig_argv:\n    {content}\n"
        (tmp_path / "sitecustomize.py").write_text(guarded)
        show = "import sys; print(sys.modules.get('sitecustomize'), sys.path)"
        argv = [support.PYTHON, "-c", show]
        bare = start(argv, rundir, None, PYTHONPATH=str(tmp_path))
        watched = start([*RUN, "--", *argv], rundir, None, PYTHONPATH=str(tmp_path))
        assert watched.returncode == bare.returncode
        assert watched.stdout == bare.stdout
        assert spoken(watched.stderr)[1] == bare.stderr
        return bare.stdout + bare.stderr

    assert b"mine" in compare("print('mine')")
    assert b"ZeroDivisionError" in compare("1 / 0")
    assert b"gw_nowhere" in compare("import gw_nowhere")


def fake_torch(directory: Path, content: str = "") -> str:
    """A package that is called torch, so that importing it takes no seconds."""
    (directory / "torch").mkdir(exist_ok=True)
    (directory / "torch" / "__init__.py").write_text(content)
    return str(directory)


@pytest.mark.process
def test_the_import_of_torch_looks_as_before(rundir: Path, tmp_path: Path) -> None:
    def compare(code: str, torch: str) -> bytes:
        path = fake_torch(tmp_path, torch)
        bare = start([support.PYTHON, "-c", code], rundir, None, PYTHONPATH=path)
        watched = start([*RUN, "--", support.PYTHON, "-c", code], rundir, None, PYTHONPATH=path)
        assert watched.returncode == bare.returncode
        assert masked(watched.stdout) == masked(bare.stdout)
        assert masked(spoken(watched.stderr)[1]) == masked(bare.stderr)
        return bare.stdout + bare.stderr

    show = "import sys, torch\nprint(torch.__spec__, vars(torch.__loader__), sys.meta_path)"
    assert b"SourceFileLoader" in compare(show, "")
    assert b"ZeroDivisionError" in compare("import torch", "1 / 0")
    assert b"ImportError" in compare("import torch", "from os import gw_nowhere")
    assert b"No module named 'torch.gw'" in compare("import torch.gw", "")


# --- why nothing reports in --------------------------------------------------------------------


# A training environment without gpuwatch: it is on none of the paths.
WITHOUT = (
    "import os, sys; sys.path[:] = "
    "[p for p in sys.path if not os.path.isdir(os.path.join(p or '.', 'gpuwatch'))]"
)


# It stays until something was said of it, or for half a minute.
STAYS = """
import os, sys, time
for _ in range(600):
    if os.path.exists(os.environ['TOLD']):
        break
    time.sleep(0.05)
"""


def said_of(
    code: str, rundir: Path, tmp_path: Path, kind: str = "pipe", job: Sequence[str] = ()
) -> str:
    """What is said on the stderr of a job that stays, besides the line with its run id.

    The job is Python with that code, or `job`; the file that ends it is new for each.
    """
    argv = [*RUN, "--", *(job or [support.PYTHON, "-c", code])]
    told = Path(tempfile.mkdtemp(dir=tmp_path)) / "told"
    env = support.environment(rundir, PYTHONPATH=fake_torch(tmp_path), TOLD=str(told))
    written = told.with_name("err")
    if kind == "file":
        writing = os.open(written, os.O_WRONLY | os.O_CREAT)
        reading = os.open(written, os.O_RDONLY)
    else:
        reading, writing = pty.openpty() if kind == "terminal" else os.pipe()
    started = subprocess.Popen(
        argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=writing
    )
    os.close(writing)
    data = b""

    def both_lines() -> bool:
        nonlocal data
        if kind == "file" or select.select([reading], [], [], 0)[0]:
            data += os.read(reading, 4096)
        return data.count(b"\n") >= 2

    try:
        support.wait_until(both_lines, 30, "a sentence")
        told.touch()
        assert started.wait(SOON_S) == 0
        data += os.read(reading, 4096) if kind == "file" else until_closed(reading)
    finally:
        told.touch()
        started.kill()
        started.wait()
        os.close(reading)
    return spoken(data.replace(b"\r\n", b"\n"))[1].decode()


@pytest.mark.process
def test_one_sentence_where_gpuwatch_is_missing(rundir: Path, tmp_path: Path) -> None:
    said = said_of(f"{WITHOUT}; import torch{STAYS}", rundir, tmp_path)
    assert said.count("\n") == 1
    assert said.startswith(
        "gpuwatch: the job is not watched: that environment has no gpuwatch; "
        f"type: {support.PYTHON} -m pip install "
    )
    assert list(rundir.iterdir()) == []


@pytest.mark.process
def test_one_sentence_where_the_hook_is_kept_out(rundir: Path, tmp_path: Path) -> None:
    # All that the lookout sees of torch is its library among the mapped files.
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(b"x")
    code = (
        "import mmap; "
        f"file = open({str(library)!r}); "
        f"kept = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ){STAYS}"
    )
    python = support.PYTHON
    jobs = {
        "-I": [python, "-I", "-c", code],
        "-E": [python, "-uE", "-W", "ignore", "-c", code],
        "-S": [python, "-S", "-c", code],
        "lost": ["env", "-u", "PYTHONPATH", python, "-c", code],
        "anew": ["env", "PYTHONPATH=/tmp", python, "-c", code],
        "child": ["sh", "-c", f'{python} -I -c "{code}" & wait'],
        "hooked": [python, "-c", f"import torch; {code}"],
    }

    def said(name: str) -> str:
        return said_of("", rundir, tmp_path, job=jobs[name])

    with ThreadPoolExecutor(len(jobs)) as pool:
        words = dict(zip(jobs, pool.map(said, jobs), strict=True))
    for name, sentence in words.items():
        if name == "hooked":
            continue
        assert sentence.count("\n") == 1, (name, sentence)
        assert re.match(r"gpuwatch: process \d+ is not watched: ", sentence)
        assert sentence.endswith("call gpuwatch.watch() in the script\n")
    assert "leave -I out" in words["-I"]
    assert "leave -I out" in words["child"]
    assert "leave -E out" in words["-E"]
    assert "leave -S out" in words["-S"]
    assert "has lost PYTHONPATH" in words["lost"]
    assert "sets PYTHONPATH anew" in words["anew"]
    # The hook runs in this one, and torch is no torch there: that is another sentence.
    assert "the torch of that environment lacks something" in words["hooked"]
    assert "install --upgrade torch" in words["hooked"]
    support.wait_until(lambda: lookout_gone(rundir), SOON_S, "the end of the lookouts")


@pytest.mark.process
@pytest.mark.parametrize("kind", ["file", "terminal"])
def test_the_sentence_reaches_files_and_terminals(rundir: Path, tmp_path: Path, kind: str) -> None:
    code = f"{WITHOUT}; import torch{STAYS}print('last words', file=sys.stderr)"
    lines = said_of(code, rundir, tmp_path, kind).splitlines()
    assert [line[:28] for line in lines] == ["gpuwatch: the job is not wat", "last words"]


# --- ranks -------------------------------------------------------------------------------------


def frames_of(
    argv: Sequence[str],
    env: Mapping[str, str],
    rundir: Path,
    log: Path,
    ranks: int,
    steps: int = 0,
    words: Sequence[str] = (),
) -> list[RankFrame]:
    """Start a job, and ask its ranks for their past when they have come so far and said so."""
    with support.process(
        [*RUN, "--no-card", "--name", "unmodified", "--", *argv], env, output=log
    ) as job:
        frames: list[RankFrame] = []

        def all_there() -> bool:
            assert job.poll() is None, support.text_of(log)
            if not all(word in support.text_of(log) for word in words):
                return False
            frames[:] = support.snapshots(rundir)
            return len(frames) == ranks and all(f.ledger.steps >= steps for f in frames)

        support.wait_until(all_there, 60, f"{ranks} ranks, now {frames}", 0.3)
        time.sleep(0.5)  # a ghost would show by now
        assert len(support.rank_presences(rundir)) == ranks

        def no_lookout() -> bool:
            return not any("gpuwatch run" in p for p in support.processes_of(rundir))

        # The older the job, the longer it sleeps; then it sees the ranks.
        support.wait_until(no_lookout, SOON_S, "the end of the lookout")
        return frames


@pytest.mark.distributed
def test_torchrun_unmodified(rundir: Path, tmp_path: Path) -> None:
    env = support.environment(rundir, DONE=str(tmp_path / "done"))
    argv = [*support.TORCHRUN, str(HERE / "ddp.py")]
    frames = frames_of(argv, env, rundir, tmp_path / "log", 2, steps=24)
    assert [f.rank for f in frames] == [0, 1]
    (run,) = {f.run for f in frames}
    assert run.startswith("ddp-")
    for frame in frames:
        hello = frame.hello
        assert hello is not None
        assert (hello.world_size, hello.run_name) == (2, "unmodified")
        assert hello.run_source == "GPUWATCH_RUN_ID"
        assert hello.ddp is not None
        assert not hello.allow_control
        (loader,) = hello.loaders
        assert (loader.num_workers, loader.batch_size) == (2, 4)
        assert set(hello.parallel) == {"ddp", "fsdp2"}
        assert len(frame.records) == frame.ledger.steps == 24
        for record in frame.records:
            host = record.host
            parts = [host.data_wait, host.forward, host.backward, host.comm, host.optimizer]
            assert all(part is not None and part > 0 for part in parts), record
            assert (record.batches, record.samples) == (1, 4)
        assert frame.state.notices == ()
    assert "gpuwatch: run ddp-" in support.text_of(tmp_path / "log")


@pytest.mark.distributed
def test_children_by_every_start_method(rundir: Path, tmp_path: Path) -> None:
    env = support.environment(rundir, DONE=str(tmp_path / "done"))
    argv = [support.PYTHON, str(HERE / "children.py")]
    words = [f"{method} trained" for method in ("fork", "spawn", "forkserver")]
    frames = frames_of(argv, env, rundir, tmp_path / "log", 3, words=words)
    assert {frame.run.rsplit("-", 1)[0] for frame in frames} == {"children"}


@pytest.mark.process
@pytest.mark.parametrize("first", ["torch", "watch"])
def test_a_shell_script_and_a_module_and_their_own_watch(
    rundir: Path, tmp_path: Path, first: str
) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    source = (HERE / "job.py").read_text()
    # It calls watch() itself as well: still one rank, and it has the last word on its name.
    watch = "import gpuwatch\ngpuwatch.watch(name='by itself', allow_control=True)\n"
    # Also before torch is there: then its import is ours, in the middle of beginning to watch.
    both = f"import torch\n{watch}" if first == "torch" else f"{watch}import torch\n"
    source = source.replace("import torch\n", both, 1)
    (package / "__main__.py").write_text(source)
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/sh\n'{support.PYTHON}' -m pkg plainly\n")
    script.chmod(0o700)
    env = support.environment(rundir, PYTHONPATH=str(tmp_path), STAY=str(tmp_path / "done"))
    (frame,) = frames_of([str(script)], env, rundir, tmp_path / "log", 1)
    assert frame.run.startswith("train-")
    assert frame.hello is not None
    assert (frame.hello.run_name, frame.hello.allow_control) == ("by itself", True)
    assert frame.hello.pid != 0


@pytest.mark.process
def test_a_shell_script_that_trains_several_times(rundir: Path, tmp_path: Path) -> None:
    job = f"'{support.PYTHON}' '{HERE / 'job.py'}'"
    script = tmp_path / "sweep.sh"
    script.write_text(
        f"STAY= {job} raises 2>/dev/null\n"
        f"STAY= {job} plainly\n"
        # The one that had failed, once more; and another one after and beside those.
        f"{job} raises 2>/dev/null & {job} plainly & wait; exit 0\n"
    )
    env = support.environment(rundir, STAY=str(tmp_path / "done"))
    frames = frames_of(["sh", str(script)], env, rundir, tmp_path / "log", 2)
    first, third = sorted(frame.run for frame in frames)
    assert re.fullmatch(r"sweep-[0-9a-f]{6}", first)
    assert third == f"{first}.3"
    scripts = {frame.run: frame.hello.script for frame in frames if frame.hello is not None}
    assert scripts[first].endswith("job.py raises")
    assert scripts[third].endswith("job.py plainly")
