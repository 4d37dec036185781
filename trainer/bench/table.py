"""The article's table of batch size, mixed precision and recomputed activations, beside ours."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from trainer.bench.fresh import Job, Measured, NotPossible, busy_machine, measure_fresh
from trainer.bench.settings import changed
from trainer.bench.text import counted, mebibytes, prose, rows_of
from trainer.config import Config
from trainer.errors import ConfigError, TrainingError

__all__ = [
    "ARTICLE",
    "NOTES",
    "SCHEMA",
    "Claimed",
    "Row",
    "TableBench",
    "bench_table",
    "parse_batch_sizes",
    "sizes_for",
]

SCHEMA = 1

_WARM_UP = 2

NOTES = (
    "GC never makes a step faster: it repeats the forward, "
    "about a third more work. In the article's last row it gains only what the doubled batch "
    "brings; compare the rows of one batch size.",
    "FP32 on an A100 is not fp32 by default: cuDNN's convolutions run in TF32 unless that is "
    "turned off. Here fp32 is fp32.",
    "1,240 to 3,120 img/s is about what one A100 does with ResNet-50, not eight.",
    "Batch size, precision and recomputation change together from row to row: no row says what one "
    "of them brings.",
)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A row of the article: ResNet-50 on, as it says, 8 x A100."""

    batch_size: int
    precision: str
    images_per_s: int
    memory_gb: int


ARTICLE = (
    Claimed(512, "FP32", 1240, 38),
    Claimed(1024, "AMP", 2850, 42),
    Claimed(2048, "AMP + GC", 3120, 45),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of ours; `claimed` is its counterpart, if it has one."""

    batch_size: int
    checkpointing: bool
    mode: str
    claimed: Claimed | None
    here: Measured | NotPossible

    @property
    def precision(self) -> str:
        """In words, as the article has it."""
        return f"{self.mode} + GC" if self.checkpointing else self.mode


@dataclass(frozen=True, slots=True)
class TableBench:
    """The article's three rows and one more, which takes the last apart."""

    model: str
    image_px: int
    steps: int
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "image_px": self.image_px,
            "steps": self.steps,
            "claimed_device": "8 x A100",
            "rows": [
                {
                    "claimed": None if row.claimed is None else asdict(row.claimed),
                    "batch_size": row.batch_size,
                    "precision": row.precision,
                    "here": {"not_possible": row.here.reason}
                    if isinstance(row.here, NotPossible)
                    else {**asdict(row.here), "images_per_s": row.here.samples_per_cost_s},
                }
                for row in self.rows
            ],
            "notes": list(NOTES),
        }

    def lines(self) -> list[str]:
        """For a person."""
        measured = [row.here for row in self.rows if isinstance(row.here, Measured)]
        one = measured[0] if measured else None
        cuda = one is not None and one.peak_allocated_bytes is not None
        where = (
            "here"
            if one is None
            else one.device_name
            if cuda
            else f"cpu, {counted(one.threads, 'thread')}"
        )
        head = [
            "claimed: batch", "precision", "img/s", "memory", "|",
            "here: batch", "precision", "img/s",
            *(["peak memory"] if cuda else ["kept", "peak RSS"]),
        ]  # fmt: skip
        rows, missing = [], []
        for row in self.rows:
            claimed = row.claimed
            left = (
                ["-", "-", "-", "-"]
                if claimed is None
                else [
                    f"{claimed.batch_size}",
                    claimed.precision,
                    f"{claimed.images_per_s:,}",
                    f"{claimed.memory_gb} GB",
                ]
            )
            here = row.here
            right = [f"{row.batch_size}", row.precision]
            if isinstance(here, NotPossible):
                right += ["n/a"] * (2 if cuda else 3)
                missing.append(f"batch {row.batch_size}, {row.precision}: n/a, {here.reason}")
            else:
                right.append(f"{here.samples_per_cost_s:,.1f}")
                right += (
                    [mebibytes(here.peak_allocated_bytes)]
                    if cuda
                    else [mebibytes(here.saved_for_backward_bytes), mebibytes(here.peak_rss_bytes)]
                )
            rows.append([*left, "|", *right])
        busy = busy_machine(row.here for row in self.rows)
        return [
            *prose(
                f"Claimed: ResNet-50 on 8 x A100. Here: another device and size, {self.model} on "
                f"{where} at {self.image_px} px, median of {self.steps} steps, a fresh process a "
                "row. Compare the rows of one side, not the sides."
            ),
            "",
            *rows_of(head, rows, left=0),
            "",
            *prose(
                "GC: gradient checkpointing, activations are computed again in the backward."
                + ("" if cuda else " kept: what the forward saves for the backward.")
                + (
                    " img/s: by CPU time, the rate where nothing else runs."
                    if one is not None and one.cost_ms == one.cpu_ms
                    else ""
                ),
                *missing,
                busy,
                self._found(),
                *(f"Note: {note}" for note in NOTES),
            ),
        ]

    def _found(self) -> str | None:
        """What recomputing costs here, at one batch size."""
        size = self.rows[1].batch_size
        amp = {r.checkpointing: r.here for r in self.rows if r.batch_size == size}
        plain, again = amp.get(False), amp.get(True)
        if not isinstance(plain, Measured) or not isinstance(again, Measured):
            return None
        ratio = again.cost_ms / plain.cost_ms
        kept = again.saved_for_backward_bytes / plain.saved_for_backward_bytes
        return (
            f"Measured here at batch {size}: with GC a step takes {ratio:.2f} times as long"
            + (" by CPU time" if plain.cost_ms == plain.cpu_ms else "")
            + f", and keeps {kept:.0%} of the bytes for the backward."
        )


def parse_batch_sizes(text: str) -> tuple[int, int, int]:
    """``4,8,16``: for fp32, AMP, AMP with checkpointing. Raises `ConfigError` for anything else."""
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) != 3 or min(sizes, default=0) < 1:
        raise ConfigError(
            f"--batch-sizes {text!r} is not possible: three numbers between commas, one a row of "
            "the table, like 4,8,16"
        )
    return sizes[0], sizes[1], sizes[2]


def sizes_for(device: str) -> tuple[tuple[int, int, int], int]:
    """(batch sizes, image side) to use where none are asked for.

    With CUDA one GPU's eighth of the article's batches, at ResNet's usual side; on a CPU what
    takes seconds.
    """
    return ((64, 128, 256), 224) if device == "cuda" else ((4, 8, 16), 64)


def bench_table(
    config: Config,
    *,
    batch_sizes: tuple[int, int, int] | None = None,
    image_px: int | None = None,
    steps: int,
    advance: Callable[[str], None] = lambda _doing: None,
) -> TableBench:
    """Measure `steps` steady steps of each row; `advance` is called before each of the 4.

    Raises `TrainingError` where none of them can be measured.
    """
    cuda = config.train.device != "cpu" and torch.cuda.is_available()
    default_sizes, default_px = sizes_for("cuda" if cuda else "cpu")
    sizes = batch_sizes or default_sizes
    px = image_px or default_px
    # On a CPU `auto` is fp32, which would leave nothing to compare.
    amp: Literal["auto", "bf16"] = "auto" if cuda else "bf16"
    plan: Sequence[tuple[int, str, bool, Claimed | None]] = (
        (sizes[0], "fp32", False, ARTICLE[0]),
        (sizes[1], amp, False, ARTICLE[1]),
        (sizes[1], amp, True, None),
        (sizes[2], amp, True, ARTICLE[2]),
    )
    rows = []
    for batch_size, mode, checkpointing, claimed in plan:
        row = Row(batch_size, checkpointing, mode, claimed, NotPossible(""))
        advance(f"batch {batch_size}, {row.precision}")
        job = Job(
            changed(
                config,
                {
                    "precision.mode": mode,
                    "memory.checkpoint_activations": checkpointing,
                    "data.image_px": px,
                    # Batches are random numbers; the set only has to be large enough for one.
                    "data.synthetic_images": 4 * max(sizes),
                    "data.synthetic_px": 32,
                    "loader.batch_size": batch_size,
                    "train.accumulate": 1,
                    "train.steps": _WARM_UP + steps,
                    "loader.num_workers": 0,
                    "loader.prefetch_factor": "auto",
                    "loader.persistent_workers": "auto",
                    "loader.multiprocessing_context": "auto",
                    "loader.timeout_s": 0.0,
                },
            ),
            steps=steps,
            warm_up=_WARM_UP,
            batches="random",
        )
        here = measure_fresh(job)
        settled = here.mode if isinstance(here, Measured) else mode
        rows.append(Row(batch_size, checkpointing, settled, claimed, here))
    reasons = {row.here.reason for row in rows if isinstance(row.here, NotPossible)}
    if len(reasons) == 1 and not any(isinstance(row.here, Measured) for row in rows):
        raise TrainingError(reasons.pop())
    return TableBench(config.model.name, px, steps, tuple(rows))
