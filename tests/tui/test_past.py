"""What is kept of a run of many ranks, which is compressed, and of one of few, which is not."""

import random
import sys
from array import array
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_step
from tui.fakes import cluster, records

from gpuwatch.store.packed import Packed, records_codec
from gpuwatch.tui import past as module
from gpuwatch.tui.past import (
    GPU_FIELDS,
    RANK_FIELDS,
    Columns,
    Moment,
    Past,
    _stall_ms,
    nodes_at,
    run_at,
)

NODES = 20

NONE = Packed((), records_codec)
ODD = "a name that is too long for a row " * 4


@pytest.mark.parametrize("seed", range(10))
def test_stalls_of_a_large_run_are_those_of_its_steps(seed: int) -> None:
    chance = random.Random(seed)
    steps = []
    for index, step in enumerate(records(number=200, first=5)):
        stall_ns = None if chance.random() < 0.3 else chance.randint(0, 10**9)
        loader = ODD if chance.random() < 0.05 else step.loader
        steps.append(
            replace_step(step, started_s=float(index), device_stall_ns=stall_ns, loader=loader)
        )
    packed = NONE
    for first in range(0, 200, 10):  # a window begins within a chunk
        packed = packed.followed_by(steps[first : first + 10], 64)
    rank = cluster(1, 1, slow_node=0).runs[0].ranks[0]
    as_bytes, plain = (replace(rank, window=window) for window in (packed, tuple(steps[-64:])))
    found = [_stall_ms(plain, since_s) for since_s in (0.0, 140.5, 170.0, 193.0, 198.5, 199.5, 300)]
    assert len(set(found)) > 3
    assert found == [
        _stall_ms(as_bytes, since_s) for since_s in (0.0, 140.5, 170.0, 193.0, 198.5, 199.5, 300)
    ]


def kept(monkeypatch: pytest.MonkeyPatch, compress_above: int) -> tuple[Past, Moment]:
    """The past of a run of 160 ranks, of three seconds each another picture, and its last one."""
    monkeypatch.setattr(module, "PACK_ABOVE", compress_above)
    past = Past()
    for seed in range(3):
        view = cluster(NODES, 8, slow_node=0, seed=seed)
        gpus = {gpu.uuid: gpu for node in view.nodes for gpu in node.gpus}
        assert past.keep(view.runs[0], gpus, (), 1000.0 + 10 * seed)
    return past, past.moments(view.runs[0].run)[-1]


def test_many_ranks_are_kept_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, one = kept(monkeypatch, 10**9)
    small, other = kept(monkeypatch, 128)
    assert isinstance(one.values, array)
    assert isinstance(other.values, Columns)
    run = cluster(NODES, 8, slow_node=0, seed=5).runs[0]
    for field in RANK_FIELDS:
        for rank in (0, 7, 159, 160):
            assert other.rank(rank, field) == one.rank(rank, field)
            assert small.rank_points(run.run, rank, field) == plain.rank_points(
                run.run, rank, field
            )
    known = [field for field in RANK_FIELDS if one.rank(7, field) is not None]
    assert len(known) > 6
    uuid = next(iter(one.gpus))
    for field in GPU_FIELDS:
        assert other.gpu(uuid, field) == one.gpu(uuid, field)
        assert small.gpu_points(run.run, uuid, field) == plain.gpu_points(run.run, uuid, field)
    assert other.gpu(uuid, "gpu_util") is not None
    assert other.gpu("another", "gpu_util") is None
    assert run_at(run, other) == run_at(run, one)
    nodes = cluster(NODES, 8, slow_node=0, seed=5).nodes
    assert nodes_at(nodes, other) == nodes_at(nodes, one)
    assert nodes_at(nodes, other) != nodes


def test_a_moment_of_many_ranks_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    _, one = kept(monkeypatch, 10**9)
    _, other = kept(monkeypatch, 128)
    assert isinstance(other.values, Columns)
    size = sum(map(sys.getsizeof, other.values._columns))
    assert size < 0.7 * sys.getsizeof(one.values)


def test_curves_go_on_as_if_made_anew() -> None:
    """Moments come, old ones go, and the clock is set back: points are those of the moments."""
    past = Past()
    run = cluster(1, 4).runs[0]
    for step, at_s in enumerate([*range(1000, 1700, 40), 1100, 1101, 1150, *range(1200, 2000, 90)]):
        slower = replace(run.ranks[0], own_ms=float(step))
        past.keep(replace(run, ranks=(slower, *run.ranks[1:])), {}, (), float(at_s))
        moments = past.moments(run.run)
        for field in ("own_ms", "memory_gb"):
            points = [(m.at_s, m.rank(slower.rank, field)) for m in moments]
            assert past.rank_points(run.run, slower.rank, field) == points
    assert len(moments) < 30  # some have gone


def test_nothing_is_nothing() -> None:
    assert list(Columns([]).column(3)) == []
    run = replace(cluster(1, 8).runs[0], ranks=())
    past = Past()
    assert past.keep(run, {}, (), 1000.0)
    assert past.rank_points(run.run, 0, "own_ms") == [(1000.0, None)]
