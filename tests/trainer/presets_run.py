"""One rank of the preset test: trains each for a few steps, watched, and asks for the records.

Started from test_presets.py; rank 0 prints one JSON object a preset.
"""

import contextlib
import faulthandler
import json
import os
import sys
from pathlib import Path

import support
import torch.distributed as dist

import trainer.run
from gpuwatch.frames import RankFrame
from gpuwatch.schema import PHASES, StepRecord
from trainer.config import PRESETS, DistConfig
from trainer.distributed import Placement, checksum, process_group
from trainer.report import Reporter
from trainer.sources import load

STEPS = 4
"""The last is closed by the next fetch only, which does not come: three records are complete."""

SMALL = {
    # The real model each time; only what it is fed with is little.
    "cnn": ["--loader.batch_size", "8"],
    "mlp": ["--loader.batch_size", "8"],
    # Over two images of one pixel at its end BatchNorm would tear any logits apart.
    "resnet50": ["--loader.batch_size", "4", "--data.image_px", "64"],
    "gpt-mini": ["--loader.batch_size", "2", "--text.max_tokens", "64"],
    "bert-tiny": ["--loader.batch_size", "4", "--text.max_tokens", "64"],
    "bert": ["--loader.batch_size", "2", "--text.max_tokens", "16"],
}


def summary(frame: RankFrame) -> dict[str, object]:
    records: list[StepRecord] = list(frame.records)
    return {
        "rank": frame.rank,
        "notices": list(frame.state.notices),
        "steps": [record.index for record in records],
        "complete": [
            sum(getattr(record.host, phase) or 0 for phase in PHASES) == record.step_ns
            for record in records
        ],
        "phases": {phase: [getattr(record.host, phase) for record in records] for phase in PHASES},
        "samples": [record.samples for record in records],
        "tokens": [record.tokens for record in records],
        "padding": [record.padding_share for record in records],
        "losses": [record.loss for record in records],
    }


def main() -> None:
    faulthandler.dump_traceback_later(110, exit=True)
    images, *presets = sys.argv[1:]
    with process_group(DistConfig(), "cpu") as placement:
        # One process joins once; its trainings follow each other.
        trainer.run.process_group = lambda *_: contextlib.nullcontext(placement)  # type: ignore[assignment]
        for preset in presets or list(PRESETS):
            train(preset, images, placement)


def train(preset: str, images: str, placement: Placement) -> None:
    arguments = ["--preset", preset, "--data.path", images, "--train.steps", str(STEPS)]
    arguments += ["--loader.num_workers", "1", "--train.eval_interval_epochs", "0"]
    config = load([*arguments, *SMALL[preset]])
    with trainer.run.open_trainer(config, reporter=Reporter(enabled=False)) as opened:
        opened.telemetry.annotate(notice=f"training {preset}")
        opened.fit()
        sums = ["", ""]
        dist.all_gather_object(sums, checksum(opened.model))
        if placement.rank == 0:
            frames = support.snapshots(Path(os.environ["GPUWATCH_DIR"]))
            found = {
                "preset": preset,
                "parameters": sum(p.numel() for p in opened.model.parameters()),
                "replicas_equal": sums[0] == sums[1],
                "ranks": [summary(frame) for frame in frames],
            }
            print(json.dumps(found), flush=True)
        dist.barrier()


if __name__ == "__main__":
    main()
