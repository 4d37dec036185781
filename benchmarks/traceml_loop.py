"""The same loop and rounds under TraceML: what `traceml run` runs, in an environment of its own.

    traceml run benchmarks/traceml_loop.py --args CASE OUT [rounds settle steps]

Set up as its documentation says: `init(mode="auto")` and `trace_step` around each iteration. It has
no switch, so off puts back what it replaced in torch: all of it, the calls of modules too.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from paired import CASES, Loop, Toggle, run_case

PAUSE_S = 0.1
"""It keeps 2,048 steps for its once-a-second sampler and prints two lines for each one beyond: more
steps a second than a training takes, so rounds leave it time, and its figure is without them."""

PATCHED: list[tuple[Any, str]] = [
    (torch.nn.Module, "__call__"),
    (torch.Tensor, "backward"),
    (torch.autograd, "backward"),
    (torch.Tensor, "to"),
    (torch.utils.data.DataLoader, "__iter__"),
]


def prepare(loop: Loop) -> Toggle:
    import traceml_ai as traceml
    from traceml_ai.instrumentation.hooks.optimizer_hooks import reset_optimizer_timing

    before = [getattr(owner, name) for owner, name in PATCHED]
    traceml.init(mode="auto")
    after = [getattr(owner, name) for owner, name in PATCHED]
    if before == after:
        raise SystemExit("TraceML has changed nothing in torch: it is not tracing")
    bare, traced = loop.batches, iter(loop.loader)

    def traced_step() -> None:
        batch = next(traced)
        with traceml.trace_step(loop.net):
            loop.optimizer.zero_grad(set_to_none=True)
            loss = loop.net(batch).mean()
            loss.backward()
            loop.optimizer.step()

    def toggle(on: bool) -> None:
        for (owner, name), value in zip(PATCHED, after if on else before, strict=True):
            setattr(owner, name, value)
        if not on:
            reset_optimizer_timing()  # its step context puts them on again
        loop.batches = traced if on else bare
        loop.step = traced_step if on else loop.bare_step

    return toggle


def main() -> None:
    name, out, *sizes = sys.argv[1:]
    case = CASES[name]
    if sizes:
        rounds, settle, steps = map(int, sizes)
        case = dataclasses.replace(case, rounds=rounds, settle=settle, steps=steps)
    result = run_case(case, prepare, PAUSE_S)
    if result is not None:
        Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
