"""The same frames as lines: what goes out comes back, and every field of the schema with it."""

import json
import math
import random
from typing import Any

import msgspec
import pytest
import test_frames
from builders import T0_S, hello, node_frame, rank_frame, record, sensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect as mi

from gpuwatch import schema
from gpuwatch.errors import TargetError
from gpuwatch.frames import decode_node_frame, decode_rank_frame, decode_sensor_frame, encode
from gpuwatch.recording.jsonl import JsonLines, read_lines
from gpuwatch.recording.shape import parse, read_struct, written

thorough = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def lines_of(*frames: bytes) -> list[bytes]:
    encoder = JsonLines()
    text = encoder.head() + b"".join(map(encoder.encode, frames))
    assert encoder.refused == 0
    return text.splitlines(keepends=True)


def plain(value: Any) -> Any:
    """A frame as values that can be compared: NaN is NaN, whatever its bits."""
    if isinstance(value, msgspec.Struct):
        return [plain(getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def whole(data: bytes) -> list[Any]:
    frame = decode_node_frame(data)
    return [
        plain(msgspec.structs.replace(frame, frames=(), sensors=None)),
        [plain(decode_rank_frame(raw)) for raw in frame.frames],
        plain(decode_sensor_frame(frame.sensors)) if frame.sensors is not None else None,
    ]


@thorough
@given(st.lists(test_frames.node_frames, max_size=3))
def test_round_trip(frames: list[schema.NodeFrame]) -> None:
    sent = [encode(frame) for frame in frames]
    back, problem = read_lines(lines_of(*sent)) if sent else ([], "")
    assert problem == ""
    assert [whole(data) for data in back] == [whole(data) for data in sent]


def drawn(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Values of a type of the schema, at its limits and within."""
    match kind:
        case mi.UnionType():
            return st.one_of([drawn(option) for option in kind.types])
        case mi.NoneType():
            return st.none()
        case mi.BoolType():
            return st.booleans()
        case mi.IntType():
            high = kind.le if kind.le is not None else kind.lt - 1 if kind.lt is not None else 2**53
            return st.integers(kind.ge or 0, int(high)) | st.just(int(high))
        case mi.FloatType():
            return st.floats(kind.ge, kind.le)
        case mi.StrType():
            return st.text(st.characters(codec="utf-8"), max_size=8)
        case mi.LiteralType():
            return st.sampled_from(kind.values)
        case mi.VarTupleType():
            return st.lists(drawn(kind.item_type), max_size=2).map(tuple)
        case mi.DictType():
            return st.dictionaries(drawn(kind.key_type), drawn(kind.value_type), max_size=2)
        case mi.StructType():
            return st.builds(kind.cls, **{f.name: drawn(f.type) for f in kind.fields})
    raise AssertionError(kind)


STRUCTS = [
    schema.Hello,
    schema.StepRecord,
    schema.Span,
    schema.RankState,
    schema.Ledger,
    schema.WorkerCost,
    schema.Reply,
    schema.Bye,
    schema.RankAge,
    schema.HostSample,
    schema.GpuSample,
    schema.ProcessSample,
]


@pytest.mark.parametrize("cls", STRUCTS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_field_comes_back(cls: type[msgspec.Struct], data: st.DataObject) -> None:
    struct = data.draw(drawn(mi.type_info(cls)))
    line = msgspec.json.encode(written(struct)).decode()
    back = read_struct(cls, parse(line), "a line")
    assert plain(back) == plain(struct)
    assert "_ns" not in line or any("_ns" in str(v) for v in plain(struct))


def test_the_lines_are_readable() -> None:
    greeting = hello(0, 2, loaders=(schema.Loader("train", 2),))
    step = record(
        7, {"data_wait": 80.25, "forward": 20.0}, loss=math.nan, tags=("warmup",), loader="train"
    )
    state = schema.RankState(status="training", phase="backward", phase_age_ns=1_500_000)
    frame = rank_frame(3, [step], hello=greeting, state=state)
    lines = lines_of(node_frame(1, [frame], sensors=sensors(cores=4, ranks={1000: None})))
    found = [json.loads(line) for line in lines]
    assert [line["type"] for line in found] == [
        *("trace", "node_frame", "rank_frame", "hello", "state", "step"),
        *("sensor_frame", "host", "process"),
    ]
    assert found[5] == {
        "type": "step",
        "rank": 0,
        "index": 7,
        "started_s": step.started_s,
        "step_ms": 100.25,
        "phases_ms": {"data_wait": 80.25, "forward": 20},
        "loss": "nan",
        "tags": ["warmup"],
        "loader": "train",
    }
    assert found[4]["phase_age_ms"] == 1.5
    assert found[3]["loaders"] == [{"key": "train", "num_workers": 2}]
    assert found[8]["readings"]["cpu_percent"] == {
        "value": None,
        "unit": "%",
        "source": "test",
        "state": "na",
        "reason": "not given",
    }


def test_durations_keep_every_nanosecond() -> None:
    for value_ns in (0, 1, 999_999, 1_000_000, 123_456_789_012_345, 10**15):
        span = schema.Span("eval", T0_S, value_ns)
        line = msgspec.json.encode(written(span)).decode()
        assert read_struct(schema.Span, parse(line), "a span") == span
    ledger = schema.Ledger(wall_ns=10**17 - 1)
    line = msgspec.json.encode(written(ledger)).decode()
    assert '"wall_ms":99999999999.999999' in line
    assert read_struct(schema.Ledger, parse(line), "a ledger") == ledger


def test_a_frame_that_cannot_be_read_is_counted_and_the_others_are_there() -> None:
    encoder = JsonLines()
    good = rank_frame(1, [record(0, {"forward": 1.0})])
    text = encoder.head() + encoder.encode(node_frame(1, [b"\x91\x01", good]))
    back, _ = read_lines(text.splitlines(keepends=True))
    assert encoder.refused == 1
    assert [decode_rank_frame(raw) for raw in decode_node_frame(back[0]).frames] == [good]


# --- damaged -----------------------------------------------------------------------------------


def recorded(count: int = 5) -> list[bytes]:
    frames = [
        node_frame(i, [rank_frame(i, [record(i, {"forward": 1.0})], hello=hello())], sensors=None)
        for i in range(1, count + 1)
    ]
    return lines_of(*frames)


def test_a_cut_file_gives_what_is_there() -> None:
    text = b"".join(recorded())
    for size in range(len(recorded()[0]) + len(recorded()[1]), len(text), 7):
        back, problem = read_lines(text[:size].splitlines(keepends=True))
        assert back
        if text[:size].endswith((b"}\n", b"}")):
            assert problem == ""
        else:
            assert problem.startswith(f"line {text[:size].count(10) + 1}, where it is cut off: ")


def test_damaged_lines_are_left_out_and_counted() -> None:
    lines = recorded()
    at = next(i for i, line in enumerate(lines) if b'"type":"step"' in line)
    lines[at] = lines[at].replace(b'"index":1', b'"index":-1')
    lines.insert(3, b"}}} nonsense\n")
    back, problem = read_lines(lines)
    assert len(back) == 5
    assert problem.startswith("line 4: no JSON")
    assert problem.endswith("; 1 more line cannot be read")
    first, second = (decode_rank_frame(decode_node_frame(b).frames[0]) for b in back[:2])
    assert (len(first.records), len(second.records)) == (0, 1)


def test_a_frame_that_contradicts_itself_is_left_out() -> None:
    lines = recorded(3)
    at = [i for i, line in enumerate(lines) if b'"type":"step"' in line][1]
    lines[at] = lines[at].replace(b'"forward":1', b'"forward":500')
    back, problem = read_lines(lines)
    assert [len(decode_node_frame(data).frames) for data in back] == [1, 0, 1]
    assert "step 2: phases are longer than the step" in problem


def test_any_damage_is_survived() -> None:
    text = b"".join(recorded())
    rng = random.Random(5)
    for _ in range(200):
        broken = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(recorded()[0]), len(broken))] = rng.randrange(256)
        back, _ = read_lines(bytes(broken).splitlines(keepends=True))
        for data in back:
            for raw in decode_node_frame(data).frames:
                decode_rank_frame(raw)


def test_names_of_a_newer_version_are_skipped_and_a_newer_format_refused() -> None:
    lines = recorded(1)
    lines[4] = lines[4].replace(b'"type"', b'"quantum_ms":1,"type"')
    assert read_lines(lines)[1] == ""
    with pytest.raises(TargetError, match="has version 2, this gpuwatch reads 1"):
        read_lines([b'{"type":"trace","version":2}\n'])
