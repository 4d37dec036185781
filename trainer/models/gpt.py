"""A small GPT: blocks of attention and a feed-forward, to learn to continue text."""

import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["TinyGPT", "lm_loss"]

_IGNORED = -100


class TinyGPT(nn.Module):
    """A decoder with norms before each part (Radford et al. 2019) and learned positions.

    The head is the embedding, transposed (Press and Wolf 2017). Weights are drawn as in GPT-2:
    deviation 0.02, less by sqrt(2 * depth) where a block adds to its input.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int,
        depth: int,
        heads: int,
        max_tokens: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_tokens, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self._checkpointing = False
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                adds = name.endswith(("attention.out.weight", "feed.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * depth) if adds else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def enable_checkpointing(self) -> None:
        """Keep only the input of each block for the backward, and compute the rest again there."""
        self._checkpointing = True

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits (N, T, vocabulary) of the token after each of ``input_ids`` (N, T).

        Padding at the end of a row needs no mask, because no token sees what comes after it. With
        ``document_ids`` (N, T) a token sees only its own document, and ``position_ids`` say where
        in that it is. T at most `max_tokens`.
        """
        ids = batch["input_ids"]
        documents, positions = batch.get("document_ids"), batch.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        mask = None
        if documents is not None:
            # Padding is a document too: a token that sees nothing at all would be nan.
            same = documents[:, None, :, None] == documents[:, None, None, :]
            mask = same.tril()
        x = self.dropout(self.embedding(ids) + self.positions(positions))
        for block in self.blocks:
            if self._checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        return functional.linear(self.norm(x), self.embedding.weight)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, dropout)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attention(self.norm_attention(x), mask)
        out: torch.Tensor = x + self.feed(self.norm_feed(x))
        return out


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        rows, length, width = x.shape
        # (3, N, heads, T, width / heads)
        split = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        seen = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
        )
        out: torch.Tensor = self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return functional.dropout(out, self.dropout, self.training)


def lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed cross entropy of the predicted tokens, in float32, and how many they are.

    `logits` (N, T, V), `labels` (N, T), -100 where nothing is to be predicted: position t is
    compared with label t + 1. Sums rather than means, because micro-batches and ranks have
    different numbers of tokens: only sum over sum is the mean over all.
    """
    # The labels are shifted, not the logits: slicing those would copy them.
    shifted = functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
    loss = functional.cross_entropy(
        logits.float().flatten(0, 1), shifted.flatten(), ignore_index=_IGNORED, reduction="sum"
    )
    return loss, (shifted != _IGNORED).sum()
