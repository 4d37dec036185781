"""Whether the weights have changed since the last backward.

So a step of an optimizer is known that no mark has seen: compiled into a step with the rest, or
none of torch's.
"""

import weakref
from typing import Any

__all__ = ["Weights"]

_MOST_NODES = 4096


class Weights:
    """Looks at one weight; the first that the graph of the first loss leads to."""

    def __init__(self) -> None:
        self._weight: weakref.ref[Any] | None = None
        self._version = 0

    def updated(self, loss: Any) -> bool:
        """Whether the weight has changed since the last call; never at the first one.

        Every change in place counts up the version of a tensor, also one that a compiled graph
        makes. Where weights are changed through `.data` the version says nothing, and no gradient
        (`zero_grad`) before a further backward says the same.
        """
        weight = None if self._weight is None else self._weight()
        if weight is None:
            weight = _a_weight(loss)
            if weight is not None:
                self._weight = weakref.ref(weight)
                self._version = weight._version
            return False
        version, self._version = self._version, weight._version
        return bool(version != self._version or weight.grad is None)


def _a_weight(loss: Any) -> Any:
    """Return a leaf of the graph that takes a gradient, None if none is near."""
    waiting = [loss.grad_fn]
    for _ in range(_MOST_NODES):
        if not waiting:
            return None
        node = waiting.pop()
        if node is None:
            continue
        found = getattr(node, "variable", None)
        if found is not None:
            return found
        waiting += [following for following, _ in reversed(node.next_functions)]
    return None
