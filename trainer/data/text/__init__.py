"""Text: reading, cleaning, tokenizing, and batches that waste little on padding."""

from trainer.data.text.clean import CleaningReport, clean_corpus, clean_text
from trainer.data.text.collate import Collate, PlannedBatches, largest_batch
from trainer.data.text.corpus import Corpus, bundled_prose, load_corpus, made_reviews
from trainer.data.text.plan import EpochPlan, PlannedBatch, plan_epoch
from trainer.data.text.tokens import ByteTokenizer, Tokenizer, TokenSet, tokenize, train_wordpiece

__all__ = [
    "ByteTokenizer",
    "CleaningReport",
    "Collate",
    "Corpus",
    "EpochPlan",
    "PlannedBatch",
    "PlannedBatches",
    "TokenSet",
    "Tokenizer",
    "bundled_prose",
    "clean_corpus",
    "clean_text",
    "largest_batch",
    "load_corpus",
    "made_reviews",
    "plan_epoch",
    "tokenize",
    "train_wordpiece",
]
