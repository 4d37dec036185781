"""A command's output: the lines that a terminal would show, the pane, the report, the question."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.pilot import Pilot

from gpuwatch.store.views import View
from gpuwatch.tui import GpuwatchApp
from gpuwatch.tui.job import runs_of, state_of
from gpuwatch.tui.output import OutputRing
from gpuwatch.tui.render.output import leave_lines, output_line, report_lines
from gpuwatch.tui.render.text import width_of
from gpuwatch.tui.screens.output import LeaveScreen, OutputScreen, ReportScreen
from gpuwatch.tui.theme import STYLES
from gpuwatch.tui.widgets.prompt import PromptPane
from tests.tui.fakes import FakeSession, rank_view, run_view, two_ranks, view
from tests.tui.snapshots import text_of
from tests.tui.test_app import drive, screen_text

if TYPE_CHECKING:
    from gpuwatch.diagnosis.types import RunDiagnosis


def shown(*pieces: bytes, most: int = 100) -> list[str]:
    ring = OutputRing(most)
    for piece in pieces:
        ring.feed(piece)
    return ring.lines(ring.first, most)


# The lines


@pytest.mark.parametrize(
    ("printed", "lines"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\ntwo", ["one", "two"]),
        (b"\n\nx\n", ["", "", "x"]),
        # A progress bar is one line, and what it was longer by stays, as on a terminal.
        (b" 1%\r 22%\r 100%\ndone", [" 100%", "done"]),
        (b"abcdef\rxy", ["xycdef"]),
        (b"abcdef\rxy\x1b[K", ["xy"]),
        (b"abcdef\r\x1b[2Kz", ["z"]),
        (b"ab\x08c", ["ac"]),
        # Two bars under each other: down, drawn, and up again.
        (b"\rA 1\n\rB 1\x1b[A\rA 2\n\rB 2\x1b[A\rA 3\n\n", ["A 3", "B 2"]),
        (b"x\x1b[5Cy\x1b[1Gz", ["z     y"]),
        # Colours, titles, links and other strings for the terminal are not text.
        (b"\x1b[1;31mred\x1b[0m \x1b[38;2;1;2;3mrgb\x1b[m", ["red rgb"]),
        (b"\x1b]0;a title\x07t\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", ["tlink"]),
        (b"\x1bPq#0\x1b\\s\x1b(Bc\x1b7\x1b8\x1b=", ["sc"]),
        (b"a\tb\x00\x07c\x9b", ["a       bc\N{REPLACEMENT CHARACTER}"]),
        ("ü 学 🙂\n".encode(), ["ü 学 🙂"]),
        (b"broken \xff\xfe end", ["broken \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} end"]),
        (b"", []),
    ],
)
def test_lines_are_those_of_a_terminal(printed: bytes, lines: list[str]) -> None:
    assert shown(printed) == lines
    # Wherever the stream is cut, between two reads, nothing else comes out.
    for at in range(len(printed) + 1):
        assert shown(printed[:at], printed[at:]) == lines
    assert shown(*[bytes([byte]) for byte in printed]) == lines


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_any_bytes_in_any_pieces_make_the_same_printable_lines(pieces: list[bytes]) -> None:
    whole = shown(b"".join(pieces))
    assert shown(*pieces) == whole
    assert all(line.isprintable() for line in whole)


def test_the_oldest_lines_go_and_numbers_stay() -> None:
    ring = OutputRing(100)
    for i in range(1000):
        ring.feed(b"line %d\n" % i)
    assert ring.first == 901  # one of the hundred is the line that is begun
    assert ring.end == 1000
    assert ring.lines(0, 903) == ["line 901", "line 902"]
    assert ring.lines(998, 10) == ["line 998", "line 999"]
    assert ring.lines(1000, 5) == []


def test_memory_is_bounded_whatever_is_printed() -> None:
    ring = OutputRing(10_000)
    for _ in range(3000):
        ring.feed(b"x" * 5000 + b"\n")  # 15 million characters, each line cut at 4,000
    kept = ring.lines(0, 10_000_000)
    assert sum(len(line) for line in kept) <= 4_000_000
    assert {len(line) for line in kept} == {4000}
    ring.feed(b"\x1b]0;" + b"t" * 9000 + b"\nand on")
    assert ring.lines(ring.end - 1, 1) == ["and on"]


def test_search_finds_what_is_kept_whatever_its_case() -> None:
    ring = OutputRing(5)
    ring.feed(b"Error 1\nfine\nERROR 2\nfine\nerror 3\nfine\n")
    assert ring.find("error") == [2, 4]
    assert ring.find("") == []
    assert ring.find("nothing") == []


def test_one_thread_feeds_while_another_looks() -> None:
    ring = OutputRing(200)
    done = threading.Event()

    def feed() -> None:
        for i in range(20_000):
            ring.feed(b"line %d\n" % i)
        done.set()

    feeding = threading.Thread(target=feed)
    feeding.start()
    while not done.is_set():
        first = ring.first
        lines = ring.lines(first, 50)
        numbers = [int(line.split()[1]) for line in lines]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        ring.find("line 7")
    feeding.join()
    assert ring.end == 20_000


@given(st.text(max_size=60), st.text(max_size=5), st.integers(10, 90))
def test_a_line_of_output_has_the_width(text: str, words: str, width: int) -> None:
    line = output_line("".join(c for c in text if c.isprintable()), words, width, current=True)
    assert width_of(line) == width
    assert {style for _, style in line} <= STYLES.keys()


def test_matches_are_marked_each() -> None:
    line = output_line("loss Loss los", "loss", 20, current=False)
    assert [text for text, style in line if style == "badge"] == ["loss", "Loss"]
    assert text_of(line) == " loss Loss los      "


# The screens


class FakeJob:
    """A command that runs until a test says how it has ended."""

    def __init__(self, run: str = "r1") -> None:
        self.run = run
        self.command = "python train.py --lr 0.1"
        self.pid = 4321
        self.log = "/tmp/gpuwatch-0/output-train-1.log"
        self.output = OutputRing()
        self.exit_code: int | None = None
        self.lost = ""
        self.stopping = ""
        self.elapsed_s = 73.0
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1
        self.stopping = "SIGINT sent, SIGTERM in 10 s"

    def report(self, picture: View, found: Mapping[str, RunDiagnosis]) -> list[str]:
        mine = runs_of(picture, self.run)
        return [f"gpuwatch: run {run.run}  {run.steps:,} steps" for run in mine]


def test_the_header_says_how_the_command_is() -> None:
    job = FakeJob()

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        assert "▶ running" in screen_text(app).splitlines()[0]
        job.stopping = "SIGINT sent"
        app.refresh_scene()
        await pilot.pause()
        assert "■ stopping" in screen_text(app).splitlines()[0]
        job.exit_code = 1
        app.refresh_scene()
        await pilot.pause()
        assert "✖ exit code 1" in screen_text(app).splitlines()[0]

    drive(two_ranks(), script, job=job)
    assert state_of(job).ended
    assert state_of(FakeJob()).word == "▶ running"


def test_until_its_run_is_there_no_other_one_is_shown() -> None:
    session = FakeSession(two_ranks())  # r1 is somebody else's

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert "Its training has not begun yet" in text
        assert "python train.py --lr 0.1" in text
        assert "l output" in text
        older = run_view([rank_view(run="mine", state="ended")], run="mine", state="ended")
        newer = run_view([rank_view(run="mine.2")], run="mine.2", name="second")
        session.show(view([newer, *two_ranks().runs, older]))
        app.refresh_scene(force=True)
        await pilot.pause()
        assert app.watcher.scene.run is not None
        assert app.watcher.scene.run.run == "mine.2"
        app.watcher.choose_run("r1")
        app.refresh_scene(force=True)
        assert app.watcher.scene.run.run == "r1"

    drive(session, script, job=FakeJob("mine"))


def test_output_is_followed_scrolled_and_searched() -> None:
    job = FakeJob()
    for i in range(200):
        job.output.feed(b"step %d loss %s\n" % (i, b"nan" if i in (50, 150) else b"0.1"))

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        async def press(*keys: str) -> str:
            await pilot.press(*keys)
            app.refresh_scene()
            await pilot.pause()
            return screen_text(app)

        text = await press("l")
        assert isinstance(app.screen, OutputScreen)
        assert "step 199 loss" in text
        assert "of 200  follows" in text
        job.output.feed(b"step 200 loss 0.1\n")
        text = await press()
        assert "step 200 loss" in text
        text = await press("k", "k")
        assert "stands still" in text
        job.output.feed(b"step 201 loss 0.1\n" * 40)
        text = await press()
        assert "step 198 loss" in text
        assert "step 201" not in text
        text = await press("G")
        assert "step 201 loss" in text
        job.output.feed(b"step 202 loss 0.1\n")
        text = await press()
        assert "follows" in text
        assert "step 202 loss" in text
        await press("k")
        text = await press("j")  # the end again
        assert "follows" in text
        assert "step 0 loss" in await press("g")
        text = await press("slash", *"NAN", "enter")
        assert "▌step 150 loss nan" in text
        assert "‹NAN› 2 of 2" in text
        assert "▌step 50 loss nan" in await press("N")
        assert "▌step 150 loss nan" in await press("N")  # round the end
        text = await press("n")
        assert "▌step 50 loss nan" in text
        assert "‹NAN› 1 of 2" in text
        assert "no line holds ‹zebra›" in await press("slash", *"zebra", "enter")
        assert "step 201 loss" in await press("pagedown", "G")
        await press("l")
        assert len(app.screen_stack) == 1

    drive(two_ranks(), script, job=job)


def test_a_quiet_command_and_a_small_terminal() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("l", "n")
        await pilot.pause()
        assert "nothing yet" in screen_text(app)
        await pilot.press("slash", "x", "enter", "g", "G", "N")
        await pilot.pause()
        assert "no line holds ‹x›" in screen_text(app)
        # It was about that key: the next one has the keys named again.
        await pilot.press("k")
        await pilot.pause()
        assert "no line holds" not in screen_text(app)
        assert "q quit" in screen_text(app)

    drive(two_ranks(), script, job=FakeJob(), size=(80, 24))


def test_q_asks_what_becomes_of_a_command_that_runs() -> None:
    job = FakeJob()

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        for key in ("q", "ctrl+c"):
            await pilot.press(key)
            await pilot.pause()
            text = screen_text(app)
            assert isinstance(app.screen, LeaveScreen)
            assert "python train.py --lr 0.1   process 4321" in text
            assert "d       leave it running without this screen" in text
            assert job.log in text
            assert "s       stop it: SIGINT now" in text
            await pilot.press("q", "ctrl+c")  # asked already
            await pilot.pause()
            assert len(app.screen_stack) == 2
            await pilot.press("escape")
            await pilot.pause()
            assert len(app.screen_stack) == 1
        assert job.stops == 0
        await pilot.press("q", "s")
        await pilot.pause()
        assert job.stops == 1
        assert "SIGINT sent, SIGTERM in 10 s; again: the next signal now" in screen_text(app)
        job.stopping, job.exit_code = "", 130
        app.refresh_scene()
        await pilot.pause()
        assert isinstance(app.screen, ReportScreen)
        assert "ended with exit code 130" in screen_text(app)
        await pilot.press("q")
        await pilot.pause()
        assert app._exit

    drive(two_ranks(), script, job=job)


def test_d_leaves_it_running() -> None:
    job = FakeJob()

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("q", "d")
        await pilot.pause()
        assert app._exit

    app = drive(two_ranks(), script, job=job)
    assert job.stops == 0
    assert not app.return_code


def test_the_report_comes_by_itself_and_stays() -> None:
    job = FakeJob()
    job.output.feed(b"first\n" + b"more\n" * 20 + b"Traceback: last words")

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        job.exit_code = 1
        app.refresh_scene()
        await pilot.pause()
        text = screen_text(app)
        assert "Report  ended with exit code 1 after 73 s" in text
        assert "gpuwatch: run r1  1,240 steps" in text
        assert "Traceback: last words" in text
        assert "first" not in text
        await pilot.press("escape")
        await pilot.pause()
        app.refresh_scene(force=True)
        assert len(app.screen_stack) == 1  # once is enough
        await pilot.press("r")
        await pilot.pause()
        assert isinstance(app.screen, ReportScreen)

    drive(two_ranks(), script, job=job)


def test_the_report_disturbs_nobody_who_reads_or_types() -> None:
    job = FakeJob()

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("question_mark")
        await pilot.pause()
        assert "what the command prints" in screen_text(app)
        job.exit_code = 0
        app.refresh_scene()
        await pilot.pause()
        assert not isinstance(app.screen, ReportScreen)
        assert app.told is not None
        assert app.told[0] == "the command has ended; r shows the report"
        await pilot.press("q")
        await pilot.pause()
        assert app._exit

    drive(two_ranks(), script, job=job, size=(120, 80))
    other = FakeJob()

    async def typing(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("2", "slash", "1")
        other.exit_code = 0
        app.refresh_scene()
        await pilot.pause()
        assert isinstance(app.focused, PromptPane)

    drive(two_ranks(), typing, job=other)


def test_without_a_command_the_keys_say_so() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        for key in ("l", "r"):
            await pilot.press(key)
            assert len(app.screen_stack) == 1
            assert app.told is not None
            assert "gpuwatch run --tui" in app.told[0]
        await pilot.press("question_mark")
        await pilot.pause()
        assert "what the command prints" not in screen_text(app)
        await pilot.press("q")
        await pilot.pause()
        assert app._exit

    drive(two_ranks(), script, size=(120, 80))


@pytest.mark.parametrize("width", [60, 80, 120, 300])
def test_report_and_question_have_the_width(width: int) -> None:
    job = FakeJob()
    job.command = "python " + "--argument value " * 30
    job.output.feed("学習 🙂 ".encode() * 60)
    card = ["gpuwatch: run x", "  verdict   " + "words " * 30, "            and more", ""]
    for code, lost in ((None, ""), (0, ""), (None, "its keeper was killed")):
        job.exit_code, job.lost = code, lost
        lines = [*report_lines(job, card, width), *leave_lines(job, ("d", "s", "esc"), width)]
        assert {width_of(line) for line in lines} == {width}
        assert {style for line in lines for _, style in line} <= STYLES.keys()
