"""The command line. torch and pydantic are imported by the commands that need them."""

import importlib
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import click

from trainer import __version__
from trainer.errors import ConfigError, TrainerError

if TYPE_CHECKING:
    from trainer.config import Config

__all__ = ["main"]

_SPEAK_S = 2.0


class _KeyHelp(click.Command):
    """A command whose help lists the configuration keys it takes."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from trainer.config import Config
        from trainer.sources import keys

        defaults = Config().model_dump(mode="json")
        rows = []
        for key, text in keys().items():
            section, _, leaf = key.rpartition(".")
            value = (defaults[section] if section else defaults)[leaf]
            shown = "none" if value is None else str(value)
            rows.append((f"--{key}", f"{text} [{shown.lower()}]"))
        with formatter.section("Configuration keys"):
            formatter.write_dl(rows)


_PASS_ON = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
_config_option = click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A TOML file with the same sections and keys.",
)
_key_arguments = click.argument(
    "arguments", nargs=-1, type=click.UNPROCESSED, metavar="[--SECTION.KEY VALUE]..."
)


class _Lazy(click.Group):
    """A group some of whose commands are imported when they are named."""

    ELSEWHERE: ClassVar[dict[str, tuple[str, str]]] = {
        "bench": ("trainer.bench.commands:bench", "Measure what the articles claim, here."),
        "find-batch-size": (
            "trainer.memory.command:find_batch_size",
            "Find the largest batch that fits into memory.",
        ),
        "tune": ("trainer.tune.commands:tune", "Find the settings that are fast enough here."),
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.ELSEWHERE})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, _, name = self.ELSEWHERE[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            if name in self.ELSEWHERE:
                rows.append((name, self.ELSEWHERE[name][1]))
            elif (command := super().get_command(ctx, name)) is not None:
                rows.append((name, command.get_short_help_str(60)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trainer")
def _cli() -> None:
    """Train a model, instrumented for gpuwatch.

    On several processes: torchrun --standalone --nproc-per-node 2 -m trainer train
    """


@_cli.command(cls=_KeyHelp, context_settings=_PASS_ON)
@_config_option
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="NAME[:STRENGTH][@RANK]",
    help="Make the training slow in a known way, on every rank or one; may be given again.",
)
@click.option(
    "--allow-control",
    is_flag=True,
    help="Let gpuwatch change workers, accumulation and the like while it trains.",
)
@_key_arguments
def train(
    file: Path | None, faults: tuple[str, ...], allow_control: bool, arguments: tuple[str, ...]
) -> None:
    """Train; one line of stdout per log interval.

    Every key of the configuration can be given here, as a TRAINER_SECTION__KEY variable, or in
    the TOML file, in this order of precedence.
    """
    if faults:
        if any(word.partition("=")[0] == "--faults.inject" for word in arguments):
            raise ConfigError("--fault and --faults.inject are one key: give one of them")
        arguments = (*arguments, "--faults.inject", ",".join(faults))
    if allow_control:
        arguments = (*arguments, "--train.allow_control", "true")
    config = _load(file, arguments)
    # By default OpenMP's threads spin at barriers. Beside loader workers that spinning takes the
    # cores the workers need: about a quarter fewer images a second on two cores. OpenMP reads
    # it when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Said once by rank 0 in our words, with the case in which it is right.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    from trainer.run import open_trainer
    from trainer.signals import Stopped, stop_signals

    try:
        with stop_signals() as stop, open_trainer(config, stop=stop) as trainer:
            trainer.fit()
    except Stopped as stopped:
        raise SystemExit(stopped.exit_code) from None


@_cli.group()
def config() -> None:
    """Show or explain the resolved configuration, or print its JSON schema."""


@config.command(cls=_KeyHelp, context_settings=_PASS_ON)
@click.option(
    "--format", "form", type=click.Choice(["toml", "json"]), default="toml", show_default=True
)
@_config_option
@_key_arguments
def show(form: str, file: Path | None, arguments: tuple[str, ...]) -> None:
    """Print what `train` would use with the same options."""
    resolved = _load(file, arguments)
    from trainer.sources import to_toml

    if form == "json":
        click.echo(resolved.model_dump_json(indent=2))
    else:
        click.echo(to_toml(resolved), nl=False)


@config.command()
def schema() -> None:
    """Print the JSON schema of the configuration."""
    import json

    from trainer.config import Config

    click.echo(json.dumps(Config.model_json_schema(), indent=2))


@config.command("explain", context_settings=_PASS_ON)
@click.argument("key")
@_config_option
@_key_arguments
def explain_key(key: str, file: Path | None, arguments: tuple[str, ...]) -> None:
    """Say what KEY means, its value here and where that comes from."""
    from trainer.sources import explain, resolve

    resolved, origin = resolve(arguments, file=file)
    for line in explain(key.removeprefix("--"), resolved, origin):
        click.echo(line)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 failed, 2 usage, 128 + a signal."""
    try:
        code = _cli.main(arguments, prog_name="trainer", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except ConfigError as error:
        # Each rank reads the same arguments: one of them says what is wrong with them.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            click.echo(f"trainer: {error}", err=True)
        else:
            time.sleep(_SPEAK_S)  # torchrun ends all ranks at the first exit
        return error.exit_code
    except TrainerError as error:
        rank = os.environ.get("RANK")
        click.echo(f"trainer: {f'rank {rank}: ' if rank else ''}{error}", err=True)
        return error.exit_code
    except BrokenPipeError:
        # The reader of stdout has gone; what is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code if isinstance(code, int) else 0


def _load(file: Path | None, arguments: Sequence[str]) -> "Config":
    from trainer.sources import load

    return load(arguments, file=file)
