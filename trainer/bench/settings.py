"""Configurations to measure with, and the process they are measured in."""

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import Config
from trainer.errors import ConfigError
from trainer.sources import resolve

if TYPE_CHECKING:
    from trainer.signals import Stop

__all__ = ["changed", "measuring", "read"]

# Telemetry, its file and the looks for leaks belong to training, not to what is measured.
_QUIET: dict[str, object] = {
    "train.watch": False,
    "train.manifest": False,
    "memory.leak_checks": False,
}


def changed(config: Config, values: Mapping[str, object]) -> Config:
    """The configuration with other values for some ``section.key``.

    The values are taken as they are: they have to fit each other.
    """
    sections: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        section, _, leaf = key.partition(".")
        sections.setdefault(section, {})[leaf] = value
    return config.model_copy(
        update={
            name: getattr(config, name).model_copy(update=leaves)
            for name, leaves in sections.items()
        }
    )


def read(
    file: Path | None, arguments: Sequence[str], defaults: Mapping[str, object]
) -> tuple[Config, frozenset[str]]:
    """The configuration as `train` would read it, quiet, on a benchmark's own defaults.

    `defaults` rule where neither file, environment nor command line say anything, and give way to
    a preset that was asked for.

    Returns:
        It, and the keys that the caller has set.

    Raises:
        ConfigError: as `trainer.sources.load`; or several ranks were launched.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("this measures one process: start it without torchrun")
    config, origin = resolve(arguments, file=file)
    asked = frozenset(k for k, where in origin.items() if not where.startswith("in the preset"))
    taken = set(origin) if "preset" in asked else asked
    own = {key: value for key, value in defaults.items() if key not in taken}
    return changed(config, {**own, **_QUIET}), asked


@contextlib.contextmanager
def measuring() -> Iterator["Stop"]:
    """Around a measurement on the command line, before torch is imported: as `train` does.

    Ctrl-C and SIGTERM end it with the exit code that a shell expects.
    """
    # OpenMP's threads would spin at barriers and take the cores that loader workers need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # More workers than CPUs is right for items that wait: it is what is measured here.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    from trainer.signals import Stopped, stop_signals

    try:
        with stop_signals() as stop:
            yield stop
    except Stopped as stopped:
        raise SystemExit(stopped.exit_code) from None
