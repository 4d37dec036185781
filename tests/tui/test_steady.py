"""Hints stay while they are read, and what is copied is what stands on the screen."""

import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from textual.pilot import Pilot

from gpuwatch.diagnosis.types import Finding, Hint, RunDiagnosis
from gpuwatch.store.views import View
from gpuwatch.tui import GpuwatchApp
from gpuwatch.tui.clipboard import runs_in_tmux, to_tmux
from gpuwatch.tui.steady import HintHold
from tests.tui.fakes import FakeSession, few_workers, two_ranks
from tests.tui.test_app import drive, screen_text


def asking(workers: int, low_ms: float = 148.0, **more: object) -> Finding:
    hint = Hint(f"num_workers 1 -> {workers}", "num_workers", 1, workers, (low_ms, low_ms + 12))
    return few_workers(hints=(hint,), **more)


def shown(hold: HintHold, finding: Finding, now_s: float = 0.0) -> Hint:
    return hold.take("r1", [finding], now_s)[0].hints[0]


def test_a_number_between_two_does_not_go_back_and_forth() -> None:
    hold = HintHold()
    asked = (11, 12, 11, 12, 12, 11, 12, 12, 12, 11)
    told = [shown(hold, asking(workers)).new for workers in asked]
    assert told == [11, 11, 11, 11, 11, 11, 11, 11, 12, 12]


def test_the_prediction_of_the_same_hint_is_always_the_newest() -> None:
    hold = HintHold()
    assert shown(hold, asking(11, 100.0)).predicted_ms == (100.0, 112.0)
    assert shown(hold, asking(11, 90.0)).predicted_ms == (90.0, 102.0)
    # The held number keeps its own.
    assert shown(hold, asking(12, 80.0)).predicted_ms == (90.0, 102.0)


def test_a_copied_hint_stands_for_as_long_as_the_footer_speaks_of_it() -> None:
    hold = HintHold()
    finding = hold.take("r1", [asking(11)], 100.0)[0]
    hold.hold(finding, 110.0)
    assert [shown(hold, asking(12), 100.0 + s).new for s in range(12)] == [*([11] * 12)]
    assert shown(hold, asking(12), 112.0).new == 12


def test_a_finding_of_another_run_or_that_went_has_nothing_held() -> None:
    hold = HintHold()
    shown(hold, asking(11))
    assert hold.take("r2", [asking(12)], 0.0)[0].hints[0].new == 12
    assert hold.take("r1", [], 0.0) == ()
    assert shown(hold, asking(12)).new == 12
    resolved = hold.take("r1", [asking(13, state="resolved")], 0.0)
    assert resolved[0].hints[0].new == 13


class Decided:
    """A diagnosis that asks for 12 workers once, and for 11 from then on."""

    def __init__(self) -> None:
        self.rounds = 0

    def __call__(self, picture: View) -> Sequence[RunDiagnosis]:
        self.rounds += 1
        workers = 12 if self.rounds == 1 else 11
        return [RunDiagnosis(run.run, (asking(workers),)) for run in picture.runs]


def test_what_is_copied_is_what_the_page_shows_then_and_after() -> None:
    copied: list[str] = []
    diagnose, session = Decided(), FakeSession(two_ranks())

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        app.copy_to_clipboard = copied.append  # type: ignore[method-assign]
        await pilot.press("enter", "c")
        for _ in range(6):
            session.show(two_ranks())
            app.watcher._diagnosed_at = -1.0
            before = app.watcher.diagnoses
            app.refresh_scene(force=True)
            for _ in range(400):
                if app.watcher.diagnoses > before:
                    break
                await pilot.pause(0.005)
            app.refresh_scene(force=True)
            await pilot.pause()
            text = screen_text(app)
            assert f"1 {copied[0]}: predicted" in text
            assert f"clipboard: {copied[0]}" in text

    drive(session, script, diagnose=diagnose)
    assert diagnose.rounds >= 6
    assert copied == ["num_workers 1 -> 12"]


# Where it is copied to


def fake_tmux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, takes: str) -> Path:
    """Put a tmux on the path that takes a buffer with these options only; returns its buffer."""
    program, buffer = tmp_path / "tmux", tmp_path / "buffer"
    program.write_text(f'#!/bin/sh\n[ "$*" = "load-buffer{takes} -" ] && cat > {buffer}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TMUX", "/tmp/tmux-0/default,1,0")
    return buffer


@pytest.mark.parametrize("takes", [" -w", ""])
def test_in_tmux_a_buffer_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: str
) -> None:
    buffer = fake_tmux(tmp_path, monkeypatch, takes=takes)
    sent: list[str] = []

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        app.copy_to_clipboard = sent.append  # type: ignore[method-assign]
        await pilot.press("4", "c")
        for _ in range(400):
            if app.told is not None:
                break
            await pilot.pause(0.01)
        assert app.told is not None
        assert app.told[0] == "copied to a buffer of tmux: num_workers 1 -> 7"

    drive(two_ranks(), script, diagnose=lambda v: [RunDiagnosis("r1", (few_workers(),))])
    assert buffer.read_text() == "num_workers 1 -> 7"
    assert sent == []


def test_where_tmux_takes_nothing_the_terminal_is_asked_and_nothing_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = fake_tmux(tmp_path, monkeypatch, takes=" --never")
    sent: list[str] = []

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        app.copy_to_clipboard = sent.append  # type: ignore[method-assign]
        await pilot.press("4", "y")
        for _ in range(400):
            if app.told is not None:
                break
            await pilot.pause(0.01)
        assert app.told is not None
        assert app.told[0] == "sent to the terminal's clipboard: F1 as Markdown   w writes files"

    drive(two_ranks(), script, diagnose=lambda v: [RunDiagnosis("r1", (few_workers(),))])
    assert sent[0].startswith("## F1 loader_few_workers")
    assert not buffer.exists()


def test_a_tmux_that_is_not_there_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not runs_in_tmux({})
    monkeypatch.setenv("PATH", "/nowhere")
    assert not runs_in_tmux({"TMUX": "/tmp/tmux-0/default,1,0"})
    assert not to_tmux("text")


@pytest.mark.terminal
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_real_tmux_pastes_what_was_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = tmp_path / "tmux"
    server = ["tmux", "-S", str(socket), "-f", "/dev/null"]
    subprocess.run([*server, "new-session", "-d", "-x", "80", "-y", "24", "sleep 60"], check=True)
    try:
        monkeypatch.setenv("TMUX", f"{socket},1,0")
        done: list[bool] = []
        asked = threading.Thread(target=lambda: done.append(to_tmux("num_workers 1 -> 7\nß")))
        asked.start()
        asked.join(10)
        assert done == [True]
        buffer = subprocess.run([*server, "show-buffer"], capture_output=True, check=True)
        assert buffer.stdout.decode() == "num_workers 1 -> 7\nß"
    finally:
        subprocess.run([*server, "kill-server"], check=False)
