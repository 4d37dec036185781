"""Planned batches on their way through a DataLoader: drawn by row, put together as tensors."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils.data import Sampler

from trainer.data.text.plan import EpochPlan, Padding, Row, row_tokens
from trainer.errors import DataError

__all__ = ["IGNORED", "Collate", "PlannedBatches", "Task", "largest_batch"]

Task = Literal["lm", "classify"]
Batch = dict[str, torch.Tensor]

IGNORED = -100
"""The label of a position that is not to be predicted; torch's cross entropy skips it."""


@dataclass(frozen=True)
class Collate:
    """Rows of (ids, label) to a batch; int64 on the CPU, N rows of T tokens.

    ``input_ids``, ``attention_mask`` (N, T): 0 at padding. ``labels``: for ``lm`` (N, T) the ids
    themselves, `IGNORED` at padding and at the first token of each text, which nothing precedes;
    the model shifts. For ``classify`` one class per text, in the order of rows. Packed rows have
    ``position_ids`` and ``document_ids`` (N, T) beside it: the first restart with each text, the
    second count the texts of a row from 1, 0 at padding.

    Raises `DataError` for a text without a class where one is needed.
    """

    padding: Padding
    max_tokens: int
    pad_id: int
    multiple: int
    task: Task

    def __call__(self, rows: list[list[tuple[torch.Tensor, int]]]) -> Batch:
        """The batch; its rows have the length that `plan_epoch` reckoned with."""
        longest = max(sum(len(ids) for ids, _ in row) for row in rows)
        width = row_tokens(
            longest, padding=self.padding, max_tokens=self.max_tokens, multiple=self.multiple
        )
        if longest > width:
            raise ValueError(f"a row has {longest} tokens, more than max_tokens={self.max_tokens}")
        shape = (len(rows), width)
        batch = {
            "input_ids": torch.full(shape, self.pad_id, dtype=torch.int64),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
        }
        packed = self.padding == "pack"
        if packed:
            batch["position_ids"] = torch.zeros(shape, dtype=torch.int64)
            batch["document_ids"] = torch.zeros(shape, dtype=torch.int64)
        labels = torch.full(shape, IGNORED, dtype=torch.int64)
        classes: list[int] = []
        for index, row in enumerate(rows):
            start = 0
            for document, (ids, label) in enumerate(row, 1):
                end = start + len(ids)
                batch["input_ids"][index, start:end] = ids
                if self.task == "lm":
                    labels[index, start + 1 : end] = ids[1:]
                if packed:
                    torch.arange(len(ids), out=batch["position_ids"][index, start:end])
                    batch["document_ids"][index, start:end] = document
                classes.append(label)
                start = end
            batch["attention_mask"][index, :start] = 1
        if self.task == "classify":
            if min(classes) < 0:
                raise DataError("a text has no class: a model that sorts texts needs one for each")
            labels = torch.tensor(classes, dtype=torch.int64)
        batch["labels"] = labels
        return batch


class PlannedBatches(Sampler[list[Row]]):
    """The batches of one rank, as `batch_sampler` of a DataLoader over a `TokenSet`.

    `set_epoch` before each iterator; persistent workers need nothing more, because the indices are
    drawn in the training process.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self._plan: EpochPlan | None = None
        self._first = 0
        self._every = 1

    def set_epoch(
        self, plan: EpochPlan, first_batch: int = 0, *, every: int = 1, offset: int = 0
    ) -> None:
        """The plan of the next epoch, and the micro-batch to resume at.

        Of the batches from there on each `every`-th, from the `offset`-th: so ranks share a plan
        that was made for one of them, each sample once, some with a batch more than others.
        """
        if not 0 <= first_batch <= len(plan):
            raise ValueError(f"first_batch={first_batch} is not in an epoch of {len(plan)}")
        self._plan = plan
        self._first = first_batch + offset
        self._every = every

    def __iter__(self) -> Iterator[list[Row]]:
        return self._planned().batches(self.rank, self._first, self._every)

    def __len__(self) -> int:
        """Batches of the next iterator."""
        return len(range(self._first, len(self._planned()), self._every))

    def _planned(self) -> EpochPlan:
        if self._plan is None:
            raise RuntimeError("no epoch is planned: call set_epoch first")
        return self._plan


def largest_batch(
    batch_size: int, max_tokens: int, vocabulary: int, task: Task, padding: Padding
) -> Batch:
    """A batch as large as any can be, every row full, to see whether it fits into memory.

    `vocabulary` is the size of the tokenizer. For ``classify`` all classes are 0.
    """
    ids = torch.arange(max_tokens, dtype=torch.int32) % vocabulary
    # Packed rows of several texts need no more memory than of one; their classes a little.
    collate = Collate(padding, max_tokens, pad_id=0, multiple=1, task=task)
    return collate([[(ids, 0)] for _ in range(batch_size)])
