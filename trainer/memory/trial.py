"""One trial of one batch size, in a process of its own: ``python -m trainer.memory.trial``.

Builds what `trainer train` would, does three whole optimizer steps with the largest batch of that
size, and leaves ``rank-N.json`` in the folder: {"outcome": "ok" | "out of memory" | "failed",
"peak_bytes", "limit_bytes", "reason"}. A rank that runs out of memory ends at once; torchrun then
ends the others, which would wait for its gradients for ever.
"""

import argparse
import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer.cpus import usable_cpus
from trainer.errors import TrainerError
from trainer.memory.host import status_bytes

if TYPE_CHECKING:
    import torch

    from trainer.config import Config

__all__ = ["OUT_OF_MEMORY", "STEPS", "CudaMeter", "HostMeter", "Meter", "main"]

_SCALES = 24  # halvings from the largest scale to where everything fits
STEPS = 3
"""The second has the optimizer's state, the third repeats what is steady."""
OUT_OF_MEMORY = 77
"""The exit code."""
# After which the trial ends itself should the finder have died without ending it.
_ORPHAN_GRACE_S = 30


class Meter(Protocol):
    """Sets the limit, and reads what was needed of it."""

    limit_bytes: int | None
    guarded: bool
    """Whether the machine itself would run short beyond the limit."""

    def peak_bytes(self) -> int | None:
        """The most that was in use at once since the meter was made."""
        ...

    def lift(self) -> None:
        """Let the process have memory again, to say that it ran out."""
        ...


class HostMeter:
    """The address space of this process, which the kernel bounds for it (RLIMIT_AS).

    Made after the imports, the build and one step: by then torch has mapped gigabytes that it
    never uses. What grows from here on is what the batch needs, and a tensor that does not fit
    fails with the allocator's own error, before the machine swaps.

    Args:
        beyond_bytes: what may be taken from here on. The peak is then counted from here too, in
            address space, of which next to all is tensors.
        available_bytes: what the machine had left before this process began. The peak is then
            all that is resident, and beyond the limit the machine would run short.
    """

    def __init__(self, *, beyond_bytes: int | None, available_bytes: int | None) -> None:
        self._size = status_bytes("VmSize") or 0
        self.guarded = beyond_bytes is None
        self._before = resource.getrlimit(resource.RLIMIT_AS)
        if self.guarded:
            self.limit_bytes = available_bytes
            left = None if available_bytes is None else available_bytes - _resident()
            with contextlib.suppress(OSError):
                # The peak resident so far, that of the imports, is forgotten.
                Path("/proc/self/clear_refs").write_text("5")
        else:
            self.limit_bytes = left = beyond_bytes
        if left is not None:
            hard = self._before[1]
            bound = self._size + max(0, left)
            if hard != resource.RLIM_INFINITY:
                bound = min(bound, hard)
            resource.setrlimit(resource.RLIMIT_AS, (bound, hard))

    def peak_bytes(self) -> int | None:
        """In the terms of the limit; None without /proc."""
        if self.guarded:
            return status_bytes("VmHWM")
        peak = status_bytes("VmPeak")
        return None if peak is None else max(0, peak - self._size)

    def lift(self) -> None:
        """Back to the limit that was there before."""
        resource.setrlimit(resource.RLIMIT_AS, self._before)


def _resident() -> int:
    return status_bytes("VmRSS") or 0


class CudaMeter:
    """What torch's allocator takes of the device, which it bounds by itself."""

    guarded = False

    def __init__(self, device: "torch.device", *, limit_bytes: int | None) -> None:
        import torch

        self._device = device
        free, total = torch.cuda.mem_get_info(device)
        if limit_bytes is None:
            limit_bytes = free + torch.cuda.memory_reserved(device)
        else:
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        self.limit_bytes: int | None = limit_bytes
        torch.cuda.reset_peak_memory_stats(device)

    def peak_bytes(self) -> int | None:
        """In tensors; the allocator's cache gives way before memory runs out."""
        import torch

        return torch.cuda.max_memory_allocated(self._device)

    def lift(self) -> None:
        """Nothing: what is written needs no device."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trial; the exit code is 0, 77 (out of memory) or 1.

    On failure the process group is left as it is: to leave it may wait for the other ranks.
    """
    parser = argparse.ArgumentParser(prog="trainer.memory.trial")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--limit-mb", type=float)
    parser.add_argument("--available-bytes", type=int)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    options = parser.parse_args(arguments)
    signal.alarm(int(options.timeout_s) + _ORPHAN_GRACE_S)
    path = options.folder / f"rank-{os.environ.get('RANK', '0')}.json"
    meters: list[Meter] = []
    report: dict[str, Any] = {"outcome": "ok", "peak_bytes": None, "reason": None}
    code = 0
    stack = contextlib.ExitStack()
    try:
        _run(options, meters, stack)
        report["peak_bytes"] = meters[0].peak_bytes()
    except Exception as error:
        for meter in meters:
            meter.lift()
        from trainer.memory.report import is_out_of_memory

        if is_out_of_memory(error):
            code, report["outcome"] = OUT_OF_MEMORY, "out of memory"
        else:
            code, report["outcome"] = 1, "failed"
        report["reason"] = _reason(error)
    report["limit_bytes"] = meters[0].limit_bytes if meters else None
    report["guarded"] = bool(meters) and meters[0].guarded
    for meter in meters:
        meter.lift()
    path.write_text(json.dumps(report))
    if code == 0:
        stack.close()
    return code


def _run(options: argparse.Namespace, meters: list[Meter], stack: contextlib.ExitStack) -> None:
    """The steps; the meter is added as soon as there is one, and the stack holds the group."""
    import torch

    from trainer.config import Config
    from trainer.distributed import process_group
    from trainer.loop import train_step
    from trainer.run import build_parts

    stored = (options.folder / "config.json").read_text()
    config = _for_trial(Config.model_validate_json(stored))
    limit_bytes = None if options.limit_mb is None else int(options.limit_mb * 2**20)
    placement = stack.enter_context(process_group(config.dist, config.train.device))
    torch.manual_seed(config.train.seed)
    torch.set_num_threads(_threads(config, placement.ranks_here))
    parts = build_parts(config, placement)
    stack.enter_context(parts.precision)
    parts.replica.train()
    # From two on, an accumulated window holds gradients while it computes the next ones.
    window = min(2, config.train.accumulate)

    def step(batch_size: int) -> None:
        batch = parts.task.largest_batch(batch_size)
        loss = float(train_step(parts, [batch] * window))
        del loss, batch

    # What the first step loads and allocates once is none of the batch. Under a loss scale the
    # first ones may overflow and be left out; the optimizer's state comes with one that is done.
    for done in range(1, _SCALES + 1):
        step(min(2, options.batch_size))
        if parts.precision.skipped < done:
            break
    if placement.device.type == "cuda":
        torch.cuda.empty_cache()
        meters.append(CudaMeter(placement.device, limit_bytes=limit_bytes))
    else:
        meters.append(HostMeter(beyond_bytes=limit_bytes, available_bytes=options.available_bytes))
    for _ in range(STEPS):
        step(options.batch_size)


def _for_trial(config: "Config") -> "Config":
    """Without workers, telemetry and files.

    The loaders are built for what they know of the data but never asked for a batch, so theirs
    may be of one sample: the made set need not be as large as the batch.
    """
    loader = type(config.loader)(batch_size=1, num_workers=0)
    train = config.train.model_copy(update={"watch": False, "manifest": False})
    memory = config.memory.model_copy(update={"leak_checks": False, "snapshot": None})
    return config.model_copy(update={"loader": loader, "train": train, "memory": memory})


def _threads(config: "Config", ranks_here: int) -> int:
    if os.environ.get("OMP_NUM_THREADS") == "1":
        return 1  # as the finder wants it, or torchrun
    if config.train.threads != "auto":
        return config.train.threads
    return max(1, usable_cpus() // ranks_here)


def _reason(error: Exception) -> str:
    """One line; of an error that was not raised on purpose also its type."""
    text = str(error).strip().splitlines()
    first = text[0] if text else "no message"
    return first if isinstance(error, TrainerError) else f"{type(error).__name__}: {first}"


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: the clean-up of a broken process group may wait for ever.
    os._exit(status)
