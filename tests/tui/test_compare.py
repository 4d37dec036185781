"""View 5: two sides, chosen from runs and recordings; values, spreads, verdicts, settings."""

from __future__ import annotations

import gc
import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from textual.pilot import Pilot
from traces import Job

from gpuwatch.commands.cli import cli
from gpuwatch.commands.compare import RecordingShelf
from gpuwatch.schema import GpuSample, Versions
from gpuwatch.store.compare import Driver, Spread, compare_sides, driver_of
from gpuwatch.store.track import Side, side_of
from gpuwatch.store.views import RankView, RunView
from gpuwatch.tui import GpuwatchApp
from gpuwatch.tui.render.compare import compare_lines, source_row, spread_line
from gpuwatch.tui.render.text import Line, width_of
from gpuwatch.tui.sides import Chosen, Compared, Sides, Source
from gpuwatch.tui.theme import STYLES
from gpuwatch.tui.tracks import Tracks
from tests.tui.fakes import FakeSession, no_diagnosis, view
from tests.tui.sides import DRIVER, GPU, FakeShelf, chosen, compared, stepping
from tests.tui.snapshots import check_lines, check_text, text_of
from tests.tui.test_app import drive, screen_text
from tests.tui.test_keys import footer, press
from tests.tui.test_pictures import SIZE_IDS, SIZES
from tests.tui.test_render import ODD_RUNS

NEWER = Versions("0.1.0", "3.11.7", "2.14.0", "12.6", "2.21.5")


def slow_and_fast() -> Compared:
    return compared(stepping(31.0, workers=12), stepping(91.2, workers=4))


CASES: dict[str, Callable[[], Compared]] = {
    "slower": slow_and_fast,
    "same": lambda: compared(stepping(91.2), stepping(91.2, first=1000)),
    "no step in common": lambda: compared(
        stepping(91.2), stepping(31.0, first=90_000, simulated=True, hello={"versions": NEWER})
    ),
    "other clocks and sizes": lambda: compared(
        stepping(91.2), with_clock(stepping(31.0, world=4), "device")
    ),
    "a side without steps": lambda: compared(stepping(91.2), stepping(number=0)),
    "nothing chosen": lambda: Compared(Chosen(), Chosen()),
    "A is missing": lambda: Compared(Chosen(), chosen(stepping(), "0417")),
    "being read": lambda: Compared(
        Chosen(Source("saved", "x", "before", "runs/before.gpuwatch")), chosen(stepping(), "0417")
    ),
    "cannot be read": lambda: Compared(
        Chosen(Source("saved", "x", "before"), problem="there is no file before.gpuwatch"),
        Chosen(Source("live", "r9", "r9"), problem="this run is not known any more"),
    ),
}


def with_clock(run: RunView, clock: str) -> RunView:
    return replace(run, ranks=tuple(replace(rank, clock=clock) for rank in run.ranks))


@pytest.mark.parametrize(("width", "height"), SIZES, ids=SIZE_IDS)
def test_the_page(width: int, height: int) -> None:
    lines: list[Line] = []
    for name, make in CASES.items():
        lines += [[(f"--- {name}".ljust(width), "text")], *compare_lines(make(), (), width)]
    check_lines(f"compare-{width}", lines, width)


def test_all_settings() -> None:
    lines = compare_lines(slow_and_fast(), (), 80, show_all=True, all_key="A")
    text = "\n".join(map(text_of, lines))
    assert "batch_size 64" in text
    assert "hidden" not in text
    hidden = "\n".join(map(text_of, compare_lines(slow_and_fast(), (), 80, all_key="A")))
    assert "batch_size" not in hidden
    assert "17 equal settings hidden, A: all" in hidden


def test_a_version_that_is_not_told_is_not_a_version() -> None:
    quiet = stepping(91.2, hello={"versions": Versions(), "device_name": ""})
    text = "\n".join(map(text_of, compare_lines(compared(quiet, stepping(91.2)), (), 160)))
    assert "torch n/a -> 2.13.0" in text
    assert f"device_name n/a -> {GPU}" in text


def test_the_driver_is_read_by_sensors_and_joined_by_device(tmp_path: Path) -> None:
    """Through the real command: traces with devices, their drivers, and one without any."""

    def trace(name: str, *drivers: str, **how: Any) -> str:
        job = Job(steps=80, ranks=len(drivers) or 1, phases_ms={"forward": 9.0}, **how)
        lines = list(job.lines())
        for line in lines:
            if line["type"] == "gpu" and drivers[int(line["uuid"].removeprefix("GPU-"))]:
                line["driver"] = drivers[int(line["uuid"].removeprefix("GPU-"))]
            elif line["type"] == "gpu":
                line["driver_reason"] = "a simulated device has no driver"
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    old = trace("old", "535.104.05", gpu={"gpu_util": 70})
    mixed = trace("mixed", "570.86.15", "535.104.05", gpu={"gpu_util": 70})
    none = trace("none", "", gpu={"gpu_util": 70})
    bare = trace("bare")

    def told(before: str, after: str) -> tuple[dict[str, Any], str]:
        runner = CliRunner()
        document = json.loads(runner.invoke(cli, ["compare", before, after, "--json"]).stdout)
        return document, runner.invoke(cli, ["compare", before, after]).stdout

    document, text = told(old, mixed)
    assert (document["before"]["driver"], document["before"]["driver_reason"]) == (
        "535.104.05",
        None,
    )
    assert document["after"]["driver"] == "535.104.05, 570.86.15"
    (setting,) = [s for s in document["settings"] if s["name"] == "driver"]
    assert setting["environment"] is True
    assert "setting driver: 535.104.05 -> 535.104.05, 570.86.15" in text
    document, text = told(old, old)
    assert {"name": "driver", "before": "535.104.05", "after": "535.104.05"}.items() <= next(
        s for s in document["equal_settings"] if s["name"] == "driver"
    ).items()
    assert "driver  n/a" not in text
    document, text = told(none, bare)
    assert document["before"]["driver"] is None
    assert document["before"]["driver_reason"] == "a simulated device has no driver"
    assert "driver  n/a of A: a simulated device has no driver" in text
    assert "driver  n/a of B: no rank computes on a GPU" in text
    document, text = told(none, old)
    assert "setting driver: n/a -> 535.104.05" in text
    # The same on the screen, from the shelf that `gpuwatch replay` has.
    shelf = RecordingShelf([none, old])
    shelf.load(none)
    assert shelf.driver(none).reason == "a simulated device has no driver"


def test_a_driver_that_is_not_told_says_why() -> None:
    run = stepping(91.2)
    (node,) = view((run,)).nodes[:1]
    ranks = tuple(replace(rank, node=node.node) for rank in run.ranks)
    assert driver_of(replace(run, ranks=()), ()).reason == "no rank has told its device"
    cuda = [
        replace(r, hello=msgspec.structs.replace(r.hello, device="cuda:0", device_uuid="GPU-x"))
        for r in ranks
    ]
    on_gpu = replace(run, ranks=tuple(cuda))
    assert driver_of(on_gpu, ()).reason == "no sensor sees the GPU of its ranks"
    off = replace(node, gpus=(), gpus_reason="no NVIDIA driver here", sensors_reason="")
    assert driver_of(on_gpu, [off]).reason == "no NVIDIA driver here"
    older = replace(node, gpus=(GpuSample(0, "GPU-x"),), sensors_reason="")
    assert driver_of(on_gpu, [older]).reason == "its sampler is older and does not ask for it"
    newer = replace(node, gpus=(GpuSample(0, "GPU-x", driver="570.86.15"),))
    assert driver_of(on_gpu, [newer]) == Driver("570.86.15", "")
    both = slow_and_fast()
    assert both.comparison is not None
    for drivers, words in (
        ((Driver(), Driver()), "driver n/a on either side: no sensor was asked"),
        ((DRIVER, Driver("", "why")), "driver n/a of B: why"),
    ):
        shown = replace(both, comparison=replace(both.comparison, drivers=drivers))
        assert words in " ".join(" ".join(map(text_of, compare_lines(shown, (), 160))).split())


def test_what_is_simulated_says_so_wherever_it_stands() -> None:
    for before, after in ((True, False), (False, True)):
        both = compared(
            stepping(31.0, simulated=before, name="a" * 60), stepping(91.2, simulated=after)
        )
        for width in (60, 80, 120, 160):
            text = "\n".join(map(text_of, compare_lines(both, (), width)))
            assert "SIMULATED" in text
    waiting = Compared(Chosen(), chosen(stepping(simulated=True), "0417"))
    assert "SIMULATED" in "\n".join(map(text_of, compare_lines(waiting, (), 80)))
    row = source_row(Source("live", "r1", "job", "2 ranks", True), "B", 80, selected=True)
    assert "SIMULATED" in text_of(row)


@pytest.mark.parametrize("name", ODD_RUNS)
def test_every_run_can_be_a_side_at_every_width(name: str) -> None:
    run = ODD_RUNS[name]
    for other in (run, stepping(91.2)):
        for one, two in ((run, other), (other, run)):
            sides = [Side("学習 " * 30, "saved", item, side_of(item).steps) for item in (one, two)]
            source = Source("saved", "k", "学習 " * 30, "x" * 400)
            both = Compared(
                Chosen(source, sides[0]), Chosen(source, sides[1]), compare_sides(*sides)
            )
            for width in (60, 80, 104, 120, 160, 300):
                lines = compare_lines(both, (), width, show_all=True)
                lines.append(source_row(source, "AB", width, selected=True))
                for line in lines:
                    assert width_of(line) == width
                    assert {style for _, style in line} <= STYLES.keys()


NUMBER = st.floats(0.0, 1e6) | st.sampled_from([math.nan, math.inf])


@settings(max_examples=150, deadline=None)
@given(
    st.none() | st.tuples(NUMBER, NUMBER, NUMBER),
    st.none() | st.tuples(NUMBER, NUMBER, NUMBER),
    st.integers(0, 60),
)
def test_a_spread_has_its_width(
    before: tuple[float, float, float] | None,
    after: tuple[float, float, float] | None,
    width: int,
) -> None:
    sides = [None if side is None else Spread(*sorted(side)) for side in (before, after)]
    line = spread_line(sides[0], sides[1], width)
    assert width_of(line) == width
    for side, glyph in zip(sides, "░█", strict=True):
        known = side is not None and math.isfinite(side.low + side.high)
        if known and width:
            assert any(char in text_of(line) for char in (glyph, "▒"))


def test_of_a_long_command_line_only_what_differs_is_shown() -> None:
    common = "trainer/__main__.py train --train.steps=1000000 --train.threads=1 --train.device=cpu"
    scripts = [f"{common} --loader.num_workers={n} --faults.item_latency_ms=25" for n in (1, 12)]
    sides = [stepping(91.2, hello={"script": script}) for script in scripts]
    text = "\n".join(map(text_of, compare_lines(compared(*sides), (), 160)))
    assert "script … --loader.num_workers=1 -> … --loader.num_workers=12" in text
    # What is only longer, or in another order, is no difference of words.
    sides = [stepping(91.2, hello={"script": script}) for script in (common, f"{common} --x")]
    assert "script … -> … --x" in "\n".join(map(text_of, compare_lines(compared(*sides), (), 160)))
    turned = " ".join(reversed(common.split()))
    sides = [stepping(91.2, hello={"script": script}) for script in (common, turned)]
    shown = "\n".join(map(text_of, compare_lines(compared(*sides), (), 160)))
    assert "script trainer/__main__.py train --tr" in shown


def test_a_spread_lies_where_its_steps_do() -> None:
    one, other = Spread(10.0, 12.0, 20.0), Spread(20.0, 25.0, 30.0)
    assert text_of(spread_line(one, other, 20)) == "░" * 10 + "▒" + "█" * 9
    assert text_of(spread_line(one, Spread(90.0, 95.0, 110.0), 10)) == "░░      ██"
    assert text_of(spread_line(one, one, 8)) == "▒" * 8
    assert text_of(spread_line(None, one, 4)) == "████"
    assert text_of(spread_line(None, None, 4)) == "    "


# The choice


def test_sides_are_given_or_the_run_on_the_screen() -> None:
    run, tracks = stepping(91.2), Tracks()
    alone = Sides(None).compared([run], run, tracks, 0.0, replayed=False)
    assert (alone.before.source, alone.comparison) == (None, None)
    assert alone.after.source == Source("live", "r1", "resnet50-ddp", "2 ranks  step 1,064")
    # One recording on the command line is the one that is replayed.
    assert Sides(FakeShelf({}, ("a.jsonl",))).compared([], None, tracks, 0.0, replayed=True) == (
        Compared(Chosen(), Chosen())
    )
    shelf = FakeShelf({"a.jsonl": stepping(31.0), "b.jsonl": run}, ("a.jsonl", "b.jsonl"))
    sides = Sides(shelf)
    until(lambda: sides.compared([run], run, tracks, 0.0, replayed=True).comparison is not None)
    both = sides.compared([run], run, tracks, 0.0, replayed=True)
    assert [c.source.key for c in (both.before, both.after) if c.source] == ["a.jsonl", "b.jsonl"]
    ended = replace(run, state="ended")
    gone = replace(run, ranks=tuple(replace(rank, state="gone") for rank in run.ranks))
    kinds = [source.kind for source in sides.sources([run, ended, gone], replayed=False)]
    assert kinds == ["live", "ended", "gone", "saved", "saved"]
    assert [s.kind for s in Sides(None).sources([run], replayed=True)] == ["replay"]


def until(ready: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(1000):
        if ready():
            return
        done.wait(0.005)
    raise AssertionError("not within 5 s")


def test_a_recording_that_cannot_be_read_is_a_sentence() -> None:
    sides, tracks = Sides(FakeShelf({}, ())), Tracks()
    sides.choose(0, Source("saved", "gone.jsonl", "gone"))
    sides.choose(1, Source("live", "r9", "r9"))
    assert sides.compared([], None, tracks, 0.0, replayed=False).before.problem == ""
    until(lambda: sides.rounds == 1)
    both = sides.compared([], None, tracks, 0.0, replayed=False)
    assert both.before.problem == "there is no file gone.jsonl"
    assert both.after.problem == "this run is not known any more"


def test_a_comparison_is_made_anew_when_there_are_new_steps_but_not_at_every_drawing() -> None:
    tracks, sides = Tracks(), Sides(FakeShelf({"a.jsonl": stepping(31.0)}))
    sides.choose(0, Source("saved", "a.jsonl", "a"))
    run = stepping(91.2)
    tracks.take([run], ())
    until(lambda: sides.compared([run], run, tracks, 0.0, replayed=False).comparison is not None)
    first = sides.compared([run], run, tracks, 5.0, replayed=False)
    assert sides.compared([run], run, tracks, 9.0, replayed=False) is first
    later = stepping(91.2, first=1064)
    tracks.take([later], ())
    made_at = 9.0
    second = sides.compared([later], later, tracks, made_at, replayed=False)
    assert second is not first
    latest = stepping(91.2, first=1128)
    tracks.take([latest], ())
    assert sides.compared([latest], latest, tracks, made_at + 1.0, replayed=False) is second
    assert sides.compared([latest], latest, tracks, made_at + 2.0, replayed=False) is not second


def test_a_comparison_keeps_no_picture() -> None:
    """Of a large run one takes megabytes, and this one stays when the view has been left."""
    run, tracks = stepping(91.2, run="kept", world=65), Tracks()
    sides = Sides(FakeShelf({}))
    sides.choose(0, Source("live", run.run, run.name))
    both = sides.compared([run], run, tracks, 0.0, replayed=False)
    assert both.comparison is not None

    def kept() -> int:
        gc.collect()
        there = [thing for thing in gc.get_objects() if type(thing) is RankView]
        return sum(rank.run == "kept" for rank in there)

    assert kept() == 65
    del run
    assert kept() == 0
    again = stepping(91.2, run="kept", world=65)
    assert sides.compared([again], again, tracks, 1.0, replayed=False) is both


def test_tracks_keep_more_than_a_window_and_forget_what_a_jump_leaves_behind() -> None:
    tracks = Tracks()
    for first in range(0, 640, 64):
        tracks.take([stepping(31.0, first=first)], (), 0)
    last = stepping(31.0, first=576)
    assert len(tracks.side(last).steps) == 640
    assert tracks.side(last, replayed=True).source == "replay"
    tracks.take([stepping(31.0, first=100)], (), 1)
    assert tracks.side(last).steps.indices == tuple(range(100, 164))
    large = stepping(31.0, run="r7", world=65, number=20)
    tracks.take([large], (), 1)
    tracks.take([stepping(31.0, run="r7", world=65, first=1020, number=20)], (), 1)
    # Not followed unasked: what its windows hold is all.
    assert len(tracks.side(large).steps) == 20
    tracks.take([large], ("r7",), 1)
    tracks.take([stepping(31.0, run="r7", world=65, first=1020, number=20)], ("r7",), 1)
    assert len(tracks.side(large).steps) == 40
    for i in range(9):
        tracks.take([stepping(31.0, run=f"n{i}")], (), 1)
    assert len(tracks._tracks) == 4


# The view


def shelf() -> FakeShelf:
    return FakeShelf(
        {"before.gpuwatch": stepping(31.0, workers=12), "after.gpuwatch": stepping(91.2)}
    )


@pytest.mark.parametrize("size", SIZES, ids=SIZE_IDS)
def test_the_view_as_a_whole(size: tuple[int, int]) -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        app.watcher._clock = lambda: app.watcher._taken_at
        app.refresh_scene(force=True)
        text = await press(pilot, "5")
        check_text(f"view-compare-none-{size[0]}", text)
        text = await press(pilot, "o")
        check_text(f"view-compare-choose-{size[0]}", text)
        text = await press(pilot, "j", "enter")
        assert "Choose B, the run after it" in text
        text = await press(pilot, "k", "enter")
        until(lambda: app.watcher.sides.rounds == 1)
        app.refresh_scene(force=True)
        await pilot.pause()
        check_text(f"view-compare-{size[0]}", screen_text(app))

    drive(view([stepping(91.2)]), script, size=size, recordings=shelf())


def test_the_keys_of_the_view() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "5")
        assert "A is not chosen: o lists runs and recordings" in text
        assert "gpuwatch replay before.gpuwatch after.gpuwatch" in text
        assert "o choose A and B" in footer(text)
        # esc leaves the list as it was; tab begins with the other side.
        text = await press(pilot, "o", "escape")
        assert "A is not chosen" in text
        text = await press(pilot, "o", "tab")
        assert "Choose B" in text
        text = await press(pilot, "tab", "j", "enter", "escape")
        until(lambda: app.watcher.sides.rounds == 1)
        app.refresh_scene()
        await pilot.pause()
        text = screen_text(app)
        assert "A before (saved)" in text
        assert "B resnet50-ddp (live)" in text
        assert "slower, 95 % CI" in text
        assert "batch_size 64" not in text
        text = await press(pilot, "a")
        assert "batch_size 64" in text
        text = await press(pilot, "escape")
        assert "batch_size 64" not in text
        # What it was is what it is when the view is opened again.
        text = await press(pilot, "1", "5")
        assert "slower, 95 % CI" in text
        text = await press(pilot, "o")
        assert "A  before" in text
        assert "q quit" in footer(text)

    drive(view([stepping(91.2)]), script, size=(120, 36), recordings=shelf())


def test_a_recording_is_drawn_when_it_is_read_also_in_a_pause() -> None:
    class Slow(FakeShelf):
        go = threading.Event()

        def load(self, path: str) -> Side:
            assert self.go.wait(10.0)
            return super().load(path)

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        await press(pilot, "5", "space", "o", "j")
        text = await press(pilot, "enter", "escape")
        assert "A: reading before.gpuwatch" in text
        Slow.go.set()
        until(lambda: app.watcher.sides.rounds == 1)
        app.refresh_scene()
        await pilot.pause()
        assert "slower, 95 % CI" in screen_text(app)
        assert "PAUSED" in screen_text(app)

    slow = Slow({"before.gpuwatch": stepping(31.0)})
    drive(view([stepping(91.2)]), script, size=(120, 36), recordings=slow)


def test_without_recordings_and_runs_the_list_says_what_makes_one() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "5")
        assert "B is not chosen" in text
        text = await press(pilot, "o", "enter")
        assert "gpuwatch record -o FILE makes one" in text

    drive(view([]), script)


def test_a_run_that_goes_on_is_compared_as_it_is() -> None:
    session = FakeSession(view([stepping(91.2)]))

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        now = [1000.0]
        app.watcher._clock = lambda: now[0]
        await press(pilot, "5", "o", "j", "enter", "escape")
        until(lambda: app.watcher.sides.rounds == 1)
        app.refresh_scene()
        await pilot.pause()
        assert "aligned by step 1,000-1,063, 64 steps each" in screen_text(app)
        now[0] += 10.0
        session.show(view([stepping(91.2, first=1064)]))
        app.refresh_scene()
        await pilot.pause()
        # A ends there; what B has done since has no counterpart.
        assert "aligned by step 1,000-1,063" in screen_text(app)
        now[0] += 10.0
        session.show(view([stepping(20.0, run="r2", first=5)]))
        app.refresh_scene()
        await pilot.pause()
        assert "they have no step in common" in screen_text(app)
        assert "faster, 95 % CI" in screen_text(app)

    recordings = FakeShelf({"before.gpuwatch": stepping(91.2)})
    drive(session, script, size=(160, 45), recordings=recordings, diagnose=no_diagnosis)


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "5", "o")
        assert "Choose A" in text
        await press(pilot, "j", "enter", "escape")
        until(lambda: app.watcher.sides.rounds == 1)
        app.refresh_scene()
        await pilot.pause()
        text = screen_text(app)
        assert "✖  slower" not in text
        assert "✖" in text
        for strip in app.screen._compositor.render_strips():
            for segment in strip:
                color = segment.style.color if segment.style is not None else None
                triplet = color.triplet if color is not None else None
                assert triplet is None or len(set(triplet)) == 1, segment

    drive(view([stepping(91.2)]), script, size=(160, 45), recordings=shelf())


def test_help_names_a_key_once() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "5", "question_mark")
        assert "choose what is compared, A and B" in text
        assert "list of the runs" not in text
        text = await press(pilot, "escape", "2", "question_mark")
        assert "list of the runs" in text

    drive(view([stepping(91.2)]), script, size=(120, 80))
