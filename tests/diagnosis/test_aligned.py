"""What the rules read of every step, whether steps are kept as objects or as bytes."""

from __future__ import annotations

import pytest
from builders import record

from gpuwatch.diagnosis.aligned import Aligned
from gpuwatch.diagnosis.periodic import _other_ms
from gpuwatch.schema import StepRecord
from gpuwatch.store.packed import Packed, records_codec


def aligned(*rows: tuple[StepRecord, ...], packed: bool) -> Aligned:
    kept = [
        Packed(tuple(records_codec.encode(step) for step in row), records_codec) if packed else row
        for row in rows
    ]
    return Aligned((), tuple(range(len(rows[0]))), tuple(kept))


@pytest.mark.parametrize("packed", [False, True])
def test_batches_and_pauses_of_each_rank(packed: bool) -> None:
    one = tuple(record(i, {"forward": 3.0, "other": 7.0}, batches=4) for i in range(2))
    other = (
        record(0, {"forward": 3.0, "other": 7.0}, batches=1, gc_ns=5_000_000),
        record(1, {"forward": 3.0, "other": 7.0}, batches=2, gc_ns=9_000_000),
    )
    found = aligned(one, other, packed=packed)
    assert found.batches == [4.0, 1.5]
    assert [list(row) for row in found.gc_ms] == [[0.0, 0.0], [5.0, 9.0]]
    assert [list(row) for row in found.step_ms] == [[10.0, 10.0], [10.0, 10.0]]
    # A pause of the collector is no time outside loading, forward, backward and optimizer.
    assert _other_ms(found) == [[7.0, 7.0], [2.0, 0.0]]
    assert not found.comm_known
