"""Traces by hand: the document's example, every mistake with its sentence, what is filled in."""

import json
import random
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import support
import traces

from gpuwatch import schema
from gpuwatch.commands.recorded import judged, last_view
from gpuwatch.errors import TargetError
from gpuwatch.frames import decode_node_frame, decode_rank_frame, decode_sensor_frame
from gpuwatch.recording import Player, open_recording
from gpuwatch.recording.jsonl import read_lines
from gpuwatch.recording.shape import names_of
from gpuwatch.store import RankView, View

DOCUMENT = Path(__file__).parents[2] / "docs" / "trace-format.md"

STEP = {"type": "step", "rank": 0, "phases_ms": {"data_wait": 80, "forward": 20}}


def lines(*found: dict[str, Any] | str) -> list[bytes]:
    return [
        (line if isinstance(line, str) else json.dumps(line)).encode() + b"\n" for line in found
    ]


def frames_of(*found: dict[str, Any] | str) -> list[bytes]:
    frames, problem = read_lines(lines(*found))
    assert problem == ""
    return frames


def rank_frames(frames: list[bytes], rank: int = 0) -> list[schema.RankFrame]:
    sent = [decode_rank_frame(raw) for f in frames for raw in decode_node_frame(f).frames]
    return [frame for frame in sent if frame.rank == rank]


def view_of(path: Path, *found: dict[str, Any] | str) -> View:
    path.write_bytes(b"".join(lines(*found)))
    return last_view(str(path))[0]


def rank_of(view: View, rank: int = 0) -> RankView:
    return next(r for run in view.runs for r in run.ranks if r.rank == rank)


# --- the document ------------------------------------------------------------------------------


def example() -> str:
    found = re.search(r"```jsonl\n(.*?)```", DOCUMENT.read_text(), re.S)
    assert found is not None
    return found[1]


def test_the_example_of_the_document_is_diagnosed(tmp_path: Path, rundir: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(example())
    done = subprocess.run(
        [*support.GPUWATCH, "diagnose", str(path), "--json", "--fail-on", "critical"],
        env=support.environment(rundir),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    document = json.loads(done.stdout)
    (finding,) = document["findings"]
    assert (finding["kind"], finding["ranks"]) == ("loader_few_workers", [0, 1, 2, 3])
    assert finding["cost_ms"] == pytest.approx(80, abs=2)
    assert finding["hints"][0]["knob"] == "num_workers"
    assert document["run"] == "my-job"
    assert document["recording"]["file"] == str(path)
    assert document["resolved"] == []


def test_every_field_of_the_schema_is_in_the_document() -> None:
    text = DOCUMENT.read_text()
    for cls in (
        *(schema.Hello, schema.Loader, schema.Ddp, schema.Precision, schema.Versions),
        *(schema.StepRecord, schema.Span, schema.RankState, schema.Ledger, schema.WorkerCost),
        *(schema.Bye, schema.RankAge, schema.Reading, schema.HostSample, schema.IoSample),
        *(schema.GpuSample, schema.GpuProcess, schema.GpuEvent, schema.ProcessSample),
    ):
        missing = [name for name in names_of(cls) if not re.search(rf'[`"]{name}[`"]', text)]
        assert not missing, f"docs/trace-format.md does not name {missing} of {cls.__name__}"


def test_the_least_that_makes_a_trace(tmp_path: Path) -> None:
    view = view_of(tmp_path / "t.jsonl", *[{"type": "step", "rank": 0, "step_ms": 143}] * 3)
    rank = rank_of(view)
    assert (rank.steps, rank.step_ms, rank.run) == (3, 143, "trace")
    assert rank.phases_ms["forward"] is None
    assert view.link == "replay"


# --- mistakes ----------------------------------------------------------------------------------

HEAD = {"type": "trace", "world_size": 2}
MISTAKES: list[tuple[str, tuple[dict[str, Any] | str, ...], str]] = [
    ("no JSON", (STEP, "{'type': 'step'}"), "line 2: no JSON: expecting property name "),
    ("cut", ('{"type": "step", "rank"',), "line 1: no JSON: expecting ':' delimiter at column 24"),
    ("list", ("# words", "", "[1, 2]"), "line 3: a line is an object, {...}, not [1, 2]"),
    ("NaN", ('{"type":"step","rank":0,"loss":NaN}',), 'line 1: NaN is no JSON; write "nan", or'),
    ("twice", ('{"type":"bye","rank":0,"rank":1}',), 'line 1: "rank" is there twice'),
    ("no type", ({"rank": 0},), 'line 1: a line needs "type": one of trace, step, '),
    ("type", ({**STEP, "type": "stp"},), 'line 1: there is no type "stp"; did you mean "step"?'),
    ("odd type", ({**STEP, "type": 7},), "line 1: there is no type 7; there are trace, step, "),
    ("no rank", ({"type": "step", "step_ms": 1},), 'line 1: a step needs "rank"'),
    (
        "rank",
        ({**STEP, "rank": -1},),
        'line 1: "rank" of a step must be a whole number from 0 to 1,048,575, not -1',
    ),
    (
        "world",
        (HEAD, STEP, {**STEP, "rank": 2}),
        'line 3: "rank" 2 in a world of 2: ranks count from 0',
    ),
    ("no time", ({"type": "step", "rank": 0},), 'line 1: a step needs "phases_ms" or "step_ms"'),
    (
        "slip",
        ({**STEP, "step_sm": 100},),
        'line 1: a step has no "step_sm"; did you mean "step_ms"?',
    ),
    ("unknown", ({**STEP, "colour": 1},), 'line 1: a step has no "colour"'),
    (
        "phase",
        ({**STEP, "phases_ms": {"foward": 1}},),
        'line 1: a step has no "phases_ms.foward"; did you mean "phases_ms.forward"?',
    ),
    (
        "text for a number",
        ({**STEP, "phases_ms": {"forward": "20"}},),
        'line 1: "phases_ms.forward" of a step must be a number from 0 to 1e+09, not "20"',
    ),
    (
        "negative",
        ({"type": "step", "rank": 0, "step_ms": -3.5},),
        'line 1: "step_ms" of a step must be a number from 0 to 1e+09, not -3.5',
    ),
    (
        "sum",
        ({**STEP, "step_ms": 99},),
        'line 1: "phases_ms" of a step add up to 100 ms, which is more than its "step_ms" of 99; '
        'without "step_ms" the step is their sum',
    ),
    (
        "two units",
        ({"type": "step", "rank": 0, "step_ms": 3, "step_s": 1},),
        'line 1: "step_ms" and "step_s" say the same',
    ),
    (
        "half a sample",
        ({**STEP, "samples": 1.5},),
        'line 1: "samples" of a step must be a whole number from 0 to 9,007,199,254,740,992, '
        "not 1.5",
    ),
    (
        "tag",
        ({**STEP, "tags": ["warm"]},),
        'line 1: "tags" of a step must be one of "first_batch", "warmup", "compile", "ddp_first", '
        '"skipped", not "warm"',
    ),
    (
        "clock",
        ({**STEP, "clock": "gpu"},),
        'line 1: "clock" of a step must be one of "device", "host", not "gpu"',
    ),
    (
        "repeat",
        ({**STEP, "repeat": 0},),
        'line 1: "repeat" of a step must be a whole number from 1 to 100,000, not 0',
    ),
    (
        "repeat and at",
        ({**STEP, "repeat": 2, "at_s": 5},),
        'line 1: a step with "repeat" has no "at_s"; "started_s" is when the first begins',
    ),
    (
        "loader",
        ({"type": "hello", "rank": 0, "loaders": [{"key": "a"}, {"num_workers": 2}]},),
        'line 1: a hello needs "loaders[1].key"',
    ),
    (
        "workers",
        ({"type": "hello", "rank": 0, "loaders": [{"key": "a", "num_workers": 1e9}]},),
        'line 1: "loaders[0].num_workers" of a hello must be a whole number from 0 to 65,536',
    ),
    (
        "flag",
        ({"type": "hello", "rank": 0, "loaders": [{"key": "a", "pin_memory": "yes"}]},),
        'line 1: "loaders[0].pin_memory" of a hello must be true or false, not "yes"',
    ),
    (
        "status",
        ({"type": "state", "rank": 0, "status": "stuck"},),
        'line 1: "status" of a state must be one of "starting", "training", ',
    ),
    ("span", ({"type": "span", "rank": 0, "name": "eval"},), 'line 1: a span needs "duration_ms"'),
    ("worker", ({"type": "worker", "rank": 0, "pid": 9},), 'line 1: a worker needs "loader"'),
    (
        "reading",
        ({"type": "host", "readings": {"cpu_percent": "20 %"}},),
        'line 1: "readings.cpu_percent" of a host must be a number or an object with a value, '
        'not "20 %"',
    ),
    ("gpu", ({"type": "gpu", "readings": {}},), 'line 1: a gpu needs "index"'),
    ("whose", ({"type": "process", "pid": 3},), 'line 1: a process needs "rank" or "rank_pid"'),
    ("late head", (STEP, HEAD), 'line 2: a "trace" line stands first, and once'),
    ("newer", ({"type": "trace", "version": 9},), "the trace has version 9, this gpuwatch reads 1"),
    (
        "surrogate",
        ('{"type": "trace", "run": "\\ud800"}',),
        'line 1: "run" of a trace holds half a character',
    ),
    ("empty", ("# nothing", ""), 'no line of a trace; each is an object like {"type": "step", '),
]


@pytest.mark.parametrize(
    ("found", "sentence"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_a_mistake_is_named_by_line_and_field(
    found: tuple[dict[str, Any] | str, ...], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(TargetError) as caught:
        read_lines(lines(*found))
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join(lines(*found)))
    with pytest.raises(TargetError) as caught:
        open_recording(path)
    assert str(caught.value).startswith(f"{path}: {sentence}")


def test_text_that_is_no_utf8(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="line 1: no UTF-8 text"):
        read_lines([b'{"type": "\xff"}\n'])
    frames, _ = read_lines([b"\xef\xbb\xbf" + lines(STEP)[0]])
    assert frames


# --- what is filled in -------------------------------------------------------------------------


def test_steps_follow_one_another_in_any_unit_and_order() -> None:
    frames = frames_of(
        {**STEP, "started_s": 10},
        {**STEP, "rank": 1, "started_s": 10},
        {"type": "step", "rank": 1, "step_s": 0.05},
        {"type": "step", "rank": 0, "step_us": 50_000.5, "phases_ms": {"forward": 40}},
        {**STEP, "rank": 0, "index": 7, "repeat": 3},
    )
    records = [r for frame in rank_frames(frames) for r in frame.records]
    assert [r.index for r in records] == [0, 1, 7, 8, 9]
    assert records[1].step_ns == 50_000_500
    assert records[1].host == schema.PhasesNs(forward=40_000_000, other=10_000_500)
    starts_s = [r.started_s for r in records]
    assert starts_s == pytest.approx([10, 10.1, 10.15, 10.25, 10.35], abs=1e-4)
    assert [r.step_ns for f in rank_frames(frames, 1) for r in f.records] == [10**8, 5 * 10**7]


def test_a_rank_is_heard_while_nothing_happens(tmp_path: Path) -> None:
    found = [STEP, {"type": "state", "rank": 0, "phase": "comm"}, {**STEP, "started_s": 3000.0}]
    frames = frames_of(*found)
    sent_s = [decode_node_frame(f).sent_s for f in frames]
    assert sent_s[0] == 0
    assert sent_s[-1] == 3000.1
    assert max(b - a for a, b in pairwise(sent_s[:8])) <= 0.5
    assert len(frames) < 150
    before_last = rank_frames(frames)[-2]
    age_s = before_last.state.phase_age_ns / 1e9
    assert before_last.state.phase == "comm"
    assert age_s == pytest.approx(before_last.sent_s - 0.1)
    assert rank_frames(frames)[-1].state.phase == ""
    seqs = [f.seq for f in rank_frames(frames)]
    assert seqs == list(range(1, len(seqs) + 1))
    view = view_of(tmp_path / "t.jsonl", *found)
    assert (rank_of(view).lost, rank_of(view).state) == (0, "training")


def test_the_ledger_is_added_up(tmp_path: Path) -> None:
    phases = {"data_wait": 100, "forward": 300, "comm": 100}
    found = {"type": "step", "rank": 0, "phases_ms": phases, "samples": 4, "repeat": 10}
    view = view_of(
        tmp_path / "t.jsonl",
        {"type": "trace", "start_s": 0},
        {"type": "state", "rank": 0, "phases_na": {"h2d": "no device"}},
        {**found, "started_s": 1.0},
        {"type": "span", "rank": 0, "name": "eval", "duration_s": 2},
        {"type": "bye", "rank": 0},
    )
    ledger = rank_of(view).ledger
    assert (ledger.steps, ledger.samples) == (10, 40)
    assert ledger.training_ns == 3_000_000_000
    assert (ledger.data_wait_ns, ledger.comm_ns) == (1_000_000_000, 1_000_000_000)
    assert ledger.eval_ns == 2_000_000_000
    assert ledger.wall_ns == pytest.approx(8e9)
    assert ledger.lost_ns == pytest.approx(1e9)
    assert (rank_of(view).state, rank_of(view).phases_na) == ("ended", {"h2d": "no device"})
    given = view_of(tmp_path / "u.jsonl", STEP, {"type": "ledger", "rank": 0, "wall_s": 9})
    assert rank_of(given).ledger == schema.Ledger(wall_ns=9_000_000_000)


def test_readings_hold_until_another_line(tmp_path: Path) -> None:
    found = [
        {"type": "host", "cores": 8, "readings": {"cpu_percent": 20, "load1": None}},
        {"type": "gpu", "index": 1, "readings": {"gpu_util": {"value": 40, "unit": "%"}}},
        {"type": "hello", "rank": 0, "device_uuid": "node0/1"},
        {"type": "process", "rank": 0, "readings": {"cpu_percent": 90}},
        {"type": "process", "rank": 0, "pid": 77, "status": "D"},
        {**STEP, "repeat": 50},
        {"type": "host", "cores": 8, "readings": {"cpu_percent": 80}},
        {**STEP, "repeat": 20},
    ]
    frames = frames_of(*found)
    ticks = [
        decode_sensor_frame(raw)
        for f in frames
        if (raw := decode_node_frame(f).sensors) is not None
    ]
    assert [t.sent_s for t in ticks[:4]] == [0.0, 1.0, 2.0, 3.0]
    cpu = [t.host.readings["cpu_percent"].value for t in ticks]
    assert cpu[:5] == [20] * 5
    assert cpu[5:] == [80] * len(cpu[5:])
    assert len(cpu) in {7, 8}
    assert all(len(t.gpus) == 1 and len(t.processes) == 2 for t in ticks)
    assert ticks[0].host.readings["load1"].state == "na"
    view = view_of(tmp_path / "t.jsonl", *found)
    rank = rank_of(view)
    assert rank.process is not None
    assert rank.process.readings["cpu_percent"] == schema.Reading(90, "%", "trace")
    assert [(w.pid, w.status) for w in rank.workers] == [(77, "D")]


def test_silence_death_and_restart(tmp_path: Path) -> None:
    work = {**STEP, "repeat": 60}
    dead = {"type": "age", "rank": 1, "at_s": 6, "age_s": 2, "pid_alive": False}
    view = view_of(tmp_path / "t.jsonl", work, {**work, "rank": 1, "started_s": 0}, dead)
    assert (rank_of(view, 0).state, rank_of(view, 1).state) == ("training", "gone")
    quiet = {"type": "age", "rank": 0, "at_s": 6, "process_state": "T"}
    end = {**STEP, "rank": 1, "started_s": 12}
    view = view_of(tmp_path / "u.jsonl", work, quiet, end)
    assert (rank_of(view).state, rank_of(view).state_reason) == ("silent", "stopped by a signal")
    back = {**STEP, "started_s": 10}
    view = view_of(tmp_path / "w.jsonl", work, quiet, back, end)
    assert (rank_of(view).state, rank_of(view).steps) == ("training", 61)
    again = {"type": "hello", "rank": 0, "incarnation": "second"}
    view = view_of(tmp_path / "v.jsonl", work, again, {**STEP, "index": 3})
    assert (rank_of(view).restarts, rank_of(view).steps) == (1, 4)


def test_several_nodes_and_the_mark_of_a_simulation(tmp_path: Path) -> None:
    view = view_of(
        tmp_path / "t.jsonl",
        {"type": "trace", "run": "big", "world_size": 4, "simulated": True},
        *({**STEP, "rank": r, "node": f"n{r // 2}", "started_s": 0} for r in range(4)),
        {"type": "host", "node": "n1", "readings": {"cpu_percent": 5}},
    )
    (run,) = view.runs
    assert (run.nodes, run.world_size, run.simulated) == (("n0", "n1"), 4, True)
    assert {n.node: n.host is not None for n in view.nodes} == {"n0": False, "n1": True}


def test_many_steps_in_half_a_second_are_all_there() -> None:
    frames = frames_of({"type": "step", "rank": 0, "step_us": 50, "repeat": 30_000})
    sent = rank_frames(frames)
    assert sum(len(f.records) for f in sent) == 30_000
    assert [f.seq for f in sent] == list(range(1, len(sent) + 1))


def test_numbers_at_the_ends_of_their_ranges_make_valid_frames() -> None:
    frames = frames_of(
        {"type": "state", "rank": 0, "phase": "comm", "phase_age_ns": 10**17},
        {"type": "step", "rank": 0, "step_ms": 1e9, "index": 2**53, "started_s": 4.2e9},
        {"type": "step", "rank": 0, "step_ms": 1e9, "repeat": 200, "index": 0},
        {"type": "worker", "rank": 0, "pid": 1, "loader": "a", "age_s": 1e9, "at_s": 0.2},
        {"type": "age", "rank": 1, "age_s": 1e9, "at_s": 0},
    )
    for frame in frames:
        node = decode_node_frame(frame)
        for raw in node.frames:
            decode_rank_frame(raw)


def test_any_lines_are_read_or_refused(tmp_path: Path) -> None:
    rng = random.Random(11)
    sentences: list[str] = []
    text = example().splitlines()
    values: list[Any] = [
        None,
        -1,
        0,
        1,
        2.5,
        1e300,
        10**30,
        "x",
        "",
        [],
        {},
        True,
        [None],
        {"a": 1},
    ]
    for _ in range(400):
        found = [dict(json.loads(line)) for line in rng.sample(text, 9) if line.startswith("{")]
        for _ in range(rng.randint(1, 3)):
            line = rng.choice(found)
            line.pop("repeat", None)
            line[rng.choice([*line, "at_s", "started_s", "node"])] = rng.choice(values)
        try:
            frames, _ = read_lines(lines(*found))
        except TargetError as exc:
            sentences.append(str(exc))
            continue
        for frame in frames:
            for raw in decode_node_frame(frame).frames:
                decode_rank_frame(raw)
    assert all(re.match(r"line \d+: [^\n]+$", sentence) for sentence in sentences)
    assert 50 < len(sentences) < 390


# --- findings over time ------------------------------------------------------------------------


def test_findings_open_and_close_as_the_trace_goes_on(tmp_path: Path) -> None:
    slow = {"data_wait": [80.0] * 100 + [0.2], "forward": 20.0, "backward": 35.0}
    job = traces.Job(
        ranks=2,
        steps=500,
        phases_ms=slow,
        step={"queue_depth": [0] * 100 + [4], "queue_capacity": 4},
        host={"cpu_percent": 20, "cpu_iowait_percent": 0},
        process={"cpu_percent": 35},
    )
    path = job.write(tmp_path / "t.jsonl")
    view, found, recording = judged(str(path))
    (finding,) = found["job"].findings
    assert (finding.kind, finding.state) == ("loader_few_workers", "resolved")
    assert finding.id == "F1"
    assert 0 < finding.opened_step < 100 < (finding.resolved_step or 0) < 300
    assert 1000 < finding.opened_s < 1015
    assert view.at_s == pytest.approx(1000 + recording.duration_s)


def test_a_short_trace_is_judged_by_its_window(tmp_path: Path) -> None:
    job = traces.Job(
        steps=20,
        phases_ms={"data_wait": 30.0, "forward": 15.0},
        step={"queue_depth": 0, "queue_capacity": 4},
    )
    _, found, recording = judged(str(job.write(tmp_path / "t.jsonl")))
    assert recording.duration_s < 1  # one evaluation
    assert [f.kind for f in found["job"].findings] == ["loader_few_workers"]


def test_ticks_are_a_second_apart_and_long_pauses_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join(lines({**STEP, "repeat": 30}, {**STEP, "started_s": 80_000})))
    with open_recording(path) as recording:
        seen_s = [view.at_s for view in Player(recording).ticks(1.0, most=20)]
    assert seen_s[:5] == [1, 2, 3, 4, 5]
    assert seen_s[-1] == pytest.approx(80_000.1)
    assert len(seen_s) < 3000
    assert seen_s == sorted(seen_s)


@pytest.mark.parametrize("start_s", [0.0, 1_796_069_006.0])
def test_times_count_from_any_moment(start_s: float, tmp_path: Path) -> None:
    """Lines that say no time stand at the beginning, whenever the others say that it was."""
    lines: list[dict[str, Any]] = [
        {"type": "hello", "rank": rank, "world_size": 2} for rank in range(2)
    ]
    lines += [
        {
            "type": "step",
            "rank": rank,
            "started_s": start_s + 0.13 * i,
            "phases_ms": {"forward": 30, "backward": 60 + 30 * rank, "comm": 40 - 30 * rank},
        }
        for i in range(60)
        for rank in range(2)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    _, found, recording = judged(str(path))
    assert recording.duration_s == pytest.approx(7.8, abs=0.3)
    (diagnosis,) = found.values()
    assert [(f.kind, f.ranks) for f in diagnosis.findings if f.severity != "note"] == [
        ("straggler", (1,))
    ]
