"""Frames on the wire: what is good comes back as it was, what is damaged is refused."""

import contextlib
import math
import random
import struct
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect as mi

from gpuwatch import schema
from gpuwatch.errors import FrameError, WireVersionError
from gpuwatch.frames import (
    MAX_FRAME_BYTES,
    Columns,
    FrameStream,
    Heartbeat,
    Ordinary,
    decode_columns,
    decode_command,
    decode_heartbeat,
    decode_node_frame,
    decode_ordinary,
    decode_rank_frame,
    decode_sensor_frame,
    encode,
    packed,
    printable,
)
from gpuwatch.wire.collect import gather

thorough = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# -- valid frames, within the ranges that gpuwatch.schema states ---------------------------------

name = st.text(st.characters(codec="utf-8"), max_size=12) | st.just("n" * 256)
text = st.text(st.characters(codec="utf-8"), max_size=20) | st.just("é" * 4096)
count = st.integers(0, 2**53)
pid = st.integers(0, 2**31)
wall = st.floats(0.0, 4.2e9)
age = st.floats(0.0, 1e9)
total_ns = st.integers(0, 10**17)
size = st.integers(0, 2**60)
user_float = st.floats()  # NaN and infinity are legal news


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def several(strategy: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=most).map(tuple)


phase_ns = maybe(st.integers(0, 10**14))
phases = st.builds(
    schema.PhasesNs,
    data_wait=phase_ns,
    h2d=phase_ns,
    forward=phase_ns,
    backward=phase_ns,
    comm=phase_ns,
    optimizer=phase_ns,
    other=phase_ns,
)


@st.composite
def step_records(draw: st.DrawFn) -> schema.StepRecord:
    host = draw(phases)
    total = sum(value or 0 for value in msgspec.structs.astuple(host))
    return draw(
        st.builds(
            schema.StepRecord,
            index=count,
            started_s=wall,
            step_ns=st.just(total) | st.integers(total, 10**15),
            host=st.just(host),
            device=maybe(phases),
            clock=st.sampled_from(["host", "device"]),
            batches=count,
            samples=maybe(count),
            tokens=maybe(count),
            loss=maybe(user_float),
            memory_bytes=maybe(size),
            queue_depth=maybe(st.floats(0.0, 1e6)),
            queue_capacity=maybe(st.integers(0, 2**20)),
            tags=several(st.sampled_from(schema.TAGS), 8),
            loader=name,
            device_stall_ns=maybe(st.integers(0, 10**15)),
        )
    )


spans = st.builds(
    schema.Span, name=name, started_s=wall, duration_ns=st.integers(0, 10**15), step=count
)
states = st.builds(
    schema.RankState,
    status=st.sampled_from(schema.RANK_STATUSES),
    phase=name,
    phase_age_ns=total_ns,
    step=count,
    phases_na=st.dictionaries(st.sampled_from(schema.PHASES), name, max_size=3),
    loss=maybe(user_float),
    epoch=maybe(user_float),
    total_steps=maybe(count),
    notices=several(text),
)
ledgers = st.builds(
    schema.Ledger,
    steps=count,
    samples=count,
    skipped=count,
    training_ns=total_ns,
    data_wait_ns=total_ns,
    comm_ns=total_ns,
    eval_ns=total_ns,
    checkpoint_ns=total_ns,
    lost_ns=total_ns,
    wall_ns=total_ns,
)
loaders = st.builds(
    schema.Loader,
    key=name,
    num_workers=st.integers(0, 65536),
    prefetch_factor=maybe(st.integers(0, 2**20)),
    pin_memory=st.booleans(),
    persistent_workers=st.booleans(),
    batch_size=maybe(count),
    drop_last=st.booleans(),
    dataset=name,
    length=maybe(count),
    worker_pids=several(pid),
)
ddps = st.builds(
    schema.Ddp,
    bucket_cap_mb=maybe(st.floats(0.0, 1e6)),
    find_unused_parameters=st.booleans(),
    static_graph=st.booleans(),
    broadcast_buffers=st.booleans(),
    gradient_as_bucket_view=st.booleans(),
    comm_hook=name,
    parameters=maybe(count),
    gradient_bytes=maybe(size),
    buffers=maybe(count),
    backend=name,
)
precisions = st.builds(
    schema.Precision,
    float32_matmul=name,
    cudnn_tf32=maybe(st.booleans()),
    autocast=name,
    grad_scaler=st.booleans(),
)
versions = st.builds(schema.Versions, gpuwatch=name, python=name, torch=name, cuda=name, nccl=name)
replies = st.builds(
    schema.Reply,
    id=name,
    status=st.sampled_from(["accepted", "done", "error"]),
    message=text,
    data=text,
)


knobs = st.builds(
    schema.Knob,
    name=name,
    value=st.integers(-(2**53), 2**53) | st.floats(-1e18, 1e18) | st.booleans() | name,
    low=maybe(st.floats(-1e18, 1e18)),
    high=maybe(st.floats(-1e18, 1e18)),
    choices=several(name),
    effective=name,
)
logged = st.builds(
    schema.Logged,
    at_s=wall,
    id=name,
    verb=name,
    args=text,
    status=st.sampled_from(["accepted", "done", "error"]),
    message=text,
)


@st.composite
def rank_frames(draw: st.DrawFn) -> schema.RankFrame:
    rank = draw(st.integers(0, 2**20 - 1))
    hello = st.builds(
        schema.Hello,
        host=name,
        pid=pid,
        pid_started_s=wall,
        world_size=st.integers(rank + 1, 2**20),
        local_rank=maybe(st.integers(0, 2**20 - 1)),
        run_name=name,
        run_source=name,
        started_s=wall,
        script=text,
        device=name,
        device_name=name,
        device_uuid=name,
        cores=maybe(st.integers(0, 65536)),
        torch_threads=maybe(st.integers(0, 65536)),
        versions=versions,
        loaders=several(loaders),
        ddp=maybe(ddps),
        precision=precisions,
        dataset_path=text,
        allow_control=st.booleans(),
        boot_id=name,
        knobs=several(knobs),
    )
    return draw(
        st.builds(
            schema.RankFrame,
            version=st.just(schema.WIRE_VERSION),
            run=name,
            rank=st.just(rank),
            incarnation=name,
            seq=count,
            sent_s=wall,
            dropped=count,
            records=several(step_records()),
            spans=several(spans),
            state=states,
            ledger=ledgers,
            hello=maybe(hello),
            replies=several(replies),
            bye=maybe(st.builds(schema.Bye, reason=name, detail=text)),
            snapshot=st.booleans(),
            simulated=st.booleans(),
            commands=several(logged),
        )
    )


readings = st.dictionaries(
    name,
    st.builds(
        schema.Reading,
        value=maybe(user_float),
        unit=name,
        source=name,
        age_s=age,
        state=st.sampled_from(["ok", "na", "stale", "error"]),
        reason=name,
    ),
    max_size=3,
)
sensor_frames = st.builds(
    schema.SensorFrame,
    version=st.just(schema.WIRE_VERSION),
    seq=count,
    sent_s=wall,
    host=st.builds(schema.HostSample, cores=st.integers(0, 65536), readings=readings),
    gpus=several(
        st.builds(
            schema.GpuSample,
            index=st.integers(0, 4096),
            uuid=name,
            name=name,
            readings=readings,
        )
    ),
    gpus_reason=text,
    processes=several(
        st.builds(
            schema.ProcessSample,
            pid=pid,
            rank_pid=pid,
            role=st.sampled_from(["rank", "worker"]),
            status=st.sampled_from(["R", "S", "D", "T", "Z"]),
            readings=readings,
        )
    ),
)


def as_raw(frame: msgspec.Struct) -> msgspec.Raw:
    return msgspec.Raw(encode(frame))


node_frames = st.builds(
    schema.NodeFrame,
    version=st.just(schema.WIRE_VERSION),
    node=name,
    incarnation=name,
    seq=count,
    sent_s=wall,
    frames=several(rank_frames().map(as_raw), 1),
    ages=several(
        st.builds(
            schema.RankAge,
            run=name,
            rank=st.integers(0, 2**20 - 1),
            incarnation=name,
            age_s=age,
            pid_alive=maybe(st.booleans()),
            process_state=name,
            gone_reason=name,
        )
    ),
    sensors=maybe(sensor_frames.map(as_raw)),
    sensors_reason=text,
    agent_pid=pid,
    notices=several(text),
    replies=several(replies),
)
commands = st.builds(
    schema.Command,
    version=st.just(schema.WIRE_VERSION),
    id=name,
    verb=name,
    run=name,
    rank=maybe(st.integers(0, 2**20 - 1)),
    args=st.dictionaries(
        name,
        st.text(st.characters(codec="utf-8"), max_size=5)
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats()
        | st.booleans(),
        max_size=3,
    ),
    ttl_s=st.floats(0.0, 3600.0),
)

Decoder = Callable[[bytes], Any]
KINDS: dict[str, tuple[Decoder, st.SearchStrategy[Any], Any]] = {
    "rank": (decode_rank_frame, rank_frames(), schema.RankFrame),
    "sensor": (decode_sensor_frame, sensor_frames, schema.SensorFrame),
    "node": (decode_node_frame, node_frames, schema.NodeFrame),
    "command": (decode_command, commands, schema.Command),
}
VERSIONED = [kind for kind in KINDS if kind != "replies"]
every_kind = pytest.mark.parametrize("kind", KINDS)


# -- round trips ---------------------------------------------------------------------------------


@every_kind
@thorough
@given(data=st.data())
def test_round_trip(kind: str, data: st.DataObject) -> None:
    decode, strategy, expected = KINDS[kind]
    frame = data.draw(strategy)
    read = decode(encode(frame))
    # Not ==: a loss may be NaN.
    assert encode(read) == encode(frame)
    if kind != "replies":
        assert type(read) is expected
    for view in (memoryview, bytearray):
        assert encode(decode(view(encode(frame)))) == encode(frame)  # type: ignore[arg-type]


@thorough
@given(node_frames)
def test_a_node_frame_carries_frames_as_they_came(frame: schema.NodeFrame) -> None:
    read = decode_node_frame(encode(frame))
    assert [bytes(raw) for raw in read.frames] == [bytes(raw) for raw in frame.frames]
    for raw in read.frames:
        decode_rank_frame(raw)
    assert (read.sensors is None) == (frame.sensors is None)
    if read.sensors is not None:
        assert frame.sensors is not None
        assert bytes(read.sensors) == bytes(frame.sensors)
        decode_sensor_frame(read.sensors)


def test_a_node_frame_has_sensors_or_none() -> None:
    sensors = encode(schema.SensorFrame(1, 0, 1.0))
    frame = schema.NodeFrame(1, "node", "inc", 0, 1.0, sensors=msgspec.Raw(sensors))
    read = decode_node_frame(encode(frame))
    assert read.sensors is not None
    assert bytes(read.sensors) == sensors
    assert decode_node_frame(encode(schema.NodeFrame(1, "n", "i", 0, 1.0))).sensors is None


def test_a_node_frame_without_its_last_fields_has_no_sensors() -> None:
    read = decode_node_frame(msgspec.msgpack.encode([1, "node", "inc", 0, 1.0]))
    assert read == schema.NodeFrame(1, "node", "inc", 0, 1.0)
    assert read.sensors is None


def test_what_cannot_be_encoded_is_a_frame_error() -> None:
    with pytest.raises(FrameError, match="surrogates"):
        encode(schema.Bye("caf\udce9"))
    with pytest.raises(FrameError, match="cannot be encoded"):
        encode(schema.Command(1, "id", "verb", args={"many": 2**70}))


# -- damage --------------------------------------------------------------------------------------


def check(value: Any, kind: mi.Type, where: str = "$") -> None:
    """Hold a decoded value against its declared type, without msgspec's own decoder."""
    match kind:
        case mi.UnionType():
            options = [part for part in kind.types if fits(value, part)]
            assert options, where
            check(value, options[0], where)
        case mi.IntType() | mi.FloatType():
            assert fits(value, kind), where
            if kind.ge is not None:
                assert value >= kind.ge, where
            if kind.le is not None:
                assert value <= kind.le, where
            if kind.lt is not None:
                assert value < kind.lt, where
            if kind.ge is not None or kind.le is not None:
                assert math.isfinite(value), where
        case mi.StrType():
            assert isinstance(value, str), where
            assert kind.max_length is None or len(value) <= kind.max_length, where
        case mi.LiteralType():
            assert value in kind.values, where
        case mi.VarTupleType():
            assert isinstance(value, tuple), where
            assert kind.max_length is None or len(value) <= kind.max_length, where
            for at, item in enumerate(value):
                check(item, kind.item_type, f"{where}[{at}]")
        case mi.DictType():
            assert isinstance(value, dict), where
            assert kind.max_length is None or len(value) <= kind.max_length, where
            for key, item in value.items():
                check(key, kind.key_type, f"{where} key")
                check(item, kind.value_type, f"{where}[{key!r}]")
        case mi.StructType():
            assert type(value) is kind.cls, where
            for field in kind.fields:
                check(getattr(value, field.encode_name), field.type, f"{where}.{field.name}")
        case _:
            assert fits(value, kind), where


def fits(value: Any, kind: mi.Type) -> bool:
    types: dict[type[mi.Type], type] = {
        mi.NoneType: type(None),
        mi.BoolType: bool,
        mi.IntType: int,
        mi.FloatType: float,
        mi.StrType: str,
        mi.RawType: msgspec.Raw,
    }
    if isinstance(kind, mi.StructType):
        return isinstance(value, kind.cls)
    if isinstance(value, bool) and not isinstance(kind, mi.BoolType):
        return False
    return isinstance(value, types[type(kind)])


def refused_or_in_range(kind: str, data: bytes) -> bool:
    """Decode; return whether it was refused. Anything but FrameError escapes."""
    decode, _, expected = KINDS[kind]
    heartbeat = decode_heartbeat(data) if kind == "rank" else None
    try:
        frame = decode(data)
    except FrameError as exc:
        if heartbeat is not None:
            with pytest.raises(FrameError):
                heartbeat.told()
        return bool(str(exc))
    check(frame, mi.type_info(expected))
    if heartbeat is not None:
        assert repr(heartbeat.told()) == repr((frame.state, frame.ledger))
    if kind == "rank":
        assert frame.hello is None or frame.rank < frame.hello.world_size
        for record in frame.records:
            host = [value or 0 for value in msgspec.structs.astuple(record.host)]
            assert sum(host) <= record.step_ns
    if kind == "node":
        for raw in frame.frames:
            refused_or_in_range("rank", bytes(raw))
        if frame.sensors is not None:
            refused_or_in_range("sensor", bytes(frame.sensors))
    return False


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Flip, overwrite, cut, insert or swap at one to three places."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.choice(b"\x00\x7f\x80\x90\xc0\xc1\xca\xcb\xcf\xd3\xdb\xdd\xdf\xff")
            case 2:
                del out[at:]
            case 3:
                out[at:at] = rng.randbytes(rng.randint(1, 9))
            case 4:
                other = rng.randrange(len(out) + 1)
                low, high = sorted((at, other))
                middle = (low + high) // 2
                out[low:high] = out[middle:high] + out[low:middle]
            case _:
                special = rng.choice([math.nan, math.inf, -math.inf, -1.0, 1e308])
                out[at : at + 9] = b"\xcb" + struct.pack(">d", special)
    return bytes(out)


@pytest.mark.parametrize("other", [Heartbeat, Ordinary, Columns, gather._Frame])
def test_what_reads_a_rank_frame_by_parts_has_all_its_fields_in_order(other: Any) -> None:
    """A field that a schema of tomorrow adds is missing here until it is read, or passed on."""
    known = getattr(other, "__struct_fields__", None) or other._fields
    assert known == schema.RankFrame.__struct_fields__


def test_a_heartbeat_is_a_rank_frame_with_its_state_left_raw() -> None:
    state = schema.RankState("training", "forward", step=7, phases_na={"comm": "one process"})
    ledger = schema.Ledger(steps=7, wall_ns=3)
    frame = schema.RankFrame(1, "r", 3, "a", 9, 5.0, 2, state=state, ledger=ledger, simulated=True)
    found = decode_heartbeat(encode(frame))
    assert found is not None
    assert found.told() == (state, ledger)
    for field in ("version", "run", "rank", "incarnation", "seq", "sent_s", "dropped", "simulated"):
        assert getattr(found, field) == getattr(frame, field)
    logged = schema.Logged(5.0, "id", "set", "lr 1", "done", "")
    for more in (
        {"records": (RECORD,)},
        {"spans": (schema.Span("eval", 5.0, 9, 3),)},
        {"hello": HELLO},
        {"replies": (schema.Reply("id", "done"),)},
        {"bye": schema.Bye("finished")},
        {"snapshot": True},
        {"workers": (schema.WorkerCost("train", 2),)},
        {"commands": (logged,)},
    ):
        assert decode_heartbeat(encode(msgspec.structs.replace(frame, **more))) is None, more


@thorough
@given(frame=rank_frames(), seed=st.integers(0, 2**32))
def test_only_what_holds_nothing_new_is_a_heartbeat(frame: schema.RankFrame, seed: int) -> None:
    fields = ("records", "spans", "hello", "replies", "bye", "snapshot", "workers", "commands")
    new = any(getattr(frame, field) for field in fields)
    assert (decode_heartbeat(encode(frame)) is None) == new
    bare: dict[str, Any] = dict.fromkeys(fields, ()) | {
        "hello": None,
        "bye": None,
        "snapshot": False,
    }
    valid = encode(msgspec.structs.replace(frame, **bare))
    assert decode_heartbeat(valid) is not None
    rng = random.Random(seed)
    for _ in range(20):
        refused_or_in_range("rank", damaged(valid, rng))


@thorough
@given(frames=st.lists(rank_frames(), max_size=4), seed=st.integers(0, 2**32))
def test_columns_are_the_heads_of_frames_that_are_all_ordinary(
    frames: list[schema.RankFrame], seed: int
) -> None:
    rng = random.Random(seed)
    parts = []
    bare = dict.fromkeys(("spans", "replies", "commands"), ()) | dict.fromkeys(("hello", "bye"))
    for frame in frames:
        plain = msgspec.structs.replace(frame, **bare, snapshot=False)
        data = encode(plain if rng.random() < 0.9 else frame)
        if rng.random() < 0.2:
            data = damaged(data, rng)
        with contextlib.suppress(msgspec.MsgspecError):  # else it is in no frame of a node
            msgspec.msgpack.decode(data, type=msgspec.Raw)
            parts.append(data)
    raws = [msgspec.Raw(data) for data in parts]
    heads = [decode_ordinary(data) for data in parts]
    found = decode_columns(raws)
    whole = all(data[:1] == b"\xdc" and data[1:3] == b"\x00\x13" for data in parts)
    if found is None:
        assert not parts or None in heads or not whole
        return
    assert all(len(column) == len(parts) for column in found)
    for at, head in enumerate(heads):
        assert head is not None
        for field, column in zip(Columns._fields, found, strict=True):
            value, expected = column[at], getattr(head, field)
            if isinstance(value, msgspec.Raw):
                value, expected = bytes(value), bytes(expected)
            assert value == expected, field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("run", "n" * 257),
        ("rank", 2**20),
        ("incarnation", 7),
        ("seq", 2**53 + 1),
        ("sent_s", -1.0),
        ("dropped", -1),
        ("spans", (1,)),
        ("hello", ("host", 1, 1.0, 4)),
        ("replies", (1,)),
        ("bye", schema.Bye("finished")),
        ("snapshot", True),
        ("simulated", 1),
        ("commands", (1,)),
        ("merged", -1),
    ],
)
def test_one_frame_that_is_not_ordinary_makes_no_columns(field: str, value: object) -> None:
    good = schema.RankFrame(1, "r", 3, "a", 9, 5.0, 2)
    assert decode_columns([msgspec.Raw(encode(good))] * 3) is not None
    other = encode(msgspec.structs.replace(good, **{field: value}))
    assert decode_ordinary(other) is None
    raws = [msgspec.Raw(encode(good)), msgspec.Raw(other), msgspec.Raw(encode(good))]
    assert decode_columns(raws) is None


def test_columns_are_none_where_a_frame_has_more_fields_or_fewer() -> None:
    frame = schema.RankFrame(1, "r", 3, "a", 9, 5.0, 2)
    values = list(msgspec.structs.astuple(frame))
    for fields, good in ((values, True), ([*values, 1], False), (values[:-1], False)):
        data = msgspec.msgpack.encode(fields)
        assert decode_ordinary(data) is not None
        assert (decode_columns([msgspec.Raw(data)]) is not None) is good


@every_kind
@thorough
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_damaged_bytes_are_refused_or_in_range(kind: str, data: st.DataObject, seed: int) -> None:
    valid = encode(data.draw(KINDS[kind][1]))
    rng = random.Random(seed)
    for _ in range(40):
        refused_or_in_range(kind, damaged(valid, rng))


@every_kind
@thorough
@given(data=st.binary(max_size=200))
def test_any_bytes_are_refused_or_in_range(kind: str, data: bytes) -> None:
    refused_or_in_range(kind, data)


@every_kind
@thorough
@given(data=st.data())
def test_a_frame_cut_anywhere_is_refused(kind: str, data: st.DataObject) -> None:
    valid = encode(data.draw(KINDS[kind][1]))
    for at in range(len(valid)) if len(valid) < 300 else range(0, len(valid), 101):
        assert refused_or_in_range(kind, valid[:at])


MONSTERS = {
    "array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "string of 4 GB": b"\xdb\xff\xff\xff\xff",
    "binary of 4 GB": b"\xc6\xff\xff\xff\xff",
    "extension of 4 GB": b"\xc9\xff\xff\xff\xff\x01",
    "100,000 arrays": b"\x91" * 100_000 + b"\xc0",
    "100,000 maps": b"\x81\xa1a" * 100_000 + b"\xc0",
    "bytes that are no UTF-8": b"\xa2\xff\xfe",
    "an unused byte": b"\xc1",
    "nothing": b"",
}


@every_kind
@pytest.mark.parametrize("monster", MONSTERS.values(), ids=MONSTERS.keys())
def test_monsters_are_refused_wherever_they_stand(kind: str, monster: bytes) -> None:
    frames: dict[str, Any] = {
        "rank": schema.RankFrame(1, "run", 0, "inc", 0, 1.0, 0, (RECORD,), hello=HELLO),
        "sensor": schema.SensorFrame(1, 0, 1.0, schema.HostSample(2, {"cpu": schema.Reading(1.0)})),
        "node": schema.NodeFrame(1, "node", "inc", 0, 1.0, (msgspec.Raw(b"\x91\x01"),)),
        "command": schema.Command(1, "id", "verb", args={"a": 1}),
        "replies": (schema.Reply("id", "done"),),
    }
    valid = encode(frames[kind])
    assert not refused_or_in_range(kind, valid)
    assert refused_or_in_range(kind, monster)
    for at in range(len(valid)):
        refused_or_in_range(kind, valid[:at] + monster)
        refused_or_in_range(kind, valid[:at] + monster + valid[at + 1 :])
    # As an unknown field behind the last one it has to be skipped; only text that nobody looks at
    # can be.
    fields = msgspec.msgpack.decode(valid)
    longer = b"\xdc" + struct.pack(">H", len(fields) + 1)
    body = b"".join(msgspec.msgpack.encode(field) for field in fields)
    refused = refused_or_in_range(kind, longer + body + monster)
    assert refused or monster == MONSTERS["bytes that are no UTF-8"]


# -- what holds between fields -------------------------------------------------------------------

HELLO = schema.Hello("node", 1, 1.0, world_size=4)
RECORD = schema.StepRecord(0, 1.0, 100, schema.PhasesNs(10, 20, 30, 20, 10, 5, 5))


@pytest.mark.parametrize(("rank", "good"), [(0, True), (3, True), (4, False), (5, False)])
def test_a_rank_is_within_its_world(rank: int, good: bool) -> None:
    data = encode(schema.RankFrame(1, "run", rank, "inc", 0, 1.0, 0, hello=HELLO))
    if good:
        assert decode_rank_frame(data).rank == rank
    else:
        with pytest.raises(FrameError, match=f"rank {rank} in a world of 4"):
            decode_rank_frame(data)


@pytest.mark.parametrize("phase", schema.PHASES)
def test_phases_are_within_the_step(phase: str) -> None:
    def frame(extra: int) -> bytes:
        host = msgspec.structs.replace(RECORD.host, **{phase: getattr(RECORD.host, phase) + extra})
        record = msgspec.structs.replace(RECORD, index=7, host=host)
        return encode(schema.RankFrame(1, "run", 0, "inc", 0, 1.0, 0, (RECORD, record)))

    assert len(decode_rank_frame(frame(0)).records) == 2
    with pytest.raises(FrameError, match="step 7: phases are longer"):
        decode_rank_frame(frame(1))


# -- versions ------------------------------------------------------------------------------------

NEWER = r"wire version 2, this gpuwatch 1: it is newer; install the same gpuwatch-monitor"


@pytest.mark.parametrize("kind", VERSIONED)
@thorough
@given(data=st.data())
def test_a_newer_version_is_named(kind: str, data: st.DataObject) -> None:
    decode, strategy, _ = KINDS[kind]
    frame = msgspec.structs.replace(data.draw(strategy), version=schema.WIRE_VERSION + 1)
    with pytest.raises(WireVersionError, match=NEWER):
        decode(encode(frame))


@pytest.mark.parametrize("kind", VERSIONED)
@pytest.mark.parametrize("rest", [[], [{"all": "new"}], [None] * 40, ["x", [[]], 1.5]])
def test_a_newer_version_is_named_though_nothing_else_fits(kind: str, rest: list[Any]) -> None:
    with pytest.raises(WireVersionError, match=NEWER):
        KINDS[kind][0](msgspec.msgpack.encode([schema.WIRE_VERSION + 1, *rest]))


@pytest.mark.parametrize("kind", VERSIONED)
def test_an_older_version_is_named(kind: str) -> None:
    fields: dict[str, list[Any]] = {
        "rank": ["run", 0, "inc", 0, 1.0, 0],
        "sensor": [0, 1.0],
        "node": ["node", "inc", 0, 1.0],
        "command": ["id", "verb"],
    }
    with pytest.raises(WireVersionError, match="it is older"):
        KINDS[kind][0](msgspec.msgpack.encode([0, *fields[kind]]))


@pytest.mark.parametrize("kind", VERSIONED)
def test_our_own_version_with_a_bad_rest_is_no_version_error(kind: str) -> None:
    with pytest.raises(FrameError) as caught:
        KINDS[kind][0](msgspec.msgpack.encode([schema.WIRE_VERSION, {}]))
    assert type(caught.value) is FrameError


# -- streams -------------------------------------------------------------------------------------


def cut(data: bytes, at: list[int]) -> list[bytes]:
    places = [0, *sorted(place % (len(data) + 1) for place in at), len(data)]
    return [data[low:high] for low, high in pairwise(places)]


bodies = st.lists(st.binary(max_size=40) | st.binary(min_size=250, max_size=400), max_size=8)


@thorough
@given(bodies, st.lists(st.integers(0, 5000), max_size=12))
def test_any_chunks_give_the_same_frames(frames: list[bytes], at: list[int]) -> None:
    stream = FrameStream()
    data = b"".join(map(packed, frames))
    assert [frame for chunk in cut(data, at) for frame in stream.feed(chunk)] == frames
    assert stream.pending == 0
    assert [frame for byte in data for frame in stream.feed(bytes([byte]))] == frames


@thorough
@given(bodies, st.integers(0, 5000))
def test_a_cut_tail_gives_the_complete_frames(frames: list[bytes], lost: int) -> None:
    stream = FrameStream()
    data = b"".join(map(packed, frames))
    data = data[: max(0, len(data) - lost)]
    read = list(stream.feed(data))
    assert read == frames[: len(read)]
    left = len(data) - sum(len(packed(frame)) for frame in read)
    assert stream.pending == left
    if len(read) < len(frames):
        assert left < len(packed(frames[len(read)]))


@thorough
@given(bodies, st.integers(MAX_FRAME_BYTES + 1, 2**32 - 1), st.binary(max_size=20))
def test_a_length_over_the_limit_ends_the_stream(
    frames: list[bytes], length: int, tail: bytes
) -> None:
    stream = FrameStream()
    data = b"".join(map(packed, frames)) + struct.pack(">I", length) + tail
    coming = stream.feed(data)
    assert [next(coming) for _ in frames] == frames
    with pytest.raises(FrameError, match=f"announces {length} bytes"):
        next(coming)
    with pytest.raises(FrameError):
        list(stream.feed(packed(b"good")))


def test_what_was_not_asked_for_comes_later() -> None:
    stream = FrameStream()
    stream.feed(packed(b"one") + packed(b"two"))
    early = stream.feed(packed(b"three"))
    assert next(early) == b"one"
    assert list(stream.feed(packed(b"four"))) == [b"two", b"three", b"four"]
    assert list(early) == []


def test_packed_refuses_what_no_stream_takes() -> None:
    assert list(FrameStream().feed(packed(bytes(MAX_FRAME_BYTES)))) == [bytes(MAX_FRAME_BYTES)]
    with pytest.raises(FrameError, match="over the limit"):
        packed(bytes(MAX_FRAME_BYTES + 1))


# -- text for the terminal -----------------------------------------------------------------------

TURNING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


@thorough
@given(st.text(st.characters(), max_size=30))
def test_printable_text_has_no_controls(value: str) -> None:
    shown = printable(value)
    assert len(shown) == len(value)
    for character in shown:
        assert unicodedata.category(character) not in {"Cc", "Cs", "Zl", "Zp"}
        assert unicodedata.bidirectional(character) not in TURNING
    shown.encode()
    assert printable(shown) == shown


@pytest.mark.parametrize("code", [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x202E, 0x2067, 0xD800])
def test_every_control_is_replaced(code: int) -> None:
    assert printable(f"a{chr(code)}b") == "a\ufffdb"


@pytest.mark.parametrize(
    "attack",
    [
        "\x1b[2J",
        "\x1b]0;title\x07",
        "\x9b31m",
        "\x1bP+q\x1b\\",
        "a\rb",
        "a\nb",
        "a\x08b",
        "\u202egpj",
    ],
)
def test_escapes_are_neutralised(attack: str) -> None:
    shown = printable(attack)
    assert shown != attack
    assert not set(shown) & set("\x1b\x9b\x07\r\n\x08\u202e")


def test_what_is_harmless_stays() -> None:
    for value in ("", "plain ascii", "größe 模型 🚀 é", "עברית", "\ufffd"):
        assert printable(value) == value
