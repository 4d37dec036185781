"""MFU: by the table, by the user's word, and n/a with the reason."""

import pytest
from builders import Trace
from msgspec.structs import replace

from gpuwatch.schema import Precision
from gpuwatch.store import Store
from gpuwatch.store.mfu import Mfu, mfu_of
from gpuwatch.store.views import RankView

HEALTHY = {"data_wait": 1.0, "forward": 30.0, "backward": 64.0, "optimizer": 5.0}


def rank(
    *,
    flops: float | None = 3.12e13,
    source: str = "formula: 6N+12LHQT",
    card: str = "",
    autocast: str = "",
) -> RankView:
    trace = Trace(
        [HEALTHY], scatter=0.0,
        more_hello={"device_name": card, "precision": Precision(autocast=autocast)},
    )  # fmt: skip
    trace.frames = [
        replace(frame, state=replace(frame.state, flops_per_step=flops, flops_source=source))
        for frame in trace.frames
    ]
    store = Store(lambda: 100.0)
    store.apply(trace.node_frame, 100.0)
    return store.view().runs[0].ranks[0]


def test_by_the_table() -> None:
    # 31.2 TFLOP in steps of 100 ms on a card of 312 TFLOPS.
    found = mfu_of(rank(card="NVIDIA A100-SXM4-80GB", autocast="bfloat16"))
    assert found.value == pytest.approx(1.0)
    assert found.peak_tflops == 312.0
    assert "data sheet" in found.peak_source


def test_by_the_users_word() -> None:
    found = mfu_of(rank(card="NVIDIA GeForce RTX 4080"), 624.0)
    assert found == Mfu(pytest.approx(0.5), "", 624.0, "--peak-tflops")


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (rank(flops=None, source="n/a: no formula for ResNet"), "no formula for ResNet"),
        (rank(flops=None, source=""), "FLOPs of a step are not known"),
        (rank(), "no GPU"),
        (rank(card="NVIDIA A100-SXM4-80GB"), "dtype"),
        (rank(card="NVIDIA GeForce RTX 4080", autocast="float16"), "no peak is known"),
    ],
)
def test_not_known_is_never_a_number(seen: RankView, why: str) -> None:
    found = mfu_of(seen)
    assert found.value is None
    assert why in found.reason
