"""What is understood at a glance: signs beside figures, names of causes, no room left empty."""

from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot

from gpuwatch.diagnosis.types import Evidence, Finding
from gpuwatch.store.views import View
from gpuwatch.tui import GpuwatchApp
from gpuwatch.tui.answers import MemoryAnswer, PythonMemory
from gpuwatch.tui.render.findings import finding_detail
from gpuwatch.tui.render.header import header_line, verdict_line
from gpuwatch.tui.render.heat import heat_lines
from gpuwatch.tui.render.memory import memory_lines
from gpuwatch.tui.screens.knobs import ChangeScreen
from gpuwatch.tui.screens.runs import run_row
from gpuwatch.tui.widgets.pane import LinePane
from gpuwatch.tui.widgets.ranks import RanksPane
from tests.tui.fakes import (
    FakeTraining,
    cluster,
    few_workers,
    found,
    peer_wait,
    rank_view,
    run_view,
    two_ranks,
    view,
)
from tests.tui.snapshots import text_of
from tests.tui.test_app import drive, press
from tests.tui.test_pictures import scene_of
from tests.tui.test_requests import FOUND, footer, live


def about(metric: str, **more: Any) -> Finding:
    evidence = Evidence(metric, 146.2, "ms", "a step of 231 ms", "host clock")
    return few_workers(evidence=(evidence,), **more)


@pytest.mark.parametrize(
    ("findings", "wait", "comm"),
    [
        ((), "", ""),
        ((about("data_wait"),), " ✖", ""),
        ((about("data_wait", severity="warning"),), " ▲", ""),
        ((about("data_wait", severity="note"),), "", ""),
        ((about("data_wait", state="resolved"),), "", ""),
        ((about("transfer", severity="warning"), about("queue_depth", id="F2")), " ✖", " ▲"),
        ((about("own_ms"), few_workers(evidence=())), "", ""),
    ],
)
def test_a_figure_has_the_sign_of_what_was_found_about_it(
    findings: tuple[Finding, ...], wait: str, comm: str
) -> None:
    line = text_of(verdict_line(scene_of(two_ranks(), findings=findings), 160))
    share = line.split("data wait ")[1].split("%")[0]
    assert f"data wait {share}%{wait} worst" in line
    share = line.split("comm ")[1].split("%")[0]
    assert f"comm {share}%{comm} │" in line


def test_a_finding_that_is_aside_leaves_no_sign() -> None:
    scene = scene_of(two_ranks(), findings=(about("data_wait"),), snoozed=frozenset({"F1"}))
    assert "✖" not in text_of(verdict_line(scene, 160))


@pytest.mark.parametrize(("epoch", "shown"), [(3.0, "epoch 3"), (7.138, "epoch 7.14")])
def test_what_changes_its_length_moves_nothing(epoch: float, shown: str) -> None:
    places = set()
    for loss in (3.134, 0.242, 0.07625):
        run = run_view([rank_view()], epoch=epoch, loss=loss)
        line = text_of(header_line(scene_of(view([run])), 140))
        assert f"{shown}  loss {loss}" in line
        places.add((line.index("epoch"), line.index("loss"), line.index("LIVE")))
    assert len(places) == 1


def test_where_there_is_no_room_for_both_the_loss_is_told() -> None:
    run = run_view([rank_view()], epoch=3.0, loss=1.284)
    lines = [text_of(header_line(scene_of(view([run])), width)) for width in range(60, 140)]
    assert any("loss" in line and "epoch" not in line for line in lines)
    assert not any("epoch" in line and "loss" not in line for line in lines)


def test_what_a_resolved_finding_followed_has_its_id() -> None:
    follower = peer_wait(state="resolved", resolved_step=99, follows="loader_few_workers")
    scene = scene_of(two_ranks(), findings=(few_workers(), follower))
    detail = "\n".join(map(text_of, finding_detail(follower, scene, 120)))
    assert "follows F1" in detail
    assert "loader_few_workers" not in detail

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "4")
        assert "follows F1" in text

    drive(two_ranks(), script, diagnose=found(few_workers(), follower), size=(120, 36))


@pytest.mark.parametrize(
    ("size", "below"), [((80, 24), True), ((120, 36), True), ((80, 14), False)]
)
def test_the_selected_rank_stands_in_the_room_under_a_short_table(
    size: tuple[int, int], below: bool
) -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "2")
        side = app.screen.query_one("#side", LinePane)
        ranks = app.screen.query_one("#ranks", RanksPane)
        assert side.display is below
        assert ("forward" in text) is below
        if below:
            assert ranks.region.bottom < side.region.y < side.region.bottom < size[1]
            assert ranks.region.height >= 2 + 2
            first = side.lines[0]
            await press(pilot, "j")
            assert side.lines[0] != first

    drive(two_ranks(), script, size=size)


def test_objects_that_were_not_counted_say_how_they_are() -> None:
    answer = MemoryAnswer(python=PythonMemory(gc_counts=(5, 1, 0)))
    text = "\n".join(map(text_of, memory_lines(1, "node0", answer, 1.0, 100)))
    assert "objects n/a: they are counted with the tensors" in text
    answer = MemoryAnswer(python=PythonMemory(gc_counts=(5, 1, 0), objects=1234))
    text = "\n".join(map(text_of, memory_lines(1, "node0", answer, 1.0, 100)))
    assert "1,234 objects, the collector's counters 5/1/0" in text


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_a_simulated_run_is_marked_whole(width: int) -> None:
    run = replace(run_view([rank_view()]), simulated=True)
    row = text_of(run_row(run, width, selected=True, shown=True, since_s=0.0))
    assert "SIMULATED" in row
    assert len(row) == width


@pytest.mark.parametrize("here", ["1", "4"])
def test_a_hint_is_applied_from_the_list_too(here: str) -> None:
    session = FakeTraining(live())

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, here)
        assert ("a apply live" in footer(text)) is (here == "4")
        text = await press(pilot, "a")
        assert isinstance(app.screen, ChangeScreen)
        assert "set num_workers 1 -> 7 on all ranks of resnet50-ddp" in text
        await press(pilot, "escape", "space")
        assert "the picture is paused" in footer(await press(pilot, "a"))
        assert not session.sent

    drive(session, script, size=(120, 36), diagnose=FOUND)


def heat_of(picture: View, width: int, **more: Any) -> list[str]:
    run = picture.runs[0]
    return [text_of(line) for line in heat_lines(run, width, 12, **more)]


def test_the_heat_map_names_what_was_found_beside_the_rows() -> None:
    flags = dict.fromkeys(range(24, 32), "F1") | {3: "F2", 24: "F1 F3"}
    rows = heat_of(cluster(), 80, flags=flags)
    assert rows[3].rstrip().endswith("◀ F1 on 8 ranks, F3")
    assert rows[0].rstrip().endswith("◀ F2 on 1 rank")
    assert "◀" not in rows[1] + rows[2]
    plain = heat_of(cluster(), 80)
    assert [row.split("◀")[0].rstrip() for row in rows] == [row.rstrip() for row in plain]
    # Where there is no room for it whole it is left out.
    assert heat_of(cluster(), 30, flags=flags) == heat_of(cluster(), 30)


@pytest.mark.parametrize("keys", [("1",), ("2",), ("h",)])
def test_every_heat_map_does_so(keys: tuple[str, ...]) -> None:
    slow = few_workers(ranks=tuple(range(24, 32)))

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, *keys)
        (row,) = [line for line in text.splitlines() if "◀ F1 on 8 ranks" in line]
        assert "node3" in row

    drive(cluster(), script, size=(160, 45), diagnose=found(slow))
