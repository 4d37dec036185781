"""The real driver in a real terminal: it paints, it quits at once, it cleans up after itself."""

import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyte
import pytest
import support
import traces

pytestmark = pytest.mark.terminal

APP = str(Path(__file__).with_name("terminal_app.py"))
PAINT_LIMIT_S = 30.0
QUIT_LIMIT_S = 4.5
"""The promise is 0.5 s; a busy machine gets more, but less than what ends an app that stays."""


class Terminal:
    """A pty with the app in it and a screen that pyte keeps."""

    def __init__(self, columns: int, rows: int, *arguments: str, **environment: str) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._main, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(child)
        env = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", **environment}
        if "NO_COLOR" not in environment:
            env.pop("NO_COLOR", None)
        self._child = child
        self.process = subprocess.Popen(
            [sys.executable, APP, *arguments],
            stdin=child,
            stdout=child,
            stderr=child,
            env=env,
            start_new_session=True,
        )

    def read(self, seconds: float) -> None:
        """Take in what the app draws for that long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([self._main], [], [], left)
            if ready:
                data = os.read(self._main, 65536)
                self.raw += data
                self._stream.feed(data)

    def text(self) -> str:
        return "\n".join(self.screen.display)

    def wait_for(self, words: str) -> None:
        end = time.monotonic() + PAINT_LIMIT_S
        while words not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < end, self.text()
            self.read(0.05)

    def press(self, keys: bytes) -> None:
        os.write(self._main, keys)

    def wait_exit(self) -> tuple[int, float]:
        """Return the exit code and how long it took."""
        start = time.monotonic()
        while self.process.poll() is None:
            assert time.monotonic() - start < PAINT_LIMIT_S
            self.read(0.01)
        took = time.monotonic() - start
        self.read(0.1)
        assert self.process.returncode is not None
        return self.process.returncode, took

    def assert_restored(self) -> None:
        assert b"\x1b[?1049h" in self.raw
        assert self.raw.rindex(b"\x1b[?1049l") > self.raw.rindex(b"\x1b[?1049h")
        assert self.raw.rindex(b"\x1b[?25h") > self.raw.rindex(b"\x1b[?25l")
        assert self.raw.rindex(b"\x1b[?1003l") > self.raw.rindex(b"\x1b[?1003h")
        assert termios.tcgetattr(self._child)[3] == self.before[3]  # echo and line mode
        assert b"Traceback" not in self.raw

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._main)
        os.close(self._child)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


@pytest.mark.parametrize(
    ("columns", "rows", "environment"), [(160, 45, {}), (80, 24, {"NO_COLOR": "1"})]
)
def test_paints_and_q_restores_the_terminal(
    terminals: list[Terminal], columns: int, rows: int, environment: dict[str, str]
) -> None:
    terminal = Terminal(columns, rows, **environment)
    terminals.append(terminal)
    terminal.wait_for("too few loader workers")
    assert "num_workers 1 -> 7" in terminal.text()
    terminal.press(b"q")
    code, took = terminal.wait_exit()
    assert code == 0
    assert took < QUIT_LIMIT_S
    terminal.assert_restored()


SGR = re.compile(rb"\x1b\[([\d;]*)m")


def colours(raw: bytes) -> set[str]:
    """Return the SGR codes in what was sent that ask for another colour than the default one."""
    found: set[str] = set()
    for codes in SGR.findall(raw):
        numbers = [int(code or 0) for code in codes.split(b";")]
        if any(30 <= n <= 38 or 40 <= n <= 48 or 90 <= n <= 107 for n in numbers):
            found.add(codes.decode())
    return found


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {}], ids=["NO_COLOR", "colour"])
@pytest.mark.parametrize("theme", ["", "light"])
def test_no_color_sends_no_colour(
    terminals: list[Terminal], tmp_path: Path, environment: dict[str, str], theme: str
) -> None:
    folder = tmp_path / "gpuwatch"
    folder.mkdir()
    if theme:
        (folder / "config.toml").write_text(f"theme = '{theme}'\n")
    environment = {**environment, "XDG_CONFIG_HOME": str(tmp_path)}
    terminal = Terminal(80, 24, "cluster", **environment)
    terminals.append(terminal)
    terminal.wait_for("too few loader workers")
    for key, words in (
        *((b"2", "slowest own time"), (b"j", "▌"), (b"h", "32 ranks"), (b"4", "Findings")),
        *((b"\r", "esc back"), (b"?", "Keys here"), (b"\x1b", "WHY"), (b":", "Commands")),
    ):
        terminal.press(key)
        terminal.wait_for(words)
    terminal.press(b"theme contrast\r")
    terminal.read(0.5)
    terminal.press(b"1")
    terminal.wait_for("Where a step goes")
    # Numbers move meanwhile: the changed cells alone are sent.
    terminal.read(2.0)
    terminal.press(b"q")
    terminal.wait_exit()
    assert (colours(terminal.raw) == set()) is ("NO_COLOR" in environment)
    if "NO_COLOR" in environment:
        # What colour would say is said otherwise.
        assert {"1", "2"} <= {
            code for codes in SGR.findall(terminal.raw) for code in codes.decode().split(";")
        }


def test_q_does_not_wait_for_a_hanging_diagnosis(terminals: list[Terminal]) -> None:
    terminal = Terminal(80, 24, "hang")
    terminals.append(terminal)
    terminal.wait_for("looking at the first steps")
    terminal.read(0.5)
    terminal.press(b"q")
    code, took = terminal.wait_exit()
    assert code == 0
    assert took < QUIT_LIMIT_S
    terminal.assert_restored()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_restore_the_terminal(terminals: list[Terminal], number: signal.Signals) -> None:
    terminal = Terminal(80, 24)
    terminals.append(terminal)
    terminal.wait_for("too few loader workers")
    terminal.process.send_signal(number)
    code, took = terminal.wait_exit()
    assert code == 128 + number
    assert took < QUIT_LIMIT_S
    terminal.assert_restored()


@pytest.mark.parametrize("name", ["dumb", ""])
def test_a_dumb_terminal_gets_text(tmp_path: Path, name: str) -> None:
    job = traces.Job(ranks=1, steps=40, phases_ms={"forward": 9.0})
    job.write(tmp_path / "run.jsonl")
    main, child = pty.openpty()
    done = subprocess.run(
        [*support.GPUWATCH, "replay", str(tmp_path / "run.jsonl")],
        stdin=child,
        stdout=child,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": name},
        timeout=60,
        check=False,
    )
    os.close(child)
    printed = b""
    with contextlib.suppress(OSError):  # the last word of a terminal that is gone
        while data := os.read(main, 65536):
            printed += data
    os.close(main)
    assert done.returncode == 0
    assert b"so here is one picture as text" in done.stderr
    assert b"\x1b" not in printed
    assert b"run job  job  running  1 of 1 ranks  40 steps" in printed


def test_a_resize_is_followed(terminals: list[Terminal]) -> None:
    terminal = Terminal(80, 24)
    terminals.append(terminal)
    terminal.wait_for("too few loader workers")
    fcntl.ioctl(terminal._child, termios.TIOCSWINSZ, struct.pack("HHHH", 5, 20, 0, 0))
    terminal.screen.resize(5, 20)
    terminal.process.send_signal(signal.SIGWINCH)
    terminal.wait_for("gpuwatch: 20x5")
    terminal.press(b"q")
    assert terminal.wait_exit()[0] == 0


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_keys_in_tmux(tmp_path: Path) -> None:
    server = ["tmux", "-L", f"gpuwatch-test-{uuid.uuid4().hex[:8]}", "-f", "/dev/null"]
    done = tmp_path / "code"

    def pane() -> str:
        result = subprocess.run(
            [*server, "capture-pane", "-p", "-t", "a"], capture_output=True, text=True, check=False
        )
        return result.stdout

    def wait_for(words: str) -> None:
        end = time.monotonic() + PAINT_LIMIT_S
        while words not in pane():
            assert time.monotonic() < end, pane()
            time.sleep(0.05)

    command = f"{sys.executable} {APP}; echo $? > {done}; sleep 60"
    subprocess.run(
        [*server, "new-session", "-d", "-s", "a", "-x", "80", "-y", "24", command], check=True
    )
    try:
        wait_for("too few loader workers")
        subprocess.run([*server, "send-keys", "-t", "a", "Enter"], check=True)
        wait_for("RULED OUT")
        subprocess.run([*server, "send-keys", "-t", "a", "Escape"], check=True)
        wait_for("Where a step goes")
        subprocess.run([*server, "send-keys", "-t", "a", "?"], check=True)
        wait_for("Keys everywhere")
        subprocess.run([*server, "send-keys", "-t", "a", "q"], check=True)
        end = time.monotonic() + PAINT_LIMIT_S
        while not (done.exists() and done.read_text().strip()):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert done.read_text().strip() == "0"
        assert "loader workers" not in pane()
    finally:
        subprocess.run([*server, "kill-server"], check=False)


def test_suspended_and_resumed(terminals: list[Terminal]) -> None:
    terminal = Terminal(80, 24)
    terminals.append(terminal)
    terminal.wait_for("too few loader workers")
    pid = terminal.process.pid

    def state() -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    terminal.process.send_signal(signal.SIGTSTP)
    end = time.monotonic() + PAINT_LIMIT_S
    while state() != "T":
        assert time.monotonic() < end
        terminal.read(0.02)
    terminal.read(0.1)
    # The shell that has the terminal now finds it as it was.
    terminal.assert_restored()
    terminal.raw = b""
    terminal.screen.reset()  # what a terminal shows of the other screen: nothing
    terminal.process.send_signal(signal.SIGCONT)
    # All of it is there again, also what does not change.
    for words in ("Where a step goes", "too few loader workers", "cpu 96% of 2 cores", "q quit"):
        terminal.wait_for(words)
    assert b"\x1b[?1049h" in terminal.raw
    # Stopped without being asked: the terminal is still read by one thread.
    threads = len(os.listdir(f"/proc/{pid}/task"))
    for number, letters in ((signal.SIGSTOP, "T"), (signal.SIGCONT, "SR")):
        terminal.process.send_signal(number)
        end = time.monotonic() + PAINT_LIMIT_S
        while state() not in letters:
            assert time.monotonic() < end
            terminal.read(0.02)
    terminal.raw = b""
    terminal.wait_for("too few loader workers")
    while b"\x1b[?1049h" not in terminal.raw:
        assert time.monotonic() < end
        terminal.read(0.02)
    terminal.read(0.3)
    assert len(os.listdir(f"/proc/{pid}/task")) <= threads
    terminal.press(b"q")
    assert terminal.wait_exit()[0] == 0
    terminal.assert_restored()


@pytest.mark.parametrize(
    "signals",
    [(signal.SIGHUP,), (signal.SIGHUP, signal.SIGCONT), (signal.SIGCONT, signal.SIGHUP)],
    ids=["hup", "hup-cont", "cont-hup"],
)
def test_a_terminal_that_is_gone_ends_the_app(
    terminals: list[Terminal], signals: tuple[signal.Signals, ...]
) -> None:
    terminal = Terminal(80, 24)
    terminal.wait_for("too few loader workers")
    # Both ends are closed: reads and writes of the app fail from here on.
    os.close(terminal._main)
    os.close(terminal._child)
    for number in signals:  # the kernel sends both to whom it stood on
        terminal.process.send_signal(number)
    try:
        assert terminal.process.wait(PAINT_LIMIT_S) != 0
    finally:
        if terminal.process.poll() is None:
            terminal.process.kill()
            terminal.process.wait()


@pytest.mark.parametrize("arguments", [(), ("cluster",)])
def test_a_terminal_that_goes_without_a_word_ends_the_app(arguments: tuple[str, ...]) -> None:
    # It is no controlling terminal: nobody sends SIGHUP, only reads and writes fail.
    terminal = Terminal(80, 24, *arguments)
    terminal.wait_for("too few loader workers")
    os.close(terminal._main)
    os.close(terminal._child)
    try:
        assert terminal.process.wait(PAINT_LIMIT_S) == 128 + signal.SIGHUP
    finally:
        if terminal.process.poll() is None:
            terminal.process.kill()
            terminal.process.wait()


@pytest.mark.parametrize(
    "environment",
    [{"LC_ALL": "C"}, {"TERM": "linux"}, {"PYTHONIOENCODING": "ascii"}],
    ids=["locale", "console", "encoding"],
)
def test_without_unicode_only_ascii_is_drawn(
    terminals: list[Terminal], environment: dict[str, str]
) -> None:
    terminal = Terminal(80, 24, **environment)
    terminals.append(terminal)
    terminal.wait_for("too few loader workers")
    views = {b"2": "slowest own time", b"3": "GPUs", b"4": "WHY", b"1": "Where a step goes"}
    for key, words in views.items():
        terminal.press(key)
        terminal.wait_for(words)
        assert all(char.isascii() for char in terminal.text()), terminal.text()
    assert b"\\u" not in terminal.raw
    assert "X F1" in terminal.text()
    assert "ddd" in terminal.text()
    terminal.press(b"q")
    assert terminal.wait_exit()[0] == 0


def test_sixteen_and_256_colours(terminals: list[Terminal]) -> None:
    for name, forbidden in (("xterm", rb"\x1b\[[0-9;]*[34]8;"), ("xterm-256color", rb"[34]8;2;")):
        terminal = Terminal(80, 24, TERM=name, COLORTERM="")
        terminals.append(terminal)
        terminal.wait_for("too few loader workers")
        terminal.press(b"4")
        terminal.wait_for("RULED OUT")
        found = re.search(forbidden, terminal.raw)
        assert found is None, terminal.raw[max(0, found.start() - 40) : found.end() + 40]
        terminal.press(b"q")
        assert terminal.wait_exit()[0] == 0


def test_a_settings_file_is_heard(terminals: list[Terminal], tmp_path: Path) -> None:
    folder = tmp_path / "gpuwatch"
    folder.mkdir()
    (folder / "config.toml").write_text("ascii = true\nthme = 'light'\n[keys]\nquit = 'Q'\n")
    terminal = Terminal(120, 40, XDG_CONFIG_HOME=str(tmp_path))
    terminals.append(terminal)
    terminal.wait_for("no setting 'thme'; did you mean theme?")
    terminal.press(b"q")
    terminal.read(0.5)
    assert terminal.process.poll() is None
    terminal.press(b"Q")
    assert terminal.wait_exit()[0] == 0
    terminal.assert_restored()


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_the_keys_of_every_view_in_tmux(tmp_path: Path) -> None:
    server = ["tmux", "-L", f"gpuwatch-test-{uuid.uuid4().hex[:8]}", "-f", "/dev/null"]
    done = tmp_path / "code"

    def pane() -> str:
        result = subprocess.run(
            [*server, "capture-pane", "-p", "-t", "a"], capture_output=True, text=True, check=False
        )
        return result.stdout

    def keys(*names: str) -> None:
        subprocess.run([*server, "send-keys", "-t", "a", *names], check=True)

    def wait_for(words: str, there: bool = True) -> None:
        end = time.monotonic() + PAINT_LIMIT_S
        while (words in pane()) is not there:
            assert time.monotonic() < end, f"{words!r} is {'not' if there else ''} on\n{pane()}"
            time.sleep(0.05)

    command = f"cd {tmp_path}; {sys.executable} {APP} cluster; echo $? > {done}; sleep 60"
    subprocess.run(
        [*server, "new-session", "-d", "-s", "a", "-x", "80", "-y", "24", command], check=True
    )
    try:
        wait_for("too few loader workers")
        keys("2")
        wait_for("slowest own time first")
        keys("/")
        wait_for("8-15")
        keys("node2")
        wait_for("8 of 32 pass")
        keys("Enter")
        wait_for("/ filter")
        keys("Enter")
        wait_for("Newest steps")
        keys("t")
        wait_for("no training behind it")
        keys("Escape")
        wait_for("Newest steps")
        keys("Escape")
        wait_for("filter ‹node2›")
        keys("Escape")
        wait_for("1-18 of 32")
        keys("h")
        wait_for("own ms of 32 ranks")
        keys("m")
        wait_for("data ms of 32 ranks")
        keys("3")
        wait_for("mem GB")
        keys("Enter")
        wait_for("Readings")
        keys("4")
        wait_for("WHY")
        keys("x")
        wait_for("1 aside")
        keys("x")
        wait_for("1 aside", there=False)
        keys("y")
        wait_for("as Markdown")
        keys("5")
        wait_for("Compare")
        # By now there is a past to go back to: moments are kept once a second.
        keys("Space")
        wait_for("PAUSED")
        keys("Left")
        wait_for("PAUSED -")
        keys("Space")
        wait_for("PAUSED", there=False)
        keys("e")
        wait_for("F1 opened")
        keys("o")
        wait_for("newest first")
        keys("Escape")
        wait_for("Events")
        keys(":")
        wait_for("Commands")
        keys("rank 30")
        wait_for("rank 30")
        keys("Enter")
        wait_for("Rank 30")
        keys("w")
        wait_for("written:")
        keys("1")
        wait_for("Where a step goes")
        keys("q")
        end = time.monotonic() + PAINT_LIMIT_S
        while not (done.exists() and done.read_text().strip()):
            assert time.monotonic() < end, pane()
            time.sleep(0.05)
        assert done.read_text().strip() == "0"
    finally:
        subprocess.run([*server, "kill-server"], check=False)
    assert len(list(tmp_path.glob("gpuwatch-*.svg"))) == 1


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_two_recordings_are_compared_and_a_change_is_checked_in_tmux(tmp_path: Path) -> None:
    common: dict[str, object] = {
        "ranks": 2,
        "host": {"cpu_percent": 20, "cpu_iowait_percent": 0},
        "process": {"cpu_percent": 40},
        "worker_process": {"cpu_percent": 20},
        "worker_state": "S",
        "batch_ms": (300, 60, 10),
    }
    # Half-way the loader gets its workers: what is checked is the rest of the run.
    phases = {"data_wait": [90.0] * 200 + [1.0], "forward": 20.0, "backward": 40.0}
    slow = traces.Job(
        **common,  # type: ignore[arg-type]
        steps=700,
        phases_ms=phases,
        step={"queue_depth": [0] * 200 + [4], "queue_capacity": 4},
        loader={"num_workers": 2},
    )
    slow.write(tmp_path / "before.jsonl")
    fast = traces.Job(
        **common,  # type: ignore[arg-type]
        steps=300,
        phases_ms={**phases, "data_wait": 1.0},
        step={"queue_depth": 4, "queue_capacity": 12},
        loader={"num_workers": 6},
        seed=3,
        simulated=True,
    )
    fast.write(tmp_path / "after.jsonl")
    with support.run_directory() as directory:
        window = support.Tmux(directory, 120, 50)
        try:
            command = " ".join([*support.GPUWATCH, "replay before.jsonl after.jsonl --at 180"])
            # Without colour: with it the other tests here draw the same panes.
            environment = support.environment(directory, NO_COLOR="1")
            window.start(f"cd {tmp_path} && {command}; echo left $?", environment)
            window.wait_for("starves", PAINT_LIMIT_S)
            window.keys("4")
            window.wait_for("v freezes this window", PAINT_LIMIT_S)
            window.keys("v")
            window.wait_for("of 64 steps up to step", PAINT_LIMIT_S)
            window.keys("5")
            shown = window.wait_for("faster, 95 % CI", PAINT_LIMIT_S)
            assert "A before (saved)" in shown
            assert "B after (saved) SIMULATED" in shown
            assert "num_workers 2 -> 6" in shown
            assert "Checked changes" in shown or "scroll" in shown
            window.keys("a")
            window.wait_for("batch_size 8", PAINT_LIMIT_S)
            window.keys("Escape")
            window.wait_for("hidden, a: all", PAINT_LIMIT_S)
            window.keys("o")
            window.wait_for("Choose A", PAINT_LIMIT_S)
            # The first in the list is the run that is replayed; after it come both recordings.
            window.keys("Tab", "Enter")
            window.wait_for("B job (replayed)", PAINT_LIMIT_S)
            window.keys("o")
            window.wait_for("Choose A", PAINT_LIMIT_S)
            # Escape and what follows it at once would be one key, alt+4.
            window.keys("Escape")
            window.wait_for("o choose A and B", PAINT_LIMIT_S)
            window.keys("4")
            window.wait_for("enter open", PAINT_LIMIT_S)
            # The replay goes on meanwhile, at its own speed, to the steps after the change.
            window.wait_for("of 256 steps so far", PAINT_LIMIT_S)
            window.keys("v")
            window.wait_for("is not checked any more", PAINT_LIMIT_S)
            window.keys("q")
            window.wait_for("left 0", PAINT_LIMIT_S)
        finally:
            window.close()
