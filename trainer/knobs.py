"""What a monitor may change while the training runs, and what the loop still has to do for it.

Knobs are turned in the training thread, at the boundary of a step. What can be done there is done;
the loop takes up the rest where it can: another loader after a step, with the order going on where
it was, and other windows of accumulation where one begins.
"""

from typing import TYPE_CHECKING

from trainer.config import Config
from trainer.cpus import usable_cpus
from trainer.data.loader import replan

if TYPE_CHECKING:
    from trainer.loop import Trainer

__all__ = ["Wanted", "register_knobs"]

_WORKERS_A_CPU = 4
_MOST_WORKERS = 32  # what waits for a disk or a network may be more than the CPUs
_MOST_PREFETCH = 64
_MOST_ACCUMULATED = 1024
_MOST_LOG_STEPS = 1_000_000
_DEFAULT_PREFETCH = 2  # torch's own


class Wanted:
    """Changes that wait for the loop; None where there are none."""

    def __init__(self) -> None:
        self.workers: tuple[int, int] | None = None
        """(num_workers, prefetch_factor) of another loader."""
        self.accumulate: int | None = None

    def take_workers(self) -> tuple[int, int] | None:
        """Return what is wanted, and forget it."""
        wanted, self.workers = self.workers, None
        return wanted

    def take_accumulate(self) -> int | None:
        """Return what is wanted, and forget it."""
        wanted, self.accumulate = self.accumulate, None
        return wanted


def register_knobs(trainer: "Trainer", config: Config) -> None:
    """Tell gpuwatch what can be changed: the loader's workers and prefetching, accumulation, the
    log interval, how gradients travel and the strength of augmentation where there are any.

    The optimizer steps of the run, and with them its learning rates, stay as they were planned:
    with more accumulation it sees more samples.
    """
    loaders, wanted = trainer.loaders, trainer.wanted
    knob = trainer.telemetry.knob

    def loader_now() -> tuple[int, int]:
        plan = loaders.plan
        return wanted.workers or (plan.num_workers, plan.prefetch_factor or _DEFAULT_PREFETCH)

    def set_workers(num_workers: int) -> None:
        prefetch = loader_now()[1]
        replan(loaders.plan, config.loader, num_workers=num_workers, prefetch_factor=prefetch)
        wanted.workers = (num_workers, prefetch)

    def set_prefetch(prefetch_factor: int) -> None:
        num_workers = loader_now()[0]
        if not num_workers:
            raise ValueError("prefetch_factor has no meaning with num_workers=0")
        wanted.workers = (num_workers, prefetch_factor)

    def set_accumulate(every: int) -> None:
        wanted.accumulate = every

    def set_log_interval(steps: int) -> None:
        trainer.log_interval_steps = steps

    workers, prefetch = loader_now()
    after = "after the step that begins now"
    high = max(workers, _WORKERS_A_CPU * usable_cpus(), _MOST_WORKERS)
    knob("num_workers", workers, set_workers, low=0, high=high, effective=after)
    high = max(prefetch, _MOST_PREFETCH)
    knob("prefetch_factor", prefetch, set_prefetch, low=1, high=high, effective=after)
    every = config.train.accumulate
    knob(
        "gradient_accumulation",
        every,
        set_accumulate,
        low=1,
        high=max(every, min(loaders.accumulation.batches, _MOST_ACCUMULATED)),
        effective="from the next step on",
        together=True,
    )
    knob(
        "log_interval_steps",
        config.train.log_interval_steps,
        set_log_interval,
        low=1,
        high=max(config.train.log_interval_steps, _MOST_LOG_STEPS),
        effective="from this step on",
    )
    hook = trainer.parts.comm_hook
    if hook is not None:
        knob(
            "comm_hook",
            hook.kind,
            hook.use,
            choices=hook.kinds,
            effective="from the next step on",
            together=True,
        )
    data = config.data
    images = config.model.reads == "images"
    if images and max(data.colour_strength, data.mixup_alpha, data.cutmix_alpha) > 0:
        knob(
            "augmentation_strength",
            1.0,
            trainer.scale_strength,
            low=0.0,
            high=1.0,
            effective="from the batches on that are loaded next",
        )
