"""Every key of every view, under Textual's pilot; the mouse too."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from textual.events import Key
from textual.keys import _character_to_key as character_to_key
from textual.pilot import Pilot

from gpuwatch.schema import Reply
from gpuwatch.store.views import View
from gpuwatch.tui import GpuwatchApp
from gpuwatch.tui.config import Config
from gpuwatch.tui.keymap import ACTIONS
from gpuwatch.tui.screens.base import FedScreen
from gpuwatch.tui.screens.finding import FindingScreen
from gpuwatch.tui.screens.gpu import GpuScreen
from gpuwatch.tui.screens.heat import HeatScreen
from gpuwatch.tui.screens.overview import Overview
from gpuwatch.tui.screens.rank import RankScreen
from gpuwatch.tui.screens.runs import RunsScreen
from gpuwatch.tui.widgets.heat import HeatPane
from tests.tui.fakes import (
    KNOBS,
    NOW_S,
    FakeSession,
    cluster,
    few_workers,
    found,
    node_view,
    peer_wait,
    rank_view,
    run_view,
    two_ranks,
    view,
    with_hello,
)
from tests.tui.snapshots import check_text
from tests.tui.test_app import drive, press, screen_text

FOUND = found(
    few_workers(ranks=tuple(range(24, 32)), nodes=("node3",)),
    peer_wait(ranks=tuple(range(32))),
)


def footer(text: str) -> str:
    return text.splitlines()[-1]


def test_digits_open_the_views_from_everywhere() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        names = ["overview-is-default", "ranks-view", "gpus-view", "findings-view", "compare-view"]
        for number, name in enumerate(names[1:], 2):
            await press(pilot, str(number))
            assert app.screen.id == name
            assert len(app.screen_stack) == 1
        await press(pilot, "2", "enter")
        assert isinstance(app.screen, RankScreen)
        await press(pilot, "question_mark", "1")
        assert isinstance(app.screen, Overview)
        await press(pilot, "2")
        # The page that was open over it has been closed.
        assert app.screen.id == "ranks-view"
        for size in ((80, 24), (120, 32), (160, 45)):
            await pilot.resize_terminal(*size)
            for key in "12345":
                text = await press(pilot, key)
                assert "q quit" in footer(text), (key, size)
                assert ("Overview" in footer(text)) == (size[0] == 160)

    drive(cluster(), script, size=(160, 45), diagnose=FOUND)


@pytest.mark.parametrize("size", [(80, 24), (120, 32), (160, 45)], ids=str)
def test_the_views_as_a_whole(size: tuple[int, int]) -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        # No clock: ages are what the view says.
        app.watcher._clock = lambda: app.watcher._taken_at
        app.refresh_scene(force=True)
        for key, name in (("1", "overview"), ("2", "ranks"), ("3", "gpus"), ("4", "findings")):
            text = await press(pilot, key)
            check_text(f"view-{name}-{size[0]}", text)

    drive(cluster(), script, size=size, diagnose=FOUND)


def test_a_view_is_drawn_however_late_its_moment_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two looks at the clock another thread may have had the interpreter for long."""
    late = itertools.count()
    monkeypatch.setattr(
        "textual._time.get_time", lambda: time.monotonic() + 0.02 * next(late), raising=True
    )

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        app.action_view(2)
        end = time.monotonic() + 5.0
        while app._batch_count or "slowest own time" not in screen_text(app):
            assert time.monotonic() < end, "the screen is held back for ever"
            await pilot.pause(0.01)

    drive(two_ranks(), script)


def test_a_filter_is_typed_kept_and_taken_away() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, "2", "slash")
        # q is a letter here.
        text = await press(pilot, *"q")
        assert app.is_running
        text = await press(pilot, "backspace", *"node3 !25")
        assert "7 of 32 pass" in text
        assert [i for i in app.watcher.scene.order if not 24 <= i <= 31 or i == 25] == []
        assert "/node3 !25" in footer(text)
        text = await press(pilot, "enter")
        assert "filter ‹node3 !25›" in text
        assert "/ filter" in footer(text)
        # On the overview it is the same list.
        text = await press(pilot, "1")
        assert "filter ‹node3 !25›" in text
        text = await press(pilot, "2", "escape")
        assert len(app.watcher.scene.order) == 32
        text = await press(pilot, "slash", *"nothing", "enter")
        assert "no rank passes" in text
        await press(pilot, "slash", "escape")
        assert len(app.watcher.scene.order) == 32
        await press(pilot, "slash", *"F1", "enter")
        assert sorted(app.watcher.scene.order) == list(range(24, 32))

    drive(cluster(), script, size=(160, 45), diagnose=FOUND)


def typed_at_once(app: GpuwatchApp, text: str) -> None:
    """Press keys of which none is done before the last is pressed."""
    for character in text:
        key = "enter" if character == "\r" else character_to_key(character)
        app.post_message(Key(key, None if key == "enter" else character))


def test_keys_pressed_at_once_are_done_in_their_order() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        typed_at_once(app, "2/node3 !25\r")
        await pilot.pause()
        await pilot.pause()
        assert "filter ‹node3 !25›" in screen_text(app)
        # What follows enter is a command again.
        typed_at_once(app, "/ !26\r1")
        await pilot.pause()
        await pilot.pause()
        assert isinstance(app.screen, Overview)
        assert "filter ‹node3 !25 !26›" in screen_text(app)
        # The palette takes letters from the key on that opens it.
        typed_at_once(app, ":compare\r")
        await pilot.pause()
        await pilot.pause()
        await pilot.pause()
        assert app.screen.VIEW == "compare"  # type: ignore[attr-defined]

    drive(cluster(), script, size=(160, 45), diagnose=FOUND)


def test_findings_and_gpus_have_filters_of_their_own() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, "4", "slash", *"comm", "enter")
        assert [item.id for item in app.watcher.scene.findings] == ["F2"]
        await press(pilot, "escape")
        assert len(app.watcher.scene.findings) == 2
        text = await press(pilot, "3", "slash", *"node2/", "enter")
        assert "8 " in text
        assert "node0/0" not in text
        text = await press(pilot, "slash", "ctrl+u", *"24-25", "enter")
        assert "node3/1" in text
        assert "node3/2" not in text

    drive(cluster(), script, size=(160, 45), diagnose=FOUND)


def test_sort_goes_round_and_says_so() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "2", "s")
        assert app.watcher.scene.order == tuple(range(32))
        assert "by rank" in text
        assert "sorted by rank" in footer(text)
        await press(pilot, "s", "s")
        ranks = app.watcher.scene.run.ranks  # type: ignore[union-attr]
        comm = [ranks[i].phases_ms["comm"] or 0.0 for i in app.watcher.scene.order]
        assert comm[0] == max(comm)
        text = await press(pilot, "4", "s")
        assert "by severity" in text
        text = await press(pilot, "3", "s")
        assert "by gpu util" in text

    drive(cluster(), script, size=(160, 45), diagnose=FOUND)


def test_metric_goes_through_those_that_are_known() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "2", "m")
        assert app.watcher.scene.metric_name == "data_wait"
        assert "data ms" in text
        seen = {"data_wait"}
        for _ in range(20):
            await press(pilot, "m")
            seen.add(app.watcher.scene.metric_name)
        assert {"own", "comm", "queue", "gpu_util", "memory"} <= seen

    drive(cluster(), script, size=(160, 45), diagnose=FOUND)

    async def no_gpu(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        for _ in range(20):
            await press(pilot, "m")
            assert app.watcher.scene.metric_name != "gpu_util"

    drive(two_ranks(), no_gpu)


def test_the_heat_map_fills_the_screen_and_is_walked_through() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "h")
        assert isinstance(app.screen, HeatScreen)
        assert "node3" in text
        app.select_rank(0)
        await press(pilot, "right", "right", "down")
        assert app.watcher.scene.rank.rank == 10  # type: ignore[union-attr]
        assert not app.watcher.scene.paused
        await press(pilot, "left", "up")
        assert app.watcher.scene.rank.rank == 1  # type: ignore[union-attr]
        text = await press(pilot, "enter")
        assert isinstance(app.screen, RankScreen)
        assert "Rank 1 " in text
        await press(pilot, "escape", "h")
        assert isinstance(app.screen, Overview)

    drive(cluster(), script, size=(80, 24), diagnose=FOUND)


def test_a_click_on_a_glyph_selects_its_rank() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, "2")
        pane = app.screen.query_one(HeatPane)
        lines = ["".join(text for text, _ in line) for line in pane.lines]
        y = next(i for i, line in enumerate(lines) if "node2" in line)
        x = next(i for i, char in enumerate(lines[y]) if char in "▁▂▃▄▅▆▇█")
        await pilot.click(HeatPane, offset=(x + 3, y))
        await pilot.pause()
        assert app.watcher.scene.rank.rank == 19  # type: ignore[union-attr]

    drive(cluster(), script, size=(160, 45), diagnose=FOUND)


def test_the_footer_and_rows_can_be_clicked() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        foot = footer(screen_text(app))
        await pilot.click("#footer", offset=(foot.index("4 Findings") + 3, 0))
        await pilot.pause()
        assert app.screen.id == "findings-view"
        await pilot.click("#findings", offset=(20, 1), times=2)
        await pilot.pause()
        assert isinstance(app.screen, FindingScreen)
        foot = footer(screen_text(app))
        await pilot.click("#footer", offset=(foot.index("esc back") + 1, 0))
        await pilot.pause()
        assert app.screen.id == "findings-view"

    drive(cluster(), script, size=(160, 45), diagnose=FOUND)


def test_brackets_go_through_ranks_findings_and_gpus() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        order = app.watcher.scene.order
        await press(pilot, "2", "enter", "]", "n")
        assert app.watcher.scene.rank.rank == order[2]  # type: ignore[union-attr]
        await press(pilot, "[", "N", "[")
        assert app.watcher.scene.rank.rank == order[-1]  # type: ignore[union-attr]
        text = await press(pilot, "3", "enter")
        assert isinstance(app.screen, GpuScreen)
        assert "node0/0" in text
        text = await press(pilot, "]")
        assert "GPU node0/1" in text
        text = await press(pilot, "4", "enter", "n")
        assert isinstance(app.screen, FindingScreen)
        assert app.screen.finding.id == "F2"
        await press(pilot, "N")
        assert app.screen.finding.id == "F1"

    drive(cluster(), script, size=(80, 24), diagnose=FOUND)


def moving(seconds: int, *, ranks: int = 2) -> list[View]:
    """A picture a second, the step number telling which."""
    pictures = []
    for i in range(seconds):
        run = run_view([rank_view(r, steps=1000 + i, own_ms=100.0 + i) for r in range(ranks)])
        nodes = [node_view(gpus=2)]
        pictures.append(view([run], nodes, at_s=NOW_S + i, version=i + 1))
    return pictures


def test_the_last_minutes_can_be_scrolled_through() -> None:
    pictures = moving(60)
    session = FakeSession(pictures[0])

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        for picture in pictures[1:]:
            session.show(picture)
            app.watcher._kept_at = -10.0
            app.refresh_scene()
        text = await press(pilot, "left", "left", "left")
        assert "PAUSED -3.0 s" in text
        assert "step 1,056" in text
        assert app.watcher.scene.rank.own_ms == 156.0  # type: ignore[union-attr]
        text = await press(pilot, "comma")
        assert "step 1,046" in text
        text = await press(pilot, "right", "full_stop", "full_stop")
        assert "PAUSED " in text
        assert "step 1,059" in text
        assert app.watcher.scene.cursor_s is None
        for _ in range(9):
            text = await press(pilot, "comma")
        # It ends where what is kept begins.
        assert "step 1,000" in text
        assert "PAUSED -59 s" in text
        text = await press(pilot, "2", "enter")
        assert "the single steps of that moment are not kept" in text
        assert "┃" in text
        text = await press(pilot, "space")
        assert "LIVE" in text
        assert "step 1,059" in text

    drive(session, script, size=(160, 45))


def test_time_goes_on_while_the_picture_is_paused() -> None:
    pictures = moving(30)
    session = FakeSession(pictures[0])

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, "space")
        for picture in pictures[1:]:
            session.show(picture)
            app.watcher._kept_at = -10.0
            app.refresh_scene()
        assert len(app.watcher._past.moments("r1")) == 30
        assert "step 1,000" in screen_text(app)
        text = await press(pilot, "space", "left")
        assert "step 1,028" in text

    drive(session, script, size=(120, 32))


def test_nothing_to_scroll_back_to_is_said() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "right")
        assert "LIVE" in text

    drive(two_ranks(), script)

    async def idle(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "left")
        assert "nothing is kept of the time before" in footer(text)

    drive(view([]), idle)


def test_enter_on_a_finding_goes_to_its_moment() -> None:
    pictures = moving(60)
    session = FakeSession(pictures[0])
    finding = few_workers(ranks=(1,), opened_s=NOW_S + 40)

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        for picture in pictures[1:]:
            session.show(picture)
            app.watcher._kept_at = -10.0
            app.refresh_scene()
        text = await press(pilot, "4", "enter", "enter")
        assert isinstance(app.screen, RankScreen)
        assert "Rank 1 " in text
        assert "PAUSED -19 s" in text
        assert "when F1 opened" in footer(text)
        assert "step 1,040" in text

    drive(session, script, size=(160, 45), diagnose=found(finding))


def test_zoom_changes_what_curves_cover() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "2", "enter", "G")
        assert app.watcher.scene.span_s == 120.0
        text = await press(pilot, "minus", "minus", "minus", "minus")
        assert app.watcher.scene.span_s == 600.0
        text = await press(pilot, "plus", "plus", "plus", "plus", "plus", "g")
        assert "-60 s" in text

    drive(two_ranks(), script, size=(160, 45))


def test_copy_snooze_and_sort_of_findings() -> None:
    copied: list[str] = []

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        app.copy_to_clipboard = copied.append  # type: ignore[method-assign]
        text = await press(pilot, "4", "c")
        assert copied == ["num_workers 1 -> 7"]
        assert "sent to the terminal's clipboard: num_workers 1 -> 7   w writes" in footer(text)
        await press(pilot, "y")
        assert copied[-1].startswith("## F1 loader_few_workers")
        assert "| data wait | 146.2 ms | 85.2 ms of compute | host clock |" in copied[-1]
        assert "1. num_workers 1 -> 7: predicted step" in copied[-1]
        text = await press(pilot, "x")
        assert "1 open  1 aside" in text
        assert [item.id for item in app.watcher.scene.findings] == ["F2", "F1"]
        assert "✖ F1  aside: too few" in text
        # The selection has gone with it: the same key takes it back.
        await press(pilot, "x")
        assert [item.id for item in app.watcher.scene.findings] == ["F1", "F2"]
        text = await press(pilot, "j", "c")
        assert "no hint to copy" in footer(text)

    drive(cluster(), script, size=(160, 45), diagnose=FOUND)


@pytest.mark.parametrize("key", ["1", "4"])
def test_what_a_key_has_acted_on_stays_selected(key: str) -> None:
    copied: list[str] = []

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        app.copy_to_clipboard = copied.append  # type: ignore[method-assign]
        await press(pilot, key)
        for aside in ({"F1"}, set(), {"F1"}):
            await press(pilot, "x")
            assert app.watcher.scene.snoozed == aside
        # It is the last one of them now, and no other was selected meanwhile.
        assert [item.id for item in app.watcher.scene.findings] == ["F2", "F3", "F1"]
        await press(pilot, "y")
        assert copied[-1].startswith("## F1")
        await press(pilot, "v")
        assert app.told is not None
        assert app.told[0].startswith("F1 ")
        await press(pilot, "enter")
        screen = app.screen
        assert isinstance(screen, FindingScreen)
        assert screen.finding.id == "F1"

    third = few_workers(id="F3", kind="h2d_pin", cost_ms=9.0)
    of_three = found(few_workers(cost_ms=61.0), peer_wait(cost_ms=30.0, follows=None), third)
    drive(two_ranks(), script, size=(80, 24), diagnose=of_three)


class AnsweringSession(FakeSession):
    """A rank that answers `stack`, or says why not."""

    def __init__(self, picture: View, status: str = "done") -> None:
        super().__init__(picture)
        self.asked: list[tuple[str, str, int | None]] = []
        self._status = status

    def send(
        self,
        verb: str,
        run: str,
        rank: int | None = None,
        args: dict[str, str | int | float | bool] | None = None,
    ) -> str:
        self.asked.append((verb, run, rank))
        return f"id{len(self.asked)}"

    def answer(self, data: str) -> None:
        run = self._view.runs[0]
        reply = Reply(f"id{len(self.asked)}", self._status, "no", data)  # type: ignore[arg-type]
        ranks = tuple(replace(rank, replies=(reply,)) for rank in run.ranks)
        self.show(replace(self._view, runs=(replace(run, ranks=ranks),)))


STACKS = (
    "Thread gpuwatch:\n"
    '  File "telemetry.py", line 1, in run\n    wait()\n\n'
    'Thread MainThread:\n  File "train.py", line 7, in <module>\n    main()\n'
    '  File "train.py", line 3, in main\n    loss.backward()\n'
)


def test_stacks_are_asked_for_and_shown() -> None:
    session = AnsweringSession(two_ranks())

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "2", "j", "t")
        assert session.asked == [("stack", "r1", 0)]
        assert "asking the rank" in text
        session.answer(STACKS)
        app.refresh_scene(force=True)
        await pilot.pause()
        text = screen_text(app)
        assert "loss.backward()" in text
        assert text.index("MainThread") < text.index("Thread gpuwatch")
        # Where it stands is seen without scrolling.
        assert text.index("loss.backward()") < text.index("main()")
        await press(pilot, "t")
        assert len(session.asked) == 2

    drive(session, script, size=(80, 24))


def test_a_session_without_a_training_behind_it_says_so() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "t")
        assert "a fake session has no training behind it" in text

    drive(two_ranks(), script)


def test_o_lists_the_runs_and_goes_to_one() -> None:
    runs = [
        run_view([rank_view(run=name)], run=name, name=f"job-{name}") for name in ("a", "b", "c")
    ]

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "o")
        assert isinstance(app.screen, RunsScreen)
        assert all(f"job-{name}" in text for name in "abc")
        text = await press(pilot, "j", "j", "enter")
        assert isinstance(app.screen, Overview)
        assert "job-c" in text
        text = await press(pilot, "o")
        assert app.screen.query_one("#runs").selected == 2  # type: ignore[attr-defined]

    drive(view(runs), script)

    async def none(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "o")
        assert "no run has been seen yet" in footer(text)

    drive(view([]), none)


def test_the_palette_finds_and_does() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "colon", *"zzz")
        assert "nothing is called that" in text
        text = await press(pilot, "ctrl+u", *"rank 17", "enter")
        assert isinstance(app.screen, RankScreen)
        assert "Rank 17 " in text
        await press(pilot, "colon", *"theme li", "enter")
        assert app.theme == "gpuwatch-light"
        await press(pilot, "colon", *"metric comm ms", "enter")
        assert app.watcher.scene.metric_name == "comm"
        await press(pilot, "colon", *"finding f2", "enter")
        assert isinstance(app.screen, FindingScreen)
        text = await press(pilot, "colon", *"ascii", "enter")
        assert text.isascii()
        await press(pilot, "colon", *"ascii", "enter")
        await press(pilot, "colon", "escape")
        assert isinstance(app.screen, FindingScreen)
        await press(pilot, "colon", *"view gp", "enter")
        assert app.screen.id == "gpus-view"

    drive(cluster(), script, size=(120, 32), diagnose=FOUND)


def test_w_writes_picture_and_findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "w")
        # Both paths whole, over the lines above if they are long.
        assert "written: " in "".join(text.splitlines()[-4:])
        assert footer(text).rstrip().endswith(".md")
        await press(pilot, "w")

    drive(cluster(), script, size=(160, 45), diagnose=FOUND)
    pictures = sorted(tmp_path.glob("gpuwatch-resnet50-ddp-*.svg"))
    texts = sorted(tmp_path.glob("gpuwatch-resnet50-ddp-*.md"))
    assert len(pictures) == len(texts) == 2
    assert "<svg" in pictures[0].read_text("utf-8")
    report = texts[0].read_text("utf-8")
    assert report.startswith("# resnet50-ddp")
    assert "## F1 loader_few_workers" in report


def test_help_lists_the_keys_of_the_view_it_was_opened_on() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "4", "question_mark")
        assert "Keys here" in text
        assert "copy what is shown as Markdown" in text
        text = await press(pilot, "question_mark", "2", "question_mark")
        assert "copy what is shown as Markdown" not in text
        assert "where every thread of the rank stands now" in text

    drive(two_ranks(), script, size=(120, 60), diagnose=FOUND)


def test_every_screen_names_only_actions_that_exist() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        for keys in (
            ["1"],
            ["2"],
            ["2", "enter"],
            ["3"],
            ["3", "enter"],
            ["4"],
            ["4", "enter"],
            ["5"],
            ["h"],
            ["e"],
            ["o"],
            ["question_mark"],
            ["t"],
            ["M"],
            ["p"],
            ["K"],
            ["4", "enter", "a"],
        ):
            await press(pilot, "1", *keys)
            screen = app.screen
            assert isinstance(screen, FedScreen)
            for name in screen.HERE:
                method = f"action_{ACTIONS[name].call.split('(')[0]}"
                owners = [screen, app, *screen.query("*")]
                assert any(hasattr(owner, method) for owner in owners), (screen, name)
                # What help names is bound on that screen, under that name.
                bound = {b.binding.id for b in screen.active_bindings.values()}
                assert name in bound, (screen, name)

    picture = with_hello(cluster(), knobs=KNOBS, allow_control=True)
    drive(picture, script, size=(120, 32), diagnose=FOUND)


def test_keys_can_be_rebound() -> None:
    config = Config(theme="dark", ascii=False, keys={"pause": "p", "filter": "f,slash"})

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "space")
        assert "PAUSED" not in text
        text = await press(pilot, "p")
        assert "PAUSED" in text
        assert "p resume" in footer(text)
        text = await press(pilot, "f", *"12")
        assert "/12" in footer(text)
        text = await press(pilot, "escape", "question_mark")
        assert re.search(r"f /\s+filter", text)

    drive(cluster(), script, size=(120, 50), config=config)


def test_a_wrong_setting_is_one_sentence_on_the_screen() -> None:
    config = Config(theme="dark", ascii=False, problems=("config.toml: no action 'pasue'",))

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        assert "no action 'pasue'" in screen_text(app)
        text = await press(pilot, "e")
        assert "no action 'pasue'" in text

    drive(two_ranks(), script, size=(160, 45), config=config)


class Recording(FakeSession):
    """A session over a recording of ten minutes."""

    def __init__(self, picture: View) -> None:
        super().__init__(replace(picture, link="replay"))
        self.paused = False
        self.speed = 1.0
        self.position = 192.0
        self.duration = 600.0
        self.seeks = 0

    def seek(self, position: float) -> None:
        self.position = position
        self.seeks += 1


def test_a_recording_is_paused_and_moved_in() -> None:
    session = Recording(two_ranks())

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        assert "REPLAY" in screen_text(app)
        assert "▶ 03:12 ━" in screen_text(app)
        text = await press(pilot, "space")
        assert session.paused
        assert "⏸ 03:12" in text
        await press(pilot, "right", "full_stop", "left")
        assert session.position == 202.0
        for _ in range(30):
            await press(pilot, "comma")
        assert session.position == 0.0
        assert not app.watcher.scene.paused

    drive(session, script, size=(160, 45))


def test_enter_on_a_finding_of_a_recording_goes_to_its_moment() -> None:
    session = Recording(two_ranks())
    finding = few_workers(ranks=(1,), opened_s=NOW_S - 40)

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "4", "enter", "enter")
        assert isinstance(app.screen, RankScreen)
        assert (session.position, session.paused) == (152.0, True)
        assert "as it was when F1 opened" in footer(text)

    drive(session, script, size=(160, 45), diagnose=found(finding))


@pytest.mark.parametrize(
    ("opened_s", "words"),
    [(NOW_S - 400, "it opened before what is kept"), (0.0, "nobody saw it open")],
)
def test_a_moment_that_is_not_kept_is_said(opened_s: float, words: str) -> None:
    session = Recording(two_ranks())
    finding = few_workers(ranks=(1,), opened_s=opened_s)

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "4", "enter", "enter")
        assert words in footer(text)
        assert (session.position, session.paused) == (192.0, False)

    drive(session, script, size=(160, 45), diagnose=found(finding))
