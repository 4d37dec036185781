"""How right the loader model is: the step it predicts for another number of workers, and measured.

    python benchmarks/bench_predictions.py [--loader NAME] [--ranks 1,2] [--workers 0,1,2,4]

Trains the real trainer with items that wait and with items that compute, on one rank and two, once
with each number of workers (about 16 runs of 20 s). What one run predicts for each of the other
numbers is compared with the mean steady step of the run that has that number. A prediction is the
median of what a monitor would have said at its last few evaluations.
"""

import argparse
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from score import pictures, run_directory, trainer_command

TARGET = 0.9
"""Share of the predictions that must hold the measured step."""

LOADERS = {
    "slow_dataset": "items that wait",
    "cpu_decode": "items that compute",
}
RANKS = (1, 2)
WORKERS = (0, 1, 2, 4)
SECONDS = 12.0
SETTLE_S = 3.0
"""Steps of this time are left out of what is measured: queues that filled before the first step,
and processes that still start."""

LAST_TICKS = 4
"""Evaluations of which a prediction is the median."""


@dataclass
class Measured:
    """One run: its mean steady step, what was found, and what it predicts by number of workers.

    `step_ms` is None where no step was steady; so is a prediction that was not made.
    """

    step_ms: float | None = None
    steps: int = 0
    found: str = ""
    predicted_ms: dict[int, tuple[float, float] | None] = field(default_factory=dict)


class Cell(NamedTuple):
    """What a run with `start` workers predicts for `to` of them, beside the step measured there."""

    start: int
    to: int
    predicted_ms: tuple[float, float] | None
    measured_ms: float | None

    @property
    def inside(self) -> bool | None:
        """Whether the prediction holds the measured step; None if one of them is missing."""
        if self.predicted_ms is None or self.measured_ms is None:
            return None
        low_ms, high_ms = self.predicted_ms
        return low_ms <= self.measured_ms <= high_ms


def cells(runs: Mapping[int, Measured]) -> list[Cell]:
    """Return every pair of different numbers of workers, by number."""
    return [
        Cell(start, to, runs[start].predicted_ms.get(to), runs[to].step_ms)
        for start in runs
        for to in runs
        if start != to
    ]


def middle(
    predicted: Sequence[tuple[float, float] | None],
) -> tuple[float, float] | None:
    """Return the median low and the median high of the last few predictions.

    None where the model could not say at most of them.
    """
    last = predicted[-LAST_TICKS:]
    known = [p for p in last if p is not None]
    if not known or 2 * len(known) < len(last):
        return None
    return statistics.median(p[0] for p in known), statistics.median(p[1] for p in known)


def measure(
    fault: str, ranks: int, workers: int, others: Iterable[int], seconds: float
) -> Measured:
    """Run the trainer with so many workers and look at it once a second."""
    from gpuwatch.diagnosis import Engine
    from gpuwatch.diagnosis.engine import picture_of
    from gpuwatch.diagnosis.prediction import predict_step_ms

    command = trainer_command(ranks, "--fault", fault, workers=workers)
    engine = Engine()
    predicted: dict[int, list[tuple[float, float] | None]] = {to: [] for to in others}
    steps_ms: dict[tuple[int, int], float] = {}
    found: tuple[Any, ...] = ()
    for at_s, view, run in pictures(command, ranks, seconds):
        picture = picture_of(view, run)
        found = engine.evaluate(view, run).findings
        for to, said in predicted.items():
            said.append(predict_step_ms(picture, to))
        # Windows overlap: a step is counted once.
        steps_ms |= {
            (rank.rank, record.index): record.step_ns / 1e6
            for rank in run.ranks
            for record in rank.window
            if record.started_s >= view.at_s - (at_s - SETTLE_S)
        }
    opened = [f for f in found if f.state == "open"]
    return Measured(
        statistics.fmean(steps_ms.values()) if steps_ms else None,
        len({index for _, index in steps_ms}),
        f"{opened[0].kind} ({opened[0].severity})" if opened else "nothing",
        {to: middle(said) for to, said in predicted.items()},
    )


def sweep(fault: str, ranks: int, workers: Sequence[int], seconds: float) -> list[Cell]:
    """Measure every number of workers, print each run and each cell, and return the cells."""
    print(f"{LOADERS[fault]} ({fault}), {ranks} rank{'s' if ranks > 1 else ''}")
    runs = {}
    for count in workers:
        others = [other for other in workers if other != count]
        runs[count] = seen = measure(fault, ranks, count, others, seconds)
        print(
            f"  {count} workers: step {_ms(seen.step_ms)} over {seen.steps} steps, "
            f"found: {seen.found}   (load {os.getloadavg()[0]:.1f})",
            flush=True,
        )
    found = cells(runs)
    for cell in found:
        said = "no prediction"
        if cell.predicted_ms is not None:
            said = f"{cell.predicted_ms[0]:.1f}..{cell.predicted_ms[1]:.1f} ms"
        words = {True: "inside", False: "OUTSIDE", None: "-"}[cell.inside]
        print(
            f"    {cell.start} -> {cell.to}: predicted {said:>20}, "
            f"measured {_ms(cell.measured_ms):>9}  {words}"
        )
    return found


def _ms(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1f} ms"


def summary(found: Sequence[Cell]) -> str:
    """Return the share of cells inside, in words; what was not predicted counts neither way."""
    told = [cell.inside for cell in found if cell.inside is not None]
    silent = len(found) - len(told)
    if not told:
        return f"no cell of {len(found)} can be compared"
    share = sum(told) / len(told)
    words = f"{sum(told)} of {len(told)} predictions hold the measured step: {share:.0%}"
    word = "pass" if share >= TARGET else "below"
    more = f"; {silent} more without a prediction or a measured step" if silent else ""
    return f"{words} (target {TARGET:.0%}: {word}){more}"


def numbers(text: str) -> tuple[int, ...]:
    """Read whole numbers between commas, each once."""
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loader", choices=LOADERS, help="only this one")
    parser.add_argument("--ranks", type=numbers, default=RANKS)
    parser.add_argument("--workers", type=numbers, default=WORKERS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each run")
    options = parser.parse_args()
    if options.seconds <= SETTLE_S or min(options.ranks) < 1 or min(options.workers) < 0:
        parser.error(f"runs take more than {SETTLE_S:.0f} s, on a rank or more")
    found: list[Cell] = []
    with run_directory():
        for fault in [options.loader] if options.loader else LOADERS:
            for ranks in options.ranks:
                found += sweep(fault, ranks, options.workers, options.seconds)
    print(summary(found))


if __name__ == "__main__":
    main()
