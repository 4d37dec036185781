"""Every view and every page behind it, for a run that lives, is silent, is gone, or is replayed."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace

import pytest
from textual.pilot import Pilot
from textual.widget import Widget

import gpuwatch.tui
from gpuwatch.store.views import Event, View
from gpuwatch.tui import GpuwatchApp
from gpuwatch.tui.widgets.pane import LinePane, ListPane
from tests.tui.fakes import (
    NOW_S,
    FakeSession,
    cluster,
    few_workers,
    found,
    peer_wait,
    records,
)
from tests.tui.sides import FakeShelf
from tests.tui.snapshots import check_text
from tests.tui.test_app import drive
from tests.tui.test_compare import until
from tests.tui.test_keys import Recording, press
from tests.tui.test_output import FakeJob
from tests.tui.test_pictures import SIZE_IDS, SIZES

FOUND = found(
    few_workers(ranks=tuple(range(24, 32)), nodes=("node3",)), peer_wait(ranks=tuple(range(32)))
)


@functools.cache
def of_state(state: str, slow_node: int | None = 3) -> View:
    """The cluster, its ranks with steps in their windows, in that state."""
    picture = cluster(slow_node=slow_node)
    run = picture.runs[0]
    ranks = []
    for rank in run.ranks:
        window = records(rank.phases_ms, first=12_416)
        item = replace(rank, window=window, last=window[-1])
        if state == "silent":
            reason = "its process sleeps, and its telemetry thread with it: is the GIL held?"
            item = replace(item, state="silent", state_reason=reason, age_s=14.0)
        elif state == "gone":
            item = replace(item, state="gone", state_reason="exit code -9 (killed)", age_s=75.0)
        ranks.append(item)
    age_s = {"silent": 14.0, "gone": 75.0}.get(state, 0.1)
    # As the store has it: a run whose ranks are all dead is over.
    word = "ended" if state == "gone" else run.state
    run = replace(run, ranks=tuple(ranks), age_s=age_s, state=word)
    picture = replace(picture, runs=(run,))
    if state in ("silent", "gone"):
        told = Event(NOW_S - age_s, f"32 ranks {state}", "warning", run.run)
        picture = replace(picture, events=(*picture.events, told))
    return picture


def session_of(state: str) -> FakeSession:
    picture = of_state(state)
    if state == "replayed":
        session = Recording(replace(picture, link="replay"))
        session.paused = True
        return session
    return FakeSession(picture)


SCREENS = {
    "overview": ("1",),
    "ranks": ("2",),
    "a rank": ("2", "enter"),
    "gpus": ("3",),
    "a gpu": ("3", "enter"),
    "findings": ("4",),
    "a finding": ("4", "enter"),
    "compare": ("5",),
    "choose": ("5", "o"),
    "heat": ("1", "h"),
    "events": ("1", "e"),
    "memory": ("1", "M"),
    "profile": ("1", "p"),
    "knobs": ("1", "K"),
}
"""How each view and each page behind it is opened."""

WORDS = {
    "live": "LIVE",
    "silent": "SILENT 14 s",
    "gone": "GONE",
    "replayed": "REPLAY",
}


@pytest.mark.parametrize(("width", "height"), SIZES, ids=SIZE_IDS)
@pytest.mark.parametrize("state", WORDS)
def test_every_screen_of_a_run_in_every_state(state: str, width: int, height: int) -> None:
    shown: list[str] = []

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        # No clock: ages are what the view says.
        app.watcher._clock = lambda: app.watcher._taken_at
        app.refresh_scene(force=True)
        await press(pilot, "5", "o", "j", "enter", "escape")
        until(lambda: app.watcher.sides.rounds == 1)
        for name, keys in SCREENS.items():
            text = await press(pilot, *keys)
            assert WORDS[state] in text.splitlines()[0], (name, text)
            assert "q quit" in text.splitlines()[-1], (name, text)
            shown.extend([f"--- {name}", text])

    before = of_state("live", slow_node=None).runs[0]
    recordings = FakeShelf({"before.gpuwatch": before})
    size = (width, height)
    drive(session_of(state), script, size=size, diagnose=FOUND, recordings=recordings)
    check_text(f"state-{state}-{width}", "\n".join(shown))


# Every widget under NO_COLOR

PANES = {
    "HeatPane": ("h",),
    "FindingsPane": ("4",),
    "RanksPane": ("2",),
    "GpusPane": ("3",),
    "PagePane": ("4", "enter"),
    "PromptPane": ("2", "slash"),
    "OutputPane": ("l", "slash", "f", "i", "n", "d", "enter"),
    "_RunsPane": ("o",),
    "_KnobsPane": ("K",),
    "_SidesPane": ("5", "o"),
    "_CommandsPane": ("colon",),
    "LinePane": ("4",),
}
"""A screen on which each kind of pane stands."""

SIGNS = {
    "HeatPane": "▇",
    "FindingsPane": "✖",
    "RanksPane": "▌",
    "GpusPane": "▌",
    "PagePane": "WHY",
    "PromptPane": "/",
    "OutputPane": "▌find me",
    "_RunsPane": "▌",
    "_KnobsPane": "▌",
    "_SidesPane": "▌",
    "_CommandsPane": "▌",
    "LinePane": "◉",
}
"""What must be there without colour: the glyph or word that says what colour would repeat."""


def widgets(base: type[Widget]) -> Iterator[type[Widget]]:
    for kind in base.__subclasses__():
        yield kind
        yield from widgets(kind)


def test_every_widget_of_ours_is_tried_without_colour() -> None:
    for module in pkgutil.walk_packages(gpuwatch.tui.__path__, "gpuwatch.tui."):
        importlib.import_module(module.name)
    ours = {kind.__name__ for base in (LinePane, ListPane) for kind in widgets(base)}
    ours = {name for name in ours if not name.startswith("Fake")}
    assert ours | {"LinePane"} == set(PANES) == set(SIGNS)
    drawn = {
        kind
        for kind in widgets(Widget)
        if kind.__module__.startswith("gpuwatch.tui.") and "render_line" in vars(kind)
    }
    # Every other widget of ours draws by one of these.
    assert drawn == {LinePane, ListPane}


def greys(app: GpuwatchApp, pane: Widget) -> tuple[str, bool]:
    """Return the text of a pane as it is painted, and whether there is no colour in it."""
    region = pane.region
    text, grey = [], True
    for strip in app.screen._compositor.render_strips()[region.y : region.bottom]:
        for segment in strip.crop(region.x, region.right):
            assert segment.style is not None
            text.append(segment.text)
            for color in (segment.style.color, segment.style.bgcolor):
                triplet = color.triplet if color is not None else None
                grey = grey and (triplet is None or len(set(triplet)) == 1)
    return "".join(text), grey


@pytest.mark.parametrize("name", PANES)
@pytest.mark.parametrize("plain", [True, False], ids=["NO_COLOR", "colour"])
def test_a_widget_without_colour(name: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if plain:
        monkeypatch.setenv("NO_COLOR", "1")

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, *PANES[name])
        found_panes = [
            pane
            for pane in app.screen.query("*")
            if type(pane).__name__ == name and pane.display and pane.size.height
        ]
        assert found_panes
        painted = [greys(app, pane) for pane in found_panes]
        assert any(SIGNS[name] in text for text, _ in painted), painted
        # With colour the same panes are not grey: the test would see it.
        assert all(grey for _, grey in painted) is plain

    job = FakeJob()
    job.output.feed(b"find me\n")
    drive(of_state("live"), script, size=(120, 36), diagnose=FOUND, job=job)
