"""Did the change help as predicted? The window of a finding against the steps after the change.

The window is frozen while the finding is open. What comes after it is either the same run going
on, its knob changed while it runs, or a new run of the same job that was started since: then that
one counts. The first 256 steady steps after the change are taken, fewer until there are so many.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from gpuwatch.diagnosis.types import Finding, Hint
from gpuwatch.store.blocks import MIN_STEPS, difference, estimate
from gpuwatch.store.compare import Setting, changed_settings
from gpuwatch.store.track import Side, Steps
from gpuwatch.store.views import RunView

__all__ = [
    "WANTED_STEPS",
    "Check",
    "CheckResult",
    "Promise",
    "comparable_ms",
    "followed",
    "freeze",
    "iterators",
    "promise_verdict",
    "successor",
    "tells",
    "verify",
]

WANTED_STEPS = 256
"""Four windows: enough for an interval of about one per cent where steps scatter by ten."""


@dataclass(frozen=True, slots=True)
class Check:
    """A finding with the window that it was found in, frozen.

    `at_step` is the newest step of the window: later ones of the same run are after it.
    `generation` is that of the run's track, which rises when the run restarts under its id;
    `known` are the ids of the runs that there were at the freeze, `at_s` its wall-clock time.
    `changed` is what was set since in the running training: what comes after `changed_step` counts
    then, of the same run, once it is `felt`.
    """

    finding: Finding
    before: Side
    at_step: int
    generation: int
    at_s: float
    known: frozenset[str]
    changed: Setting | None = None
    changed_step: int = 0
    felt: bool = True

    @property
    def run(self) -> str:
        """The id of the run that the finding is of."""
        return self.before.run.run


@dataclass(frozen=True, slots=True)
class Promise:
    """A hint's prediction against what came: mean steps in ms.

    `actual_ms` is what is held to the prediction: the mean step, with more batches accumulated the
    part of it that has as many samples as before. `verdict` is as predicted, faster or slower.
    `setting` is the change that was seen, None where the knob is in no configuration that a rank
    tells.
    """

    hint: Hint
    predicted_ms: tuple[float, float]
    actual_ms: float
    verdict: str
    setting: Setting | None = None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How a check stands: `steps` of `WANTED_STEPS` were taken, of `run`.

    `interval` is the 95 % interval of the relative change of the mean step, None until there are
    enough steps or where the two are by different clocks (then `reason` says so); `clear` whether
    it leaves out 0. `promise` is None where no hint of the finding predicts anything, or where
    `changed` has its knob at another value than it proposed: then `reason` says that. `has_ended`
    says that no further steps come of this run.
    """

    check: Check
    run: str
    is_new_run: bool
    steps: int
    before_ms: float | None
    after_ms: float | None
    interval: tuple[float, float] | None
    clear: bool | None
    promise: Promise | None
    changed: tuple[Setting, ...]
    reason: str = ""
    has_ended: bool = False

    @property
    def is_done(self) -> bool:
        """Whether all steps have come."""
        return self.steps >= WANTED_STEPS


def freeze(
    finding: Finding, before: Side, generation: int, at_s: float, runs: Iterable[RunView]
) -> Check | None:
    """Freeze a window as the before of a finding; `runs` are all that there are now.

    None where the window has too few steps to compare.
    """
    if len(before.steps) < MIN_STEPS:
        return None
    known = frozenset(run.run for run in runs)
    return Check(finding, before, before.steps.indices[-1], generation, at_s, known)


def successor(check: Check, runs: Iterable[RunView]) -> RunView | None:
    """Return the newest run of the same job that came after the freeze, None if there is none.

    One that was not there then, and began after the run of the finding: by the clocks of the jobs
    alone, for the observer's may be another machine's.

    The same job is one of the same name where it has a name, else one of the same script: the
    program, for its arguments are what one changes.
    """
    mine = _identity(check.before.run)
    after = [
        run
        for run in runs
        if run.run not in check.known
        and run.started_s > check.before.run.started_s
        and _identity(run) & mine
    ]
    return max(after, key=lambda run: run.started_s, default=None)


def _identity(run: RunView) -> set[tuple[str, str]]:
    """Return what a job is known by: a name of its own (not its id), and its script."""
    names = {("name", run.name)} if run.name and run.name != run.run else set()
    scripts = [rank.hello.script for rank in run.ranks if rank.hello is not None]
    return names or {("script", script.split(" ")[0]) for script in scripts if script}


def verify(check: Check, after: Side, generation: int) -> CheckResult:
    """Compare what has come since with the frozen window.

    `after` is the run of the check with all of its known steps, or its successor; `generation`
    that of its track.
    """
    is_new = after.run.run != check.run
    restarted = is_new or generation != check.generation
    live = None if restarted else check.changed
    first = check.at_step if live is None else max(check.at_step, check.changed_step)
    steps = after.steps if restarted else after.steps.after(first)
    if live is not None and not check.felt:
        steps = steps.first(0)
    steps = steps.first(WANTED_STEPS)
    same_clock = steps.clock is None or steps.clock == check.before.steps.clock
    column = "step" if same_clock else "wall"
    one, other = check.before.steps.column(column), steps.column(column)
    interval, clear = None, None
    if len(other) >= MIN_STEPS:
        found = difference(estimate(one, fmean), estimate(other, fmean))
        if found is not None:
            interval, clear = found.relative, found.clear
    changed = changed_settings(check.before.run, after.run)
    if live is not None and not any(_is_of(s, live.name) for s in changed):
        # A knob that is in no configuration: the rank has said that it is set.
        changed = (*changed, live)
    after_ms = fmean(other) if other else None
    promise, reason = _promise(check.finding, changed, after_ms, steps)
    if not same_clock:
        reason = "before and after are by different clocks: whole steps by the host's"
    return CheckResult(
        check,
        after.run.run,
        restarted,
        len(steps),
        fmean(one),
        after_ms,
        interval,
        clear,
        promise,
        changed,
        reason,
        after.run.state == "ended",
    )


def _promise(
    finding: Finding, changed: tuple[Setting, ...], after_ms: float | None, steps: Steps
) -> tuple[Promise | None, str]:
    """Return the promise to hold the change to, or why there is none."""
    hints = [hint for hint in finding.hints if hint.predicted_ms is not None]
    if not hints:
        return None, "no hint of this finding predicts a step"
    for hint in hints:
        setting = followed(hint, changed)
        if setting is not None and after_ms is not None and len(steps) >= MIN_STEPS:
            return _held(hint, after_ms, setting), ""
    other = next((s for hint in hints if (s := _touched(hint, changed)) is not None), None)
    if other is not None:
        hint = next(hint for hint in hints if _touched(hint, changed) is not None)
        if other.after != hint.new:
            return None, f"{other.name} is {other.after} now, the prediction was for {hint.new}"
    if after_ms is None or len(steps) < MIN_STEPS:
        return None, ""
    return _held(hints[0], after_ms, None), ""


def _held(hint: Hint, actual_ms: float, setting: Setting | None) -> Promise:
    assert hint.predicted_ms is not None
    actual_ms = comparable_ms(actual_ms, setting)
    verdict = promise_verdict(hint.predicted_ms, actual_ms)
    return Promise(hint, hint.predicted_ms, actual_ms, verdict, setting)


def comparable_ms(step_ms: float, setting: Setting | None) -> float:
    """Return what of a step after the change is to be held to the prediction for that change.

    A step that accumulates more batches is longer by them; its prediction is for as many samples
    as a step had before.
    """
    if setting is None or setting.name != "gradient_accumulation":
        return step_ms
    if not isinstance(setting.before, int) or not isinstance(setting.after, int):
        return step_ms
    return step_ms * setting.before / max(1, setting.after)


def promise_verdict(predicted_ms: tuple[float, float], actual_ms: float) -> str:
    """Return `as predicted`, or that the step is `faster` or `slower` than that."""
    low, high = predicted_ms
    return "faster" if actual_ms < low else "slower" if actual_ms > high else "as predicted"


def followed(hint: Hint, changed: Iterable[Setting]) -> Setting | None:
    """Return the setting that a hint proposed where it was changed to just that, else None."""
    setting = _touched(hint, changed)
    if setting is None or hint.new is None or setting.after != hint.new:
        return None
    return setting


def _touched(hint: Hint, changed: Iterable[Setting]) -> Setting | None:
    """Return the changed setting that is the knob of a hint."""
    return next((setting for setting in changed if _is_of(setting, hint.knob)), None)


def iterators(run: RunView) -> tuple[object, ...]:
    """Return what is another with each iterator of the loader that the first rank trains from."""
    rank = next((rank for rank in run.ranks if rank.hello is not None), None)
    if rank is None or rank.hello is None:
        return ()
    key = rank.last.loader if rank.last is not None else ""
    loaders = [item for item in rank.hello.loaders if key in ("", item.key)]
    return tuple((item.key, item.worker_pids, item.first_batch_ns) for item in loaders)


def tells(setting: Setting, before: RunView, after: RunView) -> bool:
    """Whether the configuration that the ranks tell has changed by what was set in a run."""
    return any(_is_of(s, setting.name) for s in changed_settings(before, after))


def _is_of(setting: Setting, knob: str) -> bool:
    """Whether a setting is that of a knob, by its name or the end of it, on either side."""
    one, other = setting.name, knob
    return one == other or one.endswith(f".{other}") or (bool(one) and other.endswith(f".{one}"))
