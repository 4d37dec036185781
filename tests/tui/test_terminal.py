"""The real driver in a real terminal: it paints, it quits at once, it cleans up after itself."""

import fcntl
import os
import pty
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

pytestmark = pytest.mark.terminal

APP = str(Path(__file__).with_name("terminal_app.py"))
PAINT_LIMIT_S = 30.0
QUIT_LIMIT_S = 2.0
"""The promise is 0.5 s; a busy machine gets more."""


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
            assert time.monotonic() - start < 20.0
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


@pytest.mark.parametrize(("columns", "rows"), [(160, 45), (80, 24)])
def test_paints_and_q_restores_the_terminal(
    terminals: list[Terminal], columns: int, rows: int
) -> None:
    terminal = Terminal(columns, rows)
    terminals.append(terminal)
    terminal.wait_for("too few loader workers")
    assert "num_workers 1 -> 7" in terminal.text()
    terminal.press(b"q")
    code, took = terminal.wait_exit()
    assert code == 0
    assert took < QUIT_LIMIT_S
    terminal.assert_restored()


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


def test_no_color_paints(terminals: list[Terminal]) -> None:
    terminal = Terminal(80, 24, NO_COLOR="1")
    terminals.append(terminal)
    terminal.wait_for("too few loader workers")
    terminal.press(b"q")
    assert terminal.wait_exit()[0] == 0


def test_a_resize_is_followed(terminals: list[Terminal]) -> None:
    terminal = Terminal(80, 24)
    terminals.append(terminal)
    terminal.wait_for("too few loader workers")
    fcntl.ioctl(terminal._child, termios.TIOCSWINSZ, struct.pack("HHHH", 5, 20, 0, 0))
    terminal.process.send_signal(signal.SIGWINCH)
    end = time.monotonic() + 10.0
    while b"gpuwatch: 20x5" not in terminal.raw:
        assert time.monotonic() < end
        terminal.read(0.05)
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
        wait_for("the training goes on")
        subprocess.run([*server, "send-keys", "-t", "a", "q"], check=True)
        end = time.monotonic() + 10.0
        while not (done.exists() and done.read_text().strip()):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert done.read_text().strip() == "0"
        assert "loader workers" not in pane()
    finally:
        subprocess.run([*server, "kill-server"], check=False)
