"""On the smallest screen nothing is lost: what does not fit in a line can be read all the same."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import traces
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import set_cell_size
from rich.segment import Segment
from textual.events import MouseDown
from textual.pilot import Pilot

import gpuwatch.tui
from gpuwatch.commands.card import card_lines
from gpuwatch.commands.replay import replay
from gpuwatch.commands.text import status_lines
from gpuwatch.schema import GpuEvent, Knob, Logged, Reply
from gpuwatch.store.views import Event, View
from gpuwatch.tui import GpuwatchApp
from gpuwatch.tui.answers import read_memory
from gpuwatch.tui.changes import knob_rows, limits_text
from gpuwatch.tui.render.glyphs import to_ascii
from gpuwatch.tui.render.gpus import gpu_page
from gpuwatch.tui.render.knobs import LogEntry, knob_lines, log_lines
from gpuwatch.tui.render.memory import memory_lines
from gpuwatch.tui.render.output import match_cells, output_line, report_lines
from gpuwatch.tui.render.stacks import stack_lines
from gpuwatch.tui.render.text import Line, cells, hanging, middle, width_of, wrap
from gpuwatch.tui.render.timeline import timeline_row
from tests.tui.fakes import (
    KNOBS,
    NOW_S,
    PHASES_MS,
    few_workers,
    found,
    gpu_sample,
    node_view,
    rank_view,
    run_view,
    two_ranks,
    view,
    with_hello,
)
from tests.tui.snapshots import text_of
from tests.tui.test_app import drive, press, screen_text
from tests.tui.test_output import FakeJob
from tests.tui.test_pictures import scene_of

SMALL = (80, 24)

REASON = (
    "ssh://nosuchhost.invalid: no machine is called nosuchhost.invalid; look at the name, at "
    "/home/somebody/.ssh/config and at /etc/hosts, then try ssh nosuchhost.invalid true by hand"
)


def words_of(text: str) -> str:
    """Return what stands on a screen with every run of blanks as one."""
    return " ".join(text.split())


@given(st.text(st.sampled_from("ab /é学"), max_size=300), st.integers(10, 90))
def test_wrapped_text_is_whole(text: str, width: int) -> None:
    rows = wrap(text, width)
    assert "".join("".join(rows).split()) == "".join(text.split())
    assert all(cells(row) <= width for row in rows)


@given(st.text(st.sampled_from("ab /é学"), max_size=120), st.integers(0, 60))
def test_a_text_cut_in_the_middle_keeps_both_ends(text: str, width: int) -> None:
    short = middle(text, width)
    assert cells(short) <= width
    if cells(text) > width >= 8:
        front, end = short.split("…", maxsplit=1)
        assert text.startswith(front)
        assert text.endswith(end)
        assert cells(end) >= width // 2


def test_hanging_lines_stand_under_their_text() -> None:
    lines = hanging([(" ▲ ", "warning")], "one two three four five six", "text", 20)
    assert [text_of(line).rstrip() for line in lines] == [" ▲ one two three", "   four five six"]
    assert {width_of(line) for line in lines} == {20}


@pytest.mark.parametrize("key", ["1", "2", "4"])
def test_the_reason_of_no_contact_is_read_to_its_end_and_once(key: str) -> None:
    lost = replace(view([]), link="lost", message=REASON, notices=(REASON,))

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = words_of(await press(pilot, key))
        assert text.count(REASON) == 1
        assert text.count("nosuchhost.invalid true") == 1

    drive(lost, script, size=SMALL)


def test_a_notice_that_says_something_else_stands_beside_the_reason() -> None:
    lost = replace(view([]), link="lost", message=REASON, notices=(REASON, f"other {REASON}"))

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = words_of(screen_text(app))
        assert text.count(REASON) == 2
        assert f"▲ other {REASON}" in text

    drive(lost, script, size=SMALL)


def test_the_log_is_read_to_the_end_of_each_event() -> None:
    run = two_ranks().runs[0].run
    picture: View = replace(
        two_ranks(),
        notices=(f"standing: {REASON}",),
        events=(Event(NOW_S - 5, f"lost: {REASON}", "warning", run),),
    )

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "e")
        assert f"standing: {REASON}" in words_of(text)
        assert f"lost: {REASON}" in words_of(text)
        # The second line of an event stands under its first word, not under its time.
        rows = text.splitlines()
        at = next(i for i, row in enumerate(rows) if "lost:" in row)
        assert rows[at + 1].startswith(" " * rows[at].index("lost:"))
        assert rows[at + 1].strip()

    drive(picture, script, size=SMALL)


# A command's output


def of_output(*lines: str) -> FakeJob:
    job = FakeJob()
    job.output.feed(("\n".join(lines) + "\n").encode())
    return job


def test_long_lines_of_output_are_read_to_their_end() -> None:
    long = " ".join(f"w{i:03}" for i in range(60))  # 299 cells
    job = of_output("short", long, "学" * 60)

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "l")
        assert "← → sideways" in text.splitlines()[-1]
        assert "w059" not in text
        seen = set(re.findall(r"w\d{3}", text))
        for _ in range(6):
            text = await press(pilot, "right")
            rows = text.splitlines()
            seen |= set(re.findall(r"w\d{3}", text))
        assert seen == {f"w{i:03}" for i in range(60)}
        # The end of the longest line is the end of the way, and it is not marked as cut.
        assert rows[4].rstrip().endswith("w059")
        assert rows[4].startswith("…")
        assert await press(pilot, "right") == text
        for _ in range(9):
            text = await press(pilot, "left")
        assert text.splitlines()[3].startswith(" short")
        assert text.splitlines()[4].startswith(" w000")

    drive(two_ranks(), script, size=SMALL, job=job)


def test_short_lines_of_output_are_not_moved() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "l")
        assert "sideways" not in text
        assert await press(pilot, "right") == text

    drive(two_ranks(), script, size=SMALL, job=of_output("a", "b" * 79))


def test_a_search_brings_what_it_finds_into_sight() -> None:
    lines = [f"line {i}" for i in range(60)]
    lines[5] = "x" * 400 + " needle at the far end"
    lines[50] = "needle in front " + "x" * 400
    job = of_output(*lines)

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "l", "slash", *"needle", "enter")
        assert "▌needle in front" in text
        text = await press(pilot, "n")
        assert "needle at" in text
        assert "needle in front" not in text
        text = await press(pilot, "n")
        assert "▌needle in front" in text

    drive(two_ranks(), script, size=SMALL, job=job)


@given(
    st.text(st.sampled_from("ab é学🙂"), max_size=120),
    st.sampled_from(["", "a", "b学"]),
    st.integers(0, 140),
)
def test_a_line_that_is_scrolled_sideways_keeps_its_cells(text: str, words: str, left: int) -> None:
    whole = text_of(output_line(text, words, 400, current=True))[1:]
    part = output_line(text, words, 80, current=True, left=left)
    assert width_of(part) == 80
    shown = text_of(part)[1:]
    # Cell by cell, a wide character being two; half of one is a blank.
    cut = set_cell_size(Segment(whole).split_cells(left)[1].text, 79)
    if cells(Segment(whole.rstrip()).split_cells(left)[1].text) <= 79:
        assert shown == cut
    found = match_cells(text, words)
    assert (found is not None) == bool(words and words in text)
    if found is not None:
        first, last = found
        assert text_of([("", ""), (Segment(whole).split_cells(first)[1].text, "")]).startswith(
            words
        )
        assert last - first == cells(words)


def test_the_report_is_read_to_the_end_of_each_line() -> None:
    words = " ".join(f"w{i:03}" for i in range(40))
    job = of_output(f"    Traceback: {words}")
    job.log = "/tmp/" + "/".join(f"folder{i}" for i in range(12)) + "/output.log"
    card = [
        "gpuwatch: run r1  1,240 steps",
        f"  verdict   {words}",
        f"  stack     frame one {words}",
        "            frame two",
        f"  ✖ F1 loader_few_workers  ranks 0, 1  {words}",
        f"      try  num_workers 4 -> 12 {words}",
    ]
    rows = [text_of(line).rstrip() for line in report_lines(job, card, 80)]
    text = words_of(" ".join(row.lstrip("…") for row in rows))
    assert text.count(words) == 4
    assert job.log in "".join(row.strip() for row in rows)
    # A printed line is broken where it ends on the screen, in a word or not.
    at = next(i for i, row in enumerate(rows) if "Traceback" in row)
    printed = "".join(row[1:].ljust(78) for row in rows[at:]).rstrip()
    assert printed == f"    Traceback: {words}"
    # What goes on hangs from where it began, and no line is broken twice.
    at = next(i for i, row in enumerate(rows) if row.startswith("    verdict"))
    assert rows[at + 1].startswith(" " * 14 + "w")
    assert len(rows[at]) > 72
    at = next(i for i, row in enumerate(rows) if "try  num" in row)
    assert rows[at + 1].startswith(" " * 13 + "w")


def test_the_card_of_a_screen_is_not_folded_before_it_is_shown() -> None:
    rank = rank_view(notices=(), phases_na={"comm": "one process " + "and why so " * 40})
    card = card_lines(run_view([rank]), None, width=10_000)
    assert sum(line.startswith("  n/a") for line in card) == 1
    assert not any(line.endswith("...") for line in card)
    assert any(line.endswith("...") for line in card_lines(run_view([rank]), None))


# Stacks

PACKAGES = "/home/somebody/project/.venv/lib/python3.11/site-packages"

STACK = f"""Thread MainThread:
  File "/home/somebody/project/train.py", line 12, in <module>
    main()
  File "{PACKAGES}/torch/nn/parallel/distributed.py", line 1643, in forward
    else self._run_ddp_forward(*inputs, **kwargs) if self._delay_all_reduce_all_params else x
  File "{PACKAGES}/torch/{"deeper/" * 12}dataloader.py", line 733, in __next__
    data = self._next_data()
  File "/{"d" * 90}.py", line 1234, in {"function_" * 4}
"""


def test_a_call_keeps_its_line_and_its_function() -> None:
    lines = stack_lines(0, None, Reply("c1", "done", "", STACK), "", 0.1, 80)
    assert {width_of(line) for line in lines} == {80}
    rows = [text_of(line).rstrip() for line in lines]
    assert '   File "/home/somebody/project/train.py", line 12, in <module>' in rows
    assert '   File "…/torch/nn/parallel/distributed.py", line 1643, in forward' in rows
    at = next(i for i, row in enumerate(rows) if "dataloader.py" in row)
    assert rows[at].startswith('   File "…/deeper/deeper/')
    assert rows[at].endswith('/dataloader.py", line 733, in __next__')
    text = words_of("".join(rows))
    assert "self._delay_all_reduce_all_params else x" in words_of(" ".join(rows))
    assert "d" * 90 in "".join(row.strip() for row in rows)
    assert f"line 1234, in {'function_' * 4}" in words_of(" ".join(rows))
    assert text.index("function_") < text.index("dataloader")


@pytest.mark.parametrize("status", ["error", ""])
def test_why_there_are_no_stacks_is_read_to_its_end(status: str) -> None:
    error = "" if status else REASON
    reply = Reply("c1", "error", REASON, "") if status else None
    rows = [text_of(line) for line in stack_lines(0, None, reply, error, 0.1, 80)]
    assert REASON in words_of(" ".join(rows))


# Commands, memory, messages


def rows_of(lines: list[Line]) -> str:
    assert {width_of(line) for line in lines} == {80}
    return words_of(" ".join(text_of(line) for line in lines))


def test_knobs_are_read_to_the_end_of_each_column() -> None:
    knob = Knob(
        "augmentation.color_jitter_strength",
        "a-very-long-value-indeed",
        choices=("constant", "cosine", "linear", "inverse-square-root"),
        effective="at the first step of the next epoch, for the workers that start then",
    )
    picture = with_hello(two_ranks(), knobs=(knob,))
    (row,) = knob_rows(picture.runs[0])
    lines = knob_lines(row, 2, 80, selected=True)
    assert {width_of(line) for line in lines} == {80}
    rows = [text_of(line) for line in lines]
    assert all(row.startswith("▌") for row in rows)
    columns = [slice(2, 22), slice(22, 42), slice(42, 58), slice(58, 80)]
    told = [words_of(" ".join(row[part] for row in rows)) for part in columns]
    assert told[0].replace(" ", "") == knob.name
    assert told[1].replace(" ", "") == knob.value
    assert told[2].replace(" ", "") == limits_text(knob).replace(" ", "")
    assert told[3] == knob.effective


def test_the_log_of_commands_tells_all_that_came_of_one() -> None:
    args = "num_workers=7 prefetch_factor=4 pin_memory=True"
    entries = [
        LogEntry(NOW_S, (0, 1), "set", args, "error", REASON),
        LogEntry(NOW_S, (0,), "set", "lr=0.1", "done", "it is so"),
    ]
    lines = log_lines(entries, 80)
    text = rows_of(lines)
    assert f"set {args} error" in text
    assert REASON in text
    # What fits stands in one line.
    assert "set lr=0.1 done it is so" in words_of(text_of(lines[-1]))


def test_the_whole_log_can_be_scrolled_to() -> None:
    commands = tuple(
        Logged(NOW_S - i, f"c{i}", "set", f"knob{i:02}=1", "done", "") for i in range(40)
    )
    ranks = tuple(replace(rank, commands=commands) for rank in two_ranks().runs[0].ranks)
    picture = replace(two_ranks(), runs=(replace(two_ranks().runs[0], ranks=ranks),))

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        for knobs in ((), KNOBS):
            app.watcher.session.show(with_hello(picture, knobs=knobs))  # type: ignore[attr-defined]
            app.refresh_scene(force=True)
            text = await press(pilot, "K")
            assert "knob00=1" in text
            assert "knob39=1" not in text
            text = await press(pilot, "G", "G")
            assert "knob39=1" in text
            text = await press(pilot, "g", "g")
            assert "Knobs" in text
            assert "knob00=1" in text
            text = await press(pilot, *["j"] * 45)
            assert "knob39=1" in text
            await press(pilot, *["k"] * 5)
            await press(pilot, "escape")

    drive(picture, script, size=SMALL)


def test_memory_tells_the_whole_name_of_what_it_lists() -> None:
    name = "a_" * 50
    answer = read_memory(
        json.dumps(
            {
                "schema": 1,
                "children": [{"pid": 4000, "rss_bytes": 10, "name": f"worker {name}"}],
                "cuda": [{"device": 0, "name": f"NVIDIA {name}", "ooms": 3, "retries": 4}],
                "python": {"gc_counts": [1412, 133, 111], "objects": None},
                "tensors": {
                    "count": 1,
                    "bytes": 10,
                    "largest": [{"shape": f"E({name})", "dtype": "torch.float32", "count": 1}],
                },
            }
        )
    )
    text = rows_of(memory_lines(0, "node0", answer, 1.0, 80))
    plain = text.replace(" ", "")
    for known in (f"worker{name}", f"NVIDIA{name}", f"E({name})float32"):
        assert known in plain, known
    assert "out of memory 3 cache freed 4" in text
    assert "the collector's counters 1412/133/111" in text
    assert "…" not in text


def test_a_message_is_read_whole_and_goes_with_the_next_key() -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        # Its age and loss go on meanwhile.
        before = (await press(pilot, "1")).splitlines()[1:]
        app.tell(REASON, "warning")
        await pilot.pause()
        assert REASON in words_of(screen_text(app))
        app.refresh_scene(force=True)
        await pilot.pause()
        assert REASON in words_of(screen_text(app))
        # The keys are back, and what it covered.
        assert (await press(pilot, "f12")).splitlines()[1:] == before
        app.tell(REASON, "warning")
        text = await press(pilot, "2")
        assert "nosuchhost" not in text
        assert "q quit" in text.splitlines()[-1]
        app.tell("short")
        # As a terminal sends it; the pilot's own clicks go to the screen.
        app.post_message(MouseDown(None, 3, 3, 0, 0, 1, False, False, False))
        await pilot.pause()
        await pilot.pause()
        assert "short" not in screen_text(app)

    drive(two_ranks(), script, size=SMALL)


def test_where_files_were_written_is_read_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / ("somewhere-" * 8)
    folder.mkdir()
    monkeypatch.chdir(folder)

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "w")
        (picture,) = folder.glob("*.svg")
        assert str(picture) in "".join(row.strip() for row in text.splitlines())

    drive(two_ranks(), script, size=SMALL)


# What else must be said


@pytest.mark.parametrize("size", [SMALL, (120, 36), (160, 45)], ids=str)
def test_a_filter_that_nothing_passes_says_that_it_hides_all(size: tuple[int, int]) -> None:
    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "1", "slash", *"zebra", "enter")
        assert "no step yet" not in text
        assert "no rank passes ‹zebra›; esc shows all" in text
        text = await press(pilot, "escape")
        assert "zebra" not in text

    drive(two_ranks(), script, size=size)


def test_a_sparkline_without_steps_says_so_whatever_the_filter() -> None:
    scene = scene_of(two_ranks(), filters={"ranks": "zebra"})
    assert "no step yet" in text_of(timeline_row(rank_view(phases={}, seconds=0), scene, 80))
    assert "no rank passes ‹zebra›" in text_of(timeline_row(None, scene, 80))
    assert "no step yet" in text_of(timeline_row(None, scene_of(two_ranks()), 80))


def test_every_sign_of_the_screen_has_one_in_ascii() -> None:
    for file in Path(gpuwatch.tui.__file__).parent.rglob("*.py"):
        signs = {char for char in file.read_text("utf-8") if not char.isascii()}
        unknown = {char for char in signs if to_ascii(char) == "?"}
        assert not unknown, (file, unknown)


@pytest.mark.parametrize("size", [(80, 24), (80, 20), (160, 45)], ids=str)
@pytest.mark.parametrize(
    "keys",
    [("2", "enter"), ("4", "enter"), ("l",), ("r",), ("e",), ("o",), ("K",), ("M",), ("colon",)],
    ids=str,
)
def test_the_verdict_stands_over_pages_too(size: tuple[int, int], keys: tuple[str, ...]) -> None:
    job = of_output("first line", *["more"] * 40)

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        over = (await press(pilot, "1")).splitlines()[1]
        assert "step 2" in over
        rows = (await press(pilot, *keys)).splitlines()
        assert (rows[1] == over) is (size[1] >= 24), rows
        # It hides nothing of the page: its first line is the next one.
        assert rows[2].strip()
        if keys == ("l",):
            text = await press(pilot, "g")
            assert "first line" in text
            assert text.splitlines()[-2].strip() == "more"

    drive(two_ranks(), script, size=size, job=job, diagnose=found(few_workers()))


@pytest.mark.parametrize("lost", [0, 3])
@pytest.mark.parametrize("steps", [1240, 12_345_678])
def test_the_table_of_status_fits(lost: int, steps: int) -> None:
    slow = {name: 10_000.0 + (value or 0.0) for name, value in PHASES_MS.items()}
    ranks = [
        rank_view(0, lost=lost, steps=steps, state="checkpoint"),
        rank_view(1, phases=slow, steps=steps),
    ]
    picture = view([run_view(ranks)])
    for width in (80, 100, 160):
        lines = status_lines(picture, width)
        table = [line for line in lines if line.startswith("  ")]
        assert len(table) == 3
        assert max(len(line) for line in table) <= width
        assert all(name in table[0] for name in ("rank", "state", "step ms", "own ms", "data"))
    assert ("lost" in table[0]) is bool(lost)
    assert "other" in table[0]


def test_a_large_recording_is_said_to_be_read_before_it_is(tmp_path: Path) -> None:
    small = tmp_path / "small.jsonl"
    traces.Job(ranks=1, steps=40, phases_ms={"forward": 9.0}).write(small)
    large = tmp_path / "large.jsonl"
    large.write_bytes(b"no trace at all\n" * 70_000)
    runner = CliRunner()
    assert "reading" not in runner.invoke(replay, [str(small)]).stderr
    result = runner.invoke(replay, [str(large)])
    assert result.exit_code
    assert result.stderr.startswith(f"gpuwatch: reading {large}, 1 MB ...")


def test_what_is_wrong_with_a_device_is_read_to_its_end() -> None:
    reasons = ("software power cap", "hardware thermal slowdown", "hardware power brake slowdown")
    gpu = msgspec.structs.replace(
        gpu_sample(0),
        lost=f"lost: {REASON}",
        reasons=reasons,
        events=(GpuEvent(79, f"Xid 79: {REASON}", NOW_S),),
    )
    text = rows_of(gpu_page("node0", gpu, None, scene_of(two_ranks()), 80))
    assert f"lost: {REASON}" in text
    assert f"Xid 79: {REASON}" in text
    assert f"clocks held back by {', '.join(reasons)}" in text


@pytest.mark.parametrize("size", [SMALL, (160, 45)], ids=str)
def test_why_there_are_no_devices_is_read_to_its_end(size: tuple[int, int]) -> None:
    picture = replace(two_ranks(), nodes=(node_view(gpus_reason=REASON),))

    async def script(app: GpuwatchApp, pilot: Pilot[None]) -> None:
        text = await press(pilot, "3")
        assert f"no GPUs: {REASON}" in words_of(text)
        # The host stands below, none of it lost.
        assert "2 cores" in text
        assert "cpu " in text

    drive(picture, script, size=size)
