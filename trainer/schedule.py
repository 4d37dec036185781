"""The learning rate over the optimizer steps and over the batch size, as pure functions."""

import math
from typing import Literal

__all__ = ["lr_factor", "lr_for_batch", "warmup_length"]

Kind = Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"]
Scaling = Literal["auto", "linear", "sqrt", "none"]


def lr_factor(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int,
    kind: Kind = "cosine",
    min_ratio: float = 0.0,
    decay_share: float = 0.2,
) -> float:
    """Share of the peak learning rate at optimizer step `step`, counted from 0.

    Warm-up is min(1, (step + 1) / max(1, warmup_steps)): never 0, so that no step is wasted, and
    1 at the last warm-up step. What follows it, with t = the share of the steps after the warm-up
    that are done:

    - ``cosine`` falls to `min_ratio` as (1 + cos(pi * t)) / 2 (Loshchilov & Hutter 2017, without
      restarts), ``linear`` as 1 - t; the last step of `total_steps` is the first to come near it;
    - ``wsd`` (warm-up, stable, decay; Hu et al. 2024) stays at 1 and falls linearly in the last
      `decay_share` of all steps;
    - ``inverse_sqrt`` is sqrt(warmup / (step + 1)) (Vaswani et al. 2017), without an end;
    - ``constant`` stays at 1.
    """
    warmup = max(1, warmup_steps)
    if step + 1 <= warmup:
        return (step + 1) / warmup
    match kind:
        case "constant":
            return 1.0
        case "inverse_sqrt":
            return math.sqrt(warmup / (step + 1))
        case "wsd":
            # The warm-up is never eaten: where both do not fit, the fall begins after it.
            stable_end = max(warmup, total_steps - round(decay_share * total_steps))
        case _:
            stable_end = warmup
    done = (step + 1 - stable_end) / max(1, total_steps - stable_end + 1)
    done = min(1.0, max(0.0, done))
    share = (1.0 + math.cos(math.pi * done)) / 2.0 if kind == "cosine" else 1.0 - done
    return min_ratio + (1.0 - min_ratio) * share


def warmup_length(steps: int | Literal["auto"], *, share: float, total_steps: int) -> int:
    """Optimizer steps of the warm-up: `steps`, or `share` of all of them, at least 1."""
    return max(1, round(share * total_steps)) if steps == "auto" else max(1, steps)


def lr_for_batch(
    base_lr: float,
    *,
    samples: int,
    base_samples: int | None,
    scaling: Scaling,
    optimizer: Literal["sgd", "adamw"],
) -> float:
    """The learning rate for a step of `samples` samples, found to be `base_lr` for `base_samples`.

    base_lr * (samples / base_samples) ** e with e = 1 for ``linear`` (SGD; Goyal et al. 2017),
    1/2 for ``sqrt`` (Adam and its kin; Malladi et al. 2022), 0 for ``none``; ``auto`` goes by the
    optimizer. Both rules hold up to the critical batch size only (McCandlish et al. 2018). Without
    `base_samples` there is nothing to scale by.
    """
    if base_samples is None or scaling == "none":
        return base_lr
    if scaling == "auto":
        scaling = "linear" if optimizer == "sgd" else "sqrt"
    return float(base_lr * (samples / base_samples) ** (1.0 if scaling == "linear" else 0.5))
