"""Knobs: settings of the training that a `set` command changes while it runs.

A script registers its own with `gpuwatch.knob`. For a plain loop the probe adds those of the
DataLoader that the training fetches from, which torch reads anew for every iterator.
"""

import json
import math
import multiprocessing
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from gpuwatch.probe.agree import Agreement, MissedError, group_store
from gpuwatch.probe.boundary import Job, Outcome
from gpuwatch.probe.commands import only, text_arg, whole_arg
from gpuwatch.probe.pace import CommandError, Pace, ahead_of
from gpuwatch.probe.text import NAME, wire_text
from gpuwatch.schema import Command, Knob

__all__ = ["Knobs", "Live", "Value", "loader_knobs"]

Value = int | float | str | bool

_MOST = 64
_MOST_PREFETCH = 64
_WORKERS_A_CORE = 4
_MOST_WORKERS = 32
"""Workers that wait for a disk or a network are more than there are cores; their memory is the
user's to judge."""

_FAR = 1e18  # as in the schema


class Live:
    """One knob as it stands. `apply` is called in the training thread, at a step boundary.

    Where `apply` returns a text, it says when the change takes effect, in place of `effective`.

    Raises:
        ValueError: the declaration is wrong.
    """

    def __init__(
        self,
        name: str,
        value: Value,
        apply: Callable[[Any], object],
        *,
        low: float | None = None,
        high: float | None = None,
        choices: Sequence[str] = (),
        effective: str = "at the next step",
        together: bool = False,
    ) -> None:
        if not isinstance(name, str) or not name or len(name) > NAME or not name.isprintable():
            raise ValueError(f"a knob needs a name of 1 to {NAME} characters, not {name!r}")
        if not callable(apply):
            raise ValueError(f"the knob {name} needs a function to apply a value with")
        if not isinstance(value, int | float | str | bool):
            raise ValueError(f"the knob {name} must be a number, a text or a truth value")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        for limit in (low, high):
            if limit is None:
                continue
            if not is_number:
                raise ValueError(f"the knob {name} is no number and can have no limits")
            if isinstance(limit, bool) or not isinstance(limit, int | float) or not _fits(limit):
                raise ValueError(f"the limits of the knob {name} must be numbers")
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"the limits of the knob {name} leave nothing between {low} and {high}"
            )
        if isinstance(choices, str) or not all(isinstance(one, str) for one in choices):
            raise ValueError(f"the choices of the knob {name} must be texts")
        if choices and not isinstance(value, str):
            raise ValueError(f"the knob {name} is no text and can have no choices")
        if len(choices) > _MOST:
            raise ValueError(f"the knob {name} has over {_MOST} choices")
        self.name = name
        self.value = value
        self.apply = apply
        self.low = None if low is None else float(low)
        self.high = None if high is None else float(high)
        self.choices = tuple(choices)
        self.effective = str(effective)
        self.together = together
        try:
            self.check(value)
        except CommandError as exc:
            raise ValueError(str(exc)) from None

    def check(self, value: Value) -> Value:
        """Return a value as this knob holds it.

        Raises:
            CommandError: it is of another type, or out of range.
        """
        name, now, shown = self.name, self.value, repr(value)[:64]
        if isinstance(now, bool):
            if not isinstance(value, bool):
                raise CommandError(f"{name} must be true or false, not {shown}")
            return value
        if isinstance(now, str):
            if not isinstance(value, str) or (self.choices and value not in self.choices):
                what = f"one of {', '.join(self.choices)}" if self.choices else "a text"
                raise CommandError(f"{name} must be {what}, not {shown}")
            return value
        if isinstance(value, float) and isinstance(now, int) and value.is_integer():
            value = int(value)
        whole = isinstance(now, int)
        kinds = int if whole else (int, float)
        what = ("a whole number" if whole else "a number") + self._range()
        if isinstance(value, bool) or not isinstance(value, kinds) or not _fits(value):
            raise CommandError(f"{name} must be {what}, not {shown}")
        number = value if whole else float(value)
        if (self.low is not None and number < self.low) or (
            self.high is not None and number > self.high
        ):
            raise CommandError(f"{name} must be {what}, not {shown}")
        return number

    def _range(self) -> str:
        low, high = self.low, self.high
        if low is not None and high is not None:
            return f" from {low:g} to {high:g}"
        if low is not None:
            return f" from {low:g}"
        return "" if high is None else f" up to {high:g}"

    def told(self) -> Knob:
        """Return what a monitor is told."""
        value = wire_text(self.value) if isinstance(self.value, str) else self.value
        return Knob(
            wire_text(self.name),
            value,
            self.low,
            self.high,
            tuple(wire_text(one) for one in self.choices),
            wire_text(self.effective),
        )


def _fits(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= (2**53 if isinstance(value, int) else _FAR)


class Knobs:
    """The knobs of this process.

    Args:
        changed: called when a knob is registered or has changed.
        built_in: returns those of the probe's own; a script's of the same name goes before one.
    """

    def __init__(
        self, changed: Callable[[], None], built_in: Callable[[], Sequence[Live]] = lambda: ()
    ) -> None:
        self._changed = changed
        self._built_in = built_in
        self._own: dict[str, Live] = {}

    def register(self, live: Live) -> None:
        """Add a knob, or put another in the place of the one of its name."""
        self._own[live.name] = live
        self._changed()

    def now(self) -> dict[str, Live]:
        """Return the knobs that there are now, by name."""
        built_in = {live.name: live for live in self._built_in()}
        return built_in | dict(self._own)

    def told(self) -> tuple[Knob, ...]:
        """Return what the hello says of them."""
        return tuple(live.told() for live in self.now().values())[:_MOST]

    def set(self, command: Command, pace: Pace, world_size: int) -> tuple[str, Job]:
        """Check a `set` command; returns the words of acceptance and the job.

        Raises:
            CommandError: it cannot be obeyed.
        """
        args = only(command, "knob", "value", "at")
        name = text_arg(args, "knob", "the name of a knob")
        live = self._find(name)
        if "value" not in args:
            raise CommandError(f"set {name} needs a value")
        value = live.check(args["value"])
        at = whole_arg(args, "at", 0, 2**53)
        if at is not None:
            ahead_of(at, pace)
        alone = world_size == 1
        if live.together and not alone:
            if command.rank is not None:
                raise CommandError(
                    f"{name} has to be the same on every rank: send it to all of them"
                )
            if group_store() is None:
                raise CommandError(f"{name} needs a process group through which the ranks agree")
            if pace.by_fetches:
                raise CommandError(
                    f"{name} needs steps that every rank counts alike, and no optimizer step was "
                    "seen: call gpuwatch.step() after each"
                )
        when = "" if at is None else f" at step {at}"
        together = live.together and not alone
        return f"{name} {live.value} -> {value}{when}", _Set(
            command.id, self, name, value, pace, at, together
        )

    def _find(self, name: str) -> Live:
        found = self.now()
        if name not in found:
            known = f"there are {', '.join(found)}" if found else "there is none"
            raise CommandError(f"no knob {name[:64]!r}: {known}")
        return found[name]

    def apply(self, name: str, value: Value, at: str) -> Outcome:
        """Change a knob, in the training thread."""
        try:
            live = self._find(name)
            old = live.value
            if type(old) is type(value) and old == value:
                return Outcome("done", f"{name} is {value} already", _data(name, old, value, ""))
            said = live.apply(value)
        except (CommandError, ValueError) as exc:
            return Outcome("error", str(exc))
        except Exception as exc:
            return Outcome(
                "error", f"{name} could not be set: {type(exc).__name__}: {exc}".splitlines()[0]
            )
        live.value = value
        self._changed()
        effective = at or (said if isinstance(said, str) else live.effective)
        return Outcome(
            "done",
            f"{name} {old} -> {value} {effective}".strip(),
            _data(name, old, value, effective),
        )


def _data(name: str, old: Value, new: Value, effective: str) -> str:
    return json.dumps({"schema": 1, "knob": name, "old": old, "new": new, "effective": effective})


class _Set:
    """One `set`, in the training thread."""

    def __init__(
        self,
        ident: str,
        knobs: Knobs,
        name: str,
        value: Value,
        pace: Pace,
        at: int | None,
        together: bool,
    ) -> None:
        self.id = ident
        self._knobs = knobs
        self._name = name
        self._value = value
        self._pace = pace
        self._tick = None if at is None else pace.tick_of(at)
        self._together = together
        self._agreement: Agreement | None = None

    def work(self, tick: int) -> Outcome | None:
        at = ""
        if self._together:
            agreed = self._agree(tick)
            if isinstance(agreed, Outcome):
                return agreed
            if agreed is None or tick < agreed:
                return None
            at = f"from step {self._pace.step_at(tick)} on, on every rank"
        elif self._tick is not None:
            if tick < self._tick:
                return None
            at = f"from step {self._pace.step_at(tick)} on"
        return self._knobs.apply(self._name, self._value, at)

    def _agree(self, tick: int) -> int | Outcome | None:
        if self._agreement is None:
            group = group_store()
            if group is None:
                return Outcome("error", "the process group is gone, and nothing was changed")
            store, rank, world_size = group
            self._agreement = Agreement(store, self.id, rank, world_size)
        try:
            return self._agreement.look(tick, self._pace.per_step, self._tick or 0)
        except TimeoutError:
            return Outcome(
                "error", f"not every rank came to have it in time, and {self._name} stays on all"
            )
        except MissedError as exc:
            return Outcome(
                "error",
                f"{exc}: {self._name} stays as it was here, and the ranks may differ now",
            )

    def glance(self) -> Outcome | None:
        return None

    def close(self) -> Outcome | None:
        return None


# --- the probe's own ---------------------------------------------------------------------------


def loader_knobs(
    reference: "weakref.ref[Any] | None", batches: int | None, *, on_device: bool = False
) -> Sequence[Live]:
    """Return the knobs of the DataLoader that the training fetches from, none if it is not known.

    torch reads both settings when an iterator is made, so they take effect with the next one; the
    iterator of persistent workers is let go of, so that there is a next one.

    Args:
        reference: to the loader.
        batches: in an epoch of it, None if that is not known.
        on_device: whether its batches come to the training on a device: what touches one cannot
            be done in a forked worker.
    """
    loader = reference() if reference is not None else None
    if loader is None or not hasattr(loader, "num_workers"):
        return ()
    assert reference is not None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    length = f" (an epoch has {batches:,} batches)" if batches is not None else ""
    effective = f"from the next epoch on{length}"
    ref = reference

    def workers(value: int) -> None:
        _change(ref, num_workers=value, on_device=on_device)

    def prefetch(value: int) -> None:
        _change(ref, prefetch_factor=value)

    high = max(_WORKERS_A_CORE * (cores or 1), _MOST_WORKERS, loader.num_workers)
    found = [
        Live("num_workers", int(loader.num_workers), workers, low=0, high=high, effective=effective)
    ]
    if loader.num_workers and loader.prefetch_factor:
        top = max(_MOST_PREFETCH, loader.prefetch_factor)
        found.append(
            Live(
                "prefetch_factor",
                int(loader.prefetch_factor),
                prefetch,
                low=1,
                high=top,
                effective=effective,
            )
        )
    return found


def _change(
    reference: "weakref.ref[Any]",
    *,
    num_workers: int | None = None,
    prefetch_factor: int | None = None,
    on_device: bool = False,
) -> None:
    from torch.utils.data import IterableDataset

    loader = reference()
    if loader is None:
        raise ValueError("the loader is gone")
    if num_workers is not None:
        if isinstance(loader.dataset, IterableDataset):
            raise ValueError(
                "num_workers stays: each worker of an iterable dataset may read all of it, so "
                "another number may repeat samples"
            )
        if num_workers == 0 and loader.timeout:
            raise ValueError("num_workers stays above 0: the loader has a timeout")
        if num_workers and not loader.num_workers:
            # What fails in a start of workers fails in the user's loop: nothing has proved yet that
            # this loader can have some.
            method = _start_method(loader)
            if method != "fork":
                raise ValueError(
                    f"num_workers stays 0: workers are started by {method} here, and whether the "
                    "dataset can be pickled is not known"
                )
            if on_device:
                raise ValueError(
                    "num_workers stays 0: the batches are on a device, and a forked worker cannot "
                    "use it"
                )
        if num_workers and loader.prefetch_factor is None:
            loader.prefetch_factor = 2  # torch's own default
        loader.num_workers = num_workers
    if prefetch_factor is not None:
        if not loader.num_workers:
            raise ValueError("prefetch_factor has no meaning with num_workers=0")
        loader.prefetch_factor = prefetch_factor
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None


def _start_method(loader: Any) -> str:
    context = loader.multiprocessing_context or multiprocessing
    method: str = context.get_start_method()
    return method
