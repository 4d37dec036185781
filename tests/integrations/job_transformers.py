"""A Trainer of Transformers: windows of two batches, the last one partial; evaluation and saving.

Once as any script would, and once with the callback. Run by the tests, offline.
"""

import faulthandler
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

faulthandler.dump_traceback_later(100, exit=True)

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

import gpuwatch  # noqa: E402

gpuwatch.watch()


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + 16) % 64
        return {"input_ids": tokens, "labels": tokens}


def train(folder: str, *callbacks: Any) -> int:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Texts(14),  # 7 batches: 3 windows and a half, 4 steps an epoch
        eval_dataset=Texts(12),
        callbacks=list(callbacks),
    )
    trainer.train()
    return int(trainer.state.global_step)


def main() -> None:
    steps = []
    with tempfile.TemporaryDirectory() as folder:
        steps.append(train(folder))
    with tempfile.TemporaryDirectory() as folder:
        from gpuwatch.integrations.transformers import GpuwatchCallback

        steps.append(train(folder, GpuwatchCallback()))
    print(json.dumps({"steps": steps}), flush=True)
    done = Path(os.environ["DONE"])
    while not done.exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
    sys.exit(0)
