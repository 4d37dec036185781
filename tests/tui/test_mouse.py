"""The mouse, on the smallest screen too: views, commands, ranks, columns, the axis of time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.events import MouseDown, MouseUp
from textual.pilot import Pilot

from gpuwatch.store.views import View
from gpuwatch.tui import GpuwatchApp
from gpuwatch.tui.keymap import VIEWS
from gpuwatch.tui.render.charts import Series, moment_under, time_charts, window_of
from gpuwatch.tui.render.heat import heat_row, heat_row_grid, heat_values, rank_under
from gpuwatch.tui.render.text import beside, fit, width_of
from gpuwatch.tui.render.timeline import second_under, timeline_lines, timeline_row
from gpuwatch.tui.scene import GPU_SORTS, RANK_SORTS
from gpuwatch.tui.screens.help import HelpScreen
from gpuwatch.tui.screens.palette import PaletteScreen
from gpuwatch.tui.widgets.heat import HeatPane
from tests.tui.fakes import NOW_S, FakeSession, cluster, rank_view, run_view
from tests.tui.snapshots import text_of
from tests.tui.test_app import drive, press, screen_text
from tests.tui.test_keys import FOUND, footer, moving
from tests.tui.test_pictures import cluster_scene

SMALL = (80, 24)
SIZES = [SMALL, (120, 32), (160, 45)]


async def click(pilot: Pilot[None], x: int, y: int, times: int = 1) -> str:
    """Click a cell of the screen and return what stands there then."""
    await pilot.click(offset=(x, y), times=times)
    await pilot.pause()
    app = pilot.app
    assert isinstance(app, GpuwatchApp)
    while app._batch_count or app.screen._layout_required:
        await pilot.pause(0.01)
    return screen_text(app)


def place_of(text: str, words: str) -> tuple[int, int]:
    """Return the first cell of words on a screen; what stands before them is one cell wide."""
    for y, row in enumerate(text.splitlines()):
        if words in row:
            return row.index(words), y
    raise AssertionError(f"{words}\n{text}")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_view_and_all_commands_are_a_click_away(size: tuple[int, int]) -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        bottom = size[1] - 1
        for number, name in [*enumerate(VIEWS, 1), (1, VIEWS[0])]:
            # The first cells are those of the views, whatever else may hold a digit.
            text = await click(pilot, footer(text).index(str(number)), bottom)
            assert app.screen.id in (name, f"{name}-view")
            for key in (": c", "? help", "q quit"):
                assert key in footer(text), (key, text)
        await click(pilot, footer(text).index("? help"), bottom)
        assert isinstance(app.screen, HelpScreen)
        text = await click(pilot, footer(screen_text(app)).index("esc back"), bottom)
        await click(pilot, footer(text).index(": c"), bottom)
        assert isinstance(app.screen, PaletteScreen)
        # What is not in the footer of a small screen is done from here.
        x, y = place_of(screen_text(app), "sort by the next thing")
        text = await click(pilot, x, y, times=2)
        assert "sorted by rank" in text

    drive(cluster(), script, size=size, diagnose=FOUND)


@pytest.mark.parametrize(
    "keys",
    [
        *(("1",), ("1", "tab"), ("2",), ("3",), ("4",), ("5",), ("5", "o"), ("2", "enter")),
        *(("4", "enter"), ("h",), ("e",), ("o",), ("K",), ("p",), ("colon",), ("question_mark",)),
    ],
    ids=str,
)
def test_a_click_beside_the_keys_does_nothing(keys: tuple[str, ...]) -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, *keys)
        before, focused, screen = text.splitlines()[1:], app.focused, app.screen
        foot = footer(text)
        gaps = [0, len(foot) - 1, *(i for i in range(len(foot) - 1) if foot[i : i + 2] == "  ")]
        for x in gaps[:6]:
            text = await click(pilot, x, 23)
            assert (app.focused, app.screen) == (focused, screen), x
            assert text.splitlines()[1:] == before

    drive(cluster(), script, size=SMALL, diagnose=FOUND)


def test_a_click_on_a_message_is_not_one_on_the_key_below_it() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "1")
        x, y = footer(text).index("? help"), SMALL[1] - 1
        app.tell("a message " * 7)
        opened = []
        for _ in range(2):
            # As a terminal sends them; the pilot's own clicks go to the screen.
            for kind in (MouseDown, MouseUp):
                app.post_message(kind(None, x, y, 0, 0, 1, False, False, False))
                await pilot.pause()
            await pilot.pause()
            opened.append(isinstance(app.screen, HelpScreen))
        assert opened == [False, True]

    drive(cluster(), script, size=SMALL, diagnose=FOUND)


@pytest.mark.parametrize("key", ["1", "2"])
def test_the_heat_map_in_one_line_selects_ranks(key: str) -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, key)
        y = next(i for i, row in enumerate(text.splitlines()) if row.startswith(" own ms  ▁"))
        row = text.splitlines()[y]
        assert isinstance(app.screen.query_one("#heat"), HeatPane)
        glyphs = [i for i, char in enumerate(row) if char in "▁▂▃▄▅▆▇█"]
        assert len(glyphs) == 32
        for rank in (0, 7, 8, 31):
            await click(pilot, glyphs[rank], y)
            assert app.watcher.scene.rank is not None
            assert app.watcher.scene.rank.rank == rank
        await click(pilot, glyphs[7] + 1, y)  # the gap
        assert app.watcher.scene.rank.rank == 31

    drive(cluster(), script, size=SMALL, diagnose=FOUND)


@given(st.integers(1, 300), st.integers(60, 160))
def test_every_rank_has_its_glyph_in_the_line(number: int, width: int) -> None:
    run = run_view([rank_view(i, seconds=0) for i in range(number)])
    row, grid = text_of(heat_row(run, width)), heat_row_grid(run, width)
    assert grid is not None
    values = heat_values(run, cluster_scene().metric, {})
    found = [rank_under(grid, values, x, 0) for x in range(width)]
    glyphs = [x for x, char in enumerate(row) if char in "▁▂▃▄▅▆▇█"]
    assert [x for x, rank in enumerate(found) if rank is not None] == glyphs
    members = [list(range(first, last + 1)) for _, first, last in grid.rows[0][1]]
    assert sorted(i for part in members for i in part) == list(range(number))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_heads_of_columns_sort(size: tuple[int, int]) -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        lists = (
            ("2", "ranks", {"data": "data_wait", "rank": "rank", "comm": "comm", "own": "own"}),
            ("1", "ranks", {"comm": "comm", "own": "own"}),
            ("3", "gpus", {" W": "power", "util": "gpu_util", "mem": "memory_used"}),
        )
        for key, name, heads in lists:
            text = await press(pilot, key)
            above = " own ms  ▚" if name == "ranks" else " device "
            y = next(i for i, row in enumerate(text.splitlines()) if above in row)
            for words, sort in heads.items():
                head = screen_text(app).splitlines()[y]
                await click(pilot, head.index(words) + 1, y)
                assert app.watcher.scene.sorts[name] == sort, words
            # A head that names no sort does nothing.
            before = app.watcher.scene.sorts[name]
            words = "state" if name == "ranks" else "limits"
            await click(pilot, head.index(words) + 1, y)
            assert app.watcher.scene.sorts[name] == before
        text = await press(pilot, "4")
        x, y = place_of(text, "by cost")
        text = await click(pilot, x + 1, y)
        assert "by severity" in text.splitlines()[y]

    drive(cluster(), script, size=size, diagnose=FOUND)
    assert {"data_wait", "rank", "comm", "own"} <= set(RANK_SORTS)
    assert {"power", "gpu_util", "memory_used"} <= set(GPU_SORTS)


def test_a_cell_of_a_curve_is_a_moment() -> None:
    scene = cluster_scene()
    end_s, span_s = window_of(scene)
    points = [(end_s - span_s + i, float(i)) for i in range(int(span_s) + 1)]
    series = [Series("a", points, "1"), Series("b", [], "", reason="no")]
    for width in (60, 80, 120):
        lines = time_charts(scene, series, width, 6)
        left = [fit([("学", "text")], 30)] * len(lines)
        for shift, wide in ((0, lines), (32, beside(left, lines, 30, width))):
            assert {width_of(line) for line in wide} == {width + shift}
            for line in (wide[0], wide[-1]):
                found = {x: moment_under(line, scene, x) for x in range(width + shift)}
                known = {x: at_s for x, at_s in found.items() if at_s is not None}
                assert list(known) == list(range(shift + 21, shift + width - 10))
                moments = list(known.values())
                assert moments == sorted(moments)
                assert moments[0] == end_s - span_s
                assert moments[-1] == pytest.approx(end_s)
            unknown = next(line for line in wide if "n/a" in text_of(line))
            assert moment_under(unknown, scene, shift + 40) is None


@pytest.mark.parametrize("seconds", [3, 50, 120, 400])
def test_a_cell_of_the_sparkline_is_a_second(seconds: int) -> None:
    rank = rank_view(seconds=seconds)
    scene = cluster_scene()
    first = rank.timeline[0].second_s
    for row in (True, False):
        line = timeline_row(rank, scene, 80) if row else timeline_lines(rank, scene, 80, 2)[1]
        drawn = [x for x, char in enumerate(text_of(line)) if char in "▁▂▃▄▅▆▇█"]
        found = [second_under(rank, 80, x, row=row) for x in range(80)]
        assert [x for x, at_s in enumerate(found) if at_s is not None] == drawn
        known = [at_s for at_s in found if at_s is not None]
        assert known == sorted(known)
        assert known[-1] == NOW_S
        if seconds <= 120:
            assert first < known[0] <= first + 8
    assert second_under(None, 80, 40, row=True) is None


def minute() -> list[View]:
    """Return a picture for each of the last 60 seconds."""
    return [replace(item, at_s=item.at_s - 59.0) for item in moving(60)]


async def watch(app: GpuwatchApp, session: FakeSession) -> None:
    for picture in minute():
        session.show(picture)
        app.watcher._kept_at = -10.0
        app.refresh_scene()


@pytest.mark.parametrize("size", [SMALL, (120, 32)], ids=str)
def test_a_click_on_the_sparkline_goes_to_that_second(size: tuple[int, int]) -> None:
    session = FakeSession(minute()[0])

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await watch(app, session)
        rows = (await press(pilot, "1")).splitlines()
        y = next(i for i, row in enumerate(rows) if row.startswith((" step  ", " Step time")))
        y += rows[y].startswith(" Step time")
        glyphs = [i for i, char in enumerate(rows[y]) if char in "▁▂▃▄▅▆▇█"]
        for cells in (10, 20):
            text = await click(pilot, glyphs[-1 - cells], y)
            behind_s = app.watcher.scene.behind_s
            assert f"PAUSED -{behind_s:.0f}" in text.splitlines()[0]
            # A cell is a second or three, as the width has it.
            assert cells <= behind_s <= 3 * cells
        # Beside it nothing happens; where nothing is kept it is said.
        await click(pilot, glyphs[0] - 3, y)
        assert app.watcher.scene.behind_s == behind_s
        text = await click(pilot, glyphs[0], y)
        assert "nothing is kept of that moment" in text

    drive(session, script, size=size)


PAGES = [
    ((160, 45), ("1",)),
    ((160, 45), ("2",)),
    ((160, 45), ("2", "enter")),
    ((120, 45), ("2", "enter")),
    ((160, 45), ("3",)),
    ((80, 24), ("3", "enter")),
]


@pytest.mark.parametrize(("size", "keys"), PAGES, ids=str)
def test_a_click_on_a_curve_goes_to_that_moment(
    size: tuple[int, int], keys: tuple[str, ...]
) -> None:
    session = FakeSession(minute()[0])

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await watch(app, session)
        text = await press(pilot, *keys)
        screen = app.screen
        edge, y = place_of(text, "┤")
        track = size[0] - edge - 11
        for behind_s in (20.0, 40.0):
            x = edge + 1 + round((1 - behind_s / app.watcher.scene.span_s) * (track - 1))
            text = await click(pilot, x, y)
            assert app.watcher.scene.behind_s == pytest.approx(behind_s, abs=2.0)
            assert "PAUSED -" in text.splitlines()[0]
            assert app.screen is screen
        await click(pilot, edge - 3, y)
        assert app.watcher.scene.behind_s == pytest.approx(40.0, abs=2.0)
        text = await click(pilot, edge + 2, y)
        assert "nothing is kept of that moment" in text

    drive(session, script, size=size)
