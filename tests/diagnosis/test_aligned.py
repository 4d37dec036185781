"""What the rules read of every step, whether steps are kept as objects or as bytes."""

from __future__ import annotations

import pytest
from builders import record

from gpuwatch.diagnosis.aligned import Aligned
from gpuwatch.diagnosis.periodic import _other_ns
from gpuwatch.diagnosis.steps import read_steps
from gpuwatch.schema import StepRecord
from gpuwatch.store.packed import Packed, records_codec


def aligned(*rows: tuple[StepRecord, ...], packed: bool) -> Aligned:
    kept = [
        Packed(tuple(records_codec.encode(step) for step in row), records_codec) if packed else row
        for row in rows
    ]
    return Aligned(
        (), range(len(rows[0])), tuple(kept), tuple(map(read_steps, kept)), ("",) * len(kept)
    )


@pytest.mark.parametrize("packed", [False, True])
def test_batches_and_pauses_of_each_rank(packed: bool) -> None:
    one = tuple(record(i, {"forward": 3.0, "other": 7.0}, batches=4) for i in range(2))
    other = (
        record(0, {"forward": 3.0, "other": 7.0}, batches=1, gc_ns=5_000_000),
        record(1, {"forward": 3.0, "other": 7.0}, batches=2, gc_ns=9_000_000),
    )
    found = aligned(one, other, packed=packed)
    assert [found.batches(row) for row in range(2)] == [4.0, 1.5]
    assert [list(row.gc) for row in found.rows] == [[0, 0], [5_000_000, 9_000_000]]
    assert [list(row.step) for row in found.rows] == [[10_000_000] * 2] * 2
    # A pause of the collector is no time outside loading, forward, backward and optimizer.
    assert list(map(list, _other_ns(found))) == [[7_000_000, 7_000_000], [2_000_000, 0]]
    assert not found.comm_known
