"""The rules that keep old and new versions able to read each other, for every Struct."""

import functools
import inspect
import math
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect as mi

from gpuwatch import schema

# Fields in order; those before the bar have no default. Append at the end of the second part only.
GOLDEN = {
    "Versions": "| gpuwatch python torch cuda nccl",
    "Loader": "key | num_workers prefetch_factor pin_memory persistent_workers batch_size "
    "drop_last dataset length worker_pids batch_bytes first_batch_ns collate start_method",
    "Ddp": "| bucket_cap_mb find_unused_parameters static_graph broadcast_buffers "
    "gradient_as_bucket_view comm_hook parameters gradient_bytes buffers backend bucket_bytes "
    "comm_span_ns",
    "Precision": "| float32_matmul cudnn_tf32 autocast grad_scaler",
    "Hello": "host pid pid_started_s world_size | local_rank run_name run_source started_s script "
    "device device_name device_uuid cores torch_threads versions loaders ddp precision "
    "dataset_path allow_control boot_id parallel frameworks knobs",
    "Knob": "name value | low high choices effective",
    "Logged": "at_s id verb args status message |",
    "PhasesNs": "| data_wait h2d forward backward comm optimizer other",
    "StepRecord": "index started_s step_ns host | device clock batches samples tokens loss "
    "memory_bytes queue_depth queue_capacity tags loader device_stall_ns grad_norm learning_rate "
    "loss_scale padding_share gc_ns",
    "Ledger": "| steps samples skipped training_ns data_wait_ns comm_ns eval_ns checkpoint_ns "
    "lost_ns wall_ns",
    "Span": "name started_s duration_ns | step",
    "RankState": "| status phase phase_age_ns step phases_na loss epoch total_steps notices "
    "learning_rate grad_norm loss_scale recompiles gc_pauses gc_pause_ns flops_per_step "
    "flops_source device_dropped memory_peak_bytes memory_reserved_bytes memory_retries",
    "Bye": "reason | detail",
    "Command": "version id verb | run rank args ttl_s",
    "Reply": "id status | message data",
    "RankFrame": "version run rank incarnation seq sent_s dropped | records spans state ledger "
    "hello replies bye snapshot simulated workers commands merged",
    "WorkerCost": "loader pid | batches wall_ns cpu_ns collate_ns busy_ns age_s",
    "Reading": "value | unit source age_s state reason",
    "GpuEvent": "code text time_s | hardware",
    "GpuProcess": "pid | memory_bytes kind name user visible",
    "GpuSample": "index uuid | name readings processes processes_reason reasons events lost "
    "parent slice driver driver_reason",
    "HostSample": "| cores readings core_percents io",
    "IoSample": "name kind | path filesystem readings",
    "ProcessSample": "pid rank_pid role | status readings",
    "SensorFrame": "version seq sent_s | host gpus gpus_reason processes",
    "RankAge": "run rank incarnation age_s | pid_alive process_state gone_reason",
    "NodeFrame": "version node incarnation seq sent_s | frames ages sensors sensors_reason "
    "agent_pid notices replies merged",
}

STRUCTS: dict[str, type[msgspec.Struct]] = {
    name: found
    for name, found in inspect.getmembers(schema, inspect.isclass)
    if issubclass(found, msgspec.Struct) and found.__module__ == schema.__name__ and name != "_Wire"
}
NAMES = sorted(STRUCTS)

every_struct = pytest.mark.parametrize("name", NAMES)
thorough = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def strategy(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Values that a type allows, from what msgspec knows of it."""
    match kind:
        case mi.NoneType():
            return st.none()
        case mi.BoolType():
            return st.booleans()
        case mi.IntType():
            top = kind.le if kind.le is not None else kind.lt - 1 if kind.lt is not None else 2**63
            return st.integers(kind.ge if kind.ge is not None else -(2**63), top)
        case mi.FloatType():
            if kind.ge is None and kind.le is None:
                return st.floats()
            return st.floats(kind.ge, kind.le)
        case mi.StrType():
            return st.text(st.characters(codec="utf-8"), max_size=min(kind.max_length or 20, 20))
        case mi.LiteralType():
            return st.sampled_from(kind.values)
        case mi.RawType():
            return st.builds(lambda value: msgspec.Raw(msgspec.msgpack.encode(value)), junk)
        case mi.VarTupleType():
            return st.lists(strategy(kind.item_type), max_size=3).map(tuple)
        case mi.DictType():
            return st.dictionaries(strategy(kind.key_type), strategy(kind.value_type), max_size=3)
        case mi.UnionType() if any(isinstance(part, mi.RawType) for part in kind.types):
            return st.none()  # msgspec alone cannot decode it: gpuwatch.frames does
        case mi.UnionType():
            return st.one_of(*map(strategy, kind.types))
        case mi.StructType():
            return st.builds(
                kind.cls, **{field.name: strategy(field.type) for field in kind.fields}
            )
    raise NotImplementedError(kind)


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(codec="utf-8"), max_size=5)
    | st.binary(max_size=5)
    | st.datetimes()
    | st.builds(msgspec.msgpack.Ext, st.integers(0, 127), st.binary(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=2),
    max_leaves=6,
)


@functools.cache
def instances(name: str) -> st.SearchStrategy[msgspec.Struct]:
    found: st.SearchStrategy[msgspec.Struct] = strategy(mi.type_info(STRUCTS[name]))
    return found


def as_bytes(value: object) -> bytes:
    """Return the encoding: equal where == is not, for NaN."""
    return msgspec.msgpack.encode(value)


def raw(value: msgspec.Struct) -> list[Any]:
    found: list[Any] = msgspec.msgpack.decode(as_bytes(value))
    return found


def decoded(name: str, array: object) -> msgspec.Struct:
    found: msgspec.Struct = msgspec.msgpack.decode(as_bytes(array), type=STRUCTS[name])
    return found


def required(cls: type[msgspec.Struct]) -> int:
    return len(cls.__struct_fields__) - len(cls.__struct_defaults__)


def test_the_golden_list_has_every_struct() -> None:
    assert set(GOLDEN) == set(STRUCTS)
    assert set(STRUCTS) <= set(schema.__all__)


@every_struct
def test_fields_keep_their_order(name: str) -> None:
    """A failure here is a change that old readers cannot read: only append, with a default."""
    needed, defaulted = (part.split() for part in GOLDEN[name].split("|"))
    fields = list(STRUCTS[name].__struct_fields__)
    assert fields[: len(needed) + len(defaulted)] == needed + defaulted
    assert required(STRUCTS[name]) == len(needed)


@every_struct
def test_every_struct_is_a_frozen_array(name: str) -> None:
    config = STRUCTS[name].__struct_config__
    assert config.array_like
    assert config.frozen
    assert not config.forbid_unknown_fields
    assert config.tag is None


@every_struct
def test_every_number_has_a_range(name: str) -> None:
    """All but the values from the user's own arithmetic, and switches."""
    # Results of the user's own arithmetic may be anything, NaN too.
    free = {"loss", "epoch", "value", "args", "learning_rate", "grad_norm", "loss_scale"}

    def look(kind: mi.Type, field: str) -> None:
        match kind:
            case mi.IntType() | mi.FloatType():
                assert field in free or (
                    kind.ge is not None and (kind.le is not None or kind.lt is not None)
                ), field
            case mi.StrType():
                assert field in free or kind.max_length is not None, field
            case mi.UnionType():
                for part in kind.types:
                    look(part, field)
            case mi.VarTupleType():
                assert kind.max_length is not None, field
                look(kind.item_type, field)
            case mi.DictType():
                look(kind.key_type, field)
                look(kind.value_type, field)
            case _:
                pass

    info = mi.type_info(STRUCTS[name])
    assert isinstance(info, mi.StructType)
    for field in info.fields:
        look(field.type, field.name)


@every_struct
@thorough
@given(data=st.data())
def test_round_trip(name: str, data: st.DataObject) -> None:
    value = data.draw(instances(name))
    assert as_bytes(decoded(name, raw(value))) == as_bytes(value)


@every_struct
@thorough
@given(data=st.data())
def test_new_bytes_are_read_by_an_old_reader(name: str, data: st.DataObject) -> None:
    value = data.draw(instances(name))
    info = mi.type_info(STRUCTS[name])
    assert isinstance(info, mi.StructType)
    cls = STRUCTS[name]
    keep = data.draw(st.integers(required(cls), len(info.fields)))
    hints = inspect.get_annotations(cls)
    old = msgspec.defstruct(
        "Old", [(field, hints[field]) for field in cls.__struct_fields__[:keep]], array_like=True
    )
    read = msgspec.msgpack.decode(as_bytes(value), type=old)
    assert as_bytes(read) == as_bytes(raw(value)[:keep])


@every_struct
@thorough
@given(data=st.data())
def test_old_bytes_are_read_with_defaults(name: str, data: st.DataObject) -> None:
    value = data.draw(instances(name))
    cls = STRUCTS[name]
    keep = data.draw(st.integers(required(cls), len(cls.__struct_fields__)))
    read = decoded(name, raw(value)[:keep])
    kept = [getattr(value, field) for field in cls.__struct_fields__[:keep]]
    assert as_bytes(read) == as_bytes(cls(*kept))


@every_struct
def test_bytes_that_lack_a_required_field_are_refused(name: str) -> None:
    cls = STRUCTS[name]
    if required(cls):
        with pytest.raises(msgspec.ValidationError):
            decoded(name, [])


@every_struct
@thorough
@given(data=st.data(), unknown=st.lists(junk, min_size=1, max_size=3))
def test_unknown_trailing_fields_are_ignored(
    name: str, data: st.DataObject, unknown: list[Any]
) -> None:
    value = data.draw(instances(name))
    assert as_bytes(decoded(name, raw(value) + unknown)) == as_bytes(value)


def mapped(array: Any, kind: mi.Type, change: Any) -> Any:
    """Apply `change(fields, cls)` to the array of every Struct within `array`, inside out."""
    match kind:
        case mi.StructType():
            fields = [
                mapped(item, field.type, change)
                for item, field in zip(array, kind.fields, strict=False)
            ]
            return change(fields, kind.cls)
        case mi.UnionType():
            for part in kind.types:
                if isinstance(part, mi.StructType) and array is not None:
                    return mapped(array, part, change)
        case mi.VarTupleType():
            return [mapped(item, kind.item_type, change) for item in array]
        case mi.DictType():
            return {key: mapped(item, kind.value_type, change) for key, item in array.items()}
        case _:
            pass
    return array


@every_struct
@thorough
@given(data=st.data(), unknown=junk)
def test_unknown_trailing_fields_are_ignored_at_every_depth(
    name: str, data: st.DataObject, unknown: Any
) -> None:
    value = data.draw(instances(name))
    grown = mapped(
        raw(value), mi.type_info(STRUCTS[name]), lambda fields, _: [*fields, unknown, unknown]
    )
    assert as_bytes(decoded(name, grown)) == as_bytes(value)


def only_required(value: Any) -> Any:
    """Return the value with every default in place, at every depth."""
    if isinstance(value, msgspec.Struct):
        cls = type(value)
        fields = cls.__struct_fields__[: required(cls)]
        return cls(*(only_required(getattr(value, field)) for field in fields))
    if isinstance(value, tuple):
        return tuple(map(only_required, value))
    if isinstance(value, dict):
        return {key: only_required(item) for key, item in value.items()}
    return value


@every_struct
@thorough
@given(data=st.data())
def test_old_bytes_are_read_with_defaults_at_every_depth(name: str, data: st.DataObject) -> None:
    value = data.draw(instances(name))
    cut = mapped(
        raw(value), mi.type_info(STRUCTS[name]), lambda fields, cls: fields[: required(cls)]
    )
    # Keep the outermost fields, so that what is within them is looked at.
    info = mi.type_info(STRUCTS[name])
    assert isinstance(info, mi.StructType)
    whole = [
        mapped(item, field.type, lambda fields, cls: fields[: required(cls)])
        for item, field in zip(raw(value), info.fields, strict=True)
    ]
    cls = STRUCTS[name]
    expected = cls(*(only_required(getattr(value, field)) for field in cls.__struct_fields__))
    assert as_bytes(decoded(name, cut)) == as_bytes(only_required(value))
    assert as_bytes(decoded(name, whole)) == as_bytes(expected)


def test_defaults_are_not_shared() -> None:
    """A dict in a frozen Struct is still a dict."""
    first, second = schema.HostSample(), schema.HostSample()
    assert first.readings is not second.readings
    assert schema.RankState().phases_na is not schema.RankState().phases_na


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, 1e300])
@every_struct
def test_bounded_floats_refuse_what_is_out_of_range(name: str, bad: float) -> None:
    info = mi.type_info(STRUCTS[name])
    assert isinstance(info, mi.StructType)
    for at, field in enumerate(info.fields):
        kinds = field.type.types if isinstance(field.type, mi.UnionType) else (field.type,)
        lows = [kind.ge for kind in kinds if isinstance(kind, mi.FloatType)]
        if not lows or lows[0] is None or lows[0] <= bad < 1e18:
            continue
        decoded(name, example(name, at, 1.0))
        with pytest.raises(msgspec.ValidationError, match=rf"at `\$\[{at}\]"):
            decoded(name, example(name, at, bad))


def example(name: str, at: int, value: object) -> list[Any]:
    """Return a valid array, but that field `at` is `value`."""
    least: dict[type[mi.Type], Any] = {
        mi.IntType: 1,
        mi.FloatType: 1.0,
        mi.StrType: "x",
        mi.BoolType: False,
        mi.VarTupleType: [],
        mi.DictType: {},
        mi.NoneType: None,
    }
    info = mi.type_info(STRUCTS[name])
    assert isinstance(info, mi.StructType)
    fields: list[Any] = []
    for field in info.fields:
        if isinstance(field.type, mi.LiteralType):
            fields.append(field.type.values[0])
        elif isinstance(field.type, mi.UnionType):
            none = any(isinstance(part, mi.NoneType) for part in field.type.types)
            fields.append(None if none else False)
        elif isinstance(field.type, mi.StructType):
            fields.append([])
        else:
            fields.append(least[type(field.type)])
    fields[at] = value
    return fields


def test_phases_have_one_order() -> None:
    assert schema.PhasesNs.__struct_fields__ == schema.PHASES


# A frame as the first release of wire version 1 wrote it: it is readable for ever.
OLD_FRAME = [
    1, "run", 2, "inc", 7, 1.7e9, 0,
    [[41, 1.7e9, 900, [100, None, 300, 400, None, 50, 50], None, "host", 2, 64, None, 0.5, 2**30,
      1.5, 8, ["warmup"], "train", None]],
    [["eval", 1.7e9, 5_000, 42]],
    ["training", "forward", 3, 42, {"comm": "one process"}, 0.5, 1.0, 100, ["a notice"]],
    [42, 2688, 0, 800, 100, 0, 5000, 0, 10, 5910],
    ["node", 4242, 1.7e9, 4],
    [], None, True, False,
]  # fmt: skip


def test_the_first_release_stays_readable() -> None:
    frame = msgspec.msgpack.decode(as_bytes(OLD_FRAME), type=schema.RankFrame)
    assert (frame.run, frame.rank, frame.seq, frame.snapshot) == ("run", 2, 7, True)
    (record,) = frame.records
    assert record.host.backward == 400
    assert (record.samples, record.memory_bytes, record.queue_capacity) == (64, 2**30, 8)
    assert record.tags == ("warmup",)
    assert frame.spans == (schema.Span("eval", 1.7e9, 5_000, 42),)
    assert frame.state.phases_na == {"comm": "one process"}
    assert frame.ledger.wall_ns == 5910
    assert frame.hello == schema.Hello("node", 4242, 1.7e9, 4)
