"""Dense peaks of cards by dtype, for MFU: what a matrix multiplication can reach, by data sheet.

MFU = model FLOPs per second / dense peak of the training dtype. Marketing figures with structured
sparsity are twice as large and are never used here; neither is a peak guessed for a card that is
not in the table. A card that runs below its power limit cannot reach its peak.
"""

import re
from typing import NamedTuple

__all__ = ["PEAKS", "Peak", "find_peak", "peak_tflops"]


class Peak(NamedTuple):
    """The dense peaks of one card in TFLOPS, None where the card has no such unit.

    `fp32` is without tensor cores. `bf16` and `fp16` accumulate in fp32, as training does: on
    GeForce cards that is half of the figure with fp16 accumulation. `pattern` matches the name
    that NVML and torch give.
    """

    pattern: re.Pattern[str]
    fp32: float | None
    tf32: float | None
    bf16: float | None
    fp16: float | None
    fp8: float | None
    source: str

    def of(self, dtype: str) -> float | None:
        """Return the peak for `fp32`, `tf32`, `bf16`, `fp16` or `fp8`; None for any other."""
        value = getattr(self, dtype) if dtype in {"fp32", "tf32", "bf16", "fp16", "fp8"} else None
        return value if isinstance(value, float) else None


def _card(
    pattern: str,
    source: str,
    *,
    fp32: float | None = None,
    tf32: float | None = None,
    bf16: float | None = None,
    fp16: float | None = None,
    fp8: float | None = None,
) -> Peak:
    return Peak(re.compile(pattern, re.IGNORECASE), fp32, tf32, bf16, fp16, fp8, source)


# The first that matches counts: the narrower name stands before the wider one. Data sheets that
# print figures "with sparsity" are halved.
PEAKS: tuple[Peak, ...] = (
    _card(
        r"\bGB200\b|\bGB300\b",
        "NVIDIA GB200 NVL72 data sheet, one of its GPUs, halved from sparsity",
        fp32=80.0, tf32=1250.0, bf16=2500.0, fp16=2500.0, fp8=5000.0,
    ),
    _card(
        r"\bB200\b",
        "NVIDIA HGX B200 data sheet, one of 8 GPUs, halved from sparsity",
        fp32=75.0, tf32=1125.0, bf16=2250.0, fp16=2250.0, fp8=4500.0,
    ),
    _card(
        r"\bH20\b",
        "NVIDIA H20 data sheet",
        fp32=44.0, tf32=74.0, bf16=148.0, fp16=148.0, fp8=296.0,
    ),
    _card(
        r"\bH200 NVL\b",
        "NVIDIA H200 data sheet, NVL, halved from sparsity",
        fp32=60.0, tf32=417.5, bf16=835.5, fp16=835.5, fp8=1670.5,
    ),
    _card(
        r"\bH200\b|\bGH200\b",
        "NVIDIA H200 data sheet, SXM, halved from sparsity",
        fp32=67.0, tf32=494.5, bf16=989.5, fp16=989.5, fp8=1979.0,
    ),
    _card(
        r"\bH100 NVL\b",
        "NVIDIA H100 data sheet, NVL, halved from sparsity",
        fp32=60.0, tf32=417.5, bf16=835.5, fp16=835.5, fp8=1670.5,
    ),
    _card(
        r"\bH100 PCIe\b",
        "NVIDIA H100 data sheet, PCIe, halved from sparsity",
        fp32=51.0, tf32=378.0, bf16=756.0, fp16=756.0, fp8=1513.0,
    ),
    _card(
        r"\bH100\b.*(SXM|HBM3)|\bH800\b.*SXM",
        "NVIDIA H100 data sheet, SXM, halved from sparsity",
        fp32=67.0, tf32=494.5, bf16=989.5, fp16=989.5, fp8=1979.0,
    ),
    _card(
        r"\bA100\b|\bA800\b",
        "NVIDIA A100 data sheet",
        fp32=19.5, tf32=156.0, bf16=312.0, fp16=312.0,
    ),
    _card(r"\bA30\b", "NVIDIA A30 data sheet", fp32=10.3, tf32=82.0, bf16=165.0, fp16=165.0),
    _card(
        r"\bA40\b",
        "NVIDIA A40 data sheet, halved from sparsity",
        fp32=37.4, tf32=74.8, bf16=149.7, fp16=149.7,
    ),
    _card(r"\bA10\b", "NVIDIA A10 data sheet", fp32=31.2, tf32=62.5, bf16=125.0, fp16=125.0),
    _card(
        r"\bL40S\b",
        "NVIDIA L40S data sheet, halved from sparsity",
        fp32=91.6, tf32=183.0, bf16=362.0, fp16=362.0, fp8=733.0,
    ),
    _card(
        r"\bL40\b",
        "NVIDIA L40 data sheet, halved from sparsity",
        fp32=90.5, tf32=90.5, bf16=181.0, fp16=181.0, fp8=362.0,
    ),
    _card(
        r"\bL4\b",
        "NVIDIA L4 data sheet, halved from sparsity",
        fp32=30.3, tf32=60.0, bf16=121.0, fp16=121.0, fp8=242.5,
    ),
    _card(
        r"\bRTX A6000\b",
        "NVIDIA RTX A6000 data sheet and GA102 whitepaper",
        fp32=38.7, tf32=77.4, bf16=154.8, fp16=154.8,
    ),
    _card(
        r"\bRTX 5090\b",
        "NVIDIA RTX Blackwell whitepaper, fp32 accumulation",
        fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5, fp8=419.0,
    ),
    _card(
        r"\bRTX 4090\b",
        "NVIDIA Ada whitepaper, fp32 accumulation",
        fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3,
    ),
    _card(
        r"\bRTX 3090\b(?! Ti)",
        "NVIDIA GA102 whitepaper, fp32 accumulation",
        fp32=35.6, tf32=35.6, bf16=71.0, fp16=71.0,
    ),
    _card(r"\bV100\b.*SXM", "NVIDIA V100 data sheet, SXM2", fp32=15.7, fp16=125.0),
    _card(r"\bV100\b.*PCIe", "NVIDIA V100 data sheet, PCIe", fp32=14.0, fp16=112.0),
    _card(r"\bTesla T4\b|^(NVIDIA )?T4$", "NVIDIA T4 data sheet", fp32=8.1, fp16=65.0),
)  # fmt: skip


def find_peak(card: str) -> Peak | None:
    """Return the row of a card by its name, None for one that is not in the table."""
    return next((peak for peak in PEAKS if peak.pattern.search(card)), None)


def peak_tflops(card: str, dtype: str, said: float | None = None) -> tuple[float | None, str]:
    """Return (dense peak in TFLOPS, where it comes from), or (None, why it is not known).

    Args:
        card: the name that NVML or torch gives; empty on CPU.
        dtype: of the matrix multiplications: fp32, tf32, bf16, fp16 or fp8; empty if unknown.
        said: what the user gave as `--peak-tflops`; goes before the table.
    """
    if said is not None:
        return said, "--peak-tflops"
    if not card:
        return None, "no GPU"
    peak = find_peak(card)
    if peak is None:
        return None, f"no peak is known for {card}: give --peak-tflops"
    if not dtype:
        return None, "the dtype of the training is not known: give --peak-tflops"
    value = peak.of(dtype)
    if value is None:
        return None, f"no {dtype} peak is known for {card}: give --peak-tflops"
    return value, peak.source
