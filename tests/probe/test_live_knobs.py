"""Knobs: their declaration, what `set` accepts, the ranks' agreement, and the loader's own."""

import json
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import gpuwatch
from gpuwatch.probe import knobs as module
from gpuwatch.probe.agree import FOLLOWER_S, LEADER_S, Agreement, MissedError
from gpuwatch.probe.batches import look
from gpuwatch.probe.boundary import Outcome
from gpuwatch.probe.events import Recorder, Replay
from gpuwatch.probe.knobs import Knobs, Live, loader_knobs
from gpuwatch.probe.pace import CommandError, Pace
from gpuwatch.probe.patches import Marks
from gpuwatch.probe.telemetry import Telemetry
from gpuwatch.schema import WIRE_VERSION, Command

PACE = Pace(step=5, tick=50)


def command(rank: int | None = 0, **args: Any) -> Command:
    return Command(WIRE_VERSION, "id", "set", rank=rank, args=args)


def set_now(knobs: Knobs, **args: Any) -> Outcome | None:
    """Accept a `set` and come to the next boundary."""
    _, job = knobs.set(command(**args), PACE, 1)
    return job.work(51)


@pytest.mark.parametrize(
    ("declaration", "words"),
    [
        ({"name": ""}, "needs a name of 1 to 256 characters"),
        ({"name": "a\nb"}, "needs a name"),
        ({"value": None}, "must be a number, a text or a truth value"),
        ({"apply": 3}, "needs a function to apply a value with"),
        ({"value": "x", "low": 1}, "is no number and can have no limits"),
        ({"value": True, "high": 1}, "is no number and can have no limits"),
        ({"low": "1"}, "the limits of the knob speed must be numbers"),
        ({"high": float("nan")}, "the limits of the knob speed must be numbers"),
        ({"low": 2, "high": 1}, "nothing between"),
        ({"low": 2}, "speed must be a whole number from 2, not 1"),
        ({"value": float("inf")}, "speed must be a number, not inf"),
        ({"choices": ("a",)}, "is no text and can have no choices"),
        ({"value": "c", "choices": ("a", "b")}, "speed must be one of a, b, not 'c'"),
        ({"value": "a", "choices": "ab"}, "the choices of the knob speed must be texts"),
    ],
)
def test_a_wrong_declaration_raises(declaration: dict[str, Any], words: str) -> None:
    whole: dict[str, Any] = {"name": "speed", "value": 1, "apply": print, **declaration}
    name, value, apply = whole.pop("name"), whole.pop("value"), whole.pop("apply")
    with pytest.raises(ValueError, match=words):
        gpuwatch.knob(name, value, apply, **whole)


def test_without_a_probe_a_knob_does_nothing() -> None:
    assert gpuwatch.knob("speed", 1, print, low=0) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("now", "limits", "value", "result"),
    [
        (1, {"low": 0, "high": 9}, 9, 9),
        (1, {"low": 0, "high": 9}, 7.0, 7),
        (1, {"low": 0, "high": 9}, 10, "speed must be a whole number from 0 to 9, not 10"),
        (1, {}, 7.5, "speed must be a whole number, not 7.5"),
        (1, {}, True, "speed must be a whole number, not True"),
        (1, {}, "7", "speed must be a whole number, not '7'"),
        (1.0, {"high": 2}, 2, 2.0),
        (1.0, {"high": 2}, 2.5, "speed must be a number up to 2, not 2.5"),
        (1.0, {}, float("nan"), "speed must be a number, not nan"),
        (True, {}, False, False),
        (True, {}, 0, "speed must be true or false, not 0"),
        ("a", {"choices": ("a", "b")}, "b", "b"),
        ("a", {"choices": ("a", "b")}, "c", "speed must be one of a, b, not 'c'"),
        ("a", {}, 1, "speed must be a text, not 1"),
    ],
)
def test_what_set_accepts(now: Any, limits: dict[str, Any], value: Any, result: Any) -> None:
    got: list[Any] = []
    knobs = Knobs(lambda: None)
    knobs.register(Live("speed", now, got.append, **limits))
    if isinstance(result, str) and result.startswith("speed"):
        with pytest.raises(CommandError) as refused:
            set_now(knobs, knob="speed", value=value)
        assert str(refused.value) == result
        assert got == []
        return
    outcome = set_now(knobs, knob="speed", value=value)
    assert outcome is not None
    assert outcome.message == f"speed {now} -> {result} at the next step"
    assert (got, type(got[0])) == ([result], type(now))
    assert knobs.told()[0].value == result
    data = json.loads(outcome.data)
    assert data == {
        "schema": 1, "knob": "speed", "old": now, "new": result, "effective": "at the next step",
    }  # fmt: skip


def test_what_set_refuses() -> None:
    knobs = Knobs(lambda: None)
    knobs.register(Live("speed", 1, print, low=0))
    for args, words in [
        ({}, "knob must be the name of a knob"),
        ({"knob": "pace", "value": 1}, "no knob 'pace': there are speed"),
        ({"knob": "speed"}, "set speed needs a value"),
        ({"knob": "speed", "value": 2, "now": True}, "set takes knob, value, at, not 'now'"),
        ({"knob": "speed", "value": 2, "at": 5}, "step 5 has begun already"),
        ({"knob": "speed", "value": 2, "at": "6"}, "at must be a whole number from 0 to"),
    ]:
        with pytest.raises(CommandError, match=words):
            set_now(knobs, **args)


def test_what_apply_says_and_raises_is_the_answer() -> None:
    changes: list[int] = []
    knobs = Knobs(lambda: changes.append(1))

    def apply(value: int) -> str:
        if value == 3:
            raise ValueError("three is taken")
        if value == 4:
            raise KeyError("four")
        return "when the moon is full"

    knobs.register(Live("speed", 1, apply))
    assert set_now(knobs, knob="speed", value=3) == Outcome("error", "three is taken")
    failed = set_now(knobs, knob="speed", value=4)
    assert failed == Outcome("error", "speed could not be set: KeyError: 'four'")
    assert knobs.told()[0].value == 1
    outcome = set_now(knobs, knob="speed", value=2)
    assert outcome is not None
    assert outcome.message == "speed 1 -> 2 when the moon is full"
    again = set_now(knobs, knob="speed", value=2)
    assert again is not None
    assert again.message == "speed is 2 already"
    assert len(changes) == 2  # registered, and changed once


def test_a_step_can_be_named() -> None:
    got: list[int] = []
    knobs = Knobs(lambda: None)
    knobs.register(Live("speed", 1, got.append))
    message, job = knobs.set(command(knob="speed", value=2, at=8), PACE, 1)
    assert message == "speed 1 -> 2 at step 8"
    assert [job.work(tick) for tick in (51, 52)] == [None, None]
    outcome = job.work(53)
    assert outcome is not None
    assert (got, outcome.message) == ([2], "speed 1 -> 2 from step 8 on")


# --- the agreement -----------------------------------------------------------------------------


class Ranks:
    """Agreements of some ranks over one store, on a clock of the test's."""

    def __init__(self, count: int) -> None:
        self.now_s = 0.0
        store = dist.HashStore()
        self.each = [
            Agreement(store, "key", rank, count, lambda: self.now_s) for rank in range(count)
        ]


def test_all_ranks_act_on_one_step_that_nobody_has_passed() -> None:
    ranks = Ranks(3)
    zero, one, two = ranks.each
    # At every boundary whoever has the command looks; the others do not have it yet.
    assert zero.look(10, 1) is None
    assert two.look(10, 1) is None
    assert zero.look(11, 1) is None
    assert two.look(11, 1) is None
    assert one.look(11, 1) is None
    # The last one that is told before rank 0 decides is a step ahead of it.
    assert two.look(12, 1) is None
    assert zero.look(12, 1) == 15
    assert [one.look(13, 1), two.look(13, 1), zero.look(13, 1)] == [15, 15, 15]


def test_without_one_of_them_nothing_changes_on_any() -> None:
    ranks = Ranks(2)
    zero, one = ranks.each
    assert zero.look(10, 1) is None
    ranks.now_s = LEADER_S + 1
    with pytest.raises(TimeoutError):
        zero.look(11, 1)
    with pytest.raises(TimeoutError):
        one.look(12, 1)  # it comes too late, and reads what was decided


def test_without_rank_0_the_others_decide_that_nothing_changes() -> None:
    ranks = Ranks(2)
    zero, one = ranks.each
    assert one.look(10, 1) is None
    ranks.now_s = FOLLOWER_S + 1
    with pytest.raises(TimeoutError):
        one.look(11, 1)
    with pytest.raises(TimeoutError):
        zero.look(12, 1)


def test_a_rank_that_has_passed_the_step_changes_nothing() -> None:
    zero, one = Ranks(2).each
    assert one.look(20, 1) is None  # its host has run ahead
    assert zero.look(10, 1) == 13
    with pytest.raises(MissedError, match="this rank had passed the step"):
        one.look(21, 1)
    # A boundary that leaps over the step is the first one after it on every rank.
    zero, one = Ranks(2).each
    assert one.look(10, 1) is None
    assert zero.look(10, 1) == 13
    assert one.look(14, 1) == 13


def test_an_error_of_the_store_is_tried_again_until_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(2)
    zero, one = ranks.each
    assert one.look(10, 1) is None
    with monkeypatch.context() as patch:
        patch.setattr(zero, "_store", None)
        assert zero.look(10, 1) is None
        ranks.now_s = LEADER_S - 1
        assert zero.look(11, 1) is None
    assert zero.look(12, 1) == 15
    monkeypatch.setattr(one, "_store", None)
    ranks.now_s = FOLLOWER_S + 1
    with pytest.raises(MissedError, match="the group's store cannot be asked"):
        one.look(13, 1)


def test_a_rank_waits_for_its_device_as_long_as_it_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: len(waits) == 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    zero, one = Ranks(2).each
    zero.look(10, 1)
    assert len(waits) == 1
    one.look(10, 1)  # a graph is captured
    assert len(waits) == 1
    waits.append(1)
    zero.look(11, 1)
    assert len(waits) == 3
    zero.look(12, 1)  # that was decided
    assert len(waits) == 3


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_knob_for_all_ranks_is_agreed_upon(group: None) -> None:
    got: list[int] = []
    knobs = Knobs(lambda: None)
    knobs.register(Live("windows", 1, got.append, together=True))
    with pytest.raises(CommandError, match="send it to all of them"):
        knobs.set(command(rank=1, knob="windows", value=2), PACE, 2)
    _, job = knobs.set(command(rank=None, knob="windows", value=2), PACE, 2)
    assert [job.work(tick) for tick in (51, 52, 53)] == [None, None, None]
    outcome = job.work(54)
    assert outcome is not None
    assert got == [2]
    assert outcome.message == "windows 1 -> 2 from step 9 on, on every rank"


def test_a_rank_that_may_differ_says_so(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[int] = []
    knobs = Knobs(lambda: None)
    knobs.register(Live("windows", 1, got.append, together=True))
    _, job = knobs.set(command(rank=None, knob="windows", value=2), PACE, 2)
    monkeypatch.setattr(Agreement, "look", missed)
    outcome = job.work(51)
    assert outcome is not None
    assert (got, outcome.status) == ([], "error")
    assert outcome.message == "too late: windows stays as it was here, and the ranks may differ now"


def missed(*_: object) -> None:
    raise MissedError("too late")


def test_fetches_are_no_steps_that_ranks_count_alike(group: None) -> None:
    knobs = Knobs(lambda: None)
    knobs.register(Live("windows", 1, print, together=True))
    pace = Replay(Recorder()).pace(7)
    with pytest.raises(CommandError, match="no optimizer step was seen"):
        knobs.set(command(rank=None, knob="windows", value=2), pace, 2)


def test_a_knob_for_all_ranks_needs_a_group() -> None:
    knobs = Knobs(lambda: None)
    knobs.register(Live("windows", 1, print, together=True))
    with pytest.raises(CommandError, match="needs a process group"):
        knobs.set(command(rank=None, knob="windows", value=2), PACE, 2)


# --- the loader's own --------------------------------------------------------------------------


def knobs_of(loader: DataLoader[Any]) -> Knobs:
    return Knobs(lambda: None, lambda: loader_knobs(weakref.ref(loader), 16))


def test_the_workers_of_a_loader_change_with_its_next_iterator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1})
    data = TensorDataset(torch.arange(64))
    loader = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)
    knobs = knobs_of(loader)
    batches = iter(loader)
    seen = [int(x) for x in next(batches)[0]]
    with pytest.raises(CommandError, match="num_workers must be a whole number from 0 to 32, not"):
        set_now(knobs, knob="num_workers", value=33)
    outcome = set_now(knobs, knob="num_workers", value=2)
    assert outcome is not None
    assert outcome.message == (
        "num_workers 1 -> 2 from the next epoch on (an epoch has 16 batches)"
    )
    for (part,) in batches:
        seen += [int(x) for x in part]
    assert seen == list(range(64))
    assert len(batches._workers) == 1  # type: ignore[attr-defined]
    del batches
    again = iter(loader)
    assert len(again._workers) == 2  # type: ignore[attr-defined]
    assert sum(len(part) for (part,) in again) == 64
    assert {knob.name: knob.value for knob in knobs.told()} == {
        "num_workers": 2, "prefetch_factor": 2,
    }  # fmt: skip


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_a_loader_that_cannot_have_other_workers_says_why() -> None:
    stream = DataLoader(Stream(), num_workers=1)
    refused = set_now(knobs_of(stream), knob="num_workers", value=2)
    assert refused is not None
    assert "each worker of an iterable dataset may read all of it" in refused.message
    patient = DataLoader(TensorDataset(torch.arange(8)), num_workers=1, timeout=5)
    refused = set_now(knobs_of(patient), knob="num_workers", value=0)
    assert refused is not None
    assert "the loader has a timeout" in refused.message
    assert (stream.num_workers, patient.num_workers) == (1, 1)
    alone = DataLoader(TensorDataset(torch.arange(8)))
    assert [knob.name for knob in knobs_of(alone).told()] == ["num_workers"]
    assert loader_knobs(None, None) == ()


@pytest.mark.parametrize(
    ("started_by", "on_device", "words"),
    [
        (
            "spawn",
            False,
            "workers are started by spawn here, and whether the dataset can be pickled",
        ),
        ("forkserver", False, "workers are started by forkserver here"),
        ("fork", True, "the batches are on a device"),
        ("fork", False, ""),
    ],
)
def test_workers_that_a_loader_never_had_may_not_start(
    started_by: str, on_device: bool, words: str
) -> None:
    data = TensorDataset(torch.arange(8))
    for before in (0, 1):
        loader = DataLoader(data, num_workers=1, multiprocessing_context=started_by)
        loader.num_workers = before
        reference = weakref.ref(loader)
        (live, *_) = loader_knobs(reference, None, on_device=on_device)
        knobs = Knobs(lambda: None)
        knobs.register(live)
        outcome = set_now(knobs, knob="num_workers", value=2)
        assert outcome is not None
        # What has workers already has proved that it can have them.
        refused = bool(words) and not before
        assert (outcome.status == "error") is refused, outcome.message
        assert words in outcome.message or not refused
        assert loader.num_workers == (0 if refused else 2)


def test_the_marks_know_where_batches_are() -> None:
    assert not look([torch.ones(2), 3]).on_device
    assert look({"x": [torch.ones(2, device="meta")]}).on_device
    assert not look([]).on_device


def test_the_loaders_knobs_are_told_whether_control_is_allowed_or_not() -> None:
    marks = Marks(Recorder(), pytest.fail)
    telemetry = Telemetry(
        marks._recorder, marks, name="", control=False, notices=[], warn=pytest.fail
    )
    loader = DataLoader(TensorDataset(torch.arange(8)))
    telemetry._loader = "loader0"
    marks.origins["loader0"] = weakref.ref(loader)
    assert [knob.name for knob in telemetry.knobs.told()] == ["num_workers"]


def test_the_marks_know_which_loader_an_iterator_is_of() -> None:
    marks = Marks(Recorder(), pytest.fail)
    marks.install()
    try:
        loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=4)
        for _ in loader:
            pass
        (key,) = marks.loaders
        assert marks.origins[key]() is loader
    finally:
        marks.remove()
