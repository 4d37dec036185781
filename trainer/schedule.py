"""The learning rate over the optimizer steps, as a pure function of the step."""

import math
from typing import Literal

__all__ = ["lr_factor"]


def lr_factor(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int,
    kind: Literal["cosine", "constant"] = "cosine",
    min_ratio: float = 0.0,
) -> float:
    """Share of the peak learning rate at optimizer step `step`, counted from 0.

    Warm-up is min(1, (step + 1) / max(1, warmup_steps)): never 0, so that no step is wasted, and
    1 at the last warm-up step. After it ``cosine`` falls to `min_ratio`, which the last step of
    `total_steps` is the first to come near: (1 + cos(pi * t)) / 2 with t = the share of the steps
    after the warm-up that are done (Loshchilov & Hutter 2017, without restarts).
    """
    warmup = max(1, warmup_steps)
    if step + 1 <= warmup or kind == "constant":
        return min(1.0, (step + 1) / warmup)
    done = min(1.0, (step + 1 - warmup) / max(1, total_steps - warmup + 1))
    return min_ratio + (1.0 - min_ratio) * (1.0 + math.cos(math.pi * done)) / 2.0
