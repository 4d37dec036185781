"""Drawing as pure functions: widths, columns, and no exception whatever the values are."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.diagnosis.types import Abstain, Finding, Hint
from gpuwatch.schema import PHASES
from gpuwatch.store.views import Event, RunView, View
from gpuwatch.tui.layout import CURVES_FROM, Content, allocate, plan
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.bars import PHASE_GLYPHS, gauge, phase_bar, phase_cells
from gpuwatch.tui.render.findings import (
    cost_text,
    finding_detail,
    finding_rows,
    hint_text,
    quiet_rows,
    ranks_text,
)
from gpuwatch.tui.render.header import header_line, link_word, verdict_line
from gpuwatch.tui.render.heat import heat_lines, heat_row
from gpuwatch.tui.render.keys import footer_line, help_lines
from gpuwatch.tui.render.order import steady_order
from gpuwatch.tui.render.ranks import columns_for, header_row, rank_flags, rank_row
from gpuwatch.tui.render.sensors import host_row, node_heading, node_lines
from gpuwatch.tui.render.spark import bucket_max, heat_levels, spark_rows
from gpuwatch.tui.render.states import idle_lines, too_small_lines
from gpuwatch.tui.render.steps import legend, step_lines
from gpuwatch.tui.render.text import Line, clip, fit, heading, pad, rpad, spread, width_of
from gpuwatch.tui.render.timeline import event_lines, timeline_lines, timeline_row
from gpuwatch.tui.scene import Scene, order_findings, order_ranks, run_nodes, summarise
from gpuwatch.tui.theme import STYLES
from tests.tui.fakes import (
    NOW_S,
    PHASES_MS,
    cluster,
    few_workers,
    node_view,
    ok,
    peer_wait,
    rank_view,
    run_view,
    two_ranks,
    unknown,
    view,
)

WIDTHS = st.integers(min_value=1, max_value=320)
ANY_MS = (
    st.none()
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.floats(0.0, 1e5)
    | st.floats(1e5, 1e12)
)
ANY_PHASES = st.fixed_dictionaries(dict.fromkeys(PHASES, ANY_MS))
KNOWN_PHASES = st.fixed_dictionaries({name: st.floats(0.0, 1e6) for name in PHASES}).filter(
    lambda phases: sum(phases.values()) > 0.0
)


def text_of(line: Line) -> str:
    return "".join(text for text, _ in line)


def scene_of(picture: View, **more: object) -> Scene:
    run = picture.runs[0] if picture.runs else None
    scene = Scene(
        picture,
        run=run,
        summary=summarise(run) if run is not None else None,
        order=order_ranks(run, ()) if run is not None else (),
        nodes=run_nodes(picture, run),
        gpus={gpu.uuid: gpu for node in run_nodes(picture, run) for gpu in node.gpus},
        events=tuple(sorted(picture.events, key=lambda item: -item.at_s)),
        end_s=picture.at_s,
        diagnosed=True,
    )
    return replace(scene, **more)  # type: ignore[arg-type]


def one_run(run: RunView, **more: object) -> Scene:
    return scene_of(view([run]), **more)


# Bars


@given(KNOWN_PHASES, WIDTHS)
def test_phase_cells_add_up_to_the_width(phases: dict[str, float], width: int) -> None:
    cells = phase_cells(phases, width)
    assert sum(length for _, length in cells) == width
    assert all(length > 0 for _, length in cells)
    assert [name for name, _ in cells] == [n for n in PHASES if n in dict(cells)]


@given(ANY_PHASES, WIDTHS, ANY_MS)
def test_phase_bar_is_exactly_as_wide_as_asked(
    phases: dict[str, float | None], width: int, scale: float | None
) -> None:
    assert width_of(phase_bar(phases, width, scale)) == width


@given(KNOWN_PHASES, st.integers(1, 200))
def test_no_phase_is_off_by_more_than_a_cell(phases: dict[str, float], width: int) -> None:
    total = sum(phases.values())
    cells = dict(phase_cells(phases, width))
    for name, value in phases.items():
        assert abs(cells.get(name, 0) - value / total * width) <= 1.0 + 1e-6


def test_glyph_and_colour_of_a_phase_differ_from_all_others() -> None:
    assert len(set(PHASE_GLYPHS.values())) == len(PHASES)
    fronts = [STYLES[f"bar.{name}"].color for name in PHASES]
    assert len({front.name for front in fronts if front is not None}) == len(PHASES)


def test_a_bar_on_a_scale_is_shorter() -> None:
    bar = phase_bar({"data_wait": 50.0}, 40, 100.0)
    assert text_of(bar) == "▚" * 20 + " " * 20


@given(ANY_MS, WIDTHS)
def test_gauge_width(fraction: float | None, width: int) -> None:
    assert width_of(gauge(fraction, width)) == width


# Numbers


@given(ANY_MS)
def test_a_duration_never_outgrows_its_column(value: float | None) -> None:
    assert len(numbers.ms(value)) <= 7


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (math.nan, "n/a"),
        (math.inf, "n/a"),
        (0.0, "0.0"),
        (231.44, "231.4"),
        (999.96, "1,000"),
        (12_480.6, "12,481"),
        (183_000.0, "183 s"),
        (1e9, "278 h"),
        (1e15, ">9999 h"),
    ],
)
def test_ms(value: float | None, text: str) -> None:
    assert numbers.ms(value) == text


def test_unknown_is_never_zero() -> None:
    assert numbers.reading(unknown("%"), "%") == "n/a"
    assert numbers.reading(None) == "n/a"
    assert numbers.reading(ok(0.0, "%"), "%") == "0%"
    assert numbers.bytes_pair(None, 8e9) == "n/a"
    assert numbers.share(None) == "n/a"
    assert numbers.reading(ok(math.nan, "%"), "%") == "n/a"


def test_a_loss_that_is_no_number_is_shown() -> None:
    assert numbers.loss(math.nan) == "nan"
    assert numbers.loss(None) == "n/a"


# Text


@given(st.text(max_size=60), st.integers(0, 80))
def test_text_is_cut_and_filled_by_cells(text: str, width: int) -> None:
    assert width_of([(clip(text, width), "")]) <= width
    assert width_of([(pad(text, width), "")]) == width
    assert width_of([(rpad(text, width), "")]) == width
    assert width_of(fit([(text, "text"), (text, "dim")], width)) == width


@given(st.text(max_size=40), st.text(max_size=40), WIDTHS)
def test_spread_and_heading_fill_the_line(left: str, right: str, width: int) -> None:
    assert width_of(spread([(left, "text")], [(right, "text")], width)) == width
    assert width_of(heading(left, width, right=right, note=left)) == width


def test_wide_characters_do_not_push_the_edge() -> None:
    line = fit([("学習ジョブ", "text")], 7)
    assert width_of(line) == 7


# Sparklines and heat


@given(st.lists(ANY_MS, max_size=200), st.integers(1, 120), st.integers(1, 4))
def test_spark_rows_have_the_width(values: list[float | None], width: int, rows: int) -> None:
    drawn = spark_rows(values, width, rows)
    assert [len(row) for row in drawn] == [width] * rows


def test_a_spike_survives_a_narrow_line() -> None:
    values: list[float | None] = [1.0] * 1000
    values[503] = 90.0
    assert max(value for value in bucket_max(values, 20) if value is not None) == 90.0
    assert "█" in spark_rows(values, 20)[0]


def test_scatter_of_a_steady_run_is_drawn_flat() -> None:
    assert heat_levels([100.0, 100.5, 101.0, None, math.nan], 100.0, 101.0) == [7, 7, 7, None, None]
    assert heat_levels([0.0, 50.0, 100.0], 0.0, 100.0) == [0, 3, 7]


@settings(max_examples=30)
@given(st.integers(1, 1024), st.integers(14, 160), st.integers(1, 14))
def test_heat_fits_its_room_for_any_number_of_ranks(n: int, width: int, height: int) -> None:
    run = run_view([HEAT_RANKS[i] for i in range(n)])
    lines = heat_lines(run, width, height)
    assert 0 < len(lines) <= height
    assert {width_of(line) for line in lines} == {width}
    assert width_of(heat_row(run, width)) == width


HEAT_RANKS = [
    rank_view(i, node=f"node{i // 8}", world=1024, seconds=0, workers=0) for i in range(1024)
]


def test_the_slowest_of_many_ranks_is_still_seen() -> None:
    ranks = [replace(rank, own_ms=900.0 if rank.rank == 777 else 100.0) for rank in HEAT_RANKS]
    run = run_view(ranks)
    assert "█" in "".join(text_of(line) for line in heat_lines(run, 58, 5)[:-1])
    assert "█" in text_of(heat_row(run, 80))


# The table of ranks


@settings(max_examples=60)
@given(ANY_PHASES, st.integers(24, 240), st.booleans(), ANY_MS)
def test_rows_have_the_width_of_their_columns(
    phases: dict[str, float | None], width: int, nodes: bool, scale: float | None
) -> None:
    columns = columns_for(width, nodes)
    row = rank_row(rank_view(3, phases=phases, seconds=0), columns, scale, flag="F1")
    assert width_of(row) == width
    assert width_of(header_row(columns)) == width


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_columns_align_under_their_names(width: int) -> None:
    columns = columns_for(width, several_nodes=True)
    head = text_of(header_row(columns))
    splits: list[tuple[int, dict[str, float | None]]] = [
        (0, dict(PHASES_MS)),
        (1023, dict.fromkeys(PHASES, 12_345.6)),
        (99_999, {**PHASES_MS, "comm": None}),
    ]
    rows = [
        text_of(rank_row(rank_view(r, phases=split, seconds=0), columns, 400.0))
        for r, split in splits
    ]
    for name in ("rank", "own ms", "data", "fwd", "bwd", "comm"):
        end = head.index(name) + len(name)
        for row in rows:
            assert row[end - 1] != " ", (name, row)
            assert row[end] == " ", (name, row)
    bars = {head.index("step")}
    assert bars == {re.search("▚", row).start() for row in rows}  # type: ignore[union-attr]


def test_n_a_phase_is_written_out() -> None:
    phases = {**PHASES_MS, "comm": None}
    row = text_of(rank_row(rank_view(phases=phases), columns_for(100, False), 231.0))
    assert "n/a" in row
    assert "█" not in row


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("hung", "✖ hung 45 s comm"),
        ("silent", "▲ silent 14 s"),
        ("gone", "✖ gone exit code"),
        ("checkpoint", "checkpoint"),
    ],
)
def test_trouble_is_said_in_words(state: str, words: str) -> None:
    rank = rank_view(
        state=state, state_reason="exit code 1", phase="comm", phase_age_s=45.0, age_s=14.0
    )
    assert words in text_of(rank_row(rank, columns_for(120, False), 231.0))


def test_only_findings_above_note_on_some_ranks_flag_them() -> None:
    some = few_workers(ranks=(1,))
    everywhere = few_workers(id="F2", ranks=(0, 1))
    consequence = peer_wait(id="F3", ranks=(0,))
    assert rank_flags([some, everywhere, consequence], 2) == {1: "F1"}


# Orders


def test_ranks_go_by_own_time_with_trouble_first() -> None:
    ranks = [
        rank_view(0, own_ms=100.0),
        rank_view(1, own_ms=200.0),
        rank_view(2, own_ms=None),
        rank_view(3, own_ms=90.0, state="silent"),
        rank_view(4, own_ms=math.nan),
        rank_view(5, own_ms=90.0, state="hung"),
    ]
    assert order_ranks(run_view(ranks), ())[:4] == (5, 3, 1, 0)


def test_ranks_that_are_about_equal_keep_their_places() -> None:
    ranks = [rank_view(0, own_ms=100.0), rank_view(1, own_ms=100.4)]
    assert order_ranks(run_view(ranks), (0, 1)) == (0, 1)
    assert order_ranks(run_view(ranks), ()) == (1, 0)
    apart = [rank_view(0, own_ms=100.0), rank_view(1, own_ms=140.0)]
    assert order_ranks(run_view(apart), (0, 1)) == (1, 0)


@given(
    st.dictionaries(st.integers(0, 50), st.floats(0, 1e6), max_size=20),
    st.lists(st.integers(0, 50), max_size=20, unique=True),
)
def test_an_order_holds_every_key_once(values: dict[int, float], previous: list[int]) -> None:
    assert sorted(steady_order(values, previous, 0.1)) == sorted(values)


def test_findings_go_by_cost_consequences_last() -> None:
    cheap = few_workers(id="F3", cost_ms=7.0)
    unknown_cost = few_workers(id="F5", cost_ms=math.nan)
    resolved = few_workers(id="F4", cost_ms=500.0, state="resolved", resolved_step=9)
    order = order_findings([resolved, peer_wait(), cheap, unknown_cost, few_workers()], ())
    assert [item.id for item in order] == ["F1", "F3", "F5", "F2", "F4"]


# Findings


def test_a_finding_says_what_and_how_much() -> None:
    rows = finding_rows(few_workers(), 120, world=2, step_ms=231.0)
    first, hint = (text_of(row) for row in rows)
    assert "✖ critical" in first
    assert "too few loader workers" in first
    assert "+83 ms/step" in first
    assert "confidence high" in first
    assert "num_workers 1 -> 7: predicted step 231 -> 148..160 ms" in hint


def test_a_consequence_points_at_its_cause() -> None:
    rows = finding_rows(peer_wait(), 120, world=2, step_ms=231.0)
    assert len(rows) == 1
    assert "follows F1" in text_of(rows[0])
    assert cost_text(replace(peer_wait(), follows=None)) == "--"


@given(st.integers(30, 200))
def test_costs_stand_under_each_other(width: int) -> None:
    ends = set()
    for item in (few_workers(), few_workers(cost_ms=1234.0), few_workers(cost_ms=0.4)):
        row = text_of(finding_rows(item, width, world=4, step_ms=231.0)[0])
        assert width_of([(row, "")]) == width
        if "ms/step" in row:
            ends.add(row.index("ms/step"))
    assert len(ends) <= 1


def test_hint_without_a_value_or_prediction() -> None:
    assert hint_text(Hint("move the data to a local disk", ""), 231.0).startswith("move the data")
    assert "n/a" not in hint_text(Hint("x", "k", 1, 2, None), 231.0)
    assert hint_text(Hint("x", "k", 1, 2, (math.nan, 3.0)), None) == "k 1 -> 2"
    assert (
        hint_text(Hint("x", "k", 1, 2, (1.0, 3.0)), None) == "k 1 -> 2: predicted step 1.0..3.0 ms"
    )


@pytest.mark.parametrize(
    ("ranks", "world", "text"),
    [
        ((3,), 32, "rank 3"),
        (tuple(range(32)), 32, "all ranks"),
        ((0,), 1, "rank 0"),
        ((0, 1, 2, 5, 8, 9), 32, "ranks 0-2, 5, 8, 9"),
        ((), 4, ""),
    ],
)
def test_ranks_text(ranks: tuple[int, ...], world: int, text: str) -> None:
    assert ranks_text(ranks, world) == text


def test_detail_holds_evidence_ruled_out_and_hints() -> None:
    scene = scene_of(two_ranks(), findings=(few_workers(), peer_wait()))
    page = "\n".join(text_of(line) for line in finding_detail(few_workers(), scene, 100))
    for words in (
        "WHY",
        "data wait",
        "146 ms",
        "RULED OUT",
        "cpu_quota: none set",
        "TRY",
        "num_workers 1 -> 7",
        "gain",
        "open since step 1,180",
    ):
        assert words in page
    page = "\n".join(text_of(line) for line in finding_detail(peer_wait(), scene, 100))
    assert "FOLLOWS" in page
    assert "too few loader workers" in page


def test_a_resolved_finding_is_of_its_own_time() -> None:
    """Neither the step of now nor the age of what is over stands beside it."""
    scene = scene_of(two_ranks())
    page = "\n".join(text_of(line) for line in finding_detail(few_workers(), scene, 120))
    assert re.search(r"predicted step \d+ -> \d+\.\.\d+ ms", page)
    assert "gain " in page
    over = few_workers(state="resolved", opened_step=10, resolved_step=90)
    page = "\n".join(text_of(line) for line in finding_detail(over, scene, 120))
    assert re.search(r"predicted step \d+\.\.\d+ ms", page)
    assert "gain " not in page
    assert "was open from step 10 to 90" in page
    assert "open since" not in page


@given(st.integers(30, 200))
def test_detail_lines_have_the_width(width: int) -> None:
    scene = scene_of(two_ranks())
    bare = Finding("hang", "critical", (0,), (), math.nan, math.inf, "low", "学習 " * 60)
    for item in (few_workers(), peer_wait(), bare):
        assert {width_of(line) for line in finding_detail(item, scene, width)} == {width}


def test_no_finding_is_said_only_after_a_look() -> None:
    def said(scene: Scene) -> str:
        return " ".join(text_of(row) for row in quiet_rows(scene, 100))

    assert "nothing found" in said(scene_of(two_ranks()))
    assert "nothing found" not in said(scene_of(two_ranks(), diagnosed=False))
    young = one_run(run_view([rank_view()], window=7))
    assert "nothing found yet, after 7 steady steps" in said(young)
    assert "holds this run back" not in said(young)
    early = one_run(run_view([rank_view(phases=dict.fromkeys(PHASES))]))
    assert "waiting for steady steps" in said(early)
    assert "broke" in said(scene_of(two_ranks(), diagnosis_error="rule broke"))


# Header


@pytest.mark.parametrize(
    ("picture", "more", "word"),
    [
        (view([], link="connecting"), {}, "CONNECTING"),
        (view([], link="lost"), {}, "NO CONTACT"),
        (view([]), {}, "LIVE"),
        (two_ranks(), {}, "LIVE 0.1 s"),
        (two_ranks(), {"since_s": 4.0}, "SILENT 4.1 s"),
        (two_ranks(), {"paused": True}, "PAUSED"),
        (view([run_view([rank_view()], state="ended")]), {}, "ENDED"),
        (view([run_view([rank_view(state="gone")])]), {}, "GONE"),
        (view([run_view([rank_view(state="gone")], state="ended")]), {}, "GONE"),
        (replace(two_ranks(), link="replay"), {}, "REPLAY"),
    ],
)
def test_link_word(picture: View, more: dict[str, object], word: str) -> None:
    assert link_word(scene_of(picture, **more))[0] == word


def test_header_carries_simulated_loss_and_lost_frames() -> None:
    run = run_view([rank_view(loss=math.nan)], simulated=True, lost=3, dropped=2)
    line = text_of(header_line(scene_of(view([run], lost=7)), 120))
    assert " SIMULATED " in line
    assert "loss nan" in line
    assert "3 lost" in line
    assert "7 lost" in text_of(header_line(scene_of(view([], lost=7)), 120))
    assert "2 dropped" in line
    assert " SIMULATED " in text_of(header_line(scene_of(view([run])), 60))


def test_header_counts_runs_and_steps() -> None:
    picture = view([run_view([rank_view()]), run_view([rank_view()], run="r2")])
    line = text_of(header_line(scene_of(picture), 160))
    assert "run 1/2" in line
    assert "step 1,240/9,000" in line


def test_verdict_names_the_worst_trouble_first() -> None:
    ranks = [
        rank_view(0),
        rank_view(1, state="silent", age_s=5.0),
        rank_view(2, state="hung", phase="comm", phase_age_s=45.0),
    ]
    line = text_of(verdict_line(one_run(run_view(ranks)), 160))
    assert line.strip().startswith("✖ rank 2 hung in comm 45 s")
    ended = text_of(verdict_line(one_run(run_view(ranks, state="ended")), 160))
    assert "hung" not in ended


def test_the_end_of_a_run_says_what_was_wrong_with_it() -> None:
    well = rank_view(0, state="ended", state_reason="exit")
    dead = rank_view(1, state="gone", state_reason="its process has ended without a goodbye")
    failed = rank_view(1, state="ended", state_reason="exception: ValueError: no")
    for ranks, words in (
        ([well, dead], "✖ rank 1 gone: its process has ended without a goodbye"),
        ([dead, dead], "✖ 2 ranks gone: its process has ended without a goodbye"),
        ([well, failed], "▲ rank 1 ended: exception: ValueError: no"),
    ):
        scene = one_run(run_view(ranks, state="ended"))
        assert text_of(verdict_line(scene, 120)).strip().startswith(words)
    over = text_of(verdict_line(one_run(run_view([well, well], state="ended")), 120))
    assert not {"✖", "▲"} & set(over.split(" │ ")[0])


def test_the_clock_of_a_run_that_is_over_stands() -> None:
    began_s = NOW_S - 5000.0
    over = [rank_view(n, state="ended", ended_s=began_s + 26.0 - n) for n in range(2)]
    run = run_view(over, state="ended", started_s=began_s)
    assert "00:00:26" in text_of(header_line(scene_of(view([run])), 120))
    unknown = run_view([over[0], rank_view(1, state="gone")], state="ended", started_s=began_s)
    assert "01:23:20" in text_of(header_line(scene_of(view([unknown])), 120))


def test_verdict_shows_the_message_when_contact_is_lost() -> None:
    picture = replace(two_ranks(), link="lost", message="ssh to node1 ended")
    assert "ssh to node1 ended" in text_of(verdict_line(scene_of(picture), 120))


# Machine


def test_host_ranks_and_workers_are_drawn() -> None:
    picture = two_ranks()
    lines = node_lines(picture.nodes[0], picture.runs[0].ranks, 100)
    page = "\n".join(text_of(line) for line in lines)
    for words in ("96%", "3.1/7.8 GB", "load 4.1", "rank 0", "1 worker cpu", "no GPUs: no NVIDIA"):
        assert words in page


def test_a_host_without_sensors_says_why() -> None:
    node = node_view(host=None, sensors_reason="the sampler died", sensors_age_s=None)
    assert "the sampler died" in text_of(node_lines(node, (), 80)[0])
    assert "the sampler died" in text_of(host_row(node, 1, 80))


def test_devices_with_unknown_readings() -> None:
    picture = cluster(1, 2)
    gpu = picture.nodes[0].gpus[0]
    blind = replace(
        picture.nodes[0],
        gpus=(
            type(gpu)(0, gpu.uuid, "T4", {"gpu_util": ok(50.0, "%"), "sm_active": unknown("%")}),
        ),
    )
    line = next(
        text_of(x) for x in node_lines(blind, picture.runs[0].ranks, 120) if "gpu 0" in text_of(x)
    )
    assert "util  50%" in line
    assert "sm  n/a" in line
    assert "mem          n/a" in line
    assert "rank 0" in line


# Everything at every width

ODD_RUNS = {
    "two": two_ranks().runs[0],
    "cluster": cluster().runs[0],
    "one rank": run_view([rank_view(phases={**PHASES_MS, "comm": None})]),
    "no ranks": run_view([]),
    "no steps": run_view(
        [
            rank_view(
                phases=dict.fromkeys(PHASES),
                state="starting",
                hello=None,
                process=None,
                timeline=(),
                steps=0,
            )
        ],
        started_s=0.0,
    ),
    "nan": run_view(
        [
            rank_view(
                phases=dict.fromkeys(PHASES, math.nan),
                own_ms=math.nan,
                loss=math.nan,
                data_wait_ratio=math.nan,
            )
        ],
        loss=math.inf,
        epoch=math.nan,
        samples_per_s=math.nan,
        step_ms=math.nan,
    ),
    "1,024": run_view(HEAT_RANKS),
    "wide name": run_view([rank_view(node="学習サーバ" * 9)], name="学習ジョブ" * 30),
}


@pytest.mark.parametrize("name", ODD_RUNS)
@pytest.mark.parametrize("width", [60, 80, 120, 160, 300])
def test_every_picture_has_the_width_and_only_known_styles(name: str, width: int) -> None:
    run = ODD_RUNS[name]
    events = (Event(0.0, "学習" * 99), Event(NOW_S, "x", "critical"), Event(NOW_S, "y", "odd"))
    picture = view([run], events=events, notices=("a notice " * 40,))
    odd = Finding("x", "odd", tuple(range(len(run.ranks))) or (0,), (), None, None, "low", "")
    scene = scene_of(picture, findings=(few_workers(), odd), abstained=(Abstain("numa", "sysfs"),))
    node = scene.nodes[0]
    columns = columns_for(width, len(run.nodes) > 1)
    assert scene.summary is not None
    lines: list[Line] = [
        header_line(scene, width),
        verdict_line(scene, width),
        *step_lines(scene, width, 9),
        legend(None, width),
        header_row(columns),
        *(rank_row(rank, columns, None) for rank in run.ranks[:9]),
        *heat_lines(run, width, 4),
        heat_row(run, width),
        *(row for f in scene.findings for row in finding_rows(f, width, world=2, step_ms=None)),
        *quiet_rows(scene, width),
        *finding_detail(odd, scene, width),
        node_heading(node, 3, 9.0, width, True),
        host_row(node, 3, width),
        host_row(None, 0, width),
        *node_lines(node, run.ranks, width),
        *node_lines(None, (), width),
        *timeline_lines(scene.rank, scene, width, 5),
        timeline_row(scene.rank, scene, width),
        timeline_row(None, scene, width),
        *event_lines(scene, width, 8),
        *event_lines(scene, width, 2, compact=True),
        *idle_lines(scene, width),
        *help_lines(width),
        footer_line([("q", "quit", "quit")] * 30, width, 1),
        *too_small_lines(width, 3),
    ]
    for line in lines:
        assert width_of(line) == width, text_of(line)
        assert {style for _, style in line} <= STYLES.keys()


def test_ten_thousand_ranks_are_summarised() -> None:
    ranks = [replace(HEAT_RANKS[i % 1024], rank=i, node=f"n{i // 8}") for i in range(10_000)]
    scene = one_run(run_view(ranks))
    assert scene.summary is not None
    assert scene.run is not None
    assert len(heat_lines(scene.run, 58, 12)) <= 12
    assert len(scene.order) == 10_000


@pytest.mark.parametrize("link", ["connecting", "live", "lost", "replay"])
def test_idle_picture_names_the_commands(link: str) -> None:
    scene = Scene(View(0, 0.0, link=link, message="m", notices=("n",)))
    page = "\n".join(text_of(line) for line in idle_lines(scene, 100))
    if link in ("live", "replay"):
        assert "gpuwatch demo" in page
        assert "import gpuwatch; gpuwatch.watch()" in page
    assert "m" in page


# Layout


@given(
    st.integers(1, 320),
    st.integers(1, 120),
    st.builds(
        Content,
        st.booleans(),
        message=st.integers(0, 12),
        ranks=st.integers(0, 10_000),
        findings=st.integers(0, 60),
        heat=st.integers(0, 14),
        machine=st.integers(0, 30),
    ),
)
def test_panes_stay_on_the_screen_and_apart(width: int, height: int, content: Content) -> None:
    rects = list(plan(width, height, content).rects.values())
    taken: set[tuple[int, int]] = set()
    for rect in rects:
        assert rect.height > 0
        assert 0 <= rect.x < rect.x + rect.width <= width
        assert 0 <= rect.y < rect.y + rect.height <= height
        # A pane's left and right edge stand for its cells: panes are either side by side or not.
        cells = {
            (x, rect.y + dy) for dy in range(rect.height) for x in (rect.x, rect.x + rect.width - 1)
        }
        assert not taken & cells
        taken |= cells


def test_sections_that_just_fit_leave_the_footer_free() -> None:
    for width in (80, 120, 160):
        for height in range(12, 70):
            for ranks in (1, 2, 5):
                content = Content(True, ranks=ranks, findings=4, heat=2, machine=3)
                rects = plan(width, height, content).rects
                footer = rects.pop("footer")
                assert max(rect.y + rect.height for rect in rects.values()) <= footer.y


@pytest.mark.parametrize("findings", [1, 2, 4])
@pytest.mark.parametrize("machine", [3, 4, 6])
@pytest.mark.parametrize("height", [24, 28, 32, 40, 60])
def test_no_line_of_a_narrow_screen_is_left_blank(findings: int, machine: int, height: int) -> None:
    found = plan(120, height, Content(True, ranks=2, findings=findings, machine=machine))
    rects = found.rects
    footer, header = rects.pop("footer"), rects.pop("header")
    gaps = footer.y - header.height - sum(rect.height for rect in rects.values())
    # A line around each section at most.
    assert 0 <= gaps <= len(rects) + 1
    if height >= 32:
        assert not found.compact
        assert rects["timeline"].height >= 3
        assert rects["events"].height >= 3
    if height >= 60:
        assert rects["timeline"].height >= CURVES_FROM


def test_what_matters_is_on_the_smallest_screen() -> None:
    shown = plan(80, 24, Content(True, ranks=2, findings=4, machine=3))
    assert {"header", "steps", "findings", "ranks", "machine", "timeline"} <= shown.rects.keys()
    assert shown.rects["findings"].height >= 5
    assert shown.rects["ranks"].height >= 4


def test_allocate_serves_the_first_first() -> None:
    assert allocate(5, [("a", 3, 9), ("b", 2, 2), ("c", 1, 1)]) == {"a": 3, "b": 2}
    assert allocate(9, [("a", 3, 9), ("b", 2, 2)]) == {"a": 7, "b": 2}
    assert allocate(9, [("a", 3, 9), ("b", 2, 2)], gap=1) == {"a": 5, "b": 2}
