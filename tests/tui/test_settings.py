"""A person's keys and other settings: what is wrong with them, and a terminal without room."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot
from textual.screen import Screen

from gpuwatch.tui import GpuwatchApp
from gpuwatch.tui.config import Config, read_config
from gpuwatch.tui.keymap import ACTIONS, PLACES, conflicts
from gpuwatch.tui.render.states import too_small_lines
from gpuwatch.tui.render.text import width_of
from gpuwatch.tui.screens.base import FedScreen
from gpuwatch.tui.screens.output import LeaveScreen
from gpuwatch.tui.screens.overview import Overview
from tests.tui.fakes import cluster, two_ranks
from tests.tui.snapshots import text_of
from tests.tui.test_app import drive, press, screen_text
from tests.tui.test_keys import FOUND
from tests.tui.test_output import FakeJob
from tests.tui.test_states import widgets
from tests.tui.test_whole import words_of

# Keys


def test_a_digit_is_a_key() -> None:
    config = read_config('[keys]\nview-1 = "0"\nview-2 = "ctrl+2, 9"\n')
    assert config == Config("", None, {"view-1": "0", "view-2": "ctrl+2,9"})

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, "9")
        assert app.screen.id == "ranks-view"
        await press(pilot, "0")
        assert isinstance(app.screen, Overview)
        await press(pilot, "2")
        assert isinstance(app.screen, Overview)

    drive(two_ranks(), script, config=Config(theme="dark", ascii=False, keys=config.keys))


@pytest.mark.parametrize(
    ("text", "key", "actions"),
    [
        ("pause = 'q'", "q", ["pause", "quit"]),
        ("view-1 = '2'", "2", ["view-1", "view-2"]),
        ("sort = 'f'\nfilter = 'f'", "f", ["sort", "filter"]),
        ("filter = '?'", "?", ["filter", "help"]),
        ("filter = 'question_mark'", "?", ["filter", "help"]),
        ("write = 'x, W'", "x", ["write", "snooze"]),
        ("detach = 's'", "s", ["detach", "stop"]),
    ],
)
def test_two_actions_on_one_key_are_one_sentence(text: str, key: str, actions: list[str]) -> None:
    config = read_config(f"[keys]\n{text}\n")
    told = f"config.toml: {key} is the key of {' and of '.join(actions)}: give each its own"
    assert config.problems == (told,)


@pytest.mark.parametrize(
    "text",
    [
        # Not on the same screen, or made to share a key.
        "stop = 'x'",
        "fetch = 'v'",
        "search = 'f'\nfilter = 'f'",
        "choose = 'O'\nruns = 'O'",
        "pause = 'P, space'",
        "quit = 'Q'\nprofile = 'q'",
    ],
)
def test_keys_that_do_not_meet_are_nobodys_business(text: str) -> None:
    assert read_config(f"[keys]\n{text}\n").problems == ()


def test_no_action_is_in_conflict_as_it_comes() -> None:
    assert conflicts({name: action.keys for name, action in ACTIONS.items()}) == []


def test_actions_are_where_screens_have_them() -> None:
    placed = {name for names in PLACES.values() for name in names}
    assert placed <= ACTIONS.keys()

    def local(kind: type[Screen[None]]) -> set[str]:
        own = {binding.id for binding in vars(kind).get("BINDINGS", ()) if binding.id}
        return {str(name) for name in own}

    found = [names for kind in widgets(FedScreen) if (names := local(kind))]
    assert len(found) > 10
    for names in found:
        # All of a screen's own keys are in one place, so that any two of them meet.
        of_app = names & {"memory", "profile", "knobs", "heat"}
        assert any(names - of_app <= set(place) for place in PLACES.values()), names


# What is wrong is said once

PROBLEM = "config.toml: no action 'pasue'; did you mean pause?"
OTHER = "config.toml: no theme 'lihgt'; did you mean light?"


@pytest.mark.parametrize("size", [(80, 24), (160, 45)], ids=str)
def test_what_is_wrong_with_settings_does_not_hide_the_verdict(size: tuple[int, int]) -> None:
    config = Config(theme="dark", ascii=False, problems=(PROBLEM, OTHER))

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert "step 235 ms" in text.splitlines()[1]
        assert PROBLEM in words_of(text)
        assert "e shows 1 more" in words_of(text)
        text = await press(pilot, "j")
        assert "pasue" not in text
        for key in ("e", "question_mark"):
            text = words_of(await press(pilot, key))
            assert f"▲ {PROBLEM}" in text
            assert f"▲ {OTHER}" in text
            await press(pilot, "escape")
        text = await press(pilot, "1")
        assert "pasue" not in text

    drive(cluster(), script, size=size, diagnose=FOUND, config=config)


# No room


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ((59, 24), "gpuwatch: 59x24 is too small, it needs 60x12. q quits"),
        ((80, 11), "gpuwatch: 80x11 is too small, it needs 60x12. q quits"),
        ((20, 5), "gpuwatch: 20x5 is too small, it needs 60x12. q quits"),
        ((20, 2), "gpuwatch needs 60x12. q quits"),
        ((24, 1), "needs 60x12, q quits"),
        ((12, 1), "needs 60x12"),
        ((6, 2), "needs 60x12"),
        ((6, 1), "60x12"),
    ],
)
def test_the_notice_says_what_is_true_in_the_lines_there_are(
    size: tuple[int, int], words: str
) -> None:
    lines = too_small_lines(*size)
    assert words_of(" ".join(text_of(line) for line in lines)) == words
    assert {width_of(line) for line in lines} == {size[0]}
    assert len(lines) <= size[1]

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        assert words_of(screen_text(app)) == words
        await pilot.resize_terminal(60, 12)
        await pilot.pause()
        assert "q quit" in screen_text(app)

    drive(two_ranks(), script, size=size)


@pytest.mark.parametrize("key", ["slash", "colon", "question_mark", "2", "e", "enter", "x"])
def test_nothing_is_opened_where_it_cannot_be_seen(key: str) -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, key)
        assert len(app.screen_stack) == 1
        assert app.current_mode == "overview"
        assert app.watcher.scene.snoozed == frozenset()
        await pilot.press("q")
        assert app._exit

    drive(cluster(), script, size=(20, 5), diagnose=FOUND)


@pytest.mark.parametrize("keys", [("2", "slash", "n"), ("colon", "n")], ids=str)
def test_what_is_typed_outlives_a_terminal_that_was_small(keys: tuple[str, ...]) -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, *keys)
        await pilot.resize_terminal(20, 5)
        await pilot.pause()
        text = screen_text(app)
        assert words_of(text).startswith("gpuwatch: 20x5")
        assert "/n" not in text
        assert ":n" not in text
        await press(pilot, "x")
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        text = await press(pilot, "o")
        assert "/no" in text or ":no" in text
        await pilot.resize_terminal(20, 5)
        await pilot.press("q")
        assert app._exit

    drive(cluster(), script, size=(80, 24), diagnose=FOUND)


def test_q_in_a_small_terminal_asks_about_a_command_when_there_is_room() -> None:
    job = FakeJob()

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, "q", "s", "d")
        assert isinstance(app.screen, LeaveScreen)
        assert job.stops == 0
        assert not app._exit
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert "The command still runs" in screen_text(app)
        await press(pilot, "s")
        assert job.stops == 1

    drive(two_ranks(), script, size=(20, 5), job=job)
