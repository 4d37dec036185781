"""Both ranks of a slow machine are named, whichever of them is last."""

import pytest
from builders import Trace

from gpuwatch.diagnosis.engine import diagnose_run, picture_of
from gpuwatch.store import Store

HEALTHY = {"data_wait": 1.0, "forward": 40.0, "backward": 20.0, "optimizer": 2.0}


@pytest.mark.parametrize(
    ("late_ms", "named"),
    [
        ({4: 120.0, 5: 120.0}, (4, 5)),  # they take turns
        ({4: 120.0, 5: 130.0}, (4, 5)),  # the same one is always last, by a little
        ({4: 30.0, 5: 120.0}, (5,)),  # mending the last one is most of it
    ],
)
def test_ranks_that_are_late_alike(late_ms: dict[int, float], named: tuple[int, ...]) -> None:
    ranks = [
        {**HEALTHY, "forward": HEALTHY["forward"] + late_ms.get(rank, 0.0)} for rank in range(8)
    ]
    store = Store()
    store.apply(Trace(ranks, scatter=0.01).node_frame, 0.0)
    view = store.view()
    found, _ = diagnose_run(picture_of(view, view.runs[0]))
    straggler = next(f for f in found if f.kind == "straggler")
    assert straggler.ranks == named
    note = next(f for f in found if f.kind == "comm_bound")
    assert note.ranks == tuple(r for r in range(8) if r not in named)
