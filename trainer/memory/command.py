"""``trainer find-batch-size``: the largest batch that fits, and the memory curve."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from trainer.memory.finder import Search, Trial

__all__ = ["find_batch_size"]

_SCHEMA = 1


@click.command(
    name="find-batch-size",
    context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]},
)
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Ranks of each trial; under torchrun: as many as it has started here.  [default: 1]",
)
@click.option(
    "--limit-mb",
    type=click.FloatRange(min=0, min_open=True),
    help="MiB that a rank may take: on a GPU in all, on a CPU beyond what the process has once it "
    "is built and has done one step.  [default: what there is]",
)
@click.option(
    "--start", type=click.IntRange(min=1), default=8, show_default=True, help="First batch size."
)
@click.option(
    "--most",
    type=click.IntRange(min=1),
    default=65_536,
    show_default=True,
    help="Largest batch size that is tried.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, max=0.5, min_open=True),
    default=0.05,
    show_default=True,
    help="How far the largest that fits and the smallest that does not may lie apart.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    help="A trial that takes longer ends the search.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A TOML file with the sections and keys of the configuration.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[--SECTION.KEY VALUE]...")
def find_batch_size(
    nproc: int | None,
    limit_mb: float | None,
    start: int,
    most: int,
    tolerance: float,
    timeout_s: float,
    as_json: bool,
    file: Path | None,
    arguments: tuple[str, ...],
) -> None:
    """Find the largest loader.batch_size that fits in memory.

    Each batch size is tried in a process of its own: three whole optimizer steps with the longest
    samples that the configuration allows. Every key of the configuration can be given too, as for
    train. Under torchrun one rank searches for all: its trials have as many ranks as torchrun has
    started on this node, and the other ranks end at once.
    """
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if int(os.environ.get("RANK", "0")) != 0:
        return
    from trainer.errors import ConfigError
    from trainer.sources import load

    if most < start:
        raise ConfigError(f"--most={most} is below --start={start}")
    config = load(arguments, file=file)
    from trainer.memory.finder import Trials
    from trainer.signals import Stopped, stop_signals

    trials = Trials(config, nproc=nproc or ranks_here, limit_mb=limit_mb, timeout_s=timeout_s)
    notice = _watched() if config.train.watch else None
    try:
        with stop_signals():
            _search(
                trials,
                start=start,
                most=most,
                tolerance=tolerance,
                as_json=as_json,
                notice=notice,
            )
    except Stopped as stopped:
        raise SystemExit(stopped.exit_code) from None


def _search(
    trials: Callable[[int], "Trial"],
    *,
    start: int,
    most: int,
    tolerance: float,
    as_json: bool,
    notice: Callable[[str], None] | None,
) -> None:
    from trainer.errors import TrainingError
    from trainer.memory.finder import search
    from trainer.report import Reporter

    reporter = Reporter()

    def told(batch_size: int) -> "Trial":
        result = trials(batch_size)
        sentence = _sentence(result)
        reporter.note(sentence)
        if notice is not None:
            notice(sentence)
        return result

    found = search(told, start=start, limit=most, tolerance=tolerance)
    if found.largest == 0:
        raise TrainingError(
            "not even a batch of 1 fits: set memory.checkpoint_activations=true, or take a "
            "smaller model, smaller images or shorter texts"
        )
    if notice is not None:
        notice(f"recommended: loader.batch_size={found.recommended}")
    if as_json:
        click.echo(json.dumps(_json(found), indent=2))
        return
    for line in _picture(found):
        click.echo(line)


def _sentence(result: "Trial") -> str:
    if not result.ok:
        what = "out of memory"
    elif result.peak_bytes is None:
        what = "fits, its peak is n/a (nothing here measures it)"
    else:
        what = f"fits, peak {result.peak_bytes / 2**20:,.1f} MiB"
    return f"batch {result.batch_size}: {what}, {result.seconds:.1f} s"


def _json(found: "Search") -> dict[str, object]:
    fit = found.fit
    return {
        "schema": _SCHEMA,
        "largest": found.largest,
        "too_large": found.too_large,
        "recommended": found.recommended,
        "limit_bytes": found.limit_bytes,
        "trials": [
            {
                "batch_size": trial.batch_size,
                "ok": trial.ok,
                "peak_bytes": trial.peak_bytes,
                "seconds": round(trial.seconds, 3),
            }
            for trial in found.trials
        ],
        "fit": None
        if fit is None
        else {
            "base_bytes": round(fit.base_bytes),
            "bytes_per_sample": round(fit.bytes_per_sample),
            "residual_bytes": round(fit.residual_bytes),
        },
        "edge": found.edge,
    }


def _picture(found: "Search") -> list[str]:
    from trainer.memory.curve import draw

    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    lines = draw(
        found.points,
        found.fit,
        found.limit_bytes,
        width=min(100, shutil.get_terminal_size((80, 24)).columns),
        ascii_only=not encoding.startswith("utf"),
    )
    if found.too_large is None:
        beside = "the largest that was tried; --most raises it"
    elif any(trial.batch_size == found.too_large for trial in found.trials):
        beside = f"{found.too_large} does not"
    else:
        beside = f"{found.too_large} would need more than there is, and was not tried"
    return [
        *lines,
        "",
        f"largest that fits   {found.largest:>7}   ({beside})",
        f"loader.batch_size   {found.recommended:>7}   (recommended: 0.9 of it, for what varies)",
    ]


def _watched() -> Callable[[str], None]:
    """Show the search to gpuwatch; what to tell it each trial with."""
    import gpuwatch

    gpuwatch.watch(name="find-batch-size")
    return lambda sentence: gpuwatch.annotate(notice=sentence)
