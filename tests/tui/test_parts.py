"""Filters, settings, themes, ASCII, the past and the log: functions without a screen."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch.diagnosis.types import LifeEvent
from gpuwatch.schema import PHASES, GpuSample, Reply
from gpuwatch.store.views import Rollup
from gpuwatch.tui.config import Config, config_path, load_config, read_config
from gpuwatch.tui.export import write_files
from gpuwatch.tui.filters import filter_findings, filter_gpus, filter_ranks, matches
from gpuwatch.tui.keymap import ACTIONS, help_entries, label_of
from gpuwatch.tui.log import FindingLog, merged
from gpuwatch.tui.metrics import METRICS, metric_text, next_metric
from gpuwatch.tui.past import KEPT_S, RANK_FIELDS, Past, grid, nodes_at, run_at
from gpuwatch.tui.render import numbers
from gpuwatch.tui.render.bars import PHASE_GLYPHS
from gpuwatch.tui.render.braille import braille_rows
from gpuwatch.tui.render.findings import SEVERITY_GLYPHS
from gpuwatch.tui.render.glyphs import to_ascii
from gpuwatch.tui.render.heat import heat_grid, heat_lines, heat_values, rank_under
from gpuwatch.tui.render.keys import footer_line, footer_spans
from gpuwatch.tui.render.markdown import finding_markdown, report_markdown
from gpuwatch.tui.render.spark import BLOCKS
from gpuwatch.tui.render.stacks import stack_lines
from gpuwatch.tui.render.text import Line, cells, fit, width_of
from gpuwatch.tui.terminal import has_few_colours, needs_ascii
from gpuwatch.tui.theme import PALETTES, STYLES, use_theme
from gpuwatch.tui.theme import PHASES as THEME_PHASES
from gpuwatch.tui.widgets.pane import changed_span
from tests.tui import fakes
from tests.tui.fakes import NOW_S, few_workers, peer_wait, rank_view, run_view
from tests.tui.snapshots import text_of
from tests.tui.test_pictures import scene_of

ANY = st.none() | st.floats(allow_nan=True, allow_infinity=True)


# What the first picture does not need is not loaded for it

LATER = (
    *("compare", "events", "finding", "findings", "gpu", "gpus", "heat", "help"),
    *("palette", "rank", "ranks", "reading", "runs", "sides", "stacks"),
    *("asking", "knobs", "memory", "profile"),
)


def test_views_are_loaded_when_they_are_opened() -> None:
    code = (
        "import sys, gpuwatch.tui.app; "
        "print(*[m for m in sys.modules if m.startswith(('gpuwatch', 'tomllib'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(done.stdout.split())
    assert "gpuwatch.tui.screens.overview" in loaded
    assert not {f"gpuwatch.tui.screens.{name}" for name in LATER} & loaded
    parts = ("charts", "braille", "checks", "compare", "rank", "gpus", "markdown", "stacks")
    assert not {f"gpuwatch.tui.render.{name}" for name in parts} & loaded
    later = ("answers", "changes", "checks", "fetch", "profiling", "requests", "sides", "tracks")
    assert not {f"gpuwatch.tui.{name}" for name in later} & loaded
    assert not {f"gpuwatch.store.{name}" for name in ("blocks", "compare", "track")} & loaded
    assert not {"tomllib", "gpuwatch.tui.export", "gpuwatch.tui.widgets.prompt"} & loaded
    assert not {name for name in loaded if name.startswith("gpuwatch.diagnosis")}


# Filters


@pytest.mark.parametrize(
    ("words", "passes"),
    [
        ("", True),
        ("24", True),
        ("2", False),
        ("8-30", True),
        ("25..31", False),
        ("NODE3", True),
        ("!node3", False),
        ("node3 !24", False),
        ("node3 straggler", True),
        ("!", True),
        ("9999999999", False),
    ],
)
def test_all_words_of_a_filter_must_hold(words: str, passes: bool) -> None:
    assert matches(words, [24], ["node3", "training", "F1 straggler", ""]) is passes


def test_ranks_findings_and_devices_are_filtered() -> None:
    ranks = [rank_view(i, node=f"node{i // 2}") for i in range(4)]
    silent = replace(ranks[3], state="silent")
    assert filter_ranks("node1", ranks, {}) == [2, 3]
    assert filter_ranks("silent", [*ranks[:3], silent], {}) == [3]
    assert filter_ranks("f1", ranks, {2: "F1 straggler"}) == [2]
    assert filter_findings("critical", [few_workers(), peer_wait()]) == (few_workers(),)
    gpu = GpuSample(3, "GPU-a", "H100", {}, reasons=("power cap",))
    rows = [("node0", gpu, 7)]
    assert filter_gpus("power", rows) == filter_gpus("7", rows) == filter_gpus("node0/3", rows)
    assert filter_gpus("8", rows) == []


# Settings


def test_settings_are_read() -> None:
    text = 'theme = "light"\nascii = true\n[keys]\npause = "P, space"\nfilter = "/"\n'
    config = read_config(text)
    assert config == Config("light", True, {"pause": "P,space", "filter": "/"})
    assert label_of("pause", config.keys) == "P"
    assert ("P space", ACTIONS["pause"].words) in help_entries(["pause"], config.keys)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("theme = 'lihgt'", "no theme 'lihgt'; did you mean light?"),
        ("[keys]\npasue = 'p'", "no action 'pasue'; did you mean pause?"),
        ("[keys]\npause = 7", "keys.pause = 7 is no key"),
        ("[keys]\npause = 'ctrl + p'", "is no key"),
        ("[keys]\npause = ''", "is no key"),
        ("colour = 1", "no setting 'colour'"),
        ("ascii = 'yes'", "ascii is true or false, not 'yes'"),
        ("keys = 3", "no setting 'keys'"),
        ("theme = ", "config.toml: "),
    ],
)
def test_a_setting_that_cannot_be_used_is_one_sentence(text: str, sentence: str) -> None:
    config = read_config(text)
    assert len(config.problems) == 1
    assert sentence in config.problems[0]
    assert "\n" not in config.problems[0]
    assert (config.theme, config.ascii, config.keys) == ("", None, {})


def test_one_wrong_key_leaves_the_others() -> None:
    config = read_config("theme = 'dark'\n[keys]\nnothing = 'x'\nhelp = 'f1'\n")
    assert config.theme == "dark"
    assert config.keys == {"help": "f1"}
    assert len(config.problems) == 1


def test_where_settings_are(tmp_path: Path) -> None:
    assert config_path({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}) == Path("/x/gpuwatch/config.toml")
    assert config_path({"HOME": "/h"}) == Path("/h/.config/gpuwatch/config.toml")
    # A relative path there is not valid (XDG base directories), so it is not used.
    assert config_path({"XDG_CONFIG_HOME": "x", "HOME": "/h"}).parts[1] == "h"
    path = tmp_path / "config.toml"
    assert load_config(path) == Config()
    path.write_bytes(b"\xff\xfe")
    assert "cannot be read" in load_config(path).problems[0]
    path.write_text("#" * 70_000)
    assert "too large" in load_config(path).problems[0]
    path.write_text("theme = 'contrast'")
    assert load_config(path).theme == "contrast"


# Themes and terminals


def test_every_theme_has_every_style_and_every_one_a_ground() -> None:
    use_theme("dark")
    names = set(STYLES)
    assert THEME_PHASES == PHASES
    try:
        for name in PALETTES:
            use_theme(name)
            assert set(STYLES) == names
            assert all(style.bgcolor is not None or style.reverse for style in STYLES.values())
            assert all(style.color is not None for style in STYLES.values())
    finally:
        use_theme("dark")


def _linear(colour: str) -> tuple[float, ...]:
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return tuple(v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)


# Machado, Oliveira and Fernandes 2009, severity 1.0.
BLIND = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
               (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
               (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
               (0.004733, 0.691367, 0.303900)),
}  # fmt: skip


def _lab(rgb: tuple[float, ...]) -> tuple[float, float, float]:
    r, g, b = (min(1.0, max(0.0, v)) for v in rgb)
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def _seen(colour: str, kind: str) -> tuple[float, float, float]:
    rgb = _linear(colour)
    return _lab(tuple(sum(m * v for m, v in zip(row, rgb, strict=True)) for row in BLIND[kind]))


@pytest.mark.parametrize("name", ["dark", "light", "contrast"])
def test_colours_stay_apart_for_every_eye(name: str) -> None:
    palette = PALETTES[name]
    severities = [palette.red, palette.amber, palette.ok, palette.dim]
    for kind in BLIND:
        # 10 in Lab is about what is told apart in small text side by side.
        for group, least in ((severities, 9.0), (palette.phases, 8.0)):
            seen = [_seen(colour, kind) for colour in group]
            for i, one in enumerate(seen):
                for other in seen[i + 1 :]:
                    assert math.dist(one, other) >= least, (kind, group)


@pytest.mark.parametrize("name", ["dark", "light", "contrast"])
def test_text_can_be_read_and_heat_rises(name: str) -> None:
    palette = PALETTES[name]

    def luminance(colour: str) -> float:
        r, g, b = _linear(colour)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    def contrast(colour: str) -> float:
        pair = sorted([luminance(colour), luminance(palette.background)])
        return (pair[1] + 0.05) / (pair[0] + 0.05)

    for colour in (palette.text, palette.strong, palette.red, palette.amber, palette.ok):
        assert contrast(colour) >= 4.5, colour
    assert contrast(palette.dim) >= 4.5
    steps = [contrast(colour) for colour in palette.heat]
    assert steps == sorted(steps)


def test_meaning_is_in_the_glyph() -> None:
    assert len(set(SEVERITY_GLYPHS.values())) == 3
    assert len(set(PHASE_GLYPHS.values())) == len(PHASES)
    # In ASCII too.
    for glyphs in (SEVERITY_GLYPHS.values(), PHASE_GLYPHS.values(), BLOCKS):
        plain = [to_ascii(glyph) for glyph in glyphs]
        assert len(set(plain)) == len(plain)
        assert all(len(glyph) == 1 and glyph.isascii() for glyph in plain)


@given(st.text(max_size=60))
def test_ascii_has_the_width_of_what_it_stands_for(text: str) -> None:
    plain = to_ascii(text)
    assert plain.isascii()
    assert cells(plain) == cells(text) or not text.isprintable()


def test_curves_in_ascii_are_darker_where_they_are_higher() -> None:
    rows = braille_rows([0.0, 0.0, 50.0, 50.0, 100.0, 100.0], 3, 1, 0.0, 100.0)
    assert to_ascii(rows[0]) == ":-@" or to_ascii(rows[0]) == ":=@"


@pytest.mark.parametrize(
    ("environ", "encoding", "plain"),
    [
        ({"TERM": "xterm-256color", "LANG": "en_US.UTF-8"}, "utf-8", False),
        ({"TERM": "xterm-256color"}, "utf-8", False),
        ({"TERM": "linux", "LANG": "en_US.UTF-8"}, "utf-8", True),
        ({"TERM": "vt100"}, "utf-8", True),
        ({"TERM": "xterm", "LANG": "de_DE.ISO-8859-1"}, "utf-8", True),
        ({"TERM": "xterm", "LC_ALL": "C", "LC_CTYPE": "C.UTF-8"}, "utf-8", True),
        ({"TERM": "xterm", "LC_CTYPE": "C.UTF-8"}, "utf-8", False),
        ({"TERM": "xterm"}, "ascii", True),
        ({"TERM": "xterm"}, None, False),
    ],
)
def test_when_only_ascii_is_drawn(
    environ: dict[str, str], encoding: str | None, plain: bool
) -> None:
    assert needs_ascii(environ, encoding) is plain


def test_sixteen_colours() -> None:
    assert has_few_colours("standard")
    assert not has_few_colours("256")
    assert not has_few_colours(None)


# Curves


@given(st.lists(ANY, max_size=300), st.integers(1, 120), st.integers(1, 4), ANY, ANY)
def test_braille_has_the_width(
    values: list[float | None], width: int, rows: int, low: float | None, high: float | None
) -> None:
    drawn = braille_rows(values, width, rows, low or 0.0, high or 1.0)
    assert [len(row) for row in drawn] == [width] * rows


def test_zero_and_unknown_look_different() -> None:
    assert braille_rows([0.0, 0.0, None, None], 2, 1, 0.0, 9.0) == ["⣀ "]
    assert braille_rows([9.0, 9.0, 4.0, 5.0], 2, 1, 0.0, 9.0)[0][0] == "⣿"


def test_a_grid_keeps_spikes_and_gaps() -> None:
    points = [(float(t), 1.0) for t in range(100)]
    points[50] = (50.0, 99.0)
    out = grid(points, 100.0, 100.0, 20)
    assert max(value for value in out if value is not None) == 99.0
    assert out.count(99.0) == 1
    sparse = grid([(0.0, 1.0), (60.0, 2.0)], 100.0, 100.0, 100, hold_s=6.0)
    assert sparse[3] == 1.0
    assert sparse[30] is None
    assert sparse[62] == 2.0
    assert grid([(5.0, math.nan), (5.5, None)], 10.0, 10.0, 10)[5] is None
    assert grid([], 10.0, 0.0, 10) == []


# The past


def test_a_moment_is_what_was() -> None:
    past = Past()
    rank = rank_view(
        3,
        timeline=(
            Rollup(int(NOW_S) - 1, 4, 90.0, 200.0, 900.0, 77.0),
            Rollup(int(NOW_S), 1, 1.0, 1.0, 1.0, 1.0),
        ),
        queue_depth=None,
    )
    run = run_view([rank])
    gpu = fakes.gpu_sample(0)
    assert past.keep(run, {gpu.uuid: gpu}, (few_workers(),), NOW_S)
    moment = past.at("r1", NOW_S + 5)
    assert moment is not None
    assert moment.rank(3, "own_ms") == pytest.approx(rank.own_ms)
    # The open second has not seen all of its steps.
    assert moment.rank(3, "second_max_ms") == 900.0
    assert moment.rank(3, "queue_depth") is None
    assert moment.rank(4, "own_ms") is None
    assert moment.gpu(gpu.uuid, "gpu_util") == pytest.approx(71.0)
    assert moment.gpu(gpu.uuid, "tensor_active") is None
    later = run_view([replace(rank, own_ms=1.0, steps=9999, state="silent")], steps=9999)
    then = run_at(later, moment)
    assert then.steps == run.steps
    assert then.ranks[0].own_ms == pytest.approx(rank.own_ms)
    assert then.ranks[0].state == "training"
    node = fakes.node_view(gpus=1)
    known = nodes_at([node], moment)[0].gpus[0].readings["gpu_util"]
    assert known.value == pytest.approx(71.0)


def test_unknown_in_the_past_stays_unknown() -> None:
    past = Past()
    gpu = fakes.gpu_sample(0, util=None)
    past.keep(run_view([rank_view()]), {gpu.uuid: gpu}, (), NOW_S)
    moment = past.at("r1", NOW_S)
    assert moment is not None
    reading = nodes_at([fakes.node_view(gpus=1)], moment)[0].gpus[0].readings["gpu_util"]
    assert (reading.value, reading.state) == (None, "na")
    assert reading.reason


def test_ten_minutes_are_kept_and_large_runs_more_seldom() -> None:
    past = Past()
    run = run_view([rank_view(seconds=0)])
    for second in range(700):
        past.keep(run, {}, (), NOW_S + second)
        past.keep(run, {}, (), NOW_S + second + 0.25)
    moments = past.moments("r1")
    assert len(moments) == KEPT_S + 1
    assert moments[-1].at_s - moments[0].at_s == KEPT_S
    # What does not change is kept once.
    assert moments[0].ranks is moments[-1].ranks
    assert moments[0].states is moments[-1].states
    assert past.interval_s(128) == 1.0
    assert past.interval_s(1024) == 8.0
    assert past.interval_s(10_000) == 79.0
    assert len(moments[0].values) == len(RANK_FIELDS)


def test_a_clock_that_was_set_back_begins_anew() -> None:
    past = Past()
    run = run_view([rank_view(seconds=0)])
    for at_s in (100.0, 101.0, 50.0, 51.0):
        assert past.keep(run, {}, (), at_s)
    assert [moment.at_s for moment in past.moments("r1")] == [50.0, 51.0]


def test_only_few_runs_are_kept() -> None:
    past = Past()
    for i in range(9):
        past.keep(run_view([rank_view(seconds=0)], run=f"r{i}"), {}, (), NOW_S)
    assert sum(bool(past.moments(f"r{i}")) for i in range(9)) == 4
    assert past.at("r0", NOW_S) is None


# Metrics and the heat map


def test_metrics_of_a_rank_without_a_device() -> None:
    rank = rank_view()
    known = {metric.name for metric in METRICS if metric.get(rank, None) is not None}
    assert {"own", "data_wait", "memory", "queue"} <= known
    assert not {"gpu_util", "power"} & known
    names = []
    name = "own"
    for _ in range(len(known)):
        name = next_metric(name, [rank], [None])
        names.append(name)
    assert set(names) == known
    assert all(metric_text(metric, math.nan) == "n/a" for metric in METRICS)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(20, 200), st.integers(1, 40))
def test_every_rank_has_its_place_in_the_heat_map(
    ranks: int, per_node: int, width: int, rows: int
) -> None:
    run = run_view([replace(RANK, rank=i, node=f"node{i // per_node}") for i in range(ranks)])
    plan = heat_grid(run, width, rows)
    assert len(plan.rows) <= rows
    placed = [
        plan.positions[i]
        for _, glyphs in plan.rows
        for _, first, last in glyphs
        for i in range(first, last + 1)
    ]
    assert sorted(placed) == list(range(ranks))
    for _, glyphs in plan.rows:
        places = [x for x, _, _ in glyphs]
        assert places == sorted(set(places))
        assert places[-1] < width


RANK = rank_view(0, seconds=0, workers=0)


def test_the_rank_under_the_mouse() -> None:
    run = fakes.heavy().runs[0]
    plan = heat_grid(run, 80, 20)
    values = heat_values(run, METRICS[0], {})
    label, glyphs = plan.rows[3]
    x, first, _ = glyphs[10]
    assert rank_under(plan, values, x, 3) == plan.positions[first]
    assert rank_under(plan, values, 0, 3) is None
    assert rank_under(plan, values, x, 99) is None
    assert label.startswith("node")


def test_the_greatest_of_a_glyph_is_the_one_that_is_chosen() -> None:
    ranks = [replace(RANK, rank=i, own_ms=900.0 if i == 7 else 100.0) for i in range(64)]
    run = run_view(ranks)
    plan = heat_grid(run, 20, 2)
    assert plan.per_glyph > 1
    found = [
        rank_under(plan, heat_values(run, METRICS[0], {}), x, y)
        for y, (_, glyphs) in enumerate(plan.rows)
        for x, _, _ in glyphs
    ]
    assert 7 in found
    assert len(found) == len(set(found))


def test_a_metric_that_no_rank_knows_says_why() -> None:
    run = run_view([rank_view(phases={**fakes.PHASES_MS, "comm": None})])
    comm = next(metric for metric in METRICS if metric.name == "comm")
    (line,) = heat_lines(run, 80, 5, metric=comm)
    assert "comm ms n/a: one process: no communication" in text_of(line)


# The log


def test_the_life_of_a_finding_is_logged() -> None:
    log = FindingLog()
    opened = few_workers(cost_ms=58.0)
    log.take("r1", [opened], NOW_S)
    log.take("r1", [replace(opened, cost_ms=59.0)], NOW_S + 20)
    log.take("r1", [replace(opened, cost_ms=90.0)], NOW_S + 22)
    log.take("r1", [replace(opened, cost_ms=20.0)], NOW_S + 23)  # too soon to be told again
    log.take("r1", [replace(opened, cost_ms=20.0, severity="warning")], NOW_S + 40)
    log.take("r1", [replace(opened, state="resolved", resolved_step=2000)], NOW_S + 50)
    log.take("r1", [replace(opened, state="resolved", resolved_step=2000)], NOW_S + 51)
    log.take("r1", [replace(opened, opened_step=2100)], NOW_S + 60)
    assert [event.text for event in log.events] == [
        "F1 opened: too few loader workers  +58 ms/step",
        "F1 cost 58 -> 90 ms/step",
        "F1 is now warning, was critical",
        "F1 resolved at step 2,000",
        "F1 reopened at step 2,100: too few loader workers  +58 ms/step",
    ]
    picture = fakes.two_ranks()
    texts = [event.text for event in merged(picture, log, "r1")]
    assert len(texts) == 8
    assert len(merged(picture, log, "other")) == 3
    times = [event.at_s for event in merged(picture, log, None)]
    assert times == sorted(times, reverse=True)


def test_a_finding_that_came_back_before_we_came_is_said_to_have_come_back() -> None:
    life = tuple(LifeEvent(*turn, 0.0) for turn in (("opened", 40), ("reopened", 90)))
    log = FindingLog()
    log.take("r1", [few_workers(opened_step=90, life=life)], NOW_S)
    assert log.events[0].text.startswith("F1 reopened at step 90: ")


def test_a_finding_that_was_resolved_before_we_came_is_no_news() -> None:
    log = FindingLog()
    log.take("r1", [few_workers(state="resolved", resolved_step=9)], NOW_S)
    assert log.events == ()


SEGMENTS = st.lists(
    st.tuples(st.text("ab▇学 ", max_size=5), st.sampled_from(["text", "dim"])), max_size=5
)


@given(SEGMENTS, SEGMENTS)
def test_only_what_differs_is_painted_again(old: Line, new: Line) -> None:
    width = max(width_of(old), width_of(new))
    one, other = fit(list(old), width), fit(list(new), width)
    span = changed_span(one, other, width)
    shown = [[(c, style) for text, style in line for c in text] for line in (one, other)]

    def cells_of(line: Line) -> list[tuple[str, str]]:
        # One entry a cell; the second cell of a wide character is empty.
        return [
            pair
            for char, style in line
            for pair in [(char, style), *[("", style)] * (width_of([(char, style)]) - 1)]
        ]

    before, after = map(cells_of, shown)
    if span is None:
        assert before == after
        return
    first, last = span
    assert 0 <= first < last <= width
    assert before[:first] == after[:first]
    assert before[last:] == after[last:]


def test_a_line_of_another_width_is_painted_as_a_whole() -> None:
    assert changed_span([("abc", "text")], [("abcd", "text")], 4) == (0, 4)
    assert changed_span([], [("abcd", "text")], 4) == (0, 4)
    assert changed_span([("abcd", "text")], [("abXd", "text")], 4) == (2, 3)
    assert changed_span([("abcd", "text")], [("abcd", "dim")], 4) == (0, 4)
    assert changed_span([("abcd", "dim")], [("abcd", "dim")], 4) is None


@pytest.mark.parametrize("selected", [0, 5, 11])
def test_the_selected_rank_keeps_the_height_that_is_its_value(selected: int) -> None:
    ranks = [fakes.rank_view(i, node=f"node{i // 8}", own_ms=100.0 + 9 * i) for i in range(12)]
    run = fakes.run_view(ranks)
    plain = heat_lines(run, 60, 4)
    marked = heat_lines(run, 60, 4, selected=selected)
    glyphs = ["".join(c for c in text_of(row)[9:] if c in "▁▂▃▄▅▆▇█") for row in plain[:2]]
    assert glyphs == ["".join(c for c in text_of(row)[9:] if c in "▁▂▃▄▅▆▇█") for row in marked[:2]]
    assert not any(STYLES[style].reverse for row in marked for _, style in row)
    # Not by colour alone: its row is marked at the left, its glyph from below.
    assert [text_of(row)[0] for row in marked[:2]] == (["▌", " "] if selected < 8 else [" ", "▌"])
    place = text_of(marked[0]).index("▁") + selected % 8
    assert text_of(marked[2]).rstrip() == " " * place + "↑"
    assert f"rank {selected}" in text_of(marked[3])
    # Where no line is left for the pointer the ranks go before it.
    assert len(heat_lines(run, 60, 3, selected=selected)) == 3
    assert "↑" not in "".join(text_of(row) for row in heat_lines(run, 60, 3, selected=selected))


# Footer, stacks, files


@given(st.integers(40, 200), st.integers(0, 5))
def test_help_and_quit_are_always_in_the_footer(width: int, view: int) -> None:
    keys = [(chr(97 + i), "something", "copy") for i in range(12)]
    keys += [("?", "help", "help"), ("q", "quit", "quit")]
    line = footer_line(keys, width, view)
    assert width_of(line) == width
    assert (
        text_of(line)
        .rstrip()
        .endswith("? help   q quit" if width >= (132 if view else 100) else "? help  q quit")
    )
    for start, end, action in footer_spans(keys, width, view):
        assert 0 <= start < end <= width
        text = text_of(line)[start:end]
        assert text == text.strip()
        assert action in ACTIONS


def test_stacks_say_what_is_waited_for() -> None:
    def said(**more: object) -> str:
        rank = rank_view(0, **more)
        return "\n".join(text_of(line) for line in stack_lines(0, rank, None, "", 4.0, 80))

    assert "held up by the GIL" in said()
    assert "it is gone (exit code 1)" in said(state="gone", state_reason="exit code 1")
    lines = stack_lines(0, None, None, "", 0.1, 80)
    assert "asking the rank" in text_of(lines[2])
    assert {width_of(line) for line in lines} == {80}


def test_a_report_holds_every_finding_and_stays_a_table(tmp_path: Path) -> None:
    scene = scene_of(fakes.two_ranks())
    text = report_markdown(scene)
    for words in ("# resnet50-ddp", "## F1", "## F2", "Ruled out:", "Follows F1.", "goodput 37%"):
        assert words in text
    odd = few_workers(summary="a | b\nc", ruled_out=("x | y",))
    assert "a \\| b c" in finding_markdown(odd, scene)
    run = replace(scene.run, name="../../etc/passwd", simulated=True)  # type: ignore[type-var]
    paths = [write_files(replace(scene, run=run), "<svg/>", tmp_path) for _ in range(3)]
    assert len({path for pair in paths for path in pair}) == 6
    assert all(path.parent == tmp_path for pair in paths for path in pair)
    assert "**SIMULATED**" in paths[0][1].read_text()


def test_bytes_a_second() -> None:
    texts = [numbers.bytes_rate(v) for v in (None, 0.0, 999.0, 1e3, 180e6, 3.1e9, 41e9, math.inf)]
    assert texts == [
        "n/a",
        "0 B/s",
        "999 B/s",
        "1.0 kB/s",
        "180 MB/s",
        "3.1 GB/s",
        "41 GB/s",
        "n/a",
    ]


def test_what_a_rank_waits_for_stands_above_its_stacks() -> None:
    words = "waits in DistributedDataParallel's all-reduce of the gradients over gloo"
    data = 'Thread MainThread:\n  File "graph.py", line 1, in _engine_run_backward\n'
    reply = Reply("id", "done", words, data)
    shown = [text_of(line) for line in stack_lines(0, rank_view(), reply, "", 0.1, 100)]
    place = next(i for i, line in enumerate(shown) if words in line)
    assert any("_engine_run_backward" in line for line in shown[place + 1 :])
    assert not any(words in line for line in shown[place + 1 :])
