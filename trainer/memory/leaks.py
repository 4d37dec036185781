"""Leaks that a training loop makes: kept graphs, growing tensors, gradients never cleared.

A leak is told from noise by age, not by statistics. A look takes weak references to the tensors
that the garbage collector holds in its young generations, that is, to those made lately; later
looks ask which of them still live. What a step makes is gone a step later. Where some of each of
three intervals in a row have stayed, and all tensors together have become more, there is a leak.
"""

import gc
import itertools
import statistics
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from trainer.memory.host import status_bytes

__all__ = ["Kind", "Leak", "LeakChecks"]

Kind = Literal["kept_graph", "growing_tensors", "forgotten_zero_grad"]

# Intervals of which tensors must have stayed: to suspect a leak, and to tell of it.
_SUSPECT = 2
_TELL = 3
# Steady leaks below that (over three intervals) are left alone: a list of one epoch's losses is
# no harm, and 64 KiB in 150 steps are 0.4 GiB in a million.
_FLOOR_BYTES = 64 * 1024
# Of memory that no Python object accounts for. The allocator's figure depends on what else is
# alive at the moment, so it takes more looks and a rise that is near a straight line.
_UNSEEN_LOOKS = 8
_UNSEEN_FLOOR_BYTES = 2**20
_UNSEEN_SCATTER = 0.25
# Times in a row that gradients were still there when the next backward came to add to them.
_UNCLEARED = 3
# A suspicion that came to nothing rests for so many looks, then for twice as many.
_REST_LOOKS = 4

Ref = weakref.ref[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Leak:
    """What is wrong and what to change."""

    kind: Kind
    sentence: str
    bytes_per_step: int | None
    """None: not measured, or too small beside the noise."""


_UNCLEARED_LEAK = Leak(
    "forgotten_zero_grad",
    "gradients of earlier steps are still there when the next are added to them: "
    "optimizer.zero_grad() is missing after optimizer.step()",
    None,
)


class LeakChecks:
    """Looks for leaks every `interval_steps` optimizer steps; in between it compares a number.

    Never waits for the device. The first look is the warm-up: what lives by then (parameters, the
    optimizer's state) may stay. A leak is found at the fifth look after it has begun at the
    latest, and each kind is told once.
    """

    def __init__(self, model: nn.Module, *, interval_steps: int) -> None:
        self._interval = interval_steps
        self._look = interval_steps
        self._next = interval_steps
        self._told: set[Kind] = set()
        self._device = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)
        self._gradients = _Gradients(model)
        self._known: dict[int, Ref] | None = None
        self._cohorts: deque[list[Ref]] = deque(maxlen=_TELL)
        self._losses: deque[Ref] = deque(maxlen=_TELL)
        self._memory: deque[tuple[int, int]] = deque(maxlen=_UNSEEN_LOOKS)
        self._suspicions = (_Suspicion("kept_graph"), _Suspicion("growing_tensors"))

    def after_step(self, step: int, loss: torch.Tensor | None = None) -> list[Leak]:
        """To be called after every optimizer step; `step` counts them from 1.

        `loss` may be detached or not: no reference to it is kept. Returns what has been found
        just now, mostly nothing.
        """
        if step < self._next:
            return []
        due = step >= self._look
        found: list[Leak] = []
        busy = False
        if "forgotten_zero_grad" not in self._told:
            busy = self._gradients.after_step(due=due)
            if self._gradients.uncleared >= _UNCLEARED:
                found.append(_UNCLEARED_LEAK)
        if due:
            self._look = step + self._interval
            found += self._look_at(step, loss)
        # Gradients are watched over the two steps that follow a look.
        self._next = step + 1 if busy else self._look
        self._told |= {leak.kind for leak in found}
        return found

    def _look_at(self, step: int, loss: torch.Tensor | None) -> list[Leak]:
        if {"kept_graph", "growing_tensors"} <= self._told:
            return []
        if self._known is None:
            # Whatever is young now and stays is part of the training.
            self._known = {id(tensor): weakref.ref(tensor) for tensor in _young_tensors()}
            return []
        self._memory.append((step, self._bytes_in_use()))
        known = {key: ref for key, ref in self._known.items() if ref() is not None}
        # Before the suspicions, which may collect everything: then nothing is young any more.
        cohort = {id(t): weakref.ref(t) for t in _young_tensors() if id(t) not in known}
        self._known = known | cohort
        found = []
        for suspicion in self._suspicions:
            if suspicion.kind not in self._told:
                growth = suspicion.look(step, self._cohorts)
                if growth is not None:
                    found.append(self._leak(suspicion.kind, growth))
        if self._device is not None and not found and self._told <= {"forgotten_zero_grad"}:
            found += self._unseen()
        if cohort:  # else everything has just been collected, and nothing can be said
            self._cohorts.append(list(cohort.values()))
        if loss is not None and loss.grad_fn is not None:
            self._losses.append(weakref.ref(loss))
        return found

    def _bytes_in_use(self) -> int:
        if self._device is not None:
            return torch.cuda.memory_allocated(self._device)
        return status_bytes("VmRSS") or 0

    def _leak(self, kind: Kind, growth: "_Growth") -> Leak:
        count = f"{growth.per_step:.2g} a step"
        if kind == "growing_tensors":
            kib = growth.bytes_per_step / 1024
            return Leak(
                kind,
                f"more and more tensors stay alive ({count}, mostly {growth.commonest}, "
                f"{kib:,.0f} KiB a step): something keeps a reference to them, such as a list or "
                "a cache that is never emptied",
                growth.bytes_per_step,
            )
        losses = any(ref() is not None for ref in self._losses)
        what = "losses" if losses else f"results (mostly {growth.commonest})"
        return Leak(
            kind,
            f"{what} of earlier steps are kept with their whole graph ({count}): keep "
            "loss.detach() or loss.item() instead of what has a grad_fn",
            self._rise(),
        )

    def _rise(self) -> int | None:
        """Bytes a step that the memory in use rises by, None where that drowns in the noise."""
        per_step = _slope(self._memory)
        span = self._memory[-1][0] - self._memory[0][0]
        return int(per_step) if per_step * span >= _UNSEEN_FLOOR_BYTES else None

    def _unseen(self) -> list[Leak]:
        """CUDA memory that rises without a tensor that Python knows of."""
        points = self._memory
        if len(points) < _UNSEEN_LOOKS:
            return []
        per_step = _slope(points)
        whole = per_step * (points[-1][0] - points[0][0])
        middle = statistics.median(value - per_step * step for step, value in points)
        scatter = max(abs(value - per_step * step - middle) for step, value in points)
        rises = all(before < after for (_, before), (_, after) in itertools.pairwise(points))
        floor = max(_UNSEEN_FLOOR_BYTES, points[0][1] // 100)
        if not rises or whole < floor or scatter > _UNSEEN_SCATTER * whole:
            return []
        return [
            Leak(
                "growing_tensors",
                f"the CUDA memory in tensors rises by {per_step / 1024:,.0f} KiB a step though "
                "no tensor that Python can see stays: a graph or an extension keeps it",
                int(per_step),
            )
        ]


@dataclass(frozen=True, slots=True)
class _Scan:
    """All tensors of one sort that Python can reach."""

    step: int
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Growth:
    per_step: float
    bytes_per_step: int
    commonest: str


class _Suspicion:
    """From "some of each interval have stayed" to certainty, by counting everything twice.

    Counting everything takes tens of milliseconds, so it is done only where tensors have stayed,
    and rarer each time that it came to nothing.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind
        self._before: _Scan | None = None
        self._rest = 0
        self._patience = _REST_LOOKS

    def look(self, step: int, cohorts: Sequence[list[Ref]]) -> _Growth | None:
        """`cohorts` are the tensors made in the last intervals, the oldest first."""
        if self._rest > 0:
            self._rest -= 1
            return None
        if self._before is None:
            recent = list(cohorts)[-_SUSPECT:]
            if len(recent) == _SUSPECT and self._stay(recent):
                # Cycles that nobody has collected yet are no leak; those that have grown old
                # would wait for a full collection for very long.
                gc.collect()
                if self._stay(recent):
                    self._before = self._scan(step)
                else:
                    self._dismiss()
            return None
        before, now = self._before, self._scan(step)
        steps, more = now.step - before.step, now.count - before.count
        more_bytes = now.bytes - before.bytes
        weighty = self.kind == "kept_graph" or more_bytes >= _FLOOR_BYTES / _TELL
        if len(cohorts) < _TELL or not self._stay(cohorts) or more <= 0 or not weighty:
            self._dismiss()
            return None
        stayed = itertools.chain(*map(self._stayed, cohorts))
        return _Growth(more / steps, more_bytes // steps, _commonest(stayed))

    def _stay(self, cohorts: Sequence[list[Ref]]) -> bool:
        """Whether some of each cohort live, and weigh enough."""
        stayed = [self._stayed(cohort) for cohort in cohorts]
        if self.kind == "kept_graph":
            return all(stayed)
        return all(_bytes(tensors) >= _FLOOR_BYTES / _TELL for tensors in stayed)

    def _stayed(self, cohort: list[Ref]) -> list[torch.Tensor]:
        living = (tensor for ref in cohort if (tensor := ref()) is not None)
        return [tensor for tensor in living if self._mine(tensor)]

    def _mine(self, tensor: torch.Tensor) -> bool:
        return (tensor.grad_fn is not None) == (self.kind == "kept_graph")

    def _scan(self, step: int) -> _Scan:
        mine = [tensor for tensor in _tensors(gc.get_objects()) if self._mine(tensor)]
        return _Scan(step, len(mine), _bytes(mine))

    def _dismiss(self) -> None:
        self._before = None
        self._rest, self._patience = self._patience, 2 * self._patience


class _Gradients:
    """Whether gradients are cleared between one optimizer step and the next backward.

    At a look the smallest parameter that has a gradient is chosen. If the next step changes it,
    that gradient has been used; a hook then asks, in the backward that follows, whether it is
    still there. A gradient that waits for another optimizer's turn, or for a ``zero_grad`` at the
    top of the loop, is thus no alarm. Nothing is read back from a CUDA device before the next
    look.
    """

    def __init__(self, model: nn.Module) -> None:
        self.uncleared = 0
        """How often in a row they were not."""
        self._parameters = [p for p in model.parameters() if p.requires_grad and p.numel()]
        self._chosen: nn.Parameter | None = None
        self._before: torch.Tensor | None = None
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        self._asked = False
        self._rest: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def after_step(self, *, due: bool) -> bool:
        """Take the next of the three turns; whether the very next step is needed too."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = self._chosen = self._before = None
            if self._copied is None:
                self._judge()
            return False
        if self._chosen is not None and self._before is not None:
            # Compared by value: fused optimizers do not count its version up.
            self._before = (_local(self._chosen) != self._before).any()
            self._asked = False
            self._handle = self._chosen.register_hook(self._before_adding)  # type: ignore[no-untyped-call]
            return True
        if not due:
            return False
        if self._copied is not None and self._copied.query():  # type: ignore[no-untyped-call]
            self._judge()
        held = [p for p in self._parameters if p.grad is not None]
        if not held:
            self.uncleared = 0
            return False
        self._chosen = min(held, key=torch.Tensor.numel)
        self._before = _local(self._chosen).clone()
        return True

    def _before_adding(self, _gradient: torch.Tensor) -> None:
        if self._asked or self._chosen is None or self._before is None:
            return
        self._asked = True
        gradient = self._chosen.grad
        if gradient is None:
            self.uncleared = 0
            return
        rest = (_local(gradient) != 0).any() & self._before
        if rest.device.type == "cuda":
            self._rest = torch.empty_like(rest, device="cpu", pin_memory=True)
            self._rest.copy_(rest, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        else:
            self._rest = rest

    def _judge(self) -> None:
        rest, self._rest, self._copied = self._rest, None, None
        if rest is not None:
            self.uncleared = self.uncleared + 1 if bool(rest) else 0


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part: what is computed on a DTensor may be a collective."""
    tensor = tensor.detach()
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _young_tensors() -> list[torch.Tensor]:
    """Tensors that have lived through few collections: a few thousand objects to look at."""
    return _tensors(itertools.chain(gc.get_objects(0), gc.get_objects(1)))


def _tensors(objects: Iterable[object]) -> list[torch.Tensor]:
    # By type, never isinstance: that asks proxies for their __class__, and some warn or import.
    kinds = {torch.Tensor}
    rest = [torch.Tensor]
    while rest:
        new = set(rest.pop().__subclasses__()) - kinds
        kinds |= new
        rest += new
    return [item for item in objects if type(item) in kinds]  # type: ignore[misc]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of their storages, each once; what has none (meta, a subclass of its own) weighs 0."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        try:
            if tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        except Exception:
            continue
    return sum(sizes.values())


def _commonest(tensors: Iterable[torch.Tensor]) -> str:
    shapes = Counter(
        f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape)) or 'scalar'}"
        for tensor in tensors
    )
    return shapes.most_common(1)[0][0]


def _slope(points: Iterable[tuple[int, int]]) -> float:
    """Theil-Sen: the median slope over all pairs, which single outliers do not move."""
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2)]
    return statistics.median(slopes) if slopes else 0.0
