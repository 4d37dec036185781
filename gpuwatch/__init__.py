"""gpuwatch: why is this training step not faster, and what do I change?

In a training script::

    import gpuwatch

    gpuwatch.watch()

and in another terminal ``gpuwatch``. Everything else here is optional: `step`, `phase`, `span`
and `annotate` tell the monitor what it cannot see by itself, and `knob` lets it change a setting
of the training while it runs. Importing this package loads none of its dependencies; the public
names are resolved on first use.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "GpuwatchError",
    "__version__",
    "annotate",
    "knob",
    "phase",
    "span",
    "step",
    "unwatch",
    "watch",
]

if TYPE_CHECKING:
    from gpuwatch.errors import GpuwatchError
    from gpuwatch.probe import annotate, knob, phase, span, step, unwatch, watch

_HOMES = {
    "GpuwatchError": "gpuwatch.errors",
    "annotate": "gpuwatch.probe",
    "knob": "gpuwatch.probe",
    "phase": "gpuwatch.probe",
    "span": "gpuwatch.probe",
    "step": "gpuwatch.probe",
    "unwatch": "gpuwatch.probe",
    "watch": "gpuwatch.probe",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
