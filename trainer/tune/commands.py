"""``trainer tune``: settings found by measuring."""

import shlex
from pathlib import Path

import click

from trainer.bench.commands import configured

__all__ = ["tune"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def tune() -> None:
    """Find settings by measuring."""


@tune.command(
    "loader",
    context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]},
    epilog="Every configuration key can be given as well: trainer train --help lists them.",
)
@click.option(
    "--write",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Set the section [loader] of this TOML file; all else in it stays.",
)
@click.option(
    "--ranks-here",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Ranks that will train on this node at once: each gets its share of the CPUs.",
)
@click.option(
    "--steps", type=click.IntRange(2), default=8, show_default=True, help="Batches of a window."
)
@configured
def loader(
    write: Path | None,
    ranks_here: int,
    steps: int,
    as_json: bool,
    file: Path | None,
    arguments: tuple[str, ...],
) -> None:
    """Choose the loader's workers and prefetch.

    Trains with 0, 1, 2, 4, ... workers and 2 or 4 batches ahead of each as long as that helps, and
    takes the smallest setting within 5 % of the fastest. Says whether loading or computing limits
    the training.
    """
    from trainer.bench.settings import measuring, read
    from trainer.progress import progress

    with measuring() as stop:
        from trainer.tune.loader import tune_loader

        config, _ = read(file, arguments, {})
        with progress("tune loader", 16) as advance:
            result = tune_loader(
                config, steps=steps, ranks_here=ranks_here, stop=stop, advance=advance
            )
    line = _line(file, arguments, result.settings)
    if write is not None:
        from trainer.sources import load
        from trainer.tune.toml_edit import write_keys

        write_keys(write, "loader", result.settings, check=lambda path: load(file=path))
    if as_json:
        import json

        click.echo(json.dumps({**result.as_json(), "command": line}, indent=2))
        return
    for text in result.lines():
        click.echo(text)
    if write is not None:
        click.echo(
            f"written to {write}; use it with: trainer train --config {shlex.quote(str(write))}"
        )
    else:
        click.echo(f"use it with: {line}")


def _line(
    file: Path | None, arguments: tuple[str, ...], settings: dict[str, bool | int | float | str]
) -> str:
    """What to type to train as it was measured, with the chosen setting."""
    words = ["trainer", "train"]
    if file is not None:
        words += ["--config", str(file)]
    words += arguments
    for key, value in settings.items():
        words += [f"--loader.{key}", str(value).lower() if isinstance(value, bool) else str(value)]
    return shlex.join(words)
