"""Texts with their classes, and how some of them are held out."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Corpus", "Labels"]

Labels = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Corpus:
    """Texts, all in memory; `labels[i]` indexes `classes`, and is None where nothing is sorted.

    `source` says where they come from, in words for a message.
    """

    texts: Sequence[str]
    labels: Labels | None
    classes: tuple[str, ...]
    source: str

    def __len__(self) -> int:
        return len(self.texts)

    def subset(self, indices: Sequence[int]) -> "Corpus":
        """The same classes, only these texts."""
        labels = None
        if self.labels is not None:
            labels = self.labels[np.asarray(indices, dtype=np.int64)]
        return Corpus([self.texts[i] for i in indices], labels, self.classes, self.source)

    def split(self, eval_fraction: float) -> tuple["Corpus", "Corpus"]:
        """Training and held-out texts. A text's side depends on its words alone, so that adding
        texts moves none of the others, and the same text is never on both sides.
        """
        held_out = [_unit_hash(text) < eval_fraction for text in self.texts]
        return (
            self.subset([i for i, out in enumerate(held_out) if not out]),
            self.subset([i for i, out in enumerate(held_out) if out]),
        )


def _unit_hash(text: str) -> float:
    # Half of a surrogate pair, as a JSON file may hold it, has no UTF-8.
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") / 2**64)
