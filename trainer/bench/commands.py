"""``trainer bench``: measurements of this machine beside the articles' claims."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = ["bench", "configured"]

Command = TypeVar("Command", bound=Callable[..., Any])

_PASS_ON = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
_KEYS = "Every configuration key can be given as well: trainer train --help lists them."


def configured(command: Command) -> Command:
    """Add ``--json``, ``--config FILE`` and ``--section.key value``, as `train` has them."""
    for add in (
        click.argument(
            "arguments", nargs=-1, type=click.UNPROCESSED, metavar="[--SECTION.KEY VALUE]..."
        ),
        click.option(
            "--config",
            "file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="A TOML file with the same sections and keys.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    ):
        command = add(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure this machine, beside what is claimed elsewhere."""


@bench.command("loader", context_settings=_PASS_ON, epilog=_KEYS)
@click.option(
    "--steps", type=click.IntRange(2), default=12, show_default=True, help="Steady steps a round."
)
@configured
def loader(steps: int, as_json: bool, file: Path | None, arguments: tuple[str, ...]) -> None:
    """Compare an untuned input pipeline with a tuned one.

    Naive loads in the training process; tuned has workers enough (loader.num_workers sets how
    many). By default items wait as for a remote store: --faults.item_latency_ms 0 for plain files.
    """
    from trainer.bench.settings import measuring, read
    from trainer.progress import progress

    with measuring() as stop:
        from trainer.bench.loader import DEFAULTS, bench_loader

        config, asked = read(file, arguments, DEFAULTS)
        wanted = config.loader
        workers = wanted.num_workers if "loader.num_workers" in asked else "auto"
        prefetch = wanted.prefetch_factor
        with progress("bench loader", 7) as advance:
            result = bench_loader(
                config,
                steps=steps,
                workers=None if workers == "auto" else workers,
                prefetch=None if prefetch == "auto" else prefetch,
                stop=stop,
                advance=advance,
            )
    _show(result, as_json)


@bench.command("precision", context_settings=_PASS_ON, epilog=_KEYS)
@click.option(
    "--modes",
    default="fp32,tf32,bf16,fp16,fp16-manual",
    show_default=True,
    help="Which number formats, between commas.",
)
@click.option(
    "--steps", type=click.IntRange(2), default=8, show_default=True, help="Steady steps a round."
)
@configured
def precision(
    modes: str, steps: int, as_json: bool, file: Path | None, arguments: tuple[str, ...]
) -> None:
    """Compare the number formats: time, memory, loss; each in a process of its own."""
    from trainer.bench.settings import measuring, read
    from trainer.progress import progress

    with measuring():
        from trainer.bench.precision import DEFAULTS, bench_precision, parse_modes

        chosen = parse_modes(modes)
        config, _ = read(file, arguments, DEFAULTS)
        with progress("bench precision", 2 * len(chosen)) as advance:
            result = bench_precision(config, modes=chosen, steps=steps, advance=advance)
    _show(result, as_json)


@bench.command("table", context_settings=_PASS_ON, epilog=_KEYS)
@click.option(
    "--batch-sizes",
    metavar="N,N,N",
    help="For fp32, AMP and AMP with checkpointing. [CPU 4,8,16; CUDA 64,128,256]",
)
@click.option(
    "--image-px",
    type=click.IntRange(32, 2048),
    metavar="PX",
    help="Side of the images. [CPU 64; CUDA 224]",
)
@click.option(
    "--steps", type=click.IntRange(2), default=3, show_default=True, help="Steady steps of a row."
)
@configured
def table(
    batch_sizes: str | None,
    image_px: int | None,
    steps: int,
    as_json: bool,
    file: Path | None,
    arguments: tuple[str, ...],
) -> None:
    """Show the article's ResNet-50 table with this machine's numbers beside it.

    --preset takes another model than resnet50.
    """
    from trainer.bench.settings import measuring, read
    from trainer.progress import progress

    with measuring():
        from trainer.bench.precision import DEFAULTS
        from trainer.bench.table import bench_table, parse_batch_sizes

        sizes = None if batch_sizes is None else parse_batch_sizes(batch_sizes)
        if not any(word.startswith("--preset") for word in arguments):
            arguments = ("--preset", "resnet50", *arguments)
        config, _ = read(file, arguments, DEFAULTS)
        with progress("bench table", 4) as advance:
            result = bench_table(
                config, batch_sizes=sizes, image_px=image_px, steps=steps, advance=advance
            )
    _show(result, as_json)


def _show(result: Any, as_json: bool) -> None:
    if as_json:
        import json

        click.echo(json.dumps(result.as_json(), indent=2))
    else:
        for line in result.lines():
            click.echo(line)
