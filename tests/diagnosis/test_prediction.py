"""The loader model on loaders made by hand: what another number of workers brings."""

import pytest
from builders import Trace
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.diagnosis.engine import picture_of
from gpuwatch.diagnosis.prediction import predict_step_ms
from gpuwatch.diagnosis.types import RunPicture
from gpuwatch.store import Store

REST = {"forward": 10.0, "backward": 20.0, "optimizer": 4.0, "other": 1.0}
REST_MS = 35.0


def picture(trace: Trace) -> RunPicture:
    store = Store(lambda: 100.0)
    store.apply(trace.node_frame, 100.0)
    view = store.view()
    return picture_of(view, view.runs[0])


def loading(
    workers: int, batch_ms: float = 160.0, *, ranks: int = 1, cpu_ms: float = 8.0, cores: int = 16
) -> RunPicture:
    """A loader whose items wait, with so many workers, and cores to spare."""
    step_ms = max(REST_MS, batch_ms / workers) if workers else REST_MS + batch_ms
    made = (cpu_ms + 20.0) / step_ms  # cores that a rank and its workers use
    return picture(
        Trace(
            [{**REST, "data_wait": step_ms - REST_MS + 0.2}] * ranks,
            num_workers=workers,
            queue_depth=0.0 if step_ms > REST_MS else 3.0,
            batch_ms=(batch_ms, cpu_ms, 1.0) if workers else None,
            worker_cpu=100 * cpu_ms / step_ms / max(1, workers),
            main_cpu=100 * 20.0 / step_ms,
            cpu=100 * ranks * made / cores,
            cores=cores,
            transfer_ms=0.5,
            scatter=0.01,
        )
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("before", [0, 1, 2, 4])
@pytest.mark.parametrize("after", [0, 1, 2, 4, 8])
def test_items_that_wait(before: int, after: int, ranks: int) -> None:
    predicted = predict_step_ms(loading(before, ranks=ranks), after)
    assert predicted is not None
    low_ms, high_ms = predicted
    truth_ms = max(REST_MS, 160.0 / after) if after else REST_MS + 160.0
    assert low_ms <= truth_ms <= high_ms
    assert high_ms < 1.35 * truth_ms  # a range that says something


def test_cores_are_a_limit_that_no_worker_moves() -> None:
    # Two ranks on two cores, full of decoding: 160 ms CPU a batch and 20 ms of training each.
    busy = picture(
        Trace(
            [{**REST, "data_wait": 150.0}] * 2,
            num_workers=1,
            queue_depth=0.0,
            batch_ms=(184.0, 160.0, 1.0),
            worker_cpu=86.0,
            main_cpu=11.0,
            cpu=97.0,
            cores=2,
            transfer_ms=0.5,
        )
    )
    for workers in (1, 2, 4, 16):
        predicted = predict_step_ms(busy, workers)
        assert predicted is not None
        assert predicted[0] > 160.0
        assert predicted[1] < 250.0


def test_only_the_ranks_that_are_changed_change() -> None:
    uneven = picture(
        Trace(
            [{**REST, "data_wait": 45.0}, {**REST, "data_wait": 45.0}],
            num_workers=2,
            batch_ms=(160.0, 8.0, 1.0),
            queue_depth=0.0,
        )
    )
    everywhere, one_alone = (predict_step_ms(uneven, 8, ranks) for ranks in (None, [0]))
    assert everywhere is not None
    assert one_alone is not None
    assert everywhere[1] < 50.0
    assert one_alone[0] > 70.0  # the other rank still needs 80 ms a batch


def test_what_is_not_known_is_not_predicted() -> None:
    assert predict_step_ms(picture(Trace([REST], steps=4)), 4) is None
    unknown = Trace([{**REST, "data_wait": 100.0}])
    unknown.frames[0] = unknown.frames[0].__class__(
        **{n: getattr(unknown.frames[0], n) for n in unknown.frames[0].__struct_fields__}
        | {"hello": None}
    )
    assert predict_step_ms(picture(unknown), 4) is None


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 8),
    st.integers(0, 16),
    st.floats(5.0, 900.0),
    st.sampled_from([1, 2, 3]),
)
def test_a_prediction_is_a_range_of_times(
    before: int, after: int, batch_ms: float, ranks: int
) -> None:
    predicted = predict_step_ms(loading(before, batch_ms, ranks=ranks), after)
    assert predicted is not None
    assert 0.0 < predicted[0] <= predicted[1] < 1e6
