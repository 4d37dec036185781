"""Two runs, before and after a change: what became faster, what else differs, and is it noise.

Both are taken over the same steps where they have enough in common, else over their last steady
ones. A difference is clear when its 95 % interval (see `blocks`) leaves out 0 and it is over half
a percent of the step, which no two starts of one job agree to.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from statistics import fmean, median
from typing import Any

import msgspec

from gpuwatch.schema import PHASES, Hello
from gpuwatch.store.blocks import MIN_STEPS, difference, estimate
from gpuwatch.store.track import Side, Steps, side_of
from gpuwatch.store.views import NodeView, RankView, RunView, same_device

__all__ = [
    "ENVIRONMENT",
    "Aligned",
    "Change",
    "Comparison",
    "Driver",
    "Row",
    "Setting",
    "Spread",
    "align",
    "changed_settings",
    "compare_runs",
    "compare_sides",
    "driver_of",
    "percent_range",
    "untold_drivers",
]

CLEAR_SHARE = 0.005

_COMMON = 64
_MOST_COMMON = 4096
_LAST = 256
"""Steps: so many in common are enough (or half of the shorter side); more than the newest 4,096
say nothing new and take time; without enough in common the last 256 of each are taken."""

_PART = 0.1
"""A part of a step is said to be some of its change from this share of it on."""

_MOSTLY = 0.6
"""Of a change of communication that is peer wait, and of that which data wait explains."""

_SETTINGS = ("device_name", "cores", "torch_threads", "world_size", "allow_control", "script")
"""Fields of a hello that are settings by themselves; parts of it are compared as a whole."""

ENVIRONMENT = ("device_name", "cores", "versions.", "driver")
"""Settings that are not the job's own: the device, the machine, and how their names begin."""

_DIFFERENT_CLOCKS = "they are by different clocks"


@dataclass(frozen=True, slots=True)
class Change:
    """One quantity before and after; None with the `reason` where it is not known.

    `clear` says whether the difference is beyond the scatter of the steps, None if that cannot be
    told; `interval` is the 95 % interval of the relative change. Durations are means over the
    steps compared and over ranks.
    """

    metric: str
    unit: str
    before: float | None
    after: float | None
    clear: bool | None = None
    reason: str = ""
    interval: tuple[float, float] | None = None

    @property
    def share(self) -> float | None:
        """(after - before) / before; None where it is not known."""
        if self.before is None or self.after is None or not self.before:
            return None
        return (self.after - self.before) / self.before


@dataclass(frozen=True, slots=True)
class Spread:
    """How the steps of one side lie: one in ten below `low`, half below `middle`, one in ten above
    `high`, in the unit of the row.
    """

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a comparison, as a person reads it.

    `metric` is step_p50, data_wait_worst, comm_median, transfer, peer_wait (parts of the row above
    them), forward_backward, h2d, optimizer, other, samples_per_s or goodput. `change` holds the two
    values. `better` says which way a clear difference goes, None where there is none. `verdict` is
    a clause.
    """

    metric: str
    change: Change
    before: Spread | None
    after: Spread | None
    better: bool | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting; None where one side has no such thing."""

    name: str
    before: Any
    after: Any

    @property
    def is_environment(self) -> bool:
        """Whether it is the machine's rather than the job's."""
        return self.name.startswith(ENVIRONMENT)


@dataclass(frozen=True, slots=True)
class Aligned:
    """Which steps were compared.

    `by` is step where both sides have the same ones, from `first` to `last` (`before` = `after` of
    them), and last where each has its own last ones; `why` says why they are not the same then.
    """

    by: str
    before: int
    after: int
    first: int = 0
    last: int = 0
    why: str = ""

    @property
    def text(self) -> str:
        """What a person has to know of it, as one sentence."""
        left_out = "warm-up, first batches and the steps after checkpoints and evaluations left out"
        if self.by == "step":
            span = f"aligned by step {self.first:,}-{self.last:,}, {self.before:,} steps each"
            return f"{span}; {left_out}"
        if not self.before or not self.after:
            return f"nothing to compare: {self.why}"
        return f"the last {self.before:,} steps of A, {self.after:,} of B: {self.why}; {left_out}"


@dataclass(frozen=True, slots=True)
class Driver:
    """The version of the driver below a run's devices, several with commas; empty with why."""

    version: str = ""
    reason: str = "no sensor was asked"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between two runs; `equal` are the settings that both tell and that do not.

    `notes` are sentences on what makes the two hard to compare. `drivers` are those of both sides:
    what sensors told, where all the other settings come from the run itself.
    """

    changes: tuple[Change, ...]
    settings: tuple[Setting, ...]
    rows: tuple[Row, ...] = ()
    aligned: Aligned = Aligned("last", 0, 0)
    equal: tuple[Setting, ...] = ()
    notes: tuple[str, ...] = ()
    drivers: tuple[Driver, Driver] = (Driver(), Driver())


def compare_runs(before: RunView, after: RunView) -> Comparison:
    """Compare two runs by their windows and their configurations."""
    return compare_sides(side_of(before), side_of(after))


def compare_sides(
    before: Side, after: Side, drivers: tuple[Driver, Driver] = (Driver(), Driver())
) -> Comparison:
    """Compare two runs by all of their steps that are known, and by their configurations.

    `drivers` are those below the two, from `driver_of`.
    """
    one, other, aligned = align(before.steps, after.steps)
    pair = _Pair(before, after, one, other)
    told = [driver.version or None for driver in drivers]
    settings = [*_settings(before.run, after.run), Setting("driver", *told)]
    return Comparison(
        _changes(pair),
        tuple(s for s in settings if s.before != s.after),
        _rows(pair),
        aligned,
        tuple(s for s in settings if s.before == s.after and s.before not in (None, "")),
        tuple(_notes(before, after)),
        drivers,
    )


def driver_of(run: RunView, nodes: Iterable[NodeView]) -> Driver:
    """Return the driver of the devices that the ranks of a run compute on, as the sensors saw them.

    `nodes` are those of the picture that the run is from. Where the ranks' devices have several
    drivers, all are in it.
    """
    known = {node.node: node for node in nodes}
    told = [rank for rank in run.ranks if rank.hello is not None]
    if not told:
        return Driver(reason="no rank has told its device")
    versions: set[str] = set()
    reasons: list[str] = []
    for rank in told:
        assert rank.hello is not None
        uuid, node = rank.hello.device_uuid, known.get(rank.node)
        if not uuid:
            on_cpu = rank.hello.device.startswith("cpu")
            reasons.append(
                "no rank computes on a GPU" if on_cpu else "the rank tells no id of its device"
            )
            continue
        gpu = next((g for g in node.gpus if same_device(g.uuid, uuid)), None) if node else None
        if gpu is not None and gpu.driver:
            versions.add(gpu.driver)
        elif gpu is not None:
            reasons.append(gpu.driver_reason or "its sampler is older and does not ask for it")
        else:
            why = (node.sensors_reason or node.gpus_reason) if node else ""
            reasons.append(why or "no sensor sees the GPU of its ranks")
    return Driver(", ".join(sorted(versions)), "") if versions else Driver("", reasons[0])


def untold_drivers(found: Comparison) -> list[str]:
    """Return why a driver is not known, a clause a side, or one for both where they agree."""
    one, other = (driver.reason if not driver.version else "" for driver in found.drivers)
    if one and one == other:
        return [f"on either side: {one}"]
    return [f"of {name}: {why}" for name, why in (("A", one), ("B", other)) if why]


def changed_settings(before: RunView, after: RunView) -> tuple[Setting, ...]:
    """Return what differs in the configuration of the first rank that told its own."""
    return tuple(s for s in _settings(before, after) if s.before != s.after)


def align(before: Steps, after: Steps) -> tuple[Steps, Steps, Aligned]:
    """Return the steps of both sides to compare: the same ones where that can be."""
    common = frozenset(before.indices) & frozenset(after.indices)
    shorter = min(len(before), len(after))
    if len(common) >= max(MIN_STEPS, min(_COMMON, shorter // 2)):
        if len(common) > _MOST_COMMON:
            common = frozenset(sorted(common)[-_MOST_COMMON:])
        same = (before.of(common), after.of(common))
        count = len(common)
        return *same, Aligned("step", count, count, min(common), max(common))
    one, other = before.last(_LAST), after.last(_LAST)
    if not one or not other:
        which = "A has" if other else "B has" if one else "they have"
        why = f"{which} no steady step"
    elif not common:
        why = "they have no step in common"
    else:
        why = f"they have only {len(common)} steps in common"
    return one, other, Aligned("last", len(one), len(other), why=why)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Both sides and their steps that are compared."""

    before: Side
    after: Side
    one: Steps
    other: Steps

    @property
    def same_clock(self) -> bool:
        """Whether times other than the step itself may be compared."""
        clocks = [side.clock for side in (self.before, self.after)]
        return None in clocks or clocks[0] == clocks[1]

    @property
    def step(self) -> str:
        """The column that holds the step: by the clock of both, else the host's."""
        return "step" if self.same_clock else "wall"


# --- numbers -----------------------------------------------------------------------------------


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if isfinite(value)]


def _measure(
    metric: str,
    before: Sequence[float],
    after: Sequence[float],
    floor_ms: float | None = None,
    of: Callable[[Sequence[float]], float] = fmean,
) -> Change:
    """Compare two series of durations in ms; `floor_ms` is the least difference that counts."""
    sides = [_known(before), _known(after)]
    values = [of(side) if side else None for side in sides]
    one, other = values
    if one is None or other is None:
        where = "on either side" if one is other else "before" if one is None else "after"
        return Change(metric, "ms", one, other, reason=f"not known {where}")
    interval = difference(estimate(sides[0], of), estimate(sides[1], of))
    if interval is None:
        few = f"under {MIN_STEPS} steps in a window"
        return Change(metric, "ms", one, other, None, few)
    floor = CLEAR_SHARE * one if floor_ms is None else floor_ms
    clear = interval.clear and abs(other - one) > floor
    return Change(metric, "ms", one, other, clear, interval=interval.relative)


def _changes(pair: _Pair) -> tuple[Change, ...]:
    step = _measure("step", pair.one.column(pair.step), pair.other.column(pair.step))
    floor_ms = None if step.before is None else CLEAR_SHARE * step.before
    changes = [step]
    for name in ("own", *PHASES):
        one, other = (_part(steps, side, name) for steps, side in _sides(pair))
        if not _known(one) and not _known(other):
            continue
        if pair.same_clock:
            changes.append(_measure(name, one, other, floor_ms))
        else:
            changes.append(Change(name, "ms", None, None, reason=_DIFFERENT_CLOCKS))
    changes.append(_samples(pair)[0])
    changes.append(_plain("goodput", "", _goodput(pair.before.run), _goodput(pair.after.run)))
    return tuple(changes)


def _sides(pair: _Pair) -> tuple[tuple[Steps, Side], tuple[Steps, Side]]:
    return (pair.one, pair.before), (pair.other, pair.after)


def _part(steps: Steps, side: Side, name: str) -> list[float]:
    """Return a phase of every step in ms, or `own`: the step without exposed communication."""
    if name != "own":
        return steps.column(name)
    comm = steps.column("comm")
    if side.run.world_size > 1 and not _known(comm):
        return [nan] * len(steps)
    whole = steps.column("step")
    exposed = [part if isfinite(part) else 0.0 for part in comm]
    return [step - part for step, part in zip(whole, exposed, strict=True)]


def _samples(pair: _Pair) -> tuple[Change, Spread | None, Spread | None]:
    """Return samples a second: those of all ranks over the mean step, with their spreads."""
    rates: list[list[tuple[float, float]]] = []
    for steps in (pair.one, pair.other):
        rows = zip(steps.column("samples"), steps.column(pair.step), strict=True)
        rates.append([(n, ms) for n, ms in rows if isfinite(n) and ms > 0.0])
    if not rates[0] or not rates[1]:
        known = [_rate(rows) if rows else None for rows in rates]
        return _plain("samples_per_s", "1/s", *known), None, None
    one, other = estimate(rates[0], _rate), estimate(rates[1], _rate)
    interval = difference(one, other)
    lay = [_spread([1e3 * n / ms for n, ms in rows]) for rows in rates]
    if interval is None:
        few = f"under {MIN_STEPS} steps in a window"
        return Change("samples_per_s", "1/s", one.value, other.value, None, few), lay[0], lay[1]
    clear = interval.clear and abs(other.value - one.value) > CLEAR_SHARE * one.value
    change = Change(
        "samples_per_s", "1/s", one.value, other.value, clear, interval=interval.relative
    )
    return change, lay[0], lay[1]


def _rate(rows: Sequence[tuple[float, float]]) -> float:
    return 1e3 * sum(n for n, _ in rows) / sum(ms for _, ms in rows)


def _plain(metric: str, unit: str, before: float | None, after: float | None) -> Change:
    missing = "before" if before is None else "after"
    reason = f"not known {missing}" if before is None or after is None else ""
    return Change(metric, unit, before, after, None, reason)


def _goodput(run: RunView) -> float | None:
    wall_ns = sum(rank.ledger.wall_ns for rank in run.ranks)
    training_ns = sum(rank.ledger.training_ns for rank in run.ranks)
    return training_ns / wall_ns if wall_ns else None


def _spread(values: Sequence[float]) -> Spread | None:
    known = sorted(_known(values))
    if not known:
        return None
    last = len(known) - 1
    return Spread(known[last // 10], median(known), known[last - last // 10])


# --- rows --------------------------------------------------------------------------------------


def _rows(pair: _Pair) -> tuple[Row, ...]:
    one, other = pair.one, pair.other
    whole = (one.column(pair.step), other.column(pair.step))
    p50 = _measure("step_p50", *whole, of=median)
    mean = _measure("step", *whole)
    floor_ms = None if mean.before is None else CLEAR_SHARE * mean.before
    rows = [_row(p50, whole, _step_verdict(p50))]

    def part(metric: str, name: str, before: list[float], after: list[float]) -> Change:
        if not pair.same_clock:
            change = Change(metric, "ms", None, None, reason=_DIFFERENT_CLOCKS)
        else:
            change = _measure(metric, before, after, floor_ms)
            if change.before is None and change.after is None:
                reason = _why_not(pair.after.run, name) or _why_not(pair.before.run, name)
                change = Change(metric, "ms", None, None, reason=reason or change.reason)
        rows.append(_row(change, (before, after), _part_verdict(change, mean)))
        return change

    wait = part("data_wait_worst", "data_wait", _worst_wait(one), _worst_wait(other))
    _communication(pair, rows, part, wait)
    part("forward_backward", "forward", _compute(one), _compute(other))
    if _known(one.column("h2d")) or _known(other.column("h2d")):
        part("h2d", "h2d", one.column("h2d"), other.column("h2d"))
    part("optimizer", "optimizer", one.column("optimizer"), other.column("optimizer"))
    part("other", "other", one.column("other"), other.column("other"))
    samples, one_lies, other_lies = _samples(pair)
    better = _better(samples, more=True)
    rows.append(Row(samples.metric, samples, one_lies, other_lies, better, _rate_verdict(samples)))
    goodput = _plain("goodput", "", _goodput(pair.before.run), _goodput(pair.after.run))
    rows.append(Row("goodput", goodput, None, None, None, goodput.reason or "of the whole run"))
    return tuple(rows)


def _communication(
    pair: _Pair,
    rows: list[Row],
    part: Callable[[str, str, list[float], list[float]], Change],
    wait: Change,
) -> None:
    """Add the median rank's communication, and its two parts where there are several ranks."""
    medians = [steps.column("comm_median") for steps in (pair.one, pair.other)]
    if not _known(medians[0]) and not _known(medians[1]):
        medians = [steps.column("comm") for steps in (pair.one, pair.other)]
    comm = part("comm_median", "comm", *medians)
    at = len(rows) - 1
    transfers = [steps.column("transfer") for steps in (pair.one, pair.other)]
    if not _known(transfers[0]) or not _known(transfers[1]) or not pair.same_clock:
        return
    part("transfer", "comm", *transfers)
    peers = [
        [whole - moved for whole, moved in zip(both, least, strict=True)]
        for both, least in zip(medians, transfers, strict=True)
    ]
    peer = part("peer_wait", "comm", *peers)
    follows = _follows(comm, peer, wait)
    if follows:
        row = rows[at]
        rows[at] = Row(row.metric, row.change, row.before, row.after, row.better, follows)


def _follows(comm: Change, peer: Change, wait: Change) -> str:
    """Return what a change of communication is when it is mostly wait for others, else nothing."""
    total, waited = _delta(comm), _delta(peer)
    if not comm.clear or not peer.clear or total is None or waited is None:
        return ""
    if waited * total <= 0.0 or abs(waited) < _MOSTLY * abs(total):
        return ""
    more = waited > 0.0
    words = f"{_ms(peer.after)} is wait" if more else f"{_ms(-waited)} less wait"
    data = _delta(wait)
    together = wait.clear and data is not None and data * waited > 0.0
    if together and abs(data or 0.0) >= _MOSTLY * abs(waited):
        return f"{words}, follows data wait"
    return f"{words} for slower ranks" if more else words


def _worst_wait(steps: Steps) -> list[float]:
    """Return the data wait of the rank that waits longest over these steps."""
    worst: tuple[float, list[float]] | None = None
    for rank in steps.ranks:
        waits = steps.waits(rank)
        known = _known(waits)
        if known and (worst is None or fmean(known) > worst[0]):
            worst = (fmean(known), waits)
    return [nan] * len(steps) if worst is None else worst[1]


def _compute(steps: Steps) -> list[float]:
    pairs = zip(steps.column("forward"), steps.column("backward"), strict=True)
    return [forward + backward for forward, backward in pairs]


def _why_not(run: RunView, phase: str) -> str:
    return next((why for rank in run.ranks if (why := rank.phases_na.get(phase, ""))), "")


def _row(change: Change, series: tuple[Sequence[float], Sequence[float]], verdict: str) -> Row:
    before, after = (None, None) if change.before is None and change.after is None else series
    return Row(
        change.metric,
        change,
        None if before is None else _spread(before),
        None if after is None else _spread(after),
        _better(change, more=False),
        verdict,
    )


def _better(change: Change, *, more: bool) -> bool | None:
    delta = _delta(change)
    if not change.clear or not delta:
        return None
    return (delta > 0.0) is more


def _delta(change: Change) -> float | None:
    if change.before is None or change.after is None:
        return None
    return change.after - change.before


def _ms(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:,.0f} ms" if abs(value) >= 9.95 else f"{value:.1f} ms"


def percent_range(interval: tuple[float, float]) -> str:
    """Return `+35..+38 %`, with a decimal where the two would be the same, or nearly."""
    low, high = (100.0 * value for value in interval)
    digits = 0 if high - low >= 2.0 else 1
    return f"{low:+.{digits}f}..{high:+.{digits}f} %"


def _with_interval(words: str, change: Change) -> str:
    if change.interval is None:
        return words
    return f"{words}, 95 % CI {percent_range(change.interval)}"


def _step_verdict(change: Change) -> str:
    if change.clear is None:
        return change.reason
    if not change.clear:
        return _with_interval("same", change)
    return _with_interval("slower" if (_delta(change) or 0.0) > 0.0 else "faster", change)


def _rate_verdict(change: Change) -> str:
    if change.clear is None:
        return change.reason
    if not change.clear:
        return _with_interval("same", change)
    return _with_interval("higher" if (_delta(change) or 0.0) > 0.0 else "lower", change)


def _part_verdict(change: Change, step: Change) -> str:
    """Return what a part of the step has to do with the step's change."""
    if change.clear is None:
        return change.reason
    if not change.clear:
        interval = change.interval
        if interval is not None and interval[0] * interval[1] > 0.0:
            return _with_interval(f"under {CLEAR_SHARE:.1%} of the step", change)
        return _with_interval("same", change)
    delta, whole = _delta(change) or 0.0, _delta(step) or 0.0
    # A part may change by more than the whole when another one changes the other way.
    if step.clear and delta * whole > 0.0 and _PART <= delta / whole <= 1.05:
        number = f"{abs(delta):,.0f}" if abs(whole) >= 9.95 else f"{abs(delta):.1f}"
        return _with_interval(f"{number} of the {_ms(abs(whole))}", change)
    return _with_interval("longer" if delta > 0.0 else "shorter", change)


def _notes(before: Side, after: Side) -> list[str]:
    notes = []
    if before.clock is not None and after.clock is not None and before.clock != after.clock:
        notes.append(
            f"A is by the {before.clock}'s clock, B by the {after.clock}'s: only whole steps, "
            "by the host's, are compared"
        )
    if before.run.world_size != after.run.world_size:
        notes.append(
            f"A has {before.run.world_size:,} ranks, B {after.run.world_size:,}: a step is not "
            "the same work"
        )
    if before.simulated != after.simulated:
        notes.append(f"{'A' if before.simulated else 'B'} is SIMULATED, the other was measured")
    return notes


# --- settings ----------------------------------------------------------------------------------


def _settings(before: RunView, after: RunView) -> list[Setting]:
    """Return the configuration of the first rank that told its own, of both."""
    one, other = _flat(before), _flat(after)
    return [Setting(name, one.get(name), other.get(name)) for name in dict.fromkeys([*one, *other])]


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
