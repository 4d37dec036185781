"""The number formats on this device, each in a process of its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.bench.fresh import (
    Job,
    Measured,
    NotPossible,
    busy_machine,
    combined,
    measure_fresh,
)
from trainer.bench.settings import changed
from trainer.bench.text import counted, mebibytes, ms, prose, rows_of
from trainer.config import Config
from trainer.errors import ConfigError, TrainingError

__all__ = ["DEFAULTS", "MODES", "SCHEMA", "PrecisionBench", "bench_precision", "parse_modes"]

SCHEMA = 1
# On a CPU: formats are compared, not cores, and on a busy machine threads that wait for each other
# make a step take several times as long. On a GPU the host's threads hardly matter.
DEFAULTS: dict[str, object] = {"train.threads": 1}
MODES = ("fp32", "tf32", "bf16", "fp16", "fp16-manual")

_WARM_UP = 3
_ROUNDS = 2


CLAIM = (
    "Claimed in the articles: AMP makes an iteration 2.1 times as fast, with 30-50 % less memory; "
    "on which GPU and model they do not say."
)


@dataclass(frozen=True, slots=True)
class PrecisionBench:
    """What each mode took."""

    model: str
    batch_size: int
    steps: int
    modes: Mapping[str, Measured | NotPossible]

    def as_json(self) -> dict[str, Any]:
        """For ``--json``. Gains are relative to fp32; null where one of the two is not known."""
        modes: dict[str, Any] = {}
        for name, it in self.modes.items():
            if isinstance(it, NotPossible):
                modes[name] = {"not_possible": it.reason}
            else:
                modes[name] = {
                    **asdict(it),
                    "speedup": self._speedup(it),
                    "memory_saved": self._saved(it),
                }
        return {
            "schema": SCHEMA,
            "model": self.model,
            "batch_size": self.batch_size,
            "steps": self.steps,
            "speedup_by": self._speed_name,
            "memory_saved_of": self._memory_name,
            "modes": modes,
            "claim": CLAIM,
        }

    def lines(self) -> list[str]:
        """For a person."""
        measured = [it for it in self.modes.values() if isinstance(it, Measured)]
        if not measured:
            return [
                f"{name}: n/a, {it.reason}"
                for name, it in self.modes.items()
                if isinstance(it, NotPossible)
            ]
        one = measured[0]
        cuda = one.peak_allocated_bytes is not None
        where = one.device_name if cuda else f"cpu, {counted(one.threads, 'thread')}"
        head = [
            "", "step ms", *([] if cuda else ["CPU ms"]), "samples/s", "speed",
            *(["peak memory"] if cuda else ["kept", "peak RSS"]),
            "less", "loss",
        ]  # fmt: skip
        rows, missing = [], []
        for name, it in self.modes.items():
            if isinstance(it, NotPossible):
                rows.append([name, "n/a", *["-"] * (len(head) - 2)])
                missing.append(f"{name}: n/a, {it.reason}")
                continue
            speedup, saved = self._speedup(it), self._saved(it)
            memory = (
                [mebibytes(it.peak_allocated_bytes)]
                if cuda
                else [mebibytes(it.saved_for_backward_bytes), mebibytes(it.peak_rss_bytes)]
            )
            rows.append([
                name, ms(it.step_ms), *([] if cuda else [ms(it.cpu_ms)]),
                f"{it.samples_per_s:,.0f}",
                "n/a" if speedup is None else f"{speedup:.2f}x",
                *memory,
                "n/a" if saved is None else f"{saved:.0%}",
                f"{it.final_loss:.4g}",
            ])  # fmt: skip
        skips = [
            f"{name}: {it.skipped} steps were left out because their gradients overflowed"
            for name, it in self.modes.items()
            if isinstance(it, Measured) and it.skipped
        ]
        busy = busy_machine(self.modes.values())
        return [
            *prose(
                f"{self.model} ({one.parameters:,} parameters) on {where}, batches of "
                f"{self.batch_size}; {self.steps} steps in each of {_ROUNDS} rounds, a fresh "
                "process each time, the same batches and seed; loss: mean over the last of them"
            ),
            "",
            *rows_of(head, rows),
            "",
            *prose(*missing, *skips, self._memory_words(cuda), busy, CLAIM, self._verdict(where)),
        ]

    @property
    def _memory_name(self) -> str:
        cuda = any(
            isinstance(it, Measured) and it.peak_allocated_bytes is not None
            for it in self.modes.values()
        )
        return "peak_allocated_bytes" if cuda else "saved_for_backward_bytes"

    @property
    def _speed_name(self) -> str:
        measured = [it for it in self.modes.values() if isinstance(it, Measured)]
        return "cpu_ms" if all(it.cost_ms == it.cpu_ms for it in measured) else "step_ms"

    def _speedup(self, it: Measured) -> float | None:
        fp32 = self.modes.get("fp32")
        return fp32.cost_ms / it.cost_ms if isinstance(fp32, Measured) else None

    def _saved(self, it: Measured) -> float | None:
        fp32 = self.modes.get("fp32")
        if not isinstance(fp32, Measured):
            return None
        before, after = getattr(fp32, self._memory_name), getattr(it, self._memory_name)
        return 1.0 - after / before if before and after is not None else None

    def _memory_words(self, cuda: bool) -> str:
        if cuda:
            return "Peak memory is the most that torch's allocator had handed out in these steps."
        return (
            "kept: what the forward saves for the backward, without the parameters: the part "
            "of the memory that the format changes. Peak RSS is the whole process, libraries "
            "included."
            + (
                " speed: by CPU time, the time of a step where nothing else runs."
                if self._speed_name == "cpu_ms"
                else ""
            )
        )

    def _verdict(self, where: str) -> str:
        found = []
        for name in ("bf16", "fp16"):
            it = self.modes.get(name)
            if isinstance(it, Measured):
                speedup, saved = self._speedup(it), self._saved(it)
                if speedup is not None and saved is not None:
                    change = f"{saved:.0%} less" if saved >= 0 else f"{-saved:.0%} more"
                    found.append(f"{name} {speedup:.2f} times as fast with {change}")
        if not found:
            return "Measured here: nothing to compare, for want of fp32 beside bf16 or fp16."
        return f"Measured here, on {where}: {'; '.join(found)}."


def parse_modes(text: str) -> tuple[str, ...]:
    """``fp32,bf16`` as a tuple, each once. Raises `ConfigError` for a word that is no mode."""
    modes = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(
                f"--modes: there is no precision {mode!r}; there are {', '.join(MODES)}"
            )
    if not modes:
        raise ConfigError(f"--modes names no mode; there are {', '.join(MODES)}")
    return modes


def bench_precision(
    config: Config,
    *,
    modes: Sequence[str] = MODES,
    steps: int,
    advance: Callable[[str], None] = lambda _doing: None,
) -> PrecisionBench:
    """Measure `steps` steady steps of each mode; `advance` is called before each.

    Raises `TrainingError` where not one of them can be measured.
    """
    jobs = {
        mode: Job(
            changed(
                config,
                {
                    "precision.mode": mode,
                    "train.accumulate": 1,
                    "train.steps": _WARM_UP + steps,  # the schedule ends with them
                    "loader.num_workers": 0,
                    "loader.prefetch_factor": "auto",
                    "loader.persistent_workers": "auto",
                    "loader.multiprocessing_context": "auto",
                    "loader.timeout_s": 0.0,
                },
            ),
            steps=steps,
            warm_up=_WARM_UP,
            batches="data",
        )
        for mode in modes
    }
    rounds: dict[str, list[Measured | NotPossible]] = {mode: [] for mode in modes}
    for turn in range(_ROUNDS):
        # There and back: a machine that gets busy or warms up favours none.
        for mode in modes if turn % 2 == 0 else reversed(modes):
            advance(f"{mode} {turn + 1}/{_ROUNDS}")
            if not any(isinstance(it, NotPossible) for it in rounds[mode]):
                rounds[mode].append(measure_fresh(jobs[mode]))
    results = {mode: combined(rounds[mode]) for mode in modes}
    reasons = {it.reason for it in results.values() if isinstance(it, NotPossible)}
    if len(reasons) == 1 and not any(isinstance(it, Measured) for it in results.values()):
        # The same for all of them: it is the data or the model, not the format.
        raise TrainingError(reasons.pop())
    return PrecisionBench(config.model.name, config.loader.batch_size, steps, results)
