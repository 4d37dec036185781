"""The app under Textual's pilot: sizes, states, keys. State is asserted, not pixels."""

import asyncio
import gc
import math
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from textual._compositor import Compositor
from textual.css.stylesheet import Stylesheet
from textual.events import Key
from textual.keys import _character_to_key
from textual.pilot import Pilot
from textual.widget import Widget

from gpuwatch.diagnosis.types import RankStack, RunDiagnosis
from gpuwatch.schema import PHASES
from gpuwatch.store.views import View
from gpuwatch.tui import GpuwatchApp
from gpuwatch.tui.config import Config
from gpuwatch.tui.screens.finding import FindingScreen
from gpuwatch.tui.screens.help import HelpScreen
from gpuwatch.tui.screens.overview import Overview
from gpuwatch.tui.widgets.pane import LinePane, ListPane
from tests.tui.fakes import (
    FakeSession,
    cluster,
    few_workers,
    found,
    heavy,
    no_diagnosis,
    peer_wait,
    rank_view,
    run_view,
    two_ranks,
    view,
)

SIZES = [(160, 45), (80, 24), (20, 5)]
VIEW_SIZES = [(160, 45), (80, 24)]
MORE_SIZES = [(120, 36), (300, 100), (60, 12), (139, 30), (1, 1)]

Script = Callable[[GpuwatchApp, Pilot[None]], Awaitable[None]]


def drive(
    picture: View | FakeSession,
    script: Script,
    *,
    size: tuple[int, int] = (120, 36),
    diagnose: Callable[[View], Sequence[RunDiagnosis]] = no_diagnosis,
    **options: Any,
) -> GpuwatchApp:
    """Run the app without its timer and let `script` drive it."""
    session = picture if isinstance(picture, FakeSession) else FakeSession(picture)
    options.setdefault("config", Config(theme="dark", ascii=False))
    app = GpuwatchApp(session, diagnose, hz=0, **options)

    async def main() -> None:
        async with app.run_test(size=size) as pilot:
            await settle(app, pilot)
            await script(app, pilot)

    asyncio.run(main())
    return app


async def settle(app: GpuwatchApp, pilot: Pilot[None]) -> None:
    """Let the first diagnosis come in and be drawn."""
    for _ in range(400):
        if app.watcher.scene.run is None or app.watcher.diagnoses:
            break
        await pilot.pause(0.005)
    app.refresh_scene(force=True)
    await pilot.pause()


def screen_text(app: GpuwatchApp) -> str:
    """Return what stands on the screen, line by line."""
    height = app.size.height
    strips = app.screen._compositor.render_strips()
    assert len(strips) == height
    rows = ["".join(segment.text for segment in strip) for strip in strips]
    return "\n".join(rows)


async def press(pilot: Pilot[None], *keys: str) -> str:
    """Press keys one after the other and return what stands on the screen."""
    app = pilot.app
    for key in keys:
        # Not pilot.press: it waits until the whole machine is idle, which here takes its time.
        name = _character_to_key(key) if len(key) == 1 else key
        char = key if len(key) == 1 else None
        app.post_message(Key(name, char))
        for _ in range(3):
            await pilot._wait_for_screen()
    await pilot.pause(0)
    # A change of view is painted a moment later, so that it does not flicker.
    end = time.monotonic() + 20.0
    while app.screen._layout_required or app._batch_count:
        assert time.monotonic() < end, "nothing is drawn any more"
        await pilot.pause(0.01)
    assert isinstance(pilot.app, GpuwatchApp)
    return screen_text(pilot.app)


PICTURES: dict[str, View | Callable[[], View]] = {
    "connecting": View(version=0, at_s=0.0, message="starting the node process"),
    "nothing found": view([]),
    "no contact": replace(two_ranks(), link="lost", message="ssh to node1 ended"),
    "two": two_ranks(),
    "cluster": cluster(),
    "1,024": heavy,
    "ended": view([run_view([rank_view(state="ended")], state="ended")]),
    "gone": view([run_view([rank_view(state="gone", state_reason="exit code 1")])]),
    "no steps": view(
        [run_view([rank_view(phases=dict.fromkeys(PHASES), hello=None, process=None, steps=0)])]
    ),
    "nan": view(
        [
            run_view(
                [rank_view(phases=dict.fromkeys(PHASES, math.nan), loss=math.nan)], loss=math.nan
            )
        ]
    ),
    "no ranks": view([run_view([])], nodes=[]),
}


def picture(name: str) -> View:
    known = PICTURES[name]
    return known if isinstance(known, View) else known()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, size) for name in PICTURES for size in SIZES),
        *((name, size) for name in ("two", "1,024", "nothing found") for size in MORE_SIZES),
    ],
    ids=str,
)
def test_every_state_at_every_size(name: str, size: tuple[int, int]) -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        if size >= (80, 24):
            assert "◉" in text
            assert "q quit" in text
        await press(pilot, "tab", "j", "k", "enter", "escape", "question_mark")
        for number in (2, 3, 4) if size in VIEW_SIZES or name == "two" else ():
            app.action_view(number)
            for _ in range(3):
                await pilot._wait_for_screen()
            while app.screen._layout_required or app._batch_count:
                await pilot.pause(0.01)
            text = screen_text(app)
            if size >= (80, 24):
                assert "◉" in text.splitlines()[0]
                assert "q quit" in text.splitlines()[-1]
            else:
                assert text[:1] in "g…" or size == (60, 12)

    drive(picture(name), script, size=size, diagnose=found(few_workers(), peer_wait()))


@pytest.mark.parametrize(
    ("name", "size"),
    [("two", (160, 45)), ("cluster", (80, 24)), ("1,024", (160, 45)), ("connecting", (80, 24))],
    ids=str,
)
def test_no_color(name: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        assert app.no_color
        keys = "tab j question_mark escape tab enter 2 enter 3 enter 4 enter 5 h e o colon"
        for key in keys.split():
            await press(pilot, key)

    drive(picture(name), script, size=size, diagnose=found(few_workers(), peer_wait()))


@pytest.mark.parametrize("size", [(160, 45), (120, 36), (80, 24)], ids=str)
def test_the_answer_is_on_the_first_screen(size: tuple[int, int]) -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        for words in (
            "✖",
            "too few loader workers",
            "+83 ms/step",
            "num_workers 1 -> 7: predicted step 231 -> 148..160 ms",
            "resnet50-ddp",
            "LIVE",
            "0 lost",
            "no GPUs: no NVIDIA driver on this machine",
            "rank 0",
            "cpu",
        ):
            assert words in text, words

    drive(two_ranks(), script, size=size, diagnose=found(few_workers(), peer_wait()))


def test_nothing_found_names_the_commands() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert "gpuwatch demo" in text
        assert "import gpuwatch; gpuwatch.watch()" in text
        assert "j/k" not in text

    drive(view([]), script, size=(80, 24))


def test_a_small_terminal_gets_a_notice() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        assert screen_text(app).startswith("gpuwatch: 20x5")
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert "too few loader workers" in screen_text(app)
        await pilot.resize_terminal(30, 8)
        await pilot.pause()
        assert "too small" in screen_text(app)

    drive(two_ranks(), script, size=(20, 5), diagnose=found(few_workers()))


def test_a_larger_terminal_is_filled_at_once() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        before = screen_text(app).count("node3 ")
        await pilot.resize_terminal(120, 70)
        await pilot.pause()
        assert "1-32 of 32" not in screen_text(app)
        assert " 32 " in screen_text(app)
        assert screen_text(app).count("◀ F1") == 8
        assert screen_text(app).count("node") > before + 20

    slow = few_workers(ranks=tuple(range(24, 32)))
    drive(cluster(), script, size=(120, 24), diagnose=found(slow))


def test_enter_opens_the_evidence_and_esc_goes_back() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("j", "enter")
        await pilot.pause()
        assert isinstance(app.screen, FindingScreen)
        assert app.screen.finding.id == "F2"
        text = screen_text(app)
        assert "WHY" in text
        assert "FOLLOWS" in text
        await pilot.press("escape")
        await pilot.pause()
        assert isinstance(app.screen, Overview)
        await pilot.press("k", "enter")
        await pilot.pause()
        assert "RULED OUT" in screen_text(app)

    drive(two_ranks(), script, size=(80, 24), diagnose=found(few_workers(), peer_wait()))


def test_a_long_page_scrolls() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        await pilot.pause()
        assert "j/k" in screen_text(app).splitlines()[-1]
        assert "keep workers" not in screen_text(app)
        await pilot.press("G")
        await pilot.pause()
        assert "keep workers" in screen_text(app)
        await pilot.press("g")
        await pilot.pause()
        assert "WHY" in screen_text(app)

    drive(two_ranks(), script, size=(80, 16), diagnose=found(few_workers()))


def test_tab_moves_between_findings_and_ranks_and_j_moves() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        assert app.focused is not None
        assert app.focused.id == "findings"
        assert "enter evidence" in screen_text(app)
        await pilot.press("tab")
        await pilot.pause()
        assert app.focused is not None
        assert app.focused.id == "ranks"
        text = screen_text(app)
        assert "enter evidence" not in text
        order = app.watcher.scene.order
        await pilot.press("j", "j", "down")
        await pilot.pause()
        rank = app.watcher.scene.rank
        assert rank is not None
        assert rank.rank == order[3]
        assert f"rank {order[3]} " in screen_text(app)
        await pilot.press("G")
        await pilot.pause()
        rank = app.watcher.scene.rank
        assert rank is not None
        assert rank.rank == order[-1]
        assert " of 32" in screen_text(app)
        await pilot.press("tab")
        await pilot.pause()
        assert app.focused is not None
        assert app.focused.id == "findings"

    drive(cluster(), script, size=(160, 45), diagnose=found(few_workers()))


def test_without_findings_the_ranks_have_the_focus() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        assert app.focused is not None
        assert app.focused.id == "ranks"

    drive(two_ranks(), script, diagnose=found())


def test_the_selection_follows_the_rank_when_the_order_changes() -> None:
    slow = rank_view(0, own_ms=300.0)
    session = FakeSession(view([run_view([slow, rank_view(1, own_ms=100.0)])]))

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("j")
        await pilot.pause()
        assert app.watcher.scene.selected == 1
        session.show(view([run_view([slow, rank_view(1, own_ms=900.0, state="silent")])]))
        app.refresh_scene()
        await pilot.pause()
        assert app.watcher.scene.order == (1, 0)
        assert app.watcher.scene.selected == 1

    drive(session, script)


def test_space_pauses_and_resumes() -> None:
    session = FakeSession(two_ranks())

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("space")
        await pilot.pause()
        text = screen_text(app)
        assert "PAUSED" in text
        assert "space resume" in text
        session.show(view([run_view([rank_view(steps=7777)])]))
        app.refresh_scene()
        await pilot.pause()
        assert "7,777" not in screen_text(app)
        await pilot.press("space")
        await pilot.pause()
        assert "7,777" in screen_text(app)

    drive(session, script)


def test_brackets_switch_runs_only_when_there_are_several() -> None:
    runs = [
        run_view([rank_view(run=name)], run=name, name=f"job-{name}") for name in ("a", "b", "c")
    ]

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        assert "job-a" in screen_text(app)
        assert "o runs" in screen_text(app)
        await pilot.press("]")
        await pilot.pause()
        assert "job-b" in screen_text(app)
        assert "run 2/3" in screen_text(app)
        await pilot.press("[", "[")
        await pilot.pause()
        assert "job-c" in screen_text(app)

    drive(view(runs), script)

    async def alone(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        assert "o runs" not in screen_text(app)
        await pilot.press("]")
        await pilot.pause()
        assert "resnet50-ddp" in screen_text(app)

    drive(two_ranks(), alone)


def test_question_mark_opens_and_closes_help() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("?")
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen)
        assert "quit; the training goes on" in screen_text(app)
        await pilot.press("?")
        await pilot.pause()
        assert isinstance(app.screen, Overview)

    drive(two_ranks(), script)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
@pytest.mark.parametrize("before", [[], ["?"], ["enter"]])
def test_q_quits_from_every_screen(key: str, before: list[str]) -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await pilot.press(*before)
        await pilot.pause()
        await pilot.press(key)
        await pilot.pause()

    app = drive(two_ranks(), script, diagnose=found(few_workers()))
    assert app.return_code == 0


def test_an_open_finding_stays_when_it_is_no_longer_found() -> None:
    session = FakeSession(two_ranks())
    findings = [few_workers()]

    def diagnose(picture: View) -> Sequence[RunDiagnosis]:
        return [RunDiagnosis("r1", tuple(findings))]

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        findings[:] = [few_workers(state="resolved", resolved_step=2000)]
        before = app.watcher.diagnoses
        await pilot.pause(1.05)
        session.show(two_ranks())
        app.refresh_scene()
        while app.watcher.diagnoses == before:
            await pilot.pause(0.01)
        app.refresh_scene()
        await pilot.pause()
        assert "resolved at step 2,000" in screen_text(app)
        assert isinstance(app.screen, FindingScreen)

    drive(session, script, diagnose=diagnose)


def test_first_paint_is_told_once() -> None:
    painted: list[int] = []

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        for _ in range(3):
            app.refresh_scene(force=True)
            await pilot.pause()

    drive(two_ranks(), script, on_first_paint=lambda: painted.append(1))
    assert painted == [1]


def test_the_first_picture_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, int] = {}

    def counted(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def wrapper(*args: Any, **options: Any) -> Any:
            made[name] = made.get(name, 0) + 1
            return method(*args, **options)

        monkeypatch.setattr(kind, name, wrapper)

    counted(Stylesheet, "parse")
    counted(Compositor, "render_full_update")
    counted(Overview, "feed")
    counts: list[dict[str, int]] = []

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        made.clear()
        await press(pilot, "2")
        await press(pilot, "1")
        assert "parse" not in made
        ground = app.screen.background_colors[1]
        app.action_theme("light")
        await pilot.pause()
        assert made["parse"]
        # The other views are of the new theme too, those that are there and those to come.
        for key in ("1", "2", "3"):
            await press(pilot, key)
            assert app.screen.background_colors[1] not in (ground, None)

    drive(cluster(), script, on_first_paint=lambda: counts.append(dict(made)))
    # Sheets are read before the screen and, with those of its panes, after it.
    (first,) = counts
    assert first["parse"] <= 2
    assert first["feed"] <= 3
    assert first["render_full_update"] <= 1


def test_an_unchanged_picture_is_not_painted_again() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        overview = app.screen
        assert isinstance(overview, Overview)
        panes = [*overview.query(LinePane), *overview.query(ListPane)]
        assert len(panes) == 10  # header, footer and what is between them
        for pane in panes:
            pane._dirty_regions.clear()
        overview.feed(app.watcher.scene)
        assert not any(pane._dirty_regions for pane in panes)

    drive(cluster(), script, size=(160, 45))


def test_only_the_screen_on_top_is_fed() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        overview = app.screen
        assert isinstance(overview, Overview)
        await pilot.press("?")
        await pilot.pause()
        fed: list[int] = []
        overview.feed = lambda scene: fed.append(1)  # type: ignore[method-assign]
        app.refresh_scene(force=True)
        assert not fed

    drive(two_ranks(), script)


def test_ten_thousand_ranks() -> None:
    ranks = [rank_view(i, node=f"n{i // 8}", seconds=1, workers=0) for i in range(10_000)]

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        assert "of 10,000" in screen_text(app)
        await pilot.press("tab", "G")
        await pilot.pause()
        assert "-10,000 of 10,000" in screen_text(app)
        for key in ("2", "enter", "h", "3"):
            await pilot.press(key)
            screen_text(app)

    drive(view([run_view(ranks)]), script, size=(160, 45), diagnose=found(few_workers()))


def test_resizing_while_it_is_drawn() -> None:
    session = FakeSession(cluster())

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        sizes = [(80, 24), (20, 5), (300, 100), (1, 1), (160, 45), (61, 12), (120, 32)]
        for number in (1, 2, 3, 4):
            app.action_view(number)
            for i, size in enumerate(sizes):
                session.show(cluster(seed=i))
                resize = asyncio.ensure_future(pilot.resize_terminal(*size))
                app.refresh_scene()
                await resize
                app.refresh_scene(force=True)
                await pilot.pause(0.02)
                assert len(screen_text(app).splitlines()) == size[1]

    drive(session, script, size=(160, 45), diagnose=found(few_workers()))


def test_control_characters_never_reach_the_terminal() -> None:
    hostile = few_workers(summary="a\x1b[31mb\nc\td\x00")

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert "a?[31mb?c?d?" in text
        assert "\x1b" not in text

    drive(two_ranks(), script, diagnose=found(hostile))


def test_closed_pages_leave_nothing_behind() -> None:
    kept: list[weakref.ref[object]] = []

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        for _ in range(3):
            for keys in (("enter",), ("e",), ("question_mark",), ("h",), ("o",)):
                await pilot.press(*keys)
                await pilot.pause()
                assert len(app.screen_stack) == 2
                for pane in app.screen.walk_children(Widget):
                    kept.append(weakref.ref(pane._styles_cache))
                await pilot.press("escape")
                await pilot.pause()
                assert len(app.screen_stack) == 1
        del pane
        gc.collect()
        assert len(kept) > 40
        # The page that was closed last may still be in the hands of a message.
        assert sum(item() is not None for item in kept) <= 4

    drive(cluster(), script, diagnose=found(few_workers()))


def test_t_on_a_hang_asks_the_rank_that_it_waits_for() -> None:
    stacks = (RankStack(1, ("train.py:7 in step",)), RankStack(0, ("c10d.py:5 in wait",)))
    hang = few_workers(kind="hang", summary="it stands", stacks=stacks)

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        await pilot.pause()
        text = screen_text(app)
        assert "t stacks now" in text
        assert text.index("train.py:7 in step") < text.index("c10d.py:5 in wait")
        await pilot.press("t")
        await pilot.pause()
        assert "Stacks of rank 1" in screen_text(app)

    drive(two_ranks(), script, diagnose=found(hang))
