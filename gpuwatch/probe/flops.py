"""The model's FLOPs in a step: by formula where its configuration is known, counted where asked.

**Formula.** A token of a transformer costs `6 N + 12 L H Q T` FLOPs, forward and backward (PaLM,
appendix B): N parameters, L layers, H heads of Q, sequences of T. N are the parameters that
multiply: a table that is only looked up in is none of them, an output head tied to it is.

**Counted.** `torch.utils.flop_counter` sees every operation of one steady step, in Python, which
makes that step much slower: only because the user has asked, and once. What a checkpointed
activation computes again is counted too.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from gpuwatch.probe.events import (
    BACKWARD_BEGIN,
    FETCH_BEGIN,
    OPTIMIZER_END,
    SPAN_BEGIN,
    Event,
    Recorder,
)

__all__ = ["COUNTED", "FORMULA", "Count", "Formula"]

FORMULA = "formula: 6N+12LHQT"
COUNTED = "counted in one step"
_SIZES = (
    ("hidden_size", "n_embd"),
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LONGEST_NAME = 200


class Formula:
    """FLOPs a token of one model, worked out once, in the telemetry thread.

    `reason` says why there are none.
    """

    def __init__(self, model: Any) -> None:
        self.model = weakref.ref(model)
        self.reason = ""
        self._parameters = 0  # N
        self._attention = 0  # L H Q
        try:
            self._read(model)
        except Exception as exc:  # another kind of model than its configuration made believe
            self.reason = f"its configuration is not understood ({type(exc).__name__})"

    def a_token(self, sequence: int) -> float | None:
        """FLOPs of forward and backward of one token in sequences of that length."""
        return None if self.reason else 6.0 * self._parameters + 12.0 * self._attention * sequence

    def _read(self, model: Any) -> None:
        config = getattr(model, "config", None)
        sizes = [
            next((v for n in names if isinstance(v := getattr(config, n, None), int)), 0)
            for names in _SIZES
        ]
        if not all(sizes):
            self.reason = "no transformer of a known configuration"
        elif getattr(config, "is_encoder_decoder", False):
            self.reason = "an encoder with a decoder has two lengths"
        elif any(getattr(config, name, None) for name in _EXPERTS):
            self.reason = "of a mixture of experts a token uses some"
        if self.reason:
            return
        hidden, layers, heads = sizes
        width = getattr(config, "head_dim", None)
        width = width if isinstance(width, int) and width > 0 else hidden // heads
        self._attention = layers * heads * width
        self._parameters = self._multiplying(model)

    def _multiplying(self, model: Any) -> int:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        tied = getattr(head, "weight", None)
        looked_up = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, torch.nn.Embedding) and module.weight is not tied
        }
        total = frozen = 0
        for parameter in model.parameters():
            if type(parameter).__name__ == "FlatParameter":
                self.reason = "its parameters are sharded"
                return 0
            if id(parameter) not in looked_up:
                total += parameter.numel()
                frozen += 0 if parameter.requires_grad else parameter.numel()
        if not total or frozen > total / 10:
            self.reason = "frozen parameters have no gradients to compute" if frozen else "empty"
        return total


class Count:
    """Counts the FLOPs between two steps of one optimizer; every call in the training thread.

    Args:
        recorder: whose marks tell whether what was counted is a step, the whole of one, and
            nothing else. The step is tagged `warmup` there.
        obstacle: says why operations cannot be counted now, empty if they can.

    `flops` are those of one step, None as long as there are none; `reason` says why.
    """

    _FIRST = 3  # steps that go before: warm-up, DDP's first two iterations
    _TRIES = 5
    _OVERLONG = 20_000  # marks: far more than a step leaves

    def __init__(self, recorder: Recorder, obstacle: Callable[[], str]) -> None:
        self._recorder = recorder
        self._obstacle = obstacle
        self._steps = self._tries = 0
        self._key = 0
        self._mode: Any = None
        self._inner: Any = None  # what lies on the stack of modes
        self._seen: list[Event] = []
        self.done = False
        self.flops: float | None = None
        self.source = ""
        self.reason = "not counted yet"

    def optimizer_begins(self, key: int) -> None:
        """An optimizer is about to step: the end, if a backward came since the last time."""
        if self._mode is not None and self._is_end(key):
            self._leave()

    def optimizer_ended(self, key: int) -> None:
        """An optimizer has stepped: the end, if its closure ran the backward, and the beginning."""
        if self._mode is not None:
            if self._is_end(key):
                self._leave()
        elif not self.done:
            self._steps += 1
            if self._steps >= self._FIRST:
                self._enter(key)

    def _is_end(self, key: int) -> bool:
        if key != self._key:  # another one of several in turn, unless ours is gone for good
            return len(self._seen) > self._OVERLONG
        return any(event[0] == BACKWARD_BEGIN for event in self._seen)

    def _enter(self, key: int) -> None:
        obstacle = self._obstacle()
        if not obstacle and torch._C._len_torch_dispatch_stack():
            obstacle = "another dispatch mode is on"
        if obstacle:
            self._give_up(obstacle)
            return
        self._tries += 1
        self._recorder.tag("warmup")  # importing the counter takes its time
        from torch.utils.flop_counter import FlopCounterMode

        mode: Any = FlopCounterMode(display=False)
        mode.__enter__()
        self._mode = mode
        self._inner = _innermost()
        self._key = key
        self._seen = seen = []
        before = self._recorder.push

        def push(event: Event) -> None:
            seen.append(event)
            before(event)

        self._recorder.push = push
        self._pushes = before, push

    def _leave(self) -> None:
        self._recorder.tag("warmup")
        if _innermost() is not self._inner:
            return  # inside a mode of the user's: at the next occasion
        mode, self._mode, self._inner = self._mode, None, None
        before, push = self._pushes
        if self._recorder.push is push:
            self._recorder.push = before
        mode.__exit__(None, None, None)
        self._judge(float(mode.get_total_flops()))

    def _judge(self, flops: float) -> None:
        seen, self._seen = self._seen, []
        obstacle = self._obstacle()
        if obstacle:
            self._give_up(obstacle)
        elif len(seen) > self._OVERLONG or any(map(self._disturbs, seen)):
            if self._tries >= self._TRIES:
                self._give_up("no step passed undisturbed")
        elif not flops:
            self._give_up("no operation was seen: compiled code, or a CUDA graph")
        else:
            self.done = True
            self.flops = flops
            self.source = COUNTED
            self.reason = ""

    def _disturbs(self, event: Event) -> bool:
        """Whether more happened than one step: an evaluation, a checkpoint, a skipped attempt."""
        if event[0] == FETCH_BEGIN:
            return bool(event[3])
        if event[0] == OPTIMIZER_END:
            return bool(event[2] == self._key and event[3])
        return bool(event[0] == SPAN_BEGIN)

    def _give_up(self, reason: str) -> None:
        self.done = True
        self.reason = f"not counted: {reason}"[:_LONGEST_NAME]

    def abandon(self) -> None:
        """Stop where it is, when the marks come off."""
        if self._mode is not None and _innermost() is self._inner:
            self._leave()
        if not self.done:
            self._give_up("the marks are off")


def _innermost() -> Any:
    """Return the dispatch mode on top of the stack, None without one."""
    height = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(height - 1) if height else None
