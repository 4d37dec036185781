"""The pictures, the tour that is made of them, and the figures of the soak.

`make screenshots` draws the pictures anew; look at the difference before it is committed.
"""

import asyncio
import difflib
import gzip
import html
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import PYTHON

from gpuwatch.tui.keymap import ACTIONS, label_of, pretty

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
TOUR = (ROOT / "docs" / "tour.md").read_text("utf-8")

PROSE = " ".join(re.sub(r"```.*?```", "", TOUR, flags=re.DOTALL).split())
"""The tour without its blocks of commands, on one line."""

IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
SPAN = re.compile(r"`([^`]+)`")
FIGURES: dict[str, str] = {
    "197 of 226 ms": "data 196.5 87%",
    "in 64 of 64 steps": "64 steps of 64 in the window",
    "costs 226 ms, of which 24 are CPU": "226 ms 24 ms of it CPU",
    "43.9 ms instead of 226": "step 43.9 ms",
    "up to 256": "mean of 256 of 256 steps",
    "predicted 20..28 ms, got 25 ms": "predicted 20..28 ms, got 25 ms: as predicted",
}
"""Figures of the tour, and where each of them stands on a picture."""

NO_KEYS = frozenset({"▚", "█", "▲"})
"""Glyphs of the screen that the tour explains."""


def load(name: str) -> ModuleType:
    """Import a benchmark as its own script would, and leave the path as it was."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return __import__(name)
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def screenshots() -> ModuleType:
    return load("screenshots")


@pytest.fixture(scope="module")
def pictures(screenshots: ModuleType) -> dict[str, str]:
    """The pictures as the script draws them now: each view in one size, one source in both."""
    small, large = screenshots.SIZES
    found: dict[str, str] = screenshots.draw([small])
    return found | screenshots.draw([large], ["changed", "checked"])


def text_of(screenshots: ModuleType, svg: str) -> list[str]:
    """What stands on a picture, line by line, every gap as one blank."""
    lines: dict[float, list[tuple[float, str]]] = {}
    for x, y, _, text in screenshots.drawn(svg)[0]:
        lines.setdefault(float(y), []).append((float(x), html.unescape(text)))
    rows = [" ".join(text for _, text in sorted(parts)) for _, parts in sorted(lines.items())]
    return [" ".join(row.replace("\N{NO-BREAK SPACE}", " ").split()) for row in rows]


def in_the_repository(screenshots: ModuleType, name: str) -> str:
    """A picture as it lies there."""
    svg: str = (screenshots.FOLDER / name).read_text("utf-8")
    return svg


def test_the_pictures_in_the_repository_are_drawn_by_the_script(
    screenshots: ModuleType, pictures: dict[str, str]
) -> None:
    there = {path.name for path in screenshots.FOLDER.glob("*.svg")}
    names = {f"{n}-{w}x{h}.svg" for n in screenshots.SHOTS for w, h in screenshots.SIZES}
    assert there == names >= set(pictures), "type: make screenshots"
    for name, svg in pictures.items():
        kept = in_the_repository(screenshots, name)
        texts, rects = screenshots.drawn(kept)
        assert len(texts) > 20
        assert len(rects) > 20
        changed = "\n".join(
            difflib.unified_diff(
                text_of(screenshots, kept),
                text_of(screenshots, svg),
                name,
                "now",
                lineterm="",
                n=0,
            )
        )
        assert not changed, f"type: make screenshots\n{changed}"
        same = screenshots.drawn(svg) == (texts, rects)
        assert same, f"{name} has other colours or places now; type: make screenshots"


def test_another_terminal_draws_the_same_bytes(
    screenshots: ModuleType, pictures: dict[str, str]
) -> None:
    code = (
        "import sys, screenshots\n"
        "found = screenshots.draw([(120, 32)], ['changed'])\n"
        "sys.stdout.buffer.write(found['fixed-120x32.svg'].encode())"
    )
    odd = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/nonexistent",
        "PYTHONPATH": str(BENCHMARKS),
        "PYTHONHASHSEED": "7",
        "TZ": "Asia/Tokyo",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "LANG": "C",
        "TEXTUAL_THEME": "textual-light",
    }
    done = subprocess.run(
        [PYTHON, "-c", code], env=odd, capture_output=True, timeout=60, check=True
    )
    assert done.stdout.decode() == pictures["fixed-120x32.svg"]


def test_what_is_made_up_says_so_and_what_was_measured_does_not(
    screenshots: ModuleType, pictures: dict[str, str]
) -> None:
    for name, svg in pictures.items():
        first = text_of(screenshots, svg)[0]
        source = screenshots.SHOTS[name.rsplit("-", 1)[0]].source
        assert ("SIMULATED" in first) == (source == "cluster"), first
        assert ("LIVE" if source in screenshots.LIVE else "REPLAY") in first
        assert "0 lost" in first


def test_nothing_is_fetched_and_no_place_is_named(screenshots: ModuleType) -> None:
    for path in screenshots.FOLDER.glob("*.svg"):
        svg = path.read_text("utf-8")
        assert "@font-face" not in svg
        assert "url(http" not in svg
    size = 0
    for source in screenshots.SECONDS:
        packed = (screenshots.FOLDER / f"{source}.gpuwatch.gz").read_bytes()
        size += len(packed)
        assert not re.search(rb"/(root|home|Users|tmp|mnt|opt|work)/", gzip.decompress(packed))
    assert size < 400_000


def test_the_change_in_the_recording_is_the_one_that_was_proposed(
    screenshots: ModuleType, pictures: dict[str, str]
) -> None:
    shown = {
        name: "\n".join(text_of(screenshots, pictures[f"{name}-120x32.svg"]))
        for name in ("finding", "change", "changed", "fixed")
    }
    workers = screenshots.hinted_workers("demo")
    assert f"num_workers 1 -> {workers}: predicted step" in shown["finding"]
    assert f"set num_workers 1 -> {workers} on all ranks" in shown["change"]
    assert shown["fixed"].count(f" {workers} workers cpu") == 2
    assert "resolved" in shown["fixed"]
    promise = re.search(
        rf"num_workers 1 -> {workers}: predicted (\d+)\.\.(\d+) ms, got (\d+) ms: as predicted",
        shown["changed"],
    )
    assert promise is not None
    low, high, got = map(float, promise.groups())
    assert low <= got <= high


def test_the_two_runs_that_are_compared_differ_by_what_was_proposed(
    screenshots: ModuleType, pictures: dict[str, str]
) -> None:
    workers = screenshots.hinted_workers("slow-loader")
    shown = "\n".join(text_of(screenshots, pictures["checked-120x32.svg"]))
    assert "config diff" in shown
    assert f" num_workers 1 -> {workers}" in shown


# --- documents ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_images_of_the_documents_exist(path: Path) -> None:
    for words, target in IMAGE.findall(path.read_text("utf-8")):
        assert words, f"{target} has no words for those who do not see it"
        assert "://" not in target
        assert (path.parent / target).is_file(), target


def test_the_tour_and_the_readme_show_pictures() -> None:
    assert len(IMAGE.findall(TOUR)) >= len({"overview", "findings", "finding", "fixed"})
    assert IMAGE.search((ROOT / "README.md").read_text("utf-8"))


def keys_of_the_tour() -> list[str]:
    """The keys that the tour names, in its order: spans of one character, or of one word."""
    return [
        span
        for span in SPAN.findall(PROSE)
        if re.fullmatch(r"\S|[a-z]{3,6}", span) and span not in NO_KEYS
    ]


def test_the_tour_names_keys_that_are_bound_and_shown(screenshots: ModuleType) -> None:
    bound = {key for name in ACTIONS for key in pretty(ACTIONS[name].keys).split()}
    bound |= {label_of(name, {}) for name in ACTIONS} | {"esc"}
    footers = [
        text_of(screenshots, in_the_repository(screenshots, Path(target).name))[-1]
        for _, target in IMAGE.findall(TOUR)
    ]
    together = " ".join(footers).replace("1-5 view", "1 2 3 4 5 view").replace("j/k", "j k")
    shown = together.replace("12345 view", "1 2 3 4 5 view").split()
    keys = keys_of_the_tour()
    assert {"4", "enter", "c", "q"} <= set(keys)
    for key in keys:
        assert key in bound, f"{key} is no key"
        assert key in shown, f"{key} stands at the bottom of no picture"


def test_the_tour_quotes_what_its_pictures_show(screenshots: ModuleType) -> None:
    everything = "\n".join(
        line
        for _, target in IMAGE.findall(TOUR)
        for line in text_of(screenshots, in_the_repository(screenshots, Path(target).name))
    )
    quoted = [span for span in SPAN.findall(PROSE) if "predicted " in span]
    assert any("predicted step" in span for span in quoted)
    assert any(span.endswith("as predicted") for span in quoted)
    for span in quoted:
        assert span in everything
    # Figures in the text, each as it stands on a picture.
    for words, shown in FIGURES.items():
        assert words in PROSE, words
        assert shown in everything, shown


def test_the_way_of_the_tour_leads_to_the_change(screenshots: ModuleType) -> None:
    """Its keys up to the one that sets it, pressed in the app on its recording."""
    keys = keys_of_the_tour()
    keys = [key for key in keys[: keys.index("q")] if key != "j"]
    assert keys == ["4", "enter", "c", "a", "enter", "esc", "1"]
    told: dict[str, str] = {}

    async def walk(session: Any) -> None:
        app = screenshots.watching(session)
        async with app.run_test(size=(120, 32)) as pilot:
            await screenshots.watch(app, pilot, session)
            for key in keys[: keys.index("a") + 1]:
                await pilot.press(key)
                await pilot.pause()
                told[key] = " ".join(app.told[0].split()) if app.told else ""
            assert type(app.screen).__name__ == "ChangeScreen"

    with screenshots.fixed_environment():
        asyncio.run(walk(screenshots.still("demo")))
    assert told["c"].startswith("sent to the terminal's clipboard")
    assert f"`{told['c']}`" in PROSE


# --- the soak ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    return load("bench_soak")


def samples(soak: ModuleType, *, growth_mb: float = 0.0, core: float = 0.04) -> list[object]:
    """Three minutes; memory grows evenly after the first one."""
    return [
        soak.Sample(
            1000.0 + second,
            100.0 + growth_mb * max(0, second - 60) / 120 + (20 if second < 30 else 0),
            10.0 + core * second,
        )
        for second in range(1, 181)
    ]


def every(step_s: float) -> list[float]:
    """Ticks of three minutes."""
    return [1000.0 + step_s * number for number in range(round(180 / step_s) + 1)]


def test_figures_of_a_calm_soak_are_within_the_budgets(soak: ModuleType) -> None:
    found = soak.figures(samples(soak), every(0.25), 1060.0)
    assert found.growth_mb == pytest.approx(0.0)
    assert found.missed_percent == pytest.approx(0.0)
    assert found.core_percent == pytest.approx(4.0)
    assert found.longest_s == pytest.approx(0.25)
    assert not found.over


def test_growth_counts_from_the_end_of_the_first_minute(soak: ModuleType) -> None:
    found = soak.figures(samples(soak, growth_mb=8.0), every(0.25), 1060.0)
    assert found.growth_mb == pytest.approx(8.0, abs=0.6)
    assert found.over


def test_ticks_that_did_not_come_are_missed(soak: ModuleType) -> None:
    ticks = [at_s for at_s in every(0.25) if not 1100.0 < at_s < 1106.0]
    found = soak.figures(samples(soak), ticks, 1060.0)
    assert found.missed_percent == pytest.approx(100 * 23 / 480, abs=0.3)
    assert found.longest_s == pytest.approx(6.0)
    assert found.over


def test_cpu_over_its_budget_is_told(soak: ModuleType) -> None:
    assert soak.figures(samples(soak, core=0.09), every(0.25), 1060.0).over


@pytest.mark.terminal
@pytest.mark.timeout(90)
def test_the_soaked_app_runs_in_a_terminal_until_q(soak: ModuleType) -> None:
    """Few ranks, few seconds: that both sides work together, not how well."""
    found, ticks = soak.soak(16, 4.0)
    assert len(found) == 4
    assert all(sample.rss_mb > 20 for sample in found)
    assert found[-1].cpu_s > found[0].cpu_s
    assert len(ticks) > 4
    assert ticks == sorted(ticks)
