"""The table of peaks: names as NVML gives them, dense figures, and nothing invented."""

import pytest

from gpuwatch.store.peaks import PEAKS, find_peak, peak_tflops


@pytest.mark.parametrize(
    ("card", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA H20", "bf16", 148.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA L40", "bf16", 181.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 5090", "fp16", 209.5),
        ("NVIDIA GeForce RTX 3090", "bf16", 71.0),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla T4", "fp16", 65.0),
        ("NVIDIA RTX A6000", "bf16", 154.8),
    ],
)
def test_known_cards(card: str, dtype: str, tflops: float) -> None:
    value, source = peak_tflops(card, dtype)
    assert value == tflops
    assert source


@pytest.mark.parametrize(
    ("card", "dtype", "why"),
    [
        ("", "bf16", "no GPU"),
        ("NVIDIA GeForce RTX 4080", "bf16", "no peak is known for NVIDIA GeForce RTX 4080"),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", "no peak is known"),
        ("NVIDIA A1000", "bf16", "no peak is known"),
        ("NVIDIA L400", "bf16", "no peak is known"),
        ("NVIDIA H100", "bf16", "no peak is known"),  # which of the three cannot be told
        ("Tesla V100-SXM2-32GB", "bf16", "no bf16 peak"),
        ("NVIDIA A100-SXM4-80GB", "fp8", "no fp8 peak"),
        ("NVIDIA A100-SXM4-80GB", "", "dtype"),
        ("NVIDIA A100-SXM4-80GB", "source", "no source peak"),
    ],
)
def test_what_is_not_known_is_not_guessed(card: str, dtype: str, why: str) -> None:
    value, reason = peak_tflops(card, dtype)
    assert value is None
    assert why in reason


def test_the_users_word_goes_first() -> None:
    assert peak_tflops("NVIDIA GeForce RTX 4080", "", 97.5) == (97.5, "--peak-tflops")


def test_the_table_is_dense() -> None:
    """A figure with sparsity is twice the dense one: fp8 is twice bf16, bf16 at most twice tf32."""
    for peak in PEAKS:
        assert peak.source
        if peak.fp8 is not None and peak.bf16 is not None:
            assert peak.fp8 == pytest.approx(2 * peak.bf16, rel=0.02)
        if peak.tf32 is not None and peak.bf16 is not None:
            assert peak.bf16 == pytest.approx(2 * peak.tf32, rel=0.02)
        if peak.bf16 is not None:
            assert peak.fp16 == peak.bf16


def test_each_row_is_found_first_by_some_name() -> None:
    names = [
        "NVIDIA GB200", "NVIDIA B200", "NVIDIA H20", "NVIDIA H200 NVL", "NVIDIA H200",
        "NVIDIA H100 NVL", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", "NVIDIA A100-PCIE-40GB",
        "NVIDIA A30", "NVIDIA A40", "NVIDIA A10", "NVIDIA L40S", "NVIDIA L40", "NVIDIA L4",
        "NVIDIA RTX A6000", "NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 4090",
        "NVIDIA GeForce RTX 3090", "Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB", "Tesla T4",
    ]  # fmt: skip
    assert [find_peak(name) for name in names] == list(PEAKS)
