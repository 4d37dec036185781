"""Two runs, before and after a change: what became faster, what else differs, and is it noise.

A difference of means counts as clear when it is over three standard errors, with the scatter of
the steps themselves (1.4826 MAD, the standard deviation of a normal distribution without its
outliers), and over half a percent of the step, which no two runs agree to.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gpuwatch.schema import PHASES, Hello, StepRecord
from gpuwatch.store.views import RankView, RunView

__all__ = ["Change", "Comparison", "Setting", "compare_runs"]

CLEAR_ERRORS = 3.0
CLEAR_SHARE = 0.005
MIN_STEPS = 8
"""Of a window, for its scatter to mean anything."""

_MAD_TO_SD = 1.4826

_SETTINGS = ("device_name", "cores", "torch_threads", "world_size", "allow_control", "script")
"""Fields of a hello that are settings by themselves; parts of it are compared as a whole."""


@dataclass(frozen=True, slots=True)
class Change:
    """One quantity before and after; None with the `reason` where it is not known.

    `clear` says whether the difference is beyond the scatter of the steps, None if that cannot be
    told. Durations are means over the steady steps of the window and over ranks.
    """

    metric: str
    unit: str
    before: float | None
    after: float | None
    clear: bool | None = None
    reason: str = ""

    @property
    def share(self) -> float | None:
        """(after - before) / before; None where it is not known."""
        if self.before is None or self.after is None or not self.before:
            return None
        return (self.after - self.before) / self.before


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting that differs; None where one side has no such thing."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between two runs."""

    changes: tuple[Change, ...]
    settings: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class _Mean:
    """A mean over steps and ranks, and its standard error (NaN: not known)."""

    value: float
    error: float


def compare_runs(before: RunView, after: RunView) -> Comparison:
    """Compare two runs by their windows and their configurations."""
    clocks = tuple({r.clock for r in run.ranks if r.window} for run in (before, after))
    same_clock = len(clocks[0] | clocks[1]) <= 1
    changes = [_change("step", "ms", _over(before, _step_ms), _over(after, _step_ms))]
    for name in ("own", *PHASES):
        one, other = (_over(run, _part_ms(name)) for run in (before, after))
        step = changes[0].before
        change = _change(name, "ms", one, other, step)
        if not same_clock:
            change = Change(name, "ms", None, None, reason="they are by different clocks")
        if one is not None or other is not None:
            changes.append(change)
    changes.append(_plain("samples_per_s", "1/s", before.samples_per_s, after.samples_per_s))
    changes.append(_plain("goodput", "", _goodput(before), _goodput(after)))
    return Comparison(tuple(changes), tuple(_settings(before, after)))


def _step_ms(rank: RankView, record: StepRecord) -> float | None:
    return record.step_ns / 1e6


def _part_ms(name: str) -> Any:
    def part_ms(rank: RankView, record: StepRecord) -> float | None:
        phases = record.device if rank.clock == "device" and record.device else record.host
        if name == "own":
            return (record.step_ns - (phases.comm or 0)) / 1e6
        value = getattr(phases, name)
        return None if value is None else value / 1e6

    return part_ms


def _over(run: RunView, value_of: Any) -> _Mean | None:
    """Return the mean over the steps of every rank and then over ranks; None if none knows it."""
    means, variances = [], []
    for rank in run.ranks:
        values = [v for record in rank.window if (v := value_of(rank, record)) is not None]
        if not values:
            continue
        means.append(statistics.fmean(values))
        variances.append(_variance(values) / len(values))
    if not means:
        return None
    # Ranks of a synchronous job share their scatter: they do not average it out.
    known = not any(math.isnan(variance) for variance in variances)
    return _Mean(statistics.fmean(means), math.sqrt(max(variances)) if known else math.nan)


def _variance(values: Sequence[float]) -> float:
    if len(values) < MIN_STEPS:
        return math.nan
    middle = statistics.median(values)
    return float((_MAD_TO_SD * statistics.median([abs(v - middle) for v in values])) ** 2)


def _change(
    metric: str, unit: str, before: _Mean | None, after: _Mean | None, step: float | None = None
) -> Change:
    if before is None or after is None:
        return Change(
            metric,
            unit,
            None if before is None else before.value,
            None if after is None else after.value,
            reason=f"not known {'before' if before is None else 'after'}",
        )
    error = math.hypot(before.error, after.error)
    if math.isnan(error):
        few = f"under {MIN_STEPS} steps in a window"
        return Change(metric, unit, before.value, after.value, None, few)
    least = max(CLEAR_ERRORS * error, CLEAR_SHARE * (before.value if step is None else step))
    return Change(metric, unit, before.value, after.value, abs(after.value - before.value) > least)


def _plain(metric: str, unit: str, before: float | None, after: float | None) -> Change:
    missing = "before" if before is None else "after"
    reason = f"not known {missing}" if before is None or after is None else ""
    return Change(metric, unit, before, after, None, reason)


def _goodput(run: RunView) -> float | None:
    wall_ns = sum(rank.ledger.wall_ns for rank in run.ranks)
    training_ns = sum(rank.ledger.training_ns for rank in run.ranks)
    return training_ns / wall_ns if wall_ns else None


# --- settings ----------------------------------------------------------------------------------


def _settings(before: RunView, after: RunView) -> list[Setting]:
    """Return what differs in the configuration of the first rank that told its own."""
    one, other = _flat(before), _flat(after)
    return [
        Setting(name, one.get(name), other.get(name))
        for name in dict.fromkeys([*one, *other])
        if one.get(name) != other.get(name)
    ]


def _flat(run: RunView) -> dict[str, Any]:
    rank = next((r for r in run.ranks if r.hello is not None), None)
    if rank is None or rank.hello is None:
        return {}
    hello = rank.hello
    found = {name: getattr(hello, name) for name in _SETTINGS}
    found["gradient_accumulation"] = _batches(rank)
    found |= _fields(_training_loader(rank, hello), "", leave_out={"key", "worker_pids"})
    found |= _fields(hello.ddp, "ddp.", leave_out={"comm_span_ns", "bucket_bytes"})
    found |= _fields(hello.precision, "precision.", leave_out=set())
    return found | _fields(hello.versions, "versions.", leave_out=set())


def _batches(rank: RankView) -> int | None:
    return None if rank.last is None else rank.last.batches


def _training_loader(rank: RankView, hello: Hello) -> msgspec.Struct | None:
    key = rank.window[-1].loader if rank.window else ""
    named = next((loader for loader in hello.loaders if loader.key == key), None)
    return named or next(iter(hello.loaders), None)


_MEASURED = {"first_batch_ns", "batch_bytes"}
"""Of a loader: what was seen, not what was set."""


def _fields(part: msgspec.Struct | None, prefix: str, leave_out: set[str]) -> dict[str, Any]:
    if part is None:
        return {}
    names = [n for n in part.__struct_fields__ if n not in leave_out and n not in _MEASURED]
    return {f"{prefix}{name}": getattr(part, name) for name in names}
