"""What reaches the terminal: changed cells alone, the same as Textual itself would paint."""

from dataclasses import replace
from typing import Any

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual._compositor import ChopsUpdate, CompositorUpdate
from textual.geometry import Region
from textual.pilot import Pilot
from textual.strip import Strip

from gpuwatch.tui import GpuwatchApp
from gpuwatch.tui.config import Config
from gpuwatch.tui.render.text import Line, cut, fit, width_of
from gpuwatch.tui.widgets.paint import SpanCompositor, SpanUpdate
from gpuwatch.tui.widgets.pane import LinePane, changed_spans
from tests.tui.fakes import FakeSession, cluster, few_workers, found, peer_wait
from tests.tui.sides import FakeShelf
from tests.tui.test_app import drive, press

SYSTEMS = ("truecolor", "256", "standard")
LINES = st.lists(
    st.tuples(st.text("ab▇学 ", max_size=6), st.sampled_from(["text", "dim"])), max_size=6
)
COLOURS = st.sampled_from([None, "default", "#ff0000", "#00ff40", "blue", "bright_yellow"])
STYLES = st.builds(
    Style,
    color=COLOURS,
    bgcolor=COLOURS,
    bold=st.sampled_from([None, True, False]),
    dim=st.sampled_from([None, True]),
    italic=st.sampled_from([None, True]),
    underline=st.sampled_from([None, True]),
    reverse=st.sampled_from([None, True]),
)


def console_of(system: str) -> Console:
    return Console(color_system=system, force_terminal=True)  # type: ignore[arg-type]


class Glass:
    """A terminal as it looks after what was written to it: each cell with its style."""

    def __init__(self, width: int, height: int) -> None:
        self._screen = pyte.Screen(width, height)
        self._stream = pyte.Stream(self._screen)

    def write(self, text: str) -> None:
        self._stream.feed(text)

    def cells(self) -> dict[tuple[int, int], Any]:
        """Return what is at (row, column)."""
        rows, columns = range(self._screen.lines), range(self._screen.columns)
        return {(y, x): self._screen.buffer[y][x] for y in rows for x in columns}


def differing(one: Glass, other: Glass) -> list[tuple[tuple[int, int], Any, Any]]:
    """Return (place, cell of one, cell of the other) of what is not alike."""
    cells, others = one.cells(), other.cells()
    return [
        (place, cells[place], others[place]) for place in cells if cells[place] != others[place]
    ]


@given(LINES, st.integers(0, 30), st.integers(0, 30))
def test_a_cut_is_that_part_of_the_line(line: Line, x1: int, x2: int) -> None:
    width = width_of(line)
    x1, x2 = min(x1, width), min(x2, width)
    strip = Strip(
        [Segment(text, Style.parse("dim" if name == "dim" else "bold")) for text, name in line]
    )
    expected = [
        (char, "dim" if segment.style is not None and segment.style.dim else "text")
        for segment in strip.crop(x1, x2)
        for char in segment.text
    ]
    assert [(char, name) for text, name in cut(line, x1, x2) for char in text] == expected
    assert width_of(cut(line, x1, x2)) == max(0, x2 - x1)


def cells_of(line: Line) -> list[tuple[str, str]]:
    """Return one entry a cell; the second cell of a wide character is empty."""
    return [
        pair
        for text, style in line
        for char in text
        for pair in [(char, style), *[("", style)] * (width_of([(char, style)]) - 1)]
    ]


@given(LINES, LINES)
def test_every_cell_that_differs_is_in_a_span(old: Line, new: Line) -> None:
    width = max(width_of(old), width_of(new))
    one, other = fit(list(old), width), fit(list(new), width)
    spans = changed_spans(one, other, width)
    inside = {x for first, last in spans for x in range(first, last)}
    before, after = cells_of(one), cells_of(other)
    assert {x for x in range(width) if before[x] != after[x]} <= inside <= set(range(width))
    assert spans == sorted(spans)
    assert all(first < last for first, last in spans)


def test_far_changes_are_painted_apart_and_near_ones_together() -> None:
    old: Line = [("1" + " " * 20 + "2" + " " * 5 + "3", "text"), ("▇" * 12, "bar.comm")]
    new: Line = [("4" + " " * 20 + "5" + " " * 5 + "6", "text"), ("▇" * 12, "bar.h2d")]
    assert changed_spans(old, new, 40) == [(0, 1), (21, 40)]
    assert changed_spans(old, old, 40) == []
    # Other pieces, the same cells.
    assert changed_spans(old, [("1", "text"), (old[0][0][1:], "text"), old[1]], 40) == []
    # Where a character has two cells they are not counted one by one.
    assert changed_spans([("学a", "text")], [("学b", "text")], 3) == [(2, 3)]
    assert changed_spans([("ab", "text")], [("abc", "text")], 3) == [(0, 3)]


@pytest.mark.parametrize("system", SYSTEMS)
@given(
    spans=st.lists(
        st.tuples(
            st.integers(0, 20),
            st.integers(0, 5),
            st.lists(st.tuples(st.text("xy▇", min_size=1, max_size=4), STYLES), max_size=5),
        ),
        max_size=6,
    )
)
def test_fewer_codes_paint_the_same(
    system: str, spans: list[tuple[int, int, list[tuple[str, Style]]]]
) -> None:
    console = console_of(system)
    ours, theirs = Glass(48, 6), Glass(48, 6)
    written = SpanUpdate(spans).render_segments(console)
    ours.write(written)
    for x, y, pieces in spans:
        strip = Strip([Segment(text, style) for text, style in pieces])
        theirs.write(f"\x1b[{y + 1};{x + 1}H{strip.render(console)}")
    assert differing(ours, theirs) == []
    # What is written next begins without a style, as Textual takes for granted.
    for glass in (ours, theirs):
        glass.write("\x1b[6;1Hz")
    assert differing(ours, theirs) == []


WAYS = {
    "overview": (),
    "ranks": ("2", "j", "s", "m"),
    "rank": ("2", "enter", "]"),
    "heat": ("h", "m"),
    "gpus": ("3", "j", "enter"),
    "findings": ("4", "j", "enter"),
    "compare": ("5",),
    "filter": ("2", "/", "1", "2"),
    "palette": (":", "r", "a"),
    "help": ("?", "j"),
    "ascii": ("2", "k"),
}


@pytest.fixture(params=["colour", "NO_COLOR", "ansi"])
def theme(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How it is painted; NO_COLOR and sixteen colours go through filters of Textual's."""
    if request.param == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    return "ansi" if request.param == "ansi" else "dark"


@pytest.mark.parametrize("size", [(160, 45), (80, 24)], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_changes_leave_what_a_whole_painting_would(
    name: str, size: tuple[int, int], theme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = console_of("truecolor" if theme == "dark" else "standard")
    glass = Glass(*size)
    partial: list[int] = []

    def display(app: GpuwatchApp, _: object, update: object) -> None:
        if isinstance(update, CompositorUpdate) and not app._batch_count:
            glass.write(update.render_segments(console))
            partial.append(isinstance(update, SpanUpdate))
            assert not isinstance(update, ChopsUpdate)

    monkeypatch.setattr(GpuwatchApp, "_display", display)
    pictures = [cluster(slow_node=i % 3, seed=i) for i in range(4)]
    session = FakeSession(pictures[0])

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        for i, key in enumerate((*WAYS[name], *[None] * 4)):
            shown = pictures[i % len(pictures)]
            session.show(replace(shown, at_s=shown.at_s + i))
            if key is None:
                app.refresh_scene(force=True)
            else:
                await press(pilot, key)
            await pilot.pause()
        while app.screen._dirty_widgets:
            await pilot.pause(0.01)
        assert any(partial)
        whole = Glass(*size)
        whole.write(app.screen._compositor.render_full_update().render_segments(console))
        assert differing(glass, whole) == []

    drive(
        session,
        script,
        size=size,
        diagnose=found(few_workers(), peer_wait()),
        config=Config(theme=theme, ascii=name == "ascii"),
        recordings=FakeShelf({"before.gpuwatch": pictures[0].runs[0]}),
    )


def test_what_is_in_front_has_its_cells() -> None:
    """The line that is typed in lies over the footer, the screen under all of it."""

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, "2", "/")
        compositor = app.screen._compositor
        assert isinstance(compositor, SpanCompositor)
        compositor._dirty_regions = {Region(0, 0, 120, 36)}
        update = compositor.render_partial_update()
        assert update is not None
        console = console_of("truecolor")
        ours, theirs = Glass(120, 36), Glass(120, 36)
        ours.write(update.render_segments(console))
        theirs.write(compositor.render_full_update().render_segments(console))
        assert differing(ours, theirs) == []

    drive(cluster(), script)


def test_one_digit_costs_one_cell() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        pane = app.screen.query_one("#header", LinePane)
        lines = [fit(list(line), 120) for line in pane.lines]
        text = "".join(text for text, _ in lines[0])
        at = text.index("0 lost")
        pane.show([[(text[:at], "text"), ("7", "text"), (text[at + 1 :], "text")], *lines[1:]])
        app.screen._compositor._dirty_regions.clear()
        app.screen._compositor.update_widgets({pane})
        pane.show([[(text[:at], "text"), ("8", "text"), (text[at + 1 :], "text")], *lines[1:]])
        app.screen._compositor._dirty_regions.clear()
        app.screen._compositor.update_widgets({pane})
        update = app.screen._compositor.render_partial_update()
        assert isinstance(update, SpanUpdate)
        assert [(x, y, [text for text, _ in pieces]) for x, y, pieces in update.spans] == [
            (at, 0, ["8"])
        ]

    drive(cluster(), script)
