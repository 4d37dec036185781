"""BERT with a head that sorts texts, from transformers, with random weights."""

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import MissingPackageError

__all__ = ["Bert"]


class Bert(nn.Module):
    """`BertForSequenceClassification` that takes a batch as a dict, packed ones too.

    Nothing is downloaded. Dropout is that of transformers, 0.1. Raises `MissingPackageError`
    without transformers.
    """

    def __init__(
        self,
        classes: int,
        *,
        vocabulary: int,
        width: int,
        depth: int,
        heads: int,
        max_tokens: int,
        pad_id: int = 0,
    ) -> None:
        super().__init__()
        try:
            # Seconds: only where it is used.
            from transformers import BertConfig, BertForSequenceClassification
        except ImportError:
            raise MissingPackageError(
                'model.name=bert needs transformers: pip install "gpuwatch-trainer[text]"'
            ) from None
        config = BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=max_tokens,
            pad_token_id=pad_id,
            num_labels=classes,
            attn_implementation="sdpa",
        )
        self.model: Any = BertForSequenceClassification(config)

    def enable_checkpointing(self) -> None:
        """Keep only the input of each layer for the backward, and compute the rest again there."""
        # Not with the switch of transformers, whose name depends on the version.
        for layer in self.model.bert.encoder.layer:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (texts, classes) of ``input_ids`` (N, T) with ``attention_mask`` (N, T).

        A row is a text; with ``document_ids`` and ``position_ids`` (N, T) it holds several, which
        do not see each other, and the texts are in the order of rows.
        """
        documents = batch.get("document_ids")
        if documents is None:
            logits: torch.Tensor = self.model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits
            return logits
        positions = batch["position_ids"]
        # transformers takes a mask of four dimensions as it is: True where one sees the other.
        # Padding is a document too: a token that sees nothing at all would be nan.
        hidden = self.model.bert(
            input_ids=batch["input_ids"],
            attention_mask=documents[:, None, :, None] == documents[:, None, None, :],
            position_ids=positions,
        ).last_hidden_state
        first = hidden[(positions == 0) & (documents > 0)]
        # The pooler looks at position 0 of each row: here each text is a row of that one token.
        pooled = self.model.bert.pooler(first[:, None])
        packed: torch.Tensor = self.model.classifier(self.model.dropout(pooled))
        return packed
