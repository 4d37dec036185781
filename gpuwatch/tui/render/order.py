"""Orders that do not shuffle with every breath of the numbers."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

__all__ = ["steady_order"]

Key = TypeVar("Key", bound=Hashable)


def steady_order(
    values: Mapping[Key, float], previous: Sequence[Key], tolerance: float
) -> tuple[Key, ...]:
    """Return the keys from greatest to least value, kept as before where that is nearly right.

    `previous` is nearly right if it has the same keys and no value in it is greater than one
    before it by more than `tolerance` (a ratio). Ties go by the order of `values`.
    """
    if len(previous) == len(values) and all(key in values for key in previous):
        least = float("inf")
        for key in previous:
            value = values[key]
            if value > least and value - least > abs(least) * tolerance:
                break
            least = min(least, value)
        else:
            return tuple(previous)
    return tuple(sorted(values, key=lambda key: -values[key]))
